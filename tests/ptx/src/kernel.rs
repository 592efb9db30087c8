//! Decoded kernels: instructions whose operands are numbers of registers. In: what [`crate::decode`] makes of the text. Out:
//! what a warp executes; no name is looked up after this.

use std::ops::Range;
use std::sync::Arc;

/// Type of an instruction's operands. `.b8` to `.b64` are the unsigned types of their size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[allow(missing_docs)]
pub enum Ty {
    Pred,
    U8,
    S8,
    U16,
    S16,
    F16,
    Bf16,
    U32,
    S32,
    F32,
    F16x2,
    Bf16x2,
    Tf32,
    U64,
    S64,
    F64,
}

impl Ty {
    /// The type of a modifier such as `u32`.
    pub(crate) fn of(s: &str) -> Option<Ty> {
        use Ty::*;
        Some(match s {
            "pred" => Pred,
            "b8" | "u8" => U8,
            "s8" => S8,
            "b16" | "u16" => U16,
            "s16" => S16,
            "f16" => F16,
            "bf16" => Bf16,
            "b32" | "u32" => U32,
            "s32" => S32,
            "f32" => F32,
            "f16x2" => F16x2,
            "bf16x2" => Bf16x2,
            "tf32" => Tf32,
            "b64" | "u64" => U64,
            "s64" => S64,
            "f64" => F64,
            _ => return None,
        })
    }

    /// Bytes of a value in memory.
    pub(crate) fn bytes(self) -> usize {
        use Ty::*;
        match self {
            Pred | U8 | S8 => 1,
            U16 | S16 | F16 | Bf16 => 2,
            U32 | S32 | F32 | F16x2 | Bf16x2 | Tf32 => 4,
            U64 | S64 | F64 => 8,
        }
    }

    pub(crate) fn wide(self) -> bool {
        self.bytes() == 8
    }

    pub(crate) fn signed(self) -> bool {
        matches!(self, Ty::S8 | Ty::S16 | Ty::S32 | Ty::S64)
    }

    pub(crate) fn float(self) -> bool {
        matches!(self, Ty::F16 | Ty::Bf16 | Ty::F32 | Ty::F64 | Ty::Tf32 | Ty::F16x2 | Ty::Bf16x2)
    }
}

/// What an instruction does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[allow(missing_docs)]
pub enum Op {
    Add,
    Sub,
    MulLo,
    MulHi,
    MulWide,
    MadLo,
    MadHi,
    MadWide,
    Fma,
    Div,
    Rem,
    Min,
    Max,
    Abs,
    Neg,
    And,
    Or,
    Xor,
    Not,
    Cnot,
    Shl,
    Shr,
    ShfL,
    ShfR,
    Bfe,
    Bfi,
    Bfind,
    Brev,
    Popc,
    Clz,
    Prmt,
    Lop3,
    Sad,
    Dp4a,
    Mov,
    Pack,
    Unpack,
    Selp,
    Slct,
    Setp,
    Set,
    Testp,
    Copysign,
    Rcp,
    Sqrt,
    Rsqrt,
    Ex2,
    Lg2,
    Sin,
    Cos,
    Tanh,
    Cvt,
    CvtPair,
    Window,
    IsSpace,
    Ld,
    St,
    Atom,
    Bra,
    Brx,
    Exit,
    Bar,
    BarArrive,
    SyncWarp,
    Shfl,
    Vote,
    MatchAny,
    MatchAll,
    Redux,
    ActiveMask,
    Fence,
    CpAsync,
    CpCommit,
    CpWait,
    LdMatrix,
    Mma,
    Trap,
    Nop,
}

/// Kinds of instructions, as they are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Class {
    Float,
    Double,
    Half,
    Integer,
    Special,
    Convert,
    Move,
    Predicate,
    Tensor,
    Global,
    Shared,
    Local,
    Param,
    Atomic,
    Warp,
    Barrier,
    Branch,
    Other,
}

impl Class {
    /// All classes, with the names that reports use.
    pub const ALL: [(Class, &'static str); 18] = [
        (Class::Float, "float"),
        (Class::Double, "double"),
        (Class::Half, "half"),
        (Class::Integer, "integer"),
        (Class::Special, "special"),
        (Class::Convert, "convert"),
        (Class::Move, "move"),
        (Class::Predicate, "predicate"),
        (Class::Tensor, "tensor"),
        (Class::Global, "global"),
        (Class::Shared, "shared"),
        (Class::Local, "local"),
        (Class::Param, "param"),
        (Class::Atomic, "atomic"),
        (Class::Warp, "warp"),
        (Class::Barrier, "barrier"),
        (Class::Branch, "branch"),
        (Class::Other, "other"),
    ];
}

/// Where an address points.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Space {
    #[default]
    Generic,
    Global,
    Shared,
    Local,
    Param,
}

/// Rounding to a neighbour.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Round {
    #[default]
    Nearest,
    Zero,
    Down,
    Up,
    /// Nearest, ties away from zero.
    Away,
}

/// How two values are compared; the second half is true of unordered values.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Cmp {
    #[default]
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

/// A join of two predicates, or what an atomic does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Join {
    #[default]
    None,
    And,
    Or,
    Xor,
    Add,
    Min,
    Max,
    Inc,
    Dec,
    Exch,
    Cas,
    Popc,
    /// Votes.
    All,
    Any,
    Uni,
    Ballot,
    /// Shuffles.
    Up,
    Down,
    Bfly,
    Idx,
}

