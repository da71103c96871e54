//! What is wrong with a state file, by name - above all what a server would take without a word: positions that make it
//! fail at the next request, tokens it has no cells for, values that turn its answers into nonsense. A server's own
//! check stops at the sizes.
//!
//! Only what is in the file and what is expected of it is judged. Whether the numbers are the *right* ones is for
//! [`compare`](crate::compare).

use crate::{
    CacheType, Cell, Field, KvSection, KvSpec, ParseError, Part, Place, RecSection, RowsError, Section, Shape, State,
    StateVersion, TokenForm,
};

/// What is known of what a state should be. Whatever is `None` (or `false`) is not held against it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Expect {
    /// Size of the model's vocabulary.
    pub n_vocab: Option<u32>,
    /// The tokens it should be the state of.
    pub tokens: Option<Vec<i32>>,
    /// The version the reading server has.
    pub version: Option<StateVersion>,
    /// The memory of the reading server.
    pub spec: Option<KvSpec>,
    /// Cells the reading server has for the sequence (its context size).
    pub n_ctx: Option<u32>,
    /// It is a handoff, not a server's own file: the ids must be a plain list, and window sections hold the one cell
    /// more that makes them usable (all cells with `swa_full`).
    pub handoff: bool,
}

/// One thing wrong. Where several cells or values are wrong in one way, the first is named.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The file cannot be taken apart: cut, or a field is impossible. A server refuses it, or aborts when it is cut in
    /// its rows.
    #[error("{0}")]
    Unreadable(ParseError),
    /// Bytes follow the state. Servers ignore them.
    #[error("{len} bytes follow the end of the state")]
    TrailingBytes {
        /// How many.
        len: u64,
    },
    /// A field is sound, but not what the reading server has; it will refuse.
    #[error("{}{field} is {found}, the reader has {want}", place.map(|p| format!("{p}: ")).unwrap_or_default())]
    Mismatch {
        /// The field.
        field: Field,
        /// Section and layer.
        place: Option<Place>,
        /// What the reader has.
        want: String,
        /// What the file has.
        found: String,
    },
    /// There are no tokens: a server restores nothing.
    #[error("there are no tokens: the whole prompt would be computed again")]
    NoTokens,
    /// An id that the model does not have. Older servers take it.
    #[error("token {index} is {id}, outside a vocabulary of {n_vocab}")]
    TokenOutside {
        /// Index in the list.
        index: usize,
        /// The id.
        id: i32,
        /// Size of the vocabulary; 2^31 where it is not known.
        n_vocab: u32,
    },
    /// Another number of tokens than were handed over.
    #[error("{found} tokens, should be {want}")]
    TokenCount {
        /// Tokens handed over.
        want: usize,
        /// Tokens in the file.
        found: usize,
    },
    /// Another token than was handed over: everything from there on is computed again.
    #[error("token {index} is {found}, should be {want}")]
    TokenDiffers {
        /// Index in the list.
        index: usize,
        /// The id handed over.
        want: i32,
        /// The id in the file.
        found: i32,
    },
    /// The ids are in the packed form, whose frame words older servers take for ids.
    #[error("the token ids are packed; a plain list is read by servers of every build")]
    PackedTokens,
    /// There are images or sound among the tokens.
    #[error("{n_media} media chunks among the tokens")]
    MediaTokens {
        /// How many.
        n_media: u32,
    },
    /// Tokens, but no cells: taken by servers, which then abort.
    #[error("section {section}: no cells for {tokens} tokens: a server takes that and fails at the next request")]
    NoCells {
        /// Section.
        section: usize,
        /// Tokens in the file.
        tokens: usize,
    },
    /// Cells without a token: they are thrown away.
    #[error("section {section}: {tokens} tokens for {cells} cells")]
    FewerTokensThanCells {
        /// Section.
        section: usize,
        /// Tokens in the file.
        tokens: usize,
        /// Cells in the section.
        cells: usize,
    },
    /// Tokens without a cell: servers believe them.
    #[error("section {section}: {tokens} tokens, but only {cells} cells")]
    MoreTokensThanCells {
        /// Section.
        section: usize,
        /// Tokens in the file.
        tokens: usize,
        /// Cells in the section.
        cells: usize,
    },
    /// A window section does not hold enough of the last positions.
    #[error("section {section}: {found} cells of a sliding window, should be at least {want}")]
    WindowCells {
        /// Section.
        section: usize,
        /// Cells it needs.
        want: usize,
        /// Cells it has.
        found: usize,
    },
    /// More cells than the server has; it refuses, or (before about 11200) allocates until it is killed.
    #[error("section {section}: {cells} cells, the reader has {n_ctx}")]
    TooManyCells {
        /// Section.
        section: usize,
        /// Cells in the section.
        cells: usize,
        /// Cells the reader has.
        n_ctx: u32,
    },
    /// More than one stream has cells, but a file is of one sequence.
    #[error("section {section}: {filled} streams have cells, should be 1")]
    SeveralStreams {
        /// Section.
        section: usize,
        /// How many do.
        filled: usize,
    },
    /// A negative position: the cell survives being erased and spoils later answers, or the server aborts.
    #[error("section {section}, cell {cell}: position {pos} is negative: the cell would outlive its slot")]
    NegativePosition {
        /// Section.
        section: usize,
        /// Cell in file order.
        cell: usize,
        /// Its position.
        pos: i32,
    },
    /// A position past the last token: the next request fails, for the largest ones every request until a restart.
    #[error("section {section}, cell {cell}: position {pos} lies past the last token ({last})")]
    PositionTooLarge {
        /// Section.
        section: usize,
        /// Cell in file order.
        cell: usize,
        /// Its position.
        pos: i32,
        /// The largest there should be.
        last: i64,
    },
    /// Two cells have one position.
    #[error("section {section}, cell {cell}: position {pos} a second time")]
    DuplicatePosition {
        /// Section.
        section: usize,
        /// The later cell in file order.
        cell: usize,
        /// Their position.
        pos: i32,
    },
    /// Cells do not stand in the order of positions: right but for the last bits, and nothing writes it.
    #[error("section {section}, cell {cell}: position {pos} after {previous}: cells are not in order")]
    CellsOutOfOrder {
        /// Section.
        section: usize,
        /// The later cell in file order.
        cell: usize,
        /// Its position.
        pos: i32,
        /// The position before it.
        previous: i32,
    },
    /// Positions are missing in between: wrong answers, no warning.
    #[error("section {section}: no cell has a position between {after} and {next}")]
    PositionGap {
        /// Section.
        section: usize,
        /// The position before the gap.
        after: i32,
        /// The one after it.
        next: i32,
    },
    /// The first position is not that of the first token: wrong answers, no warning.
    #[error("section {section}: the first position is {found}, should be {want}")]
    FirstPosition {
        /// Section.
        section: usize,
        /// What it should be.
        want: i32,
        /// What it is.
        found: i32,
    },
    /// The last position is not that of the last token.
    #[error("section {section}: the last position is {found}, should be {want}")]
    LastPosition {
        /// Section.
        section: usize,
        /// What it should be.
        want: i64,
        /// What it is.
        found: i32,
    },
    /// The extension of a cell is not that of its text token.
    #[error("section {section}, cell {cell}: extension {found}, should be {want} for text")]
    CellExtension {
        /// Section.
        section: usize,
        /// Cell in file order.
        cell: usize,
        /// x, y and token as they should be.
        want: String,
        /// As they are.
        found: String,
    },
    /// The bytes of a tensor are not those of its cells (in states that were not parsed).
    #[error("{0}")]
    Rows(RowsError),
    /// Values that are not numbers: taken by servers, whose answers are then nonsense.
    #[error(
        "section {section} layer {layer} {part}: {count} values are not finite, the first is {value} at position {position}, channel {channel}"
    )]
    NonFinite {
        /// Section.
        section: usize,
        /// Layer in the section.
        layer: usize,
        /// Part.
        part: Part,
        /// Position of the first.
        position: i32,
        /// Channel of the first.
        channel: usize,
        /// The first as text: NaN, inf or -inf.
        value: String,
        /// How many there are in the tensor.
        count: usize,
    },
    /// A checkpoint of the appendix does not lie within the tokens.
    #[error("checkpoint {index}: positions {pos_min} to {pos_max} of {n_tokens} tokens, in a state of {tokens}")]
    Checkpoint {
        /// Index in the appendix.
        index: usize,
        /// Its first position.
        pos_min: i32,
        /// Its last.
        pos_max: i32,
        /// Its number of tokens.
        n_tokens: i64,
        /// Tokens of the state.
        tokens: usize,
    },
}

