//! Runs a program and takes its time, from exec to exit, and the load of the machine meanwhile.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

use crate::machine::{Load, Watch};

/// A program that has ended well.
pub struct Ended {
    /// What it printed.
    pub stdout: String,
    /// From just before it was started until it was gone.
    pub process_ms: f64,
    /// What else ran.
    pub load: Load,
}

/// Runs it.
///
/// # Errors
/// It cannot be started, or does not end well; what it said then is part of the error.
pub fn run(command: &mut Command) -> Result<Ended> {
    let program = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::null());
    let watch = Watch::start();
    let began = Instant::now();
    let output = command.output();
    let process_ms = began.elapsed().as_secs_f64() * 1e3;
    let load = watch.load();
    let output = output.with_context(|| format!("starting {program}"))?;
    if !output.status.success() {
        bail!("{}", failure(&program, output.status, &String::from_utf8_lossy(&output.stderr)));
    }
    let stdout = String::from_utf8(output.stdout).with_context(|| format!("what {program} printed"))?;
    Ok(Ended { stdout, process_ms, load })
}

/// How a program ended, with the last of what it said.
fn failure(program: &str, status: ExitStatus, stderr: &str) -> String {
    let lines: Vec<&str> = stderr.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    let last = lines[lines.len().saturating_sub(3)..].join("; ");
    let said = if last.is_empty() { "it said nothing".to_owned() } else { format!("it said: {last}") };
    format!("{program} ended with {status}; {said}")
}

/// Reads the files once, so that no run waits for the disk.
///
/// # Errors
/// One cannot be read.
pub fn warm(files: &[PathBuf]) -> Result<()> {
    for path in files {
        let read = File::open(path).and_then(|mut file| io::copy(&mut file, &mut io::sink()));
        read.with_context(|| format!("reading {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_prints_is_kept() {
        let ended = run(Command::new("sh").args(["-c", "echo out; echo err >&2"])).unwrap();
        assert_eq!(ended.stdout, "out\n");
    }

    #[test]
    fn what_it_says_in_the_end_is_told() {
        let error = run(Command::new("sh").args(["-c", "seq 1 9 >&2; exit 7"])).err().unwrap().to_string();
        assert!(error.contains("sh ended with exit status: 7; it said: 7; 8; 9"), "{error}");
        let error = run(Command::new("sh").args(["-c", "exit 1"])).err().unwrap().to_string();
        assert!(error.contains("it said nothing"), "{error}");
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let error = run(&mut Command::new("./no-such-program")).err().unwrap().to_string();
        assert_eq!(error, "starting ./no-such-program");
    }

    #[test]
    fn files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, "x").unwrap();
        warm(&[path]).unwrap();
        assert!(warm(&[dir.path().join("b")]).is_err());
    }
}
