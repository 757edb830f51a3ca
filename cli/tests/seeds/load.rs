//! The clients of a seed: most requests a few at a time, the last ones all at once, as the tail of a benchmark is. A client whose stream is
//! silent keeps it open, as the field's do; one that is refused or broken off tries again, as OpenAI's client does.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A stream without a word for so long hangs, where one is to hang.
const HANGS_AFTER: Duration = Duration::from_secs(6);
/// The same where none is to: what a machine that runs much else needs to give up a step and load a model is no hang.
const SILENCE_MAX: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_millis(100);
/// One request with all its tries.
const PATIENCE: Duration = Duration::from_secs(90);
/// Of each request but those of a long tail.
pub const TOKENS: usize = 16;
/// So long a tail that its requests are all under way together at some time, on a machine too that starts their clients late.
const LONG_TAIL_TOKENS: usize = 2000;

/// How many requests, and how many of them come last and together.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub total: usize,
    pub tail: usize,
    /// The last requests are long ones.
    pub long_tail: bool,
}

/// What the clients felt.
#[derive(Debug)]
pub struct Felt {
    pub done: usize,
    pub hung: usize,
    pub retried: usize,
    pub longest: Duration,
    /// Streams that hang are kept open: their work stays owed.
    _open: Vec<TcpStream>,
}

impl Felt {
    /// Where nothing serves nobody is let in.
    pub fn nothing() -> Self {
        Self { done: 0, hung: 0, retried: 0, longest: Duration::ZERO, _open: Vec::new() }
    }

    /// A line of the table.
    pub fn print(&self, seed: &str, guards: &str, shape: &Shape, said: &str) {
        let done = format!("{}/{}", self.done, shape.total);
        let (retried, hung, longest) = (self.retried, self.hung, self.longest.as_secs_f64());
        println!("{seed:<5} {guards:<7} {done:<13} {retried:>7} {hung:>5} {longest:>11.1} s  {said}");
    }
}

/// A load that is ready to run.
pub struct Load {
    gate: String,
    shape: Shape,
    give_up: bool,
    silence_max: Duration,
    done: AtomicUsize,
    retried: AtomicUsize,
    stop: AtomicBool,
    hung: Mutex<Vec<TcpStream>>,
    longest: Mutex<Duration>,
}

enum End {
    Whole,
    /// Refused, broken off, or nobody there.
    Again,
    Silent(TcpStream),
}

impl Load {
    pub fn new(gate: &str, shape: &Shape) -> Self {
        Self {
            gate: gate.to_owned(),
            shape: *shape,
            give_up: false,
            done: AtomicUsize::new(0),
            retried: AtomicUsize::new(0),
            silence_max: SILENCE_MAX,
            stop: AtomicBool::new(false),
            hung: Mutex::default(),
            longest: Mutex::default(),
        }
    }

    /// Runs until all is done, or something hangs: then no more is asked.
    pub fn until_it_hangs(self) -> Felt {
        Self { give_up: true, silence_max: HANGS_AFTER, ..self }.run()
    }

    /// Runs until every request was answered; a stream that hangs counts, and is asked again.
    pub fn until_all_is_done(self) -> Felt {
        self.run()
    }

    fn run(self) -> Felt {
        let load = Arc::new(self);
        let Shape { total, tail, long_tail } = load.shape;
        // fewer at a time than come last, so that no batch before is as large
        load.clone().crowd(total - tail, tail - 1, TOKENS);
        load.clone().crowd(tail, tail, if long_tail { LONG_TAIL_TOKENS } else { TOKENS });
        let open = std::mem::take(&mut *load.hung.lock().unwrap());
        Felt {
            done: load.done.load(Ordering::Relaxed),
            hung: open.len(),
            retried: load.retried.load(Ordering::Relaxed),
            longest: *load.longest.lock().unwrap(),
            _open: open,
        }
    }

    /// `count` requests by `clients` at a time.
    fn crowd(self: Arc<Self>, count: usize, clients: usize, tokens: usize) {
        let next = Arc::new(AtomicUsize::new(0));
        let client = |_| {
            let (load, next) = (self.clone(), next.clone());
            std::thread::spawn(move || {
                while next.fetch_add(1, Ordering::Relaxed) < count && !load.stop.load(Ordering::Relaxed) {
                    load.request(tokens);
                }
            })
        };
        let clients: Vec<_> = (0..clients).map(client).collect();
        clients.into_iter().for_each(|client| client.join().unwrap());
    }

    /// One request until it is answered, hangs, or another one did.
    fn request(&self, tokens: usize) {
        let since = Instant::now();
        while since.elapsed() < PATIENCE && !self.stop.load(Ordering::Relaxed) {
            match self.ask(tokens) {
                End::Whole => {
                    self.done.fetch_add(1, Ordering::Relaxed);
                    let mut longest = self.longest.lock().unwrap();
                    *longest = longest.max(since.elapsed());
                    return;
                }
                End::Again => {
                    self.retried.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(RETRY);
                }
                End::Silent(stream) => {
                    self.hung.lock().unwrap().push(stream);
                    self.stop.fetch_or(self.give_up, Ordering::Relaxed);
                }
            }
        }
    }

    fn ask(&self, tokens: usize) -> End {
        let body = format!(
            r#"{{"prompt":"once upon a time","max_tokens":{tokens},"temperature":0,"ignore_eos":true,"stream":true}}"#
        );
        let post = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let Ok(mut stream) = TcpStream::connect(&self.gate) else { return End::Again };
        stream.set_read_timeout(Some(self.silence_max)).unwrap();
        if stream.write_all(post.as_bytes()).is_err() {
            return End::Again;
        }
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        loop {
            line.clear();
            match reader.read_line(&mut line) {
                Ok(0) => return End::Again,
                Ok(_) if line.trim_end() == "data: [DONE]" => return End::Whole,
                Ok(_) => (),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    return End::Silent(reader.into_inner());
                }
                Err(_) => return End::Again,
            }
        }
    }
}
