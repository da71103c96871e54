//! `bench kernels`: the matrix products and the attention of `npu-kernels` by themselves, on one thread, in the shapes of real
//! models, against the most that the processor's instructions can do - measured in the same run, since that moves with the
//! machine.
//!
//! Time is the thread's CPU time, so that waiting does not count; caches and clock rate are shared with whatever else runs
//! all the same. Rounding activations is not part of a product here (a prefill does it together with the norm before),
//! decoding weights is.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use conformance::fixtures::Rng;
use npu_kernels::host::Columns;
use npu_kernels::host::acts::Activations;
use npu_kernels::host::attention::{HeadCache, Heads, Products, attention};
use npu_kernels::host::gemm::{Job, gemm};
use npu_kernels::host::peak::{Operands, Peak};
use npu_kernels::{Isa, Pool, WeightType, WeightView, with_kernel};
use rustix::time::{ClockId, clock_gettime};

use crate::csv::{self, Csv};
use crate::ids::unit;
use crate::machine::{self, Load, Watch};
use crate::stats::{largest, median};
use crate::table::{self, percent};

/// The weight types that are measured, with the names they have on the command line: those with a decoder of their own in
/// every fast kernel, and the floats.
const TYPES: &[(&str, WeightType)] = &[
    ("Q4_0", WeightType::Q4_0),
    ("Q4_1", WeightType::Q4_1),
    ("Q5_0", WeightType::Q5_0),
    ("Q5_1", WeightType::Q5_1),
    ("Q8_0", WeightType::Q8_0),
    ("Q4_K", WeightType::Q4_K),
    ("Q5_K", WeightType::Q5_K),
    ("Q6_K", WeightType::Q6_K),
    ("F16", WeightType::F16),
    ("BF16", WeightType::Bf16),
    ("F32", WeightType::F32),
];

/// Rows of queries in attention: a chunk of a prefill.
const CHUNK: usize = 512;

/// Inputs and outputs of a weight matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Inputs.
    pub k: usize,
    /// Outputs.
    pub n: usize,
}

/// Most of either, so that a typing error does not take all memory.
const MAX_SIDE: usize = 1 << 17;

/// `576x1536`: inputs, outputs.
///
/// # Errors
/// It is something else.
pub fn shape(text: &str) -> Result<Shape, String> {
    let side = |s: &str| s.parse().ok().filter(|n| (1..=MAX_SIDE).contains(n));
    let sides = text.split_once('x').and_then(|(k, n)| Some(Shape { k: side(k)?, n: side(n)? }));
    sides.ok_or_else(|| format!("a shape is INPUTSxOUTPUTS, both 1 to {MAX_SIDE}, such as 576x1536"))
}

/// The name of a weight type, as it is spelled in [`TYPES`].
///
/// # Errors
/// There is none of that name.
pub fn weight_type(text: &str) -> Result<WeightType, String> {
    let found = TYPES.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
    found.map(|(_, ty)| *ty).ok_or_else(|| {
        let names: Vec<&str> = TYPES.iter().map(|(name, _)| *name).collect();
        format!("it is one of {}", names.join(", "))
    })
}

fn type_name(ty: WeightType) -> &'static str {
    TYPES.iter().find(|(_, t)| *t == ty).map_or("?", |(name, _)| name)
}

/// What is measured.
pub struct Kernels {
    /// The instruction set.
    pub isa: Isa,
    /// Weight types; all when empty.
    pub types: Vec<WeightType>,
    /// Rows of activations.
    pub rows: Vec<usize>,
    /// Weight matrices.
    pub shapes: Vec<Shape>,
    /// Keys that attention's last row sees.
    pub keys: Vec<usize>,
    /// Channels of a head.
    pub heads: Vec<usize>,
    /// Runs of each.
    pub runs: u32,
    /// CPU time of a run, at least.
    pub least: Duration,
}

/// One line of the result.
#[derive(Debug, Clone)]
pub struct Row {
    /// `gemm` or `attention`.
    pub what: &'static str,
    /// The weight type of a product; what attention multiplies.
    pub ty: &'static str,
    /// Rows of activations, or of queries.
    pub m: usize,
    /// Inputs of a product, keys of attention.
    pub k: usize,
    /// Outputs of a product, channels of an attention head.
    pub n: usize,
    /// 1e9 operations per second of CPU time, the median.
    pub gops: Option<f64>,
    /// The peaks it may be held against.
    yardsticks: &'static [Operands],
}

