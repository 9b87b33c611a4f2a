//! For every property a minimal bad history, and its nearest good neighbour.

use lockcore_conformance::history::{
    Access::{Read, Write},
    Answer, Bounds, Call, Ended, FaultClass, Phase,
    Property::*,
    Rules, Seen,
    Verdict::{Accepted, Duplicate, Stale},
    What, Why,
};

use crate::script::{Script, TTL, at, fence, header, ms, owner, stamp};

fn rules() -> Rules {
    Rules::complete().with(|r| r.queue = false)
}

fn bounds(set: impl FnOnce(&mut Bounds)) -> Rules {
    rules().with(|r| set(&mut r.bounds))
}

/// Alice held fence 1 until her deadline at 300, and Bob has fence 2 from 311 on.
fn taken_over() -> Script {
    let mut s = Script::new();
    s.grant("alice", 1, 0, 1).grant("bob", 2, 310, 311);
    s
}

#[test]
fn s1_a_later_grant_with_a_lower_fence_is_found() {
    let with = |second| {
        let mut s = Script::new();
        s.grant("alice", 5, 0, 1).release("alice", 5, 10, 11, true).grant("bob", second, 20, 21);
        s
    };
    let report = with(3).breaks(&rules(), &[S1]);
    assert!(report.to_string().contains("bob began to acquire at +0.020000 s and got fence 3"), "{report}");
    with(6).keeps(&rules(), S1);
}

#[test]
fn s1_a_fence_granted_twice_is_found() {
    let with = |second| {
        let mut s = Script::new();
        s.grant("alice", 5, 0, 1).tries("bob", 77, 310).granted("bob", 77, 311, second, 610);
        s
    };
    with(5).breaks(&rules(), &[S1]);
    with(6).keeps(&rules(), S1);
}

#[test]
fn s1_a_break_takes_a_fence_of_its_own() {
    let with = |second| {
        let mut s = Script::new();
        s.grant("alice", 5, 0, 1);
        s.fault(9, "break", "k", FaultClass::A6, Phase::Begin).fault(
            9,
            "break",
            "k",
            FaultClass::A6,
            Phase::End,
        );
        s.call(10, "operator", "b1", Call::Break { stamp: stamp(5, 5) });
        s.ok(11, "operator", "b1", Answer { fence: Some(fence(7)), ..Answer::default() });
        s.lost("alice", 5, 12, Ended::Broken).grant("bob", second, 20, 21);
        s
    };
    with(6).breaks(&rules(), &[S1]);
    with(8).keeps(&rules(), S1);
}

#[test]
fn s1q_a_waiter_served_after_a_higher_fence_is_found() {
    let with = |second| {
        let mut s = Script::new();
        s.waits("bob", 9, 0, 1000).grant("alice", 5, 5, 6).release("alice", 5, 20, 21, true);
        s.granted("bob", 9, 22, second, 300);
        s
    };
    with(3).breaks(&rules(), &[S1q]);
    with(6).keeps(&rules(), S1q);
}

#[test]
fn s2_two_believers_are_found() {
    let with = |released: bool| {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1);
        if released {
            s.release("alice", 1, 100, 101, true);
        }
        s.grant("bob", 2, 100, 101);
        s
    };
    let report = with(false).breaks(&rules(), &[S2]);
    assert!(report.to_string().contains("both believed that they held it from +0.101000 s to +0.300000 s"));
    with(true).keeps(&rules(), S2);
}

#[test]
fn s2_a_renewal_moves_the_deadline_only_when_its_answer_is_there() {
    // The renewal was sent in time; until its answer came at 320, Alice did not believe beyond 300.
    let mut s = Script::new();
    s.grant("alice", 1, 0, 1).renew("alice", 1, 100, 290).grant("bob", 2, 380, 381);
    s.breaks(&rules(), &[S2]);
    let mut s = Script::new();
    s.grant("alice", 1, 0, 1).renew("alice", 1, 100, 290).grant("bob", 2, 398, 400);
    s.keeps(&rules(), S2);
}

#[test]
fn s3_a_release_of_an_older_lease_that_ends_something_is_found() {
    for (now, bad) in [(true, true), (false, false)] {
        let mut s = taken_over();
        s.release("alice", 1, 320, 321, now);
        if bad { drop(s.breaks(&rules(), &[S3])) } else { drop(s.keeps(&rules(), S3)) }
    }
}

