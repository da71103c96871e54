//! A model: one file or several, their keys and tensors by name.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use crate::{
    Array, Error, GgmlType, Limits, Value, ValueType, dequant,
    error::Shown,
    mapped::Mapped,
    parse::{self, Index, KeyInfo, TensorInfo},
};

struct Shard {
    path: PathBuf,
    /// The path as messages show it.
    name: String,
    bytes: Mapped,
    index: Index,
}

impl Shard {
    fn new(path: PathBuf, bytes: Mapped, limits: &Limits) -> Result<Shard, Error> {
        let name = path.display().to_string();
        let index = parse::index(&name, bytes.bytes(), limits)?;
        Ok(Shard { path, name, bytes, index })
    }

    fn text(&self, span: parse::Span) -> &str {
        // Names were seen to be UTF-8 when the file was opened; only a file rewritten under the mapping gets here with less.
        std::str::from_utf8(span.of(self.bytes.bytes())).unwrap_or("?")
    }

    fn value<'a>(&'a self, key: &KeyInfo) -> Value<'a> {
        let bytes = key.payload.of(self.bytes.bytes());
        if key.ty != ValueType::Array {
            return Value::decode(key.ty, bytes);
        }
        Value::Array(Array { file: &self.name, key: self.text(key.name), elem: key.elem, len: key.len, bytes })
    }

    fn get(&self, key: &str) -> Option<Value<'_>> {
        Some(self.value(self.index.key(self.bytes.bytes(), key)?))
    }

    fn wrong(&self, key: &str, want: &str, found: String) -> Error {
        Error::Key { file: self.name.clone(), key: key.to_owned(), want: want.to_owned(), found }
    }

    fn typed<'a, T>(&'a self, key: &str, want: &str, f: impl Fn(&Value<'a>) -> Option<T>) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        f(&value).map(Some).ok_or_else(|| self.wrong(key, want, value.describe()))
    }

    fn u64(&self, key: &str) -> Result<Option<u64>, Error> {
        self.typed(key, "an integer from 0 to 18446744073709551615", |v| v.as_integer()?.try_into().ok())
    }
}

/// An open model. Values and tensors borrow from it.
///
/// Keys are the first shard's (the others carry only `split.*`), tensors are those of all shards, in the order of the files.
pub struct Gguf {
    shards: Vec<Shard>,
    tensors: Vec<TensorInfo>,
    by_name: Vec<u32>,
}

impl Gguf {
    /// Opens the model that `path` is, or is a shard of.
    ///
    /// # Errors
    /// [`Error::Io`] when a file can not be opened or mapped, [`Error::MissingShard`] and [`Error::Split`] when a split
    /// model is not whole or not one, and the others for what a file contains.
    pub fn open(path: impl AsRef<Path>) -> Result<Gguf, Error> {
        Gguf::open_with(path, &Limits::default())
    }

    /// [`open`](Gguf::open) with other limits than the default ones.
    ///
    /// # Errors
    /// As [`open`](Gguf::open).
    pub fn open_with(path: impl AsRef<Path>, limits: &Limits) -> Result<Gguf, Error> {
        let path = path.as_ref();
        let given = Shard::new(path.to_owned(), Mapped::open(path)?, limits)?;
        let count = given.u64("split.count")?.unwrap_or(1);
        let shards = if count > 1 { siblings(given, count, limits)? } else { vec![given] };
        Gguf::of(shards)
    }

    /// A model in memory, whole and in one piece, for tests and fuzzing. `name` stands where messages name the file.
    ///
    /// # Errors
    /// As [`open`](Gguf::open); a shard of a split model is [`Error::Split`].
    pub fn from_bytes(name: &str, bytes: Vec<u8>) -> Result<Gguf, Error> {
        Gguf::from_bytes_with(name, bytes, &Limits::default())
    }

