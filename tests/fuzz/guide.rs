//! Coverage as a guide. In: which edges of the program an input met. Out: the inputs that met new ones, or met one more often than
//! any before by a factor, and mutations of those.

use crate::mutate::{Draws, bytes, object};
use crate::targets::Target;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Inputs worth mutating, in the target's folder, where the process that follows one that failed finds them.
pub struct Guide {
    folder: PathBuf,
    /// What earlier processes of this run have kept, to be tried again first.
    before: Vec<Vec<u8>>,
    corpus: Vec<Vec<u8>>,
    /// For each edge the numbers of times that it was met, in classes, a bit each.
    met: HashMap<usize, u8>,
}

impl Guide {
    /// A guide of the inputs in this folder.
    pub fn of(folder: &Path) -> Guide {
        let kept = folder.join("corpus");
        fs::create_dir_all(&kept).expect("a folder for the corpus");
        let mut before = vec![];
        for file in fs::read_dir(&kept).expect("the corpus").flatten() {
            before.push(fs::read(file.path()).expect("an input"));
            fs::remove_file(file.path()).expect("an input");
        }
        count(|_, _| ());
        Guide { folder: folder.into(), before, corpus: vec![], met: HashMap::new() }
    }

    /// The next input: one of the target's own, or a mutation of one that is kept. It is written before it is tried.
    pub fn next(&mut self, target: &Target, d: &mut Draws) -> Vec<u8> {
        let input = match (self.before.pop(), self.corpus.len()) {
            (Some(again), _) => again,
            (None, 0) => (target.input)(d),
            (None, _) if d.below(4) == 0 => (target.input)(d),
            (None, n) => {
                let kept = &self.corpus[d.below(n)];
                match serde_json::from_slice(kept) {
                    Ok(value) if d.below(4) > 0 => object(&value, d),
                    _ => bytes(kept.clone(), d),
                }
            }
        };
        fs::write(self.folder.join("input"), &input).expect("the input is written");
        // What made the input has met edges, too.
        count(|_, _| ());
        input
    }

    /// Keeps an input that met something new.
    pub fn learn(&mut self, at: u64, input: Vec<u8>) {
        let mut new = false;
        count(|edge, times| {
            let class = 1 << times.ilog2();
            let met = self.met.entry(edge).or_default();
            new |= *met & class == 0;
            *met |= class;
        });
        if new {
            fs::write(self.folder.join(format!("corpus/{at}")), &input).expect("the input is kept");
            self.corpus.push(input);
        }
    }
}

/// Edges met since this was last asked, and how often.
fn count(met: impl FnMut(usize, u8)) {
    #[cfg(feature = "coverage")]
    astrai::coverage::take(met);
    #[cfg(not(feature = "coverage"))]
    drop(met);
}
