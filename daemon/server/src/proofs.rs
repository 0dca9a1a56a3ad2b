//! What probes found, by memory and port: what the plan says of GPUDirect RDMA, and what is to be probed again.

use std::collections::BTreeMap;

use gdrd_engine::{ProbeOutcome, Probed};
use gdrd_topology::gdr::{Gdr, GdrState};

/// What a proof is.
pub(crate) const PROVEN: &str = "a loopback transfer went through, every byte as sent";

/// GPU (empty: a host buffer), HCA and port.
type Key = (String, String, u8);

/// What is known of each.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Proofs {
    /// Not tried means that what was found is in doubt.
    found: BTreeMap<Key, ProbeOutcome>,
    /// Why the last probe of those of which nothing was found could not be tried.
    untried: BTreeMap<Key, String>,
}

impl Proofs {
    /// Notes what was found. What could not be tried says nothing against what was found before.
    pub(crate) fn note(&mut self, probed: &[Probed]) {
        for Probed { gpu, hca, port_num, outcome } in probed {
            let key = (gpu.clone(), hca.clone(), *port_num);
            match outcome {
                ProbeOutcome::NotTried(_) if self.found.contains_key(&key) => {}
                ProbeOutcome::NotTried(reason) => drop(self.untried.insert(key, reason.clone())),
                _ => {
                    self.untried.remove(&key);
                    self.found.insert(key, outcome.clone());
                }
            }
        }
    }

    /// Notes what was known before, doubt included.
    pub(crate) fn restore(&mut self, kept: Vec<Probed>) {
        self.found.extend(kept.into_iter().map(|known| ((known.gpu, known.hca, known.port_num), known.outcome)));
    }

    /// What was found through this HCA holds no longer, for this reason.
    pub(crate) fn doubt(&mut self, hca: &str, reason: &str) {
        for (_, outcome) in self.found.iter_mut().filter(|((_, known, _), _)| known == hca) {
            *outcome = ProbeOutcome::NotTried(reason.to_owned());
        }
    }

    /// Forgets all but these pairs of GPU and HCA.
    pub(crate) fn retain(&mut self, keep: impl Fn(&str, &str) -> bool) {
        self.found.retain(|(gpu, hca, _), _| keep(gpu, hca));
        self.untried.retain(|(gpu, hca, _), _| keep(gpu, hca));
    }

    /// All that was found.
    pub(crate) fn list(&self) -> Vec<Probed> {
        self.found.iter().map(|(key, outcome)| probed(key, outcome.clone())).collect()
    }

    /// Those of which nothing was found, since they could not be tried.
    pub(crate) fn untried(&self) -> Vec<Probed> {
        self.untried.iter().map(|(key, why)| probed(key, ProbeOutcome::NotTried(why.clone()))).collect()
    }

    /// What they say of a GPU and an HCA over all of its ports. One failed port makes the pair a failed one, since traffic
    /// may take any of them; one in doubt keeps it from being proven. `without` is what is known without probes.
    pub(crate) fn gdr(&self, gpu: &str, hca: &str, without: &Gdr) -> Option<Gdr> {
        let ports = self.found.iter().filter(|((known, of, _), _)| known == gpu && of == hca);
        let found = ports.filter_map(|((_, _, port_num), outcome)| gdr(*port_num, outcome));
        let found = found.max_by_key(|gdr| match gdr.state {
            GdrState::Failed => 2,
            GdrState::Proven => 0,
            _ => 1,
        });
        let is_it = |(known, of, _): &Key| known == gpu && of == hca;
        let why = || self.untried.iter().find(|(key, _)| is_it(key)).map(|(_, why)| without.untried(why));
        found.or_else(why)
    }
}

fn probed((gpu, hca, port_num): &Key, outcome: ProbeOutcome) -> Probed {
    Probed { gpu: gpu.clone(), hca: hca.clone(), port_num: *port_num, outcome }
}

fn gdr(port_num: u8, outcome: &ProbeOutcome) -> Option<Gdr> {
    let (state, reason) = match outcome {
        ProbeOutcome::Proven(figures) => {
            (GdrState::Proven, format!("{PROVEN}: {:.1} Gbit/s, {:.1} us", figures.gbps, figures.latency_us))
        }
        ProbeOutcome::Failed(reason) => (GdrState::Failed, format!("probe of port {port_num}: {reason}")),
        ProbeOutcome::NotTried(reason) => (GdrState::Possible, reason.clone()),
        _ => return None,
    };
    Some(Gdr { state, reason })
}

#[cfg(test)]
mod tests {
    use gdrd_engine::ProbeFigures;

    use super::*;

    fn probed(gpu: &str, port_num: u8, outcome: &ProbeOutcome) -> Probed {
        Probed { gpu: gpu.to_owned(), hca: "mlx5_0".to_owned(), port_num, outcome: outcome.clone() }
    }

    fn gdr_of(proofs: &Proofs, gpu: &str) -> Option<Gdr> {
        let without = Gdr { state: GdrState::Unknown, reason: "not probed; acs".to_owned() };
        proofs.gdr(gpu, "mlx5_0", &without)
    }

    fn state(proofs: &Proofs, gpu: &str) -> Option<GdrState> {
        gdr_of(proofs, gpu).map(|gdr| gdr.state)
    }

    const PROVEN: ProbeOutcome = ProbeOutcome::Proven(ProbeFigures { gbps: 1.0, latency_us: 2.0 });

    #[test]
    fn a_failed_port_speaks_for_the_pair_and_what_was_not_tried_for_none() {
        let failed = ProbeOutcome::Failed("no".to_owned());
        let mut proofs = Proofs::default();
        proofs.note(&[
            probed("", 1, &failed),
            probed("GPU0", 1, &failed),
            probed("GPU0", 2, &PROVEN),
            probed("GPU1", 1, &PROVEN),
            probed("GPU2", 1, &ProbeOutcome::NotTried("busy".to_owned())),
        ]);
        assert_eq!(state(&proofs, "GPU0"), Some(GdrState::Failed));
        assert_eq!(state(&proofs, "GPU1"), Some(GdrState::Proven));
        let untried = gdr_of(&proofs, "GPU2").expect("it is told why");
        assert_eq!((untried.state, untried.reason.as_str()), (GdrState::Unknown, "not probed: busy; acs"));
        assert_eq!((proofs.list().len(), proofs.untried().len()), (4, 1));
        assert_eq!(state(&proofs, "GPU3"), None);
        // What is found later takes its place.
        proofs.note(&[probed("GPU2", 1, &PROVEN), probed("GPU1", 1, &ProbeOutcome::NotTried("busy".to_owned()))]);
        assert_eq!([state(&proofs, "GPU1"), state(&proofs, "GPU2")], [Some(GdrState::Proven); 2]);
        assert!(proofs.untried().is_empty());
    }

    #[test]
    fn what_is_in_doubt_is_possible_until_it_is_found_anew() {
        let mut proofs = Proofs::default();
        proofs.note(&[probed("GPU0", 1, &PROVEN), probed("GPU0", 2, &PROVEN)]);
        proofs.doubt("mlx5_0", "its link has changed");
        assert_eq!(state(&proofs, "GPU0"), Some(GdrState::Possible));
        proofs.note(&[probed("GPU0", 1, &PROVEN)]);
        assert_eq!(state(&proofs, "GPU0"), Some(GdrState::Possible), "one port of two");
        proofs.note(&[probed("GPU0", 2, &PROVEN)]);
        assert_eq!(state(&proofs, "GPU0"), Some(GdrState::Proven));
    }
}
