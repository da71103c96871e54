//! Rows of f32 in, the decoder's bytes out. One implementation for every kind of memory, so that what is proved over a
//! `Vec<u8>` holds for files and regions. It does not decide where anything goes; the map did.

use crate::{Alone, ByteSpace, CacheType, KvMap, Order, Part, Spread, Window, convert};
use std::io;
use std::ops::Range;

/// What takes the keys and values of a prefill, on whatever thread that runs.
pub trait KvSink: Send {
    /// Takes rows `positions` of a tensor: `positions.len()` × width values, row after row; K after RoPE, and where the section is
    /// rotated, the rotated rows. Recurrent state, R and S, has one row, at the last position.
    ///
    /// They are converted to the cache's type ([`CacheType::encode`]). Positions before a sliding window are checked
    /// for NaN and infinity like all others (they would spoil what is computed from them), then dropped. Tensors and
    /// positions may come in any order, but every position once. On an error nothing of this call has been taken,
    /// unless it is [`SinkError::Io`].
    fn put_rows(&mut self, layer: u32, part: Part, positions: Range<u32>, rows: &[f32]) -> Result<(), SinkError>;

    /// The same for several tensors, with the threads of `spread` to help. Where a sink takes them one after the other, those before a
    /// refused one have been taken.
    fn put_tensors(&mut self, all: &[Rows<'_>], _spread: &dyn Spread) -> Result<(), SinkError> {
        all.iter().try_for_each(|r| self.put_rows(r.layer, r.part, r.positions.clone(), r.rows))
    }

    /// The positions that will be kept; empty for a tensor the decoder does not have, so that it need not be computed.
    fn wants(&self, layer: u32, part: Part) -> Range<u32>;

    /// Whether the decoder could see anything if we stopped now.
    fn touched(&self) -> bool;

    /// Hands over. Refuses unless every tensor is whole; after any error the output has been discarded as far as it can
    /// be.
    fn commit(self: Box<Self>) -> Result<Receipt, SinkError>;
}

/// Rows of a tensor, as [`KvSink::put_rows`] takes them.
#[derive(Clone, Debug)]
pub struct Rows<'a> {
    /// Model layer.
    pub layer: u32,
    /// Part.
    pub part: Part,
    /// Positions.
    pub positions: Range<u32>,
    /// Their values.
    pub rows: &'a [f32],
    /// The bits of the largest magnitude among them ([`magnitude`]), where the caller knows it and so spares a look at all of them.
    pub largest: Option<u32>,
}

/// The bits of the largest magnitude, as f32 without the sign: ordered as magnitudes are, infinity and then NaN above all others.
#[inline(always)]
pub fn magnitude(values: &[f32]) -> u32 {
    // As signed numbers, which they are all positive as: every processor compares these several at a time.
    values.iter().fold(0, |most, v| most.max((v.to_bits() & 0x7fff_ffff).cast_signed())).cast_unsigned()
}

/// What was handed over.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Receipt {
    /// Bytes put in: those of the whole state file, or those of the rows in a shared memory.
    pub bytes: u64,
    /// Tokens, which is the number of positions.
    pub tokens: u32,
    /// Tensors filled.
    pub tensors: u32,
}

