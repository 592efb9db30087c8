//! Errors as OpenAI's API writes them: a status, and `{"error": {"message", "type", "param", "code"}}`; and as Anthropic's does.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::engine::SubmitError;
use crate::request::RequestError;
use crate::template::{MessageError, TemplateError};

/// What a client is told that gets no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    pub message: String,
    /// The field of the request that is at fault.
    pub param: Option<String>,
    /// A word for programs.
    pub code: Option<&'static str>,
    /// Seconds after which to try again.
    pub retry_after: Option<u16>,
}

impl ApiError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// 400: this field cannot be so.
    pub fn field(param: impl Into<String>, message: impl std::fmt::Display) -> ApiError {
        let param = param.into();
        let message = format!("{param}: {message}");
        ApiError { param: Some(param), ..ApiError::new(StatusCode::BAD_REQUEST, message) }
    }

    /// 400, about the body as a whole.
    pub fn body(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    /// 500: not the client's fault.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// 503: gone, or going.
    pub fn unavailable(message: impl Into<String>) -> ApiError {
        ApiError { retry_after: Some(5), ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    pub fn unknown_model(name: &str) -> ApiError {
        let message = format!("the model {name:?} does not exist; /v1/models lists what does");
        let param = Some("model".into());
        ApiError { param, code: Some("model_not_found"), ..ApiError::new(StatusCode::NOT_FOUND, message) }
    }

    /// 400: this field's prompt has so many tokens; the error has a code of its own, by which clients shorten their prompts.
    pub fn beyond_context(param: &str, tokens: impl std::fmt::Display, context: usize) -> ApiError {
        // The words by which clients know it that read no code.
        let what =
            format!("has {tokens} tokens, and this model's maximum context length is {context} tokens");
        ApiError::field(param, format!("{what}; shorten the prompt")).with_code("context_length_exceeded")
    }

    /// The same where fields have other names: of these the first that the field has, or that what it is in has.
    pub fn renamed(self, names: &[(&str, &str)]) -> ApiError {
        let Some(param) = &self.param else { return self };
        let inside = |of: &str| param.strip_prefix(of).filter(|r| r.is_empty() || r.starts_with(['.', '[']));
        let new = names.iter().find_map(|(of, new)| inside(of).map(|rest| format!("{new}{rest}")));
        match new {
            Some(new) => self.about(new),
            None => self,
        }
    }

    /// The same, about another field.
    pub fn about(self, field: String) -> ApiError {
        let rest = self.param.as_ref().and_then(|param| self.message.strip_prefix(&**param));
        let message = match rest {
            Some(rest) => format!("{field}{rest}"),
            None => self.message,
        };
        ApiError { message, param: Some(field), ..self }
    }

    pub fn with_code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// The error's type, and a word for programs where it has none of its own.
    fn class(&self) -> (&'static str, Option<&'static str>) {
        match self.status.as_u16() {
            401 => ("authentication_error", Some("invalid_api_key")),
            403 => ("permission_error", None),
            404 => ("not_found_error", Some("not_found")),
            405 => ("invalid_request_error", Some("method_not_allowed")),
            408 => ("invalid_request_error", Some("request_timeout")),
            413 => ("invalid_request_error", Some("request_too_large")),
            429 => ("rate_limit_error", Some("rate_limit_exceeded")),
            500 => ("server_error", Some("server_error")),
            503 => ("service_unavailable_error", Some("service_unavailable")),
            501.. => ("server_error", None),
            _ => ("invalid_request_error", None),
        }
    }

    /// The same in the form of Anthropic's API.
    pub fn anthropic(&self, request: Option<&str>) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        };
        json!({"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request})
    }

    /// The body of the response, or the event that ends a stream.
    pub fn json(&self) -> Value {
        let (kind, code) = self.class();
        json!({"error": {
            "message": self.message, "type": kind, "param": self.param, "code": self.code.or(code),
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, super::api::json(&self.json())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        // Whoever speaks another API gets it in another form.
        response.extensions_mut().insert(self);
        response
    }
}

impl From<SubmitError> for ApiError {
    fn from(e: SubmitError) -> ApiError {
        let message = e.to_string();
        match e {
            SubmitError::Invalid(e) => e.into(),
            SubmitError::Busy(_) | SubmitError::Full(_) => {
                ApiError { retry_after: Some(1), ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, message) }
            }
            SubmitError::Draining | SubmitError::Dead(_) => ApiError::unavailable(message),
        }
    }
}

impl From<RequestError> for ApiError {
    fn from(e: RequestError) -> ApiError {
        ApiError::field(e.param, e.message)
    }
}

impl From<MessageError> for ApiError {
    fn from(e: MessageError) -> ApiError {
        ApiError::field(e.field, e.message)
    }
}

impl From<TemplateError> for ApiError {
    fn from(e: TemplateError) -> ApiError {
        let message = e.to_string();
        match &e {
            // The message begins with the field.
            TemplateError::Request(said) => {
                let param = said.split_once(": ").map(|(field, _)| field.to_owned());
                ApiError { param: param.filter(|p| !p.contains(' ')), ..ApiError::body(message) }
            }
            TemplateError::File { .. } => ApiError::internal(message),
            TemplateError::Raised(_) | TemplateError::Failed { .. } | TemplateError::Stopped(_) => {
                ApiError { param: Some("messages".into()), ..ApiError::body(message) }
            }
        }
    }
}
