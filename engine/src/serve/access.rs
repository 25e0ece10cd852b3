//! Who may use the server: the names that requests call it by, and its key.

use std::net::IpAddr;

use axum::http::{HeaderMap, StatusCode, Uri, header};

use super::{options::ServeOptions, refusal::Refusal};

/// Checks the host that a request names, and the key of one to `/v1`. Probes call `/health` by the address of a machine, and a web
/// page learns nothing there.
pub(super) fn check(
    options: &ServeOptions,
    loopback: bool,
    uri: &Uri,
    headers: &HeaderMap,
) -> Result<(), Refusal> {
    if uri.path() != "/health" && (loopback || !options.hosts.is_empty()) {
        // Clients without a name for the server are no browsers.
        let named = headers.get_all(header::HOST).iter();
        let named = named.map(|host| host.to_str().unwrap_or("?"));
        let mut named = named.chain(uri.authority().map(|authority| authority.as_str()));
        if let Some(other) = named.find(|host| !is_own(host, &options.hosts)) {
            let own = [String::from("localhost")];
            let own = own.iter().chain(&options.hosts).map(String::as_str);
            let own = own.collect::<Vec<_>>().join(" or ");
            let message = format!(
                "the request is for the host {other:?}, and this server is {own}: if it has that name, start it with \
                 --allow-host NAME"
            );
            return Err(Refusal::new(StatusCode::FORBIDDEN, message));
        }
    }
    let Some(key) = options.api_key.as_ref() else {
        return Ok(());
    };
    if !uri.path().starts_with("/v1/") {
        return Ok(());
    }
    let given = headers
        .get(header::AUTHORIZATION)
        .and_then(|given| given.as_bytes().split_at_checked(7))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"Bearer "));
    match given {
        Some((_, given)) if key.is(given.trim_ascii()) => Ok(()),
        given => {
            let what = match given {
                Some(_) => "the API key is wrong",
                None => "the API key is missing",
            };
            let message = format!("{what}: send the header `Authorization: Bearer KEY`");
            Err(Refusal::new(StatusCode::UNAUTHORIZED, message))
        }
    }
}

/// Whether a host, with or without a port, is this machine or one of the names.
fn is_own(host: &str, names: &[String]) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or(rest, |(address, _)| address),
        None => host.split_once(':').map_or(host, |(name, _)| name),
    };
    let address = name.parse::<IpAddr>();
    if let Ok(address) = address {
        // An address of IPv6 can be written in several ways.
        let is_it = |own: &String| own.parse() == Ok(address);
        return address.is_loopback() || names.iter().any(is_it);
    }
    name.eq_ignore_ascii_case("localhost") || names.iter().any(|own| name.eq_ignore_ascii_case(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_compared_without_their_ports() {
        let names = ["model.example", "10.0.0.2", "fd00::1"].map(str::to_owned);
        for own in [
            "localhost",
            "LocalHost:8000",
            "127.0.0.1:80",
            "[::1]:8000",
            "[::1]",
            "Model.Example:1",
            "10.0.0.2:8000",
            "[fd00:0::1]:8000",
        ] {
            assert!(is_own(own, &names), "{own}");
        }
        for other in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:80",
            "10.0.0.1",
            "[::2]",
            "?",
        ] {
            assert!(!is_own(other, &names), "{other}");
        }
    }
}
