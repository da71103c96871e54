//! `docs/messages.md`: every message that the programs can print, found in the source, with what it means and what to do. The texts
//! and their meanings are the source's own - a message is written where it is raised, its meaning is the doc comment of its
//! variant - and what to do is written here, per area. So a new message is on the page as soon as the page is written anew, and a
//! page that lacks one is stale.

use crate::code::{closing, literals, shipped};
use crate::tree::Tree;
use std::collections::BTreeMap;

/// The page.
pub const PAGE: &str = "docs/messages.md";

const HEAD: &str = "# Messages

<!-- Written by `cargo xtask messages` from the source. Change the texts there, what to do in xtask/src/messages.rs, then run it again. -->

Every message that `npu-prefill`, `npu-kernel` and `conformance` can print, as it stands in the source; `…` is where a name, a number or another
message goes. A number in brackets is the exit code where the message has one of its own ([exit codes](exit-codes.md)); a message
without one gets that of what it is a part of. Whatever a message says, the decoder can always compute the prompt itself.

The common ones, with more words, are in [troubleshooting](troubleshooting.md).
";

/// One area: its title, where its sources lie (the first match counts), and what to do about its messages.
struct Area {
    title: &'static str,
    places: &'static [&'static str],
    what_to_do: &'static str,
}

const fn area(title: &'static str, places: &'static [&'static str], what_to_do: &'static str) -> Area {
    Area { title, places, what_to_do }
}

const AREAS: &[Area] = &[
    area(
        "What was typed, set and configured",
        &[
            "provider/src/cli.rs",
            "provider/src/job.rs",
            "provider/src/env.rs",
            "provider/src/config.rs",
            "provider/src/main.rs",
        ],
        "Mend the option, variable or file that is named. `npu-prefill --help` lists the options, `npu-prefill environment` the \
         variables; `npu-prefill setup` writes the configuration anew.",
    ),
    area(
        "Setting up",
        &["provider/src/setup.rs", "provider/src/server.rs"],
        "The server has to run with `--slot-save-path`, on this machine, and to have loaded its model. What it answered is in the \
         message. Nothing is left in its directory.",
    ),
    area(
        "The ids",
        &["provider/src/ids.rs"],
        "The file of `--tokens` is decimal text, a JSON array, a JSON object with `tokens` or `ids`, or raw little-endian 32-bit \
         integers: the prompt's ids without the last one, of this model. The message says at which place it is something else.",
    ),
    area(
        "Handing over",
        &[
            "provider/src/handoff.rs",
            "provider/src/file.rs",
            "provider/src/engine.rs",
            "provider/src/memory.rs",
            "provider/src/state_version.rs",
        ],
        "Compare the options with the decoder's, make room where the message says there is none, or let the decoder compute the prompt.",
    ),
    area(
        "Handing over into shared memory",
        &[
            "provider/src/share.rs",
            "kvlayout/src/header.rs",
            "kvlayout/src/inherit.rs",
            "kvlayout/src/region.rs",
            "kvlayout/src/share",
            "kvlayout/src/map_shared.rs",
        ],
        "The header (`--layout`) and the descriptors (`--fds`) have to be those of one decoder with this model and these options; \
         `npu-prefill layout` prints what such a decoder would send. All of these come before the first byte is written, unless the exit \
         code is 79.",
    ),
    area(
        "Being stopped",
        &["provider/src/signals.rs"],
        "Somebody or something stopped the run. Nothing is left behind, unless the exit code is 79.",
    ),
    area(
        "Looking into files",
        &["provider/src/inspect.rs", "provider/src/compare.rs", "provider/src/describe.rs"],
        "The file is no model and no state file, or not a whole one.",
    ),
    area(
        "Faults of state files",
        &["kvlayout/src/faults.rs", "kvlayout/src/compare.rs"],
        "`npu-prefill inspect` and the harness name these of files that others made. A server may refuse such a file, take it and \
         answer wrongly, or end: do not restore it.",
    ),
    area(
        "The decoder's memory and its files",
        &["kvlayout/"],
        "The decoder's parameters do not go with the model, or a state file is not what it should be: compare `-c`, `-ctk`, `-ctv`, `-fa`, \
         `--swa-full` and `--n-stream` with the server's. Those about files: make room, or name another place.",
    ),
    area(
        "The model's file",
        &["provider/gguf/"],
        "The GGUF is damaged, cut, or of a kind that is not known here. Check it against its source's checksum, and name all shards' \
         directory as it was downloaded. `npu-prefill inspect FILE` shows what can be read.",
    ),
    area(
        "The computation",
        &["provider/prefill/"],
        "The model is not one that can be computed here, or its weights are damaged. Nothing was handed over. `npu-prefill models` \
         lists what is supported.",
    ),
    area(
        "Devices and kernels",
        &["npu-kernels/"],
        "The device or its kernels are not there or not as they should be; `--device cpu` does without. Threads that cannot be started: \
         raise the limit (`ulimit -u`), or lower `--threads`.",
    ),
    area("Exit codes", &["provider/src/exit.rs"], "Said of another message, to tell what state things are in."),
    area("The program", &["provider/src/"], "As the message says."),
    area(
        "conformance: servers and models",
        &[
            "conformance/src/pins.rs",
            "conformance/src/server.rs",
            "conformance/src/client.rs",
            "conformance/src/probe.rs",
            "conformance/src/locate.rs",
        ],
        "Servers and models come from the Python package index into a cache and are checked by sha256; pip's own settings apply. \
         Use a server of your own with `--llama-server PATH`.",
    ),
    area(
        "conformance: cases and what they compare",
        &["conformance/src/"],
        "A case could not be tried, or what came out is not as it should be. `--keep DIR` keeps its files; the server's log is quoted \
         where it says why.",
    ),
];

/// What opens a piece of code in which messages stand.
const CALLS: &[&str] = &[
    "#[error(",
    "Error::new(",
    "Error::msg(",
    "usage(",
    "wrong(",
    "failed(",
    "say(",
    "say_if_room(",
    "complain(",
    "bail!(",
    "ensure!(",
    "anyhow!(",
    ".context(",
    "with_context(",
    "Err(",
    "ok_or_else(",
    "ok_or(",
    "map_err(",
    "notes.push(",
    "notes.extend(",
];
/// The same up to a semicolon.
const BINDINGS: &[&str] =
    &["let text =", "let advice =", "let what =", "let why =", "let wrong =", "let left =", "let (kind, text) ="];

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Message {
    text: String,
    meaning: String,
    code: Option<u32>,
}

/// The page, and complaints about sources that belong to no area.
pub fn page(tree: &Tree) -> String {
    let codes = exit_codes(tree.text("provider/src/exit.rs"));
    let mut by_area: BTreeMap<usize, Vec<Message>> = BTreeMap::new();
    for (path, source) in tree.with_suffix(".rs") {
        let Some(i) = AREAS.iter().position(|a| a.places.iter().any(|p| path.starts_with(p))) else { continue };
        if !path.contains("/src/") || path.contains("/tests/") {
            continue;
        }
        let list = by_area.entry(i).or_default();
        for m in messages(source, &codes) {
            if !list.iter().any(|other| other.text == m.text) {
                list.push(m);
            }
        }
    }
    let mut out = String::from(HEAD);
    for (i, area) in AREAS.iter().enumerate() {
        let Some(list) = by_area.get(&i).filter(|l| !l.is_empty()) else { continue };
        out += &format!("\n## {}\n\n{}\n\n", area.title, area.what_to_do);
        for m in list {
            let code = m.code.map(|c| format!(" ({c})")).unwrap_or_default();
            let meaning = if m.meaning.is_empty() { String::new() } else { format!("  \n  {}", m.meaning) };
            out += &format!("- `{}`{code}{meaning}\n", m.text);
        }
    }
    out
}

/// `Kind::Name => 70,` in the file that knows the numbers.
fn exit_codes(source: &str) -> BTreeMap<String, u32> {
    let rows = source.lines().filter_map(|l| {
        let (name, number) = l.trim().strip_prefix("Kind::")?.split_once(" => ")?;
        Some((name.to_owned(), number.trim_end_matches(',').parse().ok()?))
    });
    rows.collect()
}

fn messages(source: &str, codes: &BTreeMap<String, u32>) -> Vec<Message> {
    let code = shipped(source);
    let mut pieces: Vec<(usize, usize)> = Vec::new();
    for call in CALLS {
        for (at, _) in code.match_indices(call) {
            let word = call.starts_with(|c: char| c.is_alphanumeric());
            let joined = code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
            if !(word && joined) {
                pieces.push((at, closing(&code, at + call.len() - 1)));
            }
        }
    }
    for binding in BINDINGS {
        for (at, _) in code.match_indices(binding) {
            pieces.push((at, code[at..].find(';').map_or(code.len(), |n| at + n)));
        }
    }
    let mut found = Vec::new();
    for (at, text) in literals(source) {
        // What is not in the shipped code is a test's or a comment's: blanked either way, but its surroundings tell.
        let inside = pieces.iter().filter(|(from, to)| (*from..*to).contains(&at)).max_by_key(|p| p.0);
        let Some(&(from, to)) = inside else { continue };
        let Some(text) = readable(&text) else { continue };
        let piece = &code[from..to];
        let kind = piece.split("Kind::").nth(1).and_then(|r| r.split(|c: char| !c.is_alphanumeric()).next());
        let number = match kind {
            Some(kind) => codes.get(kind).copied(),
            None if piece.starts_with("usage(") => codes.get("Usage").copied(),
            None => None,
        };
        let meaning = if piece.starts_with("#[error(") { doc_before(source, from) } else { String::new() };
        found.push(Message { text, meaning, code: number });
    }
    found
}

/// A literal as a message: one line, `…` for what is put in. `None` where it says nothing by itself.
fn readable(literal: &str) -> Option<String> {
    let (mut out, mut depth) = (String::new(), 0);
    let mut chars = literal.trim().chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '{' | '}' if depth == 0 && chars.next_if_eq(&c).is_some() => out.push(c),
            '{' => {
                if depth == 0 {
                    out.push('…');
                }
                depth += 1;
            }
            '}' => depth -= 1,
            '\n' if depth == 0 => out.push(' '),
            '`' if depth == 0 => out.push('\''),
            c if depth == 0 => out.push(c),
            _ => {}
        }
    }
    let words = out.split_whitespace().filter(|w| w.chars().filter(|c| c.is_alphabetic()).count() >= 2).count();
    (words >= 2).then(|| out.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// The doc comment above the line at `at`.
fn doc_before(source: &str, at: usize) -> String {
    let above: Vec<&str> = source[..at].lines().collect();
    let above = if source[..at].ends_with('\n') { &above[..] } else { &above[..above.len().saturating_sub(1)] };
    let mut doc: Vec<&str> = above.iter().rev().map_while(|l| l.trim().strip_prefix("///")).map(str::trim).collect();
    doc.reverse();
    doc.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "//! Head.\nenum E {\n    /// It is gone.\n    #[error(\"no {what} here\")]\n    Gone { what: u8 },\n}\n\
        fn f() { return Err(Error::new(Kind::Io, format!(\"disk {} is full\", n))); }\n\
        fn g() { let text = \"two words\"; say(format_args!(\"{{braces}} are kept: {e:#}\")); h(\"not a message\"); }\n\
        #[cfg(test)]\nmod tests { fn t() { say(\"of a test\"); } }\n";

    #[test]
    fn messages_are_found_with_meaning_and_code() {
        let codes = exit_codes("    Kind::Io => 74,\n");
        let found = messages(SOURCE, &codes);
        let texts: Vec<&str> = found.iter().map(|m| m.text.as_str()).collect();
        assert_eq!(texts, ["no … here", "disk … is full", "two words", "{braces} are kept: …"]);
        assert_eq!((found[0].meaning.as_str(), found[1].code), ("It is gone.", Some(74)));
    }

    #[test]
    fn every_error_of_the_tree_has_an_entry() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let tree = Tree::read(&root).unwrap();
        let page = page(&tree);
        // By a search of its own: every `#[error("` of the libraries and the program.
        let mut count = 0;
        for (path, source) in tree.with_suffix(".rs").filter(|(p, _)| p.contains("/src/") && !p.starts_with("xtask/")) {
            for line in source.lines().filter_map(|l| l.trim().strip_prefix("#[error(\"")) {
                // The longest piece between what is put in, as far as the line goes.
                let literal = line.split("\")]").next().unwrap_or("").split("\",").next().unwrap_or("");
                let literal = literal.trim_end_matches('\\').replace('`', "'").replace("\\\"", "\"");
                let pieces = literal.split('{').map(|p| p.split_once('}').map_or(p, |(_, rest)| rest).trim());
                let piece = pieces.max_by_key(|p| p.len()).unwrap_or("");
                if piece.split_whitespace().count() >= 2 {
                    assert!(page.contains(piece), "{path}: {piece:?} has no entry");
                    count += 1;
                }
            }
        }
        assert!(count > 90, "only {count} found");
    }
}
