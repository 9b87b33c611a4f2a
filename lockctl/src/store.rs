//! Which store: what the options, the environment and the file say, in this order, and what stands when none does.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use lockcore::{
    ErrorKind, LockName, StoreUrl,
    backend::{Call, LockBackend},
};
use lockcore_sql::{SqliteBackend, SqliteConfig};

use crate::{cli::StoreArgs, failure::Failure};

/// Which of the options stand on the command line and not in the environment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Written {
    pub(crate) store: bool,
    pub(crate) risk: bool,
}

/// The store that was chosen.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    pub(crate) url: StoreUrl,
    pub(crate) namespace: String,
}

impl Store {
    /// Returns what people read: never a password.
    pub(crate) fn shown(&self) -> String {
        self.url.to_string()
    }

    /// Opens the store.
    ///
    /// # Errors
    /// What the store said, with the code that stands for it.
    pub(crate) async fn connect(&self) -> Result<Arc<dyn LockBackend>, Failure> {
        self.open().await.map_err(|error| Failure::store(&error, self.shown()))
    }

    /// Opens the store; asks again for as long as it is merely not there.
    pub(crate) async fn connect_within(
        &self,
        budget: Option<Duration>,
    ) -> Result<Arc<dyn LockBackend>, Failure> {
        let start = std::time::Instant::now();
        let mut pause = Duration::from_millis(50);
        loop {
            match self.open().await {
                Err(error)
                    if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown)
                        && budget.is_none_or(|budget| start.elapsed() + pause < budget) =>
                {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(2));
                }
                other => return other.map_err(|error| Failure::store(&error, self.shown())),
            }
        }
    }

    async fn open(&self) -> lockcore::Result<Arc<dyn LockBackend>> {
        match self.url.scheme() {
            "sqlite" => {
                let backend = SqliteBackend::open(SqliteConfig::new(self.url.path())).await?;
                Ok(Arc::new(backend))
            }
            other => Err(lockcore::Error::new(
                ErrorKind::Misconfigured,
                format!("the scheme {other:?} is not compiled in; this lockctl has sqlite"),
            )),
        }
    }
}

/// A store that was opened, with the frame of a call: for the verbs that need no client.
pub(crate) struct Opened {
    pub(crate) backend: Arc<dyn LockBackend>,
    pub(crate) store: Store,
    client: lockcore::LockClient,
}

impl Opened {
    /// Chooses and opens.
    pub(crate) async fn new(args: &StoreArgs, written: Written) -> Result<Self, Failure> {
        let store = choose(args, written, &Surroundings::of_this_process())?;
        let backend = store.connect().await?;
        let options = lockcore::ClientOptions::default().with(|o| o.namespace = store.namespace.clone());
        let client = lockcore::LockClient::with_options(backend.clone(), options);
        Ok(Self { backend, store, client })
    }

    /// Frames one call.
    pub(crate) fn call(&self) -> Result<Call, Failure> {
        self.client.backend().map(|(_, call)| call).map_err(|error| self.failure(&error))
    }

    /// Makes a failure of what the store said.
    pub(crate) fn failure(&self, error: &lockcore::Error) -> Failure {
        Failure::store(error, self.store.shown())
    }
}

/// Reads a lock's name as it was written.
pub(crate) fn name(text: &OsString) -> Result<LockName, Failure> {
    let text = text.to_str().ok_or_else(|| {
        Failure::usage(format!(
            "the lock name {text:?} is not UTF-8; names are text, the same on every store"
        ))
    })?;
    LockName::parse(text)
        .map_err(|error| Failure::usage(format!("the lock name {text:?}: {}", error.message())))
}

/// What decides about the default store, besides the options.
#[derive(Clone, Debug, Default)]
pub(crate) struct Surroundings {
    pub(crate) is_root: bool,
    pub(crate) state_directory: Option<PathBuf>,
    pub(crate) xdg_state_home: Option<PathBuf>,
    pub(crate) home: Option<PathBuf>,
    /// What shows that this is a container, if something does.
    pub(crate) container: Option<String>,
}

impl Surroundings {
    /// Looks around.
    pub(crate) fn of_this_process() -> Self {
        let path = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        Self {
            is_root: rustix::process::geteuid().is_root(),
            // systemd may list several, with colons between them.
            state_directory: path("STATE_DIRECTORY")
                .and_then(|list| list.to_str().and_then(|text| text.split(':').next().map(PathBuf::from))),
            xdg_state_home: path("XDG_STATE_HOME"),
            home: path("HOME"),
            container: container_marker(Path::new("/"), |name| std::env::var_os(name).is_some()),
        }
    }

