//! A produced state file against the server's: the structure, field by field, and the numbers.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use kvlayout::compare::{self, LayerError};
use kvlayout::faults::{self, Expect};
use kvlayout::{CacheType, KvSpec, Part, Section, State, StateVersion, TokenForm};
use serde::{Deserialize, Serialize};

use crate::shape::{Shape, Weights};
use crate::tolerances as tol;

/// What a produced file has to be.
#[derive(Debug, Clone)]
pub struct Want<'a> {
    /// The ids handed over.
    pub tokens: &'a [i32],
    /// The reading server's version.
    pub version: StateVersion,
    /// The reading server's memory.
    pub spec: &'a KvSpec,
    /// Size of the vocabulary.
    pub n_vocab: u32,
    /// The reading server's context.
    pub n_ctx: u32,
    /// Made to be handed over, not by a server for itself.
    pub handoff: bool,
}

/// Everything that is wrong with a file, by itself and against the server's file for the same ids. Empty when all is well.
pub fn structure(bytes: &[u8], server: &State, want: &Want<'_>) -> Vec<String> {
    let expect = Expect {
        n_vocab: Some(want.n_vocab),
        tokens: Some(want.tokens.to_vec()),
        version: Some(want.version),
        spec: Some(want.spec.clone()),
        n_ctx: Some(want.n_ctx),
        handoff: want.handoff,
    };
    let mut wrong: Vec<String> =
        faults::check_bytes(bytes, &expect).iter().map(|f| format!("{}: {f}", f.name())).collect();
    match State::parse_any(bytes) {
        Ok(state) => {
            if state.write() != bytes {
                wrong.push("reading and writing the file again gives other bytes".into());
            }
            wrong.extend(compare::structure(server, &like(&state, server)).iter().map(ToString::to_string));
            if want.handoff {
                wrong.extend(checkpoints(&state, want.spec));
            }
        }
        // Said by the faults already.
        Err(_) if !wrong.is_empty() => {}
        Err(e) => wrong.push(e.to_string()),
    }
    wrong
}

/// What is wrong with the checkpoints of a handoff: each is the section of the sliding window once more.
fn checkpoints(state: &State, spec: &KvSpec) -> Vec<String> {
    let Some(appendix) = &state.appendix else { return Vec::new() };
    let windowed = spec.sections.iter().zip(&state.sections).filter(|(s, _)| s.window.is_some());
    let section = State {
        version: state.version,
        form: TokenForm::Plain,
        tokens: Vec::new(),
        cell_ext: state.cell_ext,
        sections: windowed.map(|(_, s)| s.clone()).collect(),
        appendix: None,
        trailing: Vec::new(),
    };
    // Behind magic, version and the number of tokens; before it, what a saved context begins with, and a sequence.
    let want = [&0xaf14_3cd8_u32.to_le_bytes()[..], &[0; 4], &section.write()[12..]].concat();
    let all = appendix.checkpoints.iter().enumerate();
    all.filter(|(_, c)| c.blobs[0] != want || !c.blobs[1].is_empty() || !c.blobs[2].is_empty())
        .map(|(i, _)| format!("checkpoint {i} is not the window's section once more"))
        .collect()
}

/// The state with what may differ from a server's own made the same: the form of the token list, the checkpoints at the end, cells of
/// a window that the server does not save, and the order of cells, which in a server's window is that of a ring.
fn like(state: &State, server: &State) -> State {
    let mut out = state.clone();
    out.form = server.form.clone();
    out.appendix = server.appendix.clone();
    for (mine, theirs) in out.sections.iter_mut().zip(&server.sections) {
        let (Section::Kv(mine), Section::Kv(theirs)) = (mine, theirs) else { continue };
        for (mine, theirs) in mine.streams.iter_mut().zip(&theirs.streams) {
            let first = theirs.cells.iter().map(|c| c.pos).min();
            // Rows are compared by position elsewhere; here only the cells matter, so the tensors can stay as they are.
            mine.cells.retain(|c| first.is_none_or(|f| c.pos >= f));
            let order: BTreeMap<i32, usize> = theirs.cells.iter().enumerate().map(|(i, c)| (c.pos, i)).collect();
            mine.cells.sort_by_key(|c| order.get(&c.pos).copied().unwrap_or(usize::MAX));
        }
    }
    out
}

