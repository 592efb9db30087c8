//! A folder of compiled kernels, for devices of every kind. In: what a compiler made, by a key of all that went into it. Out: the same,
//! whole or not at all. Objects are loaded into this process, so that nobody else may be able to place one: the folder is this user's alone, no folder above it can be exchanged by another user, it is opened without following links and
//! everything inside is reached through that descriptor. An object ends with a sum over its name and content; one that was cut
//! short, damaged, or written by anybody else is as good as absent.

use astrai_files::UNFINISHED;
use sha2::{Digest, Sha256};
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// Longest object read, bytes: some hundred times what a model's kernels take.
const LONGEST: u64 = 1 << 30;

/// A file that has been unfinished for so long belongs to a compilation that was killed.
const ABANDONED: Duration = Duration::from_secs(3600);

/// Between an object and its sum.
const MARK: &[u8; 8] = b"astrai-1";

/// Compiled kernels on disk.
#[derive(Clone, Debug)]
pub struct KernelCache {
    folder: Arc<Folder>,
}

#[derive(Debug)]
struct Folder {
    path: PathBuf,
    /// The same through the descriptor: whatever becomes of the name, this is the folder that was checked.
    through: PathBuf,
    _directory: File,
    /// Goes with the cache, where it is for this process alone.
    temporary: Option<TempDir>,
}

impl KernelCache {
    /// A cache in this folder, which is made where it is absent, for this user alone.
    ///
    /// # Errors
    /// The system refuses, or another user can write to the folder or put another one in its place.
    pub fn open(folder: &Path) -> io::Result<KernelCache> {
        KernelCache::new(folder, None)
    }

