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
    ErrorKind, LockClient, LockName, StoreUrl,
    backend::{Call, LockBackend},
    config::{BackendConfig, Config, Demands, Registry, RiskConfig},
};
use lockcore_sql::Sqlite;

use crate::{
    cli::StoreArgs,
    exit,
    failure::Failure,
    file::{self, File},
};

/// The families of stores that are compiled in.
pub(crate) fn registry() -> Registry {
    let registry = Registry::new().with(Sqlite);
    #[cfg(feature = "redis")]
    let registry = registry.with(lockcore_redis::Redis);
    #[cfg(feature = "zk")]
    let registry = registry.with(lockcore_zk::Zk);
    #[cfg(feature = "etcd")]
    let registry = registry.with(lockcore_etcd::Etcd);
    registry
}

/// Reads a variable that holds a path; an empty one counts as not set.
pub(crate) fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Which of the options stand on the command line and not in the environment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Written {
    pub(crate) store: bool,
    pub(crate) risk: bool,
}

/// The store that was chosen.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    /// The store; of a bridge, the one that locks leave.
    pub(crate) backend: BackendConfig,
    /// The bridge of the file that the level stands on.
    pub(crate) bridge: Option<String>,
    pub(crate) namespace: String,
    /// The level of the file that it was chosen by.
    pub(crate) level: Option<(String, RiskConfig)>,
    /// The file, whether it named the store or not: its numbers count.
    pub(crate) file: Option<File>,
}

impl Store {
    /// Returns what people read: never a password.
    pub(crate) fn shown(&self) -> String {
        match self.bridge.as_ref().zip(self.file.as_ref()) {
            Some((name, file)) => bridge_shown(name, &file.config),
            None => self.backend.url.to_string(),
        }
    }

    /// Says where the password comes from.
    pub(crate) fn password_source(&self) -> String {
        match (&self.backend.password_file, &self.backend.password_env) {
            (Some(file), _) => format!("*** from {}", file.display()),
            (_, Some(variable)) => format!("*** from ${variable}"),
            _ if self.backend.url.has_secret() => "*** from the address".into(),
            _ => "(none)".into(),
        }
    }

    /// Looks at the server, and refuses it if it does not keep what the level demands.
    pub(crate) async fn check_level(&self, client: &LockClient) -> Result<(), Failure> {
        let Some((name, level)) = &self.level else { return Ok(()) };
        let found = client.preflight().await.map_err(|error| Failure::store(&error, self.shown()))?;
        let misses = Demands::of(name, level).misses(&found.capabilities);
        if misses.is_empty() {
            return Ok(());
        }
        Err(Failure::new(
            exit::REFUSED,
            format!(
                "the store {} does not keep what the level {name:?} demands: {}",
                self.shown(),
                misses.join("; ")
            ),
        ))
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
        match self.bridge.as_ref().zip(self.file.as_ref()) {
            Some((name, file)) => file.config.connect(name, &registry()).await,
            None => registry().connect(&self.backend).await,
        }
    }
}