#[test]
fn s3_a_lease_that_dies_of_a_foreign_release_is_found() {
    let mut s = taken_over();
    s.release("alice", 1, 320, 321, false);
    let mut good = s.clone();
    s.renewal_is_lost("bob", 2, 340, 341).breaks(&rules(), &[S3]);
    good.renew("bob", 2, 340, 341).keeps(&rules(), S3);

    let mut gone = taken_over();
    gone.release("alice", 1, 320, 321, false);
    let mut there = gone.clone();
    gone.probe(330, 331, Some(Seen::Nobody), None).breaks(&rules(), &[S3]);
    there.probe(330, 331, Some(Seen::Owner(owner(2))), None).keeps(&rules(), S3);
}

#[test]
fn s3_says_nothing_where_the_store_may_have_forgotten() {
    let mut s = taken_over();
    s.release("alice", 1, 320, 321, false);
    s.fault(330, "delete", "k", FaultClass::A6, Phase::Begin).fault(
        331,
        "delete",
        "k",
        FaultClass::A6,
        Phase::End,
    );
    s.renewal_is_lost("bob", 2, 340, 341).keeps(&rules(), S3);
}

#[test]
fn s4_an_older_holder_that_gets_through_is_found() {
    for (verdict, bad) in [(Accepted, true), (Stale, false)] {
        let mut s = Script::new();
        s.judged(1, "w1", stamp(2, 2), Write, Accepted).judged(2, "w2", stamp(1, 1), Write, verdict);
        if bad { drop(s.breaks(&rules(), &[S4])) } else { drop(s.keeps(&rules(), S4)) }
    }
}

#[test]
fn s4_an_equal_fence_of_another_owner_is_an_older_holder() {
    for (verdict, bad) in [(Accepted, true), (Stale, false)] {
        let mut s = Script::new();
        s.judged(1, "w1", stamp(2, 2), Write, Accepted).judged(2, "w2", stamp(2, 3), Write, verdict);
        if bad { drop(s.breaks(&rules(), &[S4])) } else { drop(s.keeps(&rules(), S4)) }
    }
}

#[test]
fn s4_an_operation_applied_twice_is_found() {
    for (verdict, bad) in [(Accepted, true), (Duplicate, false)] {
        let mut s = Script::new();
        s.judged(1, "w1", stamp(2, 2), Write, Accepted).judged(2, "w1", stamp(2, 2), Write, verdict);
        if bad { drop(s.breaks(&rules(), &[S4])) } else { drop(s.keeps(&rules(), S4)) }
    }
}

#[test]
fn s4_a_duplicate_that_was_never_applied_is_found() {
    let mut s = Script::new();
    s.judged(1, "w1", stamp(2, 2), Write, Accepted).judged(2, "w2", stamp(2, 2), Write, Duplicate);
    s.breaks(&rules(), &[S4]);
}

#[test]
fn s4_the_newest_holder_is_not_refused() {
    for (f, bad) in [(2, true), (3, true), (1, false)] {
        let mut s = Script::new();
        s.judged(1, "w1", stamp(2, 2), Write, Accepted).judged(2, "w2", stamp(f, f), Write, Stale);
        if bad { drop(s.breaks(&rules(), &[S4])) } else { drop(s.keeps(&rules(), S4)) }
    }
}

#[test]
fn s4_a_floor_that_goes_back_is_found() {
    for (floor, bad) in [(1, true), (2, false)] {
        let mut s = Script::new();
        s.resource(1, "w1", stamp(2, 2), Write, Accepted, Some(stamp(2, 2)), None);
        s.resource(2, "w2", stamp(1, 1), Write, Stale, Some(stamp(floor, 2)), None);
        if bad { drop(s.breaks(&rules(), &[S4])) } else { drop(s.keeps(&rules(), S4)) }
    }
}

#[test]
fn s4_two_operations_on_one_place_are_found() {
    let mut s = Script::new();
    s.judged(1, "w1", stamp(2, 2), Write, Accepted).judged(1, "w2", stamp(2, 2), Write, Accepted);
    s.breaks(&rules(), &[S4]);
}

