//! Regular expressions of clients, and of patterns in schemas. In: a text. Out: the same, within bounds, without what has no meaning
//! where a whole text must match.

use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Hir, HirKind};

/// Bytes of an expression.
const LONGEST: usize = 1 << 14;

/// States of an automaton, about: characters, counted as often as they may be repeated.
const LARGEST: u64 = 20_000;

/// Groups in each other.
const DEEPEST: u32 = 64;

/// An expression that must match a whole text: anchors around it say nothing then, and are taken off.
///
/// # Errors
/// It is none, is too large, or has what is not supported: anchors within, looking around, references back.
pub(super) fn checked(text: &str) -> Result<String, String> {
    let inner = text.strip_prefix('^').unwrap_or(text);
    let escaped = inner.strip_suffix('$').is_some_and(|before| {
        let slashes = before.len() - before.trim_end_matches('\\').len();
        slashes % 2 == 1
    });
    let inner = if escaped { inner } else { inner.strip_suffix('$').unwrap_or(inner) };
    let hir = parse(inner)?;
    if has_look(&hir) {
        return Err("has an anchor or a word boundary within, which is not supported".into());
    }
    Ok(inner.into())
}

/// A pattern that must match somewhere in a text.
///
/// # Errors
/// It is none, is too large, or has what is not supported.
pub(super) fn pattern(text: &str) -> Result<(), String> {
    parse(text).map(drop)
}

fn parse(text: &str) -> Result<Hir, String> {
    if text.len() > LONGEST {
        return Err(format!("has {} bytes; {LONGEST} are the limit", text.len()));
    }
    let parsed = ParserBuilder::new().nest_limit(DEEPEST).build().parse(text);
    let hir = parsed.map_err(|e| {
        let told = e.to_string();
        let last = told.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("").trim();
        format!("is no regular expression ({})", last.trim_start_matches("error: "))
    })?;
    let size = states(&hir);
    if size > LARGEST {
        return Err(format!("is too large: about {size} states, {LARGEST} are the limit"));
    }
    Ok(hir)
}

fn states(hir: &Hir) -> u64 {
    match hir.kind() {
        HirKind::Empty | HirKind::Look(_) => 0,
        HirKind::Literal(text) => text.0.len() as u64,
        HirKind::Class(_) => 1,
        HirKind::Repetition(r) => {
            let times = u64::from(r.max.unwrap_or(r.min.max(1)));
            states(&r.sub).max(1).saturating_mul(times)
        }
        HirKind::Capture(c) => states(&c.sub),
        HirKind::Concat(all) | HirKind::Alternation(all) => {
            all.iter().map(states).fold(0, u64::saturating_add)
        }
    }
}

fn has_look(hir: &Hir) -> bool {
    match hir.kind() {
        HirKind::Look(_) => true,
        HirKind::Repetition(r) => has_look(&r.sub),
        HirKind::Capture(c) => has_look(&c.sub),
        HirKind::Concat(all) | HirKind::Alternation(all) => all.iter().any(has_look),
        HirKind::Empty | HirKind::Literal(_) | HirKind::Class(_) => false,
    }
}
