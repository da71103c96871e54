//! What a decoder says about its live memory: a small JSON file. It is read without trusting it, and held against what the model
//! makes of the same parameters; only what agrees in every size and hash becomes a [`ShareLayout`].

use crate::share::{ShareRegion, ShareTensor, hash_of, padded_ctx, tensor_name};
use crate::{CELL_STEP, CacheType, DEFAULT_UBATCH, KvSpec, Part, Refusal, ShareLayout};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Bytes of the longest header that is read. One that names every tensor of a model with 128 layers has 30 thousand.
pub const HEADER_MAX: u64 = 1 << 20;

/// Why a header could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file cannot be had.
    #[error("reading the header {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Nobody needs one that large.
    #[error("the header has {found} bytes or more; at most {HEADER_MAX} are read")]
    TooLarge {
        /// Its bytes, as far as they were counted.
        found: u64,
    },
    /// No JSON, no whole JSON, or a key twice.
    #[error("the header of {len} bytes is not sound JSON: {what}")]
    Json {
        /// Its bytes.
        len: usize,
        /// What is wrong, and where.
        what: String,
    },
    /// A value that is not what stands under its key.
    #[error("the header's {key} must be {want}, but is {found}")]
    Value {
        /// Path of the key.
        key: String,
        /// What belongs there.
        want: &'static str,
        /// What is there.
        found: String,
    },
    /// A parameter that stands in two places with two values.
    #[error("the header's {key} is {nested} in params, but {flat} outside of it")]
    Conflict {
        /// The key.
        key: &'static str,
        /// The one value.
        nested: String,
        /// The other.
        flat: String,
    },
}

/// Why a header does not describe a memory that this program may write. Nothing has been written.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShareRefusal {
    /// The model's side cannot be laid out.
    #[error(transparent)]
    Spec(#[from] Refusal),
    /// Not one descriptor per region.
    #[error("the header has {regions} regions, but {fds} descriptors were given")]
    Fds {
        /// Regions in the header.
        regions: usize,
        /// Descriptors given.
        fds: usize,
    },
    /// V would be transposed.
    #[error(
        "the header says flash_attn off: V is then transposed in the decoder's memory, and rows cannot be written; run it with -fa on"
    )]
    FlashAttention,
    /// Another cache type.
    #[error("{part} cache: the header says {header}, this program would write {ours}")]
    Type {
        /// K or V.
        part: Part,
        /// The header's.
        header: CacheType,
        /// Ours.
        ours: CacheType,
    },
    /// Another context.
    #[error("n_ctx: the header says {header}, this program was told {ours}")]
    Context {
        /// The header's.
        header: u32,
        /// Ours.
        ours: u32,
    },
    /// No n_ctx was given, and none explains the regions.
    #[error(
        "the header has no n_ctx, and none makes regions like its {regions} of {bytes} bytes together: the model needs {ours}{hint}"
    )]
    NoContext {
        /// Regions in the header.
        regions: usize,
        /// Bytes of all of them.
        bytes: u128,
        /// What contexts close to it need.
        ours: String,
        /// What would explain it, if anything was found.
        hint: String,
    },
    /// No n_ctx was given, and several explain the regions.
    #[error("the header has no n_ctx, and its regions are those of {first} as well as of {second}: tell which")]
    Contexts {
        /// The smallest.
        first: u32,
        /// The next.
        second: u32,
    },
    /// Another number of regions.
    #[error("the header has {header} regions, the model with n_ctx {n_ctx} has {ours}{hint}")]
    Regions {
        /// The header's.
        header: usize,
        /// Ours.
        ours: usize,
        /// The context.
        n_ctx: u32,
        /// What would explain it, if anything was found.
        hint: String,
    },
    /// Another size.
    #[error("region {region}: the header says {header} bytes, the model with n_ctx {n_ctx} has {ours}{hint}")]
    Size {
        /// Index of the region.
        region: usize,
        /// The header's.
        header: u64,
        /// Ours.
        ours: u64,
        /// The context.
        n_ctx: u32,
        /// What would explain it, if anything was found.
        hint: String,
    },
    /// Another hash: the types or shapes of tensors differ.
    #[error("region {region}: the header says layout {header:#018x}, {what} {ours:#018x}{hint}")]
    Hash {
        /// Index of the region.
        region: usize,
        /// The header's.
        header: u64,
        /// Ours.
        ours: u64,
        /// Of what ours is.
        what: String,
        /// What would explain it, if anything was found.
        hint: String,
    },
    /// A region that ends past what a file can have.
    #[error("region {region}: {size} bytes at {offset} end past 2^63")]
    RegionEnd {
        /// Index of the region.
        region: usize,
        /// Where it begins.
        offset: u64,
        /// Its bytes.
        size: u64,
    },
    /// A listed tensor that the model has not, or has otherwise.
    #[error("the header's tensor {name:?}: {what} is {header} there, {ours} in the model")]
    Tensor {
        /// Its name.
        name: String,
        /// What differs.
        what: &'static str,
        /// The header's.
        header: String,
        /// Ours.
        ours: String,
    },
    /// A tensor of the model is not in the list.
    #[error("the header lists {listed} tensors, but not {name}; the model has {ours}")]
    Missing {
        /// Its name.
        name: String,
        /// Tensors in the list.
        listed: usize,
        /// Tensors of the model.
        ours: usize,
    },
    /// A tensor that ends outside of its region.
    #[error("the header's tensor {name:?}: {len} bytes at {offset} do not lie inside region {region} of {size}")]
    Bounds {
        /// Its name.
        name: String,
        /// Where it begins.
        offset: u64,
        /// Its bytes.
        len: u128,
        /// Index of the region.
        region: u16,
        /// Bytes of the region.
        size: u64,
    },
    /// Two tensors share bytes.
    #[error(
        "the header's tensors {} at {} and {} at {} of region {region} overlap: the first has {len} bytes",
        names[0], offsets[0], names[1], offsets[1]
    )]
    Overlap {
        /// Their names.
        names: [String; 2],
        /// Where they begin.
        offsets: [u64; 2],
        /// Bytes of the first.
        len: u64,
        /// Index of their region.
        region: u16,
    },
}

