//! `gen`: the manifest entry of a kernel file, from its name and what is said about it.

use crate::show::Show;
use anyhow::{Context as _, Result, bail};
use clap::Args;
use npu_kernels::catalogue::{Files, KernelFile, Layout, Spec, Type, parse_name};
use npu_kernels::manifest;
use std::path::{Path, PathBuf};

/// What `gen` is told.
#[derive(Args)]
pub struct Arguments {
    /// The kernel file: a full ELF, or an xclbin with --insts
    file: PathBuf,
    /// The instructions of an xclbin
    #[arg(long, value_name = "FILE")]
    insts: Option<PathBuf>,
    /// Rows; 128 unless given
    #[arg(short)]
    m: Option<usize>,
    /// Inputs; from the file's name unless given
    #[arg(short)]
    k: Option<usize>,
    /// Outputs; from the file's name unless given
    #[arg(short)]
    n: Option<usize>,
    /// What the kernel is called within the file
    #[arg(long, default_value = "main:seq")]
    kernel: String,
    /// What it is to be called in messages; the file's name unless given
    #[arg(long)]
    name: Option<String>,
    /// For which projection it was made; from the file's name unless given
    #[arg(long)]
    role: Vec<String>,
    /// How B lies: row-major or blocked-64x128
    #[arg(long, default_value = "row-major")]
    layout: String,
}

/// Prints the entry, ready to be appended to a kernels.toml.
pub fn run(a: &Arguments, show: &Show) -> Result<()> {
    let read = |path: &Path| -> Result<KernelFile> {
        let bytes = manifest::read_kernel(path).with_context(|| path.display().to_string())?;
        Ok(KernelFile { path: path.to_owned(), sha256: manifest::sha256(&bytes) })
    };
    let name = a.file.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let named = match parse_name(&name) {
        Some(Ok((role, k, n))) => Some((role, k, n)),
        Some(Err(e)) => bail!("{name}: {e}"),
        None => None,
    };
    let known = |value: Option<usize>, named: Option<usize>, what: &str| {
        value.or(named).with_context(|| format!("{name} does not say its {what}: give -{what}"))
    };
    let k = known(a.k, named.as_ref().map(|n| n.1), "k")?;
    let n = known(a.n, named.as_ref().map(|n| n.2), "n")?;
    let mut spec = Spec::int8(a.name.as_deref().unwrap_or(&name), "", k, n);
    spec.roles = if a.role.is_empty() { named.into_iter().map(|n| n.0).collect() } else { a.role.clone() };
    spec.kernel.clone_from(&a.kernel);
    spec.m = a.m.unwrap_or(spec.m);
    spec.b.layout = match Layout::parse(&a.layout) {
        Some(layout @ (Layout::RowMajor | Layout::Blocked64x128)) => layout,
        _ => bail!("--layout {}: row-major or blocked-64x128; other types are written by hand", a.layout),
    };
    debug_assert_eq!(spec.b.ty, Type::I8);
    let file = read(&a.file)?;
    spec.files = match &a.insts {
        Some(insts) => Files::Xclbin { xclbin: file, insts: read(insts)? },
        None => Files::FullElf(file),
    };
    spec.sound().map_err(anyhow::Error::msg)?;
    show.line(manifest::entry(&spec).trim_end());
    Ok(())
}
