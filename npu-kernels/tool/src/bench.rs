//! `bench`: launches, measured, with everything one has to know to compare the numbers later.

use crate::show::{Show, table};
use crate::{On, Where, open};
use anyhow::{Context as _, Result};
use npu_kernels::check::{self, Fault, Problem, Room};
use npu_kernels::{Device, Spec};
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// What kernels of the contract's shape are bound by, as others measured it.
const BYTES_PER_SECOND: f64 = 8.3e9;

const COLUMNS: &str = "unix_time,device,device_name,kernel,m,k,n,a,b,c,bytes,runs,median_ms,min_ms,gb_per_s,tops,bound_ms,\
    driver,firmware,runtime,sha256,mtime";

/// The least time of a launch, by the weights that it has to stream.
pub fn bound_ms(spec: &Spec) -> f64 {
    spec.bytes()[1] as f64 / BYTES_PER_SECOND * 1e3
}

/// Milliseconds of each of so many launches.
///
/// # Errors
/// The first that failed, or whose product is wrong.
pub fn times(device: &mut dyn Device, room: &Room, problem: &Problem, runs: u32) -> Result<Vec<f64>, Fault> {
    let mut times = Vec::new();
    for _ in 0..runs {
        times.push(check::launch(device, room, problem)?.1.as_secs_f64() * 1e3);
    }
    Ok(times)
}

/// The middle one, or the mean of the two in the middle.
pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    let n = times.len();
    if n == 0 { 0.0 } else { (times[(n - 1) / 2] + times[n / 2]) / 2.0 }
}

/// Measures those that are named.
pub fn run(on: &On, names: &[String], runs: u32, csv: Option<&Path>, show: &Show) -> Result<()> {
    let mut device = open::device(on, open::catalogue(on)?)?;
    let ids = open::pick(&*device, names)?;
    let (mut rows, mut lines) = (Vec::new(), Vec::new());
    for id in ids {
        let spec = device.kernels()[id.0].clone();
        let about = |fault: Fault| anyhow::anyhow!("{}: {fault}", spec.name);
        // A number of a kernel that is wrong is worth nothing.
        check::self_test(&mut *device, id).map_err(about)?;
        let problem = Problem::new(&spec, 1);
        let room = Room::new(&mut *device, id)?;
        let times = times(&mut *device, &room, &problem, runs);
        room.free(&mut *device);
        let times = times.map_err(about)?;
        let least = times.iter().copied().fold(f64::INFINITY, f64::min);
        let middle = median(times);
        let gb = spec.streamed() as f64 / middle / 1e6;
        let tops = spec.ops() as f64 / middle / 1e9;
        rows.push(vec![
            spec.name.clone(),
            format!("{} x {} x {}", spec.m, spec.k, spec.n),
            format!("{middle:.3}"),
            format!("{least:.3}"),
            format!("{gb:.2}"),
            format!("{tops:.3}"),
            format!("{:.3}", bound_ms(&spec)),
        ]);
        lines.push(record(&*device, &spec, runs, [middle, least, gb, tops]));
    }
    table(&["kernel", "M x K x N", "median ms", "min ms", "GB/s", "TOPS", "bound ms"], &rows)
        .iter()
        .for_each(|l| show.line(l));
    match on.device {
        Where::Cpu => show.line(show.dim("times of this processor: they say nothing about an NPU")),
        Where::Sim => show.line(show.dim("times of a double: they say nothing about an NPU")),
        Where::Npu => {}
    }
    if let Some(path) = csv {
        append(path, &lines).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn seconds(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn record(device: &dyn Device, spec: &Spec, runs: u32, [middle, least, gb, tops]: [f64; 4]) -> String {
    let info = device.info();
    let file = spec.files.iter().next();
    let mtime = file.and_then(|f| std::fs::metadata(&f.path).ok()?.modified().ok()).map(|at| seconds(at).to_string());
    let fields = [
        seconds(SystemTime::now()).to_string(),
        info.kind.to_owned(),
        info.name.clone(),
        spec.name.clone(),
        spec.m.to_string(),
        spec.k.to_string(),
        spec.n.to_string(),
        spec.a.to_string(),
        spec.b.to_string(),
        spec.c.to_string(),
        spec.streamed().to_string(),
        runs.to_string(),
        format!("{middle:.4}"),
        format!("{least:.4}"),
        format!("{gb:.3}"),
        format!("{tops:.4}"),
        format!("{:.4}", bound_ms(spec)),
        info.driver.clone(),
        info.firmware.clone(),
        info.runtime.clone(),
        file.map(|f| f.sha256.clone()).unwrap_or_default(),
        mtime.unwrap_or_default(),
    ];
    fields.map(|f| if f.contains([',', '"', '\n']) { format!("\"{}\"", f.replace('"', "\"\"")) } else { f }).join(",")
}

fn append(path: &Path, lines: &[String]) -> std::io::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    let head = if file.metadata()?.len() == 0 { format!("{COLUMNS}\n") } else { String::new() };
    file.write_all(format!("{head}{}\n", lines.join("\n")).as_bytes())
}

#[cfg(test)]
mod tests {
    #[test]
    fn medians() {
        assert_eq!(super::median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(super::median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
