//! Inner loops for x86-64 with AVX-512 (F, BW, VL, DQ) and VNNI.

use super::acts::{CodeTile, FloatTile};
use super::panel::{CodeLine, CodePanel, FloatLine, FloatPanel};
use super::{Kernel, PANEL_COLS, TILE_ROWS, TileOut, attention, lanes};
use crate::weight::{WeightType, WeightView};
use std::arch::x86_64::*;

/// Proof that the processor has AVX-512 F, BW, VL, DQ, VNNI, FMA and F16C.
#[derive(Copy, Clone)]
pub struct Avx512(());

// SAFETY: `new` is the only constructor and checks every feature that the methods enable.
unsafe impl Kernel for Avx512 {
    fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Avx512(()))
    }

    fn decode_codes(self, w: &WeightView<'_>, first: usize, panel: &mut CodePanel) {
        let fast = matches!(
            w.ty(),
            WeightType::Q4_0
                | WeightType::Q4_1
                | WeightType::Q5_0
                | WeightType::Q5_1
                | WeightType::Q8_0
                | WeightType::Q4_K
                | WeightType::Q5_K
                | WeightType::Q6_K
        );
        if fast && first + PANEL_COLS <= w.n() {
            // SAFETY: `self` proves the instructions.
            unsafe { decode_panel(w, first, panel) }
        } else {
            lanes::decode_codes(w, first, panel);
        }
    }

    fn decode_floats(self, w: &WeightView<'_>, first: usize, panel: &mut FloatPanel) {
        lanes::decode_floats(w, first, panel);
    }

    fn mul_codes(self, tile: &CodeTile, form: usize, panel: &CodePanel, out: &mut TileOut) {
        let extra = &tile.extras[form];
        let n_sub = panel.k / panel.form.sub;
        assert_eq!(tile.k(), panel.k, "inputs of tile and panel");
        assert!(tile.words.len() >= panel.k / 4 * TILE_ROWS && panel.codes.len() >= panel.k / 4);
        assert!(tile.scales.len() >= panel.k / 32 * TILE_ROWS && panel.scales.len() >= n_sub);
        // SAFETY: `self` proves the instructions; the lengths checked here and below are all that the loops read.
        unsafe {
            if panel.form.has_min {
                assert!(extra.sums.len() >= n_sub * TILE_ROWS && panel.mins.len() >= n_sub);
                match panel.form.sub {
                    32 => mul_codes::<32, true>(tile, extra.sums.as_ptr().cast(), panel, out),
                    _ => mul_codes::<16, true>(tile, extra.sums.as_ptr().cast(), panel, out),
                }
            } else {
                assert!(extra.start.len() >= n_sub * TILE_ROWS);
                match panel.form.sub {
                    32 => mul_codes::<32, false>(tile, extra.start.as_ptr(), panel, out),
                    _ => mul_codes::<16, false>(tile, extra.start.as_ptr(), panel, out),
                }
            }
        }
    }

    fn mul_floats(self, tile: &FloatTile, panel: &FloatPanel, out: &mut TileOut) {
        assert_eq!(tile.k(), panel.k, "inputs of tile and panel");
        // SAFETY: `self` proves the instructions.
        unsafe { mul_floats(&tile.values, &panel.values, out) }
    }

    fn quantise_row(self, tile: &mut CodeTile, i: usize, row: &[f32]) {
        // SAFETY: `self` proves the instructions.
        unsafe { quantise_row(tile, i, row) }
    }

    fn attend(self, task: &attention::Task<'_>, scratch: &mut attention::Scratch, out: &mut [f32]) {
        // SAFETY: `self` proves the instructions.
        unsafe { attend(task, scratch, out) }
    }

    fn rows<F: FnOnce() -> R, R>(self, f: F) -> R {
        // SAFETY: `self` proves the instructions.
        unsafe { call(f) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")]
fn call<F: FnOnce() -> R, R>(f: F) -> R {
    f()
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")]
fn attend(task: &attention::Task<'_>, scratch: &mut attention::Scratch, out: &mut [f32]) {
    lanes::attend::<true>(Products(()), task, scratch, out);
}

/// The products of attention, made only inside a function that has the instructions on.
#[derive(Copy, Clone)]
struct Products(());

impl lanes::AttentionProducts for Products {
    #[inline(always)]
    fn scores(self, keys: &[FloatLine], q: &[f32], out: &mut TileOut) {
        // SAFETY: `Products` exists only inside `attend`, whose caller has proved the instructions.
        unsafe { mul_floats(q, keys, out) }
    }

    #[inline(always)]
    fn mix(self, values: &[FloatLine], lines: usize, weights: &[f32], acc: &mut [FloatLine]) {
        let keys = values.len() / lines;
        assert!(acc.len() >= TILE_ROWS * lines);
        assert!(keys <= attention::KEY_BLOCK && weights.len() >= TILE_ROWS * attention::KEY_BLOCK);
        // SAFETY: as above; the lengths are all that is read and written.
        unsafe {
            for l in (0..lines - lines % 2).step_by(2) {
                mix::<2>(&values[l..], keys, lines, weights, &mut acc[l..]);
            }
            if lines % 2 == 1 {
                mix::<1>(&values[lines - 1..], keys, lines, weights, &mut acc[lines - 1..]);
            }
        }
    }
}

/// `N` lines of channels for all twelve rows.
///
/// # Safety
/// `values` holds `keys` rows of `lines` lines less what was cut off in front, `acc` likewise twelve rows, `weights`
/// twelve rows of `KEY_BLOCK`, and `keys` is at most that.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn mix<const N: usize>(values: &[FloatLine], keys: usize, lines: usize, weights: &[f32], acc: &mut [FloatLine]) {
    let mut sum = [[_mm512_setzero_ps(); N]; TILE_ROWS];
    for (i, row) in sum.iter_mut().enumerate() {
        for (j, s) in row.iter_mut().enumerate() {
            // SAFETY: row i of acc, line j, by the promise above.
            *s = unsafe { _mm512_load_ps(acc.as_ptr().add(i * lines + j).cast()) };
        }
    }
    for key in 0..keys {
        let mut v = [_mm512_setzero_ps(); N];
        for (j, v) in v.iter_mut().enumerate() {
            // SAFETY: row `key` of values, line j.
            *v = unsafe { _mm512_load_ps(values.as_ptr().add(key * lines + j).cast()) };
        }
        for (i, row) in sum.iter_mut().enumerate() {
            // SAFETY: row i of weights, key below KEY_BLOCK.
            let p = _mm512_set1_ps(unsafe { *weights.as_ptr().add(i * attention::KEY_BLOCK + key) });
            for (s, v) in row.iter_mut().zip(v) {
                *s = _mm512_fmadd_ps(v, p, *s);
            }
        }
    }
    for (i, row) in sum.iter().enumerate() {
        for (j, s) in row.iter().enumerate() {
            // SAFETY: as for the loads.
            unsafe { _mm512_store_ps(acc.as_mut_ptr().add(i * lines + j).cast(), *s) };
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")]
fn mul_floats(a: &[f32], panel: &[FloatLine], out: &mut TileOut) {
    let mut sum = [_mm512_setzero_ps(); TILE_ROWS];
    for (a, w) in a.as_chunks::<TILE_ROWS>().0.iter().zip(panel) {
        // SAFETY: a line is sixteen aligned floats.
        let w = unsafe { _mm512_load_ps(w.0.as_ptr()) };
        for (s, a) in sum.iter_mut().zip(a) {
            *s = _mm512_fmadd_ps(w, _mm512_set1_ps(*a), *s);
        }
    }
    for (line, s) in out.iter_mut().zip(sum) {
        // SAFETY: a line is sixteen floats.
        unsafe { _mm512_storeu_ps(line.as_mut_ptr(), s) };
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")]
fn quantise_row(tile: &mut CodeTile, i: usize, row: &[f32]) {
    assert_eq!(row.len(), tile.k(), "a row of the matrix");
    if tile.block() == 32 {
        for (b, x) in row.as_chunks::<32>().0.iter().enumerate() {
            let amax = amax32(x);
            let exact = amax / 127.0;
            let inverse = if amax > 0.0 { 127.0 / amax } else { 0.0 };
            tile.set_block(i, b, &round32(x, inverse), half::f16::from_f32(exact).to_f32(), exact);
        }
    } else {
        for (s, x) in row.as_chunks::<256>().0.iter().enumerate() {
            let blocks = x.as_chunks::<32>().0;
            let amax = blocks.iter().map(|x| amax32(x)).fold(0f32, f32::max);
            let max = x.iter().copied().find(|v| v.abs() == amax).unwrap_or(0.0);
            let inverse = if amax > 0.0 { -127.0 / max } else { 0.0 };
            let scale = if amax > 0.0 { 1.0 / inverse } else { 0.0 };
            for (b, x) in blocks.iter().enumerate() {
                tile.set_block(i, s * 8 + b, &round32(x, inverse), scale, scale);
            }
        }
    }
}

/// The two halves of 32 values.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn halves(x: &[f32; 32]) -> [__m512; 2] {
    // SAFETY: 32 floats are there.
    unsafe { [_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16))] }
}

/// The largest magnitude of 32 values.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn amax32(x: &[f32; 32]) -> f32 {
    let [a, b] = halves(x);
    _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)))
}