    /// [`from_bytes`](Gguf::from_bytes) with other limits than the default ones.
    ///
    /// # Errors
    /// As [`from_bytes`](Gguf::from_bytes).
    pub fn from_bytes_with(name: &str, bytes: Vec<u8>, limits: &Limits) -> Result<Gguf, Error> {
        let shard = Shard::new(PathBuf::from(name), Mapped::Owned(bytes), limits)?;
        match shard.u64("split.count")? {
            Some(count) if count > 1 => Err(Error::Split {
                file: shard.name,
                what: "key \"split.count\"".to_owned(),
                want: "a whole model".to_owned(),
                found: format!("one of {count} shards"),
            }),
            _ => Gguf::of(vec![shard]),
        }
    }

    fn of(mut shards: Vec<Shard>) -> Result<Gguf, Error> {
        let mut tensors = Vec::with_capacity(shards.iter().map(|s| s.index.tensors.len()).sum());
        for (i, shard) in shards.iter_mut().enumerate() {
            let of_shard = std::mem::take(&mut shard.index.tensors);
            tensors.extend(of_shard.into_iter().map(|t| TensorInfo { shard: i as u32, ..t }));
        }
        let name = |i: usize| {
            let t: &TensorInfo = &tensors[i];
            t.name.of(shards[t.shard as usize].bytes.bytes())
        };
        let by_name = parse::order(tensors.len(), name).map_err(|(first, second)| Error::Split {
            file: shards[tensors[second].shard as usize].name.clone(),
            what: format!("tensor {} at byte {}", Shown(name(second)), tensors[second].name.at - 8),
            want: "tensors that no other shard has".to_owned(),
            found: format!("the same name in {}", shards[tensors[first].shard as usize].name),
        })?;
        Ok(Gguf { shards, tensors, by_name })
    }

    fn first(&self) -> &Shard {
        &self.shards[0]
    }

