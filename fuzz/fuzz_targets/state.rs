//! State files of any bytes: an error that points into the file, or a state that is written as it was read and can be asked
//! everything.
#![no_main]

use kvlayout::faults::{Expect, check_bytes};
use kvlayout::{Part, Section, State, StateVersion, compare, read_version};
use libfuzzer_sys::fuzz_target;
use npu_prefill_fuzz::{check_message, models};

fuzz_target!(|data: &[u8]| {
    let mut expect = Expect {
        n_vocab: Some(1000),
        version: Some(StateVersion::V4),
        spec: Some(models()[1].clone()),
        n_ctx: Some(64),
        handoff: true,
        tokens: None,
    };
    let state = match State::parse(data) {
        Ok(state) => state,
        Err(e) => {
            check_message(&e);
            assert!(e.offset <= data.len() as u64, "{e}");
            assert!(!check_bytes(data, &expect).is_empty());
            return;
        }
    };
    assert_eq!(state.write(), data);
    assert_eq!(read_version(data).as_ref(), Ok(&state.version));
    let shape = state.shape();
    assert_eq!(State::parse_as(data, &shape).as_ref(), Ok(&state), "{shape:?}");

    for (section, layer, part) in state.tensors() {
        let t = state.tensor(section, layer, part).expect("a tensor that is listed");
        let cells = state.positions(section).len();
        let rows = state.rows_f32(section, layer, part).expect("the rows of a state that was read");
        assert_eq!(rows.len(), cells * t.width as usize);
        assert_eq!(matches!(state.sections[section], Section::Rec(_)), matches!(part, Part::R | Part::S));
    }
    assert_eq!(compare::structure(&state, &state), []);
    for e in compare::numeric(&state, &state).expect("a state and itself") {
        assert!(!format!("{e:?}").is_empty());
    }
    for fault in check_bytes(data, &expect) {
        check_message(&fault);
    }
    expect = Expect { tokens: Some(state.tokens.clone()), ..Expect::default() };
    for fault in check_bytes(data, &expect) {
        check_message(&fault);
    }
});
