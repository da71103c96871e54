//! A directory of kernels: `kernels.toml` and the files it names, or, without it, files that have their numbers in their names.
//!
//! ```toml
//! [[kernel]]
//! name = "gate-up"                      # optional: what it is called in messages; the file's name otherwise
//! op = "gemm"
//! kind = "full-elf"                     # or "xclbin+insts", which has a second file: insts, insts-sha256
//! file = "full_i8_GU_K640_N3072.elf"    # in this directory
//! sha256 = "…"                          # of the file
//! kernel = "main:seq"
//! roles = ["GU"]                        # optional: QKV, Q, K, V, KV, O, GU, G, U, D
//! args = ["a", "b", "c"]                # the order of its buffer arguments
//! m = 128
//! k = 640
//! n = 3072
//! a = { type = "i8", layout = "row-major" }
//! b = { type = "i8", layout = "blocked-64x128" }
//! c = { type = "i32", layout = "row-major" }
//! rounding = "exact"                    # or "nearest-even", "floor"
//! ```
//!
//! Everything is checked before a kernel is used: keys, numbers, that files are there and what they hash to.

use crate::catalogue::{Catalogue, Files, KernelFile, Layout, Operand, Rounding, Spec, Type, parse_name};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use toml::Spanned;

/// The manifest's name.
pub const MANIFEST: &str = "kernels.toml";
/// Far more than a manifest needs.
const MAX_MANIFEST: u64 = 1 << 20;
/// Far more than a kernel is.
const MAX_KERNEL: u64 = 64 << 20;
/// Kernels of a directory: some models' worth.
const MAX_KERNELS: usize = 4096;

/// What is wrong with a directory of kernels.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// A place in the manifest, or in a directory without one.
    #[error("{}: {what}", place(path, *line))]
    Wrong {
        /// The manifest, or the file.
        path: PathBuf,
        /// The line, from 1, where there is one.
        line: Option<usize>,
        /// What is wrong.
        what: String,
    },
    /// Something could not be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// What.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

