//! Models that must be refused: one change to a good tiny model, one clear sentence.

use crate::tiny::{F32, tiny};
use prefill::{Error, Model};

pub fn refusal(arch: &'static str, change: impl Fn(&mut gguf::write::Writer)) -> String {
    let mut w = tiny(arch).writer();
    change(&mut w);
    let gguf = crate::tiny::open(&w);
    match Model::load(&gguf) {
        Ok(_) => panic!("{arch}: loaded"),
        Err(e) => e.to_string(),
    }
}

#[test]
fn good_models_load() {
    for arch in ["llama", "qwen2", "qwen3", "gemma3", "qwen2moe", "qwen3moe", "qwen35", "lfm2"] {
        let gguf = tiny(arch).gguf();
        Model::load(&gguf).unwrap_or_else(|e| panic!("{arch}: {e}"));
    }
}

#[test]
fn each_required_key_is_named_when_it_is_missing() {
    for key in [
        "block_count",
        "embedding_length",
        "context_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ] {
        let key = format!("llama.{key}");
        let message = refusal("llama", |w| {
            w.remove(&key);
        });
        assert!(message.contains(&key) && message.contains("no such key"), "{message}");
    }
}

#[test]
fn one_wrong_number_is_refused_with_key_and_value() {
    type Change = fn(&mut gguf::write::Writer);
    let table: &[(&str, Change)] = &[
        ("llama.block_count", |w| {
            w.u32("llama.block_count", 0);
        }),
        ("llama.block_count", |w| {
            w.u32("llama.block_count", 10_000);
        }),
        ("llama.attention.head_count", |w| {
            w.u32("llama.attention.head_count", 0);
        }),
        ("llama.attention.head_count_kv", |w| {
            w.u32("llama.attention.head_count_kv", 3);
        }),
        ("llama.attention.head_count_kv", |w| {
            w.u32("llama.attention.head_count_kv", 0);
        }),
        ("llama.attention.head_count", |w| {
            w.array_u32("llama.attention.head_count", &[4, 4]);
        }),
        ("llama.embedding_length", |w| {
            w.u32("llama.embedding_length", u32::MAX);
        }),
        ("llama.attention.layer_norm_rms_epsilon", |w| {
            w.f32("llama.attention.layer_norm_rms_epsilon", f32::NAN);
        }),
        ("llama.attention.layer_norm_rms_epsilon", |w| {
            w.f32("llama.attention.layer_norm_rms_epsilon", -1.0);
        }),
        ("llama.rope.freq_base", |w| {
            w.f32("llama.rope.freq_base", 0.0);
        }),
        ("llama.rope.dimension_count", |w| {
            w.u32("llama.rope.dimension_count", 8);
        }),
        ("llama.rope.scaling.factor", |w| {
            w.f32("llama.rope.scaling.factor", -2.0);
        }),
        ("llama.rope.scaling.type", |w| {
            w.str("llama.rope.scaling.type", "longrope");
        }),
        ("llama.expert_used_count", |w| {
            w.u32("llama.expert_count", 8);
        }),
        ("llama.attention.value_length", |w| {
            w.u32("llama.attention.value_length", 32);
        }),
        ("llama.attention.causal", |w| {
            w.bool("llama.attention.causal", false);
        }),
        ("llama.block_count", |w| {
            w.str("llama.block_count", "three");
        }),
    ];
    for (key, change) in table {
        let message = refusal("llama", change);
        assert!(message.contains(key), "{key}: {message}");
    }
    let message = refusal("gemma3", |w| {
        w.remove("gemma3.attention.sliding_window_pattern");
        w.array_bool("gemma3.attention.sliding_window_pattern", &[true, false]);
    });
    assert!(message.contains("sliding_window_pattern"), "{message}");
}

