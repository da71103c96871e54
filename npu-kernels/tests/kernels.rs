//! Every kernel that this processor can run against the double-precision oracle, on random data and awkward shapes.
//!
//! Bounds: integer products are exact, so what differs from the oracle is f32 rounding of at most a few hundred
//! additions: relative to the norm of a row of the product, 2e-6 was the largest seen; 1e-5 is asked for. The rounding
//! of activations itself must agree exactly, except where a quotient falls on a tie (one step in one value).

use npu_kernels::host::acts::Activations;
use npu_kernels::host::attention::Window::{self, Chunk, Last};
use npu_kernels::host::attention::{HeadCache, Products, Scratch, Task};
use npu_kernels::host::blocks;
use npu_kernels::host::gemm::{GroupedJob, Job, Part, gemm, gemm_gated, gemm_grouped};
use npu_kernels::host::recurrent::gates;
use npu_kernels::host::rowops;
use npu_kernels::host::{Columns, Isa, Pool, TILE_ROWS};
use npu_kernels::{WeightType, WeightView, oracle, with_kernel};
use proptest::prelude::*;

const GEMM_REL: f64 = 1e-5;
const ATTENTION_REL: f64 = 1e-5;
/// The same with 16-bit integers, whose codes are off by up to 2^-16 of a row's norm or a sum: measured 2.2e-4 at most.
const WORDS_REL: f64 = 5e-4;

