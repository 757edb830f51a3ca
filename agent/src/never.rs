//! Configurations that can never work, refused before anything is started: an engine that loads a model for minutes behind a gate that
//! cannot reach it is a poor way to say so. Pure: it looks at words, never at the network.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ::http::Uri;

/// What the kernel takes as a Unix socket's path: 108 bytes, of which the last is a zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;
const HTTP_PORT: u16 = 80;

/// What can never work, and what to do about it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum NeverError {
    #[error("the engine's URL {0} names no host; give --engine-url one like http://127.0.0.1:8000")]
    NoHost(Uri),
    #[error(
        "the engine's URL {0} is not http://; the gate speaks plain HTTP to an engine on its own machine: give --engine-url the engine's \
         plain address"
    )]
    NotHttp(Uri),
    #[error(
        "the engine's URL {url} is the gate's own address {listen}, so that the gate would ask itself; give --engine-url the engine's address, \
         or --listen another"
    )]
    OwnAddress { url: Uri, listen: SocketAddr },
    #[error(
        "the gate's control socket {path} would have a path of {bytes} bytes and the kernel takes {SOCKET_PATH_BYTES_MAX}; choose a shorter \
         --agent-dir (or TMPDIR)"
    )]
    SocketPath { path: PathBuf, bytes: usize },
}

/// Could a gate that listens on `listen`, before an engine at `engine_url`, with its control socket at `gate_socket`, ever work?
///
/// # Errors
/// When it could not, whatever else is true.
pub fn check(listen: SocketAddr, engine_url: &Uri, gate_socket: &Path) -> Result<(), NeverError> {
    let Some(host) = engine_url.host() else { return Err(NeverError::NoHost(engine_url.clone())) };
    // one without a scheme means the same
    if engine_url.scheme_str().is_some_and(|scheme| scheme != "http") {
        return Err(NeverError::NotHttp(engine_url.clone()));
    }
    if engine_url.port_u16().unwrap_or(HTTP_PORT) == listen.port() && reaches(host, listen.ip()) {
        return Err(NeverError::OwnAddress { url: engine_url.clone(), listen });
    }
    let bytes = gate_socket.as_os_str().as_bytes().len();
    if bytes > SOCKET_PATH_BYTES_MAX {
        return Err(NeverError::SocketPath { path: gate_socket.to_owned(), bytes });
    }
    Ok(())
}

/// Does whoever connects to this host find who listens on that address, for certain?
fn reaches(host: &str, listen: IpAddr) -> bool {
    let literal = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().ok();
    // the kernel takes the unspecified address for this machine
    let here = |ip: IpAddr| ip.is_loopback() || ip.is_unspecified();
    match literal {
        Some(ip) => {
            ip == listen
                || ip.is_ipv4() == listen.is_ipv4()
                    && here(ip)
                    && (listen.is_unspecified() || ip.is_unspecified() && here(listen))
                // `[::]` takes IPv4 as well, and where a machine keeps them apart another port does no harm
                || listen == IpAddr::V6(Ipv6Addr::UNSPECIFIED) && here(ip)
        }
        None => host == "localhost" && here(listen),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(listen: &str, url: &str) -> Result<(), NeverError> {
        check(listen.parse().unwrap(), &url.parse().unwrap(), Path::new("/run/truebeat-agent/gate/gate.sock"))
    }

    #[test]
    fn an_engine_behind_tls_or_without_a_host_is_refused() {
        for url in ["https://127.0.0.1:8000", "ftp://127.0.0.1", "/v1"] {
            let error = checked("127.0.0.1:8080", url).unwrap_err().to_string();
            assert!(error.contains(url) && error.contains("--engine-url"), "{error}");
        }
        for url in ["http://127.0.0.1:8000", "127.0.0.1:8000", "http://vllm:8000/v1"] {
            assert_eq!(checked("127.0.0.1:8080", url), Ok(()), "{url}");
        }
    }

    #[test]
    fn a_gate_before_itself_is_refused_and_a_neighbour_on_the_same_port_is_not() {
        for (listen, url) in [
            ("127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("127.0.0.1:8080", "http://localhost:8080/"),
            ("127.0.0.1:8080", "http://0.0.0.0:8080"),
            ("0.0.0.0:8080", "http://127.0.0.1:8080"),
            ("0.0.0.0:80", "http://127.0.0.2"),
            ("[::1]:8080", "http://[::1]:8080"),
            ("[::]:8080", "http://127.0.0.1:8080"),
        ] {
            let error = checked(listen, url).unwrap_err().to_string();
            assert!(error.contains(listen) && error.contains(url.trim_end_matches('/')), "{error}");
        }
        for (listen, url) in [
            ("127.0.0.1:8080", "http://127.0.0.1:8000"),
            ("127.0.0.1:8080", "http://127.0.0.2:8080"),
            ("127.0.0.1:8080", "http://10.0.0.7:8080"),
            ("10.0.0.7:8080", "http://127.0.0.1:8080"),
            ("10.0.0.7:8080", "http://localhost:8080"),
            ("127.0.0.1:8080", "http://vllm:8080"),
            ("127.0.0.1:8080", "http://[::1]:8080"),
            ("127.0.0.1:0", "http://127.0.0.1:8000"),
        ] {
            assert_eq!(checked(listen, url), Ok(()), "{listen} {url}");
        }
    }

    #[test]
    fn a_socket_path_is_as_long_as_the_kernel_takes_it() {
        let dir = tempfile::tempdir().unwrap();
        for (bytes, fits) in [(SOCKET_PATH_BYTES_MAX, true), (SOCKET_PATH_BYTES_MAX + 1, false)] {
            let path = dir.path().join("s".repeat(bytes - dir.path().as_os_str().len() - 1));
            let error = check(([127, 0, 0, 1], 8080).into(), &Uri::from_static("http://127.0.0.1:8000"), &path).err();
            assert_eq!((error.is_none(), std::os::unix::net::UnixListener::bind(&path).is_ok()), (fits, fits));
            assert!(error.is_none_or(|error| error.to_string().contains("108 bytes")));
        }
    }
}
