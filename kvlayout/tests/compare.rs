//! Distances of states whose distance is known.

mod common;
use common::{dense, ids, state, stream, windowed};
use kvlayout::compare::{numeric, rows, structure};
use kvlayout::*;

const V4: StateVersion = StateVersion::V4;

/// Changes one value of layer 1's K or V by setting its f32 bytes.
fn set(s: &mut State, part: Part, position: usize, channel: usize, value: f32) {
    let stream = stream(s, 0);
    let list = if part == Part::K { &mut stream.k } else { &mut stream.v };
    let width = list[1].width as usize;
    list[1].data[4 * (position * width + channel)..][..4].copy_from_slice(&value.to_le_bytes());
}

fn f32s() -> State {
    state(&KvSpec { type_k: CacheType::F32, type_v: CacheType::F32, ..dense(2, 4) }, &ids(10), V4)
}

#[test]
fn a_state_is_no_way_from_itself() {
    for spec in [dense(3, 8), windowed(5, 4, 3)] {
        let s = state(&spec, &ids(9), V4);
        assert_eq!(structure(&s, &s), []);
        let all = numeric(&s, &s).unwrap();
        assert_eq!(all.len(), s.tensors().len());
        for e in all {
            assert_eq!((e.rel_l2, e.max_abs, e.row_max_rel), (0.0, 0.0, 0.0));
            assert!(e.row_max_one_minus_cos < 1e-12);
            assert_eq!((e.equal, e.values), (e.values, e.rows * if spec.sections.len() == 1 { 8 } else { 4 }));
        }
    }
}

#[test]
fn one_value_apart() {
    let a = f32s();
    let mut b = a.clone();
    let old = a.rows_f32(0, 1, Part::V).unwrap();
    let row = &old[6 * 4..7 * 4];
    set(&mut b, Part::V, 6, 2, row[2] + 0.5);
    let all = numeric(&a, &b).unwrap();
    let far: Vec<_> = all.iter().filter(|e| e.rel_l2 > 0.0).collect();
    assert_eq!(far.len(), 1);
    let e = far[0];
    assert_eq!((e.section, e.layer, e.part, e.rows, e.values, e.equal), (0, 1, Part::V, 10, 40, 39));
    let norm = |v: &[f32]| v.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    assert!((e.rel_l2 - 0.5 / norm(&old)).abs() < 1e-12);
    assert!((e.row_max_rel - 0.5 / norm(row)).abs() < 1e-12);
    assert_eq!((e.max_abs, e.worst_row, e.worst_cos_row), (0.5, 6, 6));
    assert!(e.row_max_one_minus_cos > 0.0 && e.row_max_one_minus_cos < 0.1);
    let rows = rows(&a, &b, 0, 1, Part::V).unwrap();
    assert_eq!(rows.iter().map(|r| r.position).collect::<Vec<_>>(), (0..10).collect::<Vec<_>>());
    assert_eq!(rows.iter().filter(|r| r.rel_l2 > 0.0).count(), 1);
}

#[test]
fn what_is_no_number_is_infinitely_far() {
    for (x, y) in [(f32::NAN, 1.0), (1.0, f32::NAN), (f32::INFINITY, f32::INFINITY)] {
        let (mut a, mut b) = (f32s(), f32s());
        set(&mut a, Part::K, 3, 0, x);
        set(&mut b, Part::K, 3, 0, y);
        let all = numeric(&a, &b).unwrap();
        let e = all.iter().find(|e| (e.layer, e.part) == (1, Part::K)).unwrap();
        let inf = f64::INFINITY;
        assert_eq!([e.rel_l2, e.max_abs, e.row_max_rel, e.row_max_one_minus_cos], [inf; 4]);
        assert_eq!((e.worst_row, e.worst_cos_row), (3, 3));
    }
}

#[test]
fn rows_of_zeroes() {
    let (mut a, mut b) = (f32s(), f32s());
    for c in 0..4 {
        set(&mut a, Part::K, 2, c, 0.0);
        set(&mut b, Part::K, 2, c, 0.0);
    }
    let at = |a: &State, b: &State| rows(a, b, 0, 1, Part::K).unwrap()[2];
    assert_eq!((at(&a, &b).rel_l2, at(&a, &b).one_minus_cos), (0.0, 0.0));
    set(&mut b, Part::K, 2, 1, 1.0);
    assert_eq!((at(&a, &b).rel_l2, at(&a, &b).one_minus_cos), (f64::INFINITY, 1.0));
    assert_eq!((at(&b, &a).rel_l2, at(&b, &a).one_minus_cos), (1.0, 1.0));
}

#[test]
fn windows_are_compared_where_both_have_cells() {
    let tokens = ids(12);
    // What a server keeps, and what a handoff holds.
    let (a, b) = (state(&windowed(4, 4, 4), &tokens, V4), state(&windowed(4, 4, 5), &tokens, V4));
    assert!(numeric(&a, &b).unwrap().iter().all(|e| e.rel_l2 == 0.0));
    let local = numeric(&a, &b).unwrap().into_iter().find(|e| e.section == 1).unwrap();
    assert_eq!(local.rows, 5);
    let text: Vec<String> = structure(&a, &b).iter().map(|d| d.to_string()).collect();
    assert_eq!(text, ["section 1: cell_count: 5 | 6", "section 1: pos[6]: absent | 6"]);
}

