//! Shards of one key, which `astrai train` makes of text, as a store: the key is `sequence`, and all of it one segment.

use super::{Element, Found, Part, Segment};
use crate::data::{DataError, Tokens, Width};
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Debug)]
struct Shards {
    path: PathBuf,
    tokens: Arc<Tokens>,
}

/// Whether a `meta.json` describes such shards, and not a file per key.
pub(super) fn described_by(meta: &Path) -> Result<bool, DataError> {
    super::bin::read_meta(meta).map(|object| object.contains_key("dtype"))
}

pub(super) fn open(file: &Path, found: &mut Found<'_>) -> Result<(Box<dyn Part>, Arc<Tokens>), DataError> {
    let tokens = Arc::new(Tokens::open(file)?);
    let element = match tokens.meta().dtype {
        Width::Uint16 => Element::Uint16,
        Width::Uint32 => Element::Uint32,
        Width::Int64 => Element::Int64,
    };
    found.segment("sequence", element, 0, tokens.len(), 0);
    let path = file.parent().unwrap_or(Path::new("")).to_path_buf();
    Ok((Box::new(Shards { path, tokens: tokens.clone() }), tokens))
}

impl Part for Shards {
    fn path(&self) -> &Path {
        &self.path
    }

    fn ints(&self, _key: &str, _s: &Segment, from: u64, to: &mut [i32]) -> Result<(), DataError> {
        self.tokens.copy(from, to)
    }

    fn floats(&self, key: &str, s: &Segment, from: u64, to: &mut [f32]) -> Result<(), DataError> {
        let mut ids = vec![0; to.len()];
        self.ints(key, s, from, &mut ids)?;
        to.iter_mut().zip(ids).for_each(|(to, id)| *to = id as f32);
        Ok(())
    }
}