/// Why a sink did not take something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SinkError {
    /// The decoder keeps no such tensor.
    #[error("layer {layer} {part}: the decoder's memory has no such tensor")]
    UnknownTensor {
        /// Model layer.
        layer: u32,
        /// Part.
        part: Part,
    },
    /// The number of values is not that of the positions.
    #[error("layer {layer} {part}: {found} values for {positions} positions of {width} channels")]
    RowLength {
        /// Model layer.
        layer: u32,
        /// Part.
        part: Part,
        /// Positions given.
        positions: usize,
        /// Channels per position.
        width: u32,
        /// Values given.
        found: usize,
    },
    /// Positions that the prompt does not have.
    #[error("layer {layer} {part}: positions {}..{} of a prompt of {n_tokens}", positions.start, positions.end)]
    Outside {
        /// Model layer.
        layer: u32,
        /// Part.
        part: Part,
        /// Positions given.
        positions: Range<u32>,
        /// Positions there are.
        n_tokens: u32,
    },
    /// A position came a second time.
    #[error("layer {layer} {part}: position {position} is given twice")]
    Twice {
        /// Model layer.
        layer: u32,
        /// Part.
        part: Part,
        /// The first that did.
        position: u32,
    },
    /// A value is NaN or infinite: a server would take it and answer nonsense.
    #[error("layer {layer} {part}: {value} at position {position}, channel {channel}: not handed over")]
    NonFinite {
        /// Model layer.
        layer: u32,
        /// Part.
        part: Part,
        /// Position.
        position: u32,
        /// Channel.
        channel: u32,
        /// The value.
        value: f32,
    },
    /// A value is finite, but would become infinite in the cache's type.
    #[error(
        "layer {layer} {part}: {value} at position {position}, channel {channel} is too large for {ty}; try an f32 or bf16 cache"
    )]
    Overflow {
        /// Model layer.
        layer: u32,
        /// Part.
        part: Part,
        /// Position.
        position: u32,
        /// Channel.
        channel: u32,
        /// The value.
        value: f32,
        /// The cache's type.
        ty: CacheType,
    },
    /// Not every position has been given.
    #[error("layer {layer} {part}: positions {}..{} are missing", missing.start, missing.end)]
    Incomplete {
        /// Model layer.
        layer: u32,
        /// Part.
        part: Part,
        /// The first run of positions that is.
        missing: Range<u32>,
    },
    /// The byte space is not the map's.
    #[error("a map of {map} bytes over a space of {space}")]
    SpaceSize {
        /// Bytes of the map.
        map: u64,
        /// Bytes of the space.
        space: u64,
    },
    /// The byte space failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Bytes of a live space that a thread puts at a time.
const LIVE_PIECE: usize = 16 << 10;

/// A [`KvSink`] over any byte space.
///
/// The bytes that are known beforehand, the file's head among them, go in last, at commit: whatever is left of an
/// unfinished one is no state file by its first byte.
#[derive(Debug)]
pub struct Scatter<S> {
    map: KvMap,
    space: S,
    /// Per window, the positions that have come: sorted, disjoint, not touching.
    have: Vec<Vec<Range<u32>>>,
    touched: bool,
    scratch: Vec<u8>,
}

impl<S: ByteSpace> Scatter<S> {
    /// Joins a map and a space, which must be of one size.
    pub fn new(map: KvMap, space: S) -> Result<Scatter<S>, SinkError> {
        if map.size() != space.size() {
            return Err(SinkError::SpaceSize { map: map.size(), space: space.size() });
        }
        let have = map.windows().map(|_| Vec::new()).collect();
        Ok(Scatter { map, space, have, touched: false, scratch: Vec::new() })
    }

    /// The map it fills.
    pub fn map(&self) -> &KvMap {
        &self.map
    }
}

/// Rows that will be put, and where.
struct Target<'s, 'r> {
    layer: u32,
    part: Part,
    /// The window's number in the map.
    index: usize,
    window: &'s Window,
    /// The positions that are kept, and their values.
    kept: Range<u32>,
    rows: &'r [f32],
    /// All values are known to fit.
    fits: bool,
}

impl Target<'_, '_> {
    /// Why the value at `at` of the rows cannot be taken.
    fn refuse(&self, at: usize) -> SinkError {
        refuse(self.layer, self.part, self.kept.start, self.window, at, self.rows[at])
    }

    /// The byte of the region at which value `at` of the rows lies, of a window with row after row.
    fn byte(&self, at: usize) -> u64 {
        let row = u64::from(self.kept.start - self.window.positions.start);
        self.window.offset + row * self.window.row_bytes + at as u64 * self.window.elem.block_bytes()
    }
}

/// Why a value, number `at` of the rows from position `first` on, cannot be taken.
fn refuse(layer: u32, part: Part, first: u32, w: &Window, at: usize, value: f32) -> SinkError {
    let width = w.width as usize;
    let (position, channel) = (first + (at / width) as u32, (at % width) as u32);
    if value.is_finite() {
        SinkError::Overflow { layer, part, position, channel, value, ty: w.elem }
    } else {
        SinkError::NonFinite { layer, part, position, channel, value }
    }
}

