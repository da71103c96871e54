//! A model's tensors, by what they do. Every one is checked against the spec, and a tensor that nothing here asks for
//! is a reason to refuse the file: it would have changed the result.

use crate::Error;
use crate::arch::{NormKind, Presence};
use crate::layer::LayerWeights;
use crate::layer::altup::AltUpTable;
use crate::layer::per_layer::PerLayerTable;
use crate::spec::Spec;
use gguf::{GgmlType, Gguf, Tensor};
use npu_kernels::host::rowops;
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

impl<'g> Linear<'g> {
    /// `n` outputs from `first` on.
    ///
    /// # Panics
    /// When there are not so many.
    pub fn rows(&self, first: usize, n: usize) -> Linear<'g> {
        let weight = self.weight.rows(first, n).expect("rows of the matrix");
        Linear { weight, bias: self.bias.as_ref().map(|b| b[first..first + n].to_vec()) }
    }
}

/// A norm of a row, or of parts of it.
#[derive(Clone, Default, Debug)]
pub struct Norm {
    /// Multiplies what was normed.
    pub weight: Option<Vec<f32>>,
    /// Is added then.
    pub bias: Option<Vec<f32>>,
}

impl Norm {
    /// Norms `x` into `out`, which is as long.
    #[inline(always)]
    pub(crate) fn apply(&self, kind: NormKind, eps: f32, x: &[f32], out: &mut [f32]) {
        self.apply_part(0, kind, eps, x, out);
    }

    /// The same with the weights from `from` on.
    #[inline(always)]
    pub(crate) fn apply_part(&self, from: usize, kind: NormKind, eps: f32, x: &[f32], out: &mut [f32]) {
        let [weight, bias] = [&self.weight, &self.bias].map(|v| v.as_ref().map(|v| &v[from..][..x.len()]));
        match (kind, weight) {
            (NormKind::Rms, Some(weight)) => {
                rowops::rms_norm(x, weight, eps, out);
                if let Some(bias) = bias {
                    rowops::add(out, bias);
                }
            }
            (NormKind::Rms, None) => rowops::rms_norm_plain(x, eps, out),
            (NormKind::Layer, weight) => rowops::layer_norm(x, weight, bias, eps, out),
        }
    }
}

/// All tensors that a prefill uses.
#[derive(Debug)]
pub struct Weights<'g> {
    /// The embedding matrix, one row per token.
    pub token_embd: Tensor<'g>,
    /// One row per position, added to the embeddings.
    pub positions: Option<Tensor<'g>>,
    /// A norm of the embeddings.
    pub norm: Option<Norm>,
    /// A second embedding with a part for each layer.
    pub per_layer: Option<PerLayerTable<'g>>,
    /// Several residual streams.
    pub altup: Option<AltUpTable<'g>>,
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
        GgmlType::IQ1_S => WeightType::Iq1S,
        GgmlType::IQ1_M => WeightType::Iq1M,
        GgmlType::IQ2_XXS => WeightType::Iq2Xxs,
        GgmlType::IQ2_XS => WeightType::Iq2Xs,
        GgmlType::IQ2_S => WeightType::Iq2S,
        GgmlType::IQ3_XXS => WeightType::Iq3Xxs,
        GgmlType::IQ3_S => WeightType::Iq3S,
        GgmlType::TQ1_0 => WeightType::Tq1_0,
        GgmlType::TQ2_0 => WeightType::Tq2_0,
        GgmlType::NVFP4 => WeightType::Nvfp4,
        GgmlType::Q1_0 => WeightType::Q1_0,
        GgmlType::Q2_0 => WeightType::Q2_0,
        _ => return None,
    })
}

fn supported_types() -> String {
    let all = (0..64).filter_map(GgmlType::from_id).filter(|t| weight_type(*t).is_some());
    all.map(|t| t.to_string()).collect::<Vec<_>>().join(" ")
}

/// Hands out a file's tensors, checked, and remembers which ones were asked for.
pub(crate) struct Loader<'g> {
    gguf: &'g Gguf,
    used: HashSet<&'g str>,
    /// Of norms of the residual stream.
    norm_bias: Presence,
}

impl<'g> Loader<'g> {
    /// Whether the file has a tensor; does not count as asking for it.
    pub fn has(&self, name: &str) -> bool {
        self.gguf.tensor(name).is_some()
    }

    /// Counts all tensors whose names begin so as asked for.
    pub fn pass_over(&mut self, prefix: &str) {
        self.used.extend(self.gguf.tensors().map(|t| t.name).filter(|name| name.starts_with(prefix)));
    }

