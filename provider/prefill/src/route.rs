//! Routing: which experts a token goes to, and with which weights, from the router's outputs.
//!
//! Follows `llm_graph_context::build_moe_ffn` step by step, f32 where ggml has f32: what comes from here decides which
//! matrices a token meets, so a difference is not rounding but another result. Pure: no tensors, no threads.

use crate::argsort;

/// What the router's outputs go through (llama.cpp's `expert_gating_func`).
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Gating {
    /// Softmax over all experts.
    Softmax,
    /// Each on its own: 1 / (1 + exp(-x)).
    Sigmoid,
    /// Softmax over the chosen ones.
    SoftmaxOfChosen,
}

impl Gating {
    /// By its number in `expert_gating_func`.
    pub fn from_id(id: u32) -> Option<Gating> {
        Some(match id {
            1 => Gating::Softmax,
            2 => Gating::Sigmoid,
            3 => Gating::SoftmaxOfChosen,
            _ => return None,
        })
    }
}

/// How a layer chooses.
#[derive(Clone, Debug, PartialEq)]
pub struct Routing {
    /// Experts of the layer.
    pub n_expert: usize,
    /// How many a token goes to.
    pub n_used: usize,
    /// See [`Gating`].
    pub gating: Gating,
    /// Choose by the router's outputs as they are (llama4), not by what gating makes of them.
    pub by_logits: bool,
    /// The weights of the chosen are divided by their sum.
    pub normalise: bool,
    /// The weights are multiplied by this; 0 and 1 do nothing.
    pub scale: f32,
    /// Groups of neighbours of which only the best are looked at: how many there are, how many are taken.
    pub groups: Option<(usize, usize)>,
}

/// An expert and the weight of its output.
pub type Choice = (u32, f32);

/// Working memory of [`Routing::choose`].
#[derive(Default)]
pub struct Room {
    probs: Vec<f32>,
    selection: Vec<f32>,
    order: Vec<u32>,
    best: Vec<f32>,
}

/// The smallest normal f16: what ggml keeps the sum of weights above.
const LEAST_SUM: f32 = 6.103_515_6e-5;

impl Routing {
    /// Chooses for one token, best first, which is the order in which the outputs are added up. `logits` are the router's
    /// outputs, all finite, and `bias` what is added to the gated ones for the choice alone (`exp_probs_b`).
    pub fn choose(&self, logits: &[f32], bias: Option<&[f32]>, room: &mut Room, chosen: &mut [Choice]) {
        let Room { probs, selection, order, best } = room;
        probs.clear();
        probs.extend_from_slice(logits);
        match self.gating {
            Gating::Softmax => softmax(probs),
            Gating::Sigmoid => probs.iter_mut().for_each(|v| *v = 1.0 / (1.0 + (-*v).exp())),
            Gating::SoftmaxOfChosen => {}
        }
        selection.clear();
        selection.extend_from_slice(if self.by_logits { logits } else { probs });
        if let Some(bias) = bias {
            selection.iter_mut().zip(bias).for_each(|(s, b)| *s += b);
        }
        if let Some((n, used)) = self.groups {
            let len = self.n_expert / n;
            best.clear();
            for group in selection.chunks_exact(len) {
                argsort::descending(group, order);
                best.push((f64::from(group[order[0] as usize]) + f64::from(group[order[1] as usize])) as f32);
            }
            argsort::descending(best, order);
            for &g in &order[used..] {
                selection[g as usize * len..][..len].fill(f32::NEG_INFINITY);
            }
        }
        argsort::descending(selection, order);
        for (c, &e) in chosen.iter_mut().zip(&order[..self.n_used]) {
            *c = (e, probs[e as usize]);
        }
        if self.gating == Gating::SoftmaxOfChosen {
            best.clear();
            best.extend(chosen.iter().map(|(_, w)| *w));
            softmax(best);
            chosen.iter_mut().zip(best).for_each(|((_, w), v)| *w = *v);
        }
        if self.normalise {
            let sum = chosen.iter().map(|(_, w)| f64::from(*w)).sum::<f64>() as f32;
            let sum = sum.max(LEAST_SUM);
            chosen.iter_mut().for_each(|(_, w)| *w /= sum);
        }
        if self.scale != 0.0 && self.scale != 1.0 {
            chosen.iter_mut().for_each(|(_, w)| *w *= self.scale);
        }
    }
}

