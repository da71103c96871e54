//! The shared route from the decoder's side: every step of it, and everything that can go wrong between the three programs.
//!
//! Where the provider itself is not what is tried, a played one takes its place: this very test binary, started once more, which
//! writes rows by the rules of kvlayout and ends in a way that the test chooses.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use conformance::decoder::{Adopted, Decoder, Memory, Options, Peer, REUSED};
use conformance::oracle::Arithmetic;
use conformance::producer::{Job, Produced, Producer as _};
use conformance::serve::{Handoff, Outcome, Request, Said, Serve, Served, Step, said};
use conformance::shape::CacheOptions;
use conformance::shared::{Route, SharedProvider, same};
use conformance::{decoder, fixtures, locate, wire};
use kvlayout::{
    CacheType, Guard, Header, Inherited, KvMap, KvSection, KvSink as _, KvSpec, LayerKv, Part, Regions, Scatter, State,
    StateVersion,
};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};

/// The pattern that memory holds before a handoff.
const BEFORE: u64 = 0xb4;

fn spec() -> KvSpec {
    let layer = |layer| LayerKv { layer, n_embd_k: 64, n_embd_v: 32 };
    KvSpec {
        sections: vec![KvSection { layers: (0..3).map(layer).collect(), window: None, n_rot: (0, 0) }],
        recurrent: None,
        type_k: CacheType::F16,
        type_v: CacheType::F16,
        v_trans: false,
        cell_ext: false,
        swa_full: false,
        n_stream: 1,
    }
}

/// The kinds of memory that this machine has, the most real one last. Where real dma-bufs are promised, they must be there.
fn kinds() -> Vec<decoder::Kind> {
    let promised = std::env::var_os("NPU_PREFILL_TEST_DMABUF").is_some_and(|v| v == "1");
    let there = |kind: &decoder::Kind| {
        let is = kind.is_there();
        assert!(is || !promised, "NPU_PREFILL_TEST_DMABUF is set, but there is no {kind:?} here");
        is
    };
    decoder::Kind::ALL.into_iter().filter(there).collect()
}

fn most_real() -> decoder::Kind {
    kinds().pop().unwrap()
}

/// A decoder whose memory holds the pattern.
fn a_decoder(options: Options) -> Decoder {
    let decoder = Decoder::new(options).unwrap();
    decoder.memory().fill(BEFORE).unwrap();
    decoder
}

fn small() -> Decoder {
    a_decoder(Options::new(spec(), 512))
}

/// A directory for one test.
struct Dir(tempfile::TempDir);

impl Dir {
    fn new() -> Dir {
        Dir(tempfile::tempdir().unwrap())
    }

    /// A provider that is this binary, which plays `part`.
    fn played(&self, part: &str) -> PathBuf {
        let me = std::env::current_exe().unwrap();
        let run = format!("{} --exact a_played_provider --ignored --nocapture >/dev/null", me.display());
        // One that prints a receipt may have a shell around it, one that is killed may not.
        let run = match part {
            "whole" => format!("{run} && echo '{{\"prefill_ms\": 1.5}}'"),
            _ => format!("exec {run}"),
        };
        self.script("played", &format!("#!/bin/sh\nexport PLAYED_PART={part} PLAYED_ARGS=\"$*\"\n{run}\n"))
    }

    fn script(&self, name: &str, text: &str) -> PathBuf {
        // By another process: a descriptor for writing that a child of another thread holds for a moment would make the script
        // one that cannot be started.
        let path = self.0.path().join(name);
        let mut write = Command::new("sh");
        write.args(["-c", "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\""]).arg(&path).arg(text);
        assert!(write.status().unwrap().success());
        path
    }

    /// A serve whose sockets are in this directory, and patient for as long as a busy machine needs.
    fn serve(&self, provider: &Path) -> Serve {
        let root = self.0.path().join("s");
        fs::create_dir_all(&root).unwrap();
        let mut serve = Serve::new(provider);
        serve.root = root;
        serve.times.share = Duration::from_secs(60);
        serve.times.provider = Duration::from_secs(120);
        serve
    }

    /// Whether nothing of serve's is left.
    fn is_clean(&self) -> bool {
        fs::read_dir(self.0.path().join("s")).unwrap().next().is_none()
    }
}

const TOKENS: [i32; 5] = [1, 5, 2, 9, 4];

fn hand_over(serve: &Serve, peer: &mut dyn Peer) -> Handoff {
    serve.hand_over(peer, &Request { model: Path::new("no.gguf"), tokens: &TOKENS }, &mut |_| {}).unwrap()
}

fn value(layer: u32, part: Part, row: u32, channel: u32) -> f32 {
    (layer * 1000 + row * 10 + u32::from(part == Part::V) * 5) as f32 / 64.0 + channel as f32 / 1024.0
}

