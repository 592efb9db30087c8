//! What every request passes: an id, the rules for browsers, the key. Outside all of it stands the guard against panics.

use std::io;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, Version, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};

use super::app::{App, KeyHash};
use super::error::ApiError;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Of the ids that clients give.
const LONGEST_ID: usize = 128;

/// Paths that are counted by themselves.
const PATHS: [&str; 8] = [
    "/health",
    "/ready",
    "/metrics",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
];

/// Who calls: the hash of the key that was given, where keys are asked for.
#[derive(Clone, Copy, Debug)]
pub struct Caller(pub Option<KeyHash>);

/// The routes within the middleware.
pub fn layered(routes: Router, app: &Arc<App>) -> io::Result<Router> {
    let mut router = routes.layer(middleware::from_fn_with_state(app.clone(), key));
    if let Some(cors) = cors(&app.settings.cors_origins)? {
        router = router.layer(cors);
    }
    let panicked =
        |_| ApiError::internal("the server failed on this request; please report it").into_response();
    let router = router.layer(CatchPanicLayer::custom(panicked));
    Ok(router.layer(middleware::from_fn_with_state(app.clone(), identify)))
}

fn cors(origins: &[String]) -> io::Result<Option<CorsLayer>> {
    if origins.is_empty() {
        return Ok(None);
    }
    let origin = if origins.iter().any(|o| o == "*") {
        AllowOrigin::any()
    } else {
        let parse = |o: &String| {
            HeaderValue::from_str(o)
                .map_err(|_| io::Error::other(format!("{o:?} is no origin; give https://host")))
        };
        AllowOrigin::list(origins.iter().map(parse).collect::<io::Result<Vec<_>>>()?)
    };
    // A star would leave out the header that has the key.
    let headers = AllowHeaders::mirror_request();
    let cors = CorsLayer::new().allow_origin(origin).allow_methods(Any).allow_headers(headers);
    Ok(Some(cors.expose_headers([REQUEST_ID, header::RETRY_AFTER])))
}

/// Gives the response the id that the request came with, or one of ours.
async fn identify(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let given = request.headers().get(&REQUEST_ID).filter(|id| {
        let plain = |b: &u8| b.is_ascii_alphanumeric() || b"-_.:".contains(b);
        (1..=LONGEST_ID).contains(&id.len()) && id.as_bytes().iter().all(plain)
    });
    let id = given.cloned().or_else(|| HeaderValue::from_str(&format!("req-{}", app.new_id())).ok());
    let path = request.uri().path().trim_end_matches('/');
    let path = PATHS.into_iter().find(|known| *known == path).unwrap_or("other");
    // Servers behind others that take a different one of two would be told different requests.
    let hosts = request.headers().get_all(header::HOST).iter().count();
    let mut response = match hosts == 1 || hosts == 0 && request.version() < Version::HTTP_11 {
        true => next.run(request).await,
        false => ApiError::body(format!("a request has one Host header, not {hosts}")).into_response(),
    };
    app.metrics.response(path, response.status().as_u16());
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// Lets in who has a key. Whether the server lives is no secret.
async fn key(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let open = ["/health", "/ready"].contains(&request.uri().path().trim_end_matches('/'));
    let headers = request.headers();
    let bearer = headers.get(header::AUTHORIZATION).and_then(|v| {
        let (scheme, key) = v.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
    });
    let given = bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes));
    let caller = given.and_then(|key| app.check_key(key));
    if app.wants_keys() && caller.is_none() && !open && request.method() != Method::OPTIONS {
        let message = match given {
            Some(_) => "the API key is not one of this server's",
            None => "an API key is missing; send `Authorization: Bearer KEY` or `x-api-key: KEY`",
        };
        return ApiError::new(StatusCode::UNAUTHORIZED, message).into_response();
    }
    request.extensions_mut().insert(Caller(caller));
    next.run(request).await
}
