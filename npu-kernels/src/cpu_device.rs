//! The host as a [`Device`]: catalogued kernels computed by plain code on all threads. It takes no kernel files, so what it
//! proves is everything around a kernel, and it is what a real device's results are compared with.

use crate::catalogue::{Catalogue, KernelId, Layout, Spec};
use crate::device::{Buffer, Command, Device, DeviceError, DeviceInfo, Fence, Support};
use crate::host::Pool;
use crate::oracle;
use crate::pack;
use std::time::Duration;

/// See the module's documentation.
pub struct CpuDevice {
    info: DeviceInfo,
    kernels: Vec<Spec>,
    pool: Pool,
    buffers: Vec<Option<Vec<u8>>>,
    launches: u64,
}

impl CpuDevice {
    /// A device with these kernels.
    pub fn new(catalogue: Catalogue, pool: Pool) -> CpuDevice {
        let info =
            DeviceInfo { kind: "cpu", name: format!("host with {} threads", pool.threads()), ..DeviceInfo::default() };
        CpuDevice { info, kernels: catalogue.into_kernels(), pool, buffers: Vec::new(), launches: 0 }
    }

    /// Changes what it was asked for by.
    pub fn call(&mut self, kind: &'static str) {
        self.info.kind = kind;
    }

    fn buffer(&mut self, buffer: Buffer) -> Result<&mut Vec<u8>, DeviceError> {
        let found = self.buffers.get_mut(buffer.0 as usize).and_then(Option::as_mut);
        found.ok_or_else(|| DeviceError::Misuse(format!("no buffer {}", buffer.0)))
    }

    /// Buffers that have not been given back.
    pub fn buffers(&self) -> usize {
        self.buffers.iter().flatten().count()
    }
}

/// `bytes` at `at` of a buffer of `len`.
fn range(len: usize, at: usize, bytes: usize) -> Result<std::ops::Range<usize>, DeviceError> {
    let end = at.checked_add(bytes).filter(|end| *end <= len);
    end.map(|end| at..end).ok_or_else(|| DeviceError::Misuse(format!("{bytes} bytes at {at} of a buffer of {len}")))
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn kernels(&self) -> &[Spec] {
        &self.kernels
    }

    fn supports(&self, kernel: KernelId) -> Support {
        match self.kernels.get(kernel.0) {
            Some(_) => Support::Yes,
            None => Support::No("no such kernel".to_owned()),
        }
    }

    fn alloc(&mut self, bytes: usize) -> Result<Buffer, DeviceError> {
        let mut room = Vec::new();
        room.try_reserve_exact(bytes).map_err(|e| DeviceError::NoMemory { bytes, what: e.to_string() })?;
        room.resize(bytes, 0);
        let at = self.buffers.iter().position(Option::is_none).unwrap_or_else(|| {
            self.buffers.push(None);
            self.buffers.len() - 1
        });
        self.buffers[at] = Some(room);
        Ok(Buffer(at as u32))
    }

    fn free(&mut self, buffer: Buffer) {
        if let Some(slot) = self.buffers.get_mut(buffer.0 as usize) {
            *slot = None;
        }
    }

    fn write(&mut self, buffer: Buffer, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let room = self.buffer(buffer)?;
        let range = range(room.len(), at, bytes.len())?;
        room[range].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&mut self, buffer: Buffer, at: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        let room = self.buffer(buffer)?;
        let range = range(room.len(), at, out.len())?;
        out.copy_from_slice(&room[range]);
        Ok(())
    }

    fn submit(&mut self, command: &Command) -> Result<Fence, DeviceError> {
        let spec =
            self.kernels.get(command.kernel.0).ok_or_else(|| DeviceError::Misuse("no such kernel".to_owned()))?;
        let (spec, bytes) = (spec.clone(), spec.bytes());
        for (buffer, need) in [command.a, command.b, command.c].into_iter().zip(bytes) {
            let len = self.buffer(buffer)?.len();
            range(len, 0, need)?;
        }
        // C is taken out, so that A and B can be read beside it.
        let mut c = std::mem::take(self.buffer(command.c)?);
        let (Some(Some(a)), Some(Some(b))) =
            (self.buffers.get(command.a.0 as usize), self.buffers.get(command.b.0 as usize))
        else {
            return Err(DeviceError::Misuse("A or B is gone".to_owned()));
        };
        if spec.is_int8() {
            int8(&self.pool, &spec, &a[..bytes[0]], &b[..bytes[1]], &mut c[..bytes[2]]);
        } else {
            c[..bytes[2]].copy_from_slice(&oracle::gemm(&spec, &a[..bytes[0]], &b[..bytes[1]]));
        }
        *self.buffer(command.c)? = c;
        self.launches += 1;
        Ok(Fence(self.launches))
    }

    fn wait(&mut self, fence: Fence, _: Duration) -> Result<(), DeviceError> {
        if fence.0 == 0 || fence.0 > self.launches {
            return Err(DeviceError::Misuse(format!("no launch {}", fence.0)));
        }
        Ok(())
    }
}

/// Rows and columns that are added up at once.
const ROWS: usize = 4;
const COLUMNS: usize = 128;

/// The product of an int8 kernel, its operands as they lie in memory.
pub fn int8(pool: &Pool, spec: &Spec, a: &[u8], b: &[u8], c: &mut [u8]) {
    let (k, n) = (spec.k, spec.n);
    let unblocked;
    let b = match spec.b.layout {
        Layout::Blocked64x128 => {
            let codes = pack::blocked::unpack(b, n, k, k, n);
            let mut rows = vec![0u8; k * n];
            pack::row_major_b(&codes, n, k, k, n, &mut rows);
            unblocked = rows;
            unblocked.as_slice()
        }
        _ => b,
    };
    let mut bands: Vec<&mut [u8]> = c.chunks_mut(ROWS * n * 4).collect();
    pool.for_each_mut(&mut bands, |band, out| {
        let first = band * ROWS;
        let rows = out.len() / (4 * n);
        for from in (0..n).step_by(COLUMNS) {
            let columns = COLUMNS.min(n - from);
            let mut sums = [[0i32; COLUMNS]; ROWS];
            for i in 0..k {
                let b = &b[i * n + from..][..columns];
                for (r, sums) in sums.iter_mut().enumerate().take(rows) {
                    let a = i32::from(a[(first + r) * k + i].cast_signed());
                    sums.iter_mut().zip(b).for_each(|(s, b)| *s += a * i32::from(b.cast_signed()));
                }
            }
            for (r, sums) in sums.iter().enumerate().take(rows) {
                let out = &mut out[(r * n + from) * 4..][..columns * 4];
                out.as_chunks_mut::<4>().0.iter_mut().zip(sums).for_each(|(o, s)| *o = s.to_le_bytes());
            }
        }
    });
}
