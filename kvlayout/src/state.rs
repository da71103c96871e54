//! A state file taken apart into fields, and put together again.
//!
//! This is the reading half, with layout code of its own: what the [map](crate::KvMap) lays out, this must find. It
//! reads whatever a server writes, and any other bytes without harm: it never panics, and allocates in proportion to
//! the bytes there are, never to a number they claim. Whether what it read makes sense is for [`faults`](crate::faults)
//! to say.

use crate::map::MAX_STREAMS;
use crate::{CacheType, KvSpec, Part, StateVersion};
use std::fmt;

/// A sequence-state file, every field. [`State::write`] gives back the bytes it was parsed from.
///
/// Little-endian throughout, nothing aligned, no checksum.
///
/// | bytes | field |
/// |---|---|
/// | `71 73 67 67` | magic |
/// | u32 | [`version`](Self::version) |
/// | u32 *W*, i32 × *W* | token words: [`form`](Self::form) and [`tokens`](Self::tokens) |
/// | … | [`sections`](Self::sections), one after the other |
/// | … | [`appendix`](Self::appendix) |
///
/// The file says neither how many sections there are, nor of which kind, nor whether its cells have an extension: all
/// that follows from the model, and the model is not named. [`parse`](Self::parse) tries the possibilities; with a
/// [`Shape`] at hand [`parse_as`](Self::parse_as) need not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct State {
    /// Format version.
    pub version: StateVersion,
    /// How the token ids are written.
    pub form: TokenForm,
    /// The token ids.
    pub tokens: Vec<i32>,
    /// Whether the cells of attention caches carry the extension of M-RoPE models.
    pub cell_ext: bool,
    /// The sections in file order.
    pub sections: Vec<Section>,
    /// Checkpoints, which the newest builds write after the sections.
    pub appendix: Option<Appendix>,
    /// Bytes after everything. Servers ignore them; there should be none.
    pub trailing: Vec<u8>,
}

/// How the token ids are written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TokenForm {
    /// Just the ids: read by servers of every build.
    Plain,
    /// The words -1, 1, *n*, *n* ids, `n_media`, media words: written by servers since about 10405, and taken for ids
    /// by those before.
    Packed {
        /// Number of media chunks (images, sound) among the tokens; 0 for text.
        n_media: u32,
        /// The words after `n_media`, as they are: start indices and chunks. None for text.
        media: Vec<i32>,
    },
}

/// One part of the decoder's memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Section {
    /// An attention cache.
    Kv(Kv),
    /// A recurrent memory.
    Rec(Rec),
}

/// An attention cache: u32 number of streams, then each [`Stream`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Kv {
    /// One for each slot of a decoder whose slots do not share memory, else one. All but that of the saved slot are
    /// empty.
    pub streams: Vec<Stream>,
}

impl Kv {
    /// The first stream that has cells.
    pub fn stream(&self) -> Option<&Stream> {
        self.streams.iter().find(|s| !s.cells.is_empty())
    }

    /// As [`stream`](Self::stream), to change it.
    pub fn stream_mut(&mut self) -> Option<&mut Stream> {
        self.streams.iter_mut().find(|s| !s.cells.is_empty())
    }
}

/// One stream of a cache.
///
/// | bytes | field |
/// |---|---|
/// | u32 *c* | number of cells; when it is 0, nothing of what follows is there |
/// | *c* × (i32, u32 = 1, ext, i32) | [`Cell`]s: position, sequences, extension, the sequence |
/// | u32 | `v_trans` |
/// | u32 | number of layers |
/// | u32, u32 | `n_rot`, version 4 only |
/// | layers × (i32, u64, *c* rows) | `k`: type, bytes per row |
/// | layers × (i32, u64, *c* rows) | `v`; when transposed (i32, u32, u32, channels × *c* elements): type, bytes per element, channels |
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stream {
    /// The cells in file order, which need not be that of positions.
    pub cells: Vec<Cell>,
    /// V runs channel by channel: the server had flash attention off.
    pub v_trans: bool,
    /// Widths of the Hadamard rotation of K and V rows, 0 = not rotated. Read from version 4 only; before, a file does not say,
    /// and who knows may put it here (it is not written then).
    pub n_rot: Option<(u32, u32)>,
    /// K tensors, one per layer of the section, by ascending layer.
    pub k: Vec<Tensor>,
    /// V tensors, likewise; none at all in caches that have only K (MLA).
    pub v: Vec<Tensor>,
}

/// One cell of an attention cache: i32 position, u32 number of sequences (always 1 in a file of one sequence), the
/// extension, i32 sequence.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Cell {
    /// The position.
    pub pos: i32,
    /// x, y and, from version 3 on, the token id. `Some` when [`State::cell_ext`] is set. For text x and y are the
    /// position.
    pub ext: Option<(i32, i32, Option<i32>)>,
    /// The slot it was saved from. Readers ignore it.
    pub seq_id: i32,
}

/// The rows of one layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tensor {
    /// Element type.
    pub ty: CacheType,
    /// Channels per cell.
    pub width: u32,
    /// The bytes in file order.
    pub data: Vec<u8>,
}

