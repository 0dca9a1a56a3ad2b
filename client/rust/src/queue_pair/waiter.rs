//! A thread that sleeps on the ring's futex for the tasks that await completions. A futex is no poll event, so the
//! runtime cannot wait for it; the thread starts with the first await that finds nothing, and ends with its queue pair.

use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};

use gdrd_ring::WaitTicket;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::error::ClientError;

/// Tickets that wait for the thread. A second one is worth nothing: the first one's wake wakes every task.
const QUEUED_TICKETS: usize = 1;

/// The thread's handle.
#[derive(Debug, Default)]
pub(super) struct Waiter {
    notify: Arc<Notify>,
    tickets: OnceLock<SyncSender<WaitTicket>>,
}

impl Waiter {
    /// The next wake.
    pub(super) fn woken(&self) -> Notified<'_> {
        self.notify.notified()
    }

    /// Has the thread sleep on `ticket`, then wake every task. A ticket that is older than the newest wake returns at
    /// once, so one that must queue behind another loses nothing.
    pub(super) fn wait_on(&self, ticket: WaitTicket) -> Result<(), ClientError> {
        let tickets = match self.tickets.get() {
            Some(tickets) => tickets,
            None => {
                let started = start(Arc::clone(&self.notify))?;
                self.tickets.get_or_init(|| started)
            }
        };
        match tickets.try_send(ticket) {
            Ok(()) | Err(TrySendError::Full(_)) => Ok(()),
            Err(TrySendError::Disconnected(_)) => Err(ClientError::protocol("the thread that waits for wakes is gone")),
        }
    }
}

fn start(notify: Arc<Notify>) -> Result<SyncSender<WaitTicket>, ClientError> {
    let (tickets, queue) = sync_channel::<WaitTicket>(QUEUED_TICKETS);
    let thread = std::thread::Builder::new().name("gdrd-wait".into());
    let run = move || {
        for ticket in queue {
            let outcome = ticket.wait(None);
            notify.notify_waiters();
            // The kernel refuses a wait on a word that is not mapped only, and the ticket keeps it mapped.
            if outcome.is_err() {
                return;
            }
        }
    };
    thread.spawn(run).map_err(|source| ClientError::io("start the thread that waits for completions", source))?;
    Ok(tickets)
}
