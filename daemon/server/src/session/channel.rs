//! One connection of the session socket: packets in, deliveries out, one un-acknowledged at a time.
//!
//! Role: the protocol's order and bounds. Owns the socket and the queue of deliveries behind the one in flight: fds
//! in flight count against this process (unix(7), ETOOMANYREFS), so a client that does not take them may cost only
//! one message of them. Nothing here waits: a peer that makes a send wait is not reading, and ends.
//!
//! A gRPC call hands its fds over on its own task: [`Channel::deliver`] sends at once, first reading the
//! acknowledgement of the delivery before where that is still on its way to the session's task.
//! Must not know: what the fds are, or who the peer is.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gdrd_engine::{LeaseId, QueuePairId};
use gdrd_proto::MAX_SESSION_PACKET_BYTES;
use gdrd_proto::v1::{self, client_message, daemon_message};
use prost::Message;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use super::goodbye::SessionEnd;
use super::packet::{self, MAX_PACKET_FDS, PacketBuffer, Received};
use crate::admission::Admitted;
use crate::readiness::watch;

/// What fds are sent for.
#[derive(Debug)]
pub(crate) enum Parcel {
    /// A buffer's memory.
    Memory {
        /// Its lease.
        lease: LeaseId,
        /// The fd.
        memory: OwnedFd,
    },
    /// The answer to a call that lends a buffer, with the buffer's memory.
    Lease {
        /// The call.
        request_id: u64,
        /// The lease, its delivery's number still to be set.
        lease: Box<v1::Lease>,
        /// The fd.
        memory: OwnedFd,
    },
    /// A queue pair's ring.
    Ring {
        /// The queue pair.
        queue_pair: QueuePairId,
        /// The ring's memfd.
        ring: OwnedFd,
        /// The eventfd that wakes the broker.
        doorbell: OwnedFd,
    },
    /// A session's own verbs context.
    Context {
        /// The HCA.
        hca: String,
        /// Its descriptor.
        context: OwnedFd,
    },
}

/// What a client asks on its socket, acknowledgements aside.
#[derive(Debug)]
pub(super) enum Incoming {
    /// The first message.
    Hello(v1::Hello),
    /// Proof of the right to GPUs. Its fds must be looked at and closed where waiting does no harm.
    ProveGpus { request_id: u64, fds: Vec<OwnedFd>, cut: bool },
    /// Memory to adopt. Its fds likewise.
    Adopt { adopt: v1::Adopt, fds: Vec<OwnedFd>, cut: bool },
    /// A call.
    Call(v1::Call),
}

/// The connection.
#[derive(Debug)]
pub(crate) struct Channel {
    /// Before the socket, so that a client which sees the end finds its place free.
    _place: Option<Admitted>,
    socket: AsyncFd<OwnedFd>,
    outbox: Mutex<Outbox>,
    ending: Notify,
    max_queued: usize,
    /// Deliveries up to this one are an earlier daemon's.
    last_of_before: u64,
}

#[derive(Debug, Default)]
struct Outbox {
    last_delivery: u64,
    unacknowledged: Option<u64>,
    queue: VecDeque<(u64, Parcel)>,
    /// Memory that the client is to let go of; bounded by what the engine lent it.
    gone: Vec<u64>,
    /// Until the client says that it did, the rest waits: one that sleeps for long must not find its socket full.
    gone_told: bool,
    end: Option<SessionEnd>,
    ended: bool,
}

/// Ids of one message to a client: the longest take 10 bytes each, and a packet takes 8 KiB.
pub(super) const IDS_PER_MESSAGE: usize = 256;

/// Acknowledgements read by one delivery before it queues: there is one un-acknowledged delivery at most.
const ACKS_READ_INLINE: usize = 1;

impl Channel {
    /// Takes a connected socket. Must be called within the runtime.
    ///
    /// # Errors
    /// As the runtime's registration of the fd.
    pub(super) fn new(socket: OwnedFd, place: Option<Admitted>, max_queued: u32) -> io::Result<Self> {
        Self::resumed(socket, place, max_queued, 0)
    }

