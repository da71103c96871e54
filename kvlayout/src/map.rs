//! The pure map from (layer, part, positions) to bytes. Nothing is written here, and everything that can be refused is
//! refused here, so that whoever fills the bytes has nothing left to decide. It is not the reader:
//! [`State`](crate::State) takes files apart with code of its own.

use crate::{CacheType, KvSpec, Order, Part, RecSection, StateVersion};
use std::collections::HashMap;
use std::ops::Range;

/// Where one tensor lies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Window {
    /// Index of the section in the file: that in the [`KvSpec`], after whose attention sections the recurrent one stands.
    pub section: usize,
    /// Which region, where a byte space has several; always 0 in a state file.
    pub region: u16,
    /// Byte offset of the tensor's first element.
    pub offset: u64,
    /// Bytes from one row to the next. A row is one position ([`Order::Rows`]) or one channel ([`Order::Transposed`]).
    pub row_bytes: u64,
    /// Element type.
    pub elem: CacheType,
    /// Channels per position.
    pub width: u32,
    /// Which of the two runs fastest.
    pub order: Order,
    /// The positions that are kept: all of them, or the last window + 1; of recurrent state the last one alone.
    pub positions: Range<u32>,
}

impl Window {
    /// Bytes of the whole tensor.
    pub fn len(&self) -> u64 {
        // No overflow: the map was refused unless the sum of all of these fits.
        match self.order {
            Order::Rows => self.positions.len() as u64 * self.row_bytes,
            Order::Transposed => u64::from(self.width) * self.row_bytes,
        }
    }

    /// Never: a map keeps at least one position of every tensor.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A map of a decoder's memory: how many bytes, which of them are known beforehand, and where every tensor's rows go.
///
/// # The state file
///
/// Little-endian, nothing aligned, no checksum, nothing that tells the model: a file says only how the memory is laid
/// out.
///
/// | bytes | meaning |
/// |---|---|
/// | `71 73 67 67` | magic |
/// | u32 | version |
/// | u32 *n*, i32 × *n* | the token ids, as a plain list: servers of all three versions read it, the packed form only newer ones |
/// | | then every section: |
/// | u32 | number of streams; ours is the first, each of the others is one word 0 at the section's end |
/// | u32 *c* | number of cells: *n*, or the last window + 1 of them. Only *window* would be what a server saves itself, but it then computes the prompt anew, since it asks for one cell before the window |
/// | *c* × (i32, u32, ext, i32) | position, 1 (sequences in the cell), the extension, 0 (the sequence; ignored). Positions are consecutive: any others make a server fail later or answer wrongly |
/// | ext | with `cell_ext` only: i32 x, i32 y, both the position for text; from version 3 also i32 token id |
/// | u32 | 1 when V is transposed |
/// | u32 | number of layers in this section |
/// | u32, u32 | version 4 only: rotation widths of K and V; 0 where rows are not rotated, as those of f32, f16 and bf16 |
/// | layers × (i32, u64, rows) | **all** K tensors: type, bytes per row, *c* rows |
/// | layers × (i32, u64, rows) | all V tensors, unless the section has none (MLA), the same; when transposed (i32, u32, u32, …): type, bytes per element, channels, then *c* elements per channel |
///
/// Layers without attention may stand in a section, with rows of no bytes ([`LayerKv::is_empty`](crate::LayerKv::is_empty)). A
/// model with sliding-window and full layers has two sections, the full one first. A recurrent memory, if there is one, is the last
/// section, and not like the others:
///
/// | bytes | meaning |
/// |---|---|
/// | u32 1, i32, u32 0 | one cell: the position of the last token, and no sequences |
/// | u32 0, u32 | not transposed; the number of layers of the *model* |
/// | layers × (i32 0, u64, row) | R of all layers with state: f32, bytes per row, the one row |
/// | layers × (i32 0, u64, row) | S of the same layers, likewise; a row may have no bytes |
///
/// Behind the sections a checkpoint may stand ([`with_checkpoint`](Self::with_checkpoint)):
///
/// | bytes | meaning |
/// |---|---|
/// | `SCKP`, u32 1, u32 1 | magic, version, number of checkpoints |
/// | i64 *n*, i32 0, i32 *n* - 1 | tokens it stands for, its first and last position |
/// | u64, `d8 3c 14 af`, i32 0, bytes | length of what follows; magic; sequence (ignored); the section of the sliding window once more |
/// | u64 0, u64 0 | nothing of a draft model |
///
/// Recurrent state is the state after exactly these tokens and cannot step back: whoever restores it must have one token more to evaluate. All arithmetic is checked, and a
/// state of any size is mapped without being written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvMap {
    size: u64,
    n_tokens: u32,
    fixed: Vec<(u64, Vec<u8>)>,
    windows: Vec<(u32, Part, Window)>,
    index: HashMap<(u32, Part), usize>,
    window_section: Option<WindowSection>,
}

