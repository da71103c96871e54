//! The decoder's side of the shared route: memory laid out like a llama.cpp decoder's, given to others over a socket, and taken
//! over without a look at the bytes. It evaluates nothing; that the bytes are right is shown by turning them into a state file
//! for a real server.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use kvlayout::{Header, Inherited, KvSpec, Mapping, ShareLayout, ShareParams, StateVersion};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::{dmabuf, wire};

/// Bytes that are filled or checked at a time.
const PIECE: usize = 1 << 20;

/// How long the decoder tries to give its memory away.
const SEND_DEADLINE: Duration = Duration::from_secs(10);

/// What its memory is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Kind {
    /// Memory files, which any kernel has.
    #[default]
    MemFd,
    /// Real dma-bufs over memory files, which takes `/dev/udmabuf`.
    Udmabuf,
}

impl Kind {
    /// All that there may be.
    pub const ALL: [Kind; 2] = [Kind::MemFd, Kind::Udmabuf];

    /// Whether this machine has it.
    pub fn is_there(self) -> bool {
        match self {
            Kind::MemFd => true,
            Kind::Udmabuf => dmabuf::is_there(),
        }
    }
}

impl std::str::FromStr for Kind {
    type Err = String;
    fn from_str(s: &str) -> Result<Kind, String> {
        match s {
            "memfd" => Ok(Kind::MemFd),
            "udmabuf" => Ok(Kind::Udmabuf),
            _ => Err("it is memfd or udmabuf".to_owned()),
        }
    }
}

/// The next share's number, of any decoder: two never have the same, and none is one that could be guessed at.
static NEXT_ID: AtomicU64 = AtomicU64::new(4711);

/// What a decoder is started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Its memory's shape, from model and cache options.
    pub spec: KvSpec,
    /// `-c`.
    pub n_ctx: u32,
    /// `-b`.
    pub n_batch: u32,
    /// `-ub`.
    pub n_ubatch: u32,
    /// What its memory is made of.
    pub kind: Kind,
    /// Where a region begins in its buffer.
    pub offset: u64,
    /// Whether its header lists the tensors.
    pub list_tensors: bool,
}

impl Options {
    /// A decoder with llama.cpp's usual batches.
    pub fn new(spec: KvSpec, n_ctx: u32) -> Options {
        Options {
            spec,
            n_ctx,
            n_batch: 2048,
            n_ubatch: kvlayout::DEFAULT_UBATCH,
            kind: Kind::MemFd,
            offset: 0,
            list_tensors: false,
        }
    }

    /// The layout that its memory will have.
    ///
    /// # Errors
    /// When a decoder started like this has no memory to share.
    pub fn layout(&self) -> Result<ShareLayout, kvlayout::Refusal> {
        let layout = ShareLayout::compute_for(&self.spec, self.n_ctx, self.n_ubatch)?;
        let offsets = vec![self.offset; layout.regions().len()];
        Ok(layout.at_offsets(&offsets))
    }
}

/// The decoder's memory. Others hold it too: all access is by copying.
#[derive(Debug)]
pub struct Memory {
    layout: ShareLayout,
    fds: Vec<OwnedFd>,
    maps: Vec<Mapping>,
}

impl Memory {
    fn new(layout: ShareLayout, kind: Kind) -> Result<Memory> {
        let (mut fds, mut maps) = (Vec::new(), Vec::new());
        for (i, r) in layout.regions().iter().enumerate() {
            let about = || format!("allocating region {i} of {} bytes", r.size);
            let bytes = r.end().with_context(about)?;
            let fd = allocate(kind, bytes).with_context(about)?;
            let mine = Inherited::from_owned(fd.try_clone().with_context(about)?).with_context(about)?;
            maps.push(Mapping::new(&mine, r.offset, r.size).with_context(about)?);
            fds.push(fd);
        }
        Ok(Memory { layout, fds, maps })
    }

    /// How it is laid out.
    pub fn layout(&self) -> &ShareLayout {
        &self.layout
    }

    /// Its descriptors, one for each region.
    pub fn fds(&self) -> &[OwnedFd] {
        &self.fds
    }

