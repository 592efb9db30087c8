//! Pages that fit the memory. In: what is asked for, bytes of a page, free bytes. Out: how many pages there are and how long a sequence may
//! be, or a line that says what would do.

use super::{KvMemory, Room, SHARE, TOKENS};
use crate::figures::bytes;
use astrai_builders::{Cache, ModelConfig, Windows};
use astrai_ir::{Code, DType};
use astrai_serve::cache::stored;

/// What pages take.
#[derive(Clone, Copy)]
pub(super) struct PageBytes {
    /// Bytes of a page of layers that see all that came before, and of one of windowed layers.
    bytes: [u64; 2],
    /// The widest window.
    window: usize,
    /// What they hold in eight bits, if they do.
    code: Option<Code>,
}

impl PageBytes {
    pub(super) fn of(config: &ModelConfig, bytes: [u64; 2]) -> PageBytes {
        let window = config.layers.iter().filter_map(|l| l.attention.window).max();
        PageBytes { bytes, window: window.unwrap_or(usize::MAX), code: config.pages }
    }

    /// Pages of their own for windowed layers, where a sequence needs fewer of them than of others: for all sequences, twice where
    /// prefixes are kept; but no more than the budget has of others. Of `most` there are never more.
    fn windows(&self, room: &Room, context: usize, budget: u64, most: usize) -> Option<Windows> {
        let [whole, windowed] = self.bytes;
        let each = Windows::each(self.window, room.tokens.unwrap_or(TOKENS.max(room.rows())));
        let all = each.saturating_mul(room.sequences << u32::from(room.prefix_cache));
        let held = usize::try_from(budget / (whole + windowed).max(1)).unwrap_or(usize::MAX);
        let pages = all.min(most).min(held);
        let fits = windowed > 0 && each < context.div_ceil(Cache::PAGE) && each <= pages;
        fits.then_some(Windows { pages, window: self.window, every: whole == 0 })
    }

    /// Pages that a budget holds beside those of windowed layers.
    fn held(&self, budget: u64, windows: Option<Windows>) -> usize {
        let [whole, windowed] = self.bytes;
        let (each, beside) = windows.map_or((whole + windowed, 0), |w| (whole, w.pages as u64 * windowed));
        // Where nothing lies in them, they are only counted.
        budget.saturating_sub(beside).checked_div(each).and_then(|n| n.try_into().ok()).unwrap_or(usize::MAX)
    }
}

/// A KV state that fits the memory.
#[derive(Debug)]
pub(super) struct Fit {
    pub(super) cache: Cache,
    pub(super) context: usize,
    pub(super) warning: Option<String>,
}

/// Pages for as many sequences as there may be, each as long as may be, or for what the memory holds; never less than one
/// sequence of the context.
pub(super) fn fit(room: &Room, positions: usize, page: PageBytes, free: u64) -> Result<Fit, String> {
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
    let windows = page.windows(room, context, budget, most);
    let held = page.held(budget, windows);
    let (mut pages, mut table) = (most.min(held), context.div_ceil(Cache::PAGE));
    let mut warning = None;
    if pages < table {
        let (tokens, budget) = (held.saturating_mul(Cache::PAGE), bytes(budget));
        let (each, of) =
            (page.bytes.iter().sum::<u64>() / Cache::PAGE as u64, stored(page.code, room.storage));
        let short = format!(
            "{budget} of keys and values in {of}, {each} bytes a token, hold {tokens} tokens, one sequence of the context has {context}"
        );
        let narrower = match (page.code, room.storage) {
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
    Ok(Fit { cache: Cache { page: Cache::PAGE, pages, table, windows }, context, warning })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_BYTES: PageBytes = PageBytes { bytes: [1 << 10, 0], window: usize::MAX, code: None };

    fn room(sequences: usize, context: Option<usize>, kv: Option<KvMemory>) -> Room {
        Room { sequences, context, kv, ..Room::of_one(DType::F32, None) }
    }

    #[test]
    fn keys_and_values_take_what_is_of_use_and_no_more_than_there_is() {
        let fits = |room: &Room, free| {
            let f = fit(room, 100, PAGE_BYTES, free).unwrap();
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
    fn windowed_layers_have_pages_of_their_own_where_they_need_fewer() {
        // A sequence of 1,600 tokens is 100 pages; of windowed layers it needs (64 + 32) / 16 + 2 = 8.
        let room = |prefix_cache| Room { tokens: Some(32), prefix_cache, ..room(4, None, None) };
        let fits = |bytes, window, free: u64, prefix_cache| {
            let f =
                fit(&room(prefix_cache), 1600, PageBytes { bytes, window, code: None }, free << 10).unwrap();
            let windows = f.cache.windows.map(|w| (w.pages, w.every));
            (f.cache.pages, windows, f.context)
        };
        assert_eq!(fits([1 << 10, 1 << 10], 64, 1 << 20, false), (400, Some((32, false)), 1600));
        assert_eq!(fits([1 << 10, 1 << 10], 64, 1 << 20, true), (400, Some((64, false)), 1600));
        assert_eq!(fits([0, 1 << 10], 64, 1 << 20, true), (400, Some((64, true)), 1600));
        // A window as long as the context, or longer: pages that all layers have.
        assert_eq!(fits([1 << 10, 1 << 10], 1600, 1 << 20, true), (400, None, 1600));
        // 300 pages of both kinds are half of what is free.
        assert_eq!(fits([1 << 10, 1 << 10], 64, 600, true), (236, Some((64, false)), 1600));
        assert_eq!(fits([1 << 10, 1 << 10], 64, 160, false), (48, Some((32, false)), 768));
        assert_eq!(fits([0, 1 << 10], 64, 20, true), (400, Some((10, true)), 1600));
        assert_eq!(fits([0, 1 << 10], 64, 12, true), (6, None, 96));
    }

    #[test]
    fn too_little_room_is_told_with_what_would_do() {
        let told = |room: &Room, free| fit(room, 100, PAGE_BYTES, free).unwrap_err();
        let few = room(4, None, Some(KvMemory::Bytes(4 << 10)));
        let narrow = fit(&few, 100, PageBytes { code: Some(Code::Int8), ..PAGE_BYTES }, 1 << 30).unwrap_err();
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
