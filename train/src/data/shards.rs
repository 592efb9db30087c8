//! Text becomes token ids, once. In: a corpus and a tokenizer. Out: a folder with `data_00000.bin` and on, little-endian ids
//! with an eos behind each document, and `meta.json`, which is written last: where it is, the shards are whole. A folder made
//! from the same text with the same tokenizer is used as it is.

use super::meta::{FORMAT, LONGEST, META};
use super::{Corpus, DataError, Meta, Piece, Progress, Shard, Tokens, Width};
use astrai_files::{System, UNFINISHED, beside, replace};
use astrai_serve::tokenizer::Tokenizer;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Bytes of text that are tokenised at a time.
const BATCH: usize = 1 << 21;

/// How to make shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardOptions {
    /// Ids of a shard; the last one may have fewer.
    pub shard_tokens: u64,
    /// Whether special tokens written in the text are those tokens; otherwise they are spelt like any text.
    pub recognise: bool,
}

impl Default for ShardOptions {
    fn default() -> ShardOptions {
        ShardOptions { shard_tokens: 1 << 28, recognise: false }
    }
}

/// Whether the text was tokenised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokenised {
    /// Not again: the shards on disk are of the same text and tokenizer.
    Cached,
    /// For the first time.
    New,
    /// Again: the shards on disk were of other text or another tokenizer, as this line says.
    Stale(String),
}

/// Makes the shards of `corpus` in the folder `out`, or finds that they are there. `progress` is told bytes of text done of all.
///
/// # Errors
/// The text or the folder cannot be read or written, the tokenizer names no eos, or the folder holds somebody else's
/// `meta.json` or part of the text.
pub fn prepare(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    out: &Path,
    options: &ShardOptions,
    progress: Progress<'_>,
) -> Result<(Tokens, Tokenised), DataError> {
    let plan = plan(corpus, tokenizer, out, options)?;
    let made = match reason(&plan, out)? {
        None => match Tokens::open(out) {
            Ok(tokens) => return Ok((tokens, Tokenised::Cached)),
            Err(e) => Tokenised::Stale(e.to_string()),
        },
        Some(reason) if reason.is_empty() => Tokenised::New,
        Some(reason) => Tokenised::Stale(reason),
    };
    write(corpus, tokenizer, out, options, plan, progress)?;
    Ok((Tokens::open(out)?, made))
}

/// What `meta.json` is to say, shards and sums left open.
fn plan(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    out: &Path,
    options: &ShardOptions,
) -> Result<Meta, DataError> {
    let Some(eos) = &tokenizer.special().eos else {
        let message = "no eos_token is named beside the tokenizer, and documents need an end; name it in tokenizer_config.json";
        return Err(DataError::refused(tokenizer.path(), message));
    };
    if options.shard_tokens == 0 {
        return Err(DataError::Options("shards of no tokens hold nothing; ask for more".into()));
    }
    fs::create_dir_all(out).map_err(DataError::io(out, "make the folder"))?;
    let inside = out.canonicalize().map_err(DataError::io(out, "find the folder"))?;
    let within = |path: &Path| path.canonicalize().is_ok_and(|path| path.starts_with(&inside));
    if let Some(source) = corpus.files().iter().find(|source| within(&source.path)) {
        let message =
            format!("text in {} would be among the results; write them elsewhere", source.path.display());
        return Err(DataError::refused(out, message));
    }
    let width = Width::of(tokenizer.vocabulary());
    Ok(Meta {
        format: Some(FORMAT.0.into()),
        version: Some(FORMAT.1),
        vocab_size: Some(tokenizer.vocabulary() as u64),
        eos: Some(eos.id),
        tokenizer: Some(tokenizer.sha256()),
        recognise: Some(options.recognise),
        fingerprint: Some(corpus.fingerprint()),
        sources: corpus.roots().iter().map(|root| root.display().to_string()).collect(),
        ..Meta::new(width)
    })
}

/// Why the shards in `out` are not those planned; empty if there are none.
fn reason(plan: &Meta, out: &Path) -> Result<Option<String>, DataError> {
    let path = out.join(META);
    if !path.exists() {
        return Ok(Some(String::new()));
    }
    let have = match Meta::read(&path) {
        Ok((have, _)) if have.is_ours() => have,
        Err(e)
            if astrai_files::read(&path, LONGEST)
                .is_ok_and(|bytes| String::from_utf8_lossy(&bytes).contains(FORMAT.0)) =>
        {
            return Ok(Some(e.to_string()));
        }
        _ => {
            let message = "was not written by this program and is not overwritten; choose another folder";
            return Err(DataError::refused(&path, message));
        }
    };
    let why = if have.fingerprint != plan.fingerprint {
        "the text has changed"
    } else if (&have.tokenizer, have.eos) != (&plan.tokenizer, plan.eos) {
        "the tokenizer has changed"
    } else if have.recognise != plan.recognise {
        "special tokens in the text are to be read differently"
    } else {
        return Ok(None);
    };
    Ok(Some(why.into()))
}