/// A recurrent memory.
///
/// | bytes | field |
/// |---|---|
/// | u32 *c* | number of cells: 1 for a sequence that has any state |
/// | *c* × (i32, u32 = 0) | position of the last token; the sequence is not listed |
/// | u32 = 0 | `s_trans` |
/// | u32 | `n_layer`, all layers of the model |
/// | (i32, u64, *c* rows) × ? | R of the layers that have it, then S of them: type, bytes per row |
///
/// How many layers have R and S is not in the file. Unless a [`RecShape`] tells it, such a section can only be read as the
/// last one, up to the end; each of its layers has both, so the first half is R.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rec {
    /// The cells.
    pub cells: Vec<RecCell>,
    /// Number of layers of the model.
    pub n_layer: u32,
    /// All records: first R, then S.
    pub records: Vec<Tensor>,
}

impl Rec {
    /// The convolution histories.
    pub fn r(&self) -> &[Tensor] {
        &self.records[..self.records.len() / 2]
    }

    /// The recurrent states.
    pub fn s(&self) -> &[Tensor] {
        &self.records[self.records.len() / 2..]
    }
}

/// One cell of a recurrent memory.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct RecCell {
    /// Position of the last token that went in.
    pub pos: i32,
}

/// What the newest builds append: `SCKP`, u32 1, u32 count, then each [`Checkpoint`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Appendix {
    /// The checkpoints, oldest first.
    pub checkpoints: Vec<Checkpoint>,
}

/// An earlier point a server can return to: i64, i32, i32, then three times u64 length and bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Checkpoint {
    /// Number of tokens it stands for.
    pub n_tokens: i64,
    /// The first position it holds.
    pub pos_min: i32,
    /// The last.
    pub pos_max: i32,
    /// Its contents, not taken apart.
    pub blobs: [Vec<u8>; 3],
}

/// A field of the file, by name.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
#[allow(missing_docs)] // the names are those of the tables above
pub enum Field {
    Magic,
    Version,
    TokenForm,
    TokenCount,
    Token,
    PackedVersion,
    MediaCount,
    Media,
    Sections,
    NStream,
    CellCount,
    Position,
    NSeqId,
    CellExt,
    SeqId,
    VTrans,
    NLayer,
    NRotK,
    NRotV,
    TypeK,
    TypeV,
    RowSizeK,
    RowSizeV,
    RowsK,
    RowsV,
    STrans,
    RecordCount,
    RecordType,
    RecordRowSize,
    RecordRows,
    Appendix,
    AppendixVersion,
    Trailing,
}

impl Field {
    /// Its name in lower case, stable.
    pub fn name(self) -> &'static str {
        match self {
            Field::Magic => "magic",
            Field::Version => "version",
            Field::TokenForm => "token_form",
            Field::TokenCount => "token_count",
            Field::Token => "token",
            Field::PackedVersion => "packed_version",
            Field::MediaCount => "n_media",
            Field::Media => "media",
            Field::Sections => "sections",
            Field::NStream => "n_stream",
            Field::CellCount => "cell_count",
            Field::Position => "pos",
            Field::NSeqId => "n_seq_id",
            Field::CellExt => "cell_ext",
            Field::SeqId => "seq_id",
            Field::VTrans => "v_trans",
            Field::NLayer => "n_layer",
            Field::NRotK => "n_rot_k",
            Field::NRotV => "n_rot_v",
            Field::TypeK => "type_k",
            Field::TypeV => "type_v",
            Field::RowSizeK => "row_size_k",
            Field::RowSizeV => "row_size_v",
            Field::RowsK => "rows_k",
            Field::RowsV => "rows_v",
            Field::STrans => "s_trans",
            Field::RecordCount => "record_count",
            Field::RecordType => "record_type",
            Field::RecordRowSize => "record_row_size",
            Field::RecordRows => "record_rows",
            Field::Appendix => "appendix",
            Field::AppendixVersion => "appendix_version",
            Field::Trailing => "trailing",
        }
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A place in a state: a section and, maybe, one of its layers (by its index *in the section*, not in the model).
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct Place {
    /// Section index.
    pub section: usize,
    /// Layer index in the section.
    pub layer: Option<usize>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "section {}", self.section)?;
        self.layer.map_or(Ok(()), |l| write!(f, " layer {l}"))
    }
}

/// What is known of a file's shape before it is read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Whether the cells of attention caches carry the extension.
    pub cell_ext: bool,
    /// The sections in file order.
    pub sections: Vec<SectionShape>,
}

/// What is known of a section.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SectionShape {
    /// It is an attention cache.
    Kv(KvShape),
    /// It is a recurrent memory, which must be the last section.
    Rec(RecShape),
}

/// What is known of a recurrent memory. `None` = whatever the file says; `Some` = anything else is an error at that field.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RecShape {
    /// Number of layers of the model.
    pub n_layer: Option<u32>,
    /// Type of the records.
    pub ty: Option<CacheType>,
    /// Numbers in R and S of each layer that has them, and so how many records there are.
    pub widths: Option<Vec<(u32, u32)>>,
}

/// What is known of an attention cache. `None` = whatever the file says; `Some` = anything else is an error at that
/// field.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KvShape {
    /// There are no V tensors (MLA).
    pub k_only: bool,
    /// Number of streams.
    pub n_stream: Option<u32>,
    /// Whether V is transposed.
    pub v_trans: Option<bool>,
    /// K type.
    pub type_k: Option<CacheType>,
    /// V type.
    pub type_v: Option<CacheType>,
    /// Channels of K and V, layer by layer, and so the number of layers.
    pub widths: Option<Vec<(u32, u32)>>,
}

