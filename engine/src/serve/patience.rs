//! Closes connections whose clients accept no data any more.

use std::{
    future::Future,
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Instant, Sleep, sleep},
};

/// Decades: longer limits are as long as this, so that no time overflows.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// The time when a limit that begins now is over.
pub(super) fn after(limit: Duration) -> Instant {
    Instant::now() + limit.min(FOREVER)
}

/// A connection whose writes fail with [`io::ErrorKind::TimedOut`] if the client accepts no byte for `limit`.
#[derive(Debug)]
pub(super) struct Patience {
    stream: TcpStream,
    limit: Duration,
    /// Number of reads that gave something.
    reads: Arc<AtomicU64>,
    /// When the pending write times out.
    end: Pin<Box<Sleep>>,
    waits: bool,
}

impl Patience {
    /// `reads` counts the reads that give something.
    pub(super) fn new(stream: TcpStream, limit: Duration, reads: Arc<AtomicU64>) -> Self {
        Self {
            stream,
            limit,
            reads,
            end: Box::pin(sleep(limit)),
            waits: false,
        }
    }

    fn write(
        &mut self,
        context: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut TcpStream>, &mut Context<'_>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let written = write(Pin::new(&mut self.stream), context);
        if written.is_ready() {
            self.waits = false;
            return written;
        }
        if !self.waits {
            self.waits = true;
            self.end.as_mut().reset(after(self.limit));
        }
        std::task::ready!(self.end.as_mut().poll(context));
        // On a normal close the system would keep offering the rest to the client. A reset discards it and tells the
        // client.
        let _ = self.stream.set_zero_linger();
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Patience {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.reads.fetch_add(1, Relaxed);
        }
        read
    }
}

impl AsyncWrite for Patience {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.write(context, |stream, context| stream.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write(context, |stream, context| {
            stream.poll_write_vectored(context, parts)
        })
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
