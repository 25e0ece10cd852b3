//! The socket on which a server listens.

use std::{io, net::SocketAddr};

use tokio::net::{TcpListener, TcpSocket};

/// Bytes that the system may buffer for a client. More is sent only after the client accepts some of them, so this
/// buffer distinguishes a slow client from one that accepts nothing.
const SEND_BUFFER: u32 = 64 << 10;
/// Connections that may wait to be accepted: tokio's default.
const BACKLOG: u32 = 1024;

/// Takes an address, on which [`listen`] then listens. It fails if another program does.
pub(super) fn bind(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // As in `TcpListener::bind`. On other systems than Unix this option would let two programs share an address.
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    socket.set_send_buffer_size(SEND_BUFFER)?;
    socket.bind(address)?;
    Ok(socket)
}

pub(super) fn listen(socket: TcpSocket) -> io::Result<TcpListener> {
    socket.listen(BACKLOG)
}