impl Fault {
    /// A short name in lower case, stable: that of the field for what is told by one field, else that of the kind.
    pub fn name(&self) -> &'static str {
        match self {
            Fault::Unreadable(e) => e.what.name(),
            Fault::Mismatch { field, .. } => field.name(),
            Fault::TrailingBytes { .. } => "trailing",
            Fault::NoTokens => "no_tokens",
            Fault::TokenOutside { .. } => "token_outside",
            Fault::TokenCount { .. } => "token_count",
            Fault::TokenDiffers { .. } => "token_differs",
            Fault::PackedTokens => "packed_tokens",
            Fault::MediaTokens { .. } => "media_tokens",
            Fault::NoCells { .. } => "no_cells",
            Fault::FewerTokensThanCells { .. } => "fewer_tokens_than_cells",
            Fault::MoreTokensThanCells { .. } => "more_tokens_than_cells",
            Fault::WindowCells { .. } => "window_cells",
            Fault::TooManyCells { .. } => "too_many_cells",
            Fault::SeveralStreams { .. } => "several_streams",
            Fault::NegativePosition { .. } => "negative_position",
            Fault::PositionTooLarge { .. } => "position_too_large",
            Fault::DuplicatePosition { .. } => "duplicate_position",
            Fault::CellsOutOfOrder { .. } => "cells_out_of_order",
            Fault::PositionGap { .. } => "position_gap",
            Fault::FirstPosition { .. } => "first_position",
            Fault::LastPosition { .. } => "last_position",
            Fault::CellExtension { .. } => "cell_extension",
            Fault::Rows(_) => "row_bytes",
            Fault::NonFinite { .. } => "non_finite",
            Fault::Checkpoint { .. } => "checkpoint",
        }
    }
}

