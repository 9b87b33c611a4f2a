//! `fence`: shows or raises the fence of a lock, or of all locks of a namespace.

use std::time::{SystemTime, UNIX_EPOCH};

use lockcore::{ErrorKind, Fence as Number, LockName};
use serde_json::json;

use crate::{
    cli::Fence,
    exit,
    failure::Failure,
    store::{self, Opened, Written},
    voice::{Voice, print},
};

/// Shows the highest fence that was granted, or makes every later one be above a number.
pub(crate) async fn main(options: &Fence, written: Written, voice: &Voice) -> Result<u8, Failure> {
    let Some(name) = options.name.as_ref() else {
        return seed(&Opened::new(&options.store, written).await?, voice).await;
    };
    let name = store::name(name)?;
    let opened = Opened::new(&options.store, written).await?;
    let call = opened.call()?;
    let fence = match options.raise {
        Some(floor) => opened.backend.raise_fence(&call, &name, floor).await.map(Some),
        None => opened.backend.inspect(&call, &name).await.map(|state| state.last_fence),
    }
    .map_err(|error| opened.failure(&error))?;
    let text = if voice.is_json() {
        let fence = fence.map(|fence| fence.to_string());
        format!("{}\n", json!({ "schema": "lockctl/fence/1", "name": name.as_str(), "fence": fence }))
    } else {
        match fence {
            Some(fence) => format!("{fence}\n"),
            None => {
                voice
                    .progress(format_args!("the store has no record of {name:?} ({})", opened.store.shown()));
                String::new()
            }
        }
    };
    print(&text)?;
    Ok(0)
}

/// Stands for the locks that the store has no record of. Where fences come from one base for the namespace, raising it
/// raises all; elsewhere a lock without a record starts from the time as it is.
const NOBODY: &str = "lockctl/seed";

/// Brings every fence of the namespace up to the clock: the base, and each lock on record.
async fn seed(opened: &Opened, voice: &Voice) -> Result<u8, Failure> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let time = i64::try_from(since.as_micros()).ok().and_then(|micros| Number::new(micros).ok());
    let time =
        time.ok_or_else(|| Failure::usage("this machine's clock is not set; a fence cannot be made of it"))?;
    let failed = |error: lockcore::Error| opened.failure(&error);
    let nobody = LockName::parse(NOBODY).map_err(failed)?;
    opened.backend.raise_fence(&opened.call()?, &nobody, time).await.map_err(failed)?;
    let (mut after, mut raised) = (None::<LockName>, 0_u64);
    loop {
        let page = opened.backend.list(&opened.call()?, None, after.as_ref()).await.map_err(failed)?;
        let Some(last) = page.last().cloned() else { break };
        for name in &page {
            opened.backend.raise_fence(&opened.call()?, name, time).await.map_err(failed)?;
        }
        raised += page.iter().filter(|name| **name != nobody).count() as u64;
        after = Some(last);
    }
    // What was written is read again: whoever seeds a store has reason not to take its word.
    match opened.backend.high_water(&opened.call()?).await {
        Ok(stands) if stands >= Some(time) => {}
        Ok(_) => {
            let sentence = format!(
                "the store says that its fences are still below {time} ({}); nothing may be locked until they are not",
                opened.store.shown()
            );
            return Err(Failure::new(exit::REFUSED, sentence));
        }
        Err(error) if error.kind() == ErrorKind::Unsupported => {}
        Err(error) => return Err(failed(error)),
    }
    let namespace = &opened.store.namespace;
    print(&if voice.is_json() {
        let whole = json!({
            "schema": "lockctl/fence-seed/1",
            "namespace": namespace,
            "floor": time.to_string(),
            "names": raised,
        });
        format!("{whole}\n")
    } else {
        voice.progress(format_args!("{raised} locks on record were raised ({})", opened.store.shown()));
        format!("{time}\n")
    })?;
    Ok(0)
}
