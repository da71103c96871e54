//! `bench report`: the recorded measurements as pictures and tables, put into the pages between markers. It measures nothing, and
//! what stands outside of the markers is left alone. The pictures are plain SVG files beside the records.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::svg::{Bar, Chart, Group};

/// Where records lie.
const RECORDS: &str = "docs/record";
/// Where pictures go.
const CHARTS: &str = "docs/charts";
/// The pages, and what leads from them to the pictures.
const PAGES: [(&str, &str); 2] = [("README.md", "docs/charts"), ("docs/benchmarks.md", "charts")];
/// What opens and closes a place that is filled.
const OPEN: &str = "<!-- bench report: ";
const CLOSE: &str = "<!-- end of bench report -->";

/// One recorded table: the lines that begin with `#`, and its rows by column.
struct Record {
    notes: Vec<String>,
    rows: Vec<BTreeMap<String, String>>,
}

impl Record {
    /// The newest record whose name ends so; records are named by their dates.
    fn newest(root: &Path, ending: &str) -> Result<Record> {
        let dir = root.join(RECORDS);
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&dir).with_context(|| format!("reading {RECORDS}"))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name.ends_with(&format!("-{ending}.csv")) {
                names.push(name);
            }
        }
        names.sort();
        let name = names.pop().with_context(|| format!("no record …-{ending}.csv in {RECORDS}"))?;
        let text = std::fs::read_to_string(dir.join(&name)).with_context(|| format!("reading {RECORDS}/{name}"))?;
        Record::parse(&text).with_context(|| format!("{RECORDS}/{name}"))
    }

    fn parse(text: &str) -> Result<Record> {
        let notes = text.lines().filter_map(|l| l.strip_prefix('#')).map(|l| l.trim().to_owned()).collect();
        let mut lines = text.lines().filter(|l| !l.starts_with('#') && !l.trim().is_empty());
        let head: Vec<&str> = lines.next().context("no head")?.split(',').collect();
        let mut rows = Vec::new();
        for line in lines {
            let cells: Vec<&str> = line.split(',').collect();
            ensure!(cells.len() == head.len(), "{} cells under {} columns: {line}", cells.len(), head.len());
            rows.push(head.iter().zip(cells).map(|(h, c)| ((*h).to_owned(), c.to_owned())).collect());
        }
        Ok(Record { notes, rows })
    }
}

fn text<'r>(row: &'r BTreeMap<String, String>, key: &str) -> Result<&'r str> {
    row.get(key).map(String::as_str).with_context(|| format!("no column {key}"))
}

fn number(row: &BTreeMap<String, String>, key: &str) -> Result<f64> {
    let cell = text(row, key)?;
    cell.parse().with_context(|| format!("{key} is {cell:?}, no number"))
}

/// What is put into one place: the picture's file name, the picture, and the Markdown with `{charts}` for the way to it.
struct Part {
    name: &'static str,
    svg: String,
    markdown: String,
}

/// Puts everything where it belongs; with `check`, only says where it is not. True when nothing is stale.
///
/// # Errors
/// Records or pages cannot be read or written.
pub fn run(root: &Path, check: bool, say: &mut dyn FnMut(&str)) -> Result<bool> {
    let parts = parts(root)?;
    let mut fresh = true;
    let mut put = |path: &str, want: &str| -> Result<()> {
        let full = root.join(path);
        let have = std::fs::read_to_string(&full).unwrap_or_default();
        if have != want {
            fresh = false;
            if check {
                say(&format!("{path} is stale; run `cargo run --release -p bench -- report`"));
            } else {
                if let Some(dir) = full.parent() {
                    std::fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
                }
                std::fs::write(&full, want).with_context(|| format!("writing {path}"))?;
                say(&format!("{path} written"));
            }
        }
        Ok(())
    };
    for part in &parts {
        put(&format!("{CHARTS}/{}.svg", part.name), &part.svg)?;
    }
    for (page, charts) in PAGES {
        let have = std::fs::read_to_string(root.join(page)).with_context(|| format!("reading {page}"))?;
        put(page, &splice(&have, &parts, charts).with_context(|| page.to_owned())?)?;
    }
    Ok(fresh || !check)
}

/// A page with its places filled.
fn splice(page: &str, parts: &[Part], charts: &str) -> Result<String> {
    let mut out = String::new();
    let mut rest = page;
    while let Some(at) = rest.find(OPEN) {
        let body = at + rest[at..].find('\n').context("a marker without an end of its line")? + 1;
        let name = rest[at + OPEN.len()..body].trim_end().trim_end_matches("-->").trim();
        let part =
            parts.iter().find(|p| p.name == name).with_context(|| format!("there is no part {name:?} to put"))?;
        let end = body + rest[body..].find(CLOSE).with_context(|| format!("{name}: no {CLOSE}"))?;
        out += &rest[..body];
        out += &part.markdown.replace("{charts}", charts);
        out += CLOSE;
        rest = &rest[end + CLOSE.len()..];
    }
    Ok(out + rest)
}

