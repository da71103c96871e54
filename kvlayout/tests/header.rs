//! Headers: what is read, in how many forms, and what is refused with which numbers.

mod common;
use common::{dense, windowed};
use kvlayout::*;
use proptest::prelude::*;

const N_CTX: u32 = 8192;

fn params() -> ShareParams {
    ShareParams {
        n_ctx: Some(N_CTX),
        n_batch: Some(2048),
        n_ubatch: Some(512),
        flash_attn: Some(true),
        type_k: Some(CacheType::F16),
        type_v: Some(CacheType::F16),
    }
}

fn model() -> KvSpec {
    dense(28, 1024)
}

fn layout() -> ShareLayout {
    ShareLayout::compute(&model(), N_CTX).unwrap()
}

fn good() -> Header {
    Header::new(Some(7), params(), &layout())
}

fn parse(text: &str) -> Header {
    Header::parse(text.as_bytes()).unwrap()
}

/// Why the bytes are no header.
fn bad(bytes: &[u8]) -> String {
    Header::parse(bytes).unwrap_err().to_string()
}

/// Why a header does not go with the model.
fn refused(header: &Header, spec: &KvSpec) -> String {
    header.resolve(spec, None, header.regions.len()).unwrap_err().to_string()
}

#[track_caller]
fn says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
}

#[test]
fn the_documented_example() {
    let text = r#"{"share_id": 7,
        "params": {"n_ctx": 8192, "n_batch": 2048, "n_ubatch": 512, "flash_attn": true, "type_k": "f16", "type_v": "f16"},
        "regions": [{"offset": 0, "size": 939524096, "layout": "0xba98b0368cca6a2b"}]}"#;
    let header = parse(text);
    assert_eq!(header, good());
    assert_eq!(header.resolve(&model(), None, 1).unwrap(), layout());
    assert_eq!(parse(&header.write()), header);
    assert_eq!(
        header.write(),
        "{\"share_id\":7,\"params\":{\"n_ctx\":8192,\"n_batch\":2048,\"n_ubatch\":512,\"flash_attn\":true,\"type_k\":\"f16\",\
         \"type_v\":\"f16\"},\"regions\":[{\"offset\":0,\"size\":939524096,\"layout\":\"0xba98b0368cca6a2b\"}]}"
    );
    let listed = header.clone().with_tensors(&layout());
    assert_eq!(parse(&listed.write()), listed);
    assert_eq!(listed.resolve(&model(), None, 1).unwrap(), layout());
}

#[test]
fn many_spellings_of_the_same() {
    let hash = 0xba98b0368cca6a2bu64;
    for layout in [
        format!("\"{hash:#x}\""),
        format!("\"0X{hash:X}\""),
        format!("\"{hash:x}\""),
        format!("{hash}"),
        format!("\"{hash}\""),
    ] {
        let region = format!("{{\"size\":\"939524096\",\"layout\":{layout},\"fd\":3}}");
        for text in [
            format!(
                "{{\"regions\":[{region}],\"share_id\":\"7\",\"params\":{{\"n_ctx\":\"0x2000\",\"n_batch\":2048,\"n_ubatch\":512,\"flash_attn\":1,\"type_k\":1,\"type_v\":\"F16\"}}}}"
            ),
            format!(
                "{{\"n_ctx\":8192,\"n_batch\":2048,\"n_ubatch\":512,\"flash_attn\":\"on\",\"type_k\":\"f16\",\"type_v\":\"f16\",\"share_id\":7,\"regions\":[{region}]}}"
            ),
            format!(
                "{{\"n_ctx\":8192,\"n_batch\":2048,\"n_ubatch\":512,\"flash_attn\":\"on\",\"params\":{{\"type_k\":\"f16\",\"n_ctx\":8192}},\"tensors\":null,\"type_v\":\"f16\",\"share_id\":7,\"regions\":[{region}],\"more\":{{\"x\":[-1.5,null]}}}}"
            ),
        ] {
            assert_eq!(parse(&text), good(), "{text}");
            for prefix in [(text.len() as u32).to_le_bytes().to_vec(), (text.len() as u64).to_be_bytes().to_vec()] {
                assert_eq!(Header::parse(&[&prefix, text.as_bytes()].concat()).unwrap(), good());
            }
        }
    }
}