/// Not a test: the provider that others start.
#[test]
#[ignore = "started by other tests as a provider"]
fn a_played_provider() {
    let part = std::env::var("PLAYED_PART").unwrap();
    let args: Vec<String> = std::env::var("PLAYED_ARGS").unwrap().split(' ').map(str::to_owned).collect();
    let arg = |name: &str| args.iter().position(|a| a == name).map(|i| args[i + 1].clone());
    if let Some(code) = part.strip_prefix("exit-") {
        eprintln!("the played provider ends");
        std::process::exit(code.parse().unwrap());
    }
    let n = fs::read_to_string(arg("--tokens").unwrap()).unwrap().lines().count() as u32;
    let header = Header::read(Path::new(&arg("--layout").unwrap())).unwrap();
    let fds = Inherited::take(&kvlayout::parse_fds(&arg("--fds").unwrap()).unwrap()).unwrap();
    let layout = header.resolve(&spec(), None, fds.len()).unwrap();
    let map = KvMap::shared(&spec(), &layout, n).unwrap();
    let regions = Regions::map(fds, &layout, &map, Guard::open()).unwrap();
    let mut sink = Box::new(Scatter::new(map, regions).unwrap());
    for layer in 0..3 {
        for (part, width) in [(Part::K, 64), (Part::V, 32)] {
            let rows: Vec<f32> = (0..n).flat_map(|row| (0..width).map(move |c| value(layer, part, row, c))).collect();
            sink.put_rows(layer, part, 0..n, &rows).unwrap();
        }
        if layer == 1 {
            match part.as_str() {
                "whole" => {}
                "tainted" => std::process::exit(79),
                "killed" => kill_process(Pid::from_raw(std::process::id() as i32).unwrap(), Signal::KILL).unwrap(),
                "unknown-code" => std::process::exit(101),
                // Deaf to being asked, and it writes again as soon as it can.
                "hangs" => loop {
                    std::thread::sleep(Duration::from_millis(1));
                },
                _ => unreachable!("{part}"),
            }
        }
    }
    sink.commit().unwrap();
    // Not through libtest, which would take its time.
    std::process::exit(0);
}

fn half(v: f32) -> f32 {
    half::f16::from_f32(v).to_f32()
}

/// Several regions, in order: each number is that of its region.
#[test]
fn descriptors_are_inherited_in_the_order_of_their_regions() {
    let mut many = spec();
    many.sections[0].layers = (0..4).map(|layer| LayerKv { layer, n_embd_k: 4096, n_embd_v: 4096 }).collect();
    // 2^16 cells of 8 KiB: every tensor is half a chunk. Memory files are empty until they are written.
    let mut decoder = Decoder::new(Options::new(many, 1 << 16)).unwrap();
    assert_eq!(decoder.memory().layout().regions().len(), 4);
    let dir = Dir::new();
    // Writes the n-th number's position in the list into the n-th descriptor.
    let text = "#!/bin/bash\nwhile [ $# -gt 0 ]; do [ \"$1\" = --fds ] && list=$2; shift; done\nn=0\n\
                for fd in ${list//,/ }; do printf \"region $n\" >&$fd || exit 66; n=$((n+1)); done\n\
                [ -e /proc/$$/fd/0 ] && echo '{\"prefill_ms\": 0}'\n";
    let handoff = hand_over(&dir.serve(&dir.script("marks", text)), &mut decoder);
    assert!(matches!(handoff.outcome, Outcome::Adopted { .. }), "{handoff:?}");
    for region in 0..4 {
        let mut mark = [0; 8];
        decoder.memory().read(region, 0, &mut mark).unwrap();
        assert_eq!(mark, format!("region {region}").as_bytes());
    }
}

/// Whatever else is open here, and whatever other threads are doing.
#[test]
fn only_the_regions_are_inherited() {
    let dir = Dir::new();
    let text = "#!/bin/bash\nwhile [ $# -gt 0 ]; do [ \"$1\" = --fds ] && list=$2; shift; done\n\
                for fd in /proc/$$/fd/*; do n=${fd##*/}; t=$(readlink $fd)\n\
                [ \"$n\" -gt 2 ] && [ \"$n\" != \"$list\" ] && case $t in *memfd:decoder*|socket:*) echo \"$n $t\" >&2; exit 66;; esac\n\
                done\nexit 77\n";
    let mut decoder = small();
    let handoff = hand_over(&dir.serve(&dir.script("looks", text)), &mut decoder);
    assert!(matches!(handoff.outcome, Outcome::FallBack { code: Some(77), .. }), "{handoff:?}");
}

