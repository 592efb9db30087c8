//! Batches of sequences as the inputs of a program: tokens of all sequences one after another, with their positions and
//! where each sequence starts.

use astrai_runtime::Value;

/// Inputs of a ragged batch.
#[derive(Clone, Debug)]
pub struct Batch {
    /// i32 `[tokens]`.
    pub input_ids: Value,
    /// i32 `[tokens]`, from 0 in each sequence.
    pub positions: Value,
    /// i32 `[sequences + 1]`.
    pub starts: Value,
    /// i32 `[tokens]`: the next token of the same sequence, -1 at its end.
    pub targets: Value,
    /// i32 `[sequences]`: the last token of each sequence.
    pub last: Value,
}

impl Batch {
    /// The inputs for these sequences; every id must lie in `0 .. vocab` and no sequence may be empty.
    pub fn new(sequences: &[&[i64]], vocab: usize) -> Result<Batch, String> {
        let (mut ids, mut positions, mut targets) = (Vec::new(), Vec::new(), Vec::new());
        let (mut starts, mut last) = (vec![0], Vec::new());
        for (s, seq) in sequences.iter().enumerate() {
            if seq.is_empty() {
                return Err(format!("sequence {s} is empty; every sequence needs a token"));
            }
            if let Some(bad) = seq.iter().find(|&&t| t < 0 || t as usize >= vocab) {
                return Err(format!("token {bad} of sequence {s} is outside the vocabulary of {vocab}"));
            }
            ids.extend(seq.iter().map(|&t| t as i32));
            positions.extend(0..seq.len() as i32);
            targets.extend(seq[1..].iter().map(|&t| t as i32).chain([-1]));
            starts.push(ids.len() as i32);
            last.push(ids.len() as i32 - 1);
        }
        let (n, s) = (ids.len(), sequences.len());
        Ok(Batch {
            input_ids: Value::i32(&[n], &ids),
            positions: Value::i32(&[n], &positions),
            starts: Value::i32(&[s + 1], &starts),
            targets: Value::i32(&[n], &targets),
            last: Value::i32(&[s], &last),
        })
    }

    /// The inputs that a program names.
    pub fn inputs(&self, names: &[(String, astrai_ir::Type)]) -> Vec<(&'static str, &Value)> {
        let all = [
            ("input_ids", &self.input_ids),
            ("positions", &self.positions),
            ("starts", &self.starts),
            ("targets", &self.targets),
            ("last", &self.last),
        ];
        all.into_iter().filter(|(n, _)| names.iter().any(|(x, _)| x == n)).collect()
    }
}
