//! What the cluster or the client library says, and what is known then.

use etcd_client::Error as Said;
use lockcore::backend::{Error, ErrorKind};
use tonic::Code;

/// Turns what the client library says into what is known.
pub(crate) fn error(source: Said) -> Error {
    let (kind, message) = sort(&source);
    Error::new(kind, message).with_source(source)
}

/// Says whether a lease is gone: the one refusal that every verb must tell from the others.
pub(crate) fn lease_is_gone(said: &Said) -> bool {
    match said {
        Said::GRpcStatus(status) => {
            status.code() == Code::NotFound && status.message().contains("requested lease not found")
        }
        // The client library makes this of an answer with a TTL of zero, and of a stream that ended before one.
        Said::LeaseKeepAliveError(text) => text.contains("lease not found"),
        _ => false,
    }
}

/// Says whether a lease of this id was there already.
pub(crate) fn lease_exists(said: &Said) -> bool {
    matches!(said, Said::GRpcStatus(status)
        if status.code() == Code::FailedPrecondition && status.message().contains("lease already exists"))
}

/// What a refusal tells of the credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Auth {
    /// Nothing.
    Silent,
    /// The token is over, or older than a change of users and roles: a new one may do.
    Stale,
}

/// Says whether a fresh token may help. Such a refusal comes before anything is done.
pub(crate) fn auth_trouble(said: &Said) -> Auth {
    let stale = match said {
        Said::GRpcStatus(status) => {
            let text = status.message();
            text.contains("invalid auth token") || text.contains("revision of auth store is old")
        }
        // A watch is refused inside of its stream, and old servers do not tell an old token from a missing permission.
        Said::WatchError(text) => text.contains("auth") || text.contains("permission denied"),
        _ => false,
    };
    if stale { Auth::Stale } else { Auth::Silent }
}

/// Says whether the connection broke or could not be made, other than a member that said so in its own words.
pub(crate) fn lost_connection(said: &Said) -> bool {
    match said {
        Said::GRpcStatus(status) => {
            let transport = matches!(
                status.code(),
                Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal | Code::Aborted
            );
            transport && !status.message().contains("etcdserver")
        }
        Said::IoError(_) | Said::TransportError(_) => true,
        _ => false,
    }
}

/// Says whether a refusal is the cluster's, by whichever member it comes: of a user, a request, or for want of space.
pub(crate) fn is_of_the_cluster(said: &Said) -> bool {
    match said {
        // A learner's refusal is its own; newer servers give it the code of a precondition.
        Said::GRpcStatus(status) if is_of_a_member(status.message()) => false,
        Said::GRpcStatus(status) => matches!(
            status.code(),
            Code::ResourceExhausted
                | Code::PermissionDenied
                | Code::Unauthenticated
                | Code::InvalidArgument
                | Code::OutOfRange
                | Code::NotFound
                | Code::FailedPrecondition
        ),
        _ => false,
    }
}

/// Decides, arm by arm. What is not certainly a refusal may have been executed.
///
/// # Source
/// etcd 3.4 to 3.6, `rpctypes/error.go`, `apply/quota.go`; tonic 0.14, `status.rs`.
fn sort(said: &Said) -> (ErrorKind, &'static str) {
    use ErrorKind as K;
    match said {
        Said::GRpcStatus(status) => grpc(status),
        Said::InvalidArgs(_) | Said::InvalidUri(_) | Said::InvalidMetadataValue(_) => {
            (K::Misconfigured, "the client library refused the configuration")
        }
        Said::EndpointError(_) | Said::EndpointsNotManaged => {
            (K::Misconfigured, "the endpoint cannot be used")
        }
        Said::WatchError(_) if auth_trouble(said) == Auth::Stale => {
            (K::Unauthorized, "the cluster refused the user a watch")
        }
        Said::IoError(_) | Said::TransportError(_) => {
            (K::Unknown, "the connection was lost before an answer")
        }
        _ => (K::Unknown, "the client library gave up"),
    }
}