/// What the decoder was started with, as far as it tells.
#[derive(Copy, Clone, PartialEq, Eq, Default, Debug)]
pub struct ShareParams {
    /// `-c`.
    pub n_ctx: Option<u32>,
    /// `-b`.
    pub n_batch: Option<u32>,
    /// `-ub`.
    pub n_ubatch: Option<u32>,
    /// `-fa`; on when not told.
    pub flash_attn: Option<bool>,
    /// `-ctk`.
    pub type_k: Option<CacheType>,
    /// `-ctv`.
    pub type_v: Option<CacheType>,
}

/// One tensor as a header lists it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeaderTensor {
    /// llama.cpp's name: `cache_k_l<layer>` or `cache_v_l<layer>`.
    pub name: String,
    /// Index of its region.
    pub region: u16,
    /// Bytes from the region's beginning.
    pub offset: u64,
    /// Element type.
    pub ty: CacheType,
    /// ggml's dimensions.
    pub ne: [u64; 4],
}

/// The header of a shared memory.
///
/// # The file
///
/// A JSON object, of which keys that are not listed here are ignored:
///
/// | key | value |
/// |---|---|
/// | `share_id` | a number of the decoder's, for its own use |
/// | `params` | an object with `n_ctx`, `n_batch`, `n_ubatch`, `flash_attn`, `type_k`, `type_v`, each of which may be missing and may stand outside of it |
/// | `regions` | a list of objects with `size`, `layout` (the hash) and `offset` (0 when missing), in the order of the descriptors |
/// | `tensors` | may be missing: a list of objects with `name`, `region` (0 when there is one), `offset`, `type`, `ne` |
///
/// Numbers may be strings, decimal or hexadecimal after `0x`; 16 hexadecimal digits of which one is a letter need no `0x`. Types are
/// names or ggml's numbers. A length of 4 or 8 bytes may precede the object. A key that stands twice in one object is refused.
///
/// Without a list of tensors the layout is the one of [`ShareLayout`], and must reproduce every size and hash. With one, the
/// tensors lie where the list says, and the hashes must be those of the listed tensors.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Header {
    /// The decoder's number for this share.
    pub share_id: Option<u64>,
    /// What it was started with.
    pub params: ShareParams,
    /// Its regions, in the order of their descriptors.
    pub regions: Vec<ShareRegion>,
    /// Its tensors, where it lists them.
    pub tensors: Option<Vec<HeaderTensor>>,
}

impl Header {
    /// The header of a layout: the decoder's side.
    pub fn new(share_id: Option<u64>, params: ShareParams, layout: &ShareLayout) -> Header {
        Header { share_id, params, regions: layout.regions().to_vec(), tensors: None }
    }

    /// The same with a list of the layout's tensors.
    #[must_use]
    pub fn with_tensors(mut self, layout: &ShareLayout) -> Header {
        let list =
            |t: &ShareTensor| HeaderTensor { name: t.name(), region: t.region, offset: t.offset, ty: t.ty, ne: t.ne };
        self.tensors = Some(layout.tensors().iter().map(list).collect());
        self
    }

