//! What handing rows over costs: both routes' converting and writing, beside a plain copy of the same bytes. A measurement, so it
//! passes nothing and fails nothing; it is run by hand and on a quiet machine:
//!
//! ```text
//! NPU_PREFILL_TEST_MODEL=model.gguf cargo test --release -p npu-prefill --test write_cost -- --ignored --nocapture
//! ```

#[path = "../kvlayout/tests/memory/mod.rs"]
mod memory;

use std::ops::Range;
use std::time::{Duration, Instant};

use gguf::Gguf;
use kvlayout::{
    Alone, CacheType, Guard, Inherited, KvMap, KvSink, Mapping, Part, Regions, Rows, Scatter, ShareLayout, Spread,
    StateFile, StateVersion,
};
use prefill::{CacheParams, Hooks, Model, Options};

struct Silent;

impl Hooks for Silent {
    fn stop(&self) -> bool {
        false
    }
    fn progress(&mut self, _: usize, _: usize, _: usize, _: usize) {}
}

/// A second memory, into which the bytes of every piece are copied right after the sink has had its rows.
struct Beside<'a> {
    sink: &'a mut dyn KvSink,
    map: &'a KvMap,
    to: &'a mut [Mapping],
    bytes: Vec<u8>,
    copying: Duration,
}

impl KvSink for Beside<'_> {
    fn put_rows(
        &mut self,
        layer: u32,
        part: Part,
        positions: Range<u32>,
        rows: &[f32],
    ) -> Result<(), kvlayout::SinkError> {
        self.put_tensors(&[Rows { layer, part, positions, rows, largest: None }], &Alone)
    }
    fn put_tensors(&mut self, all: &[Rows<'_>], spread: &dyn Spread) -> Result<(), kvlayout::SinkError> {
        self.sink.put_tensors(all, spread)?;
        for Rows { layer, part, positions, .. } in all {
            let w = self.map.window(*layer, *part).unwrap();
            let len = positions.len() * w.row_bytes as usize;
            self.bytes.resize(self.bytes.len().max(len), 1);
            let started = Instant::now();
            let at = w.offset + u64::from(positions.start) * w.row_bytes;
            self.to[usize::from(w.region)].write(at, &self.bytes[..len])?;
            self.copying += started.elapsed();
        }
        Ok(())
    }
    fn wants(&self, layer: u32, part: Part) -> Range<u32> {
        self.sink.wants(layer, part)
    }
    fn touched(&self) -> bool {
        self.sink.touched()
    }
    fn commit(self: Box<Self>) -> Result<kvlayout::Receipt, kvlayout::SinkError> {
        unreachable!("the sink inside is committed")
    }
}

fn ms(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

#[test]
#[ignore = "a measurement, of a model that has to be named"]
fn write_cost() {
    let path = std::env::var_os("NPU_PREFILL_TEST_MODEL").expect("NPU_PREFILL_TEST_MODEL names a model");
    let gguf = Gguf::open(&path).unwrap();
    let model = Model::load(&gguf).unwrap();
    let ty = CacheType::F16;
    let cache = CacheParams {
        type_k: ty,
        type_v: ty,
        v_trans: false,
        swa_full: true,
        n_stream: 1,
        n_ctx: None,
        attn_rot: true,
    };
    let spec = model.kv_spec(&cache).unwrap();
    let options = Options::default();
    println!("tokens      MB  prefill ms | shared ms  file ms | copy of pieces ms  of all ms | copy/shared");
    for n in [128u32, 1024, 8192] {
        let tokens: Vec<u32> = (0..n).map(|i| i * 7919 % model.n_vocab()).collect();
        let layout = ShareLayout::compute(&spec, n + 1).unwrap();
        let map = KvMap::shared(&spec, &layout, n).unwrap();
        let memory = || -> Vec<Inherited> {
            let make = |r: &kvlayout::ShareRegion| memory::View::new(memory::make(memory::Kind::Memfd, r.size));
            // A decoder's memory has been cleared by it.
            let filled = |v: memory::View| {
                v.fill(0);
                Inherited::from_owned(rustix::io::dup(&v).unwrap()).unwrap()
            };
            layout.regions().iter().map(make).map(filled).collect()
        };

        let fds = memory();
        let whole = |fd: &Inherited| Mapping::new(fd, 0, fd.len()).unwrap();
        let mut to: Vec<Mapping> = fds.iter().map(whole).collect();
        // Mapped before it is measured, as the writer's own is.
        to.iter_mut().for_each(|m| m.write(0, &vec![0; m.len() as usize]).unwrap());
        let regions = Regions::map(memory(), &layout, &map, Guard::open()).unwrap();
        let mut scatter = Box::new(Scatter::new(map.clone(), regions).unwrap());
        let mut beside =
            Beside { sink: scatter.as_mut(), map: &map, to: &mut to, bytes: Vec::new(), copying: Duration::ZERO };
        let timings = prefill::run(&model, &tokens, &options, &mut beside, &mut Silent).unwrap();
        let pieces = ms(beside.copying);
        let started = Instant::now();
        let bytes = scatter.commit().unwrap().bytes;
        let shared = timings.write_ms - pieces + ms(started.elapsed());

        // All at once, from memory that no cache holds any more.
        let source = vec![1u8; bytes as usize];
        let all = (0..3).map(|_| {
            let started = Instant::now();
            let mut at = 0;
            for (_, _, w) in map.windows() {
                let len = w.len() as usize;
                to[usize::from(w.region)].write(w.offset, &source[at..at + len]).unwrap();
                at += len;
            }
            ms(started.elapsed())
        });
        let all = all.fold(f64::INFINITY, f64::min);

        let dir = tempfile::tempdir().unwrap();
        let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
        let state = KvMap::state_file(&spec, &ids, StateVersion::V3).unwrap();
        let out = StateFile::create(&dir.path().join("state.bin"), state.size()).unwrap();
        let mut sink = Box::new(Scatter::new(state, out).unwrap());
        let file = prefill::run(&model, &tokens, &options, sink.as_mut(), &mut Silent).unwrap().write_ms;
        let started = Instant::now();
        sink.commit().unwrap();
        let file = file + ms(started.elapsed());

        println!(
            "{n:6}  {:6.1}  {:10.0} | {shared:9.2}  {file:7.1} | {pieces:17.2}  {all:9.2} | {:.2} {:.2}",
            bytes as f64 / 1e6,
            timings.prefill_ms - pieces,
            pieces / shared,
            all / shared
        );
    }
}
