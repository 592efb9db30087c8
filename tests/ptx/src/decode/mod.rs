//! Statements to instructions. In: a module's statements. Out: kernels whose operands are numbers of registers: names, scopes,
//! labels and constants are resolved here once. Constants and special registers have slots like any register, so that a warp
//! never asks what kind an operand is.

mod memory;
mod modifiers;
mod operation;

use crate::kernel::{Fill, Ins, Kernel, Module, PredRef, Slot, Special, TRUE, Ty, Variable};
use crate::parse::{Arg, Declared, Entry, Stmt, Text};
use std::collections::HashMap;
use std::sync::Arc;

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Named {
    /// A register; true where it is 64 bits wide.
    Reg(Slot, bool),
    Pred(u32),
    Shared(usize),
    Local(usize),
    Param(usize),
    Variable(usize),
    Dynamic,
}

/// Resolves a module.
pub(crate) fn module(text: &Text) -> Result<Module, String> {
    let kept = |d: &&Declared| d.space == "const" || d.space == "global";
    let variables: Vec<Variable> = (text.variables.iter().filter(kept))
        .map(|d| Variable {
            name: d.name.clone(),
            bytes: d.init.clone().unwrap_or_else(|| vec![0; d.size.max(1)]),
        })
        .collect();
    let files = Arc::new(text.files.clone());
    let mut kernels = vec![];
    for e in &text.entries {
        let mut b = Builder::new(e, text, &variables, files.clone());
        for s in &e.body {
            b.statement(s).map_err(|m| format!("{}: {m}", e.name))?;
        }
        kernels.push(Arc::new(b.finish().map_err(|m| format!("{}: {m}", e.name))?));
    }
    Ok(Module { kernels, variables })
}

struct Scope {
    id: usize,
    names: HashMap<String, Named>,
}

struct Builder<'a> {
    k: Kernel,
    text: &'a Text,
    scopes: Vec<Scope>,
    next_scope: usize,
    labels: HashMap<(usize, String), u32>,
    targets: HashMap<String, Vec<String>>,
    /// Instructions whose branch goes to a label, with the scopes that they see.
    fixes: Vec<(usize, String, Vec<usize>)>,
    constants: HashMap<(Fill, bool), Slot>,
    trash: Slot,
    lists: Vec<Slot>,
}

/// Predicate that nobody reads.
const TRASH: u32 = 1;

