//! Values of a program's symbols. In: the shapes of a run's inputs. Out: sizes that make them the declared ones, and what
//! follows: shapes of results, room for them. Kept while the shapes stay as they are.

use super::Session;
use super::execute::grow;
use crate::{Error, Program, Value};
use astrai_ir::{Sizes, Type};

impl Session {
    /// Takes the shapes of these inputs for the run.
    pub(super) fn measure(&mut self, inputs: &[(&str, &Value)]) -> Result<(), Error> {
        let values = || self.order.iter().map(|&i| inputs[i].1);
        let fits = |(v, (_, ty)): (&Value, &(_, Type))| {
            v.dtype == ty.dtype && v.bytes.len() == v.shape.iter().product::<usize>() * v.dtype.bytes()
        };
        let same = self.shapes.len() == self.order.len()
            && values().zip(&self.shapes).all(|(v, s)| v.shape == *s)
            && values().zip(&self.inputs).all(fits);
        if same {
            return Ok(());
        }
        self.shapes.clear();
        let values: Vec<&Value> = values().collect();
        let sizes = self.sizes_of(&values)?;
        for r in &mut self.results {
            r.shape = concrete(&r.ty, &sizes)?;
            for i in self.result_memory.len()..r.at {
                grow(&mut self.result_memory, i, 0)?;
            }
            let bytes = r.shape.iter().product::<usize>() * r.ty.dtype.bytes();
            grow(&mut self.result_memory, r.at, bytes)?;
        }
        self.dims.clear();
        self.dims.extend(self.program.plan.symbols.iter().map(|s| sizes[&*s.name] as i64));
        // Behind them the number of the round, for kernels that run in rounds.
        self.dims.push(0);
        self.sizes = sizes;
        self.shapes.extend(values.iter().map(|v| v.shape.clone()));
        Ok(())
    }

    /// Values of the symbols that make the inputs' shapes the declared ones.
    fn sizes_of(&self, values: &[&Value]) -> Result<Sizes, Error> {
        let mut sizes = Sizes::new();
        let symbols = &self.program.plan.symbols;
        for ((name, ty), v) in self.inputs.iter().zip(values) {
            if ty.dtype != v.dtype || ty.rank() != v.shape.len() {
                return Err(Error::Input(format!(
                    "input `{name}` must be {ty}, got {}{:?}",
                    v.dtype, v.shape
                )));
            }
            for (d, &n) in ty.shape.iter().zip(&v.shape) {
                for s in symbols {
                    let rest = d - &astrai_ir::Dim::symbol(&s.name);
                    if let (Some(c), false) = (rest.literal(), sizes.contains_key(&*s.name)) {
                        let value = n as i64 - c;
                        if value < s.min as i64 || value > s.max as i64 {
                            let m = format!(
                                "`{}` is {value} in input `{name}`, the program was made for {} to {}",
                                s.name, s.min, s.max
                            );
                            return Err(Error::Input(m));
                        }
                        if !(value as u64).is_multiple_of(s.multiple_of.max(1)) {
                            let (s, m) = (&s.name, s.multiple_of);
                            let m =
                                format!("`{s}` is {value} in input `{name}`, it must be a multiple of {m}");
                            return Err(Error::Input(m));
                        }
                        sizes.insert(s.name.to_string(), value as u64);
                    }
                }
            }
        }
        for ((name, ty), v) in self.inputs.iter().zip(values) {
            let want = concrete(ty, &sizes)?;
            if want != v.shape || v.bytes.len() != want.iter().product::<usize>() * v.dtype.bytes() {
                return Err(Error::Input(format!(
                    "input `{name}` must be {ty} = {want:?}, got {:?}",
                    v.shape
                )));
            }
        }
        for s in symbols {
            if !sizes.contains_key(&*s.name) {
                if uses_symbol(&self.program, &s.name) {
                    return Err(Error::Input(format!("no input says how large `{}` is", s.name)));
                }
                sizes.insert(s.name.to_string(), s.min);
            }
        }
        Ok(sizes)
    }
}

/// A type's sizes.
pub(super) fn concrete(ty: &Type, sizes: &Sizes) -> Result<Vec<usize>, Error> {
    let size = |d: &astrai_ir::Dim| d.eval(&|s| sizes.get(s).copied()).map(|n| n as usize);
    ty.shape.iter().map(size).collect::<Result<_, _>>().map_err(Error::Input)
}

/// True when the shape of a value has this symbol in it.
fn uses_symbol(program: &Program, name: &str) -> bool {
    let mut nodes = program.plan.regions.iter().flat_map(|r| r.graph.nodes()).chain(program.graph.nodes());
    let has = |t: &Type| t.shape.iter().any(|d| d.symbols().iter().any(|s| &**s == name));
    nodes.any(|n| n.types.iter().any(has))
}