#[test]
fn a_refusal_leaves_the_memory_and_falls_back_to_the_file_route() {
    let dir = Dir::new();
    for code in [2, 65, 66, 69, 70, 74, 75, 76, 77, 78, 143] {
        let mut decoder = small();
        let handoff = hand_over(&dir.serve(&dir.played(&format!("exit-{code}"))), &mut decoder);
        match &handoff.outcome {
            Outcome::FallBack { why, code: Some(c) } => {
                assert_eq!(*c, code);
                assert!(why.contains("the played provider ends"), "{why}");
            }
            other => panic!("{code}: {other:?}"),
        }
        assert_eq!(handoff.steps.last(), Some(&Step::Released));
        assert_eq!(decoder.memory().changed(BEFORE, 0).unwrap(), None);
        assert_eq!((decoder.shared(), decoder.adopted()), (None, None));
        assert!(dir.is_clean());
    }
    // The whole way: refused there, taken here.
    let text = "#!/bin/bash\nwhile [ $# -gt 0 ]; do case $1 in --fds) exit 76;; --out) out=$2;; esac; shift; done\n\
                echo state > $out; echo '{\"prefill_ms\": 2}'\n";
    let out = dir.0.path().join("state.bin");
    let request = Request { model: Path::new("no.gguf"), tokens: &TOKENS };
    let serve = dir.serve(&dir.script("refuses", text));
    match serve.serve(&mut small(), &request, &out, &mut |_| {}).unwrap() {
        Served::File(_, file) => assert_eq!(file.receipt.unwrap()["prefill_ms"], 2),
        other => panic!("{other:?}"),
    }
    assert_eq!(fs::read_to_string(&out).unwrap(), "state\n");
    // A provider that is not there: nothing was written, and nothing comes by file either.
    let served =
        dir.serve(Path::new("/nonexistent/provider")).serve(&mut small(), &request, &out, &mut |_| {}).unwrap();
    assert!(matches!(&served, Served::Forwarded(_, why) if why.contains("could not be started")), "{served:?}");
    assert!(dir.is_clean());
}

/// Every adoption that must not be.
#[test]
fn the_share_id_and_the_tokens_are_checked() {
    let mut decoder = small();
    let no = |r: anyhow::Result<Adopted>, text: &str| {
        let e = r.unwrap_err().to_string();
        assert!(e.contains(text), "{e}");
    };
    no(decoder.adopt(&TOKENS, 4711), "none is open");
    let id = decoder.open_share().unwrap();
    no(decoder.adopt(&TOKENS, id + 1), &format!("the open one is {id}"));
    no(decoder.adopt(&[], id), "0 tokens");
    no(decoder.adopt(&vec![1; 512], id), "512 cells");
    assert!(decoder.open_share().unwrap_err().to_string().contains("still open"));
    assert_eq!(decoder.adopt(&vec![1; 511], id).unwrap(), Adopted { cells: 511 });
    no(decoder.adopt(&TOKENS, id), "none is open");
    let next = decoder.open_share().unwrap();
    assert_ne!(next, id);
    no(decoder.adopt(&TOKENS, id), &format!("the open one is {next}"));
    decoder.take_back().unwrap();
    no(decoder.adopt(&TOKENS, next), "none is open");
}

/// A decoder that answers in some other way than it should; the memory is a real one's.
struct Odd<F: FnMut(&mut Decoder, &Path) -> anyhow::Result<()> + Send> {
    decoder: Decoder,
    share: F,
    released: bool,
}

