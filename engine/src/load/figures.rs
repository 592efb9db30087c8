//! What is told of a load. In: what came of each request. Out: an object with the keys of `vllm bench serve`: a time's name ends with `_ms`, a
//! rate is a second's.

use serde_json::{Value, json};
use std::str::FromStr;

/// What came of a request. Times are seconds from when it was sent.
#[derive(Clone, Debug, Default)]
pub struct Answered {
    /// Tokens of the prompt.
    pub input: usize,
    /// Tokens of the answer.
    pub output: u64,
    /// To the first chunk.
    pub first: f64,
    /// To the last chunk.
    pub whole: f64,
    /// Why there was no answer.
    pub error: Option<String>,
}

/// A time that is measured of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// To the first token
    Ttft,
    /// For each token after the first
    Tpot,
    /// From a chunk to the next
    Itl,
    /// To the last token
    E2el,
}

const METRICS: [(Metric, &str); 4] =
    [(Metric::Ttft, "ttft"), (Metric::Tpot, "tpot"), (Metric::Itl, "itl"), (Metric::E2el, "e2el")];

impl Metric {
    /// Seconds of a request; of `itl`, which is of chunks, and where there is no second token, none.
    fn of(self, answer: &Answered) -> Option<f64> {
        match self {
            Metric::Ttft => Some(answer.first),
            Metric::Tpot => {
                (answer.output > 1).then(|| (answer.whole - answer.first) / (answer.output - 1) as f64)
            }
            Metric::Itl => None,
            Metric::E2el => Some(answer.whole),
        }
    }
}

impl FromStr for Metric {
    type Err = String;

    /// `ttft`
    fn from_str(text: &str) -> Result<Metric, String> {
        let found = METRICS.iter().find(|(_, name)| *name == text);
        found.map(|(metric, _)| *metric).ok_or_else(|| "give ttft, tpot, itl or e2el".into())
    }
}

/// The most milliseconds that a metric of a good request has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Objective {
    metric: Metric,
    most: f64,
}

impl FromStr for Objective {
    type Err = String;

    /// `ttft:200`
    fn from_str(text: &str) -> Result<Objective, String> {
        let (name, most) = text.split_once(':').unwrap_or((text, ""));
        let metric = METRICS.iter().find(|(m, n)| *n == name && *m != Metric::Itl).map(|(m, _)| *m);
        let most = most.parse().ok().filter(|ms: &f64| *ms >= 0.0 && ms.is_finite());
        let wrong = || "give ttft, tpot or e2el, a colon and milliseconds: ttft:200".to_string();
        metric.zip(most).map(|(metric, most)| Objective { metric, most }).ok_or_else(wrong)
    }
}

/// Percentiles, each from 0 to 100.
#[derive(Clone, Debug, PartialEq)]
pub struct Percentiles(Vec<f64>);

impl FromStr for Percentiles {
    type Err = String;

    /// `50,99,99.9`
    fn from_str(text: &str) -> Result<Percentiles, String> {
        let each = text.split(',').map(|p| p.trim().parse().ok().filter(|p| (0.0..=100.0).contains(p)));
        each.collect::<Option<_>>().map(Percentiles).ok_or_else(|| "give numbers from 0 to 100: 50,99".into())
    }
}

/// What came of a load, and what is wanted of it.
pub struct Figures<'a> {
    /// Of each request.
    pub answered: &'a [Answered],
    /// Seconds from a chunk to the next of the same request, of answers without an error, and how often.
    pub between: &'a [(f64, u64)],
    /// Seconds of all.
    pub seconds: f64,
    /// What a good request keeps to.
    pub goodput: &'a [Objective],
    /// Of which metrics percentiles are told; none for the usual ones.
    pub metrics: &'a [Metric],
    /// Which; none for the 99th.
    pub percentiles: Option<&'a Percentiles>,
}

/// Times in their order, each with how often it was there.
struct Sorted {
    times: Vec<(f64, u64)>,
    /// Times up to each, it among them.
    up_to: Vec<u64>,
}

impl Sorted {
    fn new(mut times: Vec<(f64, u64)>) -> Sorted {
        times.sort_by(|a, b| a.0.total_cmp(&b.0));
        let up_to = times.iter().scan(0, |sum, t| {
            *sum += t.1;
            Some(*sum)
        });
        Sorted { up_to: up_to.collect(), times }
    }

    fn count(&self) -> u64 {
        self.up_to.last().copied().unwrap_or(0)
    }

    fn mean(&self, of: impl Fn(f64) -> f64) -> f64 {
        // Zero added, because the sum of nothing is -0.
        let sum: f64 = 0.0 + self.times.iter().map(|(t, n)| of(*t) * *n as f64).sum::<f64>();
        sum / self.count().max(1) as f64
    }

    /// The value below which so many of a hundred lie, between its neighbours.
    fn percentile(&self, p: f64) -> f64 {
        let at = p / 100.0 * self.count().saturating_sub(1) as f64;
        let value = |i: f64| {
            let place = self.up_to.partition_point(|n| *n <= i as u64);
            self.times.get(place).map_or(0.0, |t| t.0)
        };
        value(at.floor()) + (value(at.ceil()) - value(at.floor())) * at.fract()
    }
}

