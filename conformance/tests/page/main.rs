//! The page of the comparison in a real browser: it opens without an error, by keyboard, on a phone and on paper.

#![forbid(unsafe_code)]

mod browser;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use browser::Browser;
use lockcore::{
    Fence, Stamp,
    backend::{BootClock, Owner},
};
use lockcore_conformance::{
    history::{Answer, Call, Expect, Property, Recorder, Rules},
    report::{Comparison, Lane, Row},
};
use serde_json::{Value, json};

/// Two clients that both believe that they hold a lock, kept as a lane would.
fn keep_a_witness(folder: &Path) {
    let recorder = Recorder::new();
    let ttl = Duration::from_secs(5);
    for (who, fence) in [("alice", 41), ("bob", 42)] {
        let owner = Owner::random().digest();
        let log = recorder.client(who);
        let op = log.invoke("order/42", Call::Acquire { owner, ttl, wait: None });
        op.sent();
        let deadline = BootClock::read().saturating_add(ttl / 2);
        op.ok(Answer::granted(Stamp::new(Fence::new(fence).unwrap(), owner), deadline, Some(ttl)));
    }
    let rules = Rules::default().expect(Property::S2, Expect::Breaks);
    std::fs::create_dir_all(folder).unwrap();
    recorder.history().under(rules).write(folder.join("witness.jsonl")).unwrap();
}

fn case(name: &str, topic: &str, row: &str, verdict: &str, more: Value) -> Value {
    let mut case = json!({
        "id": &name[..3], "topic": topic, "name": name, "promise": format!("The promise of {name}."), "rows": [row],
        "expected": verdict, "verdict": verdict, "seconds": 0.25,
    });
    for (key, value) in more.as_object().unwrap() {
        case[key] = value.clone();
    }
    case
}

/// One lane with every verdict, names that do not break and markup that must not become any.
fn lane(profile: &str, server: &str, removal: &str) -> Lane {
    let time = json!([{ "what": "hand-off", "unit": "ms", "count": 5, "least": 0.5, "median": 0.9, "greatest": 3.0 }]);
    let long = "x".repeat(180);
    serde_json::from_value(json!({
        "schema": Lane::SCHEMA, "version": Lane::VERSION, "suite": "0.1.0", "profile": profile, "server": server,
        "column": format!("{profile}/7.0"), "date": "2026-11-30T12:00:00Z", "seed": 7, "seconds": 12.5, "ttl_ms": 600.0,
        "promises": {
            "backend": profile, "consistency": "single-server", "fence": "clock-bounded", "wake_up": "push",
            "ttl_least_ms": 20.0, "ttl_most_ms": 86_400_000.0, "ttl_step_ms": 1.0,
        },
        "cases": [
            case("a01_uncontended_grant", "acquire", "exclusion", "holds", json!({})),
            case("c04_a_slow_reply_counts", "expiry", "deadline", "not run", json!({ "reason": "no wire" })),
            case("c06_a_lock_delay_holds", "expiry", "takeover", "unsupported", json!({})),
            case("g01_a_release_wakes_a_waiter", "waiting", "waiting", "holds", json!({ "measures": time })),
            case("g04_waiters_are_served_in_order", "waiting", "fairness", "n/a", json!({ "reason": "no order" })),
            case("j17_random_faults", "soak", "soak", "may break (S2)", json!({})),
            case("l02_rounds", "scale", "cost", "FAILS", json!({ "reason": format!("<b>{long}</b> & \"more\"\n  below") })),
            case("j08_a_removed_record", "faults", "removal", removal, json!({
                "evidence": { "grants": 2, "accepted": 2, "stale": 1, "breaks": ["S2 exclusion: both believed"] },
                "history": "../history/witness.jsonl",
            })),
        ],
    }))
    .unwrap()
}

/// Writes the page; returns its address.
fn page(name: &str) -> String {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("page-{name}"));
    keep_a_witness(&folder.join("history"));
    std::fs::create_dir_all(folder.join("results")).unwrap();
    let lanes = vec![
        lane("redis-single", "Redis 7.0.15", "breaks (S2)"),
        lane("a-store-with-quite-a-long-name-of-its-profile", "Store 7.0.1", "holds"),
    ];
    let comparison = Comparison::new(lanes);
    let timelines = comparison.timelines(&folder.join("results"));
    assert!(timelines.iter().all(|timeline| timeline.svg.is_ok()), "{timelines:?}");
    std::fs::write(folder.join("index.html"), comparison.to_page(&timelines)).unwrap();
    format!("file://{}/index.html", folder.display())
}