/// As ggml: exponentials in f32, their sum in f64, its reciprocal in f32 again.
fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    x.iter_mut().for_each(|v| *v = (*v - max).exp());
    let sum: f64 = x.iter().map(|v| f64::from(*v)).sum();
    let by = (1.0 / sum) as f32;
    x.iter_mut().for_each(|v| *v *= by);
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Routing = Routing {
        n_expert: 4,
        n_used: 2,
        gating: Gating::Softmax,
        by_logits: false,
        normalise: false,
        scale: 0.0,
        groups: None,
    };

    fn choose(r: &Routing, logits: &[f32], bias: Option<&[f32]>) -> (Vec<u32>, Vec<f32>) {
        let mut chosen = vec![(0, 0.0); r.n_used];
        r.choose(logits, bias, &mut Room::default(), &mut chosen);
        chosen.into_iter().unzip()
    }

    fn close(found: &[f32], wanted: &[f64]) {
        assert_eq!(found.len(), wanted.len());
        for (f, w) in found.iter().zip(wanted) {
            assert!((f64::from(*f) - w).abs() < 1e-6, "{found:?}, wanted {wanted:?}");
        }
    }

    /// ln of 1, 2, 3, 4: softmax is 0.1, 0.2, 0.3, 0.4.
    const TENTHS: [f32; 4] = [0.0, std::f32::consts::LN_2, 1.098_612_3, 1.386_294_4];

    #[test]
    fn softmax_then_the_best_two() {
        let (e, w) = choose(&PLAIN, &TENTHS, None);
        assert_eq!(e, [3, 2]);
        close(&w, &[0.4, 0.3]);
    }

    #[test]
    fn normalised_weights_add_up_to_one() {
        let (e, w) = choose(&Routing { normalise: true, ..PLAIN }, &TENTHS, None);
        assert_eq!(e, [3, 2]);
        close(&w, &[4.0 / 7.0, 3.0 / 7.0]);
        let (_, w) = choose(&Routing { normalise: true, scale: 2.5, ..PLAIN }, &TENTHS, None);
        close(&w, &[10.0 / 7.0, 7.5 / 7.0]);
    }

    #[test]
    fn softmax_of_the_chosen_only() {
        let (e, w) = choose(&Routing { gating: Gating::SoftmaxOfChosen, ..PLAIN }, &TENTHS, None);
        assert_eq!(e, [3, 2]);
        close(&w, &[4.0 / 7.0, 3.0 / 7.0]);
    }

    #[test]
    fn sigmoid_weights_stand_on_their_own() {
        // logits ln 1, ln 3, ln 9, -ln 3: 0.5, 0.75, 0.9, 0.25.
        let logits = [0.0, 1.098_612_3, 2.197_224_6, -1.098_612_3];
        let sigmoid = Routing { gating: Gating::Sigmoid, ..PLAIN };
        let (e, w) = choose(&sigmoid, &logits, None);
        assert_eq!(e, [2, 1]);
        close(&w, &[0.9, 0.75]);
        // A bias moves the choice and not the weights.
        let (e, w) = choose(&sigmoid, &logits, Some(&[0.0, -0.6, 0.0, 0.6]));
        assert_eq!(e, [2, 3]);
        close(&w, &[0.9, 0.25]);
        let (e, w) = choose(&Routing { normalise: true, ..sigmoid }, &logits, Some(&[0.0, -0.6, 0.0, 0.6]));
        assert_eq!(e, [2, 3]);
        close(&w, &[0.9 / 1.15, 0.25 / 1.15]);
    }

    #[test]
    fn the_lower_expert_wins_a_tie() {
        let (e, w) = choose(&PLAIN, &[1.0, 2.0, 2.0, 2.0], None);
        assert_eq!(e, [1, 2]);
        assert_eq!(w[0], w[1]);
        let (e, _) = choose(&PLAIN, &[0.0; 4], None);
        assert_eq!(e, [0, 1]);
    }

    #[test]
    fn only_the_best_groups_are_looked_at() {
        // Groups of two: their two best add up to 0.9, 1.0, 0.3, 0.8 after the sigmoid; the first two are taken, so the
        // expert with 0.7 in the last group is not, and the one with 0.4 is.
        let probs = [0.5f64, 0.4, 0.8, 0.2, 0.2, 0.1, 0.7, 0.1];
        let logits: Vec<f32> = probs.iter().map(|p| (p / (1.0 - p)).ln() as f32).collect();
        let r = Routing { n_expert: 8, n_used: 3, gating: Gating::Sigmoid, groups: Some((4, 2)), ..PLAIN };
        let (e, w) = choose(&r, &logits, None);
        assert_eq!(e, [2, 0, 1]);
        close(&w, &[0.8, 0.5, 0.4]);
    }

    #[test]
    fn llama4_chooses_by_logits_and_weighs_by_sigmoid() {
        // Beyond 17 a sigmoid is 1 in f32: by probability the first would win.
        let r = Routing { n_used: 1, gating: Gating::Sigmoid, by_logits: true, ..PLAIN };
        let (e, w) = choose(&r, &[30.0, 40.0, 0.0, 1.0], None);
        assert_eq!((e, w), (vec![1], vec![1.0]));
    }

    #[test]
    fn vanishing_weights_are_not_divided_by_nothing() {
        let r = Routing { gating: Gating::Sigmoid, normalise: true, ..PLAIN };
        let (_, w) = choose(&r, &[-100.0, -100.0, -100.0, -100.0], None);
        assert!(w.iter().all(|w| *w >= 0.0 && *w < 1e-30), "{w:?}");
    }
}
