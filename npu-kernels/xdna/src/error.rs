//! Everything that can go wrong between here and the device, told apart so that a caller can say what to do about it.

use crate::accel::{Firmware, NodeFault};
use crate::limits::Memlock;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// How a command ended: `ert_cmd_state` of XRT's `ert.h`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// 1, 2, 3 and 7: not ended yet.
    Pending(i32),
    /// 4: the one good end.
    Completed,
    /// 5.
    Error,
    /// 6: the firmware gave it up, or took it down with its context.
    Abort,
    /// 8: the driver's watchdog.
    Timeout,
    /// 9: the firmware did not answer.
    NoResponse,
    /// Any other number.
    Other(i32),
}

impl From<i32> for State {
    fn from(code: i32) -> State {
        match code {
            1 | 2 | 3 | 7 => State::Pending(code),
            4 => State::Completed,
            5 => State::Error,
            6 => State::Abort,
            8 => State::Timeout,
            9 => State::NoResponse,
            other => State::Other(other),
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            State::Pending(code) => write!(f, "PENDING ({code})"),
            State::Completed => f.write_str("COMPLETED"),
            State::Error => f.write_str("ERROR"),
            State::Abort => f.write_str("ABORT"),
            State::Timeout => f.write_str("TIMEOUT"),
            State::NoResponse => f.write_str("NORESPONSE"),
            State::Other(code) => write!(f, "state {code}"),
        }
    }
}

/// What a caller can do about an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// There is no NPU to be had here: compute elsewhere, and say why.
    Unavailable,
    /// Somebody else has it: try again later, or compute elsewhere.
    Busy,
    /// The device or its software failed at work. It must not be used again in this process.
    Broken,
    /// The caller asked for something that cannot be: a wrong file, a size, an argument.
    Request,
}

/// See the variants.
#[derive(thiserror::Error, Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// The C shim is nowhere.
    #[error(
        "no shim library: looked for {}; build it with `cargo xtask shim` and name it in NPU_PREFILL_SHIM",
        list(.tried)
    )]
    NoShim {
        /// Where it was looked for.
        tried: Vec<PathBuf>,
    },
    /// The shim is there, but XRT is not.
    #[error("no XRT: {shim} needs libxrt_coreutil of XRT 2.25 ({reason})", shim = .shim.display())]
    NoXrt {
        /// The shim.
        shim: PathBuf,
        /// What the loader said.
        reason: String,
    },
    /// The shim cannot be loaded for another reason.
    #[error("{shim} cannot be loaded: {reason}", shim = .shim.display())]
    BadShim {
        /// The shim.
        shim: PathBuf,
        /// What the loader said.
        reason: String,
    },
    /// The shim was built from another version of `shim.h`.
    #[error("{shim} has interface number {found}, this program needs {wanted}: build it anew with `cargo xtask shim`", shim = .shim.display())]
    WrongAbi {
        /// The shim.
        shim: PathBuf,
        /// Its number.
        found: u32,
        /// Ours.
        wanted: u32,
    },
    /// No node of the driver can be opened.
    #[error("{0}")]
    NoNode(NodeFault),
    /// The node can be opened, but XRT lists no such device.
    #[error("XRT lists {found} NPUs, number {index} is wanted (locked memory: {memlock})")]
    NoDevice {
        /// The index asked for.
        index: u32,
        /// How many there are.
        found: u32,
        /// The limit that most often is the reason for 0.
        memlock: Memlock,
    },
    /// The double of the driver is asked for, and the driver is what there is.
    #[error("the double is not loaded: start the program with LD_PRELOAD=libnpusim.so")]
    NoDouble,
    /// A device is asked for, and the double of the driver is what there is.
    #[error("the double of an NPU is loaded, and it is taken only when it is asked for by name (--device sim)")]
    Double,
    /// Too little memory may be locked.
    #[error("{what}: too little memory may be locked ({memlock}); {}", Memlock::ADVICE)]
    Memlock {
        /// What was tried.
        what: String,
        /// The limits.
        memlock: Memlock,
    },
    /// Somebody else holds the device, or all of its contexts.
    #[error("busy: {what}")]
    Busy {
        /// What is taken.
        what: String,
    },
    /// Driver, firmware and XRT do not fit each other.
    #[error(
        "the driver refuses a context ({text}): its protocol and the firmware's differ (driver {driver}, firmware {}, XRT {xrt}); update linux-firmware",
        .firmware.map_or("unknown".to_owned(), |f| f.to_string())
    )]
    Firmware {
        /// `DRM_IOCTL_VERSION`.
        driver: String,
        /// `DRM_AMDXDNA_QUERY_FIRMWARE_VERSION`.
        firmware: Option<Firmware>,
        /// XRT's own.
        xrt: String,
        /// What XRT said.
        text: String,
    },
    /// The device cannot use the process's address space.
    #[error(
        "the NPU cannot share this process's memory ({text}): the IOMMU is off or in pass-through; boot with amd_iommu=on iommu.passthrough=0"
    )]
    Iommu {
        /// What XRT said.
        text: String,
    },
    /// A run did not end in time. The device may still be at it.
    #[error("kernel {kernel}: no end within {} ms (state {state}); its output is not used", .limit.as_millis())]
    Timeout {
        /// The kernel.
        kernel: String,
        /// How long it was waited for.
        limit: Duration,
        /// The state it had.
        state: State,
    },
    /// A run ended in another state than COMPLETED.
    #[error("kernel {kernel}: the run ended in state {state}; its output is not used")]
    Failed {
        /// The kernel.
        kernel: String,
        /// The state.
        state: State,
    },
    /// The device is no longer there.
    #[error("the NPU is gone ({call}: {text})")]
    Gone {
        /// What was tried.
        call: &'static str,
        /// What XRT said.
        text: String,
    },
    /// An earlier run failed in a way that leaves the context unusable.
    #[error("the context of kernel {kernel} is not used again after a failed run")]
    Lost {
        /// The kernel.
        kernel: String,
    },
    /// An argument, a size or a file is not what the call needs.
    #[error("{0}")]
    Request(String),
    /// A system call of our own.
    #[error("{what}: {text}")]
    System {
        /// What was tried, on what.
        what: String,
        /// The errno.
        code: i32,
        /// Its words.
        text: String,
    },
    /// Anything else that XRT says.
    #[error("XRT: {call}: {text}")]
    Xrt {
        /// What was asked.
        call: &'static str,
        /// An errno, or 0.
        code: i32,
        /// What it said.
        text: String,
    },
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}

impl Error {
    /// What can be done about it.
    pub fn kind(&self) -> Kind {
        match self {
            Error::NoShim { .. }
            | Error::NoXrt { .. }
            | Error::BadShim { .. }
            | Error::WrongAbi { .. }
            | Error::NoNode(_)
            | Error::NoDevice { .. }
            | Error::NoDouble
            | Error::Double
            | Error::Memlock { .. }
            | Error::Firmware { .. }
            | Error::Iommu { .. } => Kind::Unavailable,
            Error::Busy { .. } => Kind::Busy,
            Error::Request(_) => Kind::Request,
            Error::Timeout { .. }
            | Error::Failed { .. }
            | Error::Gone { .. }
            | Error::Lost { .. }
            | Error::System { .. }
            | Error::Xrt { .. } => Kind::Broken,
        }
    }

    /// An error of a system call of ours.
    pub(crate) fn system(what: impl Into<String>, error: std::io::Error) -> Error {
        Error::System { what: what.into(), code: error.raw_os_error().unwrap_or(0), text: error.to_string() }
    }
}
