//! How every program of Truebeat starts and ends, so that a role behaves the same in `truebeat` and in an image of its own: logs on
//! stderr, one runtime, a listener, a bounded crowd of clients, all the descriptors it may have, how long it waits for a client, an error in
//! one line, an exit status, and what a process can take from itself. It knows nothing of the roles; it may touch stderr, threads, the clock, the
//! sockets that it listens on and the process's own limits.

pub mod confine;
pub mod crowd;
pub mod onward;
pub mod patience;
pub mod pulse;
pub mod stderr;
pub mod wire;

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::error::Error;
use std::io::{self, IsTerminal};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::process::ExitCode;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::runtime::{Builder, Runtime};
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

/// The exit status of a role that failed and has no more to say by it.
pub const FAILED: u8 = 1;

/// The exit status of a program whose reader has left, as shells know it: 128 and SIGPIPE.
pub const UNREAD: u8 = 141;

/// How long background tasks may still sit in a blocking call when a role has ended (E1).
const LEAVE_MAX: Duration = Duration::from_secs(1);

/// What a role that has ended waits for its last words to be taken.
const SETTLE_MAX: Duration = Duration::from_secs(1);

/// A runtime of `threads` workers.
///
/// # Errors
/// When the kernel gives no event queue or no thread.
pub fn workers(threads: usize) -> io::Result<Runtime> {
    Builder::new_multi_thread().enable_all().worker_threads(threads).build()
}

/// Does `work` and turns its outcome into an exit status: an error goes to stderr in one line with all its causes, and `exit_code` gives
/// its status. A reader that has seen enough (`truebeat why | head`) ends it without a word.
pub fn play<E>(
    runtime: io::Result<Runtime>,
    exit_code: impl Fn(&E) -> u8,
    work: impl Future<Output = Result<ExitCode, E>>,
) -> ExitCode
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            stderr::say(&format!("truebeat: could not start the async runtime: {error}"));
            return ExitCode::from(FAILED);
        }
    };
    let told = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        match (is_unread(info.payload()), stderr::started()) {
            (true, _) => {}
            // a panic that is caught costs its request alone, and is told as all else is
            (false, true) => stderr::say(&panicked(info)),
            (false, false) => told(info),
        }
    }));
    let ended = panic::catch_unwind(AssertUnwindSafe(|| runtime.block_on(work)));
    let code = match ended {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => {
            let code = exit_code(&error);
            stderr::say(&format!("truebeat: {}", one_line(error.into().as_ref())));
            ExitCode::from(code)
        }
        Err(unread) if is_unread(&*unread) => ExitCode::from(UNREAD),
        Err(panic) => {
            stderr::settle(SETTLE_MAX);
            panic::resume_unwind(panic)
        }
    };
    // Background probes may sit in a blocking read; a role that has ended must not wait for them (E1).
    runtime.shutdown_timeout(LEAVE_MAX);
    stderr::settle(SETTLE_MAX);
    code
}

/// Logs go to `stderr`, so that stdout stays for results. `filter` has the syntax of `tracing-subscriber`'s `EnvFilter`.
pub fn start_logging(filter: &str, stderr: impl for<'a> MakeWriter<'a> + Send + Sync + 'static) {
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|error| {
        stderr::say(&format!("truebeat: --log-filter {filter:?} is not a filter ({error}); logging at info"));
        EnvFilter::new("info")
    });
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .with_ansi(io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|word| word.is_empty()))
        // they go to stderr with `eprintln!`, which panics where stderr is a closed pipe
        .log_internal_errors(false)
        .init();
}

/// Listens there, at addresses of both kinds where `0.0.0.0` means all of a pod's: where the cluster's are IPv6 a kubelet that asks at those would
/// never be answered. One listener takes both, unless this machine keeps them apart.
///
/// # Errors
/// A port in use, or no right to it.
pub fn listen_in_pod(address: SocketAddr) -> io::Result<TcpListener> {
    let both = of_both(address).and_then(|both| TcpListener::bind(both).ok());
    both.map_or_else(|| TcpListener::bind(address), Ok)
}

