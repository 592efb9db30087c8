//! A file as a source of weights. In: names that a checkpoint has. Out: numbers in the checkpoint's order, or codes, scales and offsets as kernels
//! read them.

use super::blocks::{Elements, next};
use super::names::{InFile, Order};
use super::{Gguf, Head, Piece};
use crate::source::{Source, WeightSource};
use astrai_ir::DType;
use astrai_ir::narrow::Part;
use serde_json::Map;
use std::borrow::Cow;
use std::collections::HashMap;
use std::num::NonZero;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Where a checkpoint's tensor lies in a file.
type Places = Box<dyn Fn(&str) -> Option<InFile>>;

/// A file as the checkpoint of a model.
pub struct OfGguf {
    file: Gguf,
    stored: Places,
    /// Scales and offsets that were made beside codes, until they are asked for.
    kept: Mutex<HashMap<String, Vec<u8>>>,
}

impl OfGguf {
    /// The tensors of a file that `stored` finds; its keys are let go.
    pub fn new(file: Gguf, stored: Places) -> OfGguf {
        let head = Head { metadata: Map::new(), ..file.head };
        let file = Gguf { head, ..file };
        file.leave(0..file.map.len());
        OfGguf { file, stored, kept: Mutex::default() }
    }
}

/// Rows of a tensor, all of its dimensions but the last together.
fn rows(piece: &Piece) -> Option<usize> {
    let (_, front) = piece.shape.split_last()?;
    Some(front.iter().product()).filter(|rows| *rows > 0)
}

/// Matrices of experts, `[experts, rows, k]`, as a checkpoint has them: `[experts, k, rows]`, rows of two by turns; or biases `[experts, rows]`.
fn stacked(pieces: &[Piece]) -> Option<Source<'static>> {
    let (&[experts, rows, ..], turns) = (pieces[0].shape, pieces.len()) else { return None };
    let k = pieces[0].shape.get(2).copied();
    // Numbers of their own stay what they are, where both are of one type.
    let dtype = match &pieces[0].blocks.elements {
        Elements::Plain(dtype) if pieces.iter().all(|p| std::ptr::eq(p.blocks, pieces[0].blocks)) => *dtype,
        _ => DType::F32,
    };
    let size = dtype.bytes();
    let mut bytes = vec![0; experts * rows * k.unwrap_or(1) * turns * size];
    for (turn, piece) in pieces.iter().enumerate() {
        // What lies together: a row of a matrix, or an expert's bias.
        let width = piece.bytes.len() / if k.is_some() { experts * rows } else { experts };
        for (n, from) in piece.bytes.chunks_exact(width).enumerate() {
            let wide: Vec<u8> = match &piece.blocks.elements {
                Elements::Plain(of) if *of == dtype => from.to_vec(),
                _ => piece.blocks.floats(from).iter().flat_map(|x| x.to_le_bytes()).collect(),
            };
            for (i, x) in wide.chunks_exact(size).enumerate() {
                let at = match k {
                    Some(k) => ((n / rows * k + i) * rows + n % rows) * turns + turn,
                    None => (n * rows + i) * turns + turn,
                };
                bytes[at * size..][..size].copy_from_slice(x);
            }
        }
    }
    let inner: Vec<usize> = k.into_iter().collect();
    let shape = [&[experts], &inner[..], &[rows * turns]].concat();
    Some(Source { dtype, shape, bytes: Cow::Owned(bytes) })
}

