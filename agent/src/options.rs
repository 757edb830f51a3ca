//! What the detector can be told: options with their environment variables, for the role itself, for the supervisor that passes
//! them on, and for `truebeat run`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use ::http::Uri;
use clap::{Args, ValueEnum};

use crate::launch::address;
use crate::policy::changed_policy;
use crate::report::PodIdentity;
use crate::sources::{SourcesConfig, ras};
use crate::watch::{WatchConfig, WatchError};

/// Pages that are looked for, unless somebody says otherwise: more than the engines of one machine have ranks (a core's and its workers', of
/// all data-parallel engines together: 18 of eight by two, 32 of sixteen by one). One that is not there costs nothing.
pub const RANKS: u32 = 64;

/// How far the agent goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Say what it sees and save the evidence of a stall; fence and kill nothing. (`truebeat run` still starts an engine again that has ended.)
    Observe,
    /// Also refuse new requests while the engine makes no progress.
    Fence,
    /// Also restart it, with the second key (I1).
    Recover,
}

/// What becomes of requests that were in flight at two stalls (I7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PoisonRequests {
    /// The gate answers them with 422.
    Refuse,
    /// They are told in the incidents and served.
    Ignore,
}

/// The detector's options.
#[derive(Debug, Clone, Args)]
pub struct WatchArgs {
    /// The engine's own address.
    #[arg(long, env = "TRUEBEAT_ENGINE_URL", default_value = "http://127.0.0.1:8000")]
    pub engine_url: Uri,
    /// Where the engine publishes its heartbeat pages.
    #[arg(long, env = "TRUEBEAT_PAGE_DIR", default_value = "/run/truebeat")]
    pub page_dir: PathBuf,
    /// Pages are looked for up to this many ranks.
    #[arg(long, env = "TRUEBEAT_RANKS", default_value_t = RANKS, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub ranks: u32,
    /// Where evidence bundles go.
    #[arg(long, env = "TRUEBEAT_BUNDLE_DIR", default_value = "/run/truebeat-agent/bundles")]
    pub bundle_dir: PathBuf,
    /// The engine's log, where it is a file; it may come later, or never.
    #[arg(long, env = "TRUEBEAT_LOG_FILE", alias = "log")]
    pub log_file: Option<PathBuf>,
    /// What was read of the log is taken out of it: for one in memory that is written for the agent alone, as in a pod.
    #[arg(long, env = "TRUEBEAT_TRIM_LOG", value_parser = clap::builder::FalseyValueParser::new())]
    pub trim_log: bool,
    /// Do not ask NVML about the GPUs.
    #[arg(long, env = "TRUEBEAT_NO_NVML", value_parser = clap::builder::FalseyValueParser::new())]
    pub no_nvml: bool,
    /// How far the agent goes.
    #[arg(long, env = "TRUEBEAT_RECOVERY_MODE", value_enum, ignore_case = true, default_value_t = Mode::Recover)]
    pub recovery_mode: Mode,
    /// Where no operator grants a restart for this long, the agent grants itself one a window (I1). Default: never.
    #[arg(long, env = "TRUEBEAT_UNATTENDED_AFTER", value_parser = humantime::parse_duration)]
    pub unattended_after: Option<Duration>,
    /// The window of at most one such restart.
    #[arg(long, env = "TRUEBEAT_UNATTENDED_WINDOW", default_value = "1h", value_parser = humantime::parse_duration)]
    pub unattended_window: Duration,
    /// A detector's number other than the default, e.g. `native_floor_ms=500`; may be given several times.
    #[arg(long, env = "TRUEBEAT_POLICY", value_name = "NAME=NUMBER", value_delimiter = ',')]
    pub policy: Vec<String>,
    /// The engine container's `terminationMessagePath`: the summary goes there before a kill.
    #[arg(long, env = "TRUEBEAT_TERMINATION_MESSAGE_PATH", default_value = "/dev/termination-log")]
    pub termination_message_path: PathBuf,
    /// The gate's own address: before the replica is ready a few tokens are asked for through it, unless they were delivered already.
    #[arg(long, env = "TRUEBEAT_PROVE_THROUGH", value_name = "URL")]
    pub prove_through: Option<Uri>,
    /// This pod. Without a name nothing is declared to Kubernetes.
    #[arg(long, env = "POD_NAME")]
    pub pod_name: Option<String>,
    #[arg(long, env = "POD_NAMESPACE", default_value = "default")]
    pub pod_namespace: String,
    #[arg(long, env = "POD_UID")]
    pub pod_uid: Option<String>,
    /// Where the kubelet keeps the pod's annotations as files; a person's fence and declared maintenance are among them.
    #[arg(long, env = "TRUEBEAT_NOTES_DIR")]
    pub notes_dir: Option<PathBuf>,
    #[command(flatten)]
    pub poison: PoisonArgs,
    /// `truebeat run`: the engine is the supervisor's child and restarts need no second key (internal).
    #[arg(long, hide = true)]
    pub standalone: bool,
}