/// Checks all but the values that are kept.
fn target<'s, 'r>(map: &'s KvMap, have: &[Vec<Range<u32>>], r: &Rows<'r>) -> Result<Target<'s, 'r>, SinkError> {
    let Rows { layer, part, ref positions, rows, largest } = *r;
    let index = map.index_of(layer, part).ok_or(SinkError::UnknownTensor { layer, part })?;
    let w = map.window(layer, part).ok_or(SinkError::UnknownTensor { layer, part })?;
    let width = w.width as usize;
    if positions.start > positions.end || positions.end > map.n_tokens() {
        let positions = positions.clone();
        return Err(SinkError::Outside { layer, part, positions, n_tokens: map.n_tokens() });
    }
    if positions.len().checked_mul(width) != Some(rows.len()) {
        let (positions, found) = (positions.len(), rows.len());
        return Err(SinkError::RowLength { layer, part, positions, width: w.width, found });
    }
    let kept = positions.start.max(w.positions.start)..positions.end;
    let (dropped, rows) = rows.split_at(kept.start.min(kept.end).saturating_sub(positions.start) as usize * width);
    if let Some(at) = dropped.iter().position(|v| !v.is_finite()) {
        return Err(refuse(layer, part, positions.start, w, at, dropped[at]));
    }
    if let Some(position) = Some(&kept).filter(|k| !k.is_empty()).and_then(|kept| overlap(&have[index], kept)) {
        return Err(SinkError::Twice { layer, part, position });
    }
    debug_assert!(largest.is_none_or(|l| magnitude(rows) <= l), "the largest magnitude, or more");
    let fits = largest.is_some_and(|l| l < convert::limit(w.elem));
    Ok(Target { layer, part, index, window: w, kept, rows, fits })
}

impl<S: ByteSpace + Send> KvSink for Scatter<S> {
    fn put_rows(&mut self, layer: u32, part: Part, positions: Range<u32>, rows: &[f32]) -> Result<(), SinkError> {
        let rows = Rows { layer, part, positions, rows, largest: None };
        let t = target(&self.map, &self.have, &rows)?;
        if t.kept.is_empty() {
            return Ok(());
        }
        let w = t.window;
        if S::LIVE && w.order == Order::Rows && !w.elem.is_quantised() {
            return self.put_tensors(&[rows], &Alone);
        }
        let first = u64::from(t.kept.start - w.positions.start);
        let places = [Some(w.offset), self.map.copied(w).map(|distance| w.offset + distance)].into_iter().flatten();
        self.scratch.clear();
        w.elem.encode(t.rows, &mut self.scratch).map_err(|at| t.refuse(at))?;
        self.touched |= S::LIVE;
        match w.order {
            Order::Rows if S::LIVE => {
                let mut at = w.offset + first * w.row_bytes;
                for piece in self.scratch.chunks(LIVE_PIECE) {
                    self.space.put_in(w.region, at, piece)?;
                    at += piece.len() as u64;
                }
            }
            Order::Rows => {
                for offset in places {
                    self.space.put_in(w.region, offset + first * w.row_bytes, &self.scratch)?;
                }
            }
            Order::Transposed => {
                let (width, el) = (w.width as usize, w.elem.block_bytes() as usize);
                let mut line = Vec::with_capacity(t.kept.len() * el);
                for channel in 0..width {
                    line.clear();
                    for row in self.scratch.chunks_exact(width * el) {
                        line.extend_from_slice(&row[channel * el..(channel + 1) * el]);
                    }
                    for offset in places.clone() {
                        let at = offset + channel as u64 * w.row_bytes + first * el as u64;
                        self.space.put_in(w.region, at, &line)?;
                    }
                }
            }
        }
        let (index, kept) = (t.index, t.kept);
        insert(&mut self.have[index], kept);
        Ok(())
    }