#[test]
fn tensors_are_checked_against_the_numbers() {
    // More layers than tensors; another width; a tensor that nobody asks for; factors of the wrong length.
    let message = refusal("llama", |w| {
        w.u32("llama.block_count", 4);
    });
    assert!(message.contains("blk.3.") && message.contains("no such tensor"), "{message}");
    let message = refusal("llama", |w| {
        w.u32("llama.block_count", 2);
    });
    assert!(message.contains("blk.2."), "{message}");
    let message = refusal("llama", |w| {
        w.u32("llama.feed_forward_length", 100);
    });
    assert!(message.contains("ffn_gate") && message.contains("[64, 96]") && message.contains("[64, 100]"), "{message}");
    let message = refusal("llama", |w| {
        w.tensor_f32("blk.1.attn_sinks.weight", &[4], &[0.0; 4]).unwrap();
    });
    assert!(message.contains("blk.1.attn_sinks.weight"), "{message}");
    let message = refusal("llama", |w| {
        w.tensor_f32("rope_freqs.weight", &[4], &[1.0; 4]).unwrap();
    });
    assert!(message.contains("rope_freqs.weight") && message.contains("[8]"), "{message}");
    let message = refusal("qwen2", |w| {
        w.tensor_f32("rope_freqs.weight", &[8], &[1.0; 8]).unwrap();
    });
    assert!(message.contains("rope_freqs.weight"), "{message}");
    let message = refusal("llama", |w| {
        w.tensor("blk.0.attn_gate.weight", F32, &[1], vec![0; 4]).unwrap();
    });
    assert!(message.contains("attn_gate"), "{message}");
}

#[test]
fn an_unknown_architecture_is_refused_by_name() {
    let mut w = gguf::write::Writer::new("mamba9");
    w.u32("mamba9.block_count", 1);
    let gguf = crate::tiny::open(&w);
    match Model::load(&gguf) {
        Err(e @ Error::Unsupported { .. }) => assert!(e.to_string().contains("mamba9"), "{e}"),
        other => panic!("{:?}", other.map(|_| ())),
    }
}

#[test]
fn a_missing_output_matrix_is_no_matter_and_head_size_may_be_explicit() {
    let mut t = tiny("qwen3");
    (t.n_embd, t.n_head, t.n_head_kv, t.head) = (96, 5, 1, 32);
    let gguf = t.gguf();
    let model = Model::load(&gguf).unwrap();
    assert_eq!(model.spec().layers[0].mixer.attention().unwrap().head_k, 32);
    assert!(gguf.tensor("output.weight").is_none());
}

