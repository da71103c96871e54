//! `bench prefill`: whole prompts, the provider against llama.cpp. Runs of the two take turns, so that a machine which slows
//! down does so for both, and figures are medians. Their ratio is the result; the rates by themselves are the machine's.
//!
//! What is compared: the peer's evaluation of a prompt, its model loaded and warmed up, against the provider's prefill with
//! all its writing, in a process that has just been started. The provider's whole process is told beside it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::csv::{self, Csv};
use crate::locate::name;
use crate::machine::{self, Load};
use crate::ours::{Ours, Receipt};
use crate::peer::Peer;
use crate::stats::{largest, median};
use crate::table::{self, percent};
use crate::{ids, run};

/// What is measured.
pub struct Prefill {
    /// The models.
    pub models: Vec<PathBuf>,
    /// Lengths of prompts.
    pub prompts: Vec<u32>,
    /// Runs of each side per model and length.
    pub runs: u32,
    /// Threads of each side.
    pub threads: u32,
    /// How long to wait for a quiet moment before a run.
    pub patience: Duration,
    /// The other side.
    pub peer: Peer,
    /// Our side.
    pub ours: Ours,
}

/// One model and one length.
#[derive(Debug, Clone, Default)]
pub struct Row {
    /// The model's file.
    pub model: String,
    /// Tokens.
    pub prompt: u32,
    /// What the peer says of its build.
    pub peer_build: String,
    /// Its rates, run by run.
    pub peer: Vec<f64>,
    /// Our receipts and the time of our whole process, run by run.
    pub ours: Vec<(Receipt, f64)>,
    /// The others' share just before a run, the largest.
    pub before: Option<f64>,
    /// The others' CPU time during the peer's runs.
    pub peer_load: Load,
    /// And during ours.
    pub ours_load: Load,
}

impl Row {
    /// The peer's tokens per second.
    pub fn peer_rate(&self) -> Option<f64> {
        median(self.peer.iter().copied())
    }

    /// A median over our runs.
    fn ours(&self, of: impl Fn(&Receipt) -> f64) -> Option<f64> {
        median(self.ours.iter().map(|(receipt, _)| of(receipt)))
    }

    /// Our tokens per second.
    pub fn ours_rate(&self) -> Option<f64> {
        self.ours(|r| r.tokens_per_second)
    }

    /// Ours over the peer's.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.ours_rate()? / self.peer_rate()?)
    }

    /// Our process from exec to exit.
    pub fn process_ms(&self) -> Option<f64> {
        median(self.ours.iter().map(|(_, process)| *process))
    }

    /// Our prefill.
    pub fn prefill_ms(&self) -> Option<f64> {
        self.ours(|r| r.prefill_ms)
    }

    /// What the process costs, as a multiple of its prefill.
    pub fn overhead(&self) -> Option<f64> {
        Some(self.process_ms()? / self.prefill_ms()?)
    }

    /// Our largest resident memory.
    pub fn peak_rss(&self) -> Option<u64> {
        self.ours.iter().filter_map(|(receipt, _)| receipt.peak_rss_bytes).max()
    }

    /// Whether both sides ran undisturbed; `None` where that is not known.
    pub fn quiet(&self) -> Option<bool> {
        Some(self.peer_load.quiet()? && self.ours_load.quiet()?)
    }
}

const NAMES: &[&str] = &[
    "date",
    "cpu",
    "cores",
    "threads",
    "model",
    "prompt",
    "runs",
    "peer",
    "peer_build",
    "peer_tokens_per_second",
    "ours_version",
    "ours_kernel",
    "ours_tokens_per_second",
    "ratio",
    "process_ms",
    "prefill_ms",
    "process_over_prefill",
    "peak_rss_bytes",
    "others_before",
    "others_with_peer",
    "others_with_ours",
    "quiet",
];

fn cells(p: &Prefill, r: &Row) -> Vec<String> {
    let said = |of: fn(&Receipt) -> &str| r.ours.first().map_or(String::new(), |(receipt, _)| of(receipt).to_owned());
    vec![
        machine::now(),
        machine::cpu(),
        machine::cores().to_string(),
        p.threads.to_string(),
        r.model.clone(),
        r.prompt.to_string(),
        p.runs.to_string(),
        p.peer.name.clone(),
        r.peer_build.clone(),
        csv::number(r.peer_rate(), 2),
        said(|r| &r.version),
        said(|r| &r.kernel),
        csv::number(r.ours_rate(), 2),
        csv::number(r.ratio(), 3),
        csv::number(r.process_ms(), 3),
        csv::number(r.prefill_ms(), 3),
        csv::number(r.overhead(), 3),
        r.peak_rss().map_or(String::new(), |b| b.to_string()),
        csv::number(r.before, 4),
        csv::number(r.peer_load.share(), 4),
        csv::number(r.ours_load.share(), 4),
        yes(r.quiet(), "").to_owned(),
    ]
}

