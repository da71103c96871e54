//! A model a little beside itself. What a server makes of it instead shows how far the smallest of differences grow in later layers,
//! where none of its variants compute anything otherwise.

use crate::tolerances::NUDGE;
use anyhow::{Context as _, Result, ensure};
use gguf::{GgmlType, Gguf};
use std::fs;
use std::path::{Path, PathBuf};

/// The norm whose weights are changed: everything behind it depends on it, and in every model they are f32.
const TENSOR: &str = "blk.0.attn_norm.weight";

/// Writes such a model into `dir`.
///
/// # Errors
/// It is in several files, has no such norm, or cannot be written.
pub fn write(model: &Path, dir: &Path) -> Result<PathBuf> {
    let gguf = Gguf::open(model)?;
    ensure!(gguf.paths().len() == 1, "{}: a model in several files", model.display());
    let tensor = gguf.need_tensor(TENSOR)?;
    ensure!(tensor.ty == GgmlType::F32, "{}: {TENSOR} is {}, not F32", model.display(), tensor.ty);
    // All the same way would be a scale, which codes of blocks do not see.
    let up = |i: usize| if i.is_multiple_of(2) { 1.0 + NUDGE } else { 1.0 - NUDGE };
    let values = tensor.to_f32()?;
    let bytes: Vec<u8> = values.iter().enumerate().flat_map(|(i, v)| (v * up(i)).to_le_bytes()).collect();
    let mut file = fs::read(model).with_context(|| format!("reading {}", model.display()))?;
    file[tensor.offset as usize..][..bytes.len()].copy_from_slice(&bytes);
    let path = dir.join("nudged.gguf");
    fs::write(&path, file).with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    #[test]
    fn one_norm_is_another_by_what_it_should_be() {
        let dir = tempfile::tempdir().unwrap();
        let model = fixtures::find("arch-qwen35").unwrap().write(dir.path()).unwrap();
        let nudged = write(&model, dir.path()).unwrap();
        let (a, b) = (Gguf::open(&model).unwrap(), Gguf::open(&nudged).unwrap());
        for (a, b) in a.tensors().zip(b.tensors()) {
            assert_eq!((a.name == TENSOR, a.name, a.ne), (a.data != b.data, b.name, b.ne));
        }
        let values = |g: &Gguf| g.need_tensor(TENSOR).unwrap().to_f32().unwrap();
        for (a, b) in values(&a).iter().zip(values(&b)) {
            let by = (b / a - 1.0).abs();
            assert!((by - 7.63e-6).abs() < 1.3e-7, "{a} {b}");
        }
    }
}
