//! The layout of a shared memory for any model and context: refused exactly where it must be, and otherwise every byte as
//! the rules say. Then a header of it, the map of a prompt in it, and the state file taken out of it.
#![no_main]

use arbitrary::Arbitrary;
use kvlayout::faults::{Expect, check};
use kvlayout::{Header, Shape, ShareLayout, ShareParams, ShareRefusal, State, StateVersion};
use libfuzzer_sys::fuzz_target;
use npu_prefill_fuzz::{Memory, can_be, check_computed, check_map, check_message};

#[derive(Arbitrary, Debug)]
struct Input {
    memory: Memory,
    n_tokens: u32,
    few: u8,
    offsets: Vec<u64>,
    listed: bool,
    version: u8,
}

fuzz_target!(|input: Input| {
    let Input { memory, n_tokens, few, offsets, listed, version } = input;
    let Memory { spec, n_ctx, n_ubatch } = &memory;
    let layout = match ShareLayout::compute_for(spec, *n_ctx, *n_ubatch) {
        Ok(layout) => layout,
        Err(e) => {
            check_message(&e);
            return assert!(!can_be(&memory), "{e}");
        }
    };
    assert!(can_be(&memory), "a layout of what cannot be");
    check_computed(&memory, &layout);
    assert!(!layout.to_string().is_empty());

    let cells = layout.cells() as u32;
    for n in [0, 1, n_tokens, n_tokens % cells, cells - 1, cells, u32::MAX] {
        check_map(spec, &layout, n);
    }

    header(&memory, &layout, &offsets, listed);

    // The rows of a small memory, taken out as a state file.
    let n = usize::from(few).min(64);
    let width = layout.tensors().iter().map(|t| t.row_bytes()).sum::<u64>();
    let tokens: Vec<i32> = (0..n as i32).map(|i| i * 7 % 50).collect();
    let version = StateVersion::ALL[usize::from(version) % 3];
    if width > 1 << 16 {
        return;
    }
    let file = layout.to_state_file(spec, &tokens, version, |region, at, bytes| {
        let size = layout.regions()[usize::from(region)].size;
        assert!(at + bytes.len() as u64 <= size, "{} bytes at {at} of {size}", bytes.len());
        // In all types this is a number.
        bytes.fill(0x3c);
        Ok(())
    });
    assert_eq!(file.is_ok(), n > 0 && n < cells as usize && !spec.v_trans, "{file:?}");
    if let Ok(bytes) = file {
        let state = State::parse_as(&bytes, &Shape::from(spec)).expect("the file of the memory's rows");
        assert_eq!(state.write(), bytes);
        let (tokens, spec) = (Some(tokens), Some(spec.clone()));
        // A decoder's context is rounded up like its cells.
        let n_ctx = Some(cells);
        let expect = Expect { tokens, version: Some(version), spec, handoff: true, n_vocab: Some(50), n_ctx };
        let faults = check(&state, &expect);
        assert!(faults.is_empty(), "{faults:?}");
    }
});

/// A decoder with this memory that says so, in either way, is understood.
fn header(memory: &Memory, layout: &ShareLayout, offsets: &[u64], listed: bool) {
    let Memory { spec, n_ctx, n_ubatch } = memory;
    let layout = layout.clone().at_offsets(offsets);
    let fds = layout.regions().len();
    let params = ShareParams {
        n_ctx: Some(*n_ctx),
        n_ubatch: Some(*n_ubatch),
        type_k: Some(spec.type_k),
        type_v: Some(spec.type_v),
        ..ShareParams::default()
    };
    let mut header = Header::new(Some(1), params, &layout);
    if listed {
        header = header.with_tensors(&layout);
    }
    let positive = |n: u32| (1..=i32::MAX as u32).contains(&n);
    let text = header.write();
    match Header::parse(text.as_bytes()) {
        Ok(back) => assert_eq!(back, header),
        Err(e) => assert!(!positive(*n_ctx) || !positive(*n_ubatch), "{e}\n{text}"),
    }
    let ends = layout.regions().iter().all(|r| r.end().is_some());
    match header.resolve(spec, Some(*n_ctx), fds) {
        Ok(found) => assert_eq!(found, layout),
        Err(e) => {
            check_message(&e);
            assert!(spec.v_trans || !ends, "{e}");
            return;
        }
    }
    assert!(matches!(header.resolve(spec, None, fds + 1), Err(ShareRefusal::Fds { .. })));
    header.params.n_ctx = None;
    match header.resolve(spec, None, fds) {
        Ok(found) => assert_eq!(found, layout),
        // Where rows are tiny, or all layers have a window, contexts cannot be told apart.
        Err(e) => assert!(matches!(e, ShareRefusal::Contexts { .. }), "{e}"),
    }
}
