//! Recording: threads, files of several processes, the event stream of a client.

use std::{io::Write as _, sync::Arc, time::Duration};

use lockcore::{
    ErrorKind, EventKind, LockName, LostReason, Released,
    backend::{BootClock, Moment, Owner, TokioClock},
};
use lockcore_conformance::history::{
    Access, Answer, Call, ClockKind, Demand, Ended, Event, FaultClass, History, HistoryError, Property,
    Recorder, Rules, Seen, Verdict, What, Why, check,
};

use crate::script::{Script, fence, ms, owner, stamp};

fn scratch(name: &str) -> std::path::PathBuf {
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path = dir.join(format!("{name}-{}-{:x}.jsonl", std::process::id(), BootClock::read().as_nanos()));
    assert!(!path.exists());
    path
}

/// One of each kind of event, with all fields in use.
fn everything() -> History {
    let recorder = Recorder::builder().rules(Rules::complete()).about("case", "everything").build().unwrap();
    let alice = recorder.client("alice");
    let acquire = |n| Call::Acquire { owner: owner(n), ttl: ms(300), wait: Some(ms(1000)) };
    let mut op = alice.invoke("k", acquire(1));
    let deadline = recorder.now().saturating_add(ms(290));
    op.sent();
    op.retry();
    op.sent_on_wire();
    op.queued();
    op.ok(Answer { remaining: Some(ms(299)), ..Answer::granted(stamp(1, 1), deadline, Some(ms(300))) });
    let renew = || Call::Renew { fence: fence(1), owner: Some(owner(1)), ttl: ms(300) };
    alice.invoke("k", renew()).ok(Answer::renewed(deadline, None));
    alice.invoke("k", renew()).unknown("connection reset");
    let check = Call::Check { fence: fence(1), owner: None };
    alice.invoke("k", check).ok(Answer::held(true));
    let write = alice.invoke("k", Call::Write { fence: fence(1), value: Some(7) });
    let mut register = recorder.resource("k", "register");
    register.judged(stamp(1, 1), write.id(), Access::Write, Verdict::Accepted, Some(stamp(1, 1)), Some(7));
    write.ok(Answer { value: Some(7), ..Answer::default() });
    alice.invoke("k", Call::Read { fence: fence(1) }).fail(Why::Stale);
    let fault = recorder.fault("pause", "bob", "", FaultClass::A1, "waitid");
    drop(recorder.client("bob").invoke("k", acquire(2)));
    fault.end("waitid");
    let since = recorder.now();
    recorder.probe("k", since, |p| {
        let What::Probe { holder, remaining, residue, records, server_time, counter, .. } = p else { return };
        *holder = Some(Seen::Stamp(stamp(1, 1)));
        *remaining = Some(ms(300));
        (*residue, *records, *server_time, *counter) =
            (Some(0), Some(1), Some(u64::MAX), Some(fence(i64::MAX)));
    });
    let release = Call::Release { fence: fence(1), owner: Some(owner(1)) };
    alice.invoke("k", release).ok(Answer::released(Released::Now));
    alice.lost("k", stamp(1, 1), Ended::Released);
    recorder.note("the end");
    alice.invoke("", Call::Close).ok(Answer::default());
    recorder.history()
}

#[test]
fn a_history_survives_its_file() {
    let history = everything();
    let path = scratch("everything");
    history.write(&path).unwrap();
    assert_eq!(History::read([&path]).unwrap(), history);
    std::fs::remove_file(path).unwrap();
    let report = check(&history, history.rules().unwrap());
    assert!(report.passed(), "{report}");
}

