//! Files that real servers of all three versions saved (`saved/make.py` made them): every field is found, what was read
//! is written back byte by byte, and our own map puts the same rows at the same bytes.

mod common;
use kvlayout::faults::{Expect, Fault};
use kvlayout::*;
use std::collections::BTreeMap;
use std::path::Path;

const TOKENS: [i32; 12] = [1, 40, 77, 100, 65, 33, 259, 12, 200, 201, 31, 90];

fn files() -> BTreeMap<String, Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/saved");
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    let states = entries.filter(|p| p.extension().is_some_and(|e| e == "bin"));
    let files: BTreeMap<String, Vec<u8>> =
        states.map(|p| (p.file_stem().unwrap().to_str().unwrap().into(), std::fs::read(p).unwrap())).collect();
    assert_eq!(files.len(), 51, "files saved by servers are missing, or new ones are not counted here");
    files
}

fn load(name: &str) -> State {
    State::parse(&files()[name]).unwrap()
}

/// What a server was started with, from the name of the file: `model-setting-vN`.
struct Server {
    model: String,
    setting: String,
    version: StateVersion,
    spec: Option<KvSpec>,
}

fn server(name: &str) -> Server {
    let mut parts = name.split('-').map(String::from);
    let (model, setting) = (parts.next().unwrap(), parts.next().unwrap());
    let version = parts.next().unwrap()[1..].parse().unwrap();
    let mut spec = match model.as_str() {
        "llama" | "qwen2vl" => Some(common::dense(2, 32)),
        "head64" => Some(common::dense(1, 64)),
        "gemma3" => {
            let mut spec = common::dense(6, 16);
            // Which layer sees everything is up to the model; the file does not tell.
            let layers = std::mem::take(&mut spec.sections[0].layers);
            let (full, local) = layers.into_iter().partition(|l| l.layer % 2 == 1);
            spec.sections = vec![
                KvSection { layers: full, window: None, n_rot: (0, 0) },
                KvSection { layers: local, window: Some(8), n_rot: (0, 0) },
            ];
            Some(spec)
        }
        "mamba" | "jamba" | "qwen35" | "lfm2" => {
            // Which layers have attention, and the numbers in R and S of the others.
            let (n_layer, attention, width, (n_embd_r, n_embd_s)): (u32, &[u32], u32, _) = match model.as_str() {
                // Three earlier inputs, and four numbers of state, for each of 32 channels.
                "mamba" => (2, &[], 0, (96, 128)),
                "jamba" => (3, &[1], 16, (96, 128)),
                // Three earlier inputs of two key heads twice and four value heads of 8, and a square for each of the four.
                "qwen35" => (4, &[3], 16, (3 * 64, 256)),
                // Two earlier inputs of 16 channels, and no state.
                _ => (3, &[1], 16, (32, 0)),
            };
            let mut spec = common::dense(n_layer, width);
            let all = std::mem::take(&mut spec.sections[0].layers);
            let (full, other): (Vec<_>, Vec<_>) = all.into_iter().partition(|l| attention.contains(&l.layer));
            spec.sections[0].layers = full;
            if attention.is_empty() {
                spec.sections.clear();
            }
            let rec = |l: &LayerKv| LayerRec { layer: l.layer, n_embd_r, n_embd_s };
            spec.recurrent = Some(RecSection { n_layer, layers: other.iter().map(rec).collect() });
            Some(spec)
        }
        _ => None,
    };
    if let Some(spec) = &mut spec {
        spec.cell_ext = matches!(model.as_str(), "qwen2vl" | "qwen35");
        spec.v_trans = matches!(setting.as_str(), "vtrans" | "mixed");
        spec.n_stream = if setting.starts_with("np2") { 2 } else { 1 };
        spec.swa_full = setting == "swafull";
        if let Ok(ty) = setting.parse() {
            (spec.type_k, spec.type_v) = (ty, ty);
        }
        if setting == "mixed" {
            (spec.type_k, spec.type_v) = (CacheType::Q8_0, CacheType::F32);
        }
        if model == "head64" && spec.type_k.is_quantised() {
            spec.sections[0].n_rot = rotation_widths(64, 64);
        }
    }
    Server { model, setting, version, spec }
}

