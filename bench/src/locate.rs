//! The models that nobody named: those that the conformance harness has fetched. Nothing is downloaded here, and the provider
//! is found as the harness finds it.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use conformance::pins::{Cache, Pins};

/// The models to measure: the given ones, else all that the harness has installed.
///
/// # Errors
/// One is not there, or there is none at all.
pub fn models(given: &[PathBuf]) -> Result<Vec<PathBuf>> {
    for path in given {
        ensure!(path.is_file(), "there is no model {}; --model takes the path of a GGUF file", path.display());
    }
    if !given.is_empty() {
        return Ok(given.to_vec());
    }
    let (pins, cache) = (Pins::load()?, Cache::open()?);
    let found: Vec<PathBuf> = pins.models.iter().filter_map(|pin| cache.model(pin)).collect();
    ensure!(
        !found.is_empty(),
        "no model is given, and none is installed in {}; give --model FILE, or run `conformance pin install --all`",
        cache.root().display()
    );
    Ok(found)
}

/// The last part of a path, which is what a table says of a model.
pub fn name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_named() {
        let none = Path::new("no/such/thing");
        assert!(models(&[none.to_owned()]).unwrap_err().to_string().contains("no/such/thing"));
        assert!(conformance::locate::provider(Some(none)).unwrap_err().to_string().contains("no/such/thing"));
    }
}
