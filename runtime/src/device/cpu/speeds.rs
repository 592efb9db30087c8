//! How fast a processor is at a moment, which changes where a hypervisor moves the cores of a machine, or gives them to others, too. In: a
//! processor. Out: the speeds of memory, of exchange between cores and of small products, as often as one asks.

use super::Isa;
use super::exchange::exchange;
use super::peaks::{UNIT, best, in_turn, read};
use super::product::product;
use crate::Device;
use crate::device::Block;
use std::hint::black_box;
use std::ops::Range;
use std::sync::Arc;

/// Part by which speeds may differ where cores stay.
const APART: f64 = 0.12;

/// Speeds of all threads together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speeds {
    /// Bytes per second read from memory.
    pub read: f64,
    /// Bytes per second of what other cores have just written, as [`exchange`] measures them.
    pub exchange: Option<f64>,
    /// Operations per second of small products, as [`product`] measures them.
    pub product: Option<f64>,
}

impl Speeds {
    /// What runs between several looks meet, while cores stay: of reading the fastest, which other tenants only slow for moments; of exchange the
    /// one in the middle, for it is fastest where reading is slow, on cores that share a link to memory; of products all that they did, for other
    /// tenants slow them for a part of all seconds. `None` of none.
    pub fn over(looks: &[Speeds]) -> Option<Speeds> {
        let products: Vec<f64> = looks.iter().filter_map(|s| s.product).collect();
        let seconds: f64 = products.iter().map(|rate| 1.0 / rate).sum();
        Some(Speeds {
            read: looks.iter().map(|s| s.read).max_by(f64::total_cmp)?,
            exchange: median(looks.iter().filter_map(|s| s.exchange)),
            product: Some(products.len() as f64 / seconds).filter(|_| !products.is_empty()),
        })
    }

    /// Whether memory and products are about as fast: the cores have not been moved.
    pub fn alike(self, other: Speeds) -> bool {
        let close = |one: f64, other: f64| (other / one - 1.0).abs() <= APART;
        let products = self.product.zip(other.product).is_none_or(|(one, other)| close(one, other));
        close(self.read, other.read) && products
    }

    /// Those of a time of which one half had these and the other half the others: what takes seconds are bytes and operations.
    pub fn between(self, other: Speeds) -> Speeds {
        let both = |a: f64, b: f64| 2.0 / (1.0 / a + 1.0 / b);
        let known = |a: Option<f64>, b: Option<f64>| a.zip(b).map(|(a, b)| both(a, b));
        Speeds {
            read: both(self.read, other.read),
            exchange: known(self.exchange, other.exchange),
            product: known(self.product, other.product),
        }
    }
}

/// The number in the middle, the greater of two. `None` of none.
pub fn median(of: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = of.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

/// Measures speeds in memory of its own.
pub struct Speedometer {
    device: Arc<dyn Device>,
    isa: Isa,
    block: Block,
}

impl Speedometer {
    /// Bytes that are read, more than a last-level cache holds.
    pub const BYTES: usize = 128 << 20;

    /// Takes the memory. `None` where there is not as much, or this process does not see it.
    pub fn new(device: &Arc<dyn Device>) -> Option<Speedometer> {
        let isa = Isa::named(&device.backend().target().isa)?;
        let block = device.alloc(&[Speedometer::BYTES]).ok()?.pop()?;
        device.fill(block.at(), Speedometer::BYTES, &mut |bytes| bytes.fill(1)).ok()?;
        device.host(block.at())?;
        Some(Speedometer { device: device.clone(), isa, block })
    }

    /// Those of now.
    pub fn now(&self) -> Speeds {
        Speeds { read: self.read(), exchange: exchange(&*self.device), product: product(&*self.device) }
    }

    /// Two cores that share a link to memory read as fast as one.
    fn read(&self) -> f64 {
        let Some(address) = self.device.host(self.block.at()) else { return 0.0 };
        // SAFETY: the block is that long, lives as long as `self`, and nobody writes it again.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast_const(), Speedometer::BYTES) };
        let units = in_turn(bytes.chunks(UNIT).collect(), self.device.threads());
        let work = |_, some: Range<usize>| units[some].iter().for_each(|u| read(self.isa, black_box(u)));
        best(2, Speedometer::BYTES as f64, || self.device.share(units.len(), &work)).rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_halves_of_a_time_add_up() {
        let of = |read, exchange| Speeds { read, exchange, product: None };
        let both = of(60e9, Some(20e9)).between(of(30e9, Some(60e9)));
        assert!(
            (both.read / 40e9 - 1.0).abs() < 1e-12 && (both.exchange.unwrap() / 30e9 - 1.0).abs() < 1e-12
        );
        assert_eq!((both.product, of(1.0, None).between(both).exchange), (None, None));
    }

    #[test]
    fn runs_meet_the_fastest_reading_and_all_products() {
        let of = |read, exchange, product| Speeds { read, exchange: Some(exchange), product: Some(product) };
        let looks = [of(3.0, 5.0, 2.0), of(4.0, 6.0, 1.0), of(2.0, 4.0, 2.0)];
        assert_eq!(Speeds::over(&looks), Some(of(4.0, 5.0, 1.5)));
        assert_eq!(Speeds::over(&[Speeds { product: None, ..looks[0] }]).unwrap().product, None);
        assert_eq!(Speeds::over(&[]), None);
        assert!(looks[0].alike(of(3.3, 9.0, 2.2)) && !looks[0].alike(of(3.0, 5.0, 2.3)));
        assert!(!looks[0].alike(of(2.6, 5.0, 2.0)) && looks[0].alike(Speeds { product: None, ..looks[0] }));
    }
}
