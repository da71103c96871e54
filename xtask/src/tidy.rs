//! The rules of the tree, each a function from the tree to complaints with a file and a line.
//!
//! The rules that are invariants of the architecture carry the id under which `ARCHITECTURE.md` states them; the document and
//! this table are held against each other, so neither can grow without the other. What cannot be seen in the text of the tree
//! is proved by a test instead ([`PROVED`]), and it is seen to that the test is there.

use crate::code::{code_only, has_word, lines_with, shipped};
use crate::tree::Tree;
use std::collections::BTreeSet;
use std::fmt;

/// One thing that is wrong.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Complaint {
    /// The file.
    pub path: String,
    /// The line, from 1.
    pub line: usize,
    /// The rule.
    pub rule: &'static str,
    /// What is wrong, and what to do.
    pub what: String,
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {} [{}]", self.path, self.line, self.what, self.rule)
    }
}

/// One rule.
pub struct Rule {
    /// Its name.
    pub id: &'static str,
    /// What it asks for.
    pub what: &'static str,
    /// Whether `ARCHITECTURE.md` states it.
    pub invariant: bool,
    check: fn(&Tree, &mut Out),
}

/// An invariant that a test proves.
pub struct Proved {
    /// Its name.
    pub id: &'static str,
    /// The file of the test, or a directory above it.
    pub place: &'static str,
    /// The test.
    pub test: &'static str,
}

const fn rule(id: &'static str, invariant: bool, what: &'static str, check: fn(&Tree, &mut Out)) -> Rule {
    Rule { id, what, invariant, check }
}

/// Every rule.
pub const RULES: &[Rule] = &[
    rule("directions", true, "who may depend on whom", directions),
    rule("black-box", true, "the harness links nothing of the code under test", black_box),
    rule("no-files", true, "prefill knows no file, path or descriptor", no_files),
    rule("printing", true, "only programs print", printing),
    rule("exit-codes", true, "exit numbers stand in one file", exit_codes),
    rule("environment", true, "the provider's variables stand in one file", environment),
    rule("unsafe", true, "unsafe code stands in a list of files", unsafe_files),
    rule("invariants", false, "ARCHITECTURE.md and these rules agree", invariants),
    rule("manifests", false, "every package takes the workspace's lints", manifests),
    rule("heads", false, "every module says what it is", heads),
    rule("words", false, "text is written for the reader of the project", words),
    rule("sizes", false, "no large files, no models", sizes),
    rule("links", false, "links and file names in documents lead somewhere", links),
    rule("exit-table", false, "docs/exit-codes.md is provider/src/exit.rs", exit_table),
    rule("commands", false, "the README's two commands are what .ci/run runs", commands),
];

const fn proved(id: &'static str, place: &'static str, test: &'static str) -> Proved {
    Proved { id, place, test }
}

/// Invariants that only running can show.
pub const PROVED: &[Proved] = &[
    proved("whole-or-nothing", "tests/", "a_hundred_kills_never_show_a_partial_file"),
    proved("refuse-first", "kvlayout/tests/", "what_cannot_be_a_state_is_refused_before_anything_is_written"),
    proved("every-byte-once", "kvlayout/tests/", "windows_and_fixed_bytes_are_every_byte_once"),
    proved("finite", "kvlayout/tests/", "values_that_are_none_are_refused_with_their_place"),
    proved("two-readings", "kvlayout/tests/", "are_what_the_map_lays_out"),
    proved("claims", "provider/gguf/tests/", "large_claims_are_cheap"),
    proved("chunks", "provider/prefill/tests/", "threads_and_chunks_change_no_bit_without_a_window"),
    proved("not-believed", "provider/prefill/tests/", "a_device_that_fails_costs_time_and_not_the_result"),
    proved("oracle", "npu-kernels/tests/", "products_agree_with_the_oracle_for_every_type_and_awkward_shapes"),
    proved("proved", "provider/src/", "every_architecture_is_proved_on_the_newest_server"),
    proved("hostile", "conformance/src/", "every_hostile_file_is_flagged"),
    proved("sharp", "conformance/tests/", "every_deliberate_mistake_is_caught"),
    proved("streams", "tests/", "closed_streams_change_nothing"),
    proved("peak", "tests/", "only_the_residual_stream_and_one_layer_grow_with_the_prompt"),
];

