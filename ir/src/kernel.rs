//! A kernel as source. In: what a backend's emission wrote for a region. Out: text, the functions in it, and how they are launched;
//! a device builds and runs it without knowing the region.

use crate::Dim;
use std::fmt;

/// A kernel's source and how it is launched.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    /// Prefix of its symbols: a hash of everything its emission wrote, so that kernels of one identity are one kernel, whichever
    /// program they were made for.
    pub identity: String,
    /// Which of the backend's preludes come before the text in a translation unit.
    pub preludes: u32,
    /// Source text, without preludes.
    pub source: String,
    /// Its phases, one after another.
    pub entries: Vec<Entry>,
    /// Bytes it keeps between its phases.
    pub workspace: Dim,
    /// How often all phases run, one round after another; the number of the round follows the symbols in the sizes that every
    /// entry is given.
    pub rounds: Dim,
    /// On what it multiplies; no part of its identity.
    pub products: Products,
}

/// On what a kernel multiplies, which decides the peak of its arithmetic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Products {
    /// The device's fastest unit for numbers of their types.
    #[default]
    Native,
    /// Vectors of pairs of bf16.
    Pairs,
    /// Vectors of f32, whatever the numbers are stored as.
    Vectors,
    /// A unit for bf16, to which f32 numbers come in pieces.
    Pieces,
}

/// One phase of a kernel: independent units of work, any split of which over threads gives the same bits.
#[derive(Clone, PartialEq)]
pub struct Entry {
    /// Name of the function that computes units.
    pub symbol: String,
    /// How many units there are; where threads come in blocks, how many blocks.
    pub grid: Grid,
    /// Threads of a block; 1 where a unit is one thread's.
    pub block: u32,
    /// Bytes of memory that the threads of a block share and that the launch asks for; 0 where the function has all it needs.
    pub shared: Dim,
}

/// An entry as the hash of a kernel reads it: memory to share is named where there is some, so that the kernels of devices
/// without it keep their identities.
impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Entry");
        out.field("symbol", &self.symbol).field("grid", &self.grid).field("block", &self.block);
        if self.shared.literal() != Some(0) {
            out.field("shared", &self.shared);
        }
        out.finish()
    }
}

/// How many units a launch has.
#[derive(Clone, Debug, PartialEq)]
pub enum Grid {
    /// A size.
    Units(Dim),
    /// What this function of the kernel's own says of the sizes: a tuned core's, which knows its tiles.
    Counted(String),
}

/// What stands for a kernel's identity in text that is not hashed yet; no backend's language has the character.
pub const UNNAMED: &str = "@";

impl Kernel {
    /// The kernel with its identity: emission wrote [`UNNAMED`] wherever a symbol begins. The first comment, which is for the
    /// reader, does not count.
    pub fn named(mut self) -> Kernel {
        let code = self.source.split_once("*/").map_or(self.source.as_str(), |(_, code)| code);
        let launch = format!("{:?} {:?} {:?} {}", self.entries, self.workspace, self.rounds, self.preludes);
        let identity = format!("k{:016x}", fnv(&[code, &launch]));
        let name = |text: &str| text.replace(UNNAMED, &identity);
        self.source = name(&self.source);
        for entry in &mut self.entries {
            entry.symbol = name(&entry.symbol);
            if let Grid::Counted(symbol) = &mut entry.grid {
                *symbol = name(symbol);
            }
        }
        Kernel { identity, ..self }
    }
}

/// 64-bit FNV-1a with a final mix: the same on every machine and in every version of the compiler.
fn fnv(parts: &[&str]) -> u64 {
    let bytes = parts.iter().flat_map(|p| p.bytes().chain([0xff]));
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    let mixed = (hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(source: &str, workspace: usize) -> Kernel {
        let entry = Entry {
            symbol: "@_phase0".into(),
            grid: Grid::Counted("@_units0".into()),
            block: 1,
            shared: Dim::from(0),
        };
        Kernel {
            identity: String::new(),
            preludes: 0,
            source: source.into(),
            entries: vec![entry],
            workspace: Dim::from(workspace),
            rounds: Dim::from(1),
            products: Products::Native,
        }
        .named()
    }

    #[test]
    fn identity_is_all_that_was_written_but_the_readers_comment() {
        let a = kernel("/* a */ void @_phase0() {}", 0);
        assert_eq!(a.identity, kernel("/* b */ void @_phase0() {}", 0).identity);
        for other in [kernel("/* a */ void @_phase0() { }", 0), kernel("/* a */ void @_phase0() {}", 64)] {
            assert_ne!(a.identity, other.identity);
        }
        assert!(a.source.contains(&format!("void {}_phase0", a.identity)) && !a.source.contains(UNNAMED));
        assert_eq!(a.entries[0].grid, Grid::Counted(format!("{}_units0", a.identity)));
        assert!(
            !format!("{:?}", a.entries).contains("shared"),
            "nothing to share leaves identities as they are"
        );
    }
}
