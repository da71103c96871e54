//! The driver's requests: their numbers and the fields of their arguments, by offset. Arguments are handled as bytes, so that a
//! request with a wrong size cannot be misread.
//!
//! Offsets are of the structs in `drm/amdxdna_accel.h` (Linux 7.3) and `drm/drm.h` that each list is named after.

/// `_IOC` of `asm-generic/ioctl.h` with the type `d`.
const fn drm(direction: u32, number: u32, size: u32) -> u32 {
    direction << 30 | size << 16 | 0x64 << 8 | number
}

const W: u32 = 1;
const WR: u32 = 3;

/// `struct drm_version`.
pub const VERSION: u32 = drm(WR, 0x00, 64);
/// `struct drm_gem_close`.
pub const GEM_CLOSE: u32 = drm(W, 0x09, 8);
/// `struct drm_prime_handle`.
pub const PRIME_HANDLE_TO_FD: u32 = drm(WR, 0x2d, 12);
/// `struct drm_prime_handle`.
pub const PRIME_FD_TO_HANDLE: u32 = drm(WR, 0x2e, 12);
/// `struct amdxdna_drm_create_hwctx`.
pub const CREATE_HWCTX: u32 = drm(WR, 0x40, 56);
/// `struct amdxdna_drm_destroy_hwctx`.
pub const DESTROY_HWCTX: u32 = drm(WR, 0x41, 8);
/// `struct amdxdna_drm_config_hwctx`.
pub const CONFIG_HWCTX: u32 = drm(WR, 0x42, 24);
/// `struct amdxdna_drm_create_bo`.
pub const CREATE_BO: u32 = drm(WR, 0x43, 32);
/// `struct amdxdna_drm_get_bo_info`.
pub const GET_BO_INFO: u32 = drm(WR, 0x44, 48);
/// `struct amdxdna_drm_sync_bo`.
pub const SYNC_BO: u32 = drm(WR, 0x45, 24);
/// `struct amdxdna_drm_exec_cmd`.
pub const EXEC_CMD: u32 = drm(WR, 0x46, 56);
/// `struct amdxdna_drm_get_info`.
pub const GET_INFO: u32 = drm(WR, 0x47, 16);
/// `struct amdxdna_drm_set_state`.
pub const SET_STATE: u32 = drm(WR, 0x48, 16);
/// `struct amdxdna_drm_wait_cmd`.
pub const WAIT_CMD: u32 = drm(W, 0x49, 16);
/// `struct amdxdna_drm_get_array`.
pub const GET_ARRAY: u32 = drm(WR, 0x4a, 24);

/// All of them.
const ALL: [u32; 15] = [
    VERSION,
    GEM_CLOSE,
    PRIME_HANDLE_TO_FD,
    PRIME_FD_TO_HANDLE,
    CREATE_HWCTX,
    DESTROY_HWCTX,
    CONFIG_HWCTX,
    CREATE_BO,
    GET_BO_INFO,
    SYNC_BO,
    EXEC_CMD,
    WAIT_CMD,
    GET_INFO,
    GET_ARRAY,
    SET_STATE,
];

/// The request that is meant. DRM goes by number and size and not by the direction, and XRT has another one for WAIT_CMD than the
/// kernel's header.
pub fn meant(request: u32) -> u32 {
    ALL.into_iter().find(|known| known << 2 == request << 2).unwrap_or(request)
}

/// `enum amdxdna_bo_type`.
pub const BO_SHARE: u32 = 1;
/// The device's heap.
pub const BO_DEV_HEAP: u32 = 2;
/// A part of the heap.
pub const BO_DEV: u32 = 3;
/// A command packet.
pub const BO_CMD: u32 = 4;
/// `AMDXDNA_INVALID_ADDR`.
pub const INVALID_ADDR: u64 = u64::MAX;
/// `AMDXDNA_INVALID_DOORBELL_OFFSET`.
pub const INVALID_DOORBELL: u32 = u32::MAX;
/// `DRM_AMDXDNA_HWCTX_CONFIG_CU`.
pub const CONFIG_CU: u32 = 0;

/// `enum amdxdna_drm_get_param`.
pub mod query {
    pub const AIE_METADATA: u32 = 1;
    pub const AIE_VERSION: u32 = 2;
    pub const FIRMWARE_VERSION: u32 = 8;
    pub const RESOURCE_INFO: u32 = 12;
}

/// `enum ert_cmd_opcode` of XRT's `ert.h`.
pub mod opcode {
    pub const START_CU: u32 = 0;
    pub const CMD_CHAIN: u32 = 19;
    pub const START_NPU: u32 = 20;
    pub const START_NPU_PREEMPT: u32 = 21;
    pub const START_NPU_PREEMPT_ELF: u32 = 22;
}

/// `enum ert_cmd_state` of XRT's `ert.h`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    Completed = 4,
    Error = 5,
    Abort = 6,
    Timeout = 8,
}

/// An argument's bytes.
pub struct Fields<'a>(pub &'a mut [u8]);

impl Fields<'_> {
    pub fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[at..at + 4].try_into().expect("4 bytes"))
    }

    pub fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.0[at..at + 8].try_into().expect("8 bytes"))
    }

    pub fn set_u32(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    pub fn set_u64(&mut self, at: usize, value: u64) {
        self.0[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a C compiler makes of `drm/drm.h` and `drm/amdxdna_accel.h` of Linux 7.3.
    #[test]
    fn requests_are_the_kernels() {
        let theirs = [
            0xc0406400, 0x40086409, 0xc00c642d, 0xc00c642e, 0xc0386440, 0xc0086441, 0xc0186442, 0xc0206443, 0xc0306444,
            0xc0186445, 0xc0386446, 0x40106449, 0xc0106447, 0xc018644a, 0xc0106448,
        ];
        assert_eq!(ALL, theirs);
        assert_eq!((meant(0xc010_6449), meant(0xc010_6450)), (WAIT_CMD, 0xc010_6450));
    }
}