impl OfGguf {
    /// Codes, scales or offsets of a matrix. Codes are read first, the others soon after: all are made at once.
    fn part(&self, plain: &str, part: Part) -> Option<Source<'_>> {
        let at = (self.stored)(plain)?;
        let (pieces, narrow) = (self.file.pieces(&at)?, self.file.narrow(&at)?);
        let (of_one, blocks) = (rows(&pieces[0])?, pieces[0].blocks);
        let rows = of_one.checked_mul(pieces.len())?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = match kept.remove(&part.of(plain)) {
            Some(bytes) => bytes,
            None => {
                let width = pieces[0].bytes.len() / of_one;
                let row = |r: usize| {
                    let row = at.row(r / pieces.len(), of_one);
                    &pieces[r % pieces.len()].bytes[row * width..][..width]
                };
                let sizes = blocks.sizes(width);
                let mut made = sizes.map(|size| vec![0; rows * size]);
                let mut left = made.each_mut().map(Vec::as_mut_slice);
                let threads = thread::available_parallelism().map_or(1, NonZero::get);
                let each = rows.div_ceil(threads);
                thread::scope(|scope| {
                    for first in (0..rows).step_by(each) {
                        let some = first..rows.min(first + each);
                        let [codes, scales, offsets] = &mut left;
                        let now = [codes, scales, offsets].into_iter().zip(sizes);
                        let mut now = now.map(|(left, size)| next(left, some.len() * size));
                        let to = std::array::from_fn(|_| now.next().unwrap_or_default());
                        scope.spawn(move || blocks.parts(some.map(row), to));
                    }
                });
                let mut asked = None;
                for (of, bytes) in [Part::Codes, Part::Scales, Part::Offsets].into_iter().zip(made) {
                    match of == part {
                        true => asked = Some(bytes).filter(|bytes| !bytes.is_empty()),
                        false if of != Part::Codes && !bytes.is_empty() => {
                            _ = kept.insert(of.of(plain), bytes)
                        }
                        false => {}
                    }
                }
                asked?
            }
        };
        let dtype = if part == Part::Codes { narrow.code.dtype() } else { narrow.scales };
        let shape = vec![rows, bytes.len() / dtype.bytes() / rows];
        Some(Source { dtype, shape, bytes: Cow::Owned(bytes) })
    }
}

impl WeightSource for OfGguf {
    fn tensor(&self, name: &str) -> Option<Source<'_>> {
        if let Some((plain, part)) = Part::named(name) {
            return self.part(plain, part);
        }
        let at = (self.stored)(name)?;
        if let Order::Latents(sizes) = at.order {
            return self.file.latents(&at, sizes);
        }
        if let Order::Stacked | Order::Paired = at.order {
            return stacked(&self.file.pieces(&at)?);
        }
        let Piece { blocks, shape, bytes } = self.file.piece(&at)?;
        let rows = shape.first().copied().filter(|n| *n > 0)?;
        let (shape, width) = (shape.to_vec(), bytes.len() / rows);
        let row = |r: usize| &bytes[at.row(r, rows) * width..][..width];
        let as_it_lies = matches!(at.order, Order::Plain | Order::Expert(_));
        match blocks.elements {
            Elements::Plain(dtype) if as_it_lies => {
                Some(Source { dtype, shape, bytes: Cow::Borrowed(bytes) })
            }
            Elements::Plain(dtype) if at.order != Order::OneMore => {
                let bytes = (0..rows).flat_map(row).copied().collect();
                Some(Source { dtype, shape, bytes: Cow::Owned(bytes) })
            }
            _ => {
                let more = if at.order == Order::OneMore { 1.0 } else { 0.0 };
                let mut wide = Vec::with_capacity(shape.iter().product::<usize>() * 4);
                let mut push = |x: f32| wide.extend_from_slice(&(x - more).to_le_bytes());
                if shape.len() == 1 {
                    // A block holds several numbers of a vector.
                    let all = blocks.floats(bytes);
                    (0..rows).for_each(|r| push(all[at.row(r, rows)]));
                } else {
                    (0..rows).for_each(|r| blocks.floats(row(r)).into_iter().for_each(&mut push));
                }
                Some(Source { dtype: DType::F32, shape, bytes: Cow::Owned(wide) })
            }
        }
    }

    fn done(&self, name: &str) {
        // Of codes, scales and offsets the first that is asked for reads the file.
        let name = match Part::named(name) {
            Some((plain, Part::Codes)) => plain,
            Some(_) => return,
            None => name,
        };
        let Some(at) = (self.stored)(name) else { return };
        let first = self.file.piece(&at).map(|p| p.bytes);
        let second = at.second().and_then(|s| self.file.head.tensors.get(&s));
        let second = second.map(|t| &self.file.map[t.begin..t.end]);
        for bytes in [first, second].into_iter().flatten() {
            let begin = bytes.as_ptr() as usize - self.file.map.as_ptr() as usize;
            self.file.leave(begin..begin + bytes.len());
        }
    }

    fn loaded(&self) {
        // The system maps more than what is read.
        self.file.leave(0..self.file.map.len());
    }
}
