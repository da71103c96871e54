//! What a run must not depend on (chunk, threads, instruction set), and what must stop it.

use crate::tiny::{F32, Tiny, f32_bytes, tiny};
use kvlayout::{CacheType, KvMap, MemSpace, Part, Scatter, State, StateVersion, compare};
use prefill::{CacheParams, Error, Hooks, Isa, KvSink, Model, Options, Plan, run};
use std::ops::Range;

const ARCHS: [&str; 8] = ["llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "qwen35", "lfm2", "gemma3"];
/// Between instruction sets, and where a window moves the order of sums: f32 rounding through three layers. Largest
/// seen 3e-6; stored in f32 caches.
pub const REORDERED_REL: f64 = 2e-5;

struct Quiet;
impl Hooks for Quiet {
    fn stop(&self) -> bool {
        false
    }
    fn progress(&mut self, _: usize, _: usize, _: usize, _: usize) {}
}

pub fn params(ty: CacheType) -> CacheParams {
    CacheParams { type_k: ty, type_v: ty, v_trans: false, swa_full: true, n_stream: 1, n_ctx: None, attn_rot: true }
}

pub fn options() -> Options {
    Options { threads: 2, type_k: CacheType::F32, type_v: CacheType::F32, ..Options::default() }
}

pub fn state(t: &Tiny, tokens: &[u32], options: &Options) -> State {
    state_of(&t.gguf(), tokens, options)
}

pub fn state_of(gguf: &gguf::Gguf, tokens: &[u32], options: &Options) -> State {
    let model = Model::load(gguf).expect("a good model");
    let ids: Vec<i32> = tokens.iter().map(|t| *t as i32).collect();
    let map = KvMap::state_file(&model.kv_spec(&params(CacheType::F32)).unwrap(), &ids, StateVersion::V3).unwrap();
    let (size, mut bytes) = (map.size(), Vec::new());
    let mut sink = Box::new(Scatter::new(map, MemSpace::new(&mut bytes, size).unwrap()).unwrap());
    run(&model, tokens, options, &mut *sink, &mut Quiet).expect("a run");
    sink.commit().expect("every row was handed over");
    State::parse_any(&bytes).expect("a state")
}

pub fn tokens(n: usize) -> Vec<u32> {
    (0..n).map(|i| (i as u32 * 17 + 3) % 50).collect()
}

pub fn worst(a: &State, b: &State) -> f64 {
    assert!(compare::structure(a, b).is_empty());
    compare::numeric(a, b).expect("the same shape").iter().map(|e| e.rel_l2).fold(0.0, f64::max)
}

#[test]
fn threads_and_chunks_change_no_bit_without_a_window() {
    for arch in &ARCHS[..7] {
        let want = state(&tiny(arch), &tokens(70), &options()).write();
        for chunk in [1, 7, 12, 64, 70, 1000] {
            for threads in [1, 2, 5] {
                let got = state(&tiny(arch), &tokens(70), &Options { chunk, threads, ..options() }).write();
                assert!(got == want, "{arch}, chunk {chunk}, {threads} threads");
            }
        }
    }
}

#[test]
fn chunks_change_only_the_order_of_sums_with_a_window() {
    let want = state(&tiny("gemma3"), &tokens(70), &options());
    for chunk in [1, 7, 12, 64, 1000] {
        let got = state(&tiny("gemma3"), &tokens(70), &Options { chunk, ..options() });
        let error = worst(&got, &want);
        assert!(error < REORDERED_REL, "chunk {chunk}: {error:e}");
    }
}

#[test]
fn a_prefix_of_a_prompt_has_the_same_rows() {
    for arch in ARCHS {
        let all = state(&tiny(arch), &tokens(40), &options());
        let part = state(&tiny(arch), &tokens(13), &options());
        for layer in 0..2 {
            for part_of in [Part::K, Part::V] {
                let section = 0;
                let Ok(all) = all.rows_f32(section, layer, part_of) else { continue };
                let part = part.rows_f32(section, layer, part_of).unwrap();
                let error: f32 = part.iter().zip(&all).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(error < 1e-4, "{arch} layer {layer} {part_of}: {error}");
            }
        }
    }
}

#[test]
fn instruction_sets_agree() {
    for arch in ARCHS {
        let want = state(&tiny(arch), &tokens(50), &Options { isa: Isa::Scalar, ..options() });
        for isa in Isa::ALL.into_iter().filter(|i| i.is_available()) {
            let error = worst(&state(&tiny(arch), &tokens(50), &Options { isa, ..options() }), &want);
            assert!(error < REORDERED_REL, "{arch} {}: {error:e}", isa.name());
        }
    }
}

#[test]
fn fused_qkv_is_the_three_below_each_other() {
    for arch in ["llama", "qwen2"] {
        let t = tiny(arch);
        let separate = t.gguf();
        let mut w = t.writer();
        for i in 0..t.n_layer {
            for (suffix, ne0) in [("weight", Some(u64::from(t.n_embd))), ("bias", None)] {
                let names = ["attn_q", "attn_k", "attn_v"].map(|n| format!("blk.{i}.{n}.{suffix}"));
                if separate.tensor(&names[0]).is_none() {
                    continue;
                }
                let parts: Vec<_> = names.iter().map(|n| separate.tensor(n).unwrap()).collect();
                let rows: u64 = parts.iter().map(|p| if ne0.is_some() { p.ne[1] } else { p.ne[0] }).sum();
                let ne: Vec<u64> = ne0.into_iter().chain([rows]).collect();
                let bytes = parts.iter().flat_map(|p| p.data.iter().copied()).collect();
                w.tensor(&format!("blk.{i}.attn_qkv.{suffix}"), F32, &ne, bytes).unwrap();
            }
        }
        let fused = without(&w, |name| ["attn_q.", "attn_k.", "attn_v."].iter().any(|n| name.contains(n)));
        let fused =
            Model::load(&fused).map(|m| format!("{:?}", m.weights().layers[1].mixer.attention().unwrap().k.bias));
        let separate =
            Model::load(&separate).map(|m| format!("{:?}", m.weights().layers[1].mixer.attention().unwrap().k.bias));
        assert_eq!(fused.unwrap(), separate.unwrap());
    }
}

/// The file less some tensors.
pub fn without(w: &gguf::write::Writer, drop: impl Fn(&str) -> bool) -> gguf::Gguf {
    crate::tiny::open(&less(w, drop))
}

/// The same as something to write on.
pub fn less(w: &gguf::write::Writer, drop: impl Fn(&str) -> bool) -> gguf::write::Writer {
    let all = crate::tiny::open(w);
    let mut kept = gguf::write::Writer::empty();
    for (key, value) in all.keys() {
        match value {
            gguf::Value::U32(v) => kept.u32(key, v),
            gguf::Value::F32(v) => kept.f32(key, v),
            gguf::Value::Str(v) => kept.str(key, v),
            _ => continue,
        };
    }
    for t in all.tensors().filter(|t| !drop(t.name)) {
        kept.tensor(t.name, t.ty, t.shape(), t.data.to_vec()).unwrap();
    }
    kept
}

struct StopAfter(std::cell::Cell<usize>);
impl Hooks for StopAfter {
    fn stop(&self) -> bool {
        self.0.set(self.0.get().saturating_sub(1));
        self.0.get() == 0
    }
    fn progress(&mut self, _: usize, _: usize, _: usize, _: usize) {}
}

struct Nowhere;
impl KvSink for Nowhere {
    fn put_rows(&mut self, _: u32, _: Part, _: Range<u32>, _: &[f32]) -> Result<(), kvlayout::SinkError> {
        Ok(())
    }
    fn wants(&self, _: u32, _: Part) -> Range<u32> {
        0..u32::MAX
    }
    fn touched(&self) -> bool {
        false
    }
    fn commit(self: Box<Self>) -> Result<kvlayout::Receipt, kvlayout::SinkError> {
        unreachable!("nothing is committed here")
    }
}

#[test]
fn a_run_stops_between_any_two_commands() {
    let gguf = tiny("llama").gguf();
    let model = Model::load(&gguf).unwrap();
    let n = Plan::new(model.spec(), 30, 12).commands().count();
    for after in 1..=n {
        let mut hooks = StopAfter(std::cell::Cell::new(after));
        let result = run(&model, &tokens(30), &Options { chunk: 12, ..options() }, &mut Nowhere, &mut hooks);
        assert!(matches!(result, Err(Error::Stopped)), "stopped before command {after} of {n}");
    }
}

#[test]
fn ids_outside_the_vocabulary_are_refused() {
    let gguf = tiny("llama").gguf();
    let model = Model::load(&gguf).unwrap();
    let result = run(&model, &[1, 2, 50], &options(), &mut Nowhere, &mut Quiet);
    assert!(matches!(result, Err(Error::Token { index: 2, id: 50, n_vocab: 50 })));
}

#[test]
fn what_is_not_finite_is_found_where_it_arises() {
    // One NaN in the embedding of token 20, which stands at position 1; an infinite weight in layer 1's gate.
    let t = tiny("llama");
    let mut embd = t.gguf().tensor("token_embd.weight").unwrap().to_f32().unwrap();
    embd[20 * 64 + 5] = f32::NAN;
    let mut w = t.writer();
    w = replace(&w, "token_embd.weight", &embd);
    check_not_finite(&w, 0, 1);

    let mut gate = t.gguf().tensor("blk.1.ffn_gate.weight").unwrap().to_f32().unwrap();
    gate[77] = f32::INFINITY;
    let w = replace(&t.writer(), "blk.1.ffn_gate.weight", &gate);
    check_not_finite(&w, 1, 0);

    let mut query = t.gguf().tensor("blk.1.attn_q.weight").unwrap().to_f32().unwrap();
    query[77] = -f32::NAN;
    let w = replace(&t.writer(), "blk.1.attn_q.weight", &query);
    check_not_finite(&w, 1, 0);
}

fn replace(w: &gguf::write::Writer, name: &str, values: &[f32]) -> gguf::write::Writer {
    let all = crate::tiny::open(w);
    let mut out = gguf::write::Writer::empty();
    for (key, value) in all.keys() {
        match value {
            gguf::Value::U32(v) => out.u32(key, v),
            gguf::Value::F32(v) => out.f32(key, v),
            gguf::Value::Str(v) => out.str(key, v),
            _ => continue,
        };
    }
    for t in all.tensors() {
        let data = if t.name == name { f32_bytes(values) } else { t.data.to_vec() };
        out.tensor(t.name, t.ty, t.shape(), data).unwrap();
    }
    out
}

/// Returns what was not finite.
pub fn check_not_finite(w: &gguf::write::Writer, layer: u32, position: u32) -> &'static str {
    let gguf = crate::tiny::open(w);
    let model = Model::load(&gguf).unwrap();
    let result = run(&model, &tokens(30), &options(), &mut Nowhere, &mut Quiet);
    match result {
        Err(Error::NotFinite { layer: l, position: p, what }) => {
            assert_eq!((l, p), (layer, position));
            what
        }
        other => panic!("wanted layer {layer} position {position}, found {other:?}"),
    }
}

