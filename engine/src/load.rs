//! Loads of a server. In: lengths, a rate and a seed, or a trace of requests that were there. Out: requests in the order in which
//! they are sent; and, of what came of them, the figures of `vllm bench serve`.

mod figures;

pub use figures::{Answered, Figures, Metric, Objective, Percentiles};

use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Most bytes of a line of a trace.
const LINE: u64 = 1 << 20;

/// Most tokens of a prompt or of an answer.
pub const LONGEST: u32 = 1 << 24;

/// A request to be sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// Seconds after the beginning.
    pub at: f64,
    /// Its ids.
    pub prompt: Vec<u32>,
    /// Tokens of the answer.
    pub output: u64,
}

/// The `i`-th of a fixed series of random bits (SplitMix64).
pub fn draw(i: u64) -> u64 {
    let mut z = i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Draws in one order.
struct Dice {
    seed: u64,
    drawn: u64,
}

impl Dice {
    fn next(&mut self) -> u64 {
        self.drawn += 1;
        draw(draw(self.seed) ^ self.drawn)
    }

    /// From 0 to below 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn length(&mut self, length: u32, ratio: f64) -> u64 {
        let [least, most] = [1.0 - ratio, 1.0 + ratio].map(|by| (f64::from(length) * by).round() as u64);
        (least + self.next() % (most.saturating_sub(least) + 1)).max(1)
    }

    fn ids(&mut self, n: u64, vocabulary: u32) -> Vec<u32> {
        (0..n).map(|_| (self.next() % u64::from(vocabulary)) as u32).collect()
    }
}

/// A random load.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Requests.
    pub requests: u32,
    /// Requests a second, at random times (Poisson); infinite: all at once.
    pub rate: f64,
    /// Tokens of a prompt behind the prefix.
    pub input: u32,
    /// Tokens of an answer.
    pub output: u32,
    /// Lengths are drawn from (1 - R) to (1 + R) times these.
    pub ratio: f64,
    /// Tokens with which every prompt begins.
    pub prefix: u32,
    /// Prompts are drawn from so many ids.
    pub vocabulary: u32,
    /// Draws other prompts, lengths and times.
    pub seed: u64,
}

impl Workload {
    /// The requests, by when they are sent.
    pub fn requests(&self) -> impl Iterator<Item = Asked> {
        let load = self.clone();
        let mut dice = Dice { seed: load.seed, drawn: 0 };
        let prefix = dice.ids(load.prefix.into(), load.vocabulary);
        let mut at = 0.0;
        (0..load.requests).map(move |_| {
            let input = dice.length(load.input, load.ratio);
            let output = dice.length(load.output, load.ratio);
            let mut prompt = prefix.clone();
            prompt.extend(dice.ids(input, load.vocabulary));
            let asked = Asked { at, prompt, output };
            at -= (1.0 - dice.unit()).ln() / load.rate;
            asked
        })
    }
}

/// A trace of requests: lines of JSON, as Mooncake's are (arXiv 2407.00079): `timestamp` in milliseconds, `input_length` and
/// `output_length` in tokens, and, where it is known what prompts have in common, `hash_ids`, one for each block of
/// [`Trace::BLOCK`] tokens from the beginning: the same for blocks that are the same with all before them.
pub struct Trace {
    path: PathBuf,
    lines: BufReader<File>,
    line: usize,
    vocabulary: u32,
    most: u64,
    before: f64,
}

impl Trace {
    /// Tokens of a block.
    pub const BLOCK: usize = 512;

    /// Opens a trace whose prompts are made of so many ids; prompt and answer have at most so many tokens together.
    ///
    /// # Errors
    /// One line with the file's name.
    pub fn open(path: &Path, vocabulary: u32, most: u64) -> Result<Trace, String> {
        let file = File::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let (lines, path) = (BufReader::new(file), path.to_path_buf());
        Ok(Trace { path, lines, line: 0, vocabulary, most, before: 0.0 })
    }

    fn read(&mut self) -> Result<Option<Asked>, String> {
        let mut text = String::new();
        loop {
            text.clear();
            self.line += 1;
            let n = (&mut self.lines).take(LINE).read_line(&mut text).map_err(|e| e.to_string())?;
            match (n, text.trim()) {
                (0, _) => return Ok(None),
                (_, "") => {}
                _ if n as u64 == LINE => return Err(format!("a line is longer than {LINE} bytes")),
                (_, line) => return self.asked(line).map(Some),
            }
        }
    }