/// The most that each kind of instruction did.
#[derive(Debug, Clone)]
pub struct Best {
    peak: Peak,
    gops: Option<f64>,
}

/// Everything measured.
pub struct Results {
    /// The instruction peaks.
    pub peaks: Vec<Best>,
    /// Kernels.
    pub rows: Vec<Row>,
    /// What else ran, from the first to the last: a single row is over too soon for the system's clock.
    pub load: Load,
}

impl Results {
    fn peak(&self, operands: Operands) -> Option<f64> {
        self.peaks.iter().find(|b| b.peak.operands() == operands)?.gops
    }

    /// A row's share of a peak that it may be held against.
    fn share(&self, row: &Row, operands: Operands) -> Option<f64> {
        row.yardsticks.contains(&operands).then(|| Some(row.gops? / self.peak(operands)?))?
    }
}

/// CPU time of this thread.
fn thread_time() -> Duration {
    // Neither part is negative for this clock.
    let t = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec.unsigned_abs(), u32::try_from(t.tv_nsec).unwrap_or(0))
}

/// 1e9 operations per second, run by run. A run is repeated until it takes its least time, since a single product may be over
/// before the clock can tell.
fn rates(ops: f64, runs: u32, least: Duration, mut work: impl FnMut()) -> Vec<f64> {
    let mut timed = |times: u32| {
        let began = thread_time();
        (0..times).for_each(|_| work());
        thread_time().saturating_sub(began).as_secs_f64()
    };
    // The first time is slower: pages are touched, caches filled, the clock rate found. It serves for an estimate.
    let once = timed(1).max(1e-9);
    let times = (least.as_secs_f64() / once).ceil().clamp(1.0, 1e6) as u32;
    let rate = |seconds: f64| ops * f64::from(times) / seconds.max(1e-9) / 1e9;
    (0..runs).map(|_| rate(timed(times))).collect()
}

/// A weight matrix of random codes. Scales and floats are moderate numbers: with those that are not normal a processor may
/// take a slow path that no model would take.
fn weights(ty: WeightType, shape: Shape) -> Option<Vec<u8>> {
    let bytes = ty.block().1;
    let mut data = vec![0u8; ty.row_bytes(shape.k)?.checked_mul(shape.n)?];
    let mut rng = Rng::new(type_name(ty));
    match ty {
        WeightType::F32 => data.as_chunks_mut().0.iter_mut().for_each(|b| *b = unit(&mut rng).to_le_bytes()),
        WeightType::Bf16 => {
            let half = |v: f32| ((v.to_bits() >> 16) as u16).to_le_bytes();
            data.as_chunks_mut().0.iter_mut().for_each(|b| *b = half(unit(&mut rng)));
        }
        // Any sign and fraction, an exponent from 2^-7 on.
        WeightType::F16 => {
            let half = |bits: u64| ((bits as u16 & 0x87ff) | 0x2000).to_le_bytes();
            data.as_chunks_mut().0.iter_mut().for_each(|b| *b = half(rng.next_u64()));
        }
        _ => {
            for part in data.chunks_mut(8) {
                part.copy_from_slice(&rng.next_u64().to_le_bytes()[..part.len()]);
            }
            // 2^-7 as f16, wherever the block has one.
            let scale = 0x2000u16.to_le_bytes();
            let at: &[usize] = match ty {
                WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4_K | WeightType::Q5_K => &[0, 2],
                WeightType::Q6_K => &[208],
                _ => &[0],
            };
            for block in data.chunks_exact_mut(bytes) {
                at.iter().for_each(|&at| block[at..at + 2].copy_from_slice(&scale));
            }
        }
    }
    Some(data)
}

fn floats(n: usize, seed: &str) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..n).map(|_| unit(&mut rng)).collect()
}

/// The shape in which a model of these dimensions holds this type: as it is, or turned round like the matrix that leads back,
/// where only that has whole blocks.
fn fitting(ty: WeightType, shape: Shape) -> Option<Shape> {
    [shape, Shape { k: shape.n, n: shape.k }].into_iter().find(|s| ty.row_bytes(s.k).is_some())
}