#[test]
fn the_plan_prices_what_a_model_costs() {
    // 2 x parameters per token, less the output side, less everything but K and V in the last layer.
    let gguf = tiny("llama").gguf();
    let model = Model::load(&gguf).unwrap();
    let plan = Plan::new(model.spec(), 20, 8);
    let layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96;
    let attention: u64 = (1..=20u64).sum::<u64>() * 4 * 64;
    assert_eq!(plan.flops(), 20 * 2 * (2 * layer + 64 * 32 * 2) + 2 * attention);
    assert!(plan.to_string().lines().count() == plan.commands().count() + 1);
}

/// A model of architecture phi3 with factors for two context sizes, from one of llama's.
pub fn phi3(w: &gguf::write::Writer) -> gguf::write::Writer {
    let all = crate::tiny::open(w);
    let mut out = gguf::write::Writer::new("phi3");
    for (key, value) in all.keys() {
        let key = key.replace("llama.", "phi3.");
        match value {
            gguf::Value::U32(v) => out.u32(&key, v),
            gguf::Value::F32(v) => out.f32(&key, v),
            _ => continue,
        };
    }
    out.u32("phi3.rope.scaling.original_context_length", 512);
    for t in all.tensors().filter(|t| !t.name.contains("ffn_gate") && !t.name.contains("ffn_up")) {
        out.tensor(t.name, t.ty, t.shape(), t.data.to_vec()).unwrap();
    }
    for i in 0..3 {
        let parts = ["ffn_gate", "ffn_up"].map(|n| all.tensor(&format!("blk.{i}.{n}.weight")).unwrap());
        let bytes = parts.iter().flat_map(|p| p.data.iter().copied()).collect();
        let ne = [parts[0].ne[0], 2 * parts[0].ne[1]];
        out.tensor(&format!("blk.{i}.ffn_up.weight"), F32, &ne, bytes).unwrap();
    }
    out.tensor_f32("rope_factors_short.weight", &[8], &[1.0; 8]).unwrap();
    out.tensor_f32("rope_factors_long.weight", &[8], &[2.0; 8]).unwrap();
    out
}
