//! Hostile state files: each is a good one with one thing wrong, as it may come from a broken producer, a full disk or a wrong
//! setting. Some a server refuses, some make it abort, and the worst it takes without a word. The harness has to name all.

use anyhow::{Context as _, Result, ensure};
use kvlayout::faults::{self, Expect};
use kvlayout::{
    CacheType, Cell, KvMap, KvSection, KvSink as _, KvSpec, LayerKv, MemSpace, Part, Scatter, Section, State,
    StateVersion,
};

/// One hostile file.
#[derive(Debug, Clone)]
pub struct Hostile {
    /// What is wrong with it.
    pub name: &'static str,
    /// What servers do with it.
    pub server: &'static str,
    /// The bytes.
    pub bytes: Vec<u8>,
    /// The names of faults of which at least one has to be found.
    pub faults: &'static [&'static str],
}

/// What became of one.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Outcome {
    /// What is wrong with the file.
    pub name: &'static str,
    /// What servers do with it.
    pub server: &'static str,
    /// The faults found.
    pub found: Vec<String>,
    /// Whether one of those expected is among them.
    pub flagged: bool,
}

const N: usize = 39;
const N_VOCAB: u32 = 320;

/// The good file's ids.
pub fn tokens() -> Vec<i32> {
    (0..N as i32).map(|i| 3 + (i * 37 + 11) % (N_VOCAB as i32 - 3)).collect()
}

/// The reading server's memory for the good file.
pub fn spec() -> KvSpec {
    let layers = (0..3).map(|layer| LayerKv { layer, n_embd_k: 64, n_embd_v: 64 }).collect();
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

/// What is expected of a file.
pub fn expect() -> Expect {
    Expect {
        n_vocab: Some(N_VOCAB),
        tokens: Some(tokens()),
        version: Some(StateVersion::V4),
        spec: Some(spec()),
        n_ctx: Some(256),
        handoff: true,
    }
}

/// The good file.
pub fn good() -> Result<Vec<u8>> {
    good_for(&spec())
}

fn good_for(spec: &KvSpec) -> Result<Vec<u8>> {
    let map = KvMap::state_file(spec, &tokens(), StateVersion::V4)?;
    let (mut bytes, size) = (Vec::new(), map.size());
    let mut sink = Scatter::new(map, MemSpace::new(&mut bytes, size)?)?;
    for section in &spec.sections {
        for l in &section.layers {
            for (part, width) in [(Part::K, l.n_embd_k), (Part::V, l.n_embd_v)] {
                let rows: Vec<f32> =
                    (0..N as u32 * width).map(|i| ((i * 7 + l.layer * 3) % 101) as f32 / 50.0 - 1.0).collect();
                sink.put_rows(l.layer, part, 0..N as u32, &rows)?;
            }
        }
    }
    Box::new(sink).commit()?;
    Ok(bytes)
}

/// All hostile files.
pub fn all() -> Result<Vec<Hostile>> {
    let good = good()?;
    let state = State::parse(&good).context("the good file")?;
    let mut out: Vec<Hostile> = Vec::new();
    let mut put = |name, server, bytes: Vec<u8>, faults: &'static [&'static str]| {
        out.push(Hostile { name, server, bytes, faults })
    };

    // Fields at known places: 12 bytes of header, the ids, then the section.
    let section = 12 + 4 * N;
    let cells = section + 8;
    let tail = cells + 12 * N;
    let word = |at: usize, value: u32| {
        let mut b = good.clone();
        b[at..at + 4].copy_from_slice(&value.to_le_bytes());
        b
    };
    let cut = |len: usize| good[..len].to_vec();

    put("empty file", "400", Vec::new(), &["magic"]);
    put("cut in the header", "400", cut(8), &["token_count"]);
    put("cut in the ids", "400", cut(12 + 4 * 5 + 1), &["token"]);
    put("cut in the cells", "400", cut(cells + 12 * 3), &["cell_count"]);
    put("cut in the K rows", "aborts", cut(tail + 16 + 100), &["rows_k"]);
    put("cut by one byte", "aborts", cut(good.len() - 1), &["rows_v"]);
    let mut b = good.clone();
    b.extend([0u8; 100]);
    put("100 bytes more", "200, takes no notice", b, &["trailing"]);
    put("wrong magic", "400", word(0, 0x6767_736e), &["magic"]);
    put("version word of another build", "400", word(4, 3), &["version", "type_k"]);
    put("version that does not exist", "400", word(4, 5), &["version"]);
    put("n_stream 2", "400", word(section, 2), &["n_stream"]);
    put("n_stream 0", "400", word(section, 0), &["n_stream"]);
    put("cell_count 0 with ids listed", "200, then aborts", word(section + 4, 0), &["no_cells"]);
    put("cell_count far too large", "400, or eats all memory", word(section + 4, u32::MAX), &["cell_count"]);
    put("cell_count one more", "400", word(section + 4, N as u32 + 1), &["cell_count", "n_seq_id"]);
    put("n_seq_id 2", "400", word(cells + 4, 2), &["n_seq_id"]);
    put("n_seq_id 0", "400", word(cells + 4, 0), &["n_seq_id"]);
    put("v_trans 1", "400", word(tail, 1), &["v_trans"]);
    put("n_layer one more", "400", word(tail + 4, 4), &["n_layer"]);
    put("n_layer one less", "400", word(tail + 4, 2), &["n_layer"]);
    put("n_rot_k 64 on an f16 cache", "400", word(tail + 8, 64), &["n_rot_k"]);
    put("n_rot_v 64 on an f16 cache", "400", word(tail + 12, 64), &["n_rot_v"]);
    put("another K type", "400", word(tail + 16, 30), &["type_k"]);
    put("a K type that does not exist", "400", word(tail + 16, 99), &["type_k"]);
    put("another K row size", "400", word(tail + 20, 64), &["row_size_k"]);
    put("K row size 2^63", "400", word(tail + 24, 0x8000_0000), &["row_size_k"]);

    // Changes that keep the file whole.
    let mut changed = |name, server, faults: &'static [&'static str], change: &dyn Fn(&mut State)| {
        let mut s = state.clone();
        change(&mut s);
        put(name, server, s.write(), faults);
    };
    changed("version of another build", "400", &["version"], &|s| {
        s.version = StateVersion::V3;
        if let Some(Section::Kv(kv)) = s.sections.first_mut() {
            kv.streams.iter_mut().for_each(|stream| stream.n_rot = None);
        }
    });
    changed("no ids", "200, restores nothing", &["no_tokens"], &|s| s.tokens.clear());
    changed("fewer ids than cells", "200, 9 tokens computed again", &["fewer_tokens_than_cells"], &|s| {
        s.tokens.truncate(30)
    });
    changed("more ids than cells", "200, believes them", &["more_tokens_than_cells"], &|s| s.tokens.push(5));
    changed("one id differs", "200, everything from there computed again", &["token_differs"], &|s| s.tokens[20] += 1);
    changed("an id outside the vocabulary", "400, older builds take it", &["token_outside"], &|s| {
        s.tokens[3] = N_VOCAB as i32
    });
    changed("a negative id", "400, older builds take it", &["token_outside"], &|s| s.tokens[3] = -5);
    changed("a negative position", "200, a ghost cell spoils later answers", &["negative_position"], &|s| {
        each_cell(s, &|i, c| {
            if i == 0 {
                c.pos = -1
            }
        })
    });
    changed("all positions negative", "200, poisoned until restarted", &["negative_position"], &|s| {
        each_cell(s, &|_, c| c.pos = -5)
    });
    changed("a position twice", "200", &["duplicate_position"], &|s| {
        each_cell(s, &|i, c| {
            if i == 7 {
                c.pos = 6
            }
        })
    });
    changed("all positions 0", "200, then 500", &["duplicate_position"], &|s| each_cell(s, &|_, c| c.pos = 0));
    changed("a gap in the positions", "200, wrong text", &["position_gap"], &|s| {
        each_cell(s, &|i, c| {
            if i > 10 {
                c.pos += 3
            }
        })
    });
    changed("all positions ten too large", "200, wrong text", &["first_position"], &|s| {
        each_cell(s, &|_, c| c.pos += 10)
    });
    changed("last position too large", "200, then 500", &["position_too_large"], &|s| {
        each_cell(s, &|i, c| {
            if i == N - 1 {
                c.pos = i32::MAX
            }
        })
    });
    changed("cells in reverse, rows not", "200, wrong text", &["cells_out_of_order"], &|s| {
        each_cell(s, &|i, c| c.pos = (N - 1 - i) as i32)
    });
    changed("NaN in a K row", "200, other text", &["non_finite"], &|s| set_f16(s, Part::K, 1, 700, 0x7e00));
    changed("infinity in a V row", "200, other text", &["non_finite"], &|s| set_f16(s, Part::V, 2, 900, 0x7c00));
    changed("packed ids", "older builds take all words for ids", &["packed_tokens"], &|s| {
        s.form = kvlayout::TokenForm::Packed { n_media: 0, media: Vec::new() };
    });
    changed("one layer missing", "400", &["n_layer"], &|s| {
        if let Some(Section::Kv(kv)) = s.sections.first_mut() {
            for stream in &mut kv.streams {
                stream.k.pop();
                stream.v.pop();
            }
        }
    });
    let mut other = spec();
    other.v_trans = true;
    put("V transposed for a server with flash attention", "400", good_for(&other)?, &["v_trans"]);
    let mut other = spec();
    other.type_v = CacheType::F32;
    put("another V type", "400", good_for(&other)?, &["type_v"]);
    let mut other = spec();
    other.sections[0].layers.iter_mut().for_each(|l| l.n_embd_k = 32);
    put("rows of another model", "400", good_for(&other)?, &["row_size_k"]);
    Ok(out)
}