/// Packages by manifest, and what of the workspace each may depend on, for tests as well.
const DIRECTIONS: &[(&str, &str, &[&str])] = &[
    ("Cargo.toml", "npu-prefill", &["gguf", "kvlayout", "npu-kernels", "prefill", "xdna"]),
    ("provider/gguf/Cargo.toml", "gguf", &[]),
    ("provider/prefill/Cargo.toml", "prefill", &["gguf", "kvlayout", "npu-kernels"]),
    ("kvlayout/Cargo.toml", "kvlayout", &[]),
    ("npu-kernels/Cargo.toml", "npu-kernels", &[]),
    ("npu-kernels/tool/Cargo.toml", "npu-kernel", &["npu-kernels", "xdna"]),
    ("npu-kernels/xdna/Cargo.toml", "xdna", &["npu-kernels"]),
    ("npu-kernels/npusim/Cargo.toml", "npusim", &[]),
    ("conformance/Cargo.toml", "conformance", &["gguf", "kvlayout"]),
    ("bench/Cargo.toml", "bench", &["conformance", "gguf", "npu-kernels"]),
    ("fuzz/Cargo.toml", "npu-prefill-fuzz", &["gguf", "kvlayout"]),
    ("xtask/Cargo.toml", "xtask", &[]),
];

/// The files with unsafe code. A new one is a decision: it is made here and in `ARCHITECTURE.md`.
const UNSAFE: &[&str] = &[
    "conformance/src/dmabuf.rs",
    "kvlayout/src/convert.rs",
    "kvlayout/src/inherit.rs",
    "kvlayout/src/region.rs",
    "kvlayout/tests/memory/mod.rs",
    "npu-kernels/src/host/attention.rs",
    "npu-kernels/src/host/avx2.rs",
    "npu-kernels/src/host/avx512.rs",
    "npu-kernels/src/host/avx512_decode.rs",
    "npu-kernels/src/host/gemm.rs",
    "npu-kernels/src/host/mod.rs",
    "npu-kernels/src/host/neon.rs",
    "npu-kernels/src/host/out.rs",
    "npu-kernels/src/host/peak.rs",
    "npu-kernels/src/host/scalar.rs",
    "npu-kernels/npusim/src/hooks.rs",
    "npu-kernels/npusim/src/memory.rs",
    "npu-kernels/xdna/src/accel.rs",
    "npu-kernels/xdna/src/ffi.rs",
    "npu-kernels/xdna/src/foreign.rs",
    "npu-kernels/xdna/src/shim.rs",
    "provider/gguf/src/mapped.rs",
];

/// The driver's double is preloaded into other programs: variables are all that it can be told by, and stderr all it can say.
const DOUBLE: &str = "npu-kernels/npusim/src/";
const ARCHITECTURE: &str = "ARCHITECTURE.md";
/// The one file that may hold the words and paths it forbids.
const THIS: &str = "xtask/src/tidy.rs";
const MAX_BYTES: u64 = 256 << 10;

/// Where complaints go.
#[derive(Default)]
struct Out {
    rule: &'static str,
    all: Vec<Complaint>,
}

impl Out {
    fn say(&mut self, path: &str, line: usize, what: impl Into<String>) {
        self.all.push(Complaint { path: path.into(), line, rule: self.rule, what: what.into() });
    }
}

/// All complaints about a tree, by file and line.
pub fn check(tree: &Tree) -> Vec<Complaint> {
    let mut out = Out::default();
    for rule in RULES {
        out.rule = rule.id;
        (rule.check)(tree, &mut out);
    }
    out.all.sort();
    out.all.dedup();
    out.all
}

/// Tests, examples and build scripts: programs of their own.
fn is_apart(path: &str) -> bool {
    let within = |dir: &str| path.starts_with(&format!("{dir}/")) || path.contains(&format!("/{dir}/"));
    within("tests") || within("examples") || within("benches") || path.rsplit('/').next() == Some("build.rs")
}

fn starts_with_any(path: &str, prefixes: &[&str]) -> bool {
    prefixes.iter().any(|p| path.starts_with(p))
}

/// The line of the first line of `text` for which `test` holds; 1 where there is none.
fn line_of(text: &str, test: impl Fn(&str) -> bool) -> usize {
    text.lines().position(test).map_or(1, |i| i + 1)
}

// Packages.

/// Dependencies of a manifest on packages of the workspace: (package, line).
fn own_dependencies(text: &str, root: &str) -> Result<Vec<(String, usize)>, String> {
    let parse = |text: &str| text.parse::<toml::Table>().map_err(|e| e.to_string().replace('\n', " "));
    let (manifest, workspace) = (parse(text)?, parse(root).unwrap_or_default());
    let shared = workspace.get("workspace").and_then(|w| w.get("dependencies")).cloned();
    let mut tables = Vec::new();
    let kinds = ["dependencies", "dev-dependencies", "build-dependencies"];
    let mut take = |of: &toml::Table| tables.extend(kinds.iter().filter_map(|k| of.get(*k)?.as_table().cloned()));
    take(&manifest);
    let targets = manifest.get("target").and_then(toml::Value::as_table);
    targets.into_iter().flat_map(|t| t.values()).filter_map(toml::Value::as_table).for_each(&mut take);
    let mut found = Vec::new();
    for (key, value) in tables.iter().flatten() {
        let renamed = |v: &toml::Value| v.get("package").and_then(toml::Value::as_str).map(str::to_owned);
        let name = renamed(value)
            .or_else(|| shared.as_ref().and_then(|s| s.get(key)).and_then(renamed))
            .unwrap_or_else(|| key.clone());
        if DIRECTIONS.iter().any(|(_, package, _)| *package == name) {
            found.push((name, line_of(text, |l| l.trim_start().starts_with(key.as_str()))));
        }
    }
    Ok(found)
}

