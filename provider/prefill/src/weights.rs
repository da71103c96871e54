//! A model's tensors, by what they do. Every one is checked against the spec, and a tensor that nothing here asks for
//! is a reason to refuse the file: it would have changed the result.

use crate::Error;
use crate::arch::Presence;
use crate::spec::{LayerSpec, Spec};
use gguf::{GgmlType, Gguf, Tensor};
use npu_kernels::{WeightType, WeightView};
use std::collections::HashSet;

/// A projection.
#[derive(Clone, Debug)]
pub struct Linear<'g> {
    /// The matrix: rows are outputs.
    pub weight: WeightView<'g>,
    /// Added to the product.
    pub bias: Option<Vec<f32>>,
}

/// One layer's tensors.
#[derive(Debug)]
#[allow(missing_docs)] // llama.cpp's tensor names
pub struct LayerWeights<'g> {
    pub attn_norm: Vec<f32>,
    pub q: Linear<'g>,
    pub k: Linear<'g>,
    pub v: Linear<'g>,
    pub attn_q_norm: Option<Vec<f32>>,
    pub attn_k_norm: Option<Vec<f32>>,
    pub o: Linear<'g>,
    pub attn_post_norm: Option<Vec<f32>>,
    pub ffn_norm: Vec<f32>,
    pub gate: Linear<'g>,
    pub up: Linear<'g>,
    pub down: Linear<'g>,
    pub ffn_post_norm: Option<Vec<f32>>,
}

/// All tensors that a prefill uses.
#[derive(Debug)]
pub struct Weights<'g> {
    /// The embedding matrix, one row per token.
    pub token_embd: Tensor<'g>,
    /// Per layer.
    pub layers: Vec<LayerWeights<'g>>,
}

/// The kernel's name of a file's type.
pub fn weight_type(ty: GgmlType) -> Option<WeightType> {
    Some(match ty {
        GgmlType::F32 => WeightType::F32,
        GgmlType::F16 => WeightType::F16,
        GgmlType::BF16 => WeightType::Bf16,
        GgmlType::Q4_0 => WeightType::Q4_0,
        GgmlType::Q4_1 => WeightType::Q4_1,
        GgmlType::Q5_0 => WeightType::Q5_0,
        GgmlType::Q5_1 => WeightType::Q5_1,
        GgmlType::Q8_0 => WeightType::Q8_0,
        GgmlType::Q2_K => WeightType::Q2_K,
        GgmlType::Q3_K => WeightType::Q3_K,
        GgmlType::Q4_K => WeightType::Q4_K,
        GgmlType::Q5_K => WeightType::Q5_K,
        GgmlType::Q6_K => WeightType::Q6_K,
        GgmlType::IQ4_NL => WeightType::Iq4Nl,
        GgmlType::IQ4_XS => WeightType::Iq4Xs,
        GgmlType::MXFP4 => WeightType::Mxfp4,
        _ => return None,
    })
}

fn supported_types() -> String {
    let all = (0..64).filter_map(GgmlType::from_id).filter(|t| weight_type(*t).is_some());
    all.map(|t| t.to_string()).collect::<Vec<_>>().join(" ")
}

struct Loader<'g> {
    gguf: &'g Gguf,
    used: HashSet<&'g str>,
}

impl<'g> Loader<'g> {
    fn find(&mut self, name: &str) -> Option<Tensor<'g>> {
        let tensor = self.gguf.tensor(name)?;
        self.used.insert(tensor.name);
        Some(tensor)
    }

    fn vector(&mut self, name: &str, n: usize, presence: Presence) -> Result<Option<Vec<f32>>, Error> {
        let tensor = match (self.gguf.tensor(name), presence) {
            // Left unused, so that it is refused with all other tensors nobody asks for.
            (Some(_), Presence::Never) | (None, Presence::Never | Presence::Optional) => return Ok(None),
            (None, Presence::Required) => return Err(missing(name, &[n])),
            (Some(t), _) => t,
        };
        self.used.insert(tensor.name);
        check_shape(&tensor, &[n])?;
        let values = tensor.to_f32()?;
        if let Some(i) = values.iter().position(|v| !v.is_finite()) {
            let found = format!("{} at {i}", values[i]);
            return Err(Error::Tensor { name: name.into(), found, wanted: "finite values".into() });
        }
        Ok(Some(values))
    }

    fn matrix(&mut self, name: &str, k: usize, n: usize) -> Result<WeightView<'g>, Error> {
        let tensor = self.find(name).ok_or_else(|| missing(name, &[k, n]))?;
        check_shape(&tensor, &[k, n])?;
        let ty = weight_type(tensor.ty).ok_or_else(|| Error::Unsupported {
            what: format!("weight type {} of tensor {name:?}", tensor.ty),
            hint: format!("supported are {}", supported_types()),
        })?;
        WeightView::new(ty, n, k, tensor.data).ok_or_else(|| Error::Tensor {
            name: name.into(),
            found: format!("{} bytes", tensor.data.len()),
            wanted: format!("{n} rows of {k} values of {}", tensor.ty),
        })
    }

    fn linear(&mut self, stem: &str, k: usize, n: usize, bias: Presence) -> Result<Linear<'g>, Error> {
        let weight = self.matrix(&format!("{stem}.weight"), k, n)?;
        Ok(Linear { weight, bias: self.vector(&format!("{stem}.bias"), n, bias)? })
    }

    /// Query, key and value projections: three tensors, or one with their rows below each other.
    fn qkv(&mut self, prefix: &str, k: usize, n: [usize; 3], bias: Presence) -> Result<[Linear<'g>; 3], Error> {
        let fused = format!("{prefix}.attn_qkv");
        if self.gguf.tensor(&format!("{fused}.weight")).is_none() {
            let mut part = |name: &str, n| self.linear(&format!("{prefix}.{name}"), k, n, bias);
            return Ok([part("attn_q", n[0])?, part("attn_k", n[1])?, part("attn_v", n[2])?]);
        }
        let all = self.linear(&fused, k, n.iter().sum(), bias)?;
        let mut from = 0;
        Ok(n.map(|n| {
            let weight = all.weight.rows(from, n).expect("the three parts add up to the whole");
            let bias = all.bias.as_ref().map(|b| b[from..from + n].to_vec());
            from += n;
            Linear { weight, bias }
        }))
    }
}

