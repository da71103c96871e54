//! One pass over a file's head: what every key and tensor is called, what type it has and where it lies. Values are stepped
//! over, not read.

use std::fmt::{self, Display};

use crate::{Error, GgmlType, ValueType, error::Shown};

/// Bounds on what a file may claim to hold, on top of what its size allows.
///
/// They bound time and the index's memory (about 100 bytes per key or tensor; array elements cost nothing). The defaults are
/// far above any real model's numbers.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Limits {
    /// Most keys in one file.
    pub keys: u64,
    /// Most tensors in one file.
    pub tensors: u64,
    /// Most elements in one array.
    pub array: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { keys: 100_000, tensors: 10_000_000, array: 10_000_000 }
    }
}

/// ggml's `GGML_MAX_NAME`: room for a tensor's name and a final zero.
const MAX_NAME: usize = 64;
/// ggml's `GGML_MAX_DIMS`.
const MAX_DIMS: u32 = 4;
const DEFAULT_ALIGNMENT: u32 = 32;

/// Where some bytes of the file lie. Only made from slices of the file, so always inside it.
#[derive(Copy, Clone)]
pub(crate) struct Span {
    pub at: usize,
    pub len: usize,
}

impl Span {
    pub(crate) fn of<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        bytes.get(self.at..self.at.saturating_add(self.len)).unwrap_or_default()
    }
}

pub(crate) struct KeyInfo {
    pub name: Span,
    pub ty: ValueType,
    /// The elements' type and number; for other values the value's own type and 1.
    pub elem: ValueType,
    pub len: usize,
    /// The value without type and lengths: a string's text, an array's elements.
    pub payload: Span,
}

pub(crate) struct TensorInfo {
    pub name: Span,
    pub shard: u32,
    pub n_dims: u32,
    pub ty: GgmlType,
    pub ne: [u64; 4],
    pub data: Span,
}

/// The index of one file.
pub(crate) struct Index {
    pub version: u32,
    pub alignment: u32,
    pub keys: Vec<KeyInfo>,
    /// Indices into `keys` in the order of their names.
    pub keys_by_name: Vec<u32>,
    pub tensors: Vec<TensorInfo>,
}

impl Index {
    pub(crate) fn key(&self, bytes: &[u8], name: &str) -> Option<&KeyInfo> {
        let i = self.keys_by_name.binary_search_by(|&i| self.keys[i as usize].name.of(bytes).cmp(name.as_bytes()));
        Some(&self.keys[self.keys_by_name[i.ok()?] as usize])
    }
}

