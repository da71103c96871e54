//! Sixteen rows of a weight matrix, decoded and transposed so that one register holds the same four inputs of all
//! sixteen. A panel is decoded once per chunk of tokens, into a core's own cache, and used for every tile of rows.

use super::PANEL_COLS;
use crate::weight::CodeForm;

/// Four codes of each column, the columns side by side: one register, one cache line.
#[derive(Copy, Clone)]
#[repr(C, align(64))]
pub struct CodeLine(pub [u8; 4 * PANEL_COLS]);

/// One float of each column: one register, one cache line. A load that straddles two lines costs twice.
#[derive(Copy, Clone)]
#[repr(C, align(64))]
pub struct FloatLine(pub [f32; PANEL_COLS]);

impl FloatLine {
    /// Zeros.
    pub const ZERO: FloatLine = FloatLine([0.0; PANEL_COLS]);
}

/// A panel of integer codes.
pub struct CodePanel {
    /// `[k / 4]` lines of `[column][4]` codes.
    pub codes: Vec<CodeLine>,
    /// `[k / sub]` lines of scales.
    pub scales: Vec<FloatLine>,
    /// `[k / sub]` lines of minima; empty where the type has none.
    pub mins: Vec<FloatLine>,
    /// Inputs; a multiple of 32.
    pub k: usize,
    /// How codes become values.
    pub form: CodeForm,
}

/// A panel of floats, for the types that have no codes.
pub struct FloatPanel {
    /// `[k]` lines of values; none where there are pairs.
    pub values: Vec<FloatLine>,
    /// `[k / 2]` lines, rounded up, of two bf16 of each column, the first in the lower bytes; none where there are values.
    pub pairs: Vec<CodeLine>,
    /// Inputs.
    pub k: usize,
}

impl CodePanel {
    /// An empty panel, to be shaped before use.
    pub const fn empty() -> Self {
        let form = CodeForm { sub: 32, zero: 0, has_min: false, max_code: 0 };
        CodePanel { codes: Vec::new(), scales: Vec::new(), mins: Vec::new(), k: 0, form }
    }

    /// Makes room for `k` inputs. The contents are unspecified until decoded.
    pub fn shape(&mut self, k: usize, form: CodeForm) {
        assert!(k.is_multiple_of(32), "{k} inputs are no whole number of blocks");
        self.k = k;
        self.form = form;
        self.codes.resize(k / 4, CodeLine([0; 4 * PANEL_COLS]));
        self.scales.resize(k / form.sub, FloatLine::ZERO);
        self.mins.resize(if form.has_min { k / form.sub } else { 0 }, FloatLine::ZERO);
    }
}

impl FloatPanel {
    /// An empty panel, to be shaped before use.
    pub const fn empty() -> Self {
        FloatPanel { values: Vec::new(), pairs: Vec::new(), k: 0 }
    }

    /// Makes room for `k` inputs, as values or in pairs. The contents are unspecified until decoded.
    pub fn shape(&mut self, k: usize, in_pairs: bool) {
        let (values, pairs) = if in_pairs { (0, k.div_ceil(2)) } else { (k, 0) };
        self.k = k;
        self.values.resize(values, FloatLine::ZERO);
        self.pairs.resize(pairs, CodeLine([0; 4 * PANEL_COLS]));
    }
}
