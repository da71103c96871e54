//! Exit numbers, and which error gets which. No other file knows a number; the rest of the program speaks of [`Kind`]s.
//!
//! One thing outranks every kind: once the decoder's memory has been written to, whatever goes wrong is [`Kind::Tainted`].

use std::fmt;
use std::sync::OnceLock;

use kvlayout::Touched;

/// What went wrong, from the point of view of whoever started the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The command line, or a variable that stands for a part of it.
    Usage,
    /// The model, the ids, a header or a state file is malformed.
    Data,
    /// An input file is missing or cannot be opened, or a descriptor is not open.
    NoInput,
    /// No device, no kernel, an architecture or type that is not supported.
    Unavailable,
    /// An invariant broke: a bug.
    Internal,
    /// The output cannot be created where it was asked for.
    CannotCreate,
    /// A read or a write broke; the disk is full.
    Io,
    /// Not had in time.
    Busy,
    /// The parameters do not fit together. Nothing was written.
    Refused,
    /// Not worth a handoff.
    Declined,
    /// The configuration is wrong.
    Config,
    /// Stopped, by whatever, after writing into the decoder's memory.
    Tainted,
    /// SIGHUP.
    HangUp,
    /// SIGINT.
    Interrupted,
    /// SIGTERM, or the parent is gone.
    Terminated,
}

impl Kind {
    /// The process exit status.
    pub fn code(self) -> u8 {
        match self {
            Kind::Usage => 2,
            Kind::Data => 65,
            Kind::NoInput => 66,
            Kind::Unavailable => 69,
            Kind::Internal => 70,
            Kind::CannotCreate => 73,
            Kind::Io => 74,
            Kind::Busy => 75,
            Kind::Refused => 76,
            Kind::Declined => 77,
            Kind::Config => 78,
            Kind::Tainted => 79,
            Kind::HangUp => 129,
            Kind::Interrupted => 130,
            Kind::Terminated => 143,
        }
    }

    /// Every kind.
    pub const ALL: [Kind; 15] = [
        Kind::Usage,
        Kind::Data,
        Kind::NoInput,
        Kind::Unavailable,
        Kind::Internal,
        Kind::CannotCreate,
        Kind::Io,
        Kind::Busy,
        Kind::Refused,
        Kind::Declined,
        Kind::Config,
        Kind::Tainted,
        Kind::HangUp,
        Kind::Interrupted,
        Kind::Terminated,
    ];

    fn with(self, error: impl std::error::Error + Send + Sync + 'static) -> Error {
        Error { kind: self, error: error.into() }
    }
}

/// The table that `--help` prints.
pub const HELP: &str = "\
Exit codes:
    0  handed over: the file is whole and has its name, or the decoder's memory has every row
    2  usage: the command line, or a variable standing for it
   65  data: model, ids, header or state file malformed
   66  no input: a file is missing or cannot be opened, or a descriptor is not open
   69  unavailable: no device, or a model or type that is not supported
   70  internal: a bug
   73  cannot create: --out cannot be made there
   74  i/o: a read or write broke, disk full
   75  busy: not done in time (--deadline), or somebody else has the NPU
   76  refused: parameters do not fit together; nothing was written
   77  declined: not worth a handoff (--min-tokens)
   78  config: the configuration file or --elfs is wrong
   79  tainted: stopped, for whatever reason, after writing into the decoder's memory
  129, 130, 143  cancelled by SIGHUP, SIGINT, SIGTERM or the parent's death; no output left behind
After every code but 0 the decoder should compute the prompt itself.
After 79 the decoder must not adopt.";

/// Whether the decoder's memory has been written to. On the file route nobody says so.
static MEMORY: OnceLock<Touched> = OnceLock::new();

/// From here on `touched` decides whether what goes wrong is [`Kind::Tainted`].
pub fn watch_memory(touched: Touched) {
    let _ = MEMORY.set(touched);
}

/// Whether whatever goes wrong now is [`Kind::Tainted`].
pub fn is_tainted() -> bool {
    MEMORY.get().is_some_and(Touched::get)
}

/// An error with its kind. The text is the outermost line; causes follow it, separated by colons.
#[derive(Debug)]
pub struct Error {
    /// Decides the exit status.
    pub kind: Kind,
    error: anyhow::Error,
}

