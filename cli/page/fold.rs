//! What repeats, once. In: names and sequences of a model of many layers. Out: names without their layer's number, the
//! numbers as ranges, and sequences as groups that are repeated.

/// A name with every run of digits between dots replaced by `*`, and those digits, dotted: `layers.3.q` is `layers.*.q` and `3`.
pub fn star(name: &str) -> (String, String) {
    let (mut text, mut numbers) = (Vec::new(), Vec::new());
    for part in name.split('.') {
        if !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()) {
            text.push("*");
            numbers.push(part);
        } else {
            text.push(part);
        }
    }
    (text.join("."), numbers.join("."))
}

/// `0–4, 6–10, 12` of numbers in ascending order; texts that are no numbers, one after another, few of them.
pub fn ranges(items: &[String]) -> String {
    let numbers: Option<Vec<u64>> = items.iter().map(|i| i.parse().ok()).collect();
    let Some(mut numbers) = numbers else {
        let shown = items.iter().take(4).cloned().collect::<Vec<_>>().join(", ");
        return if items.len() > 4 { format!("{shown}, …") } else { shown };
    };
    numbers.sort_unstable();
    numbers.dedup();
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for n in numbers {
        match runs.last_mut() {
            Some((_, end)) if end.checked_add(1) == Some(n) => *end = n,
            _ => runs.push((n, n)),
        }
    }
    let show = |(a, b): &(u64, u64)| if a == b { a.to_string() } else { format!("{a}–{b}") };
    runs.iter().map(show).collect::<Vec<_>>().join(", ")
}

/// Longest sequence that is looked for as a repeated one.
const LONGEST: usize = 256;

/// A sequence as groups: (how often, where the first begins, how long one is), in order.
pub fn repeats<T: PartialEq>(items: &[T]) -> Vec<(usize, usize, usize)> {
    let mut groups: Vec<(usize, usize, usize)> = Vec::new();
    let mut at = 0;
    while at < items.len() {
        let left = items.len() - at;
        let times = |len: usize| {
            let unit = &items[at..at + len];
            items[at..].chunks_exact(len).take_while(|c| *c == unit).count()
        };
        // The one that covers most; of equals the shortest.
        let mut best = (1, 1);
        for len in (1..=LONGEST.min(left / 2)).filter(|len| items[at] == items[at + len]) {
            let n = times(len);
            if n > 1 && n * len > best.0 * best.1 {
                best = (n, len);
            }
        }
        match groups.last_mut() {
            Some((1, _, len)) if best.0 == 1 => *len += 1,
            _ => groups.push((best.0, at, best.1)),
        }
        at += best.0 * best.1;
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lose_their_numbers() {
        let pair = |a: &str, b: &str| (a.to_string(), b.to_string());
        assert_eq!(star("model.layers.12.mlp.w2"), pair("model.layers.*.mlp.w2", "12"));
        assert_eq!(star("a.1.b.2"), pair("a.*.b.*", "1.2"));
        assert_eq!(star(""), pair("", ""));
        let texts = |all: &[&str]| all.iter().map(|t| t.to_string()).collect::<Vec<_>>();
        assert_eq!(ranges(&texts(&["0", "1", "2", "5", "7", "8"])), "0–2, 5, 7–8");
        assert_eq!(ranges(&texts(&["1.2", "1.3"])), "1.2, 1.3");
    }

    #[test]
    fn sequences_are_told_once() {
        assert_eq!(repeats(b"xaaaaay"), [(1, 0, 1), (5, 1, 1), (1, 6, 1)]);
        assert_eq!(repeats(b"llllgllllgll"), [(2, 0, 5), (2, 10, 1)]);
        assert_eq!(repeats(b"abc"), [(1, 0, 3)]);
        assert_eq!(repeats::<u8>(&[]), []);
    }
}