    /// As JSON on one line, without a length before it. [`parse`](Self::parse) reads back the same.
    pub fn write(&self) -> String {
        use serde_json::{Map, Value, json};
        let mut top = Map::new();
        if let Some(id) = self.share_id {
            top.insert("share_id".into(), id.into());
        }
        let ShareParams { n_ctx, n_batch, n_ubatch, flash_attn, type_k, type_v } = self.params;
        let mut params = Map::new();
        for (key, value) in [("n_ctx", n_ctx), ("n_batch", n_batch), ("n_ubatch", n_ubatch)] {
            params.extend(value.map(|v| (key.to_owned(), v.into())));
        }
        params.extend(flash_attn.map(|on| ("flash_attn".to_owned(), on.into())));
        for (key, value) in [("type_k", type_k), ("type_v", type_v)] {
            params.extend(value.map(|ty| (key.to_owned(), ty.name().into())));
        }
        top.insert("params".into(), params.into());
        // More than half of all hashes are above 2^53, which many readers of JSON would round.
        let region =
            |r: &ShareRegion| json!({"offset": r.offset, "size": r.size, "layout": format!("{:#018x}", r.layout)});
        top.insert("regions".into(), self.regions.iter().map(region).collect());
        if let Some(tensors) = &self.tensors {
            let tensor = |t: &HeaderTensor| json!({"name": t.name, "region": t.region, "offset": t.offset, "type": t.ty.name(), "ne": t.ne});
            top.insert("tensors".into(), tensors.iter().map(tensor).collect());
        }
        Value::Object(top).to_string()
    }

