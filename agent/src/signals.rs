//! Signals that are taken only where whoever started us wants that (`nohup`), and those that a child leaves to its supervisor.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// A signal that our parent did not want us to ignore: to take it would undo that.
pub fn unless_ignored(kind: SignalKind) -> std::io::Result<Option<Signal>> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    (!ignores(&status, kind.as_raw_value())).then(|| signal(kind)).transpose()
}

/// Whoever ends all processes of a service at once (systemd's `KillMode=control-group`) means the engine: gate and detector stay until the
/// supervisor, which hears the same, has seen its end. Heard for as long as the answer lives. Where a signal cannot be taken it ends us, as before.
pub fn left_to_the_supervisor() -> Vec<Signal> {
    let kinds = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup(), SignalKind::quit()];
    kinds.into_iter().filter_map(|kind| unless_ignored(kind).ok().flatten()).collect()
}

/// One that is not taken never comes.
pub async fn received(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => _ = signal.recv().await,
        None => std::future::pending().await,
    }
}

/// Does a process with this `/proc/<pid>/status` ignore the signal?
fn ignores(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nohup_asked_for_is_read() {
        let status =
            |mask: &str| format!("Name:\tx\nSigBlk:\t0000000000000001\nSigIgn:\t{mask}\nSigCgt:\t0000000000000001\n");
        let ignored = |mask: &str| ignores(&status(mask), nix::libc::SIGHUP);
        assert_eq!(["0000000000001001", "0000000000001000"].map(ignored), [true, false]);
        assert!(!ignores("", nix::libc::SIGHUP) && !ignored("nonsense"));
        assert!(ignores(&status("0000000000001000"), nix::libc::SIGPIPE));
    }
}
