//! The gate: a streaming reverse proxy in front of the engine. It counts what is owed and what is delivered, and refuses at once
//! when it is shut. It decides nothing: the detector tells it what to be (`control`), and it keeps being that if the detector dies.

mod answers;
mod awaited;
mod body;
pub mod confine;
pub mod control;
pub mod counts;
mod events;
mod form;
mod guests;
pub mod ledger;
mod line;
mod line_socket;
pub mod memory;
mod name;
mod owed;
pub mod print;
mod proxy;
mod room;
mod scan;
pub mod suspects;
mod upload;
pub(crate) mod work;

use std::convert::Infallible;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use heartbeat::counts::CountsWriter;
use http::header::CONNECTION;
use http::{Request, Uri, Version};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use role::wire::{Wire, prepare};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener};

use self::guests::{Answer, Guest, Guests};
use self::ledger::Ledger;
use self::proxy::Proxy;

/// What is buffered for a client before its reading holds the engine's stream back; a request's head is no longer, either.
const CLIENT_BUFFER_BYTES: usize = 64 << 10;
/// What is read of an engine's answer at once; its head is no longer, either. Of each stream that once came faster than it was passed on this
/// much stays allocated (2c).
const ENGINE_BUFFER_BYTES: usize = 16 << 10;
/// For how long a client's connection is kept that asks for nothing. Load balancers keep theirs for 60 s (AWS, nginx), 75 or 90 s (others) or
/// 600 s (Google), and send the next request on one that we are just closing: a 502 that nobody finds the cause of. Whoever keeps it for longer
/// must not be us, so this is what Google asks for.
pub const CLIENT_IDLE: Duration = Duration::from_secs(620);

/// Requests that the gate has in hand at once, whatever becomes of them: from their heads to the end of what their clients take. Descriptors
/// bound them as well, but a container is given a million, and half as many requests take more memory than any agent has. One takes 33 to
/// 112 KiB, as its prompt is long: so many have room in the 512 MiB that a pod's agent is given, and no engine that we know runs more than a quarter as many.
pub const IN_FLIGHT_MAX: u32 = 4_096;

/// For a client that takes nothing of its answer: what Envoy gives a stream in which nothing moves. Its request is long done in the engine.
const TAKES_NOTHING_MAX: Duration = Duration::from_secs(300);
/// So long nothing of an answer's end may go to a client whose connection shall end; the rest of a refused request has as long in all.
const PARTING_MAX: Duration = Duration::from_secs(10);

/// What a gate needs.
#[derive(Debug, Clone)]
pub struct GateConfig {
    /// The engine's base URL.
    pub upstream: Uri,
    /// The control socket's path; made anew at start.
    pub control: PathBuf,
    /// For how long a client's connection is kept that asks for nothing, or does not come to the end of its head.
    pub client_idle: Duration,
    /// So many requests it has in hand at once.
    pub in_flight_max: u32,
}

impl GateConfig {
    /// As it is where nobody says otherwise.
    pub fn usual(upstream: Uri, control: PathBuf) -> Self {
        Self { upstream, control, client_idle: CLIENT_IDLE, in_flight_max: IN_FLIGHT_MAX }
    }
}

/// Why a gate cannot start.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    #[error("the engine's URL {0} names no host; give one like http://127.0.0.1:8000")]
    Upstream(Uri),
    #[error("could not listen on the gate's control socket {path}: {source}")]
    Control { path: PathBuf, source: std::io::Error },
}

