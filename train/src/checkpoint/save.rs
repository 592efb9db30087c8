//! In: the contents of a checkpoint and an empty unfinished folder. Out: the folder filled, every file durable, the manifest
//! last. Sizes are known before the first byte, so that a full disk is told before it is filled.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use astrai_runtime::weights::{Entry, file_header};

use super::manifest::{Manifest, is_plain};
use super::stream::Stream;
use super::{CONFIG, Contents, MANIFEST, MODEL, OPTIMIZER, Part, TRAINER};
use crate::lora::{ADAPTER_CONFIG, ADAPTER_MODEL};
use astrai_files::{Disk, FileError, folder_of};

/// A published checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Its folder.
    pub path: PathBuf,
    /// What went less than well without harming it (an old checkpoint that could not be removed), a line each.
    pub notes: Vec<String>,
}

/// What will be written, and how much.
pub(super) struct Layout {
    /// Name and content of the files that fit in memory.
    small: Vec<(String, Vec<u8>)>,
    tensors: Vec<TensorFile>,
    /// Bytes of all files together, but for the manifest.
    pub needed: u64,
}

struct TensorFile {
    name: &'static str,
    part: Part,
    entries: Vec<Entry>,
    /// The file's bytes before its data.
    header: Vec<u8>,
    /// Bytes of each entry.
    sizes: Vec<usize>,
}

impl Layout {
    /// Asks `contents` for everything but the tensors' bytes; `target` names the checkpoint in messages.
    pub(super) fn of(contents: &dyn Contents, step: u64, target: &Path) -> Result<Layout, FileError> {
        let refused = |trouble: String| FileError::refused(target, trouble);
        let trainer = contents.trainer();
        if trainer.step != step {
            return Err(refused(format!("the state is of step {}, not {step}", trainer.step)));
        }
        let mut small = vec![(CONFIG.to_string(), contents.config().into_bytes())];
        small.push((TRAINER.to_string(), trainer.text().map_err(refused)?.into_bytes()));
        let adapter = contents.adapter();
        let name = |part: Part| match part {
            Part::Model if adapter.is_some() => ADAPTER_MODEL,
            Part::Model => MODEL,
            Part::Optimizer => OPTIMIZER,
        };
        small.extend(adapter.iter().map(|text| (ADAPTER_CONFIG.to_string(), text.clone().into_bytes())));
        let ours = [CONFIG, TRAINER, MANIFEST, MODEL, OPTIMIZER, ADAPTER_MODEL];
        for file in contents.tokenizer() {
            let taken =
                ours.contains(&file.name.as_str()) || small.iter().any(|(name, _)| *name == file.name);
            if taken || !is_plain(&file.name) {
                return Err(refused(format!(
                    "a tokenizer's file cannot be called {:?} here: rename it",
                    file.name
                )));
            }
            small.push((file.name.clone(), file.bytes.clone()));
        }
        let mut tensors = Vec::new();
        for part in [Part::Model, Part::Optimizer] {
            let entries = contents.entries(part);
            // transformers insists on knowing which framework's layout this is.
            let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
            let (header, sizes) =
                file_header(&entries, &metadata).map_err(|e| refused(format!("{}: {e}", name(part))))?;
            tensors.push(TensorFile { name: name(part), part, entries, header, sizes });
        }
        let bytes = |file: &TensorFile| file.header.len() + file.sizes.iter().sum::<usize>();
        let needed = small.iter().map(|(_, bytes)| bytes.len()).sum::<usize>()
            + tensors.iter().map(bytes).sum::<usize>();
        Ok(Layout { small, tensors, needed: needed as u64 })
    }

    /// Writes all files into `folder`, which it makes, and makes them durable.
    pub(super) fn write(
        &self,
        disk: &dyn Disk,
        folder: &Path,
        step: u64,
        contents: &mut dyn Contents,
    ) -> Result<(), FileError> {
        disk.create_folder(folder).map_err(FileError::io(folder, "create it"))?;
        let mut manifest = Manifest::new(step);
        for (name, bytes) in &self.small {
            let mut stream = Stream::create(disk, folder.join(name))?;
            stream.put(bytes)?;
            manifest.files.insert(name.clone(), stream.finish()?);
        }
        for file in &self.tensors {
            let mut stream = Stream::create(disk, folder.join(file.name))?;
            file.write(&mut stream, contents)?;
            manifest.files.insert(file.name.to_string(), stream.finish()?);
        }
        let mut stream = Stream::create(disk, folder.join(MANIFEST))?;
        let text = manifest.text().map_err(|e| FileError::refused(stream.path(), e))?;
        stream.put(text.as_bytes())?;
        stream.finish()?;
        disk.sync_folder(folder).map_err(FileError::io(folder, "make it durable"))
    }

    /// Tells a disk that became full on the way from other errors.
    pub(super) fn explain(&self, error: FileError, disk: &dyn Disk, target: &Path) -> FileError {
        let FileError::Io { path, doing, source } = error else { return error };
        if !matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) {
            return FileError::Io { path, doing, source };
        }
        let (path, needed) = (target.to_path_buf(), self.needed);
        match disk.free(folder_of(target)) {
            Ok(Some(free)) if free < needed => FileError::Full { path, needed, free },
            // A quota, or someone else's file that came and went.
            _ => FileError::Refused {
                path,
                trouble: format!("cannot {doing}: {source}; it takes {needed} bytes"),
            },
        }
    }
}

impl TensorFile {
    fn write(&self, stream: &mut Stream, contents: &mut dyn Contents) -> Result<(), FileError> {
        stream.put(&self.header)?;
        for (entry, &size) in self.entries.iter().zip(&self.sizes) {
            let (start, size) = (stream.written(), size as u64);
            let wrong = |path: &Path, given: u64| {
                let name = &entry.name;
                FileError::refused(
                    path,
                    format!("tensor {name:?}: {given} bytes given, its shape takes {size}"),
                )
            };
            contents.write(self.part, entry, &mut |piece| {
                let given = stream.written() - start + piece.len() as u64;
                if given > size { Err(wrong(stream.path(), given)) } else { stream.put(piece) }
            })?;
            let given = stream.written() - start;
            if given != size {
                return Err(wrong(stream.path(), given));
            }
        }
        Ok(())
    }
}
