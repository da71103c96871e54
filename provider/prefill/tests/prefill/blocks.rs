//! The kernels' decoding of weight blocks against the reference dequantiser, which is itself proved against gguf-py.

use crate::tiny::Rng;
use gguf::GgmlType;
use npu_kernels::WeightView;
use npu_kernels::host::blocks;
use prefill::weights::weight_type;

/// `scale * (code - zero) + min` and the reference round their products in different order.
const REL: f32 = 1e-6;

#[test]
fn every_type_decodes_as_the_reference_does() {
    let mut rng = Rng(99);
    let mut seen = 0;
    for id in 0..64 {
        let Some((ty, kernel)) = GgmlType::from_id(id).and_then(|ty| Some((ty, weight_type(ty)?))) else { continue };
        seen += 1;
        let k = 512;
        let bytes = ty.row_bytes(k).unwrap() as usize;
        assert_eq!(kernel.row_bytes(k as usize), Some(bytes), "{ty}");
        for _ in 0..50 {
            let row: Vec<u8> = (0..bytes).map(|_| rng.next() as u8).collect();
            let (mut want, mut got) = (vec![0f32; k as usize], vec![0f32; k as usize]);
            gguf::dequant::dequantize(ty, &row, &mut want).unwrap();
            blocks::row_values(kernel, &row, &mut got);
            for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                // Relative to the block: minimum and scaled code may cancel.
                let block = &want[i / 32 * 32..][..32];
                let size = block.iter().fold(0f32, |m, v| m.max(v.abs()));
                let same = g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= REL * size || !size.is_finite();
                assert!(same, "{ty} value {i}: {g} against {w}");
            }
        }
        assert!(WeightView::new(kernel, 1, k as usize, &vec![0; bytes]).is_some());
    }
    assert_eq!(seen, 28, "all the types that the kernels know");
}
