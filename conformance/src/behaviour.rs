//! What a server says: next-token distributions and greedy text, against the control.
//!
//! The control is the same server in the same situation: it prefilled all ids but the last itself and then got the whole
//! prompt, so that it evaluates one token, as it does after a handoff. A cold server differs from the control, because there
//! the last token runs in other kernels; that difference, and those between batch sizes and kinds of attention, are what a
//! handoff is measured by.

use serde::{Deserialize, Serialize};

use crate::client::{Completion, Step};

/// How one reply's text and first token stand to the control's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    /// Divergence of the first token's distribution from the control's, in nats (a lower bound, from the most probable tokens).
    pub kl: f64,
    /// Sum of the divergences of every token before which the texts are the same: those that agree, and the one that departs.
    pub kl_text: f64,
    /// How many tokens that sum is over.
    pub kl_steps: usize,
    /// Largest difference of a log probability among the control's five most probable first tokens.
    pub dlogp: f64,
    /// The most probable first token is the same.
    pub top1: bool,
    /// How much more probable the control holds its own first token than this reply's, in log probability; 0 when they agree.
    pub gap1: f64,
    /// Tokens of the text before it departs.
    pub agreed: usize,
    /// Tokens compared.
    pub of: usize,
    /// Where it departs: the same measure as `gap1`; NaN where that is within a character.
    pub gap: f64,
}

/// Compares a reply with the control's.
pub fn compare(control: &Completion, other: &Completion) -> Reply {
    let same = |(a, b): &(&Step, &Step)| a.id == b.id && a.text == b.text;
    let agreed = control.steps.iter().zip(&other.steps).take_while(same).count();
    // A reply that was cut at its departure has one step more than agreed. One that was not, and agrees as far as it goes, may
    // lack a last step or two: a server may end it within a character.
    let ended = !other.cut && agreed == other.steps.len() && control.steps.len() - agreed <= 4;
    let of = if ended { agreed } else { control.steps.len() };
    // Where tokens come before that a server tells nothing of, the texts may have parted there, and what is told of the step
    // is then said of two different texts.
    let parted = |a: &Step, b: &Step| !same(&(a, b)) && (a.completes || b.completes);
    let gap_at = |i: usize| match (control.steps.get(i), other.steps.get(i)) {
        (Some(a), Some(b)) if parted(a, b) => f64::NAN,
        (Some(a), Some(b)) if a.id != b.id => {
            let theirs = a.top.iter().find(|t| t.0 == b.id).map(|t| t.1);
            theirs.map_or(f64::INFINITY, |t| (logprob_of(&a.top, a.id).unwrap_or(a.logprob) - t).abs())
        }
        _ => 0.0,
    };
    // Up to the departure both servers have read the same text, so each step compares the same question.
    let compared = control.steps.iter().zip(&other.steps).take(agreed + 1).filter(|(a, b)| !parted(a, b));
    let kl_steps = compared.clone().count();
    let kl_text = compared.map(|(a, b)| divergence(&a.top, &b.top)).sum();
    // Without a first token to compare, a reply says nothing.
    let of = if kl_steps == 0 { 0 } else { of };
    let (kl, dlogp) = match (control.steps.first(), other.steps.first()) {
        (Some(a), Some(b)) if of > 0 => (divergence(&a.top, &b.top), largest_difference(&a.top, &b.top)),
        _ => (f64::NAN, f64::NAN),
    };
    let top1 = control.steps.first().map(|s| s.id) == other.steps.first().map(|s| s.id);
    Reply { kl, kl_text, kl_steps, dlogp, top1, gap1: gap_at(0), agreed, of, gap: gap_at(agreed) }
}

fn logprob_of(top: &[(i32, f64)], id: i32) -> Option<f64> {
    top.iter().find(|t| t.0 == id).map(|t| t.1)
}

/// KL(p‖q) from lists of the most probable tokens. What is outside p's list is one event; what is outside q's list is taken as
/// probable as the last in it, which makes the result a lower bound.
pub fn divergence(p: &[(i32, f64)], q: &[(i32, f64)]) -> f64 {
    if p.is_empty() || q.is_empty() {
        return f64::NAN;
    }
    let least = q.iter().map(|t| t.1).fold(f64::INFINITY, f64::min);
    let (mut sum, mut p_all, mut q_all) = (0.0, 0.0, 0.0);
    for &(id, lp) in p {
        let lq = logprob_of(q, id).unwrap_or(least);
        // A probability of zero contributes nothing, and its logarithm is no number.
        if lp.is_finite() && lp > -80.0 {
            sum += lp.exp() * (lp - lq);
        }
        p_all += lp.exp();
        q_all += lq.exp();
    }
    let (p_rest, q_rest) = (1.0 - p_all, 1.0 - q_all);
    if p_rest > 1e-9 && q_rest > 1e-9 {
        sum += p_rest * (p_rest / q_rest).ln();
    }
    sum.max(0.0)
}

fn largest_difference(p: &[(i32, f64)], q: &[(i32, f64)]) -> f64 {
    p.iter().take(5).filter_map(|&(id, lp)| logprob_of(q, id).map(|lq| (lp - lq).abs())).fold(0.0, f64::max)
}

