//! The shared route: rows in memory that somebody else holds and will read without looking. Every byte of that memory is looked
//! at here: the rows are those of the file route bit for bit, nothing else changes, what is refused changes nothing at all, and
//! what is stopped stays as it was when it stopped.
//!
//! The memory is of every kind that this machine has. `tests/vm/run.sh` boots one that has real dma-bufs, and runs the tests of
//! [`any_memory`] there: all others would be the same.

mod common;
#[path = "../kvlayout/tests/memory/mod.rs"]
mod memory;

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{BIN, Ran, Random, Scene, model, program};
use kvlayout::{CacheType, Header, KvSection, KvSpec, LayerKv, Part, Section, ShareLayout, ShareParams, State};
use memory::{END, Kind, View, WRITE};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::{Value, json};

/// What stands in the memory before, which no row of zeros or small numbers looks like.
const PATTERN: u8 = 0xa5;
/// A descriptor number that is never open here.
const CLOSED: &str = "3999";

/// The memory of a decoder of the model of [`Scene`], with a pattern in it and the header that describes it.
struct Decoder {
    layout: ShareLayout,
    header: PathBuf,
    views: Vec<View>,
}

fn spec(n_layer: u32, ty: CacheType) -> KvSpec {
    let layers = (0..n_layer).map(|layer| LayerKv { layer, n_embd_k: 32, n_embd_v: 32 }).collect();
    let sections = vec![KvSection { layers, window: None, n_rot: (0, 0) }];
    let (v_trans, cell_ext, swa_full) = (false, false, false);
    KvSpec { sections, recurrent: None, type_k: ty, type_v: ty, v_trans, cell_ext, swa_full, n_stream: 1 }
}

fn params(n_ctx: u32, ty: CacheType) -> ShareParams {
    ShareParams {
        n_ctx: Some(n_ctx),
        n_batch: Some(2048),
        n_ubatch: Some(512),
        flash_attn: Some(true),
        type_k: Some(ty),
        type_v: Some(ty),
    }
}

/// FNV of types and shapes, as the layout defines it.
fn hash(tensors: &[(u32, [u64; 4])]) -> u64 {
    let words = tensors.iter().flat_map(|(ty, ne)| [&[u64::from(*ty)], &ne[..]].concat());
    words.fold(1_469_598_103_934_665_603, |h, v| (h ^ v).wrapping_mul(1_099_511_628_211))
}

impl Decoder {
    /// Of the model with two layers.
    fn new(scene: &Scene) -> Decoder {
        Decoder::with(scene, most_real(), 2, 512, 0)
    }

    fn with(scene: &Scene, kind: Kind, n_layer: u32, n_ctx: u32, offset: u64) -> Decoder {
        let layout = ShareLayout::compute(&spec(n_layer, CacheType::F16), n_ctx).unwrap().at_offsets(&[offset]);
        let header = Header::new(Some(7), params(n_ctx, CacheType::F16), &layout);
        Decoder::of(scene, kind, layout, &header.write())
    }

    fn of(scene: &Scene, kind: Kind, layout: ShareLayout, header: &str) -> Decoder {
        let path = scene.path("header.json");
        std::fs::write(&path, header).unwrap();
        let view = |r: &kvlayout::ShareRegion| {
            let view = View::new(memory::make(kind, r.end().unwrap()));
            view.fill(PATTERN);
            view
        };
        let views = layout.regions().iter().map(view).collect();
        Decoder { layout, header: path, views }
    }

    /// The program's command line, and the descriptors that it inherits: to be kept until it has been started.
    fn command(&self, scene: &Scene) -> (Command, Vec<OwnedFd>) {
        let fds: Vec<OwnedFd> = self.views.iter().map(inheritable).collect();
        let mut c = program();
        c.arg("--tokens").arg(&scene.ids).arg("--model").arg(&scene.model);
        c.arg("--layout").arg(&self.header).arg("--fds").arg(numbers(&fds));
        (c, fds)
    }

    fn run(&self, scene: &Scene, more: &[&str]) -> Ran {
        let (mut c, _fds) = self.command(scene);
        Ran::from(c.args(more).output().unwrap())
    }

