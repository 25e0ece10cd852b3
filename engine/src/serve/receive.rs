//! Receives the bodies of requests.

use std::error::Error;

use axum::{
    body::Body,
    http::{HeaderMap, StatusCode, header},
};
use hyper::body::Body as _;

use super::{options::ServeOptions, refusal::Refusal};

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

/// Reads a body, in the time and up to the size that the server allows.
pub(super) async fn whole(body: Body, options: &ServeOptions) -> Result<Vec<u8>, Refusal> {
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
    match tokio::time::timeout(options.receive, axum::body::to_bytes(body, most)).await {
        Ok(Ok(bytes)) => Ok(bytes.into()),
        Ok(Err(error)) => match is_broken(&error) {
            true => Err(Refusal::wrong(
                "the body did not arrive whole: send it again",
            )),
            false => Err(too_large()),
        },
        Err(_) => Err(Refusal::new(
            StatusCode::REQUEST_TIMEOUT,
            format!(
                "the request did not arrive within {} s: send it faster, or start the server with a larger --receive-timeout",
                options.receive.as_secs_f64()
            ),
        )),
    }
}

/// Whether the connection or the coding of the body is the cause, and not its size.
fn is_broken(error: &(dyn Error + 'static)) -> bool {
    error.is::<hyper::Error>() || error.source().is_some_and(is_broken)
}
