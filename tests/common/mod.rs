//! What the integration tests share: a tiny model, a place to work in, and the program as a child process with an
//! environment of its own.
#![allow(dead_code)]

use std::ffi::OsStr;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

use gguf::GgmlType;
use gguf::write::Writer;
use kvlayout::State;
use kvlayout::faults::{self, Expect};
use tempfile::TempDir;

pub const BIN: &str = env!("CARGO_BIN_EXE_npu-prefill");
pub const N_VOCAB: u32 = 320;

/// Numbers that look random and are the same everywhere.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// From -1 to 1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// A llama of two layers and 64 channels, in F32; `change` may spoil it.
pub fn model(n_layer: u32, change: impl FnOnce(&mut Writer)) -> Writer {
    model_of_heads(n_layer, 4, 2, change)
}

/// The same with other numbers of query and key-value heads.
pub fn model_of_heads(n_layer: u32, n_head: u32, n_head_kv: u32, change: impl FnOnce(&mut Writer)) -> Writer {
    let mut w = model_of("llama", n_layer, n_head, n_head_kv);
    change(&mut w);
    w
}

/// One whose rotations depend on the decoder's context: on whether that is above 512.
pub fn model_by_context() -> Writer {
    let mut w = model_of("mistral3", 2, 4, 2);
    w.u32("mistral3.rope.scaling.original_context_length", 512);
    w.tensor_f32("rope_factors_short.weight", &[8], &[1.0; 8]).unwrap();
    w.tensor_f32("rope_factors_long.weight", &[8], &[2.0; 8]).unwrap();
    w
}

fn model_of(arch: &str, n_layer: u32, n_head: u32, n_head_kv: u32) -> Writer {
    let key = |k: &str| format!("{arch}.{k}");
    let (n_embd, n_ff) = (64u64, 128u64);
    let n_kv = n_embd / u64::from(n_head) * u64::from(n_head_kv);
    let mut w = Writer::new(arch);
    w.str("general.name", "tiny");
    w.u32(&key("block_count"), n_layer);
    w.u32(&key("context_length"), 4096);
    w.u32(&key("embedding_length"), n_embd as u32);
    w.u32(&key("feed_forward_length"), n_ff as u32);
    w.u32(&key("attention.head_count"), n_head);
    w.u32(&key("attention.head_count_kv"), n_head_kv);
    w.u32(&key("rope.dimension_count"), n_embd as u32 / n_head);
    w.u32(&key("vocab_size"), N_VOCAB);
    w.f32(&key("rope.freq_base"), 10_000.0);
    w.f32(&key("attention.layer_norm_rms_epsilon"), 1e-5);
    let mut random = Random(1);
    let mut add = |name: &str, ne: &[u64]| {
        let n: u64 = ne.iter().product();
        let scale = if ne.len() == 1 { 0.0 } else { 1.0 / (ne[0] as f32).sqrt() };
        let offset = if ne.len() == 1 { 1.0 } else { 0.0 };
        let values: Vec<f32> = (0..n).map(|_| offset + scale * random.unit()).collect();
        w.tensor_f32(name, ne, &values).unwrap();
    };
    add("token_embd.weight", &[n_embd, N_VOCAB.into()]);
    for i in 0..n_layer {
        let mut block = |name: &str, ne: &[u64]| add(&format!("blk.{i}.{name}.weight"), ne);
        block("attn_norm", &[n_embd]);
        block("attn_q", &[n_embd, n_embd]);
        block("attn_k", &[n_embd, n_kv]);
        block("attn_v", &[n_embd, n_kv]);
        block("attn_output", &[n_embd, n_embd]);
        block("ffn_norm", &[n_embd]);
        block("ffn_gate", &[n_embd, n_ff]);
        block("ffn_up", &[n_embd, n_ff]);
        block("ffn_down", &[n_ff, n_embd]);
    }
    add("output_norm.weight", &[n_embd]);
    w
}

