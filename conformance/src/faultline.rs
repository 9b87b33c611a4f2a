//! A TCP proxy that does to connections what networks do: holds, delays, loses, cuts and refuses.
//!
//! TCP loses no bytes in the middle of a connection. So a proxy that "drops" a packet and goes on would invent a fault
//! that no network has: here bytes are held and come late, or their connection is reset.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    runtime::Runtime,
    sync::{mpsc, oneshot, watch},
    time::Instant,
};

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From client to server: requests.
    ToServer,
    /// From server to client: replies.
    ToClient,
}

/// What becomes of some bytes on their way to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// They go on.
    Pass,
    /// They are lost, and their connection is reset.
    Lose,
    /// They and all that follow them on their connection wait for [`Faultline::deliver`].
    Hold,
}

/// One listening address that leads to one server, with switches for faults. Its connections end with it.
///
/// All switches act at once, also on connections that stand. The proxy runs on a thread of its own: a
/// test that blocks its runtime does not stop the network.
#[derive(Debug)]
pub struct Faultline {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    upstream: SocketAddr,
    switches: Mutex<Switches>,
    /// Rung after each change of the switches.
    changed: watch::Sender<()>,
    /// Rung when the listener was opened or closed.
    listener: Condvar,
}

#[derive(Debug, Default)]
struct Switches {
    listening: bool,
    hold: [bool; 2],
    delay: [Duration; 2],
    refuse: bool,
    closed: bool,
    /// Bytes to the server are lost once, and their connection reset.
    lose_next_request: bool,
    /// Connections below this number are reset.
    reset_below: u64,
    /// Bytes to the server on connections below this number are held until delivery.
    hold_requests_below: u64,
    next_connection: u64,
    /// Ends a `Fate::Hold` when it moves.
    deliveries: u64,
    open: u64,
    judge: Option<mpsc::UnboundedSender<Reply>>,
}

/// Some bytes from the server, before they go on to the client.
#[derive(Debug)]
pub struct Reply {
    fate: oneshot::Sender<Fate>,
}

impl Reply {
    /// Decides.
    pub fn decide(self, fate: Fate) {
        // The connection may have ended meanwhile.
        let _ = self.fate.send(fate);
    }
}

/// Is asked about each chunk of bytes on its way to the client, for as long as it lives.
#[derive(Debug)]
pub struct Judge {
    replies: mpsc::UnboundedReceiver<Reply>,
    shared: Arc<Shared>,
}

impl Judge {
    /// Waits for the next bytes. Cancel safe.
    pub async fn next(&mut self) -> Reply {
        match self.replies.recv().await {
            Some(reply) => reply,
            // Another judge has taken over.
            None => std::future::pending().await,
        }
    }
}

impl Drop for Judge {
    fn drop(&mut self) {
        // What is asked and not decided passes: its sender goes with the channel.
        self.replies.close();
        let mut switches = self.shared.switches();
        if switches.judge.as_ref().is_some_and(mpsc::UnboundedSender::is_closed) {
            switches.judge = None;
        }
    }
}

/// The thread on which all proxies of a process run.
fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).thread_name("faultline").enable_all();
        builder.build().expect("a thread can be started")
    })
}

impl Faultline {
    /// Opens an address on the loopback that leads to `upstream`.
    ///
    /// # Errors
    /// No socket can be bound.
    pub fn start(upstream: SocketAddr) -> io::Result<Self> {
        // A socket that is bound and does not listen keeps the port while connections are refused.
        let keeper = TcpSocket::new_v4()?;
        keeper.set_reuseport(true)?;
        keeper.bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
        let address = keeper.local_addr()?;
        let shared = Arc::new(Shared {
            upstream,
            switches: Mutex::default(),
            changed: watch::Sender::new(()),
            listener: Condvar::new(),
        });
        shared.switches().listening = true;
        let _on = runtime().enter();
        let listener = listen(address)?;
        runtime().spawn(serve(shared.clone(), keeper, address, listener));
        Ok(Self { address, shared })
    }

    /// Returns where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns how many connections stand.
    pub fn connections(&self) -> u64 {
        self.shared.switches().open
    }

    /// Holds all bytes of one direction, or lets them go on.
    pub fn hold(&self, direction: Direction, on: bool) {
        self.shared.change(|s| s.hold[direction as usize] = on);
    }

    /// Holds all bytes of both directions, or lets them go on; new connections are taken and hear nothing.
    pub fn cut(&self, on: bool) {
        self.shared.change(|s| s.hold = [on; 2]);
    }

    /// Lets all bytes of one direction come later by so much.
    pub fn delay(&self, direction: Direction, by: Duration) {
        self.shared.change(|s| s.delay[direction as usize] = by);
    }

