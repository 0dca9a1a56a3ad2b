//! Sessions as the outside knows them: tokens and event streams.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use futures_channel::mpsc;
use rustix::rand::{GetRandomFlags, getrandom};

use super::{Answered, Runtime, lock};
use crate::core::{Input, NewSession, WarmUp};
use crate::error::EngineError;
use crate::ids::{SessionId, Token, TokenDigest};
use crate::peer::{Peer, TenantKey};
use crate::policy::{Prewarm, Rule};
use crate::session::{SessionEvent, SessionOpened};

/// Events queued for one session; those beyond are lost, which only delays what the session finds out anyway.
const EVENT_QUEUE: usize = 64;
#[derive(Debug)]
struct Entry {
    token: TokenDigest,
    uid: u32,
    events: mpsc::Sender<SessionEvent>,
    /// Memory that is being freed, which the session's client is still to be told of: at most what it was lent.
    memory_gone: Vec<u64>,
}

#[derive(Debug, Default)]
struct Tables {
    by_id: BTreeMap<SessionId, Entry>,
    by_token: BTreeMap<TokenDigest, SessionId>,
}

/// Open sessions.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    tables: Mutex<Tables>,
}

impl Sessions {
    pub(super) fn insert(&self, session: SessionId, token: TokenDigest, uid: u32) -> mpsc::Receiver<SessionEvent> {
        let (events, receiver) = mpsc::channel(EVENT_QUEUE);
        let mut tables = lock(&self.tables);
        tables.by_token.insert(token, session);
        tables.by_id.insert(session, Entry { token, uid, events, memory_gone: Vec::new() });
        receiver
    }

    pub(super) fn tell(&self, session: SessionId, event: &SessionEvent) {
        if let Some(entry) = lock(&self.tables).by_id.get_mut(&session) {
            // Full or gone: see `EVENT_QUEUE`.
            let _ = entry.events.try_send(event.clone());
        }
    }

    /// None of these may be lost, or the client would keep the memory: so they are a list, and the event says that
    /// there is one. Where the queue is full, an event that is in it leads to the list as well.
    pub(super) fn tell_memory_gone(&self, session: SessionId, allocation: u64) {
        if let Some(entry) = lock(&self.tables).by_id.get_mut(&session) {
            if entry.memory_gone.is_empty() {
                let _ = entry.events.try_send(SessionEvent::MemoryGone);
            }
            entry.memory_gone.push(allocation);
        }
    }

    pub(super) fn memory_gone(&self, session: SessionId) -> Vec<u64> {
        lock(&self.tables)
            .by_id
            .get_mut(&session)
            .map(|entry| std::mem::take(&mut entry.memory_gone))
            .unwrap_or_default()
    }

    /// Forgets a session: its token is worthless and its event stream ends.
    pub(super) fn remove(&self, session: SessionId) {
        let mut tables = lock(&self.tables);
        if let Some(entry) = tables.by_id.remove(&session) {
            tables.by_token.remove(&entry.token);
        }
    }

    fn find(&self, token: &Token, uid: u32) -> Option<SessionId> {
        let tables = lock(&self.tables);
        let session = tables.by_token.get(&token.digest())?;
        tables.by_id.get(session).filter(|entry| entry.uid == uid).map(|_| *session)
    }
}

fn new_token() -> Result<Token, EngineError> {
    let mut bytes = [0; Token::LEN];
    // Up to 256 bytes are given whole, getrandom(2).
    let got = getrandom(&mut bytes[..], GetRandomFlags::empty());
    match got {
        Ok(len) if len == Token::LEN => Ok(Token::new(bytes)),
        got => Err(EngineError::Internal { problem: format!("random bytes for a token: {got:?}") }),
    }
}

impl Runtime {
    pub(crate) fn open_session(self: &Arc<Self>, peer: &Peer, client_name: &str) -> Result<SessionOpened, EngineError> {
        let rule = self.config.policy.rule_for(peer)?;
        let token = new_token()?;
        let new = NewSession {
            tenant: TenantKey::of(peer),
            quota: rule.quota,
            warm_up: self.warm_ups(rule),
            admin: self.config.policy.is_admin(peer),
            client_name: client_name.to_owned(),
            token: token.digest(),
        };
        let Answered::Session(session, tenant) = self.ask(|call| Input::OpenSession { call, session: new })? else {
            return Err(EngineError::Internal { problem: "a session was answered as something else".into() });
        };
        let tenant = self.objects.tenant(tenant);
        if let Some(tenant) = &tenant {
            // As with the quota, the rule that let the newest session in holds.
            tenant.share.set(rule.traffic);
        }
        let page = tenant.and_then(|tenant| tenant.page.client_fd().ok());
        let Some(generation_page) = page else {
            self.close_session(session);
            return Err(EngineError::OutOfDescriptors { problem: "no generation page for the tenant".into() });
        };
        let events = self.sessions.insert(session, token.digest(), peer.uid);
        tracing::info!(%session, uid = peer.uid, pid = peer.pid, client = client_name, "session opened");
        Ok(SessionOpened { session, token, generation_page, events })
    }

    fn warm_ups(&self, rule: &Rule) -> Vec<WarmUp> {
        let state = self.state();
        let warm_up = |wanted: &Prewarm| match state.core.host().find_gpu(&wanted.gpu) {
            Ok(gpu) => Some(WarmUp { gpu, size_bytes: wanted.size_bytes, count: wanted.count }),
            Err(error) => {
                tracing::warn!(%error, "prewarm rule names an unknown gpu");
                None
            }
        };
        rule.prewarm.iter().filter_map(warm_up).collect()
    }

    pub(crate) fn close_session(self: &Arc<Self>, session: SessionId) {
        self.sessions.remove(session);
        self.input(Input::CloseSession { session });
    }

    pub(crate) fn memory_gone(&self, session: SessionId) -> Vec<u64> {
        self.sessions.memory_gone(session)
    }

    pub(crate) fn session_of_token(&self, token: &Token, uid: u32) -> Result<SessionId, EngineError> {
        self.sessions.find(token, uid).ok_or(EngineError::BadToken)
    }
}