fn grpc(status: &tonic::Status) -> (ErrorKind, &'static str) {
    use ErrorKind as K;
    let text = status.message();
    match status.code() {
        Code::Unavailable if never_sent(status) && says(status, "invalid peer certificate") => {
            (K::Misconfigured, "the member's certificate is not trusted")
        }
        Code::Unavailable if never_sent(status) => (K::Unavailable, "the member cannot be reached"),
        Code::Unavailable if text.contains("no leader") => (K::Unavailable, "the member knows no leader"),
        Code::Unavailable | Code::FailedPrecondition if is_of_a_member(text) => {
            (K::Unavailable, "the member cannot serve yet")
        }
        Code::ResourceExhausted if text.contains("too many requests") => {
            (K::Overloaded, "the cluster has too many requests in hand")
        }
        // The quota is checked after the write was applied.
        Code::ResourceExhausted => (K::Unknown, "the cluster's space is used up"),
        Code::PermissionDenied | Code::Unauthenticated => (K::Unauthorized, "the cluster refused the user"),
        Code::InvalidArgument if text.contains("auth") || text.contains("user name is empty") => {
            (K::Unauthorized, "the cluster refused the credentials")
        }
        Code::FailedPrecondition if text.contains("authentication is not enabled") => {
            (K::Misconfigured, "the cluster has no users; leave user and password out")
        }
        Code::OutOfRange | Code::InvalidArgument => (K::Invalid, "the cluster refused the request"),
        Code::NotFound | Code::FailedPrecondition => {
            (K::Unavailable, "the cluster refused the request as things stand")
        }
        Code::Unimplemented => (K::Misconfigured, "what answers there is no etcd 3.4 or later"),
        _ => (K::Unknown, "the cluster gave no certain answer"),
    }
}

fn is_of_a_member(text: &str) -> bool {
    text.contains("not capable") || text.contains("learner")
}

fn never_sent(status: &tonic::Status) -> bool {
    causes(status).any(|cause| cause.is::<tonic::ConnectError>())
}

fn says(status: &tonic::Status, text: &str) -> bool {
    causes(status).any(|cause| cause.to_string().contains(text))
}