/// `x * inverse`, rounded to nearest even.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn round32(x: &[f32; 32], inverse: f32) -> [i8; 32] {
    let by = _mm512_set1_ps(inverse);
    let mut out = [0i8; 32];
    for (v, o) in halves(x).into_iter().zip(out.as_chunks_mut::<16>().0) {
        let rounded = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v, by)));
        // SAFETY: room for sixteen bytes.
        unsafe { _mm_storeu_si128(o.as_mut_ptr().cast(), rounded) };
    }
    out
}

/// Tile times panel. Per sub-block the integer products of twelve rows and sixteen columns build up in twelve
/// registers, then join the float sums in twelve more.
///
/// # Safety
/// `panel.k` is a multiple of 32, the buffers of tile and panel are as long as their documentation says, and `side`
/// points to `[k / SUB][row]` i32 start values (`MIN` false) or f32 sums (`MIN` true).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn mul_codes<const SUB: usize, const MIN: bool>(
    tile: &CodeTile,
    side: *const i32,
    panel: &CodePanel,
    out: &mut TileOut,
) {
    let words = tile.words.as_ptr();
    let act_scales = tile.scales.as_ptr();
    let codes = panel.codes.as_ptr();
    let scales = panel.scales.as_ptr();
    let mins = panel.mins.as_ptr();
    let mut total = [_mm512_setzero_ps(); TILE_ROWS];
    for s in 0..panel.k / SUB {
        // SAFETY: s < k / SUB, so every offset stays inside the lengths promised above: words and codes hold SUB / 4
        // groups per sub-block, side, scales and mins one line each, act_scales one line per 32 values.
        unsafe {
            let side = side.add(s * TILE_ROWS);
            let mut dot = [_mm512_setzero_si512(); TILE_ROWS];
            if !MIN {
                for i in 0..TILE_ROWS {
                    dot[i] = _mm512_set1_epi32(*side.add(i));
                }
            }
            for q in 0..SUB / 4 {
                let w = _mm512_load_si512(codes.add(s * SUB / 4 + q).cast());
                let a = words.add((s * SUB / 4 + q) * TILE_ROWS);
                for i in 0..TILE_ROWS {
                    dot[i] = _mm512_dpbusd_epi32(dot[i], w, _mm512_set1_epi32(*a.add(i)));
                }
            }
            let scale = _mm512_load_ps(scales.add(s).cast());
            let act = act_scales.add(s * SUB / 32 * TILE_ROWS);
            for i in 0..TILE_ROWS {
                let both = _mm512_mul_ps(scale, _mm512_set1_ps(*act.add(i)));
                total[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[i]), both, total[i]);
            }
            if MIN {
                let min = _mm512_load_ps(mins.add(s).cast());
                for i in 0..TILE_ROWS {
                    total[i] = _mm512_fmadd_ps(min, _mm512_set1_ps(*side.cast::<f32>().add(i)), total[i]);
                }
            }
        }
    }
    for (line, t) in out.iter_mut().zip(total) {
        // SAFETY: a line is sixteen floats.
        unsafe { _mm512_storeu_ps(line.as_mut_ptr(), t) };
    }
}

