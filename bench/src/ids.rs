//! Made-up prompts. What a prefill costs does not depend on which ids a prompt has, only on how many; so they are drawn from
//! the whole vocabulary, from a seed, alike in every run.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use conformance::fixtures::Rng;
use gguf::Gguf;

/// A number between -1 and 1.
pub fn unit(rng: &mut Rng) -> f32 {
    (rng.next_u64() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
}

/// `n` ids of a vocabulary of `n_vocab`.
pub fn prompt(n: u32, n_vocab: u32) -> Vec<u32> {
    let mut rng = Rng::new(&format!("{n} ids"));
    (0..n).map(|_| rng.below(n_vocab)).collect()
}

/// The ids file as the provider reads it.
pub fn text(ids: &[u32]) -> String {
    ids.iter().map(|id| format!("{id}\n")).collect()
}

/// What has to be known of a model to make prompts for it.
pub struct Vocabulary {
    /// Ids there are.
    pub size: u32,
    /// The model's files.
    pub files: Vec<PathBuf>,
}

/// Reads it.
///
/// # Errors
/// The file is no model, or one without embeddings.
pub fn vocabulary(model: &std::path::Path) -> Result<Vocabulary> {
    let gguf = Gguf::open(model)?;
    let embeddings = gguf.need_tensor("token_embd.weight")?;
    let size = embeddings.shape().get(1).copied().unwrap_or(0);
    let size = u32::try_from(size).with_context(|| format!("{}: a vocabulary of {size}", model.display()))?;
    ensure!(
        size > 0,
        "{}: the table of embeddings has no rows, so there are no ids to make prompts of",
        model.display()
    );
    Ok(Vocabulary { size, files: gguf.paths().map(std::path::Path::to_owned).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_in_range_and_the_same_every_time() {
        for n_vocab in [1, 2, 1000, 151_936, u32::MAX] {
            let ids = prompt(500, n_vocab);
            assert_eq!(ids.len(), 500);
            assert!(ids.iter().all(|&id| id < n_vocab), "{n_vocab}");
            assert_eq!(ids, prompt(500, n_vocab));
        }
        // They spread over the vocabulary rather than repeat.
        let mut ids = prompt(500, 151_936);
        assert!(ids.iter().any(|&id| id > 75_968) && ids.iter().any(|&id| id < 75_968));
        ids.sort_unstable();
        ids.dedup();
        assert!(ids.len() > 450);
    }

    #[test]
    fn one_id_a_line() {
        assert_eq!(text(&[5, 0, 17]), "5\n0\n17\n");
    }

    #[test]
    fn numbers_between() {
        let mut rng = Rng::new("numbers");
        assert!((0..1000).map(|_| unit(&mut rng)).all(|v| (-1.0..1.0).contains(&v)));
        assert_eq!(rng.below(0), 0);
    }
}