    /// The value of a key, `None` when there is no such key.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        self.first().get(key)
    }

    /// All keys with their values, in the order of the file.
    pub fn keys(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        let shard = self.first();
        shard.index.keys.iter().map(|key| (shard.text(key.name), shard.value(key)))
    }

    /// A string. `Ok(None)` when the key is absent, as with all getters that follow.
    ///
    /// # Errors
    /// [`Error::Key`] when the value is of another type or, here, not UTF-8.
    pub fn str(&self, key: &str) -> Result<Option<&str>, Error> {
        self.first().typed(key, "a UTF-8 str", |v| v.as_str())
    }

    /// An integer of any width that fits.
    ///
    /// # Errors
    /// [`Error::Key`] when the value is no integer or out of range.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, Error> {
        self.first().typed(key, "an integer from 0 to 4294967295", |v| v.as_integer()?.try_into().ok())
    }

    /// An integer of any width that fits.
    ///
    /// # Errors
    /// [`Error::Key`] when the value is no integer or negative.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, Error> {
        self.first().u64(key)
    }

    /// An integer of any width that fits.
    ///
    /// # Errors
    /// [`Error::Key`] when the value is no integer or too large.
    pub fn i64(&self, key: &str) -> Result<Option<i64>, Error> {
        self.first().typed(key, "an integer below 2^63", |v| v.as_integer()?.try_into().ok())
    }

    /// A floating-point number; an f64 is rounded.
    ///
    /// # Errors
    /// [`Error::Key`] when the value is of another type, integers included.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, Error> {
        self.first().typed(key, "an f32", |v| v.as_f32())
    }

    /// A bool.
    ///
    /// # Errors
    /// [`Error::Key`] when the value is of another type, integers included.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        self.first().typed(key, "a bool", |v| v.as_bool())
    }

    /// An array of any element type.
    ///
    /// # Errors
    /// [`Error::Key`] when the value is not an array.
    pub fn array(&self, key: &str) -> Result<Option<Array<'_>>, Error> {
        self.first().typed(key, "an array", |v| v.as_array())
    }

    /// The error for a key that the reader of the model can not do without, or whose value it can not use: names the file,
    /// the key, what was wanted, and what the key holds.
    pub fn bad_key(&self, key: &str, want: impl fmt::Display) -> Error {
        let found = self.get(key).map_or_else(|| "no such key".to_owned(), |v| v.describe());
        self.first().wrong(key, &want.to_string(), found)
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let of = |i: u32| {
            let t = &self.tensors[i as usize];
            t.name.of(self.shards[t.shard as usize].bytes.bytes())
        };
        let found = self.by_name.binary_search_by(|&i| of(i).cmp(name.as_bytes())).ok()?;
        Some(self.view(&self.tensors[self.by_name[found] as usize]))
    }

    /// The tensor of this name, or an error that names it and the file.
    ///
    /// # Errors
    /// [`Error::NoTensor`].
    pub fn need_tensor(&self, name: &str) -> Result<Tensor<'_>, Error> {
        let none =
            || Error::NoTensor { file: self.first().name.clone(), name: name.to_owned(), count: self.tensors.len() };
        self.tensor(name).ok_or_else(none)
    }

    /// All tensors, in the order of the files.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        self.tensors.iter().map(|t| self.view(t))
    }

    fn view<'a>(&'a self, t: &TensorInfo) -> Tensor<'a> {
        let shard = &self.shards[t.shard as usize];
        Tensor {
            name: shard.text(t.name),
            ty: t.ty,
            ne: t.ne,
            n_dims: t.n_dims,
            data: t.data.of(shard.bytes.bytes()),
            offset: t.data.at as u64,
            shard: t.shard as usize,
        }
    }

    /// How many tensors and bytes there are of each type, by rising type id.
    pub fn type_census(&self) -> Vec<TypeCount> {
        let mut census: Vec<TypeCount> = Vec::new();
        for t in &self.tensors {
            let i = census.binary_search_by_key(&t.ty, |c| c.ty).unwrap_or_else(|i| {
                census.insert(i, TypeCount { ty: t.ty, tensors: 0, bytes: 0 });
                i
            });
            census[i].tensors += 1;
            census[i].bytes += t.data.len as u64;
        }
        census
    }

    /// `general.architecture`.
    ///
    /// # Errors
    /// [`Error::Key`] when the key is absent or no string.
    pub fn architecture(&self) -> Result<&str, Error> {
        const KEY: &str = "general.architecture";
        self.str(KEY)?.ok_or_else(|| self.bad_key(KEY, "a str"))
    }

    /// The first shard's path, or the name that [`from_bytes`](Gguf::from_bytes) was given.
    pub fn path(&self) -> &Path {
        &self.first().path
    }

    /// The paths of all shards, in their order.
    pub fn paths(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.shards.iter().map(|s| s.path.as_path())
    }

    /// The GGUF version of the first shard: 2 or 3.
    pub fn version(&self) -> u32 {
        self.first().index.version
    }

    /// The first shard's `general.alignment`, 32 when it says nothing. Tensors begin at multiples of it *in the file*; in
    /// memory that is an alignment only where the file is mapped (page-aligned), not for [`from_bytes`](Gguf::from_bytes).
    pub fn alignment(&self) -> u32 {
        self.first().index.alignment
    }

    /// The size of all shards in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.shards.iter().map(|s| s.bytes.bytes().len() as u64).sum()
    }
}

impl fmt::Debug for Gguf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shard { name, index, .. } = self.first();
        let (keys, tensors, shards) = (index.keys.len(), self.tensors.len(), self.shards.len());
        write!(f, "Gguf({name}: GGUF {}, {keys} keys, {tensors} tensors, {shards} files)", index.version)
    }
}

