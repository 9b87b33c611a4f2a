//! What the ensemble or the client library says, and what is known then.

use lockcore::backend::{Error, ErrorKind};
use zookeeper_client::Error as Said;

/// Turns what the client library says into what is known.
pub(crate) fn error(source: Said) -> Error {
    let (kind, message) = sort(&source);
    Error::new(kind, message).with_source(source)
}

/// Decides, arm by arm. What is not certainly a refusal may have been executed.
///
/// A connection that dies gives `ConnectionLoss` only where the server closed it in order; a reset and a silent link
/// give `Custom`, an end during authentication `UnexpectedError`.
///
/// # Source
/// zookeeper-client 0.11.2, `error.rs`, `session/mod.rs`; ZooKeeper 3.8, `KeeperException`.
fn sort(said: &Said) -> (ErrorKind, &'static str) {
    use ErrorKind as K;
    match said {
        Said::NoHosts | Said::Timeout => (K::Unavailable, "no server can be reached"),
        Said::NoNode
        | Said::BadVersion
        | Said::NodeExists
        | Said::NotEmpty
        | Said::NoChildrenForEphemerals
        | Said::NoWatcher
        | Said::RuntimeInconsistent => (K::Unavailable, "the ensemble refused the request as things stand"),
        Said::NotReadOnly => (K::Unavailable, "the server is cut off from its ensemble and only reads"),
        Said::SessionMoved => (K::Unavailable, "the session has moved to another server"),
        Said::Throttled => (K::Unavailable, "the server has too many requests in hand"),
        Said::NoAuth | Said::AuthFailed => (K::Unauthorized, "the ensemble refused the user"),
        Said::BadArguments(_) => (K::Invalid, "the ensemble refused the request"),
        Said::InvalidAcl => (K::Misconfigured, "the ensemble refused the access list"),
        Said::QuotaExceeded => (K::Misconfigured, "the quota of a node is used up"),
        Said::Unimplemented | Said::ReconfigDisabled => {
            (K::Misconfigured, "the server does not know this request; ZooKeeper 3.6 or later is needed")
        }
        // Its ephemeral nodes are gone, but what else was under way may have been executed before.
        Said::SessionExpired | Said::ClientClosed => (K::Unknown, "the session ended before an answer"),
        Said::ConnectionLoss | Said::Custom(_) => (K::Unknown, "the connection was lost before an answer"),
        Said::UnexpectedError(_)
        | Said::UnexpectedErrorCode(_)
        | Said::UnmarshalError { .. }
        | Said::MarshallingError => (K::Unknown, "the ensemble gave no certain answer"),
        // The enum may grow; nobody has looked at what comes.
        _ => (K::Unknown, "the client library said something new"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_has_its_kind() {
        use ErrorKind::*;
        for (said, kind) in [
            (Said::NoHosts, Unavailable),
            (Said::Timeout, Unavailable),
            (Said::UnexpectedError("BUG".into()), Unknown),
            (Said::BadArguments(&"x"), Invalid),
            (Said::NoNode, Unavailable),
            (Said::NoAuth, Unauthorized),
            (Said::BadVersion, Unavailable),
            (Said::NoChildrenForEphemerals, Unavailable),
            (Said::NodeExists, Unavailable),
            (Said::NotEmpty, Unavailable),
            (Said::SessionExpired, Unknown),
            (Said::InvalidAcl, Misconfigured),
            (Said::AuthFailed, Unauthorized),
            (Said::SessionMoved, Unavailable),
            (Said::NotReadOnly, Unavailable),
            (Said::NoWatcher, Unavailable),
            (Said::QuotaExceeded, Misconfigured),
            (Said::Throttled, Unavailable),
            (Said::MarshallingError, Unknown),
            (Said::Unimplemented, Misconfigured),
            (Said::ConnectionLoss, Unknown),
            (Said::ReconfigDisabled, Misconfigured),
            (Said::UnexpectedErrorCode(-1), Unknown),
            (Said::ClientClosed, Unknown),
            (Said::RuntimeInconsistent, Unavailable),
        ] {
            assert_eq!(error(said.clone()).kind(), kind, "{said:?}");
        }
    }
}
