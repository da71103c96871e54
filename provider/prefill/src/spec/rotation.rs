//! A model's rotations, from its metadata.

use super::{Common, Keys, MAX_WIDTH};
use crate::Error;
use crate::arch::{Mrope, Pairing, RopeRule, WindowRope};
use crate::rope::{Factors, Rope, yarn_attn_factor};

/// How many pairs in turn belong to each of M-RoPE's four axes, where RoPE turns by several positions.
pub(super) fn sections(common: &Common<'_>) -> Result<Option<[usize; 4]>, Error> {
    let Common { keys, arch, .. } = common;
    let key = "rope.dimension_sections";
    let found = match keys.gguf.get(&keys.name(key)) {
        _ if arch.mrope == Mrope::None => return Ok(None),
        Some(gguf::Value::Array(array)) => array.iter_i64()?.collect::<Result<Vec<_>, _>>()?,
        Some(_) => return Err(keys.wrong(key, "a single value", "an array of 4 numbers")),
        None if arch.mrope == Mrope::Sections => return Ok(None),
        None => return Err(keys.wrong(key, "no such key", "an array of 4 numbers")),
    };
    let wrong = || keys.wrong(key, format!("{found:?}"), "4 numbers, none negative and not all 0");
    let mut sections = [0; 4];
    if found.len() != 4 || found.iter().all(|s| *s == 0) {
        return Err(wrong());
    }
    for (section, s) in sections.iter_mut().zip(&found) {
        *section = usize::try_from(*s).ok().filter(|s| *s <= MAX_WIDTH as usize).ok_or_else(wrong)?;
    }
    if arch.mrope == Mrope::Sections && (sections[0] == 0 || sections[1] == 0) {
        return Ok(None);
    }
    Ok(Some(sections))
}

/// Which pairs do not turn: those of the fourth axis, on which text stands at 0. The other three have the token's position.
/// As `ggml_mrope_cache_init` deals pairs out; interleaved, what the sections do not reach is of the fourth axis too.
fn still(sections: [usize; 4], interleaved: bool, pairs: usize) -> Vec<bool> {
    let total: usize = sections.iter().sum();
    let one = |pair: usize| {
        let at = pair % total;
        if interleaved { at >= 3 * sections[at % 3] } else { at >= total - sections[3] }
    };
    (0..pairs).map(one).collect()
}

