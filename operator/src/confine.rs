//! The operator takes from its own process what it never needs, before its first thread (S4): whoever gets to steer it by a bug is left with
//! what an operator does anyway, which is to speak to the API server. What is taken, and how: `role::confine`. Here: what is left.

use std::path::Path;

use kube::config::Kubeconfig;
use role::confine::{Files, ITSELF, RESOLVER, Reads};

/// The folder of a pod's token and of its cluster's CA. The kubelet replaces them by swapping a link in it.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Roots of trust, and what decides how it listens.
const TRUST: [&str; 4] = ["/etc/ssl", "/etc/pki", "/usr/share/ca-certificates", "/proc/sys/net/ipv6/bindv6only"];

/// What an operator in a pod reads after its start, whose token and CA lie in the folder `service_account`.
pub fn in_pod(service_account: &Path) -> Files {
    let known = [RESOLVER.as_slice(), &TRUST, &ITSELF].concat();
    let reads = [service_account].into_iter().chain(known.into_iter().map(Path::new));
    Files { reads: Reads::Only(reads.map(Path::to_owned).collect()), writes: None }
}

/// Confines this process as an operator, and says so in the log.
pub fn confine() {
    match files() {
        Some(files) => files.confine("an operator", told(&files.reads)),
        None => tracing::warn!("not confined: a credential plugin of the kubeconfig has to be executed"),
    }
}

/// What an operator reads. With a kubeconfig that is its user's affair: certificates and tokens lie where that file says, a resolver's and
/// the system's roots anywhere, and the user's rights bound it. `None`: it has to execute a plugin.
fn files() -> Option<Files> {
    // the client looks for its configuration in the same order
    match Kubeconfig::read() {
        Err(_) => Some(in_pod(Path::new(SERVICE_ACCOUNT))),
        Ok(config) => (!executes(&config)).then_some(Files { reads: Reads::Anything, writes: None }),
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
