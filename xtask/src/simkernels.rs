//! Kernels for the double of the driver (`npu-kernels/npusim`): control code that moves the operands of an int8 product through the
//! array's interface and memory tiles, as a kernel author's tools would write it, around cores that the double stands for.
//!
//! They are for tests. On a device they would load a binary that is none, and fail.
//!
//! The product is C = A · B, int8 `[128][K]` times int8 `[K][N]` into int32 `[128][N]`, all row by row. It is cut into tiles of
//! 128 × 128 × 128. Each column of the array has some columns of C: for each of its tiles of C it streams all tiles of A and of
//! B along K through the memory tile to the core, and the core's sum back.

use anyhow::{Context as _, Result, bail, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Rows, columns and depth of a tile.
const T: u32 = 128;
/// Words of a tile of A or B (int8) and of C (int32).
const OPERAND: u32 = T * T / 4;
const RESULT: u32 = T * T;
/// The binaries that the double knows by their hash (`npu-kernels/npusim/src/designs.rs`).
const GEMM: &str = "npusim design: gemm-i8 v1\n";
const COPY: &str = "npusim design: copy v1\n";
const BINARY_BYTES: usize = 256;
/// What a copy kernel copies.
const COPY_BYTES: u32 = 4096;

/// The shapes of a layer of SmolLM2-135M, K and N filled up to 128, and those of a model of the same form with 128 channels.
const SHAPES: &[(&str, u32, u32)] = &[
    ("QKV", 640, 1024),
    ("O", 640, 640),
    ("GU", 640, 3072),
    ("D", 1536, 640),
    ("QKV", 128, 256),
    ("O", 128, 128),
    ("GU", 128, 512),
    ("D", 256, 128),
];

/// Direction of a DMA channel, as tokens number it.
#[derive(Clone, Copy)]
enum Dir {
    S2mm = 0,
    Mm2s = 1,
}

/// Registers, of AIE2P.
mod register {
    use super::Dir;

    pub const SHIM: u32 = 0;
    pub const MEM: u32 = 1;
    pub const CORE: u32 = 2;

    /// The address of a register of a tile.
    pub fn of(column: u32, row: u32, offset: u32) -> u32 {
        column << 25 | row << 20 | offset
    }

    /// A buffer descriptor.
    pub fn bd(row: u32, id: u32) -> u32 {
        let (base, count) = if row == SHIM { (0x1_d000, 16) } else { (0xa_0000, 48) };
        assert!(id < count, "descriptor {id} of {count}");
        base + 0x20 * id
    }

    /// A channel's task queue.
    pub fn queue(row: u32, dir: Dir, channel: u32) -> u32 {
        let (base, channels) = if row == SHIM { (0x1_d204, 2) } else { (0xa_0604, 6) };
        assert!(channel < channels, "channel {channel} of {channels}");
        base + 8 * (channel + channels * dir as u32)
    }

    /// A lock's value in a memory tile.
    pub fn lock(id: u32) -> u32 {
        assert!(id < 64, "lock {id} of 64");
        0xc_0000 + 0x10 * id
    }

    /// Control of a core, and the place of its parameter: tiles along K.
    pub const CORE_CONTROL: u32 = 0x3_2000;
    pub const K_TILES: u32 = 0x400;
}

/// Control code in the making: operations of a transaction of version 0.1.
#[derive(Default)]
struct Code {
    body: Vec<u8>,
    count: u32,
}

impl Code {
    fn op(&mut self, words: &[u32]) {
        self.body.extend(words.iter().flat_map(|w| w.to_le_bytes()));
        self.count += 1;
    }

    fn write(&mut self, address: u32, value: u32) {
        self.op(&[0, 0, address, 0, value, 24]);
    }

    fn block(&mut self, address: u32, words: &[u32]) {
        let mut all = vec![1, 0, address, 16 + 4 * words.len() as u32];
        all.extend(words);
        self.op(&all);
    }

    fn mask(&mut self, address: u32, value: u32, mask: u32) {
        self.op(&[3, 0, address, 0, value, mask, 32, 0]);
    }

    /// Loads binary `id`, whose address is filled in when the kernel is loaded.
    fn load(&mut self, id: u32) {
        self.op(&[8 | id << 16, BINARY_BYTES as u32, 0, 0]);
    }

    /// Adds an argument's address, and `plus` bytes, to a descriptor's.
    fn patch(&mut self, descriptor: u32, argument: u32, plus: u32) {
        self.op(&[129, 48, 0, 0, 0, 0, descriptor + 4, 0, argument, 0, plus, 0]);
    }

    /// Waits for the token of a channel of that many columns of the interface.
    fn wait(&mut self, columns: u32, dir: Dir, channel: u32) {
        self.op(&[128, 16, dir as u32, 1 << 8 | columns << 16 | channel << 24]);
    }

    fn finish(self) -> Vec<u8> {
        // Version 0.1; generation 4 (AIE2P), 6 rows; 8 columns, 1 row of memory tiles; operations; bytes.
        let mut all = vec![0, 1, 4, 6, 8, 1, 0, 0];
        all.extend(self.count.to_le_bytes());
        all.extend((16 + self.body.len() as u32).to_le_bytes());
        all.extend(self.body);
        all
    }
}

/// A descriptor of the interface: words; wrap and step of two dimensions; step of the third; step and count of executions.
fn shim_bd(length: u32, d: [(u32, u32); 2], d2_step: u32, iteration: (u32, u32)) -> Result<[u32; 8]> {
    for (wrap, step) in d {
        ensure!(wrap <= 1023, "a wrap of {wrap}, 1023 is the most");
        ensure!((1..=1 << 20).contains(&step), "a step of {step} words, {} is the most", 1 << 20);
    }
    ensure!((1..=1 << 20).contains(&d2_step), "a step of {d2_step} words");
    ensure!((1..=1 << 20).contains(&iteration.0) && (1..=64).contains(&iteration.1), "an iteration of {iteration:?}");
    Ok([
        length,
        0,
        0,
        d[0].0 << 20 | (d[0].1 - 1),
        // Bursts of 256 bytes.
        2 << 30 | d[1].0 << 20 | (d[1].1 - 1),
        2 << 24 | (d2_step - 1),
        (iteration.1 - 1) << 20 | (iteration.0 - 1),
        1 << 25,
    ])
}

/// A descriptor of a memory tile: a row of words at a byte of the tile, then the next descriptor; lock `take` at least 1 and one
/// less before, lock `give` one more after.
fn mem_bd(length: u32, at: u32, next: u32, take: u32, give: u32) -> Result<[u32; 8]> {
    ensure!(at + 4 * length <= 512 << 10, "{} bytes at {at:#x} of a memory tile of 512 KiB", 4 * length);
    // The tile's own memory and locks come after its western neighbour's.
    let (own, at_least_one) = (64, 0x7f);
    let own_window = ((512 << 10) + at) / 4;
    Ok([
        length,
        next << 20 | 1 << 19 | own_window,
        0,
        0,
        0,
        0,
        0,
        1 << 31 | 1 << 24 | (own + give) << 16 | 1 << 15 | at_least_one << 8 | (own + take),
    ])
}

/// What starts a task: descriptor, executions, and whether its end is told.
fn task(bd: u32, times: u32, token: bool) -> Result<u32> {
    ensure!((1..=256).contains(&times), "a task of {times} executions, 256 is the most");
    Ok(u32::from(token) << 31 | (times - 1) << 16 | bd)
}

/// Columns of the array for that many tiles of C side by side: as many as share them evenly, four at most.
fn columns(n_tiles: u32) -> u32 {
    [4, 2, 1].into_iter().find(|c| n_tiles.is_multiple_of(*c)).unwrap_or(1)
}

/// A stream through a memory tile by two buffers in turns.
struct Relay {
    /// Channel, both ways.
    channel: u32,
    /// First of four descriptors.
    bd: u32,
    /// Words of a buffer.
    words: u32,
    /// Byte of the first buffer; the second lies behind it.
    at: u32,
    /// The lock that counts free buffers; the next counts full ones.
    lock: u32,
}

/// A and B to the core, C back. Odd channels reach only the upper half of the descriptors.
const RELAYS: [Relay; 3] = [
    Relay { channel: 0, bd: 0, words: OPERAND, at: 0, lock: 0 },
    Relay { channel: 1, bd: 24, words: OPERAND, at: 8 * OPERAND, lock: 2 },
    Relay { channel: 2, bd: 4, words: RESULT, at: 16 * OPERAND, lock: 4 },
];

/// The control code of a product. `load`: with the binary's loading, as a full ELF needs it.
fn gemm(k: u32, n: u32, load: bool) -> Result<Vec<u8>> {
    let whole = |x: u32| x > 0 && x.is_multiple_of(T);
    ensure!(whole(k) && whole(n), "K = {k} and N = {n} are not multiples of {T}");
    let (k_tiles, columns) = (k / T, columns(n / T));
    let n_tiles = n / T / columns;
    ensure!(n_tiles <= 64, "N = {n}: {n_tiles} tiles a column, 64 is the most");
    let mut code = Code::default();
    if load {
        code.load(1);
    }
    for column in 0..columns {
        let mem = |offset| register::of(column, register::MEM, offset);
        for relay in &RELAYS {
            let (free, full) = (relay.lock, relay.lock + 1);
            code.write(mem(register::lock(free)), 2);
            code.write(mem(register::lock(full)), 0);
            for buffer in 0..2 {
                let at = relay.at + buffer * 4 * relay.words;
                let other = 1 - buffer;
                let (fill, drain) = (relay.bd, relay.bd + 2);
                let words = mem_bd(relay.words, at, fill + other, free, full)?;
                code.block(mem(register::bd(register::MEM, fill + buffer)), &words);
                let words = mem_bd(relay.words, at, drain + other, full, free)?;
                code.block(mem(register::bd(register::MEM, drain + buffer)), &words);
            }
            // Their descriptors go round for ever: one execution is enough.
            code.write(mem(register::queue(register::MEM, Dir::S2mm, relay.channel)), task(relay.bd, 1, false)?);
            code.write(mem(register::queue(register::MEM, Dir::Mm2s, relay.channel)), task(relay.bd + 2, 1, false)?);
        }
        code.write(register::of(column, register::CORE, register::K_TILES), k_tiles);
        code.mask(register::of(column, register::CORE, register::CORE_CONTROL), 1, 1);
    }
    for column in 0..columns {
        let shim = |offset| register::of(column, register::SHIM, offset);
        let bd = |id| shim(register::bd(register::SHIM, id));
        let first = column * n_tiles * T;
        // A: along K tile by tile, the same for each tile of C.
        code.block(bd(0), &shim_bd(k_tiles * OPERAND, [(T / 4, 1), (T, k / 4)], T / 4, (1, 1))?);
        code.patch(bd(0), 0, 0);
        // B: down a column of tiles; the next column of tiles at the next execution.
        code.block(bd(1), &shim_bd(k_tiles * OPERAND, [(T / 4, 1), (T, n / 4)], T * n / 4, (T / 4, n_tiles))?);
        code.patch(bd(1), 1, first);
        // C: one tile an execution.
        code.block(bd(2), &shim_bd(RESULT, [(T, 1), (T, n)], 1, (T, n_tiles))?);
        code.patch(bd(2), 2, 4 * first);
        let queue = |dir, channel| shim(register::queue(register::SHIM, dir, channel));
        code.write(queue(Dir::S2mm, 0), task(2, n_tiles, true)?);
        code.write(queue(Dir::Mm2s, 0), task(0, n_tiles, false)?);
        code.write(queue(Dir::Mm2s, 1), task(1, n_tiles, false)?);
    }
    code.wait(columns, Dir::S2mm, 0);
    Ok(code.finish())
}

/// The control code of a copy: argument 0 to argument 1.
fn copy() -> Result<Vec<u8>> {
    let mut code = Code::default();
    code.load(1);
    for (argument, dir) in [(0, Dir::Mm2s), (1, Dir::S2mm)] {
        let bd = register::bd(register::SHIM, argument);
        code.block(bd, &shim_bd(COPY_BYTES / 4, [(0, 1), (0, 1)], 1, (1, 1))?);
        code.patch(bd, argument, 0);
        code.write(register::queue(register::SHIM, dir, 0), task(argument, 1, true)?);
    }
    code.wait(1, Dir::S2mm, 0);
    Ok(code.finish())
}

fn binary(text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.resize(BINARY_BYTES, 0);
    bytes
}

/// A program of XRT, started by the loader that came with it where there is one: the system's C library may be too old.
fn tool(xrt: &Path, name: &str) -> Command {
    let libraries = xrt.join("usr/lib/x86_64-linux-gnu");
    let (loader, program) = (libraries.join("ld-linux-x86-64.so.2"), xrt.join("usr/bin").join(name));
    if loader.exists() && program.exists() {
        let mut command = Command::new(loader);
        command.arg("--library-path").arg(libraries).arg(program);
        command
    } else {
        Command::new(name)
    }
}

fn run(mut command: Command, what: &str) -> Result<()> {
    let output = command.output().with_context(|| format!("starting {what}"))?;
    if !output.status.success() {
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        bail!("{what}: {}\n{out}{err}", output.status);
    }
    Ok(())
}

/// Assembles a full ELF with a kernel `NAME:seq` of that many buffers.
fn assemble(xrt: &Path, work: &Path, name: &str, code: &[u8], pdi: &[u8], arguments: usize, to: &Path) -> Result<()> {
    let arguments: Vec<String> = (0..arguments)
        .map(|i| format!(r#"{{"name": "arg_{i}", "type": "char *", "offset": "{:#x}"}}"#, 8 * i))
        .collect();
    let config = format!(
        r#"{{"xrt-kernels": [{{"name": "{name}", "arguments": [{}], "PDIs": [{{"id": 1, "PDI_file": "design.pdi"}}],
            "instance": [{{"id": "seq", "TXN_ctrl_code_file": "code.bin"}}]}}]}}"#,
        arguments.join(", ")
    );
    std::fs::write(work.join("code.bin"), code)?;
    std::fs::write(work.join("design.pdi"), pdi)?;
    std::fs::write(work.join("config.json"), config)?;
    let mut command = tool(xrt, "aiebu-asm");
    command.args(["-t", "aie2_config", "-j", "config.json", "-o", "kernel.elf"]).current_dir(work);
    run(command, "aiebu-asm (package libxrt-utils-npu)")?;
    std::fs::copy(work.join("kernel.elf"), to).with_context(|| format!("writing {}", to.display()))?;
    Ok(())
}