    /// Further mappings of its regions, as somebody else would have them.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn map_again(&self) -> Result<Vec<Mapping>> {
        let map = |(fd, r): (&OwnedFd, &kvlayout::ShareRegion)| -> Result<Mapping> {
            Ok(Mapping::new(&Inherited::from_owned(fd.try_clone()?)?, r.offset, r.size)?)
        };
        self.fds.iter().zip(self.layout.regions()).map(map).collect()
    }

    /// Copies bytes of a region out.
    ///
    /// # Errors
    /// When they do not lie inside.
    pub fn read(&self, region: u16, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let map = self.maps.get(usize::from(region)).ok_or(io::ErrorKind::InvalidInput)?;
        map.read(at, bytes)
    }

    /// Fills all of it with a pattern, of which there is one for every seed.
    ///
    /// # Errors
    /// None that can be expected.
    pub fn fill(&self, seed: u64) -> Result<()> {
        let mut piece = vec![0; PIECE];
        for (region, map) in self.map_again()?.iter_mut().enumerate() {
            let mut at = 0;
            while at < map.len() {
                let n = PIECE.min((map.len() - at) as usize);
                pattern(seed, region, at, &mut piece[..n]);
                map.write(at, &piece[..n])?;
                at += n as u64;
            }
        }
        Ok(())
    }

    /// The first byte that is not the pattern's, outside of rows 0 to `rows` - 1 of every tensor.
    ///
    /// # Errors
    /// None that can be expected.
    pub fn changed(&self, seed: u64, rows: u64) -> io::Result<Option<Changed>> {
        for (i, map) in self.maps.iter().enumerate() {
            let here = self.layout.tensors().iter().filter(|t| usize::from(t.region) == i);
            let mut written: Vec<_> = here.map(|t| (t.offset, t.offset + rows.min(t.ne[1]) * t.row_bytes())).collect();
            written.sort_unstable();
            let mut from = 0;
            for (start, end) in written.into_iter().chain([(map.len(), map.len())]) {
                if let Some(at) = differs(map, seed, i, from, start)? {
                    return Ok(Some(Changed { region: i, at }));
                }
                from = end.max(from);
            }
        }
        Ok(None)
    }

    /// The state file of rows 0 to n - 1: what the file route would have handed over.
    ///
    /// # Errors
    /// When there is no such file for this layout.
    pub fn state_file(&self, spec: &KvSpec, tokens: &[i32], version: StateVersion) -> Result<Vec<u8>> {
        let read = |region, at, bytes: &mut [u8]| self.read(region, at, bytes);
        self.layout.to_state_file(spec, tokens, version, read).context("making a state file of the shared memory")
    }
}

/// A byte that should not have changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Changed {
    /// Index of its region.
    pub region: usize,
    /// Where in it.
    pub at: u64,
}

impl std::fmt::Display for Changed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "byte {} of region {}", self.at, self.region)
    }
}

fn differs(map: &Mapping, seed: u64, region: usize, mut from: u64, to: u64) -> io::Result<Option<u64>> {
    let (mut want, mut have) = (vec![0; PIECE], vec![0; PIECE]);
    while from < to {
        let n = PIECE.min((to - from) as usize);
        pattern(seed, region, from, &mut want[..n]);
        map.read(from, &mut have[..n])?;
        if want[..n] != have[..n] {
            let at = want.iter().zip(&have).position(|(a, b)| a != b).unwrap_or(0);
            return Ok(Some(from + at as u64));
        }
        from += n as u64;
    }
    Ok(None)
}

/// The pattern's bytes from `at` on: of no period, so that bytes which move are seen as well as bytes which change.
fn pattern(seed: u64, region: usize, at: u64, out: &mut [u8]) {
    let word = |i: u64| {
        let mut z = (seed ^ (region as u64) << 48).wrapping_add((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)).to_le_bytes()
    };
    let skip = (at % 8) as usize;
    let (head, rest) = out.split_at_mut(((8 - skip) % 8).min(out.len()));
    if !head.is_empty() {
        head.copy_from_slice(&word(at / 8)[skip..][..head.len()]);
    }
    let first = at.div_ceil(8);
    for (i, bytes) in rest.chunks_mut(8).enumerate() {
        bytes.copy_from_slice(&word(first + i as u64)[..bytes.len()]);
    }
}

fn allocate(kind: Kind, bytes: u64) -> Result<OwnedFd> {
    // A dma-buf is made of whole pages.
    let bytes = bytes.next_multiple_of(rustix::param::page_size() as u64);
    let fd = rustix::fs::memfd_create("decoder", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, bytes)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK)?;
    match kind {
        Kind::MemFd => Ok(fd),
        Kind::Udmabuf => dmabuf::over(&fd, bytes),
    }
}

/// What a decoder did with an adoption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Adopted {
    /// Cells 0 to this one, exclusive, are the prompt's first positions now.
    pub cells: usize,
}

/// A decoder, as far as the shared route sees one.
pub trait Peer: Send {
    /// `action=share`: connects to the socket and sends header and descriptors.
    ///
    /// # Errors
    /// When it does not want to, or cannot.
    fn share(&mut self, socket: &Path) -> Result<()>;
    /// `action=adopt`: takes the cells as they are.
    ///
    /// # Errors
    /// When the share is not its own, or the tokens do not fit.
    fn adopt(&mut self, tokens: &[i32], share_id: u64) -> Result<Adopted>;
    /// The share is over, and nobody has written.
    fn release(&mut self);
    /// The share is over, and what it was for is lost: the memory is put to other use at once.
    ///
    /// # Errors
    /// When that fails.
    fn take_back(&mut self) -> Result<()>;
}

