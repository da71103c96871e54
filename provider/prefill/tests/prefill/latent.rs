//! Latent attention: what must not matter, and bad numbers.

use crate::run::{options, state_of, tokens};
use crate::tiny::{Rng, open};
use gguf::write::Writer;
use kvlayout::{CacheType, Part};
use prefill::{Error, Model, Options};

const E: u64 = 64;

/// A model of `n_layer` layers, plain networks all but in name: rows of 24 channels and 8 that carry the position.
fn writer(n_layer: u32) -> Writer {
    let mut w = Writer::new("deepseek2");
    let key = |k: &str| format!("deepseek2.{k}");
    for (k, v) in [
        ("block_count", n_layer),
        ("embedding_length", E as u32),
        ("context_length", 4096),
        ("feed_forward_length", 96),
        ("expert_count", 4),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 24),
        ("expert_shared_count", 1),
        ("leading_dense_block_count", n_layer),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 1),
        ("attention.q_lora_rank", 20),
        ("attention.kv_lora_rank", 24),
        ("attention.key_length", 32),
        ("attention.value_length", 24),
        ("attention.key_length_mla", 20),
        ("attention.value_length_mla", 10),
        ("rope.dimension_count", 8),
    ] {
        w.u32(&key(k), v);
    }
    w.f32(&key("attention.layer_norm_rms_epsilon"), 1e-5);
    let mut rng = Rng(0x5EED);
    rng.tensor(&mut w, "token_embd.weight", &[E, 50], 0.0, 0.5);
    for i in 0..n_layer {
        let t = |n: &str| format!("blk.{i}.{n}.weight");
        for (name, ne) in [("attn_norm", E), ("attn_q_a_norm", 20), ("attn_kv_a_norm", 24), ("ffn_norm", E)] {
            rng.tensor(&mut w, &t(name), &[ne], 1.0, 0.1);
        }
        let matrices: [(&str, &[u64]); 9] = [
            ("attn_q_a", &[E, 20]),
            ("attn_q_b", &[20, 80]),
            ("attn_kv_a_mqa", &[E, 32]),
            ("attn_k_b", &[12, 24, 4]),
            ("attn_v_b", &[24, 10, 4]),
            ("attn_output", &[40, E]),
            ("ffn_gate", &[E, 96]),
            ("ffn_up", &[E, 96]),
            ("ffn_down", &[96, E]),
        ];
        for (name, ne) in matrices {
            rng.tensor(&mut w, &t(name), ne, 0.0, 0.12);
        }
    }
    w
}

#[test]
fn threads_and_chunks_change_no_bit() {
    let gguf = open(&writer(3));
    let want = state_of(&gguf, &tokens(70), &options()).write();
    for (chunk, threads) in [(1, 1), (7, 5), (12, 2), (64, 1), (70, 5), (1000, 2)] {
        let got = state_of(&gguf, &tokens(70), &Options { chunk, threads, ..options() }).write();
        assert!(got == want, "chunk {chunk}, {threads} threads");
    }
}

#[test]
fn only_rows_of_keys_are_handed_over() {
    let gguf = open(&writer(3));
    let model = Model::load(&gguf).unwrap();
    let params = crate::run::params(CacheType::F16);
    let spec = model.kv_spec(&params).unwrap();
    assert!(spec.sections[0].k_only());
    let quantised = model.kv_spec(&crate::run::params(CacheType::Q8_0)).expect_err("not built").to_string();
    assert!(quantised.contains("q8_0 for latent attention"), "{quantised}");
    assert!(spec.sections[0].layers.iter().all(|l| (l.n_embd_k, l.n_embd_v) == (32, 0)));
    let state = state_of(&gguf, &tokens(5), &options());
    assert_eq!(state.tensors(), [(0, 0, Part::K), (0, 1, Part::K), (0, 2, Part::K)]);
}

#[test]
fn queries_grow_in_steps_whose_length_the_file_says() {
    let state = |length: Option<u32>| {
        let mut w = writer(2);
        w.f32("deepseek2.attention.temperature_scale", 0.5);
        length.map(|n| w.u32("deepseek2.attention.temperature_length", n));
        let gguf = open(&w);
        Model::load(&gguf).map(|_| state_of(&gguf, &tokens(20), &options()).rows_f32(0, 1, Part::K).unwrap())
    };
    let (early, never) = (state(Some(10)).unwrap(), state(Some(1000)).unwrap());
    assert!(early[..10 * 32] == never[..10 * 32] && early[10 * 32..] != never[10 * 32..]);
    for length in [None, Some(0)] {
        let message = state(length).expect_err("a scale alone").to_string();
        assert!(message.contains("deepseek2.attention.temperature_length"), "{message}");
    }
}

#[test]
fn one_wrong_number_is_refused_with_its_key() {
    let refusal = |key: &str, value: u32| {
        let mut w = writer(1);
        w.u32(&format!("deepseek2.{key}"), value);
        match Model::load(&open(&w)) {
            Err(e @ (Error::Key { .. } | Error::Unsupported { .. })) => e.to_string(),
            other => panic!("{key} = {value}: {other:?}"),
        }
    };
    for (key, value) in [
        ("attention.head_count_kv", 4),
        ("attention.key_length", 33),
        ("attention.key_length_mla", 0),
        ("attention.value_length_mla", 0),
        ("attention.kv_lora_rank", 0),
        ("rope.dimension_count", 20),
        ("rope.dimension_count", 0),
        ("attention.q_lora_rank", u32::MAX),
    ] {
        let message = refusal(key, value);
        assert!(message.contains("deepseek2."), "{key} = {value}: {message}");
    }
}
