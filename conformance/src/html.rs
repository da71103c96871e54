//! A stored report as a page for people: one HTML file that needs nothing else - no script, no network, no fonts. It is readable in
//! light and dark, on a phone, by keyboard and by a screen reader: every picture has its words, and the numbers behind it as a table.
//!
//! Every number in a table is marked with its place in the JSON (`data-json`), so that a test can hold the page against it.

use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::html_pictures as pictures;

/// The page's style. Colours are variables, so that the dark ones are a list of their own.
const STYLE: &str = include_str!("html.css");

/// Text for a place between tags or in an attribute.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() && c != '\n' => {}
            c => out.push(c),
        }
    }
    out
}

/// A distance or divergence as people read it.
pub(crate) fn small(v: f64) -> String {
    match v {
        0.0 => "0".into(),
        v if !v.is_finite() => "none".into(),
        v if (0.01..1000.0).contains(&v.abs()) => format!("{v:.3}"),
        v => format!("{v:.2e}"),
    }
}

/// Milliseconds.
pub(crate) fn millis(v: f64) -> String {
    if v >= 100.0 { format!("{v:.0}") } else { format!("{v:.1}") }
}

/// A cell of a table with the number at `pointer`, shown by `show`.
fn cell(report: &Value, pointer: &str, show: impl Fn(f64) -> String) -> String {
    match report.pointer(pointer).and_then(Value::as_f64) {
        Some(v) => format!("<td class=n data-json=\"{}\">{}</td>", escape(pointer), show(v)),
        None => "<td class=n>-</td>".into(),
    }
}

/// A table that scrolls by itself where the screen is narrow, by keyboard, too.
fn table(label: &str, head: &[&str], rows: &[String]) -> String {
    let head: String = head.iter().map(|h| format!("<th scope=col>{}</th>", escape(h))).collect();
    format!(
        "<div class=scroll role=region tabindex=0 aria-label=\"{}\"><table><thead><tr>{head}</tr></thead><tbody>{}</tbody></table></div>\n",
        escape(label),
        rows.concat()
    )
}

fn text<'v>(v: &'v Value, key: &str) -> &'v str {
    v[key].as_str().unwrap_or("")
}

/// A verdict's word with its mark: colour alone would not do.
fn badge(verdict: &str) -> String {
    let (class, mark) = match verdict {
        "pass" => ("pass", "✓ pass"),
        "fail" => ("fail", "✗ fail"),
        "skip" => ("skip", "– skipped"),
        _ => ("fail", "! not tried"),
    };
    format!("<span class=\"badge {class}\">{mark}</span>")
}

/// The whole page.
///
/// # Errors
/// The value is not a report.
pub fn page(report: &Value) -> Result<String> {
    let cases = report["cases"].as_array().context("the report has no list of cases")?;
    let format = text(report, "format");
    anyhow::ensure!(
        format.starts_with("npu-prefill conformance"),
        "not a conformance report: its format is {format:?}"
    );
    let mut out = String::from("<!doctype html>\n<html lang=en><head><meta charset=utf-8>\n");
    out += "<meta name=viewport content=\"width=device-width, initial-scale=1\">\n";
    out += "<meta name=color-scheme content=\"light dark\"><link rel=icon href=\"data:,\">\n";
    let _ = writeln!(out, "<title>Conformance report</title>\n<style>\n{STYLE}</style></head><body>");
    out += "<a class=skip-link href=\"#main\">Skip to the results</a>\n";
    out += &header(report);
    out += "<main id=main>\n";
    out += &summary(report, cases);
    out += &matrix(cases);
    out += "<section aria-labelledby=h-cases><h2 id=h-cases>Case by case</h2>\n";
    for (i, c) in cases.iter().enumerate() {
        out += &case(report, i, c, cases.len() == 1);
    }
    out += "</section>\n";
    out += &made_by(report);
    out += "</main></body></html>\n";
    Ok(out)
}

fn header(report: &Value) -> String {
    let count = |i: usize| report["counts"][i].as_u64().unwrap_or(0);
    let (verdict, words) = match (count(0), count(1) + count(3)) {
        (0, 0) => ("skip", "Nothing was tried"),
        (_, 0) => ("pass", "Everything that was tried passed"),
        _ => ("fail", "Not everything passed"),
    };
    let names = ["passed", "failed", "skipped", "could not be tried"];
    let counts: String = names
        .iter()
        .enumerate()
        .map(|(i, name)| format!("<li><b data-json=\"/counts/{i}\">{}</b> {name}</li>", count(i)))
        .collect();
    let machine = &report["machine"];
    format!(
        "<header><h1>Conformance report</h1>\n<p class=verdict>{} {words}</p>\n<ul class=counts>{counts}</ul>\n\
         <p>Keys and values that a provider computed, against those of real llama-servers: byte structure, numbers, and what the \
         server says after restoring them. On {}, {} cores, Linux {}; {} s in all.</p></header>\n",
        badge(verdict),
        escape(text(machine, "cpu")),
        machine["cores"],
        escape(text(machine, "kernel")),
        report["seconds"].as_f64().unwrap_or(0.0).round(),
    )
}

