//! Requests in, token streams out. What a served model needs on top of a session lives here; so far that is the choice of
//! the next token.

pub mod sample;
