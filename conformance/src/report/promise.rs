//! The promise of a case as a sentence: the doc comment of its function.

use crate::case::Case;

/// The files of the cases, as they were compiled.
const SOURCES: &[(&str, &str)] = &[
    ("acquire", include_str!("../cases/acquire.rs")),
    ("cancel", include_str!("../cases/cancel.rs")),
    ("clocks", include_str!("../cases/clocks.rs")),
    ("config", include_str!("../cases/config.rs")),
    ("expiry", include_str!("../cases/expiry.rs")),
    ("faults", include_str!("../cases/faults.rs")),
    ("lost_replies", include_str!("../cases/lost_replies.rs")),
    ("migration", include_str!("../cases/migration.rs")),
    ("names", include_str!("../cases/names.rs")),
    ("operators", include_str!("../cases/operators.rs")),
    ("ownership", include_str!("../cases/ownership.rs")),
    ("partition", include_str!("../cases/partition.rs")),
    ("pause", include_str!("../cases/pause.rs")),
    ("renewal", include_str!("../cases/renewal.rs")),
    ("scale", include_str!("../cases/scale.rs")),
    ("servers", include_str!("../cases/servers.rs")),
    ("soak", include_str!("../cases/soak.rs")),
    ("stale_fence", include_str!("../cases/stale_fence.rs")),
    ("waiting", include_str!("../cases/waiting.rs")),
];

/// Returns what a case promises; empty if its file is not listed above, which a test finds.
pub(crate) fn promise(case: &Case) -> String {
    let source = SOURCES.iter().find(|(topic, _)| *topic == case.topic()).map_or("", |(_, source)| source);
    let Some(at) = source.find(&format!("async fn {}(", case.name())) else { return String::new() };
    let mut lines: Vec<&str> =
        source[..at].lines().rev().map_while(|line| line.strip_prefix("///")).map(str::trim).collect();
    lines.reverse();
    lines.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases;

    #[test]
    fn every_case_has_a_promise() {
        let without: Vec<_> = cases::all().filter(|case| !promise(case).ends_with('.')).collect();
        assert!(without.is_empty(), "no sentence above the function, or no line in `SOURCES`: {without:?}");
    }
}
