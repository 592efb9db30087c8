//! Batches of sequences as the inputs of a program: tokens of all sequences one after another, with their positions and
//! where each sequence starts.

use astrai_ir::DType;
use astrai_runtime::Value;
use astrai_runtime::weights::Checkpoint;
use std::path::Path;

/// Sequences of equal length.
#[derive(Clone, Debug)]
pub struct Sequences {
    /// Token ids, `[batch, seq]` row-major.
    pub ids: Vec<i64>,
    /// Number of sequences.
    pub batch: usize,
    /// Tokens of each.
    pub seq: usize,
}

impl Sequences {
    /// `input_ids` of a safetensors file: i64 or i32 `[batch, seq]`, neither of them zero.
    pub fn read(file: &Checkpoint, path: &Path) -> Result<Sequences, String> {
        let path = path.display();
        let t = file.get("input_ids").ok_or_else(|| {
            format!("{path}: no tensor `input_ids`; give the token ids as i64 [batch, seq] under this name")
        })?;
        match (t.dtype(), t.shape()) {
            (DType::I64 | DType::I32, &[batch, seq]) if batch > 0 && seq > 0 => {
                Ok(Sequences { ids: t.to_i64().map_err(|e| e.to_string())?, batch, seq })
            }
            (dtype, shape) => Err(format!(
                "{path}: `input_ids` is {dtype} {shape:?}; it has to be i64 or i32 [batch, seq], neither of them 0"
            )),
        }
    }

    /// The sequences one by one.
    pub fn rows(&self) -> Vec<&[i64]> {
        self.ids.chunks(self.seq).collect()
    }
}

/// Inputs of a ragged batch.
#[derive(Clone, Debug)]
pub struct RaggedBatch {
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

impl RaggedBatch {
    /// The inputs for these sequences; every id must lie in `0 .. vocab` and no sequence may be empty.
    pub fn new(sequences: &[&[i64]], vocab: usize) -> Result<RaggedBatch, String> {
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
        Ok(RaggedBatch {
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