/// All that is wrong with the bytes of a file, those that cannot be taken apart included. Empty = a sound handoff, as
/// far as what is expected goes.
///
/// With [`Expect::spec`] the file is read by that shape, so that a damaged field is named where it stands.
pub fn check_bytes(bytes: &[u8], expect: &Expect) -> Vec<Fault> {
    let Some(spec) = &expect.spec else {
        return State::parse(bytes).map_or_else(|e| vec![Fault::Unreadable(e)], |state| check(&state, expect));
    };
    match State::parse_as(bytes, &Shape::from(spec)) {
        Ok(state) => check(&state, expect),
        // A sound file of another shape: then all the fields that differ can be named, not only the first.
        Err(e) if !e.short => match State::parse(bytes).map(|state| check(&state, expect)) {
            Ok(faults) if !faults.is_empty() => faults,
            _ => vec![Fault::Unreadable(e)],
        },
        Err(e) => vec![Fault::Unreadable(e)],
    }
}

/// All that is wrong with a state.
pub fn check(state: &State, expect: &Expect) -> Vec<Fault> {
    let mut faults = Vec::new();
    tokens(state, expect, &mut faults);
    if let Some(want) = expect.version.filter(|&v| v != state.version) {
        faults.push(mismatch(Field::Version, None, want, state.version));
    }
    if let Some(spec) = &expect.spec {
        shape(state, spec, &mut faults);
    }
    for (i, section) in state.sections.iter().enumerate() {
        match section {
            Section::Kv(kv) => {
                let filled = kv.streams.iter().filter(|s| !s.cells.is_empty()).count();
                if filled > 1 {
                    faults.push(Fault::SeveralStreams { section: i, filled });
                }
                let cells = kv.stream().map_or(&[][..], |s| &s.cells);
                let held = cell_count(state, expect, i, cells.len(), &mut faults);
                positions(state, i, cells, held, &mut faults);
                if state.cell_ext && matches!(state.form, TokenForm::Plain | TokenForm::Packed { n_media: 0, .. }) {
                    extension(state, i, cells, &mut faults);
                }
            }
            Section::Rec(rec) => {
                let last = state.tokens.len() as i64 - 1;
                match rec.cells.as_slice() {
                    [] if state.tokens.is_empty() => {}
                    [] => faults.push(Fault::NoCells { section: i, tokens: state.tokens.len() }),
                    cells => {
                        // A sequence has one state; a server holds several cells for one to be an error of its own.
                        if cells.len() > 1 {
                            let place = Some(Place { section: i, layer: None });
                            faults.push(mismatch(Field::CellCount, place, 1, cells.len()));
                        }
                        if let Some(c) = cells.iter().find(|c| i64::from(c.pos) != last) {
                            faults.push(Fault::LastPosition { section: i, want: last, found: c.pos });
                        }
                    }
                }
            }
        }
    }
    values(state, &mut faults);
    for (index, c) in state.appendix.iter().flat_map(|a| a.checkpoints.iter().enumerate()) {
        let tokens = state.tokens.len();
        let (n_tokens, pos_min, pos_max) = (c.n_tokens, c.pos_min, c.pos_max);
        if pos_min < 0
            || pos_max < pos_min
            || i64::from(pos_max) >= tokens as i64
            || !(0..=tokens as i64).contains(&n_tokens)
        {
            faults.push(Fault::Checkpoint { index, pos_min, pos_max, n_tokens, tokens });
        }
    }
    if !state.trailing.is_empty() {
        faults.push(Fault::TrailingBytes { len: state.trailing.len() as u64 });
    }
    faults
}