    fn start(&self, scene: &Scene, more: &[&str]) -> Child {
        let (mut c, _fds) = self.command(scene);
        c.args(more).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn bytes(&self) -> Vec<Vec<u8>> {
        self.views.iter().map(View::bytes).collect()
    }

    fn is_untouched(&self) -> bool {
        self.bytes().iter().flatten().all(|&b| b == PATTERN)
    }

    /// Whether a row of the first tensor is there.
    fn has_begun(&self) -> bool {
        let t = &self.layout.tensors()[0];
        let at = (self.layout.regions()[0].offset + t.offset) as usize;
        self.views[0].read(at, t.row_bytes() as usize).iter().any(|&b| b != PATTERN)
    }

    /// What the whole memory must be when it holds the rows of a state.
    fn filled_with(&self, state: &State) -> Vec<Vec<u8>> {
        let Section::Kv(kv) = &state.sections[0] else { panic!("{:?}", state.sections[0]) };
        let mut all: Vec<Vec<u8>> = self.views.iter().map(|v| vec![PATTERN; v.len()]).collect();
        for t in self.layout.tensors() {
            let tensors = if t.part == Part::K { &kv.streams[0].k } else { &kv.streams[0].v };
            let rows = &tensors[t.layer as usize].data;
            let region = usize::from(t.region);
            let at = (self.layout.regions()[region].offset + t.offset) as usize;
            all[region][at..at + rows.len()].copy_from_slice(rows);
        }
        all
    }

    /// Checks that the memory holds the rows of the scene's state file and is otherwise as before.
    #[track_caller]
    fn holds(&self, scene: &Scene) {
        let want = self.filled_with(&scene.state());
        for (i, (found, want)) in self.bytes().iter().zip(&want).enumerate() {
            let differs = found.iter().zip(want).position(|(a, b)| a != b);
            assert!(found.len() == want.len() && differs.is_none(), "region {i} differs at byte {differs:?}");
        }
    }

    /// Checks a refusal: the exit status, what is said, and that no byte was written.
    #[track_caller]
    fn refuses(&self, scene: &Scene, more: &[&str], code: i32, says: &str) {
        self.run(scene, more).failed(code, says);
        assert!(self.is_untouched(), "written to, although refused: {says}");
    }
}

/// A dma-buf where there are any, else a memory file.
fn most_real() -> Kind {
    memory::available().pop().unwrap()
}

/// A duplicate that a child inherits.
fn inheritable(fd: impl AsFd) -> OwnedFd {
    rustix::io::dup(fd).unwrap()
}

fn numbers(fds: &[OwnedFd]) -> String {
    fds.iter().map(|fd| fd.as_raw_fd().to_string()).collect::<Vec<_>>().join(",")
}

/// The file route's state of the same prompt.
fn file_route(scene: &Scene, more: &[&str]) {
    scene.run(&[&["--state-version", "3"], more].concat()).receipt();
}

// Handoffs that are made.

/// The header says how large it is, so nobody else has to.
#[test]
fn rotations_are_those_of_the_headers_context() {
    let scene = Scene::new(100);
    common::model_by_context().write(&scene.model).unwrap();
    let mut found = Vec::new();
    for n_ctx in [512, 1024] {
        let decoder = Decoder::with(&scene, most_real(), 2, n_ctx, 0);
        decoder.run(&scene, &[]).receipt();
        file_route(&scene, &["-c", &n_ctx.to_string()]);
        decoder.holds(&scene);
        found.push(scene.state());
    }
    assert!(found[0] != found[1]);
    // Where it does not say, somebody else has to.
    let layout = ShareLayout::compute(&spec(2, CacheType::F16), 1024).unwrap();
    let silent = ShareParams { n_ctx: None, ..params(1024, CacheType::F16) };
    let decoder = Decoder::of(&scene, most_real(), layout.clone(), &Header::new(Some(7), silent, &layout).write());
    decoder.refuses(&scene, &[], 69, "--ctx-size");
    decoder.run(&scene, &["-c", "1024"]).receipt();
    decoder.holds(&scene);
}

#[test]
fn chunks_threads_and_kernels_put_rows_where_they_belong() {
    let scene = Scene::new(150);
    for more in [&["--chunk", "1"][..], &["--chunk", "7", "-t", "3"], &["--chunk", "149", "--isa", "scalar"]] {
        file_route(&scene, more);
        let decoder = Decoder::new(&scene);
        assert_eq!(decoder.run(&scene, more).receipt()["regions"], 1);
        decoder.holds(&scene);
    }
}

#[test]
fn rows_from_a_device_are_the_same_by_both_routes() {
    let scene = Scene::new(150);
    let decoder = Decoder::new(&scene);
    let kernels = scene.kernels();
    let device = ["--device", "oracle", "--elfs", kernels.to_str().unwrap()];
    file_route(&scene, &device);
    let receipt = decoder.run(&scene, &device).receipt();
    assert!(receipt["device"] == "oracle" && receipt["offload"]["launches"].as_u64() > Some(0), "{receipt}");
    decoder.holds(&scene);
}

#[test]
fn rows_that_come_through_xrt_are_the_same_by_both_routes() {
    let scene = Scene::new(150);
    let decoder = Decoder::new(&scene);
    let kernels = common::sim_kernels();
    let (mut command, _fds) = decoder.command(&scene);
    command.args(["--device", "sim", "--elfs"]).arg(&kernels);
    let Some(mut command) = common::over_the_double(&command, &[], &[]) else { return };
    let receipt = Ran::from(command.output().unwrap()).receipt();
    assert!(receipt["device"] == "sim" && receipt["offload"]["launches"].as_u64() > Some(0), "{receipt}");
    // The oracle's are the same bits (tests/sim.rs).
    file_route(&scene, &["--device", "oracle", "--elfs", kernels.to_str().unwrap()]);
    decoder.holds(&scene);
}

#[test]
fn types_are_the_headers_unless_somebody_says() {
    let scene = Scene::new(20);
    for ty in [CacheType::F32, CacheType::Bf16, CacheType::F16] {
        let layout = ShareLayout::compute(&spec(2, ty), 256).unwrap();
        let told = Header::new(None, params(256, ty), &layout).write();
        let silent = Header::new(None, ShareParams::default(), &layout).write();
        let name = ty.to_string();
        let same = ["-ctk", &name, "-ctv", &name];
        file_route(&scene, &same);
        for (header, more) in [(&told, &[][..]), (&told, &same), (&silent, &same)] {
            let decoder = Decoder::of(&scene, Kind::Memfd, layout.clone(), header);
            let receipt = decoder.run(&scene, more).receipt();
            assert_eq!((&receipt["cache_type_k"], &receipt["cache_type_v"]), (&json!(name), &json!(name)));
            assert!(receipt.get("share_id").is_none());
            decoder.holds(&scene);
        }
    }
}

#[test]
fn every_form_of_a_header() {
    let scene = Scene::new(30);
    file_route(&scene, &[]);
    let layout = ShareLayout::compute(&spec(2, CacheType::F16), 512).unwrap();
    let (size, hash) = (layout.regions()[0].size, layout.regions()[0].layout);
    let plain = json!({"params": {"n_ctx": 512, "flash_attn": true, "type_k": "f16", "type_v": "f16"},
        "regions": [{"offset": 0, "size": size, "layout": hash}]});
    let change = |key: &str, value: Value| {
        let mut v = plain.clone();
        v[key] = value;
        v.to_string().into_bytes()
    };
    let plain_text = plain.to_string().into_bytes();
    let forms: Vec<(&str, Vec<u8>)> = vec![
        ("plain", plain_text.clone()),
        ("with a length", [&(plain_text.len() as u32).to_le_bytes()[..], &plain_text].concat()),
        ("strings", change("regions", json!([{"size": size.to_string(), "layout": format!("{hash:#x}")}]))),
        ("no n_ctx", change("params", json!({}))),
        ("share_id and more", change("share_id", json!(u64::MAX))),
        ("unknown keys", change("kv_unified", json!({"a": [1, 2]}))),
        (
            "flat",
            json!({"n_ctx": 500, "type_k": 1, "type_v": "f16", "regions": plain["regions"]}).to_string().into_bytes(),
        ),
        ("tensors", Header::new(None, params(512, CacheType::F16), &layout).with_tensors(&layout).write().into_bytes()),
    ];
    for (what, bytes) in forms {
        let decoder = Decoder::of(&scene, Kind::Memfd, layout.clone(), "");
        std::fs::write(&decoder.header, bytes).unwrap();
        let ran = decoder.run(&scene, &[]);
        assert_eq!(ran.code, Some(0), "{what}: {ran:?}");
        decoder.holds(&scene);
    }
    // A context that somebody says stands in for the header's.
    let decoder = Decoder::of(&scene, Kind::Memfd, layout, "");
    std::fs::write(&decoder.header, change("params", json!({}))).unwrap();
    decoder.run(&scene, &["-c", "512"]).receipt();
    decoder.holds(&scene);
}

/// The parts of a header with a region for the keys and one for the values, in an order of their own.
fn two_regions() -> (ShareLayout, Value) {
    let plain = ShareLayout::compute(&spec(2, CacheType::F16), 512).unwrap();
    let ne = [32, 512, 1, 1];
    let (tensor, hash) = (32 * 2 * 512u64, hash(&[(1, ne), (1, ne)]));
    let regions = json!([{"offset": 8192, "size": 3 * tensor, "layout": hash}, {"size": 2 * tensor, "layout": hash}]);
    let list = [("cache_k_l0", 0, 2 * tensor), ("cache_v_l0", 1, 0), ("cache_k_l1", 0, 64), ("cache_v_l1", 1, tensor)];
    let tensors: Vec<Value> = list
        .iter()
        .map(
            |(name, region, offset)| json!({"name": name, "region": region, "offset": offset, "type": "f16", "ne": ne}),
        )
        .collect();
    let header = json!({"share_id": "0x10", "params": {"n_ctx": 512}, "regions": regions, "tensors": tensors});
    let parsed = Header::parse(header.to_string().as_bytes()).unwrap();
    let layout = parsed.resolve(&spec(2, CacheType::F16), None, 2).unwrap();
    assert_ne!(layout, plain);
    (layout, header)
}

#[test]
fn a_memory_of_gigabytes_is_written_where_it_is_needed() {
    // 2^23 cells of 64 bytes: two tensors are a whole chunk. The memory is sparse, and so is what is mapped.
    let scene = Scene::new(20);
    file_route(&scene, &[]);
    let layout = ShareLayout::compute(&spec(2, CacheType::F16), 1 << 23).unwrap();
    assert_eq!(layout.regions().iter().map(|r| r.size).collect::<Vec<_>>(), [1 << 30; 2]);
    let header = scene.path("header.json");
    std::fs::write(&header, Header::new(None, ShareParams::default(), &layout).write()).unwrap();
    let views = [0, 1].map(|_| View::new(memory::make(Kind::Memfd, 1 << 30)));
    let fds = views.each_ref().map(inheritable);
    let mut c = program();
    c.arg("--tokens").arg(&scene.ids).arg("--model").arg(&scene.model);
    c.arg("--layout").arg(&header).arg("--fds").arg(numbers(&fds));
    let receipt = Ran::from(c.output().unwrap()).receipt();
    assert!(receipt["peak_rss_bytes"].as_u64().unwrap() < 256 << 20, "{receipt}");
    let Section::Kv(kv) = &scene.state().sections[0] else { panic!() };
    for t in layout.tensors() {
        let tensors = if t.part == Part::K { &kv.streams[0].k } else { &kv.streams[0].v };
        let rows = &tensors[t.layer as usize].data;
        let found = views[usize::from(t.region)].read(t.offset as usize, rows.len() + 4096);
        assert!(found[..rows.len()] == rows[..] && found[rows.len()..].iter().all(|&b| b == 0));
    }
    // No page that no row is on has come into being: 20 rows of 4 tensors.
    let blocks: u64 = views.iter().map(|v| rustix::fs::fstat(v).unwrap().st_blocks as u64 * 512).sum();
    assert!(blocks <= 64 << 10, "{blocks} bytes");
}

#[test]
fn a_plain_file_will_do_and_the_position_stays() {
    use std::io::{Seek, SeekFrom};
    let scene = Scene::new(25);
    file_route(&scene, &[]);
    let decoder = Decoder::new(&scene);
    let path = scene.path("memory");
    std::fs::write(&path, vec![PATTERN; decoder.views[0].len()]).unwrap();
    let mut file = File::options().read(true).write(true).open(&path).unwrap();
    file.seek(SeekFrom::Start(77)).unwrap();
    let fds = [inheritable(&file)];
    let mut c = program();
    c.arg("--tokens").arg(&scene.ids).arg("--model").arg(&scene.model);
    c.arg("--layout").arg(&decoder.header).arg("--fds").arg(numbers(&fds));
    Ran::from(c.output().unwrap()).receipt();
    assert!(std::fs::read(&path).unwrap() == decoder.filled_with(&scene.state())[0]);
    assert_eq!(file.stream_position().unwrap(), 77);
}

#[test]
fn memory_that_could_shrink_is_warned_of() {
    let scene = Scene::new(5);
    let decoder = Decoder::new(&scene);
    let open = memory::unsealed(decoder.views[0].len() as u64);
    let fds = [inheritable(&open)];
    let mut c = program();
    c.arg("--tokens").arg(&scene.ids).arg("--model").arg(&scene.model);
    c.arg("--layout").arg(&decoder.header).arg("--fds").arg(numbers(&fds));
    let ran = Ran::from(c.output().unwrap());
    ran.receipt();
    assert!(ran.stderr.contains("not sealed against shrinking"), "{ran:?}");
}

#[test]
fn closed_streams_change_nothing() {
    let scene = Scene::new(30);
    file_route(&scene, &[]);
    for redirect in [">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full", "2>&1 | true"] {
        let decoder = Decoder::new(&scene);
        let (plain, fds) = decoder.command(&scene);
        let script = format!("{{ \"$@\"; echo $? >\"$0\"; }} {redirect}");
        let status = scene.path("status");
        let mut c = Command::new("/bin/sh");
        c.args(["-c", &script]).arg(&status).arg(BIN).args(plain.get_args());
        c.output().unwrap();
        drop(fds);
        assert_eq!(std::fs::read_to_string(&status).unwrap().trim(), "0", "{redirect}");
        decoder.holds(&scene);
    }
}

#[test]
fn the_layout_command_is_the_decoders_header() {
    let scene = Scene::new(10);
    file_route(&scene, &[]);
    let layout = |more: &[&str]| {
        let mut c = program();
        c.args(["layout", "--model"]).arg(&scene.model).args(more);
        Ran::from(c.output().unwrap())
    };
    let ran = layout(&["-c", "512", "--json"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{ran:?}");
    let parsed = Header::parse(ran.stdout.as_bytes()).unwrap();
    let want = ShareLayout::compute(&spec(2, CacheType::F16), 512).unwrap();
    assert_eq!(parsed.regions, want.regions());
    assert_eq!(parsed.resolve(&spec(2, CacheType::F16), None, 1).unwrap(), want);
    // It is a header as it stands.
    let decoder = Decoder::of(&scene, Kind::Memfd, want.clone(), &ran.stdout);
    decoder.run(&scene, &[]).receipt();
    decoder.holds(&scene);

    let text = layout(&["-c", "512"]).stdout;
    let hash = format!("{:#018x}", want.regions()[0].layout);
    for word in [
        "n_ctx 512",
        "4 tensors",
        &want.regions()[0].size.to_string(),
        &hash,
        "cache_k_l0",
        "cache_v_l1",
        "[32, 512, 1, 1]",
    ] {
        assert!(text.contains(word), "no {word:?} in {text}");
    }
    assert!(layout(&["-ctk", "f32", "-ub", "64"]).stdout.starts_with("n_ctx 4096, n_ubatch 64, K f32, V f16"));
    layout(&["-fa", "off"]).failed(76, "-fa on");
    layout(&["--n-stream", "2"]).failed(76, "2 streams");
    layout(&["-ub", "0"]).failed(2, "");
    layout(&["-c", "4294967295"]).failed(76, "4294967295");
}

// Refusals. Nothing is written in any of them.

#[test]
fn usage() {
    let scene = Scene::new(5);
    let decoder = Decoder::new(&scene);
    let (plain, _fds) = decoder.command(&scene);
    let args: Vec<OsString> = plain.get_args().map(Into::into).collect();
    decoder.refuses(&scene, &["--out", "x.bin"], 2, "one of them");
    decoder.refuses(&scene, &["--what"], 2, "--what");
    decoder.refuses(&scene, &["--layout", "again"], 2, "--layout");
    for missing in ["--layout", "--fds", "--tokens", "--model"] {
        let i = args.iter().position(|a| a == missing).unwrap();
        let rest = args.iter().enumerate().filter(|(j, _)| *j != i && *j != i + 1).map(|(_, a)| a);
        Ran::from(program().args(rest).output().unwrap()).failed(2, missing);
    }
    for list in ["", ",", "3,", "x", "-1", "0x3", "3.0", "99999999999999999999", "3 4", "+3"] {
        with_fds(&scene, &decoder, list).failed(2, "is not a list of descriptor numbers");
    }
    assert!(decoder.is_untouched());
    assert_eq!(scene.left(), [""; 0]);
}

/// A run with this list of descriptors instead of the right one.
fn with_fds(scene: &Scene, decoder: &Decoder, list: &str) -> Ran {
    let mut c = program();
    c.arg("--tokens").arg(&scene.ids).arg("--model").arg(&scene.model);
    c.arg("--layout").arg(&decoder.header).arg("--fds").arg(list);
    Ran::from(c.output().unwrap())
}

#[test]
fn descriptors_that_are_none() {
    let scene = Scene::new(5);
    let decoder = Decoder::new(&scene);
    let size = decoder.views[0].len() as u64;
    let good = inheritable(&decoder.views[0]);
    let number = good.as_raw_fd().to_string();

    with_fds(&scene, &decoder, CLOSED).failed(66, "is not open");
    with_fds(&scene, &decoder, &format!("{number},{CLOSED}")).failed(66, "is not open");
    with_fds(&scene, &decoder, &format!("{number},{number}")).failed(76, "is given as number 0 and as number 1");
    for standard in ["0", "1", "2"] {
        with_fds(&scene, &decoder, standard).failed(76, "standard stream");
    }
    let many: Vec<String> = (10..300).map(|n| n.to_string()).collect();
    with_fds(&scene, &decoder, &many.join(",")).failed(76, "290 descriptors");
    // One too many, and the same memory by two numbers.
    let again = inheritable(&decoder.views[0]);
    with_fds(&scene, &decoder, &format!("{number},{}", again.as_raw_fd())).failed(76, "1 regions, but 2 descriptors");

    let (reader, writer) = std::io::pipe().unwrap();
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let sealed = memory::memfd(size);
    rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::WRITE).unwrap();
    let path = scene.path("memory");
    std::fs::write(&path, vec![PATTERN; size as usize]).unwrap();
    let short = memory::memfd(size - 1);
    let wrong: Vec<(OwnedFd, &str)> = vec![
        (inheritable(&reader), "a pipe"),
        (inheritable(&writer), "a pipe"),
        (inheritable(&socket), "a socket"),
        (inheritable(File::open(scene.dir.path()).unwrap()), "a directory"),
        (inheritable(File::options().read(true).write(true).open("/dev/null").unwrap()), "a character device"),
        (inheritable(rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap()), "an event source"),
        (inheritable(&sealed), "sealed against writing"),
        (inheritable(File::open(&path).unwrap()), "for reading only"),
        (inheritable(File::options().write(true).open(&path).unwrap()), "for writing only"),
        (
            inheritable(&short),
            &format!(
                "region 0: {size} bytes at 0 do not lie inside descriptor FD, which is a memory file of {}",
                size - 1
            ),
        ),
    ]
    .into_iter()
    .map(|(fd, says)| (fd, &*says.to_owned().leak()))
    .collect();
    for (fd, says) in wrong {
        let number = fd.as_raw_fd().to_string();
        with_fds(&scene, &decoder, &number).failed(76, &says.replace("FD", &number));
    }
    assert!(std::fs::read(&path).unwrap().iter().all(|&b| b == PATTERN));
    assert!(View::new(&short).bytes().iter().all(|&b| b == 0));
    assert!(decoder.is_untouched());
}

#[test]
fn regions_that_are_too_short_or_overlap() {
    let scene = Scene::new(5);
    let (layout, header) = two_regions();
    let decoder = Decoder::of(&scene, Kind::Memfd, layout, &header.to_string());
    decoder.run(&scene, &[]).receipt();
    decoder.views.iter().for_each(|v| v.fill(PATTERN));
    // Each one byte short, then the same memory twice.
    for i in 0..2 {
        let size = decoder.views[i].len() as u64 - 1;
        let short = View::new(memory::make(Kind::Memfd, size));
        let mut fds = [inheritable(&decoder.views[0]), inheritable(&decoder.views[1])];
        fds[i] = inheritable(&short);
        let ran = with_fds(&scene, &decoder, &numbers(&fds));
        let region = &decoder.layout.regions()[i];
        ran.failed(76, &format!("region {i}: {} bytes at {} do not lie inside", region.size, region.offset));
        ran.failed(76, &format!("descriptor {}, which is a memory file of {size} bytes", fds[i].as_raw_fd()));
        assert!(short.bytes().iter().all(|&b| b == 0));
    }
    let fds = [inheritable(&decoder.views[0]), inheritable(&decoder.views[0])];
    // 98,304 bytes from 8,192 on, and 65,536 from 0 on.
    with_fds(&scene, &decoder, &numbers(&fds)).failed(76, "the regions are its bytes 8192..106496 and 0..65536");
    let fds = [inheritable(&decoder.views[0])];
    with_fds(&scene, &decoder, &numbers(&fds)).failed(76, "2 regions, but 1 descriptors");
    assert!(decoder.is_untouched());
}

#[test]
fn headers_that_are_none() {
    let scene = Scene::new(5);
    let decoder = Decoder::new(&scene);
    let good = std::fs::read_to_string(&decoder.header).unwrap();
    let replaced = |from: &str, to: &str| {
        assert!(good.contains(from), "{good}");
        good.replace(from, to)
    };
    let size = format!("\"size\":{}", decoder.layout.size());
    let cases: Vec<(&str, String, &str)> = vec![
        ("empty", String::new(), "not sound JSON"),
        ("not JSON", "cache_k_l0 = 4096".into(), "not sound JSON"),
        ("truncated", good[..good.len() - 2].to_owned(), "not sound JSON"),
        ("more after it", format!("{good}{good}"), "not sound JSON"),
        ("a list", "[1, 2]".into(), "must be an object"),
        ("a key twice", replaced("\"n_ctx\":512", "\"n_ctx\":512,\"n_ctx\":512"), "stands twice"),
        ("two contexts", replaced("{\"share_id\"", "{\"n_ctx\":1024,\"share_id\""), "512 in params, but 1024"),
        ("a float", replaced(&size, "\"size\":131072.0"), "131072.0"),
        ("a large float", replaced(&size, "\"size\":1e300"), "whole number"),
        ("negative", replaced(&size, "\"size\":-131072"), "-131072"),
        ("too large", replaced(&size, "\"size\":18446744073709551616"), "whole number"),
        ("no hash", replaced("\"layout\"", "\"other\""), "layout must be"),
        ("no regions", replaced("\"regions\"", "\"other\""), "1 to 65535 objects"),
        ("no region", "{\"regions\": []}".into(), "1 to 65535 objects"),
        ("context of nothing", replaced("\"n_ctx\":512", "\"n_ctx\":0"), "1 to 2147483647"),
        ("a type that is none", replaced("\"type_k\":\"f16\"", "\"type_k\":\"f17\""), "f17"),
        ("deep", "[".repeat(500_000), "not sound JSON"),
        ("spaces", " ".repeat(2 << 20), "at most"),
    ];
    for (what, text, says) in cases {
        std::fs::write(&decoder.header, text).unwrap();
        let ran = decoder.run(&scene, &[]);
        assert!(ran.code == Some(65) && ran.stderr.contains(says), "{what}: {ran:?}");
        assert!(ran.stderr.contains("header") && ran.stdout.is_empty(), "{what}: {ran:?}");
        assert!(decoder.is_untouched(), "{what}");
    }
    // A gigabyte of spaces costs neither time nor memory.
    let file = File::options().write(true).open(&decoder.header).unwrap();
    file.set_len(1 << 30).unwrap();
    decoder.refuses(&scene, &[], 65, "the header has 1073741824 bytes or more; at most 1048576 are read");
    // Nor do those of which nobody knows how many there are.
    std::fs::remove_file(&decoder.header).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &decoder.header, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let path = decoder.header.clone();
    let spaces = std::thread::spawn(move || {
        let mut pipe = File::options().write(true).open(path).unwrap();
        let piece = [b' '; 4096];
        (0..1u64 << 18).take_while(|_| pipe.write_all(&piece).is_ok()).count() * piece.len()
    });
    decoder.refuses(&scene, &[], 65, "the header has 1048577 bytes or more; at most 1048576 are read");
    assert!(spaces.join().unwrap() < 2 << 20);
    std::fs::remove_file(&decoder.header).unwrap();
    decoder.refuses(&scene, &[], 66, "header.json");
    std::fs::create_dir(&decoder.header).unwrap();
    decoder.refuses(&scene, &[], 66, "header.json");
}

#[test]
fn a_model_with_recurrent_state_is_refused_by_name() {
    let scene = Scene::new(20);
    let decoder = Decoder::new(&scene);
    common::hybrid().write(&scene.model).unwrap();
    decoder.refuses(&scene, &[], 76, "the model has recurrent state");
    let mut c = program();
    let ran = Ran::from(c.arg("layout").arg("--model").arg(&scene.model).output().unwrap());
    ran.failed(76, "the model has recurrent state");
}

#[test]
fn headers_of_another_memory() {
    let scene = Scene::new(300);
    let decoder = Decoder::new(&scene);
    let good: Value = serde_json::from_slice(&std::fs::read(&decoder.header).unwrap()).unwrap();
    let (size, hash) = (decoder.layout.regions()[0].size, decoder.layout.regions()[0].layout);
    let change = |path: &str, value: Value| {
        let mut v = good.clone();
        *v.pointer_mut(path).unwrap() = value;
        v.to_string()
    };
    let of = |spec: &KvSpec, n_ctx, params: ShareParams| {
        Header::new(None, params, &ShareLayout::compute(spec, n_ctx).unwrap()).write()
    };
    let other_type = of(&spec(2, CacheType::Bf16), 512, params(512, CacheType::F16));
    let other_model = of(&spec(3, CacheType::F16), 512, params(512, CacheType::F16));
    let small = of(&spec(2, CacheType::F16), 256, params(256, CacheType::F16));
    let listed = Header::new(None, params(512, CacheType::F16), &decoder.layout).with_tensors(&decoder.layout).write();
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let list = |path: &str, value: Value| {
        let mut v = listed.clone();
        *v.pointer_mut(path).unwrap() = value;
        v.to_string()
    };
    let cases: Vec<(&str, String, Vec<String>)> = vec![
        ("size", change("/regions/0/size", json!(size + 4096)), vec![(size + 4096).to_string(), size.to_string()]),
        (
            "hash",
            change("/regions/0/layout", json!(hash ^ 1)),
            vec![format!("{:#018x}", hash ^ 1), format!("{hash:#018x}")],
        ),
        ("hash of another type", other_type, vec![format!("{hash:#018x}"), "K bf16 and V bf16".into()]),
        ("type", change("/params/type_v", json!("f32")), vec![size.to_string(), "K f16 and V f16".into()]),
        ("quantised", change("/params/type_k", json!("q8_0")), vec!["q8_0".into()]),
        ("context", change("/params/n_ctx", json!(1024)), vec![size.to_string(), (2 * size).to_string()]),
        ("flash attention", change("/params/flash_attn", json!(false)), vec!["flash_attn off".into(), "-fa on".into()]),
        ("another model", other_model, vec![(size / 2 * 3).to_string(), size.to_string()]),
        ("context too small", small, vec!["300 tokens".into(), "256 cells".into()]),
        (
            "more regions",
            change("/regions", json!([good["regions"][0], good["regions"][0]])),
            vec!["2 regions, but 1".into()],
        ),
        ("offset past the end", change("/regions/0/offset", json!(1)), vec![size.to_string(), "at 1".into()]),
        ("offset past 2^63", change("/regions/0/offset", json!(u64::MAX)), vec!["2^63".into()]),
        (
            "tensors overlap",
            list("/tensors/1/offset", json!(64)),
            vec!["cache_k_l0 at 0 and cache_v_l0 at 64 of region 0 overlap: the first has 32768 bytes".into()],
        ),
        (
            "tensor out of bounds",
            list("/tensors/3/offset", json!(size - 32767)),
            vec![format!("\"cache_v_l1\": 32768 bytes at {} do not lie inside region 0 of {size}", size - 32767)],
        ),
        (
            "no such layer",
            list("/tensors/3/name", json!("cache_v_l9")),
            vec!["its layer is 9 there, one of 2 up to 1 in the model".into()],
        ),
        (
            "a recurrent layer",
            list("/tensors/3/name", json!("cache_s_l0")),
            vec!["its layer is 0 there, no recurrent one in the model".into()],
        ),
        (
            "a layer twice",
            list("/tensors/3/name", json!("cache_v_l0")),
            vec!["cache_v_l0".into(), "is 2 or more there, 1 in the model".into()],
        ),
        (
            "no such region",
            list("/tensors/3/region", json!(1)),
            vec!["its region is 1 there, below 1 in the model".into()],
        ),
        (
            "another number of cells",
            list("/tensors/2/ne", json!([32, 256, 1, 1])),
            vec!["\"cache_k_l1\": its number of cells is 256 there, 512".into()],
        ),
        (
            "hash of another list",
            list("/regions/0/layout", json!(hash ^ 1)),
            vec![format!("{:#018x}", hash ^ 1), format!("its list of tensors has {hash:#018x}")],
        ),
        ("shape", list("/tensors/0/ne", json!([16, 512, 1, 1])), vec!["[16, 512, 1, 1]".into(), "[32, cells".into()]),
        ("a tensor's type", list("/tensors/0/type", json!("bf16")), vec!["bf16".into(), "f16".into()]),
        (
            "a tensor is missing",
            list("/tensors", json!([listed["tensors"][0]])),
            vec!["lists 1 tensors, but not cache_v_l0; the model has 4".into()],
        ),
    ];
    for (what, text, says) in cases {
        std::fs::write(&decoder.header, text).unwrap();
        let ran = decoder.run(&scene, &[]);
        // A type that this version cannot write at all is not a mismatch.
        assert_eq!(ran.code, Some(if what == "quantised" { 69 } else { 76 }), "{what}: {ran:?}");
        assert!(ran.stdout.is_empty() && ran.stderr.matches('\n').count() == 1, "{what}: {ran:?}");
        for word in says {
            assert!(ran.stderr.contains(&word), "{what}: no {word:?} in {ran:?}");
        }
        assert!(decoder.is_untouched(), "{what}");
    }
    // Regions of two sizes, swapped.
    let (layout, header) = two_regions();
    let decoder = Decoder::of(&scene, Kind::Memfd, layout, &header.to_string());
    let mut swapped = header;
    let sizes = [swapped["regions"][0]["size"].clone(), swapped["regions"][1]["size"].clone()];
    (swapped["regions"][0]["size"], swapped["regions"][1]["size"]) = (sizes[1].clone(), sizes[0].clone());
    std::fs::write(&decoder.header, swapped.to_string()).unwrap();
    decoder.refuses(&scene, &[], 76, "do not lie inside region 0");
}

#[test]
fn sizes_and_hashes_in_another_order() {
    // 2^22 cells of 64 bytes: four tensors are a whole chunk, and the third layer has one of its own. The memory is sparse.
    let scene = Scene::with(20, 3);
    let layout = ShareLayout::compute(&spec(3, CacheType::F16), 1 << 22).unwrap();
    let (large, small) = (layout.regions()[0], layout.regions()[1]);
    assert_eq!((layout.regions().len(), large.size, small.size), (2, 1 << 30, 1 << 29));
    let views = [large.size, small.size].map(|size| View::new(memory::make(Kind::Memfd, size)));
    let header = scene.path("header.json");
    let good = Header::new(None, params(1 << 22, CacheType::F16), &layout);
    let run = |change: &dyn Fn(&mut Header), swapped: bool| {
        let mut changed = good.clone();
        change(&mut changed);
        std::fs::write(&header, changed.write()).unwrap();
        let mut fds = views.each_ref().map(inheritable);
        if swapped {
            fds.reverse();
        }
        let mut c = program();
        c.arg("--tokens").arg(&scene.ids).arg("--model").arg(&scene.model);
        c.arg("--layout").arg(&header).arg("--fds").arg(numbers(&fds));
        Ran::from(c.output().unwrap())
    };
    let sizes = |h: &mut Header| (h.regions[0].size, h.regions[1].size) = (small.size, large.size);
    run(&sizes, false)
        .failed(76, "region 0: the header says 536870912 bytes, the model with n_ctx 4194304 has 1073741824");
    run(&|h| h.regions.swap(0, 1), true).failed(76, "the model's in another order");
    let hashes = |h: &mut Header| (h.regions[0].layout, h.regions[1].layout) = (small.layout, large.layout);
    let [ours, theirs] = [large.layout, small.layout].map(|hash| format!("{hash:#018x}"));
    let said = run(&hashes, false);
    said.failed(76, &format!("region 0: the header says layout {theirs}"));
    said.failed(76, &format!("has {ours}"));
    // The descriptors, and not the header.
    run(&|_| (), true).failed(76, "region 0: 1073741824 bytes at 0 do not lie inside descriptor");
    // No page of the memory has come into being.
    assert!(views.iter().all(|v| rustix::fs::fstat(v).unwrap().st_blocks == 0));
    run(&|_| (), false).receipt();
}

#[test]
fn what_this_program_was_told_and_the_header_says_otherwise() {
    let scene = Scene::new(20);
    let decoder = Decoder::new(&scene);
    decoder.refuses(&scene, &["-c", "1024"], 76, "n_ctx: the header says 512, this program was told 1024");
    decoder.refuses(&scene, &["-ctk", "bf16"], 76, "K cache: the header says f16, this program would write bf16");
    decoder.refuses(&scene, &["-ctv", "f32"], 76, "V cache: the header says f16, this program would write f32");
    decoder.refuses(&scene, &["-fa", "off"], 76, "the header says flash_attn on, this program was told off");
    decoder.refuses(&scene, &["--n-stream", "2"], 76, "2 streams");
    decoder.refuses(&scene, &["-ctk", "q8_0"], 69, "a K cache of q8_0");
    let (mut c, _fds) = decoder.command(&scene);
    c.env("LLAMA_ARG_CTX_SIZE", "256").env("LLAMA_ARG_CACHE_TYPE_K", "f16");
    Ran::from(c.output().unwrap()).failed(76, "512");
    assert!(decoder.is_untouched());
    // What says the same, and what does not apply here, is no matter.
    std::fs::write(scene.slots.join("a.bin"), b"qsgg\x09\0\0\0\0\0\0\0").unwrap();
    decoder.run(&scene, &["-c", "500", "-ctk", "f16", "-fa", "on", "--swa-full", "--state-version", "2"]).receipt();
}

#[test]
fn everything_else_that_can_be_refused_is_refused_before_the_first_byte() {
    let scene = Scene::new(20);
    let decoder = Decoder::new(&scene);
    decoder.refuses(&scene, &["--min-tokens", "21"], 77, "20 ids");
    decoder.refuses(&scene, &["--max-memory", "1M"], 76, "--max-memory");
    decoder.refuses(&scene, &["--device", "npu"], 69, "--device npu: it needs kernels");
    decoder.refuses(&scene, &["--isa", "abacus"], 69, "abacus");
    decoder.refuses(&scene, &["--elfs", "/nowhere"], 78, "/nowhere");
    decoder.refuses(&scene, &["--config", "/nowhere"], 78, "/nowhere");
    std::fs::write(&scene.ids, "1 2 320").unwrap();
    decoder.refuses(&scene, &[], 65, "id 320");
    std::fs::write(&scene.ids, "").unwrap();
    decoder.refuses(&scene, &[], 65, "empty");
    scene.write_ids(&[1; 512]);
    decoder.refuses(&scene, &[], 76, "512 tokens");
    std::fs::remove_file(&scene.ids).unwrap();
    decoder.refuses(&scene, &[], 66, "ids.txt");
    scene.write_ids(&scene.tokens);
    // Not a number in the first row of the first layer: nothing has been written then.
    let good = std::fs::read(&scene.model).unwrap();
    spoil(&scene, scene.tokens[0]);
    decoder.refuses(&scene, &[], 76, "position 0");
    std::fs::write(&scene.model, &good[..good.len() - 1]).unwrap();
    decoder.refuses(&scene, &[], 65, "tiny.gguf");
    model(3, |_| ()).write(&scene.model).unwrap();
    decoder.refuses(&scene, &[], 76, "region 0");
    std::fs::write(&scene.model, good).unwrap();
    decoder.run(&scene, &[]).receipt();
}

/// Makes a token's embedding one that is not a number.
fn spoil(scene: &Scene, id: i32) {
    let mut bytes = std::fs::read(&scene.model).unwrap();
    let at = {
        let g = gguf::Gguf::open(&scene.model).unwrap();
        let t = g.tensor("token_embd.weight").unwrap();
        t.offset as usize + id as usize * t.row_bytes() as usize
    };
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&scene.model, bytes).unwrap();
}

// What goes wrong, or is stopped, after the first byte.

/// What a run says at its end when it was stopped too late for the memory to be as before.
const TAINTED: &str = "stopped after writing into the decoder's memory, which must not be adopted: ";

/// A run that takes minutes unless stopped, and looks up between small pieces of work: 8 layers of 6,000 rows.
fn endless() -> (Scene, Decoder) {
    let scene = Scene::with(6_000, 8);
    let decoder = Decoder::with(&scene, most_real(), 8, 8192, 4096);
    (scene, decoder)
}

const SLOWLY: [&str; 6] = ["--isa", "scalar", "--chunk", "4", "-t", "1"];

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// What is left of a run.
fn end(mut child: Child) -> Ran {
    let (mut stdout, mut stderr) = (String::new(), String::new());
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    Ran { code: child.wait().unwrap().code(), stdout, stderr }
}

/// A field of a process's status, `None` when it is gone.
fn status(pid: u32, field: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':'))?;
    Some(line.trim().to_owned())
}