#[test]
fn what_is_no_header() {
    says(&bad(b""), &["0 bytes", "EOF"]);
    says(&bad(b"hello"), &["5 bytes", "line 1 column 1"]);
    says(&bad(b"[1]"), &["top level must be an object", "a list of 1"]);
    let text = good().with_tensors(&layout()).write();
    for cut in 0..text.len() {
        assert!(Header::parse(&text.as_bytes()[..cut]).is_err(), "{cut}");
    }
    says(&bad(&text.as_bytes()[..100]), &["100 bytes", "EOF", "column 100"]);
    let cut = [&(text.len() as u32).to_le_bytes(), &text.as_bytes()[..100]].concat();
    says(&bad(&cut), &["EOF", &format!("after a length of {} with 100 bytes", text.len())]);
    says(&bad(format!("{text}}}").as_bytes()), &["trailing characters"]);
    says(&bad(&vec![b' '; HEADER_MAX as usize]), &["EOF"]);
    says(&bad(&vec![b' '; HEADER_MAX as usize + 1]), &["1048577 bytes", "at most 1048576"]);
    assert!(Header::parse(&[b'['; 100_000]).is_err());
    assert!(Header::parse(&[b"{\"a\":".repeat(50_000), b"1".to_vec()].concat()).is_err());
    assert!(Header::parse(&[0xff; 64]).is_err());
    says(&bad(b"{}"), &["regions", "1 to 65535", "0"]);
}

#[test]
fn a_huge_file_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("header");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(1 << 40).unwrap();
    says(&Header::read(&path).unwrap_err().to_string(), &["1099511627776", "at most 1048576"]);
    std::fs::write(&path, good().write()).unwrap();
    assert_eq!(Header::read(&path).unwrap(), good());
    for missing in [dir.path().join("none"), dir.path().to_owned()] {
        let e = Header::read(&missing).unwrap_err();
        assert!(matches!(e, HeaderError::Read { .. }), "{e}");
        says(&e.to_string(), &[missing.to_str().unwrap()]);
    }
    // No length to go by.
    let endless = Header::read(std::path::Path::new("/dev/zero")).unwrap_err().to_string();
    says(&endless, &["1048577", "at most 1048576"]);
}

#[test]
fn values_that_are_none() {
    let with = |from: &str, to: &str| {
        let text = good().with_tensors(&layout()).write();
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1).into_bytes()
    };
    let size = "939524096";
    says(&bad(&with(size, "939524096.0")), &["regions[0].size", "whole number", "939524096.0"]);
    says(&bad(&with(size, "1e9")), &["regions[0].size", "1000000000.0"]);
    says(&bad(&with(size, "-5")), &["regions[0].size", "from 0 to", "-5"]);
    says(&bad(&with(size, "-0")), &["regions[0].size", "-0.0"]);
    says(
        &bad(&with(size, "18446744073709551616")),
        &["regions[0].size", "to 18446744073709551615", "1.8446744073709552e19"],
    );
    says(&bad(&with(size, "\"\"")), &["regions[0].size", "\"\""]);
    says(&bad(&with(size, "\"-5\"")), &["regions[0].size", "\"-5\""]);
    says(&bad(&with(size, "\"+5\"")), &["regions[0].size", "\"+5\""]);
    says(&bad(&with(size, "\"5 MB\"")), &["regions[0].size", "5 MB"]);
    says(&bad(&with(size, "null")), &["regions[0].size", "missing"]);
    says(&bad(&with(size, "true")), &["regions[0].size", "true"]);
    says(&bad(&with("\"0xba98b0368cca6a2b\"", "13446105886553434667.0")), &["regions[0].layout", "1.34461058865534"]);
    says(&bad(&with("\"0xba98b0368cca6a2b\"", "\"0xg\"")), &["regions[0].layout", "0xg"]);
    says(&bad(&with(",\"layout\":\"0xba98b0368cca6a2b\"", "")), &["regions[0].layout", "missing"]);
    says(&bad(&with("8192", "0")), &["params.n_ctx", "from 1 to 2147483647", "0"]);
    says(&bad(&with("8192", "-8192")), &["params.n_ctx", "-8192"]);
    says(&bad(&with("8192", "4294967296")), &["params.n_ctx", "4294967296"]);
    says(&bad(&with("true", "\"auto\"")), &["params.flash_attn", "true or false", "auto"]);
    says(&bad(&with("true", "-1")), &["params.flash_attn", "-1"]);
    says(&bad(&with("\"f16\"", "\"q4_k\"")), &["params.type_k", "cache type", "q4_k"]);
    says(&bad(&with("\"f16\"", "99")), &["params.type_k", "99"]);
    says(&bad(&with("{\"n_ctx\"", "3,\"x\":{\"n_ctx\"")), &["params must be an object", "3"]);
    says(&bad(&with("\"share_id\":7", "\"share_id\":7.5")), &["share_id", "7.5"]);
    says(&bad(&with("[{\"offset\":0", "[[],{\"offset\":0")), &["regions[0] must be an object", "a list of 0"]);
    says(&bad(&with("\"regions\":[", "\"regions\":3,\"x\":[")), &["regions", "list", "3"]);
    says(&bad(&with("\"cache_k_l0\"", "5")), &["tensors[0].name", "5"]);
    says(&bad(&with("\"region\":0", "\"region\":65536")), &["tensors[0].region", "65536"]);
    says(&bad(&with("[1024,8192,1,1]", "[1024,8192,1,1,1]")), &["tensors[0].ne", "1 to 4", "a list of 5"]);
    says(&bad(&with("[1024,8192,1,1]", "[1024,-1]")), &["tensors[0].ne[1]", "-1"]);
    says(&bad(&with("[1024,8192,1,1]", "1024")), &["tensors[0].ne", "1024"]);
    // Fewer dimensions than four are ones.
    assert_eq!(Header::parse(&with("[1024,8192,1,1]", "[1024,8192]")).unwrap(), good().with_tensors(&layout()));
}

