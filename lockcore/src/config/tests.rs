use std::{sync::Arc, time::Duration};

use proptest::prelude::*;

use super::*;
use crate::{
    backend::{Consistency, FenceSource, LockBackend, WakeUp, async_trait},
    error::{Error, ErrorKind, Result},
};

/// Takes some schemes, knows the option `colour`, and cannot reach anything.
pub(super) struct Paper(pub(super) &'static [&'static str]);

#[async_trait]
impl Connector for Paper {
    fn schemes(&self) -> &'static [&'static str] {
        self.0
    }
    fn check(&self, config: &BackendConfig) -> Result<()> {
        let mut options = config.options()?;
        for known in ["colour", "wait-replicas", "wait-timeout", "ca-file"] {
            options.text(known)?;
        }
        options.finish()
    }
    async fn connect(&self, _config: &BackendConfig) -> Result<Arc<dyn LockBackend>> {
        Err(Error::new(ErrorKind::Unavailable, "it is made of paper"))
    }
}

fn toy() -> Registry {
    Registry::new().with(Paper(&["toy"]))
}

fn read(text: &str) -> Config {
    toml::from_str(text).unwrap_or_else(|e| panic!("{text}\n{e}"))
}

fn problems(text: &str) -> Vec<String> {
    read(text).problems(&toy()).iter().map(ToString::to_string).collect()
}

const SAMPLE: &str = r#"
# locks.toml: which store each risk runs on. One level a table, one key a line.
namespace = "shop-prod"                  # required: keeps deployments apart that share a store

[backend]
cache = "redis://redis-a:6379/0"         # short form: a URL without a password

[backend.redis]
url     = "redis+sentinel://sentinel-1,sentinel-2,sentinel-3/shop"
options = { wait-replicas = "majority", wait-timeout = "500ms" }   # what only Redis has

[backend.etcd]
url           = "etcds://etcd-1,etcd-2,etcd-3"
user          = "locks"
password-file = "/run/secrets/etcd-locks"
options       = { ca-file = "/etc/ssl/etcd-ca.pem" }

[bridge.moving]                          # two stores as one, while locks move
from  = "redis"
to    = "etcd"
phase = "both"

[risk.efficiency]                        # double work is only a waste
backend          = "cache"
ttl              = "30s"
wait             = "2s"
start            = "lazy"
when-unavailable = "allow-open"

[risk.guarded]                           # the resource checks the fence
backend  = "moving"
ttl      = "30s"
wait     = "10s"
max-hold = "30m"

[risk.critical]                          # linearizable, durable fence, fails closed
backend     = "etcd"
ttl         = "15s"
wait        = "10s"
max-hold    = "10m"
stop-margin = "2s"
require     = { fair = true }

[lock."payout/*"]                        # numbers only; the longest match wins
max-hold   = "2m"
lock-delay = "5s"
"#;

#[test]
fn the_recommended_file_is_read_as_it_says() {
    let config = read(SAMPLE);
    assert_eq!(config.namespace, "shop-prod");
    let redis = &config.backend["redis"];
    assert_eq!(redis.url.hosts().len(), 3);
    assert_eq!(redis.options["wait-timeout"], OptionValue::Text("500ms".into()));
    let etcd = &config.backend["etcd"];
    assert_eq!(etcd.user.as_deref(), Some("locks"));
    assert_eq!(etcd.password_file.as_deref(), Some(std::path::Path::new("/run/secrets/etcd-locks")));
    assert_eq!(config.bridge["moving"].phase, Phase::Both);
    let cache = &config.risk["efficiency"];
    assert_eq!((cache.start, cache.when_unavailable), (Start::Lazy, WhenUnavailable::AllowOpen));
    let critical = &config.risk["critical"];
    assert_eq!(critical.start, Start::Strict);
    assert_eq!(critical.stop_margin, Some(Duration::from_secs(2)));
    assert!(critical.require.fair);
    let payout = config.numbers(&LockName::parse("payout/7").unwrap()).unwrap();
    assert_eq!(payout.max_hold, Some(Duration::from_secs(120)));

    let registry = Registry::new().with(Paper(&["redis", "redis+sentinel"])).with(Paper(&["etcds"]));
    assert_eq!(config.problems(&registry), []);
}

#[test]
fn a_configuration_survives_being_written() {
    let config = read(SAMPLE);
    let text = toml::to_string(&config).unwrap();
    assert_eq!(read(&text), config, "{text}");
    assert!(text.contains("cache = \"redis://redis-a:6379/0\""), "the short form stays short: {text}");
}

