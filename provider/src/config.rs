//! The configuration file: what the decoder was found to be when it was last probed.
//!
//! `npu-prefill setup` writes it from a running server, and so does `conformance pin probe`. It is TOML with these keys, all optional; other keys are
//! ignored, so that a newer probe and an older program get along:
//!
//! ```toml
//! state_version = 4          # 2, 3 or 4
//! cache_type_k = "f16"       # as llama.cpp spells them
//! cache_type_v = "f16"
//! flash_attn = true          # or "on", "off", "auto"
//! attn_rot = true            # the decoder rotates the rows of quantised caches
//! n_ctx = 8192               # 0: the model's own
//! swa_full = false
//! n_stream = 1
//! ```

use std::path::{Path, PathBuf};

use kvlayout::{CacheType, StateVersion};
use serde::Deserialize;

use crate::cli::OnOff;
use crate::env;
use crate::exit::{Error, Kind, Result};

/// Far more than any probe writes.
const MAX_BYTES: u64 = 1 << 20;

/// The file's contents, checked.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Where it was read from; `None` when there is no file.
    pub path: Option<PathBuf>,
    /// The pinned version of the state file.
    pub state_version: Option<StateVersion>,
    /// Type of the keys.
    pub cache_type_k: Option<CacheType>,
    /// Type of the values.
    pub cache_type_v: Option<CacheType>,
    /// Flash attention of the decoder.
    pub flash_attn: Option<OnOff>,
    /// Whether the decoder rotates the rows of quantised caches.
    pub attn_rot: Option<bool>,
    /// Context size of the decoder.
    pub n_ctx: Option<u32>,
    /// `--swa-full` of the decoder.
    pub swa_full: Option<bool>,
    /// Streams of the decoder's cache.
    pub n_stream: Option<u32>,
}

#[derive(Deserialize)]
struct Raw {
    state_version: Option<u32>,
    cache_type_k: Option<String>,
    cache_type_v: Option<String>,
    flash_attn: Option<BoolOrWord>,
    attn_rot: Option<bool>,
    n_ctx: Option<u32>,
    swa_full: Option<bool>,
    n_stream: Option<u32>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum BoolOrWord {
    Bool(bool),
    Word(String),
}

/// Reads `named` (from `--config` or its variable), else the file at its usual place if there is one.
///
/// # Errors
/// A named file that is missing, a file that cannot be read, and one that is not as described above.
pub fn load(named: Option<&Path>) -> Result<Config> {
    let (path, must_exist) = match named {
        Some(path) => (path.to_owned(), true),
        None => match usual_place() {
            Some(path) => (path, false),
            None => return Ok(Config::default()),
        },
    };
    let about = |error: Error| error.context(format!("the configuration {}", path.display()));
    let text = match read(&path) {
        Ok(text) => text,
        Err(e)
            if !must_exist && matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) =>
        {
            return Ok(Config::default());
        }
        // A home that this user may not look into holds no configuration for it.
        Err(e) if !must_exist && e.kind() == std::io::ErrorKind::PermissionDenied => return Ok(Config::default()),
        Err(e) => return Err(about(Error::new(Kind::Config, e))),
    };
    let mut config = parse(&text).map_err(|why| about(Error::new(Kind::Config, why)))?;
    config.path = Some(path);
    Ok(config)
}

fn read(path: &Path) -> std::io::Result<String> {
    use std::io::{Error, Read};
    let file = std::fs::File::open(path)?;
    let mut text = String::new();
    file.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(Error::other(format!("larger than {MAX_BYTES} bytes")));
    }
    Ok(text)
}

/// Where the configuration is when nobody says so.
pub fn usual_place() -> Option<PathBuf> {
    let absolute = |v: &env::Variable| v.get().map(PathBuf::from).filter(|p| p.is_absolute());
    let base = absolute(&env::XDG_CONFIG_HOME).or_else(|| absolute(&env::HOME).map(|home| home.join(".config")))?;
    Some(base.join("npu-prefill/config.toml"))
}

