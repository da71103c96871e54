//! Where in a cache the difference lies: its size by layer and position, for one prompt of a case. For people to look at; what
//! is judged is in [`crate::check`]. The size is bounded: positions are put together into a few dozen groups.

use anyhow::{Context as _, Result};
use kvlayout::State;
use kvlayout::compare;
use serde::{Deserialize, Serialize};

use crate::shape::Shape;

/// Most groups of positions.
const GROUPS: usize = 32;

/// Differences of one part of the cache.
#[derive(Debug, Clone, Serialize)]
pub struct PartHeat {
    /// K, V, R or S.
    pub part: String,
    /// The layers of the model that have it.
    pub layers: Vec<usize>,
    /// |a-b|/|a| per layer and group of positions, as a line of numbers per layer: one line of JSON instead of dozens.
    pub ours: Vec<String>,
    /// The same of the server from itself, the worst of its variants; empty where none was run with this prompt.
    pub noise: Vec<String>,
}

/// Differences of one prompt.
#[derive(Debug, Clone, Serialize)]
pub struct Heat {
    /// The prompt.
    pub prompt: String,
    /// The first position of every group, and the one after the last.
    pub positions: Vec<usize>,
    /// By part.
    pub parts: Vec<PartHeat>,
}

/// Numbers by part, layer and group.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Grid(Vec<(String, usize, Vec<f64>)>);

/// First positions of the groups of `n` positions, and `n`.
fn groups(n: usize) -> Vec<usize> {
    let count = n.clamp(1, GROUPS);
    (0..=count).map(|g| g * n / count).collect()
}

impl Grid {
    /// Differences of one state from another over `n` positions.
    pub fn of(reference: &State, other: &State, shape: &Shape, n: usize) -> Result<Grid> {
        let edges = groups(n);
        let mut grid = Vec::new();
        for (section, layer, part) in reference.tensors() {
            let model_layer = shape.model_layer(section, layer).context("a layer that the model does not have")?;
            let rows = compare::rows(reference, other, section, layer, part)
                .map_err(|d| anyhow::anyhow!("the files cannot be compared: {d}"))?;
            let mut sums = vec![(0.0, 0.0); edges.len() - 1];
            for r in rows {
                let at = usize::try_from(r.position).unwrap_or(0);
                let group = edges.partition_point(|&e| e <= at).clamp(1, sums.len()) - 1;
                sums[group].0 += r.diff2;
                sums[group].1 += r.norm2;
            }
            // Groups without rows, before a window, are no number.
            let value = |(diff, norm): (f64, f64)| match (diff == 0.0, norm > 0.0) {
                (true, true) => 0.0,
                (true, false) => f64::NAN,
                _ => (diff / norm).sqrt(),
            };
            grid.push((part.to_string(), model_layer, sums.into_iter().map(value).collect()));
        }
        grid.sort_by(|a: &(String, usize, Vec<f64>), b| (&a.0, a.1).cmp(&(&b.0, b.1)));
        Ok(Grid(grid))
    }

    /// The larger of each; of the same prompt, or of nothing so far.
    pub fn max(mut self, other: Grid) -> Grid {
        if self.0.len() != other.0.len() {
            return other;
        }
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            for (a, b) in mine.2.iter_mut().zip(theirs.2) {
                *a = a.max(b);
            }
        }
        self
    }
}

/// Three digits are more than a colour can show; `-` is a group without rows.
fn line(values: &[f64]) -> String {
    let show = |v: &f64| match *v {
        v if v.is_nan() => "-".to_owned(),
        0.0 => "0".to_owned(),
        v => format!("{v:.2e}"),
    };
    values.iter().map(show).collect::<Vec<_>>().join(" ")
}

impl Heat {
    /// Of a prompt of which `n` ids were handed over.
    pub fn new(prompt: &str, n: usize, ours: &Grid, noise: &Grid) -> Heat {
        let mut parts: Vec<PartHeat> = Vec::new();
        for (i, (part, layer, values)) in ours.0.iter().enumerate() {
            if parts.last().is_none_or(|p| &p.part != part) {
                parts.push(PartHeat { part: part.clone(), layers: vec![], ours: vec![], noise: vec![] });
            }
            if let Some(p) = parts.last_mut() {
                p.layers.push(*layer);
                p.ours.push(line(values));
                p.noise.extend(noise.0.get(i).map(|(.., values)| line(values)));
            }
        }
        Heat { prompt: prompt.to_owned(), positions: groups(n), parts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_every_position_once() {
        for n in [1, 2, 31, 32, 33, 600, 2000] {
            let edges = groups(n);
            assert_eq!((edges[0], *edges.last().unwrap()), (0, n));
            assert!(edges.windows(2).all(|w| w[0] < w[1]) && edges.len() <= GROUPS + 1, "{n}");
        }
    }

    #[test]
    fn lines_of_parts_by_layer() {
        let ours = Grid(vec![
            ("K".into(), 0, vec![1e-3, 0.0]),
            ("K".into(), 1, vec![f64::NAN, 0.5]),
            ("V".into(), 0, vec![1.0, 2.0]),
        ]);
        let heat = Heat::new("p", 2, &ours, &ours.clone().max(ours.clone()));
        assert_eq!(heat.parts.len(), 2);
        assert_eq!((heat.parts[0].layers.as_slice(), heat.parts[0].ours[1].as_str()), ([0, 1].as_slice(), "- 5.00e-1"));
        assert_eq!(heat.parts[1].noise, ["1.00e0 2.00e0"]);
        assert!(Heat::new("p", 2, &ours, &Grid::default()).parts[0].noise.is_empty());
    }
}
