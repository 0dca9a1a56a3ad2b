//! RDMA devices of this machine, through libibverbs.
//!
//! Role: implements the HCA traits of gdrd-hal over verbs: one owning type per object, parents kept alive, errno
//! kept, values that a driver invents answered with an error and never with a panic. Types and inline verbs come from
//! rdma-sys; the functions are looked up in `libibverbs.so.1` at run time, so that a binary with this crate starts
//! on a host without it and says why there are no RDMA devices.
//!
//! Owns: one context per device with a thread that waits for its asynchronous events.
//! Must not know: tenants, leases, rings, configuration files; GPU memory but as dma-buf fds.
#![allow(unsafe_code)]

mod capability;
mod completion;
mod context;
mod device;
mod direct;
mod domain;
mod error;
mod events;
mod gid;
mod ledger;
mod library;
mod mapping;
mod options;
mod port;
mod queue_pair;
mod receives;
mod region;
mod registry;
mod shared_receive;
mod transition;
mod work;

use std::sync::Arc;

use gdrd_hal::{Hca, HcaError};

pub use error::AbsentError;
pub use gid::choose_gid;
pub use options::Options;

/// libibverbs of this machine and the devices that it lists.
#[derive(Debug)]
pub struct Verbs {
    library: Arc<library::Library>,
}

/// A device that libibverbs lists and that could not be used.
#[derive(Debug)]
pub struct Unusable {
    /// Name as verbs gives it.
    pub name: String,
    /// Why.
    pub error: HcaError,
}

/// What [`Verbs::open_devices`] found.
#[derive(Default)]
pub struct Devices {
    /// Devices that are open.
    pub hcas: Vec<Arc<dyn Hca>>,
    /// Devices that are there and cannot be used.
    pub unusable: Vec<Unusable>,
}

impl std::fmt::Debug for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.hcas.iter().map(|hca| hca.name()).collect();
        f.debug_struct("Devices").field("hcas", &names).field("unusable", &self.unusable).finish()
    }
}

impl Verbs {
    /// Loads libibverbs.
    ///
    /// # Errors
    /// `NoLibrary`, `NoFunction`.
    pub fn load() -> Result<Self, AbsentError> {
        Ok(Self { library: Arc::new(library::Library::load()?) })
    }

    /// Opens every device that libibverbs lists, each with its own context (`ibv_open_device(3)`). May block on
    /// drivers.
    ///
    /// # Errors
    /// `NoList` when there is no list of devices; a single device that fails is among the unusable ones.
    pub fn open_devices(&self, options: &Options) -> Result<Devices, AbsentError> {
        self.open_those(options, |_| true)
    }

    /// As [`Verbs::open_devices`], those devices whose name is wanted: what has come since.
    ///
    /// # Errors
    /// `NoList`.
    pub fn open_those(&self, options: &Options, is_wanted: impl Fn(&str) -> bool) -> Result<Devices, AbsentError> {
        let list = device::DeviceList::read(&self.library)?;
        let mut devices = Devices::default();
        for place in (0..list.len()).filter(|place| list.name(*place).is_none_or(|name| is_wanted(&name))) {
            let (name, opened) = device::Device::open(&list, place, options);
            match opened {
                Ok(device) => devices.hcas.push(Arc::new(device)),
                Err(error) => devices.unusable.push(Unusable { name, error }),
            }
        }
        Ok(devices)
    }
}
