//! `fence`: shows or raises the fence of a lock.

use serde_json::json;

use crate::{
    cli::Fence,
    failure::Failure,
    store::{self, Opened, Written},
    voice::{Voice, print},
};

/// Shows the highest fence that was granted, or makes every later one be above a number.
pub(crate) async fn main(options: &Fence, written: Written, voice: &Voice) -> Result<u8, Failure> {
    let name = store::name(&options.name)?;
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
