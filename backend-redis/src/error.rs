//! What the server or the client library says, and what is known then.

use lockcore::backend::{Error, ErrorKind};
use redis::{ErrorKind as Said, RedisError, ServerErrorKind as Refused};

/// How far a request had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The connection was being made; no request of a verb had been handed to it.
    Connect,
    /// The request was handed to the connection, and may have reached the server.
    Sent,
}

/// Turns what the client library says into what is known.
pub(crate) fn error(phase: Phase, source: RedisError) -> Error {
    let (kind, message) = sort(phase, &source);
    Error::new(kind, message).with_source(source)
}

/// Decides, arm by arm.
///
/// The server says no before it does anything: a script is refused as a whole, or at its first write. What is not an
/// answer of the server is `Unknown` once the request was handed over, because the client library tells "never sent"
/// and "sent, and the reply was lost" by the same error.
///
/// # Source
/// redis 1.8.1, `errors/`; Redis 7.0, `script_lua.c`, `server.c`.
fn sort(phase: Phase, said: &RedisError) -> (ErrorKind, &'static str) {
    use ErrorKind as K;
    let in_doubt = match phase {
        Phase::Connect => K::Unavailable,
        Phase::Sent => K::Unknown,
    };
    match said.kind() {
        Said::Server(refused) => match refused {
            Refused::NoScript => (K::Unavailable, "the server does not know the script"),
            Refused::ReadOnly => (K::Unavailable, "the server is a replica and takes no writes"),
            Refused::BusyLoading => (K::Unavailable, "the server still loads its data"),
            Refused::MasterDown => (K::Unavailable, "the server is a replica without its master"),
            Refused::TryAgain => {
                (K::Unavailable, "the slot of this lock moves to another node of the Cluster")
            }
            Refused::ClusterDown => (K::Unavailable, "the Cluster is down: a majority or a slot is missing"),
            Refused::Moved | Refused::Ask | Refused::CrossSlot => (
                K::Misconfigured,
                "the server is a node of a Cluster; write redis+cluster:// to use all of it",
            ),
            Refused::NoPerm => (K::Unauthorized, "the server's access list forbids it"),
            // Answers to commands that are not sent here; as every refusal, they did nothing.
            Refused::ExecAbort | Refused::NotBusy | Refused::NoSub => {
                (K::Unavailable, "the server refused the request")
            }
            Refused::ResponseError => response_error(phase, said),
            // A refusal that this version of the client library gave no name yet when this was written.
            _ => (in_doubt, "the server answered with an error of a new kind"),
        },
        // The first word of the answer, where the client library has no name for it.
        Said::Extension => match said.code() {
            Some("OOM") => (K::Unavailable, "the server's memory is full"),
            Some("MISCONF") => (K::Unavailable, "the server cannot write its disk and takes no writes"),
            Some("NOREPLICAS") => (K::Unavailable, "the server has too few replicas and takes no writes"),
            Some("BUSY") => (K::Unavailable, "the server is busy with somebody's script"),
            Some("NOAUTH" | "WRONGPASS") => (K::Unauthorized, "the server refused the credentials"),
            Some("DENIED") => (K::Unauthorized, "the server is in protected mode and takes no remote users"),
            Some("NOPROTO") => {
                (K::Misconfigured, "the server does not speak RESP3; Redis 6.2 or later is needed")
            }
            Some("WRONGTYPE") => (K::Misconfigured, "a key of this lock holds something that is not ours"),
            Some(_) | None => (in_doubt, "the server answered with an error"),
        },
        Said::Io => match phase {
            Phase::Connect => (K::Unavailable, "the server cannot be reached"),
            Phase::Sent if said.is_timeout() => (K::Unknown, "the server did not answer in time"),
            Phase::Sent => (K::Unknown, "the connection was lost before an answer"),
        },
        Said::AuthenticationFailed => (K::Unauthorized, "the server refused the credentials"),
        Said::InvalidClientConfig => (K::Misconfigured, "the client library refused the configuration"),
        Said::RESP3NotSupported => {
            (K::Misconfigured, "the server does not speak RESP3; Redis 6.2 or later is needed")
        }
        Said::Parse | Said::UnexpectedReturnType => match phase {
            Phase::Connect => (K::Misconfigured, "what answers there does not speak as Redis does"),
            Phase::Sent => (K::Unknown, "the answer could not be read"),
        },
        Said::Client => (in_doubt, "the client library gave up"),
        Said::MasterNameNotFoundBySentinel
        | Said::NoValidReplicasFoundBySentinel
        | Said::EmptySentinelList
        | Said::ClusterConnectionNotFound => (in_doubt, "the client library gave up"),
        // The client library may grow kinds; nothing is known about them.
        _ => (in_doubt, "the client library failed in a new way"),
    }
}