#[test]
fn a_key_stands_once() {
    let twice = |from: &str, to: &str| bad(good().write().replacen(from, to, 1).as_bytes());
    says(
        &twice("\"n_ctx\":8192", "\"n_ctx\":8192,\"n_ctx\":4096"),
        &["the key \"n_ctx\" stands twice", "line 1 column"],
    );
    says(&twice("\"offset\":0", "\"offset\":0,\"offset\":0"), &["\"offset\" stands twice"]);
    says(&twice("{\"share_id\":7", "{\"share_id\":7,\"regions\":[]"), &["\"regions\" stands twice"]);
    says(&twice("{\"share_id\":7", "{\"x\":{\"y\":1,\"y\":1}"), &["\"y\" stands twice"]);
    says(&twice("{\"share_id\":7", "{\"n_ctx\":4096"), &["n_ctx is 8192 in params, but 4096 outside"]);
}

#[test]
fn another_memory_is_refused_with_both_numbers() {
    let header = good();
    says(&header.resolve(&model(), None, 2).unwrap_err().to_string(), &["1 regions", "2 descriptors"]);
    says(&header.resolve(&model(), None, 0).unwrap_err().to_string(), &["1 regions", "0 descriptors"]);
    says(&header.resolve(&model(), Some(4096), 1).unwrap_err().to_string(), &["8192", "4096"]);
    // Rounded up they are the same.
    assert_eq!(header.resolve(&model(), Some(8000), 1).unwrap(), layout());

    let fa = Header { params: ShareParams { flash_attn: Some(false), ..params() }, ..header.clone() };
    says(&refused(&fa, &model()), &["flash_attn off", "transposed", "-fa on"]);
    says(&refused(&header, &KvSpec { v_trans: true, ..model() }), &["transposed"]);
    says(&refused(&header, &KvSpec { n_stream: 2, ..model() }), &["2 streams", "1"]);
    says(&refused(&header, &KvSpec { type_v: CacheType::Bf16, ..model() }), &["V cache", "says f16", "bf16"]);

    // Another model, told apart by size or, with the same size, by hash.
    let qwen = refused(&header, &dense(28, 512));
    says(&qwen, &["region 0", "939524096", "469762048", "n_ctx 8192"]);
    says(&refused(&header, &dense(27, 1024)), &["939524096", "905969664"]);
    let same_size = refused(&header, &dense(56, 512));
    says(
        &same_size,
        &["region 0", "0xba98b0368cca6a2b", "layout 0x", "the model with n_ctx 8192, K f16 and V f16 has 0x"],
    );
    let swapped = KvSpec {
        sections: vec![KvSection {
            n_rot: (0, 0),
            layers: (0..28).map(|layer| LayerKv { layer, n_embd_k: 512, n_embd_v: 1536 }).collect(),
            window: None,
        }],
        ..model()
    };
    says(&refused(&header, &swapped), &["layout 0xba98b0368cca6a2b", "has 0x"]);

    // A hash of another type, with the types untold or told wrongly.
    let bf16 = ShareLayout::compute(&KvSpec { type_k: CacheType::Bf16, ..model() }, N_CTX).unwrap();
    let header = Header::new(None, params(), &bf16);
    let ours = format!("{:#018x}", layout().regions()[0].layout);
    let theirs = format!("{:#018x}", bf16.regions()[0].layout);
    says(&refused(&header, &model()), &[&ours, &theirs, "they are those of K bf16 and V f16"]);
    let q8 = KvSpec { type_k: CacheType::Q8_0, type_v: CacheType::Q8_0, ..model() };
    let header = Header::new(None, params(), &ShareLayout::compute(&q8, N_CTX).unwrap());
    says(&refused(&header, &model()), &["939524096", "499122176", "K q8_0 and V q8_0"]);

    // A context that is told wrongly.
    let header = Header::new(None, params(), &ShareLayout::compute(&model(), 4096).unwrap());
    says(&refused(&header, &model()), &["939524096", "469762048", "they are those of n_ctx 4096"]);
    assert!(refused(&header, &model()).len() < 200);
}