#[test]
fn s5_a_stale_renewal_that_is_confirmed_is_found() {
    let mut bad = taken_over();
    bad.release("bob", 2, 315, 316, true);
    let mut good = bad.clone();
    bad.renew("alice", 1, 320, 321).breaks(&rules(), &[S5]);
    good.renewal_is_lost("alice", 1, 320, 321).keeps(&rules(), S3);
    // A renewal that overlaps the takeover may have come first.
    let mut overlaps = Script::new();
    overlaps.grant("alice", 1, 0, 1).renew("alice", 1, 290, 312).grant("bob", 2, 291, 311);
    overlaps.release("bob", 2, 311, 312, true).keeps(&rules(), S5);
}

#[test]
fn s6_a_renewal_after_a_release_is_found() {
    let mut s = Script::new();
    s.grant("alice", 1, 0, 1).release("alice", 1, 10, 11, true).renew("alice", 1, 20, 21);
    s.breaks(&rules(), &[S6]);
    let mut s = Script::new();
    s.grant("alice", 1, 0, 1).release("alice", 1, 10, 20, true).renew("alice", 1, 20, 21).keeps(&rules(), S6);
}

#[test]
fn s6_a_second_effective_release_is_found() {
    for (again, bad) in [(true, true), (false, false)] {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1).release("alice", 1, 10, 11, true).release("alice", 1, 20, 21, again);
        if bad { drop(s.breaks(&rules(), &[S6])) } else { drop(s.keeps(&rules(), S6)) }
    }
}

#[test]
fn s6_a_lease_that_is_over_by_the_stores_own_word_stays_so() {
    let mut s = Script::new();
    s.grant("alice", 1, 0, 1).renewal_is_lost("alice", 1, 10, 11);
    let mut released = s.clone();
    s.renew("alice", 1, 20, 21).breaks(&rules(), &[S6]);
    released.release("alice", 1, 20, 21, true).breaks(&rules(), &[S6]);
}

#[test]
fn s6_a_renewal_after_the_loss_was_told_is_found() {
    let mut s = Script::new();
    s.grant("alice", 1, 0, 1).lost("alice", 1, 300, Ended::Expired);
    let mut good = s.clone();
    s.renew("alice", 1, 310, 311).breaks(&rules(), &[S6]);
    good.renewal_is_lost("alice", 1, 310, 311).keeps(&rules(), S3);
}

#[test]
fn s6_a_renewal_after_a_look_that_showed_it_gone_is_found() {
    for (seen, bad) in
        [(Seen::Nobody, true), (Seen::Owner(owner(9)), true), (Seen::Stamp(stamp(1, 1)), false)]
    {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1).probe(10, 11, Some(seen), None).renew("alice", 1, 20, 21);
        if bad { drop(s.breaks(&rules(), &[S6])) } else { drop(s.keeps(&rules(), S6)) }
    }
}

#[test]
fn s6_a_recovery_that_adopts_a_released_lease_is_found() {
    let with = |asked: u64| {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1).release("alice", 1, 10, 20, true);
        s.call(asked, "alice", "a1", Call::Resolve).granted("alice", 1, asked + 1, 1, 300);
        s
    };
    with(30).breaks(&rules(), &[S6]);
    with(15).keeps(&rules(), S6);
}

#[test]
fn s7_a_deadline_beyond_what_was_granted_is_found() {
    let with = |deadline, wire| {
        let mut s = Script::new();
        s.tries("alice", 1, 0).add(10, "alice", "a1", What::Sent { wire });
        s.granted("alice", 1, 20, 1, deadline);
        s
    };
    // Alice read her clock between the announcement and the wire; on the wire there is no slack.
    with(10 + TTL + 1, true).breaks(&rules(), &[S7]);
    with(10 + TTL, true).keeps(&rules(), S7);
    with(10 + TTL + 6, false).breaks(&rules(), &[S7]);
    with(10 + TTL + 5, false).keeps(&rules(), S7);
    let drift = rules().with(|r| r.drift = 0.01);
    with(10 + TTL, true).breaks(&drift, &[S7]);
    with(10 + TTL - 3, true).keeps(&drift, S7);
}

