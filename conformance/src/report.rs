//! Results for people: a table, and what is wrong under it. For machines the same as JSON.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::{Value, json};

use crate::cases::Case;
use crate::pins::{Pins, ServerPin};
use crate::run::{CaseReport, Verdict};
use crate::terminal;

/// All results with where they were made.
#[derive(Debug, Serialize)]
pub struct Report<'a> {
    /// What this is.
    pub format: &'static str,
    /// The machine.
    pub machine: Value,
    /// What was run, word by word.
    pub command: Vec<String>,
    /// Programs, servers and models, exactly.
    pub versions: Value,
    /// Wall time of the whole run.
    pub seconds: f64,
    /// Cases that passed, failed, were skipped, could not be tried.
    pub counts: [usize; 4],
    /// The cases.
    pub cases: &'a [CaseReport],
}

/// Puts results together.
pub fn report(cases: &[CaseReport], seconds: f64, versions: Value) -> Report<'_> {
    let count = |v: Verdict| cases.iter().filter(|c| c.verdict == v).count();
    Report {
        format: "npu-prefill conformance 1",
        machine: machine(),
        command: std::env::args().collect(),
        versions,
        seconds,
        counts: [count(Verdict::Pass), count(Verdict::Fail), count(Verdict::Skip), count(Verdict::Error)],
        cases,
    }
}

/// Which programs, servers and models a run is about. `provider` and `server` are programs that say their version themselves.
pub fn versions(pins: &Pins, cases: &[Case], provider: Option<&Path>, server: Option<&Path>) -> Value {
    let said = |program: &Path| {
        let out = Command::new(program).arg("--version").stdin(Stdio::null()).output();
        let lines = |o: std::process::Output| {
            // llama-server says it on stderr.
            let text = [o.stdout, o.stderr].concat();
            String::from_utf8_lossy(&text).lines().take(4).map(str::trim).collect::<Vec<_>>().join("; ")
        };
        out.map(lines).unwrap_or_else(|e| format!("does not run: {e}"))
    };
    let used = |f: &dyn Fn(&Case) -> bool| cases.iter().any(f);
    let servers: Vec<Value> = match server {
        Some(path) => vec![json!({"pin": "own", "version": said(path)})],
        None => {
            let pinned = pins.servers.iter().filter(|p| used(&|c| c.pin == p.name));
            let row = |p: &ServerPin| {
                json!({
                    "pin": p.name, "package": p.package, "version": p.version, "state_version": p.state_version,
                    "sha256": p.sha256,
                })
            };
            pinned.map(row).collect()
        }
    };
    let models =
        pins.models.iter().filter(|m| used(&|c| c.model == m.name)).map(
            |m| json!({"name": m.name, "title": m.title, "weights": m.weights, "sha256": m.sha256, "bytes": m.bytes}),
        );
    json!({
        "conformance": env!("CARGO_PKG_VERSION"),
        "provider": provider.map(said),
        "servers": servers,
        "models": models.collect::<Vec<_>>(),
    })
}

/// Processor, cores and kernel, as far as the system tells.
pub fn machine() -> Value {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    json!({
        "cpu": cpu_name(&cpuinfo),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "kernel": kernel.trim(),
    })
}

fn cpu_name(cpuinfo: &str) -> &str {
    let name = cpuinfo.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    name.map_or("unknown", |(_, name)| name.trim())
}

/// One line of progress.
pub fn line(c: &CaseReport) -> String {
    let first = c.reasons.first().map(|r| format!(": {}", r.lines().next().unwrap_or(""))).unwrap_or_default();
    format!("{} {} ({:.1} s){first}", terminal::coloured(word(&c.verdict)), c.id, c.seconds)
}

fn word(v: &Verdict) -> &'static str {
    match v {
        Verdict::Pass => "ok",
        Verdict::Fail => "FAIL",
        Verdict::Skip => "skip",
        Verdict::Error => "ERROR",
    }
}

