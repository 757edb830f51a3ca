//! The gate's process: where its listener comes from, what it gives up, and until when it lives. What a gate does: `gate`.

use std::fs::DirBuilder;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::{Signal, raise};
use nix::unistd::{Pid, getppid};
use tokio::net::TcpListener;

use crate::gate::{self, GateConfig, GateError, confine};
use crate::signals;
use crate::sources::{EngineProcess, ExitWatch};

/// A gate as a process.
#[derive(Debug)]
pub struct GateRole {
    pub door: Door,
    pub config: GateConfig,
    /// It takes from itself what it never needs.
    pub confined: bool,
}

/// Where clients come.
#[derive(Debug, Clone, Copy)]
pub enum Door {
    /// A socket of the gate's own.
    Own(SocketAddr),
    /// The listening socket that is its standard input, of this supervisor, which is its parent.
    Of { supervisor: Pid },
}

/// Why such a process ended.
#[derive(Debug, thiserror::Error)]
pub enum GateRoleError {
    #[error(
        "the gate could not listen on {address}: {source}; is another program on that port? choose one with --listen"
    )]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("the gate's standard input is no listening socket: {0}; --supervisor is for the supervisor alone")]
    Inherit(std::io::Error),
    #[error("could not make the gate's own folder {path}: {source}; choose another directory with --agent-dir")]
    Folder { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Gate(#[from] GateError),
}

impl GateRole {
    /// Until the supervisor is gone, or for ever.
    ///
    /// # Errors
    /// When it cannot start.
    pub async fn run(self) -> Result<(), GateRoleError> {
        if let Err(error) = role::take_all_descriptors() {
            tracing::warn!(%error, "the gate could not raise its limit of open files");
        }
        let _deaf = matches!(self.door, Door::Of { .. }).then(signals::left_to_the_supervisor);
        let listener = match self.door {
            Door::Own(address) => {
                let bound = TcpListener::bind(address).await;
                bound.map_err(|source| GateRoleError::Listen { address, source })?
            }
            Door::Of { supervisor } => {
                // a gate that is stopped looks for nobody (the supervisor's children are its first thread's, whose end this is about)
                let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
                tokio::spawn(leave_with(supervisor));
                inherited_listener().map_err(GateRoleError::Inherit)?
            }
        };
        let own = self.config.control.parent().unwrap_or(Path::new("/"));
        let made = DirBuilder::new().recursive(true).mode(0o700).create(own);
        made.map_err(|source| GateRoleError::Folder { path: own.to_owned(), source })?;
        if self.confined {
            confine::confine(own);
        } else {
            tracing::info!("the gate is not confined: --no-confine");
        }
        Ok(gate::run(listener, self.config).await?)
    }
}

/// The supervisor gave us its listening socket as standard input.
fn inherited_listener() -> std::io::Result<TcpListener> {
    use std::os::fd::AsFd;
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    let listener = std::net::TcpListener::from(socket);
    listener.set_nonblocking(true)?;
    listener.local_addr()?;
    TcpListener::from_std(listener)
}

/// A gate without a supervisor would hold the port against the next one. The supervisor is told, not asked for: one that was killed before
/// this process ran is its parent no more.
async fn leave_with(supervisor: Pid) {
    let watch = EngineProcess::of(supervisor.as_raw()).and_then(|process| ExitWatch::of(&process).ok());
    while getppid() == supervisor {
        match &watch {
            Some(watch) => watch.ended().await,
            None => tokio::time::sleep(Duration::from_millis(250)).await,
        }
        // the kernel gives us another parent in the same breath
        tokio::task::yield_now().await;
    }
    tracing::warn!("the supervisor is gone; the gate leaves");
    // nobody is left to read a status, and a thread that a disk holds is not waited for
    let _ = raise(Signal::SIGKILL);
}