#[test]
fn s7_a_deadline_from_the_reply_is_found_for_the_attempt_that_was_answered() {
    let with = |answered: u32| {
        let mut s = Script::new();
        s.tries("alice", 1, 0);
        for (attempt, ts) in [(1, 0), (2, 200)] {
            s.add(ts, "alice", "a1", What::Sent { wire: true });
            s.events.last_mut().unwrap().attempt = attempt;
        }
        s.granted("alice", 1, 210, 1, 500);
        s.events.last_mut().unwrap().attempt = answered;
        s
    };
    with(1).breaks(&rules(), &[S7]);
    with(2).keeps(&rules(), S7);
}

#[test]
fn s7_a_success_with_nothing_left_is_found() {
    let with = |ok| {
        let mut s = Script::new();
        s.grant("alice", 1, 0, ok);
        s
    };
    with(TTL).breaks(&rules(), &[S7]);
    with(TTL - 1).keeps(&rules(), S7);
    let least = rules().with(|r| r.min_remaining = ms(30));
    with(TTL - 29).breaks(&least, &[S7]);
    with(TTL - 30).keeps(&least, S7);
}

#[test]
fn s7_a_renewal_that_shortens_is_found() {
    let with = |deadline| {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1);
        let op = s.begins_renewal("alice", 1, 10);
        s.ok(11, "alice", &op, Answer::renewed(at(deadline), Some(ms(TTL))));
        s
    };
    with(299).breaks(&rules(), &[S7]);
    with(300).keeps(&rules(), S7);
}

#[test]
fn s7_a_deadline_beyond_what_the_server_has_left_is_found() {
    let with = |remaining| {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1);
        let what = What::Probe {
            since: at(99),
            holder: Some(Seen::Stamp(stamp(1, 1))),
            remaining: Some(ms(remaining)),
            residue: None,
            records: None,
            server_time: None,
            counter: None,
        };
        s.add(100, "", "", what);
        s
    };
    with(198).breaks(&rules(), &[S7]);
    with(199).keeps(&rules(), S7);
}

#[test]
fn s7_a_clock_that_stops_in_a_suspend_is_found() {
    let mut s = Script::new();
    s.grant("alice", 1, 0, 1);
    let mut history = s.history();
    history.headers = vec![header()];
    history.headers[0].clock = lockcore_conformance::history::ClockKind::Monotonic;
    let report = lockcore_conformance::history::check(&history, &rules());
    assert_eq!(report.broken(), [S7], "{report}");
}

#[test]
fn s8_two_grants_of_one_operation_are_found() {
    let with = |second| {
        let mut s = Script::new();
        s.tries("alice", 1, 0).unknown(10, "alice", "a1");
        s.call(20, "alice", "a1", Call::Resolve).granted("alice", 1, 21, 1, 300);
        s.call(30, "alice", "a1", Call::Resolve).granted("alice", 1, 31, second, 300);
        s
    };
    with(2).breaks(&rules(), &[S8]);
    with(1).keeps(&rules(), S8);
}

#[test]
fn s8_a_grant_for_another_owner_is_found() {
    let mut s = Script::new();
    s.tries("alice", 1, 0).ok(1, "alice", "a1", Answer::granted(stamp(1, 2), at(300), Some(ms(TTL))));
    s.breaks(&rules(), &[S8]);
}

#[test]
fn s9_a_shared_owner_is_found() {
    let with = |second| {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1).release("alice", 1, 10, 11, true);
        s.call(20, "bob", "other", Call::Acquire { owner: owner(second), ttl: ms(TTL), wait: None });
        s.ok(21, "bob", "other", Answer::granted(stamp(2, second), at(320), Some(ms(TTL))));
        s
    };
    with(1).breaks(&rules(), &[S9]);
    with(2).keeps(&rules(), S9);
}

#[test]
fn s9_an_owner_shown_in_full_is_found() {
    for (shown, bad) in [("00112233445566778899aabbccddeeff", true), ("8899aabbccddeeff", false)] {
        let mut s = Script::new();
        s.tries("alice", 1, 0);
        s.add(1, "alice", "a1", What::Unknown { cause: format!("GET lock: {shown}") });
        if bad { drop(s.breaks(&rules(), &[S9])) } else { drop(s.keeps(&rules(), S9)) }
    }
}

