//! Mixtures of experts: against the plain network that they are made of, and with bad numbers.

use crate::models::refusal;
use crate::run::{REORDERED_REL, less, options, state_of, tokens, without, worst};
use crate::tiny::{F32, Tiny, f32_bytes, open, tiny};
use gguf::write::Writer;
use prefill::{Model, Options, Plan};

/// Experts that are all the same, with weights that add up to one, are one plain network.
#[test]
fn equal_experts_are_a_plain_network() {
    let width = 24;
    let plain = Tiny { n_ff: width, ..tiny("qwen3") };
    let plain_gguf = plain.gguf();
    for (n, used) in [(5, 2), (5, 5), (64, 3), (1, 1)] {
        let mixed = Tiny { experts: Some((n, used)), ..tiny("qwen3moe") };
        // The router alone stays; attention and embeddings are the plain model's, and so are each expert's matrices.
        let mut w = less(&mixed.writer(), |name| !name.contains("ffn_gate_inp"));
        for t in plain_gguf.tensors() {
            if let Some(name) =
                ["ffn_gate", "ffn_up", "ffn_down"].iter().find(|n| t.name.contains(&format!("{n}.weight")))
            {
                let ne = [t.ne[0], t.ne[1], u64::from(n)];
                let name = t.name.replace(name, &format!("{name}_exps"));
                w.tensor(&name, F32, &ne, t.data.repeat(n as usize)).unwrap();
            } else {
                w.tensor(t.name, t.ty, t.shape(), t.data.to_vec()).unwrap();
            }
        }
        let want = state_of(&plain_gguf, &tokens(60), &options());
        for chunk in [1, 13, 60] {
            let got = state_of(&open(&w), &tokens(60), &Options { chunk, ..options() });
            let error = worst(&got, &want);
            assert!(error < REORDERED_REL, "{used} of {n} experts, chunk {chunk}: {error:e}");
        }
    }
}

#[test]
fn one_wrong_number_of_experts_is_refused_with_key_or_tensor() {
    type Change = fn(&mut Writer);
    let table: &[(&str, &str, Change)] = &[
        ("qwen3moe.expert_count", "found 0", |w| {
            w.u32("qwen3moe.expert_count", 0);
        }),
        ("qwen3moe.expert_count", "no such key", |w| {
            w.remove("qwen3moe.expert_count");
        }),
        ("qwen3moe.expert_count", "from 1 to 1024", |w| {
            w.u32("qwen3moe.expert_count", u32::MAX);
        }),
        ("qwen3moe.expert_used_count", "found 6, wanted a number from 1 to 5", |w| {
            w.u32("qwen3moe.expert_used_count", 6);
        }),
        ("qwen3moe.expert_used_count", "found 0", |w| {
            w.u32("qwen3moe.expert_used_count", 0);
        }),
        ("qwen3moe.expert_used_count", "no such key", |w| {
            w.remove("qwen3moe.expert_used_count");
        }),
        ("qwen3moe.expert_used_count", "one for all layers", |w| {
            w.array_u32("qwen3moe.expert_used_count", &[2, 2, 1]);
        }),
        ("qwen3moe.expert_feed_forward_length", "from 1 to", |w| {
            w.u32("qwen3moe.expert_feed_forward_length", 1 << 30);
        }),
        ("qwen3moe.expert_group_count", "divisor of the 5", |w| {
            w.u32("qwen3moe.expert_group_count", 2);
        }),
        ("qwen3moe.expert_group_count", "fewer than the 5", |w| {
            w.u32("qwen3moe.expert_group_count", 5);
        }),
        ("blk.0.exp_probs_b.bias", "is not known", |w| {
            w.tensor("blk.0.exp_probs_b.bias", F32, &[5], f32_bytes(&[0.0; 5])).unwrap();
        }),
        ("blk.0.ffn_up_exps.scale", "is not known", |w| {
            w.tensor("blk.0.ffn_up_exps.scale", F32, &[5], f32_bytes(&[0.0; 5])).unwrap();
        }),
    ];
    for (name, wanted, change) in table {
        let message = refusal("qwen3moe", change);
        assert!(message.contains(name) && message.contains(wanted), "{message}\nshould name {name} and {wanted:?}");
    }
}

#[test]
fn a_missing_router_is_named() {
    let w = without(&tiny("qwen3moe").writer(), |name| name == "blk.1.ffn_gate_inp.weight");
    let message = Model::load(&w).expect_err("no router").to_string();
    assert!(
        message.contains("\"blk.1.ffn_gate_inp.weight\": found no such tensor, wanted one of shape [64, 5]"),
        "{message}"
    );
}

#[test]
fn an_expert_too_few_is_refused_with_both_shapes() {
    let mut w = less(&tiny("qwen3moe").writer(), |name| name == "blk.2.ffn_down_exps.weight");
    w.tensor("blk.2.ffn_down_exps.weight", F32, &[24, 64, 4], f32_bytes(&[0.0; 24 * 64 * 4])).unwrap();
    let message = Model::load(&open(&w)).expect_err("four experts of five").to_string();
    assert!(
        message.contains("\"blk.2.ffn_down_exps.weight\": found shape [24, 64, 4], wanted [24, 64, 5]"),
        "{message}"
    );
}

#[test]
fn plain_architectures_refuse_experts_and_llama_takes_them() {
    let message = refusal("qwen3", |w| {
        w.u32("qwen3.expert_count", 4);
    });
    assert!(message.contains("qwen3.expert_count"), "{message}");
    let message = refusal("llama", |w| {
        w.u32("llama.expert_count", 4).u32("llama.expert_used_count", 2);
    });
    assert!(message.contains("blk.0.ffn_gate_inp.weight"), "{message}");
    let message = refusal("llama", |w| {
        w.u32("llama.expert_used_count", 2);
    });
    assert!(message.contains("llama.expert_used_count"), "{message}");
}

#[test]
fn a_plan_shows_the_experts_and_what_they_cost() {
    let gguf = tiny("qwen2moe").gguf();
    let model = Model::load(&gguf).unwrap();
    let text = Plan::new(model.spec(), 10, 4).to_string();
    for step in [
        "Route { k: 64, experts: 5, used: 2 }",
        "ExpertsGateUp { k: 64, n: 24, used: 2 }",
        "ExpertsDown { k: 24, n: 64, used: 2 }",
        "Shared { k: 64, n: 32 }",
    ] {
        assert!(text.contains(step), "{step} in\n{text}");
    }
    // Memory grows with the prompt by the residual stream and one layer's rows alone, and with the chunk.
    let memory = |n, chunk| Plan::new(model.spec(), n, chunk).memory_bytes();
    let plain = tiny("qwen2").gguf();
    let plain = Model::load(&plain).unwrap();
    let growth =
        |m: &Model<'_>| Plan::new(m.spec(), 4096, 64).memory_bytes() - Plan::new(m.spec(), 2048, 64).memory_bytes();
    assert_eq!(growth(&model), growth(&plain));
    assert!(memory(4096, 512) > memory(4096, 64) + 448 * 2 * 4 * (2 * 64 + 3 * 24));
}
