//! Models whose layers carry a state along: what they hand over, that chunks do not matter, and what is refused.

use crate::models::refusal;
use crate::run::{options, params, state, tokens};
use crate::tiny::tiny;
use gguf::write::Writer;
use kvlayout::{CacheType, Part, Section};
use prefill::{Model, Options, Plan};

#[test]
fn chunks_change_no_bit_at_any_length() {
    for arch in ["qwen35", "lfm2", "granitehybrid", "nemotron_h", "falcon-h1"] {
        for n in [1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 100, 1000] {
            let want = state(&tiny(arch), &tokens(n), &options()).write();
            for chunk in [1, 7, 64, n].into_iter().filter(|c| n < 200 || *c > 1) {
                let got = state(&tiny(arch), &tokens(n), &Options { chunk, ..options() }).write();
                assert!(got == want, "{arch}: {n} tokens in chunks of {chunk}");
            }
        }
    }
}

#[test]
fn the_state_is_that_after_the_last_token() {
    for (arch, r_width, s_width) in [("qwen35", 3 * 64, 4 * 8 * 8), ("lfm2", 2 * 64, 0)] {
        let state = state(&tiny(arch), &tokens(2), &options());
        let [Section::Kv(_), Section::Rec(rec)] = &state.sections[..] else { panic!("{arch}: {:?}", state.shape()) };
        assert_eq!((rec.n_layer, rec.cells.len(), rec.cells[0].pos), (3, 1, 1), "{arch}");
        let widths = |t: &[kvlayout::Tensor]| t.iter().map(|t| t.width).collect::<Vec<_>>();
        assert_eq!((widths(rec.r()), widths(rec.s())), (vec![r_width; 2], vec![s_width; 2]), "{arch}");
        // A prompt shorter than the convolution leaves zeros where there was no token, channel by channel, oldest first.
        let taps = if arch == "qwen35" { 3 } else { 2 };
        let r = state.rows_f32(1, 0, Part::R).unwrap();
        let zeros = |history: &[f32]| history.iter().take_while(|v| **v == 0.0).count();
        assert!(r.chunks(taps).all(|history| zeros(history) == taps - 2), "{arch}: {r:?}");
        assert_eq!(state.cell_ext, arch == "qwen35");
    }
}

/// Layers with a state, layers with keys and values, and how many numbers each of the former keeps.
#[test]
fn every_layer_hands_over_what_it_has() {
    let mamba2 = (3 * (32 + 2 * 2 * 8), 32 * 8);
    for (arch, recurrent, attends, (r, s)) in [
        ("granitehybrid", vec![0, 2], vec![1], mamba2),
        ("nemotron_h", vec![0], vec![1], mamba2),
        ("falcon-h1", vec![0, 1, 2], vec![0, 1, 2], mamba2),
    ] {
        let gguf = tiny(arch).gguf();
        let spec = Model::load(&gguf).unwrap().kv_spec(&params(CacheType::F32)).unwrap();
        let rec = spec.recurrent.expect("a recurrent memory");
        let found: Vec<_> = rec.layers.iter().map(|l| (l.layer, l.n_embd_r, l.n_embd_s)).collect();
        assert_eq!(rec.n_layer, 3, "{arch}: of the model, those without any memory included");
        assert_eq!(found, recurrent.iter().map(|l| (*l, r, s)).collect::<Vec<_>>(), "{arch}");
        let found: Vec<_> = spec.sections[0].layers.iter().map(|l| (l.layer, l.n_embd_k, l.n_embd_v)).collect();
        assert_eq!(found, attends.iter().map(|l| (*l, 32, 32)).collect::<Vec<_>>(), "{arch}");
    }
}

/// What stands behind the last layer with a memory is never computed.
#[test]
fn a_plan_ends_with_the_last_layer_that_has_a_memory() {
    let gguf = tiny("nemotron_h").gguf();
    let model = Model::load(&gguf).unwrap();
    assert_eq!((model.spec().n_layer(), model.spec().last_layer()), (3, 1));
    let plan = Plan::new(model.spec(), 10, 4);
    assert_eq!(plan.commands().map(|c| c.layer).max(), Some(1));
    // The scan is computed to its end, attention to its keys and values.
    let text = plan.to_string();
    assert!(text.contains("MambaOut { k: 32, n: 64, adds: false }"), "{text}");
    assert!(text.contains("Qkv { k: 64, n: [0, 32, 32] }") && !text.contains("Attend"), "{text}");
    // Side by side, the second adds to what the first gave.
    let gguf = tiny("falcon-h1").gguf();
    let text = Plan::new(Model::load(&gguf).unwrap().spec(), 10, 4).to_string();
    assert!(text.contains("MambaOut { k: 32, n: 64, adds: true }"), "{text}");
}

