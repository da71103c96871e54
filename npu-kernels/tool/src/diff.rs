//! `diff`: where a kernel's product is wrong, in the terms in which one thinks about a kernel: tile, row, column, and which rows
//! and columns are wrong at all.

use crate::show::{Show, table};
use crate::{On, Wrong, open};
use anyhow::{Result, bail};
use npu_kernels::catalogue::Type;
use npu_kernels::check::{self, Problem, Room};
use npu_kernels::{Spec, oracle};

/// Rows and columns around the first wrong element that are printed.
const AROUND: usize = 4;

/// Reads `32x128`.
pub fn tile(text: &str) -> Result<(usize, usize), String> {
    let wrong = || "it is rows x columns, such as 32x128".to_owned();
    let (rows, columns) = text.split_once('x').ok_or_else(wrong)?;
    match (rows.parse(), columns.parse()) {
        (Ok(r @ 1..), Ok(c @ 1..)) => Ok((r, c)),
        _ => Err(wrong()),
    }
}

/// Launches a kernel and shows the difference.
pub fn run(on: &On, name: &str, seed: u64, tile: (usize, usize), show: &Show) -> Result<()> {
    let mut device = open::device(on, open::catalogue(on)?)?;
    let ids = open::pick(&*device, &[name.to_owned()])?;
    let exact: Vec<_> = ids.iter().filter(|id| device.kernels()[id.0].name == name).copied().collect();
    let [id] = (if exact.is_empty() { ids } else { exact })[..] else { bail!("more than one kernel is called {name}") };
    let spec = device.kernels()[id.0].clone();
    let problem = Problem::new(&spec, seed);
    let room = Room::new(&mut *device, id)?;
    let launched = check::launch(&mut *device, &room, &problem);
    room.free(&mut *device);
    let (found, _) = match launched {
        Ok(done) => done,
        Err(check::Fault::Device(e)) => return Err(e.into()),
        Err(check::Fault::Wrong(wrong)) => {
            show.line(format!("{}  {}: {wrong}", show.bad("WRONG"), spec.name));
            return Err(Wrong.into());
        }
    };
    let want = oracle::gemm(&spec, &problem.a, &problem.b);
    let lines = describe(&spec, &found, &want, tile);
    if lines.is_empty() {
        show.line(format!("{}  {}, seed {seed}: every element is the oracle's", show.good("ok"), spec.name));
        return Ok(());
    }
    lines.iter().for_each(|l| show.line(l));
    Err(Wrong.into())
}

/// What is wrong, in lines; none where nothing is.
fn describe(spec: &Spec, found: &[u8], want: &[u8], (tile_rows, tile_columns): (usize, usize)) -> Vec<String> {
    let numbers = |bytes: &[u8]| -> Vec<f64> {
        let number = |b: &[u8; 4]| match spec.c.ty {
            Type::I32 => f64::from(i32::from_le_bytes(*b)),
            _ => f64::from(f32::from_le_bytes(*b)),
        };
        bytes.as_chunks::<4>().0.iter().map(number).collect()
    };
    let (found, want, n) = (numbers(found), numbers(want), spec.n);
    let differs = |at: usize| found[at] != want[at] || found[at].is_nan();
    let wrong: Vec<usize> = (0..want.len()).filter(|at| differs(*at)).collect();
    let Some(&first) = wrong.first() else { return Vec::new() };
    let (row, column) = (first / n, first % n);
    let stale = found[first] == f64::from(i32::from_le_bytes([check::POISON; 4]));
    let mut lines = vec![
        format!("{}: {} of {} elements are wrong", spec.name, wrong.len(), want.len()),
        format!(
            "first in tile ({}, {}) of {tile_rows} x {tile_columns}, row {row}, column {column}: {}{}, not {}",
            row / tile_rows,
            column / tile_columns,
            found[first],
            if stale { " (never written)" } else { "" },
            want[first]
        ),
        format!("wrong rows: {}", ranges(&distinct(wrong.iter().map(|at| at / n)))),
        format!("wrong columns: {}", ranges(&distinct(wrong.iter().map(|at| at % n)))),
    ];
    // One factor for all is a scale or a sign that is off.
    let ratio = found[first] / want[first];
    if wrong.len() > 1 && ratio.is_finite() && wrong.iter().all(|at| found[*at] == ratio * want[*at]) {
        lines.push(format!("every wrong element is {ratio} times what it should be"));
    }
    let (r0, c0) = (row.saturating_sub(1), column.saturating_sub(1));
    let shown =
        |at: usize| if differs(at) { format!("{} ({})", found[at], want[at]) } else { format!("{}", found[at]) };
    let columns: Vec<usize> = (c0..(c0 + AROUND).min(n)).collect();
    let rows: Vec<Vec<String>> = (r0..(r0 + AROUND).min(spec.m))
        .map(|r| std::iter::once(format!("row {r}")).chain(columns.iter().map(|c| shown(r * n + c))).collect())
        .collect();
    let head: Vec<String> =
        std::iter::once("found (wanted)".to_owned()).chain(columns.iter().map(|c| format!("column {c}"))).collect();
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    lines.extend(table(&head, &rows));
    lines
}

fn distinct(values: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut all: Vec<usize> = values.collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// `0-3, 8, 12-15`, and no more than a line of it.
fn ranges(values: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for v in values {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == *v => *last = *v,
            _ => parts.push((*v, *v)),
        }
    }
    let text = |(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    let more = if parts.len() > 12 { format!(", and {} more", parts.len() - 12) } else { String::new() };
    parts.iter().take(12).map(text).collect::<Vec<_>>().join(", ") + &more
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[i32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn the_place_of_a_wrong_element() {
        let spec = Spec { m: 64, ..Spec::int8("x", "O", 128, 256) };
        let want: Vec<i32> = (0..64 * 256).collect();
        assert!(describe(&spec, &bytes(&want), &bytes(&want), (32, 128)).is_empty());
        let mut found = want.clone();
        found[40 * 256 + 130] = -1;
        found[41 * 256 + 131] = -1;
        let lines = describe(&spec, &bytes(&found), &bytes(&want), (32, 128));
        assert_eq!(lines[0], "x: 2 of 16384 elements are wrong");
        assert_eq!(lines[1], "first in tile (1, 1) of 32 x 128, row 40, column 130: -1, not 10370");
        assert_eq!(lines[2..4], ["wrong rows: 40-41", "wrong columns: 130-131"]);
        assert!(lines.iter().any(|l| l.contains("-1 (10370)")), "{lines:?}");
        let halved: Vec<i32> = want.iter().map(|v| v * 2).collect();
        let lines = describe(&spec, &bytes(&halved), &bytes(&want), (32, 128));
        assert!(lines.contains(&"every wrong element is 2 times what it should be".to_owned()), "{lines:?}");
    }

    #[test]
    fn many_ranges_are_one_line() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        let odd: Vec<usize> = (0..100).map(|i| 2 * i).collect();
        assert!(ranges(&odd).ends_with("22, and 88 more"), "{}", ranges(&odd));
    }

    #[test]
    fn tiles() {
        assert_eq!(tile("32x128"), Ok((32, 128)));
        for bad in ["", "32", "0x1", "1x0", "axb", "1x1x1"] {
            assert!(tile(bad).is_err(), "{bad}");
        }
    }
}