fn mismatch(field: Field, place: Option<Place>, want: impl ToString, found: impl ToString) -> Fault {
    Fault::Mismatch { field, place, want: want.to_string(), found: found.to_string() }
}

fn tokens(state: &State, expect: &Expect, faults: &mut Vec<Fault>) {
    if state.tokens.is_empty() {
        faults.push(Fault::NoTokens);
    }
    match state.form {
        TokenForm::Packed { n_media, .. } if n_media > 0 => faults.push(Fault::MediaTokens { n_media }),
        TokenForm::Packed { .. } if expect.handoff => faults.push(Fault::PackedTokens),
        _ => {}
    }
    let n_vocab = expect.n_vocab.unwrap_or(1 << 31);
    if let Some(index) = state.tokens.iter().position(|&id| id < 0 || id as u32 >= n_vocab) {
        faults.push(Fault::TokenOutside { index, id: state.tokens[index], n_vocab });
    }
    if let Some(want) = &expect.tokens {
        if want.len() != state.tokens.len() {
            faults.push(Fault::TokenCount { want: want.len(), found: state.tokens.len() });
        }
        if let Some(index) = want.iter().zip(&state.tokens).position(|(a, b)| a != b) {
            faults.push(Fault::TokenDiffers { index, want: want[index], found: state.tokens[index] });
        }
    }
}

