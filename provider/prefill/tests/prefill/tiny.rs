//! Tiny seeded models for the tests of this crate, written with `gguf::write`.

use gguf::write::Writer;
use gguf::{GgmlType, Gguf};

pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Roughly normal, deviation 1.
    pub fn normal(&mut self) -> f32 {
        (0..6).map(|_| (self.next() >> 40) as f32 / (1u64 << 24) as f32 - 0.5).sum::<f32>() * 1.414
    }

    /// Writes a tensor of such numbers, with another mean and deviation.
    pub fn tensor(&mut self, w: &mut Writer, name: &str, ne: &[u64], mean: f32, deviation: f32) {
        let n: u64 = ne.iter().product();
        let values: Vec<f32> = (0..n).map(|_| mean + deviation * self.normal()).collect();
        w.tensor_f32(name, ne, &values).expect("a good tensor");
    }
}

/// Shape of a tiny model.
#[derive(Clone)]
pub struct Tiny {
    pub arch: &'static str,
    pub n_layer: u32,
    pub n_embd: u32,
    pub n_head: u32,
    pub n_head_kv: u32,
    pub head: u32,
    pub n_ff: u32,
    pub n_vocab: u32,
    pub window: Option<u32>,
    /// Experts, and how many a position goes to; as wide as a quarter of the network.
    pub experts: Option<(u32, u32)>,
}

pub fn tiny(arch: &'static str) -> Tiny {
    let window = (arch == "gemma3").then_some(8);
    let experts = arch.ends_with("moe").then_some((5, 2));
    Tiny { arch, n_layer: 3, n_embd: 64, n_head: 4, n_head_kv: 2, head: 16, n_ff: 96, n_vocab: 50, window, experts }
}

