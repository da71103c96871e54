//! Q4NX tiles, the 4-bit form in which weights for this NPU are commonly kept: 32 outputs × 256 inputs in 5120 bytes, with a
//! scale and a zero for every 32 inputs of every output. The values are those of ggml's Q4_1 with scale and minimum as bf16.
//!
//! In a tile: scales at 0 (bf16, `[group of 32 inputs][output]`), zeros at 512 likewise, codes from 1024. The code of output
//! `r` and input `c` is a nibble of byte `1024 + (r/16)·2048 + c·8 + (r%16)/2`, the low one for even `r`.
//! `w = code · scale + zero`.

use half::bf16;

/// Outputs of a tile.
pub const TILE_N: usize = 32;
/// Inputs of a tile.
pub const TILE_K: usize = 256;
/// Bytes of a tile.
pub const TILE_BYTES: usize = 5120;
/// Inputs that share a scale and a zero.
pub const GROUP: usize = 32;
const ZEROS: usize = 512;
const CODES: usize = 1024;

/// One tile's numbers, `[output][...]`.
#[derive(Clone, PartialEq, Debug)]
pub struct Tile {
    /// `[output][group]`.
    pub scales: [[bf16; TILE_K / GROUP]; TILE_N],
    /// `[output][group]`.
    pub zeros: [[bf16; TILE_K / GROUP]; TILE_N],
    /// `[output][input]`, 0 to 15.
    pub codes: Vec<[u8; TILE_K]>,
}

impl Tile {
    /// A tile of zeros.
    pub fn zero() -> Tile {
        let none = [[bf16::ZERO; TILE_K / GROUP]; TILE_N];
        Tile { scales: none, zeros: none, codes: vec![[0; TILE_K]; TILE_N] }
    }

    /// What output `r` multiplies input `c` with.
    pub fn value(&self, r: usize, c: usize) -> f64 {
        let (scale, zero) = (self.scales[r][c / GROUP], self.zeros[r][c / GROUP]);
        f64::from(self.codes[r][c]) * scale.to_f64() + zero.to_f64()
    }

    /// Its bytes. Codes above 15 lose their high bits.
    pub fn pack(&self) -> Vec<u8> {
        let mut out = vec![0u8; TILE_BYTES];
        for r in 0..TILE_N {
            for g in 0..TILE_K / GROUP {
                let at = 2 * (g * TILE_N + r);
                out[at..at + 2].copy_from_slice(&self.scales[r][g].to_le_bytes());
                out[ZEROS + at..][..2].copy_from_slice(&self.zeros[r][g].to_le_bytes());
            }
            for c in 0..TILE_K {
                out[code_byte(r, c)] |= (self.codes[r][c] & 15) << (r % 2 * 4);
            }
        }
        out
    }

    /// The numbers in a tile's bytes, `None` when there are not exactly as many.
    pub fn unpack(bytes: &[u8]) -> Option<Tile> {
        if bytes.len() != TILE_BYTES {
            return None;
        }
        let mut tile = Tile::zero();
        let half = |at: usize| bf16::from_le_bytes([bytes[at], bytes[at + 1]]);
        for r in 0..TILE_N {
            for g in 0..TILE_K / GROUP {
                let at = 2 * (g * TILE_N + r);
                (tile.scales[r][g], tile.zeros[r][g]) = (half(at), half(ZEROS + at));
            }
            for c in 0..TILE_K {
                tile.codes[r][c] = bytes[code_byte(r, c)] >> (r % 2 * 4) & 15;
            }
        }
        Some(tile)
    }
}

fn code_byte(r: usize, c: usize) -> usize {
    CODES + r / 16 * 2048 + c * 8 + r % 16 / 2
}

/// Rounds one output's 32 inputs as Q4_1 does: zero the smallest, scale a fifteenth of the range, both then rounded to bf16
/// (to nearest even), codes nearest under the rounded numbers.
pub fn group(x: &[f32; GROUP]) -> (bf16, bf16, [u8; GROUP]) {
    let min = x.iter().copied().fold(f32::INFINITY, f32::min);
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (scale, zero) = (bf16::from_f32((max - min) / 15.0), bf16::from_f32(min));
    let inverse = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
    let codes = x.map(|v| ((v - zero.to_f32()) * inverse).round().clamp(0.0, 15.0) as u8);
    (scale, zero, codes)
}