fn directions(tree: &Tree, out: &mut Out) {
    let root = tree.text("Cargo.toml");
    for (path, text) in tree.with_suffix("Cargo.toml").filter(|(p, _)| !is_apart(p)) {
        let Some((_, package, allowed)) = DIRECTIONS.iter().find(|(manifest, ..)| *manifest == path) else {
            out.say(
                path,
                1,
                format!("a new package: say in {THIS} what it may depend on, and in {ARCHITECTURE} why it is one"),
            );
            continue;
        };
        match own_dependencies(text, root) {
            Ok(found) => {
                for (name, line) in found.iter().filter(|(name, _)| !allowed.contains(&name.as_str())) {
                    let may =
                        if allowed.is_empty() { "nothing of the workspace".to_owned() } else { allowed.join(", ") };
                    out.say(path, *line, format!("{package} may depend on {may}, not on {name}"));
                }
            }
            Err(e) => out.say(path, 1, format!("not a manifest: {e}")),
        }
    }
}

fn black_box(tree: &Tree, out: &mut Out) {
    // The manifest is held to its list by `directions`; here it is the sources, which could include a file by path.
    for (path, text) in tree.with_suffix(".rs").filter(|(p, _)| p.starts_with("conformance/")) {
        for (i, line) in text.lines().enumerate() {
            let reaches = ["include!", "#[path"].iter().any(|w| line.trim_start().starts_with(w));
            if reaches && (line.contains("provider/") || line.contains("npu-kernels/")) {
                out.say(path, i + 1, "the harness takes code of the program it is to judge; write it anew");
            }
        }
        let code = code_only(text);
        for name in ["prefill::", "npu_kernels::", "npu_prefill::"] {
            for line in lines_with(&code, name) {
                out.say(
                    path,
                    line,
                    format!("the harness names {name}, which is under test; it may use gguf and kvlayout"),
                );
            }
        }
    }
}

fn manifests(tree: &Tree, out: &mut Out) {
    for (path, text) in tree.with_suffix("Cargo.toml").filter(|(p, _)| !is_apart(p)) {
        let Ok(manifest) = text.parse::<toml::Table>() else { continue };
        // `[lints] workspace = true` and `license.workspace = true`; the root's own `license` is a table likewise.
        let inherits = |path: &[&str]| {
            path.iter()
                .try_fold(&toml::Value::Table(manifest.clone()), |v, key| v.get(key))
                .and_then(toml::Value::as_bool)
                == Some(true)
        };
        if !inherits(&["lints", "workspace"]) {
            out.say(path, 1, "add `[lints] workspace = true`");
        }
        if !inherits(&["package", "license", "workspace"]) {
            out.say(
                path,
                line_of(text, |l| l.starts_with("license")),
                "add `license.workspace = true` under [package]",
            );
        }
    }
}

// Sources.

fn no_files(tree: &Tree, out: &mut Out) {
    const WORDS: &[&str] = &[
        "std::fs",
        "std::path",
        "std::os",
        "std::net",
        "File",
        "Path",
        "PathBuf",
        "OwnedFd",
        "RawFd",
        "BorrowedFd",
        "memmap",
        "memmap2",
        "rustix",
        "libc",
    ];
    for (path, text) in tree.with_suffix(".rs").filter(|(p, _)| p.starts_with("provider/prefill/src/")) {
        let code = shipped(text);
        for word in WORDS {
            for line in lines_with(&code, word) {
                out.say(
                    path,
                    line,
                    format!(
                        "prefill mentions {word}: files, paths and descriptors are the caller's; rows go to a KvSink"
                    ),
                );
            }
        }
    }
}

fn printing(tree: &Tree, out: &mut Out) {
    const WORDS: &[&str] = &["println!", "eprintln!", "print!", "eprint!", "dbg!", "io::stdout", "io::stderr"];
    for (path, text) in tree.with_suffix(".rs") {
        if is_apart(path)
            || starts_with_any(
                path,
                &[DOUBLE, "provider/src/", "conformance/src/", "bench/src/", "npu-kernels/tool/src/", "xtask/"],
            )
        {
            continue;
        }
        let code = shipped(text);
        for word in WORDS {
            for line in lines_with(&code, word) {
                out.say(path, line, format!("{word} in a library: return a value or an error, the program prints"));
            }
        }
    }
}

