//! How far two states are apart: field by field, and in numbers by layer, part and row. In all of it the first state is
//! the reference. Nothing is judged here; what distance is too far is for those who know what the states are of.

use crate::{Cell, Field, Kv, Part, Place, Rec, Section, State, Tensor, TokenForm};
use std::collections::HashMap;
use std::fmt;

/// One field that differs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// The field.
    pub field: Field,
    /// Section and layer, where the field is in one.
    pub place: Option<Place>,
    /// The position of the cell, or the index of the token, the stream or the checkpoint, where there are several.
    pub index: Option<i64>,
    /// In the reference.
    pub a: String,
    /// In the other.
    pub b: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = self.place {
            write!(f, "{place}: ")?;
        }
        write!(f, "{}", self.field)?;
        if let Some(index) = self.index {
            write!(f, "[{index}]")?;
        }
        write!(f, ": {} | {}", self.a, self.b)
    }
}

/// How far one tensor is from the reference's, over the positions both have. Where a value on either side is not
/// finite, the distances are infinite.
#[derive(Clone, PartialEq, Debug)]
pub struct LayerError {
    /// Section index.
    pub section: usize,
    /// Layer index in the section.
    pub layer: usize,
    /// Part.
    pub part: Part,
    /// Rows compared.
    pub rows: usize,
    /// Values compared.
    pub values: usize,
    /// Values that are the same, bit by bit.
    pub equal: usize,
    /// |a - b| / |a| of the whole tensor.
    pub rel_l2: f64,
    /// The largest |a - b| of one value.
    pub max_abs: f64,
    /// The largest |a - b| / |a| of one row.
    pub row_max_rel: f64,
    /// Position of that row.
    pub worst_row: i32,
    /// The largest 1 - cosine(a, b) of one row.
    pub row_max_one_minus_cos: f64,
    /// Position of that row.
    pub worst_cos_row: i32,
}

/// How far one row is from the reference's.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct RowError {
    /// Position.
    pub position: i32,
    /// |a - b| / |a|; 0 where both are zero.
    pub rel_l2: f64,
    /// The largest |a - b| of one value.
    pub max_abs: f64,
    /// 1 - cosine(a, b); 0 where both are zero, 1 where one is.
    pub one_minus_cos: f64,
    /// Values that are the same, bit by bit.
    pub equal: usize,
    /// |a|².
    pub norm2: f64,
    /// |a - b|².
    pub diff2: f64,
}

/// Every field that differs, in file order. Rows are not fields: they are for [`numeric`].
///
/// Cells are held against each other by their place where there are as many on both sides, else by their position. What
/// two files of one server's memory may differ in without harm is reported as everything else: the form of the token
/// list, the slot a cell was saved from, cells of a window beyond what is needed, the appendix.
pub fn structure(a: &State, b: &State) -> Vec<Difference> {
    let mut d = Differ { list: Vec::new(), place: None };
    d.field(Field::Version, None, a.version, b.version);
    let form = |s: &State| match &s.form {
        TokenForm::Plain => "plain".to_string(),
        TokenForm::Packed { n_media: 0, .. } => "packed".to_string(),
        TokenForm::Packed { n_media, media } => format!("packed with {n_media} media chunks of {} words", media.len()),
    };
    d.field(Field::TokenForm, None, form(a), form(b));
    d.field(Field::TokenCount, None, a.tokens.len(), b.tokens.len());
    for (i, (x, y)) in a.tokens.iter().zip(&b.tokens).enumerate() {
        d.field(Field::Token, Some(i as i64), x, y);
    }
    d.field(Field::CellExt, None, a.cell_ext, b.cell_ext);
    d.field(Field::Sections, None, a.sections.len(), b.sections.len());
    for (section, pair) in a.sections.iter().zip(&b.sections).enumerate() {
        d.place = Some(Place { section, layer: None });
        match pair {
            (Section::Kv(a), Section::Kv(b)) => d.kv(section, a, b),
            (Section::Rec(a), Section::Rec(b)) => d.rec(section, a, b),
            (Section::Kv(_), _) => d.field(Field::Sections, None, "attention cache", "recurrent memory"),
            (Section::Rec(_), _) => d.field(Field::Sections, None, "recurrent memory", "attention cache"),
        }
    }
    d.place = None;
    let checkpoints =
        |s: &State| s.appendix.as_ref().map_or("none".into(), |x| format!("{} checkpoints", x.checkpoints.len()));
    d.field(Field::Appendix, None, checkpoints(a), checkpoints(b));
    if let (Some(a), Some(b)) = (&a.appendix, &b.appendix) {
        for (i, (a, b)) in a.checkpoints.iter().zip(&b.checkpoints).enumerate() {
            let show = |c: &crate::Checkpoint| {
                let lens = c.blobs.each_ref().map(Vec::len);
                format!("{} tokens, positions {} to {}, {lens:?} bytes", c.n_tokens, c.pos_min, c.pos_max)
            };
            d.field(Field::Appendix, Some(i as i64), show(a), show(b));
        }
    }
    d.field(Field::Trailing, None, a.trailing.len(), b.trailing.len());
    d.list
}

