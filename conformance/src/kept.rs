//! The server's own work on a case, kept from one run to the next: what a provider is judged by does not depend on the provider, and takes
//! most of a run's time. Only pinned servers and models are kept, since they are known by their checksums; and only where somebody names a
//! directory for it, so that a run of which nothing is said is fresh throughout.
//!
//! A directory for each case that asks a server for the same, named by model, server and a hash of all that the answers depend on;
//! in it the state files and one file of replies and distances (CBOR). It appears whole or not at all.

use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use crate::cases::Case;
use crate::fixtures;
use crate::oracle::Arithmetic;
use crate::pins;
use crate::prompts;
use crate::reference::{LONG, Reference, SMALL_BATCH};
use crate::run::{Context, TempDir};
use crate::server::Build;
use crate::tolerances as tol;

/// Goes up with every change of what servers are asked, what is told of their answers, or how distances are taken.
const FORMAT: u32 = 1;

/// The file of replies.
const REPLIES: &str = "references.cbor";

/// Where the work on one case is kept.
pub(crate) struct Kept(PathBuf);

impl Kept {
    /// In `dir`, for this case.
    ///
    /// # Errors
    /// The server is not a pinned one, or the model cannot be read.
    pub(crate) fn of(dir: &Path, context: &Context, case: &Case, build: &Build, model: &Path) -> Result<Kept> {
        let Build::Wheel { dir: server, .. } = build else {
            bail!("only the work of pinned servers can be kept: a program of your own may be another tomorrow")
        };
        // A pinned model and a wheel lie in directories that are named by their checksums; tiny models are made anew by every build.
        let model = match fixtures::find(&case.model) {
            Some(_) => pins::sha256_of(model)?,
            None => context.pins.model(&case.model)?.sha256.clone(),
        };
        let server = server.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        // Neither its name nor the provider's chunk and arithmetic are matters of the server's.
        let asked = Case { name: String::new(), chunk: None, arithmetic: Arithmetic::Exact, ..case.clone() };
        let texts: Vec<_> = prompts::all()?.into_iter().filter(|p| case.prompts.contains(&p.name)).collect();
        let harness = (tol::TOP, tol::NUDGE.to_bits(), SMALL_BATCH, LONG);
        let text = format!("{FORMAT} {} {server} {model} {asked:?} {texts:?} {harness:?}", processor());
        let hash: String = Sha256::digest(text).iter().take(8).map(|b| format!("{b:02x}")).collect();
        Ok(Kept(dir.join(format!("{}-{}-{hash}", case.model, case.pin))))
    }

    /// What is kept, if it is there and can be read.
    pub(crate) fn read(&self) -> Option<Vec<Reference>> {
        let file = File::open(self.0.join(REPLIES)).ok()?;
        let mut references: Vec<Reference> = ciborium::from_reader(BufReader::new(file)).ok()?;
        for r in &mut references {
            r.file = self.0.join(format!("{}.bin", r.name));
            r.notes.push("the server's own work was kept from an earlier run".to_owned());
        }
        references.iter().all(|r| r.file.is_file()).then_some(references)
    }

    /// Keeps it. Another run that does the same at the same time may be first.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn write(&self, references: &[Reference]) -> Result<()> {
        let parent = self.0.parent().context("a directory for references")?;
        fs::create_dir_all(parent).with_context(|| format!("creating {}", parent.display()))?;
        let unfinished = TempDir::new(parent)?;
        for r in references {
            let to = unfinished.0.join(format!("{}.bin", r.name));
            fs::copy(&r.file, &to).with_context(|| format!("copying {} to {}", r.file.display(), to.display()))?;
        }
        let path = unfinished.0.join(REPLIES);
        let mut out = BufWriter::new(File::create(&path).with_context(|| format!("creating {}", path.display()))?);
        ciborium::into_writer(references, &mut out).with_context(|| format!("writing {}", path.display()))?;
        out.flush().with_context(|| format!("writing {}", path.display()))?;
        if self.0.exists() && self.read().is_none() {
            fs::remove_dir_all(&self.0).with_context(|| format!("removing the damaged {}", self.0.display()))?;
        }
        match fs::rename(&unfinished.0, &self.0) {
            Err(_) if self.0.exists() => Ok(()),
            result => result.with_context(|| format!("naming {}", self.0.display())),
        }
    }
}

/// Another processor's kernels round otherwise.
fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let is_about = |l: &&str| l.starts_with("model name") || l.starts_with("flags");
    text.lines().filter(is_about).take(2).collect()
}