/// The section of a sliding window that a prompt does not fill: what a checkpoint of it would hold.
#[derive(Clone, PartialEq, Eq, Debug)]
struct WindowSection {
    section: usize,
    bytes: Range<u64>,
    /// Bytes from a place in it to the same place of the checkpoint, where the map has one.
    copied: Option<u64>,
}

/// What a saved context's bytes begin with (`io_magic` in llama.cpp's `llama-context.cpp`).
const CONTEXT_MAGIC: u32 = 0xaf14_3cd8;

/// Why no map can be made. Nothing has been written when one of these is seen.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// There is nothing to hand over.
    #[error(
        "no tokens: a state of an empty prompt gains nothing, and one with tokens but no cells makes a server abort"
    )]
    NoTokens,
    /// More positions than a state file can number.
    #[error("{0} tokens: positions are 31-bit numbers")]
    TooManyTokens(usize),
    /// Ids are indices into a vocabulary.
    #[error("token {index} is {id}: ids are not negative")]
    NegativeToken {
        /// Index in the list.
        index: usize,
        /// The id.
        id: i32,
    },
    /// A transposed V has no rows to quantise.
    #[error("V cache type {0} with flash attention off: servers do not have that; run the decoder with -fa on")]
    TransposedBlocks(CacheType),
    /// Rotation of rows that are no whole number of pieces, or of a width that is none.
    #[error("section {section}: {part} rows of {width} channels cannot be rotated in pieces of {n_rot}")]
    Rotation {
        /// Section index.
        section: usize,
        /// K or V.
        part: Part,
        /// Channels.
        width: u32,
        /// Width of a piece.
        n_rot: u32,
    },
    /// No section has a layer.
    #[error("the model has no layer with keys and values, nor one with recurrent state")]
    NoLayers,
    /// A recurrent layer that the model does not have.
    #[error("recurrent state of layer {layer}, in a model of {n_layer} layers")]
    RecurrentLayer {
        /// Model layer.
        layer: u32,
        /// Layers of the model.
        n_layer: u32,
    },
    /// Layers are stored by ascending model index, each once.
    #[error("section {section}: layer {layer} stands after or in another place than it should: ascending, each once")]
    LayerOrder {
        /// Section index.
        section: usize,
        /// Model layer.
        layer: u32,
    },
    /// A layer whose rows have no channels.
    #[error("layer {layer} {part}: rows of 0 channels")]
    NoChannels {
        /// Model layer.
        layer: u32,
        /// K or V.
        part: Part,
    },
    /// A sliding window of nothing.
    #[error("section {section}: a window of 0 positions; a section without a window has none at all")]
    NoWindow {
        /// Section index.
        section: usize,
    },
    /// Number of streams out of range.
    #[error("{0} streams: a decoder has 1 to 256")]
    Streams(u32),
    /// Sizes past what a file can have.
    #[error("the state would have more than 2^63 bytes")]
    TooLarge,
    /// A shared memory's context of nothing, or of more cells than can be numbered.
    #[error("a context of {0} tokens: a decoder has 1 to 2147483392")]
    Context(u32),
    /// Rows that are no whole number of blocks.
    #[error("layer {layer} {part}: rows of {width} channels are no whole number of {} of {ty}", ty.block_elems())]
    RowBlocks {
        /// Model layer.
        layer: u32,
        /// K or V.
        part: Part,
        /// Channels.
        width: u32,
        /// Their type.
        ty: CacheType,
    },
    /// A shared memory is that of one sequence.
    #[error("{0} streams: memory is shared by a decoder of 1 (-np 1)")]
    SharedStreams(u32),
    /// Recurrent state is not in the regions that a decoder shares.
    #[error("the model has recurrent state, which is no part of a decoder's shared memory: use the file route (--out)")]
    SharedRecurrent,
    /// What place a decoder keeps in its regions for a layer that does not attend is not known.
    #[error(
        "layer {layer} keeps no keys and values, and how shared memory is laid out then is not known: use the file route (--out)"
    )]
    SharedEmpty {
        /// Model layer.
        layer: u32,
    },
    /// The rows of a transposed V are no rows.
    #[error("V is transposed (flash attention off), and shared memory takes rows: run the decoder with -fa on")]
    SharedTransposed,
    /// The prompt is too long for the decoder's memory.
    #[error("section {section}: {n_tokens} tokens and the prompt's last one do not fit the decoder's {cells} cells{}",
        if *windowed { " for layers with a sliding window; with --swa-full they would have more" } else { "" })]
    SharedCells {
        /// Section index.
        section: usize,
        /// Tokens to hand over.
        n_tokens: u32,
        /// Cells there are.
        cells: u64,
        /// Whether the section has a sliding window.
        windowed: bool,
    },
    /// The layout is not that of the spec.
    #[error("layer {layer} {part}: the model has {want}, the layout {found}")]
    SharedTensor {
        /// Model layer.
        layer: u32,
        /// K or V.
        part: Part,
        /// Type and channels of the model.
        want: String,
        /// Type and channels of the layout, or that it has none.
        found: String,
    },
}

