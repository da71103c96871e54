//! The tensor types of ggml: id, name, block size and bytes, those that were removed included.

use std::{fmt, str::FromStr};

macro_rules! types {
    ($($id:literal $name:ident $elems:literal $bytes:literal;)*) => {
        /// A tensor type of ggml, by its id in files.
        ///
        /// Ids, block sizes and bytes are those of ggml's `ggml.h` and `ggml-common.h`. Types that ggml no longer reads
        /// ([`is_removed`](GgmlType::is_removed)) are kept, so that an old file can be refused by name.
        #[allow(non_camel_case_types, missing_docs)]
        #[derive(Copy, Clone, Eq, PartialEq, Ord, PartialOrd, Hash, Debug)]
        #[repr(u32)]
        #[non_exhaustive]
        pub enum GgmlType { $($name = $id,)* }

        impl GgmlType {
            /// Every type, by rising id.
            pub const ALL: &[GgmlType] = &[$(GgmlType::$name,)*];

            /// The type with this id in files, `None` for ids that ggml never gave out.
            pub fn from_id(id: u32) -> Option<GgmlType> {
                match id { $($id => Some(GgmlType::$name),)* _ => None }
            }

            /// ggml's name in capitals, as the `gguf` Python package spells it: `Q4_1`, `IQ4_NL`, `BF16`.
            pub fn name(self) -> &'static str {
                match self { $(GgmlType::$name => stringify!($name),)* }
            }

            /// Elements in one block: 1 for plain numbers, 32 or 256 for most quantised types.
            pub fn block_elems(self) -> u64 {
                match self { $(GgmlType::$name => $elems,)* }
            }

            /// Bytes of one block.
            pub fn block_bytes(self) -> u64 {
                match self { $(GgmlType::$name => $bytes,)* }
            }
        }
    };
}

types! {
    0  F32     1   4;
    1  F16     1   2;
    2  Q4_0    32  18;
    3  Q4_1    32  20;
    4  Q4_2    16  10;
    5  Q4_3    16  12;
    6  Q5_0    32  22;
    7  Q5_1    32  24;
    8  Q8_0    32  34;
    9  Q8_1    32  36;
    10 Q2_K    256 84;
    11 Q3_K    256 110;
    12 Q4_K    256 144;
    13 Q5_K    256 176;
    14 Q6_K    256 210;
    15 Q8_K    256 292;
    16 IQ2_XXS 256 66;
    17 IQ2_XS  256 74;
    18 IQ3_XXS 256 98;
    19 IQ1_S   256 50;
    20 IQ4_NL  32  18;
    21 IQ3_S   256 110;
    22 IQ2_S   256 82;
    23 IQ4_XS  256 136;
    24 I8      1   1;
    25 I16     1   2;
    26 I32     1   4;
    27 I64     1   8;
    28 F64     1   8;
    29 IQ1_M   256 56;
    30 BF16    1   2;
    31 Q4_0_4_4   32 18;
    32 Q4_0_4_8   32 18;
    33 Q4_0_8_8   32 18;
    34 TQ1_0   256 54;
    35 TQ2_0   256 66;
    36 IQ4_NL_4_4 32 18;
    37 IQ4_NL_4_8 32 18;
    38 IQ4_NL_8_8 32 18;
    39 MXFP4   32  17;
    40 NVFP4   64  36;
    41 Q1_0    128 18;
    42 Q2_0    64  18;
}

impl GgmlType {
    /// The id in files.
    pub fn id(self) -> u32 {
        self as u32
    }

    /// Whether ggml has given the type up: files with it can not be loaded by llama.cpp any more.
    pub fn is_removed(self) -> bool {
        use GgmlType::*;
        matches!(self, Q4_2 | Q4_3 | Q4_0_4_4 | Q4_0_4_8 | Q4_0_8_8 | IQ4_NL_4_4 | IQ4_NL_4_8 | IQ4_NL_8_8)
    }

    /// Bytes of a row of `n` elements; `None` when `n` is not a whole number of blocks, or the size does not fit.
    pub fn row_bytes(self, n: u64) -> Option<u64> {
        if !n.is_multiple_of(self.block_elems()) {
            return None;
        }
        (n / self.block_elems()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no ggml type; what [`GgmlType`]'s `FromStr` answers.
#[derive(Debug, Clone, Eq, PartialEq, thiserror::Error)]
#[error("{0:?} is not the name of a ggml type (such as F16, Q8_0, Q4_K)")]
pub struct UnknownType(String);

impl FromStr for GgmlType {
    type Err = UnknownType;

    /// Reads a name in any case: llama.cpp prints `q4_1` and `q4_K` where others write capitals.
    fn from_str(s: &str) -> Result<GgmlType, UnknownType> {
        let found = GgmlType::ALL.iter().find(|t| t.name().eq_ignore_ascii_case(s));
        found.copied().ok_or_else(|| UnknownType(s.chars().take(40).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_names_go_both_ways() {
        for id in 0..=42 {
            let t = GgmlType::from_id(id).unwrap_or_else(|| panic!("id {id} has no type"));
            assert_eq!(t.id(), id);
            assert_eq!(t.name().to_lowercase().parse(), Ok(t));
        }
        assert_eq!(GgmlType::from_id(43), None);
        assert_eq!(GgmlType::from_id(u32::MAX), None);
        assert!("q4_9".parse::<GgmlType>().is_err());
        assert_eq!("q4_K".parse(), Ok(GgmlType::Q4_K));
    }

    #[test]
    fn the_removed_ones() {
        let gone: Vec<u32> = GgmlType::ALL.iter().filter(|t| t.is_removed()).map(|t| t.id()).collect();
        assert_eq!(gone, [4, 5, 31, 32, 33, 36, 37, 38]);
    }

    #[test]
    fn rows() {
        assert_eq!(GgmlType::Q4_K.row_bytes(512), Some(288));
        assert_eq!(GgmlType::Q4_K.row_bytes(0), Some(0));
        assert_eq!(GgmlType::Q4_K.row_bytes(511), None);
        assert_eq!(GgmlType::F64.row_bytes(1 << 62), None);
    }
}
