//! Models whose layers carry a state along: what they hand over, that chunks do not matter, and what is refused.

use crate::models::refusal;
use crate::run::{options, state, tokens};
use crate::tiny::tiny;
use gguf::write::Writer;
use kvlayout::{Part, Section};
use prefill::Options;

#[test]
fn chunks_change_no_bit_at_any_length() {
    for arch in ["qwen35", "lfm2"] {
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
