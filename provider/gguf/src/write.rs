//! Builds small GGUF files in memory: fixtures for tests, and tiny models for real servers to load.
//!
//! Byte for byte what the `gguf` Python package writes for the same keys and tensors. Not for large models: everything is
//! held in memory twice.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{Error, GgmlType, ValueType};

/// A GGUF file in the making. Keys and tensors stay in the order in which they are first set.
#[derive(Clone, Debug)]
pub struct Writer {
    version: u32,
    alignment: u32,
    keys: Vec<(String, Vec<u8>)>,
    tensors: Vec<NewTensor>,
}

#[derive(Clone, Debug)]
struct NewTensor {
    name: String,
    ty: GgmlType,
    ne: Vec<u64>,
    bytes: Vec<u8>,
}

macro_rules! setters {
    ($($scalar:ident $array:ident $t:ty, $ty:ident;)*) => { $(
        #[doc = concat!("Sets a key to a `", stringify!($scalar), "`.")]
        pub fn $scalar(&mut self, key: &str, value: $t) -> &mut Writer {
            self.set(key, ValueType::$ty, &value.to_le_bytes())
        }

        #[doc = concat!("Sets a key to an array of `", stringify!($scalar), "`.")]
        pub fn $array(&mut self, key: &str, values: &[$t]) -> &mut Writer {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            self.array(key, ValueType::$ty, values.len(), &bytes)
        }
    )* };
}

impl Writer {
    /// A GGUF 3 file with one key, `general.architecture`.
    pub fn new(arch: &str) -> Writer {
        let mut w = Writer::empty();
        w.str("general.architecture", arch);
        w
    }

    /// A GGUF 3 file with no keys.
    pub fn empty() -> Writer {
        Writer { version: 3, alignment: 32, keys: Vec::new(), tensors: Vec::new() }
    }

    /// Writes another version; the layout of 2 is that of 3.
    pub fn version(&mut self, version: u32) -> &mut Writer {
        self.version = version;
        self
    }

    /// Sets `general.alignment` and aligns tensors to it.
    ///
    /// # Errors
    /// [`Error::Write`] when it is not a power of two.
    pub fn alignment(&mut self, alignment: u32) -> Result<&mut Writer, Error> {
        if !alignment.is_power_of_two() {
            let (want, found) = ("a power of two".to_owned(), alignment.to_string());
            return Err(Error::Write { what: "general.alignment".to_owned(), want, found });
        }
        self.alignment = alignment;
        Ok(self.u32("general.alignment", alignment))
    }

    setters! {
        u8 array_u8 u8, U8;
        i8 array_i8 i8, I8;
        u16 array_u16 u16, U16;
        i16 array_i16 i16, I16;
        u32 array_u32 u32, U32;
        i32 array_i32 i32, I32;
        u64 array_u64 u64, U64;
        i64 array_i64 i64, I64;
        f32 array_f32 f32, F32;
        f64 array_f64 f64, F64;
    }

    /// Sets a key to a bool.
    pub fn bool(&mut self, key: &str, value: bool) -> &mut Writer {
        self.set(key, ValueType::Bool, &[value.into()])
    }

    /// Sets a key to an array of bools.
    pub fn array_bool(&mut self, key: &str, values: &[bool]) -> &mut Writer {
        let bytes: Vec<u8> = values.iter().map(|&v| v.into()).collect();
        self.array(key, ValueType::Bool, values.len(), &bytes)
    }

    /// Sets a key to a string.
    pub fn str(&mut self, key: &str, value: &str) -> &mut Writer {
        let mut bytes = Vec::new();
        put_str(&mut bytes, value.as_bytes());
        self.set(key, ValueType::Str, &bytes)
    }

    /// Sets a key to an array of strings. Bytes are taken too: vocabularies hold what is not UTF-8.
    pub fn array_str<S: AsRef<[u8]>>(&mut self, key: &str, values: &[S]) -> &mut Writer {
        let mut bytes = Vec::new();
        for v in values {
            put_str(&mut bytes, v.as_ref());
        }
        self.array(key, ValueType::Str, values.len(), &bytes)
    }

    fn array(&mut self, key: &str, elem: ValueType, len: usize, elems: &[u8]) -> &mut Writer {
        let mut bytes = Vec::with_capacity(12 + elems.len());
        bytes.extend(elem.id().to_le_bytes());
        bytes.extend((len as u64).to_le_bytes());
        bytes.extend(elems);
        self.set(key, ValueType::Array, &bytes)
    }

    fn set(&mut self, key: &str, ty: ValueType, payload: &[u8]) -> &mut Writer {
        let mut value = ty.id().to_le_bytes().to_vec();
        value.extend(payload);
        match self.keys.iter_mut().find(|(name, _)| name == key) {
            Some((_, old)) => *old = value,
            None => self.keys.push((key.to_owned(), value)),
        }
        self
    }

    /// Takes a key out again; for fixtures that lack one. Nothing happens when it is not there.
    pub fn remove(&mut self, key: &str) -> &mut Writer {
        self.keys.retain(|(name, _)| name != key);
        self
    }

