//! Pages that fit the memory. In: what is asked for, bytes of a page, free bytes. Out: how many pages there are and how long a sequence may
//! be, or a line that says what would do.

use super::{KvMemory, Room, SHARE};
use crate::figures::bytes;
use astrai_builders::Cache;
use astrai_ir::{Code, DType};
use astrai_serve::cache::stored;

/// A KV state that fits the memory.
#[derive(Debug)]
pub(super) struct Fit {
    pub cache: Cache,
    pub context: usize,
    /// What the user should know of it.
    pub warning: Option<String>,
}

/// Pages for as many sequences as there may be, each as long as may be, or for what the memory holds; never less than one
/// sequence of the context.
pub(super) fn fit(
    room: &Room,
    positions: usize,
    (page_bytes, code): (u64, Option<Code>),
    free: u64,
) -> Result<Fit, String> {
    let mut context = room.context.unwrap_or(positions);
    if context > positions {
        return Err(format!("--max-model-len {context}: the model takes at most {positions} positions"));
    }
    let budget = match room.kv {
        Some(KvMemory::Bytes(n)) if n > free => {
            let (n, free) = (bytes(n), bytes(free));
            return Err(format!("--kv-memory {n}: only {free} are free beside the weights; give less"));
        }
        Some(KvMemory::Bytes(n)) => n,
        Some(KvMemory::Share(part)) => (part * free as f64) as u64,
        None => (SHARE * free as f64) as u64,
    };
    // The kernels' indices have 32 bits.
    let most =
        room.sequences.saturating_mul(context.div_ceil(Cache::PAGE)).min(i32::MAX as usize / Cache::PAGE);
    let held = usize::try_from(budget / page_bytes.max(1)).unwrap_or(usize::MAX);
    let (mut pages, mut table) = (most.min(held), context.div_ceil(Cache::PAGE));
    let mut warning = None;
    if pages < table {
        let (tokens, budget) = (held.saturating_mul(Cache::PAGE), bytes(budget));
        let (each, of) = (page_bytes / Cache::PAGE as u64, stored(code, room.storage));
        let short = format!(
            "{budget} of keys and values in {of}, {each} bytes a token, hold {tokens} tokens, one sequence of the context has {context}"
        );
        let narrower = match (code, room.storage) {
            (Some(_), _) => "",
            (None, DType::F32) => ", --dtype bf16 or --kv-cache-dtype int8",
            _ => ", or --kv-cache-dtype int8",
        };
        if room.kv.is_some() || room.context.is_some() || pages == 0 {
            let less =
                if tokens > 0 { format!(", or --max-model-len {tokens} at most") } else { String::new() };
            return Err(format!("{short}; give more --kv-memory{less}{narrower}"));
        }
        warning = Some(format!("{short}: the context is cut to {tokens}; --kv-memory gives it more"));
        (context, table) = (tokens, pages);
    }
    pages = pages.max(table);
    Ok(Fit { cache: Cache { page: Cache::PAGE, pages, table }, context, warning })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_BYTES: u64 = 1 << 10;

    fn room(sequences: usize, context: Option<usize>, kv: Option<KvMemory>) -> Room {
        Room { sequences, context, kv, ..Room::of_one(DType::F32, None) }
    }

    #[test]
    fn keys_and_values_take_what_is_of_use_and_no_more_than_there_is() {
        let fits = |room: &Room, free| {
            let f = fit(room, 100, (PAGE_BYTES, None), free).unwrap();
            (f.cache.pages, f.cache.table, f.context, f.warning.is_some())
        };
        // 100 tokens are 7 pages.
        assert_eq!(fits(&room(4, None, None), 1 << 30), (28, 7, 100, false));
        assert_eq!(fits(&room(4, None, None), 40 << 10), (20, 7, 100, false), "half of what is free");
        assert_eq!(fits(&room(4, None, None), 8 << 10), (4, 4, 64, true), "a shorter context");
        assert_eq!(fits(&room(4, Some(30), None), 1 << 30), (8, 2, 30, false));
        assert_eq!(fits(&room(4, None, Some(KvMemory::Bytes(9 << 10))), 1 << 30), (9, 7, 100, false));
        assert_eq!(fits(&room(4, None, Some(KvMemory::Share(0.25))), 40 << 10), (10, 7, 100, false));
    }

    #[test]
    fn too_little_room_is_told_with_what_would_do() {
        let told = |room: &Room, free| fit(room, 100, (PAGE_BYTES, None), free).unwrap_err();
        let few = room(4, None, Some(KvMemory::Bytes(4 << 10)));
        let narrow = fit(&few, 100, (PAGE_BYTES, Some(Code::Int8)), 1 << 30).unwrap_err();
        assert!(narrow.contains("in int8, 64 bytes a token") && !narrow.contains("dtype"), "{narrow}");
        assert!(told(&few, 1 << 30).contains("in f32, 64 bytes a token"));
        assert!(told(&few, 1 << 30).contains("--kv-cache-dtype int8"));
        let little = told(&room(4, None, Some(KvMemory::Bytes(4 << 10))), 1 << 30);
        assert!(little.contains("64 tokens") && little.contains("--max-model-len 64"), "{little}");
        assert!(told(&room(1, Some(101), None), 1 << 30).contains("at most 100"));
        assert!(told(&room(1, Some(100), None), 1 << 10).contains("--kv-memory"));
        assert!(told(&room(1, None, None), 0).contains("--kv-memory"));
        assert!(told(&room(1, None, Some(KvMemory::Bytes(1 << 30))), 1 << 20).contains("1.00 MiB are free"));
    }
}