impl From<&KvSpec> for Shape {
    fn from(spec: &KvSpec) -> Shape {
        let section = |s: &crate::KvSection| {
            SectionShape::Kv(KvShape {
                k_only: s.k_only(),
                n_stream: Some(spec.n_stream),
                v_trans: Some(spec.v_trans),
                type_k: Some(spec.type_k),
                type_v: Some(spec.type_v),
                widths: Some(s.layers.iter().map(|l| (l.n_embd_k, l.n_embd_v)).collect()),
            })
        };
        let recurrent = spec.recurrent.iter().map(|rec| {
            SectionShape::Rec(RecShape {
                n_layer: Some(rec.n_layer),
                ty: Some(CacheType::F32),
                widths: Some(rec.layers.iter().map(|l| (l.n_embd_r, l.n_embd_s)).collect()),
            })
        });
        Shape { cell_ext: spec.cell_ext, sections: spec.sections.iter().map(section).chain(recurrent).collect() }
    }
}

/// Where, and in which field, bytes are not a state file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseError {
    /// Byte offset of the field.
    pub offset: u64,
    /// The field.
    pub what: Field,
    /// Section and layer, where the field is in one.
    pub place: Option<Place>,
    /// What should be there.
    pub want: String,
    /// What is there.
    pub found: String,
    /// The file ends before the field does: it has been cut, or an earlier count is wrong.
    pub short: bool,
}

impl std::error::Error for ParseError {}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at byte {}", self.offset)?;
        if let Some(place) = self.place {
            write!(f, ", {place}")?;
        }
        write!(f, ": {}: should be {}, found {}", self.what, self.want, self.found)
    }
}

/// Why a tensor's rows cannot be had.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RowsError {
    /// The state has no such tensor.
    #[error("section {section} layer {layer}: the state has no such {part} tensor")]
    Missing {
        /// Section index.
        section: usize,
        /// Layer index in the section.
        layer: usize,
        /// Part.
        part: Part,
    },
    /// The tensor's bytes are not those of its cells; never so in a parsed state.
    #[error("section {section} layer {layer} {part}: {found} bytes of rows, should be {want}")]
    Length {
        /// Section index.
        section: usize,
        /// Layer index in the section.
        layer: usize,
        /// Part.
        part: Part,
        /// Bytes there should be.
        want: u64,
        /// Bytes there are.
        found: u64,
    },
}

/// The version of a state file, from its first eight bytes.
pub fn read_version(head: &[u8]) -> Result<StateVersion, ParseError> {
    Reader::new(head).version()
}

impl State {
    /// Takes a file apart that may have any of the shapes servers write: with or without the cell extension; one or two
    /// attention caches, followed or not by a recurrent memory; or that alone. (Caches without V need
    /// [`parse_latent`](Self::parse_latent), those of sparse attention [`parse_as`](Self::parse_as).)
    ///
    /// The shape under which the file ends where it should wins. If there is none, but one that leaves bytes over,
    /// those are in [`trailing`](Self::trailing). Otherwise the error is that of the shape which got furthest. One cut
    /// cannot be seen this way: that exactly between two sections.
    pub fn parse(bytes: &[u8]) -> Result<State, ParseError> {
        let kv = || SectionShape::Kv(KvShape::default());
        let rec = || SectionShape::Rec(RecShape::default());
        let kinds = [vec![kv()], vec![kv(), kv()], vec![kv(), rec()], vec![rec()], vec![kv(), kv(), rec()]];
        let head = Reader::new(bytes).head()?;
        let mut best: Option<(usize, Shape)> = None;
        let mut errors: Vec<(bool, ParseError)> = Vec::new();
        for cell_ext in [false, true] {
            for sections in &kinds {
                let shape = Shape { cell_ext, sections: sections.clone() };
                match Reader::after(bytes, &head, true).body(&shape, false) {
                    Ok((_, end)) if end == bytes.len() => return Self::parse_as(bytes, &shape),
                    Ok((_, end)) if best.as_ref().is_none_or(|(b, _)| *b < end) => best = Some((end, shape)),
                    Ok(_) => {}
                    Err(e) => {
                        let section = e.place.and_then(|p| sections.get(p.section));
                        errors.push((matches!(section, Some(SectionShape::Rec(_))), e));
                    }
                }
            }
        }
        // Bytes over that begin like a further section are one, and it is damaged: its first fields are too particular
        // to be met by chance.
        let end = best.as_ref().map_or(0, |(end, _)| *end as u64);
        errors.retain(|(_, e)| best.is_none() || e.offset > end);
        // Who ran out of bytes found nothing wrong up to there, and so got furthest. Of equals the first, the simplest
        // shape. A recurrent memory begins with words that those of an attention cache can be taken for: to get some
        // way into them counts for nothing.
        let furthest = errors.into_iter().rev().max_by_key(|(rec, e)| (e.short, !rec, e.offset)).map(|(_, e)| e);
        match (furthest, best) {
            (Some(e), _) => Err(e),
            (None, Some((_, shape))) => Self::parse_as(bytes, &shape),
            (None, None) => unreachable!("every shape gives a state or an error"),
        }
    }