#[test]
fn the_page_has_every_cell_and_no_complaint() {
    let Some(mut browser) = Browser::start("cells") else { return };
    browser.open(&page("cells"), 1440, 1000);
    let cells = browser.eval("document.querySelectorAll('.matrix tbody td > button').length");
    assert_eq!(cells, 2 * Row::ALL.len());
    let first = browser.eval("document.querySelector('.matrix tbody td').innerText");
    assert!(first.as_str().unwrap().starts_with("holds"), "{first}");
    let broken = "document.querySelector('[data-open=\"redis-single-7-0--removal\"]').innerText";
    let broken = browser.eval(broken);
    let broken = broken.as_str().unwrap();
    assert!(broken.contains("breaks (S2)") && broken.contains("refused 1 of 1 stale writes"), "{broken}");
    let waiting =
        browser.eval("document.querySelector('[data-open=\"redis-single-7-0--waiting\"]').innerText");
    assert!(waiting.as_str().unwrap().contains("hand-off: 0.9 ms"), "{waiting}");
    // Ids are unique, what opens something finds it, and no text of a case became markup.
    let twice = browser.eval(
        "[...document.querySelectorAll('[id]')].map(e => e.id).filter((id, at, all) => all.indexOf(id) !== at)",
    );
    assert_eq!(twice, json!([]));
    let dangling = browser.eval(
        "[...document.querySelectorAll('[data-open]')].map(e => e.dataset.open).filter(id => !document.getElementById(id))",
    );
    assert_eq!(dangling, json!([]));
    assert_eq!(browser.eval("document.querySelectorAll('.why b').length"), 0);
    browser.picture("wide");
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn a_verdict_is_a_shape_and_a_word_and_can_be_read_in_both_schemes() {
    let Some(mut browser) = Browser::start("schemes") else { return };
    let address = page("schemes");
    for scheme in ["light", "dark"] {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        browser.call("Emulation.setEmulatedMedia", json!({ "features": features }));
        browser.open(&address, 1440, 1000);
        let mute = browser.eval(
            "[...document.querySelectorAll('.verdict')].filter(v => !v.textContent.trim() ||
              !document.querySelector(v.querySelector('use')?.getAttribute('href') ?? '#nothing')).length",
        );
        assert_eq!(mute, 0, "{scheme}");
        let faint = browser.eval(
            "(() => {
              const parts = (c) => c.match(/[\\d.]+/g).map(Number);
              const light = (c) => { const [r, g, b] = parts(c).map(v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4 });
                return .2126 * r + .7152 * g + .0722 * b };
              const back = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; const p = parts(c);
                if (p.length < 4 || p[3] > 0) return c } return 'rgb(255, 255, 255)' };
              const seen = new Map();
              for (const e of document.querySelectorAll('.verdict, .said, .number, .besides, .lead, tbody th span, thead span, summary')) {
                if (!e.offsetParent) continue;
                const [a, b] = [light(getComputedStyle(e).color), light(back(e))].sort((x, y) => y - x);
                const ratio = (a + .05) / (b + .05);
                if (ratio < 4.5) seen.set(e.className + ' ' + e.textContent.trim().slice(0, 20), ratio);
              }
              return [...seen];
            })()",
        );
        assert_eq!(faint, json!([]), "{scheme}: contrast below 4.5");
        browser.picture(scheme);
    }
}

