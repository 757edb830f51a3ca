//! The operator takes from its own process what it never needs, before its first thread: programs, files to write, the memory of others, the
//! rarer parts of the kernel (S4). Whoever gets to steer it by a bug is left with what an operator does anyway: speak to the API server.
//!
//! Two kinds of the kernel's help. Landlock says which files may be read, and that none is written or executed; a seccomp filter refuses
//! system calls, by a list of what is refused, so that a newer libc or runtime that asks for something new is not killed by it. Both stay
//! for the life of the process, and a thread hands them on to those that it starts. Where a kernel has one of them not, the other holds.

mod calls;

use std::path::{Path, PathBuf};

use kube::config::Kubeconfig;
use landlock::{
    ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
    path_beneath_rules,
};
use thiserror::Error;

/// The folder of a pod's token and of its cluster's CA. The kubelet replaces them by swapping a link in it.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// What else an operator in a pod reads after its start: what a resolver asks, and the libraries that glibc's loads late; roots of trust; what it
/// prints of itself in a panic.
const READS_IN_POD: [&str; 18] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/run/systemd/resolve",
    "/etc/ssl",
    "/etc/pki",
    "/usr/share/ca-certificates",
    "/etc/ld.so.cache",
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/proc/self",
    "/proc/self/exe",
    "/proc/sys/net/ipv6/bindv6only",
];

/// The newest Landlock whose rights are named here; an older kernel holds those of them that it knows.
const LANDLOCK: ABI = ABI::V6;

/// What this process may read from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reads {
    /// Whatever its account may.
    Anything,
    /// These files, and what is in these folders; those that are not there are left out.
    Only(Vec<PathBuf>),
}

impl Reads {
    /// What an operator in a pod reads, whose token and CA lie in the folder `service_account`.
    pub fn in_pod(service_account: &Path) -> Self {
        let paths = [service_account].into_iter().chain(READS_IN_POD.iter().map(Path::new));
        Self::Only(paths.map(Path::to_owned).collect())
    }
}

/// A part of the confinement could not be had.
#[derive(Debug, Error)]
pub enum ConfineError {
    #[error("restrict files with landlock: {0}")]
    Files(#[from] RulesetError),
    #[error("make the filter of system calls: {0}")]
    Filter(#[from] seccompiler::BackendError),
    #[error("restrict system calls with seccomp: {0}")]
    Calls(#[from] seccompiler::Error),
}

/// Confines this process as an operator, as far as its kernel can, and says so in the log. Never a reason not to start: an operator that is less
/// confined is better than none.
pub fn confine() {
    let Some(reads) = reads() else {
        tracing::warn!("not confined: a credential plugin of the kubeconfig has to be executed");
        return;
    };
    match files(&reads) {
        Ok(true) => tracing::info!(reads = told(&reads), "landlock: no file is written or executed from now on"),
        Ok(false) => {
            tracing::warn!("no landlock is to be had here: files are restricted by the filter of system calls alone")
        }
        Err(error) => tracing::warn!(%error, "not confined by landlock"),
    }
    match calls() {
        Ok(()) => tracing::info!("seccomp: system calls that an operator never needs are refused from now on"),
        Err(error) => tracing::warn!(%error, "not confined by seccomp, or only in part"),
    }
}

/// No file is written, made, removed or executed any more by this thread and those that it starts, and none but `reads` is read.
/// `false`: no Landlock is to be had, and nothing was done.
///
/// # Errors
/// When the kernel has it and refuses.
pub fn files(reads: &Reads) -> Result<bool, ConfineError> {
    let reading = AccessFs::ReadFile | AccessFs::ReadDir;
    let mut handled = AccessFs::from_all(LANDLOCK);
    if *reads == Reads::Anything {
        handled.remove(reading);
    }
    let rules = Ruleset::default().handle_access(handled)?.scope(Scope::from_all(LANDLOCK))?.create()?;
    let rules = match reads {
        Reads::Anything => rules,
        Reads::Only(paths) => rules.add_rules(path_beneath_rules(paths, reading))?,
    };
    Ok(rules.restrict_self()?.ruleset != RulesetStatus::NotEnforced)
}

/// No program is started, nobody else's memory touched, no file written, and no part of the kernel asked that no operator needs, by any thread of this
/// process: such a call fails with EPERM. The few whose callers know another way when a kernel lacks them fail with ENOSYS, as if it did.
///
/// # Errors
/// When the kernel has no seccomp, or refuses.
pub fn calls() -> Result<(), ConfineError> {
    for filter in calls::filters()? {
        seccompiler::apply_filter_all_threads(&filter)?;
    }
    Ok(())
}

/// What an operator reads. With a kubeconfig that is its user's affair: certificates and tokens lie where that file says, a resolver's and
/// the system's roots anywhere, and the user's rights bound it. `None`: it has to execute a plugin.
fn reads() -> Option<Reads> {
    // the client looks for its configuration in the same order
    match Kubeconfig::read() {
        Err(_) => Some(Reads::in_pod(Path::new(SERVICE_ACCOUNT))),
        Ok(config) => (!executes(&config)).then_some(Reads::Anything),
    }
}

/// Does a user of this kubeconfig get their credentials from a program?
fn executes(config: &Kubeconfig) -> bool {
    let mut users = config.auth_infos.iter().filter_map(|user| user.auth_info.as_ref());
    users.any(|user| user.exec.is_some() || user.auth_provider.is_some())
}

fn told(reads: &Reads) -> &'static str {
    match reads {
        Reads::Anything => "what its account may read",
        Reads::Only(_) => {
            "its service account, the resolver's files, roots of trust, the system's libraries, what the kernel says of itself"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubeconfig_with_a_plugin_has_to_execute_it() {
        let of = |user: &str| {
            let users = format!("users: [{{name: other, user: {{token: t}}}}, {{name: me, user: {user}}}]");
            Kubeconfig::from_yaml(&format!("apiVersion: v1\nkind: Config\ncurrent-context: c\n{users}\n")).unwrap()
        };
        assert!(!executes(&of("{tokenFile: /run/token}")));
        assert!(!executes(&of("{client-certificate: /a.pem, client-key: /b.pem}")));
        assert!(executes(&of("{exec: {apiVersion: client.authentication.k8s.io/v1, command: login}}")));
        assert!(executes(&of("{auth-provider: {name: gcp, config: {cmd-path: gcloud}}}")));
    }
}
