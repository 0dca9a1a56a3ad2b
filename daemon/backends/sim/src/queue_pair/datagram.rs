//! UD: sends to one address, without acknowledgement.

use std::sync::Arc;

use gdrd_hal::{GRH_BYTES, Gid, QueuePairType, WorkRequest, WorkStatus};

use super::attempt::Attempt;
use super::respond::Asked;
use super::{Connection, QueuePairCore, SendSide};

/// Next-header value of InfiniBand in a global route header (InfiniBand specification vol. 1, 8.3.3).
const NEXT_HEADER_IBA: u8 = 0x1b;
/// Hop limit that the simulation puts in; nothing routes.
const HOP_LIMIT: u8 = 64;

impl QueuePairCore {
    pub(super) fn attempt_datagram(
        &self,
        send: &mut SendSide,
        connection: &Connection,
        request: &WorkRequest,
    ) -> Attempt {
        let (payload, len_bytes) = match self.payload(&mut send.local, request) {
            Ok(payload) => payload,
            Err(status) => return Attempt::failed(status),
        };
        if len_bytes > connection.path_mtu_bytes {
            return Attempt::failed(WorkStatus::LocalLength);
        }
        if let Some(peer) = self.datagram_peer(connection) {
            let header = self.route_header(connection.remote.gid, len_bytes);
            peer.take_datagram(Asked { request, len_bytes }, &header, &payload);
        }
        Attempt::Done(Ok(len_bytes))
    }

    fn datagram_peer(&self, connection: &Connection) -> Option<Arc<Self>> {
        let hca = connection.hca.as_ref()?;
        let passes = !self.hca.is_gone()
            && !hca.is_gone()
            && self.hca.port(self.config.port_num)?.passes(connection.local_epoch)
            && hca.port(connection.remote.port_num)?.passes(connection.remote_epoch);
        let peer = hca.find_queue_pair(connection.remote.qp_num).filter(|_| passes)?;
        (peer.config.qp_type == QueuePairType::Ud).then_some(peer)
    }

    /// A global route header, or on a subnet addressed by LIDs zeros: the hardware leaves the room unwritten.
    fn route_header(&self, destination: Gid, len_bytes: u32) -> [u8; GRH_BYTES as usize] {
        let mut header = [0; GRH_BYTES as usize];
        if destination == Gid::default() {
            return header;
        }
        header[0] = 6 << 4;
        header[4..6].copy_from_slice(&u16::try_from(len_bytes).unwrap_or(u16::MAX).to_be_bytes());
        header[6] = NEXT_HEADER_IBA;
        header[7] = HOP_LIMIT;
        header[8..24].copy_from_slice(&self.source_gid().0);
        header[24..40].copy_from_slice(&destination.0);
        header
    }
}