#[test]
fn a_line_is_what_the_documentation_says() {
    let text = everything().to_text();
    let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!((&lines[0]["schema"], &lines[0]["version"]), (&"lockcore-history".into(), &1.into()));
    let invoke = lines.iter().find(|l| l["ev"] == "invoke").unwrap();
    assert_eq!((&invoke["verb"], &invoke["owner"]), (&"acquire".into(), &"0000000000000001".into()));
    assert_eq!((&invoke["ttl"], &invoke["wait"]), (&300_000_000.into(), &1_000_000_000.into()));
    let granted = lines.iter().find(|l| l["ev"] == "ok").unwrap();
    assert_eq!((&granted["fence"], &granted["attempt"]), (&1.into(), &2.into()));
    let resource = lines.iter().find(|l| l["ev"] == "resource").unwrap();
    assert_eq!(
        (&resource["verdict"], &resource["stamp"]),
        (&"accepted".into(), &"1.0000000000000001".into())
    );
    let probe = lines.iter().find(|l| l["ev"] == "probe").unwrap();
    assert_eq!((&probe["holder"], &probe["counter"]), (&"1.0000000000000001".into(), &i64::MAX.into()));
}

#[test]
fn threads_and_recorders_share_a_file_line_by_line() {
    let path = scratch("shared");
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let recorder = Recorder::builder().file(&path).file_only().build().unwrap();
            for thread in 0..2 {
                let recorder = recorder.clone();
                scope.spawn(move || {
                    let client = recorder.client(format!("client-{thread}"));
                    for _ in 0..500 {
                        let owner = Owner::random().digest();
                        let op = client.invoke("k", Call::Acquire { owner, ttl: ms(300), wait: None });
                        op.fail(Why::Unavailable);
                    }
                    assert!(recorder.history().events.is_empty(), "a file-only recorder keeps nothing");
                    recorder.flushed().unwrap();
                });
            }
        }
    });
    let history = History::read([&path]).unwrap();
    std::fs::remove_file(path).unwrap();
    assert_eq!((history.headers.len(), history.events.len()), (2, 4000));
    assert!(history.events.is_sorted_by_key(|e| e.ts));
    let report = check(&history, &Rules::complete());
    assert!(report.passed(), "operations of two recorders have different names: {report}");
}

#[test]
fn a_torn_last_line_is_no_error_and_any_other_is() {
    let mut text = everything().to_text();
    let whole = History::parse(&text).unwrap().events.len();
    text.truncate(text.len() - 20);
    let torn = History::parse(&text).unwrap();
    assert_eq!(torn.events.len(), whole);
    assert!(torn.events.iter().any(|e| matches!(&e.what, What::Note { text } if text.contains("torn"))));
    let middle = text.replacen("\"ev\":\"sent\"", "\"ev\":\"snet\"", 1);
    match History::parse(&middle) {
        Err(HistoryError::Line { line: 3, .. }) => {}
        other => panic!("an unknown event was read as {other:?}"),
    }
}

#[test]
fn files_that_do_not_belong_together_are_refused() {
    assert!(matches!(History::parse(""), Err(HistoryError::NoHeader { .. })));
    assert!(matches!(History::parse("{\"ts\":1}\n"), Err(HistoryError::NoHeader { .. })));
    let header = everything().to_text().lines().next().unwrap().to_owned();
    let newer = header.replacen("\"version\":1", "\"version\":2", 1);
    assert!(matches!(History::parse(&newer), Err(HistoryError::Version { version: 2, .. })));
    let (a, b) = (scratch("boot-a"), scratch("boot-b"));
    std::fs::write(&a, &header).unwrap();
    let mut file = std::fs::File::create(&b).unwrap();
    writeln!(file, "{}", header.replacen("\"clock\":\"boot\"", "\"clock\":\"virtual\"", 1)).unwrap();
    let joined = History::read([&a, &b]);
    std::fs::remove_file(a).unwrap();
    std::fs::remove_file(b).unwrap();
    assert!(matches!(joined, Err(HistoryError::Clocks)), "{joined:?}");
    let missing = History::read(["/no/such/history"]).unwrap_err();
    assert!(missing.to_string().starts_with("/no/such/history: "), "{missing}");
}

