//! The RDMA devices of this machine: opened at start, and those that come, or come back, later.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use gdrd_engine::Engine;
use gdrd_hal::Hca;
use gdrd_server::Backend;
use gdrd_topology::model::{HcaOrigin, Host};
use gdrd_verbs::{Devices, Options, Verbs};
use tracing::warn;

use crate::hardware::backend;
use crate::locked_memory;

/// What opens them.
#[derive(Debug)]
pub(crate) struct RdmaDevices {
    verbs: Verbs,
    options: Options,
    /// Those that are there and cannot be used, with the reason, so that each is said once.
    unusable: Mutex<BTreeMap<String, String>>,
}

impl RdmaDevices {
    /// Opens what is there. A device that cannot be opened takes none of the others with it.
    pub(crate) fn open(options: Options) -> (Option<Self>, Vec<Arc<dyn Hca>>, Backend) {
        let verbs = match Verbs::load() {
            Ok(verbs) => verbs,
            Err(error) => return (None, Vec::new(), backend("verbs", Err(error.to_string()))),
        };
        let opened = verbs.open_devices(&options);
        let devices = Self { verbs, options, unusable: Mutex::default() };
        match opened {
            Ok(opened) => {
                devices.note(&opened);
                if let Some(bound) = locked_memory::bound().filter(|_| !opened.hcas.is_empty()) {
                    warn!("{bound}");
                }
                let names: Vec<String> = opened.hcas.iter().map(|hca| hca.name().to_owned()).collect();
                let told = devices.told(&names);
                (Some(devices), opened.hcas, told)
            }
            Err(error) => (Some(devices), Vec::new(), backend("verbs", Err(error.to_string()))),
        }
    }

    /// Opens the devices that the host has and the engine does not serve, and hands them to it. Blocks on drivers.
    /// Returns what is to be said of the backend, if it changed.
    pub(crate) fn follow(&self, host: &Host, engine: &Engine) -> Backend {
        let served = engine.hca_names();
        let is_rdma = |origin: &HcaOrigin| matches!(origin, HcaOrigin::Hardware | HcaOrigin::Soft { .. });
        let is_there = |name: &str| host.hcas.iter().any(|hca| hca.name == name && is_rdma(&hca.origin));
        self.lock().retain(|name, _| is_there(name));
        let is_missing = |name: &str| is_there(name) && !served.iter().any(|known| known == name);
        if host.hcas.iter().any(|hca| is_missing(&hca.name)) {
            match self.verbs.open_those(&self.options, is_missing) {
                Ok(opened) => {
                    self.note(&opened);
                    for hca in opened.hcas {
                        engine.add_hca(hca);
                    }
                }
                Err(error) => warn!("rdma devices that have come cannot be listed: {error}"),
            }
        }
        self.told(&engine.hca_names())
    }

    fn note(&self, opened: &Devices) {
        let mut unusable = self.lock();
        opened.hcas.iter().for_each(|hca| drop(unusable.remove(hca.name())));
        for device in &opened.unusable {
            let reason = device.error.to_string();
            if unusable.insert(device.name.clone(), reason.clone()).as_ref() != Some(&reason) {
                warn!(hca = device.name, "not served: {reason}");
            }
        }
    }

    /// What they are, for whoever asks what the daemon has.
    fn told(&self, served: &[String]) -> Backend {
        let serves = (!served.is_empty()).then(|| format!("serves {}", served.join(", ")));
        let unusable: Vec<String> = self.lock().iter().map(|(name, reason)| format!("not {name}: {reason}")).collect();
        let bound = locked_memory::bound().filter(|_| !served.is_empty());
        let told: Vec<String> = serves.into_iter().chain(unusable).chain(bound).collect();
        backend(
            "verbs",
            match told.as_slice() {
                [] => Err("libibverbs lists no rdma device".to_owned()),
                told if served.is_empty() => Err(told.join("; ")),
                told => Ok(told.join("; ")),
            },
        )
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, String>> {
        // Each change leaves it whole.
        self.unusable.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
