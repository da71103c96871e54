#!/usr/bin/env python3
"""Makes the files of this directory: states of tiny models, saved by real servers.

    make.py OUT SERVER_DIR...

A server directory is an unpacked `xllamacpp` wheel (one directory that has `xllamacpp/` in it); three of them, of state
versions 2, 3 and 4, give the whole set. The version in a file's name is read from the file. Needs numpy and the
`gguf` package for the models, which are random, seeded, and thrown away.

Twelve fixed token ids are prefilled in one go and the slot is saved. A server's arithmetic depends on the machine, so
that files made anew may differ in their rows from those here; nothing in the tests depends on the values.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

TOKENS = [1, 40, 77, 100, 65, 33, 259, 12, 200, 201, 31, 90]

# model: (name in the file, settings of the server) ... What versions do not differ in is kept of some of them only.
RUNS = {
    "llama": [
        ("f16", {}),
        ("vtrans", {"fa": 0}),
        ("f32", {"k": "F32", "v": "F32"}),
        ("bf16", {"k": "BF16", "v": "BF16", "versions": [3, 4]}),
        ("mixed", {"k": "Q8_0", "v": "F32", "fa": 0, "versions": [4]}),
        ("np2", {"np": 2}),
        ("np2slot1", {"np": 2, "slot": 1, "versions": [2, 4]}),
        ("empty", {"tokens": 0}),
    ],
    "head64": [("q8_0", {"k": "Q8_0", "v": "Q8_0"}), ("f32", {"k": "F32", "v": "F32", "versions": [4]})]
    + [(t.lower(), {"k": t, "v": t, "versions": [4]}) for t in ["Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL"]],
    "gemma3": [("f16", {}), ("vtrans", {"fa": 0}), ("swafull", {"swa_full": True, "versions": [4]})],
    "qwen2vl": [("f16", {})],
    "mamba": [("f16", {})],
    "jamba": [("f16", {})],
    "qwen35": [("f16", {})],
    "lfm2": [("f16", {})],
}


def serve(cfg):
    """Runs one server in this process until stdin closes."""
    import xllamacpp as x

    p = x.CommonParams()
    p.model.path = cfg["model"]
    p.n_ctx, p.n_parallel, p.kv_unified, p.warmup = 512, cfg.get("np", 1), False, False
    p.slot_save_path, p.endpoint_slots, p.port = cfg["slots"] + "/", True, cfg["port"]
    p.cpuparams.n_threads = 1
    p.cache_ram_mib = 0
    types = {t.name.removeprefix("GGML_TYPE_"): t for t in x.ggml_type}
    p.cache_type_k, p.cache_type_v = types[cfg.get("k", "F16")], types[cfg.get("v", "F16")]
    p.flash_attn_type = x.llama_flash_attn_type(cfg.get("fa", 1))
    p.swa_full = cfg.get("swa_full", False)
    server = x.Server(p)
    sys.stdin.read()
    os._exit(0 if server else 1)


def write_models(out):
    import gguf
    import numpy as np

    rng = np.random.default_rng(20)

    def model(name, arch, n_layer, embd, tensors, keys, last_norm="output_norm"):
        path = os.path.join(out, name + ".gguf")
        w = gguf.GGUFWriter(path, arch)
        w.add_context_length(512)
        w.add_embedding_length(embd)
        w.add_block_count(n_layer)
        w.add_layer_norm_rms_eps(1e-5)
        keys(w)
        pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)] + [f"\u2581w{i}" for i in range(41)]
        kinds = [2, 3, 3] + [6] * 256 + [1] * 41
        w.add_tokenizer_model("llama")
        w.add_token_list(pieces)
        w.add_token_scores([-float(i) for i in range(len(pieces))])
        w.add_token_types(kinds)
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)
        w.add_unk_token_id(0)

        def add(tensor, *shape, kind="weight"):
            scale = shape[-1] ** -0.5
            data = rng.standard_normal(shape).astype(np.float32) * scale
            if "norm" in tensor:
                data = 1 + 0.1 * data
            w.add_tensor(f"{tensor}.{kind}" if kind else tensor, data.astype(np.float32))

        add("token_embd", len(pieces), embd)
        add(last_norm, embd)
        for i in range(n_layer):
            tensors(f"blk.{i}.", i, add)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()

    def attention(add, b, embd, heads, kv, d, bias=False):
        for t, n in [("attn_q", heads * d), ("attn_k", kv * d), ("attn_v", kv * d)]:
            add(b + t, n, embd)
            if bias:
                add(b + t, n, kind="bias")
        add(b + "attn_output", embd, heads * d)

    def ffn(add, b, embd, ff):
        add(b + "ffn_norm", embd)
        add(b + "ffn_gate", ff, embd)
        add(b + "ffn_up", ff, embd)
        add(b + "ffn_down", embd, ff)

    def heads(w, n, kv, d, ff=64):
        w.add_head_count(n)
        w.add_head_count_kv(kv)
        w.add_key_length(d)
        w.add_value_length(d)
        w.add_feed_forward_length(ff)

    def llama(d):
        def tensors(b, i, add):
            add(b + "attn_norm", 64)
            attention(add, b, 64, 2, 1, d)
            ffn(add, b, 64, 64)

        def keys(w):
            heads(w, 2, 1, d)
            w.add_rope_dimension_count(d)

        return tensors, keys

    model("llama", "llama", 2, 64, *llama(32))
    model("head64", "llama", 1, 64, *llama(64))

    def gemma(b, i, add):
        for t in ["attn_norm", "post_attention_norm", "post_ffw_norm"]:
            add(b + t, 32)
        add(b + "attn_q_norm", 16)
        add(b + "attn_k_norm", 16)
        attention(add, b, 32, 2, 1, 16)
        ffn(add, b, 32, 32)

    def gemma_keys(w):
        heads(w, 2, 1, 16, 32)
        w.add_sliding_window(8)
        w.add_sliding_window_pattern(2)
        w.add_rope_freq_base(1000000.0)

    # Six layers, since older servers have the layer pattern of the real models built in: every sixth sees everything.
    model("gemma3", "gemma3", 6, 32, gemma, gemma_keys)

    def qwen2vl(b, i, add):
        add(b + "attn_norm", 64)
        attention(add, b, 64, 2, 1, 32, bias=True)
        ffn(add, b, 64, 64)

    def qwen2vl_keys(w):
        heads(w, 2, 1, 32)
        w.add_rope_dimension_sections([4, 6, 6, 0])

    model("qwen2vl", "qwen2vl", 2, 64, qwen2vl, qwen2vl_keys)

    def ssm(add, b, embd, inner, state, rank):
        add(b + "ssm_in", 2 * inner, embd)
        add(b + "ssm_conv1d", inner, 4)
        add(b + "ssm_conv1d", inner, kind="bias")
        add(b + "ssm_x", rank + 2 * state, inner)
        add(b + "ssm_dt", inner, rank)
        add(b + "ssm_dt", inner, kind="bias")
        add(b + "ssm_a", inner, state, kind=None)
        add(b + "ssm_d", inner, kind=None)
        add(b + "ssm_out", embd, inner)

    def ssm_keys(w):
        w.add_ssm_conv_kernel(4)
        w.add_ssm_inner_size(32)
        w.add_ssm_state_size(4)
        w.add_ssm_time_step_rank(2)

    def mamba(b, i, add):
        add(b + "attn_norm", 16)
        ssm(add, b, 16, 32, 4, 2)

    def mamba_keys(w):
        ssm_keys(w)
        w.add_feed_forward_length(0)
        w.add_head_count(0)

    model("mamba", "mamba", 2, 16, mamba, mamba_keys)

    def jamba(b, i, add):
        add(b + "attn_norm", 16)
        if i == 1:
            attention(add, b, 16, 1, 1, 16)
        else:
            ssm(add, b, 16, 32, 4, 2)
            add(b + "ssm_dt_norm", 2)
            add(b + "ssm_b_norm", 4)
            add(b + "ssm_c_norm", 4)
        ffn(add, b, 16, 16)

    def jamba_keys(w):
        ssm_keys(w)
        w.add_head_count(1)
        w.add_head_count_kv([0, 1, 0])
        w.add_feed_forward_length(16)

    model("jamba", "jamba", 3, 16, jamba, jamba_keys)

    # Every fourth layer has attention. Two key heads and four value heads of 8 channels.
    def qwen35(b, i, add):
        add(b + "attn_norm", 16)
        add(b + "post_attention_norm", 16)
        if i == 3:
            add(b + "attn_q", 32, 16)
            add(b + "attn_k", 16, 16)
            add(b + "attn_v", 16, 16)
            add(b + "attn_output", 16, 16)
            add(b + "attn_q_norm", 16)
            add(b + "attn_k_norm", 16)
        else:
            add(b + "attn_qkv", 64, 16)
            add(b + "attn_gate", 32, 16)
            add(b + "ssm_conv1d", 64, 4)
            add(b + "ssm_dt", 4, kind="bias")
            add(b + "ssm_a", 4, kind=None)
            add(b + "ssm_beta", 4, 16)
            add(b + "ssm_alpha", 4, 16)
            add(b + "ssm_norm", 8)
            add(b + "ssm_out", 16, 32)
        add(b + "ffn_gate", 32, 16)
        add(b + "ffn_up", 32, 16)
        add(b + "ffn_down", 16, 32)

    def qwen35_keys(w):
        heads(w, 1, 1, 16, 32)
        w.add_rope_dimension_sections([4, 2, 2, 0])
        w.add_ssm_conv_kernel(4)
        w.add_ssm_inner_size(32)
        w.add_ssm_state_size(8)
        w.add_ssm_time_step_rank(4)
        w.add_ssm_group_count(2)

    model("qwen35", "qwen35", 4, 16, qwen35, qwen35_keys)

    def lfm2(b, i, add):
        add(b + "attn_norm", 16)
        if i == 1:
            attention(add, b, 16, 1, 1, 16)
            add(b + "attn_q_norm", 16)
            add(b + "attn_k_norm", 16)
        else:
            add(b + "shortconv.conv", 16, 3)
            add(b + "shortconv.in_proj", 48, 16)
            add(b + "shortconv.out_proj", 16, 16)
        ffn(add, b, 16, 32)

    def lfm2_keys(w):
        w.add_head_count(1)
        w.add_head_count_kv([0, 1, 0])
        w.add_feed_forward_length(32)
        w.add_uint32("lfm2.shortconv.l_cache", 3)

    model("lfm2", "lfm2", 3, 16, lfm2, lfm2_keys, last_norm="token_embd_norm")


def post(port, path, body):
    url, head = f"http://127.0.0.1:{port}{path}", {"Content-Type": "application/json"}
    req = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(req, timeout=60) as r:
        return json.load(r)


def save(server_dir, model, setting, cfg, out, work, port):
    cfg = dict(cfg, model=os.path.join(work, model + ".gguf"), slots=work, port=port)
    env = dict(os.environ, PYTHONPATH=server_dir)
    log = open(os.path.join(work, "log"), "w+", errors="replace")
    # -S: the wheel given, not one that is installed.
    args = [sys.executable, "-S", os.path.abspath(__file__), "--serve", json.dumps(cfg)]
    p = subprocess.Popen(args, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        for _ in range(200):
            if p.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.1)
        slot = cfg.get("slot", 0)
        if cfg.get("tokens", 12):
            try:
                post(port, "/completion", {"prompt": TOKENS, "n_predict": 0, "id_slot": slot})
            except urllib.error.HTTPError as e:
                # Older servers say 500 when what a random model says is no text. The prompt is in the slot all
                # the same.
                if b"does not match the expected" not in e.read():
                    raise
        saved = post(port, f"/slots/{slot}?action=save", {"filename": "state.bin"})["n_saved"]
        assert saved == cfg.get("tokens", 12), saved
    except OSError as e:
        log.seek(0)
        print(f"{server_dir} {model} {setting}: {e}\n" + log.read()[-1500:])
        return
    finally:
        if p.poll() is None:
            p.send_signal(signal.SIGKILL)
        p.wait()
    data = open(os.path.join(work, "state.bin"), "rb").read()
    os.remove(os.path.join(work, "state.bin"))
    if data[4] not in cfg.get("versions", [2, 3, 4]):
        return
    name = f"{model}-{setting}-v{data[4]}.bin"
    open(os.path.join(out, name), "wb").write(data)
    print(name, len(data))


def main():
    if sys.argv[1:2] == ["--serve"]:
        return serve(json.loads(sys.argv[2]))
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    out, servers = os.path.abspath(sys.argv[1]), sys.argv[2:]
    only = os.environ.get("ONLY", "").split()
    with tempfile.TemporaryDirectory() as work:
        write_models(work)
        for server in servers:
            for model, runs in RUNS.items():
                for setting, cfg in runs:
                    if not only or model in only:
                        with socket.create_server(("127.0.0.1", 0)) as s:
                            port = s.getsockname()[1]
                        save(os.path.abspath(server), model, setting, cfg, out, work, port)


main()
