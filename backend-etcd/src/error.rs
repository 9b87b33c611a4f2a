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
        Code::Unavailable if never_sent(status) => (K::Unavailable, "the member cannot be reached"),
        Code::Unavailable if text.contains("no leader") => (K::Unavailable, "the member knows no leader"),
        Code::Unavailable if text.contains("not capable") || text.contains("learner") => {
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
        Code::OutOfRange | Code::InvalidArgument => (K::Invalid, "the cluster refused the request"),
        Code::NotFound | Code::FailedPrecondition => {
            (K::Unavailable, "the cluster refused the request as things stand")
        }
        Code::Unimplemented => (K::Misconfigured, "what answers there is no etcd 3.4 or later"),
        _ => (K::Unknown, "the cluster gave no certain answer"),
    }
}

fn never_sent(status: &tonic::Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        source = error.source();
    }
    false
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
            (Code::OutOfRange, "etcdserver: too large lease TTL", Invalid),
        ] {
            let said = error(Said::GRpcStatus(tonic::Status::new(code, text)));
            assert_eq!(said.kind(), kind, "{code:?} {text}");
        }
    }
}
