//! The supervisor: tiny, never exits by itself, holds the probe port (DESIGN §4.4). Detector and gate are its children and start
//! again in milliseconds; in `truebeat run` the engine is its child too. It decides nothing about the engine's health.

pub mod board;
mod ends;
mod guests;
pub mod keep;
pub mod narrate;
mod outlive;
pub mod registry;

use std::ffi::OsString;
use std::fs::{File, TryLockError};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use socket2::SockRef;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use self::board::Board;
use self::ends::Ends;
use self::keep::{Input, Spec, keep};
use self::outlive::outlive_engine;
use self::registry::Registry;
use crate::files::keep_from_cleaning;
use crate::http;
use crate::launch::{EngineFile, LaunchConfig, Launcher, run_dirs};
use crate::own_program::OWN_PROGRAM;

/// That the engine is about to be ended is told to the detector first: it would take that for a death, and those in flight for suspects (I7).
/// One that does not answer holds nobody.
const ANNOUNCED_WAIT: Duration = Duration::from_millis(500);
/// What the gate still holds for clients when the engine has ended is waited for so long: for the rest of the engine's own time, which whoever
/// ends us grants anyway, within these bounds.
const UNSENT_WAIT_MIN: Duration = Duration::from_secs(2);
const UNSENT_WAIT_MAX: Duration = Duration::from_secs(30);
/// A detector that may go first sees to it that what it knows is written down; one whose disk hangs is given up.
const DISMISSED_WAIT: Duration = Duration::from_millis(1_500);

/// What a supervisor needs.
#[derive(Debug, Clone)]
pub struct SuperviseConfig {
    /// The program that has the roles `agent detect`, `agent gate` and `agent exec`: this one, but in tests.
    pub exe: PathBuf,
    /// Where the gate and the agent's HTTP listen.
    pub listen: SocketAddr,
    pub agent_listen: SocketAddr,
    /// Private to the agent's processes; made when it is not there.
    pub agent_dir: PathBuf,
    /// Arguments of the two children, without the role and without what the supervisor adds itself.
    pub gate_args: Vec<OsString>,
    pub detect_args: Vec<OsString>,
    /// What the two of them log.
    pub log_filter: String,
    /// The engine to run (`truebeat run`); `None` in a pod, where the kubelet runs it.
    pub engine: Option<LaunchConfig>,
    /// In a pod: what the engine's environment names, and how long the supervisor outlives SIGTERM while the engine lives (POD.md §9).
    pub page_dir: PathBuf,
    pub outlive: Duration,
    /// Tell a person what happens, on stderr.
    pub narrate: bool,
}

/// Why a supervisor cannot start.
#[derive(Debug, thiserror::Error)]
pub enum SuperviseError {
    #[error(
        "could not listen on {address} for {what}: {source}; is another program on that port? choose one with {option}"
    )]
    Listen { what: &'static str, address: SocketAddr, option: &'static str, source: std::io::Error },
    #[error("could not make the agent's directory {path}: {source}; choose a writable one with --agent-dir")]
    Directory { path: PathBuf, source: std::io::Error },
    #[error("another truebeat works in the agent's directory {0}; choose one of its own with --agent-dir")]
    InUse(PathBuf),
    #[error("could not start the thread that answers probes: {0}")]
    Thread(std::io::Error),
    #[error("could not take signals: {0}")]
    Signals(std::io::Error),
    #[error("could not set up the agent's directory: {0}")]
    SetUp(tokio::task::JoinError),
    #[error(transparent)]
    Launch(#[from] crate::launch::LaunchError),
}

/// Runs until SIGTERM, SIGINT, SIGQUIT or SIGHUP. Returns the exit code: 0, or 137 where the engine had to be killed at the end.
///
/// # Errors
/// Only at the start: a port in use, a directory not writable, a program that is not there.
pub async fn run(config: SuperviseConfig) -> Result<u8, SuperviseError> {
    // first of all: what is made below is removed by who is told to end, and a container's first process hears no signal that it does not take
    let mut ends = Ends::new()?;
    let child_ended = signal(SignalKind::child()).map_err(SuperviseError::Signals)?;
    let stops = signal(SignalKind::from_raw(nix::libc::SIGTSTP)).map_err(SuperviseError::Signals)?;
    let in_pod = config.engine.is_none();
    let gate_listener = bind(config.listen, in_pod, "the gate", "--listen")?;
    let http_listener = bind(config.agent_listen, in_pod, "the agent's HTTP", "--agent-listen")?;
    let ground = tokio::task::spawn_blocking({
        let config = config.clone();
        move || Ground::take(&config)
    });
    let Ground { claim, launcher, _kept } = tokio::select! {
        ground = ground => ground.map_err(SuperviseError::SetUp)??,
        // a disk that does not answer holds nobody who wants to leave
        () = ends.next() => return Ok(0),
    };
    if let Err(error) = nix::sys::prctl::set_child_subreaper(true) {
        tracing::warn!(%error, "orphans of the engine will not come to this process");
    }
    let board = Arc::new(Board::default());
    http::serve_on_own_thread(http_listener, Arc::clone(&board), !in_pod).map_err(SuperviseError::Thread)?;
    let registry = Arc::new(Registry::default());
    let narrator = narrate::narrate(board.statuses(), config.narrate);
    let children = async {
        let detector = keep(detector(&config), Arc::clone(&registry), Arc::clone(&board));
        let gate = keep(gate(&config, gate_listener), Arc::clone(&registry), Arc::clone(&board));
        let others = async {
            tokio::join!(
                gate,
                registry.reap_orphans(child_ended),
                narrator,
                stay(stops, config.narrate),
                board.pulse().beat()
            )
        };
        tokio::select! {
            () = detector => {}
            _ = others => {}
            () = given_up(&board) => {}
        }
    };
    let life = async {
        let code = match launcher {
            Some(launcher) => {
                let grace = config.engine.as_ref().map_or(Duration::ZERO, |engine| engine.grace);
                let lone = claim.is_some();
                run_engine(&launcher, lone, grace, (&registry, &board), &mut ends).await
            }
            None => {
                ends.next().await;
                outlive_engine(config.outlive, &config.agent_dir, &config.page_dir).await;
                board.all_is_sent(UNSENT_WAIT_MAX).await;
                0
            }
        };
        board.dismiss();
        code
    };
    let (code, ()) = tokio::join!(life, children);
    Ok(code)
}

