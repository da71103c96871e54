//! Pre-blocked B, the faster feed of int8 kernels: 8 KiB tiles of 64 inputs × 128 outputs, so that a tile is one run of
//! memory, and within it 8 × 8 blocks in the order in which the array's vector unit takes them.
//!
//! Byte `i0·1024 + i1·64 + i2·8 + i3` of tile (`ki`, `nt`) is `B[ki·64 + i0·8 + i2][nt·128 + i1·8 + i3]`. Tiles follow one
//! another down K first: tile (`ki`, `nt`) is number `nt · K/64 + ki`, as a column of the product needs them. A kernel that
//! walks them otherwise fails its check and is not used.

/// Inputs of a tile.
pub const TILE_K: usize = 64;
/// Outputs of a tile.
pub const TILE_N: usize = 128;
/// Bytes of a tile.
pub const TILE_BYTES: usize = TILE_K * TILE_N;

/// The place of `B[i][j]` in a packed matrix of `k_pad` inputs.
pub fn place(i: usize, j: usize, k_pad: usize) -> usize {
    let tile = j / TILE_N * (k_pad / TILE_K) + i / TILE_K;
    let (ti, tj) = (i % TILE_K, j % TILE_N);
    tile * TILE_BYTES + ti / 8 * 1024 + tj / 8 * 64 + ti % 8 * 8 + tj % 8
}

/// `[n][k]` codes as packed B, padding zero.
///
/// # Panics
/// When `k_pad` or `n_pad` are no multiples of the tile, or lengths do not match.
pub fn pack(codes: &[i8], n: usize, k: usize, k_pad: usize, n_pad: usize, out: &mut [u8]) {
    assert!(k_pad.is_multiple_of(TILE_K) && n_pad.is_multiple_of(TILE_N), "tiles of 64 x 128 in {k_pad} x {n_pad}");
    assert!(codes.len() == n * k && k <= k_pad && n <= n_pad && out.len() == k_pad * n_pad, "B of {k} x {n}");
    out.fill(0);
    for (j, row) in codes.chunks_exact(k).enumerate() {
        for (i, eight) in row.chunks(8).enumerate() {
            let at = place(i * 8, j, k_pad);
            for (i2, v) in eight.iter().enumerate() {
                out[at + i2 * 8] = v.cast_unsigned();
            }
        }
    }
}

/// The inverse of [`pack`].
///
/// # Panics
/// As there.
pub fn unpack(bytes: &[u8], n: usize, k: usize, k_pad: usize, n_pad: usize) -> Vec<i8> {
    assert!(k <= k_pad && n <= n_pad && bytes.len() == k_pad * n_pad, "B of {k} x {n}");
    (0..n).flat_map(|j| (0..k).map(move |i| bytes[place(i, j, k_pad)].cast_signed())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_by_hand() {
        let k = 128;
        assert_eq!(place(0, 0, k), 0);
        assert_eq!(place(0, 1, k), 1, "outputs within a block are neighbours");
        assert_eq!(place(1, 0, k), 8);
        assert_eq!(place(0, 8, k), 64, "the next block of outputs");
        assert_eq!(place(8, 0, k), 1024, "the next block of inputs");
        assert_eq!(place(13, 21, k), 1024 + 2 * 64 + 5 * 8 + 5);
        assert_eq!(place(64, 0, k), 8192, "the next tile down K");
        assert_eq!(place(0, 128, k), 2 * 8192, "the next column of tiles");
        assert_eq!(place(127, 255, k), 4 * 8192 - 1);
    }

    #[test]
    fn every_byte_once_and_back() {
        let (k_pad, n_pad) = (192, 256);
        let mut seen = vec![false; k_pad * n_pad];
        for i in 0..k_pad {
            for j in 0..n_pad {
                assert!(!std::mem::replace(&mut seen[place(i, j, k_pad)], true), "({i}, {j})");
            }
        }
        assert!(seen.iter().all(|s| *s));
        for (n, k) in [(256, 192), (200, 130), (1, 1), (129, 65)] {
            let codes: Vec<i8> = (0..n * k).map(|i| (i * 37 % 255) as i8).collect();
            let mut out = vec![1u8; k_pad * n_pad];
            pack(&codes, n, k, k_pad, n_pad, &mut out);
            assert_eq!(unpack(&out, n, k, k_pad, n_pad), codes, "{n} x {k}");
            let zeros = out.iter().filter(|b| **b == 0).count();
            assert_eq!(zeros, k_pad * n_pad - codes.iter().filter(|c| **c != 0).count(), "padding is zero");
        }
    }
}