#[test]
fn a_dropped_call_records_that_the_caller_gave_up() {
    let recorder = Recorder::new();
    drop(recorder.client("bob").invoke("k", Call::Acquire { owner: owner(1), ttl: ms(300), wait: None }));
    let events = recorder.history().events;
    assert!(matches!(events[1].what, What::Invoke { call: Call::Cancel }), "{events:?}");
    assert_eq!(events[0].op, events[1].op);
}

#[test]
fn a_stall_of_the_process_is_measured() {
    let recorder = Recorder::new();
    let meter = recorder.meter_stalls(Duration::ZERO).unwrap();
    // Every sleep is a little late; with no lower limit, the meter reports each.
    let watchdog = BootClock::read().saturating_add(Duration::from_secs(20));
    while recorder.history().events.is_empty() {
        assert!(BootClock::read() < watchdog, "the meter never reported");
        std::thread::yield_now();
    }
    drop(meter);
    assert!(matches!(recorder.history().events[0].what, What::Stall { .. }));
}

#[tokio::test(start_paused = true)]
async fn virtual_time_is_recorded_as_such() {
    let clock = Arc::new(TokioClock::start());
    let recorder = Recorder::builder().clock(clock, ClockKind::Virtual).build().unwrap();
    let op = recorder.client("a").invoke("k", Call::Acquire { owner: owner(1), ttl: ms(300), wait: None });
    tokio::time::sleep(Duration::from_secs(3600)).await;
    op.fail(Why::Unavailable);
    let history = recorder.history();
    assert_eq!(history.headers[0].clock, ClockKind::Virtual);
    assert_eq!(history.events[0].ts.until(history.events[1].ts), Duration::from_secs(3600));
}

#[test]
fn errors_have_three_outcomes() {
    assert_eq!(Why::from_kind(ErrorKind::Held), Some(Why::Held));
    assert_eq!(Why::from_kind(ErrorKind::Unavailable), Some(Why::Unavailable));
    assert_eq!(Why::from_kind(ErrorKind::Unknown), None);
    assert_eq!(Why::from_kind(ErrorKind::FenceRegression), None);
    let recorder = Recorder::new();
    let client = recorder.client("a");
    let release = || client.invoke("k", Call::Release { fence: fence(1), owner: None });
    release().error(&lockcore::Error::new(ErrorKind::Unavailable, "no route"));
    release().error(&lockcore::Error::new(ErrorKind::Unknown, "connection reset"));
    let events = recorder.history().events;
    assert!(matches!(events[1].what, What::Fail { why: Why::Unavailable }));
    assert!(matches!(&events[3].what, What::Unknown { cause } if cause == "connection reset"));
}

/// What a client with one acquisition tells, as a history.
fn stream(kinds: Vec<(u64, EventKind)>) -> History {
    let recorder = Recorder::new();
    let mut log = recorder.stream("orders-7");
    let lock = LockName::parse("order/42").unwrap();
    for (at, kind) in kinds {
        log.record_parts(Moment::from_nanos(at * 1_000_000), &lock, owner(1), &kind);
    }
    recorder.history()
}

fn life(end: Vec<(u64, EventKind)>) -> Vec<(u64, EventKind)> {
    let deadline = |at: u64| Moment::from_nanos(at * 1_000_000);
    let mut all = vec![
        (1000, EventKind::AcquireStarted { ttl: ms(300), wait: Some(ms(5000)) }),
        (1001, EventKind::Asked { attempt: 1 }),
        (1050, EventKind::Asked { attempt: 2 }),
        (1060, EventKind::Granted { fence: fence(4), deadline: deadline(1347), waited: ms(60) }),
        (1150, EventKind::RenewStarted { fence: fence(4) }),
        (1155, EventKind::Renewed { fence: fence(4), deadline: deadline(1447), took: ms(5) }),
        (1250, EventKind::RenewStarted { fence: fence(4) }),
        (1260, EventKind::RenewFailed { fence: fence(4), kind: ErrorKind::Unknown }),
    ];
    all.extend(end);
    all
}