/// Serves on `listener` until the task is dropped. Returns only when it cannot start.
///
/// # Errors
/// When the URL names no host or the control socket cannot be made.
pub async fn run(listener: TcpListener, config: GateConfig) -> Result<(), GateError> {
    let memory = memory::kept_beside(&config.control);
    let epoch = crate::files::monotonic_ns();
    let counts = CountsWriter::create("truebeat-gate");
    let counts = counts.inspect_err(|error| tracing::info!(%error, "the gate is asked for its counters at every tick"));
    let mut ledger = Ledger::new(epoch, memory::recall(&memory)).telling(counts.ok());
    ledger.own = own_word();
    let ledger = Arc::new(ledger);
    let proxy = Proxy::new(Arc::clone(&ledger), &config.upstream).ok_or(GateError::Upstream(config.upstream))?;
    let proxy = proxy.with_at_most(config.in_flight_max);
    // A socket file that a dead gate left behind is in the way of ours.
    let _ = std::fs::remove_file(&config.control);
    let socket =
        UnixListener::bind(&config.control).map_err(|source| GateError::Control { path: config.control, source })?;
    tokio::spawn(control::serve(socket, Arc::clone(&ledger), memory));
    let guests = Guests::by_limits();
    tokio::select! {
        () = accept(listener, Arc::new(proxy), &guests, config.client_idle) => {}
        () = part_when_draining(&ledger, &guests) => {}
    }
    Ok(())
}

/// Drawn anew at each start, and told through the control socket alone. Where the kernel gives none, the agent's question is as any client's.
fn own_word() -> Option<String> {
    let word = getrandom::u64().and_then(|first| Ok(format!("{first:016x}{:016x}", getrandom::u64()?)));
    word.inspect_err(|error| tracing::warn!(%error, "the gate will not know the agent's own question")).ok()
}

/// A client that keeps its connection has no other news of a replica that leaves: its next request would be refused here, and is served on a
/// new connection elsewhere.
async fn part_when_draining(ledger: &Ledger, guests: &Guests) {
    let mut drains = ledger.drains.subscribe();
    loop {
        // (the ledger is there for as long as this is)
        if *drains.borrow_and_update() {
            guests.part();
            // a connection that is opened late, and over which nobody asks, would hold the replica up to the end of its grace
            while tokio::time::timeout(PARTING_MAX, drains.changed()).await.is_err() {
                guests.part_late();
            }
        } else {
            guests.stay();
            let _ = drains.changed().await;
        }
    }
}