/// What every fallible function of the program returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of our own.
    pub fn new(kind: Kind, text: impl fmt::Display + fmt::Debug + Send + Sync + 'static) -> Error {
        Error { kind, error: anyhow::Error::msg(text) }
    }

    /// The error with which the process ends: this one, unless the decoder's memory has been written to.
    #[must_use]
    pub fn at_the_end(self) -> Error {
        if !is_tainted() {
            return self;
        }
        let error = self.error.context("stopped after writing into the decoder's memory, which must not be adopted");
        Error { kind: Kind::Tainted, error }
    }

    /// Says what was being done when it happened.
    pub fn context(self, what: impl fmt::Display + Send + Sync + 'static) -> Error {
        Error { kind: self.kind, error: self.error.context(what) }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One line, whatever the causes hold: a caller reads stderr line by line.
        let text = format!("{:#}", self.error);
        f.write_str(&text.split(['\n', '\r']).map(str::trim).filter(|s| !s.is_empty()).collect::<Vec<_>>().join("; "))
    }
}

/// What went wrong in a process of this program that ended so.
pub fn kind_of_child(status: std::process::ExitStatus) -> Kind {
    let code = status.code().and_then(|c| u8::try_from(c).ok());
    Kind::ALL.into_iter().find(|k| Some(k.code()) == code).unwrap_or(Kind::Internal)
}

/// Opening an input.
pub fn open_error(error: std::io::Error) -> Error {
    open_kind(&error).with(error)
}

fn open_kind(error: &std::io::Error) -> Kind {
    use std::io::ErrorKind as E;
    match error.kind() {
        E::NotFound | E::PermissionDenied | E::NotADirectory | E::IsADirectory | E::InvalidInput => Kind::NoInput,
        _ if matches!(error.raw_os_error(), Some(libc_numbers::ELOOP | libc_numbers::ENAMETOOLONG)) => Kind::NoInput,
        _ => Kind::Io,
    }
}

/// Reading an input that was opened.
pub fn read_error(error: std::io::Error) -> Error {
    let kind = if error.kind() == std::io::ErrorKind::IsADirectory { Kind::NoInput } else { Kind::Io };
    kind.with(error)
}

/// Opening a model.
pub fn gguf_error(error: gguf::Error) -> Error {
    use gguf::Error as G;
    let kind = match &error {
        G::Io { source, .. } => return open_kind(source).with(error),
        G::MissingShard { .. } => Kind::NoInput,
        G::Unsupported { .. } | G::NoDequantizer { .. } => Kind::Unavailable,
        G::Write { .. } | G::Blocks { .. } => Kind::Internal,
        _ => Kind::Data,
    };
    kind.with(error)
}

/// Reading ids.
pub fn ids_error(error: crate::ids::IdsError) -> Error {
    match error {
        crate::ids::IdsError::Io(e) => read_error(e),
        e => Kind::Data.with(e),
    }
}

/// Making the map.
pub fn refusal(error: kvlayout::Refusal) -> Error {
    Kind::Refused.with(error)
}

/// Taking over descriptors.
pub fn inherit_error(error: kvlayout::InheritError) -> Error {
    use kvlayout::InheritError as I;
    let kind = match &error {
        I::List { .. } => Kind::Usage,
        I::NotInherited { .. } => Kind::NoInput,
        e if e.is_missing() => Kind::NoInput,
        I::Io { .. } => Kind::Io,
        _ => Kind::Refused,
    };
    kind.with(error)
}

/// Reading a header.
pub fn header_error(error: kvlayout::HeaderError) -> Error {
    let kind = match &error {
        kvlayout::HeaderError::Read { source, .. } => open_kind(source),
        _ => Kind::Data,
    };
    kind.with(error)
}

/// Holding a header against the model.
pub fn share_refusal(error: kvlayout::ShareRefusal) -> Error {
    match error {
        kvlayout::ShareRefusal::Spec(e) => refusal(e),
        e => Kind::Refused.with(e),
    }
}

/// Mapping the decoder's memory.
pub fn region_error(error: kvlayout::RegionError) -> Error {
    use kvlayout::RegionError as R;
    let kind = match &error {
        R::MapFailed { .. } | R::NoMemory { .. } => Kind::Io,
        _ => Kind::Refused,
    };
    kind.with(error)
}

/// Reading a state file.
pub fn parse_error(error: kvlayout::ParseError) -> Error {
    Kind::Data.with(error)
}