/// Sixteen nibble pairs to 32 codes in the order of the row.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn nibbles(bytes: &[u8; 16]) -> __m256i {
    // SAFETY: sixteen bytes are there.
    let v = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
    let mask = _mm_set1_epi8(15);
    let low = _mm_and_si128(v, mask);
    let high = _mm_and_si128(_mm_srli_epi16::<4>(v), mask);
    _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn load32(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: 32 bytes are there.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// The codes of 32 values of one row; see `blocks::decode` for the formats.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn codes32(ty: WeightType, block: &[u8], j: usize) -> __m256i {
    fn at<const N: usize>(b: &[u8], from: usize) -> &[u8; N] {
        b[from..].first_chunk().expect("inside the block")
    }
    let low4 = _mm256_set1_epi8(15);
    let nibble_half = |bytes: &[u8; 32], high: bool| {
        let v = load32(bytes);
        _mm256_and_si256(if high { _mm256_srli_epi16::<4>(v) } else { v }, low4)
    };
    match ty {
        WeightType::Q4_0 => nibbles(at(block, 2)),
        WeightType::Q4_1 => nibbles(at(block, 4)),
        WeightType::Q5_0 | WeightType::Q5_1 => {
            let head = block.len() - 20;
            let fifth = _mm256_maskz_set1_epi8(u32::from_le_bytes(*at(block, head)), 16);
            _mm256_or_si256(nibbles(at(block, head + 4)), fifth)
        }
        WeightType::Q8_0 => _mm256_xor_si256(load32(at(block, 2)), _mm256_set1_epi8(-128)),
        WeightType::Q4_K => nibble_half(at(block, 16 + j / 2 * 32), j % 2 == 1),
        WeightType::Q5_K => {
            let low = nibble_half(at(block, 48 + j / 2 * 32), j % 2 == 1);
            let bit = _mm256_test_epi8_mask(load32(at(block, 16)), _mm256_set1_epi8((1u8 << j) as i8));
            _mm256_or_si256(low, _mm256_maskz_set1_epi8(bit, 16))
        }
        _ => {
            // Q6_K
            let (n, g) = (j / 4, j % 4);
            let low = nibble_half(at(block, n * 64 + g % 2 * 32), g >= 2);
            let h = load32(at(block, 128 + n * 32));
            let h = match g {
                0 => _mm256_slli_epi16::<4>(h),
                1 => _mm256_slli_epi16::<2>(h),
                2 => h,
                _ => _mm256_srli_epi16::<2>(h),
            };
            _mm256_or_si256(low, _mm256_and_si256(h, _mm256_set1_epi8(0x30)))
        }
    }
}