/// Says of a state how its rows are rotated, where its version does not: so that it can be compared with one of another cache.
pub fn tell_rotation(state: &mut State, spec: &KvSpec) {
    for (section, want) in state.sections.iter_mut().zip(&spec.sections) {
        if let Section::Kv(kv) = section {
            kv.streams.iter_mut().for_each(|s| s.n_rot = s.n_rot.or(Some(want.n_rot)));
        }
    }
}

/// Distances of one prompt's states, reduced to what limits are about.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Distances {
    /// Model layer 0, K and V.
    pub layer0: [f64; 2],
    /// The worst layer, K and V.
    pub layer: [f64; 2],
    /// The mean over layers, K and V.
    pub mean: [f64; 2],
    /// The worst row of model layer 0, K and V.
    pub row0: [f64; 2],
    /// The worst row, K and V.
    pub row: [f64; 2],
    /// Model layer 0's recurrent state: convolution history (R) and state (S).
    pub state0: [f64; 2],
    /// The worst layer's, R and S.
    pub state: [f64; 2],
    /// The worst row's 1 - cosine.
    pub one_minus_cos: f64,
    /// The largest difference of one value.
    pub max_abs: f64,
    /// The share of values that are equal.
    pub equal: f64,
}

impl Distances {
    /// All zero, to take maxima from.
    pub const ZERO: Distances = Distances {
        layer0: [0.0; 2],
        layer: [0.0; 2],
        mean: [0.0; 2],
        row0: [0.0; 2],
        row: [0.0; 2],
        state0: [0.0; 2],
        state: [0.0; 2],
        one_minus_cos: 0.0,
        max_abs: 0.0,
        equal: 1.0,
    };

    /// The larger of each (of `equal`, the smaller).
    pub fn max(self, o: Distances) -> Distances {
        let two = |a: [f64; 2], b: [f64; 2]| [a[0].max(b[0]), a[1].max(b[1])];
        Distances {
            layer0: two(self.layer0, o.layer0),
            layer: two(self.layer, o.layer),
            mean: two(self.mean, o.mean),
            row0: two(self.row0, o.row0),
            row: two(self.row, o.row),
            state0: two(self.state0, o.state0),
            state: two(self.state, o.state),
            one_minus_cos: self.one_minus_cos.max(o.one_minus_cos),
            max_abs: self.max_abs.max(o.max_abs),
            equal: self.equal.min(o.equal),
        }
    }
}

/// Distances of one state from another, over the positions both have.
pub fn distances(reference: &State, other: &State, shape: &Shape) -> Result<(Distances, Vec<LayerError>)> {
    let errors =
        compare::numeric(reference, other).map_err(|d| anyhow::anyhow!("the files cannot be compared: {d}"))?;
    ensure!(!errors.is_empty(), "the files have no tensors to compare");
    let mut d = Distances::ZERO;
    let (mut count, mut values, mut equal) = ([0usize; 2], 0usize, 0usize);
    for e in &errors {
        let part = match e.part {
            Part::K | Part::R => 0,
            Part::V | Part::S => 1,
        };
        let layer = shape.model_layer(e.section, e.layer).with_context(|| {
            format!("section {} of the file has a layer {}, the model has none there", e.section, e.layer)
        })?;
        values += e.values;
        equal += e.equal;
        d.max_abs = d.max_abs.max(e.max_abs);
        if matches!(e.part, Part::R | Part::S) {
            if layer == 0 {
                d.state0[part] = e.rel_l2;
            }
            d.state[part] = d.state[part].max(e.rel_l2);
            continue;
        }
        if layer == 0 {
            d.layer0[part] = d.layer0[part].max(e.rel_l2);
            d.row0[part] = d.row0[part].max(e.row_max_rel);
        }
        d.layer[part] = d.layer[part].max(e.rel_l2);
        d.mean[part] += e.rel_l2;
        d.row[part] = d.row[part].max(e.row_max_rel);
        d.one_minus_cos = d.one_minus_cos.max(e.row_max_one_minus_cos);
        count[part] += 1;
    }
    for (mean, count) in d.mean.iter_mut().zip(count) {
        *mean /= count.max(1) as f64;
    }
    d.equal = equal as f64 / values.max(1) as f64;
    Ok((d, errors))
}

