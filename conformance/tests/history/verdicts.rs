//! How findings become a verdict: expectations, demands, stalls, missing events.

use lockcore_conformance::history::{
    Access, Demand, Ended, Expect, FaultClass, Judged, Outcome, Phase,
    Property::{L1, S2, S5},
    Rules, Verdict, What, Why, check,
};

use crate::script::{Script, ms, stamp};

fn two_believers() -> Script {
    let mut s = Script::new();
    s.grant("alice", 1, 0, 1).grant("bob", 2, 100, 101);
    s
}

#[test]
fn an_expected_break_passes_and_its_absence_fails() {
    let rules = Rules::default().expect(S2, Expect::Breaks);
    let report = check(&two_believers().history(), &rules);
    assert!(report.passed() && report.breaks(S2) && report.violations.is_empty(), "{report}");
    let mut kept = Script::new();
    kept.grant("alice", 1, 0, 1);
    let report = check(&kept.history(), &rules);
    assert_eq!((report.outcome, report.unbroken.as_slice()), (Outcome::Fail, &[S2][..]));
    assert!(report.to_string().contains("S2 exclusion: should have been broken"), "{report}");
}

#[test]
fn an_expected_break_excuses_no_other() {
    let mut s = two_believers();
    s.renew("alice", 1, 110, 111);
    let report = check(&s.history(), &Rules::default().expect(S2, Expect::Breaks));
    assert_eq!(report.outcome, Outcome::Fail);
    assert_eq!(report.broken(), [S2, S5]);
}

#[test]
fn what_may_break_passes_both_ways() {
    let rules = Rules::default().expect(S2, Expect::May);
    assert!(check(&two_believers().history(), &rules).passed());
    let mut kept = Script::new();
    kept.grant("alice", 1, 0, 1);
    assert!(check(&kept.history(), &rules).passed());
}

#[test]
fn an_empty_history_meets_no_demand() {
    let demands = [
        Demand::Grants(1),
        Demand::Renewals(1),
        Demand::Releases(1),
        Demand::StaleVerdicts(1),
        Demand::AcceptedVerdicts(1),
        Demand::Unknowns(1),
        Demand::FaultsHitCalls,
        Demand::Judged(S5, 1),
    ];
    for demand in demands {
        let report = check(&Script::new().history(), &Rules::default().demand(demand));
        assert_eq!((report.outcome, report.unmet.len()), (Outcome::Fail, 1), "{demand:?}: {report}");
    }
    let mut s = Script::new();
    s.grant("alice", 1, 0, 1).renew("alice", 1, 10, 11).release("alice", 1, 20, 21, true);
    let rules = Rules::default().demand(Demand::Grants(1)).demand(Demand::Renewals(1));
    let rules = rules.demand(Demand::Releases(1)).demand(Demand::Judged(S5, 1));
    let report = check(&s.history(), &rules);
    assert!(report.passed(), "{report}");
}

#[test]
fn a_report_counts_what_it_has_judged_and_nothing_else() {
    let history = two_believers().history();
    let judged = check(&history, &Rules::default()).judged;
    assert_eq!((judged.events, judged.keys, judged.grants), (history.events.len() as u64, 1, 2));
    assert!(judged.properties.contains_key(&S2));
    let report = check(&history, &Rules::default().expect(S2, Expect::NotJudged));
    assert!(!report.judged.properties.contains_key(&S2), "{report}");
    assert!(!report.breaks(S2) && report.passed(), "{report}");
}