    /// A tensor, if it is there.
    pub fn find(&mut self, name: &str) -> Option<Tensor<'g>> {
        let tensor = self.gguf.tensor(name)?;
        self.used.insert(tensor.name);
        Some(tensor)
    }

    /// A row of `n` finite numbers.
    pub fn vector(&mut self, name: &str, n: usize, presence: Presence) -> Result<Option<Vec<f32>>, Error> {
        self.numbers(name, &[n], presence)
    }

    fn numbers(&mut self, name: &str, shape: &[usize], presence: Presence) -> Result<Option<Vec<f32>>, Error> {
        let tensor = match (self.gguf.tensor(name), presence) {
            // Left unused, so that it is refused with all other tensors nobody asks for.
            (Some(_), Presence::Never) | (None, Presence::Never | Presence::Optional) => return Ok(None),
            (None, Presence::Required) => return Err(missing(name, shape)),
            (Some(t), _) => t,
        };
        self.used.insert(tensor.name);
        check_shape(&tensor, shape)?;
        finite(name, tensor.to_f32()?).map(Some)
    }

    /// A tensor of finite numbers that must be there.
    pub fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
        let tensor = self.find(name).ok_or_else(|| missing(name, shape))?;
        check_shape(&tensor, shape)?;
        finite(name, tensor.to_f32()?)
    }

    /// A matrix of `n` outputs of `k` inputs.
    pub fn matrix(&mut self, name: &str, k: usize, n: usize) -> Result<WeightView<'g>, Error> {
        let tensor = self.find(name).ok_or_else(|| missing(name, &[k, n]))?;
        check_shape(&tensor, &[k, n])?;
        view(&tensor, k, n)
    }

    /// `count` matrices of `n` outputs of `k` inputs, one behind the other in one tensor.
    pub fn matrices(&mut self, name: &str, k: usize, n: usize, count: usize) -> Result<Vec<WeightView<'g>>, Error> {
        let tensor = self.find(name).ok_or_else(|| missing(name, &[k, n, count]))?;
        check_shape(&tensor, &[k, n, count])?;
        let all = view(&tensor, k, n * count)?;
        Ok((0..count).map(|i| all.rows(i * n, n).expect("as many rows as the shape says")).collect())
    }

    /// A table of `count` rows of `n` values each, to be looked up row by row.
    pub fn rows(&mut self, name: &str, n: usize, count: usize) -> Result<Tensor<'g>, Error> {
        let tensor = self.find(name).ok_or_else(|| missing(name, &[n, count]))?;
        check_shape(&tensor, &[n, count])?;
        if gguf::dequant::is_supported(tensor.ty) {
            return Ok(tensor);
        }
        Err(Error::Unsupported {
            what: format!("weight type {} of tensor {name:?}", tensor.ty),
            hint: format!("supported are {}", supported_types()),
        })
    }

    /// `count` rows of `n` finite numbers in one tensor.
    pub fn table(&mut self, name: &str, n: usize, count: usize, presence: Presence) -> Result<Option<Vec<f32>>, Error> {
        self.numbers(name, &[n, count], presence)
    }

    /// A projection, `stem.weight` and `stem.bias`, and `stem.scale`, which NVFP4 matrices come with.
    pub fn linear(&mut self, stem: &str, k: usize, n: usize, bias: Presence) -> Result<Linear<'g>, Error> {
        let mut weight = self.matrix(&format!("{stem}.weight"), k, n)?;
        if let Some(factor) = self.vector(&format!("{stem}.scale"), 1, Presence::Optional)? {
            weight = weight.times(factor[0]);
        }
        // What activations are divided by where they are rounded to 4 bits; llama.cpp's CPU path does not.
        self.find(&format!("{stem}.input_scale"));
        Ok(Linear { weight, bias: self.vector(&format!("{stem}.bias"), n, bias)? })
    }

    /// The vectors of positions.
    fn positions(&mut self, spec: &Spec) -> Result<Option<Tensor<'g>>, Error> {
        let (name, shape) = ("position_embd.weight", [spec.n_embd, spec.n_ctx_train as usize]);
        let tensor = match spec.arch.positions {
            Presence::Never => None,
            Presence::Optional => self.find(name),
            Presence::Required => Some(self.find(name).ok_or_else(|| missing(name, &shape))?),
        };
        if let Some(t) = &tensor {
            check_shape(t, &shape)?;
        }
        Ok(tensor)
    }

    /// A norm that must be there.
    pub fn norm(&mut self, stem: &str, n: usize) -> Result<Norm, Error> {
        let norm = self.maybe_norm(stem, n, Presence::Required)?;
        Ok(norm.expect("the loader returns what is required or an error"))
    }

    /// A norm. Files of some architectures name some of them without `.weight`.
    pub fn maybe_norm(&mut self, stem: &str, n: usize, presence: Presence) -> Result<Option<Norm>, Error> {
        if self.has(stem) && presence != Presence::Never {
            return Ok(self.vector(stem, n, presence)?.map(|weight| Norm { weight: Some(weight), bias: None }));
        }
        let Some(weight) = self.vector(&format!("{stem}.weight"), n, presence)? else { return Ok(None) };
        let bias = self.vector(&format!("{stem}.bias"), n, self.norm_bias)?;
        Ok(Some(Norm { weight: Some(weight), bias }))
    }
}

