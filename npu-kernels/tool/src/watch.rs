//! `watch`: checks a kernel again when its file changes, and everything when the manifest does.

use crate::show::Show;
use crate::{On, check, open};
use anyhow::Result;
use npu_kernels::{KernelId, manifest};
use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// How often the directory is looked at.
const EVERY: Duration = Duration::from_millis(250);

type Seen = HashMap<PathBuf, (SystemTime, u64)>;

fn look(on: &On) -> Seen {
    let Some(dir) = &on.elfs else { return Seen::new() };
    let Ok(entries) = std::fs::read_dir(dir) else { return Seen::new() };
    let files = entries.filter_map(|e| {
        let meta = e.as_ref().ok()?.metadata().ok()?;
        Some((e.ok()?.path(), (meta.modified().ok()?, meta.len())))
    });
    files.collect()
}

/// Looks and checks until it is ended.
pub fn run(on: &On, rounds: Option<u64>, show: &Show) -> Result<()> {
    // What is wrong with the arguments is said at once; what is wrong with the directory may be mended while we watch.
    if on.elfs.is_none() {
        open::catalogue(on)?;
    }
    let mut seen = Seen::new();
    let mut round = 0;
    loop {
        let mut now = look(on);
        if now != seen {
            // A file that is still being written: wait until it stays as it is.
            loop {
                std::thread::sleep(EVERY);
                let again = look(on);
                if again == now {
                    break;
                }
                now = again;
            }
            let changed: Vec<&PathBuf> =
                now.iter().filter(|(p, at)| seen.get(*p) != Some(at)).map(|(p, _)| p).collect();
            if let Err(e) = changes(on, &changed, seen.is_empty(), show) {
                show.line(format!("{}  {e:#}", show.bad("ERROR")));
            }
            seen = now;
        }
        round += 1;
        if rounds.is_some_and(|most| round >= most) {
            return Ok(());
        }
        std::thread::sleep(EVERY);
    }
}

fn changes(on: &On, changed: &[&PathBuf], all: bool, show: &Show) -> Result<()> {
    let mut device = open::device(on, open::catalogue(on)?)?;
    let all = all || changed.iter().any(|p| p.file_name().is_some_and(|n| n == manifest::MANIFEST));
    let ids: Vec<KernelId> = device
        .kernels()
        .iter()
        .enumerate()
        .filter(|(_, s)| all || s.files.iter().any(|f| changed.iter().any(|c| **c == f.path)))
        .map(|(i, _)| KernelId(i))
        .collect();
    if !ids.is_empty() {
        check::all(&mut *device, &ids, show)?;
    }
    Ok(())
}