/// Sixteen f16 bit patterns to f32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn f16s(bits: &[u16; 16]) -> __m512 {
    // SAFETY: 32 bytes are there.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(bits.as_ptr().cast()) })
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn put(out: &mut FloatLine, v: __m512) {
    // SAFETY: a line is sixteen aligned floats.
    unsafe { _mm512_store_ps(out.0.as_mut_ptr(), v) };
}

/// Sixteen rows of the types with a vectorised unpacking, all of them present.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn decode_panel(w: &WeightView<'_>, first: usize, panel: &mut CodePanel) {
    let ty = w.ty();
    let (values, bytes) = ty.block();
    let per = values / 32;
    let rows: [&[u8]; PANEL_COLS] = std::array::from_fn(|i| w.row(first + i));
    let u16_at = |block: &[u8], at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
    for s in 0..w.k() / values {
        let blocks: [&[u8]; PANEL_COLS] = std::array::from_fn(|i| &rows[i][s * bytes..][..bytes]);
        let scale_at = if ty == WeightType::Q6_K { 208 } else { 0 };
        let d = f16s(&std::array::from_fn(|i| u16_at(blocks[i], scale_at)));
        // Scales and minima of the K types: 6- or 8-bit factors of d and dmin, gathered column by column.
        let mut sub_scales = [[0u8; PANEL_COLS]; 16];
        match ty {
            WeightType::Q4_K | WeightType::Q5_K => {
                for (i, block) in blocks.iter().enumerate() {
                    let word = |at: usize| u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
                    let (a, b, c) = (word(4), word(8), word(12));
                    let packed = [
                        a & 0x3f3f_3f3f,
                        (c & 0x0f0f_0f0f) | ((a >> 2) & 0x3030_3030),
                        b & 0x3f3f_3f3f,
                        ((c >> 4) & 0x0f0f_0f0f) | ((b >> 2) & 0x3030_3030),
                    ];
                    for (g, four) in packed.iter().enumerate() {
                        for (k, v) in four.to_le_bytes().into_iter().enumerate() {
                            sub_scales[g * 4 + k][i] = v;
                        }
                    }
                }
            }
            WeightType::Q6_K => {
                for (i, block) in blocks.iter().enumerate() {
                    for (k, v) in block[192..208].iter().enumerate() {
                        sub_scales[k][i] = *v;
                    }
                }
            }
            _ => {}
        }
        let factor = |k: usize| {
            // SAFETY: sixteen bytes are there.
            let v = unsafe { _mm_loadu_si128(sub_scales[k].as_ptr().cast()) };
            _mm512_cvtepi32_ps(if ty == WeightType::Q6_K { _mm512_cvtepi8_epi32(v) } else { _mm512_cvtepu8_epi32(v) })
        };
        for j in 0..per {
            let b = s * per + j;
            let codes: [__m256i; PANEL_COLS] = std::array::from_fn(|i| codes32(ty, blocks[i], j));
            transpose(&codes, panel.codes[b * 8..].first_chunk_mut().expect("eight lines for 32 codes"));
            match ty {
                WeightType::Q6_K => {
                    for h in 0..2 {
                        put(&mut panel.scales[2 * b + h], _mm512_mul_ps(d, factor(2 * j + h)));
                    }
                }
                WeightType::Q4_K | WeightType::Q5_K => {
                    let dmin = f16s(&std::array::from_fn(|i| u16_at(blocks[i], 2)));
                    let min = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(dmin, factor(8 + j)));
                    put(&mut panel.scales[b], _mm512_mul_ps(d, factor(j)));
                    put(&mut panel.mins[b], min);
                }
                _ => {
                    put(&mut panel.scales[b], d);
                    if panel.form.has_min {
                        let m = f16s(&std::array::from_fn(|i| u16_at(blocks[i], 2)));
                        put(&mut panel.mins[b], m);
                    }
                }
            }
        }
    }
}