fn place(path: &Path, line: Option<usize>) -> String {
    line.map_or_else(|| path.display().to_string(), |line| format!("{}:{line}", path.display()))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawManifest {
    #[serde(default)]
    kernel: Vec<Spanned<RawKernel>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawKernel {
    name: Option<String>,
    op: Spanned<String>,
    kind: Spanned<String>,
    file: Spanned<String>,
    sha256: Spanned<String>,
    insts: Option<Spanned<String>>,
    insts_sha256: Option<Spanned<String>>,
    kernel: String,
    #[serde(default)]
    roles: Vec<String>,
    args: Spanned<Vec<String>>,
    m: usize,
    k: usize,
    n: usize,
    a: RawOperand,
    b: RawOperand,
    c: RawOperand,
    rounding: Spanned<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawOperand {
    #[serde(rename = "type")]
    ty: Spanned<String>,
    layout: Spanned<String>,
}

/// Reads a directory of kernels. One without a manifest and without a file of the known names is an empty catalogue.
///
/// # Errors
/// See [`ManifestError`].
pub fn load(dir: &Path) -> Result<Catalogue, ManifestError> {
    let path = dir.join(MANIFEST);
    match read(&path, MAX_MANIFEST) {
        Ok(bytes) => {
            let text = String::from_utf8(bytes).map_err(|_| ManifestError::Wrong {
                path: path.clone(),
                line: None,
                what: "not UTF-8".into(),
            })?;
            parse(dir, &path, &text)
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => by_names(dir),
        Err(source) => Err(ManifestError::Io { path, source }),
    }
}

/// At most `most` bytes of a regular file.
fn read(path: &Path, most: u64) -> std::io::Result<Vec<u8>> {
    let file = std::fs::File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(std::io::Error::other("not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(std::io::Error::other(format!("larger than {most} bytes")));
    }
    Ok(bytes)
}

/// A kernel file's bytes.
///
/// # Errors
/// It cannot be read, or is larger than any kernel.
pub fn read_kernel(path: &Path) -> std::io::Result<Vec<u8>> {
    read(path, MAX_KERNEL)
}

/// Bytes of a kernel file that must still be what they were when the catalogue was read.
///
/// # Errors
/// It cannot be read, or has changed.
pub fn reread(file: &KernelFile) -> std::io::Result<Vec<u8>> {
    let bytes = read_kernel(&file.path)?;
    if sha256(&bytes) != file.sha256 {
        return Err(std::io::Error::other(format!("{} has changed since it was checked", file.path.display())));
    }
    Ok(bytes)
}

/// A hash as manifests have it.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn line(text: &str, at: usize) -> usize {
    text.as_bytes().iter().take(at).filter(|b| **b == b'\n').count() + 1
}

fn parse(dir: &Path, path: &Path, text: &str) -> Result<Catalogue, ManifestError> {
    let wrong = |at: Option<usize>, what: String| ManifestError::Wrong {
        path: path.to_owned(),
        line: at.map(|at| line(text, at)),
        what,
    };
    let raw: RawManifest =
        toml::from_str(text).map_err(|e| wrong(e.span().map(|s| s.start), e.message().replace('\n', " ")))?;
    if raw.kernel.len() > MAX_KERNELS {
        return Err(wrong(None, format!("{} kernels, at most {MAX_KERNELS}", raw.kernel.len())));
    }
    let mut kernels = Vec::with_capacity(raw.kernel.len());
    for entry in &raw.kernel {
        // An array of tables begins at its head; what is wrong with its numbers together is said there.
        let head = entry.span().start;
        let entry = entry.get_ref();
        let at = |s: &Spanned<String>, what: String| wrong(Some(s.span().start), what);
        if entry.op.get_ref() != "gemm" {
            return Err(at(&entry.op, format!("op = {:?}: known is gemm", entry.op.get_ref())));
        }
        let file = |name: &Spanned<String>, hash: &Spanned<String>| -> Result<KernelFile, ManifestError> {
            let plain = name.get_ref();
            if plain.is_empty() || plain.contains(['/', '\0']) || plain.starts_with('.') {
                return Err(at(name, format!("file {plain:?}: it is the name of a file beside this one")));
            }
            let path = dir.join(plain);
            let bytes = read_kernel(&path).map_err(|e| at(name, format!("file {plain:?}: {e}")))?;
            let found = sha256(&bytes);
            if *hash.get_ref() != found {
                return Err(at(hash, format!("{plain} hashes to {found}, not to {}", hash.get_ref())));
            }
            Ok(KernelFile { path, sha256: found })
        };
        let first = file(&entry.file, &entry.sha256)?;
        let files = match (entry.kind.get_ref().as_str(), &entry.insts, &entry.insts_sha256) {
            ("full-elf", None, None) => Files::FullElf(first),
            ("xclbin+insts", Some(name), Some(hash)) => Files::Xclbin { xclbin: first, insts: file(name, hash)? },
            ("full-elf", ..) => return Err(at(&entry.kind, "a full-elf has no insts".into())),
            ("xclbin+insts", ..) => return Err(at(&entry.kind, "an xclbin needs insts and insts-sha256".into())),
            (kind, ..) => return Err(at(&entry.kind, format!("kind = {kind:?}: it is full-elf or xclbin+insts"))),
        };
        let operand = |o: &RawOperand| -> Result<Operand, ManifestError> {
            let ty =
                Type::parse(o.ty.get_ref()).ok_or_else(|| at(&o.ty, one_of("type", o.ty.get_ref(), Type::NAMES)))?;
            let layout = Layout::parse(o.layout.get_ref())
                .ok_or_else(|| at(&o.layout, one_of("layout", o.layout.get_ref(), Layout::NAMES)))?;
            Ok(Operand { ty, layout })
        };
        let order: Vec<Option<usize>> =
            ["a", "b", "c"].iter().map(|o| entry.args.get_ref().iter().position(|a| a == o)).collect();
        let (&[Some(a), Some(b), Some(c)], 3) = (order.as_slice(), entry.args.get_ref().len()) else {
            let what = format!("args = {:?}: \"a\", \"b\" and \"c\" in some order", entry.args.get_ref());
            return Err(wrong(Some(entry.args.span().start), what));
        };
        let rounding = Rounding::parse(entry.rounding.get_ref())
            .ok_or_else(|| at(&entry.rounding, one_of("rounding", entry.rounding.get_ref(), Rounding::NAMES)))?;
        let spec = Spec {
            name: entry.name.clone().unwrap_or_else(|| entry.file.get_ref().clone()),
            files,
            kernel: entry.kernel.clone(),
            roles: entry.roles.clone(),
            args: [a, b, c],
            m: entry.m,
            k: entry.k,
            n: entry.n,
            a: operand(&entry.a)?,
            b: operand(&entry.b)?,
            c: operand(&entry.c)?,
            rounding,
        };
        spec.sound().map_err(|what| wrong(Some(head), what))?;
        if kernels.iter().any(|other: &Spec| other.name == spec.name) {
            return Err(wrong(Some(head), format!("a second kernel called {:?}; give it a name", spec.name)));
        }
        kernels.push(spec);
    }
    Catalogue::new(kernels).map_err(|what| wrong(None, what))
}

fn one_of(key: &str, found: &str, names: &[&str]) -> String {
    format!("{key} = {found:?}: it is one of {}", names.join(", "))
}

fn by_names(dir: &Path) -> Result<Catalogue, ManifestError> {
    let io = |source| ManifestError::Io { path: dir.to_owned(), source };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io)? {
        names.extend(entry.map_err(io)?.file_name().into_string());
    }
    names.sort();
    let (mut kernels, mut notes) = (Vec::new(), Vec::new());
    for name in names {
        match parse_name(&name) {
            Some(Ok((role, k, n))) => {
                let path = dir.join(&name);
                let bytes = read_kernel(&path).map_err(|source| ManifestError::Io { path: path.clone(), source })?;
                let sha256 = sha256(&bytes);
                let files = Files::FullElf(KernelFile { path: path.clone(), sha256 });
                let spec = Spec { files, ..Spec::int8(&name, &role, k, n) };
                spec.sound().map_err(|what| ManifestError::Wrong { path, line: None, what })?;
                kernels.push(spec);
            }
            Some(Err(what)) => return Err(ManifestError::Wrong { path: dir.join(&name), line: None, what }),
            None if name.ends_with(".elf") || name.ends_with(".xclbin") => {
                notes.push(format!(
                    "{name} is passed over: its name does not say what it computes, and there is no {MANIFEST}"
                ));
            }
            None => {}
        }
        if kernels.len() > MAX_KERNELS {
            let what = format!("more than {MAX_KERNELS} kernels");
            return Err(ManifestError::Wrong { path: dir.to_owned(), line: None, what });
        }
    }
    let mut catalogue =
        Catalogue::new(kernels).map_err(|what| ManifestError::Wrong { path: dir.to_owned(), line: None, what })?;
    catalogue.notes = notes;
    Ok(catalogue)
}

/// A manifest entry for a kernel, as [`load`] reads it.
pub fn entry(spec: &Spec) -> String {
    let name = |file: &KernelFile| {
        let name = file.path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        (toml::Value::String(name), file.sha256.clone())
    };
    let mut out = String::from("[[kernel]]\n");
    let files = match &spec.files {
        Files::FullElf(file) => {
            let (name, hash) = name(file);
            format!("file = {name}\nsha256 = \"{hash}\"\n")
        }
        Files::Xclbin { xclbin, insts } => {
            let ((x, xh), (i, ih)) = (name(xclbin), name(insts));
            format!("file = {x}\nsha256 = \"{xh}\"\ninsts = {i}\ninsts-sha256 = \"{ih}\"\n")
        }
        Files::BuiltIn => String::new(),
    };
    let text = |s: &str| toml::Value::String(s.to_owned());
    let mut args = ["", "", ""];
    for (place, letter) in spec.args.into_iter().zip(["a", "b", "c"]) {
        args[place] = letter;
    }
    let roles: Vec<toml::Value> = spec.roles.iter().map(|r| text(r)).collect();
    out += &format!("name = {}\nop = \"gemm\"\nkind = \"{}\"\n{files}", text(&spec.name), spec.files.kind());
    out += &format!("kernel = {}\nroles = {}\n", text(&spec.kernel), toml::Value::Array(roles));
    out += &format!("args = [\"{}\"]\nm = {}\nk = {}\nn = {}\n", args.join("\", \""), spec.m, spec.k, spec.n);
    for (letter, operand) in [("a", spec.a), ("b", spec.b), ("c", spec.c)] {
        out += &format!("{letter} = {{ type = \"{}\", layout = \"{}\" }}\n", operand.ty, operand.layout);
    }
    out += &format!("rounding = \"{}\"\n", spec.rounding);
    out
}
