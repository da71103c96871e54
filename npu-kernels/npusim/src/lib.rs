//! A double of the amdxdna driver and of the array behind it, for LD_PRELOAD: with it the unmodified XRT and its unmodified NPU
//! plugin find a device, load kernels and run them on a machine that has none. `run.sh` beside it makes the files in /sys and
//! /dev that XRT looks for, in a mount namespace.
//!
//! It is no emulator: what a core computes comes from an oracle that is chosen by the hash of the binary loaded into the array
//! ([`designs`]). Everything around the cores is done for real, on the bytes: ioctls, command packets, transactions, buffer
//! descriptors, locks, queues, tokens, and caches that are not coherent. What passes here is proved for XRT and for our calls, not
//! for a device; nothing about speed can be learned from it.
//!
//! Variables, all for tests: `NPUSIM_LOG` (say on stderr what is asked), `NPUSIM_FAULT` (see [`faults`]), `NPUSIM_REPORT` (a file
//! that gets a line when the last descriptor of the node is closed), `NPUSIM_SHADOW` (the device has a copy of its own of every
//! buffer, which only SYNC_BO moves; XRT has to be told `Debug.force_driver_sync`, since it flushes caches by itself otherwise).

// The rules of the hooks apply to x86-64: arguments of variadic functions arrive as those of others do.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

mod array;
mod bos;
mod commands;
mod designs;
mod device;
mod faults;
#[cfg_attr(test, allow(dead_code, reason = "tests do not put themselves in front of libc"))]
mod hooks;
mod memory;
mod registers;
mod transaction;
mod uapi;
