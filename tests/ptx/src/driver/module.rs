//! Modules, functions, launches.

use super::machine::Machine;
use super::tasks::Work;
use super::{Answer, Code, Handle, api, code, put};
use crate::kernel::{Kernel, Module};
use crate::launch::Launch;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

/// Bytes of shared memory of a block: without asking, and at most.
const SHARED: usize = 48 << 10;
pub(crate) const SHARED_MOST: usize = 163 << 10;

pub(crate) struct Loaded {
    device: usize,
    module: Module,
    variables: Arc<Vec<u64>>,
}

pub(crate) struct Function {
    module: usize,
    device: usize,
    kernel: Arc<Kernel>,
    variables: Arc<Vec<u64>>,
    /// Bytes of dynamic shared memory that a launch may ask for.
    most: usize,
}

/// A launch that waits.
pub(crate) struct Prepared {
    kernel: Arc<Kernel>,
    variables: Arc<Vec<u64>>,
    grid: [u32; 3],
    block: [u32; 3],
    dynamic: usize,
    params: Vec<u8>,
}

impl Machine {
    fn load(&mut self, place: *mut Handle, image: *const c_void) -> Answer {
        let device = self.working()?;
        if image.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: an image is an ELF file, a fat binary, or a text that ends with zero; all have four bytes.
        let head = unsafe { std::slice::from_raw_parts(image.cast::<u8>(), 4) };
        if head.starts_with(b"\x7fELF") || head == [0x50, 0xED, 0x55, 0xBA] {
            return Err(code::NO_BINARY_FOR_GPU);
        }
        // SAFETY: as above.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
        let module = Module::parse(&text).map_err(|e| {
            eprintln!("emulated CUDA: {e}");
            code::INVALID_PTX
        })?;
        let mut variables = vec![];
        for v in &module.variables {
            let memory = &mut self.devices[device].memory;
            let at = memory.alloc(v.bytes.len() as u64).ok_or(code::OUT_OF_MEMORY)?;
            memory.write(at, &v.bytes).map_err(|_| code::UNKNOWN)?;
            variables.push(at);
        }
        let h = self.handle();
        self.modules.insert(h, Loaded { device, module, variables: Arc::new(variables) });
        put(place, h as Handle)
    }

    fn function(&self, f: Handle) -> Result<&Function, Code> {
        self.functions.get(&(f as usize)).ok_or(code::INVALID_HANDLE)
    }

    /// Takes a launch's parameters, which the program may change as soon as the call is over.
    #[allow(clippy::too_many_arguments)]
    fn enqueue(
        &mut self,
        f: Handle,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        stream: Handle,
        args: *mut Handle,
        extra: *mut Handle,
    ) -> Answer {
        let s = self.stream(stream as usize)?;
        let f = self.function(f)?;
        let (k, dynamic) = (&f.kernel, shared as usize);
        let threads: u64 = block.iter().map(|n| u64::from(*n)).product();
        let shape = grid.iter().chain(&block).all(|n| *n > 0) && grid[1] <= 65535 && grid[2] <= 65535;
        if !shape || threads > 1024 || block[2] > 64 || f.device != self.streams[&s].device {
            return Err(code::INVALID_VALUE);
        }
        if dynamic > f.most {
            eprintln!(
                "emulated CUDA: {}: {dynamic} bytes of dynamic shared memory, allowed are {}",
                k.name, f.most
            );
            return Err(code::INVALID_VALUE);
        }
        if threads > u64::from(k.max_threads)
            || u64::from(grid[0]) * u64::from(grid[1]) * u64::from(grid[2]) > u64::from(u32::MAX)
        {
            return Err(code::OUT_OF_RESOURCES);
        }
        let mut params = vec![0u8; k.param_bytes];
        if !extra.is_null() {
            // SAFETY: the driver's form: pairs of a name and a value, ended by zero.
            let (bytes, size) = unsafe { (*extra.add(1), *(*extra.add(3)).cast::<usize>()) };
            let n = size.min(params.len());
            // SAFETY: the program says that so many bytes are there.
            params[..n].copy_from_slice(unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), n) });
        } else if !k.params.is_empty() && args.is_null() {
            return Err(code::INVALID_VALUE);
        } else {
            for (i, p) in k.params.iter().enumerate() {
                // SAFETY: the program gives a place for each parameter of the kernel.
                let bytes = unsafe { std::slice::from_raw_parts((*args.add(i)).cast::<u8>(), p.size) };
                params[p.at..p.at + p.size].copy_from_slice(bytes);
            }
        }
        let p = Prepared { kernel: k.clone(), variables: f.variables.clone(), grid, block, dynamic, params };
        self.submit(s, Work::Launch(Arc::new(p))).map(|_| ())
    }

    /// Runs a launch; what the kernel does wrong is an error that stays.
    pub fn launch(&mut self, device: usize, p: &Prepared) -> Answer {
        let key = (p.kernel.name.clone(), p.kernel.instructions());
        // Several threads cost more than they save where little is done.
        let before = self.counts.get(&key).filter(|(_, c)| c.launches > 0);
        let blocks = p.grid.iter().product::<u32>();
        let large = before.is_none_or(|(_, c)| c.lanes() / c.launches > 4 << 20);
        let seed = self.settings.seed ^ self.random(1 << 30) as u64;
        let mut l = Launch::new(&p.kernel, p.grid, p.block, &p.params);
        l.dynamic = p.dynamic;
        l.variables = &p.variables;
        l.seed = seed;
        l.counted = self.settings.counts.is_some();
        l.threads = if large && blocks > 8 { self.settings.threads } else { 1 };
        match l.run(&mut self.devices[device].memory) {
            Ok(counts) => {
                let entry = self.counts.entry(key).or_insert_with(|| (p.kernel.clone(), Default::default()));
                entry.1.add(&counts);
                Ok(())
            }
            Err(f) => {
                eprintln!("emulated CUDA: {f}");
                Err(f.kind.code())
            }
        }
    }

    /// Blocks of a function that a multiprocessor holds: by threads, shared memory and number.
    fn resident(&self, f: Handle, threads: i32, dynamic: usize) -> Result<i32, Code> {
        let f = self.function(f)?;
        if threads <= 0 {
            return Err(code::INVALID_VALUE);
        }
        let shared = f.kernel.shared + dynamic + 1024;
        let threads = (threads as usize).next_multiple_of(32);
        Ok((2048 / threads).min(32).min((SHARED_MOST + 1024) / shared) as i32)
    }
}