struct Cursor<'a> {
    file: &'a str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn fail(&self, offset: usize, what: impl Display, want: impl Display, found: impl Display) -> Error {
        Error::Format {
            file: self.file.to_owned(),
            offset: offset as u64,
            what: what.to_string(),
            want: want.to_string(),
            found: found.to_string(),
        }
    }

    fn span(&mut self, n: u64, what: impl Display) -> Result<Span, Error> {
        match usize::try_from(n) {
            Ok(len) if len <= self.left() => {
                let span = Span { at: self.at, len };
                self.at += len;
                Ok(span)
            }
            _ => Err(self.fail(
                self.at,
                what,
                format_args!("{n} bytes"),
                format_args!("{} before the end of the file", self.left()),
            )),
        }
    }

    fn u32(&mut self, what: impl Display) -> Result<u32, Error> {
        let span = self.span(4, what)?;
        Ok(u32::from_le_bytes(span.of(self.bytes).try_into().unwrap_or_default()))
    }

    fn u64(&mut self, what: impl Display) -> Result<u64, Error> {
        let span = self.span(8, what)?;
        Ok(u64::from_le_bytes(span.of(self.bytes).try_into().unwrap_or_default()))
    }

    fn string(&mut self, what: impl Display) -> Result<Span, Error> {
        let at = self.at;
        let len = self.u64(format_args!("length of {what}"))?;
        match usize::try_from(len) {
            Ok(n) if n <= self.left() => self.span(len, what),
            _ => Err(self.fail(
                at,
                format_args!("length of {what}"),
                format_args!("at most the {} bytes left in the file", self.left()),
                len,
            )),
        }
    }

    /// A count of things that take at least `each` bytes: refused when the rest of the file can not hold them.
    fn count(&self, at: usize, n: u64, each: u64, most: u64, what: impl Display) -> Result<usize, Error> {
        let room = self.left() as u64 / each;
        if n > room {
            let want = format!("at most {room}, which is all that the {} bytes left have room for", self.left());
            return Err(self.fail(at, what, want, n));
        }
        if n > most {
            let want = format!("at most {most} (a limit of this reader against damaged files)");
            return Err(self.fail(at, what, want, n));
        }
        Ok(n as usize)
    }

    /// Steps over the strings of an array; the hot loop of opening a file with a vocabulary.
    fn skip_strings(&mut self, n: usize, key: Shown<'_>) -> Result<(), Error> {
        let mut at = self.at;
        for i in 0..n {
            let next = self.bytes.get(at..).and_then(|rest| rest.first_chunk()).and_then(|len| {
                let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
                (at + 8).checked_add(len).filter(|&next| next <= self.bytes.len())
            });
            match next {
                Some(next) => at = next,
                None => {
                    self.at = at;
                    self.string(format_args!("string {i} of {n} in key {key}"))?;
                }
            }
        }
        self.at = at;
        Ok(())
    }

    fn value_type(&mut self, what: impl Display) -> Result<ValueType, Error> {
        let at = self.at;
        let id = self.u32(&what)?;
        ValueType::from_id(id).ok_or_else(|| self.fail(at, what, "a value type from 0 to 12", id))
    }

    fn key(&mut self, i: usize, n: usize, limits: &Limits) -> Result<KeyInfo, Error> {
        let at = self.at;
        let name = self.string(format_args!("name of key {i} of {n}"))?;
        let key = Shown(name.of(self.bytes));
        if name.len == 0 {
            return Err(self.fail(at, format_args!("name of key {i} of {n}"), "a name", "an empty string"));
        }
        if std::str::from_utf8(name.of(self.bytes)).is_err() {
            return Err(self.fail(at, format_args!("name of key {i} of {n}"), "UTF-8", &key));
        }
        let ty = self.value_type(format_args!("type of key {key}"))?;
        let (mut elem, mut len) = (ty, 1);
        let payload = match ty {
            ValueType::Str => self.string(format_args!("value of key {key}"))?,
            ValueType::Array => {
                let at = self.at;
                elem = self.value_type(format_args!("element type of key {key}"))?;
                if elem == ValueType::Array {
                    let what = format!("element type of key {key}");
                    return Err(self.fail(at, what, "numbers, bools or strings", "an array of arrays"));
                }
                let at = self.at;
                let n = self.u64(format_args!("array length of key {key}"))?;
                let each = elem.size().unwrap_or(8) as u64;
                len = self.count(at, n, each, limits.array, format_args!("array length of key {key}"))?;
                match elem.size() {
                    // `count` has shown that the product is at most the bytes left.
                    Some(size) => self.span(len as u64 * size as u64, format_args!("array of key {key}"))?,
                    None => {
                        let at = self.at;
                        self.skip_strings(len, Shown(name.of(self.bytes)))?;
                        Span { at, len: self.at - at }
                    }
                }
            }
            _ => self.span(ty.size().unwrap_or_default() as u64, format_args!("value of key {key}"))?,
        };
        Ok(KeyInfo { name, ty, elem, len, payload })
    }

    /// Reads one tensor description, all but whether its bytes are there; `data.len` is set, `data.at` is not.
    fn tensor(&mut self, i: usize, n: usize) -> Result<(TensorInfo, u64, usize), Error> {
        let at = self.at;
        let name = self.string(format_args!("name of tensor {i} of {n}"))?;
        let shown = Shown(name.of(self.bytes));
        if name.len == 0 || name.len >= MAX_NAME {
            let want = format!("1 to {} bytes", MAX_NAME - 1);
            return Err(self.fail(
                at,
                format_args!("name of tensor {i} of {n}"),
                want,
                format_args!("{} bytes", name.len),
            ));
        }
        if std::str::from_utf8(name.of(self.bytes)).is_err() {
            return Err(self.fail(at, format_args!("name of tensor {i} of {n}"), "UTF-8", shown));
        }
        let at = self.at;
        let n_dims = self.u32(format_args!("number of dimensions of tensor {shown}"))?;
        if n_dims > MAX_DIMS {
            let what = format!("number of dimensions of tensor {shown}");
            return Err(self.fail(at, what, format_args!("at most {MAX_DIMS}"), n_dims));
        }
        let dims_at = self.at;
        let mut ne = [1u64; 4];
        for (d, ne) in ne.iter_mut().take(n_dims as usize).enumerate() {
            let at = self.at;
            *ne = self.u64(format_args!("dimension {d} of tensor {shown}"))?;
            if *ne > i64::MAX as u64 {
                let what = format!("dimension {d} of tensor {shown}");
                return Err(self.fail(at, what, "less than 2^63", *ne));
            }
        }
        let at = self.at;
        let id = self.u32(format_args!("type of tensor {shown}"))?;
        let unsupported = |found: String, hint| Error::Unsupported {
            file: self.file.to_owned(),
            offset: at as u64,
            what: format!("type of tensor {shown}"),
            found,
            hint,
        };
        let Some(ty) = GgmlType::from_id(id) else {
            let hint =
                "ggml's types end at 42; the file may be of a newer llama.cpp, or of a fork with types of its own";
            return Err(unsupported(format!("ggml type {id}"), hint));
        };
        if ty.is_removed() {
            let hint = "llama.cpp has removed this type; convert the model again (Q4_0 and IQ4_NL took its place)";
            return Err(unsupported(format!("{ty} (ggml type {id})"), hint));
        }
        if !ne[0].is_multiple_of(ty.block_elems()) {
            let what = format!("row of tensor {shown}");
            let want = format!("a multiple of {} elements, a block of {ty}", ty.block_elems());
            return Err(self.fail(dims_at, what, want, ne[0]));
        }
        // Rows and bytes each, so that neither can wrap later, whatever dimension is zero.
        let size = || {
            let rows = ne[1].checked_mul(ne[2])?.checked_mul(ne[3])?;
            ne[0].checked_mul(rows).filter(|&n| n <= i64::MAX as u64)?;
            ty.row_bytes(ne[0])?.checked_mul(rows).filter(|&n| n <= i64::MAX as u64)
        };
        let Some(len) = size() else {
            let what = format!("size of tensor {shown}");
            return Err(self.fail(dims_at, what, "elements and bytes below 2^63", format_args!("{ne:?} of {ty}")));
        };
        let offset_at = self.at;
        let offset = self.u64(format_args!("offset of tensor {shown}"))?;
        // Where usize is small the tensor can not lie in the mapping; the check against the file's end will say so.
        let data = Span { at: 0, len: usize::try_from(len).unwrap_or(usize::MAX) };
        Ok((TensorInfo { name, shard: 0, n_dims, ty, ne, data }, offset, offset_at))
    }
}

