//! Models with a second embedding, several streams, and layers that share keys and values: what must not matter, and bad numbers.

use crate::run::{options, params, state_of, tokens};
use crate::tiny::{Rng, open};
use gguf::write::Writer;
use kvlayout::{CacheType, Part};
use prefill::{Error, Model, Options, Plan};

const E: u64 = 64;

/// A model of four layers of the architecture, the last of gemma4's without keys and values of its own; `windowed` layers have
/// heads of 8 channels in gemma4, all others of 16.
fn writer(arch: &'static str, windowed: [bool; 4], experts: bool) -> Writer {
    let mut w = Writer::new(arch);
    let key = |k: &str| format!("{arch}.{k}");
    let part: u64 = if arch == "gemma3n" { 256 } else { 12 };
    for (k, v) in [
        ("block_count", 4),
        ("embedding_length", E as u32),
        ("context_length", 4096),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("attention.sliding_window", 8),
    ] {
        w.u32(&key(k), v);
    }
    if arch == "gemma4" {
        for (k, v) in [
            ("attention.key_length_swa", 8),
            ("attention.value_length_swa", 8),
            ("rope.dimension_count_swa", 8),
            ("attention.shared_kv_layers", 1),
            ("embedding_length_per_layer_input", part as u32),
        ] {
            w.u32(&key(k), v);
        }
    }
    if experts {
        for (k, v) in [("expert_count", 4), ("expert_used_count", 2), ("expert_feed_forward_length", 24)] {
            w.u32(&key(k), v);
        }
    }
    w.f32(&key("attention.layer_norm_rms_epsilon"), 1e-5);
    w.array_bool(&key("attention.sliding_window_pattern"), &windowed);
    let mut rng = Rng(0x5EED);
    let w_ = &mut w;
    let mut put = |name: &str, ne: &[u64], mean: f32, deviation: f32| rng.tensor(w_, name, ne, mean, deviation);
    put("token_embd.weight", &[E, 50], 0.0, 0.1);
    put("per_layer_token_embd.weight", &[4 * part, 50], 0.0, 0.2);
    put("per_layer_model_proj.weight", &[E, 4 * part], 0.0, 0.12);
    put("per_layer_proj_norm.weight", &[part], 1.0, 0.1);
    if arch == "gemma3n" {
        put("altup_proj.weight", &[E, E, 3], 0.0, 0.12);
        put("altup_unembd_proj.weight", &[E, E, 3], 0.0, 0.12);
    } else {
        put("rope_freqs.weight", &[8], 3.0, 0.1);
    }
    for (i, windowed) in windowed.into_iter().enumerate() {
        let head = if windowed && arch == "gemma4" { 8 } else { 16 };
        let t = |n: &str| format!("blk.{i}.{n}.weight");
        for name in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"] {
            put(&t(name), &[E], 1.0, 0.1);
        }
        let mut matrices: Vec<(&str, Vec<u64>)> = vec![
            ("attn_q", vec![E, 4 * head]),
            ("attn_output", vec![4 * head, E]),
            ("ffn_gate", vec![E, 96]),
            ("ffn_up", vec![E, 96]),
            ("ffn_down", vec![96, E]),
            ("inp_gate", vec![E, part]),
            ("proj", vec![part, E]),
        ];
        if i < 3 || arch == "gemma3n" {
            matrices.push(("attn_k", vec![E, 2 * head]));
            put(&t("attn_k_norm"), &[head], 0.5, 0.1);
        }
        // The third layer's values are what keys are projected to.
        if i < 2 || arch == "gemma3n" {
            matrices.push(("attn_v", vec![E, 2 * head]));
        }
        put(&t("attn_q_norm"), &[head], 0.5, 0.1);
        if arch == "gemma3n" {
            for name in ["altup_router_norm", "altup_correct_scale", "laurel_post_norm"] {
                put(&t(name), &[E], 1.0, 0.1);
            }
            for (name, k, n) in [("altup_router", E, 4), ("altup_predict_coef", 4, 16), ("altup_correct_coef", 4, 4)] {
                put(&t(name), &[k, n], 0.0, 0.3);
            }
            matrices.extend([("laurel_l", vec![E, 64]), ("laurel_r", vec![64, E])]);
        } else {
            put(&t("layer_output_scale"), &[1], 0.8, 0.1);
        }
        if experts {
            put(&format!("blk.{i}.ffn_gate_inp.scale"), &[E], 8.0, 0.1);
            put(&format!("blk.{i}.ffn_down_exps.scale"), &[4], 1.0, 0.1);
            for name in ["post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"] {
                put(&t(name), &[E], 1.0, 0.1);
            }
            let more = [("ffn_gate_up_exps", vec![E, 48, 4]), ("ffn_down_exps", vec![24, E, 4])];
            matrices.extend(more.into_iter().chain([("ffn_gate_inp", vec![E, 4])]));
        }
        for (name, ne) in matrices {
            put(&t(name), &ne, 0.0, 0.12);
        }
    }
    w
}

