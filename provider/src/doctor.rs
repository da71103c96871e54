//! `doctor`: what of an NPU there is on this machine, what is missing, and what to do about it - as text, or as JSON to put into a
//! report. It changes nothing and needs no model.

use npu_kernels::{KernelId, check};
use serde::Serialize;

use crate::cli::{Device, DoctorArgs};
use crate::exit::{Error, Kind, Result};
use crate::job::Compute;
use crate::say::{print, say};
use crate::{device, npu};

/// How a check came out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// As it should be.
    Ok,
    /// Worth knowing.
    Note,
    /// Stands between this machine and its NPU.
    Missing,
}

/// One check.
#[derive(Debug, Serialize)]
pub struct Line {
    /// Of what.
    pub check: &'static str,
    /// How it came out.
    pub state: State,
    /// What was found, and what to do where something is to be done.
    pub found: String,
}

/// All of them.
#[derive(Debug, Serialize)]
struct Report {
    npu_prefill: &'static str,
    usable: bool,
    checks: Vec<Line>,
}

fn line(check: &'static str, result: Result<String, String>) -> Line {
    match result {
        Ok(found) => Line { check, state: State::Ok, found },
        Err(found) => Line { check, state: State::Missing, found },
    }
}

/// Checks and prints.
///
/// # Errors
/// The NPU cannot be used: the report is printed all the same.
pub fn run(args: &DoctorArgs) -> Result<()> {
    let mut notes = Vec::new();
    let compute = Compute::of_device(&args.device, &mut notes)?;
    notes.iter().for_each(say);
    let mut checks = vec![system()];
    match npu::node() {
        Ok(node) => {
            checks.push(line("device node", Ok(node.path)));
            checks.push(line("driver", Ok(node.driver)));
            let known = Line { check: "firmware", state: State::Ok, found: node.firmware };
            checks.push(if known.found.is_empty() {
                Line { state: State::Note, found: "the driver does not tell its version".to_owned(), ..known }
            } else {
                known
            });
        }
        Err(why) => checks.push(line("device node", Err(why))),
    }
    checks.push(line("XRT", npu::runtime()));
    checks.push(line("locked memory", npu::memlock()));
    checks.push(iommu());
    kernels(&compute, &mut checks);
    let usable = checks.iter().all(|l| l.state != State::Missing);
    let report = Report { npu_prefill: crate::cli::VERSION, usable, checks };
    if args.json {
        print(&(serde_json::to_string_pretty(&report).unwrap_or_default() + "\n"));
    } else {
        print(&text(&report));
    }
    if usable {
        Ok(())
    } else {
        Err(Error::new(Kind::Unavailable, "the NPU cannot be used; see the lines marked missing"))
    }
}

fn text(report: &Report) -> String {
    let mut out = format!("npu-prefill {}\n", report.npu_prefill);
    for Line { check, state, found } in &report.checks {
        let word = match state {
            State::Ok => "ok",
            State::Note => "note",
            State::Missing => "missing",
        };
        out += &format!("{word:<8} {check:<14} {found}\n");
    }
    out
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|s| s.trim().to_owned()).filter(|s| !s.is_empty())
}

fn system() -> Line {
    let kernel = read("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".to_owned());
    let cpu = read("/proc/cpuinfo")
        .and_then(|s| s.lines().find_map(|l| Some(l.strip_prefix("model name")?.split_once(':')?.1.trim().to_owned())));
    Line { check: "system", state: State::Ok, found: format!("Linux {kernel}, {}", cpu.unwrap_or_default()) }
}

/// The NPU shares the process's memory through the IOMMU.
fn iommu() -> Line {
    let options = read("/proc/cmdline").unwrap_or_default();
    let off = ["amd_iommu=off", "iommu=off", "iommu=pt", "iommu.passthrough=1"];
    let found = options.split_whitespace().find(|o| off.contains(o));
    let units = std::fs::read_dir("/sys/class/iommu").map_or(0, Iterator::count);
    line(
        "IOMMU",
        match (found, units) {
            (Some(option), _) => {
                Err(format!("{option} on the kernel's command line: boot with amd_iommu=on iommu.passthrough=0"))
            }
            (None, 0) => {
                Err("the kernel has none: turn it on in the firmware's setup and boot with amd_iommu=on".to_owned())
            }
            (None, n) => Ok(format!("{n} units")),
        },
    )
}

/// The kernels, and each of them tested where there is something to test it on.
fn kernels(compute: &Compute, checks: &mut Vec<Line>) {
    let Some(dir) = &compute.elfs else {
        let found =
            "no directory of kernels is given (--elfs, ONEBIT_HYBRID_ELFS); none come with this program".to_owned();
        checks.push(line("kernels", Err(found)));
        return;
    };
    let catalogue = match device::catalogue(dir) {
        Ok(catalogue) => catalogue,
        Err(e) => {
            checks.push(line("kernels", Err(e.to_string())));
            return;
        }
    };
    let n = catalogue.kernels().len();
    let found = format!("{n} in {}", dir.display());
    checks.push(line("kernels", if n > 0 { Ok(found) } else { Err(found) }));
    checks.extend(catalogue.notes.iter().map(|n| Line { check: "kernels", state: State::Note, found: n.clone() }));
    if n == 0 {
        return;
    }
    let mut opened = match device::raw(compute, catalogue) {
        Ok(opened) => opened,
        Err(e) => {
            checks.push(line("self-test", Err(format!("no device to test them on: {e}"))));
            return;
        }
    };
    for id in (0..n).map(KernelId) {
        let name = opened.kernels()[id.0].name.clone();
        let result = check::self_test(&mut *opened, id);
        let gone = matches!(&result, Err(check::Fault::Device(e)) if e.ends_device());
        checks.push(line(
            "self-test",
            match result {
                Ok(()) => Ok(format!("{name}: every row is right ({})", what_it_shows(compute.device))),
                Err(fault) => Err(format!("{name}: {fault}; it will not be used")),
            },
        ));
        if gone {
            break;
        }
    }
}

/// What a kernel that passes on a device is proved by.
pub fn what_it_shows(device: Device) -> &'static str {
    match device {
        Device::Oracle | Device::Cpu => "computed by the oracle, not by the kernel's file",
        Device::Sim => "on the real XRT over the double, whose arithmetic is the oracle",
        Device::Auto | Device::Npu => "on the device",
    }
}