    /// Reads a header file, of at most [`HEADER_MAX`] bytes.
    ///
    /// # Errors
    /// [`HeaderError::Read`] when there is none, any other when it is wrong.
    pub fn read(path: &Path) -> Result<Header, HeaderError> {
        let failed = |source| HeaderError::Read { path: path.into(), source };
        let file = File::open(path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        if len > HEADER_MAX {
            return Err(HeaderError::TooLarge { found: len });
        }
        let mut bytes = Vec::new();
        // What is no plain file has no length to go by.
        file.take(HEADER_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
        Self::parse(&bytes)
    }

    /// Reads the bytes of a header.
    ///
    /// # Errors
    /// When they are not one.
    pub fn parse(bytes: &[u8]) -> Result<Header, HeaderError> {
        if bytes.len() as u64 > HEADER_MAX {
            return Err(HeaderError::TooLarge { found: bytes.len() as u64 });
        }
        let (text, prefix) = without_prefix(bytes);
        let json: Json = serde_json::from_slice(text).map_err(|e| {
            let prefix = prefix.map_or(String::new(), |n| format!(", after a length of {n} with {} bytes", text.len()));
            HeaderError::Json { len: bytes.len(), what: format!("{e}{prefix}") }
        })?;
        let Json::Map(top) = json else { return Err(json.is_not("", "an object")) };
        let nothing = BTreeMap::new();
        let params = match top.get("params") {
            None | Some(Json::Null) => &nothing,
            Some(Json::Map(params)) => params,
            Some(other) => return Err(other.is_not("params", "an object")),
        };
        let params = Params { nested: params, flat: &top };
        let n_regions;
        Ok(Header {
            share_id: get(&top, "share_id").map(|v| v.u64("share_id")).transpose()?,
            params: ShareParams {
                n_ctx: params.get("n_ctx", Json::positive)?,
                n_batch: params.get("n_batch", Json::positive)?,
                n_ubatch: params.get("n_ubatch", Json::positive)?,
                flash_attn: params.get("flash_attn", Json::switch)?,
                type_k: params.get("type_k", Json::cache_type)?,
                type_v: params.get("type_v", Json::cache_type)?,
            },
            regions: {
                let regions = list(&top, "regions", region)?.unwrap_or_default();
                n_regions = regions.len();
                if n_regions == 0 || n_regions > usize::from(u16::MAX) {
                    let found = format!("one of {n_regions}");
                    return Err(HeaderError::Value {
                        key: "regions".into(),
                        want: "a list of 1 to 65535 objects",
                        found,
                    });
                }
                regions
            },
            tensors: list(&top, "tensors", |t, key| tensor(t, key, n_regions))?,
        })
    }

    /// The layout that the header describes, if the model's memory with the decoder's parameters is exactly that.
    ///
    /// `n_ctx` is the context this program was told of, if it was; `n_fds` the number of descriptors that came with the header.
    /// Where both sides leave the context open, it is the multiple of 256 that explains the regions, if there is just one. A
    /// decoder's sliding-window layers may have all cells or just their window's, whatever the spec says: the hashes tell.
    ///
    /// # Errors
    /// At the first thing that differs, with what either side has. Whether the prompt fits is the map's question.
    pub fn resolve(&self, spec: &KvSpec, n_ctx: Option<u32>, n_fds: usize) -> Result<ShareLayout, ShareRefusal> {
        if self.regions.len() != n_fds {
            return Err(ShareRefusal::Fds { regions: self.regions.len(), fds: n_fds });
        }
        if self.params.flash_attn == Some(false) {
            return Err(ShareRefusal::FlashAttention);
        }
        if spec.recurrent.is_some() {
            return Err(Refusal::SharedRecurrent.into());
        }
        if spec.v_trans {
            return Err(Refusal::SharedTransposed.into());
        }
        for (part, header, ours) in
            [(Part::K, self.params.type_k, spec.type_k), (Part::V, self.params.type_v, spec.type_v)]
        {
            if let Some(header) = header.filter(|&h| h != ours) {
                return Err(ShareRefusal::Type { part, header, ours });
            }
        }
        if let (Some(header), Some(ours)) = (self.params.n_ctx, n_ctx)
            && padded_ctx(header) != padded_ctx(ours)
        {
            return Err(ShareRefusal::Context { header, ours });
        }
        for (region, r) in self.regions.iter().enumerate() {
            if r.end().is_none() {
                return Err(ShareRefusal::RegionEnd { region, offset: r.offset, size: r.size });
            }
        }
        let n_ctx = self.params.n_ctx.or(n_ctx);
        match &self.tensors {
            Some(tensors) => self.listed(spec, n_ctx, tensors),
            None => self.computed(spec, n_ctx),
        }
    }

    fn n_ubatch(&self) -> u32 {
        self.params.n_ubatch.unwrap_or(DEFAULT_UBATCH)
    }

    /// The layout without a list of tensors.
    fn computed(&self, spec: &KvSpec, n_ctx: Option<u32>) -> Result<ShareLayout, ShareRefusal> {
        // Also tells whether the spec can be shared at all.
        let told = ShareLayout::compute_for(spec, n_ctx.unwrap_or(CELL_STEP), self.n_ubatch())?;
        let Some(n_ctx) = n_ctx else {
            let found = self.contexts(spec);
            return match found[..] {
                [n_ctx] => self.same_as(spec, n_ctx).ok_or_else(|| self.no_context(spec)),
                [first, second, ..] => Err(ShareRefusal::Contexts { first, second }),
                [] => Err(self.no_context(spec)),
            };
        };
        match self.same_as(spec, n_ctx) {
            Some(layout) => Ok(layout),
            None => Err(self.difference(&told, spec, n_ctx)),
        }
    }

    /// The layout of a context, at the header's offsets, if it has the header's regions.
    fn same_as(&self, spec: &KvSpec, n_ctx: u32) -> Option<ShareLayout> {
        variants(spec).into_iter().find_map(|spec| {
            let layout = ShareLayout::compute_for(&spec, n_ctx, self.n_ubatch()).ok()?;
            let same =
                |(ours, header): (&ShareRegion, &ShareRegion)| (ours.size, ours.layout) == (header.size, header.layout);
            let all =
                layout.regions().len() == self.regions.len() && layout.regions().iter().zip(&self.regions).all(same);
            let offsets: Vec<u64> = self.regions.iter().map(|r| r.offset).collect();
            all.then(|| layout.at_offsets(&offsets))
        })
    }

    fn bytes(&self) -> u128 {
        self.regions.iter().map(|r| u128::from(r.size)).sum()
    }

    /// The contexts that explain the regions; no more than two of them.
    fn contexts(&self, spec: &KvSpec) -> Vec<u32> {
        let mut found = Vec::new();
        for spec in variants(spec) {
            let first = self.first_of_size(&spec, self.bytes());
            // Many contexts need the same bytes only where rows are tiny or all layers have a window; two that match are enough.
            for n_ctx in (0..64).map_while(|i| first?.checked_add(i * CELL_STEP)) {
                if ShareLayout::total(&spec, n_ctx, self.n_ubatch()) != Some(self.bytes()) || found.len() > 1 {
                    break;
                }
                if self.same_as(&spec, n_ctx).is_some() && !found.contains(&n_ctx) {
                    found.push(n_ctx);
                }
            }
        }
        found.sort();
        found
    }

    /// The smallest multiple of 256 for which the regions have at least so many bytes. They grow with the context.
    fn first_of_size(&self, spec: &KvSpec, bytes: u128) -> Option<u32> {
        let (mut low, mut high) = (1, i32::MAX as u32 / CELL_STEP + 1);
        while low < high {
            let middle = low + (high - low) / 2;
            let total = ShareLayout::total(spec, middle * CELL_STEP, self.n_ubatch());
            if total.is_some_and(|total| total < bytes) { low = middle + 1 } else { high = middle }
        }
        let n_ctx = low * CELL_STEP;
        (n_ctx <= i32::MAX as u32).then_some(n_ctx)
    }

    fn no_context(&self, spec: &KvSpec) -> ShareRefusal {
        let need = |n_ctx: u32| {
            let total = ShareLayout::total(spec, n_ctx, self.n_ubatch());
            total.map_or("too many".into(), |total| format!("{total} with n_ctx {n_ctx}"))
        };
        let ours = match self.first_of_size(spec, self.bytes()) {
            Some(n) if n > CELL_STEP => format!("{} and {}", need(n - CELL_STEP), need(n)),
            Some(n) => need(n),
            None => need(i32::MAX as u32 / CELL_STEP * CELL_STEP),
        };
        ShareRefusal::NoContext { regions: self.regions.len(), bytes: self.bytes(), ours, hint: self.hint(spec, None) }
    }

    /// The first thing in which the regions differ from a layout's.
    fn difference(&self, layout: &ShareLayout, spec: &KvSpec, n_ctx: u32) -> ShareRefusal {
        let hint = self.hint(spec, Some(n_ctx));
        if layout.regions().len() != self.regions.len() {
            return ShareRefusal::Regions { header: self.regions.len(), ours: layout.regions().len(), n_ctx, hint };
        }
        let both = || layout.regions().iter().zip(&self.regions).enumerate();
        if let Some((region, (ours, header))) = both().find(|(_, (ours, header))| ours.size != header.size) {
            return ShareRefusal::Size { region, header: header.size, ours: ours.size, n_ctx, hint };
        }
        let Some((region, (ours, header))) = both().find(|(_, (ours, header))| ours.layout != header.layout) else {
            // They do not differ; then whoever asked would not have.
            return ShareRefusal::Regions { header: self.regions.len(), ours: layout.regions().len(), n_ctx, hint };
        };
        let what = format!("the model with n_ctx {n_ctx}, K {} and V {} has", spec.type_k, spec.type_v);
        ShareRefusal::Hash { region, header: header.layout, ours: ours.layout, what, hint }
    }

    /// What would explain the regions, for whoever has to find the difference.
    fn hint(&self, spec: &KvSpec, n_ctx: Option<u32>) -> String {
        if n_ctx.is_some()
            && let Some(n_ctx) = self.contexts(spec).first()
        {
            return format!(" (they are those of n_ctx {n_ctx})");
        }
        for type_k in CacheType::ALL {
            for type_v in CacheType::ALL {
                let other = KvSpec { type_k, type_v, ..spec.clone() };
                let n_ctx = n_ctx.or_else(|| self.contexts(&other).first().copied());
                if n_ctx.is_some_and(|n| self.same_as(&other, n).is_some()) {
                    return format!(" (they are those of K {type_k} and V {type_v})");
                }
            }
        }
        let sorted = |regions: &[ShareRegion]| {
            let mut all: Vec<_> = regions.iter().map(|r| (r.size, r.layout)).collect();
            all.sort();
            all
        };
        let ours = n_ctx.and_then(|n| ShareLayout::compute_for(spec, n, self.n_ubatch()).ok());
        if ours.is_some_and(|ours| sorted(ours.regions()) == sorted(&self.regions)) {
            return " (they are the model's in another order)".into();
        }
        String::new()
    }

    /// The layout with a list of tensors.
    fn listed(&self, spec: &KvSpec, n_ctx: Option<u32>, list: &[HeaderTensor]) -> Result<ShareLayout, ShareRefusal> {
        // Whether the spec can be shared at all.
        let model = ShareLayout::compute_for(spec, n_ctx.unwrap_or(CELL_STEP), self.n_ubatch())?;
        let full = n_ctx.and_then(padded_ctx).map(u64::from);
        let index: HashMap<(u32, Part), usize> =
            model.tensors().iter().enumerate().map(|(i, t)| ((t.layer, t.part), i)).collect();
        let mut tensors: Vec<Option<ShareTensor>> = vec![None; index.len()];
        // By section, the cells of its tensors and the first that has them.
        let mut cells: Vec<Option<(u64, &str)>> = vec![None; spec.sections.len()];
        let mut hashes = Vec::with_capacity(list.len());
        for t in list {
            let differs = |what, header: String, ours: String| {
                let name = t.name.chars().take(60).collect();
                Err(ShareRefusal::Tensor { name, what, header, ours })
            };
            let Some((layer, part)) = name_parts(&t.name) else {
                return differs("its name", "not a cache's".into(), "cache_k_l<layer> or cache_v_l<layer>".into());
            };
            let Some(&i) = index.get(&(layer, part)) else {
                let layers: Vec<u32> = spec.sections.iter().flat_map(|s| &s.layers).map(|l| l.layer).collect();
                let last = layers.iter().max().copied().unwrap_or(0);
                let ours = match part {
                    Part::K | Part::V => format!("one of {} up to {last}", layers.len()),
                    _ => "no recurrent one".into(),
                };
                return differs("its layer", layer.to_string(), ours);
            };
            let want = &model.tensors()[i];
            if tensors[i].is_some() {
                return differs("the number of its kind", "2 or more".into(), "1".into());
            }
            let Some(region) = self.regions.get(usize::from(t.region)) else {
                return differs("its region", t.region.to_string(), format!("below {}", self.regions.len()));
            };
            if t.ty != want.ty {
                return differs("its type", t.ty.to_string(), want.ty.to_string());
            }
            if (t.ne[0], t.ne[2], t.ne[3]) != (want.ne[0], 1, 1) {
                return differs("its shape", format!("{:?}", t.ne), format!("[{}, cells, 1, 1]", want.ne[0]));
            }
            if t.ne[1] == 0 || t.ne[1] > i32::MAX as u64 {
                return differs("its number of cells", t.ne[1].to_string(), "1 to 2147483647".into());
            }
            match (cells[want.section], full) {
                (Some((first, of)), _) if first != t.ne[1] => {
                    return differs("its number of cells", t.ne[1].to_string(), format!("{first} as {of}'s"));
                }
                (_, Some(full)) if spec.sections[want.section].window.is_some() && t.ne[1] > full => {
                    return differs("its number of cells", t.ne[1].to_string(), format!("at most {full}"));
                }
                (_, Some(full)) if spec.sections[want.section].window.is_none() && t.ne[1] != full => {
                    return differs("its number of cells", t.ne[1].to_string(), full.to_string());
                }
                _ => cells[want.section] = Some((t.ne[1], &t.name)),
            }
            let tensor = ShareTensor { region: t.region, offset: t.offset, ne: t.ne, ..*want };
            let len = u128::from(tensor.row_bytes()) * u128::from(t.ne[1]);
            if u128::from(t.offset) + len > region.size.into() {
                let (name, size) = (t.name.clone(), region.size);
                return Err(ShareRefusal::Bounds { name, offset: t.offset, len, region: t.region, size });
            }
            tensors[i] = Some(tensor);
            hashes.push(tensor);
        }
        let mut all = Vec::with_capacity(tensors.len());
        for (found, want) in tensors.into_iter().zip(model.tensors()) {
            let (name, listed, ours) = (want.name(), list.len(), index.len());
            all.push(found.ok_or(ShareRefusal::Missing { name, listed, ours })?);
        }
        let mut by_place = all.clone();
        by_place.sort_by_key(|t| (t.region, t.offset));
        for pair in by_place.windows(2) {
            let [a, b] = [pair[0], pair[1]];
            // No overflow: both lie inside a region.
            if a.region == b.region && a.offset + a.len() > b.offset {
                let (names, offsets) = ([a.name(), b.name()], [a.offset, b.offset]);
                return Err(ShareRefusal::Overlap { names, offsets, len: a.len(), region: a.region });
            }
        }
        for (region, r) in self.regions.iter().enumerate() {
            let here = |t: &&ShareTensor| usize::from(t.region) == region;
            let ours = hash_of(all.iter().filter(here));
            if r.layout != ours && r.layout != hash_of(hashes.iter().filter(here)) {
                let (what, hint) = ("its list of tensors has".to_owned(), String::new());
                return Err(ShareRefusal::Hash { region, header: r.layout, ours, what, hint });
            }
        }
        Ok(ShareLayout::from_parts(self.regions.clone(), all))
    }
}

/// The memories that a model can have: sliding-window layers with all cells or only their window's. What the spec says comes first.
fn variants(spec: &KvSpec) -> Vec<KvSpec> {
    let mut all = vec![spec.clone()];
    if spec.sections.iter().any(|s| s.window.is_some()) {
        all.push(KvSpec { swa_full: !spec.swa_full, ..spec.clone() });
    }
    all
}

fn name_parts(name: &str) -> Option<(u32, Part)> {
    let (part, digits) = [Part::K, Part::V, Part::R, Part::S]
        .into_iter()
        .find_map(|part| Some((part, name.strip_prefix(tensor_name(0, part).strip_suffix('0')?)?)))?;
    let layer: u32 = digits.parse().ok()?;
    (tensor_name(layer, part) == name).then_some((layer, part))
}

/// The text of a header, and the length before it if there is one.
fn without_prefix(bytes: &[u8]) -> (&[u8], Option<u64>) {
    // C programs may count the string's end.
    let bytes = &bytes[..bytes.len() - bytes.iter().rev().take_while(|&&b| b == 0).count()];
    let begins = bytes.iter().find(|b| !b.is_ascii_whitespace()) == Some(&b'{');
    for n in [4usize, 8] {
        let Some((prefix, text)) = bytes.split_at_checked(n).filter(|(_, text)| text.first() == Some(&b'{')) else {
            continue;
        };
        let little = prefix.iter().rev().fold(0, |v, &b| v << 8 | u64::from(b));
        let big = prefix.iter().fold(0, |v, &b| v << 8 | u64::from(b));
        // A length may look like the beginning of a text, but not the other way round.
        let fits = [little, big].into_iter().find(|v| (text.len() as u64..text.len() as u64 + 9).contains(v));
        if fits.is_some() || !begins {
            return (text, Some(fits.unwrap_or(little.min(big))));
        }
    }
    (bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes), None)
}

/// JSON, with numbers as they were written and every key once.
#[derive(Clone, PartialEq, Debug)]
enum Json {
    Null,
    Bool(bool),
    Number(u64),
    Negative(i64),
    Float(f64),
    Text(String),
    List(Vec<Json>),
    Map(BTreeMap<String, Json>),
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Json, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Json;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON")
            }
            fn visit_unit<E>(self) -> Result<Json, E> {
                Ok(Json::Null)
            }
            fn visit_bool<E>(self, v: bool) -> Result<Json, E> {
                Ok(Json::Bool(v))
            }
            fn visit_u64<E>(self, v: u64) -> Result<Json, E> {
                Ok(Json::Number(v))
            }
            fn visit_i64<E>(self, v: i64) -> Result<Json, E> {
                Ok(u64::try_from(v).map_or(Json::Negative(v), Json::Number))
            }
            fn visit_f64<E>(self, v: f64) -> Result<Json, E> {
                Ok(Json::Float(v))
            }
            fn visit_str<E>(self, v: &str) -> Result<Json, E> {
                Ok(Json::Text(v.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
                let mut list = Vec::new();
                while let Some(v) = seq.next_element()? {
                    list.push(v);
                }
                Ok(Json::List(list))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
                let mut map = BTreeMap::new();
                while let Some(key) = access.next_key::<String>()? {
                    if map.contains_key(&key) {
                        return Err(A::Error::custom(format!("the key {} stands twice", quoted(&key))));
                    }
                    map.insert(key, access.next_value()?);
                }
                Ok(Json::Map(map))
            }
        }
        d.deserialize_any(Any)
    }
}