/// What the modifiers of an instruction say.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Mods {
    pub round: Round,
    /// Rounds to an integer (`.rni` and so on).
    pub integer: bool,
    pub ftz: bool,
    pub sat: bool,
    pub approx: bool,
    pub nan: bool,
    pub relu: bool,
    /// Reads, writes the carry.
    pub carry_in: bool,
    pub carry_out: bool,
    pub uni: bool,
    /// `.wrap` of a funnel shift, `.shiftamt` of bfind, `.trans` of ldmatrix, `.acq_rel` and its parts of an access.
    pub alt: bool,
    /// `volatile`, `relaxed`, `acquire`, `release`: an access that other threads may make at the same time.
    pub strong: bool,
    /// `.aligned` barriers and collectives.
    pub aligned: bool,
    pub cmp: Cmp,
    pub join: Join,
    pub space: Space,
    /// Registers that loads write are 64 bits wide.
    pub wide: bool,
}

/// Slots of registers are groups of 32 words; 64-bit registers take two.
pub(crate) type Slot = u32;
/// Predicates by number, times two, plus one where it is negated.
pub(crate) type PredRef = u32;
/// The predicate that is always true.
pub(crate) const TRUE: PredRef = 0;

/// One instruction.
#[derive(Clone, Debug)]
pub(crate) struct Ins {
    pub op: Op,
    pub ty: Ty,
    pub ty2: Ty,
    pub mods: Mods,
    pub guard: PredRef,
    pub d: Slot,
    pub a: Slot,
    pub b: Slot,
    pub c: Slot,
    /// A fourth source, a second destination, a table.
    pub e: Slot,
    /// Offset of an address, target of a branch, an immediate.
    pub imm: i64,
    /// Slots of a vector operand in the kernel's lists: destinations first, then sources.
    pub list: (u32, u32),
    /// Line of the PTX text.
    pub line: u32,
    /// File and line of the CUDA source, where the text says so.
    pub loc: (u32, u32),
    pub class: Class,
}

impl Ins {
    pub(crate) fn range(&self) -> Range<usize> {
        self.list.0 as usize..(self.list.0 + self.list.1) as usize
    }
}

/// Special registers whose slots are filled when a block starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(crate) enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    Lane,
    Warp,
    Warps,
    LaneLt,
    LaneLe,
    LaneGt,
    LaneGe,
    LaneEq,
    Sm,
    DynamicAt,
    DynamicAt64,
    DynamicSize,
    TotalShared,
    Clock,
    Clock64,
    GridId,
}

/// Constant contents of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(crate) enum Fill {
    Word(u32),
    Long(u64),
    Special(Special),
    /// Address of the n-th variable of the module.
    Variable(usize, u64),
}

/// A variable of a module, in global or constant memory.
#[derive(Clone, Debug)]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// Its bytes at first, zero where the text gives none.
    pub bytes: Vec<u8>,
}

/// Offset and size of a kernel's parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    /// Bytes from the start of the parameters.
    pub at: usize,
    /// Its bytes.
    pub size: usize,
}

/// A kernel, ready to be launched.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// Its parameters in order.
    pub params: Vec<Param>,
    /// Bytes of all parameters.
    pub param_bytes: usize,
    /// Bytes of static shared memory.
    pub shared: usize,
    pub(crate) dynamic_align: usize,
    /// Bytes of a thread's local memory.
    pub local: usize,
    /// Most threads that a block may have, 1024 where the text does not say.
    pub max_threads: u32,
    /// 32-bit registers that the text declares, a 64-bit one counted twice; more than a compiler would keep.
    pub registers: u32,
    pub(crate) code: Vec<Ins>,
    pub(crate) lists: Arc<[Slot]>,
    pub(crate) tables: Vec<Vec<u32>>,
    pub(crate) fills: Vec<(Fill, Slot)>,
    pub(crate) slots: usize,
    pub(crate) preds: usize,
    /// Bytes of the smallest access to shared, to global memory: what may be told apart there.
    pub(crate) granule: (usize, usize),
    /// True when blocks may speak to each other: atomics or strong accesses to global memory.
    pub(crate) talks: bool,
    pub(crate) files: Arc<Vec<(u32, String)>>,
    /// Instructions as they are written, for messages.
    pub(crate) texts: Vec<String>,
}

impl Kernel {
    /// Number of instructions.
    pub fn instructions(&self) -> usize {
        self.code.len()
    }

    /// An instruction as it is written in the PTX, with the line of the CUDA source where that is known.
    pub fn text(&self, pc: usize) -> String {
        let line = self.source_line(pc).map(|l| format!(" ({l})")).unwrap_or_default();
        format!("{}{line}", self.texts[pc])
    }

    /// Class of an instruction.
    pub fn class(&self, pc: usize) -> Class {
        self.code[pc].class
    }

    /// Where dynamic shared memory begins.
    pub(crate) fn dynamic_at(&self) -> usize {
        self.shared.next_multiple_of(self.dynamic_align)
    }

    pub(crate) fn source_line(&self, pc: usize) -> Option<String> {
        let (file, line) = self.code[pc].loc;
        let name = self.files.iter().find(|(n, _)| *n == file).map(|(_, f)| f.as_str());
        (line > 0).then(|| format!("{}:{line}", name.unwrap_or("source")))
    }
}

/// The kernels and variables of a PTX text.
#[derive(Clone, Debug)]
pub struct Module {
    /// Its kernels.
    pub kernels: Vec<Arc<Kernel>>,
    /// Its variables in global and constant memory.
    pub variables: Vec<Variable>,
}

impl Module {
    /// Reads a PTX text.
    ///
    /// # Errors
    /// The line and the instruction that is not understood.
    pub fn parse(text: &str) -> Result<Module, String> {
        crate::decode::module(&crate::parse::parse(text)?)
    }

    /// The kernel of this name.
    pub fn kernel(&self, name: &str) -> Option<&Arc<Kernel>> {
        self.kernels.iter().find(|k| k.name == name)
    }
}