impl<F: FnMut(&mut Decoder, &Path) -> anyhow::Result<()> + Send> Peer for Odd<F> {
    fn share(&mut self, socket: &Path) -> anyhow::Result<()> {
        (self.share)(&mut self.decoder, socket)
    }
    fn adopt(&mut self, tokens: &[i32], share_id: u64) -> anyhow::Result<Adopted> {
        self.decoder.adopt(tokens, share_id)
    }
    fn release(&mut self) {
        self.released = true;
        self.decoder.release();
    }
    fn take_back(&mut self) -> anyhow::Result<()> {
        self.decoder.take_back()
    }
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// Lets a decoder answer oddly; the provider must not be started, and nothing must be left.
fn odd(text: &str, share: impl FnMut(&mut Decoder, &Path) -> anyhow::Result<()> + Send) {
    let dir = Dir::new();
    let mut serve = dir.serve(&dir.played("whole"));
    serve.times.share = Duration::from_millis(300);
    let mut peer = Odd { decoder: small(), share, released: false };
    let handoff = hand_over(&serve, &mut peer);
    match &handoff.outcome {
        Outcome::FallBack { why, code: None } => assert!(why.contains(text), "{text}: {why}"),
        other => panic!("{text}: {other:?}"),
    }
    assert!(matches!(handoff.steps[..], [Step::Listening(_), Step::Released]), "{text}: {:?}", handoff.steps);
    assert!(peer.released && dir.is_clean(), "{text}");
}

/// A memory file that is nobody's.
fn spare() -> OwnedFd {
    rustix::fs::memfd_create("spare", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
}

fn body(decoder: &mut Decoder) -> Vec<u8> {
    let id = decoder.open_share().unwrap();
    decoder.header(id).write().into_bytes()
}

#[test]
fn sockets_that_close_and_messages_that_lie() {
    odd("the decoder refused: it does not want to", |_, _| anyhow::bail!("it does not want to"));
    odd("nobody connected to the socket in time", |_, _| Ok(()));
    odd("closed the socket after 0 of 4 bytes", |_, path| {
        UnixStream::connect(path)?;
        Ok(())
    });
    odd("the decoder refused: no luck", |_, path| {
        UnixStream::connect(path)?;
        anyhow::bail!("no luck")
    });
    odd("closed the socket after 2 of 4 bytes", |_, path| {
        wire::send_raw(&UnixStream::connect(path)?, &[9, 0], &[], later())
    });
    odd("closed the socket after 3 of 100 bytes", |_, path| {
        wire::send_raw(&UnixStream::connect(path)?, &[100, 0, 0, 0, b'{', b' ', b' '], &[spare().as_fd()], later())
    });
    // It stays connected, but nothing comes.
    let (keep, kept) = mpsc::channel();
    odd("2 of 100 bytes came in time", move |_, path| {
        let stream = UnixStream::connect(path)?;
        wire::send_raw(&stream, &[100, 0, 0, 0, b'{', b' '], &[], later())?;
        Ok(keep.send(stream)?)
    });
    drop(kept);
    odd("announced to have 4294967295 bytes", |_, path| {
        wire::send_raw(&UnixStream::connect(path)?, &[0xff, 0xff, 0xff, 0xff, b'{'], &[], later())
    });
    odd("announced to have 1048577 bytes", |_, path| {
        wire::send_raw(&UnixStream::connect(path)?, &0x0010_0001u32.to_le_bytes(), &[], later())
    });
    odd("announced to be empty", |_, path| wire::send(&UnixStream::connect(path)?, b"", &[spare().as_fd()], later()));
    odd("not sound JSON", |_, path| wire::send(&UnixStream::connect(path)?, b"{\"regions\":", &[], later()));
    odd("has 1 regions, but 0 descriptors came", |d, path| {
        wire::send(&UnixStream::connect(path)?, &body(d), &[], later())
    });
    odd("has 1 regions, but 2 descriptors came", |d, path| {
        let (a, b) = (spare(), spare());
        wire::send(&UnixStream::connect(path)?, &body(d), &[a.as_fd(), b.as_fd()], later())
    });
    odd("has no share_id", |d, path| {
        let mut header = d.header(1);
        header.share_id = None;
        wire::send(&UnixStream::connect(path)?, header.write().as_bytes(), &[spare().as_fd()], later())
    });
    // A length too short by one cuts the object; one byte more would have been waited for.
    odd("not sound JSON", |d, path| {
        let body = body(d);
        let bytes = [&(body.len() as u32 - 1).to_le_bytes()[..], &body].concat();
        wire::send_raw(&UnixStream::connect(path)?, &bytes, &[spare().as_fd()], later())
    });
}

/// In pieces, and with the socket closed right after: it is whole.
#[test]
fn a_message_may_come_in_pieces() {
    let dir = Dir::new();
    let share = |d: &mut Decoder, path: &Path| -> anyhow::Result<()> {
        let stream = UnixStream::connect(path)?;
        let body = body(d);
        let bytes = [&(body.len() as u32).to_le_bytes()[..], &body].concat();
        let memory = d.memory();
        for (i, piece) in bytes.chunks(7).enumerate() {
            let fds: Vec<_> = if i == 1 { memory.fds().iter().map(AsFd::as_fd).collect() } else { Vec::new() };
            wire::send_raw(&stream, piece, &fds, later())?;
        }
        Ok(())
    };
    let mut peer = Odd { decoder: small(), share, released: false };
    let handoff = hand_over(&dir.serve(&dir.played("whole")), &mut peer);
    assert!(matches!(handoff.outcome, Outcome::Adopted { .. }), "{handoff:?}");
}

#[test]
fn more_descriptors_than_are_taken() {
    let dir = Dir::new();
    let path = dir.0.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let stream = UnixStream::connect(&path).unwrap();
    let ours = wire::accept(&listener, later()).unwrap();
    let fds: Vec<OwnedFd> = (0..5).map(|_| spare()).collect();
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    wire::send(&stream, b"{}", &borrowed, later()).unwrap();
    let e = wire::receive(&ours, wire::Limits { body: 10, fds: 4 }, later()).unwrap_err();
    assert!(format!("{e:#}").contains("5 descriptors came; at most 4"), "{e:#}");
    assert!(wire::accept(&listener, Instant::now()).is_err());
}

/// In a process of its own, since the limit is the process's.
#[test]
fn descriptors_that_the_receiver_has_no_room_for() {
    let me = std::env::current_exe().unwrap();
    let args = ["--exact", "a_process_with_few_descriptors", "--ignored", "--nocapture"];
    let output = Command::new(me).args(args).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "started by another test in its own process"]
fn a_process_with_few_descriptors() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let fds: Vec<OwnedFd> = (0..8).map(|_| spare()).collect();
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    wire::send(&theirs, b"{}", &borrowed, later()).unwrap();
    drop(fds);
    let open = || fs::read_dir("/proc/self/fd").unwrap().count() as u64 - 1;
    let before = open();
    let limit = getrlimit(Resource::Nofile);
    // Room for three more.
    let spares: Vec<OwnedFd> = (0..3).map(|_| spare()).collect();
    let highest = spares.iter().map(std::os::fd::AsRawFd::as_raw_fd).max().unwrap() as u64;
    drop(spares);
    setrlimit(Resource::Nofile, Rlimit { current: Some(highest + 1), maximum: limit.maximum }).unwrap();
    let e = wire::receive(&ours, wire::Limits::default(), later()).unwrap_err();
    setrlimit(Resource::Nofile, limit).unwrap();
    assert!(format!("{e:#}").contains("MSG_CTRUNC"), "{e:#}");
    assert!(format!("{e:#}").contains("only 3"), "{e:#}");
    assert_eq!(open(), before, "what came is closed again");
}

/// Sends a signal to the process that serve starts, as soon as the memory is touched.
struct Signaller(Signal, Option<std::thread::JoinHandle<bool>>);

impl Signaller {
    fn new(signal: Signal) -> Signaller {
        Signaller(signal, None)
    }

