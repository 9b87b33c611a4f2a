//! Servers in containers: on this machine's network and with one of its folders, so that they differ from processes only in
//! their version; removed with the test, after a panic too, and swept by the next run if the test was killed.

use std::{
    collections::HashMap,
    ffi::OsStr,
    path::Path,
    process::Command,
    sync::{Arc, LazyLock, Once, mpsc},
};

use testcontainers::{
    ContainerAsync, GenericImage, ImageExt,
    bollard::{
        Docker,
        query_parameters::{
            InspectContainerOptions, KillContainerOptions, ListContainersOptionsBuilder,
            RemoveContainerOptionsBuilder,
        },
    },
    core::{AccessMode, Mount, client::docker_client_instance},
    runners::AsyncRunner,
};

/// What marks a container as a test's. The value is the store.
const OURS: &str = "lockcore.tests";
/// Which process a container belongs to: its number, and when it began, because numbers are used again.
const PROCESS: &str = "lockcore.process";
/// Where that number means something: the run of the system, and the namespace of numbers.
const MACHINE: &str = "lockcore.machine";

/// One container.
pub(crate) struct Container {
    /// Taken by its end alone.
    inner: Option<Arc<ContainerAsync<GenericImage>>>,
}

impl std::fmt::Debug for Container {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Container").field("id", &self.id()).finish_non_exhaustive()
    }
}

impl Container {
    /// Starts the command in an image. Whether it serves is asked in its protocol, by who knows it.
    ///
    /// The network is the machine's: with a published port, a proxy of Docker's would take connections for a server that is
    /// stopped or dead, and a restart would change the port.
    pub(crate) fn start(store: &str, image: &str, command: &Command, folder: &Path) -> Self {
        let (folder, shared) = (text(folder.as_os_str()), text(std::env::temp_dir().as_os_str()));
        let (name, tag) = parts(image);
        let user = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let mut request = GenericImage::new(name, tag)
            .with_entrypoint(&text(command.get_program()))
            .with_cmd(command.get_args().map(text))
            .with_network("host")
            .with_mount(Mount::bind_mount(folder.clone(), folder))
            // Certificates and the like, which a test keeps elsewhere, and a process would find where they are.
            .with_mount(Mount::bind_mount(shared.clone(), shared).with_access_mode(AccessMode::ReadOnly))
            // What it writes into the folder is then the test's to remove.
            .with_user(format!("{}:{}", user.0, user.1))
            .with_label(OURS, store)
            .with_label(PROCESS, this_process())
            .with_label(MACHINE, machine());
        for (name, value) in command.get_envs() {
            if let Some(value) = value {
                request = request.with_env_var(text(name), text(value));
            }
        }
        let started = wait(async move { request.start().await });
        let inner =
            started.unwrap_or_else(|error| panic!("no container of {image} could be started: {error}"));
        Self { inner: Some(Arc::new(inner)) }
    }

    fn inner(&self) -> Arc<ContainerAsync<GenericImage>> {
        self.inner.clone().expect("only the end takes it")
    }

    fn id(&self) -> String {
        self.inner().id().to_owned()
    }

    pub(crate) fn has_ended(&self) -> bool {
        let inner = self.inner();
        !wait(async move { inner.is_running().await }).unwrap_or(false)
    }

    /// By SIGKILL: a server that is asked to stop would put its affairs in order. Docker answers when it is dead.
    pub(crate) fn kill(&self) {
        let id = self.id();
        let killed = wait(async move {
            let options = KillContainerOptions { signal: "SIGKILL".into() };
            docker().await?.kill_container(&id, Some(options)).await.map_err(|error| error.to_string())
        });
        // It refuses to kill the dead.
        assert!(killed.is_ok() || self.has_ended(), "{self:?} could not be killed: {killed:?}");
    }

    pub(crate) fn pause(&self) {
        let inner = self.inner();
        wait(async move { inner.pause().await }).unwrap_or_else(|error| panic!("{self:?} goes on: {error}"));
    }

    pub(crate) fn unpause(&self) {
        let inner = self.inner();
        // As with a process, one that runs may be told to go on.
        if let Err(error) = wait(async move { inner.unpause().await }) {
            assert!(!self.is_paused(), "{self:?} stands still: {error}");
        }
    }

    fn is_paused(&self) -> bool {
        let id = self.id();
        let paused = wait(async move {
            let found = docker().await?.inspect_container(&id, None::<InspectContainerOptions>).await;
            found.map(|found| found.state.and_then(|state| state.paused)).map_err(|error| error.to_string())
        });
        paused.is_ok_and(|paused| paused == Some(true))
    }

