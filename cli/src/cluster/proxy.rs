//! Which API servers `NO_PROXY` spares the proxy, as `kubectl` reads it. The kube client takes a proxy from `HTTPS_PROXY` also for a server on
//! this very machine, and asks `NO_PROXY` about the proxy itself. Pure.

use std::net::IpAddr;

use ipnet::IpNet;
use kube::Config;

/// Takes a proxy that came of the environment off where the server is not to be reached by it. One that the kubeconfig names stays.
pub fn spare(config: &mut Config, env: impl Fn(&str) -> Option<String>) {
    let of_env = ["HTTPS_PROXY", "https_proxy"]
        .iter()
        .filter_map(|name| env(name))
        .any(|proxy| proxy.parse::<http::Uri>().is_ok_and(|proxy| config.proxy_url.as_ref() == Some(&proxy)));
    let spared = ["NO_PROXY", "no_proxy"].iter().find_map(|name| env(name)).unwrap_or_default();
    let host = config.cluster_url.host().unwrap_or_default().trim_matches(['[', ']']).to_ascii_lowercase();
    let port = config.cluster_url.port_u16().unwrap_or(443);
    if of_env && (is_here(&host) || spared.split(',').any(|entry| spares(entry.trim(), &host, port))) {
        config.proxy_url = None;
    }
}

/// A cluster on the machine itself is nobody's to reach by a proxy.
fn is_here(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// One entry: `*`, a name with all below it, `.name` for those below it alone, an address, a range of them; with a port perhaps.
fn spares(entry: &str, host: &str, port: u16) -> bool {
    let entry = entry.to_ascii_lowercase();
    if entry == "*" {
        return true;
    }
    if let Ok(address) = host.parse::<IpAddr>() {
        let range = entry.parse::<IpNet>().is_ok_and(|range| range.contains(&address));
        let same = |text: &str| text.trim_matches(['[', ']']).parse() == Ok(address);
        return range || same(&entry) || entry.rsplit_once(':').is_some_and(|(text, of)| is(of, port) && same(text));
    }
    let (name, fits) = entry.split_once(':').map_or((entry.as_str(), true), |(name, of)| (name, is(of, port)));
    let (name, below_alone) = name.strip_prefix('.').map_or((name, false), |name| (name, true));
    let below = host.strip_suffix(name).is_some_and(|head| head.ends_with('.'));
    !name.is_empty() && fits && (below || (host == name && !below_alone))
}

fn is(text: &str, port: u16) -> bool {
    text.parse() == Ok(port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_spares_what_it_spares_kubectl() {
        for (entry, host, port, spared) in [
            ("*", "api.example.org", 443, true),
            ("example.org", "api.example.org", 443, true),
            ("Example.org", "example.org", 443, true),
            (".example.org", "example.org", 443, false),
            (".example.org", "api.example.org", 443, true),
            ("ample.org", "api.example.org", 443, false),
            ("example.org:6443", "api.example.org", 443, false),
            ("example.org:6443", "api.example.org", 6443, true),
            ("10.0.0.0/8", "10.1.2.3", 6443, true),
            ("10.0.0.0/8", "11.1.2.3", 6443, false),
            ("10.1.2.3", "10.1.2.3", 6443, true),
            ("10.1.2.3:443", "10.1.2.3", 6443, false),
            ("10.1.2.3:6443", "10.1.2.3", 6443, true),
            ("fd00::/8", "fd00::1", 6443, true),
            ("[fd00::1]:6443", "fd00::1", 6443, true),
            ("", "api.example.org", 443, false),
        ] {
            assert_eq!(spares(entry, host, port), spared, "{entry} {host}:{port}");
        }
    }

    #[test]
    fn a_server_that_is_spared_is_reached_without_the_proxy_of_the_environment() {
        let proxied = |server: &str, of_kubeconfig: Option<&str>| {
            let mut config = Config::new(server.parse().unwrap());
            config.proxy_url = Some(of_kubeconfig.unwrap_or("http://proxy:3128").parse().unwrap());
            spare(&mut config, |name| match name {
                "HTTPS_PROXY" => Some("http://proxy:3128".to_owned()),
                "no_proxy" => Some("other.org, .internal".to_owned()),
                _ => None,
            });
            config.proxy_url.is_some()
        };
        assert!(proxied("https://api.example.org:6443", None));
        assert!(!proxied("https://api.internal:6443", None));
        assert!(!proxied("https://127.0.0.1:6443", None) && !proxied("https://[::1]:6443", None));
        assert!(proxied("https://api.internal:6443", Some("socks5://other:1080")), "the kubeconfig's own");
    }
}