    /// Refuses new connections as a machine without a server does, and resets those that stand. Returns when that is so,
    /// which takes the proxy's thread one turn.
    pub fn refuse(&self, on: bool) {
        self.shared.change(|s| {
            s.refuse = on;
            if on {
                s.reset_below = s.next_connection;
            }
        });
        let switches = self.shared.switches();
        let done = self.shared.listener.wait_while(switches, |s| s.listening == s.refuse && !s.closed);
        drop(done.unwrap_or_else(PoisonError::into_inner));
    }

    /// Resets all connections that stand.
    pub fn reset(&self) {
        self.shared.change(|s| s.reset_below = s.next_connection);
    }

    /// Loses the next bytes to the server, and resets their connection.
    pub fn lose_next_request(&self) {
        self.shared.change(|s| s.lose_next_request = true);
    }

    /// Takes back [`lose_next_request`](Self::lose_next_request); says whether it had still hit nobody.
    pub fn spare_next_request(&self) -> bool {
        let mut switches = self.shared.switches();
        std::mem::take(&mut switches.lose_next_request)
    }

    /// Holds the bytes to the server of all connections that stand, until [`deliver`](Self::deliver). New connections are
    /// not held: their bytes overtake.
    pub fn hold_requests_of_now(&self) {
        self.shared.change(|s| s.hold_requests_below = s.next_connection);
    }

    /// Decides about bytes to the client one by one, from now on. A newer judge takes over.
    pub fn judge(&self) -> Judge {
        let (ask, replies) = mpsc::unbounded_channel();
        self.shared.change(|s| s.judge = Some(ask));
        Judge { replies, shared: self.shared.clone() }
    }

    /// Lets go on what a [`Fate::Hold`] or [`hold_requests_of_now`](Self::hold_requests_of_now) holds.
    pub fn deliver(&self) {
        self.shared.change(|s| {
            s.deliveries += 1;
            s.hold_requests_below = 0;
        });
    }

    /// Ends every fault. Bytes that were held go on.
    pub fn heal(&self) {
        self.shared.change(|s| {
            s.hold = [false; 2];
            s.delay = [Duration::ZERO; 2];
            s.refuse = false;
            s.lose_next_request = false;
            s.hold_requests_below = 0;
            s.deliveries += 1;
            s.judge = None;
        });
    }
}

impl Drop for Faultline {
    fn drop(&mut self) {
        self.shared.change(|s| s.closed = true);
    }
}

impl Shared {
    fn switches(&self) -> MutexGuard<'_, Switches> {
        self.switches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Switches)) {
        change(&mut self.switches());
        self.changed.send_replace(());
    }

    /// Waits until the switches are as asked.
    async fn until(&self, mut open: impl FnMut(&Switches) -> bool) {
        let mut changed = self.changed.subscribe();
        while !open(&self.switches()) {
            // Its sender lives in `self`.
            let _ = changed.changed().await;
        }
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseport(true)?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(1024)
}

async fn serve(shared: Arc<Shared>, _keeper: TcpSocket, address: SocketAddr, first: TcpListener) {
    let mut listener = Some(first);
    loop {
        let (refuse, closed) = {
            let mut s = shared.switches();
            if s.refuse || s.closed {
                listener = None;
            } else if listener.is_none() {
                // The keeper still has the port.
                listener = listen(address).ok();
                s.closed = listener.is_none();
            }
            s.listening = listener.is_some();
            shared.listener.notify_all();
            (s.refuse, s.closed)
        };
        if closed {
            return;
        }
        let turned = shared.until(|s| s.closed || s.refuse != refuse);
        let Some(open) = &listener else {
            turned.await;
            continue;
        };
        tokio::select! {
            () = turned => {}
            taken = open.accept() => {
                if let Ok((client, _)) = taken {
                    let number = {
                        let mut s = shared.switches();
                        s.next_connection += 1;
                        s.open += 1;
                        s.next_connection - 1
                    };
                    let shared = shared.clone();
                    tokio::spawn(async move {
                        connection(&shared, number, client).await;
                        shared.change(|s| s.open -= 1);
                    });
                }
            }
        }
    }
}

/// The connection was reset, by a fault or by either end.
struct Reset;

impl From<io::Error> for Reset {
    fn from(_: io::Error) -> Self {
        Self
    }
}

