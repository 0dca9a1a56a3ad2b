//! Rows, rounds and figures: what a measurement promises, and how its figures come about.

use std::path::PathBuf;

use anyhow::{Context as _, ensure};

use crate::sample::median_of;

/// Bound on the value of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Target {
    /// Ours is at most so many times the peer's.
    AtMostTimes(f64),
    /// The peer's is at least so many times ours.
    #[allow(dead_code, reason = "for rows of times whose peer is slower")]
    FasterTimes(f64),
    /// Ours is at least so many times the peer's, where more is better.
    AtLeastTimes(f64),
    /// Ours is at most this, in the row's unit.
    AtMost(f64),
    /// Ours is at least this, in the row's unit.
    AtLeast(f64),
    /// Shown, with ours over the peer's where there is a peer, and bound to nothing.
    Shown,
}

/// One line of the table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Row {
    /// Stable name: lower case with dashes, the measurement's name first.
    pub(crate) id: &'static str,
    /// What is measured.
    pub(crate) what: &'static str,
    /// What stands against it; empty for nothing.
    pub(crate) against: &'static str,
    /// Unit of ours and of the peer's.
    pub(crate) unit: &'static str,
    pub(crate) target: Target,
}

/// What one round found for one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sample {
    pub(crate) ours: f64,
    /// `None` where nothing stands against it.
    pub(crate) peer: Option<f64>,
}

impl Sample {
    pub(crate) fn against(ours: f64, peer: f64) -> Self {
        Self { ours, peer: Some(peer) }
    }

    pub(crate) fn alone(ours: f64) -> Self {
        Self { ours, peer: None }
    }
}

/// Which side of a comparison goes first in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    OursFirst,
    PeerFirst,
}

impl Turn {
    /// Runs both sides in this order. Both get `subject`, so that they may share what they measure on.
    ///
    /// # Errors
    /// The first side's that failed.
    pub(crate) fn both<S, T, U>(
        self,
        subject: &mut S,
        ours: impl FnOnce(&mut S) -> anyhow::Result<T>,
        peer: impl FnOnce(&mut S) -> anyhow::Result<U>,
    ) -> anyhow::Result<(T, U)> {
        match self {
            Self::OursFirst => {
                let ours = ours(subject)?;
                Ok((ours, peer(subject)?))
            }
            Self::PeerFirst => {
                let peer = peer(subject)?;
                Ok((ours(subject)?, peer))
            }
        }
    }
}

/// A measurement that has been set up.
pub(crate) trait Measurement {
    /// One round: a sample for each of the measurement's rows, in their order.
    fn round(&mut self, turn: Turn) -> anyhow::Result<Vec<Sample>>;
}

/// How a measurement begins. [`Start::Absent`] is a peer that this machine lacks.
pub(crate) enum Start {
    Ready(Box<dyn Measurement>),
    Absent(String),
}

/// A file of `rows`.
pub(crate) struct Group {
    pub(crate) rows: &'static [Row],
    /// Rounds by default; odd, so that the median is one of them.
    pub(crate) rounds: u32,
    pub(crate) start: fn(&World) -> anyhow::Result<Start>,
}

/// What measurements may use of their surroundings.
#[derive(Debug)]
pub(crate) struct World {
    divide: u32,
    #[allow(dead_code, reason = "for rows whose peer is a program of another project")]
    peers: PathBuf,
}

impl World {
    pub(crate) fn new(divide: u32, peers: PathBuf) -> Self {
        Self { divide, peers }
    }

    /// `full`, or less of it when only a look is asked for; at least 4.
    pub(crate) fn scaled(&self, full: u32) -> u32 {
        (full / self.divide).max(4)
    }

    #[allow(dead_code, reason = "for rows whose peer is a program of another project")]
    /// The program of a peer that scripts/bench.sh builds from tests/bench/peers, if it could.
    pub(crate) fn peer(&self, name: &str) -> Option<PathBuf> {
        let path = self.peers.join(name);
        path.is_file().then_some(path)
    }
}

/// What came of a row.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Figure {
    pub(crate) row: Row,
    pub(crate) found: Result<Found, String>,
}

/// Medians of all rounds, and the spread of the value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Found {
    pub(crate) ours: f64,
    pub(crate) peer: Option<f64>,
    /// What the target bounds.
    pub(crate) value: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Figure {
    /// Whether the target is kept; `None` where there is none, or nothing was found.
    pub(crate) fn is_kept(&self) -> Option<bool> {
        let value = self.found.as_ref().ok()?.value;
        match self.row.target {
            Target::AtMostTimes(most) | Target::AtMost(most) => Some(value <= most),
            Target::FasterTimes(least) | Target::AtLeastTimes(least) | Target::AtLeast(least) => Some(value >= least),
            Target::Shown => None,
        }
    }
}

/// All rows of `groups`.
pub(crate) fn rows(groups: &[Group]) -> impl Iterator<Item = &'static Row> {
    groups.iter().flat_map(|group| group.rows)
}

