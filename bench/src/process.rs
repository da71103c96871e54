//! `bench process`: what it costs that the provider is a process of its own, started for every prompt. Times from outside,
//! exec to exit, are held against what the program says of itself. There is no peer here: a resident server pays its start
//! once.

use std::path::PathBuf;

use anyhow::{Context as _, Result};

use crate::locate::name;
use crate::machine::{self, Load};
use crate::ours::{Ours, Receipt};
use crate::prefill::{remark, yes};
use crate::stats::median;
use crate::table::{self, percent};
use crate::{ids, run};

/// What is measured.
pub struct Process {
    /// The model.
    pub model: PathBuf,
    /// Lengths of prompts.
    pub prompts: Vec<u32>,
    /// Runs of each.
    pub runs: u32,
    /// The provider.
    pub ours: Ours,
}

/// One length.
pub struct Row {
    prompt: u32,
    runs: Vec<(Receipt, f64)>,
    load: Load,
}

impl Row {
    fn median(&self, of: impl Fn(&Receipt, f64) -> Option<f64>) -> Option<f64> {
        median(self.runs.iter().filter_map(|(receipt, process)| of(receipt, *process)))
    }
}

/// Measures.
///
/// # Errors
/// The provider cannot prefill one of the prompts.
pub fn measure(p: &Process, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>> {
    let vocabulary = ids::vocabulary(&p.model)?;
    run::warm(&vocabulary.files)?;
    let mut rows: Vec<Row> =
        p.prompts.iter().map(|&prompt| Row { prompt, runs: Vec::new(), load: Load::default() }).collect();
    // Lengths take turns, too: what disturbs the machine for a second should not hit one of them alone.
    for i in 1..=p.runs {
        for row in &mut rows {
            let n = row.prompt;
            progress(&format!("{n} tokens, run {i} of {}", p.runs));
            let (receipt, ended) = p
                .ours
                .prefill(&p.model, n, vocabulary.size)
                .with_context(|| format!("run {i} of {n} tokens of {}", p.model.display()))?;
            row.load += ended.load;
            row.runs.push((receipt, ended.process_ms));
        }
    }
    Ok(rows)
}

/// The table for people.
pub fn report(p: &Process, rows: &[Row]) -> String {
    let head = [
        "prompt",
        "process ms",
        "until first GEMM ms",
        "load ms",
        "prefill ms",
        "exec and exit ms",
        "process/prefill",
        "others",
        "quiet",
    ];
    let lines: Vec<Vec<String>> = rows
        .iter()
        .map(|r| {
            let process = r.median(|_, process| Some(process));
            let prefill = r.median(|receipt, _| Some(receipt.prefill_ms));
            vec![
                r.prompt.to_string(),
                table::number(process, 2),
                table::number(r.median(|receipt, _| receipt.first_gemm_ms), 2),
                table::number(r.median(|receipt, _| receipt.load_ms), 2),
                table::number(prefill, 2),
                table::number(r.median(|receipt, process| Some(process - receipt.total_ms)), 2),
                table::number(process.zip(prefill).map(|(all, part)| all / part), 3),
                percent(r.load.share(), 1),
                yes(r.load.quiet(), "-").to_owned(),
            ]
        })
        .collect();
    let said = rows.first().and_then(|r| r.runs.first());
    let ours = said.map_or(String::new(), |(r, _)| format!("npu-prefill {} with {}", r.version, r.kernel));
    let mut out = format!(
        "{}\n{ours}, model {}, medians of {} runs\n\n{}\n",
        machine::description(),
        name(&p.model),
        p.runs,
        table::markdown(&head, &lines)
    );
    out += "process: from exec to exit. exec and exit: the part of it that the program's own clock does not see, loading the \
            program before its main and unmapping everything after it.\n";
    if rows.iter().any(|r| r.runs.iter().any(|(receipt, _)| receipt.first_gemm_ms.is_none())) {
        out += "until first GEMM: not known, because this provider's line on stdout has no \"first_gemm_ms\"; load is the part \
                of it that is told, opening the model and preparing its weights.\n";
    }
    out += &remark(rows.iter().map(|r| r.load.quiet()));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(first_gemm_ms: Option<f64>) -> Row {
        let receipt = Receipt {
            tokens_per_second: 1.0,
            prefill_ms: 8.0,
            total_ms: 11.0,
            load_ms: Some(2.0),
            first_gemm_ms,
            peak_rss_bytes: None,
            kernel: "k".into(),
            version: "0".into(),
        };
        Row { prompt: 64, runs: vec![(receipt, 12.0)], load: Load::default() }
    }

    fn process() -> Process {
        Process {
            model: "dir/m.gguf".into(),
            prompts: vec![64],
            runs: 1,
            ours: Ours::new("o".into(), 2, None).unwrap(),
        }
    }

    #[test]
    fn what_the_receipt_does_not_tell_is_said() {
        let text = report(&process(), &[row(None)]);
        assert!(text.contains("no \"first_gemm_ms\"") && text.contains("model m.gguf"), "{text}");
        let cells: Vec<&str> =
            text.lines().find(|l| l.starts_with("| 64")).unwrap().split('|').map(str::trim).collect();
        assert_eq!(cells[1..8], ["64", "12.00", "-", "2.00", "8.00", "1.00", "1.500"]);
    }

    #[test]
    fn what_it_tells_is_shown() {
        let text = report(&process(), &[row(Some(2.5))]);
        assert!(!text.contains("first_gemm_ms") && text.contains("2.50"), "{text}");
    }
}
