//! The header of a shared memory from anybody: an error on one line, or a header that is written and read back the same; and
//! where it is taken for one of a model, a layout in which no row can go astray.
//!
//! The first byte chooses the model and what it is held against; the others are the file. Nobody guesses a 64-bit hash, so
//! that two of the choices put right what else would end every attempt.
#![no_main]

use kvlayout::{HEADER_MAX, Header, HeaderError, Part, ShareLayout, ShareRefusal, ShareTensor};
use libfuzzer_sys::{Corpus, fuzz_target};
use npu_prefill_fuzz::{CONTEXTS, check_layout, check_map, check_message, hash, models};

fuzz_target!(|data: &[u8]| -> Corpus {
    let Some((&choice, file)) = data.split_first() else { return Corpus::Reject };
    let mut header = match Header::parse(file) {
        Ok(header) => header,
        Err(e) => {
            check_message(&e);
            return Corpus::Keep;
        }
    };
    let text = header.write();
    match Header::parse(text.as_bytes()) {
        Ok(back) => assert_eq!(back, header),
        // Written out in full it may be longer than it was.
        Err(e) => {
            let too_large = matches!(e, HeaderError::TooLarge { .. });
            assert!(too_large && text.len() as u64 > HEADER_MAX, "{e}: {text}");
        }
    }

    let spec = &models()[usize::from(choice & 3)];
    let n_ctx = CONTEXTS[usize::from(choice >> 2 & 3)];
    match choice >> 4 & 3 {
        // As it is.
        0 => {}
        // The regions are those that the model has in a context.
        1 => {
            let n_ctx = header.params.n_ctx.or(n_ctx).unwrap_or(8192);
            let n_ubatch = header.params.n_ubatch.unwrap_or(512);
            if let Ok(layout) = ShareLayout::compute_for(spec, n_ctx, n_ubatch) {
                let offsets: Vec<u64> = header.regions.iter().map(|r| r.offset).collect();
                header.regions = layout.at_offsets(&offsets).regions().to_vec();
            }
        }
        // The hashes are those of the list.
        2 => {
            let list = header.tensors.as_deref().unwrap_or_default();
            for (i, r) in header.regions.iter_mut().enumerate() {
                let here: Vec<ShareTensor> = list
                    .iter()
                    .filter(|t| usize::from(t.region) == i)
                    .map(|t| ShareTensor {
                        layer: 0,
                        part: Part::K,
                        section: 0,
                        region: t.region,
                        offset: t.offset,
                        ty: t.ty,
                        ne: t.ne,
                    })
                    .collect();
                r.layout = hash(&here);
            }
        }
        // A descriptor too many.
        _ => {
            let e = header.resolve(spec, n_ctx, header.regions.len() + 1).expect_err("a descriptor too many");
            assert!(matches!(e, ShareRefusal::Fds { .. }), "{e}");
        }
    }

    match header.resolve(spec, n_ctx, header.regions.len()) {
        Ok(layout) => {
            assert_eq!(layout.regions(), header.regions);
            check_layout(spec, &layout);
            for t in header.tensors.iter().flatten() {
                let there = |o: &&ShareTensor| (o.region, o.offset, o.ty, o.ne) == (t.region, t.offset, t.ty, t.ne);
                assert_eq!(layout.tensors().iter().find(there).map(ShareTensor::name).as_ref(), Some(&t.name));
            }
            let cells = layout.cells() as u32;
            for n in [1, cells - 1, cells] {
                check_map(spec, &layout, n);
            }
        }
        Err(e) => check_message(&e),
    }
    Corpus::Keep
});
