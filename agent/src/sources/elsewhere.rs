//! Does an engine that nobody finds at the port that is asked answer at another? A command with a port that nobody told us of looks like a
//! start-up that never ends, and would be ended as one, again and again.
//!
//! Reads `/proc`, and asks the ports on which the engine's own processes listen for their models: what a dashboard or a store of keys beside
//! an engine answers to that is no list. Not before the start has lasted a while: such a question may disturb ranks that are finding each other.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use http::{StatusCode, Uri};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::get::{Get, with_path};
use super::net::{LISTEN, TABLE_BYTES_MAX};
use super::procs::ProcRoot;
use super::tree::{EngineProcess, process_tree};

/// Nobody has been at the port for so long before we look elsewhere.
const PATIENCE: Duration = Duration::from_secs(120);
const AGAIN: Duration = Duration::from_secs(30);
const ASK_DEADLINE: Duration = Duration::from_secs(1);
/// What is asked in one look: the root's own first.
const DOORS_MAX: usize = 16;

/// Looks for the door of one engine process.
#[derive(Debug)]
pub struct Elsewhere {
    engine: Option<EngineProcess>,
    began: Instant,
    looked: Option<Instant>,
    found: Option<SocketAddr>,
}

impl Elsewhere {
    /// For this engine; without one nothing is ever found.
    pub fn of(engine: Option<EngineProcess>) -> Self {
        Self { engine, began: Instant::now(), looked: None, found: None }
    }

    /// Nobody is at `asked`: is the engine elsewhere? Looks now and then, and says what it saw last.
    pub async fn is_there_another(&mut self, asked: &Uri) -> bool {
        let Some(engine) = self.engine.clone().filter(|_| self.began.elapsed() >= PATIENCE) else { return false };
        if self.looked.is_some_and(|at| at.elapsed() < AGAIN) {
            return self.found.is_some();
        }
        let before = self.found;
        let doors = tokio::task::spawn_blocking(move || doors_of(&ProcRoot::live(), &process_tree(&engine))).await;
        let doors = doors.unwrap_or_default().into_iter().filter(|door| !is_at(asked, *door));
        self.found = answering(doors.take(DOORS_MAX).collect()).await;
        self.looked = Some(Instant::now());
        if let Some(door) = self.found.filter(|found| before != Some(*found)) {
            let asked = asked.authority().map_or("", |authority| authority.as_str());
            tracing::warn!(
                "nobody is at http://{asked}, and the engine answers at http://{door}: it is looked for in the wrong place; name the right one \
                 by --engine-url (TRUEBEAT_ENGINE_URL)"
            );
        }
        self.found.is_some()
    }
}

/// Is this the door that is asked anyway? One that is asked by a name is on this machine, wherever else the engine listens at its port.
fn is_at(asked: &Uri, door: SocketAddr) -> bool {
    let host = asked.host().unwrap_or_default().trim_matches(['[', ']']);
    let same = host.parse::<IpAddr>().map_or(door.ip().is_loopback(), |ip| ip.is_unspecified() || ip == door.ip());
    same && asked.port_u16() == Some(door.port())
}

/// The first that lists its models, or wants a key for that. All are asked at once: a door that swallows every word holds nobody for longer.
async fn answering(doors: Vec<SocketAddr>) -> Option<SocketAddr> {
    let mut asked = JoinSet::new();
    for (place, door) in doors.into_iter().enumerate() {
        asked.spawn(async move { lists_models(door).await.then_some((place, door)) });
    }
    let mut found = Vec::new();
    while let Some(answer) = asked.join_next().await {
        found.extend(answer.ok().flatten());
    }
    found.into_iter().min().map(|(_, door)| door)
}

async fn lists_models(door: SocketAddr) -> bool {
    let Ok(base) = format!("http://{door}").parse::<Uri>() else { return false };
    let uri = with_path(&base, "/v1/models");
    let get = Get { uri, accept: "application/json", deadline: ASK_DEADLINE, body_bytes_max: 0 };
    matches!(get.status().await, Ok(StatusCode::OK | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN))
}

/// Where these processes listen, as who is on this machine reaches it; in their order.
fn doors_of(proc: &ProcRoot, pids: &[i32]) -> Vec<SocketAddr> {
    let Some(first) = pids.first() else { return Vec::new() };
    let listeners = listeners(proc, *first);
    let mut doors = Vec::new();
    for door in pids.iter().flat_map(|pid| sockets(proc, *pid)).filter_map(|inode| listeners.get(&inode)) {
        if !doors.contains(door) {
            doors.push(*door);
        }
    }
    doors
}

/// The sockets that a process has open, by inode.
fn sockets(proc: &ProcRoot, pid: i32) -> Vec<u64> {
    let inode = |(_, target): (PathBuf, PathBuf)| {
        let name = target.as_os_str().as_bytes().strip_prefix(b"socket:[")?.strip_suffix(b"]")?;
        std::str::from_utf8(name).ok()?.parse().ok()
    };
    proc.open_files(pid).filter_map(inode).collect()
}

/// Who listens in the network of this process, by inode.
fn listeners(proc: &ProcRoot, pid: i32) -> HashMap<u64, SocketAddr> {
    // the kernel names listeners first: what is cut off are connections
    let table = |name: &str| File::open(proc.path(pid, name)).map(|file| BufReader::new(file.take(TABLE_BYTES_MAX)));
    let tables = ["net/tcp", "net/tcp6"].map(|name| table(name).ok());
    let lines = tables.into_iter().flatten().flat_map(|table| table.lines().map_while(Result::ok));
    lines.filter_map(|line| listener(&line)).collect()
}

