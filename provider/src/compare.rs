//! `compare`: how far two state files are apart. The first is the reference.

use std::fmt::Write as _;
use std::path::Path;

use kvlayout::State;
use kvlayout::compare::{self, LayerError};
use serde_json::json;

use crate::exit::{self, Error, Kind, Result};
use crate::inspect::{layer_name, read_state};
use crate::say::print;

/// Differing fields that are listed; a prompt with other tokens differs in all of them.
const LISTED: usize = 20;

/// Compares.
///
/// # Errors
/// A file cannot be read or is no state file; or, after printing, the two differ in more than their values.
pub fn run(a: &Path, b: &Path, as_json: bool) -> Result<()> {
    let parse = |path: &Path| {
        let data = read_state(path)?;
        State::parse_any(&data).map_err(|e| exit::parse_error(e).context(path.display().to_string()))
    };
    let (sa, sb) = (parse(a)?, parse(b)?);
    let structure = compare::structure(&sa, &sb);
    let (layers, not_comparable) = match compare::numeric(&sa, &sb) {
        Ok(layers) => (layers, None),
        Err(difference) => (Vec::new(), Some(difference.to_string())),
    };
    if as_json {
        let value = json!({
            "a": a.to_string_lossy(),
            "b": b.to_string_lossy(),
            "differences": structure.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "not_comparable": not_comparable,
            "layers": layers.iter().map(|l| json!({
                "section": l.section, "layer": l.layer, "part": l.part.to_string(), "rows": l.rows, "values": l.values,
                "equal": l.equal, "rel_l2": l.rel_l2, "max_abs": l.max_abs, "row_max_rel": l.row_max_rel,
                "worst_row": l.worst_row, "row_max_one_minus_cos": l.row_max_one_minus_cos, "worst_cos_row": l.worst_cos_row,
            })).collect::<Vec<_>>(),
        });
        print(&format!("{value}\n"));
    } else {
        print(&text(&structure, &layers, not_comparable.as_deref()));
    }
    match (structure.len(), not_comparable) {
        (_, Some(why)) => Err(Error::new(Kind::Data, format!("the two cannot be compared: {why}"))),
        (0, None) => Ok(()),
        (1, None) => Err(Error::new(Kind::Data, "the two differ in 1 field besides their values")),
        (n, None) => Err(Error::new(Kind::Data, format!("the two differ in {n} fields besides their values"))),
    }
}

fn text(structure: &[compare::Difference], layers: &[LayerError], not_comparable: Option<&str>) -> String {
    let mut out = String::new();
    for d in structure.iter().take(LISTED) {
        let _ = writeln!(out, "differs: {d}");
    }
    if structure.len() > LISTED {
        let _ = writeln!(out, "... {} differences in all", structure.len());
    }
    if let Some(why) = not_comparable {
        let _ = writeln!(out, "not comparable: {why}");
        return out;
    }
    let _ = writeln!(
        out,
        "{:<10} {:>6} {:>8} {:>11} {:>11} {:>11} {:>6} {:>11} {:>6}",
        "section.layer", "rows", "equal %", "rel L2", "max abs", "row rel L2", "at", "row 1-cos", "at"
    );
    for l in layers {
        let _ = writeln!(
            out,
            "{:<13} {:>6} {:>8.2} {:>11.3e} {:>11.3e} {:>11.3e} {:>6} {:>11.3e} {:>6}",
            layer_name(l.section, l.layer, l.part),
            l.rows,
            100.0 * l.equal as f64 / l.values.max(1) as f64,
            l.rel_l2,
            l.max_abs,
            l.row_max_rel,
            l.worst_row,
            l.row_max_one_minus_cos,
            l.worst_cos_row
        );
    }
    for part in [kvlayout::Part::K, kvlayout::Part::V] {
        let of = || layers.iter().filter(|l| l.part == part);
        if let Some(worst) = of().max_by(|x, y| x.rel_l2.total_cmp(&y.rel_l2)) {
            let row = of().map(|l| l.row_max_rel).fold(0.0, f64::max);
            let name = layer_name(worst.section, worst.layer, part);
            let _ = writeln!(out, "{part}: worst layer {name} with rel L2 {:.3e}, worst row {row:.3e}", worst.rel_l2);
        }
    }
    if layers.iter().all(|l| l.equal == l.values) {
        out += "all values are equal\n";
    }
    out
}
