//! Typed values of keys, borrowed from the file: no reinterpretation, every conversion checked.

use std::fmt;

use crate::{Error, error::Shown};

/// The type of a key's value, or of an array's elements.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Hash)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    Str = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    /// The type with this id in files.
    pub fn from_id(id: u32) -> Option<ValueType> {
        use ValueType::*;
        Some(match id {
            0 => U8,
            1 => I8,
            2 => U16,
            3 => I16,
            4 => U32,
            5 => I32,
            6 => F32,
            7 => Bool,
            8 => Str,
            9 => Array,
            10 => U64,
            11 => I64,
            12 => F64,
            _ => return None,
        })
    }

    /// The id in files.
    pub fn id(self) -> u32 {
        self as u32
    }

    /// The name ggml prints: `u32`, `f32`, `str`, `arr`, ...
    pub fn name(self) -> &'static str {
        use ValueType::*;
        match self {
            U8 => "u8",
            I8 => "i8",
            U16 => "u16",
            I16 => "i16",
            U32 => "u32",
            I32 => "i32",
            F32 => "f32",
            Bool => "bool",
            Str => "str",
            Array => "arr",
            U64 => "u64",
            I64 => "i64",
            F64 => "f64",
        }
    }

    /// Bytes of one value; `None` for strings and arrays, whose size is in the file.
    pub fn size(self) -> Option<usize> {
        use ValueType::*;
        match self {
            U8 | I8 | Bool => Some(1),
            U16 | I16 => Some(2),
            U32 | I32 | F32 => Some(4),
            U64 | I64 | F64 => Some(8),
            Str | Array => None,
        }
    }

    /// Whether this is one of the eight integer types.
    pub fn is_integer(self) -> bool {
        use ValueType::*;
        matches!(self, U8 | I8 | U16 | I16 | U32 | I32 | U64 | I64)
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A key's value.
#[derive(Copy, Clone, Debug)]
#[allow(missing_docs)]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    Str(&'a str),
    /// A string that is not UTF-8. GGUF asks for UTF-8, but does not enforce it, and neither does llama.cpp.
    Bytes(&'a [u8]),
    Array(Array<'a>),
}

impl<'a> Value<'a> {
    /// Reads a value of fixed size, or the text of a string. `bytes` is exactly the value's payload.
    pub(crate) fn decode(ty: ValueType, bytes: &'a [u8]) -> Value<'a> {
        // The caller has cut `bytes` to the type's size; a shorter slice would read as zero rather than panic.
        fn fixed<const N: usize>(bytes: &[u8]) -> [u8; N] {
            bytes.first_chunk().copied().unwrap_or([0; N])
        }
        match ty {
            ValueType::U8 => Value::U8(u8::from_le_bytes(fixed(bytes))),
            ValueType::I8 => Value::I8(i8::from_le_bytes(fixed(bytes))),
            ValueType::U16 => Value::U16(u16::from_le_bytes(fixed(bytes))),
            ValueType::I16 => Value::I16(i16::from_le_bytes(fixed(bytes))),
            ValueType::U32 => Value::U32(u32::from_le_bytes(fixed(bytes))),
            ValueType::I32 => Value::I32(i32::from_le_bytes(fixed(bytes))),
            ValueType::U64 => Value::U64(u64::from_le_bytes(fixed(bytes))),
            ValueType::I64 => Value::I64(i64::from_le_bytes(fixed(bytes))),
            ValueType::F32 => Value::F32(f32::from_le_bytes(fixed(bytes))),
            ValueType::F64 => Value::F64(f64::from_le_bytes(fixed(bytes))),
            // As llama.cpp: anything but zero is true.
            ValueType::Bool => Value::Bool(fixed::<1>(bytes) != [0]),
            ValueType::Str | ValueType::Array => match std::str::from_utf8(bytes) {
                Ok(s) => Value::Str(s),
                Err(_) => Value::Bytes(bytes),
            },
        }
    }

    /// The value's type.
    pub fn ty(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F32(_) => ValueType::F32,
            Value::F64(_) => ValueType::F64,
            Value::Bool(_) => ValueType::Bool,
            Value::Str(_) | Value::Bytes(_) => ValueType::Str,
            Value::Array(_) => ValueType::Array,
        }
    }

    /// An integer of any width, with room for all of them; `None` for other types. A bool is not an integer.
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// A floating-point value; an f64 is rounded. `None` for other types.
    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Value::F32(v) => Some(v),
            Value::F64(v) => Some(v as f32),
            _ => None,
        }
    }

    /// A bool; `None` for other types.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Value::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// A string; `None` for other types, and for strings that are not UTF-8.
    pub fn as_str(&self) -> Option<&'a str> {
        match *self {
            Value::Str(v) => Some(v),
            _ => None,
        }
    }

    /// An array; `None` for other types.
    pub fn as_array(&self) -> Option<Array<'a>> {
        match *self {
            Value::Array(v) => Some(v),
            _ => None,
        }
    }

    /// Type and value in a few words, for messages: `i32 -1`, `str "llama"`, `arr of 3 f32`.
    pub(crate) fn describe(&self) -> String {
        match self {
            Value::Array(_) => self.to_string(),
            other => format!("{} {other}", other.ty()),
        }
    }
}