fn quoted(text: &str) -> String {
    let mut short: String = text.chars().take(60).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}

impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Json::Null => f.write_str("missing"),
            Json::Bool(v) => v.fmt(f),
            Json::Number(v) => v.fmt(f),
            Json::Negative(v) => v.fmt(f),
            Json::Float(v) => write!(f, "{v:?}"),
            Json::Text(v) => f.write_str(&quoted(v)),
            Json::List(v) => write!(f, "a list of {}", v.len()),
            Json::Map(v) => write!(f, "an object of {} keys", v.len()),
        }
    }
}

impl Json {
    fn is_not(&self, key: &str, want: &'static str) -> HeaderError {
        let key = if key.is_empty() { "top level".into() } else { key.into() };
        HeaderError::Value { key, want, found: self.to_string() }
    }

    fn u64(&self, key: &str) -> Result<u64, HeaderError> {
        let text = match self {
            Json::Number(v) => return Ok(*v),
            Json::Text(text) => text.trim(),
            _ => "",
        };
        let hex = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
        // printf's %016llx, where it cannot be anything else.
        let hex = hex.or((text.len() == 16 && text.bytes().any(|b| b.is_ascii_alphabetic())).then_some(text));
        let (digits, radix) = hex.map_or((text, 10), |hex| (hex, 16));
        // `from_str_radix` alone would take a sign.
        let digits = Some(digits).filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()));
        digits
            .and_then(|d| u64::from_str_radix(d, radix).ok())
            .ok_or_else(|| self.is_not(key, "a whole number from 0 to 18446744073709551615"))
    }

    fn positive(&self, key: &str) -> Result<u32, HeaderError> {
        let number = self.u64(key).ok().and_then(|v| u32::try_from(v).ok());
        let number = number.filter(|v| (1..=i32::MAX as u32).contains(v));
        number.ok_or_else(|| self.is_not(key, "a whole number from 1 to 2147483647"))
    }

    fn switch(&self, key: &str) -> Result<bool, HeaderError> {
        match self {
            Json::Bool(v) => return Ok(*v),
            Json::Number(v @ (0 | 1)) => return Ok(*v == 1),
            Json::Text(v) if ["on", "true", "1", "enabled"].contains(&v.as_str()) => return Ok(true),
            Json::Text(v) if ["off", "false", "0", "disabled"].contains(&v.as_str()) => return Ok(false),
            _ => {}
        }
        Err(self.is_not(key, "true or false"))
    }

    fn cache_type(&self, key: &str) -> Result<CacheType, HeaderError> {
        let ty = match self {
            Json::Text(name) => name.parse().ok(),
            Json::Number(id) => u32::try_from(*id).ok().and_then(CacheType::from_id),
            _ => None,
        };
        ty.ok_or_else(|| self.is_not(key, "the name or ggml's number of a cache type, such as \"f16\""))
    }
}