fn write(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    out: &Path,
    options: &ShardOptions,
    mut meta: Meta,
    progress: Progress<'_>,
) -> Result<(), DataError> {
    // From here until the new one is written, nothing in the folder is to be trusted.
    match fs::remove_file(out.join(META)) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(DataError::io(&out.join(META), "remove")(e));
        }
        _ => {}
    }
    remove_unfinished(out)?;
    let mut writer =
        Writer { out, width: meta.dtype, most: options.shard_tokens, shards: Vec::new(), open: None };
    let (mut batch, mut bytes, mut documents): (Vec<Piece>, _, _) = (Vec::new(), 0, 0);
    let mut flush = |batch: &mut Vec<Piece>| -> Result<(), DataError> {
        let texts: Vec<&str> = batch.iter().map(|piece| piece.text.as_str()).collect();
        let encoded = tokenizer.encode_batch(&texts, options.recognise)?;
        for (piece, ids) in batch.iter().zip(encoded) {
            writer.push(&ids)?;
            if piece.last {
                writer.push(meta.eos.as_slice())?;
                documents += 1;
            }
        }
        batch.last().inspect(|piece| progress(piece.read, corpus.bytes()));
        batch.clear();
        Ok(())
    };
    for piece in corpus.documents() {
        let piece = piece?;
        bytes += piece.text.len();
        batch.push(piece);
        if bytes >= BATCH {
            flush(&mut batch)?;
            bytes = 0;
        }
    }
    flush(&mut batch)?;
    let shards = writer.finish()?;
    if documents == 0 {
        let root = corpus.roots().first().map_or(Path::new(""), PathBuf::as_path);
        return Err(DataError::refused(root, "all documents are empty; name files with text"));
    }
    remove_beyond(out, shards.len())?;
    meta.tokens = Some(shards.iter().filter_map(|shard| shard.tokens).sum());
    (meta.documents, meta.shards) = (Some(documents), shards);
    let text = serde_json::to_string_pretty(&meta)
        .map_err(|e| DataError::refused(&out.join(META), format!("cannot be written as JSON: {e}")))?;
    Ok(replace(&System, &out.join(META), format!("{text}\n").as_bytes())?)
}

/// Removes what a process that was killed left half written.
fn remove_unfinished(out: &Path) -> Result<(), DataError> {
    for entry in fs::read_dir(out).map_err(DataError::io(out, "list"))? {
        let entry = entry.map_err(DataError::io(out, "list"))?;
        let name = entry.file_name();
        let whole = name.to_string_lossy().strip_prefix(UNFINISHED).map(str::to_owned);
        if whole.is_some_and(|name| name.starts_with("data_") || name.starts_with(META)) {
            fs::remove_file(entry.path()).map_err(DataError::io(&entry.path(), "remove the leftover"))?;
        }
    }
    Ok(())
}

/// Removes shards of an earlier, longer row.
fn remove_beyond(out: &Path, count: usize) -> Result<(), DataError> {
    for number in count.. {
        let path = out.join(name(number));
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => break,
            Err(e) => return Err(DataError::io(&path, "remove the old shard")(e)),
        }
    }
    Ok(())
}

fn name(number: usize) -> String {
    format!("data_{number:05}.bin")
}

/// Writes ids into shard after shard; each gets its name when it is whole.
struct Writer<'a> {
    out: &'a Path,
    width: Width,
    most: u64,
    shards: Vec<Shard>,
    open: Option<Open>,
}

struct Open {
    path: PathBuf,
    file: BufWriter<File>,
    tokens: u64,
}

impl Writer<'_> {
    fn push(&mut self, mut ids: &[u32]) -> Result<(), DataError> {
        while !ids.is_empty() {
            let open = match &mut self.open {
                Some(open) => open,
                none => {
                    let path = self.out.join(name(self.shards.len()));
                    let file = File::create(beside(&path)).map_err(DataError::io(&path, "write"))?;
                    none.insert(Open { path, file: BufWriter::with_capacity(1 << 18, file), tokens: 0 })
                }
            };
            let (now, later) = ids.split_at(ids.len().min((self.most - open.tokens) as usize));
            for id in now {
                // Ids are below the vocabulary, by which the width was chosen.
                let bytes = &id.to_le_bytes()[..self.width.bytes()];
                open.file.write_all(bytes).map_err(DataError::io(&open.path, "write"))?;
            }
            open.tokens += now.len() as u64;
            ids = later;
            if open.tokens == self.most {
                self.close()?;
            }
        }
        Ok(())
    }

    fn close(&mut self) -> Result<(), DataError> {
        let Some(open) = &mut self.open else { return Ok(()) };
        let whole = open.file.flush().and_then(|()| open.file.get_ref().sync_all());
        whole.map_err(DataError::io(&open.path, "write"))?;
        fs::rename(beside(&open.path), &open.path).map_err(DataError::io(&open.path, "write"))?;
        self.shards.push(Shard { file: name(self.shards.len()), tokens: Some(open.tokens) });
        self.open = None;
        Ok(())
    }

    fn finish(mut self) -> Result<Vec<Shard>, DataError> {
        self.close()?;
        Ok(std::mem::take(&mut self.shards))
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        if let Some(open) = &self.open {
            // On the way out of an error, which is what is reported.
            let _ = fs::remove_file(beside(&open.path));
        }
    }
}
