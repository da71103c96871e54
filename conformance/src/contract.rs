//! Files that were computed with kernels of the int8 contract: which kernels a provider is given, and what its files are judged by.
//!
//! Such a file is far from a server's, by what rounding whole rows to 8 bits costs, so the server alone is no yardstick. The oracle
//! computes by the same contract, in code of its own. Layer 0 has to be the oracle's. Beyond it two right results part: bits of a
//! 16-bit cache become codes, and codes others. There the oracle's file stands as one more variant of the server, in distances and
//! in what the server says after restoring it: it is how far a right result is away. That all layers are the same where nothing but
//! codes is rounded, with an f32 cache, is the matter of `tests/int8.rs`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use gguf::Gguf;
use kvlayout::{State, StateVersion};
use serde_json::Value;

use crate::behaviour::{self, Reply};
use crate::check::{self, Distances, Measure};
use crate::client::Client;
use crate::heat::Grid;
use crate::oracle::{Arithmetic, Oracle};
use crate::reference::{Reference, until_departure};
use crate::run::Runner;
use crate::tolerances as tol;

/// A device of the provider's, by name, and the directory of its kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernels {
    /// `--device`.
    pub device: String,
    /// `--elfs`.
    pub dir: PathBuf,
}

/// What kernels' shapes are multiples of, by the contract.
const STEP: u64 = 128;

/// The projections that are offered to a device.
const PROJECTIONS: [&str; 7] = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];

impl Kernels {
    /// Names of kernels for every projection of a model, in `dir`, for the provider's own oracle, which looks at nothing but names.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn named(model: &Gguf, dir: &Path) -> Result<Kernels> {
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        for t in model.tensors() {
            let part = t.name.strip_suffix(".weight").and_then(|n| n.rsplit('.').next());
            if part.is_some_and(|p| PROJECTIONS.contains(&p)) {
                let [k, n] = [t.ne[0], t.ne[1]].map(|n| n.next_multiple_of(STEP));
                let path = dir.join(format!("full_i8_P_K{k}_N{n}.elf"));
                fs::write(&path, "").with_context(|| format!("writing {}", path.display()))?;
            }
        }
        Ok(Kernels { device: "oracle".to_owned(), dir: dir.to_owned() })
    }

    /// The options that give them to a provider.
    pub fn args(&self) -> [std::ffi::OsString; 4] {
        ["--device".into(), self.device.clone().into(), "--elfs".into(), self.dir.clone().into()]
    }

    /// Whether a provider's receipt says that they computed all that they were offered. What the processor computed in their place is
    /// right, and says nothing of them.
    ///
    /// # Errors
    /// What it says instead.
    pub fn did_it_all(&self, receipt: &Value) -> Result<()> {
        let offload = &receipt["offload"];
        let count = |key: &str| offload[key].as_u64();
        ensure!(
            receipt["device"] == self.device.as_str()
                && count("on_device") > Some(0)
                && (count("on_host"), count("made_up")) == (Some(0), Some(0)),
            "the kernels of {} on the device {} should compute every projection, and the receipt says device {}, offload {offload}",
            self.dir.display(),
            self.device,
            receipt["device"]
        );
        Ok(())
    }
}

