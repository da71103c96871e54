# Runs llama-server's HTTP interface from a pinned wheel. Started by the harness with one argument, a JSON object; stops
# when its standard input closes, so it never outlives the harness.
import json
import os
import sys
import threading

cfg = json.loads(sys.argv[1])


def watch():
    sys.stdin.buffer.read()
    os._exit(0)


threading.Thread(target=watch, daemon=True).start()

import xllamacpp as x

p = x.CommonParams()


def put(name, value):
    # Names come and go between builds; what a build does not have, it does not need.
    if hasattr(p, name):
        setattr(p, name, value)


p.model.path = cfg["model"]
p.n_ctx = cfg["n_ctx"]
p.n_parallel = cfg["n_parallel"]
p.n_ubatch = cfg["n_ubatch"]
p.slot_save_path = os.path.join(cfg["slots"], "")
p.endpoint_slots = True
p.warmup = False
p.port = cfg["port"]
if hasattr(p, "hostnames"):
    p.hostnames = ["127.0.0.1"]
else:
    p.hostname = "127.0.0.1"
p.cpuparams.n_threads = cfg["threads"]
p.cpuparams_batch.n_threads = cfg["threads"]
p.cache_type_k = x.ggml_type(cfg["type_k"])
p.cache_type_v = x.ggml_type(cfg["type_v"])
p.flash_attn_type = x.llama_flash_attn_type(1 if cfg["flash_attn"] else 0)
p.swa_full = cfg["swa_full"]
put("fit_params", False)
put("n_threads_http", 2)
put("cache_ram_mib", cfg["cache_ram_mib"])
server = x.Server(p)
print("listening on", server.listening_address, flush=True)
threading.Event().wait()