/// Carries one connection until both ends have closed it or it is reset.
async fn connection(shared: &Shared, number: u64, client: TcpStream) {
    let Ok(server) = TcpStream::connect(shared.upstream).await else {
        let _ = client.set_zero_linger();
        return;
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let both = async {
        tokio::try_join!(
            carry(shared, number, Direction::ToServer, &client, &server),
            carry(shared, number, Direction::ToClient, &server, &client),
        )
    };
    let whole = tokio::select! {
        ended = both => ended.is_ok(),
        () = shared.until(|s| s.closed || s.refuse || number < s.reset_below) => false,
    };
    if !whole {
        let _ = (client.set_zero_linger(), server.set_zero_linger());
    }
}

/// What a sender did, in its order.
enum Sent {
    Bytes(Vec<u8>),
    Closed,
    Reset,
}

/// Carries one direction of a connection until its sender closes it.
async fn carry(
    shared: &Shared,
    number: u64,
    direction: Direction,
    from: &TcpStream,
    to: &TcpStream,
) -> Result<(), Reset> {
    let (queue, mut queued) = mpsc::unbounded_channel();
    let reader = async move {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            // A reset stands in line like everything else: while a network is cut, it does not arrive either.
            let sent = match read(from, &mut buffer).await {
                Ok(0) => Sent::Closed,
                Ok(length) => Sent::Bytes(buffer[..length].to_vec()),
                Err(_) => Sent::Reset,
            };
            let last = !matches!(sent, Sent::Bytes(_));
            // The delay counts from here, so that many chunks are late together and not one after another.
            let due = Instant::now() + shared.switches().delay[direction as usize];
            if queue.send((due, sent)).is_err() || last {
                return Ok(());
            }
        }
    };
    let writer = async move {
        while let Some((due, sent)) = queued.recv().await {
            tokio::time::sleep_until(due).await;
            shared.until(|s| !s.hold[direction as usize]).await;
            if direction == Direction::ToServer {
                shared.until(|s| number >= s.hold_requests_below).await;
            }
            let bytes = match sent {
                Sent::Bytes(bytes) => bytes,
                Sent::Closed => {
                    // Only this direction is closed; the other may have something to say.
                    let _ = rustix::net::shutdown(to, rustix::net::Shutdown::Write);
                    return Ok(());
                }
                Sent::Reset => return Err(Reset),
            };
            match direction {
                Direction::ToServer => {
                    if std::mem::take(&mut shared.switches().lose_next_request) {
                        return Err(Reset);
                    }
                    write(to, &bytes).await?;
                }
                Direction::ToClient => {
                    decide(shared).await?;
                    // A client that is gone says so in its own direction, behind what it sent before.
                    let _ = write(to, &bytes).await;
                }
            }
        }
        Ok(())
    };
    tokio::try_join!(reader, writer).map(drop)
}

async fn read(from: &TcpStream, into: &mut [u8]) -> io::Result<usize> {
    loop {
        from.readable().await?;
        match from.try_read(into) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            read => return read,
        }
    }
}

async fn write(to: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        to.writable().await?;
        match to.try_write(bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            wrote => bytes = &bytes[wrote?..],
        }
    }
    Ok(())
}

