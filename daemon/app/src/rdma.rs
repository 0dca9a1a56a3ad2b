//! The RDMA devices of this machine: opened at start, and those that come, or come back, later.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use gdrd_engine::Engine;
use gdrd_hal::Hca;
use gdrd_server::Backend;
use gdrd_topology::model::{HcaOrigin, Host};
use gdrd_verbs::{AbsentError, Devices, Options, Verbs};
use tracing::warn;

use crate::hardware::backend;
use crate::locked_memory;

/// Opens devices of this machine: libibverbs.
pub(crate) trait Opener: std::fmt::Debug + Send + Sync {
    /// Those whose name is wanted. Blocks on drivers.
    fn open_those(&self, options: &Options, is_wanted: &dyn Fn(&str) -> bool) -> Result<Devices, AbsentError>;
}

impl Opener for Verbs {
    fn open_those(&self, options: &Options, is_wanted: &dyn Fn(&str) -> bool) -> Result<Devices, AbsentError> {
        Self::open_those(self, options, is_wanted)
    }
}

/// Which are open, and which cannot be.
#[derive(Debug)]
pub(crate) struct RdmaDevices {
    opener: Box<dyn Opener>,
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
        let devices = Self::by(Box::new(verbs), options);
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

    /// None yet, to be opened by this.
    pub(crate) fn by(opener: Box<dyn Opener>, options: Options) -> Self {
        Self { opener, options, unusable: Mutex::default() }
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
            match self.opener.open_those(&self.options, &is_missing) {
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

#[cfg(test)]
pub(crate) mod tests {
    use std::os::fd::{BorrowedFd, OwnedFd};

    use gdrd_engine::{EngineConfig, Hardware, HostPlan, MemoryKind};
    use gdrd_hal::{
        CompletionQueue, DirectContext, Gid, GidEntry, GidType, HcaCapabilities, HcaError, HcaEvent, LinkLayer,
        PortAttributes, PortState, ProtectionDomain,
    };
    use gdrd_sim::{Provider, SimHca, SimHost, SimPort, SimSpec};
    use gdrd_topology::profile;
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    /// What the descriptor of each open device is called, so that they can be counted beside those of other tests.
    const DESCRIPTOR: &str = "gdrd-test-uverbs";

    /// A simulated device with a descriptor that is open as long as it is.
    struct Opened {
        simulated: Arc<dyn Hca>,
        _descriptor: OwnedFd,
    }

    impl Hca for Opened {
        fn name(&self) -> &str {
            self.simulated.name()
        }

        fn capabilities(&self) -> HcaCapabilities {
            self.simulated.capabilities()
        }

        fn ports(&self) -> Result<Vec<PortAttributes>, HcaError> {
            self.simulated.ports()
        }

        fn alloc_pd(&self) -> Result<Arc<dyn ProtectionDomain>, HcaError> {
            self.simulated.alloc_pd()
        }

        fn open_direct(&self) -> Result<Arc<dyn DirectContext>, HcaError> {
            self.simulated.open_direct()
        }

        fn create_cq(&self, depth: u32) -> Result<Box<dyn CompletionQueue>, HcaError> {
            self.simulated.create_cq(depth)
        }

        fn take_events(&self) -> Vec<HcaEvent> {
            self.simulated.take_events()
        }

        fn event_fd(&self) -> Option<BorrowedFd<'_>> {
            self.simulated.event_fd()
        }
    }

    /// A machine with one place for a device, which is there or not.
    #[derive(Debug, Clone)]
    pub(crate) struct Slot {
        name: String,
        there: Arc<Mutex<Option<SimHost>>>,
    }

    impl Slot {
        pub(crate) fn new(name: &str) -> Self {
            Self { name: name.to_owned(), there: Arc::default() }
        }

        /// Puts a new device in, of which nobody is told.
        pub(crate) fn fill(&self) {
            let gid = GidEntry { gid_index: 0, gid: Gid([1; 16]), gid_type: GidType::RoceV2 };
            let (state, link_layer, gids) = (PortState::Active, LinkLayer::Ethernet, vec![gid]);
            let port = SimPort { state, link_layer, rate_gbps: 100.0, lid: 0, mtu_bytes: 4096, gids };
            let capabilities = Provider::Mlx5.capabilities();
            let hca = SimHca { name: self.name.clone(), capabilities, ports: vec![port] };
            let host = SimHost::new(SimSpec { gpus: Vec::new(), hcas: vec![hca] }).expect("it is sound");
            *self.there.lock().expect("nobody panicked") = Some(host);
        }

        fn take_out(&self) {
            let host = self.there.lock().expect("nobody panicked").take().expect("it is there");
            host.inject_text(&format!("hca {}: fatal", self.name)).expect("a script");
        }
    }

    impl Opener for Slot {
        fn open_those(&self, _: &Options, is_wanted: &dyn Fn(&str) -> bool) -> Result<Devices, AbsentError> {
            let there = self.there.lock().expect("nobody panicked");
            let hcas = there.iter().flat_map(SimHost::hcas).filter(|hca| is_wanted(hca.name()));
            let open = |simulated| -> Arc<dyn Hca> {
                let descriptor = memfd_create(DESCRIPTOR, MemfdFlags::CLOEXEC).expect("a descriptor is left");
                Arc::new(Opened { simulated, _descriptor: descriptor })
            };
            Ok(Devices { hcas: hcas.map(open).collect(), unusable: Vec::new() })
        }
    }

    /// Devices that are open, in whoever's hands.
    fn open_devices() -> usize {
        let links = std::fs::read_dir("/proc/self/fd").expect("procfs").flatten();
        // One may be closed between listing and looking.
        let targets = links.filter_map(|link| std::fs::read_link(link.path()).ok());
        targets.filter(|target| target.to_string_lossy().contains(DESCRIPTOR)).count()
    }

    fn until(what: &str, reached: impl Fn() -> bool) {
        let start = std::time::Instant::now();
        while !reached() {
            assert!(start.elapsed().as_secs() < 60, "waited in vain for {what}");
            std::thread::yield_now();
        }
    }

    /// kubernetes-sigs/dranet#180: a device that comes back is not seen, and its descriptors leak each time.
    #[test]
    fn a_device_that_returns_a_thousand_times_without_a_word_is_served_each_time_and_leaves_no_descriptor() {
        let (gpu_memory_kind, plan) = (MemoryKind::CudaPosixFd, HostPlan::default());
        let hardware = Hardware { gpu_memory: None, gpu_memory_kind, gpu_facts: None, hcas: Vec::new(), plan };
        let engine = Engine::start(EngineConfig::default(), hardware).expect("it starts");
        let mut host = profile::builtin("dgx-a100").expect("a built-in profile").host;
        host.hcas.truncate(1);
        let name = host.hcas[0].name.clone();
        let without = Host { hcas: Vec::new(), ..host.clone() };
        let slot = Slot::new(&name);
        let devices = RdmaDevices::by(Box::new(slot.clone()), Options::default());
        let before = open_devices();
        for _ in 0..1000 {
            slot.fill();
            devices.follow(&host, &engine);
            assert_eq!(engine.hca_names(), std::slice::from_ref(&name));
            slot.take_out();
            until("the device to be missed", || engine.hca_names().is_empty());
            devices.follow(&without, &engine);
        }
        until("the last one to be closed", || open_devices() <= before);
    }
}
