//! Matrix products on a device beside the host: which of its kernels are used, weights on their way to it, blocks of rows through
//! it, and what happens when it fails.
//!
//! A projection of `m` rows goes through a kernel in blocks of the kernel's rows. Two launches are on their way at a time: while
//! one runs, the host rounds the next block's activations, and while that one runs, it checks and scales the results of the
//! first. Projections of the same activations (query, key and value; gate and up) share launches where a kernel is wide enough.
//!
//! **Nothing of the device's is believed.** A kernel has passed [`check::self_test`] before it gets here, and every row of
//! every product is held against the weight's [`Probe`](npu_kernels::check::Probe). Whatever is wrong - a row, a launch that does not end, a device
//! that is gone - the projection is given back to the host, which computes it from the same rows as if there were no device.
//! So a failure costs time and never the result.

use crate::weights::Linear;
use npu_kernels::catalogue::{self, KernelId, Spec};
use npu_kernels::check::{self, Fault};
use npu_kernels::device::{Buffer, Command, Device, DeviceError, DeviceInfo, Fence, Support};
use npu_kernels::host::Pool;
use npu_kernels::packed::Packed;
use npu_kernels::{WeightView, quant};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Where packed weights are kept between runs. It may forget, and it may give back something else than was put in: what comes
/// from it is checked. Nothing here depends on it but time.
pub trait PackStore {
    /// What was kept under this name.
    fn get(&mut self, key: &str) -> Option<Vec<u8>>;
    /// Keeps it.
    fn put(&mut self, key: &str, bytes: &[u8]);
}

/// A store that keeps nothing.
impl PackStore for () {
    fn get(&mut self, _: &str) -> Option<Vec<u8>> {
        None
    }
    fn put(&mut self, _: &str, _: &[u8]) {}
}

/// How long a launch may take. The driver's own watchdog is at 2 seconds.
const LAUNCH_LIMIT: Duration = Duration::from_secs(4);
/// Launches on their way at a time.
const IN_FLIGHT: usize = 2;

/// What was done where.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Usage {
    /// Projections that the device computed, each of a chunk of rows.
    pub on_device: u64,
    /// Projections that were the host's from the start: there was no kernel for them.
    pub on_host: u64,
    /// Projections that the device began or was to do, and the host did.
    pub made_up: u64,
    /// Launches that completed.
    pub launches: u64,
    /// Bytes of their operands.
    pub bytes: u64,
    /// Bytes of weights among them.
    pub weight_bytes: u64,
    /// Milliseconds spent packing weights, or fetching them packed.
    pub pack_ms: f64,
    /// Milliseconds that the host waited for launches with nothing else to do.
    pub wait_ms: f64,
    /// Weights that were packed, and those that had been kept.
    pub packed: [u64; 2],
    /// What went wrong, one sentence each.
    pub failures: Vec<String>,
}

/// One launch's worth of weights on the device.
struct Loaded {
    kernel: KernelId,
    buffer: Buffer,
    scales: Vec<f32>,
    probe: check::Probe,
    k: usize,
}

/// The buffers of a kernel's launches.
struct Slots {
    a: [Buffer; IN_FLIGHT],
    c: [Buffer; IN_FLIGHT],
    /// For weights, in use and not.
    b: Vec<Buffer>,
}

/// See the module's documentation.
pub struct Offload {
    device: Box<dyn Device + Send>,
    store: Box<dyn PackStore + Send>,
    /// Per kernel: why it is not used.
    out_of_use: Vec<Option<String>>,
    /// Why the device is not used any more.
    lost: Option<String>,
    /// Whether that is because somebody else has it.
    busy: bool,
    slots: HashMap<KernelId, Slots>,
    /// Weights of the layer at hand, by where they begin.
    loaded: Vec<(usize, Loaded)>,
    usage: Usage,
}

/// A kernel and the projections whose outputs it computes side by side.
type Group = (KernelId, std::ops::Range<usize>);
/// A row of a projection's output, and what is added to it.
type Line<'a> = (&'a mut [f32], Option<&'a [f32]>);

/// A launch on its way.
struct Flight {
    fence: Fence,
    /// Which of the loaded weights.
    group: usize,
    block: usize,
    slot: usize,
}