/// Indexes one file.
pub(crate) fn index(file: &str, bytes: &[u8], limits: &Limits) -> Result<Index, Error> {
    let mut c = Cursor { file, bytes, at: 0 };
    let version = header(&mut c)?;

    let counts_at = c.at;
    let n_tensors = c.u64("number of tensors")?;
    let n_keys = c.u64("number of keys")?;
    // Least sizes: a key is a length, a byte of name, a type and a byte of value; a tensor a length, a byte of name, the
    // number of dimensions, a type and an offset.
    let n_tensors = c.count(counts_at, n_tensors, 25, limits.tensors.min(u32::MAX.into()), "number of tensors")?;
    let n_keys = c.count(counts_at + 8, n_keys, 14, limits.keys.min(u32::MAX.into()), "number of keys")?;

    let mut keys = Vec::new();
    for i in 0..n_keys {
        keys.push(c.key(i, n_keys, limits)?);
    }
    let keys_by_name = order(keys.len(), |i| keys[i].name.of(bytes))
        .map_err(|(a, b)| duplicate(&c, "key", keys[a].name, keys[b].name))?;
    let mut index = Index { version, alignment: DEFAULT_ALIGNMENT, keys, keys_by_name, tensors: Vec::new() };
    if let Some(key) = index.key(bytes, "general.alignment") {
        index.alignment = alignment(&c, key)?;
    }

    let mut offsets = Vec::new();
    for i in 0..n_tensors {
        let (info, offset, offset_at) = c.tensor(i, n_tensors)?;
        index.tensors.push(info);
        offsets.push((offset, offset_at));
    }
    order(index.tensors.len(), |i| index.tensors[i].name.of(bytes))
        .map_err(|(a, b)| duplicate(&c, "tensor", index.tensors[a].name, index.tensors[b].name))?;
    place(&c, &mut index, &offsets)?;
    Ok(index)
}

/// Magic and version; says what the file is instead where that can be told.
fn header(c: &mut Cursor<'_>) -> Result<u32, Error> {
    let magic = c.span(4, "magic")?.of(c.bytes);
    if magic != b"GGUF" {
        let found = match magic {
            b"lmgg" | b"ggml" | b"fmgg" | b"ggmf" | b"tjgg" | b"ggjt" | b"algg" | b"ggla" => {
                format!("{} (a format before GGUF; convert the model again)", Shown(magic))
            }
            b"FUGG" => format!("{} (byte-swapped)", Shown(magic)),
            b"PK\x03\x04" => format!("{} (a zip archive or PyTorch file)", Shown(magic)),
            b"vers" => format!("{} (a Git LFS pointer? fetch the file itself)", Shown(magic)),
            b"<!DO" | b"<!do" | b"<htm" => format!("{} (a web page: the download went wrong)", Shown(magic)),
            _ => Shown(magic).to_string(),
        };
        return Err(c.fail(0, "magic", Shown(b"GGUF"), found));
    }
    let version = c.u32("version")?;
    let (found, hint) = match version {
        2 | 3 => return Ok(version),
        1 => ("GGUF 1".to_owned(), "llama.cpp has given it up too; convert the model again"),
        v if v & 0xffff == 0 && v != 0 => (
            format!("{v:#010x}: a big-endian file (GGUF {})", v.swap_bytes()),
            "only little-endian files are read; convert it with gguf-py's gguf_convert_endian",
        ),
        v => (format!("GGUF {v}"), "versions 2 and 3 are read"),
    };
    Err(Error::Unsupported { file: c.file.to_owned(), offset: 4, what: "version".to_owned(), found, hint })
}

