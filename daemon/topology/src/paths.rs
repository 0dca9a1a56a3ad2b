//! The paths of two functions up to the root, found once for all that is asked of the pair: where they meet, which links
//! lie between, which ports ACS decides at.

use std::rc::Rc;

use crate::bdf::{Bdf, RootBus};
use crate::level::Meeting;
use crate::model::{Host, PciFunction, PciRole, Upstream};

/// One function and the bridges above it.
#[derive(Debug)]
pub(crate) struct Path<'a> {
    end: &'a PciFunction,
    /// Nearest first.
    above: Vec<&'a PciFunction>,
}

impl<'a> Path<'a> {
    /// `None` if the function is not in the tree.
    pub(crate) fn of(host: &'a Host, end: Bdf) -> Option<Rc<Self>> {
        let end = host.function(end)?;
        Some(Rc::new(Self { end, above: host.bridges_of(end).collect() }))
    }

    fn root_bus(&self) -> Option<RootBus> {
        match self.above.last().unwrap_or(&self.end).upstream {
            Upstream::Root(root) => Some(root),
            Upstream::Bridge(_) | Upstream::Unknown => None,
        }
    }

    /// Bridges between the function and where `shared` bridges begin, ports that a whole switch stands for counted: a switch
    /// listed as one element has a downstream port towards the function that has no element of its own.
    fn hops(&self, shared: usize) -> usize {
        let own = self.above.len().saturating_sub(shared);
        // The bridge where the paths meet counts with the port that leads down, where that is not listed.
        let with_meeting = self.above.iter().take(own + usize::from(shared > 0));
        let below = std::iter::once(PciRole::Endpoint).chain(self.above.iter().map(|bridge| bridge.role));
        let unlisted = with_meeting
            .zip(below)
            .filter(|(bridge, below)| bridge.role == PciRole::Switch && *below != PciRole::SwitchDownstream);
        own + unlisted.count()
    }
}

/// The paths of two functions.
#[derive(Debug)]
pub(crate) struct Paths<'a> {
    a: Rc<Path<'a>>,
    b: Rc<Path<'a>>,
    /// Bridges that are above both.
    shared: usize,
}

impl<'a> Paths<'a> {
    /// `None` if one of them is not in the tree.
    pub(crate) fn of(host: &'a Host, a: Bdf, b: Bdf) -> Option<Self> {
        Some(Self::between(Path::of(host, a)?, Path::of(host, b)?))
    }

    pub(crate) fn between(a: Rc<Path<'a>>, b: Rc<Path<'a>>) -> Self {
        let from_the_top = a.above.iter().rev().zip(b.above.iter().rev());
        let shared = from_the_top.take_while(|(a, b)| a.bdf == b.bdf).count();
        Self { a, b, shared }
    }

    /// The two functions.
    pub(crate) fn ends(&self) -> [&'a PciFunction; 2] {
        [self.a.end, self.b.end]
    }

    pub(crate) fn meeting(&self) -> Meeting {
        Meeting {
            bridge: self.common().first().map(|bridge| bridge.bdf),
            depth: self.shared,
            hops_a: self.a.hops(self.shared),
            hops_b: self.b.hops(self.shared),
        }
    }

    /// Whether both hang below one root bus; `None` where that of one is not known.
    pub(crate) fn share_root_bus(&self) -> Option<bool> {
        Some(self.a.root_bus()? == self.b.root_bus()?)
    }

    /// Whether nothing below the CPU joins the two.
    pub(crate) fn pass_cpu(&self) -> bool {
        self.shared == 0
    }

    /// The bridges above both, deepest first.
    pub(crate) fn common(&self) -> &[&'a PciFunction] {
        let own = self.a.above.len().saturating_sub(self.shared);
        self.a.above.get(own..).unwrap_or_default()
    }

    /// The ports below the bridge where the paths meet, one towards each function. It is there that peer traffic turns, and
    /// there that ACS decides.
    pub(crate) fn turning_ports(&self) -> impl Iterator<Item = &'a PciFunction> + Clone {
        let port = |path: &Path<'a>| {
            let own = path.above.len().checked_sub(self.shared)?;
            path.above.get(own.checked_sub(1)?).copied()
        };
        [port(&self.a), port(&self.b)].into_iter().flatten()
    }

    /// Functions whose links peer traffic takes on the side of the first: itself and the bridges up to where the paths meet,
    /// whose own link is above. Where ACS sends the traffic up, it takes all links to the root.
    pub(crate) fn links_of_a(&self) -> impl Iterator<Item = &'a PciFunction> {
        self.links(&self.a)
    }

    /// The same on the side of the second.
    pub(crate) fn links_of_b(&self) -> impl Iterator<Item = &'a PciFunction> {
        self.links(&self.b)
    }

    fn links(&self, path: &Path<'a>) -> impl Iterator<Item = &'a PciFunction> {
        let not_taken = if self.redirects() { 0 } else { self.shared };
        let taken = path.above.len().saturating_sub(not_taken);
        std::iter::once(path.end).chain(path.above.iter().copied().take(taken))
    }
}