/// `CUlaunchConfig`, as far as it is read.
#[repr(C)]
pub struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: Handle,
    attributes: Handle,
    count: u32,
}

api! {
    fn cuModuleLoadData(module: *mut Handle, image: *const c_void) |m| { m.load(module, image) }

    fn cuModuleLoadDataEx(module: *mut Handle, image: *const c_void, n: u32, o: *mut u32, v: *mut Handle) |m| {
        m.load(module, image)
    }

    fn cuModuleUnload(module: Handle) |m| {
        let d = m.modules.get(&(module as usize)).ok_or(code::INVALID_HANDLE)?.device;
        if m.devices[d].sticky == 0 {
            m.finish_device(d)?;
        }
        m.functions.retain(|_, f| f.module != module as usize);
        if let Some(l) = m.modules.remove(&(module as usize)) {
            l.variables.iter().for_each(|v| {
                m.devices[d].memory.free(*v);
            });
        }
        Ok(())
    }

    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) |m| {
        m.working()?;
        // SAFETY: names end with zero.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let l = m.modules.get(&(module as usize)).ok_or(code::INVALID_HANDLE)?;
        let kernel = l.module.kernel(&name).ok_or(code::NOT_FOUND)?.clone();
        let most = SHARED.saturating_sub(kernel.shared);
        let f = Function { module: module as usize, device: l.device, kernel, variables: l.variables.clone(), most };
        let h = m.handle();
        m.functions.insert(h, f);
        put(function, h as Handle)
    }

    fn cuModuleGetGlobal_v2(at: *mut u64, n: *mut usize, module: Handle, name: *const c_char) |m| {
        m.working()?;
        // SAFETY: names end with zero.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let l = m.modules.get(&(module as usize)).ok_or(code::INVALID_HANDLE)?;
        let i = l.module.variables.iter().position(|v| v.name == name).ok_or(code::NOT_FOUND)?;
        if !n.is_null() {
            put(n, l.module.variables[i].bytes.len())?;
        }
        if at.is_null() { Ok(()) } else { put(at, l.variables[i]) }
    }

    fn cuLaunchKernel(f: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: Handle, args: *mut Handle, extra: *mut Handle) |m| {
        m.enqueue(f, [gx, gy, gz], [bx, by, bz], shared, stream, args, extra)
    }

    fn cuLaunchCooperativeKernel(f: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: Handle, args: *mut Handle) |m| {
        m.enqueue(f, [gx, gy, gz], [bx, by, bz], shared, stream, args, std::ptr::null_mut())
    }

    fn cuLaunchKernelEx(config: *const Config, f: Handle, args: *mut Handle, extra: *mut Handle) |m| {
        // SAFETY: the caller's configuration.
        let c = unsafe { config.as_ref() }.ok_or(code::INVALID_VALUE)?;
        m.enqueue(f, c.grid, c.block, c.shared, c.stream, args, extra)
    }

    fn cuFuncSetAttribute(f: Handle, attribute: u32, value: i32) |m| {
        m.working()?;
        let f = m.functions.get_mut(&(f as usize)).ok_or(code::INVALID_HANDLE)?;
        let value = usize::try_from(value);
        match (attribute, value) {
            (8, Ok(n)) if n + f.kernel.shared <= SHARED_MOST => f.most = n,
            // How much of the cache shared memory prefers is a hint.
            (9, _) => {}
            _ => return Err(code::INVALID_VALUE),
        }
        Ok(())
    }

    fn cuFuncGetAttribute(value: *mut i32, attribute: u32, f: Handle) |m| {
        m.working()?;
        let arch = m.settings.arch as i32;
        let f = m.function(f)?;
        let k = &f.kernel;
        put(value, match attribute {
            0 => k.max_threads as i32,
            1 => k.shared as i32,
            2 => 0,
            3 => k.local as i32,
            4 => k.registers.min(255) as i32,
            5 | 6 => arch,
            8 => f.most as i32,
            _ => return Err(code::INVALID_VALUE),
        })
    }

    fn cuFuncSetCacheConfig(f: Handle, config: u32) |m| { m.function(f).map(|_| ()) }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(n: *mut i32, f: Handle, threads: i32, dynamic: usize) |m| {
        put(n, m.resident(f, threads, dynamic)?)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n: *mut i32, f: Handle, threads: i32, dynamic: usize, flags: u32) |m| {
        put(n, m.resident(f, threads, dynamic)?)
    }

    fn cuOccupancyAvailableDynamicSMemPerBlock(bytes: *mut usize, f: Handle, blocks: i32, threads: i32) |m| {
        let f = m.function(f)?;
        let each = (SHARED_MOST + 1024) / blocks.max(1) as usize;
        put(bytes, each.saturating_sub(1024 + f.kernel.shared))
    }
}

impl Loaded {
    pub fn device(&self) -> usize {
        self.device
    }
}

impl Function {
    pub fn device(&self) -> usize {
        self.device
    }
}
