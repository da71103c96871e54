//! A matrix that several threads write at once, each its own columns.

use super::{PANEL_COLS, TILE_ROWS, TileOut};
use std::marker::PhantomData;

/// A row-major `m` × `n` matrix, written tile by tile. Two tiles that are written at the same time must not overlap;
/// [`super::gemm`] gives every panel of columns to exactly one thread.
pub struct Columns<'a> {
    base: *mut f32,
    m: usize,
    n: usize,
    _matrix: PhantomData<&'a mut [f32]>,
}

// SAFETY: the pointer comes from an exclusive borrow that lives as long as `Columns`; sharing it among threads is
// sound because `store` is unsafe and its callers write disjoint elements.
unsafe impl Send for Columns<'_> {}
// SAFETY: as above.
unsafe impl Sync for Columns<'_> {}

impl<'a> Columns<'a> {
    /// `matrix` has exactly `m * n` elements.
    pub fn new(matrix: &'a mut [f32], m: usize, n: usize) -> Self {
        assert_eq!(Some(matrix.len()), m.checked_mul(n), "a matrix of {m} x {n}");
        Columns { base: matrix.as_mut_ptr(), m, n, _matrix: PhantomData }
    }

    /// Columns.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Writes the part of `tile` that lies inside the matrix, its corner at (`row`, `col`).
    ///
    /// # Safety
    /// No other thread may write or read these elements at the same time.
    #[inline(always)]
    pub unsafe fn store(&self, row: usize, col: usize, tile: &TileOut) {
        let cols = self.n.saturating_sub(col).min(PANEL_COLS);
        if cols == PANEL_COLS && row + TILE_ROWS <= self.m {
            for (i, line) in tile.iter().enumerate() {
                // SAFETY: row + i < m and col + 16 <= n: inside the m * n elements; the caller keeps others away.
                unsafe { self.base.add((row + i) * self.n + col).cast::<[f32; PANEL_COLS]>().write_unaligned(*line) };
            }
            return;
        }
        for (i, line) in tile.iter().enumerate().take(self.m.saturating_sub(row).min(TILE_ROWS)) {
            // SAFETY: row + i < m and col + cols <= n, so the target lies inside the m * n elements; the caller
            // keeps other threads away from it.
            unsafe {
                std::ptr::copy_nonoverlapping(line.as_ptr(), self.base.add((row + i) * self.n + col), cols);
            }
        }
    }

    /// The part of row `row` that starts at column `col`, `len` long.
    ///
    /// # Safety
    /// No other thread may write or read these elements while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, row: usize, col: usize, len: usize) -> &mut [f32] {
        assert!(row < self.m && col + len <= self.n, "row {row}, columns {col}+{len} of {} x {}", self.m, self.n);
        // SAFETY: inside the matrix by the check above; the caller keeps other threads away from it.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(row * self.n + col), len) }
    }
}