/// Everything that a server holds against its own memory.
fn shape(state: &State, spec: &KvSpec, faults: &mut Vec<Fault>) {
    if state.cell_ext != spec.cell_ext {
        faults.push(mismatch(Field::CellExt, None, spec.cell_ext, state.cell_ext));
    }
    let n_sections = spec.sections.len() + usize::from(spec.recurrent.is_some());
    if state.sections.len() != n_sections {
        faults.push(mismatch(Field::Sections, None, n_sections, state.sections.len()));
    }
    if let Some(want) = &spec.recurrent {
        recurrent_shape(state, want, spec.sections.len(), faults);
    }
    for (section, (found, want)) in state.sections.iter().zip(&spec.sections).enumerate() {
        let place = Some(Place { section, layer: None });
        let Section::Kv(kv) = found else {
            faults.push(mismatch(Field::Sections, place, "an attention cache", "a recurrent memory"));
            continue;
        };
        if kv.streams.len() != spec.n_stream as usize {
            faults.push(mismatch(Field::NStream, place, spec.n_stream, kv.streams.len()));
        }
        let Some(s) = kv.stream() else { continue };
        if s.v_trans != spec.v_trans {
            faults.push(mismatch(Field::VTrans, place, u8::from(spec.v_trans), u8::from(s.v_trans)));
        }
        if s.k.len() != want.layers.len() {
            faults.push(mismatch(Field::NLayer, place, want.layers.len(), s.k.len()));
        }
        let with_v = if want.k_only() { 0 } else { s.k.len() };
        if s.v.len() != with_v {
            faults.push(mismatch(Field::NLayer, place, format!("V of {with_v} layers"), s.v.len()));
        }
        if let Some((k, v)) = s.n_rot {
            for (field, want, found) in [(Field::NRotK, want.n_rot.0, k), (Field::NRotV, want.n_rot.1, v)] {
                if found != want {
                    faults.push(mismatch(field, place, want, found));
                }
            }
        }
        for (layer, l) in want.layers.iter().enumerate() {
            let place = Some(Place { section, layer: Some(layer) });
            let parts = [
                (s.k.get(layer), spec.type_k, l.n_embd_k, [Field::TypeK, Field::RowSizeK]),
                (s.v.get(layer), spec.type_v, l.n_embd_v, [Field::TypeV, Field::RowSizeV]),
            ];
            for (t, ty, width, [type_field, size_field]) in parts {
                let Some(t) = t else { continue };
                if t.ty != ty {
                    faults.push(mismatch(type_field, place, ty, t.ty));
                }
                if t.width != width {
                    faults.push(mismatch(size_field, place, format!("{width} channels"), t.width));
                }
            }
        }
    }
}

/// The same of the recurrent memory, which stands at `section`.
fn recurrent_shape(state: &State, want: &RecSection, section: usize, faults: &mut Vec<Fault>) {
    let place = Some(Place { section, layer: None });
    let rec = match state.sections.get(section) {
        Some(Section::Rec(rec)) => rec,
        Some(Section::Kv(_)) => {
            return faults.push(mismatch(Field::Sections, place, "a recurrent memory", "an attention cache"));
        }
        // Too few sections: that has been said.
        None => return,
    };
    if rec.n_layer != want.n_layer {
        faults.push(mismatch(Field::NLayer, place, want.n_layer, rec.n_layer));
    }
    if rec.records.len() != 2 * want.layers.len() {
        faults.push(mismatch(Field::RecordCount, place, 2 * want.layers.len(), rec.records.len()));
        return;
    }
    for (layer, l) in want.layers.iter().enumerate() {
        let place = Some(Place { section, layer: Some(layer) });
        for (t, width) in [(&rec.r()[layer], l.n_embd_r), (&rec.s()[layer], l.n_embd_s)] {
            if t.ty != CacheType::F32 {
                faults.push(mismatch(Field::RecordType, place, CacheType::F32, t.ty));
            }
            if t.width != width {
                faults.push(mismatch(Field::RecordRowSize, place, format!("{width} numbers"), t.width));
            }
        }
    }
}

/// Whether a section holds every position or only the last ones.
#[derive(Copy, Clone, PartialEq)]
enum Held {
    All,
    Last,
}

fn cell_count(state: &State, expect: &Expect, section: usize, cells: usize, faults: &mut Vec<Fault>) -> Held {
    let tokens = state.tokens.len();
    let (held, at_least) = match expect.spec.as_ref().map(|spec| (spec.sections.get(section), spec.swa_full)) {
        Some((Some(KvSection { window: None, .. }), _)) => (Held::All, tokens),
        Some((Some(KvSection { window: Some(w), .. }), swa_full)) => match expect.handoff {
            true if swa_full => (Held::Last, tokens),
            true => (Held::Last, tokens.min((*w as usize).saturating_add(1))),
            false => (Held::Last, tokens.min(*w as usize)),
        },
        // Nothing is known of it; but where a model has several caches, the first is the full one.
        _ if section == 0 => (Held::All, tokens),
        _ => (Held::Last, tokens.min(1)),
    };
    if cells == 0 && tokens > 0 {
        faults.push(Fault::NoCells { section, tokens });
    } else if cells > tokens {
        faults.push(Fault::FewerTokensThanCells { section, tokens, cells });
    } else if cells < at_least {
        faults.push(match held {
            Held::All => Fault::MoreTokensThanCells { section, tokens, cells },
            Held::Last => Fault::WindowCells { section, want: at_least, found: cells },
        });
    }
    if let Some(n_ctx) = expect.n_ctx.filter(|&n| cells > n as usize) {
        faults.push(Fault::TooManyCells { section, cells, n_ctx });
    }
    held
}

