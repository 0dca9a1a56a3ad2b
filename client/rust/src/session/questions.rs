//! Questions that were asked on the session socket and not yet answered.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

#[derive(Debug)]
struct State<A> {
    ended: bool,
    waiting: HashMap<u64, oneshot::Sender<A>>,
}

/// Questions of one kind with answers `A`. Cheap to clone; clones share them.
#[derive(Debug)]
pub(super) struct Questions<A> {
    state: Arc<Mutex<State<A>>>,
    last_id: Arc<AtomicU64>,
}

impl<A> Clone for Questions<A> {
    fn clone(&self) -> Self {
        Self { state: Arc::clone(&self.state), last_id: Arc::clone(&self.last_id) }
    }
}

impl<A> Default for Questions<A> {
    fn default() -> Self {
        let state = State { ended: false, waiting: HashMap::new() };
        Self { state: Arc::new(Mutex::new(state)), last_id: Arc::default() }
    }
}

impl<A> Questions<A> {
    /// A number for a question, and where its answer will be.
    pub(super) fn begin(&self) -> (u64, oneshot::Receiver<A>) {
        let id = self.last_id.fetch_add(1, Ordering::Relaxed) + 1;
        let (sender, receiver) = oneshot::channel();
        let mut state = self.lock();
        // Those whose caller has given up are dropped here, so the table holds live callers only.
        state.waiting.retain(|_, waiting| !waiting.is_closed());
        if !state.ended {
            state.waiting.insert(id, sender);
        }
        (id, receiver)
    }

    /// Hands an answer over; gives it back when nobody waits for it.
    pub(super) fn answer(&self, id: u64, answer: A) -> Result<(), A> {
        match self.lock().waiting.remove(&id) {
            Some(waiting) => waiting.send(answer),
            None => Err(answer),
        }
    }

    /// Whether any waits for its answer.
    pub(super) fn is_asked(&self) -> bool {
        !self.lock().waiting.is_empty()
    }

    /// None of those that wait will be answered.
    pub(super) fn lose(&self) {
        self.lock().waiting.clear();
    }

    /// No answer comes any more.
    pub(super) fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        state.waiting.clear();
    }

    fn lock(&self) -> MutexGuard<'_, State<A>> {
        // No holder of this lock can panic between two changes that belong together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn answers_find_their_question_and_the_end_finds_the_rest() {
        let questions = Questions::default();
        let ((first, first_answer), (_, second_answer)) = (questions.begin(), questions.begin());
        questions.answer(first, "yes").unwrap();
        assert_eq!(first_answer.await.unwrap(), "yes");
        assert_eq!(questions.answer(99, "no"), Err("no"));
        questions.end();
        assert!(second_answer.await.is_err());
        assert!(questions.begin().1.await.is_err());
    }

    #[tokio::test]
    async fn questions_that_were_given_up_leave_no_entry() {
        let questions = Questions::<()>::default();
        drop(questions.begin());
        let (_, _answer) = questions.begin();
        assert_eq!(questions.lock().waiting.len(), 1);
    }
}