impl Loader<'_> {
    /// The norm of query or key heads: `n` weights, a row of them or one for each head of `head` channels. Biases as the
    /// weights, where the file has some.
    pub fn head_norm(&mut self, stem: &str, head: usize, n: usize, presence: Presence) -> Result<Option<Norm>, Error> {
        let Some(weight) = self.head_vector(&format!("{stem}.weight"), head, n, presence)? else { return Ok(None) };
        let bias = self.head_vector(&format!("{stem}.bias"), head, n, Presence::Optional)?;
        Ok(Some(Norm { weight: Some(weight), bias }))
    }

    fn head_vector(
        &mut self,
        name: &str,
        head: usize,
        n: usize,
        presence: Presence,
    ) -> Result<Option<Vec<f32>>, Error> {
        let Some(t) = self.gguf.tensor(name).filter(|_| presence != Presence::Never) else {
            return self.vector(name, n, presence);
        };
        if n == head || t.n_dims != 2 {
            return self.vector(name, n, presence);
        }
        check_shape(&t, &[head, n / head])?;
        self.used.insert(t.name);
        finite(name, t.to_f32()?).map(Some)
    }
}

fn finite(name: &str, values: Vec<f32>) -> Result<Vec<f32>, Error> {
    match values.iter().position(|v| !v.is_finite()) {
        None => Ok(values),
        Some(i) => Err(Error::Tensor {
            name: name.into(),
            found: format!("{} at {i}", values[i]),
            wanted: "finite values".into(),
        }),
    }
}

/// A tensor as a matrix of `n` rows; its shape was checked.
fn view<'g>(tensor: &Tensor<'g>, k: usize, n: usize) -> Result<WeightView<'g>, Error> {
    let ty = weight_type(tensor.ty).ok_or_else(|| Error::Unsupported {
        what: format!("weight type {} of tensor {:?}", tensor.ty, tensor.name),
        hint: format!("supported are {}", supported_types()),
    })?;
    WeightView::new(ty, n, k, tensor.data).ok_or_else(|| Error::Tensor {
        name: tensor.name.into(),
        found: format!("{} bytes", tensor.data.len()),
        wanted: format!("{n} rows of {k} values of {}", tensor.ty),
    })
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
        let norm_bias = match spec.arch.norm {
            NormKind::Rms => spec.arch.rms_bias,
            NormKind::Layer => Presence::Optional,
        };
        let mut loader = Loader { gguf, used: HashSet::new(), norm_bias };
        // Read or skipped by name: the output side is never computed; rope factors are in the spec.
        for name in ["output_norm.bias", "output.weight", "output.bias"] {
            loader.find(name);
        }
        loader.find(&format!("{}.weight", spec.arch.output_norm));
        if spec.arch.rope_factors {
            loader.find("rope_freqs.weight");
        }
        if spec.arch.long_factors {
            loader.find("rope_factors_short.weight");
            loader.find("rope_factors_long.weight");
        }
        for block in spec.n_layer()..spec.n_layer() + spec.n_idle {
            loader.pass_over(&format!("blk.{block}."));
        }
        let n_vocab = spec.n_vocab as usize;
        let token_embd = loader.rows("token_embd.weight", spec.n_embd, n_vocab)?;
        let positions = loader.positions(spec)?;
        let norm = if spec.arch.embedding_norm { Some(loader.norm("token_embd_norm", spec.n_embd)?) } else { None };
        let per_layer = spec.per_layer.map(|p| PerLayerTable::load(&mut loader, spec, &p)).transpose()?;
        let altup = spec.altup.map(|a| AltUpTable::load(&mut loader, spec, &a)).transpose()?;
        let layers = (0..spec.layers.len())
            .map(|i| LayerWeights::load(&mut loader, spec, &spec.layers[i], i))
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(unknown) = gguf.tensors().find(|t| !loader.used.contains(t.name)) {
            return Err(Error::Unsupported {
                what: format!("tensor {:?} in a model of architecture {}", unknown.name, spec.arch.name),
                hint: "its part in the computation is not known, and leaving it out would give a wrong cache".into(),
            });
        }
        Ok(Weights { token_embd, positions, norm, per_layer, altup, layers })
    }

    /// The distinct weight types that meet the normed residual stream.
    pub fn input_types(&self) -> Vec<WeightType> {
        let all = self.layers.iter().flat_map(|l| {
            let own =
                l.per_layer.iter().flat_map(|p| p.input_types()).chain(l.altup.iter().flat_map(|a| a.input_types()));
            l.mixer.input_types().into_iter().chain(l.ffn.input_types()).chain(own)
        });
        // The first embedding, too, takes the place of the residual stream where a second, or more streams, are made of it.
        let streams = self.altup.iter().flat_map(|a| a.input_types());
        distinct(all.chain(self.per_layer.iter().map(|p| p.proj.ty())).chain(streams))
    }
}

/// Each of `types` once.
pub(crate) fn distinct(types: impl Iterator<Item = WeightType>) -> Vec<WeightType> {
    let mut out = Vec::new();
    types.for_each(|ty| {
        if !out.contains(&ty) {
            out.push(ty);
        }
    });
    out
}