/// Sixteen rows of eight 32-bit groups to eight lines of sixteen.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn transpose(rows: &[__m256i; PANEL_COLS], out: &mut [CodeLine; 8]) {
    // Rows i and i + 8 side by side, then 2 x 2 exchanges within 128-bit lanes, then of lanes.
    let z: [__m512i; 8] =
        std::array::from_fn(|i| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(rows[i]), rows[i + 8]));
    let mut a = [_mm512_setzero_si512(); 8];
    for i in 0..4 {
        a[2 * i] = _mm512_unpacklo_epi32(z[2 * i], z[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(z[2 * i], z[2 * i + 1]);
    }
    let mut b = [_mm512_setzero_si512(); 8];
    for o in [0, 4] {
        b[o] = _mm512_unpacklo_epi64(a[o], a[o + 2]);
        b[o + 1] = _mm512_unpackhi_epi64(a[o], a[o + 2]);
        b[o + 2] = _mm512_unpacklo_epi64(a[o + 1], a[o + 3]);
        b[o + 3] = _mm512_unpackhi_epi64(a[o + 1], a[o + 3]);
    }
    let low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    let high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    for j in 0..4 {
        // SAFETY: lines are 64 aligned bytes.
        unsafe {
            _mm512_store_si512((&raw mut out[j]).cast(), _mm512_permutex2var_epi64(b[j], low, b[4 + j]));
            _mm512_store_si512((&raw mut out[j + 4]).cast(), _mm512_permutex2var_epi64(b[j], high, b[4 + j]));
        }
    }
}