/// What the keys of single families may not say: (architecture, key or tensor, the change).
#[test]
fn one_wrong_number_of_a_family_is_refused_with_its_name() {
    type Change = fn(&mut gguf::write::Writer);
    let table: &[(&'static str, &str, Change)] = &[
        ("gpt2", "gpt2.attention.layer_norm_epsilon", |_| {}),
        ("gpt2", "position_embd.weight", |w| {
            w.f32("gpt2.attention.layer_norm_epsilon", 1e-5);
        }),
        ("gpt2", "position_embd.weight", |w| {
            w.f32("gpt2.attention.layer_norm_epsilon", 1e-5);
            w.tensor_f32("position_embd.weight", &[64, 7], &[0.0; 64 * 7]).unwrap();
        }),
        ("gptneox", "gptneox.use_parallel_residual", |w| {
            w.f32("gptneox.attention.layer_norm_epsilon", 1e-5);
        }),
        ("qwen2vl", "qwen2vl.rope.dimension_sections", |_| {}),
        ("qwen2vl", "qwen2vl.rope.dimension_sections", |w| {
            w.array_i32("qwen2vl.rope.dimension_sections", &[4, 4]);
        }),
        ("qwen2vl", "qwen2vl.rope.dimension_sections", |w| {
            w.array_i32("qwen2vl.rope.dimension_sections", &[0, 0, 0, 0]);
        }),
        ("qwen3vl", "qwen3vl.rope.dimension_sections", |w| {
            w.array_i32("qwen3vl.rope.dimension_sections", &[4, -4, 4, 0]);
        }),
        ("gemma2", "gemma2.attn_logit_softcapping", |w| {
            w.f32("gemma2.attn_logit_softcapping", -50.0);
        }),
        ("olmo2", "olmo2.attention.sliding_window_pattern", |w| {
            w.u32("olmo2.attention.sliding_window", 8);
            w.array_bool("olmo2.attention.sliding_window_pattern", &[true]);
        }),
        ("mpt", "mpt.attention.max_alibi_bias", |w| {
            w.f32("mpt.attention.layer_norm_epsilon", 1e-5).f32("mpt.attention.max_alibi_bias", -8.0);
        }),
        ("mistral3", "mistral3.rope.scaling.original_context_length", |w| {
            w.f32("mistral3.attention.temperature_scale", 0.1);
            w.u32("mistral3.rope.scaling.original_context_length", 0);
        }),
        ("apertus", "xielu.alpha_n", |_| {}),
        ("apertus", "xielu.alpha_n", |w| {
            w.array_f32("xielu.alpha_n", &[0.5, 0.5]);
        }),
        ("phi3", "rope_factors_long.weight", |w| {
            w.tensor_f32("rope_factors_short.weight", &[8], &[1.0; 8]).unwrap();
        }),
        ("phi3", "rope_factors_long.weight", |w| {
            w.tensor_f32("rope_factors_short.weight", &[8], &[1.0; 8]).unwrap();
            w.tensor_f32("rope_factors_long.weight", &[4], &[1.0; 4]).unwrap();
        }),
        ("phi3", "rope_factors_short.weight", |w| {
            w.tensor_f32("rope_factors_short.weight", &[8], &[0.0; 8]).unwrap();
        }),
        ("granite", "granite.residual_scale", |w| {
            w.f32("granite.residual_scale", f32::NAN);
        }),
        ("qwen", "qwen.feed_forward_length", |w| {
            w.u32("qwen.feed_forward_length", 97);
        }),
        ("nanbeige", "nanbeige.nextn_predict_layers", |w| {
            w.u32("nanbeige.nextn_predict_layers", 1);
        }),
        ("exaone4", "exaone4.nextn_predict_layers", |w| {
            w.u32("exaone4.nextn_predict_layers", 400);
        }),
        ("nanbeige", "nanbeige.num_loops", |w| {
            w.u32("nanbeige.num_loops", 2);
        }),
        ("stablelm", "blk.0.attn_q_norm.weight", |w| {
            w.f32("stablelm.attention.layer_norm_epsilon", 1e-5);
            w.tensor_f32("blk.0.attn_q_norm.weight", &[16, 3], &[1.0; 48]).unwrap();
        }),
    ];
    for (arch, what, change) in table {
        let message = refusal(arch, change);
        assert!(message.contains(what) && message.lines().count() == 1, "{arch}, {what}: {message}");
    }
}

#[test]
fn rotations_that_depend_on_the_context_ask_for_it() {
    use prefill::CacheParams;
    // Phi-3's matrices, made of llama's.
    let gguf = crate::tiny::open(&crate::run::phi3(&tiny("llama").writer()));
    let model = Model::load(&gguf).unwrap();
    let params = |n_ctx| CacheParams {
        type_k: kvlayout::CacheType::F16,
        type_v: kvlayout::CacheType::F16,
        v_trans: false,
        swa_full: false,
        n_stream: 1,
        n_ctx,
        attn_rot: true,
    };
    let message = model.kv_spec(&params(None)).unwrap_err().to_string();
    assert!(message.contains("context size") && message.contains("-c"), "{message}");
    assert!(model.kv_spec(&params(Some(4096))).is_ok());
    let factors = &model.spec().ropes[0].factors;
    assert_eq!(factors.of(Some(512)).unwrap(), Some(&[1.0; 8][..]));
    // 513 cells are 768 for the decoder.
    assert_eq!(factors.of(Some(513)).unwrap(), Some(&[2.0; 8][..]));
}