#[test]
fn every_file_is_rewritten_byte_by_byte() {
    for (name, bytes) in files() {
        let state = State::parse(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(state.write() == bytes, "{name}");
        assert!(state.trailing.is_empty(), "{name}");
        assert_eq!(State::parse_as(&bytes, &state.shape()).as_ref(), Ok(&state), "{name}");
    }
}

#[test]
fn every_file_has_the_fields_of_its_server() {
    for (name, bytes) in files() {
        let Server { model, setting, version, spec } = server(&name);
        let state = State::parse(&bytes).unwrap();
        assert_eq!(state.version, version, "{name}");
        assert_eq!(state.form, TokenForm::Packed { n_media: 0, media: vec![] }, "{name}");
        let tokens = if setting == "empty" { &[][..] } else { &TOKENS };
        assert_eq!(state.tokens, tokens, "{name}");

        // All that the checker can hold against it, it does: types, widths, layers, streams, cells, positions,
        // extensions.
        let expect = Expect {
            n_vocab: Some(300),
            tokens: Some(tokens.to_vec()),
            version: Some(version),
            spec: spec.clone(),
            n_ctx: Some(512),
            handoff: false,
        };
        let found = faults::check_bytes(&bytes, &expect);
        assert_eq!(found, if setting == "empty" { vec![Fault::NoTokens] } else { vec![] }, "{name}");

        let kinds: Vec<bool> = state.sections.iter().map(|s| matches!(s, Section::Kv(_))).collect();
        let positions: Vec<Vec<i32>> = (0..kinds.len()).map(|i| state.positions(i)).collect();
        let all: Vec<i32> = (0..tokens.len() as i32).collect();
        match model.as_str() {
            "gemma3" => assert_eq!(positions, [all.clone(), (4..12).collect()], "{name}"),
            "mamba" => assert_eq!((kinds, positions), (vec![false], vec![vec![11]]), "{name}"),
            "jamba" | "qwen35" | "lfm2" => {
                assert_eq!((kinds, positions), (vec![true, false], vec![all, vec![11]]), "{name}");
            }
            _ => assert_eq!((kinds, positions), (vec![true], vec![all]), "{name}"),
        }
        for section in &state.sections {
            match section {
                Section::Kv(kv) => {
                    let Some(s) = kv.stream() else { continue };
                    let rotated = if model == "head64" && setting != "f32" { 64 } else { 0 };
                    assert_eq!(s.n_rot, (version == StateVersion::V4).then_some((rotated, rotated)), "{name}");
                    let slot = i32::from(setting == "np2slot1");
                    assert!(s.cells.iter().all(|c| c.seq_id == slot), "{name}");
                    assert!(kv.streams[slot as usize].cells.len() == s.cells.len(), "{name}");
                    let tok = (version >= StateVersion::V3).then_some(12);
                    let ext = if matches!(model.as_str(), "qwen2vl" | "qwen35") { Some((7, 7, tok)) } else { None };
                    assert_eq!(s.cells.iter().find(|c| c.pos == 7).unwrap().ext, ext, "{name}");
                }
                Section::Rec(rec) => {
                    let want = spec.as_ref().unwrap().recurrent.as_ref().unwrap();
                    let found = rec.r().iter().zip(rec.s()).map(|(r, s)| (r.ty, r.width, s.ty, s.width));
                    let f32 = CacheType::F32;
                    let widths: Vec<_> = want.layers.iter().map(|l| (f32, l.n_embd_r, f32, l.n_embd_s)).collect();
                    assert_eq!((rec.n_layer, found.collect::<Vec<_>>()), (want.n_layer, widths), "{name}");
                }
            }
        }
        let checkpoints = state.appendix.clone().map_or(vec![], |a| a.checkpoints);
        let known = version == StateVersion::V4
            && matches!(model.as_str(), "gemma3" | "mamba" | "jamba" | "qwen35" | "lfm2")
            && setting != "swafull";
        assert_eq!(checkpoints.len(), usize::from(known), "{name}");
        for c in checkpoints {
            assert_eq!((c.n_tokens, c.pos_max, c.blobs[1].len(), c.blobs[2].len()), (8, 7, 0, 0), "{name}");
            assert_eq!(c.blobs[0][..4], 0xaf14_3cd8_u32.to_le_bytes(), "{name}");
            // Of sliding windows it is the window's section, of a token or so earlier: the same rows where positions are the same.
            if model == "gemma3" {
                let head = [&b"qsgg"[..], &version.number().to_le_bytes(), &[0; 4]].concat();
                let then = State::parse(&[&head, &c.blobs[0][8..]].concat()).unwrap();
                assert!(then.trailing.is_empty() && then.positions(0).last() == Some(&c.pos_max), "{name}");
                let (old, new) = (then.positions(0), state.positions(1));
                let mut same = 0;
                for (layer, part) in [(0, Part::K), (0, Part::V), (1, Part::K), (1, Part::V)] {
                    let rows = |s: &State, section| s.rows_f32(section, layer, part).unwrap();
                    let (a, b) = (rows(&then, 0), rows(&state, 1));
                    let width = a.len() / old.len();
                    for (i, j) in
                        old.iter().enumerate().filter_map(|(i, p)| Some((i, new.iter().position(|q| q == p)?)))
                    {
                        assert_eq!(a[i * width..][..width], b[j * width..][..width], "{name}");
                        same += 1;
                    }
                }
                assert!(same > 0, "{name}");
            }
        }
    }
}

/// What the server wrote, fed as f32 rows through our scatter, gives the server's file again: but for the form of the
/// token list, the slot's number, the appendix, and that our file is always that of the first slot.
#[test]
fn our_map_puts_the_servers_rows_where_the_server_does() {
    let mut done = 0;
    for (name, bytes) in files() {
        let Server { setting, version, spec, .. } = server(&name);
        let Some(mut spec) = spec else { continue };
        // What iq4_nl made of values is not what it makes of them again.
        if setting == "empty" || setting == "iq4_nl" {
            continue;
        }
        let mut want = State::parse(&bytes).unwrap();
        // A server keeps only the window, and that with `--swa-full` too.
        spec.swa_full = false;
        spec.sections.iter_mut().for_each(|s| s.window = s.window.map(|w| w - 1));
        let map = KvMap::state_file(&spec, &TOKENS, version).unwrap();
        let mut out = Vec::new();
        let mut sink = Scatter::new(map.clone(), MemSpace::new(&mut out, map.size()).unwrap()).unwrap();
        for (i, s) in spec.sections.iter().enumerate() {
            for (j, l) in s.layers.iter().enumerate() {
                for part in [Part::K, Part::V] {
                    let rows = want.rows_f32(i, j, part).unwrap();
                    sink.put_rows(l.layer, part, sink.wants(l.layer, part), &rows).unwrap();
                }
            }
        }
        for (j, l) in spec.recurrent.iter().flat_map(|rec| rec.layers.iter().enumerate()) {
            for part in [Part::R, Part::S].into_iter().filter(|&p| map.window(l.layer, p).is_some()) {
                let row = want.rows_f32(spec.sections.len(), j, part).unwrap();
                sink.put_rows(l.layer, part, sink.wants(l.layer, part), &row).unwrap();
            }
        }
        Box::new(sink).commit().unwrap();
        want.form = TokenForm::Plain;
        want.appendix = None;
        for section in &mut want.sections {
            let Section::Kv(kv) = section else { continue };
            kv.streams.sort_by_key(|s| s.cells.is_empty());
            kv.streams[0].cells.iter_mut().for_each(|c| c.seq_id = 0);
        }
        assert!(want.write() == out, "{name}");
        done += 1;
    }
    assert_eq!(done, 47);
}

/// A server's f32 rows, rotated and quantised here, are the bytes of the same server's quantised caches. There is one layer, so that
/// no attention has gone before.
#[test]
fn rows_are_quantised_as_the_server_does_it() {
    let exact = load("head64-f32-v4");
    for ty in CacheType::ALL.into_iter().filter(|t| t.is_quantised()) {
        let server = load(&format!("head64-{ty}-v4"));
        for part in [Part::K, Part::V] {
            let mut rows = exact.rows_f32(0, 0, part).unwrap();
            hadamard(&mut rows, 64);
            let mut bytes = Vec::new();
            ty.encode(&rows, &mut bytes).unwrap();
            assert!(bytes == server.tensor(0, 0, part).unwrap().data, "{ty} {part}");
            // What a reader gets back is the same whether it is encoded and read or rounded.
            ty.round(&mut rows);
            assert_eq!(rows, server.rows_f32(0, 0, part).unwrap(), "{ty} {part}");
        }
    }
}

/// A rotated file against one that is not: both are turned back before they are compared.
#[test]
fn rotated_rows_are_compared_as_what_they_stand_for() {
    let exact = load("head64-f32-v4");
    // Half a step of the block's scale, against the rows' own size, as measured; unrotated they would be 1.4 apart.
    for (ty, most) in [("q8_0", 0.01), ("q5_1", 0.05), ("q5_0", 0.06), ("q4_1", 0.1), ("q4_0", 0.12), ("iq4_nl", 0.1)] {
        let mut server = load(&format!("head64-{ty}-v4"));
        for e in compare::numeric(&exact, &server).unwrap() {
            assert!(e.rel_l2 > 0.002 && e.rel_l2 < most, "{ty}: {e:?}");
        }
        let Section::Kv(kv) = &mut server.sections[0] else { panic!("an attention cache") };
        kv.streams[0].n_rot = Some((0, 0));
        assert!(compare::numeric(&exact, &server).unwrap().iter().all(|e| e.rel_l2 > 1.0), "{ty}");
        // Of versions 2 and 3 nothing is known: the rows are taken as they are.
        kv_unknown(&mut server);
        assert!(compare::numeric(&exact, &server).unwrap().iter().all(|e| e.rel_l2 > 1.0), "{ty}");
    }
}

fn kv_unknown(state: &mut State) {
    let Section::Kv(kv) = &mut state.sections[0] else { panic!("an attention cache") };
    kv.streams[0].n_rot = None;
}

/// The quantised caches of one version hold the same rows, more or less exactly: that checks the decoders on blocks of
/// ggml's own.
#[test]
fn quantised_rows_are_near_each_other() {
    let reference = load("head64-q8_0-v4");
    for (ty, most) in [("q5_1", 0.06), ("q5_0", 0.06), ("q4_1", 0.12), ("q4_0", 0.12), ("iq4_nl", 0.12)] {
        for e in compare::numeric(&reference, &load(&format!("head64-{ty}-v4"))).unwrap() {
            assert!(e.rel_l2 > 0.005 && e.rel_l2 < most, "{ty}: {e:?}");
        }
    }
    for e in compare::numeric(&load("llama-f32-v4"), &load("llama-mixed-v4")).unwrap() {
        let most = if e.part == Part::K { 0.02 } else { 0.01 };
        assert!(e.rel_l2 < most, "{e:?}");
    }
    // An f16 file is the rounding of the f32 file in the first layer, where no attention has gone before.
    let (f32s, f16s) = (load("llama-f32-v4"), load("llama-f16-v4"));
    for part in [Part::K, Part::V] {
        let rounded = f32s.rows_f32(0, 0, part).unwrap().into_iter().map(|v| half::f16::from_f32(v).to_f32());
        assert_eq!(rounded.collect::<Vec<f32>>(), f16s.rows_f32(0, 0, part).unwrap());
    }
}

#[test]
fn versions_of_one_model_differ_in_what_they_should() {
    let names = |d: Vec<compare::Difference>| {
        let mut names: Vec<&str> = d.iter().map(|d| d.field.name()).collect();
        names.dedup();
        names
    };
    let differ = |a: &str, b: &str| names(compare::structure(&load(a), &load(b)));
    assert_eq!(differ("llama-f16-v3", "llama-f16-v4"), ["version", "n_rot_k", "n_rot_v"]);
    assert_eq!(differ("llama-f16-v2", "llama-f16-v3"), ["version"]);
    assert_eq!(differ("qwen2vl-f16-v2", "qwen2vl-f16-v3"), ["version", "cell_ext"]);
    assert_eq!(differ("llama-f16-v4", "llama-vtrans-v4"), ["v_trans"]);
    assert_eq!(differ("llama-f16-v4", "llama-bf16-v4"), ["type_k", "type_v"]);
    assert_eq!(differ("llama-f16-v4", "llama-np2-v4"), ["n_stream"]);
    assert_eq!(differ("gemma3-f16-v4", "gemma3-swafull-v4"), ["appendix"]);
    assert_eq!(differ("gemma3-f16-v4", "gemma3-f16-v4"), Vec::<&str>::new());
    assert_eq!(differ("mamba-f16-v2", "mamba-f16-v3"), ["version"]);
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    for (name, bytes) in files() {
        let shape = State::parse(&bytes).unwrap().shape();
        // Checkpoints may be there or not: those cuts show only as faults.
        let whole = State { appendix: None, ..State::parse(&bytes).unwrap() }.write().len();
        for cut in (0..whole).filter(|cut| cut % 7 == 0 || cut + 40 > whole) {
            let e = State::parse_as(&bytes[..cut], &shape).unwrap_err();
            assert!(e.short && e.offset <= cut as u64, "{name} cut at {cut}: {e}");
        }
    }
}