#[test]
fn a_file_that_cannot_be_read_is_answered_with_line_key_and_what_is_right() {
    let nested = |text: &str| format!("port=1\n[locks]\nnamespace='x'\n{text}");
    #[derive(Debug, serde::Deserialize)]
    #[allow(dead_code)]
    struct AppConfig {
        port: u16,
        locks: Config,
    }
    for (text, line, says) in [
        (
            nested("[locks.risk.critical]\nbackend='c'\nmax-holt='5m'\n"),
            "6 | max-holt='5m'",
            "unknown field `max-holt`, expected one of `backend`, `ttl`, `wait`, `max-hold`",
        ),
        (
            nested("[locks.backend.c]\nurl='toy://x'\npasword-file='/x'\n"),
            "6 | pasword-file='/x'",
            "unknown field `pasword-file`, expected one of `url`, `user`, `password-file`",
        ),
        (
            nested("[locks.risk.critical]\nbackend='c'\nttl=30\n"),
            "6 | ttl=30",
            "invalid type: integer `30`, expected a duration with a unit, like \"30s\" or \"250ms\"",
        ),
        (
            nested("[locks.risk.critical]\nbackend='c'\nttl='30 sec'\n"),
            "6 | ttl='30 sec'",
            "\"30 sec\" is not a duration; write a number and a unit (ms, s, m, h, d), like \"30s\"",
        ),
        (
            nested("[locks.risk.critical]\nbackend='c'\nttl='30'\n"),
            "6 | ttl='30'",
            "\"30\" has no unit; write \"30s\" for seconds or \"30ms\" for milliseconds",
        ),
        (
            nested("[locks.backend]\nc='sqlite://x.db'\n"),
            "5 | c='sqlite://x.db'",
            "sqlite://x.db makes \"x.db\" a host; a file has three slashes",
        ),
        (nested("[locks.backend]\nc=5\n"), "5 | c=5", "expected a store's URL, or a table with a `url`"),
        (nested("[locks.backend.c]\nuser='x'\n"), "4 | [locks.backend.c]", "missing field `url`"),
        (
            nested("[locks.backend.c]\nurl='toy://x'\noptions={ a = [1] }\n"),
            "6 | options={ a = [1] }",
            "expected text, a number, true or false",
        ),
        (
            nested("[locks.risk.x]\nbackend='c'\nstart='later'\n"),
            "6 | start='later'",
            "unknown variant `later`, expected `strict` or `lazy`",
        ),
        (
            nested("[locks.risk.x]\nbackend='c'\nrequire={ fense='durable' }\n"),
            "6 | require={ fense",
            "unknown field `fense`",
        ),
        (
            nested("[locks.risk.x]\nbackend='c'\nrequire={ fence='strong' }\n"),
            "6 | require={ fence",
            "unknown variant `strong`, expected one of `volatile`, `clock-bounded`, `durable`",
        ),
        (
            nested("[locks.risk.x]\nbackend='c'\n[locks.risk.x]\nbackend='d'\n"),
            "6 | [locks.risk.x]",
            "duplicate key",
        ),
        (nested("[locks.lock.'a/*']\nlevel='critical'\n"), "5 | level='critical'", "unknown field `level`"),
        ("port=1\n[locks]\nbackend={}\n".into(), "2 | [locks]", "missing field `namespace`"),
    ] {
        let error = toml::from_str::<AppConfig>(&text).unwrap_err().to_string();
        assert!(error.contains(line) && error.contains(says), "wanted {line} … {says}, got\n{error}");
    }
}

#[test]
fn a_password_is_refused_in_a_file_and_never_shown() {
    let text = "namespace='x'\n[backend]\nc='toy://me:hunter2@host/0'\n";
    assert_eq!(problems(text), ["backend.c.url: holds a password; use password-file or password-env"]);
    let secret =
        "namespace='x'\n[backend.c]\nurl='toy://h?tls-password=hunter2'\noptions={ password='hunter2' }\n";
    assert_eq!(
        problems(secret),
        [
            "backend.c.url: holds a password; use password-file or password-env",
            "backend.c.options.password: holds a secret; use password-file or password-env",
        ]
    );
    for text in [text, secret] {
        let config = read(text);
        let shown = format!("{config:?}\n{config:#?}\n{}", toml::to_string(&config).unwrap());
        assert!(!shown.contains("hunter2") && shown.contains("***"), "{shown}");
    }
}