fn causes(status: &tonic::Status) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(std::error::Error::source(status), |cause| cause.source())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_of_the_cluster_has_its_kind() {
        use ErrorKind::*;
        for (code, text, kind) in [
            (Code::Unavailable, "etcdserver: no leader", Unavailable),
            (Code::Unavailable, "etcdserver: request timed out", Unknown),
            (Code::Unavailable, "http2 error", Unknown),
            (Code::Unknown, "transport error", Unknown),
            (Code::Cancelled, "Timeout expired", Unknown),
            (Code::DeadlineExceeded, "context deadline exceeded", Unknown),
            (Code::Internal, "h2 protocol error", Unknown),
            (Code::ResourceExhausted, "etcdserver: too many requests", Overloaded),
            (Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded", Unknown),
            (Code::PermissionDenied, "etcdserver: permission denied", Unauthorized),
            (
                Code::InvalidArgument,
                "etcdserver: authentication failed, invalid user ID or password",
                Unauthorized,
            ),
            (Code::InvalidArgument, "etcdserver: revision of auth store is old", Unauthorized),
            (Code::Unauthenticated, "etcdserver: invalid auth token", Unauthorized),
            (Code::FailedPrecondition, "etcdserver: authentication is not enabled", Misconfigured),
            (Code::FailedPrecondition, "etcdserver: lease already exists", Unavailable),
            (Code::NotFound, "etcdserver: requested lease not found", Unavailable),
            (Code::Unavailable, "etcdserver: rpc not supported for learner", Unavailable),
            (Code::Unavailable, "etcdserver: not capable", Unavailable),
            (Code::Unavailable, "etcdserver: server stopped", Unknown),
            (Code::Unavailable, "etcdserver: leader changed", Unknown),
            (
                Code::Unavailable,
                "etcdserver: request timed out, possibly due to previous leader failure",
                Unknown,
            ),
            (Code::Cancelled, "operation was canceled", Unknown),
            (Code::Unimplemented, "unknown service etcdserverpb.KV", Misconfigured),
            (Code::OutOfRange, "etcdserver: too large lease TTL", Invalid),
            (Code::OutOfRange, "etcdserver: mvcc: required revision has been compacted", Invalid),
            (Code::DataLoss, "etcdserver: corrupt cluster", Unknown),
        ] {
            let said = error(Said::GRpcStatus(tonic::Status::new(code, text)));
            assert_eq!(said.kind(), kind, "{code:?} {text}");
        }
        for (said, kind) in [
            (Said::IoError(std::io::ErrorKind::ConnectionReset.into()), Unknown),
            (Said::Internal("it went away".into()), Unknown),
            (Said::LeaseKeepAliveError("channel closed".into()), Unknown),
            (Said::WatchError("failed to create".into()), Unknown),
            (Said::WatchError("etcdserver: permission denied".into()), Unauthorized),
            (Said::InvalidArgs("empty endpoints".into()), Misconfigured),
            (Said::EndpointsNotManaged, Misconfigured),
        ] {
            let text = said.to_string();
            assert_eq!(error(said).kind(), kind, "{text}");
        }
    }

    #[test]
    fn only_the_words_of_a_stale_token_ask_for_a_new_one() {
        let status = |code, text: &str| Said::GRpcStatus(tonic::Status::new(code, text));
        for said in [
            status(Code::InvalidArgument, "etcdserver: revision of auth store is old"),
            status(Code::Unauthenticated, "etcdserver: invalid auth token"),
        ] {
            assert_eq!(auth_trouble(&said), Auth::Stale, "{said}");
        }
        let wrong =
            status(Code::InvalidArgument, "etcdserver: authentication failed, invalid user ID or password");
        assert_eq!(auth_trouble(&wrong), Auth::Silent);
        assert_eq!(
            auth_trouble(&status(Code::PermissionDenied, "etcdserver: permission denied")),
            Auth::Silent
        );
    }

    #[test]
    fn a_member_that_says_no_in_its_own_words_is_no_broken_connection() {
        let status = |code, text: &str| Said::GRpcStatus(tonic::Status::new(code, text));
        assert!(lost_connection(&status(Code::Unknown, "transport error")));
        assert!(lost_connection(&status(Code::Unavailable, "http2 error")));
        assert!(!lost_connection(&status(Code::Unavailable, "etcdserver: no leader")));
        assert!(!lost_connection(&status(Code::PermissionDenied, "etcdserver: permission denied")));
    }

    #[test]
    fn a_refusal_that_any_member_would_give_is_no_evidence_against_one() {
        let status = |code, text: &str| Said::GRpcStatus(tonic::Status::new(code, text));
        for said in [
            status(Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded"),
            status(Code::PermissionDenied, "etcdserver: permission denied"),
            status(Code::OutOfRange, "etcdserver: too large lease TTL"),
        ] {
            assert!(is_of_the_cluster(&said), "{said}");
        }
        for said in [
            status(Code::Unavailable, "etcdserver: no leader"),
            status(Code::Unavailable, "etcdserver: request timed out"),
            status(Code::Unavailable, "etcdserver: rpc not supported for learner"),
            status(Code::FailedPrecondition, "etcdserver: rpc not supported for learner"),
            status(Code::Unknown, "transport error"),
            status(Code::Unimplemented, "unknown service etcdserverpb.KV"),
            Said::IoError(std::io::ErrorKind::ConnectionReset.into()),
        ] {
            assert!(!is_of_the_cluster(&said), "{said}");
        }
    }
}