fn parts(root: &Path) -> Result<Vec<Part>> {
    let prefill = Record::newest(root, "prefill")?;
    let routes = Record::newest(root, "routes")?;
    Ok(vec![rates(&prefill)?, process(&prefill)?, routes_part(&routes)?])
}

/// The latest quiet row of every model and length, by model and then by length.
fn latest(record: &Record) -> Result<Vec<&BTreeMap<String, String>>> {
    let mut by: BTreeMap<(String, u64), &BTreeMap<String, String>> = BTreeMap::new();
    for row in &record.rows {
        if text(row, "quiet")? != "yes" {
            continue;
        }
        let key = (text(row, "model")?.to_owned(), number(row, "prompt")? as u64);
        let newer = match by.get(&key) {
            Some(old) => text(old, "date")? <= text(row, "date")?,
            None => true,
        };
        if newer {
            by.insert(key, row);
        }
    }
    ensure!(!by.is_empty(), "no row was measured on a quiet machine");
    Ok(by.into_values().collect())
}

fn name(row: &BTreeMap<String, String>) -> Result<String> {
    Ok(format!("{}, {}", text(row, "model")?.trim_end_matches(".gguf"), text(row, "prompt")?))
}

fn where_measured(row: &BTreeMap<String, String>) -> Result<String> {
    let day = text(row, "date")?.split('T').next().unwrap_or("");
    Ok(format!(
        "{}, {} threads, {} build {}, medians of {} runs, {day}",
        text(row, "cpu")?,
        text(row, "threads")?,
        text(row, "peer")?,
        text(row, "peer_build")?,
        text(row, "runs")?
    ))
}

const PREFILL: &str = "cargo run --release -p bench -- prefill --llama-bench PATH -m MODEL --csv FILE";

/// Tokens per second, ours and the peer's.
fn rates(record: &Record) -> Result<Part> {
    let rows = latest(record)?;
    let mut table =
        String::from("| model, tokens of the prompt | llama.cpp tok/s | ours tok/s | ours/peer |\n|---|---|---|---|\n");
    let mut groups = Vec::new();
    for row in &rows {
        let (peer, ours) = (number(row, "peer_tokens_per_second")?, number(row, "ours_tokens_per_second")?);
        let _ = writeln!(table, "| {} | {peer:.0} | {ours:.0} | {:.2} |", name(row)?, number(row, "ratio")?);
        groups.push(Group {
            name: name(row)?,
            bars: vec![Bar::one("ours", ours, format!("{ours:.0}")), Bar::one("peer", peer, format!("{peer:.0}"))],
        });
    }
    let last = rows.last().context("no rows")?;
    let measured = where_measured(last)?;
    let chart = Chart {
        title: "Tokens per second of a prefill".into(),
        unit: "tokens per second".into(),
        key: vec![("ours", "this provider on the CPU"), ("peer", "llama.cpp, llama-bench")],
        groups,
    };
    let markdown = format!(
        "![Tokens per second of a prefill, ours beside llama.cpp's, by model and length of the prompt; the table below has the numbers]\
         ({{charts}}/rates.svg)\n\n{table}\n{measured}. Made by `{PREFILL}`.\n"
    );
    Ok(Part { name: "rates", svg: chart.svg(), markdown })
}

/// What a process per prompt costs.
fn process(record: &Record) -> Result<Part> {
    let rows = latest(record)?;
    let mut table = String::from(
        "| model, tokens of the prompt | prefill ms | the rest of the process ms | of all |\n|---|---|---|---|\n",
    );
    let mut groups = Vec::new();
    for row in &rows {
        let (process, prefill) = (number(row, "process_ms")?, number(row, "prefill_ms")?);
        let (rest, share) = (process - prefill, 100.0 * (1.0 - prefill / process));
        let _ = writeln!(table, "| {} | {prefill:.0} | {rest:.0} | {share:.1} % |", name(row)?);
        let parts = vec![("prefill", 100.0 - share), ("rest", share)];
        groups.push(Group { name: name(row)?, bars: vec![Bar { parts, label: format!("{share:.1} %") }] });
    }
    let chart = Chart {
        title: "What starting a process for every prompt costs".into(),
        unit: "% of the process".into(),
        key: vec![("prefill", "prefill, writing included"), ("rest", "starting, opening the model, ending")],
        groups,
    };
    let markdown = format!(
        "![Share of the provider's process that is not prefill, by model and length; the table below has the numbers]\
         ({{charts}}/process.svg)\n\n{table}\nFrom the same runs.\n"
    );
    Ok(Part { name: "process", svg: chart.svg(), markdown })
}