    fn asked(&mut self, line: &str) -> Result<Asked, String> {
        let value: Value = serde_json::from_str(line).map_err(|e| format!("no JSON: {e}"))?;
        let number =
            |key: &str| value.get(key).and_then(Value::as_f64).ok_or(format!("`{key}` is no number"));
        let at = number("timestamp")? / 1e3;
        if !(0.0..1e9).contains(&at) {
            return Err(format!("`timestamp` {} ms is negative, or after 30 years", at * 1e3));
        }
        if at < self.before {
            return Err(format!("`timestamp` {} ms is before the line above", at * 1e3));
        }
        self.before = at;
        let length = |key: &str| {
            let n = value.get(key).and_then(Value::as_u64).filter(|n| (1..=u64::from(LONGEST)).contains(n));
            n.ok_or(format!("`{key}` is no number from 1 to {LONGEST}"))
        };
        let (input, output) = (length("input_length")?, length("output_length")?);
        if input + output > self.most {
            let most = self.most;
            return Err(format!(
                "a prompt of {input} and an answer of {output} tokens; a sequence has at most {most} (--max-model-len)"
            ));
        }
        let blocks: Vec<u64> = match value.get("hash_ids") {
            None | Some(Value::Null) => vec![],
            Some(Value::Array(list)) => {
                let ids: Option<_> = list.iter().map(Value::as_u64).collect();
                ids.ok_or("`hash_ids` holds something that is no number")?
            }
            Some(_) => return Err("`hash_ids` is no list".into()),
        };
        let (given, needed) = (blocks.len() as u64, input.div_ceil(Trace::BLOCK as u64));
        if given < needed && matches!(value.get("hash_ids"), Some(Value::Array(_))) {
            return Err(format!(
                "`hash_ids` are {given}, a prompt of {input} tokens has {needed} blocks of {}",
                Trace::BLOCK
            ));
        }
        let id = |i: u64| (i % u64::from(self.vocabulary)) as u32;
        let token = |at: u64| match blocks.get(at as usize / Trace::BLOCK) {
            Some(block) => id(draw(draw(*block) ^ at)),
            None => id(draw(draw(!(self.line as u64)) ^ at)),
        };
        Ok(Asked { at, prompt: (0..input).map(token).collect(), output })
    }
}

impl Iterator for Trace {
    type Item = Result<Asked, String>;

    fn next(&mut self) -> Option<Result<Asked, String>> {
        let found = self.read();
        found.map_err(|e| format!("{}, line {}: {e}", self.path.display(), self.line)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: Workload = Workload {
        requests: 400,
        rate: 20.0,
        input: 100,
        output: 10,
        ratio: 0.5,
        prefix: 7,
        vocabulary: 50,
        seed: 3,
    };

    #[test]
    fn a_load_is_what_is_asked_for() {
        let all: Vec<Asked> = LOAD.requests().collect();
        assert!(all[0].at == 0.0 && all.is_sorted_by(|a, b| a.at <= b.at));
        // 400 gaps of 50 ms: a twentieth of 20 s is their standard deviation.
        let last = all[399].at;
        assert!((17.0..23.0).contains(&last), "{last}");
        for asked in &all {
            assert!((57..=157).contains(&asked.prompt.len()) && (5..=15).contains(&asked.output));
            assert!(asked.prompt[..7] == all[0].prompt[..7] && asked.prompt.iter().all(|t| *t < 50));
        }
        let [mean, alike] = [
            all.iter().map(|a| a.prompt.len() - 7).sum::<usize>() / 400,
            all.iter().filter(|a| a.prompt == all[1].prompt).count(),
        ];
        assert!((95..=105).contains(&mean) && alike == 1);
        assert!(all.iter().eq(&LOAD.requests().collect::<Vec<_>>()), "drawn alike");
        let at_once = Workload { rate: f64::INFINITY, ..LOAD };
        assert!(at_once.requests().all(|a| a.at == 0.0));
    }

    #[test]
    fn a_trace_shares_what_its_hashes_say() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace.jsonl");
        let of = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Trace::open(&path, 1000, 4096).unwrap().collect::<Result<Vec<_>, _>>()
        };
        let two = "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 3, \"hash_ids\": [5, 6]}\n\n\
                   {\"timestamp\": 27, \"input_length\": 900, \"output_length\": 9, \"hash_ids\": [5, 7]}\n";
        let found = of(two).unwrap();
        let [a, b] = found.as_slice() else { panic!() };
        assert_eq!((a.at, b.at, a.prompt.len(), b.prompt.len(), b.output), (0.0, 0.027, 600, 900, 9));
        assert!(a.prompt[..512] == b.prompt[..512] && a.prompt[512..] != b.prompt[512..600]);
        let without = two.replace("\"hash_ids\"", "\"x\"");
        let found = of(&without).unwrap();
        assert_ne!(found[0].prompt[..512], found[1].prompt[..512]);
        for (wrong, why) in [
            ("[1]", "line 1: `timestamp`"),
            ("{\"timestamp\": -1}", "line 1: `timestamp`"),
            ("{\"timestamp\": 1e300}", "line 1: `timestamp`"),
            ("{\"timestamp\": 0, \"input_length\": 0}", "line 1: `input_length`"),
            ("{\"timestamp\": 0, \"input_length\": 1e9}", "line 1: `input_length`"),
            (
                "{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": 1}",
                "`hash_ids` is no",
            ),
            (&two.replace("900", "1025"), "line 3: `hash_ids` are 2, a prompt of 1025 tokens has 3"),
            (
                &two.replace("600", "4094"),
                "line 1: a prompt of 4094 and an answer of 3 tokens; a sequence has at most 4096",
            ),
            ("\n{", "line 2: no JSON"),
        ] {
            let line = of(wrong).unwrap_err();
            assert!(line.contains(why), "{wrong}: {line}");
        }
    }
}
