//! How long sequences of a schedule are. In: a distribution as a flag has it, or a file of lengths. Out: so many lengths, the same on every
//! machine: those that equal parts of all sequences do not exceed.

use crate::Refused;
use std::path::Path;

/// Longest file read, bytes, and the greatest length.
const LONGEST: u64 = 64 << 20;
const MOST: f64 = (1u64 << 31) as f64;

/// A distribution of lengths.
#[derive(Clone, Debug, PartialEq)]
pub enum Lengths {
    /// Every length from the first to the second as often.
    Uniform([f64; 2]),
    /// Those whose logarithms are normal: the median, the standard deviation of the logarithm, the greatest.
    Lognormal([f64; 3]),
    /// These, ascending.
    Listed(Vec<f64>),
}

impl Lengths {
    /// So many sequences tell the distribution of more.
    pub const TELLING: u64 = 1 << 10;

    /// What a flag says: `uniform:128..4096`, `lognormal:1024,0.8..8192`, or a file with a length on every line.
    ///
    /// # Errors
    /// One line that says what is wrong.
    pub fn parse(text: &str) -> Result<Lengths, Refused> {
        let wrong = || {
            let text = astrai_files::one_line(text);
            format!(
                "{text}: write uniform:SHORTEST..LONGEST, lognormal:MEDIAN,SIGMA..LONGEST, or a file; lengths are from 1 to 2^31"
            )
        };
        let length = |text: &str| text.parse::<f64>().ok().filter(|n| (1.0..=MOST).contains(n));
        match text.split_once(':') {
            Some(("uniform", range)) => {
                let (a, b) = range.split_once("..").ok_or_else(wrong)?;
                let ends = length(a).zip(length(b)).filter(|(a, b)| a <= b);
                ends.map(|(a, b)| Lengths::Uniform([a, b])).ok_or_else(wrong)
            }
            Some(("lognormal", rest)) => {
                let (of, most) = rest.split_once("..").ok_or_else(wrong)?;
                let (median, sigma) = of.split_once(',').ok_or_else(wrong)?;
                let sigma = sigma.parse::<f64>().ok().filter(|s| (0.0..=10.0).contains(s));
                let numbers = length(median).zip(sigma).zip(length(most)).filter(|((m, _), most)| m <= most);
                numbers.map(|((m, s), most)| Lengths::Lognormal([m, s, most])).ok_or_else(wrong)
            }
            _ => {
                let lines = astrai_files::read_text(Path::new(text), LONGEST).map_err(|e| e.to_string())?;
                let at = |(i, line): (usize, &str)| {
                    length(line.trim()).ok_or_else(|| {
                        format!(
                            "{}: line {} is no length from 1 to 2^31",
                            astrai_files::one_line(text),
                            i + 1
                        )
                    })
                };
                let mut all = lines.lines().enumerate().map(at).collect::<Result<Vec<f64>, _>>()?;
                all.sort_by(f64::total_cmp);
                if all.is_empty() { Err(wrong()) } else { Ok(Lengths::Listed(all)) }
            }
        }
    }

    /// The length that this part of all sequences does not exceed.
    fn at(&self, part: f64) -> f64 {
        match self {
            Lengths::Uniform([a, b]) => a + (b - a) * part,
            Lengths::Lognormal([median, sigma, most]) => {
                (median * (sigma * normal(part)).exp()).clamp(1.0, *most)
            }
            Lengths::Listed(all) => all[((all.len() as f64 * part) as usize).min(all.len() - 1)],
        }
    }

    /// Tokens of each of so many sequences, ascending.
    pub fn of(&self, sequences: u64) -> impl Iterator<Item = u64> + '_ {
        (0..sequences).map(move |i| self.one(i, sequences))
    }

    /// Tokens of the longest of so many sequences, one at least.
    pub fn longest(&self, sequences: u64) -> u64 {
        self.one(sequences.max(1) - 1, sequences.max(1))
    }

    fn one(&self, i: u64, sequences: u64) -> u64 {
        self.at((i as f64 + 0.5) / sequences as f64).round().max(1.0) as u64
    }
}

/// The number that this part of a normal distribution does not exceed (Abramowitz and Stegun 26.2.23, to 4.5e-4).
fn normal(part: f64) -> f64 {
    let tail = part.min(1.0 - part).max(1e-12);
    let t = (-2.0 * tail.ln()).sqrt();
    let (above, below) =
        (2.515517 + t * (0.802853 + t * 0.010328), 1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
    (t - above / below).copysign(part - 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_those_of_their_distribution() {
        let of = |text: &str, n| Lengths::parse(text).unwrap().of(n).collect::<Vec<_>>();
        assert_eq!(of("uniform:10..20", 5), [11, 13, 15, 17, 19]);
        assert_eq!(of("lognormal:100,0..200", 3), [100; 3]);
        let wide = of("lognormal:100,1..400", 1001);
        // A normal number exceeds 1 in 15.87 of 100.
        assert_eq!((wide[500], wide.iter().filter(|n| **n >= 272).count()), (100, 159));
        assert_eq!(wide[1000], 400);
        for wrong in [
            "uniform:20..10",
            "uniform:0..5",
            "uniform:a..b",
            "lognormal:5..6",
            "lognormal:5,x..9",
            "lognormal:50,1..9",
        ] {
            assert!(Lengths::parse(wrong).unwrap_err().contains("write uniform"), "{wrong}");
        }
        assert!(Lengths::parse("no/such/file").is_err());
    }
}