#[track_caller]
fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is() {
        assert!(started.elapsed() < Duration::from_secs(60), "never {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Waits until a signal that was sent has been taken: from then on nothing may be written.
fn wait_until_seen(child: &Child, signal: Signal) {
    let bit = 1u64 << (signal.as_raw() - 1);
    wait_until("seen", || {
        // Of whom it has ended, it stays pending.
        let gone = status(child.id(), "State").is_none_or(|s| s.starts_with(['Z', 'X']));
        let pending = |field| status(child.id(), field).and_then(|v| u64::from_str_radix(&v, 16).ok()).unwrap_or(0);
        gone || (pending("ShdPnd") | pending("SigPnd")) & bit == 0
    });
}

/// Waits until all threads of a process stand still.
fn wait_until_stopped(child: &Child) {
    wait_until("stopped", || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
        let state = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        tasks.flatten().all(|t| state(t.path().join("stat")).rsplit(") ").next().is_some_and(|s| s.starts_with('T')))
    });
}

/// Counts the times that memory changed which its owner had taken back from a writer who stood still. There is no way to stop
/// and think inside of a copy, so a writer may have stood still in the middle of one. The rest of that one may come, which is
/// rare; anything more may not.
#[derive(Default)]
struct UnderWay(u32);

impl UnderWay {
    #[track_caller]
    fn check(&mut self, before: &[Vec<u8>], after: &[Vec<u8>]) {
        let differs = |(i, (a, b)): (usize, (&u8, &u8))| (a != b).then_some(i);
        let changed: Vec<usize> = before[0].iter().zip(&after[0]).enumerate().filter_map(differs).collect();
        let (Some(first), Some(last)) = (changed.first(), changed.last()) else { return };
        // What `SLOWLY` computes at a time: 4 rows of 64 bytes.
        assert!(last - first < 256, "bytes {first} to {last} were written to after they had been taken back");
        self.0 += 1;
        assert!(self.0 < 2, "written to again and again after it had been taken back");
    }
}

#[test]
fn a_signal_ends_writing_at_once() {
    let (scene, decoder) = endless();
    for (sent, code, word) in
        [(Signal::TERM, 143, "SIGTERM"), (Signal::INT, 130, "SIGINT"), (Signal::HUP, 129, "SIGHUP")]
    {
        decoder.views[0].fill(PATTERN);
        let child = decoder.start(&scene, &SLOWLY);
        wait_until("begun", || decoder.has_begun());
        signal(&child, sent);
        wait_until_seen(&child, sent);
        let seen = decoder.bytes();
        let ran = end(child);
        ran.failed(79, TAINTED);
        assert!(ran.stderr.contains(word) && !ran.stderr.contains("left behind"), "{ran:?}");
        assert!(decoder.bytes() == seen, "written to after {word} was seen");
        // The same before the first byte: ids that never come.
        decoder.views[0].fill(PATTERN);
        let (fifo, _writer) = fifo(&scene);
        let child = start_with_ids(&scene, &decoder, &fifo, &[]);
        wait_until("watching", || is_watching(&child));
        signal(&child, sent);
        end(child).failed(code, word);
        assert!(decoder.is_untouched());
    }
}

/// A pipe with a name, and an end of it that keeps readers waiting.
fn fifo(scene: &Scene) -> (PathBuf, File) {
    let path = scene.path("ids.fifo");
    let _ = std::fs::remove_file(&path);
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let writer = File::options().read(true).write(true).open(&path).unwrap();
    (path, writer)
}

fn start_with_ids(scene: &Scene, decoder: &Decoder, ids: &PathBuf, more: &[&str]) -> Child {
    let (plain, _fds) = decoder.command(scene);
    let mut args: Vec<OsString> = plain.get_args().map(Into::into).collect();
    let i = args.iter().position(|a| a == "--tokens").unwrap();
    args[i + 1] = ids.into();
    let mut c = program();
    c.args(args).args(more).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Whether a run has come so far that signals are caught.
fn is_watching(child: &Child) -> bool {
    let mask = status(child.id(), "SigCgt").and_then(|m| u64::from_str_radix(&m, 16).ok()).unwrap_or(0);
    let of = |s: Signal| 1u64 << (s.as_raw() - 1);
    let all = of(Signal::TERM) | of(Signal::INT) | of(Signal::HUP) | of(Signal::USR1) | of(Signal::XFSZ);
    mask & all == all
}

#[test]
fn sigterm_at_any_moment_is_79_or_nothing_was_written() {
    const TIMES: u32 = 40;
    let (scene, decoder) = endless();
    let mut random = Random(11);
    let (mut tainted, mut clean) = (0, 0);
    for i in 0..TIMES {
        decoder.views[0].fill(PATTERN);
        let child = decoder.start(&scene, &SLOWLY);
        // Half of them at moments spread over loading and the first rows, half of them later.
        if i % 2 == 0 {
            std::thread::sleep(Duration::from_micros(random.below(40_000)));
        } else {
            wait_until("begun", || decoder.has_begun());
            std::thread::sleep(Duration::from_micros(random.below(100_000)));
        }
        signal(&child, Signal::TERM);
        wait_until_seen(&child, Signal::TERM);
        let seen = decoder.bytes();
        let ran = end(child);
        let after = decoder.bytes();
        assert!(after == seen, "written to after the signal was seen: {ran:?}");
        match ran.code {
            Some(79) => {
                tainted += 1;
                assert!(ran.stderr.contains(TAINTED), "{ran:?}");
                assert!(decoder.has_begun(), "{ran:?}");
            }
            // The signal itself, where it came before anybody could have caught it.
            Some(143) | None => {
                clean += 1;
                assert!(decoder.is_untouched(), "{ran:?}");
            }
            _ => panic!("{ran:?}"),
        }
    }
    println!("{tainted} tainted, {clean} clean");
    assert!(tainted >= TIMES / 2);
}

#[test]
fn who_is_stopped_past_the_deadline_and_goes_on_writes_nothing_more() {
    let (scene, decoder) = endless();
    let (mut random, mut under_way) = (Random(5), UnderWay::default());
    for _ in 0..8 {
        decoder.views[0].fill(PATTERN);
        let child = decoder.start(&scene, &[&SLOWLY[..], &["--deadline", "1.5"]].concat());
        wait_until("begun", || decoder.has_begun());
        let begun = Instant::now();
        std::thread::sleep(Duration::from_micros(random.below(200_000)));
        signal(&child, Signal::STOP);
        wait_until_stopped(&child);
        // The decoder takes its memory back.
        let stopped = decoder.bytes();
        std::thread::sleep(Duration::from_millis(1600).saturating_sub(begun.elapsed()));
        signal(&child, Signal::CONT);
        let ran = end(child);
        ran.failed(79, TAINTED);
        assert!(ran.stderr.contains("--deadline"), "{ran:?}");
        under_way.check(&stopped, &decoder.bytes());
    }
    // Stopped before the first byte, it never comes to it.
    decoder.views[0].fill(PATTERN);
    let (fifo, mut writer) = fifo(&scene);
    let child = start_with_ids(&scene, &decoder, &fifo, &["--deadline", "1.5"]);
    wait_until("watching", || is_watching(&child));
    let watching = Instant::now();
    signal(&child, Signal::STOP);
    wait_until_stopped(&child);
    // Two ids that are waiting for it when it goes on.
    writer.write_all(b"1 2 ").unwrap();
    drop(writer);
    std::thread::sleep(Duration::from_millis(1600).saturating_sub(watching.elapsed()));
    signal(&child, Signal::CONT);
    end(child).failed(75, "--deadline");
    assert!(decoder.is_untouched());
}

#[test]
fn who_is_stopped_and_terminated_writes_nothing_when_it_goes_on() {
    let (scene, decoder) = endless();
    let mut under_way = UnderWay::default();
    for _ in 0..8 {
        decoder.views[0].fill(PATTERN);
        let child = decoder.start(&scene, &SLOWLY);
        wait_until("begun", || decoder.has_begun());
        signal(&child, Signal::STOP);
        wait_until_stopped(&child);
        let stopped = decoder.bytes();
        signal(&child, Signal::TERM);
        signal(&child, Signal::CONT);
        end(child).failed(79, "SIGTERM");
        under_way.check(&stopped, &decoder.bytes());
    }
}

#[test]
fn memory_that_shrinks_under_the_writer_is_tainted_too() {
    // Nobody can go on from there, but the exit status is one that a caller understands.
    let (scene, decoder) = endless();
    let size = decoder.views[0].len() as u64;
    let open = memory::unsealed(size);
    let view = View::new(&open);
    view.fill(PATTERN);
    let fds = [inheritable(&open)];
    let mut c = program();
    c.arg("--tokens").arg(&scene.ids).arg("--model").arg(&scene.model);
    c.arg("--layout").arg(&decoder.header).arg("--fds").arg(numbers(&fds)).args(SLOWLY);
    let child = c.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(fds);
    wait_until("begun", || view.read(4096, 64).iter().any(|&b| b != PATTERN));
    rustix::fs::ftruncate(&open, 0).unwrap();
    let ran = end(child);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(79), ""), "{ran:?}");
}