/// Why the device did not do something.
enum Failure {
    Kernel(KernelId, String),
    Device(String),
    /// The weight itself: a value that is not finite. The host's computation will say so.
    Weight(String),
}

/// Rounded rows of one block.
struct Block {
    codes: Vec<i8>,
    scales: Vec<f32>,
}

impl Offload {
    /// Takes a device over. None of its kernels is used before [`Offload::self_test`] has been run for it.
    pub fn new(device: Box<dyn Device + Send>, store: Box<dyn PackStore + Send>) -> Offload {
        let ids = (0..device.kernels().len()).map(KernelId);
        let out_of_use = ids.map(|id| match device.supports(id) {
            _ if !device.kernels()[id.0].is_int8() => Some("prefill uses int8 kernels only".to_owned()),
            Support::No(why) => Some(why),
            Support::Yes => Some("not tested yet".to_owned()),
        });
        let out_of_use = out_of_use.collect();
        let (slots, loaded) = Default::default();
        Offload { device, store, out_of_use, lost: None, busy: false, slots, loaded, usage: Usage::default() }
    }

    /// Tests the kernels that a plan would use, `needs` being inputs and outputs of its projections, and takes those into use
    /// that pass. Returns a line for each that was tried: its name, and what is wrong with it if anything is.
    pub fn self_test(&mut self, needs: &[(usize, Vec<usize>)]) -> Vec<(String, Option<String>)> {
        let mut lines = Vec::new();
        let untested = |o: &Offload, id: KernelId| o.device.supports(id).is_yes() && o.device.kernels()[id.0].is_int8();
        let mut wanted: Vec<KernelId> = Vec::new();
        for (k, n) in needs {
            let fits = |n: usize| catalogue::choose(self.device.kernels(), *k, n, |id| untested(self, id));
            match fits(n.iter().sum()) {
                Ok(id) => wanted.push(id),
                Err(_) => wanted.extend(n.iter().filter_map(|n| fits(*n).ok())),
            }
        }
        wanted.sort_unstable();
        wanted.dedup();
        for id in wanted {
            let name = self.device.kernels()[id.0].name.clone();
            if let Some(why) = &self.lost {
                lines.push((name, Some(why.clone())));
                continue;
            }
            let wrong = match check::self_test(&mut *self.device, id) {
                Ok(()) => None,
                Err(fault) => {
                    if matches!(&fault, Fault::Device(e) if e.ends_device()) {
                        self.lost = Some(fault.to_string());
                        self.busy = matches!(&fault, Fault::Device(DeviceError::Busy { .. }));
                    }
                    Some(format!("self-test: {fault}"))
                }
            };
            self.out_of_use[id.0] = wrong.clone();
            lines.push((name, wrong));
        }
        lines
    }

    /// What the device is.
    pub fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// Its kernels.
    pub fn kernels(&self) -> &[Spec] {
        self.device.kernels()
    }

    /// Why the device is not used any more, if that is so.
    pub fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    /// Whether the device is not used because somebody else has it.
    pub fn is_busy(&self) -> bool {
        self.busy
    }

    /// Why a kernel is not used, if that is so.
    pub fn out_of_use(&self, kernel: KernelId) -> Option<&str> {
        self.out_of_use.get(kernel.0)?.as_deref()
    }

    /// Kernels that are in use.
    pub fn usable(&self) -> usize {
        if self.lost.is_some() { 0 } else { self.out_of_use.iter().filter(|o| o.is_none()).count() }
    }

    /// What was done so far.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// Bytes that a run in chunks of so many positions takes beside the plan's: buffers of the kernels that `needs` use, one
    /// weight packed, and the rows that are kept as f32 and rounded to int8.
    pub fn memory_bytes(&self, needs: &[(usize, Vec<usize>)], chunk: usize) -> u64 {
        let rows = needs.iter().map(|(k, _)| chunk as u64 * 5 * *k as u64).sum::<u64>();
        let mut ids: Vec<KernelId> =
            needs.iter().flat_map(|(k, n)| self.choose(*k, n).0.into_iter().map(|g| g.0)).collect();
        let weights = ids.iter().map(|id| self.kernels()[id.0].bytes()[1] as u64).max().unwrap_or(0);
        ids.sort_unstable();
        ids.dedup();
        let each = |id: &KernelId| {
            let [a, b, c] = self.kernels()[id.0].bytes().map(|b| b as u64);
            2 * a + 3 * b + 2 * c
        };
        ids.iter().map(each).sum::<u64>() + 3 * weights + rows
    }