#[test]
fn what_layers_are_made_of_is_refused_by_key() {
    type Change = fn(&mut Writer);
    let changes: &[(&str, &str, &str, Change)] = &[
        ("nemotron_h", "feed_forward_length", "no such key", |w| {
            w.remove("nemotron_h.feed_forward_length");
        }),
        ("nemotron_h", "feed_forward_length", "2 entries", |w| {
            w.array_u32("nemotron_h.feed_forward_length", &[0, 96]);
        }),
        ("nemotron_h", "feed_forward_length", "a width in every layer", |w| {
            w.array_u32("nemotron_h.feed_forward_length", &[96, 96, 96]);
        }),
        ("nemotron_h", "feed_forward_length", "4294967295", |w| {
            w.array_u32("nemotron_h.feed_forward_length", &[0, 0, u32::MAX]);
        }),
        ("nemotron_h", "attention.head_count_kv", "no such key", |w| {
            w.remove("nemotron_h.attention.head_count_kv");
        }),
        ("granitehybrid", "ssm.time_step_rank", "a divisor of 32", |w| {
            w.u32("granitehybrid.ssm.time_step_rank", 5);
        }),
        ("falcon-h1", "ssm.group_count", "a divisor of 4", |w| {
            w.u32("falcon-h1.ssm.group_count", 3);
        }),
        ("falcon-h1", "attention.head_count_kv", "found 0", |w| {
            w.u32("falcon-h1.attention.head_count_kv", 0);
        }),
    ];
    for (arch, key, says, change) in changes {
        let message = refusal(arch, change);
        assert!(message.contains(&format!("{arch}.{key}")) && message.contains(says), "{key}: {message}");
    }
    // The graph leaves this bias out, though the loader takes it.
    let message = refusal("falcon-h1", |w| {
        w.tensor_f32("blk.0.attn_output.bias", &[64], &[0.0; 64]).unwrap();
    });
    assert!(message.contains("blk.0.attn_output.bias"), "{message}");
}

#[test]
fn one_wrong_number_is_refused_with_key_and_value() {
    type Change = fn(&mut Writer);
    let qwen35: &[(&str, &str, Change)] = &[
        ("ssm.conv_kernel", "no such key", |w| {
            w.remove("qwen35.ssm.conv_kernel");
        }),
        ("ssm.conv_kernel", "found 0", |w| {
            w.u32("qwen35.ssm.conv_kernel", 0);
        }),
        ("ssm.conv_kernel", "4294967295", |w| {
            w.u32("qwen35.ssm.conv_kernel", u32::MAX);
        }),
        ("ssm.state_size", "no such key", |w| {
            w.remove("qwen35.ssm.state_size");
        }),
        ("ssm.state_size", "found 0", |w| {
            w.u32("qwen35.ssm.state_size", 0);
        }),
        ("ssm.inner_size", "no such key", |w| {
            w.remove("qwen35.ssm.inner_size");
        }),
        ("ssm.inner_size", "32", |w| {
            w.u32("qwen35.ssm.inner_size", 48);
        }),
        ("ssm.time_step_rank", "no such key", |w| {
            w.remove("qwen35.ssm.time_step_rank");
        }),
        ("ssm.group_count", "no such key", |w| {
            w.remove("qwen35.ssm.group_count");
        }),
        ("ssm.group_count", "a divisor of 4", |w| {
            w.u32("qwen35.ssm.group_count", 3);
        }),
        ("full_attention_interval", "found 0", |w| {
            w.u32("qwen35.full_attention_interval", 0);
        }),
        ("attention.recurrent_layers", "2 entries", |w| {
            w.array_bool("qwen35.attention.recurrent_layers", &[true, false]);
        }),
        ("rope.dimension_sections", "no such key", |w| {
            w.remove("qwen35.rope.dimension_sections");
        }),
    ];
    for (key, says, change) in qwen35 {
        let message = refusal("qwen35", change);
        assert!(message.contains(&format!("qwen35.{key}")) && message.contains(says), "{key}: {message}");
    }
    let lfm2: &[(&str, Change)] = &[
        ("shortconv.l_cache", |w| {
            w.remove("lfm2.shortconv.l_cache");
        }),
        ("shortconv.l_cache", |w| {
            w.u32("lfm2.shortconv.l_cache", 1);
        }),
        ("attention.head_count_kv", |w| {
            w.remove("lfm2.attention.head_count_kv");
        }),
        ("attention.head_count_kv", |w| {
            w.remove("lfm2.attention.head_count_kv");
            w.array_u32("lfm2.attention.head_count_kv", &[0, 3, 0]);
        }),
        ("attention.sliding_window", |w| {
            w.u32("lfm2.attention.sliding_window", 8);
        }),
    ];
    for (key, change) in lfm2 {
        let message = refusal("lfm2", change);
        assert!(message.contains(&format!("lfm2.{key}")), "{key}: {message}");
    }
}

#[test]
fn tensors_of_another_shape_are_refused() {
    let message = refusal("qwen35", |w| {
        w.u32("qwen35.ssm.conv_kernel", 5);
    });
    assert!(message.contains("blk.0.ssm_conv1d.weight") && message.contains("[5, 64]"), "{message}");
    let message = refusal("qwen35", |w| {
        w.u32("qwen35.ssm.group_count", 4);
    });
    assert!(message.contains("blk.0.attn_qkv.weight") && message.contains("[64, 96]"), "{message}");
    let message = refusal("qwen35", |w| {
        w.remove("qwen35.full_attention_interval");
        w.array_bool("qwen35.attention.recurrent_layers", &[true, true, false]);
    });
    assert!(message.contains("blk.1.attn_qkv.weight") && message.contains("no such tensor"), "{message}");
}