/// Says between which stores a bridge is, and in which phase.
pub(crate) fn bridge_shown(name: &str, config: &Config) -> String {
    let url = |store: &str| config.backend.get(store).map_or("?".into(), |store| store.url.to_string());
    match config.bridge.get(name) {
        Some(bridge) => format!(
            "bridge {name} from {} to {}, phase {}",
            url(&bridge.from),
            url(&bridge.to),
            bridge.phase.as_str()
        ),
        None => format!("bridge {name}"),
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

/// Chooses the store: option before environment before file before default. A file counts whenever there is one: also
/// its namespace and its numbers.
///
/// # Errors
/// 125 with what to write.
pub(crate) fn choose(args: &StoreArgs, written: Written, around: &Surroundings) -> Result<Store, Failure> {
    let registry = registry();
    let file = file::find(args, variable).map(|path| file::load(&path, &registry)).transpose()?;
    choose_with(args, written, around, file)
}

fn choose_with(
    args: &StoreArgs,
    written: Written,
    around: &Surroundings,
    file: Option<File>,
) -> Result<Store, Failure> {
    let url = args.store.as_ref().filter(|text| !text.is_empty());
    let risk = args.risk.as_ref().filter(|text| !text.is_empty());
    let (url, risk) = match (url, risk) {
        (Some(_), Some(_)) if written.store == written.risk => {
            let (store, risk) =
                if written.store { ("--store", "--risk") } else { ("LOCKCTL_STORE", "LOCKCTL_RISK") };
            return Err(Failure::usage(format!("{store} and {risk} both name a store; give one of them")));
        }
        // An option comes before the environment.
        (Some(_), Some(risk)) if written.risk => (None, Some(risk)),
        (Some(url), Some(_)) => (Some(url), None),
        one_or_none => one_or_none,
    };
    let (backend, level) = match (url, risk, &file) {
        (Some(text), _, _) => (BackendConfig::new(given_url(text, written.store)?), None),
        (None, Some(name), Some(file)) => of_level(file, name)?,
        (None, Some(name), None) => {
            return Err(Failure::usage(format!(
                "the level {name:?} is looked up in a configuration file, and there is none; name one with --config"
            )));
        }
        (None, None, Some(file)) => {
            let mut names = file.config.risk.keys();
            match (names.next(), names.next()) {
                (Some(only), None) => of_level(file, only)?,
                (None, _) => (BackendConfig::new(default_url(around)?), None),
                _ => {
                    let all: Vec<&str> = file.config.risk.keys().map(String::as_str).collect();
                    return Err(Failure::usage(format!(
                        "{} has several levels; name one with --risk: {}",
                        file.path.display(),
                        all.join(", ")
                    )));
                }
            }
        }
        (None, None, None) => (BackendConfig::new(default_url(around)?), None),
    };
    let bridge = level.as_ref().zip(file.as_ref()).and_then(|((_, level), file)| {
        file.config.bridge.contains_key(&level.backend).then(|| level.backend.clone())
    });
    if bridge.is_some() && (args.user.is_some() || args.password_file.is_some()) {
        return Err(Failure::usage(
            "the level stands on a bridge, so --user and --password-file could mean either store; write them into the file",
        ));
    }
    let backend = with_credentials(backend, args)?;
    registry()
        .check(&backend)
        .map_err(|error| Failure::usage(format!("{}: {}", backend.url, error.message())))?;
    let namespace =
        args.namespace.clone().or_else(|| file.as_ref().map(|file| file.config.namespace.clone()));
    Ok(Store { backend, bridge, namespace: namespace.unwrap_or_default(), level, file })
}

type Chosen = (BackendConfig, Option<(String, RiskConfig)>);

fn of_level(file: &File, name: &str) -> Result<Chosen, Failure> {
    let config = &file.config;
    let level = config.risk.get(name).ok_or_else(|| {
        let all: Vec<&str> = config.risk.keys().map(String::as_str).collect();
        Failure::usage(format!("{} has no level {name:?}; it has {}", file.path.display(), all.join(", ")))
    })?;
    // A file with a name that leads nowhere has been refused before.
    let of_bridge = config.bridge.get(&level.backend).map(|bridge| &bridge.from);
    let backend = config.backend.get(of_bridge.unwrap_or(&level.backend)).ok_or_else(|| {
        Failure::usage(format!("{} has no backend {:?}", file.path.display(), level.backend))
    })?;
    Ok((backend.clone(), Some((name.to_owned(), level.clone()))))
}

fn with_credentials(backend: BackendConfig, args: &StoreArgs) -> Result<BackendConfig, Failure> {
    let password_file = match args.password_file.as_ref().filter(|path| !path.as_os_str().is_empty()) {
        // One name alone is looked up among the credentials that systemd handed over.
        Some(path) if path.components().count() == 1 && variable("CREDENTIALS_DIRECTORY").is_some() => {
            Some(path.clone())
        }
        Some(path) => Some(std::path::absolute(path)?),
        None => None,
    };
    Ok(backend.with(|backend| {
        if let Some(user) = &args.user {
            backend.user = Some(user.clone());
        }
        if let Some(file) = password_file {
            backend.password_file = Some(file);
            backend.password_env = None;
        }
    }))
}

/// Reads the address of an option that stands on the command line.
pub(crate) fn url_of_option(option: &str, text: &OsString) -> Result<StoreUrl, Failure> {
    let url = read_url(option, text)?;
    if url.has_secret() {
        return Err(Failure::usage(format!(
            "{option} holds a password, which every user of this machine can read in the list of processes; put the \
             store into a configuration file"
        )));
    }
    Ok(url)
}

fn read_url(source: &str, text: &OsString) -> Result<StoreUrl, Failure> {
    // What cannot be read is not repeated: it may hold a password.
    let text = text.to_str().ok_or_else(|| Failure::usage(format!("{source} is not UTF-8")))?;
    StoreUrl::parse(text).map_err(|error| Failure::usage(format!("{source}: {}", error.message())))
}

/// Reads the address of the store that was written out.
fn given_url(text: &OsString, on_command_line: bool) -> Result<StoreUrl, Failure> {
    let url = read_url(if on_command_line { "--store" } else { "LOCKCTL_STORE" }, text)?;
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
pub(crate) mod tests {
    use super::*;

    pub(crate) fn args(store: Option<&str>) -> StoreArgs {
        StoreArgs {
            store: store.map(Into::into),
            risk: None,
            config: None,
            namespace: None,
            user: None,
            password_file: None,
        }
    }

    fn choose_alone(args: &StoreArgs, written: Written, around: &Surroundings) -> Result<Store, Failure> {
        choose_with(args, written, around, None)
    }

    fn at_home(root: &Path) -> Surroundings {
        Surroundings { home: Some(root.into()), ..Surroundings::default() }
    }

    const ON_LINE: Written = Written { store: true, risk: false };

    #[test]
    fn the_default_is_a_file_of_this_user() {
        let root = tempfile::tempdir().unwrap();
        let around = at_home(root.path());
        let store = choose_alone(&args(None), Written::default(), &around).unwrap();
        assert_eq!(Path::new(store.backend.url.path()), root.path().join(".local/state/lockctl/locks.db"));
        let around = Surroundings { xdg_state_home: Some(root.path().join("a b%")), ..around };
        let store = choose_alone(&args(None), Written::default(), &around).unwrap();
        assert_eq!(Path::new(store.backend.url.path()), root.path().join("a b%/lockctl/locks.db"));
        let around = Surroundings { state_directory: Some(root.path().join("s")), is_root: true, ..around };
        let store = choose_alone(&args(None), Written::default(), &around).unwrap();
        assert_eq!(Path::new(store.backend.url.path()), root.path().join("s/locks.db"));
        let root_alone = Surroundings { is_root: true, ..Surroundings::default() };
        assert_eq!(root_alone.default_path().unwrap(), Path::new("/var/lib/lockctl/locks.db"));
    }

    #[test]
    fn without_a_home_the_default_is_refused_with_the_option_to_set() {
        for around in [
            Surroundings::default(),
            Surroundings { home: Some("relative".into()), ..Surroundings::default() },
        ] {
            let failure = choose_alone(&args(None), Written::default(), &around).unwrap_err();
            assert_eq!(failure.code, exit::USAGE);
            assert!(failure.sentence.contains("--store sqlite:///PATH"), "{}", failure.sentence);
        }
    }

    #[test]
    fn in_a_container_the_default_is_refused_and_a_named_store_is_not() {
        let around = Surroundings { container: Some("/.dockerenv".into()), ..Surroundings::default() };
        let failure = choose_alone(&args(None), Written::default(), &around).unwrap_err();
        assert_eq!(failure.code, exit::USAGE);
        assert!(failure.sentence.contains("excludes nobody outside it"), "{}", failure.sentence);
        assert!(choose_alone(&args(Some("sqlite:///srv/locks.db")), ON_LINE, &around).is_ok());
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
            choose_alone(&args(Some("redis://u:s3cret@h/0")), ON_LINE, &Surroundings::default()).unwrap_err();
        assert_eq!(failure.code, exit::USAGE);
        assert!(failure.sentence.contains("--password-file"), "{}", failure.sentence);
        assert!(!failure.sentence.contains("s3cret"));
    }

    #[test]
    fn a_password_in_the_environment_is_taken_and_never_shown() {
        // What the store's connector says about a user is not the question here.
        let url = given_url(&"redis://u:s3cret@h/0".into(), false).unwrap();
        assert_eq!(url.expose_password(), Some("s3cret"));
        let store = Store {
            backend: BackendConfig::new(url),
            bridge: None,
            namespace: String::new(),
            level: None,
            file: None,
        };
        assert_eq!(store.shown(), "redis://u:***@h/0");
        assert_eq!(store.password_source(), "*** from the address");
        assert!(!format!("{store:?}").contains("s3cret"));
    }

    fn file(text: &str) -> File {
        File { path: "locks.toml".into(), config: toml::from_str(text).unwrap() }
    }

    const TWO_LEVELS: &str = r#"
        namespace = "shop"
        backend.one = "sqlite:///srv/one.db"
        backend.two = "sqlite:///srv/two.db"
        risk.efficiency.backend = "one"
        [risk.guarded]
        backend = "two"
        max-hold = "1h"
    "#;

    #[test]
    fn an_option_comes_before_the_environment_and_two_of_a_kind_are_refused() {
        let both = StoreArgs { risk: Some("guarded".into()), ..args(Some("sqlite:///srv/given.db")) };
        let path = |written| {
            let store = choose_with(&both, written, &Surroundings::default(), Some(file(TWO_LEVELS)));
            store.map(|store| (store.backend.url.path().to_owned(), store.level.map(|(name, _)| name)))
        };
        assert_eq!(path(Written { store: true, risk: false }).unwrap(), ("/srv/given.db".into(), None));
        assert_eq!(
            path(Written { store: false, risk: true }).unwrap(),
            ("/srv/two.db".into(), Some("guarded".into()))
        );
        assert!(
            path(Written { store: true, risk: true }).unwrap_err().sentence.contains("--store and --risk")
        );
        assert!(path(Written::default()).unwrap_err().sentence.contains("LOCKCTL_STORE and LOCKCTL_RISK"));
    }

    #[test]
    fn a_file_with_one_level_needs_no_name_for_it_and_one_with_two_does() {
        let around = Surroundings::default();
        let failure =
            choose_with(&args(None), Written::default(), &around, Some(file(TWO_LEVELS))).unwrap_err();
        assert!(failure.sentence.contains("name one with --risk: efficiency, guarded"), "{failure:?}");
        let one = r#"
            namespace = "shop"
            backend.one = "sqlite:///srv/one.db"
            risk.efficiency.backend = "one"
        "#;
        let store = choose_with(&args(None), Written::default(), &around, Some(file(one))).unwrap();
        assert_eq!((store.backend.url.path(), &*store.namespace), ("/srv/one.db", "shop"));
        let absent = StoreArgs { risk: Some("critical".into()), ..args(None) };
        let failure = choose_with(&absent, Written::default(), &around, Some(file(one))).unwrap_err();
        assert!(failure.sentence.contains("it has efficiency"), "{failure:?}");
        let failure = choose_with(&absent, Written::default(), &around, None).unwrap_err();
        assert!(failure.sentence.contains("--config"), "{failure:?}");
    }

    #[test]
    fn an_address_that_cannot_be_read_is_not_repeated() {
        for text in ["u:s3cret@h", "redis://u:s3cret#@h/0", "redis://u:s3c ret@h"] {
            let failure =
                choose_alone(&args(Some(text)), Written::default(), &Surroundings::default()).unwrap_err();
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