    fn observe(&mut self, step: &Step, memory: &Arc<Memory>) {
        let Step::Started { pid, .. } = *step else { return };
        let (memory, pid, signal) = (memory.clone(), Pid::from_raw(pid as i32).unwrap(), self.0);
        self.1 = Some(std::thread::spawn(move || {
            let give_up = Instant::now() + Duration::from_secs(60);
            while Instant::now() < give_up {
                if memory.changed(BEFORE, 0).unwrap().is_some() {
                    return kill_process(pid, signal).is_ok();
                }
            }
            false
        }));
    }

    /// Whether it could.
    fn done(self) -> bool {
        self.1.unwrap().join().unwrap()
    }
}

/// Stopped in the middle of its work, past the deadline: it ends before its memory is used again, and nothing is written after.
fn late(serve: &Serve, mut decoder: Decoder, request: &Request<'_>) {
    let memory = decoder.memory();
    let mut stopper = Signaller::new(Signal::STOP);
    let mut pid = None;
    let mut observe = |step: &Step| {
        stopper.observe(step, &memory);
        match step {
            Step::Started { pid: p, .. } => pid = Some(*p),
            // The memory is as the provider left it for as long as it lives.
            Step::Late | Step::Killed | Step::Ended(_) => {
                assert!(memory.changed(REUSED, 0).unwrap().is_some(), "reused too early")
            }
            Step::TakenBack => assert!(!Path::new(&format!("/proc/{}", pid.unwrap())).exists(), "it still lives"),
            _ => {}
        }
    };
    let handoff = serve.hand_over(&mut decoder, request, &mut observe).unwrap();
    assert!(stopper.done(), "it could not be stopped while it wrote: {handoff:?}");
    assert!(matches!(handoff.outcome, Outcome::Lost { ended: true, .. }), "{handoff:?}");
    let tail = &handoff.steps[2..];
    assert!(
        matches!(tail, [Step::Started { .. }, Step::Late, Step::Killed, Step::Ended(_), Step::TakenBack]),
        "{tail:?}"
    );
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(decoder.memory().changed(REUSED, 0).unwrap(), None, "written after it was taken back");
    assert_eq!((decoder.shared(), decoder.adopted()), (None, None));
}

#[test]
fn a_late_provider_ends_before_its_memory_is_used_again() {
    let dir = Dir::new();
    let mut serve = dir.serve(&dir.played("hangs"));
    serve.times.provider = Duration::from_secs(3);
    serve.times.grace = Duration::from_millis(100);
    late(&serve, small(), &Request { model: Path::new("no.gguf"), tokens: &TOKENS });
    assert!(dir.is_clean());
}

/// Asked to end when it is late, it ends: what it then says is believed.
#[test]
fn a_late_provider_is_asked_first() {
    let dir = Dir::new();
    for (code, adopted) in [(0, true), (143, false), (79, false)] {
        let text = format!("#!/bin/sh\ntrap 'exit {code}' TERM\nwhile :; do sleep 0.02; done\n");
        let mut serve = dir.serve(&dir.script("ends", &text));
        serve.times.provider = Duration::from_millis(500);
        serve.times.grace = Duration::from_secs(30);
        let mut decoder = small();
        let handoff = hand_over(&serve, &mut decoder);
        assert_eq!(matches!(handoff.outcome, Outcome::Adopted { .. }), adopted, "{handoff:?}");
        assert!(handoff.steps.contains(&Step::Late) && !handoff.steps.contains(&Step::Killed), "{handoff:?}");
        assert_eq!(matches!(handoff.outcome, Outcome::Lost { .. }), code == 79);
    }
}

/// The decoder changes its mind after the provider has written: the file route is closed.
#[test]
fn an_adoption_that_fails_is_no_refusal() {
    struct Stubborn(Decoder, Arc<AtomicBool>);
    impl Peer for Stubborn {
        fn share(&mut self, socket: &Path) -> anyhow::Result<()> {
            self.0.share(socket)
        }
        fn adopt(&mut self, tokens: &[i32], share_id: u64) -> anyhow::Result<Adopted> {
            self.0.adopt(tokens, share_id + 1)
        }
        fn release(&mut self) {
            self.1.store(true, Ordering::SeqCst);
        }
        fn take_back(&mut self) -> anyhow::Result<()> {
            self.0.take_back()
        }
    }
    let dir = Dir::new();
    let released = Arc::new(AtomicBool::new(false));
    let mut peer = Stubborn(small(), released.clone());
    let out = dir.0.path().join("must-not-be");
    let request = Request { model: Path::new("no.gguf"), tokens: &TOKENS };
    let served = dir.serve(&dir.played("whole")).serve(&mut peer, &request, &out, &mut |_| {}).unwrap();
    assert!(matches!(&served, Served::Forwarded(_, why) if why.contains("did not adopt")), "{served:?}");
    assert!(!out.exists() && !released.load(Ordering::SeqCst));
    assert_eq!(peer.0.memory().changed(REUSED, 0).unwrap(), None);
}

#[test]
fn rows_that_differ_are_named() {
    let map = KvMap::state_file(&spec(), &TOKENS, StateVersion::V3).unwrap();
    let mut bytes = vec![0; map.size() as usize];
    for (at, fixed) in map.fixed() {
        bytes[at as usize..][..fixed.len()].copy_from_slice(fixed);
    }
    let mut other = bytes.clone();
    same(&bytes, &other, true).unwrap();
    let w = map.window(1, Part::V).unwrap();
    other[(w.offset + 3 * w.row_bytes + 7) as usize] ^= 1;
    let e = same(&bytes, &other, false).unwrap_err().to_string();
    assert_eq!(e, "1 rows, the first in section 0 layer 1 V, position 3");
    // A token id is in no row.
    let mut other = bytes.clone();
    other[12] ^= 1;
    same(&bytes, &other, false).unwrap();
    assert!(same(&bytes, &other, true).is_err());
}

/// The program under test: given by a variable, else as cargo builds it for tests.
fn provider() -> PathBuf {
    std::env::var_os("CONFORMANCE_PROVIDER").map_or_else(|| locate::provider_for_tests().unwrap(), PathBuf::from)
}

fn tiny(name: &str, dir: &Dir) -> PathBuf {
    fixtures::find(name).unwrap().write(dir.0.path()).unwrap()
}

const F16: CacheOptions =
    CacheOptions { type_k: CacheType::F16, type_v: CacheType::F16, flash_attn: true, swa_full: false, n_stream: 1 };

/// The real provider's rows of `n` tokens by both routes, in a decoder's memory of this kind: the same, or refused with nothing written
/// where they cannot be shared.
#[track_caller]
fn both_routes(kind: decoder::Kind, model: &str, cache: CacheOptions, n: usize, shared: bool) {
    let (dir, provider) = (Dir::new(), provider());
    let ids: Vec<i32> = (0..600).map(|i| 3 + (i * 7) % 60).collect();
    let model_path = tiny(model, &dir);
    let out = dir.0.path().join("prompt.bin");
    let job = Job {
        name: model.into(),
        model: &model_path,
        tokens: &ids[..n],
        version: StateVersion::V4,
        cache,
        n_ctx: 1024,
        chunk: Some(64),
        arithmetic: Arithmetic::Exact,
        kernels: None,
        server_file: Path::new("none"),
    };
    let mut producer = SharedProvider::new(&provider, 1, Route::Both, kind);
    let produced = producer.produce(&job, &out).unwrap_or_else(|e| panic!("{model} {cache:?}: {e:#}"));
    assert!(matches!(produced, Produced::File { .. }), "{model} {cache:?}: {produced:?}");
    let notes = producer.notes();
    assert!(notes[0].starts_with(if shared { "shared route" } else { "file route" }), "{model} {cache:?}: {notes:?}");
    assert_eq!(State::parse(&fs::read(&out).unwrap()).unwrap().tokens, ids[..n]);
}

/// Every architecture and type.
#[test]
fn both_routes_give_the_same_rows() {
    for (model, cache, n, shared) in [
        ("tiny-llama-f32", F16, 600, true),
        ("tiny-llama-f32", F16, 1, true),
        ("tiny-qwen2-q4_k", CacheOptions { type_k: CacheType::Bf16, type_v: CacheType::F32, ..F16 }, 70, true),
        ("tiny-qwen3-f16", CacheOptions { type_k: CacheType::F32, ..F16 }, 33, true),
        ("tiny-qwen3-f16", CacheOptions { type_k: CacheType::Q8_0, type_v: CacheType::Q4_1, ..F16 }, 90, true),
        ("tiny-gemma3-f32", CacheOptions { type_k: CacheType::Iq4Nl, type_v: CacheType::Q5_0, ..F16 }, 90, true),
        ("tiny-gemma3-f32", F16, 100, true),
        ("tiny-gemma3-f32", CacheOptions { swa_full: true, ..F16 }, 600, true),
        // 544 cells, 768 with the padding, are what its window and a batch need.
        ("tiny-gemma3-f32", F16, 600, true),
        ("tiny-llama-f32", CacheOptions { flash_attn: false, ..F16 }, 40, false),
        ("tiny-llama-f32", CacheOptions { n_stream: 2, ..F16 }, 40, false),
    ] {
        both_routes(decoder::Kind::MemFd, model, cache, n, shared);
    }
}

/// The proof itself is tried: a provider that hands over other rows, or writes a byte too many, does not get through.
#[test]
fn rows_that_are_not_the_same_are_noticed() {
    let (dir, provider) = (Dir::new(), provider());
    let model = tiny("tiny-llama-f32", &dir);
    let head = "#!/bin/bash\nargs=(\"$@\")\nwhile [ $# -gt 0 ]; do case $1 in --tokens) ids=$2;; --out) out=$2;; --fds) fd=$2;; esac; shift; done\n";
    let run = format!("{} \"${{args[@]}}\" || exit $?\n", provider.display());
    let other_ids = format!("{head}[ -n \"$out\" ] && sed -i '$ s/.*/9/' $ids\n{run}");
    let one_more = format!(
        "{head}{run}[ -z \"$fd\" ] || printf x | dd of=/proc/$$/fd/$fd bs=1 seek=$(($(stat -Lc %s /proc/$$/fd/$fd) - 1)) conv=notrunc status=none\n"
    );
    let ids: Vec<i32> = (0..20).map(|i| 3 + i).collect();
    for (text, want) in [
        (&other_ids, "the routes differ: 6 rows, the first in section 0 layer 0 K, position 19"),
        (&one_more, "was written, which is in no row of the 20 tokens"),
    ] {
        let job = Job {
            name: "noticed".into(),
            model: &model,
            tokens: &ids,
            version: StateVersion::V3,
            cache: F16,
            n_ctx: 256,
            chunk: None,
            arithmetic: Arithmetic::Exact,
            kernels: None,
            server_file: Path::new("none"),
        };
        let mut producer = SharedProvider::new(&dir.script("wrong", text), 1, Route::Shared, decoder::Kind::MemFd);
        let e = producer.produce(&job, &dir.0.path().join("prompt.bin")).unwrap_err();
        assert!(format!("{e:#}").contains(want), "{e:#}");
    }
}

/// One that takes the provider long enough to be interrupted.
fn a_long_prompt(dir: &Dir) -> (Serve, Decoder, PathBuf, Vec<i32>) {
    let provider = provider();
    let model = tiny("tiny-llama-f32", dir);
    let ids: Vec<i32> = (0..2000).map(|i| 3 + (i * 5) % 60).collect();
    let shape = conformance::shape::Shape::of(&gguf::Gguf::open(&model).unwrap()).unwrap();
    let decoder = a_decoder(Options { kind: most_real(), ..Options::new(shape.kv_spec(&F16), 2048) });
    let config = dir.0.path().join("config");
    fs::write(&config, "").unwrap();
    let mut serve = dir.serve(&provider);
    serve.options = vec!["--config".into(), config.into(), "-t".into(), "1".into(), "--chunk".into(), "16".into()];
    (serve, decoder, model, ids)
}

/// Over whatever memory this machine has. What `tests/vm/run.sh` runs where that includes real dma-bufs.
mod any_memory {
    use super::*;

