//! Checkpoints as they are published with quantised linear layers. In: a checkpoint, how its configuration says that matrices are packed,
//! the tensors that the model has. Out: those tensors, packed ones widened to f32 one at a time; and, where groups run along the inputs in
//! their order, the codes, scales and offsets of packed ones, which kernels read as they are. A format says which tensors stand for a
//! matrix and gives its codes, scales and zero points: `W = scale · (value(code) - zero)`. Which matrices are packed the file says.

mod awq;
mod compressed;
mod fp8;
mod gptq;
mod words;

pub(super) use words::bits;

use super::error::{WeightsError, quote};
use super::{Checkpoint, TensorView};
use crate::pack::convert;
use crate::source::{Source, WeightSource};
use astrai_ir::narrow::Part;
use astrai_ir::packing::Packing;
use astrai_ir::{Code, DType, Narrow};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// A tensor that a matrix consists of.
struct Stored {
    /// Its name behind the module's and a dot.
    end: &'static str,
    shape: Vec<usize>,
    kind: Kind,
}

/// What a tensor's elements are.
enum Kind {
    Only(DType),
    Float,
    Integer,
}

impl Kind {
    fn holds(&self, dtype: DType) -> bool {
        match self {
            Kind::Only(only) => *only == dtype,
            Kind::Float => dtype.is_float() && dtype.bytes() > 1,
            Kind::Integer => [DType::I32, DType::I64].contains(&dtype),
        }
    }
}

/// A way of storing matrices `[n, k]`.
trait Format {
    /// The tensors of one, that of the codes first; `has` knows the ends of names that the module has.
    fn stored(&self, shape: [usize; 2], has: &dyn Fn(&str) -> bool) -> Vec<Stored>;

    /// Its codes, each a byte: integers less the middle of their range.
    fn codes(&self, of: &Module) -> Option<Vec<u8>>;

    /// Its codes as they are stored, where that is as kernels read them: those of four bits two a byte, each 8 more than its value.
    fn stored_codes<'a>(&self, _of: &Module<'a>) -> Option<&'a [u8]> {
        None
    }

    /// A scale a row and group.
    fn scales(&self, of: &Module) -> Option<Vec<f32>>;

    /// The scales as they are stored, where that is one a row and group in their order.
    fn stored_scales<'a>(&self, _of: &Module<'a>) -> Option<TensorView<'a>> {
        None
    }

    /// A zero point a row and group, less the middle of the codes' range; empty where all are zero.
    fn zeros(&self, of: &Module) -> Option<Vec<i32>>;

    /// The group of each input, where groups are no neighbours.
    fn index(&self, _of: &Module) -> Option<Vec<usize>> {
        None
    }
}

/// A matrix of a checkpoint.
struct Module<'a> {
    file: &'a Checkpoint,
    stem: &'a str,
    shape: [usize; 2],
    groups: usize,
}

impl<'a> Module<'a> {
    fn get(&self, end: &str) -> Option<TensorView<'a>> {
        self.file.get(&format!("{}.{end}", self.stem))
    }

    fn floats(&self, end: &str) -> Option<Vec<f32>> {
        let t = self.get(end)?;
        let mut out = vec![0.0; t.elements()];
        t.to_f32(&mut out).ok()?;
        Some(out)
    }
}

struct Matrix {
    shape: [usize; 2],
    groups: usize,
    index: Option<Vec<usize>>,
    /// Ends of its tensors' names.
    ends: Vec<&'static str>,
}

/// A checkpoint whose packed matrices read under the names that they stand for.
pub struct Packed {
    file: Checkpoint,
    format: Box<dyn Format>,
    narrow: Narrow,
    matrices: BTreeMap<String, Matrix>,
}

