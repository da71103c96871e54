//! `list`: what kernels there are.

use crate::show::{Show, table};
use crate::{On, bench, open};
use anyhow::Result;

/// Prints a line for each.
pub fn run(on: &On, show: &Show) -> Result<()> {
    let catalogue = open::catalogue(on)?;
    let rows: Vec<Vec<String>> = catalogue
        .kernels()
        .iter()
        .map(|s| {
            let hash = s.files.iter().next().map_or("-", |f| &f.sha256[..12]);
            let roles = if s.roles.is_empty() { "-".to_owned() } else { s.roles.join(",") };
            vec![
                s.name.clone(),
                s.files.kind().to_owned(),
                roles,
                format!("{} x {} x {}", s.m, s.k, s.n),
                s.b.to_string(),
                format!("{:.2}", s.streamed() as f64 / 1e6),
                format!("{:.3}", bench::bound_ms(s)),
                hash.to_owned(),
            ]
        })
        .collect();
    let head = ["kernel", "kind", "roles", "M x K x N", "B", "MB", "bound ms", "sha256"];
    table(&head, &rows).iter().for_each(|l| show.line(l));
    catalogue.notes.iter().for_each(|n| show.line(show.dim(n)));
    show.line(show.dim(format!(
        "bound: B at 8.3 GB/s, as others measured it on kernels of {} rows; nothing was measured here",
        npu_kernels::catalogue::CONTRACT_M
    )));
    Ok(())
}
