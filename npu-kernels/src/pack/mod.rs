//! How operands lie in a device's memory. Each layout is a pure map between values and bytes: a bijection where values are
//! integers, a rounding with a stated rule where they are not.
//!
//! | layout | of | is |
//! |---|---|---|
//! | row-major | A, B, C | `[rows][columns]`, B as `[K][N]` |
//! | [`blocked`] | int8 B | tiles of 64 × 128, each of 8 × 16 blocks of 8 × 8 |
//! | [`q4nx`] | 4-bit B | tiles of 32 outputs × 256 inputs with scales and zeros of their own |
//! | [`bfp16`] | A or B | 8 values along K share an exponent: 9 bytes |

pub mod bfp16;
pub mod blocked;
pub mod q4nx;

/// `[n][k]` codes (one output after the other) as `[k_pad][n_pad]` bytes, padding zero: row-major B.
///
/// # Panics
/// When `out` is not exactly `k_pad * n_pad` long, or smaller than the matrix.
pub fn row_major_b(codes: &[i8], n: usize, k: usize, k_pad: usize, n_pad: usize, out: &mut [u8]) {
    assert!(codes.len() == n * k && k <= k_pad && n <= n_pad && out.len() == k_pad * n_pad, "B of {k} x {n}");
    out.fill(0);
    // Squares, so that neither side walks memory in steps of a whole row for long.
    const S: usize = 64;
    for n0 in (0..n).step_by(S) {
        for k0 in (0..k).step_by(S) {
            for j in n0..(n0 + S).min(n) {
                for i in k0..(k0 + S).min(k) {
                    out[i * n_pad + j] = codes[j * k + i].cast_unsigned();
                }
            }
        }
    }
}

/// The inverse of [`row_major_b`].
///
/// # Panics
/// As there.
pub fn unpack_row_major_b(bytes: &[u8], n: usize, k: usize, k_pad: usize, n_pad: usize) -> Vec<i8> {
    assert!(k <= k_pad && n <= n_pad && bytes.len() == k_pad * n_pad, "B of {k} x {n}");
    (0..n).flat_map(|j| (0..k).map(move |i| bytes[i * n_pad + j].cast_signed())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_major_by_hand() {
        // Two outputs of three inputs: (1 2 3) and (4 5 6) become columns.
        let mut out = [9u8; 4 * 4];
        row_major_b(&[1, 2, 3, 4, 5, -6], 2, 3, 4, 4, &mut out);
        assert_eq!(out, [1, 4, 0, 0, 2, 5, 0, 0, 3, 250, 0, 0, 0, 0, 0, 0]);
        assert_eq!(unpack_row_major_b(&out, 2, 3, 4, 4), [1, 2, 3, 4, 5, -6]);
    }
}