/// The replies of several prompts, in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Spread {
    /// Replies.
    pub n: usize,
    /// Mean divergence of all tokens before which texts are the same. Divergences differ by factors of a hundred between tokens,
    /// so that the mean of the first ones alone would say more of the choice of prompts than of what is measured.
    pub kl_mean: f64,
    /// Tokens that mean is over.
    pub kl_steps: usize,
    /// Mean divergence of the first tokens.
    pub kl_first: f64,
    /// Largest divergence of a first token.
    pub kl_max: f64,
    /// Largest difference of a log probability.
    pub dlogp_max: f64,
    /// Replies whose first token is the control's.
    pub top1: usize,
    /// Mean length of text before it departs.
    pub agreed_mean: f64,
    /// Texts that are equal to the end.
    pub equal: usize,
}

impl Spread {
    /// Of these replies. Those to a control that could not be told say nothing.
    pub fn of(replies: &[Reply]) -> Spread {
        let replies: Vec<Reply> = replies.iter().copied().filter(|r| r.of > 0).collect();
        let n = replies.len();
        let mean = |f: &dyn Fn(&Reply) -> f64| replies.iter().map(f).sum::<f64>() / n.max(1) as f64;
        let kl_steps = replies.iter().map(|r| r.kl_steps).sum::<usize>();
        let max = |f: &dyn Fn(&Reply) -> f64| replies.iter().map(f).fold(0.0, f64::max);
        Spread {
            n,
            kl_mean: replies.iter().map(|r| r.kl_text).sum::<f64>() / kl_steps.max(1) as f64,
            kl_steps,
            kl_first: mean(&|r| r.kl),
            kl_max: max(&|r| r.kl),
            dlogp_max: max(&|r| r.dlogp),
            top1: replies.iter().filter(|r| r.top1).count(),
            agreed_mean: mean(&|r| r.agreed as f64),
            equal: replies.iter().filter(|r| r.agreed == r.of).count(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(ids: &[i32]) -> Completion {
        let step = |&id: &i32| Step {
            id,
            logprob: -0.1,
            top: vec![(id, -0.1), (id + 1, -2.5)],
            text: id.to_string(),
            completes: false,
        };
        let steps = ids.iter().map(step).collect();
        Completion { steps, text: String::new(), prompt_n: Some(1), cache_n: Some(9), prompt_ms: Some(1.0), cut: true }
    }

    #[test]
    fn divergence_is_zero_of_itself_and_grows() {
        let p = [(1, 0.7f64.ln()), (2, 0.2f64.ln()), (3, 0.05f64.ln())];
        let q = [(1, 0.6f64.ln()), (2, 0.3f64.ln()), (3, 0.05f64.ln())];
        let r = [(2, 0.7f64.ln()), (1, 0.2f64.ln()), (3, 0.05f64.ln())];
        assert_eq!(divergence(&p, &p), 0.0);
        let exact = 0.7 * (0.7f64 / 0.6).ln() + 0.2 * (0.2f64 / 0.3).ln();
        assert!((divergence(&p, &q) - exact).abs() < 1e-12);
        assert!(divergence(&p, &r) > divergence(&p, &q));
        assert!(divergence(&p, &[]).is_nan());
    }

    #[test]
    fn departures_are_found_and_weighed() {
        let a = reply(&[5, 6, 7, 8]);
        let same = compare(&a, &a);
        assert_eq!((same.agreed, same.of, same.gap, same.top1), (4, 4, 0.0, true));
        let b = compare(&a, &reply(&[5, 6, 8]));
        assert_eq!((b.agreed, b.top1), (2, true));
        assert!((b.gap - 2.4).abs() < 1e-12);
        let c = compare(&a, &reply(&[9]));
        assert_eq!((c.agreed, c.top1, c.gap), (0, false, f64::INFINITY));
        let s = Spread::of(&[same, b, c]);
        assert_eq!((s.n, s.top1, s.equal), (3, 2, 1));
        // Four steps of the first, three of the second (its last departs), one of the third.
        assert_eq!((same.kl_steps, b.kl_steps, c.kl_steps, s.kl_steps), (4, 3, 1, 8));
        assert_eq!(same.kl_text, 0.0);
        assert!((s.kl_mean - (b.kl_text + c.kl_text) / 8.0).abs() < 1e-12 && b.kl_text > 0.0);
        assert_eq!(s.agreed_mean, 2.0);
    }

    /// Two emoji whose last bytes are one token or two, after tokens that a server does not tell.
    #[test]
    fn a_departure_within_a_character_is_one_and_has_no_divergence() {
        let with = |id: i32, text: &str| {
            let mut r = reply(&[5, id, 8]);
            (r.steps[1].text, r.steps[1].completes) = (text.to_owned(), true);
            r
        };
        let control = with(6, "\u{1f600}");
        let same = compare(&control, &with(6, "\u{1f600}"));
        assert_eq!((same.agreed, same.of, same.kl_steps), (3, 3, 3));
        for other in [with(6, "\u{1f340}"), with(7, "\u{1f601}")] {
            let r = compare(&control, &other);
            assert_eq!((r.agreed, r.of, r.kl_steps, r.kl_text, r.top1), (1, 3, 1, 0.0, true));
            assert!(r.gap.is_nan());
        }
        // As the first that is told: nothing to compare.
        let (mut a, mut b) = (with(6, "\u{1f600}"), with(7, "\u{1f601}"));
        a.steps.remove(0);
        b.steps.remove(0);
        let r = compare(&a, &b);
        assert_eq!((r.agreed, r.of, r.kl_steps), (0, 0, 0));
        assert_eq!(Spread::of(&[r]).n, 0);
    }
}
