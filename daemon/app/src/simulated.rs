//! What a rescan finds on a simulated host: its profile, and what faults have made of its devices.
//!
//! Role: stands in for sysfs, which tells a live host of ports without link and of devices that are gone. Must not know: who asks.

use std::collections::HashMap;

use anyhow::Context as _;
use gdrd_engine::GpuUuid;
use gdrd_hal::{GpuHealth, HcaError, PortAttributes, PortState as Told};
use gdrd_sim::SimHost;
use gdrd_topology::model::{Host, PortState, Snapshot};

/// A simulated host and what it was made of.
#[derive(Debug)]
pub(crate) struct Simulated {
    pub(crate) profile: Snapshot,
    pub(crate) sim: SimHost,
}

impl Simulated {
    /// The host as it is now: without the HCAs that are gone, with the ports' states, and with a warning of each GPU that is lost.
    ///
    /// # Errors
    /// When the simulated driver does not answer.
    pub(crate) fn read(&self) -> anyhow::Result<Snapshot> {
        let mut snapshot = self.profile.clone();
        let host = &mut snapshot.host;
        for hca in self.sim.hcas() {
            match hca.ports() {
                Ok(ports) => note_ports(host, hca.name(), &ports),
                Err(HcaError::Gone { .. }) => host.hcas.retain(|known| known.name != hca.name()),
                Err(error) => return Err(error).context("ask a simulated hca for its ports"),
            }
        }
        for fact in self.sim.gpu_facts().gpus().context("list the simulated gpus")? {
            if let GpuHealth::Lost(reason) = fact.health {
                let gpu = host.gpus.iter().find(|gpu| gpu.bdf == Some(fact.bdf));
                let name = gpu.map_or_else(|| fact.uuid.0.clone(), |gpu| gpu.name.clone());
                host.warnings.push(format!("{name}: {reason}"));
            }
        }
        Ok(snapshot)
    }

    /// UUIDs by address: a profile need not have any.
    pub(crate) fn uuids(&self) -> HashMap<String, GpuUuid> {
        let facts = self.sim.gpu_facts().gpus().unwrap_or_default();
        facts.into_iter().map(|fact| (fact.bdf.to_string(), fact.uuid)).collect()
    }
}

/// Puts a state in place of the profile's where a fault has changed it: the profile tells more states apart.
fn note_ports(host: &mut Host, hca: &str, told: &[PortAttributes]) {
    let ports = host.hcas.iter_mut().filter(|known| known.name == hca).flat_map(|known| &mut known.ports);
    for port in ports {
        let is_active = matches!(port.state, PortState::Active | PortState::ActiveDefer);
        match told.iter().find(|told| told.port_num == port.port_num).map(|told| told.state) {
            Some(Told::Active) if !is_active => port.state = PortState::Active,
            Some(Told::Down) if is_active => port.state = PortState::Down,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use gdrd_topology::plan::{PlanOptions, plan};
    use gdrd_topology::profile;

    use super::*;

    fn simulated(script: &str) -> Simulated {
        let profile = profile::builtin("dgx-a100").expect("a built-in profile");
        let sim = SimHost::from_host(&profile.host).expect("it can be simulated");
        sim.inject_text(script).expect("a script");
        Simulated { profile, sim }
    }

    #[test]
    fn a_host_without_faults_is_its_profile() {
        for name in profile::builtin_names() {
            let profile = profile::builtin(name).expect("a built-in profile");
            let sim = SimHost::from_host(&profile.host).expect("it can be simulated");
            assert_eq!(Simulated { profile: profile.clone(), sim }.read().expect("it is read"), profile, "{name}");
        }
    }

    #[test]
    fn a_port_without_link_is_down_until_it_comes_back() {
        let simulated = simulated("hca mlx5_2: link-down port 1");
        let state = || {
            let host = simulated.read().expect("it is read").host;
            host.hcas.iter().find(|hca| hca.name == "mlx5_2").and_then(|hca| Some(hca.ports.first()?.state))
        };
        assert_eq!(state(), Some(PortState::Down));
        simulated.sim.inject_text("hca mlx5_2: link-up port 1").expect("a script");
        assert_eq!(state(), Some(PortState::Active));
    }

    #[test]
    fn an_hca_that_is_fatal_is_gone_and_another_one_is_assigned() {
        let simulated = simulated("");
        let options = PlanOptions::default();
        let assigned = |snapshot: &Snapshot| {
            let plan = plan(snapshot, &options);
            plan.gpu("GPU0").map(|gpu| gpu.assigned.clone()).expect("it is planned")
        };
        let first = assigned(&simulated.profile);
        for hca in &first {
            simulated.sim.inject_text(&format!("hca {hca}: fatal")).expect("a script");
        }
        let now = simulated.read().expect("it is read");
        assert!(now.host.hcas.iter().all(|hca| !first.contains(&hca.name)));
        let second = assigned(&now);
        assert!(!second.is_empty() && second.iter().all(|hca| !first.contains(hca)), "{second:?}");
    }

    #[test]
    fn a_lost_gpu_is_warned_of_by_name() {
        let warnings = simulated("gpu GPU4: lost").read().expect("it is read").host.warnings;
        assert!(warnings.iter().any(|warning| warning.starts_with("GPU4: gpu has fallen off the bus")), "{warnings:?}");
    }
}