#[test]
fn transposed_or_not_the_values_are_the_same() {
    let spec = dense(2, 4);
    let a = state(&spec, &ids(7), V4);
    let b = state(&KvSpec { v_trans: true, ..spec.clone() }, &ids(7), V4);
    assert!(numeric(&a, &b).unwrap().iter().all(|e| e.equal == e.values));
    let wide = state(&KvSpec { type_k: CacheType::Bf16, type_v: CacheType::F32, ..spec }, &ids(7), V4);
    assert!(numeric(&a, &wide).unwrap().iter().all(|e| e.equal == e.values));
}

#[test]
fn every_kind_of_difference_is_named() {
    let a = state(&KvSpec { cell_ext: true, ..dense(2, 4) }, &ids(5), V4);
    let differ = |change: &dyn Fn(&mut State)| {
        let mut b = a.clone();
        change(&mut b);
        structure(&a, &b).iter().map(|d| d.to_string()).collect::<Vec<String>>()
    };
    assert_eq!(differ(&|s| s.version = StateVersion::V3), ["version: 4 | 3"]);
    assert_eq!(differ(&|s| s.form = TokenForm::Packed { n_media: 0, media: vec![] }), ["token_form: plain | packed"]);
    assert_eq!(differ(&|s| s.tokens[3] = 9), ["token[3]: 121 | 9"]);
    assert_eq!(differ(&|s| s.tokens.push(9)), ["token_count: 5 | 6"]);
    assert_eq!(differ(&|s| stream(s, 0).cells[2].pos = 8), ["section 0: pos[2]: 2 | 8"]);
    assert_eq!(differ(&|s| stream(s, 0).cells[2].seq_id = 1), ["section 0: seq_id[2]: 0 | 1"]);
    let ext = |s: &mut State| stream(s, 0).cells[2].ext = Some((2, 2, Some(0)));
    assert_eq!(differ(&ext), ["section 0: cell_ext[2]: 2, 2, 84 | 2, 2, 0"]);
    assert_eq!(differ(&|s| stream(s, 0).v_trans = true), ["section 0: v_trans: 0 | 1"]);
    assert_eq!(differ(&|s| stream(s, 0).n_rot = Some((64, 0))), ["section 0: n_rot_k: 0 | 64"]);
    assert_eq!(differ(&|s| stream(s, 0).k[1].ty = CacheType::Bf16), ["section 0 layer 1: type_k: f16 | bf16"]);
    assert_eq!(differ(&|s| stream(s, 0).v[1].width = 8), ["section 0 layer 1: row_size_v: 4 channels | 8 channels"]);
    assert_eq!(differ(&|s| s.trailing.push(0)), ["trailing: 0 | 1"]);
    assert_eq!(differ(&|s| s.sections.push(s.sections[0].clone())), ["sections: 1 | 2"]);
    assert_eq!(differ(&|s| s.appendix = Some(Appendix { checkpoints: vec![] })), ["appendix: none | 0 checkpoints"]);
    let layers = differ(&|s| {
        stream(s, 0).k.pop();
        stream(s, 0).v.pop();
    });
    assert_eq!(layers, ["section 0: n_layer: 2 | 1"]);
}

#[test]
fn what_cannot_be_compared_says_why() {
    let a = state(&dense(2, 4), &ids(5), V4);
    let e = |b: &State| numeric(&a, b).unwrap_err().to_string();
    assert_eq!(e(&state(&dense(3, 4), &ids(5), V4)), "section 0: n_layer: 2 | 3");
    assert_eq!(e(&state(&dense(2, 8), &ids(5), V4)), "section 0 layer 0: row_size_k: 4 channels | 8 channels");
    let mut b = a.clone();
    stream(&mut b, 0).cells.iter_mut().for_each(|c| c.pos += 100);
    assert_eq!(e(&b), "section 0 layer 0: pos: positions 0 to 4 | positions 100 to 104");
}

#[test]
fn memories_without_cells_do_not_differ() {
    let with = |cells: &[i32]| {
        let record = Tensor { ty: CacheType::F32, width: 2, data: vec![0; 8 * cells.len()] };
        let cells = cells.iter().map(|&pos| RecCell { pos }).collect();
        let mut s = state(&dense(1, 4), &[], V4);
        s.sections = vec![Section::Rec(Rec { cells, n_layer: 1, records: vec![record.clone(), record] })];
        assert_eq!(State::parse(&s.write()).as_ref(), Ok(&s));
        s
    };
    let empty = with(&[]);
    assert_eq!(structure(&empty, &empty), []);
    let all = numeric(&empty, &empty).unwrap();
    assert!(all.len() == 2 && all.iter().all(|e| (e.rows, e.values, e.rel_l2) == (0, 0, 0.0)), "{all:?}");
    for (a, b) in [(&empty, &with(&[4])), (&with(&[4]), &empty)] {
        assert!(numeric(a, b).unwrap_err().to_string().contains("no positions"));
    }
}