/// What a supervisor has on disk before anything starts.
struct Ground {
    claim: Option<File>,
    launcher: Option<Launcher>,
    _kept: Vec<File>,
}

impl Ground {
    /// Blocks for as long as the disk does.
    fn take(config: &SuperviseConfig) -> Result<Self, SuperviseError> {
        make_private(&config.agent_dir)?;
        let claim = claim(&config.agent_dir)?;
        if config.engine.is_none() {
            link_program(&config.agent_dir);
        }
        let launcher = config.engine.clone().map(Launcher::new).transpose()?;
        if launcher.is_some() && claim.is_some() {
            EngineFile::set_aside(&config.agent_dir);
        }
        Ok(Self { claim, launcher, _kept: keep_directories(config) })
    }
}

/// Returns when a detector that may go is waited for no longer.
async fn given_up(board: &Board) {
    board.dismissed().await;
    tokio::time::sleep(DISMISSED_WAIT).await;
}

/// Runs the engine until it is told to end, ends it, and waits for what the gate still holds. `lone`: the directory is nobody else's, so what a
/// predecessor left in it may go.
async fn run_engine(
    launcher: &Launcher,
    lone: bool,
    grace: Duration,
    (registry, board): (&Registry, &Board),
    ends: &mut Ends,
) -> u8 {
    let (stop, stopped) = watch::channel(false);
    let told = OnceLock::new();
    let run = async {
        if lone {
            launcher.clear_predecessor(registry, stopped.clone()).await;
        }
        let code = launcher.run(registry, stopped).await;
        let left = grace.saturating_sub(told.get().map_or(Duration::ZERO, Instant::elapsed));
        board.all_is_sent(left.clamp(UNSENT_WAIT_MIN, UNSENT_WAIT_MAX)).await;
        code
    };
    let end = async {
        ends.next().await;
        told.get_or_init(Instant::now);
        let tell = async {
            board.announce_end(ANNOUNCED_WAIT).await;
            stop.send_replace(true);
        };
        // Nobody is left to tell the engine a second time; a second signal means now.
        tokio::join!(tell, ends.insisted());
    };
    tokio::select! {
        code = run => code,
        () = end => launcher.end_now(registry),
    }
}

/// A `^Z` would stop this process alone: nobody would take the engine's output any more, which holds the engine, answer a probe, or start what
/// ended; and the detector, which goes on, would kill an engine for it that nothing ails. So it is heard and not obeyed.
async fn stay(mut stops: Signal, narrate: bool) {
    while stops.recv().await.is_some() {
        if narrate {
            narrate::say(
                "Ctrl-Z does not stop an engine that has clients; Ctrl-C ends it. To have the terminal back, start it with & behind it, or in tmux",
            );
        }
    }
}

/// Connections that wait in the kernel's queue; it takes its own bound (`net.core.somaxconn`) where that is less.
const BACKLOG: i32 = 4096;

fn bind(
    address: SocketAddr,
    in_pod: bool,
    what: &'static str,
    option: &'static str,
) -> Result<TcpListener, SuperviseError> {
    let failed = |source| SuperviseError::Listen { what, address, option, source };
    let listener = if in_pod { role::listen_in_pod(address) } else { TcpListener::bind(address) };
    let listener = listener.map_err(failed)?;
    // the standard library asks for 128, and whoever comes beyond them while the gate is replaced would try again in seconds
    SockRef::from(&listener).listen(BACKLOG).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

fn make_private(path: &Path) -> Result<(), SuperviseError> {
    use std::os::unix::fs::DirBuilderExt;
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|source| SuperviseError::Directory { path: path.to_owned(), source })
}

