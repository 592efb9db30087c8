//! NVRTC, NVIDIA's run-time compiler. In: a CUDA program. Out: a cubin for one architecture and what ptxas says of its use
//! of registers. The library is loaded when asked for, so that everything else works where it is absent; no GPU is needed.

use crate::Error;
use libloading::Library;
use libloading::os::unix::{Library as Global, RTLD_GLOBAL, RTLD_NOW};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};

type Program = *mut c_void;

/// The functions of the library, with the signatures of `nvrtc.h`.
struct Functions {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    text: unsafe extern "C" fn(c_int) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
}

/// The loaded library. Its functions may be called from several threads at once.
pub struct Nvrtc {
    functions: Functions,
    version: (i32, i32),
    _library: Library,
}

/// Machine code of a program.
#[derive(Clone, Debug)]
pub struct Cubin {
    /// The ELF image that a driver loads.
    pub image: Vec<u8>,
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

    /// Loads the library at this path.
    pub fn open(path: &Path) -> Result<Nvrtc, Error> {
        let fail = |message: String| Error::Nvrtc { program: path.display().to_string(), message };
        // Where the library does not name its own folder as one to search, its second half must be there before it is used.
        for builtins in siblings(path, "libnvrtc-builtins.so.") {
            // SAFETY: NVIDIA's library, whose initialisers only register tables.
            if let Ok(l) = unsafe { Global::open(Some(&builtins), RTLD_NOW | RTLD_GLOBAL) } {
                std::mem::forget(l);
            }
        }
        // SAFETY: as above.
        let library = unsafe { Library::new(path) }.map_err(|e| fail(e.to_string()))?;
        let functions = load(&library).map_err(|e| fail(e.to_string()))?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both places are valid for writes.
        if unsafe { (functions.version)(&mut major, &mut minor) } != 0 {
            return Err(fail("the library does not say its version".into()));
        }
        Ok(Nvrtc { functions, version: (major, minor), _library: library })
    }

    /// (major, minor) version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Compiles a program for an architecture such as `sm_90a`.
    pub fn cubin(&self, name: &str, source: &str, arch: &str, options: &[&str]) -> Result<Cubin, Error> {
        let fail = |message: String| Error::Nvrtc { program: format!("{name} for {arch}"), message };
        let text = |s: &str| CString::new(s).map_err(|_| fail("a zero byte in the text".into()));
        let mut flags = vec![text(&format!("--gpu-architecture={arch}"))?, text("--ptxas-options=-v")?];
        for o in options {
            flags.push(text(o)?);
        }
        let flags: Vec<*const c_char> = flags.iter().map(|f| f.as_ptr()).collect();
        let program =
            Created::new(&self.functions, &text(source)?, &text(name)?).map_err(|c| fail(self.said(c)))?;
        let count = c_int::try_from(flags.len()).map_err(|_| fail("too many options".into()))?;
        // SAFETY: the program is alive and the flags are `count` strings that live until the end of this function.
        let code = unsafe { (self.functions.compile)(program.handle, count, flags.as_ptr()) };
        let log =
            program.bytes(self.functions.log_size, self.functions.log).map_err(|c| fail(self.said(c)))?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
        if code != 0 {
            let line = log.lines().find(|l| l.contains("error")).unwrap_or("").to_string();
            return Err(fail(format!("{} {line}", self.said(code))));
        }
        let image = program.bytes(self.functions.cubin_size, self.functions.cubin);
        let image = image.map_err(|c| fail(self.said(c)))?;
        Ok(Cubin { image, usage: usage(&log), log })
    }

    /// The library's words for a result code.
    fn said(&self, code: c_int) -> String {
        // SAFETY: the function takes any code and gives a static string.
        let text = unsafe { (self.functions.text)(code) };
        if text.is_null() {
            return format!("error {code}");
        }
        // SAFETY: not null, and ended by a zero byte.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// A program that is destroyed with this value.
struct Created<'a> {
    functions: &'a Functions,
    handle: Program,
}

impl<'a> Created<'a> {
    fn new(functions: &'a Functions, source: &CStr, name: &CStr) -> Result<Created<'a>, c_int> {
        let mut handle = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: strings end in zero and are copied by the call; there are no headers.
        let code = unsafe { (functions.create)(&mut handle, source.as_ptr(), name.as_ptr(), 0, none, none) };
        if code == 0 { Ok(Created { functions, handle }) } else { Err(code) }
    }

    /// What a pair of functions gives: a size, then that many bytes.
    fn bytes(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        fill: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, c_int> {
        let mut n = 0;
        // SAFETY: the program is alive and the place is valid for writes.
        let code = unsafe { size(self.handle, &mut n) };
        if code != 0 {
            return Err(code);
        }
        let mut out = vec![0u8; n];
        // SAFETY: the buffer has the size that the library named.
        let code = unsafe { fill(self.handle, out.as_mut_ptr().cast()) };
        if code == 0 { Ok(out) } else { Err(code) }
    }
}

impl Drop for Created<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle was made by `create` and is destroyed once.
        unsafe { (self.functions.destroy)(&mut self.handle) };
    }
}

fn load(library: &Library) -> Result<Functions, libloading::Error> {
    // SAFETY: names and signatures are those of nvrtc.h, unchanged since CUDA 11.2.
    unsafe {
        Ok(Functions {
            version: *library.get(b"nvrtcVersion\0")?,
            text: *library.get(b"nvrtcGetErrorString\0")?,
            create: *library.get(b"nvrtcCreateProgram\0")?,
            destroy: *library.get(b"nvrtcDestroyProgram\0")?,
            compile: *library.get(b"nvrtcCompileProgram\0")?,
            log_size: *library.get(b"nvrtcGetProgramLogSize\0")?,
            log: *library.get(b"nvrtcGetProgramLog\0")?,
            cubin_size: *library.get(b"nvrtcGetCUBINSize\0")?,
            cubin: *library.get(b"nvrtcGetCUBIN\0")?,
        })
    }
}

fn search(folder: &Path, deep: usize, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
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
fn usage(log: &str) -> Vec<Usage> {
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
}