#[test]
fn a_cell_opens_and_closes_by_keyboard() {
    let Some(mut browser) = Browser::start("keyboard") else { return };
    browser.open(&page("keyboard"), 1440, 1000);
    let here = "document.activeElement.dataset?.open ?? document.activeElement.id ?? ''";
    let wanted = format!("redis-single-7-0--{}", Row::ALL[0].id);
    let mut tabs = 0;
    while browser.eval(here) != wanted {
        browser.press("Tab");
        tabs += 1;
        assert!(tabs < 12, "twelve tabs do not lead to the first cell");
    }
    // The arrow keys go on from there.
    let at = Row::ALL.iter().position(|row| row.id == "removal").unwrap();
    for _ in 0..at {
        browser.press("ArrowDown");
    }
    assert_eq!(browser.eval(here), "redis-single-7-0--removal");
    browser.press("Enter");
    let open = "[...document.querySelectorAll('dialog[open]')].map(d => d.id)";
    assert_eq!(browser.eval(open), json!(["redis-single-7-0--removal"]));
    let shown = browser.eval("document.querySelector('dialog[open]').innerText");
    let shown = shown.as_str().unwrap();
    for expected in
        ["j08_a_removed_record", "The promise of j08", "S2 exclusion: both believed", "1 stale one refused"]
    {
        assert!(shown.contains(expected), "{expected}: {shown}");
    }
    assert_eq!(
        browser
            .eval("document.querySelector('dialog[open] svg.timeline').getBoundingClientRect().height > 100"),
        true
    );
    assert_eq!(browser.eval("document.querySelector('dialog[open]').contains(document.activeElement)"), true);
    assert_eq!(browser.eval("location.hash"), "#redis-single-7-0--removal");
    browser.picture("dialog");
    browser.press("Escape");
    assert_eq!(browser.eval(open), json!([]));
    assert_eq!(browser.eval(here), "redis-single-7-0--removal", "the focus did not come back");
    browser.until("location.hash === ''");
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn a_link_to_a_cell_opens_it() {
    let Some(mut browser) = Browser::start("link") else { return };
    browser.open(&format!("{}#redis-single-7-0--cost", page("link")), 1440, 1000);
    browser.until("document.querySelector('dialog[open]')?.id === 'redis-single-7-0--cost'");
    browser.until("document.activeElement.textContent === 'Close'");
    browser.press("Enter");
    browser.until("!document.querySelector('dialog[open]')");
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn a_phone_needs_no_scrolling_to_the_side() {
    let Some(mut browser) = Browser::start("phone") else { return };
    browser.open(&page("phone"), 390, 844);
    let overflow = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)";
    assert_eq!(browser.eval(overflow), 390);
    browser.picture("phone");
    // Each cell names its store, because the head of the table is gone.
    let unnamed = browser.eval(
        "[...document.querySelectorAll('.matrix td > button')].filter(b =>
           !getComputedStyle(b, '::before').content.includes(b.dataset.column)).length",
    );
    assert_eq!(unnamed, 0);
    browser.eval("document.querySelectorAll('main > section > details').forEach(d => d.open = true)");
    assert_eq!(browser.eval(overflow), 390, "with the topics open");
    for cell in ["removal", "cost"] {
        browser.eval(&format!("document.querySelector('[data-open=\"redis-single-7-0--{cell}\"]').click()"));
        browser.eval("document.querySelectorAll('dialog[open] details').forEach(d => d.open = true)");
        assert_eq!(browser.eval(overflow), 390, "with {cell} open");
        let wide =
            browser.eval("(d => d.scrollWidth - d.clientWidth)(document.querySelector('dialog[open]'))");
        assert_eq!(wide, 0, "the dialog of {cell}");
        browser.picture(&format!("phone-{cell}"));
        browser.press("Escape");
    }
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn paper_shows_the_table_and_what_broke() {
    let Some(mut browser) = Browser::start("paper") else { return };
    browser.open(&page("paper"), 1050, 740);
    browser.call("Emulation.setEmulatedMedia", json!({ "media": "print" }));
    let shown = browser
        .eval("[...document.querySelectorAll('dialog')].filter(d => d.offsetHeight > 0).map(d => d.id)");
    let shown: Vec<&str> = shown.as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(
        shown.contains(&"redis-single-7-0--removal") && shown.contains(&"redis-single-7-0--cost"),
        "{shown:?}"
    );
    assert!(!shown.contains(&"redis-single-7-0--exclusion"), "{shown:?}");
    let cut =
        browser.eval("(s => s.scrollHeight - s.clientHeight)(document.querySelector('#matrix .scroll'))");
    assert_eq!(cut, 0, "the table is cut off");
    assert_eq!(browser.eval("document.querySelector('#differ').offsetHeight"), 0, "a box to tick on paper");
    let pdf = browser.call("Page.printToPDF", json!({ "preferCSSPageSize": true, "printBackground": true }));
    let pdf = browser::base64(pdf["data"].as_str().unwrap());
    assert!(pdf.starts_with(b"%PDF"));
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("page");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("paper.pdf"), pdf).unwrap();
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn only_rows_that_differ_can_be_shown() {
    let Some(mut browser) = Browser::start("differ") else { return };
    browser.open(&page("differ"), 1440, 1000);
    let shown = "[...document.querySelectorAll('.matrix tbody tr')].filter(r => r.offsetHeight > 0)
        .map(r => r.querySelector('b').textContent)";
    assert_eq!(browser.eval(&format!("{shown}.length")), Row::ALL.len());
    browser.eval("document.querySelector('#differ').click()");
    assert_eq!(browser.eval(shown), json!(["Eviction, deletion"]));
}