#[test]
fn s10_a_loss_that_nobody_told_is_found() {
    let guarded = rules().with(|r| r.loss_notice = Some(ms(50)));
    let with = |told: Option<u64>| {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1);
        if let Some(told) = told {
            s.lost("alice", 1, told, Ended::Expired);
        }
        s.checks("alice", 1, 400, 401, false);
        s
    };
    with(None).breaks(&guarded, &[S10]);
    with(Some(351)).breaks(&guarded, &[S10]);
    with(Some(350)).keeps(&guarded, S10);
}

#[test]
fn s10_a_paused_client_is_told_when_it_runs_again() {
    let guarded = rules().with(|r| r.loss_notice = Some(ms(50)));
    let with = |told| {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1).fault(100, "pause", "alice", FaultClass::A1, Phase::Begin);
        s.fault(900, "pause", "alice", FaultClass::A1, Phase::End).lost("alice", 1, told, Ended::Expired);
        s
    };
    with(951).breaks(&guarded, &[S10]);
    with(950).keeps(&guarded, S10);
}

#[test]
fn s10_a_loss_that_did_not_happen_is_found() {
    let with = |ts, why| {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1).lost("alice", 1, ts, why);
        s
    };
    with(299, Ended::Expired).breaks(&rules(), &[S10]);
    with(300, Ended::Expired).keeps(&rules(), S10);
    with(100, Ended::Taken).breaks(&rules(), &[S10]);
    let mut stolen = Script::new();
    stolen.grant("alice", 1, 0, 1).fault(50, "delete", "k", FaultClass::A6, Phase::Begin);
    stolen.fault(51, "delete", "k", FaultClass::A6, Phase::End).lost("alice", 1, 100, Ended::Taken);
    stolen.keeps(&rules(), S10);
}

#[test]
fn s11_a_guard_that_says_yes_too_late_is_found() {
    let with = |asked| {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1).checks("alice", 1, asked, 310, true);
        s
    };
    with(300).breaks(&rules(), &[S11]);
    with(299).keeps(&rules(), S11);
    let margin = rules().with(|r| r.stop_margin = ms(20));
    with(280).breaks(&margin, &[S11]);
    with(279).keeps(&margin, S11);
}

#[test]
fn s11_a_guard_that_says_yes_after_a_loss_is_found() {
    for (held, bad) in [(true, true), (false, false)] {
        let mut s = Script::new();
        s.fault(0, "cut", "server", FaultClass::A1, Phase::Begin);
        s.grant("alice", 1, 0, 1).lost("alice", 1, 100, Ended::Taken).checks("alice", 1, 110, 111, held);
        s.checks("alice", 1, 90, 91, true);
        if bad { drop(s.breaks(&rules(), &[S11])) } else { drop(s.keeps(&rules(), S11)) }
    }
}

#[test]
fn s12_a_failure_that_had_its_effect_is_found() {
    let with = |honest: bool| {
        let mut s = Script::new();
        s.tries("alice", 1, 0).tries("bob", 2, 50).fail(51, "bob", "a2", Why::Unavailable);
        if honest {
            s.unknown(10, "alice", "a1")
        } else {
            s.fail(10, "alice", "a1", Why::Unavailable)
        };
        s.probe(20, 21, Some(Seen::Owner(owner(1))), None);
        s
    };
    with(false).breaks(&rules(), &[S12]);
    with(true).keeps(&rules(), S12);
}

#[test]
fn s12_a_grant_after_a_failure_is_found() {
    let mut s = Script::new();
    s.tries("alice", 1, 0).fail(10, "alice", "a1", Why::Unavailable);
    s.call(20, "alice", "a1", Call::Resolve).granted("alice", 1, 21, 1, 300);
    s.breaks(&rules(), &[S12]);
}

#[test]
fn s12_a_refused_write_that_was_applied_is_found() {
    for (verdict, bad) in [(Accepted, true), (Stale, false)] {
        let mut s = Script::new();
        s.judged(1, "w0", stamp(2, 2), Write, Accepted).judged(
            5,
            "w1",
            stamp(2 - i64::from(!bad), 2),
            Write,
            verdict,
        );
        s.call(4, "alice", "w1", Call::Write { fence: fence(2), value: None }).fail(
            6,
            "alice",
            "w1",
            Why::Stale,
        );
        if bad { drop(s.breaks(&rules(), &[S12])) } else { drop(s.keeps(&rules(), S12)) }
    }
}