    fn put_tensors(&mut self, all: &[Rows<'_>], spread: &dyn Spread) -> Result<(), SinkError> {
        let plain = |r: &Rows<'_>| {
            let w = self.map.window(r.layer, r.part);
            w.is_some_and(|w| w.order == Order::Rows && !w.elem.is_quantised())
        };
        if !S::LIVE || !all.iter().all(plain) {
            return all.iter().try_for_each(|r| self.put_rows(r.layer, r.part, r.positions.clone(), r.rows));
        }
        // From f32 straight to where they are read, without a copy of more than a strip, and never long without a look at
        // whether writing is still allowed. All values are judged before the first is seen.
        let targets = all.iter().map(|r| target(&self.map, &self.have, r)).collect::<Result<Vec<_>, _>>()?;
        for (i, t) in targets.iter().enumerate() {
            let before = targets[..i].iter().filter(|o| o.index == t.index);
            if let Some(position) = before.filter_map(|o| overlap(std::slice::from_ref(&o.kept), &t.kept)).next() {
                return Err(SinkError::Twice { layer: t.layer, part: t.part, position });
            }
        }
        let pieces = pieces(&targets);
        for t in targets.iter().filter(|t| !t.fits) {
            if let Some(at) = convert::not_finite(t.window.elem, t.rows) {
                return Err(t.refuse(at));
            }
        }
        self.touched |= !pieces.is_empty();
        let mut regions: Vec<u16> = targets.iter().map(|t| t.window.region).collect();
        regions.sort_unstable();
        regions.dedup();
        self.space.put_pieces(&regions, pieces.len(), spread, &|i, put| {
            let (t, values) = &pieces[i];
            let t = &targets[*t];
            let bytes = t.window.elem.block_bytes() as usize;
            let mut strip = [0u8; convert::STRIP];
            for from in values.clone().step_by(convert::STRIP / bytes) {
                let rows = &t.rows[from..values.end.min(from + convert::STRIP / bytes)];
                let strip = &mut strip[..rows.len() * bytes];
                convert::into_bytes(t.window.elem, rows, strip);
                put(t.window.region, t.byte(from), strip)?;
            }
            Ok(())
        })?;
        let taken: Vec<_> = targets.into_iter().map(|t| (t.index, t.kept)).collect();
        for (index, kept) in taken.into_iter().filter(|(_, kept)| !kept.is_empty()) {
            insert(&mut self.have[index], kept);
        }
        Ok(())
    }

    fn wants(&self, layer: u32, part: Part) -> Range<u32> {
        self.map.window(layer, part).map_or(0..0, |w| w.positions.clone())
    }

    fn touched(&self) -> bool {
        self.space.touched().unwrap_or(self.touched)
    }

    fn commit(self: Box<Self>) -> Result<Receipt, SinkError> {
        let Scatter { map, mut space, have, .. } = *self;
        for ((layer, part, w), have) in map.windows().zip(&have) {
            let reached = have.first().filter(|r| r.start == w.positions.start).map_or(w.positions.start, |r| r.end);
            if reached != w.positions.end {
                let next = have.iter().map(|r| r.start).find(|&s| s > reached).unwrap_or(w.positions.end);
                return Err(SinkError::Incomplete { layer, part, missing: reached..next });
            }
        }
        for (at, bytes) in map.fixed() {
            space.put(at, bytes)?;
        }
        space.seal()?;
        Ok(Receipt { bytes: map.filled(), tokens: map.n_tokens(), tensors: have.len() as u32 })
    }
}

/// Cuts the rows of all targets into pieces that a thread converts at a time, each a target's number and values of it: the same share
/// of every tensor one after another, since a thread that computed some positions has all of theirs near.
fn pieces(targets: &[Target<'_, '_>]) -> Vec<(usize, Range<usize>)> {
    let bytes = |t: &Target<'_, '_>| t.rows.len() * t.window.elem.block_bytes() as usize;
    let n = targets.iter().map(|t| bytes(t).div_ceil(LIVE_PIECE)).max().unwrap_or(0);
    let share = |t: &Target<'_, '_>, i: usize| t.rows.len() * i / n..t.rows.len() * (i + 1) / n;
    let all = (0..n).flat_map(|i| targets.iter().enumerate().map(move |(t, target)| (t, share(target, i))));
    all.filter(|(_, values)| !values.is_empty()).collect()
}

/// The first position of `r` that is in `have`.
fn overlap(have: &[Range<u32>], r: &Range<u32>) -> Option<u32> {
    let i = have.partition_point(|h| h.end <= r.start);
    have.get(i).filter(|h| h.start < r.end).map(|h| h.start.max(r.start))
}

/// Adds `r`, which overlaps nothing in `have`.
fn insert(have: &mut Vec<Range<u32>>, r: Range<u32>) {
    let i = have.partition_point(|h| h.end <= r.start);
    have.insert(i, r);
    if i + 1 < have.len() && have[i].end == have[i + 1].start {
        have[i].end = have.remove(i + 1).end;
    }
    if i > 0 && have[i - 1].end == have[i].start {
        have[i - 1].end = have.remove(i).end;
    }
}
