//! The functions of libcuda, and what their results mean.
//!
//! Signatures are those of cuda.h with a plain integer for each enum, so that a number which a newer driver invents is
//! still a value. Contexts, streams and events are pointers that only the driver follows: they travel as `usize`.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::CudaError;

/// `CUcontext`, `CUstream`, `CUevent`: addresses of the driver's own.
pub(crate) type Opaque = usize;
/// `CUdeviceptr`.
pub(crate) type Address = u64;
/// `CUmemGenericAllocationHandle`.
pub(crate) type AllocationHandle = u64;
/// `CUdevice`.
pub(crate) type Device = c_int;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Location {
    pub(crate) kind: c_uint,
    pub(crate) id: c_int,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct AccessDescriptor {
    pub(crate) location: Location,
    pub(crate) flags: c_uint,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct AllocationProperties {
    pub(crate) kind: c_uint,
    pub(crate) handle_types: c_uint,
    pub(crate) location: Location,
    pub(crate) windows_metadata: Opaque,
    pub(crate) compression: u8,
    pub(crate) rdma_capable: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

const _: () = assert!(size_of::<AllocationProperties>() == 32 && size_of::<AccessDescriptor>() == 12);

macro_rules! table {
    (
        $($field:ident = $symbol:literal ($($argument:ty),*);)*
        ;
        $($newer:ident = $newer_symbol:literal ($($newer_argument:ty),*);)*
    ) => {
        /// Every function that is called.
        #[derive(Debug)]
        pub(crate) struct Driver {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> c_uint,)*
            $(pub(crate) $newer: Option<unsafe extern "C" fn($($newer_argument),*) -> c_uint>,)*
        }

        impl Driver {
            fn load() -> Result<Self, CudaError> {
                // SAFETY: loading libcuda runs its initialisers, which are sound in any process at any time.
                let library = unsafe { Library::new("libcuda.so.1") };
                let library = library.map_err(|error| CudaError::Absent { what: error.to_string() })?;
                // Never unloaded: the driver has threads and handlers of its own.
                let library: &'static Library = Box::leak(Box::new(library));
                Ok(Self {
                    $($field: {
                        // SAFETY: the signature is the one that cuda.h gives for this name, up to enums as integers
                        // and opaque pointers as addresses, which pass alike.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> c_uint>($symbol.as_bytes())
                        };
                        *found.map_err(|_| CudaError::Absent { what: $symbol.to_owned() })?
                    },)*
                    $($newer: {
                        // SAFETY: as above.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($newer_argument),*) -> c_uint>($newer_symbol.as_bytes())
                        };
                        found.ok().map(|found| *found)
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
    device_get = "cuDeviceGet"(*mut Device, c_int);
    device_get_uuid = "cuDeviceGetUuid_v2"(*mut [u8; 16], Device);
    device_get_attribute = "cuDeviceGetAttribute"(*mut c_int, c_uint, Device);
    device_can_access_peer = "cuDeviceCanAccessPeer"(*mut c_int, Device, Device);
    primary_ctx_retain = "cuDevicePrimaryCtxRetain"(*mut Opaque, Device);
    primary_ctx_release = "cuDevicePrimaryCtxRelease_v2"(Device);
    ctx_push = "cuCtxPushCurrent_v2"(Opaque);
    ctx_pop = "cuCtxPopCurrent_v2"(*mut Opaque);
    ctx_get_flags = "cuCtxGetFlags"(*mut c_uint);
    mem_create = "cuMemCreate"(*mut AllocationHandle, usize, *const AllocationProperties, c_ulonglong);
    mem_import = "cuMemImportFromShareableHandle"(*mut AllocationHandle, *mut c_void, c_uint);
    mem_export = "cuMemExportToShareableHandle"(*mut c_int, AllocationHandle, c_uint, c_ulonglong);
    mem_range_handle = "cuMemGetHandleForAddressRange"(*mut c_int, Address, usize, c_uint, c_ulonglong);
    mem_release = "cuMemRelease"(AllocationHandle);
    mem_address_reserve = "cuMemAddressReserve"(*mut Address, usize, usize, Address, c_ulonglong);
    mem_address_free = "cuMemAddressFree"(Address, usize);
    mem_map = "cuMemMap"(Address, usize, usize, AllocationHandle, c_ulonglong);
    mem_unmap = "cuMemUnmap"(Address, usize);
    mem_set_access = "cuMemSetAccess"(Address, usize, *const AccessDescriptor, usize);
    memcpy_to_host = "cuMemcpyDtoH_v2"(*mut c_void, Address, usize);
    memcpy_to_device = "cuMemcpyHtoD_v2"(Address, *const c_void, usize);
    memcpy_device = "cuMemcpyDtoD_v2"(Address, Address, usize);
    mem_alloc = "cuMemAlloc_v2"(*mut Address, usize);
    mem_free = "cuMemFree_v2"(Address);
    pointer_get_attribute = "cuPointerGetAttribute"(*mut c_void, c_uint, Address);
    mem_host_alloc = "cuMemHostAlloc"(*mut Opaque, usize, c_uint);
    mem_free_host = "cuMemFreeHost"(Opaque);
    memset_d8 = "cuMemsetD8_v2"(Address, u8, usize);
    ctx_synchronize = "cuCtxSynchronize"();
    event_create = "cuEventCreate"(*mut Opaque, c_uint);
    event_record = "cuEventRecord"(Opaque, Opaque);
    event_synchronize = "cuEventSynchronize"(Opaque);
    event_destroy = "cuEventDestroy_v2"(Opaque);
    ;
    // What a driver of CUDA 11.7 lacks.
    ctx_set_flags = "cuCtxSetFlags"(c_uint);
}

impl Driver {
    /// The library, loaded and started at the first call.
    pub(crate) fn get() -> Result<&'static Self, CudaError> {
        static DRIVER: OnceLock<Result<Driver, CudaError>> = OnceLock::new();
        let driver = DRIVER.get_or_init(|| {
            let driver = Driver::load()?;
            // SAFETY: cuInit takes 0 as its flags and may be called at any time (cuda.h).
            let code = unsafe { (driver.init)(0) };
            driver.check("cuInit", code)?;
            Ok(driver)
        });
        driver.as_ref().map_err(Clone::clone)
    }

    /// What a result means.
    pub(crate) fn check(&self, call: &'static str, code: c_uint) -> Result<(), CudaError> {
        match code {
            0 => Ok(()),
            code => Err(CudaError::Driver { call, reason: self.name(code), code }),
        }
    }

    fn name(&self, code: c_uint) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: `name` is valid for a write for the call. An unknown code gives an error and a null pointer (cuda.h).
        let found = unsafe { (self.get_error_name)(code, &raw mut name) };
        if found != 0 || name.is_null() {
            return "a result without a name".to_owned();
        }
        // SAFETY: on success it is a string constant of the library, ended by zero, which is never unloaded.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}