#[test]
fn s13_a_refusal_without_a_holder_is_found() {
    let with = |asked| {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1).release("alice", 1, 10, 11, true);
        s.tries("bob", 2, asked).fail(20, "bob", "a2", Why::Held);
        s
    };
    with(12).breaks(&rules(), &[S13]);
    with(11).keeps(&rules(), S13);
}

#[test]
fn s13_an_acquire_without_an_answer_may_hold() {
    let with = |unknown: bool| {
        let mut s = Script::new();
        s.tries("alice", 1, 0);
        if unknown {
            s.unknown(5, "alice", "a1")
        } else {
            s.fail(5, "alice", "a1", Why::Unavailable)
        };
        s.tries("bob", 2, 12).fail(20, "bob", "a2", Why::Held);
        s
    };
    with(false).breaks(&rules(), &[S13]);
    with(true).keeps(&rules(), S13);
}

#[test]
fn s13_a_place_in_the_queue_refuses_where_the_store_has_a_queue() {
    let mut s = Script::new();
    s.tries("alice", 1, 0).tries("bob", 2, 1);
    s.fail(10, "alice", "a1", Why::Held).fail(10, "bob", "a2", Why::Held);
    s.breaks(&rules(), &[S13]);
    s.keeps(&rules().with(|r| r.queue = true), S13);
}

#[test]
fn s14_a_write_behind_a_newer_reader_is_found() {
    for (verdict, bad) in [(Accepted, true), (Stale, false)] {
        let mut s = Script::new();
        s.judged(1, "r1", stamp(2, 2), Read, Accepted).judged(2, "w1", stamp(1, 1), Write, verdict);
        if bad { drop(s.breaks(&rules(), &[S14])) } else { drop(s.keeps(&rules(), S14)) }
    }
}

#[test]
fn s14_a_read_that_leaves_the_floor_is_found() {
    for (floor, bad) in [(1, true), (2, false)] {
        let mut s = Script::new();
        s.resource(1, "r1", stamp(2, 2), Read, Accepted, Some(stamp(floor, 2)), None);
        if bad { drop(s.breaks(&rules(), &[S14])) } else { drop(s.keeps(&rules(), S14)) }
    }
}

#[test]
fn s14_a_lost_update_of_a_counter_is_found() {
    let counter = rules().with(|r| r.counter = true);
    for (value, bad) in [(6, true), (7, false)] {
        let mut s = Script::new();
        s.resource(1, "r1", stamp(1, 1), Read, Accepted, None, Some(5));
        s.resource(2, "w1", stamp(1, 1), Write, Accepted, None, Some(6));
        s.resource(3, "w2", stamp(2, 2), Write, Accepted, None, Some(value));
        if bad { drop(s.breaks(&counter, &[S14])) } else { drop(s.keeps(&counter, S14)) }
    }
}

#[test]
fn s15_a_name_that_changes_by_itself_is_found() {
    for (seen, bad) in [(Seen::Owner(owner(7)), true), (Seen::Nobody, false)] {
        let mut s = Script::new();
        s.on("other").probe(0, 1, Some(Seen::Nobody), None);
        s.on("k").grant("alice", 1, 2, 3);
        s.on("other").probe(10, 11, Some(seen), None);
        if bad { drop(s.breaks(&rules(), &[S15])) } else { drop(s.keeps(&rules(), S15)) }
    }
}

#[test]
fn s15_a_lease_that_runs_out_changes_by_itself() {
    for (ts, bad) in [(290, true), (300, false)] {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1).probe(10, 11, Some(Seen::Owner(owner(1))), None);
        s.on("other").tries("bob", 2, 20).fail(21, "bob", "a2", Why::Unavailable);
        s.on("k").probe(ts - 1, ts, Some(Seen::Nobody), None);
        if bad { drop(s.breaks(&rules(), &[S15])) } else { drop(s.keeps(&rules(), S15)) }
    }
}

#[test]
fn s16_a_second_answer_is_found() {
    let mut s = Script::new();
    s.grant("alice", 1, 0, 1);
    s.keeps(&rules(), S16);
    s.granted("alice", 1, 2, 1, 300).breaks(&rules(), &[S16]);
}

#[test]
fn s16_an_answer_without_a_call_is_found() {
    let mut s = Script::new();
    s.fail(1, "alice", "a1", Why::Held).breaks(&rules(), &[S16]);
}

