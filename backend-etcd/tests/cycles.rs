//! L02: thousands of rounds with cancellations leave keys, leases and watchers as they were.

mod common;

use std::{
    io::{Read, Write},
    sync::Arc,
    time::Duration,
};

use common::*;
use lockcore::backend::*;
use lockcore_etcd::EtcdBackend;

/// Polls a future so often and drops it; says whether it had ended.
async fn polled<F: Future>(future: F, polls: u64) -> Option<F::Output> {
    let mut future = Box::pin(future);
    for _ in 0..polls {
        let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(future.as_mut().poll(cx))).await;
        if let std::task::Poll::Ready(output) = polled {
            return Some(output);
        }
        tokio::task::yield_now().await;
    }
    None
}

/// Reads one number of the server's own metrics.
fn metric(server: &Server, name: &str) -> u64 {
    let address = server.url.rsplit('/').next().unwrap();
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(WATCHDOG)).unwrap();
    write!(stream, "GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}"));
    line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64
}

async fn rounds(backend: &Arc<EtcdBackend>, numbers: std::ops::Range<u64>) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let held = backend.acquire(&call(), &request_of("held", Duration::from_secs(60))).await.unwrap();
    for round in numbers {
        let name = if draw(2) == 0 { "free" } else { "held" };
        let mut asked = request_of(name, Duration::from_secs(4));
        if draw(2) == 0 {
            asked = asked.waiting_until(call().now().saturating_add(Duration::from_millis(draw(8))));
        }
        let call = call();
        // A quarter goes on to its end; the rest is dropped on its way, like its release.
        let polls = if draw(4) == 0 { u64::MAX } else { draw(400) };
        match polled(backend.acquire(&call, &asked), polls).await {
            Some(Ok(lease)) => match polled(backend.release(&call, &lease), draw(200)).await {
                Some(released) => drop(released.unwrap()),
                None => drop(backend.release(&call, &lease).await.unwrap()),
            },
            Some(Err(error)) => assert!(
                matches!(error.kind(), ErrorKind::Held | ErrorKind::WaitTimeout),
                "round {round}: {error:?}"
            ),
            None => backend.abandon(&call, &asked).await.unwrap(),
        }
    }
    backend.release(&call(), &held).await.unwrap();
}

#[tokio::test]
async fn rounds_with_cancellations_leave_keys_leases_and_watchers_as_they_were() {
    let Some(server) = Server::start() else { return };
    let count = std::env::var("LOCK_TEST_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1000_u64);
    let backend = server.backend().await;
    let watchers = async || {
        // Streams that were dropped are closed by the server in its own time.
        let mut left = 0;
        eventually("watches are closed", async || {
            left = metric(&server, "etcd_debugging_mvcc_watcher_total");
            left <= 1
        })
        .await;
        left
    };
    rounds(&backend, 0..count / 10).await;
    assert_eq!(server.places().await, [""; 0]);
    assert_eq!(watchers().await, 1, "the one that guards the connection");
    let leases = metric(&server, "etcd_debugging_lease_granted_total") - revoked(&server);
    rounds(&backend, count / 10..count).await;
    assert_eq!(server.places().await, [""; 0]);
    assert_eq!(watchers().await, 1, "the one that guards the connection");
    assert!(format!("{backend:?}").contains("places: 0"), "{backend:?}");
    // A grant that was dropped before its answer leaves an empty lease for its TTL.
    eventually("no more leases than before", async || {
        let now = metric(&server, "etcd_debugging_lease_granted_total") - revoked(&server);
        now <= leases.max(4)
    })
    .await;
    backend.close().await;
    eventually("none is left", async || server.leases().await == 0).await;
}

fn revoked(server: &Server) -> u64 {
    metric(server, "etcd_debugging_lease_revoked_total")
}
