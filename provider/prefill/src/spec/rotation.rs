//! A model's rotations, from its metadata.

use super::Common;
use crate::Error;
use crate::rope::{Rope, yarn_attn_factor};

/// The rotation of full layers, then that of window layers where there are any.
pub(super) fn read(common: &Common<'_>, head_k: u32, windowed: bool) -> Result<Vec<Rope>, Error> {
    let Common { keys, arch, n_ctx_train, .. } = common;
    let n_rot = keys.u32("rope.dimension_count")?.unwrap_or(head_k);
    if n_rot != head_k && !arch.partial_rope {
        return Err(keys.wrong("rope.dimension_count", n_rot, format!("{head_k}, the size of a key head")));
    }
    if n_rot == 0 || n_rot > head_k {
        return Err(keys.wrong(
            "rope.dimension_count",
            n_rot,
            format!("a number from 2 to {head_k}, the size of a key head"),
        ));
    }
    if !n_rot.is_multiple_of(2) {
        return Err(keys.wrong("rope.dimension_count", n_rot, "an even number"));
    }
    let base = |key: &str, default: f32| {
        let value = keys.f32(key)?.unwrap_or(default);
        if value > 0.0 { Ok(value) } else { Err(keys.wrong(key, value, "a positive number")) }
    };
    let freq_base = base("rope.freq_base", 10000.0)?;
    let key = keys.name("rope.scaling.type");
    let scaling = keys.gguf.str(&key)?.unwrap_or("linear");
    if !["none", "linear", "yarn"].contains(&scaling) {
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
    let factors = match keys.gguf.tensor("rope_freqs.weight") {
        Some(t) if arch.rope_factors => {
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
            Some(factors)
        }
        _ => None,
    };
    let rope = Rope {
        n_rot: n_rot as usize,
        freq_base,
        freq_scale,
        factors,
        ext_factor,
        attn_factor: yarn_attn_factor(ext_factor, freq_scale, attn_factor),
        beta: (32.0, 1.0),
        n_ctx_orig,
    };
    let window_rope = match arch.window {
        Some(rule) if windowed => {
            let freq_base = base("rope.freq_base_swa", rule.rope_base.unwrap_or(freq_base))?;
            let freq_scale = if rule.rope_base.is_some() { 1.0 } else { freq_scale };
            Some(Rope { freq_base, freq_scale, ..rope.clone() })
        }
        _ => None,
    };
    Ok([Some(rope), window_rope].into_iter().flatten().collect())
}