/// Over whatever memory this machine has. What `tests/vm/run.sh` runs where that includes real dma-bufs.
mod any_memory {
    use super::*;

    #[test]
    fn both_routes_hand_over_the_same_rows_and_nothing_else_changes() {
        let scene = Scene::new(40);
        file_route(&scene, &[]);
        for kind in memory::available() {
            // Also with less than a page, more than one, and nothing round before the region.
            for offset in [0, 4096, 24 << 10, 100, 12_345] {
                let decoder = Decoder::with(&scene, kind, 2, 512, offset);
                let ran = decoder.run(&scene, &[]);
                let receipt = ran.receipt();
                decoder.holds(&scene);
                assert_eq!((&receipt["route"], &receipt["share_id"]), (&"shared".into(), &7.into()), "{ran:?}");
                assert_eq!((&receipt["regions"], &receipt["n_tokens"]), (&1.into(), &40.into()));
                assert_eq!(receipt["bytes"], 2 * 2 * 40 * 64);
                for key in ["prefill_ms", "write_ms", "load_ms", "total_ms"] {
                    assert!(receipt[key].as_f64().unwrap() > 0.0, "{key} in {receipt}");
                }
                for key in ["state_version", "state_version_from", "out"] {
                    assert!(receipt.get(key).is_none(), "{key} in {receipt}");
                }
                // On a slow machine there is progress to tell; there is nothing to warn of anywhere.
                assert!(ran.stderr.lines().all(|l| l.contains("progress: ")), "{kind} at {offset}: {ran:?}");
            }
        }
        assert_eq!(scene.run::<&str>(&[]).receipt()["route"], "file");
        assert_eq!(scene.left(), ["state.bin"]);
    }

