//! The folder of a run. In: `OUT`, and checkpoints to publish in it. Out: `step_…` folders of which the newest are kept, and
//! `latest`. A lock, which the system drops with the process however it ends, keeps two runs out of one folder and
//! tells that whatever is unfinished here belongs to nobody.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use super::manifest::Manifest;
use super::open::{Latest, Opened, open_latest, steps};
use super::save::{Layout, Saved};
use super::{Contents, LATEST, folder_name, step_of};
use astrai_files::{Disk, FileError, System, UNFINISHED, folder_of, read, replace, shown};

/// A run's folder, held by this process alone.
pub struct RunFolder {
    path: PathBuf,
    disk: Box<dyn Disk + Send>,
    /// Held for the lock on it.
    _lock: File,
}

/// Which checkpoints stay when another is there.
#[derive(Clone, Copy, Debug)]
pub struct Keep {
    /// So many of the newest; 0: all.
    pub newest: usize,
    /// Those at multiples of this many steps, too.
    pub every: Option<u64>,
}

impl From<usize> for Keep {
    fn from(newest: usize) -> Keep {
        Keep { newest, every: None }
    }
}

/// A run's folder and where the run stands.
pub struct Resumed {
    /// The folder.
    pub folder: RunFolder,
    /// The newest checkpoint that is sound; none if the run ended before its first.
    pub checkpoint: Option<Opened>,
    /// What was wrong with newer ones, a line each, for the user.
    pub notes: Vec<String>,
}

impl RunFolder {
    /// Takes `out`, made if need be, for a run from its beginning.
    ///
    /// # Errors
    /// There are checkpoints in it, another run holds it, or the system refuses.
    pub fn create(out: &Path) -> Result<RunFolder, FileError> {
        let folder = RunFolder::hold(out, Box::new(System))?;
        match steps(out)?.first() {
            Some((_, newest)) => {
                let newest = newest.file_name().unwrap_or_default().to_string_lossy();
                let trouble =
                    format!("has checkpoints up to {newest}: continue with --resume, or give another --out");
                Err(FileError::refused(out, trouble))
            }
            None => Ok(folder),
        }
    }

    /// Takes `out`, made if need be, to continue from its newest sound checkpoint. Newer damaged ones are set aside
    /// under another name, where they are in nobody's way.
    ///
    /// # Errors
    /// Another run holds it, there are checkpoints but none is sound, or the system refuses.
    pub fn resume(out: &Path) -> Result<Resumed, FileError> {
        RunFolder::resume_on(out, Box::new(System))
    }

    pub(super) fn resume_on(out: &Path, disk: Box<dyn Disk + Send>) -> Result<Resumed, FileError> {
        let folder = RunFolder::hold(out, disk)?;
        let Some(Latest { checkpoint, mut notes }) = open_latest(out)? else {
            return Ok(Resumed { folder, checkpoint: None, notes: Vec::new() });
        };
        for (_, path) in steps(out)?.iter().filter(|(step, _)| *step > checkpoint.trainer.step) {
            notes.push(folder.set_aside(path)?);
        }
        folder.point_at(&checkpoint.path)?;
        Ok(Resumed { folder, checkpoint: Some(checkpoint), notes })
    }