struct Rng(u64);
impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    /// Roughly normal, deviation 1.
    fn normal(&mut self) -> f32 {
        (0..6).map(|_| (self.next() >> 40) as f32 / (1u64 << 24) as f32 - 0.5).sum::<f32>() * 1.414
    }
    fn row(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// Random bytes of `n` rows, with every f16 scale small and finite and every exponent moderate.
fn weights(ty: WeightType, n: usize, k: usize, rng: &mut Rng) -> Vec<u8> {
    let (values, bytes) = ty.block();
    let mut out = Vec::new();
    for _ in 0..n * k / values {
        let mut block: Vec<u8> = (0..bytes).map(|_| rng.next() as u8).collect();
        let mut half =
            |at: usize| block[at..at + 2].copy_from_slice(&half::f16::from_f32(rng.normal() * 0.01).to_le_bytes());
        match ty {
            WeightType::F32 => block.copy_from_slice(&rng.normal().to_le_bytes()),
            WeightType::F16 => half(0),
            WeightType::Bf16 => block.copy_from_slice(&half::bf16::from_f32(rng.normal()).to_le_bytes()),
            WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4_K | WeightType::Q5_K => {
                half(0);
                half(2);
            }
            WeightType::Q2_K => {
                half(80);
                half(82);
            }
            WeightType::Q3_K => half(108),
            WeightType::Q6_K => half(208),
            WeightType::Mxfp4 => block[0] = 118 + block[0] % 8,
            WeightType::Nvfp4 => block[..4].iter_mut().for_each(|e| *e &= 63),
            WeightType::Tq1_0 => half(52),
            WeightType::Tq2_0 => half(64),
            // In four pieces; this is 2^-7.
            WeightType::Iq1M => (0..4).for_each(|i| block[49 + 2 * i] = block[49 + 2 * i] & 15 | [0, 0, 0, 2][i] << 4),
            _ => half(0),
        }
        out.extend(block);
    }
    out
}

/// Distance from `wanted`, relative to its norm, or to `usual`, the norm that it has as a rule, where that is more: the sum of a
/// few products may happen to be next to nothing, and rounding is of the products.
fn relative(found: &[f32], wanted: &[f64], usual: f64) -> f64 {
    let diff: f64 = found.iter().zip(wanted).map(|(f, w)| (f64::from(*f) - w).powi(2)).sum();
    let norm: f64 = wanted.iter().map(|w| w * w).sum();
    diff.sqrt() / norm.sqrt().max(usual).max(1e-30)
}

/// The norm of a weight matrix.
fn norm(weight: &WeightView<'_>) -> f64 {
    let mut values = vec![0f32; weight.k()];
    let square = |n: usize, values: &mut [f32]| {
        blocks::row_values(weight.ty(), weight.row(n), values);
        values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>()
    };
    (0..weight.n()).map(|n| square(n, &mut values)).sum::<f64>().sqrt()
}

fn check_gemm(isa: Isa, ty: WeightType, m: usize, n: usize, k: usize, seed: u64) {
    let mut rng = Rng(seed | 1);
    let data = weights(ty, n, k, &mut rng);
    let weight = WeightView::new(ty, n, k, &data).expect("whole rows");
    let rows: Vec<Vec<f32>> = (0..m).map(|_| rng.row(k)).collect();
    let bias: Vec<f32> = rng.row(n);
    let wanted = oracle::product(&rows, &weight);
    let pool = Pool::new(2).unwrap();
    let mut acts = Activations::new(
        m,
        k,
        &[WeightType::Q4_K, ty, WeightType::Q8_0].map(|t| if k.is_multiple_of(256) { t } else { ty }),
    );
    let mut out = vec![f32::NAN; m * n];
    with_kernel!(isa, kernel => {
        acts.fill(kernel, &pool, |i, row| row.copy_from_slice(&rows[i]));
        gemm(kernel, &pool, &acts, &[Job { weight, bias: Some(&bias), out: Columns::new(&mut out, m, n) }]);
    });
    let size = norm(&weight);
    for (i, want) in wanted.iter().enumerate() {
        let want: Vec<f64> = want.iter().zip(&bias).map(|(w, b)| w + f64::from(*b)).collect();
        let row = rows[i].iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        let error = relative(&out[i * n..(i + 1) * n], &want, row * size / (k as f64).sqrt());
        assert!(error < GEMM_REL, "{} {ty:?} m {m} n {n} k {k}, row {i}: {error:e}", isa.name());
    }
}

/// Three experts of different types of rows: none, a few, more than a tile; the gaps between groups stay untouched.
fn check_grouped(isa: Isa, ty: WeightType, threads: usize) {
    let (n, k) = (37, ty.block().0.max(64));
    let counts = [5, 0, TILE_ROWS + 7, 1];
    let mut rng = Rng(91);
    let data: Vec<Vec<u8>> = counts.iter().map(|_| weights(ty, n, k, &mut rng)).collect();
    let views: Vec<_> = data.iter().map(|d| WeightView::new(ty, n, k, d).expect("whole rows")).collect();
    let biases: Vec<Vec<f32>> = counts.iter().map(|_| rng.row(n)).collect();
    let mut tiles = Vec::new();
    let mut rows: Vec<Vec<f32>> = Vec::new();
    for count in counts {
        let first = rows.len() / TILE_ROWS;
        rows.extend((0..count).map(|_| rng.row(k)));
        rows.resize(rows.len().next_multiple_of(TILE_ROWS), vec![0.0; k]);
        tiles.push(first..rows.len() / TILE_ROWS);
    }
    let m = rows.len();
    let pool = Pool::new(threads).unwrap();
    let mut acts = Activations::new(m, k, &[ty]);
    let mut out = [vec![f32::NAN; m * n], vec![f32::NAN; m * n]];
    let [one, two] = &mut out;
    with_kernel!(isa, kernel => {
        acts.fill(kernel, &pool, |i, row| row.copy_from_slice(&rows[i]));
        let parts = |with_bias: bool| {
            let both = views.iter().zip(&biases);
            both.map(|(weight, bias)| Part { weight: *weight, bias: with_bias.then_some(&**bias) }).collect()
        };
        let jobs = [
            GroupedJob { parts: parts(false), out: Columns::new(one, m, n) },
            GroupedJob { parts: parts(true), out: Columns::new(two, m, n) },
        ];
        gemm_grouped(kernel, &pool, &acts, &tiles, &jobs);
    });
    for ((range, count), (view, bias)) in tiles.iter().zip(counts).zip(views.iter().zip(&biases)) {
        let first = range.start * TILE_ROWS;
        let wanted = oracle::product(&rows[first..first + count], view);
        for (i, want) in wanted.iter().enumerate() {
            let biased: Vec<f64> = want.iter().zip(bias).map(|(w, b)| w + f64::from(*b)).collect();
            for (out, want) in out.iter().zip([want, &biased]) {
                let error = relative(&out[(first + i) * n..][..n], want, 0.0);
                assert!(error < GEMM_REL, "{} {ty:?} row {i} of the group at {first}: {error:e}", isa.name());
            }
        }
    }
}

#[test]
fn each_group_of_rows_meets_its_own_matrix() {
    for isa in available() {
        for ty in WeightType::ALL {
            check_grouped(isa, ty, 1);
        }
        check_grouped(isa, WeightType::Mxfp4, 40);
    }
}

/// Two matrices with biases, one of them with a factor; what is made of their outputs is no symmetric function, so that neither
/// can stand for the other.
fn check_gated(isa: Isa, ty: WeightType, threads: usize) {
    let (m, n, k) = (TILE_ROWS * 2 + 5, 37, ty.block().0.max(64) * 2);
    let mut rng = Rng(17);
    let data: [Vec<u8>; 2] = std::array::from_fn(|_| weights(ty, n, k, &mut rng));
    let gate = WeightView::new(ty, n, k, &data[0]).expect("whole rows");
    let other = WeightView::new(ty, n, k, &data[1]).expect("whole rows").times(0.5);
    let biases = [rng.row(n), rng.row(n)];
    let rows: Vec<Vec<f32>> = (0..m).map(|_| rng.row(k)).collect();
    let pool = Pool::new(threads).unwrap();
    let mut acts = Activations::new(m, k, &[ty]);
    let mut out = vec![f32::NAN; m * n];
    let join = |gate: &[f32], other: &[f32], out: &mut [f32]| {
        for ((o, g), u) in out.iter_mut().zip(gate).zip(other) {
            *o = g - 3.0 * u;
        }
    };
    with_kernel!(isa, kernel => {
        acts.fill(kernel, &pool, |i, row| row.copy_from_slice(&rows[i]));
        let part = |weight, bias| Part { weight, bias: Some(bias) };
        let columns = Columns::new(&mut out, m, n);
        gemm_gated(kernel, &pool, &acts, part(gate, &biases[0]), part(other, &biases[1]), &join, &columns);
    });
    let wanted = oracle::product(&rows, &gate).into_iter().zip(oracle::product(&rows, &other));
    for (i, (gates, others)) in wanted.enumerate() {
        let biases = biases[0].iter().zip(&biases[1]).map(|(g, u)| f64::from(*g) - 3.0 * f64::from(*u));
        let want: Vec<f64> = gates.iter().zip(others).zip(biases).map(|((g, u), b)| g - 3.0 * u + b).collect();
        let error = relative(&out[i * n..][..n], &want, 0.0);
        assert!(error < GEMM_REL, "{} {ty:?} row {i}: {error:e}", isa.name());
    }
}

#[test]
fn gates_meet_the_other_matrix_output_by_output() {
    for isa in available() {
        for ty in WeightType::ALL {
            check_gated(isa, ty, 1);
        }
        check_gated(isa, WeightType::Q4_K, 40);
    }
}

#[test]
#[should_panic(expected = "one type and shape")]
fn a_gate_of_another_type_is_a_mistake() {
    let (pool, data) = (Pool::new(1).unwrap(), [0u8; 64]);
    let part =
        |ty: WeightType| Part { weight: WeightView::new(ty, 4, 4, &data[..16 * ty.block().1]).unwrap(), bias: None };
    let acts = Activations::new(12, 4, &[WeightType::F32, WeightType::F16]);
    let mut out = vec![0f32; 12 * 4];
    let (gate, other) = (part(WeightType::F32), part(WeightType::F16));
    let join = |_: &[f32], _: &[f32], _: &mut [f32]| {};
    let columns = Columns::new(&mut out, 12, 4);
    gemm_gated(npu_kernels::host::scalar::Scalar, &pool, &acts, gate, other, &join, &columns);
}

#[test]
#[should_panic(expected = "groups follow each other")]
fn groups_that_overlap_are_a_mistake() {
    let (pool, data) = (Pool::new(1).unwrap(), [0u8; 64]);
    let part = Part { weight: WeightView::new(WeightType::F32, 4, 4, &data).unwrap(), bias: None };
    let acts = Activations::new(24, 4, &[WeightType::F32]);
    let mut out = vec![0f32; 24 * 4];
    let jobs = [GroupedJob { parts: vec![part, part], out: Columns::new(&mut out, 24, 4) }];
    gemm_grouped(npu_kernels::host::scalar::Scalar, &pool, &acts, &[0..2, 1..2], &jobs);
}

/// Values from Python, `g * 1 / (1 + exp(-1.702 * g)) * (u + 1)` in double precision with g and u
/// clamped first.
#[test]
fn the_gate_of_gpt_oss_is_clamped() {
    let gate = [0.5f32, -2.0, 9.0, 7.0, -40.0, 1.0];
    let up = [0.25f32, 3.0, -9.0, 9.0, 1.0, -1.0];
    let want = [0.437_985_55_f32, -0.257_365_5, -41.999_719, 55.999_625, 0.0, 0.0];
    let mut out = [0f32; 6];
    rowops::swiglu_oai(&gate, &up, &mut out);
    for (o, w) in out.iter().zip(want) {
        assert!((o - w).abs() <= 1e-5 * w.abs().max(1.0), "{out:?}, wanted {want:?}");
    }
    let mut nan = [0f32; 17];
    rowops::swiglu_oai(&[f32::NAN; 17], &[1.0; 17], &mut nan);
    assert!(nan.iter().all(|v| v.is_nan()), "a NaN stays one, so that it is noticed");
    rowops::relu_mul(&[f32::NAN, -1.0, 2.0], &[1.0, f32::MAX, 3.0], &mut nan[..3]);
    assert!(nan[0].is_nan() && nan[1] == 0.0 && nan[2] == 6.0);
}

fn available() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

#[test]
fn products_agree_with_the_oracle_for_every_type_and_awkward_shapes() {
    for isa in available() {
        for ty in WeightType::ALL {
            for (m, n) in [(1, 1), (1, 16), (11, 15), (12, 17), (13, 48), (30, 33)] {
                let k = if ty.block().0 == 256 { 512 } else { 96_usize.next_multiple_of(ty.block().0) };
                check_gemm(isa, ty, m, n, k, 7 + m as u64 * 31 + n as u64);
            }
        }
    }
}

#[test]
fn a_factor_multiplies_the_product_and_not_the_bias() {
    let data = weights(WeightType::Nvfp4, 3, 64, &mut Rng(5));
    let weight = WeightView::new(WeightType::Nvfp4, 3, 64, &data).unwrap();
    let row = Rng(9).row(64);
    let pool = Pool::new(1).unwrap();
    let mut acts = Activations::new(1, 64, &[WeightType::Nvfp4]);
    let mut run = |weight: WeightView<'_>| {
        let mut out = vec![0f32; 3];
        with_kernel!(Isa::Scalar, kernel => {
            acts.fill(kernel, &pool, |_, to| to.copy_from_slice(&row));
            gemm(kernel, &pool, &acts, &[Job { weight, bias: Some(&[8.0; 3]), out: Columns::new(&mut out, 1, 3) }]);
        });
        out.iter().map(|v| v - 8.0).collect::<Vec<f32>>()
    };
    let (plain, half) = (run(weight), run(weight.rows(0, 3).unwrap().times(0.5)));
    assert!(plain.iter().zip(&half).all(|(p, h)| (p - 2.0 * h).abs() < 1e-5 && p.abs() > 1e-3), "{plain:?} {half:?}");
}