    /// Takes a file apart that a decoder of latent attention writes: one cache without V, and a recurrent memory behind it where the
    /// model has one. [`parse`](Self::parse) does not try this shape, since a file of another model that ends behind its keys
    /// has it too.
    pub fn parse_latent(bytes: &[u8]) -> Result<State, ParseError> {
        let kv = SectionShape::Kv(KvShape { k_only: true, ..KvShape::default() });
        let alone = Self::parse_as(bytes, &Shape { cell_ext: false, sections: vec![kv.clone()] });
        if alone.as_ref().is_ok_and(|s| s.trailing.is_empty()) {
            return alone;
        }
        let sections = vec![kv, SectionShape::Rec(RecShape::default())];
        Self::parse_as(bytes, &Shape { cell_ext: false, sections }).or(alone)
    }

    /// [`parse`](Self::parse), and where that fails or leaves bytes over [`parse_latent`](Self::parse_latent): for who does not know the model. The
    /// error is that of the first.
    pub fn parse_any(bytes: &[u8]) -> Result<State, ParseError> {
        match Self::parse(bytes) {
            Ok(state) if state.trailing.is_empty() => Ok(state),
            other => Self::parse_latent(bytes).ok().filter(|s| s.trailing.is_empty()).map_or(other, Ok),
        }
    }

    /// Takes a file apart that has a known shape: the first field that is not as the shape says is the error. Bytes
    /// left over are in [`trailing`](Self::trailing).
    pub fn parse_as(bytes: &[u8], shape: &Shape) -> Result<State, ParseError> {
        let head = Reader::new(bytes).head()?;
        let (mut state, end) = Reader::after(bytes, &head, false).body(shape, true)?;
        state.trailing = bytes[end..].to_vec();
        Ok(state)
    }

    /// The file again, byte by byte.
    ///
    /// For a state that was not parsed but put together, the counts in the file are those of the lists: what the lists
    /// hold is written, also where it makes no sense.
    pub fn write(&self) -> Vec<u8> {
        let mut w = Writer(Vec::new());
        w.bytes(b"qsgg");
        w.u32(self.version.number());
        match &self.form {
            TokenForm::Plain => {
                w.u32(self.tokens.len() as u32);
                self.tokens.iter().for_each(|&t| w.i32(t));
            }
            TokenForm::Packed { n_media, media } => {
                w.u32((self.tokens.len() + 4 + media.len()) as u32);
                [-1, 1, self.tokens.len() as i32].into_iter().chain(self.tokens.iter().copied()).for_each(|t| w.i32(t));
                w.u32(*n_media);
                media.iter().for_each(|&m| w.i32(m));
            }
        }
        for section in &self.sections {
            match section {
                Section::Kv(kv) => {
                    w.u32(kv.streams.len() as u32);
                    kv.streams.iter().for_each(|s| self.write_stream(&mut w, s));
                }
                Section::Rec(rec) => {
                    w.u32(rec.cells.len() as u32);
                    for cell in &rec.cells {
                        w.i32(cell.pos);
                        w.u32(0);
                    }
                    w.u32(0);
                    w.u32(rec.n_layer);
                    rec.records.iter().for_each(|t| w.rows(t));
                }
            }
        }
        if let Some(appendix) = &self.appendix {
            w.bytes(b"SCKP");
            w.u32(1);
            w.u32(appendix.checkpoints.len() as u32);
            for c in &appendix.checkpoints {
                w.bytes(&c.n_tokens.to_le_bytes());
                w.i32(c.pos_min);
                w.i32(c.pos_max);
                for blob in &c.blobs {
                    w.u64(blob.len() as u64);
                    w.bytes(blob);
                }
            }
        }
        w.bytes(&self.trailing);
        w.0
    }

    fn write_stream(&self, w: &mut Writer, s: &Stream) {
        w.u32(s.cells.len() as u32);
        if s.cells.is_empty() {
            return;
        }
        for cell in &s.cells {
            w.i32(cell.pos);
            w.u32(1);
            if let Some((x, y, tok)) = cell.ext {
                w.i32(x);
                w.i32(y);
                tok.into_iter().for_each(|t| w.i32(t));
            }
            w.i32(cell.seq_id);
        }
        w.u32(s.v_trans.into());
        w.u32(s.k.len() as u32);
        if self.version >= StateVersion::V4 {
            let (k, v) = s.n_rot.unwrap_or((0, 0));
            w.u32(k);
            w.u32(v);
        }
        s.k.iter().for_each(|t| w.rows(t));
        for t in &s.v {
            if s.v_trans {
                w.u32(t.ty.id());
                w.u32(t.ty.block_bytes() as u32);
                w.u32(t.width);
                w.bytes(&t.data);
            } else {
                w.rows(t);
            }
        }
    }

    /// The shape of this state, as completely as a shape can tell: where streams or layers differ in something, that is
    /// left out, and empty streams do not tell more than their number.
    pub fn shape(&self) -> Shape {
        fn same<T: PartialEq>(mut all: impl Iterator<Item = T>) -> Option<T> {
            let first = all.next()?;
            all.all(|other| other == first).then_some(first)
        }
        let sections = self.sections.iter().map(|s| match s {
            Section::Rec(rec) => SectionShape::Rec(RecShape {
                n_layer: Some(rec.n_layer),
                ty: same(rec.records.iter().map(|t| t.ty)),
                widths: Some(rec.r().iter().zip(rec.s()).map(|(r, s)| (r.width, s.width)).collect()),
            }),
            Section::Kv(kv) => {
                let filled = || kv.streams.iter().filter(|s| !s.cells.is_empty());
                let widths = |s: &Stream| {
                    let v = |i: usize| s.v.get(i).map_or(0, |t| t.width);
                    s.k.iter().enumerate().map(|(i, t)| (t.width, v(i))).collect()
                };
                SectionShape::Kv(KvShape {
                    k_only: filled().any(|s| !s.k.is_empty()) && filled().all(|s| s.v.is_empty()),
                    n_stream: Some(kv.streams.len() as u32),
                    v_trans: same(filled().map(|s| s.v_trans)),
                    type_k: same(filled().flat_map(|s| s.k.iter().map(|t| t.ty))),
                    type_v: same(filled().flat_map(|s| s.v.iter().map(|t| t.ty))),
                    widths: same(filled().map(widths)),
                })
            }
        });
        Shape { cell_ext: self.cell_ext, sections: sections.collect() }
    }