impl Packed {
    /// Over a file that must have these tensors, packed or not, and no others but `extra`.
    ///
    /// # Errors
    /// A tensor is missing, surplus, misshapen or of a wrong type, or says that an input is in a group that is not there.
    pub fn open(
        file: Checkpoint,
        packing: Packing,
        tensors: impl Iterator<Item = (String, Vec<usize>)>,
        extra: &dyn Fn(&str) -> bool,
    ) -> Result<Packed, WeightsError> {
        let format: Box<dyn Format> = match packing {
            Packing::Fp8(f) => Box::new(f),
            Packing::Compressed(f) => Box::new(f),
            Packing::Gptq(f) => Box::new(f),
            Packing::Awq(f) => Box::new(f),
        };
        let (mut expected, mut found) = (Vec::new(), Vec::new());
        for (name, shape) in tensors {
            let packed = match (name.strip_suffix(".weight"), shape.as_slice()) {
                (Some(stem), &[n, k]) => {
                    let has = |end: &str| file.get(&format!("{stem}.{end}")).is_some();
                    let all = format.stored([n, k], &has);
                    let codes = all.first().map(|s| (file.get(&format!("{stem}.{}", s.end)), &s.kind));
                    let packed = codes.is_some_and(|(t, kind)| t.is_some_and(|t| kind.holds(t.dtype())));
                    packed.then(|| (stem.to_string(), [n, k], all))
                }
                _ => None,
            };
            let Some((stem, shape, all)) = packed else {
                expected.push((name, shape));
                continue;
            };
            expected.extend(all.iter().map(|s| (format!("{stem}.{}", s.end), s.shape.clone())));
            found.push((stem, shape, all));
        }
        // Scales of activations: inputs are not rounded here.
        const OF_INPUTS: [&str; 3] = [".input_scale", ".input_zero_point", ".activation_scale"];
        let of_inputs = |name: &str| OF_INPUTS.iter().any(|end| name.ends_with(end));
        file.check(&expected, &|name| extra(name) || of_inputs(name))?;
        let mut made = Packed { file, format, narrow: packing.narrow(), matrices: BTreeMap::new() };
        let mut types = Vec::new();
        for (stem, shape, all) in found {
            types.push(made.add(stem, shape, all)?);
        }
        made.narrow.offsets = types.iter().any(|t| t.1);
        made.narrow.scales = match types.as_slice() {
            // Offsets have more digits than scales.
            [(first, _), rest @ ..] if !made.narrow.offsets && rest.iter().all(|t| t.0 == *first) => *first,
            _ => DType::F32,
        };
        Ok(made)
    }

    /// Adds a matrix whose tensors have their shapes; gives the type of its scales and whether it has zero points.
    fn add(
        &mut self,
        stem: String,
        shape: [usize; 2],
        all: Vec<Stored>,
    ) -> Result<(DType, bool), WeightsError> {
        let path = self.file.path().to_path_buf();
        let mut scales = DType::F32;
        for s in &all {
            let name = format!("{stem}.{}", s.end);
            let Some(t) = self.file.get(&name) else { continue };
            if !s.kind.holds(t.dtype()) {
                let trouble =
                    format!("tensor {} is of {}, which this format has not", quote(&name), t.dtype());
                return Err(WeightsError::Mismatch { path, trouble });
            }
            if matches!(s.kind, Kind::Float) {
                scales = t.dtype();
            }
        }
        let group = if self.narrow.group == 0 { shape[1] } else { self.narrow.group };
        let groups = shape[1].div_ceil(group.max(1));
        let module = Module { file: &self.file, stem: &stem, shape, groups };
        let index = self.format.index(&module);
        if index.iter().flatten().any(|g| *g >= groups) {
            let trouble = format!("{} has an input in a group beyond its {groups}", quote(&stem));
            return Err(WeightsError::Mismatch { path, trouble });
        }
        let neighbours = |index: &Vec<usize>| index.iter().enumerate().all(|(i, g)| *g == i / group);
        let index = index.filter(|index| !neighbours(index));
        let zeros = self.format.zeros(&module).is_none_or(|z| z.iter().any(|z| *z != 0));
        let ends = all.iter().map(|s| s.end).collect();
        self.matrices.insert(format!("{stem}.weight"), Matrix { shape, groups, index, ends });
        Ok((scales, zeros))
    }

    /// How packed matrices can stay in memory.
    pub fn narrow(&self) -> Narrow {
        self.narrow
    }

    /// True for a tensor that can stay so.
    pub fn stays(&self, name: &str) -> bool {
        let fits = |m: &Matrix| m.index.is_none() && self.narrow.group_of(m.shape[1]).is_some();
        self.matrices.get(name).is_some_and(fits)
    }

    /// True for a tensor that is packed.
    pub fn packs(&self, name: &str) -> bool {
        self.matrices.contains_key(name)
    }

