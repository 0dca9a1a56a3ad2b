//! Rules on calls at work: which call meets which effect.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use super::{Call, Effect, MAX_RULES};
use crate::sync::lock;

struct Rule {
    call: Call,
    target: Option<String>,
    skip: u64,
    left: Option<u64>,
    effect: Effect,
}

#[derive(Default)]
struct State {
    rules: Vec<Rule>,
    /// How often a device went on.
    went_on: BTreeMap<String, u64>,
}

impl State {
    fn went_on(&self, target: &str) -> u64 {
        self.went_on.get(target).copied().unwrap_or_default()
    }
}

/// The live rules. Calls that no rule speaks of cost one load.
#[derive(Default)]
pub(crate) struct FaultRules {
    /// One bit a [`Call`] that has rules.
    calls: AtomicU32,
    state: Mutex<State>,
    /// Told when a device goes on.
    going_on: Condvar,
}

impl FaultRules {
    /// Adds a rule; false when [`MAX_RULES`] are at work already. `target` is canonical.
    pub(crate) fn add(&self, call: Call, target: Option<String>, skip: u64, effect: Effect, left: Option<u64>) -> bool {
        let mut state = lock(&self.state);
        if state.rules.len() >= MAX_RULES {
            return false;
        }
        state.rules.push(Rule { call, target, skip, left, effect });
        self.calls.fetch_or(bit(call), Ordering::Release);
        true
    }

    /// What happens to this call; counts it. One that hangs has hung when this returns.
    pub(crate) fn on_call(&self, call: Call, target: &str) -> Option<Effect> {
        if self.calls.load(Ordering::Acquire) & bit(call) == 0 {
            return None;
        }
        let mut state = lock(&self.state);
        let mut effect = None;
        for rule in state.rules.iter_mut().filter(|rule| rule.speaks_of(call, target)) {
            if rule.skip > 0 {
                rule.skip -= 1;
            } else if effect.is_none() {
                effect = Some(rule.effect);
                rule.left = rule.left.map(|left| left.saturating_sub(1));
            }
        }
        self.retain(&mut state, |rule| rule.left != Some(0));
        if effect == Some(Effect::Hang) {
            // Counted under the lock that found the rule, so no going on is missed.
            let before = state.went_on(target);
            let hangs = |state: &mut State| state.went_on(target) == before;
            drop(self.going_on.wait_while(state, hangs).unwrap_or_else(PoisonError::into_inner));
        }
        effect
    }

    /// Lets all calls that hang on the device go on, and ends the rules by which they hang. `target` is canonical.
    pub(crate) fn go_on(&self, target: &str) {
        let mut state = lock(&self.state);
        self.retain(&mut state, |rule| rule.effect != Effect::Hang || rule.target.as_deref() != Some(target));
        *state.went_on.entry(target.to_owned()).or_default() += 1;
        self.going_on.notify_all();
    }

    fn retain(&self, state: &mut State, stays: impl Fn(&Rule) -> bool) {
        state.rules.retain(stays);
        let calls = state.rules.iter().fold(0, |calls, rule| calls | bit(rule.call));
        self.calls.store(calls, Ordering::Release);
    }
}

impl Rule {
    fn speaks_of(&self, call: Call, target: &str) -> bool {
        self.call == call && self.target.as_deref().is_none_or(|wanted| wanted == target)
    }
}

fn bit(call: Call) -> u32 {
    1 << (call as u32)
}
