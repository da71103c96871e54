//! The other side of a comparison: llama.cpp's `llama-bench`, or a program that takes the same options and prints the same
//! JSON. It evaluates a prompt of random ids once to warm up and once against the clock; loading the model is not part of its
//! figure.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::run::{Ended, run};

/// A `llama-bench`.
pub struct Peer {
    /// The program.
    pub program: PathBuf,
    /// What tables call it.
    pub name: String,
    /// Threads.
    pub threads: u32,
    /// Options of its own, after the usual ones.
    pub more: Vec<String>,
}

/// What it says of one prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Its rate.
    pub tokens_per_second: f64,
    /// Number and commit of its build, what it computes on where that is not the CPU alone, and options of its own.
    pub build: String,
}

impl Peer {
    /// Lets it evaluate a prompt of `n` tokens.
    ///
    /// # Errors
    /// It cannot be run, or does not say what it was asked for.
    pub fn prefill(&self, model: &Path, n: u32) -> Result<(Answer, Ended)> {
        let mut c = Command::new(&self.program);
        c.arg("-m").arg(model).args(["-p", &n.to_string(), "-n", "0", "-r", "1", "-o", "json"]);
        // Flash attention as llama-server has it by itself on a CPU; without it the state would be laid out differently, too.
        c.args(["-t", &self.threads.to_string(), "-fa", "1"]);
        c.args(&self.more);
        let ended = run(&mut c)?;
        let mut answer = parse(&ended.stdout, n, self.threads).with_context(|| {
            format!("what {} printed for {n} tokens of {}", self.program.display(), model.display())
        })?;
        self.more.iter().for_each(|option| answer.build += &format!(" {option}"));
        Ok((answer, ended))
    }
}

/// Reads the list of tests it prints, which has to hold the one that was asked for.
fn parse(stdout: &str, n: u32, threads: u32) -> Result<Answer> {
    // Backends may print lines of their own first.
    let start = stdout.lines().take_while(|l| !l.trim_start().starts_with('[')).map(|l| l.len() + 1).sum::<usize>();
    let list: Value = serde_json::from_str(stdout.get(start..).unwrap_or_default())
        .context("this is not the JSON of llama-bench; is --llama-bench that program?")?;
    let tests = list.as_array().context("this is JSON, but no list of tests")?;
    let asked = |t: &&Value| t["n_prompt"] == n && t["n_gen"].as_u64().unwrap_or(0) == 0;
    let test = tests
        .iter()
        .find(asked)
        .with_context(|| format!("none of its {} tests is a prompt of {n} tokens without generation", tests.len()))?;
    if let Some(used) = test["n_threads"].as_u64() {
        ensure!(used == u64::from(threads), "it used {used} threads instead of {threads}");
    }
    let rate = test["avg_ts"].as_f64().context("the test has no avg_ts, its tokens per second")?;
    ensure!(rate.is_finite() && rate > 0.0, "the test's avg_ts is {rate}, which is no rate");
    let mut build = match test["build_number"].as_u64() {
        Some(number) => format!("b{number}"),
        None => "unknown build".to_owned(),
    };
    if let Some(commit) = test["build_commit"].as_str().filter(|c| !c.is_empty() && *c != "unknown") {
        build += &format!(" ({commit})");
    }
    if let Some(backends) = test["backends"].as_str().filter(|b| !b.is_empty() && *b != "CPU") {
        build += &format!(" on {backends}");
    }
    Ok(Answer { tokens_per_second: rate, build })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields that matter, and some that do not.
    fn sample(n: u32) -> String {
        format!(
            r#"[
  {{
    "build_commit": "0a1b2c3",
    "build_number": 11434,
    "cpu_info": "Some CPU",
    "gpu_info": "",
    "backends": "CPU",
    "model_filename": "m.gguf",
    "model_type": "llama 135M Q4_1",
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_threads": 2,
    "flash_attn": 1,
    "n_prompt": {n},
    "n_gen": 0,
    "avg_ns": 1500000000,
    "avg_ts": 341.333333,
    "stddev_ts": 0.000000,
    "samples_ns": [ 1500000000 ],
    "samples_ts": [ 341.333 ]
  }}
]
"#
        )
    }

    #[test]
    fn its_rate_and_build_are_read() {
        let want = Answer { tokens_per_second: 341.333333, build: "b11434 (0a1b2c3)".into() };
        assert_eq!(parse(&sample(512), 512, 2).unwrap(), want);
        assert_eq!(parse(&format!("a backend: hello\n\n{}", sample(512)), 512, 2).unwrap(), want);
    }

    #[test]
    fn what_it_computed_on_is_told_unless_it_was_the_cpu() {
        let text = sample(8).replace("\"backends\": \"CPU\"", "\"backends\": \"CUDA,BLAS\"");
        assert_eq!(parse(&text, 8, 2).unwrap().build, "b11434 (0a1b2c3) on CUDA,BLAS");
        let text = r#"[{"n_prompt": 8, "n_gen": 0, "avg_ts": 2}]"#;
        assert_eq!(parse(text, 8, 2).unwrap(), Answer { tokens_per_second: 2.0, build: "unknown build".into() });
    }

    #[test]
    fn what_is_not_an_answer_is_refused() {
        for (text, says) in [
            ("", "not the JSON of llama-bench"),
            ("| model | t/s |\n", "not the JSON of llama-bench"),
            ("[\n", "not the JSON of llama-bench"),
            ("[]", "none of its 0 tests"),
            ("[1, null]", "none of its 2 tests"),
            (&sample(64), "none of its 1 tests"),
            (&sample(512).replace("\"n_threads\": 2", "\"n_threads\": 8"), "8 threads instead of 2"),
            (&sample(512).replace("avg_ts", "other"), "no avg_ts"),
            (&sample(512).replace("341.333333", "0"), "no rate"),
        ] {
            let error = format!("{:#}", parse(text, 512, 2).unwrap_err());
            assert!(error.contains(says), "{text:?}: {error}");
        }
    }
}
