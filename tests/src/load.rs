//! Clients of a Service and what they felt; and what each replica delivered meanwhile, read from its heartbeat page. Clients behave
//! as those of the field do: they stream, give a silent stream up, and try again when they are refused. Loopback and files only.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// A stream without a word for this long is given up.
const SILENCE_MAX: Duration = Duration::from_secs(1);
/// The same for clients whose every loss is somebody's fault: a busy machine's pauses are nobody's.
const PATIENCE: Duration = Duration::from_secs(20);
const CONNECT_MAX: Duration = Duration::from_secs(3);
/// Between two tries of a refused request.
const RETRY: Duration = Duration::from_millis(100);
/// Between two requests of one client: two engines and everything else share this machine.
const PAUSE: Duration = Duration::from_millis(40);
const SAMPLE: Duration = Duration::from_millis(100);
const TOKENS: u32 = 32;
const CLOSE: &str = "Connection: close\r\n";
/// An answer of half a megabyte or more, of which a client with so small a window and the gate's own buffers hold a fifth.
const HELD_TOKENS: u32 = 4000;
const HELD_WINDOW_BYTES: u32 = 4 << 10;

/// How one try of a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Answered to its last token.
    Whole,
    /// 503 or 429: a gate or an engine that says "not now".
    Refused,
    /// Nobody takes connections: the Service has no endpoint, or the pod has gone.
    Unreachable,
    /// Cut off in the middle, or another status.
    Broken,
    /// Given up after a second of silence.
    Silent,
}

/// What the clients felt since some moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Felt {
    pub whole: usize,
    pub refused: usize,
    pub unreachable: usize,
    pub broken: usize,
    pub silent: usize,
    /// The longest that one client had to try, retries and all, until its request was answered whole.
    pub longest: Duration,
}

impl Felt {
    /// Tries that did not end in a whole answer.
    pub fn lost(&self) -> usize {
        self.refused + self.unreachable + self.broken + self.silent
    }
}

/// Running clients; dropping it ends them.
#[derive(Debug)]
pub struct Load {
    book: Arc<Mutex<Book>>,
    tasks: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Book {
    tries: Vec<(Instant, End)>,
    answered: Vec<(Instant, Duration)>,
}

impl Load {
    /// Starts `clients` that ask `service` again and again for `model`. Call it on a thread inside the cluster's network.
    pub fn start(service: SocketAddr, model: &str, clients: usize) -> Self {
        Self::with(service, model, clients, (SILENCE_MAX, CLOSE))
    }

    /// The same with clients that give up a silent stream only after 20 s.
    pub fn patient(service: SocketAddr, model: &str, clients: usize) -> Self {
        Self::with(service, model, clients, (PATIENCE, CLOSE))
    }

    /// The same with clients that send one request after the other on one connection, for as long as it is left open.
    pub fn keeping(service: SocketAddr, model: &str, clients: usize) -> Self {
        Self::with(service, model, clients, (PATIENCE, ""))
    }

    fn with(service: SocketAddr, model: &str, clients: usize, (patience, header): (Duration, &str)) -> Self {
        let book = Arc::new(Mutex::new(Book::default()));
        let body = serde_json::json!({
            "model": model, "prompt": "once upon a time", "max_tokens": TOKENS, "ignore_eos": true, "stream": true,
        })
        .to_string();
        let request: Arc<str> = request(&body, header).into();
        let client = |_| {
            let client = Client { service, request: Arc::clone(&request), patience, kept: None };
            tokio::spawn(client.ask_for_ever(Arc::clone(&book)))
        };
        Self { tasks: (0..clients).map(client).collect(), book }
    }

