//! States made up for tests, by code that knows nothing of the map.
#![allow(dead_code)] // each test binary uses its own part

use kvlayout::*;

/// A spec of one section without a window.
pub fn dense(layers: u32, width: u32) -> KvSpec {
    let layers = (0..layers).map(|layer| LayerKv { layer, n_embd_k: width, n_embd_v: width }).collect();
    KvSpec {
        sections: vec![KvSection { layers, window: None, n_rot: (0, 0) }],
        recurrent: None,
        type_k: CacheType::F16,
        type_v: CacheType::F16,
        v_trans: false,
        cell_ext: false,
        swa_full: false,
        n_stream: 1,
    }
}

/// Full layers 2, 5, …; sliding-window layers between.
pub fn windowed(layers: u32, width: u32, window: u32) -> KvSpec {
    let mut spec = dense(layers, width);
    let (full, local) = spec.sections[0].layers.iter().partition(|l| l.layer % 3 == 2);
    spec.sections = vec![
        KvSection { layers: full, window: None, n_rot: (0, 0) },
        KvSection { layers: local, window: Some(window), n_rot: (0, 0) },
    ];
    spec
}

/// Attention in every third layer, recurrent state in the others, the last of which has none but its history.
pub fn hybrid(layers: u32, width: u32) -> KvSpec {
    let mut spec = dense(layers, width);
    let (full, other): (Vec<LayerKv>, Vec<LayerKv>) = spec.sections[0].layers.iter().partition(|l| l.layer % 3 == 2);
    let last = other.last().map(|l| l.layer);
    let rec = |l: &LayerKv| {
        let n_embd_s = if Some(l.layer) == last { 0 } else { 2 * width };
        LayerRec { layer: l.layer, n_embd_r: 3 * width + l.layer, n_embd_s }
    };
    spec.recurrent = Some(RecSection { n_layer: layers, layers: other.iter().map(rec).collect() });
    spec.sections[0].layers = full;
    spec
}

pub fn ids(n: usize) -> Vec<i32> {
    (0..n).map(|i| (i * 37 % 1000) as i32 + 10).collect()
}

/// A value that every type holds exactly, different for every place.
pub fn value(layer: u32, part: Part, position: u32, channel: u32) -> f32 {
    let seed = layer * 31 + position * 7 + channel * 3 + if part == Part::K { 0 } else { 101 } * part as u32;
    (seed % 241) as f32 / 8.0 - 15.0
}

/// Rows of [`value`]s.
pub fn rows(layer: u32, part: Part, positions: std::ops::Range<u32>, width: u32) -> Vec<f32> {
    positions.flat_map(|p| (0..width).map(move |c| value(layer, part, p, c))).collect()
}

pub fn bytes(ty: CacheType, v: f32) -> Vec<u8> {
    match ty {
        CacheType::F32 => v.to_le_bytes().to_vec(),
        CacheType::F16 => half::f16::from_f32(v).to_le_bytes().to_vec(),
        CacheType::Bf16 => half::bf16::from_f32(v).to_le_bytes().to_vec(),
        _ => panic!("{ty}"),
    }
}

