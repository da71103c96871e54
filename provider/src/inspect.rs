//! `inspect`: what a GGUF model or a state file holds, and what is wrong with it.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use gguf::{Gguf, Value};
use kvlayout::faults::{self, Expect};
use kvlayout::{Part, Section, State, TokenForm};
use serde_json::{Value as Json, json};

use crate::engine::Engine;
use crate::exit::{self, Error, Kind, Result};
use crate::say::{bytes, print};

/// Elements of an array that are shown.
const SHOWN: usize = 8;

/// Describes a file.
///
/// # Errors
/// The file cannot be read, is neither of the two, or is a state file with faults.
pub fn run(path: &Path, as_json: bool) -> Result<()> {
    let about = |e: Error| e.context(path.display().to_string());
    let mut head = [0u8; 4];
    let mut file = open(path).map_err(about)?;
    let n = read_head(&mut file, &mut head).map_err(|e| about(exit::read_error(e)))?;
    match &head[..n] {
        b"GGUF" => model(path, as_json),
        b"qsgg" => state(path, as_json),
        other => {
            let text = format!("neither a GGUF model nor a state file: it starts with {}", other.escape_ascii());
            Err(about(Error::new(Kind::Data, if n == 0 { "the file is empty".to_owned() } else { text })))
        }
    }
}

fn open(path: &Path) -> Result<File> {
    // Asked by name first: opening a pipe would wait for a writer.
    let meta = std::fs::metadata(path).map_err(exit::open_error)?;
    if !meta.is_file() {
        return Err(Error::new(Kind::NoInput, "is not a regular file"));
    }
    File::open(path).map_err(exit::open_error)
}

