//! The suite against a backend of one's own, in one file.

use std::{process::ExitCode, sync::Arc};

use lockcore::{
    LockName,
    backend::{LockBackend, OwnerDigest, async_trait},
};
use lockcore_conformance::{Service, Suite};
use lockcore_examples::toy_backend::ToyBackend;

/// A directory, and two roads to it: the backend under test, and the files.
struct ToyDirectory(tempfile::TempDir);

#[async_trait]
impl Service for ToyDirectory {
    async fn connect(&self) -> Arc<dyn LockBackend> {
        Arc::new(ToyBackend::new(self.0.path()))
    }

    async fn holder(&self, name: &LockName) -> Option<OwnerDigest> {
        let owner = ToyBackend::new(self.0.path()).holder("", name).expect("the file can be read");
        owner.map(|owner| owner.digest())
    }

    async fn steal(&self, name: &LockName) {
        ToyBackend::new(self.0.path()).steal("", name).expect("the file can be written");
    }

    fn embedded(&self) -> bool {
        true
    }

    fn address(&self) -> Option<String> {
        Some(self.0.path().display().to_string())
    }
}

fn main() -> ExitCode {
    Suite::new("toy", async || ToyDirectory(tempfile::tempdir().expect("a directory can be made")))
        .processes(async |directory| Arc::new(ToyBackend::new(directory)) as Arc<dyn LockBackend>)
        .main()
}
