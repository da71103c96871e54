//! bfp16ebs8, the array's block floating point: 8 values along K in 9 bytes, an exponent and eight int8 mantissas. A value is
//! `m · 2^(E - 133)`.
//!
//! Packing here rounds to nearest even. The array's own conversion rounds *down* unless it is told otherwise, so a kernel's
//! catalogue entry has to say which of the two its inputs went through.

/// Values of a block.
pub const BLOCK: usize = 8;
/// Bytes of a block.
pub const BLOCK_BYTES: usize = 9;
const BIAS: i32 = 133;

/// How mantissas are rounded.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Round {
    /// To nearest, halves to even.
    NearestEven,
    /// Towards minus infinity.
    Floor,
}

/// One block. Values must be finite; the largest magnitude decides the exponent, so that its mantissa is
/// 64 to 127 wherever the exponent reaches that far down.
pub fn block(x: &[f32; BLOCK], round: Round) -> [u8; BLOCK_BYTES] {
    let amax = x.iter().fold(0f32, |m, v| m.max(v.abs()));
    if amax == 0.0 {
        return [0; BLOCK_BYTES];
    }
    // The binary exponent e of amax, 2^e <= amax < 2^(e+1), gives mantissas below 128 as x / 2^(e - 6). Rounding may
    // reach 128, which no int8 is: then one exponent more.
    // Below the smallest exponent mantissas only get smaller.
    let mut e = exponent(amax).max(6 - BIAS);
    loop {
        let stored = e - 6 + BIAS;
        if stored > 255 {
            // Beyond the format: the largest there is.
            return std::array::from_fn(|i| match i {
                0 => 255,
                i => (if x[i - 1] < 0.0 { -127i8 } else { 127 }).cast_unsigned(),
            });
        }
        let scaled = x.map(|v| {
            let m = f64::from(v) * 2f64.powi(6 - e);
            match round {
                Round::NearestEven => m.round_ties_even(),
                Round::Floor => m.floor(),
            }
        });
        if scaled.iter().all(|m| (-128.0..=127.0).contains(m)) {
            return std::array::from_fn(|i| match i {
                0 => stored as u8,
                i => (scaled[i - 1] as i8).cast_unsigned(),
            });
        }
        e += 1;
    }
}

/// The e of 2^e <= x < 2^(e+1), x finite and above 0.
fn exponent(x: f32) -> i32 {
    let (bits, shift) = if x.is_normal() { (x.to_bits(), 0) } else { ((x * 16_777_216.0).to_bits(), 24) };
    (bits >> 23 & 255) as i32 - 127 - shift
}

/// The values of a block.
pub fn block_values(bytes: &[u8; BLOCK_BYTES]) -> [f64; BLOCK] {
    let scale = 2f64.powi(i32::from(bytes[0]) - BIAS);
    std::array::from_fn(|i| f64::from(bytes[i + 1].cast_signed()) * scale)
}

/// Rows of `k` values, each in blocks along K.
///
/// # Panics
/// When `k` is no multiple of 8 or `values` are no whole rows.
pub fn pack(values: &[f32], k: usize, round: Round) -> Vec<u8> {
    assert!(k > 0 && k.is_multiple_of(BLOCK) && values.len().is_multiple_of(k), "blocks of 8 in rows of {k}");
    values.as_chunks::<BLOCK>().0.iter().flat_map(|x| block(x, round)).collect()
}

/// The values of packed rows; `None` when there are no whole blocks.
pub fn values(bytes: &[u8]) -> Option<Vec<f64>> {
    let (blocks, rest) = bytes.as_chunks::<BLOCK_BYTES>();
    rest.is_empty().then(|| blocks.iter().flat_map(block_values).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        // amax 1.0 = 64 · 2^-6: the exponent stored is -6 + 133.
        let x = [1.0, -0.5, 0.25, 1.0 / 64.0, 0.5 / 64.0, 1.5 / 64.0, -0.5 / 64.0, -1.5 / 64.0];
        let near = block(&x, Round::NearestEven);
        assert_eq!(near.map(|b| b.cast_signed())[1..], [64, -32, 16, 1, 0, 2, 0, -2], "halves to even");
        assert_eq!(near[0], 127);
        let floor = block(&x, Round::Floor);
        assert_eq!(floor.map(|b| b.cast_signed())[1..], [64, -32, 16, 1, 0, 1, -1, -2], "down");
        assert_eq!(block(&[0.0; 8], Round::Floor), [0; 9]);
        // 127.6 would round to 128: one exponent more, in which it is 64.
        let mut x = [0.0; 8];
        x[7] = 127.6;
        assert_eq!(block(&x, Round::NearestEven)[8], 64);
        assert_eq!(block_values(&block(&x, Round::NearestEven))[7], 128.0);
        x[7] = f32::MAX;
        assert_eq!(block(&x, Round::NearestEven)[0], 255);
        x[7] = f32::MIN_POSITIVE / 8.0;
        assert_eq!(block_values(&block(&x, Round::NearestEven))[7], f64::from(x[7]));
    }

    #[test]
    fn what_is_representable_comes_back() {
        for e in 0..=255u8 {
            let m: [i8; 8] = [64, -64, 1, 0, -1, 127, 33, -127];
            let mut bytes = [e; 9];
            bytes[1..].copy_from_slice(&m.map(i8::cast_unsigned));
            let values = block_values(&bytes);
            let x = values.map(|v| v as f32);
            // Neither beyond f32 nor below its smallest steps.
            if x.iter().zip(&values).all(|(x, v)| f64::from(*x) == *v) {
                let again = block(&x, Round::NearestEven);
                assert_eq!(block_values(&again), values, "exponent {e}");
            }
        }
    }
}