/// Writes a configuration, whole or not at all. One that was there is kept beside it as `.old`, if it was another.
///
/// # Errors
/// The place cannot be written to.
pub fn write(path: &Path, text: &str) -> Result<()> {
    let dir = crate::state_version::directory_of(path);
    let about = |e: std::io::Error| {
        Error::new(Kind::CannotCreate, e).context(format!("writing the configuration {}", path.display()))
    };
    std::fs::create_dir_all(dir).map_err(about)?;
    let beside = |ending: &str| {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(ending);
        dir.join(name)
    };
    if std::fs::read(path).is_ok_and(|old| old != text.as_bytes()) {
        std::fs::copy(path, beside(".old")).map_err(about)?;
    }
    let temp = beside(&format!(".{}", std::process::id()));
    std::fs::write(&temp, text).and_then(|()| std::fs::rename(&temp, path)).map_err(|e| {
        let _ = std::fs::remove_file(&temp);
        about(e)
    })
}

/// Its text, checked.
pub fn parse(text: &str) -> Result<Config, String> {
    let raw: Raw = toml::from_str(text).map_err(|e| e.to_string())?;
    let cache_type = |key: &str, value: Option<String>| {
        value.map(|v| v.parse::<CacheType>().map_err(|e| format!("{key} = \"{v}\": {e}"))).transpose()
    };
    Ok(Config {
        path: None,
        state_version: raw
            .state_version
            .map(|v| StateVersion::try_from(v).map_err(|_| format!("state_version = {v}: it is 2, 3 or 4")))
            .transpose()?,
        cache_type_k: cache_type("cache_type_k", raw.cache_type_k)?,
        cache_type_v: cache_type("cache_type_v", raw.cache_type_v)?,
        flash_attn: match raw.flash_attn {
            None => None,
            Some(BoolOrWord::Bool(on)) => Some(if on { OnOff::On } else { OnOff::Off }),
            Some(BoolOrWord::Word(w)) => Some(w.parse().map_err(|e| format!("flash_attn = \"{w}\": {e}"))?),
        },
        attn_rot: raw.attn_rot,
        n_ctx: raw.n_ctx,
        swa_full: raw.swa_full,
        n_stream: match raw.n_stream {
            Some(0) => return Err("n_stream = 0: a cache has at least one stream".to_owned()),
            n => n,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_is_read_and_unknown_keys_are_not_minded() {
        let c = parse(
            "state_version = 4\ncache_type_k = \"f16\"\ncache_type_v = \"bf16\"\nflash_attn = true\nattn_rot = false\nn_ctx = 8192\n\
             swa_full = true\nn_stream = 2\nprobed = \"http://127.0.0.1:8080\"\n[more]\nx = 1\n",
        )
        .unwrap();
        assert_eq!(c.state_version.unwrap().number(), 4);
        assert_eq!(c.cache_type_v.unwrap().to_string(), "bf16");
        assert_eq!(c.attn_rot, Some(false));
        assert_eq!((c.flash_attn, c.n_ctx, c.swa_full, c.n_stream), (Some(OnOff::On), Some(8192), Some(true), Some(2)));
        assert!(parse("").unwrap().state_version.is_none());
        assert_eq!(parse("flash_attn = \"auto\"").unwrap().flash_attn, Some(OnOff::Auto));
    }

    #[test]
    fn wrong_values_name_the_key() {
        for (text, word) in [
            ("state_version = \"4\"", "state_version"),
            ("state_version = 5", "state_version = 5"),
            ("state_version = -1", "state_version"),
            ("cache_type_k = 1", "cache_type_k"),
            ("cache_type_k = \"f12\"", "cache_type_k"),
            ("flash_attn = 3", "flash_attn"),
            ("flash_attn = \"maybe\"", "flash_attn"),
            ("attn_rot = 1", "attn_rot"),
            ("n_ctx = 1.5", "n_ctx"),
            ("n_ctx = 99999999999", "n_ctx"),
            ("swa_full = \"yes\"", "swa_full"),
            ("n_stream = 0", "n_stream"),
            ("state_version = ", "line 1"),
        ] {
            let e = parse(text).unwrap_err();
            assert!(e.contains(word), "{text}: {e}");
        }
    }
}