    #[test]
    fn several_regions_in_the_order_of_their_descriptors() {
        let scene = Scene::new(60);
        file_route(&scene, &[]);
        let (layout, header) = two_regions();
        for kind in memory::available() {
            let decoder = Decoder::of(&scene, kind, layout.clone(), &header.to_string());
            let receipt = decoder.run(&scene, &[]).receipt();
            assert_eq!((&receipt["regions"], &receipt["share_id"]), (&2.into(), &16.into()));
            decoder.holds(&scene);
        }
        // The same memory may hold both, as long as they do not meet.
        let decoder = Decoder::of(&scene, Kind::Memfd, layout, &header.to_string());
        let mut one = header;
        one["regions"][1]["offset"] = json!(1 << 20);
        std::fs::write(&decoder.header, one.to_string()).unwrap();
        let view = View::new(memory::make(Kind::Memfd, 2 << 20));
        let fds = [inheritable(&view), inheritable(&view)];
        let mut c = program();
        c.arg("--tokens").arg(&scene.ids).arg("--model").arg(&scene.model);
        c.arg("--layout").arg(&decoder.header).arg("--fds").arg(numbers(&fds));
        Ran::from(c.output().unwrap()).receipt();
        let want = decoder.filled_with(&scene.state());
        // What was never written is zero in this one.
        let zero = |bytes: &[u8]| bytes.iter().map(|&b| if b == PATTERN { 0 } else { b }).collect::<Vec<u8>>();
        let (a, b) = (view.read(8192, want[0].len() - 8192), view.read(1 << 20, want[1].len()));
        assert!(zero(&a) == zero(&want[0][8192..]) && zero(&b) == zero(&want[1]));
    }

