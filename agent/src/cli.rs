//! The command line of the agent's roles and of `truebeat run`: options as values, and what each role does with them.

use std::ffi::{CStr, OsString};
use std::io::IsTerminal;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use ::http::Uri;
use clap::{Args, Subcommand};
use nix::unistd::{Pid, getppid};

use crate::footprint;
use crate::forensics;
use crate::forensics::shelf::{self, EvidenceArgs};
use crate::gate::control::socket_in;
use crate::gate::{self, GateConfig};
use crate::gate_role::{Door, GateRole, GateRoleError};
use crate::launch::{EngineFile, LaunchConfig, run_dirs};
use crate::never::{self, NeverError};
use crate::options::WatchArgs;
use crate::own_program::{OWN_PROGRAM, be_called};
use crate::short_slice;
use crate::signals;
use crate::sources::process_tree;
use crate::spare_thread;
use crate::supervisor::{self, SuperviseConfig, SuperviseError};
use crate::watch::{self, WatchError};

/// The sidecar's roles.
#[derive(Debug, Args)]
pub struct AgentArgs {
    #[command(subcommand)]
    pub role: Role,
}

/// One process each.
#[derive(Debug, Subcommand)]
pub enum Role {
    /// The sidecar's first process: holds the probe port, keeps detector and gate alive, never exits by itself.
    Supervise(Box<SuperviseArgs>),
    /// Watches the engine and acts on the verdict; a child of `supervise`.
    Detect(Box<DetectArgs>),
    /// The reverse proxy in front of the engine; a child of `supervise`.
    Gate(GateArgs),
    /// Tells of the evidence that lies here, or sends it; `kubectl truebeat bundles` starts it in a pod.
    Evidence(EvidenceArgs),
    /// Makes a session and becomes the engine (internal, `truebeat run`).
    #[command(hide = true)]
    Exec {
        /// Whoever starts it. Where that is its parent no more, it becomes nothing.
        #[arg(long)]
        supervisor: i32,
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
    /// Reads the GPUs for a detector that must not (internal).
    #[command(hide = true)]
    NvmlProbe,
    /// Reads a Python process's stacks for a detector that must not (internal).
    #[command(hide = true)]
    PyStacks { pid: i32 },
}

impl Role {
    /// Of those that are started by a link to this program: of all others its file's name says it, or the engine's.
    fn process_name(&self) -> Option<&'static CStr> {
        match self {
            Self::Detect(_) => Some(c"truebeat-detect"),
            Self::Gate(_) => Some(c"truebeat-gate"),
            Self::NvmlProbe => Some(c"truebeat-nvml"),
            Self::PyStacks { .. } => Some(c"truebeat-stacks"),
            Self::Supervise(_) | Self::Evidence(_) | Self::Exec { .. } => None,
        }
    }
}

#[derive(Debug, Args)]
pub struct SuperviseArgs {
    /// Where clients reach the engine through the gate.
    #[arg(long, env = "TRUEBEAT_LISTEN", default_value_t = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 8080)))]
    pub listen: SocketAddr,
    /// Where probes and people reach the agent.
    #[arg(long, env = "TRUEBEAT_AGENT_LISTEN", default_value_t = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 9400)))]
    pub agent_listen: SocketAddr,
    /// A directory of the agent's own, not shared with the engine.
    #[arg(long, env = "TRUEBEAT_AGENT_DIR", default_value = "/run/truebeat-agent")]
    pub agent_dir: PathBuf,
    /// How long the agent outlives SIGTERM while the engine lives.
    #[arg(long, env = "TRUEBEAT_OUTLIVE", default_value = "30m", value_parser = humantime::parse_duration)]
    pub outlive: Duration,
    /// The program that has the children's roles.
    #[arg(long, hide = true, env = "TRUEBEAT_EXE", default_value = OWN_PROGRAM)]
    pub exe: PathBuf,
    #[command(flatten)]
    pub clients: ClientArgs,
    #[command(flatten)]
    pub watch: WatchArgs,
}

#[derive(Debug, Args)]
pub struct DetectArgs {
    /// A directory of the agent's own, not shared with the engine.
    #[arg(long, env = "TRUEBEAT_AGENT_DIR", default_value = "/run/truebeat-agent")]
    pub agent_dir: PathBuf,
    #[command(flatten)]
    pub watch: WatchArgs,
}