/// What the routes cost besides computing.
fn routes_part(record: &Record) -> Result<Part> {
    let mut table = String::from(
        "| tokens | route | prefill ms, without writing | writing ms | restore ms | the rest of the process ms |\n|---|---|---|---|---|---|\n",
    );
    let mut groups = Vec::new();
    for row in &record.rows {
        let tokens = text(row, "tokens")?;
        for (route, restore) in [("file", Some("restore_ms")), ("shared", None)] {
            let get = |what: &str| number(row, &format!("{route}_{what}_ms"));
            let (whole, prefill, write) = (get("whole")?, get("prefill")?, get("write")?);
            let restore = restore.map_or(Ok(0.0), |key| number(row, key))?;
            // The whole has the restore in it on the file route, as measured.
            let rest = (whole - prefill - restore).max(0.0);
            let _ = writeln!(
                table,
                "| {tokens} | {route} | {:.1} | {write:.1} | {} | {rest:.1} |",
                (prefill - write).max(0.0),
                if route == "file" { format!("{restore:.1}") } else { "none".into() },
            );
            let label = format!("{:.1} ms besides {prefill:.0} ms of prefill", write + restore + rest);
            groups.push(Group {
                name: format!("{tokens}, {route}"),
                bars: vec![Bar { parts: vec![("write", write), ("restore", restore), ("rest", rest)], label }],
            });
        }
    }
    let chart = Chart {
        title: "What a handoff costs besides computing".into(),
        unit: "ms".into(),
        key: vec![("write", "writing rows"), ("restore", "the server's restore"), ("rest", "the rest of the process")],
        groups,
    };
    let notes = record.notes.iter().take(2).map(String::as_str).collect::<Vec<_>>();
    let (command, how) = (notes.first().copied().unwrap_or(""), notes.get(1).copied().unwrap_or(""));
    let markdown = format!(
        "![Milliseconds that a handoff takes besides computing, by route and number of tokens; the table below has the numbers]\
         ({{charts}}/routes.svg)\n\n{table}\n{how} Made by `{command}`.\n"
    );
    Ok(Part { name: "routes", svg: chart.svg(), markdown })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CSV: &str = "# how\ndate,cpu,threads,model,prompt,runs,peer,peer_build,peer_tokens_per_second,ours_tokens_per_second,ratio,process_ms,prefill_ms,quiet\n\
        2026-01-01T00:00:00Z,X,2,a.gguf,512,5,llama.cpp,b1,100.0,300.0,3.000,110.0,100.0,yes\n\
        2026-01-02T00:00:00Z,X,2,a.gguf,512,5,llama.cpp,b1,100.0,400.0,4.000,125.0,100.0,yes\n\
        2026-01-03T00:00:00Z,X,2,a.gguf,512,5,llama.cpp,b1,100.0,999.0,9.990,125.0,100.0,no\n";

    #[test]
    fn the_latest_quiet_rows_are_shown() {
        let record = Record::parse(CSV).unwrap();
        let part = rates(&record).unwrap();
        assert!(part.markdown.contains("| a, 512 | 100 | 400 | 4.00 |"), "{}", part.markdown);
        assert!(!part.markdown.contains("999") && part.svg.contains(">400</text>"));
        assert!(process(&record).unwrap().markdown.contains("| a, 512 | 100 | 25 | 20.0 % |"));
    }

    #[test]
    fn only_what_is_between_markers_changes() {
        let part = Part { name: "x", svg: String::new(), markdown: "new {charts}/x.svg\n".into() };
        let page = format!("before\n{OPEN}x -->\nold\n{CLOSE}\nafter\n");
        let once = splice(&page, std::slice::from_ref(&part), "c").unwrap();
        assert_eq!(once, format!("before\n{OPEN}x -->\nnew c/x.svg\n{CLOSE}\nafter\n"));
        assert_eq!(splice(&once, std::slice::from_ref(&part), "c").unwrap(), once);
        assert!(splice(&format!("{OPEN}y -->\n{CLOSE}"), &[part], "c").is_err());
        assert!(splice(&format!("{OPEN}x -->\n"), &[], "c").is_err());
    }

    #[test]
    fn damaged_records_are_refused() {
        assert!(Record::parse("a,b\n1\n").is_err());
        assert!(Record::parse("# only notes\n").is_err());
        assert!(latest(&Record::parse("quiet,model,prompt,date\nno,a,1,d\n").unwrap()).is_err());
    }
}