/// One line of [`Gguf::type_census`].
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct TypeCount {
    /// The type.
    pub ty: GgmlType,
    /// How many tensors have it.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// A tensor as the file has it: `data` is rows of `ne[0]` elements in blocks of `ty`, the first dimension running fastest.
#[derive(Copy, Clone)]
pub struct Tensor<'a> {
    /// Its name, unique in the model.
    pub name: &'a str,
    /// The type of its elements.
    pub ty: GgmlType,
    /// Elements per dimension, ggml's order (`ne[0]` is a row's length); 1 past `n_dims`.
    pub ne: [u64; 4],
    /// How many dimensions the file lists, 0 to 4.
    pub n_dims: u32,
    /// Its bytes: exactly `n_rows() * row_bytes()` of them.
    pub data: &'a [u8],
    /// Where `data` begins in its file.
    pub offset: u64,
    /// Which file, as a position in [`Gguf::paths`].
    pub shard: usize,
}

impl<'a> Tensor<'a> {
    /// The dimensions the file lists.
    pub fn shape(&self) -> &[u64] {
        &self.ne[..self.n_dims.min(4) as usize]
    }

    /// Number of elements.
    pub fn n_elements(&self) -> u64 {
        self.ne[0] * self.n_rows() // products were checked when the file was opened
    }

    /// Number of rows: the product of all dimensions but the first.
    pub fn n_rows(&self) -> u64 {
        self.ne[1] * self.ne[2] * self.ne[3]
    }

    /// Bytes of one row of `ne[0]` elements.
    pub fn row_bytes(&self) -> u64 {
        self.ty.row_bytes(self.ne[0]).unwrap_or_default()
    }

    /// The bytes of row `i`, counted through all dimensions but the first; `None` past the last.
    pub fn row(&self, i: u64) -> Option<&'a [u8]> {
        let len = self.row_bytes();
        let at = usize::try_from(i.checked_mul(len)?).ok()?;
        if i < self.n_rows() { self.data.get(at..at.checked_add(len as usize)?) } else { None }
    }

    /// All elements as f32, by [`dequant::dequantize`].
    ///
    /// # Errors
    /// [`Error::NoDequantizer`] for types that have none.
    pub fn to_f32(&self) -> Result<Vec<f32>, Error> {
        if !dequant::is_supported(self.ty) {
            return Err(Error::NoDequantizer { ty: self.ty });
        }
        // Memory for elements that are in the file: at most 32 times its bytes.
        let mut out = vec![0.0; self.n_elements() as usize];
        dequant::dequantize(self.ty, self.data, &mut out)?;
        Ok(out)
    }
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {:?} at {} in file {}", self.name, self.ty, self.shape(), self.offset, self.shard)
    }
}

/// llama.cpp keeps the number of shards in 16 bits.
const MAX_SHARDS: u64 = u16::MAX as u64;