    /// Adds a tensor from its encoded bytes. `ne` is ggml's order: a row's length first.
    ///
    /// # Errors
    /// [`Error::Write`] when the name is empty, taken, or of 64 bytes or more, when there are more than four dimensions, a
    /// row is not whole blocks, or the bytes are not as many as type and dimensions ask for.
    pub fn tensor(&mut self, name: &str, ty: GgmlType, ne: &[u64], bytes: Vec<u8>) -> Result<&mut Writer, Error> {
        let fail = |want: &str, found: String| Error::Write {
            what: format!("tensor {name:?} of {ty} {ne:?}"),
            want: want.to_owned(),
            found,
        };
        if name.is_empty() || name.len() > 63 {
            return Err(fail("a name of 1 to 63 bytes", format!("{} bytes", name.len())));
        }
        if self.tensors.iter().any(|t| t.name == name) {
            return Err(fail("a name of its own", "one that is taken".to_owned()));
        }
        if ne.len() > 4 {
            return Err(fail("at most 4 dimensions", ne.len().to_string()));
        }
        let (row, rows) = ne.split_first().map_or((1, &[][..]), |(row, rows)| (*row, rows));
        let Some(row) = ty.row_bytes(row) else {
            return Err(fail("rows of whole blocks", format!("{row} elements in blocks of {}", ty.block_elems())));
        };
        match rows.iter().try_fold(row, |n, d| n.checked_mul(*d)) {
            Some(n) if n == bytes.len() as u64 => {}
            Some(n) => return Err(fail(&format!("{n} bytes"), bytes.len().to_string())),
            None => return Err(fail("a size that fits", "one of more than 2^64 bytes".to_owned())),
        }
        self.tensors.push(NewTensor { name: name.to_owned(), ty, ne: ne.to_vec(), bytes });
        Ok(self)
    }

    /// Adds a tensor of f32.
    ///
    /// # Errors
    /// As [`tensor`](Writer::tensor).
    pub fn tensor_f32(&mut self, name: &str, ne: &[u64], values: &[f32]) -> Result<&mut Writer, Error> {
        self.tensor(name, GgmlType::F32, ne, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// The file.
    pub fn finish(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            put_str(&mut out, key.as_bytes());
            out.extend(value);
        }
        let align = self.alignment as usize;
        let mut offset = 0;
        for t in &self.tensors {
            put_str(&mut out, t.name.as_bytes());
            out.extend((t.ne.len() as u32).to_le_bytes());
            out.extend(t.ne.iter().flat_map(|n| n.to_le_bytes()));
            out.extend(t.ty.id().to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset += t.bytes.len().next_multiple_of(align);
        }
        for t in &self.tensors {
            out.resize(out.len().next_multiple_of(align), 0);
            out.extend(&t.bytes);
        }
        if !self.tensors.is_empty() {
            out.resize(out.len().next_multiple_of(align), 0);
        }
        out
    }

    /// Writes the file.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        fs::write(path, self.finish()).map_err(|source| Error::Io { path: path.to_owned(), doing: "writing", source })
    }

    /// The file in `n_shards` pieces, as llama.cpp's splitter makes them: all keys in the first, tensors in their order
    /// spread evenly, `split.no`, `split.count` and `split.tensors.count` in each.
    ///
    /// # Errors
    /// [`Error::Write`] when `n_shards` is 0 or does not fit the key's 16 bits.
    pub fn split(&self, n_shards: usize) -> Result<Vec<Writer>, Error> {
        let Some(count) = u16::try_from(n_shards).ok().filter(|&n| n > 0) else {
            let (want, found) = ("1 to 65535".to_owned(), n_shards.to_string());
            return Err(Error::Write { what: "number of shards".to_owned(), want, found });
        };
        let total = self.tensors.len();
        let shard = |no: u16| {
            let mut w = Writer { version: self.version, alignment: self.alignment, ..Writer::empty() };
            if no == 0 {
                w.keys = self.keys.clone();
            } else if let Some(key) = self.keys.iter().find(|(name, _)| name == "general.alignment") {
                w.keys.push(key.clone());
            }
            w.u16("split.no", no).u16("split.count", count).i32("split.tensors.count", total as i32);
            let bound = |no: usize| no * total / n_shards;
            w.tensors = self.tensors[bound(no.into())..bound(usize::from(no) + 1)].to_vec();
            w
        };
        Ok((0..count).map(shard).collect())
    }

    /// Writes the pieces of [`split`](Writer::split) as `DIR/STEM-00001-of-0000N.gguf` and so on; answers their paths.
    ///
    /// # Errors
    /// [`Error::Io`], and as [`split`](Writer::split).
    pub fn write_split(&self, dir: &Path, stem: &str, n_shards: usize) -> Result<Vec<PathBuf>, Error> {
        let mut paths = Vec::new();
        for (i, shard) in self.split(n_shards)?.iter().enumerate() {
            let path = dir.join(format!("{stem}-{:05}-of-{n_shards:05}.gguf", i + 1));
            shard.write(&path)?;
            paths.push(path);
        }
        Ok(paths)
    }
}

fn put_str(out: &mut Vec<u8>, s: &[u8]) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s);
}