impl Tiny {
    /// The model, before `change` gets at it.
    pub fn writer(&self) -> Writer {
        let mut w = Writer::new(self.arch);
        let key = |k: &str| format!("{}.{k}", self.arch);
        w.u32(&key("block_count"), self.n_layer)
            .u32(&key("embedding_length"), self.n_embd)
            .u32(&key("context_length"), 4096)
            .u32(&key("feed_forward_length"), self.n_ff)
            .u32(&key("attention.head_count"), self.n_head)
            .u32(&key("attention.head_count_kv"), self.n_head_kv)
            .u32(&key("attention.key_length"), self.head)
            .u32(&key("attention.value_length"), self.head)
            .f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
            .f32(&key("rope.freq_base"), 10000.0);
        if let Some(n) = self.window {
            w.u32(&key("attention.sliding_window"), n).u32(&key("attention.sliding_window_pattern"), 2);
        }
        if let Some((n, used)) = self.experts {
            w.u32(&key("expert_count"), n)
                .u32(&key("expert_used_count"), used)
                .u32(&key("expert_feed_forward_length"), self.n_ff / 4)
                .u32(&key("expert_shared_feed_forward_length"), self.n_ff / 3);
        }
        match self.arch {
            // The second layer attends; two key heads and four value heads of 8 channels.
            "qwen35" => {
                w.u32(&key("full_attention_interval"), 2)
                    .array_u32(&key("rope.dimension_sections"), &[3, 3, 2, 0])
                    .u32(&key("ssm.conv_kernel"), 4)
                    .u32(&key("ssm.state_size"), 8)
                    .u32(&key("ssm.inner_size"), 32)
                    .u32(&key("ssm.time_step_rank"), 4)
                    .u32(&key("ssm.group_count"), 2);
            }
            "lfm2" => {
                w.remove(&key("attention.head_count_kv"));
                w.array_u32(&key("attention.head_count_kv"), &[0, self.n_head_kv, 0]);
                w.u32(&key("shortconv.l_cache"), 3);
            }
            // As in granitehybrid; in nemotron_h one layer of each kind; in falcon-h1 both side by side. Four heads of 8 channels.
            "granitehybrid" | "nemotron_h" | "falcon-h1" => {
                if self.arch != "falcon-h1" {
                    w.remove(&key("attention.head_count_kv"));
                    w.array_u32(&key("attention.head_count_kv"), &[0, self.n_head_kv, 0]);
                }
                if self.arch == "nemotron_h" {
                    w.remove(&key("feed_forward_length"));
                    w.array_u32(&key("feed_forward_length"), &[0, 0, self.n_ff]);
                }
                w.u32(&key("ssm.conv_kernel"), 4)
                    .u32(&key("ssm.state_size"), 8)
                    .u32(&key("ssm.inner_size"), 32)
                    .u32(&key("ssm.time_step_rank"), 4)
                    .u32(&key("ssm.group_count"), 2);
            }
            _ => {}
        }
        let mut rng = Rng(0x5EED);
        let (e, ff) = (u64::from(self.n_embd), u64::from(self.n_ff));
        let (q, kv) = (u64::from(self.n_head * self.head), u64::from(self.n_head_kv * self.head));
        rng.tensor(&mut w, "token_embd.weight", &[e, u64::from(self.n_vocab)], 0.0, 0.5);
        let last_norm = if self.arch == "lfm2" { "token_embd_norm.weight" } else { "output_norm.weight" };
        rng.tensor(&mut w, last_norm, &[e], 1.0, 0.1);
        for i in 0..self.n_layer {
            let t = |n: &str| format!("blk.{i}.{n}");
            rng.tensor(&mut w, &t("attn_norm.weight"), &[e], 1.0, 0.1);
            let scans = match self.arch {
                "granitehybrid" => i != 1,
                "nemotron_h" => i == 0,
                arch => arch == "falcon-h1",
            };
            if scans {
                rng.tensor(&mut w, &t("ssm_in.weight"), &[e, 2 * 32 + 2 * 2 * 8 + 4], 0.0, 0.12);
                rng.tensor(&mut w, &t("ssm_conv1d.weight"), &[4, 32 + 2 * 2 * 8], 0.0, 0.5);
                rng.tensor(&mut w, &t("ssm_conv1d.bias"), &[32 + 2 * 2 * 8], 0.0, 0.3);
                rng.tensor(&mut w, &t("ssm_dt.bias"), &[4], 0.0, 0.3);
                rng.tensor(&mut w, &t("ssm_a"), &[1, 4], -0.3, 0.05);
                rng.tensor(&mut w, &t("ssm_d"), &[1, 4], 0.5, 0.1);
                rng.tensor(&mut w, &t("ssm_norm.weight"), &[16, 2], 1.0, 0.1);
                rng.tensor(&mut w, &t("ssm_out.weight"), &[32, e], 0.0, 0.12);
            }
            match self.arch {
                "granitehybrid" | "nemotron_h" if i != 1 => {}
                "qwen35" if i != 1 => {
                    rng.tensor(&mut w, &t("attn_qkv.weight"), &[e, 64], 0.0, 0.12);
                    rng.tensor(&mut w, &t("attn_gate.weight"), &[e, 32], 0.0, 0.12);
                    rng.tensor(&mut w, &t("ssm_conv1d.weight"), &[4, 64], 0.0, 0.5);
                    rng.tensor(&mut w, &t("ssm_dt.bias"), &[4], 0.0, 0.3);
                    rng.tensor(&mut w, &t("ssm_a"), &[4], -0.3, 0.05);
                    rng.tensor(&mut w, &t("ssm_beta.weight"), &[e, 4], 0.0, 0.12);
                    rng.tensor(&mut w, &t("ssm_alpha.weight"), &[e, 4], 0.0, 0.12);
                    rng.tensor(&mut w, &t("ssm_norm.weight"), &[8], 1.0, 0.1);
                    rng.tensor(&mut w, &t("ssm_out.weight"), &[32, e], 0.0, 0.12);
                }
                "lfm2" if i != 1 => {
                    rng.tensor(&mut w, &t("shortconv.in_proj.weight"), &[e, 3 * e], 0.0, 0.12);
                    rng.tensor(&mut w, &t("shortconv.conv.weight"), &[3, e], 0.0, 0.5);
                    rng.tensor(&mut w, &t("shortconv.out_proj.weight"), &[e, e], 0.0, 0.12);
                }
                arch => {
                    let gates = if arch == "qwen35" { 2 } else { 1 };
                    rng.tensor(&mut w, &t("attn_q.weight"), &[e, gates * q], 0.0, 0.12);
                    rng.tensor(&mut w, &t("attn_k.weight"), &[e, kv], 0.0, 0.12);
                    rng.tensor(&mut w, &t("attn_v.weight"), &[e, kv], 0.0, 0.12);
                    rng.tensor(&mut w, &t("attn_output.weight"), &[q, e], 0.0, 0.12);
                    if matches!(arch, "qwen35" | "lfm2") {
                        rng.tensor(&mut w, &t("attn_q_norm.weight"), &[u64::from(self.head)], 1.0, 0.1);
                        rng.tensor(&mut w, &t("attn_k_norm.weight"), &[u64::from(self.head)], 1.0, 0.1);
                    }
                }
            }
            let ffn_norm = match self.arch {
                "qwen35" => "post_attention_norm.weight",
                "falcon-h1" => "ffn_norm",
                _ => "ffn_norm.weight",
            };
            if self.arch != "nemotron_h" {
                rng.tensor(&mut w, &t(ffn_norm), &[e], 1.0, 0.1);
            }
            match self.experts {
                None if self.arch == "nemotron_h" => {
                    if i == 2 {
                        rng.tensor(&mut w, &t("ffn_up.weight"), &[e, ff], 0.0, 0.12);
                        rng.tensor(&mut w, &t("ffn_down.weight"), &[ff, e], 0.0, 0.12);
                    }
                }
                None => {
                    rng.tensor(&mut w, &t("ffn_gate.weight"), &[e, ff], 0.0, 0.12);
                    rng.tensor(&mut w, &t("ffn_up.weight"), &[e, ff], 0.0, 0.12);
                    rng.tensor(&mut w, &t("ffn_down.weight"), &[ff, e], 0.0, 0.12);
                }
                Some((n, _)) => {
                    let n = u64::from(n);
                    rng.tensor(&mut w, &t("ffn_gate_inp.weight"), &[e, n], 0.0, 0.3);
                    rng.tensor(&mut w, &t("ffn_gate_exps.weight"), &[e, ff / 4, n], 0.0, 0.12);
                    rng.tensor(&mut w, &t("ffn_up_exps.weight"), &[e, ff / 4, n], 0.0, 0.12);
                    rng.tensor(&mut w, &t("ffn_down_exps.weight"), &[ff / 4, e, n], 0.0, 0.12);
                }
            }
            if self.arch == "qwen2moe" {
                rng.tensor(&mut w, &t("ffn_gate_inp_shexp.weight"), &[e], 0.0, 0.3);
                rng.tensor(&mut w, &t("ffn_gate_shexp.weight"), &[e, ff / 3], 0.0, 0.12);
                rng.tensor(&mut w, &t("ffn_up_shexp.weight"), &[e, ff / 3], 0.0, 0.12);
                rng.tensor(&mut w, &t("ffn_down_shexp.weight"), &[ff / 3, e], 0.0, 0.12);
            }
            if self.arch.starts_with("qwen2") {
                for (n, len) in [("attn_q.bias", q), ("attn_k.bias", kv), ("attn_v.bias", kv)] {
                    rng.tensor(&mut w, &t(n), &[len], 0.0, 0.3);
                }
            }
            if matches!(self.arch, "qwen3" | "qwen3moe" | "gemma3") {
                rng.tensor(&mut w, &t("attn_q_norm.weight"), &[u64::from(self.head)], 1.0, 0.1);
                rng.tensor(&mut w, &t("attn_k_norm.weight"), &[u64::from(self.head)], 1.0, 0.1);
            }
            if self.arch == "gemma3" {
                rng.tensor(&mut w, &t("post_attention_norm.weight"), &[e], 1.0, 0.1);
                rng.tensor(&mut w, &t("post_ffw_norm.weight"), &[e], 1.0, 0.1);
            }
        }
        w
    }

    pub fn gguf(&self) -> Gguf {
        open(&self.writer())
    }
}

pub fn open(w: &Writer) -> Gguf {
    Gguf::from_bytes("tiny.gguf", w.finish()).expect("a sound file")
}

pub fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub const F32: GgmlType = GgmlType::F32;
