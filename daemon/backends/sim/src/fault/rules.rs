//! Rules on calls at work: which call meets which effect.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Call, Effect, MAX_RULES};
use crate::sync::lock;

struct Rule {
    call: Call,
    target: Option<String>,
    skip: u64,
    left: Option<u64>,
    effect: Effect,
}

/// The live rules. Calls that no rule speaks of cost one load.
#[derive(Default)]
pub(crate) struct FaultRules {
    /// One bit a [`Call`] that has rules.
    calls: AtomicU32,
    rules: Mutex<Vec<Rule>>,
}

impl FaultRules {
    /// Adds a rule; false when [`MAX_RULES`] are at work already. `target` is canonical.
    pub(crate) fn add(&self, call: Call, target: Option<String>, skip: u64, effect: Effect, left: Option<u64>) -> bool {
        let mut rules = lock(&self.rules);
        if rules.len() >= MAX_RULES {
            return false;
        }
        rules.push(Rule { call, target, skip, left, effect });
        self.calls.fetch_or(bit(call), Ordering::Release);
        true
    }

    /// What happens to this call; counts it.
    pub(crate) fn on_call(&self, call: Call, target: &str) -> Option<Effect> {
        if self.calls.load(Ordering::Acquire) & bit(call) == 0 {
            return None;
        }
        let mut rules = lock(&self.rules);
        let mut effect = None;
        for rule in rules.iter_mut().filter(|rule| rule.speaks_of(call, target)) {
            if rule.skip > 0 {
                rule.skip -= 1;
            } else if effect.is_none() {
                effect = Some(rule.effect);
                rule.left = rule.left.map(|left| left.saturating_sub(1));
            }
        }
        rules.retain(|rule| rule.left != Some(0));
        if !rules.iter().any(|rule| rule.call == call) {
            self.calls.fetch_and(!bit(call), Ordering::Release);
        }
        effect
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
