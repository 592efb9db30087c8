//! The next token from logits.

/// The token with the largest logit, the first of equals; NaN never wins. `None` for no logits.
pub fn greedy(logits: &[f32]) -> Option<u32> {
    let mut best: Option<(u32, f32)> = None;
    for (i, &x) in logits.iter().enumerate() {
        if !x.is_nan() && best.is_none_or(|(_, b)| x > b) {
            best = Some((i as u32, x));
        }
    }
    best.map(|(i, _)| i)
}

#[cfg(test)]
mod tests {
    use super::greedy;

    #[test]
    fn the_first_of_equals_wins_and_nan_never() {
        assert_eq!(greedy(&[1.0, 3.0, 3.0, f32::NAN]), Some(1));
        assert_eq!(greedy(&[f32::NEG_INFINITY]), Some(0));
        assert_eq!(greedy(&[f32::NAN]), None);
        assert_eq!(greedy(&[]), None);
    }
}
