//! Metrics. In: what each line gave. Out: means and ratios with their standard errors; nothing is kept but sums.

use std::collections::BTreeMap;
use std::f64::consts::LN_2;

/// What a line gave.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Of a text.
    Text {
        /// In nats.
        loglikelihood: f64,
        /// Scored tokens.
        tokens: usize,
        /// Bytes of UTF-8.
        bytes: usize,
        /// Words between white space.
        words: usize,
    },
    /// Of choices.
    Choice {
        /// Of each, in nats.
        loglikelihoods: Vec<f64>,
        /// Of each, in characters.
        lengths: Vec<usize>,
        /// The right one.
        gold: usize,
    },
    /// Of a generated answer.
    Answer {
        /// What judged it.
        metric: &'static str,
        /// Whether it is right.
        right: bool,
    },
}

impl Outcome {
    /// Of a text of this log-likelihood.
    pub fn of_text(text: &str, loglikelihood: f64, tokens: usize) -> Outcome {
        let words = text.split_whitespace().count().max(1);
        Outcome::Text { loglikelihood, tokens, bytes: text.len(), words }
    }

    /// Of choices of these log-likelihoods.
    pub fn of_choices(choices: &[String], loglikelihoods: Vec<f64>, gold: usize) -> Outcome {
        let lengths = choices.iter().map(|choice| choice.chars().count()).collect();
        Outcome::Choice { loglikelihoods, lengths, gold }
    }

    /// Whether the likeliest choice is the right one: by sums, and by sums over lengths.
    pub fn picks(&self) -> Option<[bool; 2]> {
        let Outcome::Choice { loglikelihoods, lengths, gold } = self else { return None };
        let by_length = loglikelihoods.iter().zip(lengths).map(|(sum, &n)| sum / n.max(1) as f64).collect();
        Some([loglikelihoods.clone(), by_length].map(|scores| likeliest(&scores) == *gold))
    }
}

/// By how much the right choice is likelier than the likeliest of the others, in nats.
fn margin(loglikelihoods: &[f64], gold: usize) -> Option<f64> {
    let others = loglikelihoods.iter().enumerate().filter(|(i, _)| *i != gold).map(|(_, x)| *x);
    Some(loglikelihoods.get(gold)? - others.reduce(f64::max)?)
}

/// The place of the largest, the first of equals.
fn likeliest(scores: &[f64]) -> usize {
    (0..scores.len()).fold(0, |best, i| if scores[i] > scores[best] { i } else { best })
}

/// A metric of a task.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// Its name, the harness's where it has one.
    pub name: &'static str,
    /// Its value.
    pub value: f64,
    /// Standard error; not known of fewer than two lines.
    pub stderr: Option<f64>,
    /// Lines it is of.
    pub lines: u64,
}

/// Sums of a ratio of sums, of which a mean (weight 1 each) is one.
#[derive(Clone, Debug, Default)]
struct Ratio {
    n: u64,
    x: f64,
    w: f64,
    xx: f64,
    xw: f64,
    ww: f64,
}

impl Ratio {
    fn add(&mut self, x: f64, w: f64) {
        self.n += 1;
        self.x += x;
        self.w += w;
        self.xx += x * x;
        self.xw += x * w;
        self.ww += w * w;
    }

    fn value(&self) -> f64 {
        self.x / self.w
    }

    /// By linearisation; that of a mean is the usual one, of the sample's deviation.
    fn stderr(&self) -> Option<f64> {
        let (n, r) = (self.n as f64, self.value());
        let squares = (self.xx - 2.0 * r * self.xw + r * r * self.ww).max(0.0);
        (self.n > 1).then(|| (n / (n - 1.0) * squares).sqrt() / self.w)
    }
}

/// Results of a task so far.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    ratios: BTreeMap<&'static str, Ratio>,
}

impl Tally {
    /// Counts a line.
    pub fn add(&mut self, outcome: &Outcome) {
        let mut ratio = |name, x, w: usize| self.ratios.entry(name).or_default().add(x, w as f64);
        match outcome {
            Outcome::Text { loglikelihood, tokens, bytes, words } => {
                for (name, weight) in
                    [("perplexity", *tokens), ("byte_perplexity", *bytes), ("word_perplexity", *words)]
                {
                    ratio(name, -loglikelihood, weight);
                }
                ratio("bits_per_byte", -loglikelihood / LN_2, *bytes);
            }
            Outcome::Answer { metric, right } => ratio(metric, f64::from(u8::from(*right)), 1),
            Outcome::Choice { loglikelihoods, gold, .. } => {
                if let Some(margin) = margin(loglikelihoods, *gold) {
                    ratio("margin", margin, 1);
                }
                let picks = outcome.picks().unwrap_or_default();
                for (name, right) in ["acc", "acc_norm"].into_iter().zip(picks) {
                    ratio(name, f64::from(u8::from(right)), 1);
                }
            }
        }
    }

    /// The metrics, in order of names.
    pub fn metrics(&self) -> Vec<Metric> {
        let one = |(&name, ratio): (&&'static str, &Ratio)| {
            let (mut value, mut stderr) = (ratio.value(), ratio.stderr());
            if name.ends_with("perplexity") {
                value = value.exp();
                stderr = stderr.map(|e| e * value);
            }
            Metric { name, value, stderr, lines: ratio.n }
        };
        self.ratios.iter().map(one).collect()
    }
}