/// The rotation of full layers, whose key heads have `head_k` channels, then that of window layers where there are any, whose key
/// heads have `window_head`.
pub(super) fn read(
    common: &Common<'_>,
    head_k: u32,
    window_head: Option<u32>,
    mrope: Option<[usize; 4]>,
) -> Result<Vec<Rope>, Error> {
    let Common { keys, arch, n_ctx_train, .. } = common;
    let n_rot = keys.u32("rope.dimension_count")?.unwrap_or(head_k);
    let pairing = if mrope.is_some() { Pairing::Halves } else { arch.pairing };
    if arch.rope == RopeRule::Never {
        return Ok(Vec::new());
    }
    if n_rot != head_k && !arch.partial_rope {
        return Err(keys.wrong("rope.dimension_count", n_rot, format!("{head_k}, the size of a key head")));
    }
    turned(keys, "rope.dimension_count", n_rot, head_k)?;
    let base = |key: &str, default: f32| {
        let value = keys.f32(key)?.unwrap_or(default);
        if value > 0.0 { Ok(value) } else { Err(keys.wrong(key, value, "a positive number")) }
    };
    let freq_base = base("rope.freq_base", 10000.0)?;
    let key = keys.name("rope.scaling.type");
    let scaling = keys.gguf.str(&key)?.unwrap_or("linear");
    let known = ["none", "linear", "yarn"].contains(&scaling) || (scaling == "longrope" && arch.long_factors);
    if !known {
        return Err(Error::Unsupported {
            what: format!("{key} = {scaling:?}"),
            hint: "supported are none, linear, yarn, and rope_freqs.weight".into(),
        });
    }
    let factor = match keys.f32("rope.scaling.factor")? {
        Some(f) => f,
        None => keys.f32("rope.scale_linear")?.unwrap_or(0.0),
    };
    if factor < 0.0 {
        return Err(keys.wrong("rope.scaling.factor", factor, "a positive number"));
    }
    let freq_scale = if factor == 0.0 || scaling == "none" { 1.0 } else { 1.0 / factor };
    let ext_factor = if scaling == "yarn" { 1.0 } else { 0.0 };
    let attn_factor = keys.f32("rope.scaling.attn_factor")?.unwrap_or(1.0);
    let n_ctx_orig = keys.u32("rope.scaling.original_context_length")?.filter(|n| *n > 0).unwrap_or(*n_ctx_train);
    let factors = match factors(keys, "rope_freqs.weight", n_rot)?.filter(|_| arch.rope_factors) {
        Some(all) => Factors::All(all),
        None if arch.long_factors => {
            let pair = ["short", "long"].map(|kind| factors(keys, &format!("rope_factors_{kind}.weight"), n_rot));
            match pair {
                [Err(e), _] | [_, Err(e)] => return Err(e),
                [Ok(None), Ok(None)] => Factors::None,
                [Ok(Some(short)), Ok(Some(long))] => Factors::ByContext { short, long, above: n_ctx_orig },
                [Ok(short), _] => {
                    let missing = if short.is_some() { "long" } else { "short" };
                    return Err(Error::Tensor {
                        name: format!("rope_factors_{missing}.weight"),
                        found: "no such tensor".into(),
                        wanted: "both sets of factors, or none".into(),
                    });
                }
            }
        }
        None => Factors::None,
    };
    let beta = |key: &str, default: f32| -> Result<f32, Error> {
        Ok(keys.f32(key)?.filter(|_| arch.yarn_keys).unwrap_or(default))
    };
    let beta = (beta("rope.scaling.yarn_beta_fast", arch.yarn_beta_fast)?, beta("rope.scaling.yarn_beta_slow", 1.0)?);
    let log_mul = keys.f32("rope.scaling.yarn_log_multiplier")?.filter(|_| arch.yarn_keys).unwrap_or(0.0);
    let rope = Rope {
        n_rot: n_rot as usize,
        pairing,
        still: mrope.map_or_else(Vec::new, |s| still(s, arch.mrope == Mrope::Interleaved, n_rot as usize / 2)),
        freq_base,
        freq_scale,
        factors,
        ext_factor,
        attn_factor: yarn_attn_factor(ext_factor, freq_scale, log_mul, attn_factor),
        beta,
        n_ctx_orig,
    };
    let window_rope = match (arch.window, window_head) {
        (Some(rule), Some(head)) => Some(match rule.rope {
            WindowRope::Own(default) => {
                Rope { freq_base: base("rope.freq_base_swa", default)?, freq_scale: 1.0, ..rope.clone() }
            }
            WindowRope::OwnHeads(default) => {
                let key = "rope.dimension_count_swa";
                let n_rot = keys.u32(key)?.unwrap_or(n_rot);
                turned(keys, key, n_rot, head)?;
                Rope {
                    n_rot: n_rot as usize,
                    freq_base: base("rope.freq_base_swa", default)?,
                    freq_scale: 1.0,
                    factors: Factors::None,
                    ..rope.clone()
                }
            }
            WindowRope::Same => Rope { freq_base: base("rope.freq_base_swa", rope.freq_base)?, ..rope.clone() },
            WindowRope::Unscaled => Rope { freq_scale: 1.0, ext_factor: 0.0, attn_factor: 1.0, ..rope.clone() },
            WindowRope::Shared => rope.clone(),
        }),
        _ => None,
    };
    Ok([Some(rope), window_rope].into_iter().flatten().collect())
}

/// Complains when RoPE cannot turn `n_rot` channels of a head of `head`.
fn turned(keys: &Keys<'_>, key: &str, n_rot: u32, head: u32) -> Result<(), Error> {
    if n_rot == 0 || n_rot > head {
        return Err(keys.wrong(key, n_rot, format!("a number from 2 to {head}, the size of a key head")));
    }
    if !n_rot.is_multiple_of(2) {
        return Err(keys.wrong(key, n_rot, "an even number"));
    }
    Ok(())
}

/// A tensor of factors, one for each pair of channels.
fn factors(keys: &Keys<'_>, name: &str, n_rot: u32) -> Result<Option<Vec<f32>>, Error> {
    let Some(t) = keys.gguf.tensor(name) else { return Ok(None) };
    if t.n_elements() != u64::from(n_rot / 2) || t.ne[0] != t.n_elements() {
        return Err(Error::Tensor {
            name: t.name.into(),
            found: format!("{:?}", t.shape()),
            wanted: format!("[{}], one factor for each pair of channels", n_rot / 2),
        });
    }
    let factors = t.to_f32()?;
    if let Some(i) = factors.iter().position(|f| !f.is_finite() || *f == 0.0) {
        return Err(Error::Tensor {
            name: t.name.into(),
            found: format!("{} at {i}", factors[i]),
            wanted: "finite factors other than 0".into(),
        });
    }
    Ok(Some(factors))
}
