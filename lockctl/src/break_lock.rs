//! `break`: takes a lock away from its holder.

use lockcore::text::show_label;
use serde_json::json;

use crate::{
    cli::Break,
    duration::show,
    exit,
    failure::Failure,
    store::{self, Opened, Written},
    voice::{Voice, millis, print},
};

/// Breaks, and says what was broken and which fence now stands.
pub(crate) async fn main(options: &Break, written: Written, voice: &Voice) -> Result<u8, Failure> {
    let name = store::name(&options.name)?;
    if options.reason.trim().is_empty() {
        return Err(Failure::usage("--reason is empty; whoever reads the record at night needs it"));
    }
    let opened = Opened::new(&options.store, written).await?;
    let broken = match opened.backend.break_lock(&opened.call()?, &name, options.expect).await {
        Ok(broken) => broken,
        Err(error) if error.kind() == lockcore::ErrorKind::Held => {
            let now = error.holder().map_or_else(|| "nobody".to_owned(), |holder| holder.stamp().to_string());
            return Err(Failure::new(
                exit::BUSY,
                format!(
                    "{name:?} has another holder now, {now}; nothing was broken (store {})",
                    opened.store.shown()
                ),
            ));
        }
        Err(error) => return Err(opened.failure(&error)),
    };
    if voice.is_json() {
        let whole = json!({
            "schema": "lockctl/break/1",
            "store": opened.store.shown(),
            "name": name.as_str(),
            "reason": options.reason,
            "floor": broken.floor.to_string(),
            "broken": broken.holder.as_ref().map(|holder| json!({
                "stamp": holder.stamp().to_string(),
                "label": holder.label,
                "remaining_ms": millis(holder.remaining),
            })),
        });
        print(&format!("{whole}\n"))?;
    } else {
        let what = match &broken.holder {
            Some(holder) => format!(
                "broke {name:?}, held by {} as {} for {} more",
                show_label(holder.label.as_deref().unwrap_or("(no label)")),
                holder.stamp(),
                show(holder.remaining)
            ),
            None => format!("nobody held {name:?}"),
        };
        print(&format!(
            "{what}\nfence floor {}: write it to the resource to shut the old holder out now\n",
            broken.floor
        ))?;
    }
    Ok(0)
}
