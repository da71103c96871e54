//! The NPU through XRT: devices, contexts, kernels, buffers and runs as owned values, over a C shim (`shim.h`) that is loaded at
//! run time. It knows no model and no option of the program; it neither prints nor reads the environment.
//!
//! What it promises its callers:
//!
//! - A machine without the shim, without XRT, without a device or without the right to open it gives an [`Error`] that says
//!   which of these it is, and nothing else happens.
//! - A run whose state is not COMPLETED is an [`Error`]. Its buffers are not given back, so what it may have written cannot be
//!   read by accident.
//! - Caches are flushed and invalidated here and nowhere else: [`Buffer::write`] and [`Buffer::read`] know what is due.
//! - New buffers are zero, also when their memory was used before.
//!
//! The order of things: [`DeviceLock`], [`Driver::load`], [`Driver::open`], [`Device::context_elf`], [`Context::kernel`],
//! [`Kernel::start`], [`Run::wait`]. [`CatalogueDevice`] is all of it behind the trait of `npu_kernels`, and [`open`] the whole way there.

mod accel;
mod buffer;
mod catalogued;
mod device;
mod driver;
mod error;
mod ffi;
mod foreign;
mod limits;
mod lock;
mod open;
mod run;
mod shim;

pub use accel::{Firmware, Node, NodeFault};
pub use buffer::Buffer;
pub use catalogued::{CatalogueDevice, WARM};
pub use device::{Context, Device, DeviceInfo, Kernel, Live};
pub use driver::{Driver, SHIM_FILE, Version};
pub use error::{Error, Kind, State};
pub use foreign::Foreign;
pub use limits::{Memlock, memlock, raise_memlock};
pub use lock::{DEVICE_LOCK, DeviceLock};
pub use open::{driver, leave, open};
pub use run::{Arg, Run, WATCHDOG};
