//! A model's metadata, asked for by the names that its architecture gives to keys.

use crate::Error;
use gguf::Gguf;

/// Beyond any model there is; keeps products of two sizes far from overflow.
pub(crate) const MAX_WIDTH: u32 = 1 << 20;

/// The keys `ARCHITECTURE.…` of a file. Every complaint names the key, what was found and what was wanted.
pub(crate) struct Keys<'g> {
    /// The file.
    pub gguf: &'g Gguf,
    /// What keys begin with.
    pub arch: &'static str,
    /// Entries of an array with one for each block. Blocks that only predict more tokens have some too, and come last: what is
    /// read here of an array are the entries of the layers.
    pub n_block: u32,
}

impl Keys<'_> {
    /// The whole name of a key.
    pub fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    /// A complaint.
    pub fn wrong(&self, key: &str, found: impl ToString, wanted: impl ToString) -> Error {
        Error::Key { key: self.name(key), found: found.to_string(), wanted: wanted.to_string() }
    }

    /// A variant that is not built.
    pub fn unsupported(&self, key: &str, found: impl ToString, hint: &str) -> Error {
        Error::Unsupported { what: format!("{} = {}", self.name(key), found.to_string()), hint: hint.into() }
    }

    /// A whole number, if it is there.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, Error> {
        Ok(self.gguf.u32(&self.name(key))?)
    }

    /// A finite number, if it is there.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, Error> {
        let value = self.gguf.f32(&self.name(key))?;
        match value {
            Some(v) if !v.is_finite() => Err(self.wrong(key, v, "a finite number")),
            other => Ok(other),
        }
    }

    /// A flag, if it is there.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        Ok(self.gguf.bool(&self.name(key))?)
    }

    /// A size that must be there.
    pub fn size(&self, key: &str, max: u32) -> Result<u32, Error> {
        let Some(value) = self.u32(key)? else {
            return Err(self.wrong(key, "no such key", format!("a number from 1 to {max}")));
        };
        self.in_range(key, value, max)
    }

    /// `value`, if it is from 1 to `max`.
    pub fn in_range(&self, key: &str, value: u32, max: u32) -> Result<u32, Error> {
        if (1..=max).contains(&value) {
            Ok(value)
        } else {
            Err(self.wrong(key, value, format!("a number from 1 to {max}")))
        }
    }

    /// A flag for each layer, if the key is there.
    pub fn flags(&self, key: &str, n_layer: u32) -> Result<Option<Vec<bool>>, Error> {
        let Some(value) = self.gguf.get(&self.name(key)) else { return Ok(None) };
        let found =
            |n: usize| self.wrong(key, format!("{n} entries"), format!("{} flags, one per block", self.n_block));
        let array = value.as_array().ok_or_else(|| found(1))?;
        if array.len() != self.n_block as usize {
            return Err(found(array.len()));
        }
        Ok(Some(first_flags(&array, n_layer)?))
    }

    /// One number from 1 on for all layers, or an array with one for each.
    pub fn per_layer(&self, key: &str, n_layer: u32, max: u32) -> Result<Option<Vec<u32>>, Error> {
        self.per_layer_from(1, key, n_layer, max)
    }

    /// One number from `min` on for all layers, or an array with one for each.
    pub fn per_layer_from(&self, min: u32, key: &str, n_layer: u32, max: u32) -> Result<Option<Vec<u32>>, Error> {
        let in_range = |value: u32| match value {
            0 if min == 0 => Ok(0),
            other => self.in_range(key, other, max),
        };
        match self.gguf.get(&self.name(key)) {
            None => Ok(None),
            Some(gguf::Value::Array(array)) => {
                self.check_len(key, &array)?;
                let mut all = Vec::new();
                for value in array.iter_u64()?.take(n_layer as usize) {
                    let value = u32::try_from(value?).unwrap_or(u32::MAX);
                    all.push(in_range(value)?);
                }
                Ok(Some(all))
            }
            Some(_) => Ok(Some(vec![in_range(self.u32(key)?.unwrap_or(0))?; n_layer as usize])),
        }
    }

    /// One finite number for all layers, or an array with one for each.
    pub fn f32s(&self, key: &str, n_layer: u32) -> Result<Option<Vec<f32>>, Error> {
        let Some(gguf::Value::Array(array)) = self.gguf.get(&self.name(key)) else {
            return Ok(self.f32(key)?.map(|v| vec![v; n_layer as usize]));
        };
        self.check_len(key, &array)?;
        let all = array.iter_f32()?.take(n_layer as usize).collect::<Result<Vec<f32>, _>>()?;
        match all.iter().find(|v| !v.is_finite()) {
            Some(v) => Err(self.wrong(key, v, "finite numbers")),
            None => Ok(Some(all)),
        }
    }

    fn check_len(&self, key: &str, array: &gguf::Array<'_>) -> Result<(), Error> {
        if array.len() == self.n_block as usize {
            return Ok(());
        }
        Err(self.wrong(key, format!("{} entries", array.len()), format!("{}, one per block", self.n_block)))
    }
}

/// The first `n` entries of an array of flags, which may be whole numbers.
pub(super) fn first_flags(array: &gguf::Array<'_>, n: u32) -> Result<Vec<bool>, gguf::Error> {
    let n = n as usize;
    match array.elem_type() {
        gguf::ValueType::Bool => array.iter_bool()?.take(n).collect(),
        _ => array.iter_i64()?.take(n).map(|v| v.map(|v| v != 0)).collect(),
    }
}