    fn module(&self, name: &str) -> Option<(Module<'_>, &Matrix)> {
        let (name, m) = self.matrices.get_key_value(name)?;
        let stem = name.strip_suffix(".weight")?;
        Some((Module { file: &self.file, stem, shape: m.shape, groups: m.groups }, m))
    }

    /// A matrix in f32.
    fn widened(&self, name: &str) -> Option<Source<'_>> {
        let (of, m) = self.module(name)?;
        let (codes, scales, zeros) =
            (self.format.codes(&of)?, self.format.scales(&of)?, self.format.zeros(&of)?);
        let ([n, k], code) = (m.shape, self.narrow.code);
        let value: [f32; 256] = std::array::from_fn(|b| match code {
            Code::Fp8 => code.dtype().decode(&[b as u8]) as f32,
            _ => f32::from(b as u8 as i8),
        });
        let group = if self.narrow.group == 0 { k } else { self.narrow.group };
        let mut bytes = Vec::with_capacity(n * k * 4);
        for (r, row) in codes.chunks(k.max(1)).enumerate() {
            for (i, c) in row.iter().enumerate() {
                let at = r * m.groups + m.index.as_ref().map_or(i / group, |index| index[i]);
                let zero = zeros.get(at).map_or(0.0, |z| *z as f32);
                bytes.extend((scales[at] * (value[usize::from(*c)] - zero)).to_le_bytes());
            }
        }
        Some(Source { dtype: DType::F32, shape: vec![n, k], bytes: Cow::Owned(bytes) })
    }

    /// A part of a matrix that can stay narrow.
    fn part(&self, name: &str, part: Part) -> Option<Source<'_>> {
        let (of, m) = self.module(name).filter(|_| self.stays(name))?;
        let Narrow { code, scales: dtype, .. } = self.narrow;
        let width = match part {
            Part::Codes => m.shape[1] / code.per_element(),
            Part::Scales | Part::Offsets => m.groups,
        };
        let shape = vec![m.shape[0], width];
        // What lies in the file as kernels read it is not copied.
        let stored = match part {
            Part::Codes => self.format.stored_codes(&of).map(|bytes| (code.dtype(), bytes)),
            Part::Scales => {
                self.format.stored_scales(&of).map(|t| (t.dtype(), t.bytes())).filter(|s| s.0 == dtype)
            }
            Part::Offsets => None,
        };
        if let Some((dtype, bytes)) = stored {
            return Some(Source { dtype, shape, bytes: Cow::Borrowed(bytes) });
        }
        let (dtype, bytes) = match part {
            Part::Codes if code == Code::Int4 => {
                let codes = self.format.codes(&of)?;
                let pair = |[low, high]: &[u8; 2]| low.wrapping_add(8) | high.wrapping_add(8) << 4;
                (code.dtype(), codes.as_chunks::<2>().0.iter().map(pair).collect())
            }
            Part::Codes => (code.dtype(), self.format.codes(&of)?),
            Part::Scales => {
                let scales = self.format.scales(&of)?;
                let mut wide = vec![0; scales.len() * 4];
                wide.as_chunks_mut::<4>().0.iter_mut().zip(&scales).for_each(|(b, s)| *b = s.to_le_bytes());
                let mut bytes = vec![0; scales.len() * dtype.bytes()];
                convert(&mut bytes, dtype, &wide, DType::F32);
                (dtype, bytes)
            }
            Part::Offsets => {
                let (scales, mut zeros) = (self.format.scales(&of)?, self.format.zeros(&of)?);
                zeros.resize(scales.len(), 0);
                let offset = |(s, z): (&f32, &i32)| (s * -(*z as f32)).to_le_bytes();
                (dtype, scales.iter().zip(&zeros).flat_map(offset).collect())
            }
        };
        Some(Source { dtype, shape, bytes: Cow::Owned(bytes) })
    }
}

impl WeightSource for Packed {
    fn tensor(&self, name: &str) -> Option<Source<'_>> {
        match Part::named(name) {
            Some((plain, part)) => self.part(plain, part),
            None if self.packs(name) => self.widened(name),
            None => self.file.tensor(name),
        }
    }

    fn done(&self, name: &str) {
        let plain = Part::named(name).map_or(name, |(plain, _)| plain);
        match self.module(plain) {
            Some((of, m)) => m.ends.iter().for_each(|end| self.file.done(&format!("{}.{end}", of.stem))),
            None => self.file.done(name),
        }
    }
}

#[cfg(test)]
mod tests;
