//! The part of `selftest` that is about memory of somebody else: whether a kernel's product gets there, and by which way.
//!
//! A prefill does not need it. Its rows are made by the host from a kernel's products, which lie in buffers of the device's, and the
//! host writes them. Who wants a kernel to write into a decoder's memory has to measure that with that memory: reports of
//! which device reaches whose memory disagree.

use std::os::fd::AsFd as _;
use std::path::Path;

use kvlayout::{Inherited, Mapping};
use npu_kernels::catalogue::Files;
use npu_kernels::check::{self, Fault, Problem, Room};
use npu_kernels::{Device, KernelId, Spec, device, oracle};

use crate::cli::Import;
use crate::exit::{Error, Kind, Result};
use crate::job::Compute;

/// Operands of the launches; two, so that a product which is left from before shows.
const SEEDS: [u64; 2] = [1, 2];

/// Tries one descriptor's memory, with a device that is opened for it: a line, and whether all is well.
///
/// # Errors
/// There is no device, or the memory is smaller than every kernel's product.
pub fn test(compute: &Compute, elfs: &Path, memory: &Inherited, import: Import) -> Result<(String, bool)> {
    let about = format!("memory of descriptor {}, {} of {} bytes", memory.number(), memory.kind(), memory.len());
    let ways: &[Import] = match import {
        Import::Auto => &[Import::Own, Import::Bounce],
        Import::Own => &[Import::Own],
        Import::Driver => &[Import::Driver],
        Import::Bounce => &[Import::Bounce],
    };
    let mut line = about.clone();
    for way in ways {
        // A launch that failed may have cost the device: each way has its own.
        let mut opened = crate::device::raw(compute, crate::device::catalogue(elfs)?)?;
        let Some(kernel) = smallest(&*opened, *way) else {
            line += &format!(": no kernel gets there {}: those of an xclbin take buffers of their own", words(*way));
            continue;
        };
        let spec = &opened.kernels()[kernel.0];
        let (name, needs) = (spec.name.clone(), Room::product_bytes(spec)[1]);
        if needs as u64 > memory.len() {
            let text = format!("the smallest product and what is watched behind it take {needs} bytes");
            return Err(Error::new(Kind::Refused, text).context(about));
        }
        let view = Mapping::new(memory, 0, needs as u64).and_then(|view| view.back(0, needs as u64).map(|()| view));
        let mut view = view.map_err(|e| {
            Error::new(Kind::Io, e).context(format!("{about}: the system has no memory behind its first {needs} bytes"))
        })?;
        match launch_into(&mut *opened, kernel, memory, &mut view, *way) {
            Ok(()) => {
                line += &format!(": {name} gets there {}", words(*way));
                return Ok((line, true));
            }
            Err(fault) => line += &format!(": {name} does not get there {}: {fault}", words(*way)),
        }
    }
    Ok((line, false))
}

fn words(way: Import) -> &'static str {
    match way {
        Import::Own | Import::Auto => "by the address of our own mapping (own)",
        Import::Driver => "through a mapping of the driver's (driver)",
        Import::Bounce => "through a buffer of the device's and a copy (bounce)",
    }
}

/// The kernel with the smallest product. Addresses are taken by kernels of full ELFs only.
fn smallest(device: &dyn Device, way: Import) -> Option<KernelId> {
    let takes = |s: &Spec| way == Import::Bounce || !matches!(s.files, Files::Xclbin { .. });
    let ids = (0..device.kernels().len()).map(KernelId);
    let usable = ids.filter(|id| device.supports(*id).is_yes() && takes(&device.kernels()[id.0]));
    usable.min_by_key(|id| device.kernels()[id.0].bytes()[2])
}

/// Launches into the memory, and looks at it as its owner would.
fn launch_into(
    device: &mut dyn Device,
    kernel: KernelId,
    memory: &Inherited,
    view: &mut Mapping,
    way: Import,
) -> std::result::Result<(), String> {
    let spec = device.kernels()[kernel.0].clone();
    let [bytes, watched] = Room::product_bytes(&spec);
    let how = match way {
        Import::Bounce => None,
        Import::Driver => Some(device::Import::Driver),
        Import::Own | Import::Auto => Some(device::Import::Own),
    };
    let room = match how {
        None => Room::new(device, kernel),
        Some(how) => device.import(memory.as_fd(), watched, how).and_then(|c| Room::with_product(device, kernel, c)),
    };
    let room = room.map_err(|e| e.to_string())?;
    let mut all = || -> std::result::Result<(), Fault> {
        for seed in SEEDS {
            let problem = Problem::new(&spec, seed);
            let (mut product, _) = check::launch(device, &room, &problem)?;
            let put_off = |e: std::io::Error| Fault::Device(npu_kernels::DeviceError::Other(e.to_string()));
            if way == Import::Bounce {
                view.write(0, &product).map_err(put_off)?;
            }
            product.resize(bytes, 0);
            view.read(0, &mut product).map_err(put_off)?;
            check::compare(&spec, &product, &oracle::gemm(&spec, &problem.a, &problem.b)).map_err(Fault::Wrong)?;
        }
        Ok(())
    };
    let result = all();
    room.free(device);
    result.map_err(|fault| fault.to_string())
}
