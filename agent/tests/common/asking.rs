//! How a test waits for what runs, and asks it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

pub const SOON: Duration = Duration::from_secs(40);

pub fn until(what: &str, mut wanted: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !wanted() {
        assert!(begun.elapsed() < SOON, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub fn get(address: &str, path: &str) -> Option<String> {
    ask(address, &format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"))
}

pub fn ask(address: &str, request: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    stream.write_all(request.as_bytes()).ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}