#[test]
fn the_event_stream_of_a_client_is_a_history() {
    let history = stream(life(vec![
        (1300, EventKind::ReleaseStarted { fence: fence(4) }),
        (1301, EventKind::Lost { fence: fence(4), reason: LostReason::Released }),
        (1305, EventKind::Released { fence: fence(4), released: Released::Now }),
    ]));
    let rules = Rules::application()
        .demand(Demand::Grants(1))
        .demand(Demand::Renewals(1))
        .demand(Demand::Releases(1))
        .demand(Demand::Unknowns(1))
        .demand(Demand::Judged(Property::S7, 2));
    let report = check(&history, &rules);
    assert!(report.passed(), "{report}");
    assert_eq!(report.judged.losses, 1);
}

#[test]
fn a_loss_that_the_event_stream_tells_late_is_found() {
    for (told, passes) in [(1690, true), (1700, false)] {
        let lost = EventKind::Lost { fence: fence(4), reason: LostReason::Expired };
        let report = check(&stream(life(vec![(told, lost)])), &Rules::application());
        assert_eq!(report.passed(), passes, "{report}");
        assert_eq!(report.broken(), if passes { vec![] } else { vec![Property::S10] });
    }
}

#[test]
fn an_acquire_that_goes_on_as_a_new_operation_is_two() {
    let recorder = Recorder::new();
    let mut log = recorder.stream("orders-7");
    let lock = LockName::parse("order/42").unwrap();
    let deadline = Moment::from_nanos(1_330_000_000);
    for (at, n, kind) in [
        (1000, 1, EventKind::AcquireStarted { ttl: ms(300), wait: Some(ms(5000)) }),
        (1001, 1, EventKind::Asked { attempt: 1 }),
        (1030, 2, EventKind::Asked { attempt: 1 }),
        (1031, 1, EventKind::Abandoned),
        (1040, 2, EventKind::Granted { fence: fence(4), deadline, waited: ms(40) }),
    ] {
        log.record_parts(Moment::from_nanos(at * 1_000_000), &lock, owner(n), &kind);
    }
    // An owner whose beginning was before the recording says nothing that could be judged.
    log.record_parts(deadline, &lock, owner(3), &EventKind::RenewStarted { fence: fence(2) });
    let history = recorder.history();
    let rules = Rules::complete().demand(Demand::Grants(1)).demand(Demand::Unknowns(1));
    let report = check(&history, &rules);
    assert!(report.passed(), "{report}");
    let waits: Vec<_> = history
        .events
        .iter()
        .filter_map(|e| match e.what {
            What::Invoke { call: Call::Acquire { wait, .. } } => wait,
            _ => None,
        })
        .collect();
    assert_eq!(waits, [ms(5000), ms(4970)], "the budget is one");
}

#[test]
fn a_gap_in_the_event_stream_is_no_pass() {
    let report = check(&stream(life(vec![(1300, EventKind::Missed { count: 9 })])), &Rules::default());
    assert_eq!((report.passed(), report.missed), (false, 9));
}

#[test]
fn a_long_history_is_judged_in_linear_time() {
    // 200,000 operations; a quadratic pass would take minutes.
    let mut s = Script::new();
    let mut ts = 0;
    for f in 1..50_000 {
        s.grant("alice", f, ts, ts + 1).renew("alice", f, ts + 2, ts + 3);
        s.release("alice", f, ts + 4, ts + 5, true).tries("bob", 1_000_000 + f, ts);
        s.fail(ts + 1, "bob", &format!("a{}", 1_000_000 + f), Why::Held);
        ts += 6;
    }
    let history = s.history();
    let start = BootClock::read();
    let report = check(&history, &Rules::complete());
    let took = start.until(BootClock::read());
    assert!(report.passed(), "{report}");
    assert!(took < Duration::from_secs(20), "{took:?} for {} events", history.events.len());
}

#[test]
fn what_the_recorder_keeps_is_what_was_said() {
    let recorder = Recorder::new();
    let event = Event { op: "x".into(), ..Script::new().note(5).events[0].clone() };
    recorder.record(event.clone());
    assert_eq!(recorder.history().events, [event]);
}