/// The state of `tokens` that a handoff should be, filled with [`value`]s.
pub fn state(spec: &KvSpec, tokens: &[i32], version: StateVersion) -> State {
    let n = tokens.len() as u32;
    let section = |s: &KvSection| {
        let first = match s.window {
            Some(w) if !spec.swa_full => n.saturating_sub(w + 1),
            _ => 0,
        };
        let cell = |p: u32| {
            let tok = (version != StateVersion::V2).then(|| tokens[p as usize]);
            let ext = spec.cell_ext.then_some((p as i32, p as i32, tok));
            Cell { pos: p as i32, ext, seq_id: 0 }
        };
        let tensor = |layer: u32, part: Part, ty: CacheType, width: u32| {
            let at = |p: u32, c: u32| bytes(ty, value(layer, part, p, c));
            let data = if part == Part::V && spec.v_trans {
                (0..width).flat_map(|c| (first..n).flat_map(move |p| at(p, c))).collect()
            } else {
                (first..n).flat_map(|p| (0..width).flat_map(move |c| at(p, c))).collect()
            };
            Tensor { ty, width, data }
        };
        let mut streams = vec![Stream::default(); spec.n_stream as usize];
        streams[0] = Stream {
            cells: (first..n).map(cell).collect(),
            v_trans: spec.v_trans,
            n_rot: (version == StateVersion::V4).then_some((0, 0)),
            k: s.layers.iter().map(|l| tensor(l.layer, Part::K, spec.type_k, l.n_embd_k)).collect(),
            v: s.layers.iter().map(|l| tensor(l.layer, Part::V, spec.type_v, l.n_embd_v)).collect(),
        };
        Section::Kv(Kv { streams })
    };
    let recurrent = |rec: &RecSection| {
        let tensor = |l: &LayerRec, part: Part, width: u32| {
            let data = rows(l.layer, part, n - 1..n, width).into_iter().flat_map(f32::to_le_bytes).collect();
            Tensor { ty: CacheType::F32, width, data }
        };
        let r = rec.layers.iter().map(|l| tensor(l, Part::R, l.n_embd_r));
        let s = rec.layers.iter().map(|l| tensor(l, Part::S, l.n_embd_s));
        let cells = vec![RecCell { pos: n as i32 - 1 }];
        Section::Rec(Rec { cells, n_layer: rec.n_layer, records: r.chain(s).collect() })
    };
    State {
        version,
        form: TokenForm::Plain,
        tokens: tokens.to_vec(),
        cell_ext: spec.cell_ext,
        sections: spec.sections.iter().map(section).chain(spec.recurrent.iter().map(recurrent)).collect(),
        appendix: None,
        trailing: Vec::new(),
    }
}

/// The attention cache of a section, for changing it.
pub fn stream(state: &mut State, section: usize) -> &mut Stream {
    match &mut state.sections[section] {
        Section::Kv(kv) => kv.stream_mut().expect("a stream with cells"),
        Section::Rec(_) => panic!("section {section} is recurrent"),
    }
}

/// Fills a map with [`value`]s by a scatter over memory, tensor after tensor.
pub fn scattered(spec: &KvSpec, tokens: &[i32], version: StateVersion) -> Vec<u8> {
    let map = KvMap::state_file(spec, tokens, version).unwrap();
    let mut out = Vec::new();
    let space = MemSpace::new(&mut out, map.size()).unwrap();
    let mut sink = Scatter::new(map.clone(), space).unwrap();
    for (layer, part, w) in map.windows() {
        let positions = if w.elem == CacheType::F32 { w.positions.clone() } else { 0..map.n_tokens() };
        sink.put_rows(layer, part, positions.clone(), &rows(layer, part, positions, w.width)).unwrap();
    }
    Box::new(sink).commit().unwrap();
    out
}

/// What stands behind a state whose prompt does not reach past its sliding window: that section once more, made from the parsed
/// file's parts.
pub fn checkpoint(spec: &KvSpec, state: &State) -> Option<Appendix> {
    let n = state.tokens.len() as i64;
    let inside = |s: &KvSection| s.window.is_some_and(|w| !spec.swa_full && n <= i64::from(w));
    let section = spec.sections.iter().rposition(inside).filter(|_| spec.recurrent.is_none())?;
    let mut blob = [0xaf14_3cd8_u32.to_le_bytes(), [0; 4]].concat();
    blob.extend(section_bytes(state, section));
    let checkpoint =
        Checkpoint { n_tokens: n, pos_min: 0, pos_max: n as i32 - 1, blobs: [blob, Vec::new(), Vec::new()] };
    Some(Appendix { checkpoints: vec![checkpoint] })
}

/// The bytes of one section of a state.
pub fn section_bytes(state: &State, section: usize) -> Vec<u8> {
    let mut alone = state.clone();
    alone.sections = vec![state.sections[section].clone()];
    (alone.form, alone.tokens, alone.appendix) = (TokenForm::Plain, Vec::new(), None);
    // Behind magic, version, and the number of tokens.
    alone.write().split_off(12)
}
