//! NVRTC, NVIDIA's run-time compiler. In: a CUDA program. Out: a cubin for one architecture, the PTX that it was made of, and what ptxas
//! says of its use of registers. The library is loaded when asked for, so that everything else works where it is absent; no GPU is
//! needed. Its functions are called here and not through `cudarc`, which takes the first library of a fixed list of names: on a machine
//! with a toolkit that is not the one that a user named.

use crate::Error;
use crate::device::cause;
use cudarc::nvrtc::result::NvrtcError;
use cudarc::nvrtc::sys::{nvrtcProgram, nvrtcResult};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CString, c_char, c_int};
use std::fs;
use std::path::{Path, PathBuf};

/// Names by which the system's loader is asked; a toolkit's own comes first.
const NAMES: [&str; 3] = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"];

/// A loaded library. Its functions may be called from several threads at once.
#[derive(Clone, Debug)]
pub struct Nvrtc {
    version: (i32, i32),
    more: Vec<String>,
    calls: &'static Calls,
}

/// Declares the library's functions, and how they are found in it.
macro_rules! calls {
    ($($field:ident $symbol:literal ($($argument:ty),*);)*) => {
        #[derive(Debug)]
        struct Calls {
            $($field: unsafe extern "C" fn($($argument),*) -> nvrtcResult,)*
        }

        impl Calls {
            fn of(library: &Library) -> Result<Calls, libloading::Error> {
                // SAFETY: the types are those of NVRTC's header.
                Ok(unsafe { Calls { $($field: *library.get($symbol)?,)* } })
            }
        }
    };
}

type Texts = *const *const c_char;

calls! {
    version b"nvrtcVersion" (*mut c_int, *mut c_int);
    architecture_count b"nvrtcGetNumSupportedArchs" (*mut c_int);
    architectures b"nvrtcGetSupportedArchs" (*mut c_int);
    create b"nvrtcCreateProgram" (*mut nvrtcProgram, *const c_char, *const c_char, c_int, Texts, Texts);
    compile b"nvrtcCompileProgram" (nvrtcProgram, c_int, Texts);
    destroy b"nvrtcDestroyProgram" (*mut nvrtcProgram);
    log_size b"nvrtcGetProgramLogSize" (nvrtcProgram, *mut usize);
    log b"nvrtcGetProgramLog" (nvrtcProgram, *mut c_char);
    ptx_size b"nvrtcGetPTXSize" (nvrtcProgram, *mut usize);
    ptx b"nvrtcGetPTX" (nvrtcProgram, *mut c_char);
    image_size b"nvrtcGetCUBINSize" (nvrtcProgram, *mut usize);
    image b"nvrtcGetCUBIN" (nvrtcProgram, *mut c_char);
}

type SizeOf = unsafe extern "C" fn(nvrtcProgram, *mut usize) -> nvrtcResult;
type BytesOf = unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> nvrtcResult;

/// Machine code of a program.
#[derive(Clone, Debug)]
pub struct Cubin {
    /// The ELF image that a driver loads.
    pub image: Vec<u8>,
    /// The program as PTX, which a driver compiles itself.
    pub ptx: String,
    /// Use of registers and memory of each kernel, in the order of the log.
    pub usage: Vec<Usage>,
    /// Everything that the compiler and ptxas said.
    pub log: String,
}

/// What one kernel uses, as ptxas reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Name of the kernel.
    pub name: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of registers written to local memory for want of registers.
    pub spill_stores: u32,
    /// Bytes read back.
    pub spill_loads: u32,
    /// Bytes of static shared memory.
    pub shared: u32,
}

impl Nvrtc {
    /// The library below these folders, at most six deep; the newest name where there are several.
    pub fn find(folders: &[PathBuf]) -> Option<PathBuf> {
        let mut found = Vec::new();
        folders.iter().for_each(|f| search(f, 6, &mut found));
        found.sort();
        found.pop()
    }

    /// The library that the system's loader finds by its name.
    ///
    /// # Errors
    /// There is none.
    pub fn system() -> Result<Nvrtc, Error> {
        // SAFETY: NVIDIA's library, whose initialisers only register tables.
        let open = |name: &&str| unsafe { Library::open(Some(*name), RTLD_NOW | RTLD_LOCAL) }.ok();
        let found = NAMES.iter().filter_map(open).find_map(|l| Nvrtc::loaded(l, "the loader").ok());
        found.ok_or_else(|| fail("the loader", "no libnvrtc.so is installed".into()))
    }

