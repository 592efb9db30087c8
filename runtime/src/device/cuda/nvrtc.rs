//! NVRTC, NVIDIA's run-time compiler. In: a CUDA program. Out: a cubin for one architecture, the PTX that it was made of, and what ptxas
//! says of its use of registers. `cudarc` calls the library, which is loaded when asked for, so that everything else works where it is absent;
//! no GPU is needed.

use crate::Error;
use cudarc::nvrtc::result::{
    NvrtcError, compile_program, create_program, destroy_program, get_program_log, get_ptx,
};
use cudarc::nvrtc::sys;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};

/// The loaded library, one in a process. Its functions may be called from several threads at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nvrtc {
    version: (i32, i32),
}

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
        // SAFETY: loads NVIDIA's library by its names.
        match unsafe { sys::is_culib_present() } {
            true => Nvrtc::loaded(),
            false => Err(fail("the loader", "no libnvrtc.so is installed".into())),
        }
    }

    /// Loads the library at this path.
    ///
    /// `cudarc` finds libraries by name only, and panics where it finds none. So the file is loaded here first, for the
    /// loader answers `cudarc`'s `libnvrtc.so.13` with a library of that name that is there already.
    ///
    /// # Errors
    /// The file is no NVRTC, or the loader's own path leads `cudarc` to another one.
    pub fn open(path: &Path) -> Result<Nvrtc, Error> {
        let fail = |message: String| fail(&path.display().to_string(), message);
        // Where the library does not name its own folder as one to search, its second half must be there before it is used.
        for builtins in siblings(path, "libnvrtc-builtins.so.") {
            // SAFETY: NVIDIA's library, whose initialisers only register tables.
            if let Ok(l) = unsafe { Library::open(Some(&builtins), RTLD_NOW | RTLD_GLOBAL) } {
                std::mem::forget(l);
            }
        }
        // SAFETY: as above.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
        let library = library.map_err(|e| fail(e.to_string()))?;
        // SAFETY: only the address is used.
        let ours = unsafe { library.get::<*const ()>(b"nvrtcGetCUBIN") }.map(|f| *f);
        let ours = ours.map_err(|e| fail(e.to_string()))?;
        // SAFETY: loads NVIDIA's library by its names.
        if !unsafe { sys::is_culib_present() } {
            return Err(fail(
                "its name is none that cudarc looks for (libnvrtc.so, libnvrtc.so.13, …)".into(),
            ));
        }
        // SAFETY: present, so `culib` does not panic; only the address is used.
        let theirs = unsafe { sys::culib().get::<*const ()>(b"nvrtcGetCUBIN") }.map(|f| *f);
        if theirs.map_err(|e| fail(e.to_string()))? != ours {
            return Err(fail(
                "another NVRTC is in use, or comes first in LD_LIBRARY_PATH: name that one".into(),
            ));
        }
        Nvrtc::loaded()
    }

    /// The library that `cudarc` has found.
    fn loaded() -> Result<Nvrtc, Error> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both places are valid for writes.
        let answer = unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result();
        answer.map_err(|e| fail("its version", e.to_string()))?;
        Ok(Nvrtc { version: (major, minor) })
    }

    /// Architectures that it compiles for, as numbers such as 90, ascending.
    ///
    /// # Errors
    /// The library fails.
    pub fn architectures(&self) -> Result<Vec<u32>, Error> {
        let mut count = 0;
        let said = |e: NvrtcError| fail("its architectures", e.to_string());
        // SAFETY: the place is valid for writes.
        unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) }.result().map_err(said)?;
        let mut all = vec![0i32; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the buffer has the size that the library named.
        unsafe { sys::nvrtcGetSupportedArchs(all.as_mut_ptr()) }.result().map_err(said)?;
        all.sort_unstable();
        Ok(all.into_iter().filter_map(|n| u32::try_from(n).ok()).collect())
    }

    /// (major, minor) version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Compiles a program for an architecture such as `sm_90a`; for a virtual one such as `compute_90` there is PTX and no image.
    pub fn cubin(&self, name: &str, source: &str, arch: &str, options: &[&str]) -> Result<Cubin, Error> {
        let fail = |message: String| fail(&format!("{name} for {arch}"), message);
        let text = |s: &str| CString::new(s).map_err(|_| fail("a zero byte in the text".into()));
        let architecture = format!("--gpu-architecture={arch}");
        let flags = [architecture.as_str(), "--ptxas-options=-v"].into_iter().chain(options.iter().copied());
        let flags = flags.map(text).collect::<Result<Vec<CString>, Error>>()?;
        let said = |e: NvrtcError| fail(e.to_string());
        // The program may refer to its text and name, which live until the end of this function.
        let (source, name) = (text(source)?, text(name)?);
        let program = Program(create_program(&source, Some(&name)).map_err(said)?);
        // SAFETY: the program is alive.
        let compiled = unsafe { compile_program(program.0, &flags) };
        // SAFETY: as above.
        let log = unsafe { get_program_log(program.0) }.map_err(said)?;
        let log: Vec<u8> = log.into_iter().map(|c| c as u8).collect();
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
        if let Err(e) = compiled {
            let line = log.lines().find(|l| l.contains("error")).unwrap_or("");
            return Err(fail(format!("{e} {line}")));
        }
        let image = if arch.starts_with("sm_") { program.image().map_err(said)? } else { vec![] };
        // SAFETY: as above.
        let ptx: Vec<u8> =
            unsafe { get_ptx(program.0) }.map_err(said)?.into_iter().map(|c| c as u8).collect();
        let ptx = String::from_utf8_lossy(&ptx).trim_end_matches('\0').to_string();
        Ok(Cubin { image, ptx, usage: usage(&log), log })
    }
}

fn fail(program: &str, message: String) -> Error {
    Error::Library { library: "NVRTC", program: program.into(), message }
}

/// A program that is destroyed with this value.
struct Program(sys::nvrtcProgram);

impl Program {
    /// The cubin of the compiled program; `cudarc`'s own layer has a function for PTX only.
    fn image(&self) -> Result<Vec<u8>, NvrtcError> {
        let mut size = 0;
        // SAFETY: the program is alive and the place is valid for writes.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &mut size) }.result()?;
        let mut image = vec![0u8; size];
        // SAFETY: the buffer has the size that the library named.
        unsafe { sys::nvrtcGetCUBIN(self.0, image.as_mut_ptr().cast()) }.result()?;
        Ok(image)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `create_program`, destroyed once. A program that cannot be destroyed leaves nothing to do.
        let _leak = unsafe { destroy_program(self.0) };
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
}