    fn default_path(&self) -> Result<PathBuf, Failure> {
        let absolute = |path: &Option<PathBuf>| path.clone().filter(|path| path.is_absolute());
        if let Some(directory) = absolute(&self.state_directory) {
            return Ok(directory.join("locks.db"));
        }
        if self.is_root {
            return Ok("/var/lib/lockctl/locks.db".into());
        }
        absolute(&self.xdg_state_home)
            .or_else(|| Some(absolute(&self.home)?.join(".local/state")))
            .map(|state| state.join("lockctl/locks.db"))
            .ok_or_else(|| {
                Failure::usage(
                    "no home directory for the default store; give one with --store sqlite:///PATH or LOCKCTL_STORE",
                )
            })
    }
}

/// Says what shows that this process runs in a container.
fn container_marker(root: &Path, has_variable: impl Fn(&str) -> bool) -> Option<String> {
    for variable in ["KUBERNETES_SERVICE_HOST", "container"] {
        if has_variable(variable) {
            return Some(format!("${variable}"));
        }
    }
    for file in [".dockerenv", "run/.containerenv"] {
        if root.join(file).exists() {
            return Some(format!("/{file}"));
        }
    }
    let groups = fs::read_to_string(root.join("proc/1/cgroup")).unwrap_or_default();
    ["docker", "kubepods", "containerd", "libpod", "lxc"]
        .into_iter()
        .find(|word| groups.contains(word))
        .map(|word| format!("{word} in /proc/1/cgroup"))
}

/// Chooses the store: option before environment before file before default.
///
/// # Errors
/// 125 with what to write.
pub(crate) fn choose(args: &StoreArgs, written: Written, around: &Surroundings) -> Result<Store, Failure> {
    let given = args.store.as_ref().filter(|text| !text.is_empty());
    let url = match given {
        Some(text) => given_url(text, written.store)?,
        None => default_url(around)?,
    };
    Ok(Store { url, namespace: args.namespace.clone().unwrap_or_default() })
}

/// Reads an address that was written out.
fn given_url(text: &OsString, on_command_line: bool) -> Result<StoreUrl, Failure> {
    let source = if on_command_line { "--store" } else { "LOCKCTL_STORE" };
    // What cannot be read is not repeated: it may hold a password.
    let text = text.to_str().ok_or_else(|| Failure::usage(format!("{source} is not UTF-8")))?;
    let url =
        StoreUrl::parse(text).map_err(|error| Failure::usage(format!("{source}: {}", error.message())))?;
    if on_command_line && url.has_secret() {
        return Err(Failure::usage(
            "--store holds a password, which every user of this machine can read in the list of processes; put it \
             into a file and name that with --password-file, or set LOCKCTL_STORE",
        ));
    }
    Ok(url)
}

fn default_url(around: &Surroundings) -> Result<StoreUrl, Failure> {
    if let Some(marker) = &around.container {
        return Err(Failure::usage(format!(
            "the default store is a file in this container ({marker}) and excludes nobody outside it; name a store \
             with --store or LOCKCTL_STORE"
        )));
    }
    let path = around.default_path()?;
    if let Some(directory) = path.parent() {
        make_directory(directory).map_err(|error| {
            Failure::usage(format!(
                "the directory {} of the default store: {error}; name a store with --store",
                directory.display()
            ))
        })?;
    }
    let text = path.to_str().ok_or_else(|| {
        Failure::usage(format!(
            "the path {} of the default store is not UTF-8; name a store with --store",
            path.display()
        ))
    })?;
    let mut encoded = String::from("sqlite://");
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' => encoded.push(byte as char),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    StoreUrl::parse(&encoded).map_err(|error| Failure::usage(error.message()))
}