/// Poison requests (I7).
#[derive(Debug, Clone, Args)]
pub struct PoisonArgs {
    /// What becomes of requests that were in flight at two stalls.
    #[arg(long, env = "TRUEBEAT_POISON_REQUESTS", value_enum, ignore_case = true, default_value_t = PoisonRequests::Refuse)]
    pub poison_requests: PoisonRequests,
    /// How long such a request stays refused after its last stall. In a pod the InferenceDeployment says it.
    #[arg(long, env = "TRUEBEAT_POISON_FOR", default_value = "6h", value_parser = humantime::parse_duration)]
    pub poison_for: Duration,
}

/// The detector's options that make sense in `truebeat run`.
#[derive(Debug, Clone, Args)]
pub struct RunWatchArgs {
    /// The engine's own address. Default: what its command says (`--host`, `--port`), or where such an engine usually listens.
    #[arg(long, env = "TRUEBEAT_ENGINE_URL")]
    pub engine_url: Option<Uri>,
    /// Where evidence bundles go.
    #[arg(long, env = "TRUEBEAT_BUNDLE_DIR", default_value = "truebeat-bundles")]
    pub bundle_dir: PathBuf,
    /// Where the engine's output goes, beside ours. Default: among the agent's own files.
    #[arg(long, env = "TRUEBEAT_LOG_FILE", alias = "log")]
    pub log_file: Option<PathBuf>,
    /// Do not ask NVML about the GPUs.
    #[arg(long, env = "TRUEBEAT_NO_NVML", value_parser = clap::builder::FalseyValueParser::new())]
    pub no_nvml: bool,
    /// How far the agent goes.
    #[arg(long, env = "TRUEBEAT_RECOVERY_MODE", value_enum, ignore_case = true, default_value_t = Mode::Recover)]
    pub recovery_mode: Mode,
    /// A detector's number other than the default, e.g. `native_floor_ms=500`; may be given several times.
    #[arg(long, env = "TRUEBEAT_POLICY", value_name = "NAME=NUMBER", value_delimiter = ',')]
    pub policy: Vec<String>,
    /// A directory for notes to the agent: while a file `maintenance` is in it that says anything, no silence counts; while a file `fence`
    /// is, no new request is taken.
    #[arg(long, env = "TRUEBEAT_NOTES_DIR")]
    pub notes_dir: Option<PathBuf>,
    #[command(flatten)]
    pub poison: PoisonArgs,
}

impl RunWatchArgs {
    /// The detector's options of a run of this command with these directories.
    pub fn for_run(self, command: &[OsString], page_dir: PathBuf, log_file: PathBuf) -> WatchArgs {
        WatchArgs {
            engine_url: self.engine_url.unwrap_or_else(|| address::of_command(command)),
            page_dir,
            ranks: RANKS,
            bundle_dir: self.bundle_dir,
            log_file: Some(log_file),
            trim_log: false,
            no_nvml: self.no_nvml,
            recovery_mode: self.recovery_mode,
            unattended_after: None,
            unattended_window: Duration::from_secs(3600),
            policy: self.policy,
            termination_message_path: PathBuf::new(),
            prove_through: None,
            pod_name: None,
            pod_namespace: String::new(),
            pod_uid: None,
            notes_dir: self.notes_dir,
            poison: self.poison,
            standalone: true,
        }
    }
}