fn positions(state: &State, section: usize, cells: &[Cell], held: Held, faults: &mut Vec<Fault>) {
    // Where cells outnumber tokens, that has been said; the positions are then held against the cells.
    let end = state.tokens.len().max(cells.len()) as i64;
    if let Some(cell) = cells.iter().position(|c| c.pos < 0) {
        faults.push(Fault::NegativePosition { section, cell, pos: cells[cell].pos });
    }
    if let Some(cell) = cells.iter().position(|c| i64::from(c.pos) >= end) {
        faults.push(Fault::PositionTooLarge { section, cell, pos: cells[cell].pos, last: end - 1 });
    }
    if let Some(i) = cells.windows(2).position(|w| w[1].pos < w[0].pos) {
        let (pos, previous) = (cells[i + 1].pos, cells[i].pos);
        faults.push(Fault::CellsOutOfOrder { section, cell: i + 1, pos, previous });
    }
    let mut sorted: Vec<(i32, usize)> = cells.iter().enumerate().map(|(i, c)| (c.pos, i)).collect();
    sorted.sort_unstable();
    if let Some(w) = sorted.windows(2).filter(|w| w[0].0 == w[1].0).min_by_key(|w| w[1].1) {
        faults.push(Fault::DuplicatePosition { section, cell: w[1].1, pos: w[1].0 });
    }
    if let Some(w) = sorted.windows(2).find(|w| i64::from(w[1].0) - i64::from(w[0].0) > 1) {
        faults.push(Fault::PositionGap { section, after: w[0].0, next: w[1].0 });
    }
    if let (Some(&(first, _)), Some(&(last, _))) = (sorted.first(), sorted.last()) {
        if held == Held::All && first > 0 {
            faults.push(Fault::FirstPosition { section, want: 0, found: first });
        }
        let want = match held {
            // Of fewer cells than tokens that has been said too.
            Held::All => cells.len() as i64 - 1,
            Held::Last => end - 1,
        };
        if i64::from(last) < want {
            faults.push(Fault::LastPosition { section, want, found: last });
        }
    }
}

fn extension(state: &State, section: usize, cells: &[Cell], faults: &mut Vec<Fault>) {
    for (cell, c) in cells.iter().enumerate() {
        let Some((x, y, tok)) = c.ext else { continue };
        let want_tok = usize::try_from(c.pos).ok().and_then(|p| state.tokens.get(p).copied());
        let tok_differs = matches!((tok, want_tok), (Some(a), Some(b)) if a != b);
        if x != c.pos || y != c.pos || tok_differs {
            let show =
                |x: i32, y: i32, t: Option<i32>| format!("{x}, {y}{}", t.map(|t| format!(", {t}")).unwrap_or_default());
            let want = show(c.pos, c.pos, tok.and(want_tok));
            faults.push(Fault::CellExtension { section, cell, want, found: show(x, y, tok) });
            return;
        }
    }
}

fn values(state: &State, faults: &mut Vec<Fault>) {
    for (section, layer, part) in state.tensors() {
        let values = match state.rows_f32(section, layer, part) {
            Ok(values) => values,
            Err(e) => {
                faults.push(Fault::Rows(e));
                continue;
            }
        };
        let Some(first) = values.iter().position(|v| !v.is_finite()) else { continue };
        let width = state.tensor(section, layer, part).map_or(1, |t| t.width.max(1)) as usize;
        let position = state.positions(section).get(first / width).copied().unwrap_or(-1);
        let count = values.iter().filter(|v| !v.is_finite()).count();
        let value = values[first].to_string();
        faults.push(Fault::NonFinite { section, layer, part, position, channel: first % width, value, count });
    }
}