/// A value that is there.
fn get<'j>(map: &'j BTreeMap<String, Json>, key: &str) -> Option<&'j Json> {
    map.get(key).filter(|v| **v != Json::Null)
}

struct Params<'j> {
    nested: &'j BTreeMap<String, Json>,
    flat: &'j BTreeMap<String, Json>,
}

impl Params<'_> {
    fn get<T: PartialEq>(
        &self,
        key: &'static str,
        read: impl Fn(&Json, &str) -> Result<T, HeaderError>,
    ) -> Result<Option<T>, HeaderError> {
        let flat = get(self.flat, key).map(|v| Ok((v, read(v, key)?))).transpose()?;
        let nested = get(self.nested, key).map(|v| Ok((v, read(v, &format!("params.{key}"))?))).transpose()?;
        match (nested, flat) {
            (Some((a, nested)), Some((b, flat))) if nested != flat => {
                Err(HeaderError::Conflict { key, nested: a.to_string(), flat: b.to_string() })
            }
            (nested, flat) => Ok(nested.or(flat).map(|(_, v)| v)),
        }
    }
}

/// A list of objects, each read with its path at hand.
fn list<T>(
    top: &BTreeMap<String, Json>,
    key: &str,
    read: impl Fn(&BTreeMap<String, Json>, &str) -> Result<T, HeaderError>,
) -> Result<Option<Vec<T>>, HeaderError> {
    let items = match get(top, key) {
        None => return Ok(None),
        Some(Json::List(items)) => items,
        Some(other) => return Err(other.is_not(key, "a list of objects")),
    };
    let read = |(i, item): (usize, &Json)| {
        let key = format!("{key}[{i}]");
        match item {
            Json::Map(map) => read(map, &key),
            other => Err(other.is_not(&key, "an object")),
        }
    };
    items.iter().enumerate().map(read).collect::<Result<Vec<T>, _>>().map(Some)
}