    /// Which kernels compute projections of `n` outputs each, all of `k` inputs: the groups, each a kernel and the parts it
    /// takes, and the parts that stay on the host with the reason.
    pub(crate) fn choose(&self, k: usize, n: &[usize]) -> (Vec<Group>, Vec<(usize, String)>) {
        if let Some(why) = &self.lost {
            return (Vec::new(), (0..n.len()).map(|i| (i, why.clone())).collect());
        }
        let fits = |n: usize| {
            let fits = catalogue::choose(self.device.kernels(), k, n, |id| self.out_of_use[id.0].is_none());
            fits.map_err(|why| match catalogue::choose(self.device.kernels(), k, n, |_| true) {
                Ok(id) => match &self.out_of_use[id.0] {
                    Some(reason) => format!("{}: {reason}", self.device.kernels()[id.0].name),
                    None => why,
                },
                Err(_) => why,
            })
        };
        if let Ok(id) = fits(n.iter().sum()) {
            return (vec![(id, 0..n.len())], Vec::new());
        }
        let (mut groups, mut rest) = (Vec::new(), Vec::new());
        for (i, n) in n.iter().enumerate() {
            match fits(*n) {
                Ok(id) => groups.push((id, i..i + 1)),
                Err(why) => rest.push((i, why)),
            }
        }
        (groups, rest)
    }

    /// Computes `out = rows · weight + bias` for projections of the same rows, as far as the device can; returns those that are
    /// left for the host.
    pub(crate) fn project<'p, 'l, 'o>(
        &mut self,
        pool: &Pool,
        rows: &[f32],
        k: usize,
        mut parts: Vec<(&'p Linear<'l>, &'o mut [f32])>,
    ) -> Vec<(&'p Linear<'l>, &'o mut [f32])> {
        let n: Vec<usize> = parts.iter().map(|(linear, _)| linear.weight.n()).collect();
        let (groups, _) = self.choose(k, &n);
        if groups.is_empty() {
            let count = if self.lost.is_some() { &mut self.usage.made_up } else { &mut self.usage.on_host };
            *count += parts.len() as u64;
            return parts;
        }
        let result = self.groups(pool, rows, k, &groups, &mut parts);
        let covered = |i: usize| groups.iter().any(|(_, range)| range.contains(&i));
        let done = (0..parts.len()).filter(|i| covered(*i)).count() as u64;
        self.usage.on_host += parts.len() as u64 - done;
        match result {
            Ok(()) => {
                self.usage.on_device += done;
                let mut at = 0..;
                parts.retain(|_| !covered(at.next().unwrap_or(0)));
                parts
            }
            Err(failure) => {
                // All of it, not only what is missing: the parts have one set of rows and belong together.
                self.usage.made_up += done;
                self.note(failure);
                parts
            }
        }
    }

    /// Draws the conclusion from a failure.
    fn note(&mut self, failure: Failure) {
        let line = match failure {
            Failure::Kernel(id, why) => {
                let name = self.device.kernels()[id.0].name.clone();
                let line = format!("kernel {name} is out of use: {why}");
                self.out_of_use[id.0] = Some(why);
                line
            }
            Failure::Device(why) => {
                let line = format!("the device is out of use: {why}");
                self.lost = Some(why);
                line
            }
            Failure::Weight(why) => why,
        };
        if !self.usage.failures.contains(&line) {
            self.usage.failures.push(line);
        }
    }

