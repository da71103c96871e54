//! The provider's products by the int8 contract against the oracle's by the same contract, both from the same page and from no
//! line of code in common. With an f32 cache nothing else is rounded on the way, and all layers have to be the same. The provider's
//! host kernels are the plain ones (`--isa scalar`): where weights are quantised, faster ones round attention to 16 bits, which is
//! nothing beside a server and yet makes other codes.
//!
//! What a server says of such files is the matter of the cases `int8` and `int8-tiny`.

use conformance::check::{self, Distances};
use conformance::contract::Kernels;
use conformance::oracle::{Arithmetic, Oracle};
use conformance::pins::{Cache, Pins};
use conformance::producer::{Job, Produced, Producer as _, Provider};
use conformance::shape::{CacheOptions, Shape};
use conformance::{fixtures, locate, run, tolerances};
use gguf::Gguf;
use kvlayout::{CacheType, State, StateVersion};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

const CACHE: CacheOptions =
    CacheOptions { type_k: CacheType::F32, type_v: CacheType::F32, flash_attn: true, swa_full: false, n_stream: 1 };
const VERSION: StateVersion = StateVersion::V4;

struct Bench {
    model: PathBuf,
    oracle: Oracle,
    shape: Shape,
    provider: Provider,
    kernels: Kernels,
    dir: tempfile::TempDir,
}

impl Bench {
    fn new(model: impl FnOnce(&Path) -> PathBuf) -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let model = model(dir.path());
        let gguf = Gguf::open(&model).unwrap();
        let provider = dir.path().join("provider");
        let program = locate::provider_for_tests().unwrap();
        std::fs::write(&provider, format!("#!/bin/sh\nexec '{}' --isa scalar \"$@\"\n", program.display())).unwrap();
        std::fs::set_permissions(&provider, std::fs::Permissions::from_mode(0o755)).unwrap();
        Bench {
            oracle: Oracle::load(&gguf).unwrap(),
            shape: Shape::of(&gguf).unwrap(),
            provider: Provider::new(&provider, 1),
            kernels: Kernels::named(&gguf, &dir.path().join("kernels")).unwrap(),
            model,
            dir,
        }
    }

    fn tiny(name: &str) -> Bench {
        Bench::new(|dir| fixtures::find(name).unwrap().write(dir).unwrap())
    }

    fn oracle(&self, tokens: &[i32], arithmetic: Arithmetic) -> State {
        let spec = self.shape.kv_spec(&CACHE);
        State::parse(&self.oracle.state(tokens, &spec, VERSION, arithmetic, None).unwrap()).unwrap()
    }

    fn provider(&mut self, tokens: &[i32]) -> State {
        let out = self.dir.path().join("out.bin");
        let job = Job {
            name: "int8".into(),
            model: &self.model,
            tokens,
            version: VERSION,
            cache: CACHE,
            n_ctx: 512,
            chunk: None,
            arithmetic: Arithmetic::Int8,
            kernels: Some(&self.kernels),
            server_file: Path::new("none"),
        };
        let produced = self.provider.produce(&job, &out).unwrap();
        assert!(matches!(produced, Produced::File { .. }), "{produced:?}");
        State::parse(&std::fs::read(&out).unwrap()).unwrap()
    }

    fn distances(&self, reference: &State, other: &State) -> Distances {
        check::distances(reference, other, &self.shape).unwrap().0
    }
}

/// The worst of K and V.
fn worst(d: &Distances) -> f64 {
    d.layer[0].max(d.layer[1])
}

const IDS: [i32; 6] = [11, 48, 85, 122, 159, 196];

#[test]
fn the_providers_products_are_the_oracles_in_all_layers() {
    for name in [
        "tiny-llama-f32",
        "tiny-llama-f16",
        "tiny-llama-q8_0",
        "tiny-llama-q4_0",
        "tiny-llama-q4_1",
        "tiny-qwen2-f32",
        "tiny-qwen2-q4_k",
        "tiny-qwen3-f32",
        "tiny-gemma3-f32",
    ] {
        let mut bench = Bench::tiny(name);
        let (theirs, ours) = (bench.provider(&IDS), bench.oracle(&IDS, Arithmetic::Int8));
        let d = bench.distances(&ours, &theirs);
        println!("{name}: {:e}", worst(&d));
        assert!(worst(&d) <= tolerances::INT8_SAME, "{name}: {:e}", worst(&d));
        // And it is the contract that they agree on: without it they are a thousand times as far apart.
        let exact = bench.distances(&bench.oracle(&IDS, Arithmetic::Exact), &theirs);
        assert!(worst(&exact) > 1e3 * tolerances::INT8_SAME, "{name}: {:e}", worst(&exact));
    }
}

/// Thirty layers of a real model, whose activations have a few large channels.
#[test]
fn smollm2_is_the_oracles_in_all_layers() {
    let (pins, cache) = (Pins::load().unwrap(), Cache::open().unwrap());
    let mut bench = Bench::new(|_| run::model_path(&pins, &cache, "smollm2").unwrap());
    let mut same = 0;
    for id in [1, 260, 5000, 20_000] {
        let tokens = [id];
        let (theirs, ours) = (bench.provider(&tokens), bench.oracle(&tokens, Arithmetic::Int8));
        let d = worst(&bench.distances(&ours, &theirs));
        println!("{id}: {d:e}");
        same += usize::from(d <= tolerances::INT8_SAME);
    }
    // Of the 100,000 codes of a token some lie so near to the middle of two that they may be either.
    assert!(same >= 3, "{same} of 4");
}