#[test]
fn every_problem_is_reported_with_its_path_and_what_would_be_right() {
    for (text, expected) in [
        (
            "namespace=''",
            vec!["namespace: is required; it keeps deployments apart that share a store, like \"shop-prod\""],
        ),
        ("namespace='a/b'", vec!["namespace: a namespace is made of A-Z a-z 0-9 . _ and -, not '/'"]),
        (
            "namespace='x'\n[backend]\nc='redis://host/0'",
            vec!["backend.c.url: scheme \"redis\" is not compiled in; have toy"],
        ),
        (
            "namespace='x'\n[risk.critical]\nbackend='etcd'",
            vec![
                "risk.critical.backend: \"etcd\" is not defined; have none",
                "risk.critical.max-hold: is required at this level",
            ],
        ),
        (
            "namespace='x'\n[backend]\na='toy://'\nb='toy://'\n[risk.guarded]\nbackend='c'\nmax-hold='1m'",
            vec!["risk.guarded.backend: \"c\" is not defined; have a, b"],
        ),
        (
            "namespace='x'\n[backend.c]\nurl='toy://me@h'\nuser='me'\npassword-file='a/b'\npassword-env='X'",
            vec![
                "backend.c.user: stands in the URL, too; once is enough",
                "backend.c.password-env: stands beside password-file; use one of them",
                "backend.c.password-file: is relative; write an absolute path, or one name below $CREDENTIALS_DIRECTORY",
            ],
        ),
        (
            "namespace='x'\n[backend.c]\nurl='toy://h'\noptions={ color='red' }",
            vec![
                "backend.c: the option \"color\" is not known here; have colour, wait-replicas, wait-timeout, ca-file",
            ],
        ),
        (
            "namespace='x'\n[backend.c]\nurl='toy://h?colour=red'\noptions={ colour='red' }",
            vec!["backend.c: \"colour\" stands in `options` and in the URL; once is enough"],
        ),
        (
            "namespace='x'\n[backend]\nc='toy://'\n[risk.critical]\nbackend='c'\nmax-hold='0s'\nstart='lazy'\n\
             when-unavailable='allow-open'\nrequire={ fence='clock-bounded', consistency='replicated' }",
            vec![
                "risk.critical.start: must be \"strict\" at this level",
                "risk.critical.require.consistency: \"replicated\" lowers what this level demands (\"linearizable\"); \
                 a weaker level needs a name of its own",
                "risk.critical.require.fence: \"clock-bounded\" lowers what this level demands (\"durable\"); a weaker \
                 level needs a name of its own",
                "risk.critical.when-unavailable: cannot be \"allow-open\" at a level that demands a fence: who goes on \
                 without the lock has none",
                "risk.critical.max-hold: must be more than zero",
            ],
        ),
        (
            "namespace='x'\n[backend]\nc='toy://'\n[risk.own]\nbackend='c'\nwhen-unavailable='allow-open'\n\
             require={ fence='durable' }\nttl='0'",
            vec![
                "risk.own.when-unavailable: cannot be \"allow-open\" at a level that demands a fence: who goes on \
                 without the lock has none",
                "risk.own.ttl: must be more than zero",
            ],
        ),
        (
            "namespace='x'\n[backend]\nc='toy://'\n[risk.critcal]\nbackend='c'",
            vec![
                "risk.critcal: is not the built-in level \"critical\" and has none of its demands; a level of your \
                 own needs a name that nobody can mistake for it",
            ],
        ),
        (
            "namespace='x'\n[backend]\nc='toy://'\n[risk.own]\nbackend='c'\nstop-margin='30s'\n\
             [risk.other]\nbackend='c'\nttl='2s'\nstop-margin='3s'",
            vec![
                "risk.other.stop-margin: leaves nothing of a TTL of 2s",
                "risk.own.stop-margin: leaves nothing of a TTL of 30s",
            ],
        ),
        (
            "namespace='x'\n[lock.'*']\n[lock.'a*']\n[lock.'a//b']\n[lock.'a/*']\nttl='0'\n[lock.ok]\n",
            vec![
                "lock.\"*\": is neither a name nor `prefix/*`; numbers for all locks of a level stand at the level",
                "lock.\"a*\": is neither a name nor `prefix/*`; numbers for all locks of a level stand at the level",
                "lock.\"a/*\".ttl: must be more than zero",
                "lock.\"a//b\": segment 2 of a lock name is empty",
            ],
        ),
    ] {
        assert_eq!(problems(text), expected, "{text}");
    }
}

