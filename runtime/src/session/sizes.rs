//! Values of a program's symbols. In: the shapes of a run's inputs. Out: sizes that make them the declared ones, and what
//! follows: shapes of results, room for them. Kept while the shapes stay as they are; nothing is allocated for shapes no
//! larger than before.

use super::Session;
use crate::{Compiled, Error, Value};
use astrai_ir::{Dim, Sizes, Symbol, Type};

/// Where a symbol's value is read off: an axis of an input, which is the symbol plus a constant.
pub(super) struct Origin {
    input: usize,
    axis: usize,
    more: i64,
}

/// For each symbol of a program where its value is read off; `None` for those that nothing uses.
pub(super) fn origins(program: &Compiled, inputs: &[(String, Type)]) -> Result<Vec<Option<Origin>>, Error> {
    let find = |s: &Symbol| {
        let symbol = Dim::symbol(&s.name);
        let axes = inputs
            .iter()
            .enumerate()
            .flat_map(|(i, (_, ty))| ty.shape.iter().enumerate().map(move |a| (i, a)));
        let mut found = axes.filter_map(|(input, (axis, d))| {
            let more = (d - &symbol).literal()?;
            Some(Origin { input, axis, more })
        });
        match found.next() {
            None if uses_symbol(program, &s.name) => {
                Err(Error::Input(format!("no input says how large `{}` is", s.name)))
            }
            found => Ok(found),
        }
    };
    program.plan.symbols.iter().map(find).collect()
}

impl Session {
    /// Takes the shapes of these inputs for the run.
    pub(super) fn measure(&mut self, inputs: &[(&str, &Value)]) -> Result<(), Error> {
        let values = || self.order.iter().map(|&i| inputs[i].1);
        let fits = |(v, (_, ty)): (&Value, &(_, Type))| {
            v.dtype == ty.dtype && v.bytes.len() == v.shape.iter().product::<usize>() * v.dtype.bytes()
        };
        let same = self.measured
            && values().zip(&self.shapes).all(|(v, s)| v.shape == *s)
            && values().zip(&self.inputs).all(fits);
        if same {
            return Ok(());
        }
        self.measured = false;
        self.solve(inputs)?;
        for at in 0..self.results.len() {
            let r = &mut self.results[at];
            r.shape.clear();
            for d in &r.ty.shape {
                r.shape.push(value(d, &self.sizes)? as usize);
            }
            let (place, bytes) = (r.at, r.shape.iter().product::<usize>() * r.ty.dtype.bytes());
            self.grow(place, bytes, |s| &mut s.result_memory)?;
        }
        self.dims.clear();
        self.dims.extend(self.program.plan.symbols.iter().map(|s| self.sizes[&*s.name] as i64));
        self.shapes.resize(self.order.len(), vec![]);
        for (kept, &i) in self.shapes.iter_mut().zip(&self.order) {
            kept.clone_from(&inputs[i].1.shape);
        }
        self.measured = true;
        Ok(())
    }

    /// Values of the symbols that make the inputs' shapes the declared ones.
    fn solve(&mut self, inputs: &[(&str, &Value)]) -> Result<(), Error> {
        for ((name, ty), &i) in self.inputs.iter().zip(&self.order) {
            let v = inputs[i].1;
            if ty.dtype != v.dtype || ty.rank() != v.shape.len() {
                return Err(Error::Input(format!(
                    "input `{name}` must be {ty}, got {}{:?}",
                    v.dtype, v.shape
                )));
            }
        }
        for (s, origin) in self.program.plan.symbols.iter().zip(&self.origins) {
            let size = match origin {
                Some(o) => {
                    let n = inputs[self.order[o.input]].1.shape[o.axis] as i64 - o.more;
                    allowed(s, n, &self.inputs[o.input].0)?
                }
                None => s.min,
            };
            match self.sizes.get_mut(&*s.name) {
                Some(kept) => *kept = size,
                None => _ = self.sizes.insert(s.name.to_string(), size),
            }
        }
        for ((name, ty), &i) in self.inputs.iter().zip(&self.order) {
            let v = inputs[i].1;
            let mut fits = v.bytes.len() == v.shape.iter().product::<usize>() * v.dtype.bytes();
            for (d, &n) in ty.shape.iter().zip(&v.shape) {
                fits &= value(d, &self.sizes)? == n as u64;
            }
            if !fits {
                let want = concrete(ty, &self.sizes)?;
                let got = &v.shape;
                return Err(Error::Input(format!("input `{name}` must be {ty} = {want:?}, got {got:?}")));
            }
        }
        Ok(())
    }
}

/// The value of a symbol, when it is one that the program was made for.
fn allowed(s: &Symbol, n: i64, input: &str) -> Result<u64, Error> {
    if n < s.min as i64 || n > s.max as i64 {
        return Err(Error::Input(format!(
            "`{}` is {n} in input `{input}`, the program was made for {} to {}",
            s.name, s.min, s.max
        )));
    }
    if !(n as u64).is_multiple_of(s.multiple_of.max(1)) {
        let (s, m) = (&s.name, s.multiple_of);
        return Err(Error::Input(format!("`{s}` is {n} in input `{input}`, it must be a multiple of {m}")));
    }
    Ok(n as u64)
}

/// A size at these.
pub(super) fn value(d: &Dim, sizes: &Sizes) -> Result<u64, Error> {
    d.eval(&|s| sizes.get(s).copied()).map_err(Error::Input)
}

/// A type's sizes.
pub(crate) fn concrete(ty: &Type, sizes: &Sizes) -> Result<Vec<usize>, Error> {
    ty.shape.iter().map(|d| Ok(value(d, sizes)? as usize)).collect()
}

/// True when the shape of a value has this symbol in it.
fn uses_symbol(program: &Compiled, name: &str) -> bool {
    let mut nodes = program.plan.regions.iter().flat_map(|r| r.graph().nodes()).chain(program.graph.nodes());
    let has = |t: &Type| t.shape.iter().any(|d| d.symbols().iter().any(|s| &**s == name));
    nodes.any(|n| n.types.iter().any(has))
}
