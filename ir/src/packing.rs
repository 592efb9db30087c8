//! How a published checkpoint stores the matrices of its quantised linear layers. In: what its configuration states, checked. Out: what
//! readers need to know beside the tensors themselves. Matrices are `[n, k]`: outputs by inputs.

use crate::DType;
use crate::narrow::{Code, Narrow};

/// A way of storing matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Codes of e4m3 in the weight's own shape, a scale a block (DeepSeek's `fp8`).
    Fp8(Blocks),
    /// compressed-tensors.
    Compressed(Compressed),
    /// GPTQ, as AutoGPTQ and GPTQModel write it.
    Gptq(Gptq),
    /// AWQ in its `gemm` form.
    Awq(Awq),
}

/// Neighbours of a matrix that share a scale; blocks at the edges may be partial. Of no rows and no columns: all do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Rows of a block.
    pub rows: usize,
    /// Columns of a block.
    pub columns: usize,
}

/// What shares a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// The whole matrix.
    Tensor,
    /// A row.
    Row,
    /// So many neighbours of a row.
    Group(usize),
}

impl Share {
    /// Neighbours of a row; 0: all of them.
    pub fn group(self) -> usize {
        if let Share::Group(n) = self { n } else { 0 }
    }
}

/// A format of compressed-tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compressed {
    /// What a code stands for.
    pub code: Code,
    /// Codes stand in words of 32 bits; else each in its own type.
    pub packed: bool,
    /// What shares a scale.
    pub share: Share,
    /// Scales have zero points beside them.
    pub zeros: bool,
}

/// GPTQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gptq {
    /// Integers of four or of eight bits.
    pub code: Code,
    /// What shares a scale.
    pub share: Share,
    /// Which group an input is in stands in the file.
    pub act_order: bool,
    /// Zero points are stored less one.
    pub less_one: bool,
}

/// AWQ, integers of four bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awq {
    /// What shares a scale.
    pub share: Share,
}

impl Packing {
    /// What a code stands for.
    pub fn code(self) -> Code {
        match self {
            Packing::Fp8(_) => Code::Fp8,
            Packing::Compressed(c) => c.code,
            Packing::Gptq(g) => g.code,
            Packing::Awq(_) => Code::Int4,
        }
    }

    /// Neighbours of a row that share a scale; 0: all of them.
    pub fn group(self) -> usize {
        match self {
            Packing::Fp8(b) => b.columns,
            Packing::Compressed(Compressed { share, .. })
            | Packing::Gptq(Gptq { share, .. })
            | Packing::Awq(Awq { share }) => share.group(),
        }
    }

    /// How kernels read such matrices, as far as the configuration tells: the type of scales stands in the file, as does whether GPTQ has
    /// offsets. The head is seldom packed.
    pub fn narrow(self) -> Narrow {
        let offsets = matches!(self, Packing::Awq(_) | Packing::Compressed(Compressed { zeros: true, .. }));
        let (code, group) = (self.code(), self.group());
        Narrow { code, group, scales: DType::F32, offsets, head: None, activations: None }
    }
}
