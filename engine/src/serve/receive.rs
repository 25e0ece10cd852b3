//! Receives the bodies of requests.

use std::{
    error::Error,
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use axum::{
    body::Body,
    http::{HeaderMap, StatusCode, header},
};
use futures_util::StreamExt as _;
use hyper::body::Body as _;

use super::{lanes::SHORT, options::ServeOptions, refusal::Refusal};

/// A web page can send other content types to a loopback address without a CORS preflight.
pub(super) fn json_only(headers: &HeaderMap) -> Result<(), Refusal> {
    let kind = headers
        .get(header::CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok());
    let kind = kind
        .and_then(|kind| kind.split(';').next())
        .unwrap_or_default();
    match kind.trim().eq_ignore_ascii_case("application/json") {
        true => Ok(()),
        false => Err(Refusal::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "send the request with content-type: application/json",
        )),
    }
}

/// Bytes of bodies that are being received or parsed, all together: connections are many, and have no places yet. The first
/// [`SHORT`] bytes of each do not count: clients that send most of a large body and stop must not keep short ones out.
const MOST_BYTES: u64 = 256 << 20;

/// Room for bodies.
pub(super) struct Bodies {
    free: Arc<AtomicU64>,
}

impl Bodies {
    /// Room for one body of this size at least.
    pub(super) fn new(body_bytes: usize) -> Self {
        Self::of(MOST_BYTES.max(body_bytes as u64))
    }

    fn of(bytes: u64) -> Self {
        Self {
            free: Arc::new(AtomicU64::new(bytes)),
        }
    }
}

/// A body, whose room is free again when it is dropped.
pub(super) struct Received {
    pub bytes: Vec<u8>,
    free: Arc<AtomicU64>,
    held: u64,
}

impl Received {
    /// Appends a part of a body. Returns false if there is no room.
    fn push(&mut self, part: &[u8]) -> bool {
        let counted = |length: usize| length.saturating_sub(SHORT) as u64;
        let length = self.bytes.len();
        let more = counted(length.saturating_add(part.len())) - counted(length);
        let take = |free: u64| free.checked_sub(more);
        if self.free.fetch_update(Relaxed, Relaxed, take).is_err() {
            return false;
        }
        self.held += more;
        self.bytes.extend_from_slice(part);
        true
    }

