//! The rule in memory: the register, and the value behind it.

use lockcore_fenced::{Fence, Fenced, OwnerDigest, Register, Stamp, Verdict};

fn stamp(fence: i64, owner: i64) -> Stamp {
    Stamp::new(Fence::new(fence).unwrap(), OwnerDigest::from_i64(owner))
}

#[test]
fn an_older_fence_is_refused_and_leaves_value_and_floor_intact() {
    let mut value = Fenced::new("none");
    assert_eq!(value.write(stamp(42, 2), "w1", |v| *v = "bob").unwrap(), Verdict::Accepted);
    let stale = value.write(stamp(41, 1), "w2", |v| *v = "alice").unwrap_err();
    assert_eq!(
        stale.to_string(),
        "stale fence 41.0000000000000001: the resource has seen 42.0000000000000002"
    );
    assert_eq!(*value.peek(), "bob");
    assert_eq!(value.register().floor(), Some(stamp(42, 2)));
}

#[test]
fn a_retry_is_a_duplicate_and_another_operation_of_the_same_holder_is_new() {
    let mut value = Fenced::new(0);
    assert_eq!(value.write(stamp(42, 2), "a", |v| *v += 1).unwrap(), Verdict::Accepted);
    assert_eq!(value.write(stamp(42, 2), "a", |v| *v += 1).unwrap(), Verdict::Duplicate);
    assert_eq!(value.write(stamp(42, 2), "b", |v| *v += 1).unwrap(), Verdict::Accepted);
    assert_eq!(*value.peek(), 2);
}

#[test]
fn an_equal_fence_of_another_owner_is_stale_whichever_digest_is_larger() {
    for (first, second) in [(1, 2), (2, 1), (0, -1)] {
        let mut register = Register::default();
        assert_eq!(register.admit(stamp(42, first), "a").unwrap(), Verdict::Accepted);
        register.admit(stamp(42, second), "a").unwrap_err();
        register.touch(stamp(42, second)).unwrap_err();
        assert_eq!(register.admit(stamp(42, first), "b").unwrap(), Verdict::Accepted);
    }
}

#[test]
fn a_read_keeps_older_holders_out_before_the_first_write() {
    let mut value = Fenced::new(5);
    assert_eq!(*value.read(stamp(42, 2)).unwrap(), 5);
    value.write(stamp(41, 1), "w", |v| *v -= 1).unwrap_err();
    value.read(stamp(41, 1)).unwrap_err();
    assert_eq!(value.write(stamp(42, 2), "w", |v| *v -= 1).unwrap(), Verdict::Accepted);
    assert_eq!(*value.peek(), 4);
}

#[test]
fn a_retry_after_a_takeover_learns_that_it_was_applied() {
    let mut register = Register::default();
    assert_eq!(register.admit(stamp(41, 1), "a").unwrap(), Verdict::Accepted);
    register.touch(stamp(42, 2)).unwrap();
    assert_eq!(register.admit(stamp(41, 1), "a").unwrap(), Verdict::Duplicate);
    register.admit(stamp(41, 1), "b").unwrap_err();
    assert_eq!(register.floor(), Some(stamp(42, 2)), "a duplicate under an old fence moved the floor");
}

#[test]
fn memory_holds_the_operations_of_two_holders() {
    let mut register = Register::default();
    for fence in 1..=1000 {
        for op in ["a", "b", "c"] {
            assert_eq!(register.admit(stamp(fence, 7), op).unwrap(), Verdict::Accepted);
        }
    }
    assert_eq!(register.operations().count(), 6);
}

#[test]
fn a_restart_goes_on_refusing_and_knowing() {
    let mut register = Register::default();
    assert_eq!(register.admit(stamp(41, 1), "a").unwrap(), Verdict::Accepted);
    assert_eq!(register.admit(stamp(42, 2), "b").unwrap(), Verdict::Accepted);
    // What a program would write to disk: text.
    let floor = register.floor().unwrap().to_string();
    let ops: Vec<(String, String)> =
        register.operations().map(|(stamp, op)| (stamp.to_string(), op.to_owned())).collect();

    let ops = ops.into_iter().map(|(stamp, op)| (stamp.parse().unwrap(), op));
    let mut back = Register::restore(Some(floor.parse().unwrap()), ops);
    assert_eq!(back, register);
    back.admit(stamp(41, 1), "c").unwrap_err();
    assert_eq!(back.admit(stamp(41, 1), "a").unwrap(), Verdict::Duplicate);
    assert_eq!(back.admit(stamp(42, 2), "b").unwrap(), Verdict::Duplicate);
}

#[test]
fn a_floor_that_was_saved_too_early_is_lifted_to_the_operations() {
    let back = Register::restore(Some(stamp(41, 1)), [(stamp(42, 2), "b")]);
    assert_eq!(back.floor(), Some(stamp(42, 2)));
}

#[test]
fn a_write_that_panics_is_not_a_duplicate_afterwards_but_keeps_older_holders_out() {
    let mut value = Fenced::new(0);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        value.write(stamp(42, 2), "a", |_| panic!("the disk is full")).is_ok()
    }));
    assert!(panicked.is_err());
    value.write(stamp(41, 1), "b", |v| *v = 9).unwrap_err();
    assert_eq!(value.write(stamp(42, 2), "a", |v| *v = 1).unwrap(), Verdict::Accepted);
    assert_eq!(*value.peek(), 1);
}

#[test]
fn fences_are_exact_to_the_end_of_the_range() {
    for fence in [(1 << 53) - 1, 1 << 53, i64::MAX - 1] {
        let mut register = Register::default();
        register.touch(stamp(fence, 1)).unwrap();
        register.touch(stamp(fence + 1, 2)).unwrap();
        register.touch(stamp(fence, 1)).unwrap_err();
    }
}

/// Two stale holders in a chain, waking in reverse order.
#[test]
fn every_former_holder_is_refused_in_whatever_order_they_wake() {
    let mut value = Fenced::new(Vec::new());
    assert_eq!(value.write(stamp(43, 3), "c", |v| v.push(43)).unwrap(), Verdict::Accepted);
    for late in [42, 41, 42] {
        value.write(stamp(late, late), "late", |v| v.push(late)).unwrap_err();
    }
    assert_eq!(*value.peek(), [43]);
}
