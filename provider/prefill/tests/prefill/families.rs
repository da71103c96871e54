//! Models whose layers are made of parts that few others have: that chunks and threads change nothing, and bad numbers.

use crate::run::{check_not_finite, options, state_of, tokens};
use crate::tiny::{Rng, open};
use gguf::write::Writer;
use prefill::{Error, Model, Options, Plan};

const E: u64 = 64;
const LAYERS: u32 = 4;

/// Names and shapes.
type Tensors = Vec<(&'static str, Vec<u64>)>;

/// Keys and tensors of a family; of the latter those of layer `i`.
struct Family {
    arch: &'static str,
    keys: &'static [(&'static str, u32)],
    layer: fn(u32) -> Tensors,
}

const ATTENTION: [(&str, [u64; 2]); 4] =
    [("attn_q", [E, 64]), ("attn_k", [E, 32]), ("attn_v", [E, 32]), ("attn_output", [64, E])];
const GATED: [(&str, [u64; 2]); 3] = [("ffn_gate", [E, 96]), ("ffn_up", [E, 96]), ("ffn_down", [96, E])];

fn norms(names: &[&'static str]) -> Tensors {
    names.iter().map(|n| (*n, vec![E])).collect()
}

fn matrices(all: &[(&'static str, [u64; 2])]) -> Tensors {
    all.iter().map(|(name, ne)| (*name, ne.to_vec())).collect()
}

fn experts() -> Tensors {
    vec![
        ("ffn_gate_inp", vec![E, 4]),
        ("ffn_gate_exps", vec![E, 24, 4]),
        ("ffn_up_exps", vec![E, 24, 4]),
        ("ffn_down_exps", vec![24, E, 4]),
    ]
}

fn shared() -> Tensors {
    matrices(&[("ffn_gate_shexp", [E, 24]), ("ffn_up_shexp", [E, 24]), ("ffn_down_shexp", [24, E])])
}

/// The third layer attends, by rows of 24 channels and 8 that carry no position; heads of 8 channels fade channel by channel.
fn kimi_linear(i: u32) -> Tensors {
    let mut all = norms(&["attn_norm", "ffn_norm"]);
    if i == 2 {
        all.extend(matrices(&[("attn_q", [E, 80]), ("attn_kv_a_mqa", [E, 32]), ("attn_output", [40, E])]));
        all.extend([("attn_kv_a_norm", vec![24]), ("attn_k_b", vec![12, 24, 4]), ("attn_v_b", vec![24, 10, 4])]);
    } else {
        let square = [("attn_q", [E, 32]), ("attn_k", [E, 32]), ("attn_v", [E, 32]), ("attn_output", [32, E])];
        all.extend(matrices(&square));
        let low = [("ssm_f_a", [E, 8]), ("ssm_f_b", [8, 32]), ("ssm_g_a", [E, 8]), ("ssm_g_b", [8, 32])];
        all.extend(matrices(&low));
        all.extend(["ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"].map(|name| (name, vec![4, 1, 32])));
        all.extend([("ssm_beta", vec![E, 4]), ("ssm_norm", vec![8]), ("ssm_dt.bias", vec![32]), ("ssm_a", vec![1, 4])]);
    }
    if i == 0 {
        all.extend(matrices(&GATED));
    } else {
        all.extend(experts());
        all.extend(shared());
        all.push(("exp_probs_b.bias", vec![4]));
    }
    all
}

fn minicpm3(_: u32) -> Tensors {
    let mut all = norms(&["attn_norm", "ffn_norm"]);
    all.extend([("attn_q_a_norm", vec![20]), ("attn_kv_a_norm", vec![24])]);
    all.extend(matrices(&[("attn_q_a", [E, 20]), ("attn_q_b", [20, 80]), ("attn_kv_a_mqa", [E, 32])]));
    all.extend(matrices(&[("attn_kv_b", [24, 4 * (12 + 10)]), ("attn_output", [40, E])]));
    all.extend(matrices(&GATED));
    all
}

fn llama4(i: u32) -> Tensors {
    let mut all = norms(&["attn_norm", "ffn_norm"]);
    all.extend(matrices(&ATTENTION));
    if i.is_multiple_of(2) {
        all.extend(matrices(&GATED));
    } else {
        all.extend(experts());
        all.extend(shared());
    }
    all
}

fn smallthinker(_: u32) -> Tensors {
    [norms(&["attn_norm", "ffn_norm"]), matrices(&ATTENTION), experts()].concat()
}

fn arctic(_: u32) -> Tensors {
    let plain = [("ffn_gate", [E, E]), ("ffn_up", [E, E]), ("ffn_down", [E, E])];
    [norms(&["attn_norm", "ffn_norm", "ffn_norm_exps"]), matrices(&ATTENTION), matrices(&plain), experts()].concat()
}

fn grok(_: u32) -> Tensors {
    let norms = norms(&["attn_norm", "ffn_norm", "attn_output_norm", "layer_output_norm"]);
    [norms, matrices(&ATTENTION), matrices(&GATED), experts()].concat()
}

fn afmoe(i: u32) -> Tensors {
    let mut all = norms(&["attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"]);
    all.extend(matrices(&ATTENTION));
    all.extend([("attn_q_norm", vec![16]), ("attn_k_norm", vec![16]), ("attn_gate", vec![E, 64])]);
    match i {
        0 => all.extend(matrices(&GATED)),
        _ => all.extend([experts(), shared(), vec![("exp_probs_b.bias", vec![4])]].concat()),
    }
    all
}

fn glm4moe(i: u32) -> Tensors {
    let mut all = norms(&["attn_norm", "post_attention_norm"]);
    all.extend(matrices(&ATTENTION));
    match i {
        0 => all.extend(matrices(&GATED)),
        _ => all.extend([experts(), shared(), vec![("exp_probs_b.bias", vec![4])]].concat()),
    }
    if i + 1 == LAYERS {
        all.push(("nextn.eh_proj", vec![2 * E, E]));
    }
    all
}

/// A layer without attention and one with a matrix in its place.
fn deci(i: u32) -> Tensors {
    let mut all = norms(if i == 1 { &["ffn_norm"] } else { &["attn_norm", "ffn_norm"] });
    match i {
        1 => {}
        2 => all.push(("attn_output", vec![E, E])),
        _ => all.extend(matrices(&ATTENTION)),
    }
    all.extend(matrices(&GATED));
    all
}

/// The third layer attends.
fn jamba_mixer(i: u32) -> Tensors {
    let mut all = norms(&["attn_norm", "ffn_norm"]);
    if i == 2 {
        all.extend(matrices(&ATTENTION));
    } else {
        all.extend(matrices(&[("ssm_in", [E, 256]), ("ssm_x", [128, 8 + 2 * 8]), ("ssm_dt", [8, 128])]));
        all.extend(matrices(&[("ssm_conv1d", [4, 128]), ("ssm_out", [128, E])]));
        all.extend([("ssm_conv1d.bias", vec![128]), ("ssm_dt.bias", vec![128])]);
        all.extend([("ssm_a", vec![8, 128]), ("ssm_d", vec![128])]);
        all.extend(["ssm_dt_norm", "ssm_b_norm", "ssm_c_norm"].map(|name| (name, vec![8])));
    }
    all
}

/// Every second layer has experts, as wide as the other layers' networks.
fn jamba(i: u32) -> Tensors {
    let mut all = jamba_mixer(i);
    match i % 2 {
        0 => all.extend(matrices(&GATED)),
        _ => all.extend([
            ("ffn_gate_inp", vec![E, 4]),
            ("ffn_gate_exps", vec![E, 96, 4]),
            ("ffn_up_exps", vec![E, 96, 4]),
            ("ffn_down_exps", vec![96, E, 4]),
        ]),
    }
    all
}

/// A scan, experts without gates on rows of 20 channels, attention, and experts that nothing is handed over from.
fn nemotron(i: u32) -> Tensors {
    let mut all = norms(&["attn_norm"]);
    match i {
        0 => {
            all.extend(matrices(&[("ssm_in", [E, 100]), ("ssm_conv1d", [4, 64]), ("ssm_out", [32, E])]));
            all.extend([("ssm_conv1d.bias", vec![64]), ("ssm_dt.bias", vec![4]), ("ssm_norm", vec![16, 2])]);
            all.extend([("ssm_a", vec![1, 4]), ("ssm_d", vec![1, 4])]);
        }
        2 => all.extend(matrices(&ATTENTION)),
        _ => {
            all.extend(matrices(&[("ffn_gate_inp", [E, 4]), ("ffn_latent_down", [E, 20]), ("ffn_latent_up", [20, E])]));
            all.extend([("ffn_up_exps", vec![20, 24, 4]), ("ffn_down_exps", vec![24, 20, 4])]);
            all.extend(matrices(&[("ffn_up_shexp", [E, 40]), ("ffn_down_shexp", [40, E])]));
            all.push(("exp_probs_b.bias", vec![4]));
        }
    }
    all
}

fn nemotron_without(i: u32, what: &str) -> Tensors {
    nemotron(i).into_iter().filter(|(name, _)| *name != what).collect()
}

const ALL: &[Family] = &[
    Family {
        arch: "kimi-linear",
        keys: &[
            ("attention.kv_lora_rank", 24),
            ("attention.key_length", 32),
            ("attention.key_length_mla", 20),
            ("attention.value_length_mla", 10),
            ("rope.dimension_count", 8),
            ("ssm.conv_kernel", 4),
            ("kda.head_dim", 8),
            ("expert_shared_count", 1),
            ("expert_gating_func", 2),
            ("leading_dense_block_count", 1),
        ],
        layer: kimi_linear,
    },
    Family {
        arch: "minicpm3",
        keys: &[
            ("attention.head_count_kv", 4),
            ("attention.q_lora_rank", 20),
            ("attention.kv_lora_rank", 24),
            ("attention.key_length", 20),
            ("attention.value_length", 10),
            ("rope.dimension_count", 8),
            ("expert_count", 0),
        ],
        layer: minicpm3,
    },
    Family { arch: "llama4", keys: &[("interleave_moe_layer_step", 2)], layer: llama4 },
    Family {
        arch: "smallthinker",
        keys: &[("expert_gating_func", 2), ("attention.sliding_window", 4096)],
        layer: smallthinker,
    },
    Family { arch: "arctic", keys: &[("feed_forward_length", 24)], layer: arctic },
    Family { arch: "grok", keys: &[], layer: grok },
    Family {
        arch: "afmoe",
        keys: &[
            ("attention.sliding_window", 16),
            ("expert_shared_count", 1),
            ("expert_gating_func", 2),
            ("leading_dense_block_count", 1),
        ],
        layer: afmoe,
    },
    Family {
        arch: "glm4moe",
        keys: &[("nextn_predict_layers", 1), ("expert_shared_count", 1), ("leading_dense_block_count", 1)],
        layer: glm4moe,
    },
    Family { arch: "deci", keys: &[("expert_count", 0)], layer: deci },
    Family {
        arch: "jamba",
        keys: &[("ssm.conv_kernel", 4), ("ssm.inner_size", 128), ("ssm.state_size", 8), ("ssm.time_step_rank", 8)],
        layer: jamba,
    },
    Family {
        arch: "nemotron_h_moe",
        keys: &[
            ("ssm.conv_kernel", 4),
            ("ssm.inner_size", 32),
            ("ssm.state_size", 8),
            ("ssm.time_step_rank", 4),
            ("ssm.group_count", 2),
            ("expert_shared_feed_forward_length", 40),
            ("moe_latent_size", 20),
        ],
        layer: nemotron,
    },
];

fn writer(family: &Family) -> Writer {
    let mut w = Writer::new(family.arch);
    let key = |k: &str| format!("{}.{k}", family.arch);
    for (k, v) in [
        ("block_count", LAYERS),
        ("embedding_length", E as u32),
        ("context_length", 4096),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("expert_count", 4),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 24),
    ] {
        w.u32(&key(k), v);
    }
    family.keys.iter().for_each(|(k, v)| {
        w.u32(&key(k), *v);
    });
    if family.arch == "minicpm3" {
        w.remove(&key("expert_used_count"));
    }
    if family.arch == "deci" {
        for (k, v) in [("attention.head_count", [4, 0, 4, 4]), ("attention.head_count_kv", [2, 0, 0, 2])] {
            w.remove(&key(k));
            w.array_u32(&key(k), &v);
        }
    }
    if let Some(heads) =
        [("kimi-linear", 1), ("jamba", 2), ("nemotron_h_moe", 2)].iter().find(|(arch, _)| *arch == family.arch)
    {
        w.remove(&key("attention.head_count_kv"));
        w.array_u32(&key("attention.head_count_kv"), &[0, 0, heads.1, 0]);
    }
    if family.arch == "nemotron_h_moe" {
        w.remove(&key("feed_forward_length"));
        w.array_u32(&key("feed_forward_length"), &[0, 24, 0, 24]);
    }
    w.f32(&key("attention.layer_norm_rms_epsilon"), 1e-5);
    let mut rng = Rng(0x5EED);
    rng.tensor(&mut w, "token_embd.weight", &[E, 50], 0.0, 0.5);
    for i in 0..LAYERS {
        for (name, ne) in (family.layer)(i) {
            let bare = matches!(name, "ssm_a" | "ssm_d") || name.contains(".bias");
            let full = format!("blk.{i}.{name}{}", if bare { "" } else { ".weight" });
            let (mean, deviation) = match name {
                "ssm_a" => (-0.4, 0.05),
                name if name.contains("norm") => (1.0, 0.1),
                name if name.contains("conv1d") => (0.0, 0.5),
                _ => (0.0, 0.12),
            };
            rng.tensor(&mut w, &full, &ne, mean, deviation);
        }
    }
    w
}

#[test]
fn threads_and_chunks_change_no_bit() {
    for family in ALL {
        let gguf = open(&writer(family));
        let want = state_of(&gguf, &tokens(70), &options()).write();
        for (chunk, threads) in [(1, 1), (7, 5), (64, 1), (1000, 2)] {
            let got = state_of(&gguf, &tokens(70), &Options { chunk, threads, ..options() }).write();
            assert!(got == want, "{}: chunk {chunk}, {threads} threads", family.arch);
        }
    }
}

/// Of those that carry a state along, at every length.
#[test]
fn chunks_change_no_bit_of_a_state_at_any_length() {
    for family in ALL.iter().filter(|f| f.keys.iter().any(|(key, _)| *key == "ssm.conv_kernel")) {
        let gguf = open(&writer(family));
        for n in [1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 100, 1000] {
            let want = state_of(&gguf, &tokens(n), &options()).write();
            for chunk in [1, 7, 64, n].into_iter().filter(|c| n < 200 || *c > 1) {
                let got = state_of(&gguf, &tokens(n), &Options { chunk, ..options() }).write();
                assert!(got == want, "{}: {n} tokens in chunks of {chunk}", family.arch);
            }
        }
    }
}

#[test]
fn layers_without_a_router_have_a_plain_network() {
    let family = ALL.iter().find(|f| f.arch == "jamba").expect("a family of this name");
    let mixtures = |w: &Writer| {
        let gguf = open(w);
        Model::load(&gguf).map(|m| m.spec().layers.iter().map(|l| l.ffn.experts().is_some()).collect::<Vec<_>>())
    };
    assert_eq!(mixtures(&writer(family)).unwrap(), [false, true, false, true]);
    let no_router = |i| jamba(i).into_iter().filter(|(name, _)| *name != "ffn_gate_inp").collect();
    let message = mixtures(&writer(&Family { layer: no_router, ..*family })).unwrap_err().to_string();
    assert!(message.contains("\"blk.1.ffn_gate.weight\": found no such tensor, wanted"), "{message}");
    // The smallest files say that there is one expert, and no layer has it.
    let plain = |i| [jamba_mixer(i), matrices(&GATED)].concat();
    let mut w = writer(&Family { layer: plain, ..*family });
    w.u32("jamba.expert_count", 1).u32("jamba.expert_used_count", 1);
    assert_eq!(mixtures(&w).unwrap(), [false; 4]);
}

/// Experts may have rows of their own length; the router and the shared expert read embeddings.
#[test]
fn rows_of_the_experts_are_as_long_as_the_file_says() {
    let family = ALL.iter().find(|f| f.arch == "nemotron_h_moe").expect("a family of this name");
    let gguf = open(&writer(family));
    let model = Model::load(&gguf).unwrap();
    let text = Plan::new(model.spec(), 10, 4).to_string();
    for step in [
        "Route { k: 64, experts: 4, used: 2 }",
        "LatentDown { k: 64, n: 20 }",
        "ExpertsUp { k: 20, n: 24, used: 2 }",
        "ExpertsDown { k: 24, n: 20, used: 2 }",
        "LatentUp { k: 20, n: 64 }",
        "SharedUp { k: 64, n: 40 }",
    ] {
        assert!(text.contains(step), "{step} in\n{text}");
    }
    let refused = |w: &Writer, wanted: &str| {
        let message = Model::load(&open(w)).expect_err(wanted).to_string();
        assert!(message.contains(wanted), "{message}\nshould say {wanted}");
    };
    let key = "nemotron_h_moe.moe_latent_size";
    let mut w = writer(family);
    w.u32(key, 21);
    refused(&w, "\"blk.1.ffn_latent_down.weight\": found shape [64, 20], wanted [64, 21]");
    // Without it experts read embeddings.
    w.u32(key, 0);
    refused(&w, "\"blk.1.ffn_up_exps.weight\": found shape [20, 24, 4], wanted [64, 24, 4]");
    w.remove(key);
    refused(&w, "\"blk.1.ffn_up_exps.weight\": found shape [20, 24, 4], wanted [64, 24, 4]");
    let w = writer(&Family { layer: |i| nemotron_without(i, "ffn_latent_down"), ..*family });
    refused(&w, "\"blk.1.ffn_latent_down.weight\": found no such tensor, wanted one of shape [64, 20]");
    let w = writer(&Family { layer: |i| nemotron_without(i, "ffn_latent_up"), ..*family });
    refused(&w, "\"blk.1.ffn_latent_up.weight\": found no such tensor, wanted one of shape [20, 64]");
}

/// Rounding to integers would hide what is not finite on the way to the experts and back.
#[test]
fn what_is_not_finite_beside_the_experts_is_found() {
    let family = ALL.iter().find(|f| f.arch == "nemotron_h_moe").expect("a family of this name");
    let found = |layer, name: &str, ne: &[u64]| {
        let mut w = writer(&Family { layer, ..*family });
        for i in [1, 3] {
            let values = vec![3e38; ne.iter().product::<u64>() as usize];
            w.tensor_f32(&format!("blk.{i}.{name}.weight"), ne, &values).unwrap();
        }
        check_not_finite(&w, 1, 0)
    };
    let input = found(|i| nemotron_without(i, "ffn_latent_down"), "ffn_latent_down", &[E, 20]);
    let sum = found(|i| nemotron_without(i, "ffn_down_exps"), "ffn_down_exps", &[24, 20, 4]);
    assert_eq!((input, sum), ("the input of the experts", "the sum of the experts"));
}

#[test]
fn one_wrong_number_is_refused_with_its_key() {
    for (arch, key, value) in [
        ("kimi-linear", "kda.head_dim", 0),
        ("kimi-linear", "kda.head_dim", u32::MAX),
        ("kimi-linear", "ssm.conv_kernel", 0),
        ("kimi-linear", "attention.kv_lora_rank", 0),
        ("kimi-linear", "attention.key_length", 33),
        ("kimi-linear", "attention.key_length_mla", 0),
        ("kimi-linear", "expert_gating_func", 9),
        ("kimi-linear", "expert_shared_count", 0),
        ("kimi-linear", "attention.head_count_kv", 4),
        ("minicpm3", "attention.q_lora_rank", 0),
        ("minicpm3", "attention.kv_lora_rank", u32::MAX),
        ("minicpm3", "rope.dimension_count", 20),
        ("minicpm3", "rope.dimension_count", 0),
        ("minicpm3", "attention.head_count_kv", 2),
        ("minicpm3", "expert_count", 4),
        ("llama4", "interleave_moe_layer_step", 0),
        ("llama4", "interleave_moe_layer_step", u32::MAX),
        ("llama4", "attention.sliding_window", 0),
        ("llama4", "expert_count", 0),
        ("smallthinker", "expert_gating_func", 0),
        ("smallthinker", "expert_used_count", 5),
        ("arctic", "expert_count", 0),
        ("grok", "attention.head_count_kv", 3),
        ("afmoe", "expert_used_count", 0),
        ("glm4moe", "nextn_predict_layers", LAYERS),
        ("glm4moe", "nextn_predict_layers", u32::MAX),
        ("deci", "attention.head_count", 0),
        ("deci", "attention.head_count_kv", 0),
        ("deci", "expert_count", 4),
        ("jamba", "expert_count", u32::MAX),
        ("jamba", "expert_used_count", 0),
        ("jamba", "expert_used_count", 5),
        ("jamba", "feed_forward_length", 0),
        ("jamba", "ssm.time_step_rank", 0),
        ("nemotron_h_moe", "moe_latent_size", u32::MAX),
        ("nemotron_h_moe", "expert_used_count", 5),
        ("nemotron_h_moe", "expert_feed_forward_length", 0),
    ] {
        let family = ALL.iter().find(|f| f.arch == arch).expect("a family of this name");
        let mut w = writer(family);
        w.remove(&format!("{arch}.{key}"));
        w.u32(&format!("{arch}.{key}"), value);
        match Model::load(&open(&w)) {
            Err(e @ (Error::Key { .. } | Error::Unsupported { .. })) => {
                assert!(e.to_string().contains(&format!("{arch}.{key}")), "{arch}.{key} = {value}: {e}");
            }
            other => panic!("{arch}.{key} = {value}: {other:?}"),
        }
    }
    for (arch, key) in [
        ("kimi-linear", "kda.head_dim"),
        ("kimi-linear", "ssm.conv_kernel"),
        ("kimi-linear", "attention.kv_lora_rank"),
        ("kimi-linear", "attention.head_count_kv"),
        ("kimi-linear", "expert_gating_func"),
        ("kimi-linear", "expert_shared_count"),
        ("minicpm3", "attention.q_lora_rank"),
        ("minicpm3", "attention.kv_lora_rank"),
        ("minicpm3", "rope.dimension_count"),
        ("llama4", "interleave_moe_layer_step"),
        ("llama4", "expert_feed_forward_length"),
        ("smallthinker", "expert_gating_func"),
        ("arctic", "feed_forward_length"),
        ("jamba", "expert_used_count"),
        ("jamba", "feed_forward_length"),
    ] {
        let family = ALL.iter().find(|f| f.arch == arch).expect("a family of this name");
        let mut w = writer(family);
        w.remove(&format!("{arch}.{key}"));
        let message = Model::load(&open(&w)).expect_err(key).to_string();
        assert!(message.contains(&format!("{arch}.{key}")), "{arch}.{key}: {message}");
    }
}

#[test]
fn blocks_that_only_predict_are_no_layers() {
    use kvlayout::StateVersion;
    let family = ALL.iter().find(|f| f.arch == "glm4moe").expect("a family of this name");
    let load = |arrays: &dyn Fn(&mut Writer)| {
        let mut w = writer(family);
        arrays(&mut w);
        let gguf = open(&w);
        Model::load(&gguf).map(|m| (m.spec().n_layer(), StateVersion::ALL.map(|v| m.check_version(v).is_ok())))
    };
    let want = (LAYERS - 1, [false, true, true]);
    assert_eq!(load(&|_| ()).unwrap(), want);
    // Arrays have an entry for each block, whatever it is for.
    let heads = |w: &mut Writer, all: &[u32]| {
        w.remove("glm4moe.attention.head_count_kv");
        w.array_u32("glm4moe.attention.head_count_kv", all);
    };
    assert_eq!(load(&|w| heads(w, &[2, 2, 2, 0])).unwrap(), want);
    let message = load(&|w| heads(w, &[2, 2, 2])).unwrap_err().to_string();
    assert!(message.contains("glm4moe.attention.head_count_kv") && message.contains("one per block"), "{message}");
    // Without the key the block is a layer, which has a tensor too many.
    let message = load(&|w| {
        w.remove("glm4moe.nextn_predict_layers");
    })
    .unwrap_err()
    .to_string();
    assert!(message.contains("nextn.eh_proj"), "{message}");
}
