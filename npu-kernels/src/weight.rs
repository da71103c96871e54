//! What a weight matrix is to a kernel: a type, a shape and the bytes of its rows.
//!
//! Block formats are ggml's (`ggml-common.h`): blocks of 32 or 256 values along a row, each with its own scale. The
//! table below holds what a kernel must know of each; decoding itself is `host::blocks`.

/// How the weights of one matrix are stored.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)] // the names are ggml's
#[allow(non_camel_case_types)]
pub enum WeightType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
    Iq1S,
    Iq1M,
    Iq2Xxs,
    Iq2Xs,
    Iq2S,
    Iq3Xxs,
    Iq3S,
    Tq1_0,
    Tq2_0,
    Nvfp4,
    Q1_0,
    Q2_0,
}

/// The form in which a row of activations meets a weight. ggml's CPU path rounds activations to the partner type of
/// the weight before multiplying (`vec_dot_type`); a prefill that is to agree with it does the same.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum ActKind {
    /// Not rounded.
    F32,
    /// Rounded to IEEE half precision.
    F16,
    /// Rounded to bfloat16.
    Bf16,
    /// int8 in blocks of 32 with an f16 scale (ggml's `Q8_0` and `Q8_1`).
    Q8Block32,
    /// int8 in blocks of 256 with an f32 scale (ggml's `Q8_K`).
    Q8Block256,
}

/// How integer codes of a weight type become values: `scale[sub] * (code - zero) + min[sub]`.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct CodeForm {
    /// Values that share one scale: 16 or 32.
    pub sub: usize,
    /// Subtracted from every code.
    pub zero: i32,
    /// Whether sub-blocks carry a minimum. Where they do, `zero` is 0.
    pub has_min: bool,
    /// The largest code; a kernel that multiplies in 16 bits must know whether pairs of products can overflow.
    pub max_code: u8,
}

impl WeightType {
    /// Every type, in ggml's order.
    pub const ALL: [WeightType; 28] = [
        WeightType::F32,
        WeightType::F16,
        WeightType::Q4_0,
        WeightType::Q4_1,
        WeightType::Q5_0,
        WeightType::Q5_1,
        WeightType::Q8_0,
        WeightType::Q2_K,
        WeightType::Q3_K,
        WeightType::Q4_K,
        WeightType::Q5_K,
        WeightType::Q6_K,
        WeightType::Iq4Nl,
        WeightType::Iq4Xs,
        WeightType::Bf16,
        WeightType::Mxfp4,
        WeightType::Iq1S,
        WeightType::Iq1M,
        WeightType::Iq2Xxs,
        WeightType::Iq2Xs,
        WeightType::Iq2S,
        WeightType::Iq3Xxs,
        WeightType::Iq3S,
        WeightType::Tq1_0,
        WeightType::Tq2_0,
        WeightType::Nvfp4,
        WeightType::Q1_0,
        WeightType::Q2_0,
    ];

    /// (values, bytes) of one block.
    pub const fn block(self) -> (usize, usize) {
        match self {
            WeightType::F32 => (1, 4),
            WeightType::F16 | WeightType::Bf16 => (1, 2),
            WeightType::Q4_0 | WeightType::Iq4Nl => (32, 18),
            WeightType::Q4_1 => (32, 20),
            WeightType::Q5_0 => (32, 22),
            WeightType::Q5_1 => (32, 24),
            WeightType::Q8_0 => (32, 34),
            WeightType::Mxfp4 => (32, 17),
            WeightType::Q2_K => (256, 84),
            WeightType::Q3_K => (256, 110),
            WeightType::Q4_K => (256, 144),
            WeightType::Q5_K => (256, 176),
            WeightType::Q6_K => (256, 210),
            WeightType::Iq4Xs => (256, 136),
            WeightType::Iq1S => (256, 50),
            WeightType::Iq1M => (256, 56),
            WeightType::Iq2Xxs => (256, 66),
            WeightType::Iq2Xs => (256, 74),
            WeightType::Iq2S => (256, 82),
            WeightType::Iq3Xxs => (256, 98),
            WeightType::Iq3S => (256, 110),
            WeightType::Tq1_0 => (256, 54),
            WeightType::Tq2_0 => (256, 66),
            WeightType::Nvfp4 => (64, 36),
            WeightType::Q1_0 => (128, 18),
            WeightType::Q2_0 => (64, 18),
        }
    }

    /// Bytes of a row of `k` values, or `None` when `k` is no whole number of blocks.
    pub fn row_bytes(self, k: usize) -> Option<usize> {
        let (values, bytes) = self.block();
        k.is_multiple_of(values).then(|| k / values * bytes)
    }