    /// A cache for this process alone, among the system's temporary files.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn temporary() -> io::Result<KernelCache> {
        let made = tempfile::Builder::new().prefix("astrai-").tempdir()?;
        let path = made.path().to_path_buf();
        KernelCache::new(&path, Some(made))
    }

    fn new(path: &Path, temporary: Option<TempDir>) -> io::Result<KernelCache> {
        let path = resolved(path)?;
        let directory = open_private(&path)?;
        let through = through(&directory, &path);
        let folder = Folder { path, through, _directory: directory, temporary };
        let cache = KernelCache { folder: Arc::new(folder) };
        cache.remove_abandoned();
        Ok(cache)
    }

    /// Whether it goes with this process.
    pub(crate) fn is_temporary(&self) -> bool {
        self.folder.temporary.is_some()
    }

    /// The folder as it was found, for messages.
    pub(crate) fn path(&self) -> &Path {
        &self.folder.path
    }

    /// The folder as it is reached, through its descriptor.
    pub(super) fn directory(&self) -> &Path {
        &self.folder.through
    }

    /// A name in the folder that no other process and no other thread of this one takes.
    pub(super) fn fresh_name(&self, end: &str) -> String {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        format!("{UNFINISHED}{}-{}.{end}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
    }

    /// Content of a file of the folder; nothing where there is none that this user wrote.
    pub(super) fn read(&self, name: &str) -> Option<Vec<u8>> {
        let (file, len) = self.file(name)?;
        let mut bytes = Vec::with_capacity(len.min(LONGEST) as usize);
        file.take(LONGEST).read_to_end(&mut bytes).is_ok().then_some(bytes)
    }

    /// A file of the folder and its length; nothing where there is none that this user wrote.
    pub(crate) fn file(&self, name: &str) -> Option<(File, u64)> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file =
            OpenOptions::new().read(true).custom_flags(flags).open(self.directory().join(name)).ok()?;
        let found = file.metadata().ok()?;
        (found.is_file() && is_ours(&found)).then_some((file, found.len()))
    }

    /// Names of the folder's files with this beginning.
    pub(crate) fn names(&self, beginning: &str) -> Vec<String> {
        let entries = fs::read_dir(self.directory()).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.starts_with(beginning)).collect()
    }

    /// Writes a file whole: other processes, and other threads of this one, may be writing the same. What a power cut leaves of
    /// it is found out when it is read.
    pub(super) fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.write_by(name, |mut file| file.write_all(bytes))
    }

    /// The same of what `content` writes.
    pub(crate) fn write_by(
        &self,
        name: &str,
        content: impl FnOnce(&File) -> io::Result<()>,
    ) -> io::Result<()> {
        let (directory, own) = (self.directory(), self.fresh_name("tmp"));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(directory.join(&own))?;
        let published = content(&file).and_then(|()| fs::rename(directory.join(&own), directory.join(name)));
        if published.is_err() {
            self.remove(&own);
        }
        published
    }

    /// Removes a file, if it is there.
    pub(crate) fn remove(&self, name: &str) {
        // A leftover that stays is removed by a later run.
        let _ = fs::remove_file(self.directory().join(name));
    }

    /// Gives what the compiler wrote as `made` its name, with the sum that [`object`](Self::object) looks for.
    pub(super) fn publish(&self, made: &str, name: &str) -> io::Result<()> {
        let bytes = self.read(made).ok_or_else(|| io::Error::from(ErrorKind::NotFound))?;
        self.remove(made);
        self.keep(name, bytes)
    }

    /// Writes an object with the sum that [`whole`](Self::whole) looks for.
    pub(super) fn keep(&self, name: &str, mut bytes: Vec<u8>) -> io::Result<()> {
        bytes.extend(sum(name, &bytes));
        self.write_by(name, |mut file| file.write_all(&bytes).and_then(|()| file.sync_data()))
    }

    /// The path to load an object by, if the folder has it whole.
    pub(super) fn object(&self, name: &str) -> Option<PathBuf> {
        self.whole(name).map(|_| self.directory().join(name))
    }

    /// An object without its sum, if the folder has it whole.
    pub(super) fn whole(&self, name: &str) -> Option<Vec<u8>> {
        let mut bytes = self.read(name)?;
        let (object, end) = bytes.split_at_checked(bytes.len().checked_sub(MARK.len() + 32)?)?;
        let (len, same) = (object.len(), end == sum(name, object));
        bytes.truncate(len);
        same.then_some(bytes)
    }

    fn remove_abandoned(&self) {
        let Ok(entries) = fs::read_dir(self.directory()) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            // The compiler's own drafts lie here too, under names of its choice.
            if name.ends_with(".so")
                || name.ends_with(".c") && !name.starts_with(UNFINISHED)
                || name.ends_with(".kernel")
                || name.ends_with(".cubin")
                || name.ends_with(".weights")
            {
                continue;
            }
            let age = entry.metadata().and_then(|m| m.modified()).ok().and_then(|at| at.elapsed().ok());
            if age.is_some_and(|age| age > ABANDONED) {
                self.remove(&name);
            }
        }
    }
}

/// 128 bits of hash as hex: the name of what was compiled of these.
pub(crate) fn key(parts: &[&str]) -> String {
    let half = |seed: u64| {
        let mut h = DefaultHasher::new();
        seed.hash(&mut h);
        parts.hash(&mut h);
        h.finish()
    };
    format!("{:016x}{:016x}", half(1), half(2))
}

/// Mark and sum at the end of an object of this name.
fn sum(name: &str, object: &[u8]) -> Vec<u8> {
    let sum = Sha256::new().chain_update(name).chain_update([0]).chain_update(object).finalize();
    [&MARK[..], &sum].concat()
}

/// Something inside of an open folder.
fn through(directory: &File, path: &Path) -> PathBuf {
    let open = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
    if open.exists() { open } else { path.to_path_buf() }
}

/// The path without links, as far as it exists.
fn resolved(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    let mut rest = Vec::new();
    let mut at = path.as_path();
    loop {
        match (at.canonicalize(), at.file_name(), at.parent()) {
            (Ok(found), ..) => return Ok(found.join(rest.iter().rev().collect::<PathBuf>())),
            (Err(e), Some(name), Some(above)) if e.kind() == ErrorKind::NotFound => {
                rest.push(name.to_owned());
                at = above;
            }
            (Err(e), ..) => return Err(e),
        }
    }
}

