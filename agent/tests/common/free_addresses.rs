//! Loopback addresses for programs that a test starts, which nobody else on the machine is given meanwhile.

use std::net::SocketAddr;
use std::sync::Mutex;

use tokio::net::TcpSocket;

/// What is reserved stays so until the test's process ends. A port that was merely free a moment ago may be that of somebody's connection
/// when the program listens.
static RESERVED: Mutex<Vec<TcpSocket>> = Mutex::new(Vec::new());

/// `N` different ones. Nobody listens there yet; a program that sets `SO_REUSEADDR`, as servers do, may.
pub fn free_addresses<const N: usize>() -> [SocketAddr; N] {
    [(); N].map(|()| {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = socket.local_addr().unwrap();
        RESERVED.lock().unwrap().push(socket);
        address
    })
}
