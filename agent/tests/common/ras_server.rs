//! A server that speaks NCCL's RAS protocol, and some that do not.
#![allow(dead_code, reason = "each test crate uses its own part")]

use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

pub const JSON: &str = include_str!("../../../vitals/tests/samples/ras/stopped.json");
pub const TEXT: &str = include_str!("../../../vitals/tests/samples/ras/stopped.txt");

/// How the server of a test behaves once its handshake is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// 2.28.7 and later.
    Json,
    /// 2.24 to 2.28.6: knows no formats.
    Text,
    /// The same, which waits for a silent rank first.
    Waits,
    /// Half an answer, and the connection stays open.
    Half,
    /// A byte every now and then, without end.
    Drip,
    /// As fast as it can, without end.
    Flood,
    /// Closes in the middle of the handshake.
    Hangup,
}

pub async fn server(manner: Manner) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            // a client that leaves in mid-answer is what some of these tests are about
            tokio::spawn(async move { _ = converse(stream, manner).await });
        }
    });
    address
}

/// The documented conversation, one command a line, in any case of letters.
async fn converse(stream: TcpStream, manner: Manner) -> std::io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read).lines();
    let mut json = false;
    while let Some(line) = lines.next_line().await? {
        match line.to_ascii_lowercase().as_str() {
            "client protocol 2" => write.write_all(b"SERVER PROTOCOL 2\n").await?,
            "timeout 2" if manner == Manner::Hangup => return Ok(()),
            "timeout 2" => write.write_all(b"OK\n").await?,
            "set format json" if manner != Manner::Text => {
                json = true;
                write.write_all(b"OK\n").await?;
            }
            "verbose status" => return answer(&mut write, manner, json).await,
            unknown => write.write_all(format!("ERROR: Unknown command {unknown}\n").as_bytes()).await?,
        }
    }
    Ok(())
}

async fn answer(write: &mut (impl AsyncWriteExt + Unpin), manner: Manner, json: bool) -> std::io::Result<()> {
    match manner {
        Manner::Half => {
            write.write_all(&JSON.as_bytes()[..JSON.len() / 2]).await?;
            std::future::pending::<()>().await;
        }
        Manner::Drip => loop {
            write.write_all(b"x").await?;
            tokio::time::sleep(Duration::from_millis(20)).await;
        },
        Manner::Flood => loop {
            write.write_all(&[b'x'; 1 << 16]).await?;
        },
        Manner::Waits => {
            tokio::time::sleep(Duration::from_secs(2)).await;
            write.write_all(JSON.as_bytes()).await?;
        }
        _ => write.write_all(if json { JSON } else { TEXT }.as_bytes()).await?,
    }
    Ok(())
}