#[test]
fn several_regions() {
    let params = ShareParams { n_ctx: Some(40960), ..params() };
    let layout = ShareLayout::compute(&model(), 40960).unwrap();
    let mut header = Header::new(None, params, &layout);
    assert_eq!(header.resolve(&model(), None, 5).unwrap(), layout);
    for (i, r) in header.regions.iter_mut().enumerate() {
        r.offset = i as u64 * 4096 + 17;
    }
    let moved = header.resolve(&model(), None, 5).unwrap();
    assert_eq!(moved.regions(), header.regions);
    assert_eq!(moved.tensors(), layout.tensors());

    let mut swapped = header.clone();
    swapped.regions.swap(3, 4);
    says(&refused(&swapped, &model()), &["region 3", "671088640", "1006632960", "in another order"]);
    let mut short = header.clone();
    short.regions.pop();
    says(&refused(&short, &model()), &["4 regions", "has 5"]);
    let mut off = header.clone();
    off.regions[2].size -= 1;
    says(&refused(&off, &model()), &["region 2", "1006632959", "1006632960"]);
    off = header.clone();
    off.regions[4].layout ^= 1;
    says(&refused(&off, &model()), &["region 4", "0xbc7878b1b2b3489b", "0xbc7878b1b2b3489a"]);
    off = header.clone();
    off.regions[1].offset = u64::MAX - 5;
    says(&refused(&off, &model()), &["region 1", "1006632960", "18446744073709551610"]);
}

#[test]
fn the_context_can_be_found() {
    let untold = ShareParams { n_ctx: None, ..params() };
    let header = Header::new(None, untold, &layout());
    let found = header.resolve(&model(), None, 1).unwrap();
    assert_eq!((found.n_ctx(), &found), (8192, &layout()));
    assert_eq!(header.resolve(&model(), Some(8192), 1).unwrap(), layout());
    says(&header.resolve(&model(), Some(256), 1).unwrap_err().to_string(), &["939524096", "29360128", "n_ctx 8192"]);

    let other = refused(&header, &dense(27, 1024));
    says(&other, &["no n_ctx", "1 of 939524096 bytes", "934281216 with n_ctx 8448", "962592768 with n_ctx 8704"]);
    let q4 = KvSpec { type_k: CacheType::Q4_0, type_v: CacheType::Q8_0, ..model() };
    let header = Header::new(None, ShareParams::default(), &ShareLayout::compute(&q4, 2048).unwrap());
    says(&refused(&header, &model()), &["no n_ctx", "K q4_0 and V q8_0"]);

    // Of rows so small that several contexts fill the same pages, the hash still tells.
    let tiny = KvSpec { type_k: CacheType::F16, ..dense(1, 1) };
    for n_ctx in [256, 512, 1024, 2048, 2304] {
        let want = ShareLayout::compute(&tiny, n_ctx).unwrap();
        let header = Header::new(None, untold, &want);
        assert_eq!(header.resolve(&tiny, None, 1).unwrap(), want);
    }
    // Where all layers have windows, nothing tells.
    let mut local = windowed(3, 64, 100);
    local.sections[0].layers.clear();
    let header = Header::new(None, untold, &ShareLayout::compute(&local, 4096).unwrap());
    let open = refused(&header, &local);
    says(&open, &["no n_ctx", "768", "1024", "tell which"]);
    assert!(header.resolve(&local, Some(4096), 1).is_ok());
}

