//! Calls in flight and grants not yet taken, independent of any async runtime.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_channel::oneshot;

use crate::error::EngineError;
use crate::runtime::Answered;

/// Something to do unless it is disarmed first.
#[must_use]
pub struct Undo(Option<Box<dyn FnOnce() + Send>>);

impl Undo {
    pub(crate) fn new(undo: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(undo)))
    }

    pub(crate) fn none() -> Self {
        Self(None)
    }

    pub(crate) fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if let Some(undo) = self.0.take() {
            undo();
        }
    }
}

impl fmt::Debug for Undo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Undo(armed)" } else { "Undo" })
    }
}

/// An answer that may come later. Dropping it cancels the call: what it would have granted is taken back.
#[must_use = "dropping a call cancels it"]
#[derive(Debug)]
pub struct Call<T> {
    answer: Answer<T>,
    cancel: Undo,
}

#[derive(Debug)]
enum Answer<T> {
    Ready(Option<Result<T, EngineError>>),
    Later(oneshot::Receiver<Result<Answered, EngineError>>, fn(Answered) -> Option<T>),
}

impl<T> Call<T> {
    pub(crate) fn ready(answer: Result<T, EngineError>) -> Self {
        Self { answer: Answer::Ready(Some(answer)), cancel: Undo::none() }
    }

    /// An answer to come, of which `pick` takes what the call is about.
    pub(crate) fn later(
        receiver: oneshot::Receiver<Result<Answered, EngineError>>,
        pick: fn(Answered) -> Option<T>,
        cancel: Undo,
    ) -> Self {
        Self { answer: Answer::Later(receiver, pick), cancel }
    }

    /// Blocks the thread until the answer is there. For tests and threads of their own, never for async tasks.
    ///
    /// # Errors
    /// Those of the call.
    pub fn wait(self) -> Result<T, EngineError> {
        block_on(self)
    }
}

impl<T> Future for Call<T> {
    type Output = Result<T, EngineError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = Pin::into_inner(self);
        let answer = match &mut this.answer {
            Answer::Ready(answer) => answer.take().unwrap_or(Err(EngineError::Cancelled)),
            Answer::Later(receiver, pick) => match Pin::new(receiver).poll(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(answer) => answer.unwrap_or(Err(EngineError::ShuttingDown)).and_then(|answer| {
                    pick(answer).ok_or_else(|| EngineError::Internal { problem: "a call got another's answer".into() })
                }),
            },
        };
        std::mem::replace(&mut this.cancel, Undo::none()).disarm();
        Poll::Ready(answer)
    }
}

impl<T> Unpin for Call<T> {}

/// Polls a future on this thread, parking between polls.
fn block_on<F: Future + Unpin>(mut future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = std::sync::Arc::new(Unpark(std::thread::current())).into();
    let mut context = Context::from_waker(&waker);
    loop {
        match Pin::new(&mut future).poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn done(answer: Answered) -> Option<()> {
        matches!(answer, Answered::Done).then_some(())
    }

    fn counting() -> (Arc<AtomicU32>, Undo) {
        let count = Arc::new(AtomicU32::new(0));
        let inner = Arc::clone(&count);
        (
            count,
            Undo::new(move || {
                inner.fetch_add(1, Ordering::Relaxed);
            }),
        )
    }

    #[test]
    fn a_dropped_call_is_cancelled_once() {
        let (count, cancel) = counting();
        let (_sender, receiver) = oneshot::channel::<Result<Answered, EngineError>>();
        drop(Call::later(receiver, done, cancel));
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn an_answered_call_is_not_cancelled() {
        let (count, cancel) = counting();
        let (sender, receiver) = oneshot::channel();
        let call = Call::later(receiver, done, cancel);
        let answerer = std::thread::spawn(move || sender.send(Ok(Answered::Done)).is_ok());
        assert_eq!(call.wait(), Ok(()));
        assert!(answerer.join().unwrap());
        assert_eq!(count.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_call_whose_engine_is_gone_says_so() {
        let (sender, receiver) = oneshot::channel::<Result<Answered, EngineError>>();
        drop(sender);
        assert_eq!(Call::later(receiver, done, Undo::none()).wait(), Err(EngineError::ShuttingDown));
    }
}