/// Rows are rotated in whole pieces, of a width that is a power of two.
pub(crate) fn check_rotation(section: usize, part: Part, width: u32, n_rot: u32) -> Result<(), Refusal> {
    if n_rot != 0 && !(n_rot.is_power_of_two() && width.is_multiple_of(n_rot)) {
        return Err(Refusal::Rotation { section, part, width, n_rot });
    }
    Ok(())
}

/// A decoder has at most this many sequences (`LLAMA_MAX_SEQ`), and a stream for each at most.
pub(crate) const MAX_STREAMS: u32 = 256;

impl KvMap {
    /// The map of a state file for `tokens`, which become positions 0, 1, 2, ….
    pub fn state_file(spec: &KvSpec, tokens: &[i32], version: StateVersion) -> Result<KvMap, Refusal> {
        let n_tokens = match i32::try_from(tokens.len()) {
            Ok(0) => return Err(Refusal::NoTokens),
            Ok(n) => n as u32,
            Err(_) => return Err(Refusal::TooManyTokens(tokens.len())),
        };
        if let Some(index) = tokens.iter().position(|&id| id < 0) {
            return Err(Refusal::NegativeToken { index, id: tokens[index] });
        }
        if spec.v_trans && spec.type_v.is_quantised() {
            return Err(Refusal::TransposedBlocks(spec.type_v));
        }
        if !(1..=MAX_STREAMS).contains(&spec.n_stream) {
            return Err(Refusal::Streams(spec.n_stream));
        }
        if spec.sections.iter().all(|s| s.layers.is_empty())
            && spec.recurrent.as_ref().is_none_or(|r| r.layers.is_empty())
        {
            return Err(Refusal::NoLayers);
        }

        let mut b = Builder::default();
        b.word(u32::from_le_bytes(*b"qsgg"));
        b.word(version.number());
        b.word(n_tokens);
        tokens.iter().for_each(|&id| b.int(id));
        let mut window_section = None;
        for (section, s) in spec.sections.iter().enumerate() {
            let start = b.at;
            let kept = match s.window {
                Some(0) => return Err(Refusal::NoWindow { section }),
                Some(w) if !spec.swa_full => n_tokens.min(w.saturating_add(1)),
                _ => n_tokens,
            };
            let positions = n_tokens - kept..n_tokens;
            b.word(spec.n_stream);
            b.word(kept);
            for p in positions.clone() {
                let p = p as i32;
                b.int(p);
                b.word(1);
                if spec.cell_ext {
                    b.int(p);
                    b.int(p);
                    if version >= StateVersion::V3 {
                        b.int(tokens[p as usize]);
                    }
                }
                b.int(0);
            }
            b.word(spec.v_trans.into());
            b.word(s.layers.len() as u32);
            if version >= StateVersion::V4 {
                b.word(s.n_rot.0);
                b.word(s.n_rot.1);
            }
            for part in [Part::K, Part::V].into_iter().filter(|p| *p == Part::K || !s.k_only()) {
                for (i, l) in s.layers.iter().enumerate() {
                    let (elem, width, n_rot) = match part {
                        Part::K => (spec.type_k, l.n_embd_k, s.n_rot.0),
                        _ => (spec.type_v, l.n_embd_v, s.n_rot.1),
                    };
                    if width == 0 && (i == 0 || !l.is_empty()) {
                        return Err(Refusal::NoChannels { layer: l.layer, part });
                    }
                    check_rotation(section, part, width, n_rot)?;
                    let order = if part == Part::V && spec.v_trans { Order::Transposed } else { Order::Rows };
                    // Neither overflows: both factors are 32-bit, an element has at most 4 bytes.
                    let row_bytes = match order {
                        Order::Rows => {
                            let blocks = Refusal::RowBlocks { layer: l.layer, part, width, ty: elem };
                            elem.row_bytes(width.into()).ok_or(blocks)?
                        }
                        Order::Transposed => u64::from(kept) * elem.block_bytes(),
                    };
                    b.word(elem.id());
                    match order {
                        Order::Rows => b.long(row_bytes),
                        Order::Transposed => {
                            b.word(elem.block_bytes() as u32);
                            b.word(width);
                        }
                    }
                    if width == 0 {
                        continue;
                    }
                    let positions = positions.clone();
                    let mut w = Window { section, region: 0, offset: 0, row_bytes, elem, width, order, positions };
                    let rows = if order == Order::Rows { kept } else { width };
                    w.offset = b.hole(u64::from(rows).checked_mul(row_bytes).ok_or(Refusal::TooLarge)?)?;
                    b.window(l.layer, part, w)?;
                }
            }
            (1..spec.n_stream).for_each(|_| b.word(0));
            if s.window.is_some_and(|w| !spec.swa_full && n_tokens <= w) && spec.recurrent.is_none() {
                window_section = Some(WindowSection { section, bytes: start..b.at, copied: None });
            }
        }
        if let Some(rec) = &spec.recurrent {
            b.recurrent(rec, spec.sections.len(), n_tokens)?;
        }
        b.finish(n_tokens, window_section)
    }