struct Differ {
    list: Vec<Difference>,
    place: Option<Place>,
}

impl Differ {
    fn field<A: ToString, B: ToString>(&mut self, field: Field, index: Option<i64>, a: A, b: B) {
        let (a, b) = (a.to_string(), b.to_string());
        if a != b {
            self.list.push(Difference { field, place: self.place, index, a, b });
        }
    }

    fn kv(&mut self, section: usize, a: &Kv, b: &Kv) {
        self.field(Field::NStream, None, a.streams.len(), b.streams.len());
        for (i, (a, b)) in a.streams.iter().zip(&b.streams).enumerate() {
            let stream = (a != b && i > 0).then_some(i as i64);
            self.field(Field::CellCount, stream, a.cells.len(), b.cells.len());
            self.cells(&a.cells, &b.cells);
            if a.cells.is_empty() || b.cells.is_empty() {
                continue;
            }
            self.field(Field::VTrans, stream, u8::from(a.v_trans), u8::from(b.v_trans));
            self.field(Field::NLayer, stream, a.k.len(), b.k.len());
            let rot = |n: Option<u32>| n.map_or("absent".into(), |n| n.to_string());
            self.field(Field::NRotK, stream, rot(a.n_rot.map(|r| r.0)), rot(b.n_rot.map(|r| r.0)));
            self.field(Field::NRotV, stream, rot(a.n_rot.map(|r| r.1)), rot(b.n_rot.map(|r| r.1)));
            self.tensors(section, [Field::TypeK, Field::RowSizeK], &a.k, &b.k);
            if a.v.len() != b.v.len() && (a.v.len(), b.v.len()) != (a.k.len(), b.k.len()) {
                self.field(Field::NLayer, stream, format!("V of {}", a.v.len()), format!("V of {}", b.v.len()));
            }
            self.tensors(section, [Field::TypeV, Field::RowSizeV], &a.v, &b.v);
        }
    }

    fn cells(&mut self, a: &[Cell], b: &[Cell]) {
        if a.len() == b.len() {
            a.iter().zip(b).for_each(|(a, b)| self.cell(a, b));
            return;
        }
        let by_pos = |cells: &[Cell]| cells.iter().map(|c| (c.pos, *c)).collect::<HashMap<i32, Cell>>();
        let (in_a, in_b) = (by_pos(a), by_pos(b));
        for cell in a {
            match in_b.get(&cell.pos) {
                Some(other) => self.cell(cell, other),
                None => self.field(Field::Position, Some(cell.pos.into()), cell.pos, "absent"),
            }
        }
        for cell in b.iter().filter(|c| !in_a.contains_key(&c.pos)) {
            self.field(Field::Position, Some(cell.pos.into()), "absent", cell.pos);
        }
    }

    fn cell(&mut self, a: &Cell, b: &Cell) {
        let index = Some(i64::from(a.pos));
        self.field(Field::Position, index, a.pos, b.pos);
        if let (Some(a), Some(b)) = (a.ext, b.ext) {
            let show = |(x, y, tok): (i32, i32, Option<i32>)| match tok {
                Some(tok) => format!("{x}, {y}, {tok}"),
                None => format!("{x}, {y}"),
            };
            self.field(Field::CellExt, index, show(a), show(b));
        }
        self.field(Field::SeqId, index, a.seq_id, b.seq_id);
    }

