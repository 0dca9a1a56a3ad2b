//! Counts connections, in all and per uid, and refuses those beyond the bound. A share of the places is for administrators: other
//! users together cannot keep them off the daemon.
//!
//! Role: one counter per socket. Must not know what the connections are for.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One in so many places is for administrators.
const ADMIN_SHARE: u32 = 8;

/// How often it is logged at most that connections are refused.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// Which bound keeps a connection off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Full {
    /// Its uid's.
    Uid(u32),
    /// That of all together.
    Daemon,
}

impl Full {
    /// For the client; `kind` names the connections.
    pub(crate) fn describe(self, kind: &str) -> String {
        match self {
            Self::Uid(uid) => format!("uid {uid} has as many {kind} connections as it may; close some"),
            Self::Daemon => format!("the daemon has as many {kind} connections as it may, but for administrators"),
        }
    }
}

/// Bounds and counts of one socket.
#[derive(Debug)]
pub(crate) struct Admission {
    max_total: u32,
    max_per_uid: u32,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    total: u32,
    per_uid: HashMap<u32, u32>,
    refused: u32,
    last_logged: Option<Instant>,
}

/// One admitted connection; the count goes down when it is dropped.
#[derive(Debug)]
pub(crate) struct Admitted {
    admission: Arc<Admission>,
    uid: u32,
}

impl Admission {
    pub(crate) fn new(max_total: u32, max_per_uid: u32) -> Arc<Self> {
        Arc::new(Self { max_total, max_per_uid, counts: Mutex::default() })
    }

    /// A place for one more connection of this uid, unless it or all together have as many as they may. `is_admin` is asked
    /// where only places for administrators are left.
    pub(crate) fn admit(self: &Arc<Self>, uid: u32, is_admin: impl FnOnce() -> bool) -> Result<Admitted, Full> {
        let for_others = self.max_total - self.max_total / ADMIN_SHARE;
        // Asked without the lock: it may read files.
        let is_admin = self.total() >= for_others && is_admin();
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let of_uid = counts.per_uid.get(&uid).copied().unwrap_or(0);
        let full = if of_uid >= self.max_per_uid {
            Some(Full::Uid(uid))
        } else if counts.total >= if is_admin { self.max_total } else { for_others } {
            Some(Full::Daemon)
        } else {
            None
        };
        if let Some(full) = full {
            counts.refused = counts.refused.saturating_add(1);
            return Err(full);
        }
        counts.total += 1;
        counts.per_uid.insert(uid, of_uid + 1);
        Ok(Admitted { admission: Arc::clone(self), uid })
    }

    /// Logs that a connection of the socket was refused, once a minute at most.
    pub(crate) fn log_refusal(&self, kind: &str, full: Full) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.last_logged.is_some_and(|last| last.elapsed() < LOG_EVERY) {
            return;
        }
        counts.last_logged = Some(Instant::now());
        let refused = counts.refused;
        drop(counts);
        tracing::warn!(refused, "a connection was refused: {}", full.describe(kind));
    }

    /// Connections refused so far.
    pub(crate) fn refused(&self) -> u32 {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).refused
    }

    /// Connections now.
    pub(crate) fn total(&self) -> u32 {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).total
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut counts = self.admission.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.total = counts.total.saturating_sub(1);
        if let Some(of_uid) = counts.per_uid.get_mut(&self.uid) {
            *of_uid = of_uid.saturating_sub(1);
            if *of_uid == 0 {
                counts.per_uid.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_uid_cannot_take_the_places_of_others() {
        let admission = Admission::new(3, 2);
        let admit = |uid| admission.admit(uid, || false);
        let first = admit(1).expect("a place");
        let _second = admit(1).expect("a place");
        assert_eq!(admit(1).expect_err("its own bound"), Full::Uid(1));
        let _other = admit(2).expect("a place for another uid");
        assert_eq!(admit(3).expect_err("all places are taken"), Full::Daemon);
        drop(first);
        assert!(admit(3).is_ok());
        assert_eq!(admission.refused(), 2);
    }

    #[test]
    fn all_others_together_leave_places_for_administrators() {
        let admission = Admission::new(16, 4);
        let others: Vec<_> = (0..20).filter_map(|index| admission.admit(1000 + index / 4, || false).ok()).collect();
        assert_eq!(others.len(), 14);
        assert_eq!(admission.admit(2000, || false).expect_err("the rest is for others"), Full::Daemon);
        let admins: Vec<_> = (0..2).map(|_| admission.admit(0, || true).expect("a place")).collect();
        assert_eq!(admission.admit(0, || true).expect_err("none is left"), Full::Daemon);
        drop((others, admins));
    }

    #[test]
    fn nothing_is_left_when_all_are_gone() {
        let admission = Admission::new(3, 2);
        drop((admission.admit(1, || false), admission.admit(2, || false)));
        assert_eq!(admission.total(), 0);
        assert!(admission.counts.lock().expect("no panic held it").per_uid.is_empty());
    }
}