    /// What they felt since `since`. Requests that are still being tried are not in `longest`.
    pub fn felt(&self, since: Instant) -> Felt {
        let book = lock(&self.book);
        let count = |end| book.tries.iter().filter(|(at, is)| *at >= since && *is == end).count();
        Felt {
            whole: count(End::Whole),
            refused: count(End::Refused),
            unreachable: count(End::Unreachable),
            broken: count(End::Broken),
            silent: count(End::Silent),
            longest: book
                .answered
                .iter()
                .filter(|(at, _)| *at >= since)
                .map(|(_, took)| *took)
                .max()
                .unwrap_or_default(),
        }
    }
}

impl Load {
    /// When tries ended since `since` for which nobody took connections.
    pub fn unreachable(&self, since: Instant) -> Vec<Instant> {
        let book = lock(&self.book);
        let found_nobody = book.tries.iter().filter(|(at, end)| *at >= since && *end == End::Unreachable);
        found_nobody.map(|(at, _)| *at).collect()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// One request whose client takes nothing of the answer until it is told to: in flight for as long as a story wants.
#[derive(Debug)]
pub struct Held(BufReader<TcpStream>);

impl Held {
    /// Asks `gate` for more of `model` than the sockets on the way hold; returns when the answer has begun.
    ///
    /// # Errors
    /// When there is no answer, or it is not a good one.
    pub async fn start(gate: SocketAddr, model: &str) -> io::Result<Self> {
        let mut stream = small_window(gate).await?;
        let body = serde_json::json!({
            "model": model, "prompt": "once upon a time", "max_tokens": HELD_TOKENS, "ignore_eos": true, "stream": true,
        });
        stream.write_all(post(&body.to_string()).as_bytes()).await?;
        let mut stream = BufReader::with_capacity(HELD_WINDOW_BYTES as usize, stream);
        let mut status = String::new();
        timeout(PATIENCE, stream.read_line(&mut status)).await??;
        if status.split(' ').nth(1) == Some("200") { Ok(Self(stream)) } else { Err(io::Error::other(status)) }
    }

    /// Takes the rest: how did it end?
    pub async fn rest(self) -> End {
        let mut lines = self.0.lines();
        loop {
            match timeout(PATIENCE, lines.next_line()).await {
                Err(_) => return End::Silent,
                Ok(Ok(Some(line))) if line == "data: [DONE]" => return End::Whole,
                Ok(Ok(Some(_))) => {}
                Ok(Ok(None) | Err(_)) => return End::Broken,
            }
        }
    }
}

/// A connection whose client takes no more than it reads: a long answer is under way for as long as it wants.
///
/// # Errors
/// When nobody takes it.
pub async fn small_window(gate: SocketAddr) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(HELD_WINDOW_BYTES)?;
    timeout(CONNECT_MAX, socket.connect(gate)).await?
}

/// A request for a completion, as it goes over the wire.
pub fn post(body: &str) -> String {
    request(body, CLOSE)
}

fn request(body: &str, header: &str) -> String {
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n";
    format!("{head}{header}Content-Length: {}\r\n\r\n{body}", body.len())
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One client, and the connection that it has kept.
struct Client {
    service: SocketAddr,
    request: Arc<str>,
    patience: Duration,
    kept: Option<BufReader<TcpStream>>,
}

impl Client {
    async fn ask_for_ever(mut self, book: Arc<Mutex<Book>>) {
        loop {
            let begun = Instant::now();
            loop {
                let end = self.ask().await;
                let now = Instant::now();
                lock(&book).tries.push((now, end));
                if end == End::Whole {
                    lock(&book).answered.push((now, now - begun));
                    break;
                }
                tokio::time::sleep(RETRY).await;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Where a kept connection ends before a byte of the answer came, it was closed while the request was on its way: that one is sent again on
    /// a new one, as Go's client does and proxies do.
    async fn ask(&mut self) -> End {
        if let Some(kept) = self.kept.take()
            && let Some(end) = self.ask_on(kept).await
        {
            return end;
        }
        let Ok(Ok(stream)) = timeout(CONNECT_MAX, TcpStream::connect(self.service)).await else {
            return End::Unreachable;
        };
        self.ask_on(BufReader::new(stream)).await.unwrap_or(End::Broken)
    }

    /// `None` where nothing of an answer came.
    async fn ask_on(&mut self, mut stream: BufReader<TcpStream>) -> Option<End> {
        stream.write_all(self.request.as_bytes()).await.ok()?;
        let mut lines = stream.lines();
        let (mut status, mut closes, mut done) = (None, self.request.contains(CLOSE), false);
        loop {
            match timeout(self.patience, lines.next_line()).await {
                Err(_) => return Some(End::Silent),
                Ok(Ok(Some(line))) if status.is_none() => status = Some(line),
                Ok(Ok(Some(line))) if line.eq_ignore_ascii_case("connection: close") => closes = true,
                Ok(Ok(Some(line))) if line == "data: [DONE]" && closes => return Some(End::Whole),
                Ok(Ok(Some(line))) if line == "data: [DONE]" => done = true,
                // the last chunk, and the blank behind it
                Ok(Ok(Some(line))) if done && line == "0" => {
                    let blank = timeout(self.patience, lines.next_line()).await;
                    self.kept = matches!(blank, Ok(Ok(Some(_)))).then(|| lines.into_inner());
                    return Some(End::Whole);
                }
                Ok(Ok(Some(_))) => {}
                Ok(Ok(None) | Err(_)) => return status.map(|status| end_of(Some(&status))),
            }
        }
    }
}

/// How a try ended that did not come to its last token, by its status line.
fn end_of(status: Option<&str>) -> End {
    match status.and_then(|line| line.split(' ').nth(1)) {
        Some("503" | "429") => End::Refused,
        _ => End::Broken,
    }
}

/// By pod: when its count of delivered tokens was seen to be another, and what it was.
type Moves = BTreeMap<String, Vec<(Instant, u64)>>;

/// Tokens delivered by each replica over time, from the pages in the kubelet's folder of the pod's volume.
#[derive(Debug)]
pub struct Pages {
    moved: Arc<Mutex<Moves>>,
    task: JoinHandle<()>,
}

impl Pages {
    /// Samples `folders` (pod name, folder of its page) ten times a second.
    pub fn watch(folders: Vec<(String, PathBuf)>) -> Self {
        let moved = Arc::new(Mutex::new(Moves::new()));
        let shared = Arc::clone(&moved);
        let task = tokio::spawn(async move {
            loop {
                for (pod, folder) in &folders {
                    // the page names a process as its own container numbers it: who it is cannot be checked from out here
                    let Ok(page) = heartbeat::Reader::open(folder, 0).read_unverified() else { continue };
                    let mut all = lock(&shared);
                    let mine = all.entry(pod.clone()).or_default();
                    let tokens = page.beat.tokens_delivered;
                    if mine.last().is_none_or(|(_, before)| *before != tokens) {
                        mine.push((Instant::now(), tokens));
                    }
                }
                tokio::time::sleep(SAMPLE).await;
            }
        });
        Self { moved, task }
    }

    /// The longest time between `from` and now in which `pod` delivered nothing.
    pub fn silence(&self, pod: &str, from: Instant) -> Duration {
        let all = lock(&self.moved);
        let moments = all.get(pod).into_iter().flatten().map(|(at, _)| *at).filter(|at| *at > from);
        let mut last = from;
        let mut longest = Duration::ZERO;
        for at in moments.chain([Instant::now()]) {
            longest = longest.max(at - last);
            last = at;
        }
        longest
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_told_by_the_status() {
        assert_eq!(end_of(Some("HTTP/1.1 503 Service Unavailable")), End::Refused);
        assert_eq!(end_of(Some("HTTP/1.1 200 OK")), End::Broken);
        assert_eq!(end_of(None), End::Broken);
    }

    /// Answers so many requests on each connection, and closes the connection at the next one.
    async fn serve(listener: tokio::net::TcpListener, requests: usize, connections: Arc<Mutex<usize>>) {
        const ANSWER: &[u8] =
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            *lock(&connections) += 1;
            let mut lines = BufReader::new(stream);
            'kept: for _ in 0..requests {
                let mut line = String::new();
                while !line.ends_with("\r\n\r\nx") {
                    let mut byte = [0];
                    if tokio::io::AsyncReadExt::read_exact(&mut lines, &mut byte).await.is_err() {
                        break 'kept;
                    }
                    line.push(char::from(byte[0]));
                }
                lines.write_all(ANSWER).await.unwrap();
            }
            let _ = lines.fill_buf().await;
        }
    }

    #[tokio::test]
    async fn a_client_keeps_its_connection_and_loses_nothing_when_it_ends() {
        for (header, opened) in [("", 4), (CLOSE, 12)] {
            let connections = Arc::<Mutex<usize>>::default();
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let service = listener.local_addr().unwrap();
            let server = tokio::spawn(serve(listener, 3, Arc::clone(&connections)));
            let mut client = Client { service, request: request("x", header).into(), patience: PATIENCE, kept: None };
            for n in 0..12 {
                assert_eq!(client.ask().await, End::Whole, "{n}");
            }
            assert_eq!(*lock(&connections), opened);
            server.abort();
        }
    }

    #[test]
    fn only_what_was_felt_since_then_counts() {
        let (old, now) = (Instant::now(), Instant::now() + Duration::from_secs(1));
        let book = Book {
            tries: vec![(old, End::Unreachable), (now, End::Whole)],
            answered: vec![(old, Duration::from_secs(9)), (now, Duration::from_secs(2))],
        };
        let load = Load { book: Arc::new(Mutex::new(book)), tasks: Vec::new() };
        let felt = load.felt(now);
        assert_eq!((felt.whole, felt.unreachable, felt.longest), (1, 0, Duration::from_secs(2)));
    }
}
