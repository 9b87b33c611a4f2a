//! Changes that must not change the verdict.

use std::time::Duration;

use lockcore::backend::Moment;
use lockcore_conformance::history::{
    Access, Answer, Call, Event, History, Property, Report, Rules, Verdict, What, check,
};

use crate::{
    random::{Dice, Kinds, disturb, histories, legal, uses_before_it_knows},
    script::{Script, at, header, ms, stamp},
};

fn rules() -> Rules {
    Rules::complete().with(|r| r.queue = false)
}

fn count() -> u64 {
    histories(5_000)
}

/// A random history with beliefs, refusals and a resource; about half are illegal in one way or another.
fn history(n: u64) -> (Dice, Script) {
    let mut dice = Dice::new(40_000_000 + n);
    let mut script = legal(&mut dice, Kinds { refusals: true, deadlines: true });
    if dice.one_in(2) {
        disturb(&mut dice, &mut script);
    }
    for rseq in 0..dice.below(5) {
        let f = 11 + dice.below(6) as i64;
        let access = if dice.one_in(3) { Access::Read } else { Access::Write };
        let verdict = [Verdict::Accepted, Verdict::Stale, Verdict::Duplicate][dice.below(3) as usize];
        script.judged(rseq, &format!("w{}", dice.below(3)), stamp(f, f), access, verdict);
        script.events.last_mut().unwrap().ts = at(10 + rseq);
    }
    (dice, script)
}

fn judge(events: Vec<Event>) -> Report {
    check(&History::new(vec![header()], events), &rules())
}

/// What a verdict consists of, whatever its sentences say.
fn verdict(report: &Report) -> Vec<(Property, String)> {
    let mut all: Vec<_> = report.violations.iter().map(|v| (v.property, v.key.clone())).collect();
    all.sort();
    all
}

#[test]
fn shifting_all_stamps_changes_nothing() {
    let later = |m: Moment| m.saturating_add(Duration::from_secs(12345));
    for n in 0..count() {
        let (_, script) = history(n);
        let mut shifted = script.events.clone();
        for event in &mut shifted {
            event.ts = later(event.ts);
            if let What::Ok { answer: Answer { deadline: Some(deadline), .. } } = &mut event.what {
                *deadline = later(*deadline);
            }
        }
        let (before, after) = (judge(script.events), judge(shifted));
        assert_eq!(before, {
            // The sentences count from the start of the history, so even they stay; only the stamps moved.
            let mut after = after;
            for (v, b) in after.violations.iter_mut().zip(&before.violations) {
                v.events.clone_from(&b.events);
            }
            after
        });
    }
}

#[test]
fn permuting_simultaneous_events_changes_nothing() {
    for n in 0..count() {
        let (mut dice, script) = history(n);
        let mut shuffled = script.events.clone();
        for i in (1..shuffled.len()).rev() {
            shuffled.swap(i, dice.below(i as u64 + 1) as usize);
        }
        let (a, b) = (judge(script.events.clone()), judge(shuffled));
        assert_eq!(verdict(&a), verdict(&b), "history {n}\n{a}\n{b}\n{}", script.history().to_text());
    }
}

#[test]
fn renaming_clients_changes_nothing() {
    for n in 0..count() {
        let (_, script) = history(n);
        let mut renamed = script.events.clone();
        for event in &mut renamed {
            if !event.client.is_empty() {
                event.client = format!("zz-{}", event.client.chars().rev().collect::<String>());
            }
        }
        assert_eq!(verdict(&judge(script.events)), verdict(&judge(renamed)), "history {n}");
    }
}

#[test]
fn names_are_judged_apart() {
    for n in 0..count() {
        let (_, first) = history(2 * n);
        let (_, mut second) = history(2 * n + 1);
        for event in &mut second.events {
            event.key = "other".into();
            event.op = format!("second-{}", event.op);
            if let What::Invoke { call: Call::Acquire { owner, .. } } = &mut event.what {
                *owner = lockcore::OwnerDigest::from_i64(owner.to_i64() + 5000);
            }
            if let What::Ok { answer: Answer { owner: Some(owner), .. } } = &mut event.what {
                *owner = lockcore::OwnerDigest::from_i64(owner.to_i64() + 5000);
            }
        }
        let mut apart = verdict(&judge(first.events.clone()));
        apart.extend(verdict(&judge(second.events.clone())));
        apart.sort();
        let together = first.events.into_iter().chain(second.events).collect();
        assert_eq!(apart, verdict(&judge(together)), "history {n}");
    }
}

#[test]
fn widening_an_interval_never_turns_legal_into_illegal() {
    let mut widened = 0;
    for n in 0..4 * count() {
        let mut dice = Dice::new(80_000_000 + n);
        let mut script = legal(&mut dice, Kinds { refusals: true, deadlines: n % 2 == 0 });
        if dice.one_in(2) {
            disturb(&mut dice, &mut script);
        }
        // A deadline counts from the invocation, so that is left alone by not judging it.
        let milder = rules().expect(Property::S7, lockcore_conformance::history::Expect::NotJudged);
        let judge = |events: Vec<Event>| check(&History::new(vec![header()], events), &milder);
        if uses_before_it_knows(&script) || !check(&script.history(), &rules()).passed() {
            continue;
        }
        let mut wider = script.events.clone();
        let which = dice.below(wider.len() as u64) as usize;
        let by = ms(1 + dice.below(6));
        match &wider[which].what {
            What::Invoke { .. } => wider[which].ts = wider[which].ts.saturating_sub(by),
            What::Ok { .. } | What::Fail { .. } => wider[which].ts = wider[which].ts.saturating_add(by),
            _ => continue,
        }
        widened += 1;
        let report = judge(wider.clone());
        assert!(report.passed(), "history {n}: {report}\n{}", script.history().to_text());
    }
    assert!(widened > histories(4000), "{widened} were legal");
}