/// Held for as long as the supervisor lives: two in one directory would take each other's engine for their own, and kill it. The kernel lets
/// go of it with the process, whatever ends that.
fn claim(dir: &Path) -> Result<Option<File>, SuperviseError> {
    let failed = |source| SuperviseError::Directory { path: dir.to_owned(), source };
    let lock = File::options().create(true).append(true).open(dir.join(run_dirs::LOCK)).map_err(failed)?;
    match lock.try_lock() {
        Ok(()) => Ok(Some(lock)),
        Err(TryLockError::WouldBlock) => Err(SuperviseError::InUse(dir.to_owned())),
        Err(TryLockError::Error(error)) => {
            tracing::warn!(%error, path = %dir.display(), "nobody can tell whether this directory is another's, too");
            Ok(None)
        }
    }
}

/// A run of weeks writes some of its files once. What is kept is so for as long as the answer lives.
fn keep_directories(config: &SuperviseConfig) -> Vec<File> {
    let pages = config.engine.as_ref().map(|engine| &engine.page_dir);
    [Some(&config.agent_dir), pages].into_iter().flatten().filter_map(|dir| keep_from_cleaning(dir)).collect()
}

/// Whoever looks into this container from outside (`kubectl truebeat bundles`) starts our program by this, whatever the image calls it.
fn link_program(dir: &Path) {
    let link = dir.join(Path::new(crds::agent::AGENT_PROGRAM).file_name().unwrap_or_default());
    let made = std::fs::read_link(OWN_PROGRAM).and_then(|program| {
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(program, &link)
    });
    if let Err(error) = made {
        tracing::warn!(%error, path = %link.display(), "evidence cannot be fetched with `kubectl truebeat bundle`");
    }
}

fn detector(config: &SuperviseConfig) -> Spec {
    let args = ["agent", "detect", "--agent-dir"].map(OsString::from).into_iter();
    let args = args.chain([config.agent_dir.clone().into()]).chain(config.detect_args.iter().cloned());
    spec(config, "detector", args.collect(), Input::Talk)
}

fn gate(config: &SuperviseConfig, listener: TcpListener) -> Spec {
    let supervisor = std::process::id().to_string();
    let args = ["agent", "gate", "--supervisor", &supervisor, "--agent-dir"].map(OsString::from).into_iter();
    let args = args.chain([config.agent_dir.clone().into()]).chain(config.gate_args.iter().cloned());
    spec(config, "gate", args.collect(), Input::Listener(listener))
}

fn spec(config: &SuperviseConfig, name: &'static str, args: Vec<OsString>, stdin: Input) -> Spec {
    Spec { name, program: config.exe.clone(), args, log_filter: config.log_filter.clone(), stdin }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A crowd that comes while no gate takes anybody waits in the kernel's queue.
    #[test]
    fn many_may_wait_for_a_gate_that_is_replaced() {
        let most = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap().trim().parse().unwrap();
        let listener = bind("127.0.0.1:0".parse().unwrap(), false, "the gate", "--listen").unwrap();
        let address = listener.local_addr().unwrap();
        let wait = std::time::Duration::from_secs(20);
        let crowd = (0..600.min(most)).map(|_: usize| std::net::TcpStream::connect_timeout(&address, wait).unwrap());
        let crowd: Vec<_> = crowd.collect();
        // the last handshake is done only where the queue has taken it
        let taken = (0..crowd.len()).filter(|_| listener.accept().is_ok()).count();
        assert_eq!(taken, crowd.len());
    }

    /// As `systemd-tmpfiles` looks before it clears a directory.
    fn is_cleared(dir: &Path) -> bool {
        let dir = File::open(dir).unwrap();
        dir.try_lock_shared().is_ok()
    }

    #[test]
    fn the_directories_of_a_run_are_not_cleared_while_it_lives() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["agent", "pages"].map(|name| dir.path().join(name));
        paths.iter().for_each(|path| std::fs::create_dir(path).unwrap());
        let [agent_dir, page_dir] = paths.clone();
        let engine = LaunchConfig {
            command: Vec::new(),
            exe: PathBuf::new(),
            agent_dir: agent_dir.clone(),
            page_dir: page_dir.clone(),
            log_path: PathBuf::new(),
            grace: Duration::ZERO,
            narrate: false,
        };
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let config = SuperviseConfig {
            exe: PathBuf::new(),
            listen: address,
            agent_listen: address,
            agent_dir,
            gate_args: Vec::new(),
            detect_args: Vec::new(),
            log_filter: String::new(),
            engine: Some(engine),
            page_dir,
            outlive: Duration::ZERO,
            narrate: false,
        };
        let claimed = claim(&config.agent_dir).unwrap();
        assert!(claimed.is_some() && paths.iter().all(|path| is_cleared(path)), "that lock is of a file");
        let kept = keep_directories(&config);
        assert!(!paths.iter().any(|path| is_cleared(path)));
        assert!(matches!(claim(&config.agent_dir), Err(SuperviseError::InUse(_))));
        drop(kept);
        assert!(paths.iter().all(|path| is_cleared(path)));
    }
}