impl WatchArgs {
    /// The same options as words, for the child that has the role.
    pub fn to_args(&self) -> Vec<OsString> {
        let mode = name_of(&self.recovery_mode);
        let mut words: Vec<OsString> = Vec::new();
        // clap takes `--name=` for a forgotten value; an empty one means the default anyway
        let mut push = |name: &str, value: OsString| words.extend((!value.is_empty()).then(|| joined(name, value)));
        push("--engine-url", self.engine_url.to_string().into());
        push("--page-dir", self.page_dir.clone().into());
        push("--ranks", self.ranks.to_string().into());
        push("--bundle-dir", self.bundle_dir.clone().into());
        push("--recovery-mode", mode.into());
        push("--poison-requests", name_of(&self.poison.poison_requests).into());
        push("--poison-for", format!("{}ms", self.poison.poison_for.as_millis()).into());
        push("--pod-namespace", self.pod_namespace.clone().into());
        push("--termination-message-path", self.termination_message_path.clone().into());
        push("--unattended-window", format!("{}ms", self.unattended_window.as_millis()).into());
        let optional = [
            ("--log-file", self.log_file.clone().map(OsString::from)),
            ("--unattended-after", self.unattended_after.map(|after| format!("{}ms", after.as_millis()).into())),
            ("--prove-through", self.prove_through.as_ref().map(|gate| gate.to_string().into())),
            ("--pod-name", self.pod_name.clone().map(OsString::from)),
            ("--pod-uid", self.pod_uid.clone().map(OsString::from)),
            ("--notes-dir", self.notes_dir.clone().map(OsString::from)),
        ];
        optional
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)))
            .for_each(|(name, value)| push(name, value));
        self.policy.iter().for_each(|pair| push("--policy", pair.into()));
        words.extend(self.trim_log.then(|| "--trim-log".into()));
        words.extend(self.no_nvml.then(|| "--no-nvml".into()));
        words.extend(self.standalone.then(|| "--standalone".into()));
        words
    }

    /// The detector's configuration.
    ///
    /// # Errors
    /// When a policy entry names no number of the policy.
    pub fn into_config(self, agent_dir: PathBuf) -> Result<WatchConfig, WatchError> {
        let pod = self.pod_name.filter(|name| !name.is_empty()).filter(|_| !self.standalone);
        Ok(WatchConfig {
            sources: SourcesConfig {
                page_dir: self.page_dir,
                ranks: self.ranks,
                // pid and start time say whose page it is (H2); the nonce of `truebeat run` changes with each start
                nonce: None,
                engine_url: self.engine_url,
                log_path: self.log_file,
                trim_log: self.trim_log,
                nvml: !self.no_nvml,
                ras_address: Some(ras::address()),
            },
            agent_dir,
            bundle_dir: self.bundle_dir,
            policy: changed_policy(&self.policy)?,
            mode: self.recovery_mode,
            unattended_after: self.unattended_after,
            unattended_window: self.unattended_window,
            termination_message_path: self.termination_message_path,
            pod: pod.map(|name| PodIdentity { name, namespace: self.pod_namespace, uid: self.pod_uid }),
            notes_dir: self.notes_dir,
            refuse_poison_for: (self.poison.poison_requests == PoisonRequests::Refuse)
                .then_some(self.poison.poison_for),
            prove_through: self.prove_through,
            standalone: self.standalone,
        })
    }
}

fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

fn joined(name: &str, value: OsString) -> OsString {
    let mut word = OsString::from(name);
    word.push("=");
    word.push(value);
    word
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        watch: WatchArgs,
    }

    #[derive(Debug, Parser)]
    struct RunLine {
        #[command(flatten)]
        watch: RunWatchArgs,
    }

    #[test]
    fn options_survive_the_way_to_the_child() {
        let given = [
            "x",
            "--engine-url=http://127.0.0.1:1",
            "--unattended-after=90s",
            "--unattended-window=7m",
            "--policy=native_floor_ms=500,fresh_ms=1",
            "--recovery-mode=Fence",
            "--no-nvml",
            "--pod-name=p",
            "--notes-dir=/n",
            "--prove-through=http://127.0.0.1:2",
            "--log-file=-x",
            "--trim-log",
            "--poison-requests=Ignore",
            "--poison-for=77m",
            "--standalone",
        ];
        let first = Line::try_parse_from(given).unwrap().watch;
        let words = std::iter::once(OsString::from("x")).chain(first.to_args());
        let second = Line::try_parse_from(words).unwrap().watch;
        assert_eq!(format!("{first:?}"), format!("{second:?}"));
        let config = second.into_config("/a".into()).unwrap();
        assert_eq!((config.policy.native_floor_ms, config.policy.fresh_ms), (500, 1));
        let in_a_pod = ["x", "--engine-url=http://127.0.0.1:1", "--notes-dir=/n"];
        let config = Line::try_parse_from(in_a_pod).unwrap().watch.into_config("/a".into()).unwrap();
        assert_eq!((config.standalone, config.notes_dir), (false, Some(PathBuf::from("/n"))));
    }

    #[test]
    fn the_options_of_a_run_are_options_of_the_detector() {
        let given = ["x", "--engine-url=http://127.0.0.1:1", "--notes-dir=/n"];
        let args = RunLine::try_parse_from(given).unwrap().watch.for_run(&[], "/p".into(), "/l".into());
        let words = std::iter::once(OsString::from("x")).chain(args.to_args());
        let config = Line::try_parse_from(words).unwrap().watch.into_config("/a".into()).unwrap();
        assert!(config.standalone && config.pod.is_none());
        assert_eq!((config.sources.page_dir, config.notes_dir), (PathBuf::from("/p"), Some(PathBuf::from("/n"))));
        let in_a_pod = Line::try_parse_from(["x"]).unwrap().watch.into_config("/a".into()).unwrap();
        assert_eq!((config.sources.ranks, in_a_pod.sources.ranks), (RANKS, RANKS));
    }
}