#[test]
fn bridges_need_two_stores_that_exist_and_may_not_lead_back() {
    assert_eq!(
        problems(
            "namespace='x'\n[backend]\na='toy://'\nb='toy://b'\nc='toy://b'\n\
             [bridge.a]\nfrom='a'\nto='a'\nphase='from'\n\
             [bridge.m]\nfrom='b'\nto='n'\nphase='both'\n\
             [bridge.n]\nfrom='m'\nto='b'\nphase='to'\n\
             [bridge.o]\nfrom='p'\nto='z'\nphase='to'\n\
             [bridge.p]\nfrom='b'\nto='c'\nphase='to'\nmembership='0'\n\
             [bridge.'q r']\nfrom='a'\nto='b'\nphase='to'"
        ),
        [
            "bridge.a: has the name of a backend; a level could mean either",
            "bridge.a.to: is the store that locks come from; a bridge needs two",
            "bridge.m: leads back to itself",
            "bridge.n: leads back to itself",
            "bridge.o.from: is a bridge; it joins two stores, so end one move before the next",
            "bridge.o.to: \"z\" is not defined; have a, b, c, m, n, o, p, q r",
            "bridge.p.to: has the address of the store that locks come from; a bridge needs two",
            "bridge.p.membership: must be more than zero",
            "bridge.\"q r\": the name of a migration is 1 to 64 bytes of `A-Z a-z 0-9 . _ -`, not \"q r\"",
        ]
    );
}

#[test]
fn no_ttl_is_longer_than_a_membership_of_its_bridge() {
    let text = |level: &str, bridge: &str, lock: &str| {
        format!(
            "namespace='x'\n[backend]\na='toy://a'\nb='toy://b'\n\
             [bridge.m]\nfrom='a'\nto='b'\nphase='both'\n{bridge}\n[risk.own]\nbackend='m'\n{level}\n{lock}"
        )
    };
    let after = " is longer than a membership of bridge.m, which lasts ";
    for (level, bridge, lock, says) in [
        ("ttl='10m'", "", "", format!("risk.own.ttl: 10m (lock-delay included){after}1m; ")),
        (
            "ttl='50s'\nlock-delay='20s'",
            "",
            "",
            format!("risk.own.ttl: 1m10s (lock-delay included){after}1m; "),
        ),
        ("", "membership='20s'", "", format!("risk.own.ttl: 30s (lock-delay included){after}20s; ")),
        ("", "", "[lock.x]\nttl='2m'", format!("lock.x.ttl: 2m (lock-delay included){after}1m; ")),
    ] {
        let found = problems(&text(level, bridge, lock));
        assert!(found.len() == 1 && found[0].starts_with(&says), "{found:?} is not {says:?}");
    }
    assert_eq!(problems(&text("ttl='10m'", "membership='15m'", "")), [""; 0]);
    assert_eq!(problems(&text("", "", "")), [""; 0]);
}

#[test]
fn the_longest_match_gives_the_numbers() {
    let config =
        read("namespace='x'\n[lock.'a/*']\nttl='1s'\n[lock.'a/b/*']\nttl='2s'\n[lock.'a/b/c']\nttl='3s'\n");
    for (name, seconds) in [
        ("a", None),
        ("a/x", Some(1)),
        ("a/b", Some(1)),
        ("a/b/x", Some(2)),
        ("a/b/c", Some(3)),
        ("a/b/c/d", Some(2)),
        ("b", None),
    ] {
        let numbers = config.numbers(&LockName::parse(name).unwrap());
        assert_eq!(numbers.and_then(|n| n.ttl), seconds.map(Duration::from_secs), "{name}");
    }
}