    fn tensors(&mut self, section: usize, [ty, size]: [Field; 2], a: &[Tensor], b: &[Tensor]) {
        let outer = self.place;
        for (layer, (a, b)) in a.iter().zip(b).enumerate() {
            self.place = Some(Place { section, layer: Some(layer) });
            self.field(ty, None, a.ty, b.ty);
            self.field(size, None, format!("{} channels", a.width), format!("{} channels", b.width));
        }
        self.place = outer;
    }

    fn rec(&mut self, section: usize, a: &Rec, b: &Rec) {
        self.field(Field::CellCount, None, a.cells.len(), b.cells.len());
        for (i, (a, b)) in a.cells.iter().zip(&b.cells).enumerate() {
            self.field(Field::Position, Some(i as i64), a.pos, b.pos);
        }
        self.field(Field::NLayer, None, a.n_layer, b.n_layer);
        self.field(Field::RecordCount, None, a.records.len(), b.records.len());
        self.tensors(section, [Field::RecordType, Field::RecordRowSize], &a.records, &b.records);
    }
}

/// How far every tensor is from the reference's, in file order. Rows are held against each other by position, so that a
/// window of one cell more is compared where both have cells, and in f64, whatever their types. Quantised rows are decoded, and
/// where the two sides are rotated otherwise, both are turned back first. What a file of version 2 or 3 does not say of its
/// rotation is taken to be like the other side's ([`Stream::n_rot`](crate::Stream) can be set by who knows).
///
/// The error names what stands in the way: other sections or layers, other widths, no position in common (unless neither
/// has any).
pub fn numeric(a: &State, b: &State) -> Result<Vec<LayerError>, Difference> {
    let count = |s: &State| s.tensors().len().to_string();
    if a.tensors() != b.tensors() {
        let what = structure(a, b)
            .into_iter()
            .find(|d| matches!(d.field, Field::Sections | Field::CellCount | Field::NLayer | Field::RecordCount));
        let other = Difference {
            field: Field::Sections,
            place: None,
            index: None,
            a: count(a) + " tensors",
            b: count(b) + " tensors",
        };
        return Err(what.unwrap_or(other));
    }
    a.tensors()
        .into_iter()
        .map(|(section, layer, part)| summary(section, layer, part, &rows(a, b, section, layer, part)?, a))
        .collect()
}

fn summary(section: usize, layer: usize, part: Part, rows: &[RowError], a: &State) -> Result<LayerError, Difference> {
    let width = a.tensor(section, layer, part).map_or(0, |t| t.width as usize);
    let mut e = LayerError {
        section,
        layer,
        part,
        rows: rows.len(),
        values: rows.len() * width,
        equal: rows.iter().map(|r| r.equal).sum(),
        rel_l2: ratio(rows.iter().map(|r| r.diff2).sum(), rows.iter().map(|r| r.norm2).sum()),
        max_abs: 0.0,
        row_max_rel: 0.0,
        worst_row: rows.first().map_or(0, |r| r.position),
        row_max_one_minus_cos: 0.0,
        worst_cos_row: rows.first().map_or(0, |r| r.position),
    };
    for r in rows {
        e.max_abs = e.max_abs.max(r.max_abs);
        if r.rel_l2 > e.row_max_rel {
            (e.row_max_rel, e.worst_row) = (r.rel_l2, r.position);
        }
        if r.one_minus_cos > e.row_max_one_minus_cos {
            (e.row_max_one_minus_cos, e.worst_cos_row) = (r.one_minus_cos, r.position);
        }
    }
    Ok(e)
}