#[test]
fn s16_an_answer_after_the_caller_gave_up_is_found() {
    for (cancelled, bad) in [(5, true), (30, false)] {
        let mut s = Script::new();
        s.tries("alice", 1, 0).granted("alice", 1, 10, 1, 300).call(cancelled, "alice", "a1", Call::Cancel);
        if bad { drop(s.breaks(&rules(), &[S16])) } else { drop(s.keeps(&rules(), S16)) }
    }
}

#[test]
fn s16_a_sign_of_life_after_closing_is_found() {
    for (ts, bad) in [(30, true), (20, false)] {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1).call(10, "alice", "x", Call::Close).ok(20, "alice", "x", Answer::default());
        s.lost("alice", 1, ts, Ended::Closed);
        if bad { drop(s.breaks(&rules(), &[S16])) } else { drop(s.keeps(&rules(), S16)) }
    }
}

#[test]
fn l1_a_late_takeover_is_found() {
    let rules = bounds(|b| b.takeover = Some(ms(100)));
    let with = |ok| {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1).waits("bob", 2, 10, 10_000).granted("bob", 2, ok, 2, ok + 250).note(900);
        s
    };
    // The lease may have begun as late as its answer, so it has run out by 301.
    with(402).breaks(&rules, &[L1]);
    with(401).keeps(&rules, L1);
}

#[test]
fn l1_is_demanded_only_after_the_last_fault() {
    let rules = bounds(|b| b.takeover = Some(ms(100)));
    let with = |healed| {
        let mut s = Script::new();
        s.fault(5, "cut", "server", FaultClass::A1, Phase::Begin);
        s.fault(healed, "cut", "server", FaultClass::A1, Phase::End);
        s.grant("alice", 1, 0, 1).waits("bob", 2, 10, 10_000).granted("bob", 2, 500, 2, 750).note(900);
        s
    };
    with(399).breaks(&rules, &[L1]);
    with(400).keeps(&rules, L1);
}

#[test]
fn l2_a_late_hand_off_is_found() {
    let rules = bounds(|b| b.wake = Some(ms(100)));
    let with = |ok| {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1).waits("bob", 2, 10, 10_000).release("alice", 1, 50, 51, true);
        s.granted("bob", 2, ok, 2, ok + 250).note(900);
        s
    };
    with(152).breaks(&rules, &[L2]);
    with(151).keeps(&rules, L2);
}

#[test]
fn l3_a_waiter_of_a_free_lock_is_found() {
    let rules = bounds(|b| b.quiet = Some(ms(100)));
    let with = |end| {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1).waits("bob", 2, 10, 10_000).release("alice", 1, 50, 51, true).note(end);
        s
    };
    with(152).breaks(&rules, &[L3]);
    with(151).keeps(&rules, L3);
}

#[test]
fn l4_a_record_that_stays_is_found() {
    let rules = bounds(|b| b.residue = Some(ms(50)));
    let with = |since| {
        let mut s = Script::new();
        s.waits("bob", 2, 0, 100).fail(100, "bob", "a2", Why::WaitTimeout).probe(
            since,
            since + 1,
            None,
            Some(1),
        );
        s
    };
    with(151).breaks(&rules, &[L4]);
    with(150).keeps(&rules, L4);
}

#[test]
fn l5_an_overtaken_waiter_is_found() {
    let with = |queued| {
        let mut s = Script::new();
        s.waits("alice", 1, 0, 9000).add(queued, "alice", "a1", What::Queued).waits("bob", 2, 10, 9000);
        s.granted("bob", 2, 20, 1, 300).release("bob", 1, 30, 31, true);
        s.granted("alice", 1, 40, 2, 300);
        s.events.retain(|e| !e.op.starts_with('q'));
        s.call(30, "bob", "q", Call::Release { fence: fence(1), owner: Some(owner(2)) });
        s.ok(31, "bob", "q", Answer { released: Some(true), ..Answer::default() });
        s
    };
    with(9).breaks(&bounds(|b| b.fair = true), &[L5]);
    with(10).keeps(&bounds(|b| b.fair = true), L5);
    assert_eq!(with(9).keeps(&rules(), S1).judged.bypasses, 1, "an unfair store has its bypasses counted");
}

