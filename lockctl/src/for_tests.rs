//! The supervisor with a lease that a test makes up.

use tokio::sync::watch;

use crate::supervisor::{LossPipe, Signals, supervise};
pub use crate::{
    state_file::StateFile,
    supervisor::{End, Ended, Hold, Job, NotStarted, Standing},
    voice::Voice,
};

/// Runs a command under a made-up lease, on the calling thread. `lease` runs beside it and moves the hold.
///
/// # Errors
/// Nothing was started, and why.
pub fn run(
    job: &Job,
    first: Hold,
    state: StateFile,
    lease: impl AsyncFnOnce(watch::Sender<Hold>),
) -> Result<Ended, NotStarted> {
    let loss = LossPipe::new().map_err(NotStarted::Own)?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(NotStarted::Own)?;
    runtime.block_on(async {
        let (sender, hold) = watch::channel(first);
        let voice = Voice::for_tests();
        let mut signals = Signals::hear().map_err(NotStarted::Own)?;
        let beside = async {
            lease(sender).await;
            std::future::pending::<()>().await;
        };
        tokio::select! {
            ended = supervise(job, hold, &mut signals, loss, state, &voice) => ended,
            () = beside => unreachable!("it never ends"),
        }
    })
}
