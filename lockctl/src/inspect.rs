//! `inspect`: who holds a lock.

use std::{fmt::Write as _, time::Duration};

use lockcore::{LockName, LockState, text::show_label};
use serde_json::{Value, json};

use crate::{
    cli::Inspect,
    duration::show,
    failure::Failure,
    store::{self, Opened, Written},
    voice::{Voice, millis, print},
};

/// How often `--watch` looks. A look is one read; people do not see more.
const EVERY: Duration = Duration::from_millis(500);

/// Looks once, or goes on looking.
pub(crate) async fn main(options: &Inspect, written: Written, voice: &Voice) -> Result<u8, Failure> {
    let name = store::name(&options.name)?;
    let opened = Opened::new(&options.store, written).await?;
    let mut state = look(&opened, &name).await?;
    if options.test {
        return Ok(u8::from(state.holder.is_none()));
    }
    let mut seen = None;
    loop {
        let identity = (state.holder.as_ref().map(lockcore::Holder::stamp), state.last_fence, state.waiters);
        if seen.as_ref() != Some(&identity) {
            let text = if voice.is_json() {
                format!("{}\n", to_json(&opened, &name, &state))
            } else {
                to_text(&opened, &name, &state, voice)
            };
            if !print(&text)? {
                return Ok(0);
            }
            seen = Some(identity);
        }
        if !options.watch {
            return Ok(0);
        }
        tokio::time::sleep(EVERY).await;
        state = look(&opened, &name).await?;
    }
}

async fn look(opened: &Opened, name: &LockName) -> Result<LockState, Failure> {
    opened.backend.inspect(&opened.call()?, name).await.map_err(|error| opened.failure(&error))
}

fn to_json(opened: &Opened, name: &LockName, state: &LockState) -> Value {
    json!({
        "schema": "lockctl/inspect/1",
        "store": opened.store.shown(),
        "namespace": opened.store.namespace,
        "name": name.as_str(),
        "held": state.holder.is_some(),
        "holder": state.holder.as_ref().map(|holder| json!({
            "stamp": holder.stamp().to_string(),
            "fence": holder.fence.to_string(),
            "owner": holder.owner.to_string(),
            "label": holder.label,
            "since_ms": holder.since.map(millis),
            "remaining_ms": millis(holder.remaining),
        })),
        "last_fence": state.last_fence.map(|fence| fence.to_string()),
        "waiters": state.waiters,
    })
}

fn to_text(opened: &Opened, name: &LockName, state: &LockState, voice: &Voice) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let mut row = |key: &str, value: &dyn std::fmt::Display| {
        let _ = writeln!(text, "{key:<11} {value}");
    };
    row("lock", name);
    row("store", &opened.store.shown());
    if !opened.store.namespace.is_empty() {
        row("namespace", &opened.store.namespace);
    }
    match &state.holder {
        Some(holder) => {
            row("state", &voice.bold("held"));
            row("label", &show_label(holder.label.as_deref().unwrap_or("(none)")));
            row("stamp", &holder.stamp());
            row("fence", &holder.fence);
            if let Some(since) = holder.since {
                row("since", &format_args!("{} ago", show(since)));
            }
            row("remaining", &show(holder.remaining));
        }
        None => {
            row("state", &voice.bold("free"));
            match state.last_fence {
                Some(fence) => row("last fence", &fence),
                None => row("last fence", &"(none known)"),
            }
        }
    }
    if let Some(waiters) = state.waiters {
        row("waiters", &waiters);
    }
    text
}
