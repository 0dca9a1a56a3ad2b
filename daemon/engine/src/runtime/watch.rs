//! Who watches leases, and what each is told.

use std::sync::Arc;

use futures_channel::mpsc;

use super::objects::Objects;
use crate::config::Limits;
use crate::core::{Change, Core, Seen, TenantId};
use crate::error::EngineError;
use crate::lease::{LeaseEvent, LeaseEventKind};

/// One user that is no administrator has at most this part of all streams.
const USERS_PART: u32 = 8;
/// And at least so many.
const USERS_LEAST: u32 = 2;

/// One stream.
#[derive(Debug)]
struct Watcher {
    seen: Seen,
    sequence: u64,
    events: mpsc::Sender<LeaseEvent>,
    /// A channel has room for one event of each sender beyond its length: this one is kept for `Resync`.
    last_word: mpsc::Sender<LeaseEvent>,
}

impl Watcher {
    /// False when the stream has ended.
    fn tell(&mut self, kind: LeaseEventKind) -> bool {
        self.sequence += 1;
        let event = LeaseEvent { sequence: self.sequence, kind };
        match self.events.try_send(event) {
            Ok(()) => true,
            Err(error) => {
                if error.is_full() {
                    let event = LeaseEvent { sequence: self.sequence, kind: LeaseEventKind::Resync };
                    // Its place is free: nothing else was ever sent there.
                    let _ = self.last_word.try_send(event);
                }
                false
            }
        }
    }
}

/// All streams.
#[derive(Debug)]
pub(super) struct Watchers {
    watchers: Vec<Watcher>,
    most: u32,
    queue: u32,
}

impl Watchers {
    pub(super) fn new(limits: &Limits) -> Self {
        Self { watchers: Vec::new(), most: limits.max_watches, queue: limits.watch_queue }
    }

    pub(super) fn is_watched(&self) -> bool {
        !self.watchers.is_empty()
    }

    /// A new stream, which starts with the full state.
    pub(super) fn add(&mut self, core: &Core, seen: Seen) -> Result<mpsc::Receiver<LeaseEvent>, EngineError> {
        self.watchers.retain(|watcher| !watcher.events.is_closed());
        let limit = |whom, limit: u32, used: usize| {
            let (limit, used) = (u64::from(limit), used as u64);
            let what = "the limit on watches";
            let refused = EngineError::Limit { reason: "LIMIT_WATCHES", what, whom, limit, used, asked: 1 };
            if used < limit { Ok(()) } else { Err(refused) }
        };
        limit("the daemon", self.most, self.watchers.len())?;
        if let Seen::Tenant(key) = &seen {
            let is_theirs = |watcher: &&Watcher| matches!(&watcher.seen, Seen::Tenant(other) if other.uid == key.uid);
            let used = self.watchers.iter().filter(is_theirs).count();
            limit("your user", (self.most / USERS_PART).max(USERS_LEAST), used)?;
        }
        let present = core.all_leases(&seen);
        let (events, receiver) = mpsc::channel(present.len() + 1 + self.queue as usize);
        let last_word = events.clone();
        let mut watcher = Watcher { seen, sequence: 0, events, last_word };
        for lease in present {
            watcher.tell(LeaseEventKind::Present(lease));
        }
        watcher.tell(LeaseEventKind::Synced);
        self.watchers.push(watcher);
        Ok(receiver)
    }

    /// Tells those who see the tenant.
    pub(super) fn tell(&mut self, core: &Core, objects: &Objects, tenant: TenantId, change: &Change) {
        self.watchers.retain_mut(|watcher| {
            let own = matches!(watcher.seen, Seen::Tenant(_));
            !core.sees(&watcher.seen, tenant) || watcher.tell(event_of(core, objects, change, own))
        });
    }

    /// Tells everyone.
    pub(super) fn nic_down(&mut self, hca: &Arc<str>, port_num: u8) {
        self.watchers.retain_mut(|watcher| watcher.tell(LeaseEventKind::NicDown { hca: Arc::clone(hca), port_num }));
    }

    /// Ends all streams.
    pub(super) fn end(&mut self) {
        self.watchers.clear();
    }
}

fn event_of(core: &Core, objects: &Objects, change: &Change, own: bool) -> LeaseEventKind {
    match change {
        Change::Acquired(info) => LeaseEventKind::Acquired(info.clone()),
        Change::Released { lease, generation, reason } => {
            LeaseEventKind::Released { lease: *lease, generation: *generation, reason }
        }
        Change::Revoked { lease, generation, reason } => {
            LeaseEventKind::Revoked { lease: *lease, generation: *generation, reason: reason.clone() }
        }
        Change::Rekeyed(info) => {
            let mut info = info.clone();
            // The tenant needs its new keys; nobody else is shown any.
            if let Some(memory) = core.memory_of(info.id).filter(|_| own).and_then(|id| objects.memory(id)) {
                memory.fill_keys(&mut info.registrations);
            }
            LeaseEventKind::Rekeyed(info)
        }
    }
}