fn field<T>(
    map: &BTreeMap<String, Json>,
    path: &str,
    key: &str,
    read: impl Fn(&Json, &str) -> Result<T, HeaderError>,
) -> Result<T, HeaderError> {
    read(get(map, key).unwrap_or(&Json::Null), &format!("{path}.{key}"))
}

fn region(map: &BTreeMap<String, Json>, path: &str) -> Result<ShareRegion, HeaderError> {
    Ok(ShareRegion {
        offset: if get(map, "offset").is_some() { field(map, path, "offset", Json::u64)? } else { 0 },
        size: field(map, path, "size", Json::u64)?,
        layout: field(map, path, "layout", Json::u64)?,
    })
}

fn tensor(map: &BTreeMap<String, Json>, path: &str, n_regions: usize) -> Result<HeaderTensor, HeaderError> {
    let name = field(map, path, "name", |v, key| match v {
        Json::Text(name) => Ok(name.clone()),
        other => Err(other.is_not(key, "a name")),
    })?;
    let region = |v: &Json, key: &str| {
        let number = v.u64(key)?;
        u16::try_from(number).map_err(|_| v.is_not(key, "the index of a region"))
    };
    let ne = |v: &Json, key: &str| {
        let items = match v {
            Json::List(items) if (1..=4).contains(&items.len()) => items,
            other => return Err(other.is_not(key, "a list of 1 to 4 numbers")),
        };
        let mut ne = [1; 4];
        for (i, (n, v)) in ne.iter_mut().zip(items).enumerate() {
            *n = v.u64(&format!("{key}[{i}]"))?;
        }
        Ok(ne)
    };
    Ok(HeaderTensor {
        name,
        region: if n_regions == 1 && get(map, "region").is_none() { 0 } else { field(map, path, "region", region)? },
        offset: field(map, path, "offset", Json::u64)?,
        ty: field(map, path, "type", Json::cache_type)?,
        ne: field(map, path, "ne", ne)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(name_parts("cache_k_l0"), Some((0, Part::K)));
        assert_eq!(name_parts("cache_v_l127"), Some((127, Part::V)));
        assert_eq!(name_parts("cache_s_l3"), Some((3, Part::S)));
        for bad in ["cache_k_l", "cache_k_l01", "cache_k_l+1", "cache_q_l0", "k", "", "cache_k_l0 (view)"] {
            assert_eq!(name_parts(bad), None, "{bad}");
        }
    }

    #[test]
    fn lengths_before_the_text_are_skipped() {
        // 123 bytes: the length itself begins with a brace.
        let text = format!("{{\"a\": {}}}", "1".repeat(116));
        assert_eq!(text.len(), 123);
        let text = text.as_bytes();
        let with = |prefix: &[u8]| [prefix, text].concat();
        let lengths: [&[u8]; 6] = [
            &123u32.to_le_bytes(),
            &123u32.to_be_bytes(),
            &123u64.to_le_bytes(),
            &123u64.to_be_bytes(),
            &[1, 2, 3, 4],
            &127u32.to_le_bytes(),
        ];
        for prefix in lengths {
            assert_eq!(without_prefix(&with(prefix)).0, text, "{prefix:?}");
        }
        for prefix in [&b""[..], b"    ", b"        ", b" \n", b"\xef\xbb\xbf"] {
            let with = with(prefix);
            let (found, none) = without_prefix(&with);
            assert_eq!((found.trim_ascii(), none), (text, None), "{prefix:?}");
        }
        assert_eq!(without_prefix(b"{\"a{\":1}").1, None);
        assert_eq!(without_prefix(b"").0, b"");
        assert_eq!(without_prefix(&[text, &[0, 0]].concat()).0, text);
    }
}
