//! Which layers carry a state along instead of attending, from a model's metadata.

use super::Common;
use crate::Error;
use crate::arch::{Recurrence, RecurrentLayers};

/// Per layer: whether it is recurrent.
pub(super) fn read(c: &Common<'_>) -> Result<Vec<bool>, Error> {
    let (keys, n) = (&c.keys, c.n_layer);
    let Some(kind) = c.arch.recurrence else { return Ok(vec![false; n as usize]) };
    let layers: Vec<bool> = match c.arch.recurrent_layers {
        RecurrentLayers::All => vec![true; n as usize],
        RecurrentLayers::WithoutKvHeads => {
            let heads = keys.per_layer_from(0, "attention.head_count_kv", n, super::MAX_WIDTH)?;
            let heads = heads.ok_or_else(|| {
                keys.wrong("attention.head_count_kv", "no such key", "the key-value heads of each layer")
            })?;
            heads.into_iter().map(|h| h == 0).collect()
        }
        RecurrentLayers::Interval => {
            let key = "attention.recurrent_layers";
            match keys.flags(key, n)? {
                Some(layers) => layers,
                None => {
                    let key = "full_attention_interval";
                    let every = keys.u32(key)?.unwrap_or(4);
                    if every == 0 {
                        return Err(keys.wrong(key, every, "a positive number"));
                    }
                    // Blocks that only predict attend, but nothing is made of them.
                    (1..=n).map(|i| !i.is_multiple_of(every)).collect()
                }
            }
        }
    };
    if kind == Recurrence::ShortConv && keys.u32("attention.sliding_window")?.is_some_and(|w| w > 0) {
        let window = keys.u32("attention.sliding_window")?.unwrap_or(0);
        return Err(keys.unsupported("attention.sliding_window", window, "it is not built for this architecture"));
    }
    Ok(layers)
}