async fn accept(listener: TcpListener, proxy: Arc<Proxy>, guests: &Arc<Guests>, client_idle: Duration) {
    let mut told = false;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                told = false;
                prepare(&stream);
                tokio::spawn(serve_connection(stream, Arc::clone(&proxy), guests.welcome(), client_idle));
                // who came with a request is heard before the next one is let in, who may make the first one go
                tokio::task::yield_now().await;
            }
            Err(error) => {
                // Out of descriptors, most likely: connections that end will free some.
                if !std::mem::replace(&mut told, true) {
                    tracing::warn!(%error, "the gate does not accept a connection");
                }
                guests.make_room();
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// A connection whose end can be made one that nobody takes for the end of an answer.
trait Reset {
    fn reset(&self);
}

impl Reset for TcpStream {
    fn reset(&self) {
        let _ = SockRef::from(self).set_linger(Some(Duration::ZERO));
    }
}

async fn serve_connection<S>(stream: S, proxy: Arc<Proxy>, guest: Arc<Guest>, client_idle: Duration)
where
    S: AsyncRead + AsyncWrite + Reset + Unpin,
{
    let _connected = proxy.connected();
    let wire = Wire::of(stream, TAKES_NOTHING_MAX);
    let sent = wire.sent();
    let is_old = AtomicBool::new(false);
    let service = service_fn(|request: Request<Incoming>| {
        is_old.fetch_or(request.version() == Version::HTTP_10, Ordering::Relaxed);
        let (asking, guest) = (guest.asks(), Arc::clone(&guest));
        let answer = Arc::clone(&proxy).handle(request, asking.together());
        async move {
            let response = answer.await?;
            if response.headers().get(CONNECTION).is_some_and(|said| said == "close") {
                guest.gets_the_last();
            }
            Ok::<_, Infallible>(response.map(|body| Answer::new(body, asking)))
        }
    });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(client_idle)
        .max_buf_size(CLIENT_BUFFER_BYTES)
        .serve_connection(TokioIo::new(wire), service);
    // a request that can be read now is heard before its connection is given up (all of this is one thread)
    let mut served = tokio::select! {
        biased;
        served = &mut connection => Some(served),
        () = guest.sent_away() => None,
    };
    // An answer is at its end when all of it was taken and not when all of it was sent: the rest goes out first, and what was asked in the
    // same moment is answered. A connection without either ends at once.
    if served.is_none() && guest.has_asked() {
        // (hyper would not read the rest of a refused request, where nothing more is to be sent)
        if !guest.ends_by_itself() {
            Pin::new(&mut connection).graceful_shutdown();
        }
        while served.is_none() {
            let before = sent.bytes();
            served = tokio::time::timeout(PARTING_MAX, &mut connection).await.ok();
            if !guest.is_asking() && sent.bytes() == before {
                break;
            }
        }
    }
    if let Some(Err(error)) = served {
        tracing::debug!(%error, "a client's connection ended");
        // where nothing else frames an answer the end of its connection does: that of half an answer must be another
        if error.is_user() && is_old.load(Ordering::Relaxed) {
            connection.into_parts().io.into_inner().into_stream().reset();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::ledger::Control;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    impl Reset for DuplexStream {
        fn reset(&self) {}
    }

    const SOON: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn whoever_comes_with_a_request_is_answered_however_many_come() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut crowd = Vec::new();
        for _ in 0..100 {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
            crowd.push(client);
        }
        let ledger = Arc::new(Ledger::new(1, Control::default()));
        let proxy = Arc::new(Proxy::new(ledger, &"http://127.0.0.1:1".parse().unwrap()).unwrap());
        tokio::spawn(async move { accept(listener, proxy, &Guests::at_most(4), CLIENT_IDLE).await });
        for (n, mut client) in crowd.into_iter().enumerate() {
            let mut heard = [0; 12];
            let answered = tokio::time::timeout(SOON, client.read_exact(&mut heard)).await.unwrap();
            assert!(answered.is_ok() && &heard == b"HTTP/1.1 503", "{n}");
        }
    }

    const ANSWER_BYTES: usize = 1 << 20;

    /// A gate that has read a whole answer and shall leave, and its client, who has taken nothing of it.
    async fn parting() -> (DuplexStream, tokio::task::JoinHandle<()>) {
        let engine = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let upstream = format!("http://{}", engine.local_addr().unwrap()).parse().unwrap();
        let proxy = Arc::new(Proxy::new(Arc::new(Ledger::new(1, Control::default())), &upstream).unwrap());
        let guests = Guests::at_most(4);
        let guest = guests.welcome();
        let (mut client, gate) = tokio::io::duplex(CLIENT_BUFFER_BYTES);
        let serving = tokio::spawn(serve_connection(gate, proxy, Arc::clone(&guest), CLIENT_IDLE));
        client.write_all(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
        let (mut server, _) = tokio::time::timeout(SOON, engine.accept()).await.unwrap().unwrap();
        let head =
            format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {ANSWER_BYTES}\r\n\r\n");
        server.write_all(head.as_bytes()).await.unwrap();
        server.write_all(&vec![b'1'; ANSWER_BYTES]).await.unwrap();
        let taken = async {
            while !guest.has_asked() || guest.is_asking() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(SOON, taken).await.expect("the answer is never all in the gate");
        tokio::time::pause();
        guests.part();
        (client, serving)
    }

    #[tokio::test]
    async fn a_client_that_takes_its_answer_slowly_gets_all_of_it_while_the_gate_leaves() {
        let (mut client, serving) = parting().await;
        let mut taken = 0;
        loop {
            tokio::time::sleep(PARTING_MAX.mul_f64(0.6)).await;
            let mut part = vec![0; CLIENT_BUFFER_BYTES];
            let bytes = client.read(&mut part).await.unwrap();
            taken += bytes;
            if bytes == 0 {
                break;
            }
        }
        assert!(taken > ANSWER_BYTES, "{taken}: it was cut");
        serving.await.unwrap();
    }

    #[tokio::test]
    async fn nobody_waits_at_a_leave_for_a_client_that_takes_nothing() {
        let (_client, serving) = parting().await;
        tokio::time::timeout(5 * PARTING_MAX, serving).await.expect("it is waited for").unwrap();
    }
}
