//! Options of a verb that are made only once the verb is typed, since to make those of all is half of what a start costs.

use clap::error::Error;
use clap::{ArgMatches, Args, Command, FromArgMatches};

/// The options of one verb.
#[derive(Debug)]
pub(crate) struct Deferred<T>(pub(crate) T);

impl<T: Args> Args for Deferred<T> {
    fn augment_args(verb: Command) -> Command {
        verb.defer(|verb| made(verb, T::augment_args))
    }

    fn augment_args_for_update(verb: Command) -> Command {
        verb.defer(|verb| made(verb, T::augment_args_for_update))
    }
}

/// Makes the options, whose own description would take the place of the verb's.
fn made(verb: Command, make: fn(Command) -> Command) -> Command {
    let about = verb.get_about().cloned().unwrap_or_default();
    make(verb).about(about)
}

impl<T: FromArgMatches> FromArgMatches for Deferred<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        T::from_arg_matches(matches).map(Self)
    }

    fn from_arg_matches_mut(matches: &mut ArgMatches) -> Result<Self, Error> {
        T::from_arg_matches_mut(matches).map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.0.update_from_arg_matches(matches)
    }

    fn update_from_arg_matches_mut(&mut self, matches: &mut ArgMatches) -> Result<(), Error> {
        self.0.update_from_arg_matches_mut(matches)
    }
}