/// Of either sign: x86 makes NaN with the sign bit, and one that became a number would be handed over.
#[test]
fn nan_stays_nan_in_gates_and_activations() {
    for isa in available() {
        for nan in [f32::NAN, -f32::NAN] {
            let (x, one) = ([nan; 18], [1.0; 18]);
            let (mut silu, mut relu, mut glu, mut gate) = ([0.0; 18], [0.0; 18], [0.0; 18], [1.0; 18]);
            with_kernel!(isa, kernel => {
                kernel.rows(|| rowops::silu_mul(&x, &one, &mut silu));
                kernel.rows(|| rowops::relu_squared(&x, &mut relu));
                kernel.rows(|| rowops::gelu_mul(&x, &one, &mut glu, &mut Vec::new()));
                kernel.rows(|| gates::sigmoid_mul(&mut gate, &x));
            });
            for (what, out) in [("silu", silu), ("relu²", relu), ("gelu", glu), ("sigmoid", gate)] {
                assert!(out.iter().all(|v| v.is_nan()), "{} {what}({nan}): {out:?}", isa.name());
            }
        }
    }
}

#[test]
fn float_products_take_any_number_of_inputs() {
    for isa in available() {
        for ty in [WeightType::F32, WeightType::F16, WeightType::Bf16] {
            for k in [1, 3, 17, 100] {
                check_gemm(isa, ty, 5, 19, k, k as u64);
            }
        }
    }
}