    fn clear(&mut self) {
        self.bytes = Vec::new();
        self.free.fetch_add(std::mem::take(&mut self.held), Relaxed);
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Reads a body, in the time and up to the size that the server allows. If `room` is an error, or there is no room for the body, it
/// is read and dropped: most clients read no answer before they have sent their request.
pub(super) async fn whole(
    body: Body,
    options: &ServeOptions,
    bodies: &Bodies,
    room: Result<(), Refusal>,
) -> Result<Received, Refusal> {
    let most = options.body_bytes;
    let too_large = || {
        let message = format!(
            "the body is too large: a request to this server has at most {most} bytes; send a shorter one, or start the server \
             with a larger --body-bytes"
        );
        Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    if body.size_hint().lower() > most as u64 {
        return Err(too_large());
    }
    let read = async {
        let (mut parts, mut room, mut length) = (body.into_data_stream(), room, 0_usize);
        let mut received = Received {
            bytes: Vec::new(),
            free: Arc::clone(&bodies.free),
            held: 0,
        };
        while let Some(part) = parts.next().await {
            let part = part.map_err(|error| broken(&error))?;
            length = length.saturating_add(part.len());
            if length > most {
                return Err(too_large());
            }
            if room.is_ok() && !received.push(&part) {
                received.clear();
                room = Err(Refusal::busy("too many large requests arrive at once"));
            }
        }
        room.map(|()| received)
    };
    let timed_out = |_| {
        let message = format!(
            "the request did not arrive within {} s: send it faster, or start the server with a larger --receive-timeout",
            options.receive.as_secs_f64()
        );
        Refusal::new(StatusCode::REQUEST_TIMEOUT, message)
    };
    let read = tokio::time::timeout(options.receive, read).await;
    read.map_err(timed_out)?
}

/// A body that is malformed, or whose client has gone.
fn broken(error: &(dyn Error + 'static)) -> Refusal {
    let mut refusal = Refusal::wrong("the body did not arrive whole: send it again");
    let causes = std::iter::successors(Some(error), |&error| error.source());
    let mut kinds = causes.filter_map(|error| Some(error.downcast_ref::<io::Error>()?.kind()));
    // Other kinds are those of parts with a wrong length.
    refusal.has_left = kinds.any(|kind| {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
        matches!(
            kind,
            BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof
        )
    });
    refusal
}

#[cfg(test)]
mod tests {
    use axum::body::Bytes;
    use futures_util::stream;
    use tokio::sync::mpsc;

    use super::*;

    /// A body whose parts come one by one.
    fn body() -> (mpsc::UnboundedSender<usize>, Body) {
        let (parts, coming) = mpsc::unbounded_channel::<usize>();
        let parts_of = stream::unfold(coming, |mut coming| async {
            let bytes = Bytes::from(vec![b'a'; coming.recv().await?]);
            Some((Ok::<_, std::io::Error>(bytes), coming))
        });
        (parts, Body::from_stream(parts_of))
    }

    #[test]
    fn bodies_have_room_for_so_many_bytes_together() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_time()
            .build();
        runtime.unwrap().block_on(async {
            let mut options = ServeOptions::new("tiny".to_owned());
            options.body_bytes = SHORT + 90;
            let bodies = Arc::new(Bodies::of(100));
            let free = |bytes| bodies.free.load(Relaxed) == bytes;
            let receive = |body| {
                let (options, bodies) = (options.clone(), Arc::clone(&bodies));
                tokio::spawn(async move { whole(body, &options, &bodies, Ok(())).await })
            };
            let (slow, one) = body();
            let one = receive(one);
            for bytes in [SHORT - 10, 50, 40] {
                slow.send(bytes).unwrap();
            }
            while !free(20) {
                tokio::task::yield_now().await;
            }
            let text = |more| Body::from("a".repeat(SHORT + more));
            let large = receive(text(20)).await.unwrap().unwrap();
            assert!(large.bytes.len() == SHORT + 20 && free(0));
            // Short ones need no room.
            let short = receive(text(0)).await.unwrap().unwrap();
            assert!(short.bytes.len() == SHORT && free(0));
            drop((large, short));
            let refused = receive(text(21)).await.unwrap();
            assert_eq!(refused.err().unwrap().status, 429);
            // One that leaves gives its room back, and so does one that is parsed.
            one.abort();
            assert!(one.await.is_err() && free(100));
            let (parts, two) = body();
            let two = receive(two);
            parts.send(SHORT + 90).unwrap();
            drop(parts);
            drop(two.await.unwrap().unwrap());
            assert!(free(100));
            // Beyond the size of one body it is too large, also if it is not kept.
            let (parts, large) = body();
            let full = Err(Refusal::busy("full"));
            parts.send(SHORT + 91).unwrap();
            let refused = whole(large, &options, &bodies, full).await;
            assert_eq!(refused.err().unwrap().status, 413);
        });
    }

    #[test]
    fn a_body_without_a_place_is_read_and_dropped() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_time()
            .build();
        runtime.unwrap().block_on(async {
            let options = ServeOptions::new("tiny".to_owned());
            let bodies = Bodies::of(10);
            let (parts, one) = body();
            let full = Err(Refusal::busy("full"));
            let reads = whole(one, &options, &bodies, full);
            let sends = async {
                for _ in 0..10 {
                    parts.send(40).unwrap();
                    tokio::task::yield_now().await;
                }
                drop(parts);
            };
            let (refused, ()) = tokio::join!(reads, sends);
            assert_eq!(refused.err().unwrap().message, "full: try again later");
            assert_eq!(bodies.free.load(Relaxed), 10);
        });
    }
}