    /// One tensor; `layer` is the index in the section. K and V are those of the section's first stream that has cells.
    pub fn tensor(&self, section: usize, layer: usize, part: Part) -> Option<&Tensor> {
        let list: &[Tensor] = match (self.sections.get(section)?, part) {
            (Section::Kv(kv), Part::K) => &kv.stream()?.k,
            (Section::Kv(kv), Part::V) => &kv.stream()?.v,
            (Section::Rec(rec), Part::R) => rec.r(),
            (Section::Rec(rec), Part::S) => rec.s(),
            _ => return None,
        };
        list.get(layer)
    }

    /// The tensors of a state: section, layer index in it, part, in file order.
    pub fn tensors(&self) -> Vec<(usize, usize, Part)> {
        let mut all = Vec::new();
        for (i, section) in self.sections.iter().enumerate() {
            let lists = match section {
                Section::Kv(kv) => {
                    kv.stream().map_or([(Part::K, 0), (Part::V, 0)], |s| [(Part::K, s.k.len()), (Part::V, s.v.len())])
                }
                Section::Rec(rec) => [(Part::R, rec.r().len()), (Part::S, rec.s().len())],
            };
            all.extend(lists.into_iter().flat_map(|(part, n)| (0..n).map(move |layer| (i, layer, part))));
        }
        all
    }

    /// The positions of a section's cells in file order; none for a section that is not there.
    pub fn positions(&self, section: usize) -> Vec<i32> {
        match self.sections.get(section) {
            Some(Section::Kv(kv)) => kv.stream().map_or(Vec::new(), |s| s.cells.iter().map(|c| c.pos).collect()),
            Some(Section::Rec(rec)) => rec.cells.iter().map(|c| c.pos).collect(),
            None => Vec::new(),
        }
    }

