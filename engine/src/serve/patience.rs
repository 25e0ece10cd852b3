//! Closes connections whose clients accept no data any more.

use std::{
    future::Future,
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
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
    /// Shared with those who watch for [its end](left).
    incoming: Arc<OwnedReadHalf>,
    outgoing: OwnedWriteHalf,
    limit: Duration,
    /// Number of reads that gave something.
    reads: Arc<AtomicU64>,
    /// When the pending write times out.
    end: Pin<Box<Sleep>>,
    waits: bool,
}

/// How often a connection is looked at whose client has sent something that is not read yet.
const LOOK: Duration = Duration::from_millis(100);

/// Returns when the client sends no more, and has had a moment since for answers that were almost ready. It may have gone. While a
/// request is answered, hyper watches for this only if nothing is behind the request.
pub(super) async fn left(incoming: &OwnedReadHalf, moment: Duration) {
    while let Ok(ready) = incoming.ready(Interest::READABLE).await {
        if ready.is_read_closed() {
            break;
        }
        sleep(LOOK).await;
    }
    sleep(moment).await;
}

impl Patience {
    /// `reads` counts the reads that give something.
    pub(super) fn new(stream: TcpStream, limit: Duration, reads: Arc<AtomicU64>) -> Self {
        let (incoming, outgoing) = stream.into_split();
        Self {
            incoming: Arc::new(incoming),
            outgoing,
            limit,
            reads,
            end: Box::pin(sleep(limit)),
            waits: false,
        }
    }

    /// What the client sends.
    pub(super) fn incoming(&self) -> Arc<OwnedReadHalf> {
        Arc::clone(&self.incoming)
    }

    fn write(
        &mut self,
        context: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut OwnedWriteHalf>, &mut Context<'_>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let written = write(Pin::new(&mut self.outgoing), context);
        if written.is_ready() {
            self.waits = false;
            return written;
        }
        if !self.waits {
            self.waits = true;
            self.end.as_mut().reset(after(self.limit));
        }
        ready!(self.end.as_mut().poll(context));
        // On a normal close the system would keep offering the rest to the client. A reset discards it and tells the
        // client.
        let _ = self.outgoing.as_ref().set_zero_linger();
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Patience {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let stream: &TcpStream = (*self.incoming).as_ref();
        loop {
            ready!(stream.poll_read_ready(context))?;
            match stream.try_read(buffer.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
                Ok(bytes) => {
                    buffer.advance(bytes);
                    self.reads.fetch_add(u64::from(bytes > 0), Relaxed);
                    return Poll::Ready(Ok(()));
                }
            }
        }
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
        self.outgoing.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.outgoing).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.outgoing).poll_shutdown(context)
    }
}
