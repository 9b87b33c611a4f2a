//! Histories written by hand, in milliseconds.

use std::time::Duration;

use lockcore::{Fence, OwnerDigest, Stamp, backend::Moment};
use lockcore_conformance::history::{
    Access, Answer, Call, Ended, Event, FaultClass, Header, History, Phase, Property, Report, Rules, Seen,
    Verdict, What, Why, check,
};

pub(crate) const TTL: u64 = 300;

/// A history in the making. Owners are numbered like the fences that they get, unless said otherwise.
#[derive(Clone, Debug, Default)]
pub(crate) struct Script {
    pub(crate) key: String,
    pub(crate) events: Vec<Event>,
    ops: u32,
}

pub(crate) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(crate) fn at(ms: u64) -> Moment {
    Moment::from_nanos(3_600_000_000_000 + ms * 1_000_000)
}

pub(crate) fn fence(n: i64) -> Fence {
    Fence::new(n).unwrap()
}

pub(crate) fn owner(n: i64) -> OwnerDigest {
    OwnerDigest::from_i64(n)
}

pub(crate) fn stamp(f: i64, o: i64) -> Stamp {
    Stamp::new(fence(f), owner(o))
}

pub(crate) fn header() -> Header {
    serde_json::from_str(r#"{"schema":"lockcore-history","version":1,"clock":"boot","pid":1}"#).unwrap()
}

impl Script {
    pub(crate) fn new() -> Self {
        Self { key: "k".into(), ..Self::default() }
    }

    pub(crate) fn history(&self) -> History {
        History::new(vec![header()], self.events.clone())
    }

    pub(crate) fn on(&mut self, key: &str) -> &mut Self {
        self.key = key.into();
        self
    }

    pub(crate) fn add(&mut self, ts: u64, client: &str, op: &str, what: What) -> &mut Self {
        self.events.push(Event {
            ts: at(ts),
            pid: 1,
            client: client.into(),
            key: self.key.clone(),
            op: op.into(),
            attempt: 0,
            what,
        });
        self
    }

    pub(crate) fn call(&mut self, ts: u64, client: &str, op: &str, call: Call) -> &mut Self {
        self.add(ts, client, op, What::Invoke { call })
    }

    pub(crate) fn ok(&mut self, ts: u64, client: &str, op: &str, answer: Answer) -> &mut Self {
        self.add(ts, client, op, What::Ok { answer })
    }

    pub(crate) fn fail(&mut self, ts: u64, client: &str, op: &str, why: Why) -> &mut Self {
        self.add(ts, client, op, What::Fail { why })
    }

    pub(crate) fn unknown(&mut self, ts: u64, client: &str, op: &str) -> &mut Self {
        self.add(ts, client, op, What::Unknown { cause: "connection reset".into() })
    }

    /// A try, as operation `a<owner>`.
    pub(crate) fn tries(&mut self, client: &str, o: i64, ts: u64) -> &mut Self {
        self.call(ts, client, &format!("a{o}"), Call::Acquire { owner: owner(o), ttl: ms(TTL), wait: None })
    }

    /// An acquire that waits, as operation `a<owner>`.
    pub(crate) fn waits(&mut self, client: &str, o: i64, ts: u64, wait: u64) -> &mut Self {
        let call = Call::Acquire { owner: owner(o), ttl: ms(TTL), wait: Some(ms(wait)) };
        self.call(ts, client, &format!("a{o}"), call)
    }

    /// The answer to `a<owner>`.
    pub(crate) fn granted(&mut self, client: &str, o: i64, ts: u64, f: i64, deadline: u64) -> &mut Self {
        let answer = Answer::granted(stamp(f, o), at(deadline), Some(ms(TTL)));
        self.ok(ts, client, &format!("a{o}"), answer)
    }

    /// A try that is granted; the owner has the fence's number.
    pub(crate) fn grant(&mut self, client: &str, f: i64, inv: u64, ok: u64) -> &mut Self {
        self.tries(client, f, inv).granted(client, f, ok, f, inv + TTL)
    }

    fn next_op(&mut self, verb: &str) -> String {
        self.ops += 1;
        format!("{verb}{}-{}", self.ops, self.key)
    }

    pub(crate) fn begins_renewal(&mut self, client: &str, f: i64, inv: u64) -> String {
        let op = self.next_op("r");
        self.call(inv, client, &op, Call::Renew { fence: fence(f), owner: Some(owner(f)), ttl: ms(TTL) });
        op
    }

    pub(crate) fn renew(&mut self, client: &str, f: i64, inv: u64, ok: u64) -> &mut Self {
        let op = self.begins_renewal(client, f, inv);
        self.ok(ok, client, &op, Answer::renewed(at(inv + TTL), Some(ms(TTL))))
    }

    pub(crate) fn renewal_is_lost(&mut self, client: &str, f: i64, inv: u64, done: u64) -> &mut Self {
        let op = self.begins_renewal(client, f, inv);
        self.fail(done, client, &op, Why::Lost)
    }

    pub(crate) fn begins_release(&mut self, client: &str, f: i64, inv: u64) -> String {
        let op = self.next_op("q");
        self.call(inv, client, &op, Call::Release { fence: fence(f), owner: Some(owner(f)) });
        op
    }

    pub(crate) fn release(&mut self, client: &str, f: i64, inv: u64, ok: u64, now: bool) -> &mut Self {
        let op = self.begins_release(client, f, inv);
        self.ok(ok, client, &op, Answer { released: Some(now), ..Answer::default() })
    }

    pub(crate) fn lost(&mut self, client: &str, f: i64, ts: u64, why: Ended) -> &mut Self {
        self.add(ts, client, "", What::Lost { fence: fence(f), owner: Some(owner(f)), why })
    }

    pub(crate) fn checks(&mut self, client: &str, f: i64, inv: u64, ok: u64, held: bool) -> &mut Self {
        let op = self.next_op("c");
        self.call(inv, client, &op, Call::Check { fence: fence(f), owner: Some(owner(f)) });
        self.ok(ok, client, &op, Answer::held(held))
    }

    pub(crate) fn judged(
        &mut self,
        rseq: u64,
        op: &str,
        stamp: Stamp,
        access: Access,
        verdict: Verdict,
    ) -> &mut Self {
        self.resource(rseq, op, stamp, access, verdict, None, None)
    }

    #[expect(clippy::too_many_arguments, reason = "a judgement has that many parts")]
    pub(crate) fn resource(
        &mut self,
        rseq: u64,
        op: &str,
        stamp: Stamp,
        access: Access,
        verdict: Verdict,
        floor: Option<Stamp>,
        value: Option<i64>,
    ) -> &mut Self {
        let what = What::Resource { resource: String::new(), rseq, stamp, access, verdict, floor, value };
        self.add(rseq, "", op, what)
    }

    pub(crate) fn fault(
        &mut self,
        ts: u64,
        name: &str,
        target: &str,
        class: FaultClass,
        phase: Phase,
    ) -> &mut Self {
        let key = std::mem::take(&mut self.key);
        let what = What::Fault {
            name: name.into(),
            target: target.into(),
            phase,
            class,
            confirmed_by: "probe".into(),
        };
        self.add(ts, "", "", what);
        self.key = key;
        self
    }

    pub(crate) fn probe(
        &mut self,
        since: u64,
        ts: u64,
        seen: Option<Seen>,
        residue: Option<u64>,
    ) -> &mut Self {
        let what = What::Probe {
            since: at(since),
            holder: seen,
            remaining: None,
            residue,
            records: None,
            server_time: None,
            counter: None,
        };
        self.add(ts, "", "", what)
    }

    pub(crate) fn note(&mut self, ts: u64) -> &mut Self {
        self.add(ts, "", "", What::Note { text: "the end".into() })
    }

    /// Demands that exactly these properties are broken, and that the report names the key.
    #[track_caller]
    pub(crate) fn breaks(&self, rules: &Rules, properties: &[Property]) -> Report {
        let report = check(&self.history(), rules);
        assert_eq!(report.broken(), properties, "{report}");
        assert!(!report.passed());
        for violation in &report.violations {
            assert!(!violation.events.is_empty(), "nothing shows it: {violation}");
            assert!(!violation.says.is_empty());
        }
        report
    }

    /// Demands that nothing is broken, and that the property was put to the test at all.
    #[track_caller]
    pub(crate) fn keeps(&self, rules: &Rules, property: Property) -> Report {
        let report = check(&self.history(), rules);
        assert!(report.passed(), "{report}");
        assert!(report.judged.properties.contains_key(&property), "{property} was not tested: {report:?}");
        report
    }
}