#[derive(Debug, Args)]
pub struct GateArgs {
    /// Where clients reach the engine through the gate.
    #[arg(long, env = "TRUEBEAT_LISTEN", default_value_t = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 8080)))]
    pub listen: SocketAddr,
    /// The engine's own address.
    #[arg(long, env = "TRUEBEAT_ENGINE_URL", default_value = "http://127.0.0.1:8000")]
    pub upstream: Uri,
    /// A directory of the agent's own; the control socket lies in it.
    #[arg(long, env = "TRUEBEAT_AGENT_DIR", default_value = "/run/truebeat-agent")]
    pub agent_dir: PathBuf,
    /// The control socket, if it shall lie elsewhere.
    #[arg(long)]
    pub control: Option<PathBuf>,
    #[command(flatten)]
    pub clients: ClientArgs,
    /// Standard input is the listening socket of the supervisor with this pid, which is the parent (internal, `supervise`).
    #[arg(long, hide = true)]
    pub supervisor: Option<i32>,
}

impl GateArgs {
    fn into_role(self) -> GateRole {
        let ClientArgs { client_idle, in_flight_max, no_confine } = self.clients;
        let control = self.control.unwrap_or_else(|| socket_in(&self.agent_dir));
        let config = GateConfig { upstream: self.upstream, control, client_idle, in_flight_max };
        let door = self.supervisor.map_or(Door::Own(self.listen), |pid| Door::Of { supervisor: Pid::from_raw(pid) });
        GateRole { door, config, confined: !no_confine }
    }
}

/// How the gate holds its clients, and itself.
#[derive(Debug, Args)]
pub struct ClientArgs {
    /// How long a client's connection is kept that asks for nothing. Must be longer than a load balancer in front keeps it, or that one answers
    /// 502 now and then.
    #[arg(long, env = "TRUEBEAT_CLIENT_IDLE", default_value = "620s", value_parser = idle_time)]
    pub client_idle: Duration,
    /// So many requests are in flight through the gate at once; who comes beyond them is told to come again.
    #[arg(long, env = "TRUEBEAT_IN_FLIGHT_MAX", default_value_t = gate::IN_FLIGHT_MAX, value_parser = clap::value_parser!(u32).range(1..))]
    pub in_flight_max: u32,
    /// Do not confine the gate's process: without it, it can start no program, write no file but its own, and make no system call that a gate never needs.
    #[arg(long, env = "TRUEBEAT_NO_CONFINE", value_parser = clap::builder::FalseyValueParser::new())]
    pub no_confine: bool,
}

impl ClientArgs {
    /// The same for a gate in front of this engine.
    fn for_gate(&self, engine: &Uri) -> Vec<OsString> {
        let idle = format!("{}ms", self.client_idle.as_millis());
        let (engine, most) = (engine.to_string(), self.in_flight_max.to_string());
        let told = ["--upstream", &engine, "--client-idle", &idle, "--in-flight-max", &most];
        told.into_iter().chain(self.no_confine.then_some("--no-confine")).map(OsString::from).collect()
    }
}

/// In less than a second many a connection would end before its first request has come.
fn idle_time(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if time < Duration::from_secs(1) { Err("it must be 1 s at least".to_owned()) } else { Ok(time) }
}

