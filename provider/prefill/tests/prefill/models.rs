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
    for arch in ["llama", "qwen2", "qwen3", "gemma3", "qwen2moe", "qwen3moe"] {
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