fn yardsticks(ty: WeightType) -> &'static [Operands] {
    match ty {
        WeightType::F32 | WeightType::F16 => &[Operands::F32],
        WeightType::Bf16 => &[Operands::Bf16, Operands::F32],
        _ => &[Operands::Int8],
    }
}

fn products(c: &Kernels, pool: &Pool, out: &mut Vec<Row>, progress: &mut dyn FnMut(&str)) -> Result<()> {
    let all: Vec<WeightType> = TYPES.iter().map(|(_, ty)| *ty).collect();
    let types = if c.types.is_empty() { &all } else { &c.types };
    let most = c.rows.iter().max().copied().unwrap_or(0);
    for &ty in types {
        for shape in &c.shapes {
            let Some(Shape { k, n }) = fitting(ty, *shape) else {
                let block = ty.block().0;
                progress(&format!("{} has blocks of {block}, which do not divide {shape:?}: left out", type_name(ty)));
                continue;
            };
            progress(&format!("{} {k} x {n}", type_name(ty)));
            let data = weights(ty, Shape { k, n }).context("a matrix beyond all memory")?;
            let weight = WeightView::new(ty, n, k, &data).context("a matrix of whole rows")?;
            let row = floats(k, "activations");
            let mut acts = Activations::new(most, k, &[ty]);
            let mut product = vec![0f32; most * n];
            for &m in &c.rows {
                acts.reshape(m, k);
                let result = with_kernel!(c.isa, kernel => {
                    acts.fill(kernel, pool, |_, buffer| buffer.copy_from_slice(&row));
                    rates(2.0 * m as f64 * n as f64 * k as f64, c.runs, c.least, || {
                        let out = Columns::new(&mut product[..m * n], m, n);
                        gemm(kernel, pool, &acts, &[Job { weight, bias: None, out }]);
                    })
                });
                out.push(Row {
                    what: "gemm",
                    ty: type_name(ty),
                    m,
                    k,
                    n,
                    gops: median(result),
                    yardsticks: yardsticks(ty),
                });
            }
        }
    }
    Ok(())
}

/// Operations of attention over `m` rows, the last of which sees `keys` keys: two products of `head` channels for every pair
/// of a row and a key that it sees.
fn attention_ops(m: usize, keys: usize, head: usize) -> f64 {
    let seen: f64 = (keys - m + 1..=keys).map(|n| n as f64).sum();
    seen * 4.0 * head as f64
}

/// What attention multiplies, and its name in the tables.
const PRODUCTS: [(Products, &str); 2] = [(Products::Floats, "f32"), (Products::Words, "i16")];

fn attentions(c: &Kernels, pool: &Pool, out: &mut Vec<Row>, progress: &mut dyn FnMut(&str)) {
    for &head in &c.heads {
        for (&keys, (products, ty)) in c.keys.iter().flat_map(|k| PRODUCTS.map(|p| (k, p))) {
            progress(&format!("attention in {ty}, {keys} keys, {head} channels"));
            let m = keys.min(CHUNK);
            let mut cache = HeadCache::new(products, head, head, keys);
            let (k, v) = (floats(keys * head, "keys"), floats(keys * head, "values"));
            k.chunks_exact(head).zip(v.chunks_exact(head)).for_each(|(k, v)| cache.push(k, v));
            let caches = [cache];
            let q = floats(m * head, "queries");
            let mut result = vec![0f32; m * head];
            let rates = with_kernel!(c.isa, kernel => {
                rates(attention_ops(m, keys, head), c.runs, c.least, || {
                    attention(kernel, pool, Heads {
                        q: &q,
                        n_head: 1,
                        caches: &caches,
                        m,
                        first: keys - m,
                        scale: 1.0 / (head as f32).sqrt(),
                        softcap: None,
                        slopes: &[],
                        window: None,
                        sinks: None,
                        out: &mut result,
                    });
                })
            });
            out.push(Row {
                what: "attention",
                ty,
                m,
                k: keys,
                n: head,
                gops: median(rates),
                yardsticks: &[Operands::Bf16, Operands::F32],
            });
        }
    }
}