fn missing(name: &str, shape: &[usize]) -> Error {
    Error::Tensor { name: name.into(), found: "no such tensor".into(), wanted: format!("one of shape {shape:?}") }
}

fn check_shape(tensor: &Tensor<'_>, want: &[usize]) -> Result<(), Error> {
    let same = (0..4).all(|i| tensor.ne[i] == want.get(i).map_or(1, |n| *n as u64));
    if same {
        return Ok(());
    }
    Err(Error::Tensor {
        name: tensor.name.into(),
        found: format!("shape {:?}", tensor.shape()),
        wanted: format!("{want:?}, by the model's hyper-parameters"),
    })
}

impl<'g> Weights<'g> {
    /// Finds and checks every tensor.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a missing or misshapen tensor, [`Error::Unsupported`] for a weight type that is not built
    /// and for a tensor that is not known.
    pub fn load(gguf: &'g Gguf, spec: &Spec) -> Result<Weights<'g>, Error> {
        let mut loader = Loader { gguf, used: HashSet::new() };
        // Read or skipped by name: the output side is never computed; rope factors are in the spec.
        for name in ["output_norm.weight", "output.weight", "output.bias"] {
            loader.find(name);
        }
        if spec.arch.rope_factors {
            loader.find("rope_freqs.weight");
        }
        let n_vocab = spec.n_vocab as usize;
        let token_embd = loader.find("token_embd.weight").ok_or_else(|| missing("token_embd.weight", &[]))?;
        check_shape(&token_embd, &[spec.n_embd, n_vocab])?;
        if !gguf::dequant::is_supported(token_embd.ty) {
            return Err(Error::Unsupported {
                what: format!("weight type {} of tensor \"token_embd.weight\"", token_embd.ty),
                hint: format!("supported are {}", supported_types()),
            });
        }
        let layers = (0..spec.layers.len())
            .map(|i| layer(&mut loader, spec, &spec.layers[i], i))
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(unknown) = gguf.tensors().find(|t| !loader.used.contains(t.name)) {
            return Err(Error::Unsupported {
                what: format!("tensor {:?} in a model of architecture {}", unknown.name, spec.arch.name),
                hint: "its part in the computation is not known, and leaving it out would give a wrong cache".into(),
            });
        }
        Ok(Weights { token_embd, layers })
    }

    /// The distinct weight types that meet the same activations: (of the embedding's width, of the attention's, of the
    /// feed-forward network's).
    pub fn types(&self) -> [Vec<WeightType>; 3] {
        let mut sets: [Vec<WeightType>; 3] = Default::default();
        for layer in &self.layers {
            let uses = [
                (0, &layer.q),
                (0, &layer.k),
                (0, &layer.v),
                (1, &layer.o),
                (0, &layer.gate),
                (0, &layer.up),
                (2, &layer.down),
            ];
            for (set, linear) in uses {
                if !sets[set].contains(&linear.weight.ty()) {
                    sets[set].push(linear.weight.ty());
                }
            }
        }
        sets
    }
}

fn layer<'g>(loader: &mut Loader<'g>, spec: &Spec, l: &LayerSpec, i: usize) -> Result<LayerWeights<'g>, Error> {
    let arch = spec.arch;
    let prefix = format!("blk.{i}");
    let post = if arch.post_norms { Presence::Required } else { Presence::Never };
    let name = |what: &str| format!("{prefix}.{what}.weight");
    let (e, hk, hv) = (spec.n_embd, spec.head_k, spec.head_v);
    let required = |v: Option<Vec<f32>>| v.expect("the loader returns required vectors or an error");
    let [q, k, v] = loader.qkv(&prefix, e, [l.n_head * hk, l.n_head_kv * hk, l.n_head_kv * hv], arch.qkv_bias)?;
    Ok(LayerWeights {
        attn_norm: required(loader.vector(&name("attn_norm"), e, Presence::Required)?),
        q,
        k,
        v,
        attn_q_norm: loader.vector(&name("attn_q_norm"), hk, arch.qk_norm)?,
        attn_k_norm: loader.vector(&name("attn_k_norm"), hk, arch.qk_norm)?,
        o: loader.linear(&format!("{prefix}.attn_output"), l.n_head * hv, e, arch.other_bias)?,
        attn_post_norm: loader.vector(&name("post_attention_norm"), e, post)?,
        ffn_norm: required(loader.vector(&name("ffn_norm"), e, Presence::Required)?),
        gate: loader.linear(&format!("{prefix}.ffn_gate"), e, l.n_ff, arch.other_bias)?,
        up: loader.linear(&format!("{prefix}.ffn_up"), e, l.n_ff, arch.other_bias)?,
        down: loader.linear(&format!("{prefix}.ffn_down"), l.n_ff, e, arch.other_bias)?,
        ffn_post_norm: loader.vector(&name("post_ffw_norm"), e, post)?,
    })
}