    /// Loads the library at this path.
    ///
    /// # Errors
    /// The file is no NVRTC.
    pub fn open(path: &Path) -> Result<Nvrtc, Error> {
        let named = path.display().to_string();
        // Where the library does not name its own folder as one to search, its second half must be there before it is used.
        for builtins in siblings(path, "libnvrtc-builtins.so.") {
            // SAFETY: as above.
            if let Ok(l) = unsafe { Library::open(Some(&builtins), RTLD_NOW | RTLD_LOCAL) } {
                std::mem::forget(l);
            }
        }
        // SAFETY: as above.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        Nvrtc::loaded(library.map_err(|e| fail(&named, cause(&e)))?, &named)
    }

    /// A library, which stays loaded.
    fn loaded(library: Library, named: &str) -> Result<Nvrtc, Error> {
        let calls = Calls::of(&library)
            .map_err(|e| fail(named, format!("is no NVRTC of CUDA 11.2 or later: {}", cause(&e))))?;
        std::mem::forget(library);
        let calls: &'static Calls = Box::leak(Box::new(calls));
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both places are valid for writes.
        let answer = unsafe { (calls.version)(&mut major, &mut minor) }.result();
        if major == 0 {
            return Err(fail(named, "is a stub to link against, which compiles nothing".into()));
        }
        answer.map_err(|e| fail("its version", e.to_string()))?;
        Ok(Nvrtc { version: (major, minor), more: vec![], calls })
    }

    /// Architectures that it compiles for, as numbers such as 90, ascending.
    ///
    /// # Errors
    /// The library fails.
    pub fn architectures(&self) -> Result<Vec<u32>, Error> {
        let mut count = 0;
        let said = |e: NvrtcError| fail("its architectures", e.to_string());
        // SAFETY: the place is valid for writes.
        unsafe { (self.calls.architecture_count)(&mut count) }.result().map_err(said)?;
        let mut all = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the buffer has the size that the library named.
        unsafe { (self.calls.architectures)(all.as_mut_ptr()) }.result().map_err(said)?;
        all.sort_unstable();
        Ok(all.into_iter().filter_map(|n| u32::try_from(n).ok()).collect())
    }

    /// (major, minor) version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The library with further options for every program, apart by spaces: `-lineinfo`, say, which a profiler reads.
    pub fn with(mut self, options: &str) -> Nvrtc {
        self.more.extend(options.split_whitespace().map(String::from));
        self
    }

    /// Those options.
    pub fn options(&self) -> &[String] {
        &self.more
    }

    /// Compiles a program for an architecture such as `sm_90a`; for a virtual one such as `compute_90` there is PTX and no image.
    pub fn cubin(&self, name: &str, source: &str, arch: &str, options: &[&str]) -> Result<Cubin, Error> {
        let fail = |message: String| fail(&format!("{name} for {arch}"), message);
        let text = |s: &str| CString::new(s).map_err(|_| fail("a zero byte in the text".into()));
        let architecture = format!("--gpu-architecture={arch}");
        let flags = [architecture.as_str(), "--ptxas-options=-v"].into_iter().chain(options.iter().copied());
        let flags = flags
            .chain(self.more.iter().map(String::as_str))
            .map(text)
            .collect::<Result<Vec<CString>, Error>>()?;
        let said = |e: NvrtcError| fail(e.to_string());
        // The program may refer to its text and name, which live until the end of this function.
        let (source, name) = (text(source)?, text(name)?);
        let flags: Vec<*const c_char> = flags.iter().map(|f| f.as_ptr()).collect();
        let (calls, none) = (self.calls, std::ptr::null());
        let mut program = std::ptr::null_mut();
        // SAFETY: the texts end in zeros and are alive; the place is valid for writes.
        let created = unsafe { (calls.create)(&mut program, source.as_ptr(), name.as_ptr(), 0, none, none) };
        created.result().map_err(said)?;
        let program = Program { calls, program };
        // SAFETY: the program and the flags are alive.
        let compiled = unsafe { (calls.compile)(program.program, flags.len() as c_int, flags.as_ptr()) };
        let words = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_string();
        let log = words(program.part(calls.log_size, calls.log).map_err(said)?);
        if let Err(e) = compiled.result() {
            let line = log.lines().find(|l| l.contains("error")).unwrap_or("");
            return Err(fail(format!("{e} {line}")));
        }
        let image = match arch.starts_with("sm_") {
            true => program.part(calls.image_size, calls.image).map_err(said)?,
            false => vec![],
        };
        let ptx = words(program.part(calls.ptx_size, calls.ptx).map_err(said)?);
        Ok(Cubin { image, ptx, usage: usage(&log), log })
    }
}

