//! The harness notices mistakes: the oracle passes against real servers, and every deliberate mistake fails on at least one
//! model. One server per model; the judging is the same code that judges the provider.

use conformance::check::{self, Distances, Measure, Want};
use conformance::oracle::{Arithmetic, Mistake, Oracle};
use conformance::pins::{Cache, Pins};
use conformance::server::{Build, Server, ServerOptions};
use conformance::shape::{CacheOptions, Shape};
use conformance::{contract, fixtures};
use gguf::Gguf;
use kvlayout::{CacheType, State};

const MODELS: [&str; 8] = [
    "tiny-llama-f32",
    "tiny-llama-freqs-f32",
    "tiny-qwen2-f32",
    "tiny-qwen3-f32",
    "tiny-qwen3-yarn-f32",
    "tiny-gemma3-f32",
    "tiny-gemma3-linear-f32",
    "tiny-llama-f16",
];

struct Bench {
    oracle: Oracle,
    shape: Shape,
    tokens: Vec<i32>,
    cache: CacheOptions,
    server: State,
}

impl Bench {
    fn new(model: &str, pin: &str) -> Bench {
        let pins = Pins::load().unwrap();
        let cache = Cache::open().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = fixtures::find(model).unwrap().write(dir.path()).unwrap();
        let build = Build::pinned(&pins, &cache, pin).unwrap();
        let options = ServerOptions { n_ctx: 512, ..ServerOptions::new(&path, dir.path()) };
        let mut server = Server::start(&build, &options, &dir.path().join("log")).unwrap();
        server.client.ban = fixtures::unprintable();
        let tokens: Vec<i32> = (0..90).map(|i| (i * 37 + 11) % 317 + 3).collect();
        server.client.prefill(&tokens, 0).unwrap();
        server.client.save(0, "a.bin").unwrap();
        let state = State::parse(&std::fs::read(dir.path().join("a.bin")).unwrap()).unwrap();
        let gguf = Gguf::open(&path).unwrap();
        let cache = CacheOptions {
            type_k: CacheType::F16,
            type_v: CacheType::F16,
            flash_attn: true,
            swa_full: false,
            n_stream: 1,
        };
        Bench { oracle: Oracle::load(&gguf).unwrap(), shape: Shape::of(&gguf).unwrap(), tokens, cache, server: state }
    }

    /// The oracle's file.
    fn state(&self, arithmetic: Arithmetic, mistake: Option<Mistake>) -> State {
        let spec = self.shape.kv_spec(&self.cache);
        let bytes = self.oracle.state(&self.tokens, &spec, self.server.version, arithmetic, mistake).unwrap();
        State::parse(&bytes).unwrap()
    }

    fn distances(&self, reference: &State, other: &State) -> Distances {
        check::distances(reference, other, &self.shape).unwrap().0
    }

    /// Failed measures of a file in a case of the int8 contract, where `right` is the oracle's.
    fn judge_int8(&self, right: &State, state: &State) -> Vec<Measure> {
        let cost = self.distances(&self.server, right);
        let mut failed = contract::judge(&self.distances(right, state), &self.distances(&self.server, state), &cost);
        failed.retain(|m| !m.passes());
        failed
    }

    /// Differences of structure and failed measures.
    fn judge(&self, mistake: Option<Mistake>) -> (Vec<String>, Vec<Measure>) {
        let spec = self.shape.kv_spec(&self.cache);
        let bytes = self.oracle.state(&self.tokens, &spec, self.server.version, Arithmetic::Exact, mistake).unwrap();
        let want = Want {
            tokens: &self.tokens,
            version: self.server.version,
            spec: &spec,
            n_vocab: self.shape.n_vocab,
            n_ctx: 512,
            handoff: true,
        };
        let structure = check::structure(&bytes, &self.server, &want);
        let (d, _) = check::distances(&self.server, &State::parse(&bytes).unwrap(), &self.shape).unwrap();
        let mut measures =
            check::judge(&d, self.shape.weights, [self.cache.type_k, self.cache.type_v], &Distances::ZERO);
        measures.retain(|m| !m.passes());
        (structure, measures)
    }
}

#[test]
fn every_deliberate_mistake_is_caught() {
    let benches: Vec<_> = MODELS.iter().map(|m| (*m, Bench::new(m, "v4"))).collect();
    for (model, bench) in &benches {
        let (structure, failed) = bench.judge(None);
        assert!(structure.is_empty() && failed.is_empty(), "{model} without a mistake: {structure:?} {failed:?}");
    }
    let mut report = String::new();
    for mistake in Mistake::ALL {
        let mut caught = Vec::new();
        for (model, bench) in &benches {
            let (structure, failed) = bench.judge(Some(mistake));
            // A mistake in the numbers is not one of structure.
            assert!(structure.is_empty(), "{model} with {}: {structure:?}", mistake.name());
            if let Some(worst) = failed.iter().max_by(|a, b| (a.value / a.limit).total_cmp(&(b.value / b.limit))) {
                caught.push(format!("{model} ({} is {:.1} times its limit)", worst.what, worst.value / worst.limit));
            }
        }
        report += &format!("{}: {}\n", mistake.name(), caught.join(", "));
        assert!(!caught.is_empty(), "{} is not noticed on any model\n{report}", mistake.name());
    }
    println!("{report}");
}

/// 8-bit codes are far from a server's numbers, and hide nothing all the same.
#[test]
fn every_deliberate_mistake_is_caught_where_products_are_int8() {
    let mut caught = [const { String::new() }; Mistake::ALL.len()];
    for model in MODELS {
        let bench = Bench::new(model, "v4");
        let right = bench.state(Arithmetic::Int8, None);
        let failed = bench.judge_int8(&right, &bench.state(Arithmetic::Exact, None));
        assert!(failed.iter().any(|m| m.what.starts_with("layer 0 ")), "{model}: products that are not int8 pass");
        for (mistake, caught) in Mistake::ALL.into_iter().zip(&mut caught) {
            let failed = bench.judge_int8(&right, &bench.state(Arithmetic::Int8, Some(mistake)));
            if let Some(worst) = failed.iter().max_by(|a, b| (a.value / a.limit).total_cmp(&(b.value / b.limit))) {
                *caught += &format!(" {model} ({} is {:.1} times its limit)", worst.what, worst.value / worst.limit);
            }
        }
    }
    for (mistake, caught) in Mistake::ALL.into_iter().zip(&caught) {
        println!("{}:{caught}", mistake.name());
        assert!(!caught.is_empty(), "{} is not noticed on any model", mistake.name());
    }
}

#[test]
fn the_oracle_agrees_with_every_server_build() {
    for pin in ["v3", "v2"] {
        for model in ["tiny-llama-yarn-f32", "tiny-gemma3-partial-f32"] {
            let (structure, failed) = Bench::new(model, pin).judge(None);
            assert!(structure.is_empty() && failed.is_empty(), "{model} on {pin}: {structure:?} {failed:?}");
        }
    }
}

/// gemma3's window pattern as an array is passed over by llama.cpp, which then takes every sixth layer for a global one.
/// Readers that honour the array would make a cache of another shape.
#[test]
fn a_window_pattern_that_is_an_array_means_six() {
    let bench = Bench::new("tiny-gemma3-partial-f32", "v4");
    let layers = |s: usize| match &bench.server.sections[s] {
        kvlayout::Section::Kv(kv) => kv.streams[0].k.len(),
        kvlayout::Section::Rec(_) => 0,
    };
    assert_eq!((layers(0), layers(1)), (1, 6));
}