/// Packs an xclbin with a kernel `GEMM` of opcode, instructions, their number and five buffers.
fn pack(xrt: &Path, work: &Path, pdi: &[u8], to: &Path) -> Result<()> {
    let buffers: Vec<String> = (0..5)
        .map(|i| {
            format!(
                r#"{{"name": "bo{i}", "memory-connection": "HOST", "address-qualifier": "GLOBAL", "type": "void*", "offset": "{:#x}"}}"#,
                0x14 + 8 * i
            )
        })
        .collect();
    let kernel = format!(
        r#"{{"ps-kernels": {{"kernels": [{{"name": "GEMM", "type": "dpu",
            "extended-data": {{"subtype": "DPU", "functional": "0", "dpu_kernel_id": "0x901"}},
            "arguments": [
              {{"name": "opcode", "address-qualifier": "SCALAR", "type": "uint64_t", "offset": "0x00"}},
              {{"name": "instr", "memory-connection": "SRAM", "address-qualifier": "GLOBAL", "type": "char *", "offset": "0x08"}},
              {{"name": "ninstr", "address-qualifier": "SCALAR", "type": "uint32_t", "offset": "0x10"}},
              {}],
            "instances": [{{"name": "I0"}}]}}]}}}}"#,
        buffers.join(", ")
    );
    let memory = r#"{"mem_topology": {"m_count": "2", "m_mem_data": [
        {"m_type": "MEM_DRAM", "m_used": "1", "m_sizeKB": "0x10000", "m_tag": "HOST", "m_base_address": "0x4000000"},
        {"m_type": "MEM_DRAM", "m_used": "1", "m_sizeKB": "0xc000", "m_tag": "SRAM", "m_base_address": "0x4000000"}]}}"#;
    let partition = r#"{"aie_partition": {"name": "sim", "operations_per_cycle": "2048", "inference_fingerprint": "1",
        "pre_post_fingerprint": "1", "partition": {"column_width": "8", "start_columns": ["0"]},
        "PDIs": [{"uuid": "00000000-0000-0000-0000-000000000001", "file_name": "design.pdi",
          "cdo_groups": [{"name": "DPU", "type": "PRIMARY", "pdi_id": "0x1", "dpu_kernel_ids": ["0x901"],
            "pre_cdo_groups": ["0xc1"]}]}]}}"#;
    std::fs::write(work.join("design.pdi"), pdi)?;
    std::fs::write(work.join("kernel.json"), kernel)?;
    std::fs::write(work.join("memory.json"), memory)?;
    std::fs::write(work.join("partition.json"), partition)?;
    let mut command = tool(xrt, "xclbinutil");
    command
        .args(["--add-replace-section", "MEM_TOPOLOGY:JSON:memory.json", "--add-kernel", "kernel.json"])
        .args(["--add-replace-section", "AIE_PARTITION:JSON:partition.json", "--force", "--output", "kernel.xclbin"])
        .current_dir(work);
    run(command, "xclbinutil (package libxrt-utils)")?;
    std::fs::copy(work.join("kernel.xclbin"), to).with_context(|| format!("writing {}", to.display()))?;
    Ok(())
}

