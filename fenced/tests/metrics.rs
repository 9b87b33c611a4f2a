//! What an operator counts.

#![cfg(feature = "metrics")]

use lockcore_fenced::{Fence, OwnerDigest, Register, Stamp, Verdict, sql};
use metrics_util::debugging::{DebugValue, DebuggingRecorder};

#[test]
fn refused_writes_are_counted_and_looks_are_not() {
    let recorder = DebuggingRecorder::new();
    let seen = recorder.snapshotter();
    let stamp = |fence| Stamp::new(Fence::new(fence).unwrap(), OwnerDigest::from_i64(fence));
    metrics::with_local_recorder(&recorder, || {
        let mut register = Register::default();
        assert_eq!(register.admit(stamp(42), "a").unwrap(), Verdict::Accepted);
        register.peek(stamp(41)).unwrap_err();
        register.admit(stamp(41), "b").unwrap_err();
        register.touch(stamp(41)).unwrap_err();
        sql::judge(stamp(41), Some((42, 42))).unwrap_err();
    });
    let mut counts: Vec<(String, u64)> = seen
        .snapshot()
        .into_vec()
        .into_iter()
        .map(|(key, _, _, value)| {
            assert_eq!(key.key().name(), "lock_stale_refused_total");
            let place = key.key().labels().next().unwrap().value().to_owned();
            match value {
                DebugValue::Counter(n) => (place, n),
                other => panic!("{other:?}"),
            }
        })
        .collect();
    counts.sort();
    assert_eq!(counts, [("register".to_owned(), 2), ("sql".to_owned(), 1)]);
}
