//! Counts connections, in all and per uid, and refuses those beyond the bound.
//!
//! Role: one counter per socket. Must not know what the connections are for.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

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

    /// A place for one more connection of this uid, unless it or all together have as many as they may.
    pub(crate) fn admit(self: &Arc<Self>, uid: u32) -> Option<Admitted> {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let of_uid = counts.per_uid.get(&uid).copied().unwrap_or(0);
        if counts.total >= self.max_total || of_uid >= self.max_per_uid {
            return None;
        }
        counts.total += 1;
        counts.per_uid.insert(uid, of_uid + 1);
        Some(Admitted { admission: Arc::clone(self), uid })
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
        let first = admission.admit(1).expect("a place");
        let _second = admission.admit(1).expect("a place");
        assert!(admission.admit(1).is_none());
        let _other = admission.admit(2).expect("a place for another uid");
        assert!(admission.admit(3).is_none(), "all places are taken");
        drop(first);
        assert!(admission.admit(3).is_some());
    }

    #[test]
    fn nothing_is_left_when_all_are_gone() {
        let admission = Admission::new(3, 2);
        drop((admission.admit(1), admission.admit(2)));
        assert_eq!(admission.total(), 0);
        assert!(admission.counts.lock().expect("no panic held it").per_uid.is_empty());
    }
}