fn fail(program: &str, message: String) -> Error {
    Error::Library { library: "NVRTC", program: program.into(), message }
}

/// A program that is destroyed with this value.
struct Program {
    calls: &'static Calls,
    program: nvrtcProgram,
}

impl Program {
    /// Something of the program, by the functions that give its size and its bytes.
    fn part(&self, size: SizeOf, bytes: BytesOf) -> Result<Vec<u8>, NvrtcError> {
        let mut n = 0;
        // SAFETY: the program is alive and the place is valid for writes.
        unsafe { size(self.program, &mut n) }.result()?;
        let mut all = vec![0u8; n];
        // SAFETY: the buffer has the size that the library named.
        unsafe { bytes(self.program, all.as_mut_ptr().cast()) }.result()?;
        Ok(all)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by the library, destroyed once. What cannot be destroyed leaves nothing to do.
        let _leak = unsafe { (self.calls.destroy)(&mut self.program) };
    }
}

fn search(folder: &Path, deep: usize, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        // A toolkit's stubs are there to be linked against.
        if entry.file_name() == "stubs" {
            continue;
        }
        if path.is_dir() && deep > 0 {
            search(&path, deep - 1, found);
        } else if entry.file_name().to_string_lossy().starts_with("libnvrtc.so") {
            found.push(path);
        }
    }
}

/// Files beside this one whose names start so.
fn siblings(path: &Path, prefix: &str) -> Vec<PathBuf> {
    let beside = path.parent().and_then(|p| fs::read_dir(p).ok());
    let named = |e: &fs::DirEntry| e.file_name().to_string_lossy().starts_with(prefix);
    beside.into_iter().flatten().flatten().filter(named).map(|e| e.path()).collect()
}

/// Reads ptxas's report.
pub(super) fn usage(log: &str) -> Vec<Usage> {
    let mut all: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let name = rest.split('\'').next().unwrap_or_default().to_string();
            all.push(Usage { name, ..Usage::default() });
        }
        let Some(last) = all.last_mut() else { continue };
        let words: Vec<&str> = line.split([' ', ',']).filter(|w| !w.is_empty()).collect();
        for w in words.windows(4).filter(|w| w[1] == "bytes" && w[2] == "spill") {
            let bytes = w[0].parse().unwrap_or(0);
            *(if w[3] == "stores" { &mut last.spill_stores } else { &mut last.spill_loads }) = bytes;
        }
        for w in words.windows(3).filter(|w| w[0] == "Used" && w[2] == "registers") {
            last.registers = w[1].parse().unwrap_or(0);
        }
        for w in words.windows(3).filter(|w| w[1..] == ["bytes", "smem"]) {
            last.shared = w[0].parse().unwrap_or(0);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'k1' for 'sm_90a'\n\
                   ptxas info    : Function properties for k1\n    \
                   8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n\
                   ptxas info    : Used 28 registers, used 1 barriers, 64 bytes smem, 400 bytes cmem[0]\n";
        let want = Usage { name: "k1".into(), registers: 28, spill_stores: 16, spill_loads: 24, shared: 64 };
        assert_eq!(usage(log), vec![want]);
    }

    #[test]
    fn an_absent_library_is_an_error() {
        assert_eq!(Nvrtc::find(&[PathBuf::from("/nonexistent")]), None);
        let e = Nvrtc::open(Path::new("/nonexistent/libnvrtc.so.13")).map(|_| ()).unwrap_err();
        assert!(e.to_string().contains("libnvrtc.so.13"), "{e}");
    }

    #[test]
    fn a_toolkit_s_stubs_are_passed_over() {
        let folder = std::env::temp_dir().join(format!("astrai-stubs-{}", std::process::id()));
        let stubs = folder.join("lib").join("stubs");
        fs::create_dir_all(&stubs).unwrap();
        fs::write(stubs.join("libnvrtc.so"), "").unwrap();
        let none = Nvrtc::find(std::slice::from_ref(&folder));
        let library = folder.join("lib").join("libnvrtc.so.13");
        fs::write(&library, "").unwrap();
        let found = Nvrtc::find(std::slice::from_ref(&folder));
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!((none, found), (None, Some(library)));
    }
}
