//! This project's side of a comparison: `npu-prefill`, started as a decoder's owner would start it, for the file route. What
//! it says of itself on stdout is taken as it stands; its whole time is taken from outside.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::ids;
use crate::run::{Ended, run};

/// The provider.
pub struct Ours {
    program: PathBuf,
    threads: u32,
    /// For ids and states; goes with its contents.
    scratch: TempDir,
}

/// What it says of one prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Receipt {
    /// Its rate over `prefill_ms`.
    pub tokens_per_second: f64,
    /// Computing and writing keys and values.
    pub prefill_ms: f64,
    /// From the start of its `main` to the line it printed.
    pub total_ms: f64,
    /// Opening the model, as far as it says.
    pub load_ms: Option<f64>,
    /// From the start of its `main` to its first matrix product, as far as it says.
    pub first_gemm_ms: Option<f64>,
    /// Most memory it had resident, pages of the mapped model included.
    pub peak_rss_bytes: Option<u64>,
    /// The kernels it computed with.
    pub kernel: String,
    /// Its version.
    pub version: String,
}

impl Ours {
    /// The provider at `program`, with a directory of its own under `scratch` or where the system has such.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn new(program: PathBuf, threads: u32, scratch: Option<&Path>) -> Result<Ours> {
        let parent = scratch.map_or_else(std::env::temp_dir, Path::to_owned);
        let scratch = tempfile::Builder::new().prefix("npu-prefill-bench-").tempdir_in(&parent).with_context(|| {
            format!("making a directory in {}; --scratch names a place that can be written", parent.display())
        })?;
        // Settings of whoever measures are not what is measured: an empty file stands for the user's.
        let config = scratch.path().join("config.toml");
        fs::write(&config, "").with_context(|| format!("writing {}", config.display()))?;
        Ok(Ours { program, threads, scratch })
    }

    /// Lets it prefill `n` ids of a vocabulary of `n_vocab`.
    ///
    /// # Errors
    /// It cannot be run, refuses, or prints something else than its receipt.
    pub fn prefill(&self, model: &Path, n: u32, n_vocab: u32) -> Result<(Receipt, Ended)> {
        let file = |name: &str| self.scratch.path().join(name);
        let (tokens, out) = (file("ids"), file("state.bin"));
        fs::write(&tokens, ids::text(&ids::prompt(n, n_vocab)))
            .with_context(|| format!("writing {}", tokens.display()))?;
        let mut c = Command::new(&self.program);
        c.arg("--tokens").arg(&tokens).arg("--out").arg(&out).arg("--model").arg(model);
        // A context with room for the prompt and one more, in whole blocks as a server has it.
        let n_ctx = u64::from(n + 1).next_multiple_of(256);
        c.args(["-c", &n_ctx.to_string(), "-t", &self.threads.to_string(), "--flash-attn", "on"]);
        // Named, so that it has not to be found out; the versions differ by a few bytes.
        c.args(["--state-version", "3", "--config"]).arg(file("config.toml"));
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if ["LLAMA_ARG_", "NPU_PREFILL_", "ONEBIT_"].iter().any(|p| text.starts_with(p)) {
                c.env_remove(&name);
            }
        }
        let ended = run(&mut c)?;
        let receipt = parse(&ended.stdout, n)
            .with_context(|| format!("what {} printed for {}", self.program.display(), model.display()))?;
        // The next run writes a fresh file again, as it would for a decoder.
        fs::remove_file(&out).with_context(|| format!("removing {}, which should be there", out.display()))?;
        Ok((receipt, ended))
    }
}

fn parse(stdout: &str, n: u32) -> Result<Receipt> {
    let line: Value = serde_json::from_str(stdout.trim()).context("this is not one line of JSON")?;
    let number = |key: &str| line[key].as_f64();
    let need = |key: &str| {
        let value = number(key).filter(|v| *v > 0.0);
        value.with_context(|| format!("{key} should be a number above 0, but is {}", line[key]))
    };
    let word = |key: &str| line[key].as_str().unwrap_or("unknown").to_owned();
    if let Some(done) = line["n_tokens"].as_u64() {
        ensure!(done == u64::from(n), "it computed {done} tokens instead of {n}");
    }
    Ok(Receipt {
        tokens_per_second: need("tokens_per_second")?,
        prefill_ms: need("prefill_ms")?,
        total_ms: need("total_ms")?,
        load_ms: number("load_ms"),
        first_gemm_ms: number("first_gemm_ms"),
        peak_rss_bytes: line["peak_rss_bytes"].as_u64(),
        kernel: word("kernel"),
        version: word("npu_prefill"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"prefill_ms":250.5,"route":"file","n_tokens":512,"tokens_per_second":2043.9,"bytes":9,
        "load_ms":1.5,"total_ms":260.25,"peak_rss_bytes":104857600,"kernel":"x86_64-i8f32-avx2","npu_prefill":"0.1.0"}"#;

    #[test]
    fn a_receipt_is_read() {
        let receipt = parse(LINE, 512).unwrap();
        assert_eq!(
            receipt,
            Receipt {
                tokens_per_second: 2043.9,
                prefill_ms: 250.5,
                total_ms: 260.25,
                load_ms: Some(1.5),
                first_gemm_ms: None,
                peak_rss_bytes: Some(100 << 20),
                kernel: "x86_64-i8f32-avx2".into(),
                version: "0.1.0".into(),
            }
        );
        let more = LINE.replace("\"load_ms\"", "\"first_gemm_ms\":3.5,\"load_ms\"");
        assert_eq!(parse(&more, 512).unwrap().first_gemm_ms, Some(3.5));
    }

    #[test]
    fn what_is_no_receipt_is_refused() {
        for (text, says) in [
            ("", "not one line of JSON"),
            ("{}\n{}", "not one line of JSON"),
            ("{}", "tokens_per_second should be a number above 0, but is null"),
            (&LINE.replace("260.25", "0"), "total_ms"),
            (&LINE.replace("\"n_tokens\":512", "\"n_tokens\":511"), "511 tokens instead of 512"),
        ] {
            let error = format!("{:#}", parse(text, 512).unwrap_err());
            assert!(error.contains(says), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_place_that_is_not_there_is_named() {
        let error = Ours::new("x".into(), 1, Some(Path::new("no/such/place"))).err().unwrap();
        assert!(format!("{error:#}").contains("no/such/place"));
    }
}
