//! Registers of a warp: 32 lanes side by side, so that one instruction is one loop over lanes.

use crate::kernel::{PredRef, Slot};
use std::sync::Arc;

/// A 32-bit register of all lanes.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
pub(crate) struct Lanes(pub [u32; 32]);

pub(crate) type V32 = [u32; 32];
pub(crate) type V64 = [u64; 32];

/// Registers of one warp. A 64-bit register is two slots that hold 32 words of 64 bits.
pub(crate) struct Regs {
    file: Vec<Lanes>,
    pub preds: Vec<u32>,
    /// The carry.
    pub carry: u32,
    /// Slots of vector operands, the kernel's.
    pub lists: Arc<[Slot]>,
}

impl Regs {
    pub fn new(slots: usize, preds: usize, lists: Arc<[Slot]>) -> Regs {
        let mut p = vec![0; preds];
        p[0] = !0;
        Regs { file: vec![Lanes([0xDEAD_BEEF; 32]); slots], preds: p, carry: 0, lists }
    }

    #[inline(always)]
    pub fn v32(&self, s: Slot) -> &V32 {
        &self.file[s as usize].0
    }

    #[inline(always)]
    pub fn v64(&self, s: Slot) -> &V64 {
        let two = &self.file[s as usize..s as usize + 2];
        // SAFETY: two slots are 256 bytes, aligned to 128, and any bits are 64-bit words.
        unsafe { &*two.as_ptr().cast::<V64>() }
    }

    #[inline(always)]
    pub fn set32(&mut self, s: Slot) -> &mut V32 {
        &mut self.file[s as usize].0
    }

    #[inline(always)]
    pub fn set64(&mut self, s: Slot) -> &mut V64 {
        let two = &mut self.file[s as usize..s as usize + 2];
        // SAFETY: as in `v64`, borrowed exclusively.
        unsafe { &mut *two.as_mut_ptr().cast::<V64>() }
    }

    /// Writes the lanes of a mask.
    #[inline(always)]
    pub fn put32(&mut self, s: Slot, v: &V32, m: u32) {
        let d = self.set32(s);
        if m == !0 {
            *d = *v;
        } else {
            for l in 0..32 {
                let k = 0u32.wrapping_sub(m >> l & 1);
                d[l] = v[l] & k | d[l] & !k;
            }
        }
    }

    #[inline(always)]
    pub fn put64(&mut self, s: Slot, v: &V64, m: u32) {
        let d = self.set64(s);
        if m == !0 {
            *d = *v;
        } else {
            for l in 0..32 {
                let k = 0u64.wrapping_sub(u64::from(m >> l & 1));
                d[l] = v[l] & k | d[l] & !k;
            }
        }
    }

    #[inline(always)]
    pub fn pred(&self, p: PredRef) -> u32 {
        let v = self.preds[(p >> 1) as usize];
        if p & 1 == 1 { !v } else { v }
    }

    #[inline(always)]
    pub fn put_pred(&mut self, p: u32, v: u32, m: u32) {
        let d = &mut self.preds[p as usize];
        *d = *d & !m | v & m;
    }
}
