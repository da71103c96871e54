//! The most that the processor's multiply-add instructions can do: loops of nothing else, for a benchmark to hold the
//! kernels against.
//!
//! Not here: a clock - a caller runs a loop for some rounds and takes the time. And no arithmetic of a prefill; nothing
//! but a benchmark calls this.
//!
//! A loop works on accumulators that do not depend on each other, enough of them to cover the latency of the
//! instruction, and on operands that the compiler is kept from knowing. What it computes can be told beforehand, so
//! that a test can see that every operation it claims was really done.

use super::Isa;

/// What an instruction multiplies.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Operands {
    /// Unsigned with signed bytes, added up in 32 bits.
    Int8,
    /// bfloat16, added up in f32.
    Bf16,
    /// f32.
    F32,
}

/// One loop. There are only those whose instructions this processor has.
#[derive(Copy, Clone, Debug)]
pub struct Peak {
    operands: Operands,
    name: &'static str,
    chains: u64,
    lanes: u64,
    per_lane: u64,
    run: fn(u64) -> f64,
}

impl Peak {
    /// The loops of an instruction set; none where the processor lacks it, and none for plain code, which has no
    /// instruction of its own.
    pub fn of(isa: Isa) -> Vec<Peak> {
        #[cfg(target_arch = "x86_64")]
        return x86::peaks(isa);
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = isa;
            Vec::new()
        }
    }

    /// What is multiplied.
    pub fn operands(&self) -> Operands {
        self.operands
    }

    /// The instruction, or the instructions that stand for it.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Multiplications and additions of one round.
    pub fn ops_per_round(&self) -> u64 {
        2 * self.chains * self.lanes * self.per_lane
    }

    /// Runs the loop. Every product in it is 1 and the accumulators start at 0, so the sum that is returned is half the
    /// number of operations (as long as the accumulators hold it exactly).
    pub fn run(&self, rounds: u64) -> f64 {
        (self.run)(rounds)
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Isa, Operands, Peak};
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// Accumulators of the 512-bit loops: two instructions a cycle at four or five cycles' latency need ten.
    const WIDE: usize = 16;
    /// Of the 256-bit loops, which have sixteen registers for accumulators and operands together.
    const NARROW: usize = 12;

    pub(super) fn peaks(isa: Isa) -> Vec<Peak> {
        let mut found = Vec::new();
        match isa {
            Isa::Avx2 => {
                if is_x86_feature_detected!("avx2") {
                    found.push(Peak {
                        operands: Operands::Int8,
                        name: "VPMADDUBSW + VPMADDWD + VPADDD ymm",
                        chains: NARROW as u64,
                        lanes: 8,
                        per_lane: 4,
                        // SAFETY: the processor has AVX2, as was seen above.
                        run: |rounds| unsafe { madd_ymm(rounds) },
                    });
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    found.push(Peak {
                        operands: Operands::F32,
                        name: "VFMADD231PS ymm",
                        chains: NARROW as u64,
                        lanes: 8,
                        per_lane: 1,
                        // SAFETY: the processor has AVX2 and FMA, as was seen above.
                        run: |rounds| unsafe { fma_ymm(rounds) },
                    });
                }
            }
            Isa::Avx512 | Isa::Avx512Bf16 => {
                if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni") {
                    found.push(Peak {
                        operands: Operands::Int8,
                        name: "VPDPBUSD zmm",
                        chains: WIDE as u64,
                        lanes: 16,
                        per_lane: 4,
                        // SAFETY: the processor has AVX-512 F and VNNI, as was seen above.
                        run: |rounds| unsafe { dpbusd_zmm(rounds) },
                    });
                }
                if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16") {
                    found.push(Peak {
                        operands: Operands::Bf16,
                        name: "VDPBF16PS zmm",
                        chains: WIDE as u64,
                        lanes: 16,
                        per_lane: 2,
                        // SAFETY: the processor has AVX-512 F and BF16, as was seen above.
                        run: |rounds| unsafe { dpbf16_zmm(rounds) },
                    });
                }
                if is_x86_feature_detected!("avx512f") {
                    found.push(Peak {
                        operands: Operands::F32,
                        name: "VFMADD231PS zmm",
                        chains: WIDE as u64,
                        lanes: 16,
                        per_lane: 1,
                        // SAFETY: the processor has AVX-512 F, as was seen above.
                        run: |rounds| unsafe { fma_zmm(rounds) },
                    });
                }
            }
            // Plain code, and what other processors have.
            _ => {}
        }
        found
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    fn dpbusd_zmm(rounds: u64) -> f64 {
        // Were the chains known to start alike, they could be computed as one.
        let mut acc = black_box([_mm512_setzero_si512(); WIDE]);
        let (a, b) = black_box((_mm512_set1_epi8(1), _mm512_set1_epi8(1)));
        for _ in 0..rounds {
            for c in &mut acc {
                *c = _mm512_dpbusd_epi32(*c, a, b);
            }
        }
        acc.into_iter().map(|c| f64::from(_mm512_reduce_add_epi32(c))).sum()
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn dpbf16_zmm(rounds: u64) -> f64 {
        let mut acc = black_box([_mm512_setzero_ps(); WIDE]);
        let one = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1.0), _mm512_set1_ps(1.0));
        let (a, b) = black_box((one, one));
        for _ in 0..rounds {
            for c in &mut acc {
                *c = _mm512_dpbf16_ps(*c, a, b);
            }
        }
        acc.into_iter().map(|c| f64::from(_mm512_reduce_add_ps(c))).sum()
    }

    #[target_feature(enable = "avx512f")]
    fn fma_zmm(rounds: u64) -> f64 {
        let mut acc = black_box([_mm512_setzero_ps(); WIDE]);
        let (a, b) = black_box((_mm512_set1_ps(1.0), _mm512_set1_ps(1.0)));
        for _ in 0..rounds {
            for c in &mut acc {
                *c = _mm512_fmadd_ps(a, b, *c);
            }
        }
        acc.into_iter().map(|c| f64::from(_mm512_reduce_add_ps(c))).sum()
    }

    #[target_feature(enable = "avx2")]
    fn madd_ymm(rounds: u64) -> f64 {
        let mut acc = black_box([_mm256_setzero_si256(); NARROW]);
        // One operand changes from round to round as far as the compiler can tell, the other from chain to chain: else
        // the products, which do not depend on the accumulators, would be formed once and kept.
        let (mut a, step) = black_box((_mm256_set1_epi8(1), _mm256_setzero_si256()));
        let b = black_box([_mm256_set1_epi8(1); NARROW]);
        let ones = _mm256_set1_epi16(1);
        for _ in 0..rounds {
            for (c, b) in acc.iter_mut().zip(&b) {
                *c = _mm256_add_epi32(*c, _mm256_madd_epi16(_mm256_maddubs_epi16(a, *b), ones));
            }
            a = _mm256_add_epi8(a, step);
        }
        let mut sum = 0.0;
        for c in acc {
            let mut lanes = [0i32; 8];
            // SAFETY: room for eight integers.
            unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), c) };
            sum += lanes.into_iter().map(f64::from).sum::<f64>();
        }
        sum
    }

    #[target_feature(enable = "avx2,fma")]
    fn fma_ymm(rounds: u64) -> f64 {
        let mut acc = black_box([_mm256_setzero_ps(); NARROW]);
        let (a, b) = black_box((_mm256_set1_ps(1.0), _mm256_set1_ps(1.0)));
        for _ in 0..rounds {
            for c in &mut acc {
                *c = _mm256_fmadd_ps(a, b, *c);
            }
        }
        let mut sum = 0.0;
        for c in acc {
            let mut lanes = [0f32; 8];
            // SAFETY: room for eight floats.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), c) };
            sum += lanes.into_iter().map(f64::from).sum::<f64>();
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_is_done() {
        for isa in Isa::ALL {
            for peak in Peak::of(isa) {
                for rounds in [0, 1, 1000] {
                    let all = rounds * peak.ops_per_round();
                    assert_eq!(peak.run(rounds) * 2.0, all as f64, "{} for {rounds} rounds", peak.name());
                }
            }
        }
    }

    #[test]
    fn an_instruction_set_that_is_there_has_its_loops() {
        assert!(Peak::of(Isa::Scalar).is_empty());
        for isa in [Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| isa.is_available()) {
            for operands in [Operands::Int8, Operands::F32] {
                assert_eq!(Peak::of(isa).iter().filter(|p| p.operands() == operands).count(), 1, "{operands:?}");
            }
        }
    }
}