/// Opens the other shards of a model of `count` files and checks that they belong together.
fn siblings(given: Shard, count: u64, limits: &Limits) -> Result<Vec<Shard>, Error> {
    let split = |shard: &Shard, what: &str, want: String, found: String| Error::Split {
        file: shard.name.clone(),
        what: what.to_owned(),
        want,
        found,
    };
    let file_name = given.path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let Some(name) = ShardName::parse(file_name).filter(|n| n.count == count) else {
        let want = format!("a name that ends in -NNNNN-of-{count:05}.gguf, by which the others are found");
        return Err(split(&given, "file name of a shard", want, Shown(file_name.as_bytes()).to_string()));
    };
    if count > MAX_SHARDS {
        let want = format!("at most {MAX_SHARDS}");
        return Err(split(&given, "key \"split.count\"", want, count.to_string()));
    }
    let place = name.index - 1;
    let path = |i: u64| given.path.with_file_name(format!("{}-{:05}-of-{count:05}.gguf", name.prefix, i + 1));

    let missing: Vec<PathBuf> = (0..count).filter(|&i| i != place).map(path).filter(|p| !p.exists()).collect();
    if !missing.is_empty() {
        return Err(Error::MissingShard { file: given.name, count, missing });
    }
    let paths: Vec<PathBuf> = (0..count).map(path).collect();
    let mut given = Some(given);
    let mut shards = Vec::new();
    for (i, path) in paths.into_iter().enumerate() {
        let given = if i as u64 == place { given.take() } else { None };
        let shard = match given {
            Some(shard) => shard,
            None => {
                let bytes = Mapped::open(&path)?;
                Shard::new(path, bytes, limits)?
            }
        };
        // Names count from 1, the key from 0.
        for (key, want) in [("split.count", count), ("split.no", i as u64)] {
            match shard.u64(key)? {
                Some(found) if found == want => {}
                found => {
                    let found = found.map_or("no such key".to_owned(), |v| v.to_string());
                    let want = format!("{want}, as the file's name says");
                    return Err(split(&shard, &format!("key {key:?} (was the file renamed?)"), want, found));
                }
            }
        }
        shards.push(shard);
    }

    let (first, rest) = shards.split_first().expect("count is at least 2");
    let total = first.u64("split.tensors.count")?;
    for shard in rest {
        // Other writers may repeat keys; then they must agree. Alignment is each file's own.
        for key in &shard.index.keys {
            let name = shard.text(key.name);
            if matches!(name, "split.no" | "general.alignment") {
                continue;
            }
            let Some(other) = first.index.key(first.bytes.bytes(), name) else { continue };
            let same = key.ty == other.ty
                && key.elem == other.elem
                && key.payload.of(shard.bytes.bytes()) == other.payload.of(first.bytes.bytes());
            if !same {
                let what = format!("key {name:?} (a shard of another model?)");
                let want = format!("{}, as in {}", first.value(other).describe(), first.name);
                return Err(split(shard, &what, want, shard.value(key).describe()));
            }
        }
    }
    let found: u64 = shards.iter().map(|s| s.index.tensors.len() as u64).sum();
    match total {
        Some(total) if total != found => {
            let what = "key \"split.tensors.count\" (a shard of another model?)";
            Err(split(first, what, format!("{total} tensors in all files"), format!("{found}")))
        }
        _ => Ok(shards),
    }
}

/// `PREFIX-00002-of-00003.gguf`, taken apart.
struct ShardName {
    prefix: String,
    /// From 1.
    index: u64,
    count: u64,
}

impl ShardName {
    fn parse(file_name: &str) -> Option<ShardName> {
        // At least five digits, as printf's %05d writes them.
        let number = |s: &str| {
            let plain = s.len() >= 5 && (s.len() == 5 || !s.starts_with('0')) && s.bytes().all(|b| b.is_ascii_digit());
            s.parse::<u64>().ok().filter(|_| plain)
        };
        let rest = file_name.strip_suffix(".gguf")?;
        let (rest, count) = rest.rsplit_once("-of-")?;
        let (prefix, index) = rest.rsplit_once('-')?;
        let (index, count) = (number(index)?, number(count)?);
        (index >= 1 && index <= count).then(|| ShardName { prefix: prefix.to_owned(), index, count })
    }
}

#[cfg(test)]
mod tests {
    use super::ShardName;

    #[test]
    fn shard_names() {
        let n = ShardName::parse("a-b-00002-of-00003.gguf").unwrap();
        assert_eq!((n.prefix.as_str(), n.index, n.count), ("a-b", 2, 3));
        assert!(ShardName::parse("-00001-of-00001.gguf").is_some());
        for bad in [
            "a.gguf",
            "a-00000-of-00003.gguf",
            "a-00004-of-00003.gguf",
            "a-2-of-3.gguf",
            "a-00002-of-00003.bin",
            "a-+0002-of-00003.gguf",
            "a-00002-of-99999999999999999999.gguf",
        ] {
            assert!(ShardName::parse(bad).is_none(), "{bad}");
        }
    }
}