/// A matrix `[n][k]` of values as tiles: tiles of one band of 32 outputs follow one another down K, then the next band. (The
/// form says what a tile is; the order of tiles is this project's.)
///
/// # Panics
/// When `n` is no multiple of 32 or `k` none of 256, or `values` are not `n * k`.
pub fn pack(values: &[f32], n: usize, k: usize) -> Vec<u8> {
    assert!(n.is_multiple_of(TILE_N) && k.is_multiple_of(TILE_K) && values.len() == n * k, "tiles in {n} x {k}");
    let mut out = Vec::with_capacity(n / TILE_N * (k / TILE_K) * TILE_BYTES);
    for band in 0..n / TILE_N {
        for column in 0..k / TILE_K {
            let mut tile = Tile::zero();
            for r in 0..TILE_N {
                let row = &values[(band * TILE_N + r) * k + column * TILE_K..][..TILE_K];
                for (g, x) in row.as_chunks::<GROUP>().0.iter().enumerate() {
                    let (scale, zero, codes) = group(x);
                    (tile.scales[r][g], tile.zeros[r][g]) = (scale, zero);
                    tile.codes[r][g * GROUP..][..GROUP].copy_from_slice(&codes);
                }
            }
            out.extend(tile.pack());
        }
    }
    out
}

/// The values that packed tiles stand for, `[n][k]`; `None` when there are not exactly as many.
pub fn values(bytes: &[u8], n: usize, k: usize) -> Option<Vec<f64>> {
    let columns = k / TILE_K;
    if !n.is_multiple_of(TILE_N) || !k.is_multiple_of(TILE_K) || bytes.len() != n / TILE_N * columns * TILE_BYTES {
        return None;
    }
    let mut out = vec![0f64; n * k];
    for (t, bytes) in bytes.chunks_exact(TILE_BYTES).enumerate() {
        let tile = Tile::unpack(bytes)?;
        let (band, column) = (t / columns, t % columns);
        for r in 0..TILE_N {
            for c in 0..TILE_K {
                out[(band * TILE_N + r) * k + column * TILE_K + c] = tile.value(r, c);
            }
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_by_hand() {
        let mut tile = Tile::zero();
        tile.scales[3][2] = bf16::from_f32(1.0);
        tile.zeros[31][7] = bf16::from_f32(-2.0);
        tile.codes[17][255] = 9;
        tile.codes[4][1] = 5;
        tile.codes[5][1] = 11;
        let bytes = tile.pack();
        // 1.0 is 0x3f80, -2.0 is 0xc000.
        assert_eq!(bytes[2 * (2 * 32 + 3)..][..2], [0x80, 0x3f]);
        assert_eq!(bytes[512 + 2 * (7 * 32 + 31)..][..2], [0x00, 0xc0]);
        assert_eq!(bytes[1024 + 2048 + 255 * 8], 9 << 4);
        assert_eq!(bytes[1024 + 8 + 2], 5 | 11 << 4);
        assert_eq!(bytes.iter().filter(|b| **b != 0).count(), 2 + 1 + 1 + 1);
    }

    #[test]
    fn bytes_are_numbers_and_back() {
        let mut seed = 1u32;
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 24) as u8
        };
        let bytes: Vec<u8> = (0..TILE_BYTES).map(|_| next()).collect();
        let tile = Tile::unpack(&bytes).unwrap();
        assert_eq!(tile.pack(), bytes, "every byte means something");
        assert!(Tile::unpack(&bytes[1..]).is_none());
    }

    #[test]
    fn a_group_by_hand() {
        // -3 .. 12 in steps of one: scale 1, zero -3, and every value is a code.
        let x: [f32; 32] = std::array::from_fn(|i| (i % 16) as f32 - 3.0);
        let (scale, zero, codes) = group(&x);
        assert_eq!((scale.to_f32(), zero.to_f32()), (1.0, -3.0));
        assert_eq!(codes, std::array::from_fn(|i| (i % 16) as u8));
        let (scale, zero, codes) = group(&[0.5; 32]);
        assert_eq!((scale.to_f32(), zero.to_f32(), codes), (0.0, 0.5, [0; 32]));
    }

    #[test]
    fn a_matrix_comes_back_within_half_a_step() {
        let (n, k) = (64, 512);
        let x: Vec<f32> = (0..n * k).map(|i| ((i * 7919) % 1000) as f32 / 500.0 - 1.0).collect();
        let y = values(&pack(&x, n, k), n, k).unwrap();
        for (i, (x, y)) in x.iter().zip(&y).enumerate() {
            // Half a step of at most 2/15, and bf16's rounding of zero and scale (2^-9 each, the scale 15 times).
            assert!((f64::from(*x) - y).abs() <= 1.0 / 15.0 + 2.0 * 2f64.powi(-8), "{i}: {x} {y}");
        }
    }
}