    /// Waits for its end; says whether that was a success.
    pub(crate) fn succeeds(&self) -> bool {
        while !self.has_ended() {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let inner = self.inner();
        wait(async move { inner.exit_code().await }).is_ok_and(|code| code == Some(0))
    }

    pub(crate) fn said(&self) -> String {
        let inner = self.inner();
        let said = wait(async move { (inner.stdout_to_vec().await, inner.stderr_to_vec().await) });
        let told = [said.0, said.1].map(|said| said.unwrap_or_default());
        String::from_utf8_lossy(&told.concat()).into_owned()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.take() {
            let id = inner.id().to_owned();
            wait(async move { remove(&id).await });
            // Its own end would remove it once more, from a runtime that the test may have left.
            std::mem::forget(inner);
        }
    }
}

/// Says whether containers of this image can be started; the name of the image, or why not.
pub(crate) fn has_image(image: &str) -> Result<String, String> {
    let name = image.to_owned();
    let found: Result<(), String> = wait(async move {
        let docker = docker().await?;
        docker.ping().await.map_err(|error| format!("Docker does not answer: {error}"))?;
        let found = docker.inspect_image(&name).await;
        found.map(drop).map_err(|error| format!("there is no image {name} ({error}); build it: ./dev images"))
    });
    found?;
    static SWEPT: Once = Once::new();
    SWEPT.call_once(|| wait(sweep()));
    Ok(image.to_owned())
}

/// Removes the containers of tests that were killed: their process is gone.
async fn sweep() {
    let Ok(docker) = docker().await else { return };
    let filters = HashMap::from([("label", vec![OURS])]);
    let options = ListContainersOptionsBuilder::new().all(true).filters(&filters).build();
    for container in docker.list_containers(Some(options)).await.unwrap_or_default() {
        let labels = container.labels.unwrap_or_default();
        let label = |name| labels.get(name).map_or("", String::as_str);
        if let Some(id) = container.id
            && is_left_behind(label(MACHINE), label(PROCESS))
        {
            remove(&id).await;
        }
    }
}

/// Of another namespace nothing is known; of another run of the system nothing lives.
fn is_left_behind(machine_then: &str, process: &str) -> bool {
    let machine_now = machine();
    let boot = |machine: &str| machine.split('/').next().unwrap_or_default().to_owned();
    if boot(machine_then) != boot(&machine_now) {
        return true;
    }
    let id = process.split('@').next().unwrap_or_default();
    machine_then == machine_now && identity(id).as_deref() != Some(process)
}

async fn remove(id: &str) {
    let options = RemoveContainerOptionsBuilder::new().force(true).v(true).build();
    if let Ok(docker) = docker().await {
        // Another run may sweep the same.
        let _ = docker.remove_container(id, Some(options)).await;
    }
}

async fn docker() -> Result<Docker, String> {
    docker_client_instance().await.map_err(|error| format!("Docker cannot be reached: {error}"))
}

/// Names a process for as long as the system runs: its number, and the tick in which it began.
fn identity(id: &str) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name of the program, in parentheses, may hold anything; the 20th word after it is the tick.
    let began = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?;
    Some(format!("{id}@{began}"))
}

fn this_process() -> String {
    let id = std::process::id().to_string();
    identity(&id).unwrap_or(id)
}

fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{}/{}", boot.trim(), space.display())
}

fn text(word: &OsStr) -> String {
    word.to_str().expect("commands and folders of tests are plain text").to_owned()
}

/// Splits `registry:5000/name:tag`.
fn parts(image: &str) -> (&str, &str) {
    match image.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, tag),
        _ => (image, "latest"),
    }
}

/// Waits for work on a runtime of its own: tests call from inside theirs, where another must not be entered.
fn wait<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    static RUNTIME: LazyLock<tokio::runtime::Runtime> = LazyLock::new(|| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder
            .worker_threads(1)
            .thread_name("containers")
            .enable_all()
            .build()
            .expect("a runtime can be made")
    });
    let (done, result) = mpsc::channel();
    RUNTIME.spawn(async move {
        // Nobody hears it only if the caller is gone.
        let _ = done.send(work.await);
    });
    result.recv().expect("the work ends with a result")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_split_at_its_tag() {
        assert_eq!(parts("lockcore/redis:8.0"), ("lockcore/redis", "8.0"));
        assert_eq!(parts("redis"), ("redis", "latest"));
        assert_eq!(parts("127.0.0.1:5000/redis"), ("127.0.0.1:5000/redis", "latest"));
    }

    #[test]
    fn only_what_a_dead_process_left_is_swept() {
        let (here, us) = (machine(), this_process());
        assert!(!is_left_behind(&here, &us), "a living process was taken for dead");
        let again = format!("{}@0", std::process::id());
        assert!(is_left_behind(&here, &again), "a number that is used again was taken for its first owner");
        assert!(is_left_behind(&here, "4194305@1"), "no process has such a number");
        assert!(is_left_behind("another boot/pid:[1]", &us), "nothing outlives the system");
        let boot = here.split('/').next().unwrap();
        assert!(!is_left_behind(&format!("{boot}/pid:[1]"), &us), "a stranger's container was swept");
    }
}