/// The best of some runs: a peak is what was possible at all.
fn measure_peaks(c: &Kernels, progress: &mut dyn FnMut(&str)) -> Vec<Best> {
    let one = |peak: Peak| {
        progress(&format!("peak of {}", peak.name()));
        const ROUNDS: u64 = 10_000;
        let ops = ROUNDS as f64 * peak.ops_per_round() as f64;
        let rates = rates(ops, c.runs, c.least, || {
            std::hint::black_box(peak.run(ROUNDS));
        });
        Best { peak, gops: largest(rates) }
    };
    Peak::of(c.isa).into_iter().map(one).collect()
}

const NAMES: &[&str] = &[
    "date",
    "cpu",
    "kernel",
    "what",
    "type",
    "m",
    "k_or_keys",
    "n_or_head",
    "runs",
    "gops",
    "peak_int8_gops",
    "peak_bf16_gops",
    "peak_f32_gops",
    "share_of_int8",
    "share_of_bf16",
    "share_of_f32",
    "others",
];

fn cells(c: &Kernels, results: &Results, r: &Row) -> Vec<String> {
    let peak = |operands| csv::number(results.peak(operands), 2);
    let share = |operands| csv::number(results.share(r, operands), 4);
    vec![
        machine::now(),
        machine::cpu(),
        c.isa.name().to_owned(),
        r.what.to_owned(),
        r.ty.to_owned(),
        r.m.to_string(),
        r.k.to_string(),
        r.n.to_string(),
        c.runs.to_string(),
        csv::number(r.gops, 2),
        peak(Operands::Int8),
        peak(Operands::Bf16),
        peak(Operands::F32),
        share(Operands::Int8),
        share(Operands::Bf16),
        share(Operands::F32),
        csv::number(results.load.share(), 4),
    ]
}

/// Measures. The CSV file gets its rows at the end, when the peaks are known.
///
/// # Errors
/// A matrix cannot be made, or the file cannot be written.
pub fn measure(c: &Kernels, path: Option<&Path>, progress: &mut dyn FnMut(&str)) -> Result<Results> {
    let mut csv = Csv::open_if(path, NAMES)?;
    let pool = Pool::new(1)?;
    let watch = Watch::start();
    let mut peaks = measure_peaks(c, progress);
    let mut rows = Vec::new();
    products(c, &pool, &mut rows, progress)?;
    attentions(c, &pool, &mut rows, progress);
    // Once more: a machine that was slower in the beginning than later would make shares too large.
    for (peak, again) in peaks.iter_mut().zip(measure_peaks(c, progress)) {
        peak.gops = largest([peak.gops, again.gops].into_iter().flatten());
    }
    let results = Results { peaks, rows, load: watch.load() };
    if let Some(csv) = &mut csv {
        for row in &results.rows {
            csv.row(&cells(c, &results, row))?;
        }
    }
    Ok(results)
}