fn alignment(c: &Cursor<'_>, key: &KeyInfo) -> Result<u32, Error> {
    let value = crate::Value::decode(key.ty, key.payload.of(c.bytes));
    match value {
        // Strictly u32, and any power of two: what ggml takes.
        crate::Value::U32(v) if v.is_power_of_two() && key.ty == ValueType::U32 => Ok(v),
        _ => Err(Error::Key {
            file: c.file.to_owned(),
            key: "general.alignment".to_owned(),
            want: "u32, a power of two".to_owned(),
            found: if key.ty == ValueType::Array { "an array".to_owned() } else { value.describe() },
        }),
    }
}

/// Gives every tensor its place in the file: one after the other, as ggml asks, and before the end.
fn place(c: &Cursor<'_>, index: &mut Index, offsets: &[(u64, usize)]) -> Result<(), Error> {
    if index.tensors.is_empty() {
        return Ok(()); // a vocabulary alone; it need not even be padded
    }
    let align = u64::from(index.alignment);
    let start = (c.at as u64).next_multiple_of(align); // no wrap: at is a file's offset, align below 2^32
    let end = c.bytes.len() as u64;
    let mut running = 0u64;
    let mut first_missing = None;
    for (info, &(offset, offset_at)) in index.tensors.iter_mut().zip(offsets) {
        let shown = Shown(info.name.of(c.bytes));
        let what = || format!("offset of tensor {shown}");
        if offset != running {
            let want = format!("{running}, where the tensors before it end (no gap, no overlap)");
            return Err(c.fail(offset_at, what(), want, offset));
        }
        let len = info.data.len as u64;
        let at = start.saturating_add(running);
        if first_missing.is_none() && (at > end || len > end - at) {
            first_missing = Some((info.name, at, len, offset_at));
        }
        info.data.at = at.min(end) as usize;
        let next = running.checked_add(len).and_then(|n| n.checked_next_multiple_of(align)).filter(|n| n >> 62 == 0);
        running = match next {
            Some(next) => next,
            None => return Err(c.fail(offset_at, what(), "tensors of less than 2^62 bytes in all", "more")),
        };
    }
    let Some((name, at, len, offset_at)) = first_missing else { return Ok(()) };
    // The last tensor's padding is not asked for, so the file's full size is told up to that.
    let last = index.tensors.last().map_or(0, |t| t.data.len as u64);
    let whole = start.saturating_add(offsets.last().map_or(0, |&(o, _)| o)).saturating_add(last);
    let want = format!("bytes {at} to {} of {whole} in all", at.saturating_add(len));
    let found = format!("a file of {end} bytes: {} bytes missing (cut short while copied?)", whole - end);
    Err(c.fail(offset_at, format_args!("data of tensor {}", Shown(name.of(c.bytes))), want, found))
}

fn duplicate(c: &Cursor<'_>, what: &str, first: Span, second: Span) -> Error {
    // A span begins after the name's length; messages point at the length.
    let found = format!("{} a second time (first at byte {})", Shown(second.of(c.bytes)), first.at - 8);
    c.fail(second.at - 8, format_args!("name of {what}"), "names that differ", found)
}

/// The indices of `n` things by name, or two with the same one, in the order of the file.
pub(crate) fn order<'a>(n: usize, name: impl Fn(usize) -> &'a [u8]) -> Result<Vec<u32>, (usize, usize)> {
    let mut by_name: Vec<u32> = (0..n as u32).collect();
    by_name.sort_by(|&a, &b| name(a as usize).cmp(name(b as usize))); // stable: equals stay in the file's order
    let twice = by_name.windows(2).find(|w| name(w[0] as usize) == name(w[1] as usize));
    match twice {
        Some(w) => Err((w[0] as usize, w[1] as usize)),
        None => Ok(by_name),
    }
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GGUF {}, {} keys, {} tensors", self.version, self.keys.len(), self.tensors.len())
    }
}
