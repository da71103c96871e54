//! The array's configurations that the double knows: by the hash of the binary (PDI) that is loaded, what the cores compute and how
//! streams are routed. `cargo xtask simkernels` writes these binaries; a real one is unknown here and fails its run.

use sha2::{Digest as _, Sha256};

/// Rows of A and C in a tile of the product.
pub const M: usize = 128;
/// Columns of A, rows of B in a tile.
pub const K: usize = 128;
/// Columns of B and C in a tile.
pub const N: usize = 128;

/// What is loaded into the array.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Design {
    /// Every column multiplies int8 tiles: the interface's channel MM2S 0 brings A and MM2S 1 brings B to the memory tile, whose
    /// MM2S 0 and 1 bring them to the core; the core's tile of C goes through the memory tile's channel 2 to the interface's
    /// S2MM 0. The core's parameter [`K_TILES`] says over how many tiles of A and B it adds up.
    GemmI8,
    /// Every column returns what it is sent: the interface's MM2S 0 is its S2MM 0.
    Copy,
}

/// Address in a core tile (row 2) of the number of tiles along K.
pub const K_TILES: u32 = 0x400;

/// sha256 of `npusim design: gemm-i8 v1\n`, filled up with zeros to 256 bytes.
const GEMM_I8: &str = "cb37b65c820eb0b7316712254e5cb0ec9db2b3aac15575f9311a96eed843c4f3";
/// sha256 of `npusim design: copy v1\n`, filled up likewise.
const COPY: &str = "5c46151ec41d098210f3332753215535af02a6d6d694721f154cbc6d62dd82af";

impl Design {
    /// The design of that binary.
    pub fn of(pdi: &[u8]) -> Result<Design, String> {
        let hash: String = Sha256::digest(pdi).iter().map(|b| format!("{b:02x}")).collect();
        match hash.as_str() {
            GEMM_I8 => Ok(Design::GemmI8),
            COPY => Ok(Design::Copy),
            _ => Err(format!("no oracle for the binary {hash} of {} bytes", pdi.len())),
        }
    }
}

/// C += A · B, exactly: int8 [M][K] times int8 [K][N] into int32 [M][N], all row by row.
pub fn multiply(a: &[u8], b: &[u8], c: &mut [i32]) {
    let wide: Vec<i16> = b.iter().map(|&v| i16::from(v as i8)).collect();
    for (a, c) in a.chunks_exact(K).zip(c.chunks_exact_mut(N)) {
        for (&a, b) in a.iter().zip(wide.chunks_exact(N)) {
            let a = i16::from(a as i8);
            for (c, &b) in c.iter_mut().zip(b) {
                *c = c.wrapping_add(i32::from(a) * i32::from(b));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn designs_are_known_by_their_bytes() {
        let pdi = |text: &str| [text.as_bytes(), &vec![0; 256 - text.len()]].concat();
        assert_eq!(Design::of(&pdi("npusim design: gemm-i8 v1\n")), Ok(Design::GemmI8));
        assert_eq!(Design::of(&pdi("npusim design: copy v1\n")), Ok(Design::Copy));
        assert!(Design::of(&pdi("another")).unwrap_err().contains("no oracle"));
    }

    #[test]
    fn products_are_exact() {
        // All −128: the largest product there is, 128 · 128 · 128 in each place. One row of A is 1, 0, 0, …: a row of B.
        let mut a = vec![0x80u8; M * K];
        a[..K].fill(0);
        a[0] = 1;
        let mut b = vec![0x80u8; K * N];
        b[..N].iter_mut().enumerate().for_each(|(i, v)| *v = i as u8);
        let mut c = vec![7; M * N];
        multiply(&a, &b, &mut c);
        assert_eq!((c[0], c[5], c[127]), (7, 12, 134));
        assert_eq!(c[N], 7 + 127 * 16384);
        assert_eq!(c[N + 3], 7 + 127 * 16384 - 3 * 128);
    }
}
