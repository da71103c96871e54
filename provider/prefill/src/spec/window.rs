//! Which layers see only a window of positions, and how long it is.

use super::Common;
use super::keys::first_flags;
use crate::Error;
use crate::arch::WindowForm;

/// The window and which layers have it.
pub(super) fn read(common: &Common<'_>) -> Result<Option<(u32, Vec<bool>)>, Error> {
    let Common { keys, arch, n_layer, .. } = common;
    let Some(rule) = arch.window else { return Ok(None) };
    if rule.only_at_layers.is_some_and(|n| n != *n_layer) {
        return Ok(None);
    }
    let key = "attention.sliding_window";
    let window = match (keys.u32(key)?.or(rule.default), rule.form) {
        (Some(0), WindowForm::Chunks(_)) => {
            return Err(keys.unsupported(key, 0, "no model without chunks is known that servers can run"));
        }
        (None | Some(0), _) => return Ok(None),
        (Some(n), WindowForm::Last) => n,
        (Some(_), WindowForm::FixedFullFirst(n) | WindowForm::Chunks(n)) => n,
    };
    let key = "attention.sliding_window_pattern";
    let pattern = keys.gguf.get(&keys.name(key));
    let layers = match pattern {
        Some(gguf::Value::Array(array)) => {
            // Converters leave out blocks that only predict more tokens, and servers take an array of any length.
            if ![*n_layer, keys.n_block].map(|n| n as usize).contains(&array.len()) {
                return Err(keys.wrong(key, format!("{} entries", array.len()), format!("{n_layer}, one per layer")));
            }
            first_flags(&array, *n_layer)?
        }
        _ if rule.period == 0 => return Err(keys.wrong(key, "no array", format!("{n_layer} flags, one per layer"))),
        _ => {
            let period = keys.u32(key)?.unwrap_or(rule.period);
            let full = if matches!(rule.form, WindowForm::FixedFullFirst(_)) { 0 } else { period.saturating_sub(1) };
            (0..*n_layer).map(|i| period == 0 || i % period != full).collect()
        }
    };
    Ok(Some((window, layers)))
}