/// Opens the folder from the root downwards, follows no link, makes what is absent, and refuses what another user could
/// exchange.
fn open_private(path: &Path) -> io::Result<File> {
    let open = |path: &Path| {
        OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_DIRECTORY).open(path)
    };
    let mut at = PathBuf::from("/");
    let mut directory = open(&at)?;
    let mut above = vec![];
    for part in path.components().filter(|c| matches!(c, Component::Normal(_))) {
        above.push((at.clone(), directory.metadata()?));
        let next = through(&directory, &at).join(part);
        directory = match open(&next) {
            Err(e) if e.kind() == ErrorKind::NotFound => match DirBuilder::new().mode(0o700).create(&next) {
                Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(e),
                _ => open(&next)?,
            },
            found => found?,
        };
        at.push(part);
    }
    let refused = |what: String| Err(io::Error::new(ErrorKind::PermissionDenied, what));
    if !is_ours(&directory.metadata()?) {
        return refused("belongs to or can be written by another user; give another cache folder".into());
    }
    for (at, found) in above.iter().rev() {
        // In a sticky folder only the owner of an entry may rename it.
        let sticky = found.mode() & 0o1000 != 0;
        if ![0, me().0].contains(&found.uid()) || (!sticky && others_write(found)) {
            let what = "above it, can be changed by another user; give another cache folder";
            return refused(format!("{}, {what}", at.display()));
        }
        if sticky {
            break;
        }
    }
    Ok(directory)
}

/// This process's user and group.
fn me() -> (u32, u32) {
    // SAFETY: neither has preconditions.
    unsafe { (libc::geteuid(), libc::getegid()) }
}

/// Whether others than the owner, and the group that the owner's files have, may write.
fn others_write(found: &Metadata) -> bool {
    found.mode() & 0o002 != 0 || (found.mode() & 0o020 != 0 && ![0, me().1].contains(&found.gid()))
}

