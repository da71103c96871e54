//! The rotation that llama.cpp applies to the rows of quantised caches before it stores them (since April 2026): every head, in
//! consecutive pieces of n values, times the orthonormal Walsh-Hadamard matrix. It spreads outliers over the piece, which
//! a block's one scale could not hold; being its own inverse and orthonormal it leaves every product of queries and keys as it was.

/// Turns consecutive pieces of `n` values in place; doing it twice gives the values back, but for rounding. `n` 0 does nothing.
///
/// Scaled first, then added and subtracted by rising distance, as llama.cpp's fast transform does it, so that rows come out the
/// same to the bit.
///
/// # Panics
/// When `n` is no power of two, or `rows` no whole number of pieces.
#[inline]
pub fn hadamard(rows: &mut [f32], n: usize) {
    if n == 0 {
        return;
    }
    assert!(n.is_power_of_two() && rows.len().is_multiple_of(n), "{} values in pieces of {n}", rows.len());
    let scale = 1.0 / (n as f32).sqrt();
    for piece in rows.chunks_exact_mut(n) {
        piece.iter_mut().for_each(|v| *v *= scale);
        let mut len = 1;
        while len < n {
            for pair in piece.chunks_exact_mut(2 * len) {
                let (low, high) = pair.split_at_mut(len);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            len *= 2;
        }
    }
}

/// The widths of rotation that llama.cpp gives a cache whose layers all have heads of this size: keys' and values'.
///
/// Keys take the largest power of two times 64 that divides the head, values always 64. What is not a multiple of 64 is not
/// rotated. Only quantised caches are rotated.
pub fn rotation_widths(head_k: u32, head_v: u32) -> (u32, u32) {
    let whole = |head: u32| head > 0 && head.is_multiple_of(64);
    let keys = if whole(head_k) { 1 << head_k.trailing_zeros() } else { 0 };
    (keys, if whole(head_v) { 64 } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_by_hand() {
        let mut x = [1.0, 2.0, 3.0, 6.0];
        hadamard(&mut x, 4);
        // Half of the sums with the signs of the Sylvester matrix.
        assert_eq!(x, [6.0, -2.0, -3.0, 1.0]);
        hadamard(&mut x, 4);
        assert_eq!(x, [1.0, 2.0, 3.0, 6.0]);
        hadamard(&mut x, 0);
        assert_eq!(x, [1.0, 2.0, 3.0, 6.0]);
    }

    #[test]
    fn pieces_are_turned_one_by_one() {
        let mut x: Vec<f32> = (0..128).map(|i| (i % 7) as f32).collect();
        let (mut a, mut b) = (x[..64].to_vec(), x[64..].to_vec());
        hadamard(&mut x, 64);
        hadamard(&mut a, 64);
        hadamard(&mut b, 64);
        assert_eq!(x, [a, b].concat());
    }

    /// From the state files of real servers.
    #[test]
    fn widths_by_head_size() {
        for (head, want) in
            [(64, (64, 64)), (128, (128, 64)), (192, (64, 64)), (256, (256, 64)), (80, (0, 0)), (0, (0, 0))]
        {
            assert_eq!(rotation_widths(head, head), want, "{head}");
        }
        assert_eq!(rotation_widths(192, 128), (64, 64));
        assert_eq!(rotation_widths(96, 64), (0, 64));
    }
}