/// `truebeat run [OPTIONS] -- CMD…`: any engine on this machine under supervision.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Where clients reach the engine through the gate.
    #[arg(long, env = "TRUEBEAT_LISTEN", default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, 8080)))]
    pub listen: SocketAddr,
    /// Where people and programs ask the agent (`truebeat why`).
    #[arg(long, env = "TRUEBEAT_AGENT_LISTEN", default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, 9400)))]
    pub agent_listen: SocketAddr,
    /// Between SIGTERM and SIGKILL for the engine, when `truebeat run` is told to end.
    #[arg(long, default_value = "40s", value_parser = humantime::parse_duration)]
    pub grace: Duration,
    /// A directory of the agent's own. Default: a new one among the temporary files, removed at the end.
    #[arg(long, env = "TRUEBEAT_AGENT_DIR")]
    pub agent_dir: Option<PathBuf>,
    /// The program that has the children's roles.
    #[arg(long, hide = true, env = "TRUEBEAT_EXE", default_value = OWN_PROGRAM)]
    pub exe: PathBuf,
    #[command(flatten)]
    pub clients: ClientArgs,
    #[command(flatten)]
    pub watch: crate::options::RunWatchArgs,
    /// The engine's command line.
    #[arg(required = true, last = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// Why a role ended.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error(transparent)]
    Supervise(#[from] SuperviseError),
    #[error(transparent)]
    Watch(#[from] WatchError),
    #[error(transparent)]
    Gate(#[from] GateRoleError),
    #[error(transparent)]
    Never(#[from] NeverError),
    #[error("could not make a directory for this run at {path}: {source}; choose one with --agent-dir")]
    RunDirectory { path: PathBuf, source: std::io::Error },
}

/// Roles that need neither runtime nor logging: run here and now, before either is made. `None` for the others.
pub fn small_role(args: &AgentArgs) -> Option<ExitCode> {
    args.role.process_name().into_iter().for_each(be_called);
    match &args.role {
        Role::Exec { supervisor, command } => Some(become_engine(Pid::from_raw(*supervisor), command)),
        Role::NvmlProbe => Some(crate::sources::nvml_child_main()),
        Role::PyStacks { pid } => Some(crate::forensics::py_stacks_main(*pid)),
        Role::Evidence(args) => Some(shelf::show(args).unwrap_or_else(|error| failed(&error))),
        Role::Supervise(_) | Role::Detect(_) | Role::Gate(_) => None,
    }
}

/// The runtime of the sidecar's roles: one thread, for they share the engine's CPUs, and a second one would be woken for nothing.
///
/// # Errors
/// When the kernel gives no event queue.
pub fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    spare_thread::ends_late(tokio::runtime::Builder::new_current_thread().enable_all()).build()
}

/// Runs one of the agent's roles to its end. `log_filter`: what its children log.
///
/// # Errors
/// When the role cannot start: a port in use, a directory not writable, an option that makes no sense.
pub async fn run_agent(args: AgentArgs, log_filter: String) -> Result<ExitCode, AgentError> {
    tokio::spawn(footprint::keep_small());
    tokio::spawn(spare_thread::keep_one());
    match args.role {
        Role::Supervise(args) => {
            short_slice::ask_or_log();
            let config = SuperviseConfig {
                exe: args.exe,
                listen: args.listen,
                agent_listen: args.agent_listen,
                agent_dir: args.agent_dir,
                gate_args: args.clients.for_gate(&args.watch.engine_url),
                detect_args: args.watch.to_args(),
                log_filter,
                engine: None,
                page_dir: args.watch.page_dir.clone(),
                outlive: args.outlive,
                narrate: false,
            };
            Ok(ExitCode::from(supervisor::run(config).await?))
        }
        Role::Detect(args) => {
            short_slice::ask_or_log();
            forensics::try_to_write(args.watch.bundle_dir.clone(), args.watch.pod_name.is_some());
            // by hand, at a terminal, it is ended as any program is
            let _deaf = (!std::io::stdin().is_terminal()).then(signals::left_to_the_supervisor);
            watch::run(args.watch.into_config(args.agent_dir)?).await?;
            Ok(ExitCode::SUCCESS)
        }
        Role::Gate(args) => {
            args.into_role().run().await?;
            Ok(ExitCode::SUCCESS)
        }
        // They ran before there was a runtime; from here they run all the same.
        role @ (Role::Evidence(_) | Role::Exec { .. } | Role::NvmlProbe | Role::PyStacks { .. }) => {
            Ok(small_role(&AgentArgs { role }).unwrap_or(ExitCode::FAILURE))
        }
    }
}

/// `truebeat run`: supervisor, gate, detector and the engine itself, until SIGTERM, SIGINT, SIGQUIT or SIGHUP.
///
/// # Errors
/// When it cannot start: no such program, a port in use, a directory not writable.
pub async fn run_supervised(args: RunArgs, log_filter: String) -> Result<ExitCode, AgentError> {
    use std::os::unix::fs::DirBuilderExt;
    tokio::spawn(footprint::keep_small());
    tokio::spawn(spare_thread::keep_one());
    short_slice::ask_or_log();
    let own_dir = args.agent_dir.is_none();
    let agent_dir = args.agent_dir.clone().unwrap_or_else(|| run_dirs::fresh(&std::env::temp_dir()));
    let page_dir = run_dirs::for_pages(&agent_dir);
    let log_path = args.watch.log_file.clone().unwrap_or_else(|| agent_dir.join("engine.log"));
    let mut watch = args.watch.for_run(&args.command, page_dir.clone(), log_path.clone());
    // who asks for evidence may stand in another folder than who runs
    watch.bundle_dir = std::path::absolute(&watch.bundle_dir).unwrap_or(watch.bundle_dir);
    // What gate or detector would refuse for ever is refused before an engine has loaded its model beside them.
    never::check(args.listen, &watch.engine_url, &socket_in(&agent_dir))?;
    watch.clone().into_config(agent_dir.clone())?;
    // The engine's output and the bundles of a crash lie here: whoever made it, nobody else reads it.
    let made = std::fs::DirBuilder::new().recursive(!own_dir).mode(0o700).create(&agent_dir);
    made.map_err(|source| AgentError::RunDirectory { path: agent_dir.clone(), source })?;
    let engine = LaunchConfig {
        command: args.command,
        exe: args.exe.clone(),
        agent_dir: agent_dir.clone(),
        page_dir: page_dir.clone(),
        log_path,
        grace: args.grace,
        narrate: true,
    };
    let config = SuperviseConfig {
        exe: args.exe,
        listen: args.listen,
        agent_listen: args.agent_listen,
        agent_dir: agent_dir.clone(),
        gate_args: args.clients.for_gate(&watch.engine_url),
        detect_args: watch.to_args(),
        log_filter,
        engine: Some(engine),
        page_dir: page_dir.clone(),
        outlive: Duration::ZERO,
        narrate: true,
    };
    let ended = supervisor::run(config).await;
    // where something outlives its SIGKILL, the folder that names it stays for whoever comes next
    let left = EngineFile::read(&agent_dir).is_some_and(|file| !process_tree(&file.process()).is_empty());
    if own_dir && !left {
        let _ = std::fs::remove_dir_all(&agent_dir);
    }
    run_dirs::remove_pages(&page_dir);
    Ok(ExitCode::from(ended?))
}

/// Makes a session of its own, so that the whole tree is known by it, and becomes the program.
fn become_engine(supervisor: Pid, command: &[OsString]) -> ExitCode {
    use std::os::unix::process::CommandExt;
    let Some((program, args)) = command.split_first() else { return ExitCode::FAILURE };
    if let Err(error) = nix::unistd::setsid() {
        complain(&format!("the engine gets no session of its own: {error}"));
    }
    // Where the supervisor dies without a word, the engine is told to end as a terminal would tell it.
    let _ = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGTERM);
    // It may have died before that could be asked for: then nobody would tell this engine anything.
    if getppid() != supervisor {
        complain("the supervisor is gone; no engine is started");
        return ExitCode::FAILURE;
    }
    let error = std::process::Command::new(program).args(args).exec();
    complain(&format!("could not start {}: {error}", program.to_string_lossy()));
    ExitCode::from(127)
}

fn failed(error: &dyn std::error::Error) -> ExitCode {
    complain(&error.to_string());
    ExitCode::FAILURE
}

/// For a process that is about to become another one or to end. A closed pipe is no reason to do more.
fn complain(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "truebeat: {line}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        gate: GateArgs,
    }

    #[test]
    fn how_clients_are_held_is_told_to_the_gate() {
        let gate = |words: &[OsString]| {
            let words = [OsString::from("x")].iter().chain(words).cloned().collect::<Vec<_>>();
            Line::try_parse_from(words).map(|line| line.gate.clients)
        };
        let clients = gate(&[]).unwrap();
        assert_eq!((clients.client_idle, clients.in_flight_max), (gate::CLIENT_IDLE, gate::IN_FLIGHT_MAX));
        let asked = ClientArgs { client_idle: Duration::from_millis(1_500), in_flight_max: 7, no_confine: true };
        let told = asked.for_gate(&"http://127.0.0.1:1".parse().unwrap());
        let heard = gate(&told).unwrap();
        assert_eq!((heard.client_idle, heard.in_flight_max), (asked.client_idle, asked.in_flight_max));
        assert!(heard.no_confine && !clients.no_confine);
        assert!(gate(&["--client-idle=999ms".into()]).unwrap_err().to_string().contains("1 s at least"));
        assert!(gate(&["--in-flight-max=0".into()]).is_err(), "it would be no gate");
    }
}