#[test]
fn extreme_codes_do_not_overflow() {
    // All-ones blocks: the largest code everywhere, against activations that round to +-127.
    for isa in available() {
        for ty in WeightType::ALL.into_iter().filter(|t| t.code_form().is_some()) {
            let (values, bytes) = ty.block();
            let k = 512;
            let mut data = vec![0xFFu8; k / values * bytes * 16];
            for block in data.chunks_mut(bytes) {
                let one = half::f16::ONE.to_le_bytes();
                match ty {
                    WeightType::Q2_K => block[80..84].copy_from_slice(&[one, one].concat()),
                    WeightType::Q3_K => block[108..110].copy_from_slice(&one),
                    WeightType::Q6_K => block[208..210].copy_from_slice(&one),
                    WeightType::Mxfp4 => block[0] = 127,
                    WeightType::Nvfp4 => block[..4].fill(0x7e),
                    WeightType::Tq1_0 => block[52..54].copy_from_slice(&one),
                    WeightType::Tq2_0 => block[64..66].copy_from_slice(&one),
                    WeightType::Iq1M => (0..4).for_each(|i| block[49 + 2 * i] = 15 | [0, 0, 0xc, 3][i] << 4),
                    WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4_K | WeightType::Q5_K => {
                        block[0..4].copy_from_slice(&[one, one].concat());
                    }
                    _ => block[0..2].copy_from_slice(&one),
                }
            }
            let weight = WeightView::new(ty, 16, k, &data).unwrap();
            let rows = vec![vec![1f32; k], vec![-1f32; k]];
            let wanted = oracle::product(&rows, &weight);
            let pool = Pool::new(1).unwrap();
            let mut acts = Activations::new(2, k, &[ty]);
            let mut out = vec![0f32; 32];
            with_kernel!(isa, kernel => {
                acts.fill(kernel, &pool, |i, row| row.copy_from_slice(&rows[i]));
                gemm(kernel, &pool, &acts, &[Job { weight, bias: None, out: Columns::new(&mut out, 2, 16) }]);
            });
            for i in 0..2 {
                let error = relative(&out[i * 16..][..16], &wanted[i], 0.0);
                assert!(error < GEMM_REL, "{} {ty:?} row {i}: {error:e}", isa.name());
            }
        }
    }
}

