//! Limits and access of a server.

use std::{fmt, hint::black_box, time::Duration};

#[cfg(doc)]
use crate::Engine;
use crate::SamplingOptions;

/// Limits of a server, and who may use it.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The model's name in the interface.
    pub name: String,
    /// How tokens are drawn where a request does not say. What this leaves open is as in OpenAI's interface: temperature 1,
    /// from all tokens. If its temperature is 0, a request that gives another parameter or a seed, and no temperature, has 1.
    pub sampling: SamplingOptions,
    /// Maximum number of open connections; more wait to be accepted.
    pub connections: usize,
    /// Maximum number of bytes of a request's body.
    pub body_bytes: usize,
    /// Maximum time in which a client must send its request.
    pub receive: Duration,
    /// How long a connection may have no request after an answer, before it is closed. It is longer than proxies keep connections
    /// that they use again.
    pub idle: Duration,
    /// How long a client may accept no byte that is sent to it. After that its connection is closed and its request
    /// cancelled.
    pub send: Duration,
    /// How long answers may continue once the server begins to stop. New requests are refused meanwhile.
    pub grace: Duration,
    /// Tokens of a chat's answer if the request gives no maximum. If none: 2048, or a quarter of the KV cache if that is less.
    pub answer_tokens: Option<u32>,
    /// After this time without an event, a stream gets a comment, so that proxies do not close its connection.
    pub keep_alive: Duration,
    /// Names of this server, beside `localhost` and loopback addresses: host names, or IP addresses without brackets. If there are some, or if the server listens on a
    /// loopback address, requests with another `Host` are refused, except those for `/health`: a web page could have sent them (DNS
    /// rebinding).
    pub hosts: Vec<String>,
    /// The key that requests to `/v1` must bring; if none, all are taken.
    pub api_key: Option<ApiKey>,
    /// Gets [what made steps slower](Engine::warnings): a line for a user. By default nobody does.
    pub warn: fn(&str),
}

impl ServeOptions {
    /// Default of [`connections`](Self::connections).
    pub const CONNECTIONS: u32 = 1024;
    /// Default of [`body_bytes`](Self::body_bytes): 4 MiB.
    pub const BODY_BYTES: u32 = 4 << 20;
    /// Default of [`receive`](Self::receive), in seconds.
    pub const RECEIVE_SECONDS: u32 = 30;
    /// Default of [`idle`](Self::idle), in seconds.
    pub const IDLE_SECONDS: u32 = 75;
    /// Default of [`send`](Self::send), in seconds.
    pub const SEND_SECONDS: u32 = 60;
    /// Default of [`grace`](Self::grace), in seconds.
    pub const GRACE_SECONDS: u32 = 10;

    /// Default limits, and no key.
    #[must_use]
    pub fn new(name: String) -> Self {
        let seconds = |number: u32| Duration::from_secs(number.into());
        Self {
            name,
            sampling: SamplingOptions::default(),
            connections: Self::CONNECTIONS as usize,
            body_bytes: Self::BODY_BYTES as usize,
            receive: seconds(Self::RECEIVE_SECONDS),
            idle: seconds(Self::IDLE_SECONDS),
            send: seconds(Self::SEND_SECONDS),
            grace: seconds(Self::GRACE_SECONDS),
            answer_tokens: None,
            keep_alive: Duration::from_secs(15),
            hosts: Vec::new(),
            api_key: None,
            warn: |_| (),
        }
    }
}

/// A secret that clients send as `Authorization: Bearer KEY`.
#[derive(Clone)]
pub struct ApiKey(String);

impl ApiKey {
    /// A key. None if a header cannot carry it: it is empty, or has other characters than visible ones of ASCII.
    #[must_use]
    pub fn new(key: &str) -> Option<Self> {
        let sound = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
        sound.then(|| Self(key.to_owned()))
    }

    /// Whether these are its bytes. The time depends only on their number.
    pub(super) fn is(&self, other: &[u8]) -> bool {
        let key = self.0.as_bytes();
        let pairs = key.iter().zip(other);
        let differ = pairs.fold(0, |differ, (a, b)| black_box(differ | (a ^ b)));
        key.len() == other.len() && differ == 0
    }
}

/// Without the key, so that no log has it.
impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_compared_whole_and_not_shown() {
        let key = ApiKey::new("sk-1").unwrap();
        assert!(key.is(b"sk-1"));
        for other in [&b"sk-2"[..], b"sk-", b"sk-11", b""] {
            assert!(!key.is(other));
        }
        for unsound in ["", "a b", "a\n", "ä"] {
            assert!(ApiKey::new(unsound).is_none(), "{unsound:?}");
        }
        assert!(!format!("{key:?}").contains("sk"));
    }
}
