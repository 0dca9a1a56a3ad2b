//! From probes to the plan: what was seen of a GPU and an HCA over all of its ports.

use std::collections::BTreeMap;

use gdrd_engine::{ProbeOutcome, Probed};
use gdrd_topology::gdr::{Gdr, GdrState};

/// What a proof is.
pub(crate) const PROVEN: &str = "a loopback transfer went through, every byte as sent";

/// One failed port makes the pair a failed one: traffic may take any of them. What was not tried says nothing.
pub fn proofs(probed: &[Probed]) -> BTreeMap<(String, String), Gdr> {
    let mut found: BTreeMap<(String, String), Gdr> = BTreeMap::new();
    for Probed { gpu, hca, port_num, outcome } in probed.iter().filter(|probed| !probed.gpu.is_empty()) {
        let gdr = match outcome {
            ProbeOutcome::Proven(figures) => Gdr {
                state: GdrState::Proven,
                reason: format!("{PROVEN}: {:.1} Gbit/s, {:.1} us", figures.gbps, figures.latency_us),
            },
            ProbeOutcome::Failed(reason) => {
                Gdr { state: GdrState::Failed, reason: format!("probe of port {port_num}: {reason}") }
            }
            _ => continue,
        };
        let entry = found.entry((gpu.clone(), hca.clone())).or_insert_with(|| gdr.clone());
        if gdr.state == GdrState::Failed {
            *entry = gdr;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use gdrd_engine::ProbeFigures;

    use super::*;

    #[test]
    fn a_failed_port_speaks_for_the_pair_and_what_was_not_tried_for_none() {
        let proven = ProbeOutcome::Proven(ProbeFigures { gbps: 1.0, latency_us: 2.0 });
        let probe = |gpu: &str, port_num, outcome: &ProbeOutcome| Probed {
            gpu: gpu.to_owned(),
            hca: "mlx5_0".to_owned(),
            port_num,
            outcome: outcome.clone(),
        };
        let failed = ProbeOutcome::Failed("no".to_owned());
        let probed = [
            probe("", 1, &failed),
            probe("GPU0", 1, &failed),
            probe("GPU0", 2, &proven),
            probe("GPU1", 1, &proven),
            probe("GPU2", 1, &ProbeOutcome::NotTried("busy".to_owned())),
        ];
        let found = proofs(&probed);
        let states: Vec<_> = found.iter().map(|((gpu, _), gdr)| (gpu.as_str(), gdr.state)).collect();
        assert_eq!(states, [("GPU0", GdrState::Failed), ("GPU1", GdrState::Proven)]);
    }
}