impl<'a> Builder<'a> {
    fn new(e: &Entry, text: &'a Text, variables: &[Variable], files: Arc<Vec<(u32, String)>>) -> Builder<'a> {
        let k = Kernel {
            name: e.name.clone(),
            params: e.params.iter().map(|p| p.1).collect(),
            param_bytes: e.params.last().map_or(0, |p| p.1.at + p.1.size),
            shared: 0,
            dynamic_align: 16,
            local: 0,
            max_threads: e.max_threads,
            registers: 0,
            code: vec![],
            lists: Arc::new([]),
            tables: vec![],
            fills: vec![],
            slots: 2,
            preds: 2,
            granule: (16, 16),
            talks: false,
            files,
            texts: vec![],
        };
        let mut names = HashMap::new();
        names.extend(variables.iter().enumerate().map(|(i, v)| (v.name.clone(), Named::Variable(i))));
        names.extend(e.params.iter().map(|(n, p)| (n.clone(), Named::Param(p.at))));
        Builder {
            k,
            text,
            scopes: vec![Scope { id: 0, names }],
            next_scope: 1,
            labels: HashMap::new(),
            targets: HashMap::new(),
            fixes: vec![],
            constants: HashMap::new(),
            trash: 0,
            lists: vec![],
        }
    }

    fn statement(&mut self, s: &Stmt) -> Result<(), String> {
        match s {
            Stmt::Open => {
                self.scopes.push(Scope { id: self.next_scope, names: HashMap::new() });
                self.next_scope += 1;
            }
            Stmt::Close => drop(self.scopes.pop()),
            Stmt::Label(l) => {
                let scope = self.scopes.last().ok_or("a label outside a body")?.id;
                self.labels.insert((scope, l.clone()), self.k.code.len() as u32);
            }
            Stmt::Reg(ty, names) => {
                for (name, count) in names {
                    match count {
                        Some(n) => (0..*n).for_each(|i| self.register(*ty, format!("{name}{i}"))),
                        None => self.register(*ty, name.clone()),
                    }
                }
            }
            Stmt::Var(d) => {
                let named = match d.space {
                    "shared" => Named::Shared(place(&mut self.k.shared, d)),
                    "local" | "param" => Named::Local(place(&mut self.k.local, d)),
                    s => return Err(format!("a variable of .{s} in a body")),
                };
                self.name(d.name.clone(), named);
            }
            Stmt::Targets(names) => {
                let here = self.k.code.len() as u32;
                let label = self.labels.iter().find(|(_, at)| **at == here).map(|(l, _)| l.1.clone());
                self.targets.insert(label.ok_or("branch targets without a label")?, names.clone());
            }
            Stmt::Ins(w) => {
                let ins = self.operation(w).map_err(|m| format!("line {}: `{}`: {m}", w.line, w.text))?;
                self.k.code.push(ins);
                self.k.texts.push(w.text.clone());
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Kernel, String> {
        for (at, label, seen) in std::mem::take(&mut self.fixes) {
            if let Some(names) = self.targets.get(&label) {
                let to = names.iter().map(|n| self.label(n, &seen)).collect::<Result<_, _>>()?;
                self.k.code[at].e = self.k.tables.len() as u32;
                self.k.tables.push(to);
            } else {
                self.k.code[at].imm = i64::from(self.label(&label, &seen)?);
            }
        }
        // Whoever runs off the end leaves.
        let mut w = crate::parse::Written {
            line: 0,
            loc: (0, 0),
            guard: None,
            op: "exit".into(),
            args: vec![],
            text: "exit".into(),
        };
        w.line = self.k.code.last().map_or(0, |i| i.line);
        let ins = self.operation(&w)?;
        self.k.code.push(ins);
        self.k.texts.push(w.text);
        self.k.lists = self.lists.into();
        self.k.local = self.k.local.next_multiple_of(16);
        Ok(self.k)
    }

    fn label(&self, name: &str, seen: &[usize]) -> Result<u32, String> {
        let at = seen.iter().rev().find_map(|s| self.labels.get(&(*s, name.to_string())));
        at.copied().ok_or_else(|| format!("no label {name}"))
    }

    fn name(&mut self, name: String, is: Named) {
        if let Some(s) = self.scopes.last_mut() {
            s.names.insert(name, is);
        }
    }

    fn slot(&mut self, wide: bool) -> Slot {
        let at = self.k.slots as Slot;
        self.k.slots += 1 + usize::from(wide);
        at
    }

    fn register(&mut self, ty: Ty, name: String) {
        let named = if ty == Ty::Pred {
            self.k.preds += 1;
            Named::Pred(self.k.preds as u32 - 1)
        } else {
            self.k.registers += 1 + u32::from(ty.wide());
            Named::Reg(self.slot(ty.wide()), ty.wide())
        };
        self.name(name, named);
    }

    fn find(&mut self, name: &str) -> Result<Named, String> {
        if let Some(n) = self.scopes.iter().rev().find_map(|s| s.names.get(name)) {
            return Ok(*n);
        }
        // Shared memory of the module is this kernel's where it names it.
        let d = self.text.variables.iter().find(|d| d.name == name && d.space == "shared");
        let d = d.ok_or_else(|| format!("no name {name}"))?;
        let named = if d.size == 0 {
            self.k.dynamic_align = self.k.dynamic_align.max(d.align);
            Named::Dynamic
        } else {
            Named::Shared(place(&mut self.k.shared, d))
        };
        self.scopes[0].names.insert(name.into(), named);
        Ok(named)
    }

    fn constant(&mut self, fill: Fill, wide: bool) -> Slot {
        if let Some(s) = self.constants.get(&(fill, wide)) {
            return *s;
        }
        let s = self.slot(wide);
        self.k.fills.push((fill, s));
        self.constants.insert((fill, wide), s);
        s
    }

    fn number(&mut self, v: u64, wide: bool) -> Slot {
        let fill = if wide { Fill::Long(v) } else { Fill::Word(v as u32) };
        self.constant(fill, wide)
    }

    /// The slot of a source of this type; its register is as wide as the type or, if `any`, of any width.
    fn source(&mut self, a: &Arg, ty: Ty) -> Result<Slot, String> {
        let wide = ty.wide();
        match a {
            Arg::Int(v) => {
                let v = if ty.bytes() == 2 { v & 0xffff } else { *v };
                Ok(self.number(v, wide))
            }
            Arg::F32(v) if wide => Ok(self.number(f64::from(f32::from_bits(*v)).to_bits(), true)),
            Arg::F32(v) => Ok(self.number(u64::from(*v), false)),
            Arg::F64(v) if wide => Ok(self.number(*v, true)),
            Arg::F64(v) => Ok(self.number(u64::from((f64::from_bits(*v) as f32).to_bits()), false)),
            Arg::Name(n) => match special(n) {
                Some(s) => Ok(self.constant(Fill::Special(s), wide)),
                None => match self.find(n)? {
                    Named::Reg(s, w) if w == wide => Ok(s),
                    Named::Reg(..) => Err(format!("{n} has another width")),
                    n => self.address(n, 0, wide),
                },
            },
            Arg::Mem(base, off) => match &**base {
                Arg::Name(n) => {
                    let n = self.find(n)?;
                    self.address(n, *off, wide)
                }
                _ => Err("an address where a value belongs".into()),
            },
            _ => Err(format!("operand {a:?}")),
        }
    }

    /// The address of a variable, in its own space.
    fn address(&mut self, n: Named, off: i64, wide: bool) -> Result<Slot, String> {
        let at = |v: usize| (v as i64 + off) as u64;
        Ok(match n {
            Named::Shared(v) | Named::Local(v) | Named::Param(v) => self.number(at(v), wide),
            Named::Variable(v) => self.constant(Fill::Variable(v, off as u64), true),
            Named::Dynamic if off == 0 => {
                let at = if wide { Special::DynamicAt64 } else { Special::DynamicAt };
                self.constant(Fill::Special(at), wide)
            }
            _ => return Err("no address".into()),
        })
    }

    /// Register and width of a destination; `_` is a slot that nobody reads.
    fn destination(&mut self, a: &Arg) -> Result<(Slot, bool), String> {
        let Arg::Name(n) = a else { return Err(format!("destination {a:?}")) };
        if n == "_" {
            return Ok((self.trash, true));
        }
        match self.find(n)? {
            Named::Reg(s, w) => Ok((s, w)),
            _ => Err(format!("{n} is no register")),
        }
    }

    fn predicate(&mut self, a: &Arg) -> Result<PredRef, String> {
        let (n, negated) = match a {
            Arg::Name(n) => (n, 0),
            Arg::Not(n) => (n, 1),
            Arg::Int(v) => return Ok(if *v != 0 { TRUE } else { TRUE | 1 }),
            _ => return Err(format!("predicate {a:?}")),
        };
        match self.find(n)? {
            Named::Pred(p) => Ok(p << 1 | negated),
            _ => Err(format!("{n} is no predicate")),
        }
    }

    /// Number of a predicate that is written.
    fn written(&mut self, a: &Arg) -> Result<u32, String> {
        match a {
            Arg::Name(n) if n == "_" => Ok(TRASH),
            a => Ok(self.predicate(a)? >> 1),
        }
    }
}

fn place(total: &mut usize, d: &Declared) -> usize {
    let at = total.next_multiple_of(d.align.max(1));
    *total = at + d.size;
    at
}

fn special(name: &str) -> Option<Special> {
    use Special::*;
    let axis = |s: &str| ["x", "y", "z"].iter().position(|a| *a == s).map(|a| a as u8);
    let (base, dim) = name.split_once('.').unwrap_or((name, ""));
    Some(match base {
        "%tid" => Tid(axis(dim)?),
        "%ntid" => Ntid(axis(dim)?),
        "%ctaid" => Ctaid(axis(dim)?),
        "%nctaid" => Nctaid(axis(dim)?),
        "%laneid" => Lane,
        "%warpid" => Warp,
        "%nwarpid" => Warps,
        "%lanemask_lt" => LaneLt,
        "%lanemask_le" => LaneLe,
        "%lanemask_gt" => LaneGt,
        "%lanemask_ge" => LaneGe,
        "%lanemask_eq" => LaneEq,
        "%smid" => Sm,
        "%dynamic_smem_size" => DynamicSize,
        "%total_smem_size" => TotalShared,
        "%clock" | "%clock_hi" | "%globaltimer_lo" => Clock,
        "%clock64" | "%globaltimer" => Clock64,
        "%gridid" => GridId,
        _ => return None,
    })
}

impl Builder<'_> {
    /// Adds slots to the kernel's lists.
    fn list(&mut self, slots: &[Slot]) -> (u32, u32) {
        let at = self.lists.len() as u32;
        self.lists.extend_from_slice(slots);
        (at, slots.len() as u32)
    }

    /// Remembers how small an access there is.
    fn accesses(&mut self, i: &Ins, bytes: usize) {
        use crate::kernel::Space::*;
        if matches!(i.mods.space, Shared | Generic) {
            self.k.granule.0 = self.k.granule.0.min(bytes);
        }
        if matches!(i.mods.space, Global | Generic) {
            self.k.granule.1 = self.k.granule.1.min(bytes);
        }
    }
}
