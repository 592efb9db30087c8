//! `GET /`: a page to talk to the model and to look at the server, whole in the binary. It asks this server's API for everything, with the key that
//! is typed into it; nothing else runs in it or is loaded by it.

use std::sync::LazyLock;

use axum::http::header;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};

const PAGE: &str = include_str!("page/page.html");

/// What the page may do: run its one script, have its one style, ask this server.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let hash = |element: &str| {
        let inside = PAGE.split_once(&format!("<{element}>")).map_or("", |(_, rest)| rest);
        let inside = inside.split_once(&format!("</{element}>")).map_or("", |(inside, _)| inside);
        STANDARD.encode(Sha256::digest(inside))
    };
    format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; connect-src 'self'; img-src data:; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
        hash("script"),
        hash("style")
    )
});

/// `GET /`
pub async fn show() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY.as_str()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, PAGE).into_response()
}