impl Runner<'_> {
    /// The oracle's files by the case's contract, how far they are from the server's, and what a further server `e` says after
    /// restoring them. Nothing in a case without one.
    pub(crate) fn by_contract(&self, references: &mut [Reference], version: StateVersion) -> Result<()> {
        if self.case.arithmetic == Arithmetic::Exact {
            return Ok(());
        }
        ensure!(!self.quantised(), "cases of a contract have f32, f16 or bf16 caches: the oracle writes no others");
        let oracle = Oracle::load(&Gguf::open(&self.model)?)?;
        let spec = self.shape.kv_spec(&self.cache());
        let mut server = self.start("e", |o| o.cache_ram_mib = 8192)?;
        for r in references.iter_mut() {
            let handed = &r.ids[..r.ids.len() - 1];
            let path = server.options.slots.join(format!("{}.bin", r.name));
            let state = oracle.state(handed, &spec, version, self.case.arithmetic, None)?;
            fs::write(&path, state).with_context(|| format!("writing {}", path.display()))?;
            let (reference, state) = (self.read(&r.file)?, self.read(&path)?);
            r.noise = r.noise.max(check::distances(&reference, &state, &self.shape)?.0);
            let grid = Grid::of(&reference, &state, &self.shape, handed.len())?;
            r.noise_grid = std::mem::take(&mut r.noise_grid).max(grid);
            let reply = self.restored(&server.client, r, &path);
            let about = || format!("prompt {}, the oracle's file", r.name);
            let reply = server.explain(reply).with_context(about)?;
            r.oracle = Some((path, reply));
        }
        Ok(())
    }

    /// A state file of this case's model.
    pub(crate) fn read(&self, path: &Path) -> Result<State> {
        let bytes = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        self.shape.parse(&bytes).with_context(|| path.display().to_string())
    }

    /// What a server says after restoring a file, against the control.
    fn restored(&self, client: &Client, r: &Reference, file: &Path) -> Result<Reply> {
        client.restore(0, file.file_name().and_then(|n| n.to_str()).context("file name")?)?;
        let reply = client.complete(&self.ask(&r.ids), until_departure(&r.control))?;
        client.erase(0)?;
        Ok(behaviour::compare(&r.control, &reply))
    }

    /// The device for a case of a contract.
    pub(crate) fn kernels(&self) -> Result<Option<Kernels>> {
        Ok(match (self.case.arithmetic, &self.context.kernels) {
            (Arithmetic::Exact, _) => None,
            (Arithmetic::Int8, Some(kernels)) => Some(kernels.clone()),
            (Arithmetic::Int8, None) => Some(Kernels::named(&Gguf::open(&self.model)?, &self.dir.0.join("kernels"))?),
        })
    }
}

/// Holds a file against the oracle's in layer 0 and, beyond it, against the server's. `oracle` is the file's distance from the
/// oracle's, `server` that from the server's, and `cost` the worst that the oracle's own files, or variants of the server, are away from
/// the server's.
pub fn judge(oracle: &Distances, server: &Distances, cost: &Distances) -> Vec<Measure> {
    let mut out = Vec::new();
    let mut put = |what: String, value: f64, limit: f64| out.push(Measure { what, value, limit });
    for (i, part) in ["K", "V"].iter().enumerate() {
        put(format!("layer 0 {part}, from the oracle"), oracle.layer0[i], tol::INT8_LAYER0);
        put(format!("worst row of layer 0 {part}, from the oracle"), oracle.row0[i], tol::INT8_ROW0);
        put(format!("mean of layers {part}"), server.mean[i], tol::NOISE * cost.mean[i]);
        put(format!("worst layer {part}"), server.layer[i], tol::NOISE * cost.layer[i]);
        put(format!("worst row {part}"), server.row[i], tol::NOISE * cost.row[i]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;
    use serde_json::json;

    #[test]
    fn every_projection_has_a_kernel() {
        let dir = tempfile::tempdir().unwrap();
        let model = fixtures::find("tiny-llama-f32").unwrap().write(dir.path()).unwrap();
        let kernels = Kernels::named(&Gguf::open(&model).unwrap(), &dir.path().join("kernels")).unwrap();
        let mut names: Vec<String> =
            fs::read_dir(&kernels.dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        // Embedding 256, keys and values of 128, 512 in the network: K and V; Q and output; gate and up; down.
        let want = ["K256_N128", "K256_N256", "K256_N512", "K512_N256"].map(|kn| format!("full_i8_P_{kn}.elf"));
        assert_eq!(names, want);
    }

    #[test]
    fn a_receipt_says_who_computed() {
        let kernels = Kernels { device: "sim".into(), dir: "/k".into() };
        let receipt = |device: &str, on_device, on_host, made_up| json!({"device": device, "offload": {"on_device": on_device, "on_host": on_host, "made_up": made_up}});
        kernels.did_it_all(&receipt("sim", 9, 0, 0)).unwrap();
        for other in [
            receipt("cpu", 9, 0, 0),
            receipt("sim", 0, 0, 0),
            receipt("sim", 8, 1, 0),
            receipt("sim", 8, 0, 1),
            json!({}),
        ] {
            assert!(kernels.did_it_all(&other).is_err(), "{other}");
        }
    }
}