fn each_cell(state: &mut State, change: &dyn Fn(usize, &mut Cell)) {
    if let Some(Section::Kv(kv)) = state.sections.first_mut() {
        for stream in &mut kv.streams {
            stream.cells.iter_mut().enumerate().for_each(|(i, c)| change(i, c));
        }
    }
}

fn set_f16(state: &mut State, part: Part, layer: usize, index: usize, bits: u16) {
    if let Some(Section::Kv(kv)) = state.sections.first_mut() {
        for stream in &mut kv.streams {
            let tensors = if part == Part::K { &mut stream.k } else { &mut stream.v };
            tensors[layer].data[2 * index..2 * index + 2].copy_from_slice(&bits.to_le_bytes());
        }
    }
}

/// Looks at all of them, the good one first.
pub fn run() -> Result<Vec<Outcome>> {
    let expect = expect();
    let clean = faults::check_bytes(&good()?, &expect);
    ensure!(clean.is_empty(), "the good file is called faulty: {clean:?}");
    let mut out = Vec::new();
    for h in all()? {
        let found: Vec<String> =
            faults::check_bytes(&h.bytes, &expect).iter().map(|f| format!("{}: {f}", f.name())).collect();
        let expected = |f: &String| h.faults.iter().any(|n| f.split(':').next() == Some(n));
        let flagged = found.iter().any(expected);
        out.push(Outcome { name: h.name, server: h.server, flagged, found });
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_hostile_file_is_flagged() {
        for o in run().unwrap() {
            assert!(o.flagged, "{}: found only {:?}", o.name, o.found);
        }
    }
}