    pub(super) fn hold(out: &Path, disk: Box<dyn Disk + Send>) -> Result<RunFolder, FileError> {
        if !out.is_dir() {
            disk.create_folder(out).map_err(FileError::io(out, "create it"))?;
            let above = folder_of(out);
            disk.sync_folder(above).map_err(FileError::io(above, "make it durable"))?;
        }
        let lock = lock(out)?;
        let folder = RunFolder { path: out.to_path_buf(), disk, _lock: lock };
        for entry in fs::read_dir(out).map_err(FileError::io(out, "list it"))? {
            let entry = entry.map_err(FileError::io(out, "list it"))?;
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                folder.discard(&entry.path()).map_err(FileError::io(&entry.path(), "remove it"))?;
            }
        }
        Ok(folder)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Saves and publishes the checkpoint of `step`, then removes those that `keep` does not name. Whatever goes
    /// wrong or stops the process, the older checkpoints stay until the new one is published. Saving a step
    /// again that is there and sound changes nothing.
    ///
    /// # Errors
    /// Contents that make no checkpoint, no room ([`FileError::Full`], known before anything is written where the system
    /// tells), or the system refuses; the unfinished folder is removed.
    pub fn save(
        &self,
        step: u64,
        contents: &mut dyn Contents,
        keep: impl Into<Keep>,
    ) -> Result<Saved, FileError> {
        let (disk, target) = (self.disk.as_ref(), self.path.join(folder_name(step)));
        let mut notes = Vec::new();
        if fs::symlink_metadata(&target).is_ok() {
            if Manifest::verify(&target).is_ok() {
                self.point_at(&target)?;
                return Ok(Saved { path: target, notes });
            }
            notes.push(self.set_aside(&target)?);
        }
        let layout = Layout::of(contents, step, &target)?;
        match disk.free(&self.path) {
            Ok(Some(free)) if free < layout.needed => {
                return Err(FileError::Full { path: target, needed: layout.needed, free });
            }
            Ok(_) => {}
            Err(e) => notes.push(format!("{}: its free space is not known: {e}", shown(&self.path))),
        }
        let name = format!("{UNFINISHED}{}-{}", folder_name(step), std::process::id());
        let unfinished = self.path.join(name);
        if fs::symlink_metadata(&unfinished).is_ok() {
            // An earlier attempt of ours failed and could not even be removed.
            self.discard(&unfinished).map_err(FileError::io(&unfinished, "remove it"))?;
        }
        let written = layout.write(disk, &unfinished, step, contents).and_then(|()| {
            disk.rename(&unfinished, &target).map_err(FileError::io(&target, "give it its name"))
        });
        if let Err(e) = written {
            // The save's own error is the one to report; a leftover is removed by the next run.
            let _leftover = disk.remove_folder(&unfinished);
            return Err(layout.explain(e, disk, &target));
        }
        disk.sync_folder(&self.path).map_err(FileError::io(&self.path, "make it durable"))?;
        self.point_at(&target)?;
        self.retain(step, keep.into(), &mut notes);
        Ok(Saved { path: target, notes })
    }

    /// Makes `latest` name the checkpoint.
    fn point_at(&self, checkpoint: &Path) -> Result<(), FileError> {
        let name = checkpoint.file_name().unwrap_or_default().to_string_lossy();
        let (path, text) = (self.path.join(LATEST), format!("{name}\n"));
        match read(&path, 256) {
            Ok(now) if now == text.as_bytes() => Ok(()),
            _ => replace(self.disk.as_ref(), &path, text.as_bytes()),
        }
    }

    /// Removes the checkpoints up to `newest`, which is published, that `keep` does not name.
    fn retain(&self, newest: u64, keep: Keep, notes: &mut Vec<String>) {
        let all = match steps(&self.path) {
            Ok(all) if keep.newest > 0 => all,
            Ok(_) => return,
            Err(e) => return notes.push(format!("old checkpoints stay: {e}")),
        };
        let old = all.iter().filter(|(step, _)| *step <= newest).skip(keep.newest);
        for (_, path) in old.filter(|(step, _)| keep.every.is_none_or(|n| !step.is_multiple_of(n))) {
            // Under an unfinished name first, so that a kill on the way leaves no half of a checkpoint.
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let going = self.path.join(format!("{UNFINISHED}old-{name}-{}", std::process::id()));
            let removed = self.disk.rename(path, &going).and_then(|()| self.discard(&going));
            if let Err(e) = removed {
                notes.push(format!("{}: an old checkpoint cannot be removed: {e}", shown(path)));
            }
        }
    }

    fn discard(&self, path: &Path) -> io::Result<()> {
        if fs::symlink_metadata(path)?.is_dir() {
            self.disk.remove_folder(path)
        } else {
            self.disk.remove_file(path)
        }
    }

    /// Renames a damaged checkpoint, and says so.
    fn set_aside(&self, path: &Path) -> Result<String, FileError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let free = |n: u32| self.path.join(format!("{name}.aside-{n}"));
        let aside = (1..).map(free).find(|to| fs::symlink_metadata(to).is_err());
        let aside = aside.unwrap_or_else(|| free(0));
        self.disk.rename(path, &aside).map_err(FileError::io(path, "set it aside"))?;
        Ok(format!("{}: set aside as {}; remove it when it is of no use", shown(path), shown(&aside)))
    }
}

/// Locks `out` for this process.
fn lock(out: &Path) -> Result<File, FileError> {
    let path = out.join(".lock");
    let file = File::options().create(true).write(true).truncate(false).open(&path);
    let file = file.map_err(FileError::io(&path, "open it"))?;
    // SAFETY: the descriptor is open for as long as `file` lives.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return Ok(file);
    }
    let e = io::Error::last_os_error();
    if e.kind() == ErrorKind::WouldBlock {
        return Err(FileError::refused(
            out,
            "another run writes here: wait for its end, or give another --out",
        ));
    }
    Err(FileError::io(&path, "lock it")(e))
}

impl std::fmt::Debug for RunFolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RunFolder({})", shown(&self.path))
    }
}

impl Opened {
    /// The step, by the folder's name where it has one.
    pub fn step(&self) -> u64 {
        step_of(&self.path).unwrap_or(self.trainer.step)
    }
}
