//! The environment: every variable the program reads, in one table, and nothing else reads any.
//!
//! A variable stands for the option beside it and loses to it. An empty variable is an unset one. The
//! documentation's table is printed from here (`npu-prefill environment`).

use std::ffi::OsString;

use crate::exit::{Error, Kind, Result};

/// One variable.
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// The option it stands for; empty where there is none.
    pub option: &'static str,
    /// What it does.
    pub meaning: &'static str,
}

macro_rules! variables {
    ($($(#[$doc:meta])* $id:ident = $name:literal, $option:literal, $meaning:literal;)*) => {
        $($(#[$doc])* pub const $id: Variable = Variable { name: $name, option: $option, meaning: $meaning };)*
        /// All of them, in the order in which they are documented.
        pub const ALL: &[&Variable] = &[$(&$id),*];
    };
}

variables! {
    // llama-server's own names: the program runs as a child of whoever started the server.
    CTX_SIZE = "LLAMA_ARG_CTX_SIZE", "--ctx-size", "the decoder's context size; 0 is the model's own";
    CACHE_TYPE_K = "LLAMA_ARG_CACHE_TYPE_K", "--cache-type-k", "type of the keys in the decoder's cache";
    CACHE_TYPE_V = "LLAMA_ARG_CACHE_TYPE_V", "--cache-type-v", "type of the values in the decoder's cache";
    FLASH_ATTN = "LLAMA_ARG_FLASH_ATTN", "--flash-attn", "flash attention of the decoder: on, off or auto";
    ATTN_ROT_DISABLE = "LLAMA_ATTN_ROT_DISABLE", "--attn-rot", "any number but 0: the decoder does not rotate the rows of quantised caches";
    SWA_FULL = "LLAMA_ARG_SWA_FULL", "--swa-full", "the decoder keeps all positions of sliding-window layers";
    THREADS = "LLAMA_ARG_THREADS", "--threads", "threads; 0 and -1 are the default";
    // The handoff's name.
    ELFS = "ONEBIT_HYBRID_ELFS", "--elfs", "directory of NPU kernels";
    // Ours.
    SHIM = "NPU_PREFILL_SHIM", "", "the library through which XRT is reached, instead of libxdna_shim.so beside the program";
    CONFIG = "NPU_PREFILL_CONFIG", "--config", "configuration file, instead of $XDG_CONFIG_HOME/npu-prefill/config.toml";
    STATE_VERSION = "NPU_PREFILL_STATE_VERSION", "--state-version", "version of the state file: 2, 3, 4 or auto";
    ATTN_ROT = "NPU_PREFILL_ATTN_ROT", "--attn-rot", "whether the decoder rotates the rows of quantised caches: on, off or auto";
    CHECKPOINT = "NPU_PREFILL_CHECKPOINT", "--checkpoint", "whether the decoder reads checkpoints behind a state: on, off or auto";
    N_STREAM = "NPU_PREFILL_N_STREAM", "--n-stream", "streams of the decoder's cache";
    DEVICE = "NPU_PREFILL_DEVICE", "--device", "where to compute: auto, cpu, npu, oracle or sim";
    ISA = "NPU_PREFILL_ISA", "--isa", "instruction set of the host kernels";
    CHUNK = "NPU_PREFILL_CHUNK", "--chunk", "tokens computed at a time";
    MIN_TOKENS = "NPU_PREFILL_MIN_TOKENS", "--min-tokens", "decline shorter prompts";
    MAX_MEMORY = "NPU_PREFILL_MAX_MEMORY", "--max-memory", "refuse when the estimate is higher";
    DEADLINE = "NPU_PREFILL_DEADLINE", "--deadline", "give up after this many seconds";
    API_KEY = "LLAMA_API_KEY", "", "the key of a server that wants one; only `setup` asks a server for anything";
    LOG = "NPU_PREFILL_LOG", "", "what libraries may say on stderr: off, error, warn (default), info, debug or trace";
    CACHE_SIZE = "NPU_PREFILL_CACHE_SIZE", "", "bound of the packed weights that are kept for the NPU, such as 8G; 0 keeps none; 32G unless set";
    XDG_CACHE_HOME = "XDG_CACHE_HOME", "", "packed weights are kept under it, in npu-prefill/packed; $HOME/.cache stands for an unset one";
    NO_COLOR = "NO_COLOR", "", "no colours, also on terminals";
    TERM = "TERM", "", "no colours where it is dumb";
    // Where the configuration file is.
    XDG_CONFIG_HOME = "XDG_CONFIG_HOME", "", "see NPU_PREFILL_CONFIG; ignored when not absolute";
    HOME = "HOME", "", "$HOME/.config stands for an unset XDG_CONFIG_HOME";
}

/// Those that say what the decoder's memory is like, as the configuration does.
pub const OF_THE_DECODER: &[&Variable] = &[
    &CTX_SIZE,
    &CACHE_TYPE_K,
    &CACHE_TYPE_V,
    &FLASH_ATTN,
    &SWA_FULL,
    &STATE_VERSION,
    &N_STREAM,
    &ATTN_ROT,
    &CHECKPOINT,
    &ATTN_ROT_DISABLE,
];

impl Variable {
    /// Its value, `None` when unset or empty.
    pub fn get(&self) -> Option<OsString> {
        std::env::var_os(self.name).filter(|v| !v.is_empty())
    }

    /// Its value through `parse`, whose error is what is wrong with the text.
    pub fn parse<T>(&self, parse: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>> {
        let Some(raw) = self.get() else { return Ok(None) };
        let text = raw.to_str().ok_or_else(|| "not UTF-8".to_owned());
        match text.and_then(|t| parse(t.trim())) {
            Ok(value) => Ok(Some(value)),
            Err(why) => {
                let text = format!("the environment variable {}={}: {why}", self.name, raw.to_string_lossy());
                Err(Error::new(Kind::Usage, text))
            }
        }
    }
}

/// The table for the documentation.
pub fn markdown() -> String {
    let mut out = String::from("| variable | stands for | meaning |\n|---|---|---|\n");
    for v in ALL {
        let option = if v.option.is_empty() { String::new() } else { format!("`{}`", v.option) };
        out += &format!("| `{}` | {option} | {} |\n", v.name, v.meaning);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_named_here_exists() {
        use clap::CommandFactory;
        let command = crate::cli::Cli::command();
        for v in ALL.iter().filter(|v| !v.option.is_empty()) {
            let name = v.option.strip_prefix("--").unwrap();
            let arg = command.get_arguments().find(|a| a.get_long() == Some(name)).unwrap_or_else(|| panic!("{name}"));
            let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains(v.name), "the help of {} does not name {}", v.option, v.name);
        }
    }

    #[test]
    fn no_other_file_reads_the_environment() {
        let src = concat!(env!("CARGO_MANIFEST_DIR"), "/provider/src");
        for entry in std::fs::read_dir(src).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap() != "env.rs" {
                let text = std::fs::read_to_string(&path).unwrap();
                assert!(!text.contains("env::var"), "{}", path.display());
            }
        }
    }
}
