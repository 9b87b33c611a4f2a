//! TLS between the client and a server, by rustls.

use std::{io, path::Path, sync::Arc};

use lockcore::backend::ErrorKind;
use redis::RedisError;
use rustls::{
    ClientConfig, RootCertStore,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::{config::RedisConfig, greeting::Refusal};

/// Speaks TLS over a connection that stands. Certificates are read anew each time, because they are renewed while processes
/// run.
pub(crate) async fn wrap(
    config: &RedisConfig,
    host: &str,
    stream: TcpStream,
) -> Result<TlsStream<TcpStream>, Refusal> {
    let settings = settings(config).map_err(|message| (ErrorKind::Misconfigured, message, None))?;
    let name = ServerName::try_from(host.to_owned()).map_err(|_| {
        (ErrorKind::Misconfigured, format!("{host:?} is no name that a certificate could have"), None)
    })?;
    TlsConnector::from(Arc::new(settings)).connect(name, stream).await.map_err(refused)
}

fn refused(error: io::Error) -> Refusal {
    let said = error.get_ref().and_then(|source| source.downcast_ref::<rustls::Error>());
    let (kind, message) = match said {
        Some(rustls::Error::InvalidCertificate(why)) => (
            ErrorKind::Misconfigured,
            format!("the certificate of the server is not to be believed: {why:?}; see ca_file"),
        ),
        Some(rustls::Error::AlertReceived(alert)) => (
            ErrorKind::Unauthorized,
            format!("the server refused the TLS handshake: {alert:?}; see cert_file"),
        ),
        Some(rustls::Error::InvalidMessage(_)) => {
            (ErrorKind::Misconfigured, "what answers there does not speak TLS".to_owned())
        }
        Some(_) => (ErrorKind::Misconfigured, "the TLS handshake failed".to_owned()),
        // A server that is asked for TLS and does not speak it says an error of its own, or just hangs up.
        None => (ErrorKind::Unavailable, "the connection was lost in the TLS handshake".to_owned()),
    };
    (kind, message, Some(RedisError::from(error)))
}

fn settings(config: &RedisConfig) -> Result<ClientConfig, String> {
    // What the process has chosen, or ours: two libraries in one process must not disagree.
    let provider =
        CryptoProvider::get_default().cloned().unwrap_or_else(|| Arc::new(aws_lc_rs::default_provider()));
    let mut roots = RootCertStore::empty();
    match &config.ca_file {
        Some(file) => {
            for certificate in certificates(file)? {
                roots.add(certificate).map_err(|error| format!("{}: {error}", file.display()))?;
            }
        }
        None => {
            // One certificate of the system that cannot be read does not spoil the others.
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    if roots.is_empty() {
        return Err("no authority is known whose certificates could be believed; set ca_file".to_owned());
    }
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    match (&config.cert_file, &config.key_file) {
        (Some(own), Some(key)) => {
            let secret = PrivateKeyDer::from_pem_file(key)
                .map_err(|error| format!("the key in {} cannot be read: {error}", key.display()))?;
            let own = certificates(own)?;
            builder
                .with_client_auth_cert(own, secret)
                .map_err(|error| format!("the client's certificate and key do not go together: {error}"))
        }
        _ => Ok(builder.with_no_client_auth()),
    }
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let read =
        read.map_err(|error| format!("the certificates in {} cannot be read: {error}", file.display()))?;
    if read.is_empty() {
        return Err(format!("{} has no certificate", file.display()));
    }
    Ok(read)
}