/// The decoder that does all of it as it should.
#[derive(Debug)]
pub struct Decoder {
    options: Options,
    memory: Arc<Memory>,
    shared: Option<u64>,
    adopted: Option<Vec<i32>>,
}

/// The seed of the pattern that memory is filled with when it is taken back.
pub const REUSED: u64 = 0x7ea5;

impl Decoder {
    /// Allocates its memory, which is zeroed.
    ///
    /// # Errors
    /// When there is no such decoder, or no memory for it.
    pub fn new(options: Options) -> Result<Decoder> {
        let layout = options.layout().context("a decoder with these options does not share its memory")?;
        let memory = Arc::new(Memory::new(layout, options.kind)?);
        Ok(Decoder { options, memory, shared: None, adopted: None })
    }

    /// What it was started with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Its memory, which outlives it.
    pub fn memory(&self) -> Arc<Memory> {
        self.memory.clone()
    }

    /// The share that is open.
    pub fn shared(&self) -> Option<u64> {
        self.shared
    }

    /// The tokens of the cells it has taken over.
    pub fn adopted(&self) -> Option<&[i32]> {
        self.adopted.as_deref()
    }

    /// The header it sends for a share.
    pub fn header(&self, share_id: u64) -> Header {
        let o = &self.options;
        let params = ShareParams {
            n_ctx: Some(o.n_ctx),
            n_batch: Some(o.n_batch),
            n_ubatch: Some(o.n_ubatch),
            flash_attn: Some(!o.spec.v_trans),
            type_k: Some(o.spec.type_k),
            type_v: Some(o.spec.type_v),
        };
        let header = Header::new(Some(share_id), params, self.memory.layout());
        if o.list_tensors { header.with_tensors(self.memory.layout()) } else { header }
    }

    /// Begins a share: from now on others may write.
    ///
    /// # Errors
    /// When one is open already.
    pub fn open_share(&mut self) -> Result<u64> {
        if let Some(id) = self.shared {
            bail!("share {id} is still open: somebody may be writing");
        }
        self.adopted = None;
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        self.shared = Some(id);
        Ok(id)
    }

    /// The state file of what it has adopted.
    ///
    /// # Errors
    /// When it has adopted nothing.
    pub fn state_file(&self, version: StateVersion) -> Result<Vec<u8>> {
        let tokens = self.adopted.as_deref().context("the decoder has adopted nothing")?;
        self.memory.state_file(&self.options.spec, tokens, version)
    }
}

impl Peer for Decoder {
    fn share(&mut self, socket: &Path) -> Result<()> {
        let id = self.open_share()?;
        let body = self.header(id).write();
        let fds: Vec<_> = self.memory.fds.iter().map(AsFd::as_fd).collect();
        let sent = UnixStream::connect(socket)
            .with_context(|| format!("connecting to {}", socket.display()))
            .and_then(|s| wire::send(&s, body.as_bytes(), &fds, Instant::now() + SEND_DEADLINE));
        if sent.is_err() {
            self.shared = None;
        }
        sent
    }

    fn adopt(&mut self, tokens: &[i32], share_id: u64) -> Result<Adopted> {
        match self.shared {
            Some(id) if id == share_id => {}
            Some(id) => bail!("share {share_id} cannot be adopted: the open one is {id}"),
            None => bail!("share {share_id} cannot be adopted: none is open"),
        }
        let cells = self.memory.layout().cells();
        let n = tokens.len();
        // One more is needed for the token that it evaluates itself.
        ensure!(
            n > 0 && (n as u64) < cells,
            "{n} tokens cannot be adopted: there are {cells} cells, one for the next token"
        );
        self.shared = None;
        self.adopted = Some(tokens.to_vec());
        Ok(Adopted { cells: n })
    }

    fn release(&mut self) {
        self.shared = None;
    }

    fn take_back(&mut self) -> Result<()> {
        self.shared = None;
        self.memory.fill(REUSED).context("reusing the memory")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pattern_is_the_same_from_every_place() {
        let mut all = vec![0; 100];
        pattern(5, 1, 0, &mut all);
        for from in 0..40 {
            for len in 0..30 {
                let mut some = vec![0; len];
                pattern(5, 1, from as u64, &mut some);
                assert_eq!(some, all[from..from + len], "{from} {len}");
            }
        }
        let mut other = vec![0; 100];
        pattern(6, 1, 0, &mut other);
        assert_ne!(all, other);
        pattern(5, 2, 0, &mut other);
        assert_ne!(all, other);
    }
}