fn rounded(x: f64, digits: i32) -> f64 {
    let by = 10f64.powi(digits);
    (x * by).round() / by
}

impl Figures<'_> {
    fn good(&self) -> impl Iterator<Item = &Answered> {
        self.answered.iter().filter(|a| a.error.is_none())
    }

    /// The figures of all requests together, after the head.
    pub fn told(&self, mut told: Value) -> Value {
        let (completed, seconds) = (self.good().count(), self.seconds.max(1e-9));
        let input: usize = self.good().map(|a| a.input).sum();
        let output: u64 = self.good().map(|a| a.output).sum();
        let rate = |n: f64| rounded(n / seconds, 4);
        let mut put = |name: String, value: Value| told[name] = value;
        put("duration".into(), json!(rounded(seconds, 4)));
        put("completed".into(), json!(completed));
        put("failed".into(), json!(self.answered.len() - completed));
        put("total_input_tokens".into(), json!(input));
        put("total_output_tokens".into(), json!(output));
        put("request_throughput".into(), json!(rate(completed as f64)));
        let keeps = |a: &&Answered| {
            self.goodput.iter().all(|o| o.metric.of(a).is_none_or(|seconds| 1e3 * seconds <= o.most))
        };
        let kept = (!self.goodput.is_empty()).then(|| rate(self.good().filter(keeps).count() as f64));
        put("request_goodput".into(), json!(kept));
        put("output_throughput".into(), json!(rate(output as f64)));
        put("total_token_throughput".into(), json!(rate(input as f64 + output as f64)));
        let usual = [Metric::Ttft, Metric::Tpot, Metric::Itl];
        let chosen = if self.metrics.is_empty() { &usual[..] } else { self.metrics };
        for (metric, name) in METRICS.into_iter().filter(|(metric, _)| chosen.contains(metric)) {
            let ms = |(seconds, n): (f64, u64)| (1e3 * seconds, n);
            let all = Sorted::new(match metric {
                Metric::Itl => self.between.iter().copied().map(ms).collect(),
                _ => self.good().filter_map(|a| metric.of(a)).map(|seconds| ms((seconds, 1))).collect(),
            });
            let mean = all.mean(|x| x);
            let deviation = all.mean(|x| (x - mean).powi(2)).sqrt();
            for (word, value) in [("mean", mean), ("median", all.percentile(50.0)), ("std", deviation)] {
                put(format!("{word}_{name}_ms"), json!(rounded(value, 3)));
            }
            for p in self.percentiles.map_or(&[99.0][..], |p| &p.0) {
                put(format!("p{p}_{name}_ms"), json!(rounded(all.percentile(*p), 3)));
            }
        }
        told
    }

    /// Adds what came of each request.
    pub fn add_each(&self, told: &mut Value) {
        let each = |of: fn(&Answered) -> Value| self.answered.iter().map(of).collect::<Value>();
        told["input_lens"] = each(|a| json!(a.input));
        told["output_lens"] = each(|a| json!(a.output));
        told["ttfts"] = each(|a| json!(a.first));
        told["errors"] = each(|a| json!(a.error.as_deref().unwrap_or("")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_requests() {
        let answer = |first, between: &[f64], error: Option<&str>| Answered {
            input: 10,
            output: between.len() as u64 + 1,
            first,
            whole: first + between.iter().sum::<f64>(),
            error: error.map(str::to_owned),
        };
        let answered = [
            answer(0.1, &[0.01, 0.03], None),
            answer(0.3, &[0.05, 0.05], None),
            answer(0.0, &[], Some("no")),
            answer(0.2, &[], None),
        ];
        let goodput = ["ttft:250", "tpot:30"].map(|o| o.parse().unwrap());
        let percentiles = "50,99.9".parse().unwrap();
        let figures = Figures {
            answered: &answered,
            between: &[(0.05, 2), (0.01, 1), (0.03, 1)],
            seconds: 2.0,
            goodput: &goodput,
            metrics: &[],
            percentiles: Some(&percentiles),
        };
        let told = figures.told(json!({"backend": "openai"}));
        for (key, value) in [
            ("completed", 3.0),
            ("failed", 1.0),
            ("total_output_tokens", 7.0),
            ("request_throughput", 1.5),
            ("request_goodput", 1.0),
            ("output_throughput", 3.5),
            ("total_token_throughput", 18.5),
            ("mean_ttft_ms", 200.0),
            ("median_ttft_ms", 200.0),
            ("p99.9_ttft_ms", 299.8),
            ("mean_tpot_ms", 35.0),
            ("mean_itl_ms", 35.0),
            ("p50_itl_ms", 40.0),
        ] {
            assert_eq!(told[key].as_f64(), Some(value), "{key}: {told}");
        }
        assert!(told.get("mean_e2el_ms").is_none());
        for wrong in ["ttft", "itl:3", "ttft:-1", "ttft:x", ":3"] {
            assert!(wrong.parse::<Objective>().is_err(), "{wrong}");
        }
        assert!("50,101".parse::<Percentiles>().is_err());
    }
}