/// What the rows of `q`, from position `first` on, read from a cache.
fn attend(
    isa: Isa,
    cache: &HeadCache,
    q: &[f32],
    first: usize,
    scale: f32,
    window: Option<Window>,
    sink: Option<f32>,
) -> Vec<f32> {
    let rows = q.len() / cache.head_k();
    // Neither right anywhere, nor what is looked for where something should not be finite.
    let mut out = vec![7e30; rows * cache.head_v()];
    let q_stride = cache.head_k();
    let task = Task { q, q_stride, rows, first, scale, softcap: None, slope: 0.0, window, sink, cache };
    with_kernel!(isa, kernel => kernel.attend(&task, &mut Scratch::default(), &mut out));
    out
}

fn check_attention(
    isa: Isa,
    products: Products,
    [hk, hv]: [usize; 2],
    first: usize,
    rows: usize,
    window: Option<Window>,
    sink: Option<f32>,
) {
    let mut rng = Rng((hk * 7919 + first * 31 + rows) as u64 | 1);
    let n = first + rows;
    let keys: Vec<Vec<f32>> = (0..n).map(|_| rng.row(hk)).collect();
    let values: Vec<Vec<f32>> = (0..n).map(|_| rng.row(hv)).collect();
    let q: Vec<Vec<f32>> = (0..rows).map(|_| rng.row(hk)).collect();
    let scale = 1.0 / (hk as f32).sqrt();
    let wanted = oracle::attention(&q, first, &keys, &values, f64::from(scale), window, sink.map(f64::from));
    let mut cache = HeadCache::new(products, hk, hv, n);
    keys.iter().zip(&values).for_each(|(k, v)| cache.push(k, v));
    let out = attend(isa, &cache, &q.concat(), first, scale, window, sink);
    for (i, want) in wanted.iter().enumerate() {
        // Relative to the values (deviation 1), of which the output is a mean that may cancel.
        let diff: f64 = out[i * hv..][..hv].iter().zip(want).map(|(o, w)| (f64::from(*o) - w).powi(2)).sum();
        let error = (diff / hv as f64).sqrt();
        let limit = match products {
            Products::Floats => ATTENTION_REL,
            Products::Words => WORDS_REL,
        };
        assert!(
            error < limit,
            "{} {products:?} hk {hk} hv {hv} first {first} row {i} window {window:?} sink {sink:?}: {error:e}",
            isa.name()
        );
    }
}

