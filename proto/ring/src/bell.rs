//! Who sleeps says so first, who publishes looks after: the handshake that loses no wake-up.
//!
//! (bell) The sleeper stores its flag, fences, then looks for work once more; the other side
//! publishes work, fences, then looks at the flag. The two sequentially consistent fences are
//! ordered, so the later side sees what the earlier one stored: either the sleeper finds the work
//! or the publisher finds the flag. Acquire and release alone would allow neither.

use std::sync::atomic::Ordering;

use crate::cursor::Word;

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;

/// Says that this side is about to sleep. Look for work after this, then sleep or [`retract`].
pub(crate) fn announce<W: Word>(flag: &W) {
    // Swaps and not stores, here and in `retract`: the flag has two writers, and loom does not derive from the waker's
    // swap having read an older value that this write is the newer one. Off the hot path they cost nothing.
    flag.swap(ASLEEP, Ordering::Relaxed);
    // (bell) sleeper's fence.
    W::full_fence();
}

/// Says that this side is awake again.
pub(crate) fn retract<W: Word>(flag: &W) {
    flag.swap(AWAKE, Ordering::Relaxed);
}

/// After publishing: whether the other side sleeps and is to be woken, which this call takes upon
/// its caller. One announcement is answered once.
pub(crate) fn must_wake<W: Word>(flag: &W) -> bool {
    // (bell) publisher's fence.
    W::full_fence();
    flag.load(Ordering::Relaxed) != AWAKE && flag.swap(AWAKE, Ordering::Relaxed) != AWAKE
}

/// The waiter's half of a futex: announces, and returns the count to sleep on. Look for work after this.
pub(crate) fn announce_wait<W: Word>(flag: &W, wakes: &W) -> u32 {
    // (wake) acquire, and before the announcement: a waker that is late with our previous announcement may answer this
    // one before it has published more. Its raise is then newer than what we sleep on, so we do not, and announce anew.
    let seen = wakes.load(Ordering::Acquire);
    announce(flag);
    seen
}

/// The waker's half: after publishing, raises the count if the other side waits; then wake it.
pub(crate) fn raise<W: Word>(flag: &W, wakes: &W) -> bool {
    if !must_wake(flag) {
        return false;
    }
    // (wake) release.
    wakes.fetch_add(1, Ordering::Release);
    true
}