    #[test]
    fn a_handoff_step_by_step() {
        let dir = Dir::new();
        let all = kinds().into_iter().flat_map(|kind| [(kind, 0, false), (kind, 12288, true)]);
        for (kind, offset, list_tensors) in all {
            let mut decoder = a_decoder(Options { kind, offset, list_tensors, ..Options::new(spec(), 512) });
            let handoff = hand_over(&dir.serve(&dir.played("whole")), &mut decoder);
            let Outcome::Adopted { adopted, receipt, .. } = &handoff.outcome else { panic!("{handoff:?}") };
            assert_eq!(*adopted, Adopted { cells: 5 });
            assert_eq!(receipt.as_ref().unwrap()["prefill_ms"], 1.5);
            assert_eq!(decoder.adopted(), Some(&TOKENS[..]));
            assert_eq!(decoder.shared(), None);
            match &handoff.steps[..] {
                [
                    Step::Listening(socket),
                    Step::Received { fds: 1, share_id },
                    Step::Started { numbers, .. },
                    Step::Ended(_),
                    Step::Adopted(5),
                ] => {
                    assert!(*share_id >= 4711);
                    assert!(numbers.len() == 1 && numbers[0] >= 3, "{numbers:?}");
                    assert!(!socket.exists());
                }
                other => panic!("{other:?}"),
            }
            assert!(dir.is_clean());
            // Rows 0 to n - 1 hold what was computed, and no other byte has changed.
            assert_eq!(decoder.memory().changed(BEFORE, 5).unwrap(), None);
            assert!(decoder.memory().changed(BEFORE, 4).unwrap().is_some());
            let state = State::parse(&decoder.state_file(StateVersion::V4).unwrap()).unwrap();
            let rows = state.rows_f32(0, 2, Part::V).unwrap();
            assert_eq!(rows.len(), 5 * 32);
            for (i, row) in rows.chunks(32).enumerate() {
                for (c, v) in row.iter().enumerate() {
                    let want = half(value(2, Part::V, i as u32, c as u32));
                    assert_eq!(*v, want, "row {i} channel {c}");
                }
            }
        }
    }