fn summary(report: &Value, cases: &[Value]) -> String {
    let head = [
        "case",
        "verdict",
        "prompts",
        "reused",
        "worst layer K",
        "its noise",
        "worst layer V",
        "its noise",
        "KL mean",
        "KL cold",
        "KL batch",
        "KL attention",
        "first token",
        "provider ms",
        "server ms",
    ];
    let rows: Vec<String> = cases
        .iter()
        .enumerate()
        .map(|(i, c)| {
            let at = |key: &str| format!("/cases/{i}/{key}");
            let n = c["prompts"].as_array().map_or(0, Vec::len);
            let ran = n > 0;
            let cell_if = |key: &str| match ran {
                true => cell(report, &at(key), small),
                false => "<td class=n>-</td>".to_owned(),
            };
            // A sum is not in the JSON; the test adds it up itself.
            let sum = |key: &str| {
                let all: f64 = c["prompts"].as_array().into_iter().flatten().filter_map(|p| p[key].as_f64()).sum();
                match all > 0.0 {
                    true => format!("<td class=n data-sum=\"/cases/{i}/prompts\" data-key={key}>{}</td>", millis(all)),
                    false => "<td class=n>-</td>".into(),
                }
            };
            let whole = |v: f64| format!("{v}");
            format!(
                "<tr><th scope=row><a href=\"#case-{i}\">{}</a></th><td>{}</td><td class=n>{n}</td>{}{}{}{}{}{}{}{}{}{}{}{}</tr>",
                escape(text(c, "id")),
                badge(text(c, "verdict")),
                cell(report, &at("reused"), whole),
                cell_if("distances/layer/0"),
                cell_if("noise/layer/0"),
                cell_if("distances/layer/1"),
                cell_if("noise/layer/1"),
                cell_if("handed/kl_mean"),
                cell_if("cold/kl_mean"),
                cell_if("small_batch/kl_mean"),
                cell_if("other_attention/kl_mean"),
                cell(report, &at("handed/top1"), whole),
                sum("prefill_ms"),
                sum("server_prefill_ms"),
            )
        })
        .collect();
    format!(
        "<section aria-labelledby=h-summary><h2 id=h-summary>Summary</h2>\n{}<p class=note>Distances are |a-b|/|a| from the server's \
         own file, the worst of all prompts; <i>its noise</i> is the server from itself (smaller batches, the other attention or what stands in for it). KL is in \
         nats against the control: the server after its own prefill of all but the last token. Times are sums over the prompts \
         on machines that may have been busy: they are no benchmark.</p></section>\n",
        table("Summary of all cases", &head, &rows)
    )
}

/// Models by servers, as this run tried them.
fn matrix(cases: &[Value]) -> String {
    let mut models: Vec<&str> = Vec::new();
    let mut pins: Vec<&str> = Vec::new();
    let split = |id: &'_ str| -> Option<(usize, usize)> {
        let last = id.rfind('/')?;
        Some((id[..last].find('/')? + 1, last))
    };
    let parts: Vec<(&str, &str, &Value)> = cases
        .iter()
        .filter_map(|c| {
            let id = c["id"].as_str()?;
            let (from, to) = split(id)?;
            Some((&id[from..to], &id[to + 1..], c))
        })
        .collect();
    for (model, pin, _) in &parts {
        if !models.contains(model) {
            models.push(model);
        }
        if !pins.contains(pin) {
            pins.push(pin);
        }
    }
    let rows: Vec<String> = models
        .iter()
        .map(|model| {
            let cells: String = pins
                .iter()
                .map(|pin| {
                    let of: Vec<&str> = parts
                        .iter()
                        .filter(|(m, p, _)| m == model && p == pin)
                        .map(|(.., c)| text(c, "verdict"))
                        .collect();
                    let worst = ["error", "fail", "skip", "pass"].into_iter().find(|v| of.contains(v));
                    let more = if of.len() > 1 { format!(" <small>{} cases</small>", of.len()) } else { String::new() };
                    match worst {
                        Some(v) => format!("<td>{}{more}</td>", badge(v)),
                        None => "<td class=none>not in this run</td>".into(),
                    }
                })
                .collect();
            format!("<tr><th scope=row>{}</th>{cells}</tr>", escape(model))
        })
        .collect();
    let head: Vec<&str> = std::iter::once("model").chain(pins.iter().copied()).collect();
    format!(
        "<section aria-labelledby=h-matrix><h2 id=h-matrix>Models and servers</h2>\n{}<p class=note>What this run covered, the worst \
         verdict of each. Other models and servers may be supported and were not tried here.</p></section>\n",
        table("Models by servers", &head, &rows)
    )
}

