//! The functions of libibverbs, looked up at run time.
//!
//! Owns the loaded library, which is never unloaded: its providers keep thread-local state and exit handlers.
//! Must not know: what the functions are used for.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;

use rdma_sys::{
    ibv_ah, ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid_entry, ibv_mr,
    ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_srq, ibv_srq_attr, ibv_srq_init_attr,
};

use crate::error::AbsentError;

/// Soname since rdma-core 15; it names the ABI.
const LIBRARY: &str = "libibverbs.so.1";

/// `struct ibv_async_event` with plain numbers: a type that rdma-sys makes a Rust enum would be undefined behaviour for
/// events that are newer than its headers. tests/abi.rs compares the layout.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct AsyncEvent {
    /// Union of pointers and a port number in its first four bytes.
    pub(crate) element: u64,
    pub(crate) event_type: u32,
}

macro_rules! library {
    ($($name:ident: unsafe extern "C" fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// One field per function of verbs.h, with its name and signature.
        pub(crate) struct Library {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            _handle: ManuallyDrop<libloading::Library>,
        }

        impl Library {
            /// Loads the library and looks up every function.
            ///
            /// # Errors
            /// `NoLibrary`, `NoFunction`.
            pub(crate) fn load() -> Result<Self, AbsentError> {
                // SAFETY: libibverbs' initialiser only registers providers and reads the environment, as for every
                // program that links it; the caller loads it once, before it starts threads that change the
                // environment.
                let loaded = unsafe { libloading::Library::new(LIBRARY) };
                let handle = ManuallyDrop::new(
                    loaded.map_err(|error| AbsentError::NoLibrary { name: LIBRARY, reason: error.to_string() })?
                );
                $(
                    // SAFETY: the type is the signature of this function in <infiniband/verbs.h>, which the soname
                    // promises.
                    let found = unsafe {
                        handle.get::<unsafe extern "C" fn($($argument),*) $(-> $result)?>(stringify!($name).as_bytes())
                    };
                    let $name = *found.map_err(|error| AbsentError::NoFunction {
                        name: stringify!($name),
                        reason: error.to_string(),
                    })?;
                )*
                Ok(Self { $($name,)* _handle: handle })
            }

            /// A library that no call comes back from, for tests to put the functions in that they expect to be called.
            #[cfg(test)]
            pub(crate) fn uncallable() -> Self {
                $(
                    unsafe extern "C" fn $name($(_: $argument),*) $(-> $result)? {
                        std::process::abort()
                    }
                )*
                let own = libloading::os::unix::Library::this();
                Self { $($name,)* _handle: ManuallyDrop::new(own.into()) }
            }
        }
    };
}

library! {
    ibv_get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device;
    ibv_free_device_list: unsafe extern "C" fn(*mut *mut ibv_device);
    ibv_get_device_name: unsafe extern "C" fn(*mut ibv_device) -> *const c_char;
    ibv_open_device: unsafe extern "C" fn(*mut ibv_device) -> *mut ibv_context;
    ibv_close_device: unsafe extern "C" fn(*mut ibv_context) -> c_int;
    ibv_import_device: unsafe extern "C" fn(c_int) -> *mut ibv_context;
    ibv_query_device: unsafe extern "C" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    ibv_query_port: unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    _ibv_query_gid_table: unsafe extern "C" fn(*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize;
    ibv_get_async_event: unsafe extern "C" fn(*mut ibv_context, *mut AsyncEvent) -> c_int;
    ibv_ack_async_event: unsafe extern "C" fn(*mut AsyncEvent);
    ibv_alloc_pd: unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_pd;
    ibv_dealloc_pd: unsafe extern "C" fn(*mut ibv_pd) -> c_int;
    ibv_reg_mr: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    ibv_reg_mr_iova2: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
    ibv_reg_dmabuf_mr: unsafe extern "C" fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
    ibv_dereg_mr: unsafe extern "C" fn(*mut ibv_mr) -> c_int;
    ibv_create_comp_channel: unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_comp_channel;
    ibv_destroy_comp_channel: unsafe extern "C" fn(*mut ibv_comp_channel) -> c_int;
    ibv_create_cq:
        unsafe extern "C" fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    ibv_destroy_cq: unsafe extern "C" fn(*mut ibv_cq) -> c_int;
    ibv_get_cq_event: unsafe extern "C" fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events: unsafe extern "C" fn(*mut ibv_cq, c_uint);
    ibv_create_srq: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
    ibv_modify_srq: unsafe extern "C" fn(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int;
    ibv_query_srq: unsafe extern "C" fn(*mut ibv_srq, *mut ibv_srq_attr) -> c_int;
    ibv_destroy_srq: unsafe extern "C" fn(*mut ibv_srq) -> c_int;
    ibv_create_qp: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    ibv_modify_qp: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    ibv_query_qp: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
    ibv_destroy_qp: unsafe extern "C" fn(*mut ibv_qp) -> c_int;
    ibv_create_ah: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
    ibv_destroy_ah: unsafe extern "C" fn(*mut ibv_ah) -> c_int;
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(LIBRARY)
    }
}
