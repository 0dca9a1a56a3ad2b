//! Why a GPU has the NICs it has, candidate by candidate.

use serde::{Deserialize, Serialize};

use crate::error::TopologyError;
use crate::level::Level;
use crate::model::{GpuId, HcaId, Snapshot};
use crate::path::Bottleneck;
use crate::plan::contract::Plan;
use crate::plan::wording::level_word;
use crate::plan::{MAX_PAIRS, Pairing, PlanOptions, is_too_large, sticky};
use crate::words::gbps;

/// The whole story of one GPU's pairing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// Name of the GPU.
    pub gpu: String,
    /// The reason as the plan gives it.
    pub reason: String,
    /// NICs it is given.
    pub winners: Vec<Winner>,
    /// All others, nearest first.
    pub losers: Vec<Loser>,
}

/// A NIC that is given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Winner {
    /// Name of the NIC.
    pub nic: String,
    /// P2P level.
    pub level: Option<Level>,
    /// Narrowest part of the path.
    pub bottleneck: Option<Bottleneck>,
    /// GPUs that share it, this one included.
    pub gpus: Vec<String>,
}

/// A NIC that is not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Loser {
    /// Name of the NIC.
    pub nic: String,
    /// P2P level.
    pub level: Option<Level>,
    /// Narrowest part of the path.
    pub bottleneck: Option<Bottleneck>,
    /// Why it lost.
    pub why: String,
}

/// Explains the pairing of a GPU, named by name, uuid or address. `plan` is the plan in force, if it is to
/// be explained rather than a new one.
///
/// # Errors
/// The host has no such GPU.
pub fn explain(
    snapshot: &Snapshot,
    options: &PlanOptions,
    plan: Option<&Plan>,
    gpu: &str,
) -> Result<Explanation, TopologyError> {
    let host = &snapshot.host;
    let id = host
        .find_gpu(gpu)
        .ok_or_else(|| TopologyError::NoSuchDevice { what: "GPU", name: gpu.chars().take(64).collect() })?;
    if is_too_large(host) {
        return Err(TopologyError::BadRequest { message: format!("more than {MAX_PAIRS} pairs are not planned") });
    }
    let kept = plan.map(|plan| sticky::still_there(plan, host)).unwrap_or_default();
    let pairing = Pairing::of(host, options, &kept);
    Ok(pairing.explanation(id))
}

impl Pairing<'_> {
    fn explanation(&self, gpu: GpuId) -> Explanation {
        let assigned = self.choice.of_gpu(gpu);
        let (winners, losers): (Vec<HcaId>, Vec<HcaId>) =
            self.by_nearness(gpu).into_iter().partition(|nic| assigned.contains(nic));
        let gpu_name = |id: GpuId| self.host.gpu(id).map_or_else(String::new, |gpu| gpu.name.clone());
        let winner = |nic: HcaId| Winner {
            nic: self.name(nic),
            level: self.host.gpu_hca_level(gpu, nic),
            bottleneck: self.host.gpu_hca_bottleneck(gpu, nic),
            gpus: self.choice.users(nic).map(gpu_name).collect(),
        };
        let loser = |nic: HcaId| Loser {
            nic: self.name(nic),
            level: self.host.gpu_hca_level(gpu, nic),
            bottleneck: self.host.gpu_hca_bottleneck(gpu, nic),
            why: self.why_lost(gpu, nic),
        };
        Explanation {
            gpu: gpu_name(gpu),
            reason: self.reason(gpu),
            winners: winners.into_iter().map(winner).collect(),
            losers: losers.into_iter().map(loser).collect(),
        }
    }

    fn why_lost(&self, gpu: GpuId, nic: HcaId) -> String {
        let Some(candidate) = self.candidates.nic(nic) else { return "no such NIC".to_owned() };
        if let Some(reason) = &candidate.exclusion {
            return format!("never given automatically: {reason}");
        }
        if self.choice.pinned.contains(&gpu) {
            return "the operator pinned this GPU to others".to_owned();
        }
        let level = self.host.gpu_hca_level(gpu, nic);
        let Some(winner) = self.choice.of_gpu(gpu).first() else {
            return format!("{} is beyond max_level {}", level_word(level), self.options.max_level);
        };
        let (own, best) = (self.candidates.nearness(gpu, nic), self.candidates.nearness(gpu, *winner));
        if let Some((own, best)) = own.zip(best).filter(|(own, best)| own != best) {
            return self.why_farther(gpu, *winner, level, own, best);
        }
        self.why_equal_lost(gpu, nic)
    }

    fn why_farther(
        &self,
        gpu: GpuId,
        winner: HcaId,
        level: Option<Level>,
        own: super::candidates::Nearness,
        best: super::candidates::Nearness,
    ) -> String {
        if own < best {
            return format!("nearer than {}, which is kept until a new plan is applied", self.name(winner));
        }
        if own.is_soft && !best.is_soft {
            return format!("software RDMA comes after hardware such as {}", self.name(winner));
        }
        if own.level == best.level && own.has_no_level == best.has_no_level {
            return format!("{} like {}, but farther by NUMA node", level_word(level), self.name(winner));
        }
        let winner_level = self.host.gpu_hca_level(gpu, winner);
        format!("{} is farther than {} of {}", level_word(level), level_word(winner_level), self.name(winner))
    }

    fn why_equal_lost(&self, gpu: GpuId, nic: HcaId) -> String {
        let users: Vec<String> =
            self.choice.users(nic).filter_map(|user| self.host.gpu(user)).map(|user| user.name.clone()).collect();
        let demotions = self.candidates.nic(nic).map(|candidate| candidate.demotion.reasons()).unwrap_or_default();
        let why = match (users.is_empty(), demotions.is_empty()) {
            (false, _) => format!("equally near, given to {} so that each has its own share", users.join(", ")),
            (true, false) => format!("equally near, but it {}", demotions.join(" and ")),
            (true, true) => self.why_left_over(gpu, nic),
        };
        why + &self.meets_higher(gpu, nic).unwrap_or_default()
    }

    /// Of equals the one whose path meets the GPU's at the deeper bridge is taken, where the rest is equal too.
    fn meets_higher(&self, gpu: GpuId, nic: HcaId) -> Option<String> {
        let winner = *self.choice.of_gpu(gpu).first()?;
        let (own, best) = (self.meeting(gpu, nic)?, self.meeting(gpu, winner)?);
        let (higher, deeper) = own.bridge.zip(best.bridge).filter(|_| best.depth > own.depth)?;
        Some(format!("; {} meets this GPU deeper, at {deeper} below {higher}", self.name(winner)))
    }

    fn why_left_over(&self, gpu: GpuId, nic: HcaId) -> String {
        let rate = |id: HcaId| self.host.gpu_hca_bottleneck(gpu, id).map(|narrowest| narrowest.gbps);
        let best = self.choice.of_gpu(gpu).first().and_then(|winner| rate(*winner));
        match (rate(nic), best) {
            (Some(own), Some(best)) if own < best => {
                format!("equally near, but only {} of {} Gbit/s", gbps(own), gbps(best))
            }
            _ => "equally near, left over: the GPUs that compete for it could not all have one more".to_owned(),
        }
    }
}
