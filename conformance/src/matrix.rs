//! The table of what is supported: architectures, servers and caches, from the results of the cases made for it.
//!
//! Those are the cases whose name begins with `arch`. What passed goes into two files: a table in a page for people, and a list
//! that is built into the provider, which says of every architecture what it was proved on. Neither is written by hand.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};

use crate::cases::Case;
use crate::fixtures;
use crate::pins::Pins;

/// The list for the provider, from the root of the tree.
pub const LIST: &str = "provider/src/proofs.tsv";
/// The page with the table.
pub const PAGE: &str = "docs/models.md";
/// The page with the [`summary`].
pub const FRONT: &str = "README.md";
const BEGIN: &str = "<!-- matrix: written by `conformance matrix` -->";
const END: &str = "<!-- matrix: end -->";

/// Whether a case is one of the table's.
pub fn is_of_matrix(case: &Case) -> bool {
    case.name.starts_with("arch")
}

/// What one architecture was proved on.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Proofs {
    /// Per server and cache types, `v4` and `f16`, the tiny models.
    pub models: BTreeMap<(String, String), BTreeSet<String>>,
}

/// The architectures of cases that passed.
pub fn proofs<'a>(passed: impl Iterator<Item = &'a Case>) -> Result<BTreeMap<String, Proofs>> {
    let mut out: BTreeMap<String, Proofs> = BTreeMap::new();
    for case in passed {
        let tiny = fixtures::find(&case.model).with_context(|| format!("no tiny model is called {}", case.model))?;
        let proofs = out.entry(tiny.arch.to_owned()).or_default();
        proofs.models.entry((case.pin.clone(), cache(case))).or_default().insert(case.model.clone());
    }
    Ok(out)
}

fn cache(case: &Case) -> String {
    let types =
        if case.type_k == case.type_v { case.type_k.to_string() } else { format!("{}/{}", case.type_k, case.type_v) };
    if case.flash_attn { types } else { format!("{types} fa-off") }
}

/// The list for the provider: architecture, server, state version, cache, models.
pub fn list(all: &BTreeMap<String, Proofs>, pins: &Pins) -> Result<String> {
    let mut out =
        String::from("# Written by `conformance matrix`: architecture, server, state version, cache, tiny models.\n");
    for (arch, proofs) in all {
        for ((pin, cache), models) in &proofs.models {
            let version = pins.server(pin)?.state_version;
            let models: Vec<_> = models.iter().map(String::as_str).collect();
            out += &format!("{arch}\t{pin}\t{version}\t{cache}\t{}\n", models.join(" "));
        }
    }
    Ok(out)
}

/// The table for people: an architecture a line, a server a column.
pub fn table(all: &BTreeMap<String, Proofs>, pins: &Pins) -> Result<String> {
    let used: BTreeSet<&String> = all.values().flat_map(|p| p.models.keys().map(|(pin, _)| pin)).collect();
    let servers: Vec<_> = pins.servers.iter().filter(|p| used.contains(&p.name)).collect();
    let mut out = format!("{BEGIN}\n{} architectures.\n\n| architecture |", all.len());
    for s in &servers {
        out += &format!(" {} {} (state version {}) |", s.package, s.version, s.state_version);
    }
    out += " tiny models |\n|---|";
    out += &"---|".repeat(servers.len() + 1);
    for (arch, proofs) in all {
        out += &format!("\n| `{arch}` |");
        for s in &servers {
            let of = proofs.models.keys().filter(|(pin, _)| *pin == s.name);
            let caches: Vec<_> = of.map(|(_, cache)| cache.as_str()).collect();
            out += &format!(" {} |", if caches.is_empty() { "-".to_owned() } else { caches.join(", ") });
        }
        let models: BTreeSet<&str> = proofs.models.values().flatten().map(String::as_str).collect();
        out += &format!(" {} |", models.into_iter().collect::<Vec<_>>().join(" "));
    }
    Ok(out + "\n" + END)
}

/// The same in short: the architectures by the state versions of the servers they were proved on.
pub fn summary(all: &BTreeMap<String, Proofs>, pins: &Pins) -> Result<String> {
    let mut by_versions: BTreeMap<BTreeSet<u32>, Vec<String>> = BTreeMap::new();
    for (arch, proofs) in all {
        let versions = proofs.models.keys().map(|(pin, _)| Ok(pins.server(pin)?.state_version));
        by_versions.entry(versions.collect::<Result<_>>()?).or_default().push(format!("`{arch}`"));
    }
    let mut out = format!(
        "{BEGIN}\n{} architectures, by the state versions of the servers that each was proved on:\n",
        all.len()
    );
    for (versions, archs) in by_versions {
        let versions: Vec<_> = versions.iter().map(u32::to_string).collect();
        out += &format!("\n- **{}** ({}): {}", versions.join(", "), archs.len(), archs.join(" "));
    }
    Ok(out + "\n\n" + END)
}

/// A page with another table.
pub fn splice(page: &str, table: &str) -> Result<String> {
    let (head, rest) = page.split_once(BEGIN).with_context(|| format!("no line {BEGIN:?}"))?;
    let (_, tail) = rest.split_once(END).with_context(|| format!("no line {END:?}"))?;
    ensure!(table.starts_with(BEGIN) && table.ends_with(END), "a table with its marks");
    Ok(format!("{head}{table}{tail}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases;
    use std::path::Path;

    /// The files in the tree name cases that there are, and every architecture there is a tiny model of.
    #[test]
    fn the_lists_in_the_tree_are_of_the_cases_there_are() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
        let pins = Pins::load().unwrap();
        let all: Vec<_> = cases::all(&pins).unwrap().into_iter().filter(is_of_matrix).collect();
        let want = proofs(all.iter()).unwrap();
        assert_eq!(read(LIST), list(&want, &pins).unwrap(), "run `conformance matrix` and commit what it writes");
        let page = read(PAGE);
        assert_eq!(splice(&page, &table(&want, &pins).unwrap()).unwrap(), page, "run `conformance matrix`");
        let front = read(FRONT);
        assert_eq!(splice(&front, &summary(&want, &pins).unwrap()).unwrap(), front, "run `conformance matrix`");
    }
}