fn every_attention() -> impl Iterator<Item = (Isa, Products)> {
    available().flat_map(|isa| [(isa, Products::Floats), (isa, Products::Words)])
}

#[test]
fn attention_agrees_with_the_oracle() {
    for (isa, products) in every_attention() {
        for (hk, hv) in [(64, 64), (32, 32), (80, 80), (256, 256), (20, 12), (1, 1)] {
            for first in [0, 1, 5, 15, 16, 250, 256, 300, 700] {
                for rows in [1, 7, TILE_ROWS] {
                    for window in [
                        None,
                        Some(Last(1)),
                        Some(Last(8)),
                        Some(Last(64)),
                        Some(Last(500)),
                        Some(Chunk(5)),
                        Some(Chunk(64)),
                    ] {
                        check_attention(isa, products, [hk, hv], first, rows, window, None);
                    }
                }
            }
        }
    }
}

/// Rows at the edge of what integers hold: one channel with everything, all channels alike, a thousand keys of the same weight,
/// tiny and huge numbers. Sums that left 32 bits would come out with another sign.
#[test]
fn integer_sums_stay_within_their_bits() {
    let (n, h) = (1000usize, 256usize);
    let spread = vec![1.0f32; h];
    let mut single = vec![0f32; h];
    single[7] = -1.0;
    for (isa, products) in every_attention() {
        for size in [1e-15f32, 1e-3, 1.0, 6e4, 1e15] {
            for key in [&spread, &single] {
                for value in [&spread, &single] {
                    let mut cache = HeadCache::new(products, h, h, n);
                    let key: Vec<f32> = key.iter().map(|x| x * size).collect();
                    let value: Vec<f32> = value.iter().map(|x| x * size).collect();
                    (0..n).for_each(|_| cache.push(&key, &value));
                    let out = attend(isa, &cache, &key, n - 1, 1.0 / (size * size), None, None);
                    // All keys are alike, so the mean of the values is the value, whatever the scores.
                    for (o, v) in out.iter().zip(&value) {
                        let off = f64::from(o - v).abs() / f64::from(size);
                        assert!(off < WORDS_REL, "{} {products:?} {size:e}: {o:e} for {v:e}", isa.name());
                    }
                }
            }
        }
    }
}

/// What is no number stays none: it must be found, not rounded away.
#[test]
fn attention_keeps_what_is_not_finite() {
    for (isa, products) in every_attention() {
        for bad in [f32::NAN, f32::INFINITY] {
            for at in 0..3 {
                let (h, n) = (32, 40);
                let mut rows = [vec![0.5f32; n * h], vec![0.25; n * h], vec![0.125; n * h]];
                rows[at][17 * h + 5] = bad;
                let [q, k, v] = &rows;
                let mut cache = HeadCache::new(products, h, h, n);
                k.chunks(h).zip(v.chunks(h)).for_each(|(k, v)| cache.push(k, v));
                let out = attend(isa, &cache, &q[12 * h..][..TILE_ROWS * h], 12, 1.0, None, None);
                let found = out.chunks(h).any(|row| row.iter().any(|x| !x.is_finite()));
                assert!(found, "{} {products:?} {bad} in {}", isa.name(), ["q", "k", "v"][at]);
            }
        }
    }
}

#[test]
fn sinks_join_the_sum_of_weights() {
    for (isa, products) in every_attention() {
        for sink in [-60.0, -1.5, 0.0, 2.0, 40.0] {
            for (first, rows) in [(0, 1), (0, TILE_ROWS), (5, 7), (300, TILE_ROWS)] {
                for window in [None, Some(Last(1)), Some(Last(8)), Some(Chunk(8))] {
                    check_attention(isa, products, [64, 64], first, rows, window, Some(sink));
                    check_attention(isa, products, [20, 12], first, rows, window, Some(sink));
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn products_of_random_shapes(t in 0usize..28, m in 1usize..40, n in 1usize..70, blocks in 1usize..4, seed: u64) {
        let ty = WeightType::ALL[t];
        for isa in available() {
            check_gemm(isa, ty, m, n, blocks * ty.block().0.max(32), seed);
        }
    }
}
