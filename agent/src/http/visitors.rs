//! Who may ask for a drain. A browser sends a page's request to `127.0.0.1` as readily as its user's own, and a drain is asked for by GET, because
//! that is what the kubelet sends: any page that is open on the machine could take the engine out of service.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

const OF_A_PAGE: &str = "a web page may not drain a replica; ask without the headers Origin and Sec-Fetch-Site\n";
const OF_A_NAME: &str = "ask by an address, localhost or a name without a dot: whoever holds another name could lead a browser here by it\n";

/// Answers whoever may not ask; all others are passed on. `standalone`: nobody but us is asked by name.
pub async fn pass(standalone: bool, request: Request, next: Next) -> Response {
    match refusal(request.headers(), standalone) {
        Some(why) => (StatusCode::FORBIDDEN, why).into_response(),
        None => next.run(request).await,
    }
}

/// Why whoever sends these may not ask.
fn refusal(headers: &HeaderMap, standalone: bool) -> Option<&'static str> {
    // `none`: a person has typed the address
    let by_page = headers.get("sec-fetch-site").is_some_and(|site| site != "none");
    if by_page || headers.contains_key(header::ORIGIN) {
        return Some(OF_A_PAGE);
    }
    // a page at a name that its owner has made to mean this machine is no stranger to its browser, which says nothing then
    let host = headers.get(header::HOST).filter(|_| standalone)?;
    let known = host.to_str().is_ok_and(|host| host.parse().is_ok_and(|host| is_nobodys(&host)));
    (!known).then_some(OF_A_NAME)
}

/// An address, or a name that nobody can have in the names of the world.
fn is_nobodys(authority: &Authority) -> bool {
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    host.parse::<IpAddr>().is_ok() || !host.contains('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_and_a_foreign_name_may_not_ask_and_the_kubelet_may() {
        for (name, value, in_a_run, in_a_pod) in [
            ("host", "127.0.0.1:9400", true, true),
            ("host", "[::1]:9400", true, true),
            ("host", "localhost:9400", true, true),
            ("host", "gpu7", true, true),
            ("host", "rebound.example.com:9400", false, true),
            ("host", "127.0.0.1.example.com", false, true),
            ("origin", "http://127.0.0.1:9400", false, false),
            ("origin", "null", false, false),
            ("sec-fetch-site", "cross-site", false, false),
            ("sec-fetch-site", "same-origin", false, false),
            ("sec-fetch-site", "none", true, true),
            ("user-agent", "kube-probe/1.34", true, true),
        ] {
            let name = axum::http::HeaderName::from_static(name);
            let headers = HeaderMap::from_iter([(name.clone(), axum::http::HeaderValue::from_static(value))]);
            let may = [true, false].map(|standalone| refusal(&headers, standalone).is_none());
            assert_eq!(may, [in_a_run, in_a_pod], "{name}: {headers:?}");
        }
        assert_eq!(refusal(&HeaderMap::new(), true), None);
    }
}