/// Whether this user alone may have written it.
fn is_ours(found: &Metadata) -> bool {
    found.uid() == me().0 && found.mode() & 0o022 == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::fs::Permissions;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).expect("mode");
    }

    /// Each way in which another user could place an object is refused; what is common is not.
    #[test]
    fn a_folder_that_another_user_could_exchange_is_refused() {
        let dir = tempfile::tempdir().expect("a folder");
        let deep = dir.path().join("a/b/kernels");
        KernelCache::open(&deep).expect("made");
        let modes = |parent: u32, own: u32| {
            mode(&dir.path().join("a"), parent);
            mode(&deep, own);
            KernelCache::open(&deep).map(drop).map_err(|e| e.to_string())
        };
        for (parent, own) in [(0o755, 0o700), (0o775, 0o755), (0o1777, 0o700)] {
            assert_eq!(modes(parent, own), Ok(()), "{parent:o} {own:o}");
        }
        for (parent, own) in [(0o777, 0o700), (0o755, 0o720), (0o755, 0o777)] {
            let line = modes(parent, own).expect_err("refused");
            assert!(line.ends_with("another user; give another cache folder"), "{line}");
        }
        mode(&dir.path().join("a"), 0o755);
        mode(&deep, 0o700);
        // A link in the way is followed before the check, not after it.
        symlink(dir.path().join("a"), dir.path().join("link")).expect("a link");
        assert_eq!(
            KernelCache::open(&dir.path().join("link/b/kernels")).expect("opened").path(),
            resolved(&deep).expect("real")
        );
    }

    /// A folder `kernels` in `above`, whose object holds these bytes and its right sum.
    fn prepared(above: &Path, content: &[u8]) {
        fs::create_dir(above).expect("made");
        let cache = KernelCache::open(&above.join("kernels")).expect("opened");
        fs::write(cache.directory().join("made"), content).expect("written");
        cache.publish("made", "0.so").expect("published");
    }

    /// A prepared folder takes the name of the one that was checked, at every moment that two processes meet: what is found is
    /// the checked folder's, or the folder is refused.
    #[test]
    fn an_exchanged_folder_plants_nothing() {
        let dir = tempfile::tempdir().expect("a folder");
        let [good, bad] = ["good", "bad"].map(|name| dir.path().join(name));
        prepared(&good, b"honest");
        prepared(&bad, b"planted");
        mode(&bad, 0o777);
        let names = [&good, &bad].map(|p| CString::new(p.as_os_str().as_bytes()).expect("a name"));
        let exchange = || {
            let [a, b] = names.each_ref().map(|n| n.as_ptr());
            // SAFETY: both are strings that end with a zero and outlive the call.
            let done = unsafe {
                let (here, how) = (libc::AT_FDCWD, libc::RENAME_EXCHANGE);
                libc::syscall(libc::SYS_renameat2, here, a, here, b, how)
            };
            assert_eq!(done, 0, "{}", io::Error::last_os_error());
        };
        let (mut opened, mut refused) = (0, 0);
        let mut look = |between: &dyn Fn()| match KernelCache::open(&good.join("kernels")) {
            Ok(cache) => {
                between();
                let found = cache.object("0.so").and_then(|path| fs::read(path).ok()).expect("the object");
                assert!(found.starts_with(b"honest"), "{}", String::from_utf8_lossy(&found[..7]));
                opened += 1;
            }
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::PermissionDenied, "{e}");
                refused += 1;
            }
        };
        // The right moment: after the check, before the object is read.
        look(&exchange);
        look(&|| ());
        exchange();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Bounded, so that a test that fails ends.
                (0..1_000_000).take_while(|_| !done.load(Ordering::Relaxed)).for_each(|_| exchange());
            });
            (0..300).for_each(|_| look(&|| ()));
            done.store(true, Ordering::Relaxed);
        });
        assert!(opened > 0 && refused > 0, "{opened} opened, {refused} refused");
    }

    #[test]
    fn an_object_that_is_not_whole_is_absent() {
        let cache = KernelCache::temporary().expect("a cache");
        let (name, directory) = ("0.so", cache.directory());
        let publish = |bytes: &[u8]| {
            fs::write(directory.join("made"), bytes).expect("written");
            cache.publish("made", name).expect("published");
        };
        let content = vec![7; 10_000];
        publish(&content);
        let whole = fs::read(directory.join(name)).expect("read");
        assert!(
            cache.object(name).is_some() && whole.starts_with(&content) && !directory.join("made").exists()
        );
        let mut flipped = whole.clone();
        flipped[9_000] ^= 1;
        let zeros = [&whole[..5000], &[0; 5040][..]].concat();
        for damaged in [&whole[..4096], &[], b"text", &flipped, &zeros, &content] {
            fs::write(directory.join(name), damaged).expect("written");
            assert_eq!(cache.object(name), None, "{} bytes", damaged.len());
            publish(&content);
            assert!(cache.object(name).is_some());
        }
        // Another object's content, a link, and what others may write are not this object.
        fs::copy(directory.join(name), directory.join("1.so")).expect("copied");
        symlink(name, directory.join("2.so")).expect("a link");
        assert_eq!((cache.object("1.so"), cache.object("2.so"), cache.object("none.so")), (None, None, None));
        mode(&directory.join(name), 0o666);
        assert_eq!(cache.object(name), None);
    }

    #[test]
    fn leftovers_of_killed_compilations_go() {
        let dir = tempfile::tempdir().expect("a folder");
        mode(dir.path(), 0o700);
        let (old, kept) =
            ([".tmp-1-0.c", ".tmp-1-0.tmp", "ccQ3x.s"], ["a.so", "a.c", "b.kernel", "c.cubin", ".tmp-2-0.c"]);
        for name in old.iter().chain(&kept) {
            let file = File::create(dir.path().join(name)).expect("made");
            if *name != ".tmp-2-0.c" {
                file.set_modified(std::time::SystemTime::now() - 2 * ABANDONED).expect("aged");
            }
        }
        KernelCache::open(dir.path()).expect("opened");
        let there = |name: &&str| dir.path().join(name).exists();
        assert!(kept.iter().all(there) && !old.iter().any(there));
    }
}