impl fmt::Display for Value<'_> {
    /// The value on one line: text quoted, escaped and cut, an array as its length and type.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(v) => v.fmt(f),
            Value::I8(v) => v.fmt(f),
            Value::U16(v) => v.fmt(f),
            Value::I16(v) => v.fmt(f),
            Value::U32(v) => v.fmt(f),
            Value::I32(v) => v.fmt(f),
            Value::U64(v) => v.fmt(f),
            Value::I64(v) => v.fmt(f),
            Value::F32(v) => v.fmt(f),
            Value::F64(v) => v.fmt(f),
            Value::Bool(v) => v.fmt(f),
            Value::Str(v) => Shown(v.as_bytes()).fmt(f),
            Value::Bytes(v) => Shown(v).fmt(f),
            Value::Array(v) => write!(f, "arr of {} {}", v.len(), v.elem_type()),
        }
    }
}

/// A key's array: elements of one type, read from the file as they are asked for. There are no arrays of arrays.
#[derive(Copy, Clone)]
pub struct Array<'a> {
    pub(crate) file: &'a str,
    pub(crate) key: &'a str,
    pub(crate) elem: ValueType,
    pub(crate) len: usize,
    pub(crate) bytes: &'a [u8],
}

impl fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}; {}]", self.elem, self.len)
    }
}

impl<'a> Array<'a> {
    /// Number of elements, known to be in the file.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements' type.
    pub fn elem_type(&self) -> ValueType {
        self.elem
    }

    /// The elements as they lie in the file: little-endian numbers, or strings each after its 8-byte length.
    pub fn raw(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements whatever their type.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (elem, len) = (self.elem, self.len);
        let mut rest = self.bytes;
        (0..len).map_while(move |_| {
            let size = match elem.size() {
                Some(size) => size,
                None => {
                    let n = rest.split_off(..8)?;
                    usize::try_from(u64::from_le_bytes(n.try_into().ok()?)).ok()?
                }
            };
            Some(Value::decode(elem, rest.split_off(..size)?))
        })
    }

    fn convert<T, F: Fn(Value<'a>) -> Option<T>>(
        &self,
        ok: bool,
        want: &'static str,
        f: F,
    ) -> Result<impl Iterator<Item = Result<T, Error>> + use<'a, T, F>, Error> {
        let Array { file, key, len, elem, .. } = *self;
        let fail = move |want: String, found: String| Error::Key { file: file.into(), key: key.into(), want, found };
        if !ok {
            return Err(fail(format!("an array of {want}"), format!("arr of {len} {elem}")));
        }
        Ok(self
            .iter()
            .enumerate()
            .map(move |(i, v)| f(v).ok_or_else(|| fail(format!("{want} at index {i}"), v.describe()))))
    }

    /// The elements of an integer array, each converted from its width; a negative one is an error where it stands.
    pub fn iter_u64(&self) -> Result<impl Iterator<Item = Result<u64, Error>> + use<'a>, Error> {
        self.convert(self.elem.is_integer(), "integers that are not negative", |v| v.as_integer()?.try_into().ok())
    }

    /// The elements of an integer array, each converted from its width; a `u64` of 2^63 or more is an error where it stands.
    pub fn iter_i64(&self) -> Result<impl Iterator<Item = Result<i64, Error>> + use<'a>, Error> {
        self.convert(self.elem.is_integer(), "integers below 2^63", |v| v.as_integer()?.try_into().ok())
    }

    /// The elements of an `f32` or `f64` array (the latter rounded).
    pub fn iter_f32(&self) -> Result<impl Iterator<Item = Result<f32, Error>> + use<'a>, Error> {
        self.convert(matches!(self.elem, ValueType::F32 | ValueType::F64), "floating-point numbers", |v| v.as_f32())
    }

    /// The elements of a `bool` array.
    pub fn iter_bool(&self) -> Result<impl Iterator<Item = Result<bool, Error>> + use<'a>, Error> {
        self.convert(self.elem == ValueType::Bool, "bools", |v| v.as_bool())
    }

    /// The elements of a string array; one that is not UTF-8 is an error where it stands.
    pub fn iter_str(&self) -> Result<impl Iterator<Item = Result<&'a str, Error>> + use<'a>, Error> {
        self.convert(self.elem == ValueType::Str, "UTF-8 strings", |v| v.as_str())
    }
}