/// Asks the judge about bytes to the client.
async fn decide(shared: &Shared) -> Result<(), Reset> {
    let (fate, decided) = oneshot::channel();
    let deliveries = {
        let s = shared.switches();
        // In one step: a judge may decide and deliver before this thread has its next turn.
        match &s.judge {
            Some(judge) if judge.send(Reply { fate }).is_ok() => s.deliveries,
            _ => return Ok(()),
        }
    };
    match decided.await.unwrap_or(Fate::Pass) {
        Fate::Pass => Ok(()),
        Fate::Lose => Err(Reset),
        Fate::Hold => {
            shared.until(|s| s.deliveries != deliveries).await;
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// A server that tells what it heard, and echoes it.
    async fn echo() -> (Faultline, mpsc::UnboundedReceiver<Vec<u8>>) {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let line = Faultline::start(server.local_addr().unwrap()).unwrap();
        let (tell, heard) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = server.accept().await {
                let tell = tell.clone();
                tokio::spawn(async move {
                    let mut buffer = [0; 64];
                    while let Ok(length @ 1..) = client.read(&mut buffer).await {
                        let _ = tell.send(buffer[..length].to_vec());
                        if client.write_all(&buffer[..length]).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        (line, heard)
    }

    async fn say(client: &mut TcpStream, text: &str) {
        client.write_all(text.as_bytes()).await.unwrap();
    }

    async fn hear(client: &mut TcpStream) -> io::Result<String> {
        let mut buffer = [0; 64];
        let length = client.read(&mut buffer).await?;
        Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
    }

    #[tokio::test]
    async fn what_is_held_comes_late_and_whole() {
        let (line, mut heard) = echo().await;
        let mut client = TcpStream::connect(line.address()).await.unwrap();
        line.cut(true);
        say(&mut client, "one").await;
        let mut second = TcpStream::connect(line.address()).await.unwrap();
        say(&mut second, "two").await;
        // A round trip on another line shows that the proxy's thread had its turn.
        let (other, mut other_heard) = echo().await;
        say(&mut TcpStream::connect(other.address()).await.unwrap(), "three").await;
        assert_eq!(other_heard.recv().await.unwrap(), b"three");
        assert!(heard.try_recv().is_err(), "bytes went over a line that is cut");
        line.cut(false);
        assert_eq!(hear(&mut client).await.unwrap(), "one");
        assert_eq!(hear(&mut second).await.unwrap(), "two");
    }

    #[tokio::test]
    async fn bytes_of_a_client_that_left_still_arrive_after_a_cut() {
        let (line, mut heard) = echo().await;
        let mut client = TcpStream::connect(line.address()).await.unwrap();
        say(&mut client, "a").await;
        assert_eq!(hear(&mut client).await.unwrap(), "a");
        assert_eq!(heard.recv().await.unwrap(), b"a");
        line.cut(true);
        say(&mut client, "late").await;
        client.set_zero_linger().unwrap();
        drop(client);
        line.cut(false);
        assert_eq!(heard.recv().await.unwrap(), b"late");
    }

    #[tokio::test]
    async fn a_lost_request_never_arrives_and_its_client_is_told() {
        let (line, mut heard) = echo().await;
        let mut client = TcpStream::connect(line.address()).await.unwrap();
        line.lose_next_request();
        say(&mut client, "lost").await;
        assert_eq!(hear(&mut client).await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        let mut client = TcpStream::connect(line.address()).await.unwrap();
        say(&mut client, "next").await;
        assert_eq!(hear(&mut client).await.unwrap(), "next");
        assert_eq!(heard.recv().await.unwrap(), b"next");
    }

    #[tokio::test]
    async fn a_judge_loses_a_reply_whose_request_was_served() {
        let (line, mut heard) = echo().await;
        let mut client = TcpStream::connect(line.address()).await.unwrap();
        let mut judge = line.judge();
        say(&mut client, "served").await;
        let reply = judge.next().await;
        assert_eq!(heard.recv().await.unwrap(), b"served");
        reply.decide(Fate::Lose);
        assert_eq!(hear(&mut client).await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        drop(judge);
        let mut client = TcpStream::connect(line.address()).await.unwrap();
        say(&mut client, "next").await;
        assert_eq!(hear(&mut client).await.unwrap(), "next");
    }

    #[tokio::test]
    async fn a_reply_that_is_held_waits_for_its_delivery() {
        let (line, _heard) = echo().await;
        let mut client = TcpStream::connect(line.address()).await.unwrap();
        let mut judge = line.judge();
        say(&mut client, "held").await;
        judge.next().await.decide(Fate::Hold);
        drop(judge);
        let mut answer = Box::pin(hear(&mut client));
        assert!(crate::bench::poll_once(&mut answer).await.is_pending());
        line.deliver();
        assert_eq!(answer.await.unwrap(), "held");
    }

    #[tokio::test]
    async fn requests_of_old_connections_can_be_overtaken() {
        let (line, mut heard) = echo().await;
        let mut old = TcpStream::connect(line.address()).await.unwrap();
        say(&mut old, "a").await;
        assert_eq!(hear(&mut old).await.unwrap(), "a");
        assert_eq!(heard.recv().await.unwrap(), b"a");
        line.hold_requests_of_now();
        say(&mut old, "first").await;
        let mut new = TcpStream::connect(line.address()).await.unwrap();
        say(&mut new, "second").await;
        assert_eq!(heard.recv().await.unwrap(), b"second");
        line.deliver();
        assert_eq!(heard.recv().await.unwrap(), b"first");
    }

    #[tokio::test]
    async fn a_line_that_refuses_keeps_its_port() {
        let (line, _heard) = echo().await;
        let mut old = TcpStream::connect(line.address()).await.unwrap();
        say(&mut old, "a").await;
        assert_eq!(hear(&mut old).await.unwrap(), "a");
        line.refuse(true);
        assert_eq!(hear(&mut old).await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        let refused = TcpStream::connect(line.address()).await;
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        line.refuse(false);
        let mut new = TcpStream::connect(line.address()).await.unwrap();
        say(&mut new, "b").await;
        assert_eq!(hear(&mut new).await.unwrap(), "b");
    }

    #[tokio::test]
    async fn late_bytes_are_late_together() {
        let (line, _heard) = echo().await;
        let mut client = TcpStream::connect(line.address()).await.unwrap();
        line.delay(Direction::ToClient, Duration::from_millis(40));
        let begun = Instant::now();
        say(&mut client, "x").await;
        assert_eq!(hear(&mut client).await.unwrap(), "x");
        assert!(begun.elapsed() >= Duration::from_millis(40));
    }

    #[tokio::test]
    async fn its_connections_end_with_it() {
        let (line, _heard) = echo().await;
        let mut client = TcpStream::connect(line.address()).await.unwrap();
        say(&mut client, "a").await;
        assert_eq!(hear(&mut client).await.unwrap(), "a");
        assert_eq!(line.connections(), 1);
        drop(line);
        assert_eq!(hear(&mut client).await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }
}
