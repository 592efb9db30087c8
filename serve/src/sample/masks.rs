//! What a request forbids by itself, before anything is drawn: tokens that are not among those it allows, words that may not come, and with
//! typical sampling what is far from what was to be expected.

use super::softmax::Softmax;
use crate::request::Sampling;

/// Leaves only the allowed tokens, and takes out the last token of each word whose others came just before.
pub(super) fn forbid(logits: &mut [f32], sampling: &Sampling, recent: &[u32]) -> bool {
    let before = logits.len();
    if !sampling.allowed_ids.is_empty() {
        let kept: Vec<(usize, f32)> = sampling
            .allowed_ids
            .iter()
            .filter_map(|&id| Some((id as usize, *logits.get(id as usize)?)))
            .collect();
        logits.fill(f32::NEG_INFINITY);
        kept.into_iter().for_each(|(id, x)| logits[id] = x);
    }
    for word in &sampling.bad_words {
        let Some((&last, first)) = word.split_last() else { continue };
        if recent.ends_with(first)
            && let Some(x) = logits.get_mut(last as usize)
        {
            *x = f32::NEG_INFINITY;
        }
    }
    before > 0 && !(sampling.allowed_ids.is_empty() && sampling.bad_words.is_empty())
}

/// Keeps the tokens whose surprise is nearest to the expected one, as few as have this probability together (Meister et al., "Locally
/// Typical Sampling", 2022). The row has been scanned.
pub(super) fn keep_typical(logits: &mut [f32], softmax: &mut Softmax, sampling: &Sampling) {
    softmax.sum_weights(logits, sampling.temperature, f32::NEG_INFINITY);
    let total = softmax.total.max(f64::MIN_POSITIVE);
    let likely: Vec<(usize, f64)> = logits
        .iter()
        .enumerate()
        .map(|(id, x)| (id, f64::from(softmax.weight(*x)) / total))
        .filter(|(_, p)| *p > 0.0)
        .collect();
    let entropy: f64 = likely.iter().map(|(_, p)| -p * p.ln()).sum();
    let mut near: Vec<(f64, usize, f64)> =
        likely.into_iter().map(|(id, p)| ((-p.ln() - entropy).abs(), id, p)).collect();
    near.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut sum = 0.0;
    let kept = near.iter().take_while(|(_, _, p)| {
        let more = sum < f64::from(sampling.typical_p);
        sum += p;
        more
    });
    let kept: Vec<(usize, f32)> = kept.map(|(_, id, _)| (*id, logits[*id])).collect();
    logits.fill(f32::NEG_INFINITY);
    kept.into_iter().for_each(|(id, x)| logits[id] = x);
}