/// The tables for people.
pub fn report(c: &Kernels, results: &Results) -> String {
    let mut out = format!(
        "{}\n{}, one thread, CPU time, medians of {} runs; other work took {} of the machine meanwhile\n\n",
        machine::description(),
        c.isa.name(),
        c.runs,
        percent(results.load.share(), 1)
    );
    if results.peaks.is_empty() {
        out += "There is no loop for the peak of this instruction set, so there are no shares.\n\n";
    } else {
        let lines: Vec<Vec<String>> =
            results.peaks.iter().map(|b| vec![b.peak.name().to_owned(), table::number(b.gops, 1)]).collect();
        out += &table::markdown(&["instruction", "peak GOP/s"], &lines);
        out.push('\n');
    }
    let shares =
        |r: &Row| [Operands::Int8, Operands::Bf16, Operands::F32].map(|o| percent(results.share(r, o), 0)).into_iter();
    let lines = |what: &str| -> Vec<Vec<String>> {
        let rows = results.rows.iter().filter(|r| r.what == what);
        rows.map(|r| {
            let mut line = vec![r.ty.to_owned(), r.m.to_string(), r.k.to_string(), r.n.to_string()];
            line.push(table::number(r.gops, 1));
            line.extend(shares(r));
            line
        })
        .collect()
    };
    let (gemms, attentions) = (lines("gemm"), lines("attention"));
    if !gemms.is_empty() {
        out += &table::markdown(&["weights", "M", "K", "N", "GOP/s", "of int8", "of bf16", "of f32"], &gemms);
        out.push('\n');
    }
    if !attentions.is_empty() {
        out += &table::markdown(
            &["attention", "rows", "keys", "head", "GOP/s", "of int8", "of bf16", "of f32"],
            &attentions,
        );
    }
    if results.load.quiet() == Some(false) {
        out += "\nWaiting for a CPU is not counted, but caches and clock rate were shared: measure again on a quiet machine.\n";
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny(isa: Isa) -> Kernels {
        Kernels {
            isa,
            types: Vec::new(),
            rows: vec![1, 13],
            shapes: vec![Shape { k: 256, n: 33 }, Shape { k: 64, n: 256 }, Shape { k: 7, n: 3 }],
            keys: vec![5, 600],
            heads: vec![8],
            runs: 1,
            least: Duration::ZERO,
        }
    }

    #[test]
    fn everything_is_measured_and_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("k.csv");
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let c = tiny(isa);
            let mut said = Vec::new();
            let results = measure(&c, Some(&path), &mut |text| said.push(text.to_owned())).unwrap();
            // Eight types have blocks and take two of the shapes, three take all of them.
            let gemms = results.rows.iter().filter(|r| r.what == "gemm").count();
            assert_eq!((gemms, results.rows.len()), ((8 * 2 + 3 * 3) * 2, (8 * 2 + 3 * 3) * 2 + 2 * PRODUCTS.len()));
            assert!(results.rows.iter().all(|r| r.gops.is_some_and(f64::is_finite)));
            assert!(said.iter().any(|s| s.contains("Q4_0 has blocks of 32")), "{said:?}");
            let turned = results.rows.iter().find(|r| r.ty == "Q6_K" && r.n == 64).unwrap();
            assert_eq!(turned.k, 256);
            let text = report(&c, &results);
            assert!(text.contains("| Q4_0") && text.contains("| i16"), "{text}");
        }
        let rows = std::fs::read_to_string(&path).unwrap();
        assert!(rows.lines().all(|l| l.matches(',').count() >= NAMES.len() - 1));
    }

    #[test]
    fn weights_are_finite_numbers() {
        for &(name, ty) in TYPES {
            let data = weights(ty, Shape { k: 512, n: 3 }).unwrap();
            let weight = WeightView::new(ty, 3, 512, &data).unwrap();
            let rows = npu_kernels::oracle::product(&[vec![1.0; 512]], &weight);
            assert!(rows[0].iter().all(|v| v.is_finite() && *v != 0.0), "{name}: {rows:?}");
        }
        assert!(weights(WeightType::Q4_K, Shape { k: 576, n: 1 }).is_none());
    }

    #[test]
    fn operations_of_attention_are_those_of_pairs_that_are_seen() {
        // One row and three keys of two channels: 3 * 2 products and sums for the scores, as many for the mix.
        assert_eq!(attention_ops(1, 3, 2), 24.0);
        assert_eq!(attention_ops(3, 3, 1), (1 + 2 + 3) as f64 * 4.0);
    }

    #[test]
    fn shapes_and_types_are_read() {
        assert_eq!(shape("576x1536"), Ok(Shape { k: 576, n: 1536 }));
        for bad in ["", "5", "0x5", "5x", "-1x5", "5x99999999", "axb", "5x5x5"] {
            assert!(shape(bad).unwrap_err().contains("576x1536"), "{bad}");
        }
        assert_eq!(weight_type("q4_k"), Ok(WeightType::Q4_K));
        assert!(weight_type("Q9").unwrap_err().contains("Q8_0, Q4_K"));
    }

    #[test]
    fn shares_are_of_the_peaks_that_apply() {
        let peaks = Peak::of(Isa::detect());
        let results = Results {
            peaks: peaks.into_iter().map(|peak| Best { peak, gops: Some(200.0) }).collect(),
            rows: Vec::new(),
            load: Load::default(),
        };
        let row = Row {
            what: "gemm",
            ty: "Q4_0",
            m: 1,
            k: 32,
            n: 1,
            gops: Some(100.0),
            yardsticks: yardsticks(WeightType::Q4_0),
        };
        let want = if results.peaks.is_empty() { None } else { Some(0.5) };
        assert_eq!((results.share(&row, Operands::Int8), results.share(&row, Operands::F32)), (want, None));
    }
}