#[test]
fn window_layers_in_either_size() {
    let spec = windowed(6, 64, 512);
    let full = KvSpec { swa_full: true, ..spec.clone() };
    for (decoder, ub) in [(&spec, 512), (&spec, 100), (&full, 512)] {
        let want = ShareLayout::compute_for(decoder, 8192, ub).unwrap();
        let header = Header::new(None, ShareParams { n_ubatch: Some(ub), ..params() }, &want);
        for ours in [&spec, &full] {
            assert_eq!(header.resolve(ours, None, 1).unwrap(), want);
        }
        let untold = Header { params: ShareParams { n_ctx: None, ..header.params }, ..header };
        assert_eq!(untold.resolve(&spec, None, 1).unwrap(), want);
    }
}

/// A header that lists its tensors, changed.
fn listed(change: impl Fn(&mut Header)) -> Result<ShareLayout, ShareRefusal> {
    let spec = dense(3, 64);
    let layout = ShareLayout::compute(&spec, 512).unwrap();
    let mut header = Header::new(None, ShareParams { n_ctx: Some(512), ..params() }, &layout).with_tensors(&layout);
    change(&mut header);
    header.resolve(&spec, None, header.regions.len())
}

#[test]
fn a_list_of_tensors_is_held_against_the_model() {
    let layout = listed(|_| ()).unwrap();
    let no = |change: fn(&mut Header, &mut Vec<HeaderTensor>)| {
        listed(|h| {
            let mut tensors = h.tensors.take().unwrap();
            change(h, &mut tensors);
            h.tensors = Some(tensors);
        })
        .unwrap_err()
        .to_string()
    };
    says(&no(|_, t| t[1].name = "cache_v_l3".into()), &["cache_v_l3", "layer", "3", "one of 3 up to 2"]);
    says(&no(|_, t| t[1].name = "cache_r_l0".into()), &["cache_r_l0", "no recurrent"]);
    says(&no(|_, t| t[1].name = "cache_k_l0".into()), &["cache_k_l0", "2 or more", "1 in the model"]);
    says(&no(|_, t| t[1].name = "V0".into()), &["V0", "cache_v_l<layer>"]);
    says(&no(|_, t| t[1].region = 1), &["cache_v_l0", "region is 1", "below 1"]);
    says(&no(|_, t| t[1].ty = CacheType::Bf16), &["cache_v_l0", "type is bf16", "f16"]);
    says(&no(|_, t| t[1].ne = [32, 512, 1, 1]), &["cache_v_l0", "[32, 512, 1, 1]", "[64, cells, 1, 1]"]);
    says(&no(|_, t| t[1].ne = [64, 512, 2, 1]), &["cache_v_l0", "[64, 512, 2, 1]"]);
    says(&no(|_, t| t[1].ne = [512, 64, 1, 1]), &["cache_v_l0", "[512, 64, 1, 1]"]);
    says(&no(|_, t| t[1].ne[1] = 256), &["cache_v_l0", "cells is 256", "512"]);
    says(&no(|_, t| t[0].ne[1] = 768), &["cache_k_l0", "cells is 768", "512"]);
    says(&no(|_, t| t[0].ne[1] = u64::MAX), &["cache_k_l0", "18446744073709551615", "2147483647"]);
    says(&no(|_, t| drop(t.remove(4))), &["lists 5 tensors", "cache_k_l2", "has 6"]);
    says(&no(|_, t| t.clear()), &["lists 0 tensors", "cache_k_l0", "has 6"]);
    says(&no(|_, t| t[5].offset += 1), &["cache_v_l2", "65536 bytes at 327681", "393216"]);
    says(&no(|_, t| t[5].offset = u64::MAX), &["cache_v_l2", "18446744073709551615", "393216"]);
    says(&no(|_, t| t[3].offset -= 1), &["overlap", "cache_k_l1 at 131072", "cache_v_l1 at 196607", "65536"]);
    says(&no(|_, t| t[2].offset = t[1].offset), &["overlap", "65536"]);
    says(&no(|h, _| h.regions[0].layout = 5), &["region 0", "0x0000000000000005", "list of tensors has 0x"]);
    says(&no(|h, _| h.regions[0].size -= 1), &["cache_v_l2", "393215"]);
    says(&no(|h, _| h.params.n_ctx = Some(1024)), &["cache_k_l0", "512", "1024"]);

    // It may lie anywhere, with gaps, in another order, over more regions, as long as the hashes are those of the list.
    let elsewhere = listed(|h| {
        h.regions[0].size += 100_000;
        let t = h.tensors.as_mut().unwrap();
        t[0].offset = layout.size() + 34_000;
        t.swap(0, 3);
    })
    .unwrap();
    assert_eq!(elsewhere.tensor(0, Part::K).unwrap().offset, layout.size() + 34_000);
    assert_eq!(elsewhere.tensors()[1..], layout.tensors()[1..]);
    let map = KvMap::shared(&dense(3, 64), &elsewhere, 100).unwrap();
    assert_eq!(map.windows().last().unwrap().0, 0);
    // The context comes from the list where nobody tells it.
    assert_eq!(listed(|h| h.params.n_ctx = None).unwrap(), layout);
}