    #[test]
    fn what_was_begun_is_not_adopted_and_not_done_by_file() {
        let dir = Dir::new();
        for (kind, part) in
            kinds().into_iter().flat_map(|k| ["tainted", "killed", "unknown-code"].map(|part| (k, part)))
        {
            let mut decoder = a_decoder(Options { kind, ..Options::new(spec(), 512) });
            let serve = dir.serve(&dir.played(part));
            let out = dir.0.path().join("must-not-be");
            let request = Request { model: Path::new("no.gguf"), tokens: &TOKENS };
            let memory = decoder.memory();
            let mut seen_before_the_end = false;
            let mut observe = |s: &Step| {
                if matches!(s, Step::Ended(_)) {
                    seen_before_the_end = memory.changed(BEFORE, 0).unwrap().is_some();
                    assert!(memory.changed(REUSED, 0).unwrap().is_some(), "reused before the provider's end");
                }
            };
            let served = serve.serve(&mut decoder, &request, &out, &mut observe).unwrap();
            let Served::Forwarded(handoff, _) = served else { panic!("{part}: {served:?}") };
            assert!(matches!(handoff.outcome, Outcome::Lost { ended: true, .. }), "{part}: {handoff:?}");
            assert!(matches!(handoff.steps[..], [.., Step::Ended(_), Step::TakenBack]), "{:?}", handoff.steps);
            assert!(seen_before_the_end, "{part}: it had to write first");
            assert_eq!((decoder.shared(), decoder.adopted()), (None, None));
            assert_eq!(decoder.memory().changed(REUSED, 0).unwrap(), None);
            assert!(!out.exists() && dir.is_clean());
        }
        // Not every end is one that says something.
        for (status, want) in
            [(0, Said::Whole), (79, Said::Tainted), (1, Said::Tainted), (101, Said::Tainted), (126, Said::Tainted)]
        {
            assert_eq!(said(std::process::ExitStatus::from_raw(status << 8)), want, "{status}");
        }
        assert_eq!(said(std::process::ExitStatus::from_raw(15)), Said::Tainted);
    }

