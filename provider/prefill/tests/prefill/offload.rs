//! Whole prefills with their products on a device that plays an NPU: the host's result within int8, and whole whatever happens.

use crate::tiny::{Tiny, tiny};
use kvlayout::{CacheType, KvMap, MemSpace, Scatter, State, StateVersion, compare};
use npu_kernels::fake::{Fake, Misfortune};
use npu_kernels::{Catalogue, Pool, Spec};
use prefill::{CacheParams, Hooks, KvSink, Model, Offload, Options, Plan, Where, place, run_on};
use std::sync::Mutex;

/// One scale a row and one an output, 8 bits each, against the host's exact f32 products, through three layers of random
/// weights; relative L2 of a layer's K or V. Largest seen 1.6e-2.
const INT8_REL: f64 = 3e-2;
/// Tokens of the prompts here: two blocks of 128 rows, the second not full.
const N: usize = 150;

struct Quiet;
impl Hooks for Quiet {
    fn stop(&self) -> bool {
        false
    }
    fn progress(&mut self, _: usize, _: usize, _: usize, _: usize) {}
}

fn tokens() -> Vec<u32> {
    (0..N as u32).map(|i| (i * 17 + 3) % 50).collect()
}

fn options(chunk: usize) -> Options {
    Options { threads: 2, chunk, type_k: CacheType::F32, type_v: CacheType::F32, ..Options::default() }
}

fn state(t: &Tiny, chunk: usize, offload: Option<&Mutex<Offload>>) -> State {
    let gguf = t.gguf();
    let model = Model::load(&gguf).expect("a good model");
    let ty = CacheType::F32;
    let params = CacheParams {
        type_k: ty,
        type_v: ty,
        v_trans: false,
        swa_full: true,
        n_stream: 1,
        n_ctx: None,
        attn_rot: true,
    };
    let ids: Vec<i32> = tokens().iter().map(|t| *t as i32).collect();
    let map = KvMap::state_file(&model.kv_spec(&params).unwrap(), &ids, StateVersion::V3).unwrap();
    let (size, mut bytes) = (map.size(), Vec::new());
    let mut sink = Box::new(Scatter::new(map, MemSpace::new(&mut bytes, size).unwrap()).unwrap());
    run_on(&model, &tokens(), &options(chunk), offload, &mut *sink, &mut Quiet).expect("a run");
    sink.commit().expect("every row was handed over");
    State::parse(&bytes).expect("a state")
}

fn fake() -> Fake {
    let kernels = [(128, 128), (128, 256)].map(|(k, n)| Spec::int8(&format!("i8 {k} x {n}"), "", k, n));
    Fake::new(Catalogue::new(kernels.into()).unwrap(), Pool::new(1).unwrap())
}

fn plan(t: &Tiny) -> Plan {
    let gguf = t.gguf();
    Plan::new(Model::load(&gguf).unwrap().spec(), N, 512)
}

fn offload(t: &Tiny, fake: Fake) -> Mutex<Offload> {
    let mut offload = Offload::new(Box::new(fake), Box::new(()));
    offload.self_test(&plan(t).products());
    Mutex::new(offload)
}

fn worst(a: &State, b: &State) -> f64 {
    assert!(compare::structure(a, b).is_empty());
    compare::numeric(a, b).expect("the same shape").iter().map(|e| e.rel_l2).fold(0.0, f64::max)
}

#[test]
fn a_device_computes_the_same_within_int8_for_every_architecture_and_chunk() {
    for arch in ["llama", "qwen2", "qwen3", "gemma3"] {
        let t = tiny(arch);
        let host = state(&t, 512, None);
        let device = offload(&t, fake());
        let got = state(&t, 512, Some(&device));
        let error = worst(&got, &host);
        println!("{arch}: {error:.2e}");
        assert!(error > 1e-4 && error < INT8_REL, "{arch}: {error:e}");
        let usage = device.lock().unwrap().usage().clone();
        // Three layers of three, one, two and one projections; of the last only keys and values.
        assert_eq!((usage.on_device, usage.on_host, usage.made_up), (2 * 7 + 2, 0, 0), "{arch} {usage:?}");
        assert_eq!((usage.launches, usage.packed), (2 * (2 * 4 + 1), [9, 0]), "{arch}");
        if arch != "gemma3" {
            for chunk in [7, 128, 140] {
                let again = state(&t, chunk, Some(&offload(&t, fake())));
                assert!(
                    again.write() == got.write(),
                    "{arch}: a row's scale is its own, whatever chunk it is in ({chunk})"
                );
            }
        }
    }
}

