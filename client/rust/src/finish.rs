//! Calls that hand something out must not be cut off half-way: the daemon would have lent what nobody here knows of.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A future that is polled where it is awaited, and goes on in the background when it is dropped before its end. Its
/// output is then dropped there, and what it lent goes back by that.
pub(crate) struct FinishOnDrop<T: Send + 'static> {
    future: Option<Boxed<T>>,
    runtime: Handle,
}

impl<T: Send + 'static> FinishOnDrop<T> {
    pub(crate) fn new(runtime: &Handle, future: impl Future<Output = T> + Send + 'static) -> Self {
        Self { future: Some(Box::pin(future)), runtime: runtime.clone() }
    }
}

impl<T: Send + 'static> Future for FinishOnDrop<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        // As for every future, a poll after the end is a bug of the caller; here it never ends.
        let Some(future) = self.future.as_mut() else { return Poll::Pending };
        let polled = future.as_mut().poll(context);
        if polled.is_ready() {
            self.future = None;
        }
        polled
    }
}

impl<T: Send + 'static> Drop for FinishOnDrop<T> {
    fn drop(&mut self) {
        if let Some(future) = self.future.take() {
            self.runtime.spawn(async move { drop(future.await) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    struct Lent(Option<oneshot::Sender<()>>);

    impl Drop for Lent {
        fn drop(&mut self) {
            let _ = self.0.take().map(|sender| sender.send(()));
        }
    }

    #[tokio::test]
    async fn a_future_that_is_given_up_still_ends_and_gives_back() {
        let (go, wait) = oneshot::channel::<()>();
        let (returned, came_back) = oneshot::channel();
        let mut call = FinishOnDrop::new(&Handle::current(), async move {
            let _ = wait.await;
            Lent(Some(returned))
        });
        std::future::poll_fn(|context| {
            assert!(Pin::new(&mut call).poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
        drop(call);
        go.send(()).unwrap();
        came_back.await.unwrap();
    }

    #[tokio::test]
    async fn a_future_that_is_awaited_gives_its_output_here() {
        assert_eq!(FinishOnDrop::new(&Handle::current(), async { 7 }).await, 7);
    }
}
