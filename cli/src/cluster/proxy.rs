//! By which proxy an API server is reached, as `kubectl` finds it. The kube client asks `NO_PROXY` about the proxy itself, whoever named it, and
//! never about the server. Pure.

use std::net::IpAddr;

use anyhow::Context;
use http::Uri;
use ipnet::IpNet;
use kube::config::Kubeconfig;

/// The proxy that the kubeconfig names for the cluster of a context, or of the current one.
pub fn named(config: &Kubeconfig, context: Option<&str>) -> Option<String> {
    let context = context.or(config.current_context.as_deref())?;
    let context = config.contexts.iter().find(|named| named.name == context)?.context.as_ref()?;
    let cluster = config.clusters.iter().find(|named| named.name == context.cluster)?.cluster.as_ref()?;
    cluster.proxy_url.clone().filter(|proxy| !proxy.is_empty())
}

/// The proxy for `server`: the kubeconfig's own, else that of the environment, unless that spares the server.
///
/// # Errors
/// A proxy that is no address.
pub fn of(named: Option<&str>, server: &Uri, env: impl Fn(&str) -> Option<String>) -> anyhow::Result<Option<Uri>> {
    let set = |names: [&str; 2]| names.iter().find_map(|name| env(name).filter(|value| !value.is_empty()));
    let host = server.host().unwrap_or_default().trim_matches(['[', ']']).to_ascii_lowercase();
    let port = server.port_u16().unwrap_or(443);
    let spared = set(["NO_PROXY", "no_proxy"]).unwrap_or_default();
    let spared = is_here(&host) || spared.split(',').any(|entry| spares(entry.trim(), &host, port));
    let of_env = || set(["HTTPS_PROXY", "https_proxy"]).filter(|_| !spared);
    let Some(proxy) = named.map(str::to_owned).or_else(of_env) else { return Ok(None) };
    let whole = if proxy.contains("://") { proxy.clone() } else { format!("http://{proxy}") };
    whole.parse().map(Some).with_context(|| format!("the proxy {proxy:?} is no address, such as http://proxy:3128"))
}

/// A cluster on the machine itself is nobody's to reach by a proxy.
fn is_here(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// One entry: `*`, a name with all below it, `.name` or `*.name` for those below it alone, an address, a range of them; with a port perhaps.
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
    let name = if name.starts_with("*.") { &name[1..] } else { name };
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
            ("*.example.org", "api.example.org", 443, true),
            ("*.example.org", "example.org", 443, false),
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
    fn the_kubeconfigs_own_proxy_wins_and_that_of_the_environment_spares() {
        let env = |proxy: &'static str| {
            move |name: &str| match name {
                "HTTPS_PROXY" => Some(proxy.to_owned()),
                "NO_PROXY" => Some(String::new()),
                "no_proxy" => Some("127.0.0.1, .internal".to_owned()),
                _ => None,
            }
        };
        let by = |named, server: &str, proxy| {
            of(named, &server.parse().unwrap(), env(proxy)).unwrap().map(|proxy| proxy.to_string())
        };
        let (near, far) = ("http://127.0.0.1:3128", "https://api.example.org:6443");
        assert_eq!(by(None, far, near).as_deref(), Some("http://127.0.0.1:3128/"), "it is no server to be spared");
        assert_eq!(by(None, far, "proxy:3128").as_deref(), Some("http://proxy:3128/"), "as kubectl reads it");
        for spared in ["https://api.internal:6443", "https://127.0.0.1:6443", "https://[::1]:6443"] {
            assert_eq!(by(None, spared, near), None, "{spared}");
            assert!(by(Some("socks5://127.0.0.1:1080"), spared, near).unwrap().starts_with("socks5:"));
        }
        assert_eq!(by(None, far, ""), None);
        let error = of(Some("http://:x y"), &far.parse().unwrap(), |_| None).unwrap_err().to_string();
        assert!(error.contains("is no address"), "{error}");
    }

    #[test]
    fn a_proxy_is_named_by_the_cluster_of_the_context() {
        let cluster = |proxy: &str| serde_json::json!({"server": "https://a", "proxy-url": proxy});
        let config: Kubeconfig = serde_json::from_value(serde_json::json!({
            "current-context": "one",
            "contexts": [{"name": "one", "context": {"cluster": "a"}}, {"name": "two", "context": {"cluster": "b"}}],
            "clusters": [{"name": "a", "cluster": cluster("")}, {"name": "b", "cluster": cluster("http://p:1")}],
        }))
        .unwrap();
        assert_eq!(named(&config, None), None);
        assert_eq!(named(&config, Some("two")).as_deref(), Some("http://p:1"));
        assert_eq!(named(&config, Some("three")), None);
    }
}