/// Measures each group that has a row in `only`, or all.
///
/// # Errors
/// When a measurement fails, with its rows.
pub(crate) fn run(
    groups: &[Group],
    world: &World,
    only: &[String],
    rounds: Option<u32>,
) -> anyhow::Result<Vec<Figure>> {
    let wanted = |row: &Row| only.is_empty() || only.iter().any(|start| row.id.starts_with(start.as_str()));
    let mut figures = Vec::new();
    for group in groups.iter().filter(|group| group.rows.iter().any(wanted)) {
        let ids: Vec<_> = group.rows.iter().map(|row| row.id).collect();
        eprintln!("measuring {}", ids.join(", "));
        let measured = measure(group, world, rounds.unwrap_or(group.rounds));
        figures.extend(measured.with_context(|| format!("measure {}", ids.join(", ")))?);
    }
    figures.retain(|figure| wanted(&figure.row));
    Ok(figures)
}

fn measure(group: &Group, world: &World, rounds: u32) -> anyhow::Result<Vec<Figure>> {
    let mut measurement = match (group.start)(world)? {
        Start::Ready(measurement) => measurement,
        Start::Absent(reason) => {
            return Ok(group.rows.iter().map(|row| Figure { row: *row, found: Err(reason.clone()) }).collect());
        }
    };
    let mut samples = vec![Vec::new(); group.rows.len()];
    for round in 0..rounds {
        let turn = if round % 2 == 0 { Turn::OursFirst } else { Turn::PeerFirst };
        let found = measurement.round(turn)?;
        ensure!(found.len() == samples.len(), "a round gave {} samples for {} rows", found.len(), samples.len());
        for (row, sample) in samples.iter_mut().zip(found) {
            row.push(sample);
        }
    }
    Ok(group.rows.iter().zip(samples).map(|(row, samples)| figure(*row, &samples)).collect())
}

fn figure(row: Row, samples: &[Sample]) -> Figure {
    let values: Vec<f64> = samples.iter().map(|sample| value(row.target, sample)).collect();
    let peers: Option<Vec<f64>> = samples.iter().map(|sample| sample.peer).collect();
    let found = Found {
        ours: median_of(samples.iter().map(|sample| sample.ours).collect()),
        peer: peers.map(median_of),
        least: values.iter().copied().fold(f64::INFINITY, f64::min),
        most: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        value: median_of(values),
    };
    Figure { row, found: Ok(found) }
}

/// What the target bounds, of one sample. The ratio is taken round by round: both sides of a round saw the same machine.
fn value(target: Target, sample: &Sample) -> f64 {
    match (target, sample.peer) {
        (Target::FasterTimes(_), Some(peer)) => peer / sample.ours,
        (Target::AtMostTimes(_) | Target::AtLeastTimes(_) | Target::Shown, Some(peer)) => sample.ours / peer,
        _ => sample.ours,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn row(target: Target) -> Row {
        Row { id: "test", what: "a test", against: "nothing", unit: "ns", target }
    }

    const ROWS: &[Row] = &[row(Target::AtMostTimes(2.0)), row(Target::FasterTimes(2.0))];

    /// Doubles its peer's time in the third round.
    struct Drifting(u32, Vec<Turn>);

    impl Measurement for Drifting {
        fn round(&mut self, turn: Turn) -> anyhow::Result<Vec<Sample>> {
            self.0 += 1;
            self.1.push(turn);
            let sample = Sample::against(3.0, if self.0 == 3 { 4.0 } else { 2.0 });
            Ok(vec![sample, sample])
        }
    }

    fn world() -> World {
        World::new(100, PathBuf::new())
    }

    #[test]
    fn figures_are_medians_of_the_rounds_ratios() {
        let group = Group { rows: ROWS, rounds: 3, start: |_| Ok(Start::Ready(Box::new(Drifting(0, Vec::new())))) };
        let figures = run(&[group], &world(), &[], None).unwrap();
        let found = figures[0].found.clone().unwrap();
        assert_eq!((found.value, found.least, found.most), (1.5, 0.75, 1.5));
        assert_eq!((found.ours, found.peer), (3.0, Some(2.0)));
        assert_eq!(figures[0].is_kept(), Some(true));
        assert_eq!(figures[1].is_kept(), Some(false), "2/3 is not twice as fast");
    }

    #[test]
    fn a_peer_that_is_not_there_leaves_its_rows_without_a_verdict() {
        let group = Group { rows: ROWS, rounds: 3, start: |_| Ok(Start::Absent("no peer".to_owned())) };
        let figures = run(&[group], &world(), &[], None).unwrap();
        assert!(figures.iter().all(|figure| figure.found == Err("no peer".to_owned()) && figure.is_kept().is_none()));
    }

    #[test]
    fn both_sides_run_in_the_order_of_the_turn() {
        for (turn, expected) in [(Turn::OursFirst, ["ours", "peer"]), (Turn::PeerFirst, ["peer", "ours"])] {
            let mut order = Vec::new();
            let ours = |order: &mut Vec<_>| {
                order.push("ours");
                Ok(())
            };
            let peer = |order: &mut Vec<_>| {
                order.push("peer");
                Ok(())
            };
            turn.both(&mut order, ours, peer).unwrap();
            assert_eq!(order, expected);
        }
    }

    #[test]
    fn every_row_has_an_id_of_its_own() {
        let mut ids: Vec<_> = rows(crate::rows::ALL).map(|row| row.id).collect();
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count);
    }
}
