//! The line on stdout that says a handoff was made.

use std::time::Duration;

use serde::Serialize;

/// What was done. Times are in milliseconds.
#[derive(Debug, Serialize)]
pub struct Receipt<'a> {
    /// Computing the keys and values, from the first layer to the last, their conversion and writing included.
    pub prefill_ms: f64,
    /// The route: `file` or `shared`.
    pub route: &'static str,
    /// Ids handed over.
    pub n_tokens: usize,
    /// Their rate.
    pub tokens_per_second: f64,
    /// Version of the state file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_version: Option<u32>,
    /// How the version was come by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_version_from: Option<String>,
    /// Whether the state has a checkpoint behind it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub checkpoint: bool,
    /// The decoder's number for its shared memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_id: Option<u64>,
    /// Regions of the shared memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub regions: Option<usize>,
    /// Size of the state file, or of the rows in shared memory.
    pub bytes: u64,
    /// Converting and writing rows, and publishing the file or telling devices of the rows.
    pub write_ms: f64,
    /// Opening the model and preparing its weights.
    pub load_ms: f64,
    /// Each layer of the prefill, in their order, to a tenth.
    pub layer_ms: Vec<f64>,
    /// From the start of the process to its first matrix product.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_gemm_ms: Option<f64>,
    /// From the start of the process.
    pub total_ms: f64,
    /// Threads.
    pub threads: usize,
    /// Tokens computed at a time.
    pub chunk: usize,
    /// Where it was computed.
    pub device: &'a str,
    /// What a device beside the host did of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload: Option<crate::device::Report>,
    /// The host's kernels.
    pub kernel: &'a str,
    /// The model's architecture.
    pub architecture: &'a str,
    /// Type of the keys.
    pub cache_type_k: String,
    /// Type of the values.
    pub cache_type_v: String,
    /// Whether the decoder is expected to use flash attention.
    pub flash_attn: bool,
    /// Most memory the process had resident, pages of the mapped model and of the decoder's memory included.
    pub peak_rss_bytes: Option<u64>,
    /// What had been estimated.
    pub memory_estimate_bytes: u64,
    /// The state file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub out: Option<String>,
    /// Version of this program.
    pub npu_prefill: &'static str,
}

impl Receipt<'_> {
    /// Prints it. Whether anyone reads it changes nothing: the handoff is made.
    pub fn print(&self) {
        let line = serde_json::to_string(self).unwrap_or_else(|_| format!("{{\"prefill_ms\":{}}}", self.prefill_ms));
        crate::say::report(&line);
    }
}

/// Milliseconds to the microsecond.
pub fn ms(d: Duration) -> f64 {
    round(d.as_secs_f64() * 1e3)
}

/// To three decimals; whatever is not finite is 0, since JSON has no word for it.
pub fn round(value: f64) -> f64 {
    if value.is_finite() { (value * 1e3).round() / 1e3 } else { 0.0 }
}