    fn groups(
        &mut self,
        pool: &Pool,
        rows: &[f32],
        k: usize,
        groups: &[Group],
        parts: &mut [(&Linear<'_>, &mut [f32])],
    ) -> Result<(), Failure> {
        let mut loaded = Vec::with_capacity(groups.len());
        for (id, range) in groups {
            let weights: Vec<WeightView<'_>> = parts[range.clone()].iter().map(|(linear, _)| linear.weight).collect();
            loaded.push(self.load(*id, &weights)?);
        }
        let m = rows.len() / k.max(1);
        let mut flights: VecDeque<Flight> = VecDeque::new();
        let mut blocks: HashMap<(usize, usize), Rc<Block>> = HashMap::new();
        let mut launched = 0;
        // Blocks outside, groups inside: rows are rounded once for all groups whose kernels take as many.
        let m_of = |this: &Offload, g: usize| this.device.kernels()[groups[g].0.0].m;
        let of_group = |g: usize| (0..m.div_ceil(m_of(self, g))).map(move |block| (block, g));
        let mut list: Vec<(usize, usize)> = (0..groups.len()).flat_map(of_group).collect();
        list.sort_by_key(|&(block, g)| (block * m_of(self, g), g));
        let result = (|| {
            for (block, g) in list {
                let per = m_of(self, g);
                let rounded = blocks.entry((per, block)).or_insert_with(|| {
                    let part = &rows[block * per * k..m.min((block + 1) * per) * k];
                    Rc::new(round(pool, part, k))
                });
                let rounded = rounded.clone();
                let slot = launched % IN_FLIGHT;
                let flight = self.launch(&rounded, groups[g].0, g, block, slot, loaded[g])?;
                launched += 1;
                flights.push_back(flight);
                if flights.len() == IN_FLIGHT
                    && let Some(flight) = flights.pop_front()
                {
                    self.finish(pool, &flight, groups, &loaded, &blocks, parts)?;
                    blocks.retain(|(per, b), _| (b + 1) * per > flight.block * m_of(self, flight.group));
                }
            }
            while let Some(flight) = flights.pop_front() {
                self.finish(pool, &flight, groups, &loaded, &blocks, parts)?;
            }
            Ok(())
        })();
        if matches!(result, Err(Failure::Kernel(..))) {
            // The device itself is well: let it end what it has begun before its buffers are used again.
            for flight in flights {
                if let Err(e) = self.device.wait(flight.fence, LAUNCH_LIMIT) {
                    return Err(Failure::Device(e.to_string()));
                }
            }
        }
        result
    }

    /// The place of these weights among the loaded ones, which they are now if they were not.
    fn load(&mut self, id: KernelId, weights: &[WeightView<'_>]) -> Result<usize, Failure> {
        let key = weights.first().map_or(0, |w| w.data().as_ptr() as usize);
        if let Some(at) = self.loaded.iter().position(|(k, l)| *k == key && l.kernel == id) {
            return Ok(at);
        }
        let started = Instant::now();
        let spec = self.device.kernels()[id.0].clone();
        let (k, n) = (weights.first().map_or(0, WeightView::k), weights.iter().map(WeightView::n).sum());
        let name = Packed::key(&spec, weights);
        let kept = self.store.get(&name).and_then(|bytes| Packed::from_bytes(&spec, k, n, &bytes));
        self.usage.packed[usize::from(kept.is_some())] += 1;
        let packed = match kept {
            Some(packed) => packed,
            None => {
                let what = |row| Failure::Weight(format!("output {row} of a weight is not finite; left to the host"));
                let packed = Packed::new(&spec, weights).map_err(what)?;
                self.store.put(&name, &packed.to_bytes());
                packed
            }
        };
        let buffer = self.weight_buffer(id, &spec)?;
        self.device.write(buffer, 0, &packed.bytes).map_err(|e| failure(id, &e))?;
        self.loaded.push((key, Loaded { kernel: id, buffer, scales: packed.scales, probe: packed.probe, k }));
        self.usage.pack_ms += ms(started.elapsed());
        Ok(self.loaded.len() - 1)
    }

    /// A buffer for weights of a kernel. Those of the layer before are not needed any more.
    fn weight_buffer(&mut self, id: KernelId, spec: &Spec) -> Result<Buffer, Failure> {
        let [a_bytes, b_bytes, c_bytes] = spec.bytes();
        if !self.slots.contains_key(&id) {
            let mut get = |bytes| self.device.alloc(bytes).map_err(|e| failure(id, &e));
            let slots = Slots { a: [get(a_bytes)?, get(a_bytes)?], c: [get(c_bytes)?, get(c_bytes)?], b: Vec::new() };
            self.slots.insert(id, slots);
        }
        let slots = self.slots.get_mut(&id).expect("made above");
        let used: Vec<Buffer> = self.loaded.iter().map(|(_, l)| l.buffer).collect();
        if let Some(free) = slots.b.iter().find(|b| !used.contains(b)) {
            return Ok(*free);
        }
        let buffer = self.device.alloc(b_bytes).map_err(|e| failure(id, &e))?;
        slots.b.push(buffer);
        Ok(buffer)
    }

    /// Weights of a layer that is done with are not asked for again.
    pub(crate) fn next_layer(&mut self) {
        self.loaded.clear();
    }

    fn launch(
        &mut self,
        block: &Block,
        id: KernelId,
        group: usize,
        at: usize,
        slot: usize,
        loaded: usize,
    ) -> Result<Flight, Failure> {
        let spec = &self.device.kernels()[id.0];
        let (m, k_pad, bytes) = (spec.m, spec.k, spec.bytes()[0]);
        let k = self.loaded[loaded].1.k;
        // Rows of the kernel's width; what is not a row of ours is zeros.
        let mut a = vec![0u8; bytes];
        for (to, from) in a.chunks_exact_mut(k_pad).zip(block.codes.chunks_exact(k)).take(m) {
            to.iter_mut().zip(from).for_each(|(t, f)| *t = f.cast_unsigned());
        }
        let slots = &self.slots[&id];
        let command = Command { kernel: id, a: slots.a[slot], b: self.loaded[loaded].1.buffer, c: slots.c[slot] };
        self.device.write(command.a, 0, &a).map_err(|e| failure(id, &e))?;
        let fence = self.device.submit(&command).map_err(|e| failure(id, &e))?;
        Ok(Flight { fence, group, block: at, slot })
    }

    fn finish(
        &mut self,
        pool: &Pool,
        flight: &Flight,
        groups: &[Group],
        loaded: &[usize],
        blocks: &HashMap<(usize, usize), Rc<Block>>,
        parts: &mut [(&Linear<'_>, &mut [f32])],
    ) -> Result<(), Failure> {
        let (id, range) = &groups[flight.group];
        let spec = self.device.kernels()[id.0].clone();
        let waited = Instant::now();
        self.device.wait(flight.fence, LAUNCH_LIMIT).map_err(|e| failure(*id, &e))?;
        self.usage.wait_ms += ms(waited.elapsed());
        let block = &*blocks[&(spec.m, flight.block)];
        let rows = block.scales.len();
        let mut c = vec![0u8; rows * spec.n * 4];
        self.device.read(self.slots[id].c[flight.slot], 0, &mut c).map_err(|e| failure(*id, &e))?;
        self.usage.launches += 1;
        self.usage.bytes += spec.streamed();
        self.usage.weight_bytes += spec.bytes()[1] as u64;

        let weight = &self.loaded[loaded[flight.group]].1;
        let first = flight.block * spec.m;
        // One task per row: its part of every output.
        let mut outs: Vec<Vec<Line<'_>>> = (0..rows).map(|_| Vec::with_capacity(range.len())).collect();
        for (linear, out) in &mut parts[range.clone()] {
            let n = linear.weight.n();
            let lines = out[first * n..(first + rows) * n].chunks_exact_mut(n);
            outs.iter_mut().zip(lines).for_each(|(list, line)| list.push((line, linear.bias.as_deref())));
        }
        let bad = AtomicUsize::new(usize::MAX);
        pool.for_each_mut(&mut outs, |i, list| {
            let c = &c[i * spec.n * 4..][..spec.n * 4];
            if !weight.probe.holds(&block.codes[i * weight.k..][..weight.k], c) {
                bad.fetch_min(i, Ordering::Relaxed);
                return;
            }
            let (mut numbers, mut scales) = (c.as_chunks::<4>().0.iter(), weight.scales.iter());
            let row = block.scales[i];
            for (line, bias) in list {
                for ((o, c), s) in line.iter_mut().zip(numbers.by_ref()).zip(scales.by_ref()) {
                    *o = i32::from_le_bytes(*c) as f32 * row * s;
                }
                if let Some(bias) = bias {
                    line.iter_mut().zip(*bias).for_each(|(o, b)| *o += b);
                }
            }
        });
        match bad.into_inner() {
            usize::MAX => Ok(()),
            row => Err(Failure::Kernel(*id, format!("row {row} of a product was wrong"))),
        }
    }
}

impl Drop for Offload {
    fn drop(&mut self) {
        if self.lost.is_none() {
            for slots in self.slots.values() {
                slots.a.iter().chain(&slots.c).chain(&slots.b).for_each(|b| self.device.free(*b));
            }
        }
    }
}

fn failure(id: KernelId, e: &DeviceError) -> Failure {
    if e.ends_device() { Failure::Device(e.to_string()) } else { Failure::Kernel(id, e.to_string()) }
}

/// Rounds rows on all threads.
fn round(pool: &Pool, rows: &[f32], k: usize) -> Block {
    let m = rows.len() / k;
    let (mut codes, mut scales) = (vec![0i8; m * k], vec![0f32; m]);
    let mut tasks: Vec<(&mut [i8], &mut f32)> = codes.chunks_exact_mut(k).zip(&mut scales).collect();
    pool.for_each_mut(&mut tasks, |i, (codes, scale)| **scale = quant::row(&rows[i * k..][..k], codes));
    Block { codes, scales }
}

fn ms(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use npu_kernels::catalogue::{Catalogue, Layout};
    use npu_kernels::fake::{Event, Fake, Misfortune};
    use npu_kernels::{WeightType, weight};

    const K: usize = 96;
    const M: usize = 300;

    struct Case {
        rows: Vec<f32>,
        data: [Vec<u8>; 2],
        bias: Vec<f32>,
    }

    fn case() -> Case {
        let mut seed = 7u32;
        let mut next = move || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        let mut many = |n: usize| (0..n).map(|_| next()).collect::<Vec<f32>>();
        let mut rows = many(M * K);
        rows[5 * K..6 * K].fill(0.0);
        let bytes = |v: Vec<f32>| v.iter().flat_map(|v| v.to_le_bytes()).collect();
        Case { rows, data: [bytes(many(40 * K)), bytes(many(72 * K))], bias: many(72) }
    }

    fn linears(case: &Case) -> [Linear<'_>; 2] {
        let view = |i: usize, n| weight::WeightView::new(WeightType::F32, n, K, &case.data[i]).unwrap();
        [Linear { weight: view(0, 40), bias: None }, Linear { weight: view(1, 72), bias: Some(case.bias.clone()) }]
    }

    /// The contract, written out plainly: no padding, no layout, no blocks.
    fn plain(case: &Case, linear: &Linear<'_>) -> Vec<f32> {
        let quantise = |x: &[f32]| {
            let scale = x.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0;
            let code = |v: &f32| if scale == 0.0 { 0 } else { (v / scale).round().clamp(-127.0, 127.0) as i32 };
            (x.iter().map(code).collect::<Vec<i32>>(), scale)
        };
        let row_of = |j: usize| -> Vec<f32> {
            linear.weight.row(j).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
        };
        let weights: Vec<_> = (0..linear.weight.n()).map(|j| quantise(&row_of(j))).collect();
        let mut out = Vec::new();
        for row in case.rows.chunks_exact(K) {
            let (a, sa) = quantise(row);
            for (j, (b, sb)) in weights.iter().enumerate() {
                let c: i32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                out.push(c as f32 * sa * sb + linear.bias.as_ref().map_or(0.0, |b| b[j]));
            }
        }
        out
    }

    fn fake(kernels: Vec<Spec>) -> Fake {
        Fake::new(Catalogue::new(kernels).unwrap(), Pool::new(1).unwrap())
    }

    fn offload(fake: Fake) -> Offload {
        let mut offload = Offload::new(Box::new(fake), Box::new(()));
        for (name, wrong) in offload.self_test(&[(K, vec![40, 72])]) {
            assert_eq!(wrong, None, "{name}");
        }
        offload
    }

    fn wide() -> Vec<Spec> {
        let mut blocked = Spec::int8("wide", "QKV", 128, 128);
        blocked.b.layout = Layout::Blocked64x128;
        vec![blocked]
    }

    fn narrow() -> Vec<Spec> {
        // Kernels of other widths and row counts, one of them for each part.
        let small = Spec { m: 64, ..Spec::int8("small", "K", 128, 64) };
        let other = Spec { m: 96, ..Spec::int8("other", "V", 96, 80) };
        vec![small, other]
    }

    fn go(offload: &mut Offload, case: &Case, threads: usize) -> (Vec<f32>, Vec<f32>, usize) {
        let [one, two] = linears(case);
        let (mut a, mut b) = (vec![f32::NAN; M * 40], vec![f32::NAN; M * 72]);
        let parts = vec![(&one, &mut a[..]), (&two, &mut b[..])];
        let left = offload.project(&Pool::new(threads).unwrap(), &case.rows, K, parts).len();
        (a, b, left)
    }

    #[test]
    fn a_projection_is_the_contract_to_the_last_bit() {
        let case = case();
        let [one, two] = linears(&case);
        for kernels in [wide(), narrow()] {
            let mut offload = offload(fake(kernels));
            for threads in [1, 3] {
                let (a, b, left) = go(&mut offload, &case, threads);
                assert_eq!(left, 0);
                assert!(a == plain(&case, &one) && b == plain(&case, &two), "{threads} threads");
            }
            assert_eq!(offload.usage().on_device, 4);
        }
    }

    /// The order of what a device is asked, seen from the device.
    #[test]
    fn the_next_block_is_rounded_while_one_runs() {
        struct Spy(Fake, std::sync::Arc<std::sync::Mutex<Vec<Event>>>);
        impl Device for Spy {
            fn info(&self) -> &DeviceInfo {
                self.0.info()
            }
            fn kernels(&self) -> &[Spec] {
                self.0.kernels()
            }
            fn supports(&self, kernel: KernelId) -> Support {
                self.0.supports(kernel)
            }
            fn alloc(&mut self, bytes: usize) -> Result<Buffer, DeviceError> {
                self.0.alloc(bytes)
            }
            fn free(&mut self, buffer: Buffer) {
                self.0.free(buffer);
                if self.0.buffers() == 0 {
                    self.1.lock().unwrap().clear();
                }
            }
            fn write(&mut self, buffer: Buffer, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
                self.1.lock().unwrap().push(Event::Write(buffer));
                self.0.write(buffer, at, bytes)
            }
            fn read(&mut self, buffer: Buffer, at: usize, out: &mut [u8]) -> Result<(), DeviceError> {
                self.1.lock().unwrap().push(Event::Read(buffer));
                self.0.read(buffer, at, out)
            }
            fn submit(&mut self, command: &Command) -> Result<Fence, DeviceError> {
                self.1.lock().unwrap().push(Event::Submit(*command));
                self.0.submit(command)
            }
            fn wait(&mut self, fence: Fence, limit: Duration) -> Result<(), DeviceError> {
                self.1.lock().unwrap().push(Event::Wait(fence));
                self.0.wait(fence, limit)
            }
        }
        let events = std::sync::Arc::default();
        let mut offload = Offload::new(Box::new(Spy(fake(wide()), std::sync::Arc::clone(&events))), Box::new(()));
        offload.self_test(&[(K, vec![40, 72])]);
        go(&mut offload, &case(), 1);
        let letters: String = events
            .lock()
            .unwrap()
            .iter()
            .map(|e| match e {
                Event::Write(_) => 'w',
                Event::Read(_) => 'r',
                Event::Submit(_) => 's',
                Event::Wait(_) => 'x',
            })
            .collect();
        // The weight, then: activations and launch, activations and launch of the next, only then the wait for the first.
        assert_eq!(letters, "wwswsxrwsxrxr");
        drop(offload);
        assert!(events.lock().unwrap().is_empty(), "every buffer was given back");
    }

    #[test]
    fn what_goes_wrong_is_the_hosts_to_do() {
        let case = case();
        let long = Misfortune::Slow(Duration::from_secs(60));
        for m in [Misfortune::Timeout, Misfortune::Abort, Misfortune::Gone, Misfortune::Busy, long] {
            for at in 0..3 {
                let mut device = fake(wide());
                // Two launches are the self-test's.
                device.plan(2 + at, m);
                let mut offload = offload(device);
                let (_, _, left) = go(&mut offload, &case, 1);
                assert_eq!(left, 2, "{m:?}: all of it goes back");
                assert!(offload.lost().is_some() && offload.usable() == 0, "{m:?}");
                assert_eq!((offload.usage().made_up, offload.usage().failures.len()), (2, 1), "{m:?}");
                let (_, _, left) = go(&mut offload, &case, 1);
                assert_eq!(left, 2, "{m:?}: it is not asked again");
            }
        }
        for m in [Misfortune::WrongC, Misfortune::StaleC] {
            for at in 0..3 {
                let mut kernels = wide();
                kernels.extend(narrow());
                let mut device = fake(kernels);
                device.plan(2 + at, m);
                let mut offload = offload(device);
                let (_, _, left) = go(&mut offload, &case, 1);
                assert_eq!((left, offload.lost()), (2, None), "{m:?}");
                assert!(offload.out_of_use(KernelId(0)).unwrap().contains("of a product was wrong"), "{m:?}");
                offload.self_test(&[(K, vec![40, 72])]);
            }
        }
    }

    #[test]
    fn kernels_are_used_when_they_have_passed() {
        let mut device = fake(wide());
        device.plan(1, Misfortune::WrongC);
        let mut offload = Offload::new(Box::new(device), Box::new(()));
        let case = case();
        assert_eq!(go(&mut offload, &case, 1).2, 2, "not tested");
        let lines = offload.self_test(&[(K, vec![40, 72])]);
        assert!(lines[0].1.as_ref().unwrap().contains("row 0 of the product is wrong"), "{lines:?}");
        assert_eq!(go(&mut offload, &case, 1).2, 2, "not passed");
        assert_eq!(offload.usage().launches, 0);
        let mut device = fake(wide());
        device.refuse(KernelId(0), "too many columns");
        let offload = Offload::new(Box::new(device), Box::new(()));
        assert_eq!(offload.out_of_use(KernelId(0)), Some("too many columns"));
    }

    #[derive(Default, Clone)]
    struct Kept(std::sync::Arc<std::sync::Mutex<HashMap<String, Vec<u8>>>>);

    impl PackStore for Kept {
        fn get(&mut self, key: &str) -> Option<Vec<u8>> {
            self.0.lock().unwrap().get(key).cloned()
        }
        fn put(&mut self, key: &str, bytes: &[u8]) {
            self.0.lock().unwrap().insert(key.to_owned(), bytes.to_vec());
        }
    }

    #[test]
    fn packed_weights_are_kept_and_damaged_ones_made_anew() {
        let case = case();
        let [one, two] = linears(&case);
        let kept = Kept::default();
        for (packed, damage) in [([1, 0], false), ([0, 1], false), ([1, 0], true), ([0, 1], false)] {
            if damage {
                kept.0.lock().unwrap().values_mut().for_each(|v| v[100] ^= 1);
            }
            let mut offload = Offload::new(Box::new(fake(wide())), Box::new(kept.clone()));
            offload.self_test(&[(K, vec![40, 72])]);
            let (a, b, left) = go(&mut offload, &case, 1);
            assert!(left == 0 && a == plain(&case, &one) && b == plain(&case, &two));
            assert_eq!(offload.usage().packed, packed);
        }
    }

    #[test]
    fn a_weight_that_is_not_finite_is_left_to_the_host() {
        let mut case = case();
        case.data[1][..4].copy_from_slice(&f32::NAN.to_le_bytes());
        let mut offload = offload(fake(wide()));
        assert_eq!(go(&mut offload, &case, 1).2, 2);
        assert!(offload.usage().failures[0].contains("output 40 of a weight is not finite"), "{:?}", offload.usage());
        assert_eq!(offload.lost(), None);
    }
}