fn exit_codes(tree: &Tree, out: &mut Out) {
    for (path, text) in tree.with_suffix(".rs") {
        if is_apart(path)
            || path == "provider/src/exit.rs"
            || path == "conformance/src/main.rs"
            || path == "bench/src/main.rs"
            || path == "npu-kernels/tool/src/main.rs"
            || path.starts_with("xtask/")
        {
            continue;
        }
        for (i, line) in shipped(text).lines().enumerate() {
            let number = |call: &str| {
                line.split(call).skip(1).any(|rest| rest.trim_start().starts_with(|c: char| c.is_ascii_digit()))
            };
            if number("process::exit(") || number("ExitCode::from(") || line.contains("ExitCode::FAILURE") {
                out.say(path, i + 1, "an exit number: give the error a Kind of provider/src/exit.rs instead");
            }
            if !path.starts_with("provider/src/")
                && (has_word(line, "process::exit") || has_word(line, "process::abort"))
            {
                out.say(path, i + 1, "a library ends the process: return an error");
            }
        }
    }
}

fn environment(tree: &Tree, out: &mut Out) {
    const WORDS: &[&str] = &["env::var", "env::var_os", "env::vars", "env::vars_os"];
    let judged = ["provider/", "kvlayout/", "npu-kernels/"];
    for (path, text) in tree.with_suffix(".rs") {
        if is_apart(path)
            || path.starts_with(DOUBLE)
            || path == "provider/src/env.rs"
            || !starts_with_any(path, &judged)
        {
            continue;
        }
        let code = shipped(text);
        for word in WORDS {
            for line in lines_with(&code, word) {
                out.say(
                    path,
                    line,
                    format!("{word}: every variable is read in provider/src/env.rs, where it is documented"),
                );
            }
        }
    }
}

fn unsafe_files(tree: &Tree, out: &mut Out) {
    for (path, text) in tree.with_suffix(".rs") {
        let code = code_only(text);
        let mut lines = lines_with(&code, "unsafe");
        match (lines.next(), UNSAFE.contains(&path)) {
            (Some(line), false) => {
                out.say(
                    path,
                    line,
                    format!("unsafe code in a new file: avoid it, or list the file in {THIS} and {ARCHITECTURE}"),
                );
            }
            (None, true) => out.say(
                path,
                1,
                format!("no unsafe code any more: take the file off the list in {THIS} and {ARCHITECTURE}"),
            ),
            _ => {}
        }
    }
    for path in UNSAFE.iter().filter(|p| tree.file(p).is_none()) {
        out.say(
            THIS,
            line_of(tree.text(THIS), |l| l.contains(path)),
            format!("{path} is on the list of unsafe files, but not in the tree"),
        );
    }
    // The document repeats the list between two marks.
    let text = tree.text(ARCHITECTURE);
    let start = line_of(text, |l| l.trim() == "<!-- unsafe files -->");
    let listed: Vec<(usize, &str)> = text
        .lines()
        .enumerate()
        .skip(start)
        .take_while(|(_, l)| l.trim() != "<!-- end -->")
        .filter_map(|(i, l)| Some((i + 1, l.trim_start().strip_prefix("- `")?.split('`').next()?)))
        .collect();
    for path in UNSAFE.iter().filter(|p| !listed.iter().any(|(_, l)| l == *p)) {
        out.say(ARCHITECTURE, start, format!("the list of unsafe files lacks {path}"));
    }
    for (line, path) in listed.iter().filter(|(_, l)| !UNSAFE.contains(l)) {
        out.say(ARCHITECTURE, *line, format!("{path} is not on the list of unsafe files in {THIS}"));
    }
}

fn heads(tree: &Tree, out: &mut Out) {
    for (path, text) in tree.with_suffix(".rs") {
        if !text.starts_with("//!") {
            out.say(path, 1, "a module opens with `//!`: what it is, and what it is not");
        }
    }
}

// Documents.