    /// Takes the socket of a session that an earlier daemon began; none of its deliveries had a number above
    /// `last_delivery`.
    ///
    /// # Errors
    /// As [`Channel::new`].
    pub(super) fn resumed(
        socket: OwnedFd,
        place: Option<Admitted>,
        max_queued: u32,
        last_delivery: u64,
    ) -> io::Result<Self> {
        let outbox = Outbox { last_delivery, ..Outbox::default() };
        Ok(Self {
            _place: place,
            socket: watch(socket, Interest::READABLE)?,
            outbox: Mutex::new(outbox),
            ending: Notify::new(),
            max_queued: usize::try_from(max_queued).unwrap_or(usize::MAX),
            last_of_before: last_delivery,
        })
    }

    /// The socket, for its credentials.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.get_ref().as_fd()
    }

    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends fds as the next delivery, or queues them behind the one in flight; gives the delivery's number.
    ///
    /// # Errors
    /// The fds back when the session has ended, or ends by this: its queue is full or its peer does not read.
    pub(crate) fn deliver(&self, parcel: Parcel) -> Result<u64, Parcel> {
        let mut outbox = self.outbox();
        if outbox.unacknowledged.is_some() {
            self.read_acks(&mut outbox);
        }
        if outbox.ended {
            return Err(parcel);
        }
        if outbox.queue.len() >= self.max_queued {
            let problem = format!("{} deliveries wait for an acknowledgement", outbox.queue.len());
            self.end_locked(&mut outbox, SessionEnd::SlowReader(problem));
            return Err(parcel);
        }
        outbox.last_delivery += 1;
        let id = outbox.last_delivery;
        outbox.queue.push_back((id, parcel));
        self.flush(&mut outbox);
        Ok(id)
    }

    /// Has the client let go of memory that is being freed, some now, the rest as it keeps up.
    pub(super) fn memory_gone(&self, allocations: &[u64]) {
        let mut outbox = self.outbox();
        outbox.gone.extend(allocations);
        self.tell_gone(&mut outbox);
    }

    fn tell_gone(&self, outbox: &mut Outbox) {
        if outbox.ended || outbox.gone_told || outbox.gone.is_empty() {
            return;
        }
        let rest = outbox.gone.split_off(outbox.gone.len().min(IDS_PER_MESSAGE));
        let gone = v1::MemoryGone { allocation_ids: std::mem::replace(&mut outbox.gone, rest) };
        let message = v1::DaemonMessage { message: Some(daemon_message::Message::MemoryGone(gone)) };
        match packet::send(self.fd(), &message.encode_to_vec(), &[] as &[OwnedFd]) {
            Ok(()) => outbox.gone_told = true,
            Err(error) => self.end_locked(outbox, end_of_send(error)),
        }
    }

    /// Sends a message without fds that answers one of the client's.
    pub(super) fn answer(&self, message: daemon_message::Message) {
        let packet = v1::DaemonMessage { message: Some(message) }.encode_to_vec();
        self.send_or_end(&packet, &[] as &[OwnedFd]);
    }

    /// Sends the welcome with the generation page.
    pub(super) fn welcome(&self, welcome: v1::Welcome, generation_page: &OwnedFd) {
        let message = v1::DaemonMessage { message: Some(daemon_message::Message::Welcome(welcome)) };
        self.send_or_end(&message.encode_to_vec(), &[generation_page]);
    }

    fn send_or_end<F: AsFd>(&self, packet: &[u8], fds: &[F]) {
        let mut outbox = self.outbox();
        if outbox.ended {
            return;
        }
        if let Err(error) = packet::send(self.fd(), packet, fds) {
            self.end_locked(&mut outbox, end_of_send(error));
        }
    }

    /// Last message; whether it can still be sent does not matter.
    pub(super) fn goodbye(&self, end: &SessionEnd) {
        let mut outbox = self.outbox();
        outbox.ended = true;
        outbox.queue.clear();
        packet::refuse_more(self.fd());
        let _ = packet::send(self.fd(), &end.to_message().encode_to_vec(), &[] as &[OwnedFd]);
        // Closing it is not enough: whoever keeps descriptors for the next daemon may still have it.
        packet::send_no_more(self.fd());
    }

    fn end_locked(&self, outbox: &mut Outbox, end: SessionEnd) {
        if !outbox.ended {
            outbox.ended = true;
            outbox.end = Some(end);
            self.ending.notify_one();
        }
    }

    /// Waits until something other than the client's packets ends the session.
    pub(super) async fn ended(&self) -> SessionEnd {
        loop {
            self.ending.notified().await;
            if let Some(end) = self.outbox().end.take() {
                return end;
            }
        }
    }

    /// The next message that needs an answer; acknowledgements are taken on the way.
    ///
    /// # Errors
    /// What ends the session.
    pub(super) async fn next(&self, fds: impl Fn() -> Result<(), SessionEnd>) -> Result<Incoming, SessionEnd> {
        loop {
            let mut ready = self.socket.readable().await?;
            let read = ready.try_io(|_| match self.read(&fds) {
                Err(SessionEnd::Socket(error)) if error.kind() == io::ErrorKind::WouldBlock => Err(error),
                other => Ok(other),
            });
            match read {
                Ok(Ok(Ok(None))) | Err(_) => {}
                Ok(Ok(Ok(Some(incoming)))) => return Ok(incoming),
                Ok(Ok(Err(end))) => return Err(end),
                Ok(Err(error)) => return Err(error.into()),
            }
        }
    }

    /// Takes one packet; `None` for an acknowledgement.
    fn read(&self, fds: impl Fn() -> Result<(), SessionEnd>) -> Result<Option<Incoming>, SessionEnd> {
        let mut buffer: PacketBuffer = [0; MAX_SESSION_PACKET_BYTES];
        // Held over peek and receive: another reader between them would take a packet that was not looked at.
        let mut outbox = self.outbox();
        let seen = packet::peek(self.fd(), &mut buffer)?;
        match decode(&buffer, seen)? {
            message @ (client_message::Message::ProveGpus(_) | client_message::Message::Adopt(_)) => {
                fds()?;
                let (received, fds) = packet::receive_with_fds(self.fd(), &mut buffer)?;
                let cut = received.fds_cut || fds.len() > MAX_PACKET_FDS;
                Ok(match message {
                    client_message::Message::ProveGpus(prove) => {
                        Some(Incoming::ProveGpus { request_id: prove.request_id, fds, cut })
                    }
                    client_message::Message::Adopt(adopt) => Some(Incoming::Adopt { adopt, fds, cut }),
                    _ => None,
                })
            }
            _ if seen.fds_cut => Err(SessionEnd::UnexpectedFds),
            client_message::Message::Ack(ack) => {
                packet::receive_plain(self.fd(), &mut buffer)?;
                self.acknowledge(&mut outbox, ack.delivery_id).map(|()| None)
            }
            client_message::Message::Call(call) => {
                packet::receive_plain(self.fd(), &mut buffer)?;
                if call.ack_delivery_id != 0 {
                    self.acknowledge(&mut outbox, call.ack_delivery_id)?;
                }
                Ok(Some(Incoming::Call(call)))
            }
            client_message::Message::MemoryDropped(_) => {
                packet::receive_plain(self.fd(), &mut buffer)?;
                // It may be the answer to an earlier daemon.
                outbox.gone_told = false;
                self.tell_gone(&mut outbox);
                Ok(None)
            }
            client_message::Message::Hello(hello) => {
                packet::receive_plain(self.fd(), &mut buffer)?;
                Ok(Some(Incoming::Hello(hello)))
            }
        }
    }

    /// Drops calls that wait at the head of the socket: an earlier daemon's, whose clients make them again once they
    /// are told that there is a new one.
    pub(super) fn forget_calls(&self) {
        let mut buffer: PacketBuffer = [0; MAX_SESSION_PACKET_BYTES];
        let _outbox = self.outbox();
        for _ in 0..packet::MAX_WAITING_PACKETS {
            let Ok(seen) = packet::peek(self.fd(), &mut buffer) else { return };
            if seen.fds_cut || !matches!(decode(&buffer, seen), Ok(client_message::Message::Call(_))) {
                return;
            }
            // What it acknowledges is an earlier daemon's as well.
            let _ = packet::receive_plain(self.fd(), &mut buffer);
        }
    }

    /// Takes acknowledgements that are there already; leaves everything else to the session's task.
    fn read_acks(&self, outbox: &mut Outbox) {
        let mut buffer: PacketBuffer = [0; MAX_SESSION_PACKET_BYTES];
        for _ in 0..ACKS_READ_INLINE {
            let Ok(seen) = packet::peek(self.fd(), &mut buffer) else { return };
            let Ok(client_message::Message::Ack(ack)) = decode(&buffer, seen) else { return };
            if seen.fds_cut || outbox.unacknowledged != Some(ack.delivery_id) {
                return;
            }
            if packet::receive_plain(self.fd(), &mut buffer).is_err() {
                return;
            }
            outbox.unacknowledged = None;
            self.flush(outbox);
        }
    }

    fn acknowledge(&self, outbox: &mut Outbox, delivery: u64) -> Result<(), SessionEnd> {
        if outbox.unacknowledged != Some(delivery) {
            if delivery <= self.last_of_before {
                return Ok(());
            }
            return Err(SessionEnd::Protocol("an acknowledgement names a delivery that is not in flight"));
        }
        outbox.unacknowledged = None;
        self.flush(outbox);
        Ok(())
    }

    /// Sends the next delivery unless one is in flight.
    fn flush(&self, outbox: &mut Outbox) {
        if outbox.unacknowledged.is_some() {
            return;
        }
        let Some((id, mut parcel)) = outbox.queue.pop_front() else { return };
        match parcel.send(self.fd(), id) {
            Ok(()) => outbox.unacknowledged = Some(id),
            Err(error) => self.end_locked(outbox, end_of_send(error)),
        }
    }
}

