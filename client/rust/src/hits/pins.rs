//! Which entries are in use: hazard words that readers write, each thread on cache lines of its own.
//!
//! A reader pins an entry and then checks that it is still there; a writer takes the entry away, and then looks at the
//! pins. Between its two steps each side has a fence, so that one of the two sees the other. The reader's costs nothing:
//! the writer's is membarrier(2), which makes every running thread of the process pass a full fence.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use super::word::{Fence, Word};

/// Lines that belong to one thread each. Threads beyond that many share some, at the price of an atomic exchange.
const OWN_LINES: usize = 64;
const SHARED_LINES: usize = 4;
/// Pins on a line's two cache lines: 128 bytes, since processors fetch pairs of lines (Intel optimization manual,
/// "Spatial Prefetcher").
const PINS_PER_LINE: usize = 16;
/// No entry.
const FREE: u64 = 0;
/// A thread without a line of its own.
const NO_LINE: usize = usize::MAX;

/// Lines that no thread has, of all caches alike: a thread has the same line in each.
static LINES: Mutex<Lines> = Mutex::new(Lines { used: 0, free: Vec::new() });

struct Lines {
    /// Lines ever given.
    used: usize,
    free: Vec<usize>,
}

thread_local! {
    /// This thread's line; `None` before its first pin.
    static LINE: Cell<Option<usize>> = const { Cell::new(None) };
    /// Gives the line back at the thread's end.
    static LOAN: Cell<Loan> = const { Cell::new(Loan(NO_LINE)) };
}

struct Loan(usize);

impl Drop for Loan {
    fn drop(&mut self) {
        if self.0 != NO_LINE {
            // What still runs on this thread, such as other destructors, shares lines from here on.
            LINE.set(Some(NO_LINE));
            LINES.lock().unwrap_or_else(PoisonError::into_inner).free.push(self.0);
        }
    }
}

#[derive(Debug)]
#[repr(align(128))]
struct Line<W>([W; PINS_PER_LINE]);

/// The pins of one cache.
#[derive(Debug)]
pub(crate) struct Pins<W> {
    lines: Box<[Line<W>]>,
    own_lines: usize,
    fence: Fence,
}

impl<W: Word> Pins<W> {
    pub(crate) fn new(fence: Fence) -> Self {
        Self::with_lines(fence, OWN_LINES, SHARED_LINES)
    }

    pub(crate) fn with_lines(fence: Fence, own: usize, shared: usize) -> Self {
        let line = || Line(std::array::from_fn(|_| W::new(FREE)));
        Self { lines: std::iter::repeat_with(line).take(own + shared).collect(), own_lines: own, fence }
    }

    /// Pins an entry; `None` when every pin that this thread may take is taken.
    #[inline]
    pub(crate) fn pin(&self, entry: u32) -> Option<&W> {
        let line = line_of_thread();
        if line >= self.own_lines {
            return self.pin_shared(entry);
        }
        let pins = &self.lines.get(line)?.0;
        // Only this thread takes pins of its line; others may free some of them.
        let Some(pin) = pins.iter().find(|pin| pin.load(Ordering::Relaxed) == FREE) else {
            return self.pin_shared(entry);
        };
        pin.store(name_of(entry), Ordering::Relaxed);
        // (pin) before the check that the entry is still there.
        W::reader_fence(self.fence);
        Some(pin)
    }

    #[cold]
    fn pin_shared(&self, entry: u32) -> Option<&W> {
        let shared = self.lines.get(self.own_lines..)?.iter().flat_map(|line| &line.0);
        let taken = shared.into_iter().find(|pin| pin.compare_exchange(FREE, name_of(entry), Ordering::SeqCst));
        // (pin)
        W::reader_fence(self.fence);
        taken
    }

    /// Gives a pin back.
    #[inline]
    pub(crate) fn unpin(&self, pin: &W) {
        // (unpin) release: whoever sees it free sees that its reader is done.
        pin.store(FREE, Ordering::Release);
        // (part) before the look at the number of parted entries.
        W::reader_fence(self.fence);
    }

    /// Lets the pins be looked at: those of readers who have not seen yet what the writer did before. `false` where that
    /// cannot be had, and any entry may be pinned.
    #[must_use]
    pub(crate) fn fence(&self) -> bool {
        W::writer_fence(self.fence)
    }

    /// Whether some pin names the entry. After a [`Pins::fence`].
    pub(crate) fn is_pinned(&self, entry: u32) -> bool {
        let pins = self.lines.iter().flat_map(|line| &line.0);
        // (unpin) acquire.
        pins.into_iter().any(|pin| pin.load(Ordering::Acquire) == name_of(entry))
    }
}

#[inline]
fn name_of(entry: u32) -> u64 {
    u64::from(entry) + 1
}

#[inline]
fn line_of_thread() -> usize {
    match LINE.get() {
        Some(line) => line,
        None => take_line(),
    }
}

#[cold]
fn take_line() -> usize {
    let line = {
        let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
        lines.free.pop().unwrap_or_else(|| {
            lines.used += 1;
            lines.used - 1
        })
    };
    LINE.set(Some(line));
    // Refused while the thread's locals are being dropped: then the line stays taken, and only that.
    let _ = LOAN.try_with(|loan| loan.set(Loan(line)));
    line
}
