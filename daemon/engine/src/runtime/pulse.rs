//! Sends a pulse ([`crate::Engine::pulse`]) on its way.

use super::Runtime;
use crate::pulse::Beat;

impl Runtime {
    pub(crate) fn pulse(&self, beat: Beat) {
        self.timer.pulse(beat.clone());
        self.devices.pulse(beat.clone());
        self.broker.pulse(&beat);
        self.executor.pulse(beat.clone());
        self.background.pulse(beat);
    }
}

#[cfg(test)]
mod tests {
    use crate::config::EngineConfig;
    use crate::engine::{Engine, Hardware};
    use crate::lease::MemoryKind;
    use crate::plan::HostPlan;

    use super::*;

    fn engine() -> Engine {
        let hardware = Hardware {
            gpu_memory: None,
            gpu_memory_kind: MemoryKind::Memfd,
            gpu_facts: None,
            hcas: Vec::new(),
            plan: HostPlan::default(),
        };
        Engine::start(EngineConfig::default(), hardware).unwrap()
    }

    /// Waits until at most so many threads have it.
    fn until_held_by(beat: &Beat, threads: usize) {
        while beat.held() > threads + 1 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_pulse_passes_through_an_engine_at_rest_as_often_as_one_likes() {
        let engine = engine();
        for _ in 0..3 {
            let (beat, _over) = Beat::new();
            engine.runtime().pulse(beat.clone());
            until_held_by(&beat, 0);
        }
    }

    #[test]
    fn a_pulse_does_not_pass_the_state_while_somebody_has_its_lock() {
        let engine = engine();
        let state = engine.runtime().state();
        let (beat, _over) = Beat::new();
        engine.runtime().pulse(beat.clone());
        until_held_by(&beat, 1);
        for _ in 0..100 {
            std::thread::yield_now();
            assert_eq!(beat.held(), 2, "the timer's thread has it");
        }
        drop(state);
        until_held_by(&beat, 0);
    }
}
