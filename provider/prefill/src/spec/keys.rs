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

    /// One number for all layers, or an array with one for each.
    pub fn per_layer(&self, key: &str, n_layer: u32, max: u32) -> Result<Option<Vec<u32>>, Error> {
        match self.gguf.get(&self.name(key)) {
            None => Ok(None),
            Some(gguf::Value::Array(array)) => {
                if array.len() != n_layer as usize {
                    return Err(self.wrong(
                        key,
                        format!("{} entries", array.len()),
                        format!("{n_layer}, one per layer"),
                    ));
                }
                let mut all = Vec::new();
                for value in array.iter_u64()? {
                    let value = u32::try_from(value?).unwrap_or(u32::MAX);
                    all.push(self.in_range(key, value, max)?);
                }
                Ok(Some(all))
            }
            Some(_) => Ok(Some(vec![self.size(key, max)?; n_layer as usize])),
        }
    }

    /// One finite number for all layers, or an array with one for each.
    pub fn f32s(&self, key: &str, n_layer: u32) -> Result<Option<Vec<f32>>, Error> {
        let Some(gguf::Value::Array(array)) = self.gguf.get(&self.name(key)) else {
            return Ok(self.f32(key)?.map(|v| vec![v; n_layer as usize]));
        };
        if array.len() != n_layer as usize {
            return Err(self.wrong(key, format!("{} entries", array.len()), format!("{n_layer}, one per layer")));
        }
        let all = array.iter_f32()?.collect::<Result<Vec<f32>, _>>()?;
        match all.iter().find(|v| !v.is_finite()) {
            Some(v) => Err(self.wrong(key, v, "finite numbers")),
            None => Ok(Some(all)),
        }
    }
}
