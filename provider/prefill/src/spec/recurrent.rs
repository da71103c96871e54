//! Which layers carry a state along instead of attending, or beside it, from a model's metadata.

use super::{Common, MAX_WIDTH};
use crate::Error;
use crate::arch::{Recurrence, RecurrentLayers};

/// What a layer mixes positions by.
#[derive(Copy, Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Mixes {
    /// Attention.
    pub attends: bool,
    /// A state.
    pub recurrent: bool,
    /// One matrix for every position alone.
    pub linear: bool,
}

/// Per layer.
pub(super) fn read(c: &Common<'_>) -> Result<Vec<Mixes>, Error> {
    let (keys, n) = (&c.keys, c.n_layer);
    if c.arch.lone_halves {
        return lone_halves(c);
    }
    let either = |recurrent: bool| Mixes { attends: !recurrent, recurrent, linear: false };
    let Some(kind) = c.arch.recurrence else { return Ok(vec![either(false); n as usize]) };
    let heads_kv = || {
        let heads = keys.per_layer_from(0, "attention.head_count_kv", n, MAX_WIDTH)?;
        heads.ok_or_else(|| keys.wrong("attention.head_count_kv", "no such key", "the key-value heads of each layer"))
    };
    let layers: Vec<Mixes> = match c.arch.recurrent_layers {
        RecurrentLayers::All => vec![either(true); n as usize],
        RecurrentLayers::BesideAttention => vec![Mixes { recurrent: true, ..either(false) }; n as usize],
        RecurrentLayers::WithoutKvHeads => heads_kv()?.into_iter().map(|h| either(h == 0)).collect(),
        RecurrentLayers::OneHalf => {
            let key = "feed_forward_length";
            let widths = keys.per_layer_from(0, key, n, MAX_WIDTH)?;
            let widths = widths.ok_or_else(|| keys.wrong(key, "no such key", "the width of each layer's network"))?;
            let layer = |(heads, width): (u32, u32)| match width {
                0 => either(heads == 0),
                _ => Mixes::default(),
            };
            let layers: Vec<Mixes> = heads_kv()?.into_iter().zip(widths).map(layer).collect();
            if layers.iter().all(|l| !l.attends && !l.recurrent) {
                return Err(keys.wrong(key, "a width in every layer", "0 in those that mix positions"));
            }
            layers
        }
        RecurrentLayers::Interval => {
            let key = "attention.recurrent_layers";
            match keys.flags(key, n)? {
                Some(layers) => layers.into_iter().map(either).collect(),
                None => {
                    let key = "full_attention_interval";
                    let every = keys.u32(key)?.unwrap_or(4);
                    if every == 0 {
                        return Err(keys.wrong(key, every, "a positive number"));
                    }
                    (1..=n).map(|i| either(!i.is_multiple_of(every))).collect()
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

/// By heads: layers attend that have both kinds, those with query heads alone have one matrix.
fn lone_halves(c: &Common<'_>) -> Result<Vec<Mixes>, Error> {
    let (keys, n) = (&c.keys, c.n_layer);
    let [key, key_kv] = ["attention.head_count", "attention.head_count_kv"];
    let heads = keys
        .per_layer_from(0, key, n, MAX_WIDTH)?
        .ok_or_else(|| keys.wrong(key, "no such key", "the number of query heads"))?;
    let heads_kv = keys.per_layer_from(0, key_kv, n, MAX_WIDTH)?.unwrap_or_else(|| heads.clone());
    if heads[0] == 0 || heads_kv[0] == 0 {
        // Servers measure heads by the first layer's, and rows of no bytes at the beginning look like another kind of memory.
        let (key, wanted) = if heads[0] == 0 {
            (key, "query heads in the first layer, by which heads are measured")
        } else {
            (key_kv, "key-value heads in the first layer; a state that begins with one without keys is not known")
        };
        return Err(keys.wrong(key, 0, wanted));
    }
    if let Some((_, kv)) = heads.iter().zip(&heads_kv).find(|(h, kv)| **h == 0 && **kv > 0) {
        return Err(keys.wrong(key_kv, kv, "0 in a layer without query heads"));
    }
    let widths = keys.per_layer_from(0, "feed_forward_length", n, MAX_WIDTH)?.unwrap_or_default();
    let layer = |(i, (heads, kv)): (usize, (u32, u32))| Mixes {
        attends: kv > 0,
        // What the matrix gives is lost where no network follows.
        linear: heads > 0 && kv == 0 && widths.get(i).is_some_and(|n| *n > 0),
        recurrent: false,
    };
    Ok(heads.into_iter().zip(heads_kv).enumerate().map(layer).collect())
}