/// `sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode …`, of which addresses are words of the machine, in hexadecimal.
fn listener(line: &str) -> Option<(u64, SocketAddr)> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let (Some(local), Some(&state), Some(inode)) = (fields.get(1), fields.get(3), fields.get(9)) else { return None };
    if state != LISTEN {
        return None;
    }
    let (address, port) = local.split_once(':')?;
    let words: Option<Vec<u8>> = (0..address.len() / 8)
        .map(|at| Some(u32::from_str_radix(address.get(at * 8..at * 8 + 8)?, 16).ok()?.to_ne_bytes()))
        .collect::<Option<Vec<[u8; 4]>>>()
        .map(|words| words.concat());
    let address = match words?.as_slice() {
        [0, 0, 0, 0] => IpAddr::V4(Ipv4Addr::LOCALHOST),
        four @ [_, _, _, _] => IpAddr::V4(<[u8; 4]>::try_from(four).ok()?.into()),
        sixteen => match Ipv6Addr::from(<[u8; 16]>::try_from(sixteen).ok()?) {
            Ipv6Addr::UNSPECIFIED => IpAddr::V6(Ipv6Addr::LOCALHOST),
            other => other.to_canonical(),
        },
    };
    Some((inode.parse().ok()?, SocketAddr::new(address, u16::from_str_radix(port, 16).ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn the_doors_of_a_process_are_where_it_listens() {
        let (any, own, six) = (bound("0.0.0.0:0"), bound("127.0.0.1:0"), TcpListener::bind("[::]:0"));
        let doors = doors_of(&ProcRoot::live(), &[std::process::id().cast_signed()]);
        let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
        let at = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        assert!(doors.contains(&at(port(&any))) && doors.contains(&at(port(&own))), "{doors:?}");
        // a machine may have no IPv6
        if let Ok(six) = six {
            assert!(doors.contains(&SocketAddr::from((Ipv6Addr::LOCALHOST, port(&six)))), "{doors:?}");
        }
        assert!(doors_of(&ProcRoot::live(), &[]).is_empty());
    }

    #[test]
    fn whoever_is_connected_is_no_listener_and_nonsense_is_nobody() {
        let line = |state: &str| {
            format!(" 0: 0100007F:1F40 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 77 1 0")
        };
        assert_eq!(listener(&line("0A")), Some((77, "127.0.0.1:8000".parse().unwrap())));
        assert_eq!(listener(&line("01")), None);
        for nonsense in
            ["", "sl local_address", " 0: zz:1F40 0:0 0A 0:0 0:0 0 0 0 77", " 0: 01:1F40 0:0 0A 0:0 0:0 0 0 0 77"]
        {
            assert_eq!(listener(nonsense), None, "{nonsense}");
        }
    }

    #[tokio::test]
    async fn only_who_lists_models_is_an_engine() {
        let (dashboard, engine) = (serving("404 Not Found"), serving("401 Unauthorized"));
        let silent = bound("127.0.0.1:0");
        assert_eq!(answering(vec![silent.local_addr().unwrap(), dashboard, engine]).await, Some(engine));
        assert_eq!(answering(vec![dashboard]).await, None);
    }

    #[test]
    fn the_door_that_is_asked_is_not_another() {
        for (asked, door, same) in [
            ("http://127.0.0.1:8000/", "127.0.0.1:8000", true),
            ("http://127.0.0.1:8000/", "10.0.0.5:8000", false), // an engine of `--host 10.0.0.5`
            ("http://127.0.0.1:8000/", "127.0.0.1:9000", false),
            ("http://localhost:8000/", "127.0.0.1:8000", true),
            ("http://localhost:8000/", "10.0.0.5:8000", false),
            ("http://[::1]:8000/", "[::1]:8000", true),
            ("http://[::1]:8000/", "127.0.0.1:8000", false),
            ("http://0.0.0.0:8000/", "127.0.0.1:8000", true),
        ] {
            assert_eq!(is_at(&asked.parse().unwrap(), door.parse().unwrap()), same, "{asked} {door}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_is_left_alone_for_a_while() {
        let listener = bound("127.0.0.1:0");
        // one whose standard input is the listener has it open as a server has
        let held = std::os::fd::OwnedFd::from(listener.try_clone().unwrap());
        let mut engine = std::process::Command::new("sleep").arg("600").stdin(held).spawn().unwrap();
        let mut elsewhere = Elsewhere::of(EngineProcess::of(engine.id().cast_signed()));
        answer_all(listener, "200 OK");
        let asked: Uri = "http://127.0.0.1:1".parse().unwrap();
        assert!(!elsewhere.is_there_another(&asked).await);
        tokio::time::advance(PATIENCE).await;
        tokio::time::resume();
        assert!(elsewhere.is_there_another(&asked).await);
        engine.kill().unwrap();
        engine.wait().unwrap();
    }

    fn bound(address: &str) -> TcpListener {
        TcpListener::bind(address).unwrap()
    }

    /// Answers everybody so, for as long as this program runs.
    fn serving(status: &'static str) -> SocketAddr {
        let listener = bound("127.0.0.1:0");
        let address = listener.local_addr().unwrap();
        answer_all(listener, status);
        address
    }

    fn answer_all(listener: TcpListener, status: &'static str) {
        std::thread::spawn(move || {
            use std::io::{Read, Write};
            for mut stream in listener.incoming().flatten() {
                let _ = stream.read(&mut [0; 1024]);
                let _ = write!(stream, "HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            }
        });
    }
}