    /// The form that activations take before they meet this type.
    pub const fn activation(self) -> ActKind {
        match self {
            WeightType::F32 => ActKind::F32,
            WeightType::F16 => ActKind::F16,
            WeightType::Bf16 => ActKind::Bf16,
            WeightType::Q4_0
            | WeightType::Q4_1
            | WeightType::Q5_0
            | WeightType::Q5_1
            | WeightType::Q8_0
            | WeightType::Iq4Nl
            | WeightType::Mxfp4
            | WeightType::Nvfp4
            | WeightType::Q1_0
            | WeightType::Q2_0 => ActKind::Q8Block32,
            WeightType::Q2_K
            | WeightType::Q3_K
            | WeightType::Q4_K
            | WeightType::Q5_K
            | WeightType::Q6_K
            | WeightType::Iq4Xs
            | WeightType::Iq1S
            | WeightType::Iq1M
            | WeightType::Iq2Xxs
            | WeightType::Iq2Xs
            | WeightType::Iq2S
            | WeightType::Iq3Xxs
            | WeightType::Iq3S
            | WeightType::Tq1_0
            | WeightType::Tq2_0 => ActKind::Q8Block256,
        }
    }

    /// How codes become values; `None` for the float types, which have no codes.
    pub fn code_form(self) -> Option<CodeForm> {
        let form = |sub, zero, has_min, max_code| Some(CodeForm { sub, zero, has_min, max_code });
        match self {
            WeightType::F32 | WeightType::F16 | WeightType::Bf16 => None,
            WeightType::Q4_0 => form(32, 8, false, 15),
            WeightType::Q4_1 => form(32, 0, true, 15),
            WeightType::Q5_0 => form(32, 16, false, 31),
            WeightType::Q5_1 => form(32, 0, true, 31),
            WeightType::Q8_0 | WeightType::Iq4Nl | WeightType::Iq4Xs | WeightType::Mxfp4 => form(32, 128, false, 255),
            WeightType::Q2_K => form(16, 0, true, 3),
            WeightType::Q3_K => form(16, 4, false, 7),
            WeightType::Q4_K => form(32, 0, true, 15),
            WeightType::Q5_K => form(32, 0, true, 31),
            WeightType::Q6_K => form(16, 32, false, 63),
            // Magnitudes up to 43 and 62, and up to 15 and 12; eighths up to 9.
            WeightType::Iq2Xxs => form(32, 43, false, 86),
            WeightType::Iq2Xs | WeightType::Iq2S => form(16, 43, false, 86),
            WeightType::Iq3Xxs => form(32, 62, false, 124),
            WeightType::Iq3S => form(32, 15, false, 30),
            WeightType::Iq1S => form(32, 9, false, 18),
            WeightType::Iq1M => form(16, 9, false, 18),
            WeightType::Nvfp4 => form(16, 12, false, 24),
            WeightType::Tq1_0 | WeightType::Q1_0 => form(32, 1, false, 2),
            WeightType::Tq2_0 | WeightType::Q2_0 => form(32, 1, false, 3),
        }
    }
}

/// One weight matrix: `n` rows (outputs) of `k` values (inputs), row-major, as it stands in the file.
#[derive(Copy, Clone, Debug)]
pub struct WeightView<'a> {
    ty: WeightType,
    n: usize,
    k: usize,
    data: &'a [u8],
    factor: f32,
}

impl<'a> WeightView<'a> {
    /// A view over `data`, or `None` when `k` is no whole number of blocks or `data` is not exactly `n` rows.
    pub fn new(ty: WeightType, n: usize, k: usize, data: &'a [u8]) -> Option<Self> {
        let bytes = ty.row_bytes(k)?.checked_mul(n)?;
        (n > 0 && k > 0 && data.len() == bytes).then_some(WeightView { ty, n, k, data, factor: 1.0 })
    }

    /// The same whose products are multiplied by `factor`, as files with NVFP4 weights want it.
    #[must_use]
    pub fn times(self, factor: f32) -> Self {
        WeightView { factor: self.factor * factor, ..self }
    }

    /// What products are multiplied by.
    pub fn factor(&self) -> f32 {
        self.factor
    }

    /// How the values are stored.
    pub fn ty(&self) -> WeightType {
        self.ty
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The bytes of all rows.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// The bytes of row `i`.
    pub fn row(&self, i: usize) -> &'a [u8] {
        let bytes = self.data.len() / self.n;
        &self.data[i * bytes..(i + 1) * bytes]
    }

    /// The sub-matrix of rows `from..from + n`, or `None` when it reaches past the end.
    pub fn rows(&self, from: usize, n: usize) -> Option<WeightView<'a>> {
        let bytes = self.data.len() / self.n;
        let data = self.data.get(from.checked_mul(bytes)?..from.checked_add(n)?.checked_mul(bytes)?)?;
        (n > 0).then_some(WeightView { n, data, ..*self })
    }
}
