//! Memory of cuMemAlloc opened in another process by CUDA IPC: what a job does that has no daemon, for measurements. No
//! descriptor of such memory can be given to a NIC or be kept for a later process.

use std::ffi::c_uint;
use std::sync::{Arc, OnceLock};

use libloading::Library;

use crate::table::Address;
use crate::{Allocation, CudaError, Gpu};

/// `CU_IPC_HANDLE_SIZE`, cuda.h.
const HANDLE_BYTES: usize = 64;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, cuda.h: the one flag there is.
const LAZY_PEER_ACCESS: c_uint = 1;

/// `CUipcMemHandle`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct IpcHandle([u8; HANDLE_BYTES]);

#[derive(Debug)]
struct Table {
    get_handle: unsafe extern "C" fn(*mut IpcHandle, Address) -> c_uint,
    open_handle: unsafe extern "C" fn(*mut Address, IpcHandle, c_uint) -> c_uint,
    close_handle: unsafe extern "C" fn(Address) -> c_uint,
}

impl Table {
    /// Beside the clients' own table, so that no client needs these functions.
    fn get() -> Result<&'static Self, CudaError> {
        static TABLE: OnceLock<Result<Table, CudaError>> = OnceLock::new();
        TABLE.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, CudaError> {
        // SAFETY: libcuda is loaded already, by the `Gpu` that every caller has; this counts one more user of it.
        let library = unsafe { Library::new("libcuda.so.1") };
        let library = library.map_err(|error| CudaError::Absent { what: error.to_string() })?;
        // Never unloaded, as the clients' own.
        let library: &'static Library = Box::leak(Box::new(library));
        macro_rules! symbol {
            ($name:literal) => {{
                // SAFETY: the signature of the field is the one that cuda.h gives for this name.
                let found = unsafe { library.get($name) };
                *found.map_err(|_| CudaError::Absent { what: String::from_utf8_lossy($name).into_owned() })?
            }};
        }
        Ok(Self {
            get_handle: symbol!(b"cuIpcGetMemHandle"),
            open_handle: symbol!(b"cuIpcOpenMemHandle_v2"),
            close_handle: symbol!(b"cuIpcCloseMemHandle"),
        })
    }
}

/// What another process opens memory of cuMemAlloc by, as text.
///
/// # Errors
/// `Absent`, `Driver`.
pub fn handle(memory: &Allocation) -> Result<String, CudaError> {
    let (table, gpu) = (Table::get()?, memory.gpu());
    let _current = gpu.enter()?;
    let mut handle = IpcHandle([0; HANDLE_BYTES]);
    // SAFETY: `handle` is valid for a write for the call, and the address is the start of a live allocation.
    let code = unsafe { (table.get_handle)(&raw mut handle, memory.device_address()) };
    gpu.driver.check("cuIpcGetMemHandle", code)?;
    Ok(handle.0.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Memory of another process, usable here until it is dropped.
#[derive(Debug)]
pub struct OpenedIpc {
    gpu: Arc<Gpu>,
    start: Address,
}

impl OpenedIpc {
    /// Opens what [`handle`] told in another process.
    ///
    /// # Errors
    /// `Driver`; `Absent` for a text that is no handle.
    pub fn open(gpu: &Arc<Gpu>, handle: &str) -> Result<Self, CudaError> {
        let table = Table::get()?;
        let digits = |at: usize| handle.get(2 * at..2 * at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
        let mut bytes = IpcHandle([0; HANDLE_BYTES]);
        for (at, byte) in bytes.0.iter_mut().enumerate() {
            *byte = digits(at).ok_or_else(|| CudaError::Absent { what: "an IPC handle in this text".to_owned() })?;
        }
        let _current = gpu.enter()?;
        let mut start = 0;
        // SAFETY: `start` is valid for a write for the call, a context is current, and the driver checks the handle.
        let code = unsafe { (table.open_handle)(&raw mut start, bytes, LAZY_PEER_ACCESS) };
        gpu.driver.check("cuIpcOpenMemHandle", code)?;
        Ok(Self { gpu: Arc::clone(gpu), start })
    }
}

impl Drop for OpenedIpc {
    fn drop(&mut self) {
        let (Ok(table), Ok(_current)) = (Table::get(), self.gpu.enter()) else { return };
        // SAFETY: it was opened once by `open` and is closed once.
        let _ = unsafe { (table.close_handle)(self.start) };
    }
}