    /// Whether a server needs a checkpoint to use this file: the prompt does not reach past the sliding window, and a server
    /// without `--swa-full` wants the cell before the window's first, which there cannot be.
    pub fn wants_checkpoint(&self) -> bool {
        self.window_section.as_ref().is_some_and(|s| s.copied.is_none())
    }

    /// The same file with a checkpoint behind it, if it [wants one](Self::wants_checkpoint); else the same. It is a second copy of
    /// the window's section: servers that read it (the newest builds) take the window back to it and evaluate the last of
    /// these tokens and the next one; for all others it is bytes behind the end, which they ignore.
    ///
    /// # Errors
    /// [`Refusal::TooLarge`].
    pub fn with_checkpoint(self) -> Result<KvMap, Refusal> {
        let Some(WindowSection { section, bytes, .. }) =
            self.window_section.clone().filter(|_| self.wants_checkpoint())
        else {
            return Ok(self);
        };
        let KvMap { size, n_tokens, fixed, windows, index, .. } = self;
        let inside: Vec<(u64, Vec<u8>)> = fixed.iter().filter_map(|(at, piece)| cut(*at, piece, &bytes)).collect();
        let mut b = Builder { at: size, fixed, windows, index };
        b.bytes(b"SCKP");
        b.word(1);
        b.word(1);
        b.long(n_tokens.into());
        b.int(0);
        b.word(n_tokens - 1);
        b.long(8 + (bytes.end - bytes.start));
        b.word(CONTEXT_MAGIC);
        b.word(0);
        let distance = b.at - bytes.start;
        for (at, piece) in inside {
            b.hole(at + distance - b.at)?;
            b.bytes(&piece);
        }
        b.hole(bytes.end + distance - b.at)?;
        b.long(0);
        b.long(0);
        b.finish(n_tokens, Some(WindowSection { section, bytes, copied: Some(distance) }))
    }

    /// Bytes from a tensor to its copy in the checkpoint, if it has one.
    pub fn copied(&self, window: &Window) -> Option<u64> {
        self.window_section.as_ref().filter(|s| s.section == window.section)?.copied
    }

    /// A map whose bytes are in the windows alone, which must be disjoint and inside `size` bytes.
    pub(crate) fn of_windows(size: u64, n_tokens: u32, windows: Vec<(u32, Part, Window)>) -> KvMap {
        let index = windows.iter().enumerate().map(|(i, (layer, part, _))| ((*layer, *part), i)).collect();
        KvMap { size, n_tokens, fixed: Vec::new(), windows, index, window_section: None }
    }

    /// Bytes in all.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Number of tokens, which is that of positions.
    pub fn n_tokens(&self) -> u32 {
        self.n_tokens
    }

    /// Where a tensor lies, by the layer's index in the model; `None` when the decoder keeps none.
    pub fn window(&self, layer: u32, part: Part) -> Option<&Window> {
        self.index_of(layer, part).map(|i| &self.windows[i].2)
    }