#[test]
fn l6_an_acquire_that_outstays_its_budget_is_found() {
    let rules = bounds(|b| {
        b.wait_slack = Some(ms(20));
        b.call_timeout = Some(ms(200));
    });
    let with = |back| {
        let mut s = Script::new();
        s.waits("bob", 2, 0, 100).fail(back, "bob", "a2", Why::WaitTimeout);
        s
    };
    with(121).breaks(&rules, &[L6]);
    with(120).keeps(&rules, L6);
    let with = |back| {
        let mut s = Script::new();
        s.tries("bob", 2, 0).fail(back, "bob", "a2", Why::Unavailable);
        s
    };
    with(201).breaks(&rules, &[L6]);
    with(200).keeps(&rules, L6);
    let mut never = Script::new();
    never.tries("bob", 2, 0).note(201).breaks(&rules, &[L6]);
}

#[test]
fn l7_a_lease_that_is_not_kept_is_found() {
    let rules = bounds(|b| b.steady_ttls = Some(2));
    let with = |renewals: &[u64]| {
        let mut s = Script::new();
        s.grant("alice", 1, 0, 1);
        for &inv in renewals {
            s.renew("alice", 1, inv, inv + 20);
        }
        s.note(900);
        s
    };
    with(&[100, 200, 300]).breaks(&rules, &[L7]);
    with(&[100, 200, 301]).keeps(&rules, L7);
    // The last two overlap.
    with(&[100, 200, 301, 320]).breaks(&rules, &[L7]);
    let mut lost = with(&[100, 200, 301]);
    lost.lost("alice", 1, 601, Ended::Expired).breaks(&rules, &[L7]);
}

#[test]
fn l8_waiters_that_knock_too_often_or_in_step_are_found() {
    let with = |gaps: &[u64]| {
        let mut s = Script::new();
        s.waits("bob", 2, 0, 1000);
        let mut ts = 0;
        for gap in gaps {
            ts += gap;
            s.add(ts, "bob", "a2", What::Sent { wire: false });
        }
        s.fail(1000, "bob", "a2", Why::WaitTimeout);
        s
    };
    let often = bounds(|b| b.requests_per_waiter_second = Some(7.0));
    with(&[100; 9]).breaks(&often, &[L8]);
    with(&[100; 8]).keeps(&often, L8);
    let jitter = bounds(|b| b.jitter = true);
    with(&[100; 8]).breaks(&jitter, &[L8]);
    with(&[100, 90, 110, 95, 105, 100, 100, 97]).keeps(&jitter, L8);
    let mut s = Script::new();
    s.grant("alice", 1, 0, 2);
    for ts in [0, 1, 1] {
        s.add(ts, "alice", "a1", What::Sent { wire: false });
    }
    s.breaks(&bounds(|b| b.requests_per_grant = Some(2.0)), &[L8]);
    s.keeps(&bounds(|b| b.requests_per_grant = Some(3.0)), L8);
}

#[test]
fn l9_a_slow_or_unclean_shutdown_is_found() {
    let rules = bounds(|b| b.close = Some(ms(1000)));
    let with = |took: u64, left| {
        let mut s = Script::new();
        let look = |since: u64, records| What::Probe {
            since: at(since),
            holder: None,
            remaining: None,
            residue: None,
            records: Some(records),
            server_time: None,
            counter: None,
        };
        s.add(0, "", "", look(0, 3));
        s.call(10, "alice", "x", Call::Close).ok(10 + took, "alice", "x", Answer::default());
        s.add(5000, "", "", look(5000, left));
        s
    };
    with(1001, 3).breaks(&rules, &[L9]);
    with(1000, 4).breaks(&rules, &[L9]);
    with(1000, 3).keeps(&rules, L9);
}

#[test]
fn l10_a_store_that_stays_away_is_found() {
    let rules = bounds(|b| b.recovery = Some(ms(50)));
    let with = |asked| {
        let mut s = Script::new();
        s.fault(0, "restart", "server", FaultClass::A2, Phase::Begin);
        s.fault(100, "restart", "server", FaultClass::A2, Phase::End);
        s.tries("alice", 1, asked).fail(asked + 1, "alice", "a1", Why::Unavailable);
        s.tries("alice", 2, 200).granted("alice", 2, 201, 2, 500);
        s
    };
    with(150).breaks(&rules, &[L10]);
    with(149).keeps(&rules, L10);
}