fn case(report: &Value, i: usize, c: &Value, open: bool) -> String {
    let verdict = text(c, "verdict");
    let open = if open || verdict != "pass" { " open" } else { "" };
    let mut out = format!(
        "<details class=case id=case-{i}{open}><summary><h3>{}</h3> {}</summary>\n",
        escape(text(c, "id")),
        badge(verdict)
    );
    let reasons: Vec<&str> = c["reasons"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if !reasons.is_empty() {
        let list: String = reasons.iter().take(50).map(|r| format!("<li>{}</li>", escape(r))).collect();
        let _ = writeln!(out, "<h4>Why</h4><ul class=reasons>{list}</ul>");
    }
    let prompts = c["prompts"].as_array().map_or(&[] as &[Value], Vec::as_slice);
    if prompts.is_empty() {
        return out + "</details>\n";
    }
    out += &format!("<p class=note>By {}.</p>", escape(text(c, "producer")));
    out += &distances(report, i, c);
    out += &pictures::heat(&c["heat"]);
    out += &divergences(report, i, prompts);
    out += &pictures::timeline(prompts);
    out += &prompt_table(report, i, prompts);
    out + "</details>\n"
}

/// Our distance beside the server's own, as a picture and as a table.
fn distances(report: &Value, i: usize, c: &Value) -> String {
    let kinds = [
        ("layer 0, K", "layer0/0"),
        ("layer 0, V", "layer0/1"),
        ("mean of layers, K", "mean/0"),
        ("mean of layers, V", "mean/1"),
        ("worst layer, K", "layer/0"),
        ("worst layer, V", "layer/1"),
        ("worst row, K", "row/0"),
        ("worst row, V", "row/1"),
        ("worst row, 1 - cosine", "one_minus_cos"),
    ];
    let number = |which: &str, key: &str| c.pointer(&format!("/{which}/{key}")).and_then(Value::as_f64).unwrap_or(0.0);
    let pairs: Vec<(&str, f64, f64)> =
        kinds.iter().map(|(name, key)| (*name, number("distances", key), number("noise", key))).collect();
    let rows: Vec<String> = kinds
        .iter()
        .map(|(name, key)| {
            format!(
                "<tr><th scope=row>{name}</th>{}{}</tr>",
                cell(report, &format!("/cases/{i}/distances/{key}"), small),
                cell(report, &format!("/cases/{i}/noise/{key}"), small)
            )
        })
        .collect();
    format!(
        "<h4>Distance from the server's file, beside the server's from itself</h4>\n{}<details class=numbers><summary>The numbers</summary>{}</details>\n",
        pictures::pairs(&pairs),
        table("Distances and noise", &["measure", "ours", "the server's own"], &rows)
    )
}

fn divergences(report: &Value, i: usize, prompts: &[Value]) -> String {
    let of = |p: &Value, which: &str| p[which]["kl"].as_f64();
    let rows: Vec<pictures::Dots> = prompts
        .iter()
        .map(|p| pictures::Dots {
            name: text(p, "prompt").to_owned(),
            ours: of(p, "handed"),
            own: ["cold", "small_batch", "other_attention"].map(|w| of(p, w)),
        })
        .collect();
    let cells: Vec<String> = prompts
        .iter()
        .enumerate()
        .map(|(k, p)| {
            let at = |which: &str| cell(report, &format!("/cases/{i}/prompts/{k}/{which}/kl"), small);
            format!(
                "<tr><th scope=row>{}</th>{}{}{}{}</tr>",
                escape(text(p, "prompt")),
                at("handed"),
                at("cold"),
                at("small_batch"),
                at("other_attention")
            )
        })
        .collect();
    format!(
        "<h4>Divergence of the next token</h4>\n{}<details class=numbers><summary>The numbers</summary>{}</details>\n",
        pictures::dots(&rows),
        table(
            "Divergence of the next token",
            &["prompt", "handed over", "cold", "batches of 32", "other attention or stand-in"],
            &cells
        )
    )
}

fn prompt_table(report: &Value, i: usize, prompts: &[Value]) -> String {
    let rows: Vec<String> = prompts
        .iter()
        .enumerate()
        .map(|(k, p)| {
            let at = |key: &str| format!("/cases/{i}/prompts/{k}/{key}");
            let whole = |v: f64| format!("{v}");
            let notes: Vec<&str> = ["structure", "notes"]
                .iter()
                .flat_map(|key| p[*key].as_array().into_iter().flatten())
                .filter_map(Value::as_str)
                .collect();
            format!(
                "<tr><th scope=row>{}</th>{}{}{}{}{}{}{}{}<td>{}</td></tr>",
                escape(text(p, "prompt")),
                cell(report, &at("n"), whole),
                cell(report, &at("prompt_n"), whole),
                cell(report, &at("handed/agreed"), whole),
                cell(report, &at("cold/agreed"), whole),
                cell(report, &at("prefill_ms"), millis),
                cell(report, &at("restore_ms"), millis),
                cell(report, &at("first_token_ms"), millis),
                cell(report, &at("server_prefill_ms"), millis),
                escape(&notes.join("; "))
            )
        })
        .collect();
    let head = [
        "prompt",
        "tokens",
        "evaluated",
        "text agrees",
        "cold agrees",
        "provider ms",
        "restore ms",
        "first token ms",
        "server's prefill ms",
        "notes",
    ];
    format!("<h4>Prompts</h4>\n{}", table("Prompts of this case", &head, &rows))
}

fn made_by(report: &Value) -> String {
    let command: Vec<String> =
        report["command"].as_array().into_iter().flatten().filter_map(Value::as_str).map(quoted).collect();
    let versions = &report["versions"];
    let mut rows = vec![format!(
        "<tr><th scope=row>conformance</th><td>{}</td><td></td></tr>",
        escape(text(versions, "conformance"))
    )];
    if let Some(provider) = versions["provider"].as_str() {
        rows.push(format!("<tr><th scope=row>provider</th><td>{}</td><td></td></tr>", escape(provider)));
    }
    for s in versions["servers"].as_array().into_iter().flatten() {
        rows.push(format!(
            "<tr><th scope=row>server {}</th><td>{} {}, state version {}</td><td><code>{}</code></td></tr>",
            escape(text(s, "pin")),
            escape(text(s, "package")),
            escape(text(s, "version")),
            s["state_version"].as_u64().map_or("unknown".into(), |v| v.to_string()),
            escape(text(s, "sha256"))
        ));
    }
    for m in versions["models"].as_array().into_iter().flatten() {
        rows.push(format!(
            "<tr><th scope=row>model {}</th><td>{} {}</td><td><code>{}</code></td></tr>",
            escape(text(m, "name")),
            escape(text(m, "title")),
            escape(text(m, "weights")),
            escape(text(m, "sha256"))
        ));
    }
    format!(
        "<section aria-labelledby=h-made><h2 id=h-made>What made this</h2>\n<pre tabindex=0><code>{}</code></pre>\n{}</section>\n",
        escape(&command.join(" ")),
        table("Versions", &["what", "version", "sha256"], &rows)
    )
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "_-./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn nothing_of_a_report_becomes_markup() {
        let report = json!({
            "format": "npu-prefill conformance 1", "machine": {"cpu": "<b>", "cores": 2, "kernel": "&"}, "seconds": 1.0,
            "counts": [0, 1, 0, 0], "command": ["a b", "<script>"],
            "cases": [{"id": "x/<img src=x>/v4", "verdict": "fail", "reasons": ["</ul><script>alert(1)</script>"]}],
        });
        let page = page(&report).unwrap();
        assert!(!page.contains("<script") && !page.contains("<img") && !page.contains("<b>&"), "{page}");
        assert!(page.contains("&lt;script&gt;") && page.contains("'a b' '&lt;script&gt;'"), "{page}");
    }

    #[test]
    fn something_else_is_no_report() {
        assert!(page(&json!({})).is_err());
        assert!(page(&json!({"cases": [], "format": "other"})).unwrap_err().to_string().contains("other"));
    }

    #[test]
    fn numbers_as_people_read_them() {
        assert_eq!([small(0.0), small(0.0123), small(1.5e-5), small(f64::NAN)], ["0", "0.012", "1.50e-5", "none"]);
        assert_eq!([millis(4960.26), millis(2.25)], ["4960", "2.2"]);
    }
}