    /// A tensor's values: cells × width, cell after cell in file order, also where the file has them transposed.
    /// Rotated rows stay rotated.
    pub fn rows_f32(&self, section: usize, layer: usize, part: Part) -> Result<Vec<f32>, RowsError> {
        let t = self.tensor(section, layer, part).ok_or(RowsError::Missing { section, layer, part })?;
        let (cells, transposed) = match &self.sections[section] {
            Section::Kv(kv) => kv.stream().map_or((0, false), |s| (s.cells.len(), s.v_trans && part == Part::V)),
            Section::Rec(rec) => (rec.cells.len(), false),
        };
        let width = t.width as usize;
        let row = t.ty.row_bytes(width as u64);
        let want = row.and_then(|row| row.checked_mul(cells as u64)).unwrap_or(u64::MAX);
        let found = t.data.len() as u64;
        if want != found || (transposed && t.ty.block_elems() != 1) {
            return Err(RowsError::Length { section, layer, part, want, found });
        }
        // As long as the data, times at most seven: the product is bounded by what is in memory already.
        let mut values = vec![0.0f32; cells * width];
        t.ty.decode(&t.data, &mut values);
        if transposed {
            let channels = std::mem::take(&mut values);
            values.reserve_exact(channels.len());
            for cell in 0..cells {
                values.extend((0..width).map(|channel| channels[channel * cells + cell]));
            }
        }
        Ok(values)
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn bytes(&mut self, b: &[u8]) {
        self.0.extend_from_slice(b);
    }

    fn u32(&mut self, v: u32) {
        self.bytes(&v.to_le_bytes());
    }

    fn i32(&mut self, v: i32) {
        self.bytes(&v.to_le_bytes());
    }

    fn u64(&mut self, v: u64) {
        self.bytes(&v.to_le_bytes());
    }

    fn rows(&mut self, t: &Tensor) {
        self.u32(t.ty.id());
        self.u64(t.ty.row_bytes(t.width.into()).unwrap_or(0));
        self.bytes(&t.data);
    }
}

/// What stands before the sections, and where they begin.
struct Head {
    version: StateVersion,
    form: TokenForm,
    tokens: Vec<i32>,
    end: usize,
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    place: Option<Place>,
    version: StateVersion,
    head: Option<&'a Head>,
    /// The shape is a guess, so that fields which are never otherwise are held against it.
    guess: bool,
    copy: bool,
}

impl<'a> Reader<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Reader { bytes, at: 0, place: None, version: StateVersion::V2, head: None, guess: false, copy: false }
    }

    fn after(bytes: &'a [u8], head: &'a Head, guess: bool) -> Self {
        Reader { at: head.end, version: head.version, head: Some(head), guess, ..Self::new(bytes) }
    }

    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    fn error(&self, at: usize, what: Field, want: impl Into<String>, found: impl Into<String>) -> ParseError {
        let (offset, place) = (at as u64, self.place);
        ParseError { offset, what, place, want: want.into(), found: found.into(), short: false }
    }

    /// The next `n` bytes.
    fn take(&mut self, n: u64, what: Field) -> Result<&'a [u8], ParseError> {
        if n > self.left() {
            let want = format!("{n} bytes");
            let found = format!("the end of the file after {}", self.left());
            return Err(ParseError { short: true, ..self.error(self.at, what, want, found) });
        }
        let taken = &self.bytes[self.at..self.at + n as usize];
        self.at += n as usize;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: Field) -> Result<[u8; N], ParseError> {
        let mut a = [0; N];
        a.copy_from_slice(self.take(N as u64, what)?);
        Ok(a)
    }

    fn u32(&mut self, what: Field) -> Result<u32, ParseError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn i32(&mut self, what: Field) -> Result<i32, ParseError> {
        self.array(what).map(i32::from_le_bytes)
    }

    fn u64(&mut self, what: Field) -> Result<u64, ParseError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A u32 that must be `want`, where that is known.
    fn u32_as(&mut self, what: Field, want: Option<u32>) -> Result<u32, ParseError> {
        let at = self.at;
        let found = self.u32(what)?;
        match want {
            Some(want) if want != found => Err(self.error(at, what, want.to_string(), found.to_string())),
            _ => Ok(found),
        }
    }

    fn version(&mut self) -> Result<StateVersion, ParseError> {
        let magic: [u8; 4] = self.array(Field::Magic)?;
        if magic != *b"qsgg" {
            let show = |m: [u8; 4]| format!("{:02x} {:02x} {:02x} {:02x}", m[0], m[1], m[2], m[3]);
            let want = format!("{} (a sequence state)", show(*b"qsgg"));
            return Err(self.error(0, Field::Magic, want, show(magic)));
        }
        let version = self.u32(Field::Version)?;
        StateVersion::try_from(version).map_err(|_| self.error(4, Field::Version, "2, 3 or 4", version.to_string()))
    }

    fn head(mut self) -> Result<Head, ParseError> {
        let version = self.version()?;
        let n = u64::from(self.u32(Field::TokenCount)?);
        let start = self.at;
        let words =
            self.take(n * 4, Field::Token)?.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let mut words: Vec<i32> = words.collect();
        let end = self.at;
        if words.first() != Some(&-1) {
            return Ok(Head { version, form: TokenForm::Plain, tokens: words, end });
        }
        // The packed form, whose words have a version and counts of their own.
        let word = |i: usize, what| {
            let missing = || self.error(start + 4 * i, what, "a word", format!("the end of the {n} words"));
            words.get(i).copied().ok_or_else(missing)
        };
        let packed = word(1, Field::PackedVersion)?;
        if packed != 1 {
            return Err(self.error(start + 4, Field::PackedVersion, "1", packed.to_string()));
        }
        let count = word(2, Field::TokenCount)?;
        let ids = match usize::try_from(count) {
            Ok(ids) if ids <= words.len().saturating_sub(4) => ids,
            _ => {
                let want = format!("0 to {} for {n} words", (words.len() as i64 - 4).max(0));
                return Err(self.error(start + 8, Field::TokenCount, want, count.to_string()));
            }
        };
        let n_media = word(3 + ids, Field::MediaCount)? as u32;
        let media = words.split_off(4 + ids);
        if n_media == 0 && !media.is_empty() {
            let found = format!("{} more words", media.len());
            return Err(self.error(
                start + 4 * (4 + ids),
                Field::Media,
                "the end of the words, since n_media is 0",
                found,
            ));
        }
        words.truncate(3 + ids);
        words.drain(..3);
        Ok(Head { version, form: TokenForm::Packed { n_media, media }, tokens: words, end })
    }

    fn data(&self, bytes: &[u8]) -> Vec<u8> {
        if self.copy { bytes.to_vec() } else { Vec::new() }
    }

    /// Everything after the head; also where it ended. Without `copy` the tensors' bytes are passed over.
    fn body(mut self, shape: &Shape, copy: bool) -> Result<(State, usize), ParseError> {
        self.copy = copy;
        let mut sections: Vec<Section> = Vec::new();
        let mut n_stream = None;
        for (i, s) in shape.sections.iter().enumerate() {
            self.place = Some(Place { section: i, layer: None });
            sections.push(match s {
                SectionShape::Kv(kv) => {
                    let kv = self.kv(kv, shape.cell_ext, n_stream)?;
                    // All caches of a decoder have the same streams.
                    n_stream = Some(kv.streams.len() as u32);
                    Section::Kv(kv)
                }
                SectionShape::Rec(rec) => {
                    let filled = sections.iter().any(|s| matches!(s, Section::Kv(kv) if kv.stream().is_some()));
                    Section::Rec(self.rec(rec, filled)?)
                }
            });
        }
        self.place = None;
        let appendix = if self.bytes[self.at..].starts_with(b"SCKP") { Some(self.appendix()?) } else { None };
        let (form, tokens) = match self.head {
            Some(head) if copy => (head.form.clone(), head.tokens.clone()),
            _ => (TokenForm::Plain, Vec::new()),
        };
        let (version, cell_ext) = (self.version, shape.cell_ext);
        Ok((State { version, form, tokens, cell_ext, sections, appendix, trailing: Vec::new() }, self.at))
    }

    fn kv(&mut self, shape: &KvShape, cell_ext: bool, n_stream: Option<u32>) -> Result<Kv, ParseError> {
        let at = self.at;
        let found = self.u32_as(Field::NStream, shape.n_stream.or(n_stream))?;
        if !(1..=MAX_STREAMS).contains(&found) {
            return Err(self.error(at, Field::NStream, format!("1 to {MAX_STREAMS}"), found.to_string()));
        }
        let mut streams = Vec::new();
        for _ in 0..found {
            streams.push(self.stream(shape, cell_ext)?);
        }
        Ok(Kv { streams })
    }

    fn stream(&mut self, shape: &KvShape, cell_ext: bool) -> Result<Stream, ParseError> {
        let section = self.place.map_or(0, |p| p.section);
        let cells = self.cells(cell_ext)?;
        if cells.is_empty() {
            return Ok(Stream::default());
        }
        let at = self.at;
        let v_trans = match self.u32_as(Field::VTrans, shape.v_trans.map(u32::from))? {
            0 => false,
            1 => true,
            other => return Err(self.error(at, Field::VTrans, "0 or 1", other.to_string())),
        };
        let n_layer = self.u32_as(Field::NLayer, shape.widths.as_ref().map(|w| w.len() as u32))?;
        let n_rot = match self.version {
            StateVersion::V4 => Some((self.u32(Field::NRotK)?, self.u32(Field::NRotV)?)),
            _ => None,
        };
        let mut stream = Stream { cells, v_trans, n_rot, k: Vec::new(), v: Vec::new() };
        let n_cells = stream.cells.len() as u64;
        // A list grows with the bytes that are found for it, whatever number of layers is claimed.
        for layer in 0..n_layer as usize {
            self.place = Some(Place { section, layer: Some(layer) });
            let width = shape.widths.as_ref().map(|w| w[layer].0);
            let fields = [Field::TypeK, Field::RowSizeK, Field::RowsK];
            stream.k.push(self.rows(fields, n_cells, shape.type_k, width, layer > 0)?);
        }
        for layer in 0..if shape.k_only { 0 } else { n_layer as usize } {
            self.place = Some(Place { section, layer: Some(layer) });
            let width = shape.widths.as_ref().map(|w| w[layer].1);
            let empty = stream.k[layer].width == 0;
            stream.v.push(if v_trans {
                self.columns(n_cells, shape.type_v, width, empty)?
            } else {
                self.rows([Field::TypeV, Field::RowSizeV, Field::RowsV], n_cells, shape.type_v, width, empty)?
            });
        }
        self.place = Some(Place { section, layer: None });
        Ok(stream)
    }

    fn cells(&mut self, cell_ext: bool) -> Result<Vec<Cell>, ParseError> {
        let has_tok = self.version >= StateVersion::V3;
        let each = match (cell_ext, has_tok) {
            (false, _) => 12,
            (true, false) => 20,
            (true, true) => 24,
        };
        let at = self.at;
        let n = self.u32(Field::CellCount)?;
        if self.guess && n > 0 {
            self.first_cell(cell_ext)?;
        }
        let need = u64::from(n) * each;
        if need > self.left() {
            let want = format!("at most {} (cells of {each} bytes to the end of the file)", self.left() / each);
            return Err(ParseError { short: true, ..self.error(at, Field::CellCount, want, n.to_string()) });
        }
        let mut cells = Vec::with_capacity(n as usize);
        for _ in 0..n {
            let pos = self.i32(Field::Position)?;
            self.u32_as(Field::NSeqId, Some(1))?;
            let ext = if cell_ext {
                let (x, y) = (self.i32(Field::CellExt)?, self.i32(Field::CellExt)?);
                let tok = if has_tok { Some(self.i32(Field::CellExt)?) } else { None };
                Some((x, y, tok))
            } else {
                None
            };
            cells.push(Cell { pos, ext, seq_id: self.i32(Field::SeqId)? });
        }
        Ok(cells)
    }

    /// Looks at the first cell, as far as it is there, before the number of cells is believed: something else read as
    /// cells mostly does not have even one. Sequences begin with text, whose x and y are the position; cells without an
    /// extension do not look so, and could otherwise pass for a while and hide where a fault is.
    fn first_cell(&self, cell_ext: bool) -> Result<(), ParseError> {
        let word = |i: usize| Some(i32::from_le_bytes(*self.bytes[self.at..].get(4 * i..)?.first_chunk()?));
        let (pos, n_seq_id) = (word(0), word(1));
        if let Some(n) = n_seq_id.filter(|&n| n != 1) {
            return Err(self.error(self.at + 4, Field::NSeqId, "1", (n as u32).to_string()));
        }
        for i in [2, 3] {
            if let (true, Some(pos), Some(found)) = (cell_ext, pos, word(i))
                && pos != found
            {
                return Err(self.error(self.at + 4 * i, Field::CellExt, pos.to_string(), found.to_string()));
            }
        }
        Ok(())
    }

    fn ty(&mut self, what: Field, want: Option<CacheType>) -> Result<CacheType, ParseError> {
        let at = self.at;
        let id = self.u32(what)?;
        let show = |t: CacheType| format!("{} ({t})", t.id());
        let found = CacheType::from_id(id);
        match (found, want) {
            (Some(found), None) => Ok(found),
            (Some(found), Some(want)) if found == want => Ok(found),
            (_, Some(want)) => Err(self.error(at, what, show(want), found.map_or(id.to_string(), show))),
            (None, None) => Err(self.error(at, what, "the id of a cache type", id.to_string())),
        }
    }

    /// `empty`: the rows may have no channels, though nobody says how many they have.
    fn rows(
        &mut self,
        [what_ty, what_size, what_rows]: [Field; 3],
        cells: u64,
        ty: Option<CacheType>,
        width: Option<u32>,
        empty: bool,
    ) -> Result<Tensor, ParseError> {
        let ty = self.ty(what_ty, ty)?;
        let at = self.at;
        let size = self.u64(what_size)?;
        let found_width = ty.row_elems(size).and_then(|w| u32::try_from(w).ok());
        let width = match (found_width, width) {
            // Rows of nothing stand only in recurrent memories, and behind others where not all layers attend.
            (Some(0), None) if !empty => None,
            (Some(found), None) => Some(found),
            (Some(found), Some(want)) if found == want => Some(found),
            _ => None,
        }
        .ok_or_else(|| {
            let want = match width.and_then(|w| ty.row_bytes(w.into())) {
                Some(bytes) => bytes.to_string(),
                None => format!("a multiple of {} ({ty})", ty.block_bytes()),
            };
            self.error(at, what_size, want, size.to_string())
        })?;
        let len = cells.checked_mul(size).ok_or_else(|| self.error(at, what_size, "less", size.to_string()))?;
        let data = self.take(len, what_rows)?;
        Ok(Tensor { ty, width, data: self.data(data) })
    }

    fn columns(
        &mut self,
        cells: u64,
        ty: Option<CacheType>,
        width: Option<u32>,
        empty: bool,
    ) -> Result<Tensor, ParseError> {
        let at = self.at;
        let ty = self.ty(Field::TypeV, ty)?;
        if ty.block_elems() != 1 {
            return Err(self.error(at, Field::TypeV, "f32, f16 or bf16 where V is transposed", ty.name()));
        }
        self.u32_as(Field::RowSizeV, Some(ty.block_bytes() as u32))?;
        let at = self.at;
        let width = self.u32_as(Field::RowSizeV, width)?;
        if width == 0 && !empty {
            return Err(self.error(at, Field::RowSizeV, "at least 1 channel", "0"));
        }
        // Three 32-bit factors at most, of which one is 4.
        let len = (u64::from(width) * ty.block_bytes()).checked_mul(cells);
        let len = len.ok_or_else(|| self.error(at, Field::RowSizeV, "less", width.to_string()))?;
        let data = self.take(len, Field::RowsV)?;
        Ok(Tensor { ty, width, data: self.data(data) })
    }

    fn rec(&mut self, shape: &RecShape, filled: bool) -> Result<Rec, ParseError> {
        let section = self.place.map_or(0, |p| p.section);
        // One sequence has one cell. More are read, but not so many that any number would do for a guess.
        let at = self.at;
        let n = self.u32(Field::CellCount)?;
        if n > 16 || (self.guess && filled && n == 0) {
            return Err(self.error(at, Field::CellCount, "1", n.to_string()));
        }
        let mut cells = Vec::new();
        for _ in 0..n {
            cells.push(RecCell { pos: self.i32(Field::Position)? });
            self.u32_as(Field::NSeqId, Some(0))?;
        }
        self.u32_as(Field::STrans, Some(0))?;
        let at = self.at;
        let n_layer = self.u32_as(Field::NLayer, shape.n_layer)?;
        if n_layer == 0 {
            return Err(self.error(at, Field::NLayer, "at least 1", "0"));
        }
        let mut records = Vec::new();
        let fields = [Field::RecordType, Field::RecordRowSize, Field::RecordRows];
        if let Some(widths) = &shape.widths {
            let (r, s) = (widths.iter().map(|w| w.0), widths.iter().map(|w| w.1));
            for (layer, width) in r.enumerate().chain(s.enumerate()) {
                self.place = Some(Place { section, layer: Some(layer) });
                records.push(self.rows(fields, n.into(), shape.ty, Some(width), true)?);
            }
            self.place = Some(Place { section, layer: None });
            return Ok(Rec { cells, n_layer, records });
        }
        // Each layer has at most R and S.
        while self.left() > 0
            && !self.bytes[self.at..].starts_with(b"SCKP")
            && (records.len() as u64) < 2 * u64::from(n_layer)
        {
            self.place = Some(Place { section, layer: Some(records.len()) });
            records.push(self.rows(fields, n.into(), shape.ty, None, true)?);
        }
        self.place = Some(Place { section, layer: None });
        if records.len() % 2 != 0 {
            let found = records.len().to_string();
            return Err(self.error(self.at, Field::RecordCount, "an even number (R and S of each layer)", found));
        }
        Ok(Rec { cells, n_layer, records })
    }

    fn appendix(&mut self) -> Result<Appendix, ParseError> {
        self.take(4, Field::Appendix)?;
        self.u32_as(Field::AppendixVersion, Some(1))?;
        let n = self.u32(Field::Appendix)?;
        let mut checkpoints = Vec::new();
        for _ in 0..n {
            let n_tokens = self.u64(Field::Appendix)? as i64;
            let (pos_min, pos_max) = (self.i32(Field::Appendix)?, self.i32(Field::Appendix)?);
            let mut blobs = [Vec::new(), Vec::new(), Vec::new()];
            for blob in &mut blobs {
                let len = self.u64(Field::Appendix)?;
                let bytes = self.take(len, Field::Appendix)?;
                *blob = self.data(bytes);
            }
            checkpoints.push(Checkpoint { n_tokens, pos_min, pos_max, blobs });
        }
        Ok(Appendix { checkpoints })
    }
}