/// `ERR …`: anything from a misspelt command to a script that failed half-way, told apart by its text.
fn response_error(phase: Phase, said: &RedisError) -> (ErrorKind, &'static str) {
    let text = said.detail().unwrap_or_default();
    if text.contains("OOM command not allowed") {
        return (ErrorKind::Unavailable, "the server's memory is full");
    }
    if text.contains("max number of clients") {
        return (ErrorKind::Unavailable, "the server has too many clients");
    }
    if text.starts_with("unknown command") {
        return (ErrorKind::Misconfigured, "the server lacks a command; Redis 6.2 or later is needed");
    }
    if text.contains("AUTH") && phase == Phase::Connect {
        return (ErrorKind::Unauthorized, "the server refused the credentials");
    }
    match phase {
        Phase::Connect => (ErrorKind::Misconfigured, "the server refused the greeting"),
        Phase::Sent => (ErrorKind::Unknown, "the server answered with an error"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(line: &str) -> RedisError {
        let bytes = format!("-{line}\r\n");
        let value = redis::parse_redis_value(bytes.as_bytes()).unwrap();
        match value {
            redis::Value::ServerError(error) => error.into(),
            other => panic!("{line} was read as {other:?}"),
        }
    }

    #[test]
    fn every_refusal_of_the_server_has_its_kind() {
        use ErrorKind::*;
        for (line, kind) in [
            ("NOSCRIPT No matching script", Unavailable),
            (
                "READONLY You can't write against a read only replica. script: 1, on @user_script:1.",
                Unavailable,
            ),
            ("LOADING Redis is loading the dataset in memory", Unavailable),
            ("MASTERDOWN Link with MASTER is down", Unavailable),
            ("TRYAGAIN Multiple keys request during rehashing of slot", Unavailable),
            ("CLUSTERDOWN Hash slot not served", Unavailable),
            ("MOVED 1 127.0.0.1:1", Misconfigured),
            ("ASK 1 127.0.0.1:1", Misconfigured),
            ("CROSSSLOT Keys in request don't hash to the same slot", Misconfigured),
            ("NOPERM this user has no permissions", Unauthorized),
            ("EXECABORT Transaction discarded", Unavailable),
            ("OOM command not allowed when used memory > 'maxmemory'.", Unavailable),
            (
                "ERR Error running script: OOM command not allowed when used memory > 'maxmemory'.",
                Unavailable,
            ),
            ("MISCONF Redis is configured to save RDB snapshots", Unavailable),
            ("NOREPLICAS Not enough good replicas to write.", Unavailable),
            ("BUSY Redis is busy running a script.", Unavailable),
            ("NOAUTH Authentication required.", Unauthorized),
            ("WRONGPASS invalid username-password pair", Unauthorized),
            ("DENIED Redis is running in protected mode", Unauthorized),
            ("NOPROTO unsupported protocol version", Misconfigured),
            ("WRONGTYPE Operation against a key", Misconfigured),
            ("ERR unknown command 'EVALSHA'", Misconfigured),
            ("ERR max number of clients reached", Unavailable),
            ("ERR user_script:1: attempt to compare nil with number", Unknown),
            ("NEWCODE something", Unknown),
        ] {
            let error = error(Phase::Sent, server(line));
            assert_eq!(error.kind(), kind, "{line}: {error:?}");
        }
        assert_eq!(error(Phase::Connect, server("ERR DB index is out of range")).kind(), Misconfigured);
        assert_eq!(error(Phase::Connect, server("NEWCODE something")).kind(), Unavailable);
    }

    #[test]
    fn a_connection_that_drops_after_sending_is_unknown_and_before_it_unavailable() {
        use std::io::ErrorKind::*;
        for io in [BrokenPipe, ConnectionReset, UnexpectedEof, TimedOut, ConnectionRefused, ConnectionAborted]
        {
            let source = || RedisError::from(std::io::Error::from(io));
            assert_eq!(error(Phase::Sent, source()).kind(), ErrorKind::Unknown, "{io}");
            assert_eq!(error(Phase::Connect, source()).kind(), ErrorKind::Unavailable, "{io}");
        }
        let unreadable = RedisError::from((Said::Parse, "broken"));
        assert_eq!(error(Phase::Sent, unreadable).kind(), ErrorKind::Unknown);
    }
}