    /// Few tokens: the machine in which this runs computes slowly.
    #[test]
    fn both_routes_give_the_same_rows_here() {
        let bf16 = CacheOptions { type_k: CacheType::Bf16, type_v: CacheType::F32, ..F16 };
        both_routes(most_real(), "tiny-llama-f32", F16, 1, true);
        both_routes(most_real(), "tiny-qwen2-q4_k", bf16, 9, true);
        both_routes(most_real(), "tiny-gemma3-f32", F16, 12, true);
        both_routes(most_real(), "tiny-llama-f32", CacheOptions { flash_attn: false, ..F16 }, 10, false);
    }

    /// The real one, asked to end while it writes: it says that it had begun.
    #[test]
    fn the_provider_itself_when_it_is_asked_to_end() {
        let dir = Dir::new();
        let (serve, mut decoder, model, ids) = a_long_prompt(&dir);
        let memory = decoder.memory();
        let mut signaller = Signaller::new(Signal::TERM);
        let request = Request { model: &model, tokens: &ids };
        let handoff = serve.hand_over(&mut decoder, &request, &mut |s| signaller.observe(s, &memory)).unwrap();
        assert!(signaller.done(), "it could not be asked while it wrote: {handoff:?}");
        let Outcome::Lost { why, ended: true } = &handoff.outcome else { panic!("{handoff:?}") };
        assert!(why.contains("exit status: 79"), "{why}");
        assert!(!handoff.steps.contains(&Step::Late));
        assert_eq!(decoder.memory().changed(REUSED, 0).unwrap(), None);
    }

    /// The real one, stopped while it writes.
    #[test]
    fn the_provider_itself_when_it_is_late() {
        let dir = Dir::new();
        let (mut serve, decoder, model, ids) = a_long_prompt(&dir);
        serve.times.provider = Duration::from_secs(10);
        serve.times.grace = Duration::from_millis(200);
        late(&serve, decoder, &Request { model: &model, tokens: &ids });
        assert!(dir.is_clean());
    }
}