fn invariants(tree: &Tree, out: &mut Out) {
    let text = tree.text(ARCHITECTURE);
    let known: BTreeSet<&str> =
        RULES.iter().filter(|r| r.invariant).map(|r| r.id).chain(PROVED.iter().map(|p| p.id)).collect();
    let mut stated = BTreeSet::new();
    for (i, line) in text.lines().enumerate() {
        for rest in line.split("**Invariant").skip(1) {
            let id = rest.trim_start().strip_prefix('(').and_then(|r| r.split_once("):**")).map(|(id, _)| id);
            match id {
                Some(id) if !stated.insert(id) => {
                    out.say(ARCHITECTURE, i + 1, format!("the invariant {id} is stated twice"))
                }
                Some(id) if known.contains(id) => {}
                Some(id) => out.say(ARCHITECTURE, i + 1, format!("no rule or test in {THIS} holds the invariant {id}")),
                None => out.say(ARCHITECTURE, i + 1, "write it as **Invariant (id):**"),
            }
        }
    }
    for id in known.iter().filter(|id| !stated.contains(*id)) {
        out.say(ARCHITECTURE, 1, format!("the invariant {id} is checked, but not stated here"));
    }
    for p in PROVED {
        let name = format!("fn {}(", p.test);
        let there = tree.with_suffix(".rs").any(|(path, text)| path.starts_with(p.place) && text.contains(&name));
        if !there {
            let line = line_of(tree.text(THIS), |l| l.contains(p.test));
            out.say(
                THIS,
                line,
                format!("the invariant {} is proved by {} in {}, which is not there", p.id, p.test, p.place),
            );
        }
        if there && !text.contains(p.test) {
            out.say(
                ARCHITECTURE,
                line_of(text, |l| l.contains(&format!("({}):**", p.id))),
                format!("name the test {}", p.test),
            );
        }
    }
}

/// Written somewhere else than where the reader is.
const FORBIDDEN: &[(&str, &str)] = &[
    ("/work/", "a path of one machine"),
    ("/root/", "a path of one machine"),
    ("this session", "the history of the text; say how things are"),
    ("helper session", "the history of the text; say how things are"),
    ("helper-", "the history of the text; say how things are"),
    ("issues show", "the history of the text; say how things are"),
    ("issue #", "a number that the reader cannot look up; give the reason itself"),
    ("subagent", "the history of the text; say how things are"),
    ("the brief", "the history of the text; say how things are"),
];

fn words(tree: &Tree, out: &mut Out) {
    for file in tree.files.iter().filter(|f| f.path != THIS && f.path != "Cargo.lock") {
        let Some(text) = &file.text else { continue };
        for (i, line) in text.lines().enumerate() {
            let lower = line.to_lowercase();
            for (word, why) in FORBIDDEN.iter().filter(|(word, _)| lower.contains(word)) {
                out.say(&file.path, i + 1, format!("{word:?}: {why}"));
            }
            if file.path.ends_with(".md") && line.contains("/tmp/") {
                out.say(&file.path, i + 1, "\"/tmp/\": name a place of the reader's, such as ./slots");
            }
        }
    }
}

fn sizes(tree: &Tree, out: &mut Out) {
    for file in &tree.files {
        if file.size > MAX_BYTES {
            let what = format!(
                "{} bytes, at most {MAX_BYTES} are committed: make it when it is needed, from a script or a seed",
                file.size
            );
            out.say(&file.path, 1, what);
        }
        let fixture = starts_with_any(&file.path, &["provider/gguf/tests/vectors/", "kvlayout/tests/"]);
        if file.path.ends_with(".gguf") && !fixture {
            out.say(
                &file.path,
                1,
                "a model in the tree: models come through conformance/pins.toml, tiny ones from code",
            );
        }
    }
}

/// Lines outside of fenced blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(i, line)| {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            return None;
        }
        (!fenced).then_some((i + 1, line))
    })
}

/// A line without `code`, and the code spans by themselves.
fn spans(line: &str) -> (String, Vec<&str>) {
    let (mut rest, mut code) = (String::new(), Vec::new());
    for (i, part) in line.split('`').enumerate() {
        if i % 2 == 0 {
            rest.push_str(part);
        } else {
            code.push(part);
            rest.push('_');
        }
    }
    (rest, code)
}

/// How GitHub turns a heading into an anchor.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|(_, l)| l.starts_with('#')).map(|(_, l)| anchor(l.trim_start_matches('#')));
    headings.collect()
}