#[test]
fn a_list_over_several_regions() {
    let spec = dense(4, 64);
    let one = ShareLayout::compute(&dense(2, 64), 256).unwrap();
    let mut header = Header::new(None, ShareParams::default(), &one).with_tensors(&one);
    header.regions.push(header.regions[0]);
    let mut more = header.tensors.clone().unwrap();
    for (t, name) in more.iter_mut().zip(["cache_k_l2", "cache_v_l2", "cache_k_l3", "cache_v_l3"]) {
        (t.name, t.region) = (name.into(), 1);
    }
    header.tensors.as_mut().unwrap().extend(more);
    let header = parse(&header.write());
    let layout = header.resolve(&spec, None, 2).unwrap();
    assert_eq!(layout.tensor(3, Part::V).unwrap().region, 1);
    assert_eq!(layout.tensor(3, Part::V).unwrap().offset, layout.tensor(1, Part::V).unwrap().offset);
    let text = header.write().replacen(",\"region\":0", "", 1);
    says(&bad(text.as_bytes()), &["tensors[0].region", "missing"]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_read(
        n_ctx in prop::option::of(1u32..1 << 20),
        layers in 1u32..40,
        width in 1u32..20,
        window in prop::option::of(1u32..2000),
        id in prop::option::of(any::<u64>()),
        list in any::<bool>(),
        offset in 0u64..1 << 40,
    ) {
        let spec = match window {
            Some(w) if layers > 2 => windowed(layers, width * 32, w),
            _ => dense(layers, width * 32),
        };
        let layout = ShareLayout::compute(&spec, n_ctx.unwrap_or(5000)).unwrap();
        let layout = layout.clone().at_offsets(&vec![offset; layout.regions().len()]);
        let mut header = Header::new(id, ShareParams { n_ctx, ..params() }, &layout);
        if list {
            header = header.with_tensors(&layout);
        }
        prop_assert_eq!(parse(&header.write()), header.clone());
        prop_assert_eq!(header.resolve(&spec, None, layout.regions().len()).unwrap(), layout);
    }

    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Header::parse(&bytes);
    }

    #[test]
    fn any_damage_is_survived(at in 0usize..2000, byte in any::<u8>(), cut in any::<bool>()) {
        let spec = dense(3, 64);
        let layout = ShareLayout::compute(&spec, 512).unwrap();
        let mut text = Header::new(Some(1), params(), &layout).with_tensors(&layout).write().into_bytes();
        let at = at % text.len();
        if cut { drop(text.drain(at..)) } else { text[at] = byte }
        if let Ok(header) = Header::parse(&text)
            && let Ok(found) = header.resolve(&spec, None, header.regions.len())
        {
            // Whatever was damaged then is nothing that decides where rows go.
            prop_assert_eq!(found.tensors(), layout.tensors());
        }
    }
}