fn of_both(address: SocketAddr) -> Option<SocketAddr> {
    let together = std::fs::read_to_string("/proc/sys/net/ipv6/bindv6only").is_ok_and(|text| text.trim() == "0");
    let all = address.ip() == IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    (together && all).then(|| SocketAddr::from((Ipv6Addr::UNSPECIFIED, address.port())))
}

/// Raises the limit of open files as far as it goes, for a program whose every connection is a descriptor or two. The soft limit is as low as
/// it is for programs that count them in a fixed set, and ours are none of them; the hard one is what the machine's owner meant.
///
/// # Errors
/// The system's, where it does not let itself be raised.
pub fn take_all_descriptors() -> io::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?)
}

/// As the standard library tells it.
fn panicked(info: &PanicHookInfo<'_>) -> String {
    let thread = std::thread::current();
    let (name, trace) = (thread.name().unwrap_or("<unnamed>"), Backtrace::capture());
    match trace.status() {
        BacktraceStatus::Captured => format!("\nthread '{name}' {info}\nstack backtrace:\n{trace}"),
        _ => format!("\nthread '{name}' {info}"),
    }
}

/// Is it the panic of `println!` whose reader has left? The standard library has no other word for it.
fn is_unread(payload: &(dyn Any + Send)) -> bool {
    let said = payload.downcast_ref::<String>();
    said.is_some_and(|said| said.starts_with("failed printing to stdout") && said.contains("Broken pipe"))
}

/// The error and what lies beneath it. Some errors quote their cause already; it is not told twice. What is quoted may be anybody's words, and
/// moves no cursor.
fn one_line(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    for cause in causes.map(ToString::to_string) {
        if !quotes(&line, &cause) {
            line.push_str(": ");
            line.push_str(&cause);
        }
    }
    // (the end of a log comes on lines of its own)
    line.chars().map(|c| if c.is_control() && !matches!(c, '\n' | '\t') { ' ' } else { c }).collect()
}

/// Does it say so at its end, or after a colon and before the next part of the sentence?
fn quotes(line: &str, cause: &str) -> bool {
    let part = |(at, _): (usize, &str)| {
        let (before, after) = (&line[..at], &line[at + cause.len()..]);
        before.ends_with(": ") && after.starts_with([';', ',', '.', ')'])
    };
    line.ends_with(cause) || line.match_indices(cause).any(part)
}

#[cfg(test)]
mod tests {
    use std::error::Error;
    use std::fmt;

    use super::one_line;

    #[derive(Debug)]
    struct Told(&'static str, Option<Box<Told>>);

    impl fmt::Display for Told {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Told {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|cause| cause as &dyn Error)
        }
    }

    #[test]
    fn an_error_is_told_with_each_cause_once() {
        let port = || Box::new(Told("port 80 is taken", None));
        assert_eq!(one_line(&Told("could not listen", Some(port()))), "could not listen: port 80 is taken");
        let quotes = Told("could not listen: port 80 is taken", Some(port()));
        assert_eq!(
            one_line(&Told("no engine", Some(Box::new(quotes)))),
            "no engine: could not listen: port 80 is taken"
        );
        let advises = Told("could not listen: port 80 is taken; choose another", Some(port()));
        assert_eq!(one_line(&advises), "could not listen: port 80 is taken; choose another");
        let by_chance = Told("could not read /run/timeout.d", Some(Box::new(Told("timeout", None))));
        assert_eq!(one_line(&by_chance), "could not read /run/timeout.d: timeout");
    }

    #[test]
    fn words_of_others_stay_words() {
        assert_eq!(one_line(&Told("the pod says", Some(Box::new(Told("\u{1b}[2Jok", None))))), "the pod says:  [2Jok");
    }
}