/// `to` as seen from the directory of `from`.
fn resolve(from: &str, to: &str) -> Option<String> {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in to.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

fn links(tree: &Tree, out: &mut Out) {
    // A file name in code is a promise too, where it starts with one of our directories.
    let rooms =
        ["provider/", "kvlayout/", "npu-kernels/", "conformance/", "bench/", "tests/", "docs/", "xtask/", ".ci/"];
    for (path, text) in tree.with_suffix(".md") {
        for (number, line) in prose(text) {
            let (rest, code) = spans(line);
            for target in rest.split("](").skip(1).filter_map(|r| r.split(')').next()) {
                let target = target.split(' ').next().unwrap_or("");
                if target.contains("://") || target.starts_with("mailto:") {
                    continue;
                }
                let (file, fragment) = target.split_once('#').map_or((target, None), |(f, a)| (f, Some(a)));
                let resolved = if file.is_empty() { Some(path.to_owned()) } else { resolve(path, file) };
                match resolved.filter(|r| tree.exists(r)) {
                    None => out.say(path, number, format!("the link to {target} leads nowhere")),
                    Some(to) => {
                        let missing = fragment.filter(|a| to.ends_with(".md") && !anchors(tree.text(&to)).contains(*a));
                        if let Some(a) = missing {
                            out.say(path, number, format!("{to} has no heading #{a}"));
                        }
                    }
                }
            }
            for name in code {
                let name = name.split("::").next().unwrap_or("");
                let plain = name.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
                if plain && starts_with_any(name, &rooms) && !tree.exists(name) {
                    out.say(path, number, format!("there is no {name}"));
                }
            }
        }
    }
}

/// Rows (code, name) of a table whose first cell is a number.
fn table_rows(text: &str) -> Vec<(usize, u32, String)> {
    let cell = |c: &str| c.trim().trim_matches('`').to_owned();
    let rows = prose(text).filter_map(|(line, l)| {
        let mut cells = l.strip_prefix('|')?.split('|');
        Some((line, cell(cells.next()?).parse().ok()?, cell(cells.next()?)))
    });
    rows.collect()
}

fn exit_table(tree: &Tree, out: &mut Out) {
    const SOURCE: &str = "provider/src/exit.rs";
    const TABLE: &str = "docs/exit-codes.md";
    let source = tree.text(SOURCE);
    // The numbers that are used: `Kind::Name => 70,`.
    let used: Vec<(usize, u32)> = source
        .lines()
        .enumerate()
        .filter_map(|(i, l)| {
            let (name, number) = l.trim().strip_prefix("Kind::")?.split_once(" => ")?;
            name.chars().all(char::is_alphanumeric).then_some(())?;
            Some((i + 1, number.trim_end_matches(',').parse().ok()?))
        })
        .collect();
    // The words of `--help`: `   70  internal: a bug`.
    let help = source.lines().skip_while(|l| !l.contains("pub const HELP")).take_while(|l| !l.ends_with("\";"));
    let named: Vec<(u32, &str)> = help
        .filter_map(|l| {
            let (number, rest) = l.trim_start().split_once("  ")?;
            Some((number.parse().ok()?, rest.split_once(':')?.0))
        })
        .collect();
    if used.is_empty() || named.is_empty() {
        return out.say(SOURCE, 1, format!("the numbers cannot be found here any more: teach {THIS} their new form"));
    }
    let rows = table_rows(tree.text(TABLE));
    let has = |number: u32| rows.iter().any(|(_, n, _)| *n == number);
    for (line, number) in used.iter().filter(|(_, n)| !has(*n)) {
        out.say(TABLE, 1, format!("exit code {number} ({SOURCE}:{line}) is not in the table"));
    }
    for (line, number, name) in &rows {
        if *number != 0 && !used.iter().any(|(_, n)| n == number) {
            out.say(TABLE, *line, format!("{SOURCE} knows no exit code {number}"));
        }
        if let Some((_, want)) = named.iter().find(|(n, want)| n == number && want != name) {
            out.say(TABLE, *line, format!("exit code {number} is called {name:?} here and {want:?} in --help"));
        }
    }
}

/// The two commands that set everything up, character by character.
const COMMANDS: [&str; 2] = ["cargo run --release -p conformance -- demo", "cargo test --workspace"];

fn commands(tree: &Tree, out: &mut Out) {
    for path in ["README.md", ".ci/run"] {
        let lines: Vec<&str> = tree.text(path).lines().map(str::trim).collect();
        for command in COMMANDS {
            let is = |l: &&str| [Some(*l), l.strip_prefix("run "), l.strip_prefix("$ ")].contains(&Some(command));
            if !lines.iter().any(is) {
                out.say(path, 1, format!("`{command}` does not stand here on a line of its own"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_tree_is_tidy() {
        let tree = Tree::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).unwrap();
        let complaints: Vec<String> = check(&tree).iter().map(ToString::to_string).collect();
        assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
    }

    /// What one rule says of a tree, as `path:line`.
    fn says(id: &str, files: &[(&str, &str)]) -> Vec<String> {
        let rule = RULES.iter().find(|r| r.id == id).unwrap();
        let mut out = Out { rule: rule.id, all: Vec::new() };
        (rule.check)(&Tree::of(files), &mut out);
        out.all.iter().map(|c| format!("{}:{}", c.path, c.line)).collect()
    }

    const ROOT: (&str, &str) =
        ("Cargo.toml", "[workspace.dependencies]\nengine = { package = \"prefill\", path = \"x\" }\n");

    #[test]
    fn wrong_directions_are_seen() {
        let manifest = "[dependencies]\nhalf = \"2\"\nkvlayout.workspace = true\n";
        assert_eq!(says("directions", &[ROOT, ("provider/prefill/Cargo.toml", manifest)]), [""; 0]);
        assert_eq!(says("directions", &[ROOT, ("provider/gguf/Cargo.toml", manifest)]), ["provider/gguf/Cargo.toml:3"]);
        for sly in [
            "\n[dev-dependencies]\nprefill = { path = \"../provider/prefill\" }\n",
            "\n[build-dependencies]\nprefill.workspace = true\n",
            "\n[target.'cfg(unix)'.dependencies]\nengine = { package = \"prefill\", path = \"x\" }\n",
            "\n[dependencies]\nengine.workspace = true\n",
        ] {
            assert_eq!(
                says("directions", &[ROOT, ("conformance/Cargo.toml", sly)]),
                ["conformance/Cargo.toml:3"],
                "{sly}"
            );
        }
        assert_eq!(says("directions", &[ROOT, ("new/Cargo.toml", "")]), ["new/Cargo.toml:1"]);
        assert_eq!(says("manifests", &[("kvlayout/Cargo.toml", "[package]\nname = \"k\"\n")]).len(), 2);
    }

    #[test]
    fn the_harness_stays_outside() {
        let rs = "//! x\n#[path = \"../../provider/src/ids.rs\"]\nmod ids;\nuse prefill::Plan;\n// prefill::run\n";
        assert_eq!(
            says("black-box", &[("conformance/src/run.rs", rs)]),
            ["conformance/src/run.rs:2", "conformance/src/run.rs:4"]
        );
    }

    #[test]
    fn misplaced_code_is_seen() {
        let rs = "//! x\nuse std::fs;\n// a File\nfn f() { println!(\"\"); std::process::exit(3); std::env::var(\"X\"); }\n\
                  #[cfg(test)]\nmod tests { fn g() { dbg!(1); unsafe {} } }\n";
        let at = |path: &str, lines: &[usize]| lines.iter().map(|l| format!("{path}:{l}")).collect::<Vec<_>>();
        let path = "provider/prefill/src/x.rs";
        assert_eq!(says("no-files", &[(path, rs)]), at(path, &[2]));
        assert_eq!(says("printing", &[(path, rs)]), at(path, &[4]));
        assert_eq!(says("exit-codes", &[(path, rs)]), at(path, &[4, 4]));
        assert_eq!(says("environment", &[(path, rs)]), at(path, &[4]));
        // Unsafe code of tests counts.
        assert!(says("unsafe", &[(path, rs)]).contains(&format!("{path}:6")));
        assert_eq!(says("heads", &[("a.rs", "// x\n"), ("b.rs", "//! x\n")]), ["a.rs:1"]);
        for path in ["tests/x.rs", "kvlayout/tests/x.rs", "conformance/examples/x.rs", "build.rs"] {
            for rule in ["no-files", "printing", "exit-codes", "environment"] {
                assert_eq!(says(rule, &[(path, rs)]), [""; 0], "{rule} {path}");
            }
        }
    }

    #[test]
    fn the_list_of_unsafe_files_is_held_on_all_sides() {
        let mut doc = String::from("x\n<!-- unsafe files -->\n");
        UNSAFE.iter().for_each(|p| doc += &format!("- `{p}`: y\n"));
        let whole = doc.clone() + "<!-- end -->\n- `other.rs`\n";
        let mut files: Vec<(&str, &str)> = UNSAFE.iter().map(|p| (*p, "//! x\nunsafe {}\n")).collect();
        files.push((ARCHITECTURE, &whole));
        assert_eq!(says("unsafe", &files), [""; 0]);
        files[0].1 = "//! not unsafe\n";
        assert_eq!(says("unsafe", &files), [format!("{}:1", UNSAFE[0])]);
        files[0].1 = "unsafe {}";
        let more = doc + "- `kvlayout/src/new.rs`\n<!-- end -->\n";
        files.last_mut().unwrap().1 = &more;
        assert_eq!(says("unsafe", &files), [format!("{ARCHITECTURE}:{}", UNSAFE.len() + 3)]);
    }

    #[test]
    fn the_document_states_what_is_checked() {
        let ids = || RULES.iter().filter(|r| r.invariant).map(|r| r.id).chain(PROVED.iter().map(|p| p.id));
        let mut doc: String = ids().map(|id| format!("**Invariant ({id}):** x\n")).collect();
        PROVED.iter().for_each(|p| doc += &format!("`{}`\n", p.test));
        let tests: Vec<(String, String)> =
            PROVED.iter().map(|p| (format!("{}x.rs", p.place), format!("fn {}()", p.test))).collect();
        let mut by_file = std::collections::BTreeMap::<&str, String>::new();
        tests.iter().for_each(|(f, t)| by_file.entry(f).or_default().push_str(t));
        let with = |doc: &str| {
            let mut files: Vec<(&str, &str)> = by_file.iter().map(|(f, t)| (*f, t.as_str())).collect();
            files.push((ARCHITECTURE, doc));
            says("invariants", &files)
        };
        assert_eq!(with(&doc), [""; 0]);
        assert_eq!(with(&doc.replace("**Invariant (unsafe):**", "")), ["ARCHITECTURE.md:1"]);
        assert_eq!(with(&format!("**Invariant (made-up):** x\n{doc}")), ["ARCHITECTURE.md:1"]);
        assert_eq!(with(&format!("**Invariant:** x\n{doc}")), ["ARCHITECTURE.md:1"]);
        assert_eq!(with(&format!("{doc}**Invariant (unsafe):** again\n")).len(), 1);
        assert!(says("invariants", &[(ARCHITECTURE, &doc)]).len() >= PROVED.len());
    }

    #[test]
    fn words_of_the_workshop_are_seen_and_those_of_the_trade_are_not() {
        let bad = format!("see {}x\nIssue #3\nthis Session\n", "/work/");
        assert_eq!(says("words", &[("src/a.rs", &bad)]), ["src/a.rs:1", "src/a.rs:2", "src/a.rs:3"]);
        let good = "a session file of llama.cpp (ggsn), seen by issuing a save; the network/worker; $HOME/x\nlet t = \"/tmp/x\";\n";
        assert_eq!(says("words", &[("src/a.rs", good)]), [""; 0]);
        assert_eq!(says("words", &[("docs/a.md", good)]), ["docs/a.md:2"]);
    }

    #[test]
    fn large_files_and_models_are_seen() {
        let large = " ".repeat(MAX_BYTES as usize + 1);
        assert_eq!(
            says("sizes", &[("a", &large), ("m.gguf", ""), ("kvlayout/tests/saved/m.gguf", "")]),
            ["a:1", "m.gguf:1"]
        );
    }

    #[test]
    fn links_that_lead_nowhere_are_seen() {
        let doc = "[a](../README.md) [b](b.md#the-top-2) [c](https://x.y/z)\n```\n[no](no.md)\n```\n`docs/b.md` `docs/{x,y}.md`\n\
                   [d](c.md) [e](b.md#none) [f](#here)\n`tests/x.rs::name` `npu-prefill/config.toml`\n# Here\n";
        let files = [("docs/a.md", doc), ("docs/b.md", "## The `top`, (2)\n"), ("README.md", "x")];
        assert_eq!(says("links", &files), ["docs/a.md:6", "docs/a.md:6", "docs/a.md:7"]);
        assert_eq!(resolve("docs/x/a.md", "../b.md").as_deref(), Some("docs/b.md"));
        assert_eq!(resolve("a.md", "../b.md"), None);
    }

    #[test]
    fn the_exit_table_is_the_source() {
        let source = "    Kind::Usage => 2,\n    Kind::Data => 65,\npub const HELP: &str = \"\\\n    0  handed over: x\n    2  usage: y\n   65  data: z\";\n";
        let table = |rows: &str| format!("| code | name |\n|---|---|\n{rows}");
        let with =
            |rows: &str| says("exit-table", &[("provider/src/exit.rs", source), ("docs/exit-codes.md", &table(rows))]);
        assert_eq!(with("| 0 | handed over |\n| 2 | usage |\n| `65` | data |\n"), [""; 0]);
        assert_eq!(with("| 0 | handed over |\n| 2 | usage |\n"), ["docs/exit-codes.md:1"]);
        assert_eq!(with("| 2 | use |\n| 65 | data |\n| 70 | x |\n"), ["docs/exit-codes.md:3", "docs/exit-codes.md:5"]);
        assert_eq!(says("exit-table", &[("provider/src/exit.rs", "")]), ["provider/src/exit.rs:1"]);
    }

    #[test]
    fn the_two_commands_stand_everywhere() {
        let readme = format!("```sh\n{}\n{}\n```\n", COMMANDS[0], COMMANDS[1]);
        let ci = format!("run {}\nrun {}\n", COMMANDS[0], COMMANDS[1]);
        assert_eq!(says("commands", &[("README.md", &readme), (".ci/run", &ci)]), [""; 0]);
        assert_eq!(says("commands", &[("README.md", &readme), (".ci/run", "cargo test")]).len(), 2);
    }

    #[test]
    fn complaints_say_where() {
        let c = Complaint { path: "a/b.rs".into(), line: 7, rule: "heads", what: "no head".into() };
        assert_eq!(c.to_string(), "a/b.rs:7: no head [heads]");
    }
}