impl Parcel {
    fn send(&mut self, socket: BorrowedFd<'_>, delivery_id: u64) -> io::Result<()> {
        let message = self.message(delivery_id);
        let packet = v1::DaemonMessage { message: Some(message) }.encode_to_vec();
        match self {
            Self::Memory { memory, .. } | Self::Lease { memory, .. } => packet::send(socket, &packet, &[memory]),
            Self::Ring { ring, doorbell, .. } => packet::send(socket, &packet, &[ring, doorbell]),
            Self::Context { context, .. } => packet::send(socket, &packet, &[context]),
        }
    }

    fn message(&mut self, delivery_id: u64) -> daemon_message::Message {
        use v1::delivery::Subject;
        let (kinds, subject): (&[&str], _) = match self {
            Self::Memory { lease, .. } => (&["memory"], Subject::LeaseId(lease.0)),
            Self::Ring { queue_pair, .. } => (&["ring", "doorbell"], Subject::QueuePairId(queue_pair.0)),
            Self::Context { hca, .. } => (&["context"], Subject::DirectHca(std::mem::take(hca))),
            Self::Lease { request_id, lease, .. } => {
                let lease = v1::Lease { delivery_id, ..std::mem::take(&mut **lease) };
                let (request_id, answer) = (*request_id, Some(v1::answer::Answer::Lease(lease)));
                return daemon_message::Message::Answer(v1::Answer { request_id, answer });
            }
        };
        let kinds = kinds.iter().map(|kind| (*kind).to_owned()).collect();
        daemon_message::Message::Delivery(v1::Delivery { delivery_id, kinds, subject: Some(subject) })
    }
}

fn decode(buffer: &PacketBuffer, received: Received) -> Result<client_message::Message, SessionEnd> {
    if received.truncated {
        return Err(SessionEnd::PacketTooLong { limit_bytes: MAX_SESSION_PACKET_BYTES });
    }
    let packet = buffer.get(..received.len_bytes).unwrap_or_default();
    if packet.is_empty() {
        return Err(SessionEnd::Closed);
    }
    let message = v1::ClientMessage::decode(packet).map_err(|error| SessionEnd::Malformed(error.to_string()))?;
    message.message.ok_or(SessionEnd::Malformed("no known message in it".to_owned()))
}

fn end_of_send(error: io::Error) -> SessionEnd {
    match error.kind() {
        io::ErrorKind::WouldBlock => SessionEnd::SlowReader("its socket is full".to_owned()),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => SessionEnd::Closed,
        _ => SessionEnd::Socket(error),
    }
}
