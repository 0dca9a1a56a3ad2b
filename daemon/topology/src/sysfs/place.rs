//! What the path of a device folder tells: the PCI functions above it.

use crate::bdf::{Bdf, PathPart};
use crate::model::Upstream;

/// A PCI function on the path of a device, and what it hangs below.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) bdf: Bdf,
    pub(super) upstream: Upstream,
    /// Path of its folder, relative to the root of the tree.
    pub(super) path: String,
}

/// PCI functions on a device path, from the root down.
///
/// `sys/devices/pci0000:00/0000:00:01.1/0000:01:00.0/infiniband/mlx5_0` gives two. Below a VMD or a virtual
/// host bridge another root bus may follow; what comes after hangs below that one.
pub(super) fn steps(path: &str) -> Vec<Step> {
    let mut above = Upstream::Unknown;
    let mut steps = Vec::new();
    let mut end = 0;
    for part in path.split('/') {
        end += part.len();
        match PathPart::of(part) {
            PathPart::RootBus(root) => above = Upstream::Root(root),
            PathPart::Function(bdf) => {
                let path = path.get(..end).unwrap_or(path).to_owned();
                steps.push(Step { bdf, upstream: above, path });
                above = Upstream::Bridge(bdf);
            }
            PathPart::Other => {}
        }
        end += 1;
    }
    steps
}

/// The last of [`steps`], found from the end.
pub(super) fn last_step(path: &str) -> Option<Step> {
    let mut rest = Some(path);
    let mut found: Option<(Bdf, &str)> = None;
    let mut above = Upstream::Unknown;
    while let Some(here) = rest {
        let (folder, part) = here.rsplit_once('/').map_or((None, here), |(folder, part)| (Some(folder), part));
        above = match (PathPart::of(part), found) {
            (PathPart::Function(bdf), None) => {
                found = Some((bdf, here));
                above
            }
            (PathPart::Function(bdf), Some(_)) => Upstream::Bridge(bdf),
            (PathPart::RootBus(root), Some(_)) => Upstream::Root(root),
            (PathPart::RootBus(_), None) | (PathPart::Other, _) => above,
        };
        rest = folder.filter(|_| above == Upstream::Unknown);
    }
    found.map(|(bdf, path)| Step { bdf, upstream: above, path: path.to_owned() })
}

/// The part of a device path that names a sub-function on the auxiliary bus (`mlx5_core.sf.4`).
pub(super) fn sub_function(path: &str) -> Option<String> {
    let is_sf = |part: &&str| {
        let mut words = part.rsplit('.');
        words.next().is_some_and(|number| number.parse::<u32>().is_ok()) && words.next() == Some("sf")
    };
    path.split('/').find(is_sf).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_path_gives_the_functions_above_it() {
        let path = "sys/devices/pci0000:80/0000:80:02.2/0000:82:00.0/infiniband/mlx4_0";
        let steps = steps(path);
        assert_eq!(steps.len(), 2);
        assert_eq!(steps[0].upstream, Upstream::Root("pci0000:80".parse().unwrap()));
        assert_eq!(steps[1].upstream, Upstream::Bridge("0000:80:02.2".parse().unwrap()));
        assert_eq!(steps[1].path, "sys/devices/pci0000:80/0000:80:02.2/0000:82:00.0");
    }

    #[test]
    fn the_last_step_is_the_same_found_from_either_end() {
        for path in [
            "sys/devices/pci0000:80/0000:80:02.2/0000:82:00.0/infiniband/mlx4_0",
            "sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0",
            "sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0",
            "sys/devices/platform/0000:00:0e.0",
            "0000:00:0e.0",
            "pci0000:00",
            "",
        ] {
            assert_eq!(last_step(path), steps(path).pop(), "{path}");
        }
    }

    #[test]
    fn a_root_bus_below_a_function_starts_anew() {
        let steps = steps("sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0");
        assert_eq!(steps[1].upstream, Upstream::Root("pci10000:e0".parse().unwrap()));
    }

    #[test]
    fn virtual_devices_have_no_function_and_sub_functions_the_one_below() {
        assert_eq!(steps("sys/devices/virtual/infiniband/siw0"), []);
        assert_eq!(last_step("sys/devices/virtual/infiniband/siw0"), None);
        let path = "sys/devices/pci0000:00/0000:00:01.0/0000:08:00.0/mlx5_core.sf.4/infiniband/mlx5_2";
        assert_eq!(steps(path).last().unwrap().bdf.to_string(), "0000:08:00.0");
        assert_eq!(sub_function(path).as_deref(), Some("mlx5_core.sf.4"));
        assert_eq!(sub_function("sys/devices/pci0000:00/0000:00:01.0/mlx5_core.eth.0/net/x"), None);
    }
}