/// Where `install-xrt.sh` unpacks to unless it is told otherwise.
fn default_xrt() -> PathBuf {
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    std::env::var_os("XDG_CACHE_HOME").map_or_else(|| home.join(".cache"), PathBuf::from).join("npu-prefill-xrt")
}

/// `ROLE:KxN`.
fn shape(text: &str) -> Result<(String, u32, u32)> {
    let parts = text.split_once(':').and_then(|(role, kn)| {
        let (k, n) = kn.split_once('x')?;
        Some((role.to_owned(), k.parse().ok()?, n.parse().ok()?))
    });
    parts.with_context(|| format!("{text:?} is no shape: write ROLE:KxN, such as QKV:640x1024"))
}

/// Writes the kernels of those shapes (`ROLE:KxN`), or of all of [`SHAPES`], into a directory: `full_i8_ROLE_Kk_Nn.elf` each, and
/// for flow 1 `gemm_i8.xclbin` with `gemm_i8_Kk_Nn.bin` each, and `copy.elf` with a kernel `copy:seq`. Gives their number.
pub fn write(dir: &Path, xrt: Option<&Path>, shapes: &[&str]) -> Result<usize> {
    let xrt = xrt.map_or_else(default_xrt, Path::to_owned);
    let shapes: Vec<(String, u32, u32)> = match shapes {
        [] => SHAPES.iter().map(|(role, k, n)| ((*role).to_owned(), *k, *n)).collect(),
        some => some.iter().map(|s| shape(s)).collect::<Result<_>>()?,
    };
    std::fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    let work = dir.join(format!(".work-{}", std::process::id()));
    std::fs::create_dir_all(&work)?;
    let done = (|| {
        for (role, k, n) in &shapes {
            let to = dir.join(format!("full_i8_{role}_K{k}_N{n}.elf"));
            assemble(&xrt, &work, "main", &gemm(*k, *n, true)?, &binary(GEMM), 3, &to)?;
            std::fs::write(dir.join(format!("gemm_i8_K{k}_N{n}.bin")), gemm(*k, *n, false)?)?;
        }
        pack(&xrt, &work, &binary(GEMM), &dir.join("gemm_i8.xclbin"))?;
        assemble(&xrt, &work, "copy", &copy()?, &binary(COPY), 2, &dir.join("copy.elf"))
    })();
    std::fs::remove_dir_all(&work)?;
    done.map(|()| shapes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(code: &[u8]) -> Vec<u32> {
        code.chunks_exact(4).map(|w| u32::from_le_bytes(w.try_into().unwrap())).collect()
    }

    /// Written by hand from the fields of `xaie_txn.h` and the descriptors' register tables.
    #[test]
    fn the_copy_is_word_for_word() {
        let want = [
            // 0.1, generation 4, 6 rows; 8 columns, 1 row of memory; 8 operations; bytes.
            0x0604_0100,
            0x0000_0108,
            8,
            16 + 16 + 2 * (48 + 48 + 24) + 16,
            // Load binary 1.
            8 | 1 << 16,
            256,
            0,
            0,
            1,
            0,
            0x1_d000,
            48,
            1024,
            0,
            0,
            0,
            0x8000_0000,
            0x0200_0000,
            0,
            0x0200_0000,
            129,
            48,
            0,
            0,
            0,
            0,
            0x1_d004,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0x1_d214,
            0,
            0x8000_0000,
            24,
            1,
            0,
            0x1_d020,
            48,
            1024,
            0,
            0,
            0,
            0x8000_0000,
            0x0200_0000,
            0,
            0x0200_0000,
            129,
            48,
            0,
            0,
            0,
            0,
            0x1_d024,
            0,
            1,
            0,
            0,
            0,
            0,
            0,
            0x1_d204,
            0,
            0x8000_0001,
            24,
            128,
            16,
            0,
            0x0001_0100,
        ];
        assert_eq!(words(&copy().unwrap()), want);
    }

    #[test]
    fn products_keep_to_the_hardwares_limits() {
        for (_, k, n) in SHAPES {
            gemm(*k, *n, true).unwrap();
        }
        assert!(gemm(100, 128, true).is_err(), "no multiple of 128");
        assert!(gemm(128, 128 * 257, true).is_err(), "one column with too many tiles");
        assert_eq!((columns(8), columns(5), columns(6)), (4, 1, 2));
        assert!(shape("QKV:640x1024").is_ok() && shape("QKV").is_err());
    }
}
