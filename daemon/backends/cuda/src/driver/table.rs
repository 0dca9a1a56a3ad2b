//! The functions of libcuda that the worker calls, looked up once, and what their results mean.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle, CUstream,
    CUuuid,
};

use crate::device::{DeviceError, DeviceErrorKind};

/// As cudarc loads it.
pub(super) type Library = libloading::Library;

/// Results that leave the context as it was (`CUresult`, cuda.h).
const SUCCESS: c_uint = 0;
const INVALID_VALUE: c_uint = 1;
const OUT_OF_MEMORY: c_uint = 2;
const NO_DEVICE: c_uint = 100;
const INVALID_DEVICE: c_uint = 101;
const INVALID_HANDLE: c_uint = 400;
const NOT_PERMITTED: c_uint = 800;
const NOT_SUPPORTED: c_uint = 801;

macro_rules! table {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// Every function that is called, with the signature of cuda.h and a plain integer for `CUresult`.
        #[derive(Debug, Clone, Copy)]
        pub(super) struct Driver {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> c_uint,)*
        }

        impl Driver {
            /// Finds the library and every symbol.
            pub(super) fn load() -> Result<Self, DeviceError> {
                let library = Self::library()?;
                Ok(Self {
                    $($field: {
                        // SAFETY: the symbol's signature is the one that cuda.h gives for this name, and the library
                        // is never unloaded.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> c_uint>($symbol.as_bytes())
                        };
                        *found.map_err(|_| missing($symbol))?
                    },)*
                })
            }
        }
    };
}

table! {
    init = "cuInit"(c_uint);
    get_error_name = "cuGetErrorName"(c_uint, *mut *const c_char);
    device_get_count = "cuDeviceGetCount"(*mut c_int);
    device_get = "cuDeviceGet"(*mut CUdevice, c_int);
    device_get_uuid = "cuDeviceGetUuid_v2"(*mut CUuuid, CUdevice);
    device_get_attribute = "cuDeviceGetAttribute"(*mut c_int, c_uint, CUdevice);
    primary_ctx_set_flags = "cuDevicePrimaryCtxSetFlags_v2"(CUdevice, c_uint);
    primary_ctx_retain = "cuDevicePrimaryCtxRetain"(*mut CUcontext, CUdevice);
    primary_ctx_release = "cuDevicePrimaryCtxRelease_v2"(CUdevice);
    ctx_set_current = "cuCtxSetCurrent"(CUcontext);
    stream_priority_range = "cuCtxGetStreamPriorityRange"(*mut c_int, *mut c_int);
    stream_create = "cuStreamCreateWithPriority"(*mut CUstream, c_uint, c_int);
    stream_synchronize = "cuStreamSynchronize"(CUstream);
    mem_get_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);
    mem_get_granularity = "cuMemGetAllocationGranularity"(*mut usize, *const CUmemAllocationProp, c_uint);
    mem_create = "cuMemCreate"(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
    mem_import =
        "cuMemImportFromShareableHandle"(*mut CUmemGenericAllocationHandle, *mut c_void, c_uint);
    mem_release = "cuMemRelease"(CUmemGenericAllocationHandle);
    mem_address_reserve = "cuMemAddressReserve"(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    mem_address_free = "cuMemAddressFree"(CUdeviceptr, usize);
    mem_map = "cuMemMap"(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    mem_unmap = "cuMemUnmap"(CUdeviceptr, usize);
    mem_set_access = "cuMemSetAccess"(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    mem_export = "cuMemExportToShareableHandle"(*mut c_void, CUmemGenericAllocationHandle, c_uint, c_ulonglong);
    mem_range_handle = "cuMemGetHandleForAddressRange"(*mut c_void, CUdeviceptr, usize, c_uint, c_ulonglong);
    pointer_get_attribute = "cuPointerGetAttribute"(*mut c_void, c_uint, CUdeviceptr);
    memset_d8 = "cuMemsetD8Async"(CUdeviceptr, c_uchar, usize, CUstream);
    memcpy_device = "cuMemcpyDtoDAsync_v2"(CUdeviceptr, CUdeviceptr, usize, CUstream);
    memcpy_to_host = "cuMemcpyDtoHAsync_v2"(*mut c_void, CUdeviceptr, usize, CUstream);
    memcpy_to_device = "cuMemcpyHtoDAsync_v2"(CUdeviceptr, *const c_void, usize, CUstream);
}

fn missing(symbol: &str) -> DeviceError {
    DeviceError::refused(symbol, "libcuda has no such function; upgrade the nvidia driver to one of CUDA 11.7 or later")
}

impl Driver {
    /// What a result means.
    pub(super) fn check(&self, call: &str, code: c_uint) -> Result<(), DeviceError> {
        let kind = match code {
            SUCCESS => return Ok(()),
            OUT_OF_MEMORY => DeviceErrorKind::OutOfMemory,
            INVALID_VALUE | INVALID_HANDLE | NOT_PERMITTED | NOT_SUPPORTED => DeviceErrorKind::Refused,
            NO_DEVICE | INVALID_DEVICE => DeviceErrorKind::Lost,
            // Most others spoil the context, and which do changes with the driver: a new worker is the safe answer.
            _ => DeviceErrorKind::Sticky,
        };
        Err(DeviceError { kind, call: call.to_owned(), reason: self.name(code) })
    }

    fn name(&self, code: c_uint) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: `name` is valid for a write for the call. An unknown code gives an error and a null pointer (cuda.h).
        let found = unsafe { (self.get_error_name)(code, &raw mut name) };
        if found != SUCCESS || name.is_null() {
            return format!("result {code}");
        }
        // SAFETY: on success it is a string constant of the library, ended by zero, which is never unloaded.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}