#[tokio::test]
async fn a_registry_answers_for_its_schemes_only() {
    let config = |url: &str| BackendConfig::new(StoreUrl::parse(url).unwrap());
    let registry = toy().with(Paper(&["a", "b"]));
    assert_eq!(registry.schemes().collect::<Vec<_>>(), ["toy", "a", "b"]);
    let error = registry.connect(&config("b://h")).await.unwrap_err();
    assert_eq!(error.to_string(), "connect to b: it is made of paper");
    let error = registry.connect(&config("c://h")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misconfigured);
    assert_eq!(error.to_string(), "scheme \"c\" is not compiled in; have toy, a, b");
    let error = registry.connect(&config("a://h?color=red")).await.unwrap_err();
    assert!(error.to_string().contains("\"color\" is not known here"), "{error}");

    let twice = toy().with(Paper(&["other", "toy"]));
    let error = twice.connect(&config("toy://h")).await.unwrap_err();
    assert_eq!(error.to_string(), "scheme \"toy\" is taken by two connectors; register one of them");
    let error = twice.connect(&config("other://h")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

#[test]
fn demands_are_written_in_the_words_of_the_capabilities() {
    let config = read(
        "namespace='x'\n[risk.own]\nbackend='c'\n\
         require={ consistency='single-server', fence='durable', wake-up='push', fair=true, survives=['restart','clock-step'] }",
    );
    let demands = Demands::of("own", &config.risk["own"]);
    assert_eq!(demands.consistency, Consistency::SingleServer);
    assert_eq!(demands.fence, FenceSource::Durable);
    assert_eq!(demands.wake_up, WakeUp::Push);
    assert!(demands.survives.restart && demands.survives.clock_step && !demands.survives.failover);
}

// Words that the structs know, and some that they do not, so that random files get past the first key.
fn key() -> impl Strategy<Value = String> {
    let known: Vec<String> = "namespace backend bridge risk lock url user password-file password-env options from to phase membership \
         ttl wait max-hold stop-margin lock-delay start when-unavailable require consistency fence wake-up fair survives \
         efficiency guarded critical critcal a b"
        .split(' ')
        .map(Into::into)
        .collect();
    prop_oneof![8 => proptest::sample::select(known), 1 => "\\PC{0,6}"]
}

fn value() -> impl Strategy<Value = toml::Value> {
    let known: Vec<String> = [
        "30s",
        "5m",
        "0",
        "1h1h",
        "toy://h",
        "toy://me:x@h?a=1",
        "sqlite://x",
        "both",
        "lazy",
        "durable",
        "a",
        "b",
        "allow-open",
    ]
    .map(Into::into)
    .into();
    let leaf = prop_oneof![
        6 => proptest::sample::select(known).prop_map(toml::Value::String),
        1 => "\\PC{0,12}".prop_map(toml::Value::String),
        1 => any::<i64>().prop_map(toml::Value::Integer),
        1 => any::<bool>().prop_map(toml::Value::Boolean),
        1 => any::<f64>().prop_map(toml::Value::Float),
    ];
    leaf.prop_recursive(4, 40, 8, |inner| {
        prop_oneof![
            4 => proptest::collection::btree_map(key(), inner.clone(), 0..6)
                .prop_map(|map| toml::Value::Table(map.into_iter().collect())),
            1 => proptest::collection::vec(inner, 0..3).prop_map(toml::Value::Array),
        ]
    })
}

fn level() -> impl Strategy<Value = toml::Value> {
    let number = proptest::sample::select(vec!["0", "1s", "30s", "2h", "500ms"]);
    (
        proptest::sample::select(vec!["a", "b", "m", "z"]),
        proptest::collection::btree_map(
            proptest::sample::select(vec!["ttl", "wait", "max-hold", "stop-margin", "lock-delay"]),
            number,
            0..5,
        ),
    )
        .prop_map(|(backend, numbers)| {
            let mut table = toml::Table::new();
            table.insert("backend".into(), backend.into());
            table.extend(numbers.into_iter().map(|(k, v)| (k.to_owned(), v.into())));
            toml::Value::Table(table)
        })
}

proptest! {
    #[test]
    fn no_file_makes_the_reader_panic(value in value()) {
        if let Ok(config) = value.clone().try_into::<Config>() {
            let _ = config.problems(&toy());
        }
        if let Ok(text) = toml::to_string(&value)
            && let Ok(config) = toml::from_str::<Config>(&text)
        {
            let _ = format!("{config:?}");
        }
    }

    #[test]
    fn well_formed_files_survive_being_written(
        levels in proptest::collection::btree_map(key(), level(), 0..4),
        locks in proptest::collection::vec(key(), 0..3),
    ) {
        let mut table = toml::Table::new();
        table.insert("namespace".into(), "n".into());
        table.insert("risk".into(), toml::Value::Table(levels.into_iter().collect()));
        let empty = || toml::Value::Table(toml::Table::new());
        table.insert("lock".into(), toml::Value::Table(locks.into_iter().map(|k| (k, empty())).collect()));
        let config: Config = table.try_into().unwrap();
        let _ = config.problems(&toy());
        let text = toml::to_string(&config).unwrap();
        prop_assert_eq!(toml::from_str::<Config>(&text).unwrap(), config);
    }
}