/// An LFM2 of two layers and 64 channels, in F32: a short convolution of three positions, then attention.
pub fn hybrid() -> Writer {
    let (n_embd, n_ff, n_kv) = (64u64, 128u64, 32u64);
    let mut w = Writer::new("lfm2");
    w.u32("lfm2.block_count", 2);
    w.u32("lfm2.context_length", 4096);
    w.u32("lfm2.embedding_length", n_embd as u32);
    w.u32("lfm2.feed_forward_length", n_ff as u32);
    w.u32("lfm2.attention.head_count", 4);
    w.array_u32("lfm2.attention.head_count_kv", &[0, 2]);
    w.u32("lfm2.shortconv.l_cache", 3);
    w.f32("lfm2.rope.freq_base", 10_000.0);
    w.f32("lfm2.attention.layer_norm_rms_epsilon", 1e-5);
    let mut random = Random(3);
    let mut add = |name: &str, ne: &[u64]| {
        let n: u64 = ne.iter().product();
        let scale = if ne.len() == 1 { 0.0 } else { 1.0 / (ne[0] as f32).sqrt() };
        let offset = if ne.len() == 1 { 1.0 } else { 0.0 };
        let values: Vec<f32> = (0..n).map(|_| offset + scale * random.unit()).collect();
        w.tensor_f32(name, ne, &values).unwrap();
    };
    add("token_embd.weight", &[n_embd, N_VOCAB.into()]);
    add("token_embd_norm.weight", &[n_embd]);
    add("blk.0.shortconv.in_proj.weight", &[n_embd, 3 * n_embd]);
    add("blk.0.shortconv.conv.weight", &[3, n_embd]);
    add("blk.0.shortconv.out_proj.weight", &[n_embd, n_embd]);
    add("blk.1.attn_q.weight", &[n_embd, n_embd]);
    add("blk.1.attn_k.weight", &[n_embd, n_kv]);
    add("blk.1.attn_v.weight", &[n_embd, n_kv]);
    add("blk.1.attn_output.weight", &[n_embd, n_embd]);
    add("blk.1.attn_q_norm.weight", &[16]);
    add("blk.1.attn_k_norm.weight", &[16]);
    for i in 0..2 {
        let mut block = |name: &str, ne: &[u64]| add(&format!("blk.{i}.{name}.weight"), ne);
        block("attn_norm", &[n_embd]);
        block("ffn_norm", &[n_embd]);
        block("ffn_gate", &[n_embd, n_ff]);
        block("ffn_up", &[n_embd, n_ff]);
        block("ffn_down", &[n_ff, n_embd]);
    }
    w
}

/// A directory with a model, an ids file and room for a state.
pub struct Scene {
    pub dir: TempDir,
    pub model: PathBuf,
    pub ids: PathBuf,
    pub slots: PathBuf,
    pub out: PathBuf,
    pub tokens: Vec<i32>,
}

impl Scene {
    pub fn new(n_tokens: usize) -> Scene {
        Scene::with(n_tokens, 2)
    }

    pub fn with(n_tokens: usize, n_layer: u32) -> Scene {
        let dir = tempfile::tempdir().unwrap();
        let slots = dir.path().join("slots");
        std::fs::create_dir(&slots).unwrap();
        let mut random = Random(2);
        let tokens: Vec<i32> = (0..n_tokens).map(|_| random.below(N_VOCAB.into()) as i32).collect();
        let scene = Scene {
            model: dir.path().join("tiny.gguf"),
            ids: slots.join("ids.txt"),
            out: slots.join("state.bin"),
            slots,
            tokens,
            dir,
        };
        model(n_layer, |_| ()).write(&scene.model).unwrap();
        scene.write_ids(&scene.tokens);
        scene
    }

    pub fn write_ids(&self, ids: &[i32]) {
        let text: String = ids.iter().map(|id| format!("{id}\n")).collect();
        std::fs::write(&self.ids, text).unwrap();
    }

    /// A directory of kernels for the model's shapes, as far as their names go.
    pub fn kernels(&self) -> PathBuf {
        let dir = self.path("kernels");
        std::fs::create_dir_all(&dir).unwrap();
        for name in ["QKV_K128_N128", "GU_K128_N256"] {
            std::fs::write(dir.join(format!("full_i8_{name}.elf")), name).unwrap();
        }
        dir
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The handoff's command line.
    pub fn command(&self) -> Command {
        let mut c = program();
        c.arg("--tokens").arg(&self.ids).arg("--out").arg(&self.out).arg("--model").arg(&self.model);
        c
    }

    pub fn run<A: AsRef<OsStr>>(&self, more: &[A]) -> Ran {
        Ran::from(self.command().args(more).output().unwrap())
    }

    /// The names in the slot directory besides the ids file.
    pub fn left(&self) -> Vec<String> {
        let names = std::fs::read_dir(&self.slots).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|n| n != "ids.txt").collect()
    }

    /// The state that was written, checked from one end to the other.
    pub fn state(&self) -> State {
        check_state(&self.out, &self.tokens)
    }
}

pub fn check_state(path: &Path, tokens: &[i32]) -> State {
    let bytes = std::fs::read(path).unwrap();
    let state = State::parse(&bytes).unwrap_or_else(|e| panic!("{e}"));
    let expect = Expect { n_vocab: Some(N_VOCAB), tokens: Some(tokens.to_vec()), handoff: true, ..Expect::default() };
    let faults = faults::check(&state, &expect);
    assert!(faults.is_empty(), "{faults:?}");
    assert_eq!(state.write(), bytes);
    state
}

