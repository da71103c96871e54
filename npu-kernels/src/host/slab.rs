//! A large matrix: zeros, on a page of its own and in huge pages where the system gives them. It knows nothing of what
//! stands in it.
//!
//! Both matter to products, which write a matrix column by column: rows that start on a cache line are stored in whole lines, and
//! hundreds of rows in ordinary pages are more than a processor keeps translations for.

use memmap2::MmapMut;
use std::ops::{Deref, DerefMut};

/// Below this, in bytes, a huge page would be mostly empty.
const LEAST: usize = 2 << 20;

/// A fixed number of f32.
pub struct Slab(Kind);

enum Kind {
    Pages(MmapMut),
    Plain(Vec<f32>),
}

impl Slab {
    /// `len` zeros.
    pub fn new(len: usize) -> Slab {
        let bytes = len.saturating_mul(4);
        if bytes >= LEAST
            && let Ok(pages) = MmapMut::map_anon(bytes)
        {
            // A wish: a system without huge pages says no, and all is as before.
            #[cfg(target_os = "linux")]
            let _ = pages.advise(memmap2::Advice::HugePage);
            return Slab(Kind::Pages(pages));
        }
        Slab(Kind::Plain(vec![0.0; len]))
    }
}

impl Deref for Slab {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        match &self.0 {
            Kind::Pages(pages) => bytemuck::cast_slice(pages),
            Kind::Plain(values) => values,
        }
    }
}

impl DerefMut for Slab {
    fn deref_mut(&mut self) -> &mut [f32] {
        match &mut self.0 {
            Kind::Pages(pages) => bytemuck::cast_slice_mut(pages),
            Kind::Plain(values) => values,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_ones_are_zeros_that_can_be_written() {
        for len in [0, 1, 1000, LEAST / 4 - 1, LEAST / 4, 3 * LEAST / 4 + 5] {
            let mut slab = Slab::new(len);
            assert_eq!(slab.len(), len);
            assert!(slab.iter().all(|v| *v == 0.0));
            slab.fill(2.5);
            assert!(slab.iter().all(|v| *v == 2.5));
            assert!(len < LEAST / 4 || (slab.as_ptr() as usize).is_multiple_of(4096));
        }
    }
}