fn read_head(file: &mut File, head: &mut [u8]) -> std::io::Result<usize> {
    let mut n = 0;
    while n < head.len() {
        match file.read(&mut head[n..]) {
            Ok(0) => break,
            Ok(more) => n += more,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(n)
}

/// Reads a state file whole.
///
/// # Errors
/// It cannot be read, or memory for it cannot be had.
pub fn read_state(path: &Path) -> Result<Vec<u8>> {
    let about = |e: Error| e.context(path.display().to_string());
    let mut file = open(path).map_err(about)?;
    let size = file.metadata().map_err(|e| about(exit::read_error(e)))?.len();
    let mut data = Vec::new();
    data.try_reserve_exact(usize::try_from(size).unwrap_or(usize::MAX))
        .map_err(|_| about(Error::new(Kind::Io, format!("no memory for the {} of this file", bytes(size)))))?;
    file.by_ref().take(size).read_to_end(&mut data).map_err(|e| about(exit::read_error(e)))?;
    Ok(data)
}

fn model(path: &Path, as_json: bool) -> Result<()> {
    let gguf = Gguf::open(path).map_err(exit::gguf_error)?;
    let arch = gguf.architecture().map_err(exit::gguf_error)?;
    let unsupported = Engine::new(&gguf).err().map(|e| e.to_string());
    let params: Vec<(&str, Value<'_>)> = gguf.keys().filter(|(key, _)| !key.starts_with("tokenizer.")).collect();
    let n_vocab = gguf.get("tokenizer.ggml.tokens").and_then(|v| v.as_array()).map(|a| a.len());
    let census = gguf.type_census();
    let files: Vec<String> = gguf.paths().map(|p| p.display().to_string()).collect();

    if as_json {
        let value = json!({
            "kind": "gguf",
            "version": gguf.version(),
            "files": files,
            "bytes": gguf.file_bytes(),
            "alignment": gguf.alignment(),
            "architecture": arch,
            "supported": unsupported.is_none(),
            "why_not": unsupported,
            "vocabulary": n_vocab,
            "keys": params.iter().map(|(k, v)| ((*k).to_owned(), value_json(v))).collect::<serde_json::Map<_, _>>(),
            "tensors": gguf.tensors().len(),
            "types": census.iter().map(|c| json!({"type": c.ty.name(), "tensors": c.tensors, "bytes": c.bytes})).collect::<Vec<_>>(),
        });
        print(&format!("{value}\n"));
        return Ok(());
    }
    let mut out = String::new();
    let n = files.len();
    let _ = writeln!(
        out,
        "{}: GGUF {}, {}{}",
        path.display(),
        gguf.version(),
        bytes(gguf.file_bytes()),
        if n > 1 { format!(", {n} files") } else { String::new() }
    );
    let _ = writeln!(out, "architecture  {arch}");
    match &unsupported {
        None => out += "supported     yes\n",
        Some(why) => _ = writeln!(out, "supported     no: {why}"),
    }
    if let Some(n) = n_vocab {
        let _ = writeln!(out, "vocabulary    {n}");
    }
    let _ = writeln!(out, "\ntensors       {}", gguf.tensors().len());
    for c in &census {
        let _ = writeln!(out, "  {:<10} {:>6}  {}", c.ty.name(), c.tensors, bytes(c.bytes));
    }
    out += "\nkeys\n";
    let width = params.iter().map(|(k, _)| k.len()).max().unwrap_or(0).min(48);
    for (key, value) in &params {
        let _ = writeln!(out, "  {:<width$}  {}", key.escape_debug(), value_text(value));
    }
    print(&out);
    Ok(())
}

fn value_text(value: &Value<'_>) -> String {
    match value {
        Value::Array(a) => {
            let shown: Vec<String> = a.iter().take(SHOWN).map(|v| value_text(&v)).collect();
            let more = if a.len() > SHOWN { format!(", ... ({} in all)", a.len()) } else { String::new() };
            format!("[{}{more}]", shown.join(", "))
        }
        v => v.to_string(),
    }
}

fn value_json(value: &Value<'_>) -> Json {
    if let Some(n) = value.as_integer() {
        return i64::try_from(n).map(Json::from).or_else(|_| u64::try_from(n).map(Json::from)).unwrap_or(Json::Null);
    }
    if let Some(a) = value.as_array() {
        // A vocabulary's worth of numbers is of no use to anybody here.
        let shown: Vec<Json> = a.iter().take(1024).map(|v| value_json(&v)).collect();
        return if a.len() > shown.len() { json!({"length": a.len()}) } else { Json::Array(shown) };
    }
    value
        .as_bool()
        .map(Json::from)
        .or_else(|| value.as_f32().map(Json::from))
        .or_else(|| value.as_str().map(Json::from))
        .unwrap_or_else(|| Json::from(value.to_string()))
}

fn state(path: &Path, as_json: bool) -> Result<()> {
    let about = |e: Error| e.context(path.display().to_string());
    let data = read_state(path)?;
    let state = State::parse_any(&data).map_err(|e| about(exit::parse_error(e)))?;
    let faults = faults::check(&state, &Expect::default());
    print(&if as_json { state_json(&data, &state, &faults) } else { state_text(path, &data, &state, &faults) });
    match faults.len() {
        0 => Ok(()),
        1 => Err(about(Error::new(Kind::Data, "1 fault"))),
        n => Err(about(Error::new(Kind::Data, format!("{n} faults")))),
    }
}

/// What a section's layers have in common, or each where they differ.
fn tensors(list: &[kvlayout::Tensor]) -> String {
    let mut out = String::new();
    let mut i = 0;
    while i < list.len() {
        let run = list[i..].iter().take_while(|t| (t.ty, t.width) == (list[i].ty, list[i].width)).count();
        let comma = if out.is_empty() { "" } else { ", " };
        let _ = write!(out, "{comma}{run} x {} of {}", list[i].width, list[i].ty);
        i += run;
    }
    if out.is_empty() { "none".to_owned() } else { out }
}

fn positions(cells: impl Iterator<Item = i32> + Clone) -> String {
    match (cells.clone().min(), cells.max()) {
        (Some(first), Some(last)) => format!("{first}..{last}"),
        _ => "none".to_owned(),
    }
}

fn state_text(path: &Path, data: &[u8], state: &State, faults: &[faults::Fault]) -> String {
    let mut out = String::new();
    let _ =
        writeln!(out, "{}: sequence state, version {}, {}", path.display(), state.version, bytes(data.len() as u64));
    let form = match state.form {
        TokenForm::Plain => "plain list".to_owned(),
        TokenForm::Packed { n_media, .. } => format!("packed, {n_media} media chunks"),
    };
    let first: Vec<String> = state.tokens.iter().take(SHOWN).map(i32::to_string).collect();
    let more = if state.tokens.len() > SHOWN { " ..." } else { "" };
    let _ = writeln!(out, "tokens        {} ({form}): {}{more}", state.tokens.len(), first.join(" "));
    let _ = writeln!(out, "cell ext      {}", if state.cell_ext { "yes" } else { "no" });
    for (i, section) in state.sections.iter().enumerate() {
        match section {
            Section::Kv(kv) => {
                let _ = writeln!(out, "section {i}     keys and values, {} stream(s)", kv.streams.len());
                for (j, s) in kv.streams.iter().enumerate() {
                    let _ = writeln!(
                        out,
                        "  stream {j}    {} cells, positions {}",
                        s.cells.len(),
                        positions(s.cells.iter().map(|c| c.pos))
                    );
                    if s.cells.is_empty() {
                        continue;
                    }
                    let v = if s.v_trans { "transposed (flash attention off)" } else { "rows (flash attention on)" };
                    let _ = writeln!(out, "    layers    K {}; V {}, {v}", tensors(&s.k), tensors(&s.v));
                    if let Some((k, v)) = s.n_rot {
                        let _ = writeln!(out, "    rotation  K {k}, V {v}");
                    }
                }
            }
            Section::Rec(rec) => {
                let _ =
                    writeln!(out, "section {i}     recurrent, {} layers, {} records", rec.n_layer, rec.records.len());
                let _ = writeln!(
                    out,
                    "  cells       {}, positions {}",
                    rec.cells.len(),
                    positions(rec.cells.iter().map(|c| c.pos))
                );
            }
        }
    }
    if let Some(appendix) = &state.appendix {
        let _ = writeln!(out, "checkpoints   {}", appendix.checkpoints.len());
        for c in &appendix.checkpoints {
            let size: usize = c.blobs.iter().map(Vec::len).sum();
            let _ = writeln!(
                out,
                "  {} tokens, positions {}..{}, {}",
                c.n_tokens,
                c.pos_min,
                c.pos_max,
                bytes(size as u64)
            );
        }
    }
    if faults.is_empty() {
        out += "faults        none\n";
    }
    for fault in faults {
        let _ = writeln!(out, "fault         {}: {fault}", fault.name());
    }
    out
}

fn state_json(data: &[u8], state: &State, faults: &[faults::Fault]) -> String {
    let tensor = |t: &kvlayout::Tensor| json!({"type": t.ty.to_string(), "width": t.width, "bytes": t.data.len()});
    let sections: Vec<Json> = state
        .sections
        .iter()
        .map(|section| match section {
            Section::Kv(kv) => json!({
                "kind": "kv",
                "streams": kv.streams.iter().map(|s| json!({
                    "cells": s.cells.len(),
                    "pos_min": s.cells.iter().map(|c| c.pos).min(),
                    "pos_max": s.cells.iter().map(|c| c.pos).max(),
                    "v_trans": s.v_trans,
                    "n_rot_k": s.n_rot.map(|r| r.0),
                    "n_rot_v": s.n_rot.map(|r| r.1),
                    "k": s.k.iter().map(tensor).collect::<Vec<_>>(),
                    "v": s.v.iter().map(tensor).collect::<Vec<_>>(),
                })).collect::<Vec<_>>(),
            }),
            Section::Rec(rec) => json!({
                "kind": "recurrent",
                "cells": rec.cells.iter().map(|c| c.pos).collect::<Vec<_>>(),
                "layers": rec.n_layer,
                "records": rec.records.iter().map(tensor).collect::<Vec<_>>(),
            }),
        })
        .collect();
    let (form, n_media) = match &state.form {
        TokenForm::Plain => ("plain", 0),
        TokenForm::Packed { n_media, .. } => ("packed", *n_media),
    };
    let value = json!({
        "kind": "state",
        "version": state.version.number(),
        "bytes": data.len(),
        "token_form": form,
        "n_media": n_media,
        "n_tokens": state.tokens.len(),
        "tokens": state.tokens,
        "cell_ext": state.cell_ext,
        "sections": sections,
        "checkpoints": state.appendix.iter().flat_map(|a| &a.checkpoints).map(|c| json!({
            "n_tokens": c.n_tokens, "pos_min": c.pos_min, "pos_max": c.pos_max,
            "bytes": c.blobs.iter().map(Vec::len).collect::<Vec<_>>(),
        })).collect::<Vec<_>>(),
        "trailing_bytes": state.trailing.len(),
        "faults": faults.iter().map(|f| json!({"name": f.name(), "text": f.to_string()})).collect::<Vec<_>>(),
    });
    format!("{value}\n")
}

/// Which layers a section's tensors belong to is not in the file; they are numbered within their section.
pub fn layer_name(section: usize, layer: usize, part: Part) -> String {
    format!("{section}.{layer} {part}")
}