    #[test]
    fn values_that_are_not_finite_in_a_later_chunk() {
        let scene = Scene::new(40);
        let decoder = Decoder::new(&scene);
        // The last position's, by an id that no other has.
        let last = (0..).find(|id| !scene.tokens.contains(id)).unwrap();
        let mut tokens = scene.tokens.clone();
        tokens[39] = last;
        scene.write_ids(&tokens);
        spoil(&scene, last);
        let ran = decoder.run(&scene, &["--chunk", "8"]);
        ran.failed(79, TAINTED);
        assert!(ran.stderr.contains("position 39"), "{ran:?}");
        assert!(decoder.has_begun());
        // With all positions in one chunk it is seen in time.
        let decoder = Decoder::new(&scene);
        decoder.refuses(&scene, &[], 76, "position 39");
    }

    #[test]
    fn a_deadline_ends_writing() {
        let (scene, decoder) = endless();
        let ran = decoder.run(&scene, &[&SLOWLY[..], &["--deadline", "2"]].concat());
        ran.failed(79, TAINTED);
        assert!(ran.stderr.contains("--deadline"), "{ran:?}");
        assert!(decoder.has_begun());
    }

    #[test]
    fn the_parents_death_ends_writing() {
        // Its child comes to us then, and so does its exit status.
        rustix::process::set_child_subreaper(Some(Pid::INIT)).unwrap();
        let (scene, decoder) = endless();
        let (plain, fds) = decoder.command(&scene);
        let mut c = Command::new("/bin/sh");
        c.args(["-c", "\"$0\" \"$@\" 2>&1 & echo $!; wait", BIN]).args(plain.get_args()).args(SLOWLY);
        let mut shell = c.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        drop(fds);
        let mut stdout = BufReader::new(shell.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let pid = Pid::from_raw(line.trim().parse().unwrap()).unwrap();
        wait_until("begun", || decoder.has_begun());
        shell.kill().unwrap();
        shell.wait().unwrap();
        let (_, status) = waitpid(Some(pid), WaitOptions::empty()).unwrap().unwrap();
        assert_eq!(status.exit_status(), Some(79));
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).unwrap();
        assert!(rest.contains(TAINTED) && rest.contains("the process that started this one is gone"), "{rest}");
    }