/// Makes the directory of the default store, private to the user.
fn make_directory(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit;

    fn args(store: Option<&str>) -> StoreArgs {
        StoreArgs {
            store: store.map(Into::into),
            risk: None,
            config: None,
            namespace: None,
            user: None,
            password_file: None,
        }
    }

    fn at_home(root: &Path) -> Surroundings {
        Surroundings { home: Some(root.into()), ..Surroundings::default() }
    }

    const ON_LINE: Written = Written { store: true, risk: false };

    #[test]
    fn the_default_is_a_file_of_this_user() {
        let root = tempfile::tempdir().unwrap();
        let around = at_home(root.path());
        let store = choose(&args(None), Written::default(), &around).unwrap();
        assert_eq!(Path::new(store.url.path()), root.path().join(".local/state/lockctl/locks.db"));
        let around = Surroundings { xdg_state_home: Some(root.path().join("a b%")), ..around };
        let store = choose(&args(None), Written::default(), &around).unwrap();
        assert_eq!(Path::new(store.url.path()), root.path().join("a b%/lockctl/locks.db"));
        let around = Surroundings { state_directory: Some(root.path().join("s")), is_root: true, ..around };
        let store = choose(&args(None), Written::default(), &around).unwrap();
        assert_eq!(Path::new(store.url.path()), root.path().join("s/locks.db"));
        let root_alone = Surroundings { is_root: true, ..Surroundings::default() };
        assert_eq!(root_alone.default_path().unwrap(), Path::new("/var/lib/lockctl/locks.db"));
    }

    #[test]
    fn without_a_home_the_default_is_refused_with_the_option_to_set() {
        for around in [
            Surroundings::default(),
            Surroundings { home: Some("relative".into()), ..Surroundings::default() },
        ] {
            let failure = choose(&args(None), Written::default(), &around).unwrap_err();
            assert_eq!(failure.code, exit::USAGE);
            assert!(failure.sentence.contains("--store sqlite:///PATH"), "{}", failure.sentence);
        }
    }

    #[test]
    fn in_a_container_the_default_is_refused_and_a_named_store_is_not() {
        let around = Surroundings { container: Some("/.dockerenv".into()), ..Surroundings::default() };
        let failure = choose(&args(None), Written::default(), &around).unwrap_err();
        assert_eq!(failure.code, exit::USAGE);
        assert!(failure.sentence.contains("excludes nobody outside it"), "{}", failure.sentence);
        assert!(choose(&args(Some("sqlite:///srv/locks.db")), ON_LINE, &around).is_ok());
    }

    #[test]
    fn containers_are_known_by_their_markers() {
        let root = tempfile::tempdir().unwrap();
        let nothing = |_: &str| false;
        assert_eq!(container_marker(root.path(), nothing), None);
        assert_eq!(
            container_marker(root.path(), |name| name == "KUBERNETES_SERVICE_HOST").as_deref(),
            Some("$KUBERNETES_SERVICE_HOST")
        );
        assert!(container_marker(root.path(), |name| name == "container").is_some());
        fs::create_dir_all(root.path().join("proc/1")).unwrap();
        fs::write(root.path().join("proc/1/cgroup"), "0::/init.scope\n").unwrap();
        assert_eq!(container_marker(root.path(), nothing), None);
        fs::write(root.path().join("proc/1/cgroup"), "0::/kubepods/burstable/pod1\n").unwrap();
        assert_eq!(container_marker(root.path(), nothing).as_deref(), Some("kubepods in /proc/1/cgroup"));
        fs::create_dir(root.path().join("run")).unwrap();
        fs::write(root.path().join("run/.containerenv"), "").unwrap();
        assert_eq!(container_marker(root.path(), nothing).as_deref(), Some("/run/.containerenv"));
    }

    #[test]
    fn a_password_on_the_command_line_is_refused_and_not_repeated() {
        let failure =
            choose(&args(Some("redis://u:s3cret@h/0")), ON_LINE, &Surroundings::default()).unwrap_err();
        assert_eq!(failure.code, exit::USAGE);
        assert!(failure.sentence.contains("--password-file"), "{}", failure.sentence);
        assert!(!failure.sentence.contains("s3cret"));
    }

    #[test]
    fn a_password_in_the_environment_is_taken_and_never_shown() {
        let store = choose(&args(Some("redis://u:s3cret@h/0")), Written::default(), &Surroundings::default())
            .unwrap();
        assert_eq!(store.url.expose_password(), Some("s3cret"));
        assert_eq!(store.shown(), "redis://u:***@h/0");
        assert!(!format!("{store:?}").contains("s3cret"));
    }

    #[test]
    fn an_address_that_cannot_be_read_is_not_repeated() {
        for text in ["u:s3cret@h", "redis://u:s3cret#@h/0", "redis://u:s3c ret@h"] {
            let failure =
                choose(&args(Some(text)), Written::default(), &Surroundings::default()).unwrap_err();
            assert_eq!(failure.code, exit::USAGE);
            assert!(failure.sentence.starts_with("LOCKCTL_STORE: "), "{}", failure.sentence);
            assert!(!failure.sentence.contains("s3c"), "{}", failure.sentence);
        }
    }

    #[test]
    fn a_name_that_is_not_text_is_refused() {
        use std::os::unix::ffi::OsStringExt;
        let failure = name(&OsString::from_vec(vec![b'a', 0xff])).unwrap_err();
        assert_eq!(failure.code, exit::USAGE);
        assert!(failure.sentence.contains("not UTF-8"), "{}", failure.sentence);
        assert!(name(&"a//b".into()).unwrap_err().sentence.contains("\"a//b\""));
    }
}
