//! Who holds a lease: sessions, each with the grants that made it so.
//!
//! There are as many of these as leases, and nearly all name one session with one grant, so they are short lists in order.

use super::GrantId;
use crate::ids::SessionId;

#[derive(Debug)]
struct Holder {
    session: SessionId,
    grants: Vec<GrantId>,
}

/// The holders of one lease, in order of their sessions.
#[derive(Debug, Default)]
pub(crate) struct Holders(Vec<Holder>);

impl Holders {
    /// How many sessions hold it.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn sessions(&self) -> impl Iterator<Item = SessionId> {
        self.0.iter().map(|holder| holder.session)
    }

    pub(crate) fn contains(&self, session: SessionId) -> bool {
        self.place(session).is_ok()
    }

    /// By how many grants the session holds it; 0 if it does not.
    pub(super) fn grants_of(&self, session: SessionId) -> usize {
        let place = self.place(session).ok();
        place.and_then(|place| self.0.get(place)).map_or(0, |holder| holder.grants.len())
    }

    pub(super) fn add(&mut self, session: SessionId, grant: GrantId) {
        match self.place(session) {
            Ok(place) => self.0.get_mut(place).into_iter().for_each(|holder| holder.grants.push(grant)),
            Err(place) => {
                self.0.reserve_exact(1);
                self.0.insert(place, Holder { session, grants: vec![grant] });
            }
        }
    }

    /// Takes one grant back. True if the session held the lease, and by no other.
    pub(super) fn take_back(&mut self, session: SessionId, grant: GrantId) -> bool {
        let holder = self.place(session).ok().and_then(|place| self.0.get_mut(place));
        holder.is_some_and(|holder| {
            holder.grants.retain(|held| *held != grant);
            holder.grants.is_empty()
        })
    }

    /// Takes a session off with all its grants.
    pub(super) fn remove(&mut self, session: SessionId) {
        if let Ok(place) = self.place(session) {
            self.0.remove(place);
        }
    }

    /// Where the session is, or would be.
    fn place(&self, session: SessionId) -> Result<usize, usize> {
        self.0.binary_search_by_key(&session, |holder| holder.session)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_holds_until_its_last_grant_is_taken_back() {
        let [one, two] = [1, 2].map(SessionId);
        let mut holders = Holders::default();
        for (session, grant) in [(two, 7), (one, 8), (two, 9)] {
            holders.add(session, GrantId(grant));
        }
        assert!(holders.sessions().eq([one, two]));
        assert_eq!((holders.grants_of(two), holders.grants_of(SessionId(3))), (2, 0));
        assert!(!holders.take_back(two, GrantId(7)) && holders.contains(two));
        assert!(holders.take_back(two, GrantId(9)));
        assert!(!holders.take_back(SessionId(3), GrantId(9)));
        holders.remove(two);
        assert!(holders.contains(one) && !holders.contains(two));
        assert_eq!((holders.len(), holders.is_empty()), (1, false));
    }
}