/// Demands and the report's evidence rest on these numbers; twice of each tells a sum from a mark.
#[test]
fn each_kind_of_event_is_counted_for_what_it_is() {
    let mut s = Script::new();
    for n in [1, 2] {
        let (from, f) = (1000 * n, 10 * n as i64);
        s.grant("alice", f, from, from + 1).renew("alice", f, from + 10, from + 11);
        s.checks("alice", f, from + 12, from + 13, true).tries("bob", 100 + f, from + 20);
        s.fail(from + 21, "bob", &format!("a{}", 100 + f), Why::Held);
        s.waits("bob", 200 + f, from + 22, 10);
        s.fail(from + 40, "bob", &format!("a{}", 200 + f), Why::WaitTimeout);
        s.tries("bob", 300 + f, from + 41).unknown(from + 42, "bob", &format!("a{}", 300 + f));
        s.probe(from + 43, from + 44, None, None);
        s.release("alice", f, from + 50, from + 51, true);
        s.on("other").grant("carol", f + 4, from, from + 1).lost("carol", f + 4, from + 301, Ended::Expired);
        s.on("k");
        let op = |kind: &str| format!("{kind}-{n}");
        s.judged(10 * n, &op("x"), stamp(f, f), Access::Write, Verdict::Accepted);
        s.judged(10 * n + 1, &op("x"), stamp(f, f), Access::Write, Verdict::Duplicate);
        s.judged(10 * n + 2, &op("y"), stamp(f - 1, 77), Access::Write, Verdict::Stale);
        s.fault(from, "cut", "server", FaultClass::A1, Phase::Begin);
        s.fault(from + 30, "cut", "server", FaultClass::A1, Phase::End);
    }
    let judged = check(&s.history(), &Rules::default()).judged;
    let Judged { keys, grants, renewals, releases, refusals, unknowns, losses, probes, .. } = judged;
    assert_eq!(
        (keys, grants, renewals, releases, refusals, unknowns, losses, probes),
        (2, 4, 2, 2, 4, 2, 2, 2)
    );
    assert_eq!((judged.accepted, judged.duplicates, judged.stale, judged.faults), (2, 2, 2, 2));
    assert_eq!(judged.events, s.events.len() as u64);
}

#[test]
fn a_fault_that_overlaps_no_call_is_told() {
    for (end, met) in [(4, false), (10, true)] {
        let mut s = Script::new();
        s.fault(1, "cut", "server", FaultClass::A1, Phase::Begin);
        s.fault(end, "cut", "server", FaultClass::A1, Phase::End).grant("alice", 1, 5, 6);
        let report = check(&s.history(), &Rules::default().demand(Demand::FaultsHitCalls));
        assert_eq!(report.passed(), met, "{report}");
    }
}

#[test]
fn a_stall_makes_an_upper_bound_inconclusive_and_excuses_no_safety() {
    let late = |stall: u64| {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1).waits("bob", 2, 10, 10_000).granted("bob", 2, 450, 2, 700).note(900);
        s.add(420, "", "", What::Stall { ns: ms(stall) });
        s
    };
    let rules = Rules::complete().with(|r| r.bounds.takeover = Some(ms(100)));
    assert_eq!(check(&late(26).history(), &rules).outcome, Outcome::Inconclusive);
    assert_eq!(check(&late(25).history(), &rules).outcome, Outcome::Fail);
    assert!(check(&late(25).history(), &rules).breaks(L1));

    let mut both = two_believers();
    both.add(101, "", "", What::Stall { ns: ms(5000) });
    assert_eq!(check(&both.history(), &rules).outcome, Outcome::Fail);
}

#[test]
fn missing_events_leave_everything_inconclusive() {
    let mut s = Script::new();
    s.grant("alice", 1, 0, 1).add(2, "alice", "", What::Missed { count: 3 });
    let report = check(&s.history(), &Rules::default());
    assert_eq!((report.outcome, report.missed), (Outcome::Inconclusive, 3));
    let mut s = two_believers();
    s.add(2, "alice", "", What::Missed { count: 3 });
    assert_eq!(check(&s.history(), &Rules::default()).outcome, Outcome::Inconclusive);
}

#[test]
fn a_thousand_violations_are_counted_and_not_all_kept() {
    let mut s = Script::new();
    for n in 0..1000_i64 {
        let ts = n as u64;
        s.grant("alice", 2000 - n, 2 * ts, 2 * ts + 1);
    }
    let report = check(&s.history(), &Rules::default());
    let told = report.violations.len() as u64 + report.more.values().sum::<u64>();
    assert!(report.violations.len() <= 200 && told >= 1998, "{told}");
}

#[test]
fn rules_survive_their_file() {
    let rules = Rules::complete()
        .expect(S2, Expect::Breaks)
        .demand(Demand::Judged(S5, 3))
        .with(|r| r.bounds.takeover = Some(ms(100)));
    let text = serde_json::to_string(&rules).unwrap();
    assert_eq!(serde_json::from_str::<Rules>(&text).unwrap(), rules);
    assert!(serde_json::from_str::<Rules>(r#"{"drfit": 0.1}"#).is_err(), "a misspelt rule is no rule");
}

#[test]
fn the_readme_names_every_property() {
    let readme = include_str!("../../README.md");
    for property in lockcore_conformance::history::Property::ALL {
        let row = format!("| {property} {} | {} |", property.title(), property.sentence());
        assert!(readme.contains(&row), "the table lacks {row}");
        assert_eq!(property.id().parse(), Ok(*property));
    }
}