    #[test]
    fn kills_leave_the_rest_of_the_memory_alone() {
        // Whatever is there after a kill are rows in their places, as far as they had come.
        let scene = Scene::new(300);
        file_route(&scene, &["--chunk", "4"]);
        let mut random = Random(9);
        for _ in 0..30 {
            let decoder = Decoder::with(&scene, most_real(), 2, 512, 4096);
            let mut child = decoder.start(&scene, &["--chunk", "4"]);
            std::thread::sleep(Duration::from_micros(random.below(60_000)));
            let _ = child.kill();
            child.wait().unwrap();
            let want = decoder.filled_with(&scene.state());
            let found = decoder.bytes();
            let odd = found[0].iter().zip(&want[0]).position(|(&f, &w)| f != w && f != PATTERN);
            assert_eq!(odd, None);
        }
    }

    #[test]
    fn a_prompt_that_fits_to_the_last_cell_and_one_that_does_not() {
        // 256 cells: the prompt's last token needs one of its own.
        for kind in memory::available() {
            let scene = Scene::new(256);
            let decoder = Decoder::with(&scene, kind, 2, 256, 4096);
            decoder.refuses(&scene, &[], 76, "256 tokens and the prompt's last one do not fit the decoder's 256 cells");
            if kind == most_real() {
                scene.write_ids(&scene.tokens[..255]);
                let receipt = decoder.run(&scene, &[]).receipt();
                assert_eq!((&receipt["n_tokens"], &receipt["bytes"]), (&255.into(), &(2 * 2 * 255 * 64).into()));
            }
        }
    }

