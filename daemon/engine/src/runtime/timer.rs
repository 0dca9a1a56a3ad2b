//! One thread that sleeps until the state machine's next deadline, or calls are to be looked at that may take long; without
//! either, for ever.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::{Runtime, lock};
use crate::core::Input;
use crate::pulse::Beat;

#[derive(Debug, Default)]
struct Alarm {
    /// When the thread will wake by itself, ns of the runtime's clock.
    armed: Option<u64>,
    /// The earliest deadline that the state machine told.
    wanted: Option<u64>,
    /// When to look for calls that take long.
    calls: Option<u64>,
    /// Pulses that the thread has to pass on.
    beats: Vec<Beat>,
    stopping: bool,
}

/// The alarm that the timer thread sleeps on.
#[derive(Debug, Default)]
pub(crate) struct Timer {
    alarm: Mutex<Alarm>,
    changed: Condvar,
}

impl Timer {
    /// Notes the next deadline. Wakes the thread only if it would sleep past it: one that is later or gone is found
    /// when the thread wakes anyway.
    pub(super) fn set(&self, wanted: Option<u64>) {
        let mut alarm = lock(&self.alarm);
        alarm.wanted = wanted;
        if let Some(wanted) = wanted {
            self.wake_by(&mut alarm, wanted);
        }
    }

    /// Has calls that take long looked for then, unless that is due before.
    pub(super) fn look_for_long_calls(&self, due: u64) {
        let mut alarm = lock(&self.alarm);
        if alarm.calls.is_none_or(|before| due < before) {
            alarm.calls = Some(due);
            self.wake_by(&mut alarm, due);
        }
    }

    fn wake_by(&self, alarm: &mut Alarm, due: u64) {
        if alarm.armed.is_none_or(|armed| due < armed) {
            alarm.armed = Some(due);
            self.changed.notify_one();
        }
    }

    /// Sends a sign of life through the thread, and the lock that all calls take.
    pub(super) fn pulse(&self, beat: Beat) {
        lock(&self.alarm).beats.push(beat);
        self.changed.notify_one();
    }

    pub(super) fn stop(&self) {
        lock(&self.alarm).stopping = true;
        self.changed.notify_one();
    }
}

/// Runs until the timer is stopped.
pub(super) fn run(runtime: &Arc<Runtime>) {
    let timer = &runtime.timer;
    let mut alarm = lock(&timer.alarm);
    while !alarm.stopping {
        if !alarm.beats.is_empty() {
            let beats = std::mem::take(&mut alarm.beats);
            // Whoever has the state's lock may wait for this one.
            drop(alarm);
            drop(runtime.state());
            drop(beats);
            alarm = lock(&timer.alarm);
            continue;
        }
        let now = runtime.now();
        match alarm.wanted.into_iter().chain(alarm.calls).min() {
            Some(due) if due <= now => {
                // Another thread's deadline must be able to wake us from here on.
                alarm.armed = Some(0);
                let is_wanted = alarm.wanted.take_if(|due| *due <= now).is_some();
                let is_for_calls = alarm.calls.take_if(|due| *due <= now).is_some();
                drop(alarm);
                if is_wanted {
                    runtime.input(Input::Time);
                }
                if is_for_calls {
                    runtime.tell_of_long_calls();
                }
                alarm = lock(&timer.alarm);
            }
            Some(due) => {
                alarm.armed = Some(due);
                let sleep = Duration::from_nanos(due - now);
                alarm = timer.changed.wait_timeout(alarm, sleep).unwrap_or_else(PoisonError::into_inner).0;
            }
            None => {
                alarm.armed = None;
                alarm = timer.changed.wait(alarm).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}