/// Beginning the output.
pub fn create_error(error: kvlayout::CreateError) -> Error {
    let kind = match error {
        kvlayout::CreateError::CannotCreate { .. } => Kind::CannotCreate,
        _ => Kind::Io,
    };
    kind.with(error)
}

/// Filling and publishing the output.
pub fn sink_error(error: kvlayout::SinkError) -> Error {
    use kvlayout::SinkError as S;
    let kind = match error {
        S::Io(_) => Kind::Io,
        S::NonFinite { .. } | S::Overflow { .. } => Kind::Refused,
        _ => Kind::Internal,
    };
    kind.with(error)
}

/// Loading a model and running it.
pub fn prefill_error(error: prefill::Error) -> Error {
    use prefill::Error as P;
    let kind = match error {
        P::Sink(e) => return sink_error(e),
        P::Gguf(e) => return gguf_error(e),
        P::Unsupported { .. } => Kind::Unavailable,
        P::Key { .. } | P::Tensor { .. } | P::Token { .. } | P::TooLong { .. } => Kind::Data,
        // As the sink's own check: the computation was made, and its result is not handed over.
        P::NotFinite { .. } => Kind::Refused,
        P::Pool(_) => Kind::Busy,
        // Whoever asked for the stop says why; this is only for a stop that nobody owns up to.
        P::Stopped => Kind::Terminated,
        _ => Kind::Internal,
    };
    kind.with(error)
}

mod libc_numbers {
    pub const ELOOP: i32 = rustix::io::Errno::LOOP.raw_os_error();
    pub const ENAMETOOLONG: i32 = rustix::io::Errno::NAMETOOLONG.raw_os_error();
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Makes this process one that has written into a decoder's memory.
    pub fn taint() {
        use kvlayout::{
            ByteSpace, CacheType, Guard, Inherited, KvMap, KvSection, KvSpec, LayerKv, Regions, ShareLayout,
        };
        let layers = vec![LayerKv { layer: 0, n_embd_k: 32, n_embd_v: 32 }];
        let (type_k, type_v) = (CacheType::F16, CacheType::F16);
        let sections = vec![KvSection { layers, window: None, n_rot: (0, 0) }];
        let (v_trans, cell_ext, swa_full) = (false, false, false);
        let spec = KvSpec { sections, recurrent: None, type_k, type_v, v_trans, cell_ext, swa_full, n_stream: 1 };
        let layout = ShareLayout::compute(&spec, 256).unwrap();
        let map = KvMap::shared(&spec, &layout, 1).unwrap();
        let fd = rustix::fs::memfd_create("taint", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, layout.size()).unwrap();
        let guard = Guard::open();
        watch_memory(guard.touched());
        let mut regions = Regions::map(vec![Inherited::from_owned(fd).unwrap()], &layout, &map, guard).unwrap();
        assert!(!is_tainted());
        regions.put_in(0, 0, &[1]).unwrap();
        assert!(is_tainted());
    }

    /// Runs a test that is ignored elsewhere in a process of its own, and returns its exit status and what it says.
    pub fn in_a_process_of_its_own(test: &str) -> (Option<i32>, String) {
        let mut c = std::process::Command::new(std::env::current_exe().unwrap());
        let out = c.args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"]).output().unwrap();
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    }

    #[test]
    #[ignore = "makes its process a tainted one; run by the next"]
    fn tainted() {
        taint();
        let e = Error::new(Kind::Io, "the disk is full").at_the_end();
        say_and_leave(&e);
    }

    fn say_and_leave(e: &Error) -> ! {
        crate::say::say(e);
        std::process::exit(e.kind.code().into())
    }

    #[test]
    fn after_the_first_byte_every_error_is_tainted() {
        let e = Error::new(Kind::Io, "the disk is full").at_the_end();
        assert_eq!((e.kind, e.to_string()), (Kind::Io, "the disk is full".into()));
        let (code, said) = in_a_process_of_its_own("exit::tests::tainted");
        let want = "stopped after writing into the decoder's memory, which must not be adopted: the disk is full";
        assert!(code == Some(79) && said.contains(want), "{code:?} {said}");
    }

    #[test]
    fn one_line_whatever_the_cause_says() {
        let e = Error::new(Kind::Data, "inner\nsecond line\r\n").context("reading x");
        assert_eq!(e.to_string(), "reading x: inner; second line");
    }

    #[test]
    fn help_lists_every_code() {
        for kind in Kind::ALL {
            assert!(HELP.contains(&kind.code().to_string()), "{kind:?}");
        }
    }
}