/// The program with nothing in its environment, heeding all signals. It keeps to what it inherits, and a shell makes what it
/// starts in the background ignore SIGINT, nohup SIGHUP: the tests may have been started so.
pub fn program() -> Command {
    let mut c = if ignores_signals() { Command::new(heeding_signals()) } else { Command::new(BIN) };
    c.env_clear();
    c
}

/// The same command where there seems to be an NPU (`npu-kernels/npusim/run.sh`), with variables for the double. `None`, and said
/// why, where something that takes is missing; with `NPUSIM_REQUIRED` set that is a failure.
pub fn over_the_double(c: &Command, variables: &[(&str, &str)], options: &[&str]) -> Option<Command> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let built = Path::new(BIN).parent().unwrap();
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let cache = std::env::var_os("XDG_CACHE_HOME").map_or_else(|| home.join(".cache"), PathBuf::from);
    let xrt = cache.join("npu-prefill-xrt");
    let needs = [
        (xrt.join("usr/lib/x86_64-linux-gnu/libxrt_coreutil.so.2"), "npu-kernels/xdna/install-xrt.sh"),
        (built.join("libnpusim.so"), "cargo build -p npusim"),
        (built.join("libxdna_shim.so"), "cargo xtask shim --xrt DIR"),
        (sim_kernels(), "cargo xtask simkernels --xrt DIR"),
    ];
    if let Some((path, how)) = needs.iter().find(|(path, _)| !path.exists()) {
        let text = format!("{} is missing: {how}", path.display());
        assert!(std::env::var_os("NPUSIM_REQUIRED").is_none(), "{text}");
        println!("SKIPPED: {text}");
        return None;
    }
    let mut over = Command::new("bash");
    over.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    over.envs(c.get_envs().filter_map(|(name, value)| Some((name, value?)))).envs(variables.iter().copied());
    over.arg(root.join("npu-kernels/npusim/run.sh")).arg("--sim").arg(built.join("libnpusim.so"));
    over.arg("--xrt").arg(xrt).args(options).arg(c.get_program()).args(c.get_args());
    Some(over)
}

/// The double's kernels.
pub fn sim_kernels() -> PathBuf {
    Path::new(BIN).parent().unwrap().join("simkernels")
}

/// Whether this process ignores SIGHUP or SIGINT, the lowest two bits of a mask.
fn ignores_signals() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() & 0b11 != 0
}

/// A script that becomes the program, with the same arguments, after setting both signals right.
fn heeding_signals() -> &'static Path {
    static SCRIPT: LazyLock<PathBuf> = LazyLock::new(|| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
        // Whole when it gets its name, and the name is not another test binary's.
        let script = dir.join(format!("heeding-signals-{}", std::process::id()));
        let text = format!("#!/bin/sh\nexec /usr/bin/env --default-signal=HUP,INT '{BIN}' \"$@\"\n");
        let mut file = tempfile::NamedTempFile::new_in(dir).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        file.into_temp_path().persist(&script).unwrap();
        script
    });
    &SCRIPT
}

/// How a run ended.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ran {
    fn from(o: Output) -> Ran {
        Ran {
            code: o.status.code(),
            stdout: String::from_utf8(o.stdout).unwrap(),
            stderr: String::from_utf8(o.stderr).unwrap(),
        }
    }
}

impl Ran {
    /// The receipt of a run that went well.
    #[track_caller]
    pub fn receipt(&self) -> serde_json::Value {
        assert_eq!(self.code, Some(0), "{self:?}");
        assert_eq!(self.stdout.matches('\n').count(), 1, "{self:?}");
        serde_json::from_str(&self.stdout).unwrap()
    }

    /// Checks a run that failed: its code, silence on stdout, and what the last line on stderr says.
    #[track_caller]
    pub fn failed(&self, code: i32, says: &str) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        let last = self.stderr.lines().last().unwrap_or_default();
        assert!(last.starts_with("npu-prefill: "), "{self:?}");
        assert!(self.stderr.contains(says), "no {says:?} in {self:?}");
        assert!(!self.stderr.contains("panicked"), "{self:?}");
    }
}

/// A tensor of a type, filled with nothing.
pub fn zeros(ty: GgmlType, ne: &[u64]) -> Vec<u8> {
    let rows: u64 = ne[1..].iter().product();
    vec![0; (ty.row_bytes(ne[0]).unwrap() * rows) as usize]
}
