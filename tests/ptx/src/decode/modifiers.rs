//! Modifiers of instructions: the words after the first dot.

use crate::kernel::{Cmp, Join, Mods, Round, Space, Ty};

/// Words of an instruction.
#[derive(Default)]
pub(super) struct Words<'a> {
    pub base: &'a str,
    pub mods: Mods,
    pub types: Vec<Ty>,
    /// `lo`, `hi`, `wide`.
    pub part: &'a str,
    /// Elements of a vector or matrices of ldmatrix.
    pub count: usize,
    /// Shape of mma.
    pub shape: &'a str,
    /// All words.
    pub all: Vec<&'a str>,
}

impl<'a> Words<'a> {
    pub fn has(&self, word: &str) -> bool {
        self.all.contains(&word)
    }

    pub fn read(op: &'a str) -> Result<Words<'a>, String> {
        let mut words = op.split('.');
        let base = words.next().unwrap_or("");
        let mut w = Words { base, count: 1, all: words.collect(), ..Words::default() };
        for m in w.all.clone() {
            if let Some(t) = Ty::of(m) {
                w.types.push(t);
            } else if !(w.comparison(m) || w.rounding(m) || w.memory(m) || w.joining(m) || w.other(m)) {
                return Err(format!("modifier .{m} is not known"));
            }
        }
        Ok(w)
    }

    fn comparison(&mut self, m: &str) -> bool {
        use Cmp::*;
        let compares = matches!(self.base, "setp" | "set");
        self.mods.cmp = match m {
            "eq" => Eq,
            "ne" => Ne,
            "lt" => Lt,
            "lo" if compares => Lt,
            "le" => Le,
            "ls" => Le,
            "gt" => Gt,
            "hi" if compares => Gt,
            "ge" => Ge,
            "hs" => Ge,
            "equ" => Equ,
            "neu" => Neu,
            "ltu" => Ltu,
            "leu" => Leu,
            "gtu" => Gtu,
            "geu" => Geu,
            "num" => Num,
            "nan" => Nan,
            _ => return false,
        };
        true
    }

    fn rounding(&mut self, m: &str) -> bool {
        let (round, integer) = match m {
            "rn" => (Round::Nearest, false),
            "rz" => (Round::Zero, false),
            "rm" => (Round::Down, false),
            "rp" => (Round::Up, false),
            "rna" => (Round::Away, false),
            "rni" => (Round::Nearest, true),
            "rzi" => (Round::Zero, true),
            "rmi" => (Round::Down, true),
            "rpi" => (Round::Up, true),
            _ => return false,
        };
        (self.mods.round, self.mods.integer) = (round, integer);
        true
    }

    fn memory(&mut self, m: &str) -> bool {
        let m = m.strip_suffix("::cta").unwrap_or(m);
        match m {
            "global" if !(self.base == "cp" && self.mods.space == Space::Shared) => {
                self.mods.space = Space::Global
            }
            "const" => self.mods.space = Space::Global,
            "shared" => self.mods.space = Space::Shared,
            "local" => self.mods.space = Space::Local,
            "param" => self.mods.space = Space::Param,
            "volatile" | "relaxed" => self.mods.strong = true,
            "acquire" | "release" | "acq_rel" => (self.mods.strong, self.mods.alt) = (true, true),
            "v2" => self.count = 2,
            "v4" => self.count = 4,
            "v8" => self.count = 8,
            "x1" => self.count = 1,
            "x2" => self.count = 2,
            "x4" => self.count = 4,
            "global" | "weak" | "nc" | "ca" | "cg" | "cs" | "lu" | "cv" | "wb" | "wt" | "cta" | "gpu"
            | "sys" | "gl" | "cluster" | "sc" => {}
            _ => return m.starts_with("L1::") || m.starts_with("L2::"),
        }
        true
    }

    fn joining(&mut self, m: &str) -> bool {
        use Join::{
            Add, All, And, Any, Ballot, Bfly, Cas, Dec, Down, Exch, Idx, Inc, Max, Min, Or, Popc, Uni, Up,
            Xor,
        };
        let named = [
            ("and", And),
            ("or", Or),
            ("xor", Xor),
            ("add", Add),
            ("min", Min),
            ("max", Max),
            ("inc", Inc),
            ("dec", Dec),
            ("exch", Exch),
            ("cas", Cas),
            ("popc", Popc),
            ("all", All),
            ("any", Any),
            ("ballot", Ballot),
            ("up", Up),
            ("down", Down),
            ("bfly", Bfly),
            ("idx", Idx),
        ];
        match named.iter().find(|n| n.0 == m) {
            Some(n) => self.mods.join = n.1,
            None if m == "uni" && self.base == "vote" => self.mods.join = Uni,
            None => return false,
        }
        true
    }

    fn other(&mut self, m: &'a str) -> bool {
        match m {
            "ftz" => self.mods.ftz = true,
            "sat" | "satfinite" => self.mods.sat = true,
            "approx" | "full" => self.mods.approx = true,
            "NaN" => self.mods.nan = true,
            "relu" => self.mods.relu = true,
            "cc" => self.mods.carry_out = true,
            "uni" => self.mods.uni = true,
            "wrap" | "shiftamt" | "trans" => self.mods.alt = true,
            "aligned" => self.mods.aligned = true,
            "lo" | "hi" | "wide" => self.part = m,
            "m16n8k4" | "m16n8k8" | "m16n8k16" | "m16n8k32" | "m8n8" => self.shape = m,
            "sync" | "to" | "clamp" | "noftz" | "row" | "col" | "warp" | "red" | "arrive" | "async"
            | "commit_group" | "wait_group" | "wait_all" | "l" | "r" | "finite" | "infinite" | "number"
            | "notanumber" | "normal" | "subnormal" | "b4e" | "f4e" | "rc8" | "ecl" | "ecr" | "rc16" => {}
            _ => return false,
        }
        true
    }
}
