//! A batch that has been filled once is filled again without asking for memory, whatever documents it meets.

use astrai_train::batch::PackedBatch;
use astrai_train::data::{Packing, Tokens, WindowOptions, Windows};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is handed to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn filling_again_asks_for_no_memory() {
    let dir = tempfile::tempdir().unwrap();
    // Documents grow shorter, so that later batches have more sequences.
    let ids = (0..4000_u16).flat_map(|i| if i % (1 + (4000 - i) / 50) == 0 { [0, 0] } else { [1, 2] });
    std::fs::write(dir.path().join("x.bin"), ids.flat_map(u16::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    std::fs::write(dir.path().join("meta.json"), r#"{"dtype": "uint16", "eos": 0, "vocab_size": 3}"#)
        .unwrap();
    let tokens = Arc::new(Tokens::open(dir.path()).unwrap());
    let options = WindowOptions { seq: 64, stride: None, packing: Packing::Masked };
    let windows = Windows::new(tokens, &options).unwrap();
    let mut batch = PackedBatch::default();
    let mut counts = Vec::new();
    for step in 0..31 {
        let before = COUNT.with(Cell::get);
        batch.fill(&windows, 4 * step..4 * step + 4).unwrap();
        counts.push(COUNT.with(Cell::get) - before);
        assert_eq!(batch.tokens(), 256);
        assert_eq!(batch.starts.last(), Some(&256));
    }
    assert!(counts[0] > 0 && counts[1..].iter().all(|&count| count == 0), "{counts:?}");
}