/// Queries on a kernel of 96 rows, keys and values on one of 128: blocks of the two begin at different rows.
#[test]
fn kernels_of_different_heights_compute_every_row() {
    let t = tiny("llama");
    let mut kernels = [64, 32].map(|n| Spec::int8(&format!("i8 128 x {n}"), "", 128, n));
    kernels[0].m = 96;
    let fake = Fake::new(Catalogue::new(kernels.into()).unwrap(), Pool::new(1).unwrap());
    let device = offload(&t, fake);
    let got = state(&t, 512, Some(&device));
    let usage = device.lock().unwrap().usage().clone();
    // Queries, keys, values, output and down of two layers, and keys and values of the third at once: two blocks each. Gate and
    // up are too wide for both kernels.
    assert_eq!((usage.on_device, usage.on_host, usage.launches), (2 * 5 + 2, 2 * 2, 2 * (2 * 5 + 1)), "{usage:?}");
    let error = worst(&got, &state(&t, 512, None));
    assert!(error > 1e-4 && error < INT8_REL, "{error:e}");
}

#[test]
fn a_device_that_fails_costs_time_and_not_the_result() {
    let t = tiny("llama");
    let host = state(&t, 512, None);
    let whole = state(&t, 512, Some(&offload(&t, fake())));
    let usual = [
        Misfortune::Timeout,
        Misfortune::Abort,
        Misfortune::Gone,
        Misfortune::Busy,
        Misfortune::WrongC,
        Misfortune::StaleC,
    ];
    for m in usual {
        // Four launches are the self-tests', then 18 follow.
        for at in [4, 5, 11, 21] {
            let mut fake = fake();
            fake.plan(at, m);
            let device = offload(&t, fake);
            let got = state(&t, 512, Some(&device));
            let device = device.into_inner().unwrap();
            let usage = device.usage();
            assert_eq!(usage.failures.len(), 1, "{m:?} at {at}: {usage:?}");
            assert!(usage.made_up > 0, "{m:?} at {at}: {usage:?}");
            let error = worst(&got, &host);
            assert!(error < INT8_REL, "{m:?} at {at}: {error:e}");
            if device.lost().is_some() && at == 4 {
                assert!(got.write() == host.write(), "{m:?}: nothing but the host computed");
            }
            assert!(got.write() != whole.write(), "{m:?} at {at}: the host made up for something");
        }
    }
    // In the self-test already.
    for m in usual {
        let mut fake = fake();
        fake.plan(0, m);
        fake.plan(2, m);
        let device = offload(&t, fake);
        assert!(state(&t, 512, Some(&device)).write() == host.write(), "{m:?}");
        assert_eq!(device.lock().unwrap().usage().launches, 0, "{m:?}");
    }
}

#[test]
fn every_command_has_a_place_and_a_reason() {
    let t = tiny("llama");
    let plan = plan(&t);
    assert!(place(&plan, None).iter().all(|p| p.parts == [(0, Where::Host("no device".into()))]));
    let device = offload(&t, fake()).into_inner().unwrap();
    let places = place(&plan, Some(&device));
    let count = |want: &str| places.iter().flat_map(|p| &p.parts).filter(|(_, w)| w.to_string().contains(want)).count();
    assert_eq!(count("device: i8 128 x 128, 2 launches"), 3 * 2 + 1);
    assert_eq!(count("device: i8 128 x 256, 2 launches"), 2);
    assert!(count("host: no matrix product with a weight") > 10);
    // A device without the wide kernel: gate and up apart.
    let kernels = vec![Spec::int8("only", "", 128, 128)];
    let only = Fake::new(Catalogue::new(kernels).unwrap(), Pool::new(1).unwrap());
    let places = place(&plan, Some(&offload(&t, only).into_inner().unwrap()));
    let apart = places.iter().filter(|p| p.parts.len() == 2 && p.parts.iter().all(|(n, _)| *n == 96)).count();
    assert_eq!(apart, 2);
    let untested = Offload::new(Box::new(fake()), Box::new(()));
    let reasons = place(&plan, Some(&untested));
    assert!(reasons.iter().any(|p| p.parts.iter().any(|(_, w)| w.to_string().contains("not tested yet"))));
}
