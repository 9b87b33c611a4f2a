//! Certificates for tests of servers that speak TLS.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// An authority with a certificate by it for each name, as files in a folder: `ca.pem`, and `<name>.pem` and `<name>.key`.
///
/// Made by `openssl`; without it `new` panics with the line that installs it.
#[derive(Debug)]
pub struct Authority {
    folder: PathBuf,
}

impl Authority {
    /// Makes one in a folder. Its certificates are for 127.0.0.1 and localhost, of servers and of clients, for two days.
    pub fn new(folder: &Path, names: &[&str]) -> Self {
        let this = Self { folder: folder.to_owned() };
        this.openssl(
            &["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=tests"],
            &["-keyout", "ca.key", "-out", "ca.pem"],
        );
        for name in names {
            let (key, csr, pem) = (format!("{name}.key"), format!("{name}.csr"), format!("{name}.pem"));
            let subject = format!("/CN={name}");
            this.openssl(
                &["req", "-newkey", "rsa:2048", "-nodes", "-subj", &subject],
                &["-keyout", &key, "-out", &csr],
            );
            let usage = "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n";
            std::fs::write(this.file("extensions"), usage).expect("the folder can be written");
            this.openssl(
                &["x509", "-req", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"],
                &["-in", &csr, "-out", &pem, "-extfile", "extensions"],
            );
        }
        this
    }

    /// Returns the path of one of its files.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn openssl(&self, command: &[&str], files: &[&str]) {
        let done = Command::new("openssl")
            .args(command)
            .args(files)
            .current_dir(&self.folder)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap_or_else(|error| panic!("openssl: {error}; run: sudo apt-get install openssl"));
        assert!(done.success(), "{command:?}");
    }
}
