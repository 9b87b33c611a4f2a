//! `list`: the locks that the store has a record of.

use serde_json::json;

use crate::{
    cli::List,
    failure::Failure,
    store::{self, Opened, Written},
    voice::{Voice, print},
};

/// Writes one name a line, in order, page by page.
pub(crate) async fn main(options: &List, written: Written, voice: &Voice) -> Result<u8, Failure> {
    // People write `nightly/` for what is below `nightly`.
    let prefix = match options.prefix.as_ref().map(|text| (text, text.to_str())) {
        None | Some((_, Some("" | "/"))) => None,
        Some((_, Some(text))) => Some(store::name(&text.strip_suffix('/').unwrap_or(text).into())?),
        Some((text, None)) => Some(store::name(text)?),
    };
    let opened = Opened::new(&options.store, written).await?;
    let mut after = None;
    loop {
        let page = opened
            .backend
            .list(&opened.call()?, prefix.as_ref(), after.as_ref())
            .await
            .map_err(|error| opened.failure(&error))?;
        let Some(last) = page.last().cloned() else { return Ok(0) };
        let mut text = String::new();
        for name in &page {
            if voice.is_json() {
                text.push_str(&json!({ "schema": "lockctl/list/1", "name": name.as_str() }).to_string());
            } else {
                text.push_str(name.as_str());
            }
            text.push('\n');
        }
        if !print(&text)? {
            return Ok(0);
        }
        after = Some(last);
    }
}