    /// The kernel's own record of what processes ask of dma-bufs, and what they are answered.
    struct Trace {
        instance: PathBuf,
    }

    /// One entry of it.
    #[derive(PartialEq, Eq, Debug)]
    enum Seen {
        /// `DMA_BUF_IOCTL_SYNC` on a buffer, with these flags.
        Sync { buffer: String, flags: u64 },
        /// Anything else.
        Other(String),
        /// What the call before returned.
        Answer(i64),
    }

    impl Trace {
        const TRACING: &str = "/sys/kernel/tracing";

        /// Begins it. Only the machine's owner may, so it is begun only where real dma-bufs are promised.
        fn start() -> Option<Trace> {
            if !memory::required() {
                return None;
            }
            // The functions below this one are the kernel's to inline.
            for probe in [
                "p:share/asked dma_buf_ioctl buffer=$arg1:x64 call=$arg2:x32 flags=+u0($arg3):u64\n",
                "r:share/answered dma_buf_ioctl answer=$retval:s64\n",
            ] {
                let mut file = File::options().append(true).open(format!("{}/kprobe_events", Trace::TRACING)).unwrap();
                file.write_all(probe.as_bytes()).unwrap();
            }
            let instance = PathBuf::from(format!("{}/instances/share", Trace::TRACING));
            std::fs::create_dir(&instance).unwrap();
            std::fs::write(instance.join("options/record-tgid"), "1").unwrap();
            std::fs::write(instance.join("events/share/enable"), "1").unwrap();
            Some(Trace { instance })
        }

        /// What came of a process, of any thread of it, in order.
        fn of(&self, pid: u32) -> Vec<Seen> {
            let text = std::fs::read_to_string(self.instance.join("trace")).unwrap();
            // "rows-59  (   57) [001] ...  8.1: asked: (dma_buf_ioctl+0x4/0x1f0) buffer=0xff11 call=0x40086200 flags=2"
            let seen = |line: &str| {
                let (who, _) = line.split_once(" [")?;
                let (_, process) = who.rsplit_once('(')?;
                (process.trim_end_matches(')').trim() == pid.to_string()).then_some(())?;
                let field = |name: &str| Some(line.split_once(name)?.1.split_whitespace().next()?.to_owned());
                if let Some(answer) = field("answer=") {
                    return Some(Seen::Answer(answer.parse().ok()?));
                }
                match field("call=")?.as_str() {
                    "0x40086200" => {
                        Some(Seen::Sync { buffer: field("buffer=")?, flags: field("flags=")?.parse().ok()? })
                    }
                    _ => Some(Seen::Other(line.to_owned())),
                }
            };
            text.lines().filter(|l| !l.starts_with('#')).filter_map(seen).collect()
        }
    }

    #[test]
    fn devices_are_told_of_every_region_once_it_is_written_and_of_none_that_is_not() {
        let Some(trace) = Trace::start() else { return };
        let scene = Scene::new(40);
        file_route(&scene, &[]);
        let (layout, header) = two_regions();
        let run = |decoder: &Decoder, more: &[&str]| {
            let child = decoder.start(&scene, more);
            let pid = child.id();
            (end(child), trace.of(pid))
        };
        for kind in memory::available() {
            let decoder = Decoder::of(&scene, kind, layout.clone(), &header.to_string());
            let (ran, seen) = run(&decoder, &[]);
            ran.receipt();
            decoder.holds(&scene);
            if !kind.is_dma_buf() {
                assert_eq!(seen, []);
                continue;
            }
            // Two regions, begun as the rows come to them, and ended when all rows are there.
            let buffers: Vec<&String> = seen
                .iter()
                .filter_map(|s| if let Seen::Sync { buffer, .. } = s { Some(buffer) } else { None })
                .collect();
            assert!(buffers.len() == 4 && buffers[0] != buffers[1], "{kind}: {seen:?}");
            let sync = |i: usize, flags| [Seen::Sync { buffer: buffers[i].clone(), flags }, Seen::Answer(0)];
            let want = [sync(0, WRITE), sync(1, WRITE), sync(0, WRITE | END), sync(1, WRITE | END)];
            assert_eq!(seen, want.into_iter().flatten().collect::<Vec<_>>(), "{kind}");

            // What is refused is not announced either.
            let (ran, seen) = run(&decoder, &["-c", "1024"]);
            ran.failed(76, "n_ctx: the header says 512, this program was told 1024");
            assert_eq!(seen, [], "{kind}");
        }
        // Who stops on the way says so of what has been written.
        let (scene, decoder) = endless();
        let child = decoder.start(&scene, &[&SLOWLY[..], &["--deadline", "2"]].concat());
        let pid = child.id();
        end(child).failed(79, TAINTED);
        let seen = trace.of(pid);
        let [Seen::Sync { flags: WRITE, buffer: a }, Seen::Answer(0), Seen::Sync { flags, buffer: b }, Seen::Answer(0)] =
            &seen[..]
        else {
            panic!("{seen:?}");
        };
        assert_eq!((*flags, a), (WRITE | END, b));
    }
}