/// How far every row of one tensor is from the reference's, by ascending position. Errors as for [`numeric`].
pub fn rows(a: &State, b: &State, section: usize, layer: usize, part: Part) -> Result<Vec<RowError>, Difference> {
    let place = Some(Place { section, layer: Some(layer) });
    let differ = |field, a: String, b: String| Difference { field, place, index: None, a, b };
    let width = |s: &State| s.tensor(section, layer, part).map(|t| t.width);
    let rows_field = match part {
        Part::K => Field::RowsK,
        Part::V => Field::RowsV,
        Part::R | Part::S => Field::RecordRows,
    };
    let (width, other) = match (width(a), width(b)) {
        (Some(x), Some(y)) => (x, y),
        (x, y) => {
            let show = |w: Option<u32>| if w.is_some() { "present" } else { "absent" };
            return Err(differ(rows_field, show(x).into(), show(y).into()));
        }
    };
    if width != other {
        let field = match part {
            Part::K => Field::RowSizeK,
            Part::V => Field::RowSizeV,
            Part::R | Part::S => Field::RecordRowSize,
        };
        return Err(differ(field, format!("{width} channels"), format!("{other} channels")));
    }
    let alike = match (rotation(a, section, part), rotation(b, section, part)) {
        (Some(x), Some(y)) => x == y,
        _ => true,
    };
    let values = |s: &State| {
        let mut rows = s.rows_f32(section, layer, part).map_err(|e| e.to_string())?;
        let n = if alike { 0 } else { rotation(s, section, part).unwrap_or(0) };
        if n != 0 && !(n.is_power_of_two() && width.is_multiple_of(n)) {
            return Err(format!("rows of {width} channels rotated in pieces of {n}"));
        }
        crate::hadamard(&mut rows, n as usize);
        Ok(rows)
    };
    let (x, y) = match (values(a), values(b)) {
        (Ok(x), Ok(y)) => (x, y),
        (x, y) => {
            let show = |v: Result<Vec<f32>, String>| v.map_or_else(|e| e, |_| "sound".into());
            return Err(differ(rows_field, show(x), show(y)));
        }
    };
    let width = width as usize;
    let in_b: HashMap<i32, usize> = b.positions(section).into_iter().enumerate().map(|(i, p)| (p, i)).collect();
    let mut shared: Vec<(i32, usize, usize)> =
        a.positions(section).into_iter().enumerate().filter_map(|(i, p)| in_b.get(&p).map(|&j| (p, i, j))).collect();
    shared.sort_unstable();
    // Recurrent memories without a cell have their records all the same, of no rows: nothing in them differs.
    let any = |s: &State| !s.positions(section).is_empty();
    if shared.is_empty() && (any(a) || any(b)) {
        let show = |s: &State| match (s.positions(section).first(), s.positions(section).last()) {
            (Some(first), Some(last)) => format!("positions {first} to {last}"),
            _ => "no positions".into(),
        };
        return Err(Difference { field: Field::Position, place, index: None, a: show(a), b: show(b) });
    }
    Ok(shared.into_iter().map(|(p, i, j)| row_error(p, &x[i * width..][..width], &y[j * width..][..width])).collect())
}

/// The width in which a section's rows are rotated, where that is known.
fn rotation(s: &State, section: usize, part: Part) -> Option<u32> {
    let Some(Section::Kv(kv)) = s.sections.get(section) else { return None };
    let stream = kv.stream()?;
    let (ty, n) = match part {
        Part::K => (stream.k.first()?.ty, stream.n_rot.map(|n| n.0)),
        _ => (stream.v.first()?.ty, stream.n_rot.map(|n| n.1)),
    };
    // Plain types are never rotated where a file does not say so.
    n.or_else(|| (!ty.is_quantised()).then_some(0))
}

fn row_error(position: i32, a: &[f32], b: &[f32]) -> RowError {
    let (mut norm2, mut other2, mut dot, mut diff2, mut max_abs, mut equal, mut finite) =
        (0.0, 0.0, 0.0, 0.0, 0.0f64, 0, true);
    for (&x, &y) in a.iter().zip(b) {
        equal += usize::from(x.to_bits() == y.to_bits());
        finite &= x.is_finite() && y.is_finite();
        let (x, y) = (f64::from(x), f64::from(y));
        norm2 += x * x;
        other2 += y * y;
        dot += x * y;
        diff2 += (x - y) * (x - y);
        max_abs = max_abs.max((x - y).abs());
    }
    if !finite {
        // NaN would be lost in every maximum.
        let inf = f64::INFINITY;
        return RowError { position, rel_l2: inf, max_abs: inf, one_minus_cos: inf, equal, norm2: 0.0, diff2: inf };
    }
    let one_minus_cos = match (norm2 > 0.0, other2 > 0.0) {
        (true, true) => (1.0 - dot / (norm2.sqrt() * other2.sqrt())).max(0.0),
        (false, false) => 0.0,
        _ => 1.0,
    };
    RowError { position, rel_l2: ratio(diff2, norm2), max_abs, one_minus_cos, equal, norm2, diff2 }
}

fn ratio(diff2: f64, norm2: f64) -> f64 {
    if diff2 == 0.0 { 0.0 } else { (diff2 / norm2).sqrt() }
}
