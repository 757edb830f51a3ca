//! Loopback addresses for programs that a test starts, of which none is taken now.

use std::net::{SocketAddr, TcpListener};

/// `N` different ones. They are free when this returns: a program that is quick to start finds nobody on them.
pub fn free_addresses<const N: usize>() -> [SocketAddr; N] {
    let listeners = [(); N].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap())
}
