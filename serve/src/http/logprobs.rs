//! Log-probabilities as the two endpoints write them. JSON has no infinity: what cannot happen has -9999.

use serde_json::{Map, Value, json};

use crate::answer::Token;
use crate::sample::Logprobs;
use crate::tokenizer::Tokenizer;

/// Stands for negative infinity.
const NEVER: f32 = -9999.0;

fn number(x: f32) -> f64 {
    // NaN is not larger either.
    f64::from(if x > NEVER { x.min(0.0) } else { NEVER })
}

/// A token's text, with U+FFFD for bytes that are no character by themselves.
fn text(tokenizer: &Tokenizer, id: u32) -> String {
    String::from_utf8_lossy(&tokenizer.bytes(id)).into_owned()
}

fn entry(tokenizer: &Tokenizer, id: u32, logprob: f32) -> Value {
    let bytes = tokenizer.bytes(id);
    json!({"token": String::from_utf8_lossy(&bytes), "logprob": number(logprob), "bytes": bytes})
}

/// Of tokens: each with the likeliest in its place. None if they were not asked for.
pub fn each(tokenizer: &Tokenizer, tokens: &[Token]) -> Option<Vec<Value>> {
    let one = |token: &Token| {
        let Logprobs { chosen, top } = token.logprobs.as_ref()?;
        let mut shown = entry(tokenizer, token.id, *chosen);
        shown["top_logprobs"] = top.iter().map(|(id, x)| entry(tokenizer, *id, *x)).collect();
        Some(shown)
    };
    tokens.iter().map(one).collect()
}

/// Of a chat's tokens. Null if they were not asked for.
pub fn chat(tokenizer: &Tokenizer, tokens: &[Token]) -> Value {
    match each(tokenizer, tokens) {
        Some(content) if !content.is_empty() => json!({"content": content, "refusal": null}),
        _ => Value::Null,
    }
}

/// Of a prompt's tokens by id, the first of which has none.
pub fn prompt(tokenizer: &Tokenizer, tokens: &[Token]) -> Value {
    let one = |token: &Token| {
        let Some(Logprobs { chosen, top }) = &token.logprobs else { return Value::Null };
        let all = top.iter().map(|(id, x)| (*id, *x)).chain([(token.id, *chosen)]);
        let shown =
            |(id, x)| (format!("{id}"), json!({"logprob": number(x), "decoded_token": text(tokenizer, id)}));
        Value::Object(all.map(shown).collect())
    };
    tokens.iter().map(one).collect()
}

/// Of a completion's tokens, and of its prompt's, the first of which has none; `offset` counts the characters before them, and then
/// those after them. The token itself is among the likeliest even if it is none of them.
pub fn completion(tokenizer: &Tokenizer, tokens: &[Token], offset: &mut usize) -> Value {
    let (mut texts, mut own, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for Token { id, logprobs } in tokens {
        let shown = text(tokenizer, *id);
        let likeliest = logprobs.as_ref().map(|Logprobs { chosen, top }| {
            let mut likeliest = Map::new();
            // Different bytes may look the same; the likelier one stays.
            for (id, x) in top.iter().map(|(id, x)| (*id, *x)).chain([(*id, *chosen)]) {
                likeliest.entry(text(tokenizer, id)).or_insert_with(|| json!(number(x)));
            }
            likeliest
        });
        offsets.push(*offset);
        // A character of several tokens begins with the first of them.
        *offset += tokenizer.bytes(*id).iter().filter(|byte| **byte & 0xc0 != 0x80).count();
        texts.push(shown);
        own.push(logprobs.as_ref().map(|l| number(l.chosen)));
        tops.push(likeliest);
    }
    json!({"tokens": texts, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets})
}