/// A yes or no, or `unknown`.
pub fn yes(value: Option<bool>, unknown: &'static str) -> &'static str {
    value.map_or(unknown, |v| if v { "yes" } else { "no" })
}

/// Measures; every row goes into the CSV file as soon as it is complete.
///
/// # Errors
/// A side cannot prefill one of the prompts, or the file cannot be written.
pub fn measure(p: &Prefill, path: Option<&Path>, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>> {
    let mut csv = Csv::open_if(path, NAMES)?;
    let mut rows = Vec::new();
    for model in &p.models {
        let vocabulary = ids::vocabulary(model)?;
        run::warm(&vocabulary.files)?;
        for &prompt in &p.prompts {
            let mut row = Row { model: name(model), prompt, ..Row::default() };
            let mut before = Vec::new();
            for i in 1..=p.runs {
                progress(&format!("{}, {prompt} tokens, run {i} of {}", row.model, p.runs));
                let here = || format!("run {i} of {prompt} tokens of {}", model.display());
                before.extend(machine::settle(p.patience).share());
                let (answer, ended) = p.peer.prefill(model, prompt).with_context(here)?;
                row.peer.push(answer.tokens_per_second);
                row.peer_build = answer.build;
                row.peer_load += ended.load;
                before.extend(machine::settle(p.patience).share());
                let (receipt, ended) = p.ours.prefill(model, prompt, vocabulary.size).with_context(here)?;
                row.ours.push((receipt, ended.process_ms));
                row.ours_load += ended.load;
            }
            row.before = largest(before);
            if let Some(csv) = &mut csv {
                csv.row(&cells(p, &row))?;
            }
            rows.push(row);
        }
    }
    Ok(rows)
}

/// The table for people.
pub fn report(p: &Prefill, rows: &[Row]) -> String {
    let head = [
        "model",
        "prompt",
        "peer tok/s",
        "ours tok/s",
        "ours/peer",
        "process ms",
        "prefill ms",
        "process/prefill",
        "peak MiB",
        "others, peer",
        "others, ours",
        "quiet",
    ];
    let lines: Vec<Vec<String>> = rows
        .iter()
        .map(|r| {
            vec![
                r.model.clone(),
                r.prompt.to_string(),
                table::number(r.peer_rate(), 1),
                table::number(r.ours_rate(), 1),
                table::number(r.ratio(), 2),
                table::number(r.process_ms(), 1),
                table::number(r.prefill_ms(), 1),
                table::number(r.overhead(), 2),
                table::number(r.peak_rss().map(|b| b as f64 / f64::from(1 << 20)), 0),
                percent(r.peer_load.share(), 1),
                percent(r.ours_load.share(), 1),
                yes(r.quiet(), "-").to_owned(),
            ]
        })
        .collect();
    let mut builds: Vec<&str> = rows.iter().map(|r| r.peer_build.as_str()).collect();
    builds.dedup();
    let said = rows.first().and_then(|r| r.ours.first());
    let ours = said.map_or(String::new(), |(r, _)| format!("npu-prefill {} with {}", r.version, r.kernel));
    let mut out = format!(
        "{}\npeer: {} {}; ours: {ours}; {} threads each, medians of {} runs in turn\n\n{}",
        machine::description(),
        p.peer.name,
        builds.join(", "),
        p.threads,
        p.runs,
        table::markdown(&head, &lines)
    );
    out += &remark(rows.iter().map(Row::quiet));
    out
}

/// What has to be said under a table about disturbed rows.
pub fn remark(quiet: impl IntoIterator<Item = Option<bool>>) -> String {
    let quiet: Vec<Option<bool>> = quiet.into_iter().collect();
    let disturbed = quiet.iter().filter(|q| **q == Some(false)).count();
    if disturbed > 0 {
        return format!(
            "\nIn {disturbed} of {} rows other work took {} % of the CPU time or more: those are not to be relied on.\n",
            quiet.len(),
            machine::QUIET * 100.0
        );
    }
    if quiet.contains(&None) {
        return "\nThe system does not tell what else ran, so whether these runs were disturbed is not known.\n"
            .to_owned();
    }
    String::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receipt(rate: f64, ms: f64, peak: Option<u64>) -> Receipt {
        Receipt {
            tokens_per_second: rate,
            prefill_ms: ms,
            total_ms: ms + 1.0,
            load_ms: None,
            first_gemm_ms: None,
            peak_rss_bytes: peak,
            kernel: "k".into(),
            version: "0".into(),
        }
    }

    #[test]
    fn a_row_is_the_medians_of_its_runs() {
        let row = Row {
            peer: vec![100.0, 50.0, 90.0],
            ours: vec![
                (receipt(270.0, 10.0, Some(5)), 15.0),
                (receipt(200.0, 12.0, None), 18.0),
                (receipt(300.0, 9.0, Some(7)), 14.0),
            ],
            ..Row::default()
        };
        assert_eq!((row.peer_rate(), row.ours_rate(), row.ratio()), (Some(90.0), Some(270.0), Some(3.0)));
        assert_eq!((row.process_ms(), row.prefill_ms(), row.overhead()), (Some(15.0), Some(10.0), Some(1.5)));
        assert_eq!((row.peak_rss(), row.quiet()), (Some(7), None));
        assert_eq!(Row::default().ratio(), None);
    }

    #[test]
    fn a_row_has_a_cell_for_every_column() {
        let p = Prefill {
            models: Vec::new(),
            prompts: Vec::new(),
            runs: 1,
            threads: 2,
            patience: Duration::ZERO,
            peer: Peer { program: "p".into(), name: "peer".into(), threads: 2, more: Vec::new() },
            ours: Ours::new("o".into(), 2, None).unwrap(),
        };
        assert_eq!(cells(&p, &Row::default()).len(), NAMES.len());
        let text = report(&p, &[Row { model: "m.gguf".into(), ..Row::default() }]);
        assert!(text.contains("| m.gguf |") && text.contains("not known"), "{text}");
    }

    #[test]
    fn disturbed_rows_are_pointed_out() {
        assert_eq!(remark([Some(true), Some(true)]), "");
        assert!(remark([Some(true), Some(false), None]).contains("1 of 3 rows other work took 2 %"));
        assert!(remark([Some(true), None]).contains("not known"));
    }
}
