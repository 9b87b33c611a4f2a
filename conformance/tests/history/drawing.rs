//! Timelines: what a person sees.

use lockcore_conformance::history::{
    Access, Call, Ended, FaultClass, Phase, Rules, Seen, Verdict, What, Why, check, timeline,
};

use crate::script::{Script, fence, stamp};

/// The story that fences are for: Alice pauses past her deadline, Bob takes over, Alice wakes up and writes.
pub(crate) fn story(verdict: Verdict) -> Script {
    let mut s = Script::new();
    s.on("order/42").grant("alice", 41, 0, 3).renew("alice", 41, 100, 104);
    s.waits("bob", 42, 150, 2000).add(152, "bob", "a42", What::Queued);
    s.fault(180, "pause", "alice", FaultClass::A1, Phase::Begin);
    s.probe(300, 302, Some(Seen::Stamp(stamp(41, 41))), Some(1));
    s.add(405, "bob", "a42", What::Sent { wire: false }).granted("bob", 42, 412, 42, 705);
    s.call(450, "bob", "w1", Call::Write { fence: fence(42), value: None });
    s.fault(500, "pause", "alice", FaultClass::A1, Phase::End);
    s.lost("alice", 41, 505, Ended::Expired);
    s.call(510, "alice", "w2", Call::Write { fence: fence(41), value: None });
    let key = s.key.clone();
    s.resource(451, "w1", stamp(42, 42), Access::Write, Verdict::Accepted, None, None);
    s.resource(512, "w2", stamp(41, 41), Access::Write, verdict, None, None);
    s.ok(453, "bob", "w1", Default::default());
    if verdict == Verdict::Stale {
        s.fail(514, "alice", "w2", Why::Stale);
    } else {
        s.ok(514, "alice", "w2", Default::default());
    }
    s.on(&key).release("bob", 42, 600, 604, true);
    s.release("alice", 41, 610, 613, false).tries("carol", 43, 640);
    s
}

fn text(script: &Script) -> String {
    let history = script.history();
    timeline::text(&history, Some(&check(&history, &Rules::complete())), &script.key)
}

fn svg(script: &Script) -> String {
    let history = script.history();
    timeline::svg(&history, Some(&check(&history, &Rules::complete())), &script.key)
}

#[test]
fn a_text_timeline_tells_the_story_in_100_columns() {
    let page = text(&story(Verdict::Stale));
    for line in page.lines() {
        assert!(line.chars().count() <= 100, "{} columns: {line}", line.chars().count());
        assert_eq!(line.trim_end(), line);
    }
    for words in [
        "order/42",
        "is granted fence 41, until +0.300000 s",
        "has its lease renewed, until +0.400000 s",
        "stands in the queue",
        "fault pause of alice begins (A1)",
        "held by 41.0000000000000029, 1 more records",
        "reaches its deadline under fence 41",
        "is granted fence 42",
        "is told that fence 41 is over: expired",
        "refuses as stale a write of 41.0000000000000029",
        "finds nothing to release: it was over",
    ] {
        let flat = page.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains(words), "{words:?} is missing:\n{page}");
    }
    let stale = page.lines().find(|l| l.contains("refuses as stale")).unwrap();
    assert!(stale.contains("+0.512000 s  ┆ ┃ · ✗"), "{stale}");
    assert!(
        !page.contains('▲') || !page.lines().skip(8).any(|l| l.contains('▲')),
        "nothing was found:\n{page}"
    );
}

#[test]
fn a_text_timeline_shows_two_holders_side_by_side_and_the_finding_below() {
    let mut s = Script::new();
    s.grant("alice", 1, 0, 1).grant("bob", 2, 100, 101);
    let page = text(&s);
    let granted = page.lines().position(|l| l.contains("is granted fence 2")).unwrap();
    let lines: Vec<&str> = page.lines().collect();
    assert!(lines[granted].contains("┃ ┏"), "{}", lines[granted]);
    assert_eq!(page.matches("✓ accepted").count(), 1, "the legend is not torn apart");
    assert!(lines[granted + 1].contains("▲  S2 exclusion: alice (fence 1) and bob (fence 2) both"), "{page}");
}

#[test]
fn a_long_text_timeline_shows_what_surrounds_the_finding() {
    let mut s = Script::new();
    for f in 1..1000_i64 {
        let ts = f as u64 * 10;
        s.grant("alice", f, ts, ts + 1).release("alice", f, ts + 2, ts + 3, true);
    }
    let calm = text(&s);
    assert!(calm.lines().count() < 450 && calm.contains("events left out"), "{} lines", calm.lines().count());
    s.tries("bob", 5000, 20_000).granted("bob", 5000, 20_001, 1, 20_300);
    let page = text(&s);
    assert!(page.contains("S1 fence order") && page.contains("bob"), "{page}");
    assert!(page.lines().count() < 450);
}

#[test]
fn an_svg_timeline_is_well_formed_and_needs_nothing_else() {
    let mut s = story(Verdict::Accepted);
    s.on("order/42").add(620, "alice", "", What::Note { text: "<script>&\"'\u{1}".into() });
    s.add(
        621,
        "<b onclick=\"x\">",
        "z1",
        What::Invoke { call: Call::Check { fence: fence(41), owner: None } },
    );
    let page = svg(&s);
    assert!(page.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""));
    assert!(page.contains("role=\"img\" aria-labelledby=\"title desc\""));
    assert!(page.contains("<title id=\"title\">Timeline of order/42</title>"));
    assert!(
        page.contains("<desc id=\"desc\">") && page.contains("one finding")
            || page.contains("findings, the first")
    );
    assert!(!page.contains("<script") && !page.contains("href") && !page.contains("<b "), "{page}");
    assert!(!page.contains('\u{1}'));
    assert!(page.contains("S4 the resource never goes back"), "{page}");
    well_formed(&page);
}

#[test]
fn an_svg_timeline_stays_small() {
    let mut s = Script::new();
    for f in 1..20_000_i64 {
        let ts = f as u64 * 10;
        s.grant("alice", f, ts, ts + 1).release("alice", f, ts + 2, ts + 3, true);
    }
    let page = svg(&s);
    assert!(page.len() < 1_000_000 && page.contains("are left out"), "{} bytes", page.len());
    well_formed(&page);
}

#[test]
fn a_deadline_at_the_end_of_time_can_be_drawn() {
    let mut s = Script::new();
    s.tries("alice", 1, 0).granted("alice", 1, 1, 1, 18_446_740_000_000 - 3_600_000);
    let page = svg(&s);
    assert!(page.contains("recording ends") && page.contains("fence 1"), "{page}");
    well_formed(&page);
}

#[test]
fn an_empty_name_can_be_drawn() {
    let s = Script::new();
    well_formed(&svg(&s));
    assert!(text(&s).starts_with('k'));
}

/// Tags are closed in order, and attributes are quoted.
#[track_caller]
fn well_formed(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    for part in page.split('<').skip(1) {
        let (tag, text) = part.split_once('>').unwrap_or_else(|| panic!("no end: <{part}"));
        assert!(!text.contains('>') || open.last() == Some(&"style"), "a bare > in {part}");
        assert!(tag.matches('"').count() % 2 == 0, "<{tag}>");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "closed out of order");
        } else if !tag.ends_with('/') {
            open.push(tag.split(' ').next().unwrap());
        }
        for entity in text.split('&').skip(1) {
            let known = ["amp;", "lt;", "gt;", "quot;"].iter().any(|e| entity.starts_with(e));
            assert!(known, "&{entity}");
        }
    }
    assert!(open.is_empty(), "{open:?} are not closed");
}
