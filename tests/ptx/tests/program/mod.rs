//! Programs that the tests of the driver run in processes of their own.

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use std::sync::Arc;

/// `y[i] = x[i] + a` for `i < n`.
const ADD: &str = include_str!("../add.ptx");

fn add(stream: &Arc<CudaStream>, x: &CudaSlice<f32>, y: &mut CudaSlice<f32>, a: f32, n: i32) {
    let module = stream.context().load_module(Ptx::from_src(ADD)).unwrap();
    let f = module.load_function("add").unwrap();
    // SAFETY: the parameters are those of the kernel.
    unsafe {
        stream.launch_builder(&f).arg(x).arg(y).arg(&a).arg(&n).launch(LaunchConfig::for_num_elems(n as u32))
    }
    .unwrap();
}

#[test]
#[ignore = "a program of another test"]
fn everyday() {
    let context = CudaContext::new(0).unwrap();
    assert_eq!(context.compute_capability().unwrap(), (8, 2));
    let cubin = context.load_module(Ptx::from_src("\u{7f}ELF of some processor"));
    assert_eq!(cubin.unwrap_err().0, CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
    let stream = context.new_stream().unwrap();
    let x: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let d = stream.clone_htod(&x).unwrap();
    let mut y = stream.alloc_zeros::<f32>(1000).unwrap();
    let begin = stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
    add(&stream, &d, &mut y, 1.5, 999);
    let end = stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
    assert!(begin.elapsed_ms(&end).unwrap() >= 0.0);
    let got = stream.clone_dtoh(&y).unwrap();
    assert!(got[..999].iter().zip(&x).all(|(y, x)| *y == x + 1.5) && got[999] == 0.0);
    graph(&context, &stream, &d);
}

fn graph(context: &Arc<CudaContext>, stream: &Arc<CudaStream>, x: &CudaSlice<f32>) {
    let module = context.load_module(Ptx::from_src(ADD)).unwrap();
    let f = module.load_function("add").unwrap();
    let (mut y, n, a) = (stream.clone_dtod(x).unwrap(), 1000i32, 2.0f32);
    stream.synchronize().unwrap();
    // SAFETY: nothing of another stream is used.
    unsafe { context.disable_event_tracking() };
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    for _ in 0..2 {
        let y2 = y.clone_pointer();
        // SAFETY: the parameters are those of the kernel.
        unsafe {
            stream
                .launch_builder(&f)
                .arg(&y2)
                .arg(&mut y)
                .arg(&a)
                .arg(&n)
                .launch(LaunchConfig::for_num_elems(1000))
        }
        .unwrap();
    }
    assert!(stream.synchronize().is_err(), "waiting for a stream that captures");
    assert!(
        stream
            .end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
            .is_err()
    );
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    for _ in 0..2 {
        let y2 = y.clone_pointer();
        // SAFETY: as above.
        unsafe {
            stream
                .launch_builder(&f)
                .arg(&y2)
                .arg(&mut y)
                .arg(&a)
                .arg(&n)
                .launch(LaunchConfig::for_num_elems(1000))
        }
        .unwrap();
    }
    // Events that are nodes of the graph keep the time of each launch of it.
    let event = || context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
    let ends = [event(), event()];
    let external = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
    // SAFETY: both handles are alive.
    let mark =
        |e: &CudaEvent| unsafe { sys::cuEventRecordWithFlags(e.cu_event(), stream.cu_stream(), external) };
    ends.iter().for_each(|e| mark(e).result().unwrap());
    let g =
        stream.end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
    let g = g.unwrap().unwrap();
    assert!(mark(&ends[0]).result().is_err(), "no stream captures");
    assert!(ends[0].elapsed_ms(&ends[1]).is_err(), "the graph was not launched");
    (0..3).for_each(|_| g.launch().unwrap());
    stream.synchronize().unwrap();
    assert!(ends[0].elapsed_ms(&ends[1]).unwrap() >= 0.0);
    let got = stream.clone_dtoh(&y).unwrap();
    assert!(got.iter().enumerate().all(|(i, y)| *y == i as f32 + 12.0), "{:?}", &got[..4]);
}

/// The same device memory as a second argument.
trait ClonePointer {
    fn clone_pointer(&self) -> u64;
}

impl ClonePointer for CudaSlice<f32> {
    fn clone_pointer(&self) -> u64 {
        use cudarc::driver::DevicePtr;
        self.device_ptr(self.stream()).0
    }
}

#[test]
#[ignore = "a program of another test"]
fn stray() {
    let context = CudaContext::new(0).unwrap();
    let stream = context.default_stream();
    let x = stream.alloc_zeros::<f32>(2048).unwrap();
    let mut y = stream.alloc_zeros::<f32>(1000).unwrap();
    add(&stream, &x, &mut y, 1.0, 1001);
    // The launch itself says nothing: it has not run.
    let e = stream.synchronize().unwrap_err();
    assert_eq!(e.0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_eq!(stream.clone_dtoh(&x).unwrap_err().0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_eq!(stream.alloc_zeros::<f32>(1).unwrap_err().0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
}

#[test]
#[ignore = "a program of another test"]
fn injected() {
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let mut y = stream.alloc_zeros::<f32>(10).unwrap();
    let e = stream.alloc_zeros::<f32>(10).unwrap_err();
    assert_eq!(e.0, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    let x = stream.alloc_zeros::<f32>(10).unwrap();
    let module = context.load_module(Ptx::from_src(ADD)).unwrap();
    let f = module.load_function("add").unwrap();
    let (a, n) = (1.0f32, 10i32);
    // SAFETY: the parameters are those of the kernel.
    let e = unsafe {
        stream.launch_builder(&f).arg(&x).arg(&mut y).arg(&a).arg(&n).launch(LaunchConfig::for_num_elems(10))
    };
    assert_eq!(e.unwrap_err().0, CUresult::CUDA_ERROR_LAUNCH_FAILED);
    assert_eq!(stream.synchronize().unwrap_err().0, CUresult::CUDA_ERROR_LAUNCH_FAILED);
}

#[test]
#[ignore = "a program of another test"]
fn two() {
    let (a, b) = (CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap());
    let (s, t) = (a.new_stream().unwrap(), b.new_stream().unwrap());
    let x: Vec<f32> = (0..100).map(|i| i as f32).collect();
    let (dx, dz) = (s.clone_htod(&x).unwrap(), t.clone_htod(&x).unwrap());
    let (mut y, mut z) = (s.alloc_zeros::<f32>(100).unwrap(), t.alloc_zeros::<f32>(100).unwrap());
    add(&s, &dx, &mut y, 1.0, 100);
    add(&t, &dz, &mut z, 2.0, 100);
    assert_eq!(s.clone_dtoh(&y).unwrap()[99], 100.0);
    assert_eq!(t.clone_dtoh(&z).unwrap()[99], 101.0);
    // Pinned memory is written when the copy runs, not before.
    // SAFETY: read after it was written.
    let mut pinned = unsafe { a.alloc_pinned::<f32>(100) }.unwrap();
    a.bind_to_thread().unwrap();
    let host = pinned.as_mut_ptr().unwrap();
    // SAFETY: the memory lives until the stream is done.
    unsafe {
        host.write(-1.0);
        let from = y.clone_pointer();
        assert_eq!(sys::cuMemcpyDtoHAsync_v2(host.cast(), from, 400, s.cu_stream()), CUresult::CUDA_SUCCESS);
        assert_eq!(host.read(), -1.0);
        s.synchronize().unwrap();
        assert_eq!(host.read(), 1.0);
    }
}