/// The table for people, from the JSON value so that a stored report prints the same.
pub fn table(report: &Value) -> Result<String> {
    let cases = report["cases"].as_array().context("the report has no list of cases")?;
    let mut rows = vec![vec![
        "case".to_owned(),
        "".into(),
        "prompts".into(),
        "layer 0 K/V".into(),
        "worst layer K/V".into(),
        "its noise K/V".into(),
        "reused".into(),
        "KL mean".into(),
        "cold".into(),
        "batch".into(),
        "attn".into(),
        "top-1".into(),
        "text".into(),
        "cold".into(),
        "batch".into(),
        "prefill ms".into(),
        "server".into(),
    ]];
    for c in cases {
        let text = |v: &Value| v.as_str().unwrap_or("").to_owned();
        let pair = |v: &Value| format!("{} {}", short(v[0].as_f64()), short(v[1].as_f64()));
        let prompts = c["prompts"].as_array().map_or(0, Vec::len);
        let sum = |key: &str| {
            let list = c["prompts"].as_array();
            list.map(|l| l.iter().filter_map(|p| p[key].as_f64()).sum::<f64>()).filter(|s| *s > 0.0)
        };
        let verdict = match c["verdict"].as_str() {
            Some("pass") => "ok",
            Some("fail") => "FAIL",
            Some("skip") => "skip",
            _ => "ERROR",
        };
        let n = c["handed"]["n"].as_u64().unwrap_or(0);
        let again = c["reprocessed"].as_u64().unwrap_or(0);
        let reused = format!("{}/{n}{}", c["reused"], if again > 0 { format!(" +{again}") } else { String::new() });
        let spread = |which: &str, key: &str| if n == 0 { "-".into() } else { short(c[which][key].as_f64()) };
        let agreed = |which: &str| match c[which]["agreed_mean"].as_f64() {
            Some(v) if n > 0 => format!("{v:.1}"),
            _ => "-".into(),
        };
        let ms = |v: Option<f64>| v.map_or("-".into(), |v| format!("{v:.0}"));
        let ran = prompts > 0;
        let or = |v: String| if ran { v } else { "-".into() };
        rows.push(vec![
            text(&c["id"]),
            verdict.into(),
            prompts.to_string(),
            or(pair(&c["distances"]["layer0"])),
            or(pair(&c["distances"]["layer"])),
            or(pair(&c["noise"]["layer"])),
            or(reused),
            spread("handed", "kl_mean"),
            spread("cold", "kl_mean"),
            spread("small_batch", "kl_mean"),
            spread("other_attention", "kl_mean"),
            if n == 0 { "-".into() } else { format!("{}/{n}", c["handed"]["top1"]) },
            agreed("handed"),
            agreed("cold"),
            agreed("small_batch"),
            ms(sum("prefill_ms")),
            ms(sum("server_prefill_ms")),
        ]);
    }
    let widths: Vec<usize> =
        (0..rows[0].len()).map(|i| rows.iter().map(|r| r[i].chars().count()).max().unwrap_or(0)).collect();
    let mut out = String::new();
    for row in &rows {
        let cells: Vec<_> = row.iter().zip(&widths).map(|(c, &w)| format!("{c:<w$}")).collect();
        let _ = writeln!(out, "{}", cells.join("  ").trim_end());
    }
    for c in cases.iter().filter(|c| c["from_oracle"].is_object()) {
        let pair = |v: &Value| format!("{} {}", short(v[0].as_f64()), short(v[1].as_f64()));
        let (from, said) = (&c["from_oracle"], &c["oracle"]);
        let _ = writeln!(
            out,
            "\n{}, products by int8: from the oracle's files layer 0 {}, worst layer {}; the largest divergence of a first token {}. The \
             oracle's files at the server: KL mean {}, largest {}, top-1 {}/{}, text {:.1}.",
            c["id"].as_str().unwrap_or(""),
            pair(&from["layer0"]),
            pair(&from["layer"]),
            short(c["handed"]["kl_max"].as_f64()),
            short(said["kl_mean"].as_f64()),
            short(said["kl_max"].as_f64()),
            said["top1"],
            said["n"],
            said["agreed_mean"].as_f64().unwrap_or(0.0)
        );
    }
    for c in cases.iter().filter(|c| c["verdict"] != "pass") {
        let _ = writeln!(out, "\n{} - {}", c["id"].as_str().unwrap_or(""), c["verdict"].as_str().unwrap_or(""));
        let reasons = c["reasons"].as_array().cloned().unwrap_or_default();
        for r in reasons.iter().take(20) {
            let _ = writeln!(out, "  {}", r.as_str().unwrap_or("").replace('\n', "\n    "));
        }
        if reasons.len() > 20 {
            let _ = writeln!(out, "  and {} more", reasons.len() - 20);
        }
    }
    let (adopted, refused) = crate::shared::routes_of(cases);
    if adopted + refused > 0 {
        let _ = writeln!(
            out,
            "\nShared route: {adopted} prompts adopted, all rows equal to the file's bit for bit; {refused} refused as they have to be, \
             with nothing written, and handed over by file."
        );
    }
    let n = |i: usize| report["counts"][i].as_u64().unwrap_or(0);
    let _ = writeln!(
        out,
        "\n{} passed, {} failed, {} skipped, {} could not be tried, in {:.0} s. Distances are |a-b|/|a| against the server's own \
         file, the worst of all prompts; noise is the server against itself; reused +n: prompts that the server computes again \
         whatever it is given, asserted; KL in nats and text in tokens against the control.",
        n(0),
        n(1),
        n(2),
        n(3),
        report["seconds"].as_f64().unwrap_or(0.0)
    );
    Ok(out)
}

fn short(v: Option<f64>) -> String {
    match v {
        None => "-".into(),
        Some(0.0) => "0".into(),
        Some(v) if v >= 0.01 => format!("{v:.3}"),
        Some(v) => format!("{v:.1e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_has_a_name() {
        assert_eq!(cpu_name("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nflags\t: x\n"), "Some CPU @ 3 GHz");
        assert_eq!(cpu_name(""), "unknown");
    }
}