/// One number against its limit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measure {
    /// What was measured.
    pub what: String,
    /// The value.
    pub value: f64,
    /// The most it may be.
    pub limit: f64,
}

impl Measure {
    /// Whether it is within the limit. A value that is no number is not.
    pub fn passes(&self) -> bool {
        self.value <= self.limit
    }
}

/// Holds distances against the limits for a model's weights and the cache's types. `noise` is the worst the server is away from itself.
pub fn judge(d: &Distances, weights: Weights, cache: [CacheType; 2], noise: &Distances) -> Vec<Measure> {
    let mut out = Vec::new();
    let mut put = |what: String, value: f64, limit: f64| out.push(Measure { what, value, limit });
    let widen = if cache.contains(&CacheType::Bf16) { tol::BF16_CACHE } else { 1.0 };
    let quantised = cache.map(CacheType::is_quantised);
    // A state of f32 numbers, whatever the type of the attention cache.
    let recurrent = d.state != [0.0; 2];
    for (i, part) in ["R", "S"].iter().enumerate().filter(|_| recurrent) {
        let (layer0, layer) = match tol::absolute(weights) {
            Some(t) => (t.state0[i], t.state[i]),
            None => (tol::QUANTISED_LAYER0[i], tol::NOISE * noise.state[i].max(tol::NOISE_FLOOR)),
        };
        put(format!("layer 0 {part}"), d.state0[i], layer0);
        put(format!("worst layer {part}"), d.state[i], layer);
    }
    match tol::absolute(weights).filter(|_| quantised == [false; 2]) {
        Some(t) => {
            for (i, part) in ["K", "V"].iter().enumerate() {
                put(format!("layer 0 {part}"), d.layer0[i], t.layer0[i] * widen);
                put(format!("worst layer {part}"), d.layer[i], t.layer[i] * widen);
                put(format!("worst row {part}"), d.row[i], t.row[i] * widen);
            }
            put("worst row 1-cos".into(), d.one_minus_cos, t.one_minus_cos * widen);
        }
        None => {
            let against = |noise: f64, floor: f64| tol::NOISE * noise.max(floor);
            let exact = weights != Weights::Quantised;
            for (i, part) in ["K", "V"].iter().enumerate() {
                let codes = if exact { tol::OTHER_CODES_EXACT } else { tol::OTHER_CODES };
                let (layer0, row0) = if quantised[i] {
                    (codes * noise.layer0[i], tol::OTHER_CODES_ROW * noise.row0[i])
                } else {
                    (tol::QUANTISED_LAYER0[i] * widen, tol::QUANTISED_ROW0 * widen)
                };
                put(format!("layer 0 {part}"), d.layer0[i], layer0);
                put(format!("worst row of layer 0 {part}"), d.row0[i], row0);
                put(format!("mean of layers {part}"), d.mean[i], against(noise.mean[i], tol::NOISE_FLOOR));
                put(format!("worst layer {part}"), d.layer[i], against(noise.layer[i], tol::NOISE_FLOOR));
                put(format!("worst row {part}"), d.row[i], against(noise.row[i], 4.0 * tol::NOISE_FLOOR));
            }
            // As an angle, which is a distance like the others; 1 - cosine is half its square.
            let angle = |one_minus_cos: f64| (1.0 - one_minus_cos).clamp(-1.0, 1.0).acos();
            let limit = against(angle(noise.one_minus_cos), 4.0 * tol::NOISE_FLOOR);
            put("worst row angle".into(), angle(d.one_minus_cos), limit);
        }
    }
    out
}