    /// Index of a tensor in [`windows`](Self::windows).
    pub(crate) fn index_of(&self, layer: u32, part: Part) -> Option<usize> {
        self.index.get(&(layer, part)).copied()
    }

    /// All tensors, by ascending offset: model layer, part, place.
    pub fn windows(&self) -> impl Iterator<Item = (u32, Part, &Window)> {
        self.windows.iter().map(|(layer, part, w)| (*layer, *part, w))
    }

    /// The bytes that do not depend on the computation, and where they go, by ascending offset. Together with the
    /// windows, and their [copies](Self::copied), they are every byte exactly once.
    pub fn fixed(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.fixed.iter().map(|(at, bytes)| (*at, bytes.as_slice()))
    }
}

/// The part of the bytes at `at` that lies within `range`, and where that begins.
fn cut(at: u64, bytes: &[u8], range: &Range<u64>) -> Option<(u64, Vec<u8>)> {
    let (from, to) = (at.max(range.start), (at + bytes.len() as u64).min(range.end));
    (from < to).then(|| (from, bytes[(from - at) as usize..(to - at) as usize].to_vec()))
}

#[derive(Default)]
struct Builder {
    at: u64,
    fixed: Vec<(u64, Vec<u8>)>,
    windows: Vec<(u32, Part, Window)>,
    index: HashMap<(u32, Part), usize>,
}

impl Builder {
    fn bytes(&mut self, bytes: &[u8]) {
        match self.fixed.last_mut() {
            Some((at, piece)) if *at + piece.len() as u64 == self.at => piece.extend_from_slice(bytes),
            _ => self.fixed.push((self.at, bytes.to_vec())),
        }
        // Far from overflowing: `hole` stops at 2^63, and nobody has 2^63 bytes of cells.
        self.at += bytes.len() as u64;
    }

    fn word(&mut self, v: u32) {
        self.bytes(&v.to_le_bytes());
    }

    fn int(&mut self, v: i32) {
        self.bytes(&v.to_le_bytes());
    }

    fn long(&mut self, v: u64) {
        self.bytes(&v.to_le_bytes());
    }

    fn hole(&mut self, len: u64) -> Result<u64, Refusal> {
        let start = self.at;
        self.at = start.checked_add(len).filter(|&end| end <= i64::MAX as u64).ok_or(Refusal::TooLarge)?;
        Ok(start)
    }

    /// The recurrent section: one cell, at the last position.
    fn recurrent(&mut self, rec: &RecSection, section: usize, n_tokens: u32) -> Result<(), Refusal> {
        let positions = n_tokens - 1..n_tokens;
        self.word(1);
        self.word(positions.start);
        self.word(0);
        self.word(0);
        self.word(rec.n_layer);
        for part in [Part::R, Part::S] {
            for l in &rec.layers {
                if l.layer >= rec.n_layer {
                    return Err(Refusal::RecurrentLayer { layer: l.layer, n_layer: rec.n_layer });
                }
                if (l.n_embd_r, l.n_embd_s) == (0, 0) {
                    return Err(Refusal::NoChannels { layer: l.layer, part });
                }
                let width = if part == Part::R { l.n_embd_r } else { l.n_embd_s };
                let elem = CacheType::F32;
                let row_bytes = u64::from(width) * elem.block_bytes();
                self.word(elem.id());
                self.long(row_bytes);
                let (order, positions) = (Order::Rows, positions.clone());
                let mut w = Window { section, region: 0, offset: 0, row_bytes, elem, width, order, positions };
                w.offset = self.hole(row_bytes)?;
                // A row of no bytes is whole from the beginning: there is nothing to wait for.
                if width > 0 {
                    self.window(l.layer, part, w)?;
                }
            }
        }
        Ok(())
    }

    fn finish(self, n_tokens: u32, window_section: Option<WindowSection>) -> Result<KvMap, Refusal> {
        let Builder { at: size, fixed, windows, index } = self;
        if size > i64::MAX as u64 {
            return Err(Refusal::TooLarge);
        }
        Ok(KvMap { size, n_tokens, fixed, windows, index, window_section })
    }

    fn window(&mut self, layer: u32, part: Part, w: Window) -> Result<(), Refusal> {
        let section = w.section;
        let previous = self.windows.last().filter(|(_, p, last)| *p == part && last.section == section);
        let ascending = previous.is_none_or(|(l, ..)| *l < layer);
        let first = self.index.insert((layer, part), self.windows.len()).is_none();
        if !ascending || !first {
            return Err(Refusal::LayerOrder { section, layer });
        }
        self.windows.push((layer, part, w));
        Ok(())
    }
}
