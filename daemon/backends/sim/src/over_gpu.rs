//! HCAs over GPU memory of another backend: they move its bytes by copies on the device, where there is no NIC. What they
//! show is the path to an HCA and back, and nothing about one.

use std::sync::Arc;

use gdrd_hal::{Gid, GidEntry, GidType, GpuCopies, LinkLayer, PortState};

use crate::{Provider, SimError, SimHca, SimHost, SimOptions, SimPort, SimSpec, Timing};

/// Rate that they tell.
const RATE_GBPS: f64 = 400.0;
/// Their MTU, bytes.
const MTU_BYTES: u32 = 4096;

impl SimHost {
    /// `count` HCAs, `sim_0` and so on, on one link, as an mlx5 has them.
    ///
    /// # Errors
    /// As [`SimHost::with_options`].
    pub fn over_gpu_memory(copies: Arc<dyn GpuCopies>, count: u8, timing: Timing) -> Result<Self, SimError> {
        let spec = SimSpec { gpus: Vec::new(), hcas: (0..count).map(hca).collect() };
        Self::with_options(spec, SimOptions { timing, gpu_copies: Some(copies), ..SimOptions::default() })
    }
}

fn hca(index: u8) -> SimHca {
    SimHca {
        name: format!("sim_{index}"),
        capabilities: Provider::Mlx5.capabilities(),
        ports: vec![SimPort {
            state: PortState::Active,
            link_layer: LinkLayer::Ethernet,
            rate_gbps: RATE_GBPS,
            lid: 0,
            mtu_bytes: MTU_BYTES,
            gids: vec![GidEntry { gid_index: 0, gid: link_local(index), gid_type: GidType::RoceV2 }],
        }],
    }
}

fn link_local(index: u8) -> Gid {
    let mut gid = [0; 16];
    gid[..2].copy_from_slice(&[0xfe, 0x80]);
    gid[15] = index + 1;
    Gid(gid)
}