/// What changes the order of sums.
const NO_WINDOW: [bool; 4] = [false; 4];
const WINDOWS: [bool; 4] = [true, true, false, true];

#[test]
fn threads_and_chunks_change_no_bit() {
    for (arch, experts) in [("gemma4", false), ("gemma4", true), ("gemma3n", false)] {
        let gguf = open(&writer(arch, NO_WINDOW, experts));
        let want = state_of(&gguf, &tokens(70), &options()).write();
        for (chunk, threads) in [(1, 1), (7, 5), (12, 2), (64, 1), (70, 5), (1000, 2)] {
            let got = state_of(&gguf, &tokens(70), &Options { chunk, threads, ..options() }).write();
            assert!(got == want, "{arch}, experts {experts}, chunk {chunk}, {threads} threads");
        }
    }
}

#[test]
fn only_layers_that_own_keys_and_values_have_rows() {
    let gguf = open(&writer("gemma4", WINDOWS, false));
    let model = Model::load(&gguf).unwrap();
    let spec = model.kv_spec(&params(CacheType::F16)).unwrap();
    let rows = |i: usize| spec.sections[i].layers.iter().map(|l| (l.layer, l.n_embd_k, l.n_embd_v)).collect::<Vec<_>>();
    assert_eq!(rows(0), [(2, 32, 32)]);
    assert_eq!(rows(1), [(0, 16, 16), (1, 16, 16)]);
    let state = state_of(&gguf, &tokens(5), &options());
    let both = [Part::K, Part::V];
    let wanted = [(0, 0), (1, 0), (1, 1)].into_iter().flat_map(|(s, l)| both.map(|p| (s, l, p)));
    let mut found = state.tensors();
    found.sort_unstable_by_key(|(s, l, p)| (*s, *l, *p == Part::V));
    assert_eq!(found, wanted.collect::<Vec<_>>());
    // Nothing of the layer that shares is computed.
    assert!(Plan::new(model.spec(), 5, 5).commands().all(|c| c.layer < 3));
}

#[test]
fn other_streams_are_in_the_estimate() {
    let growth = |arch| {
        let gguf = open(&writer(arch, NO_WINDOW, false));
        let model = Model::load(&gguf).unwrap();
        let memory = |n| Plan::new(model.spec(), n, 64).memory_bytes();
        memory(4096) - memory(2048)
    };
    // Three more streams of f32, and angles for 16 channels instead of 8 in windowed layers; all else that grows with the prompt
    // is the same.
    assert_eq!(growth("gemma3n") - growth("gemma4"), 2048 * (3 * E + 16 - 8) * 4);
}

#[test]
fn one_wrong_number_is_refused_with_its_key() {
    let refusal = |change: &dyn Fn(&mut Writer)| {
        let mut w = writer("gemma4", WINDOWS, false);
        change(&mut w);
        match Model::load(&open(&w)) {
            Err(e @ (Error::Key { .. } | Error::Unsupported { .. })) => e.to_string(),
            other => panic!("{other:?}"),
        }
    };
    for (key, value) in [
        // Two layers, one with a window and one without, have to keep theirs.
        ("attention.shared_kv_layers", 3),
        ("attention.shared_kv_layers", u32::MAX),
        ("attention.key_length_swa", 0),
        ("attention.value_length_swa", 16),
        ("rope.dimension_count_swa", 0),
        ("rope.dimension_count_swa", 10),
        ("rope.dimension_count_swa", 7),
        ("embedding_length_per_layer_input", u32::MAX),
        // Flags, and not a period.
        ("attention.sliding_window_pattern", 4),
    ] {
        let message = refusal(&|w| {
            w.remove(&format!("gemma4.{key}"));
            w.u32(&format!("gemma4.{key}"), value);
        });
        assert!(message.contains(&format!("gemma4.{key}")), "{key} = {value}: {message}");
    }
    for key in ["embedding_length_per_layer_input", "attention.sliding_window_pattern"] {
        let message = refusal(&|w| {
            w.remove(&format!("gemma4.{key}"));
        });
        assert!(message.contains(&format!("gemma4.{key}")), "{key}: {message}");
    }
}
