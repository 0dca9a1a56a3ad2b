//! What holds of pairing on every small host: order and names change nothing, a worse NIC changes nothing,
//! and no other choice would be better.

use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::level::Level;
use gdrd_topology::plan::contract::Plan;
use gdrd_topology::plan::{PlanOptions, plan};
use gdrd_topology::profile;
use proptest::prelude::*;

/// Devices below one switch: GPUs, then cards by number of ports, and how deep each device hangs.
#[derive(Clone, Debug)]
struct Switch {
    numa: u8,
    gpus: Vec<bool>,
    cards: Vec<(u8, bool)>,
}

fn switches() -> impl Strategy<Value = Vec<Switch>> {
    let gpus = prop::collection::vec(any::<bool>(), 0..3);
    let cards = prop::collection::vec((1_u8..3, any::<bool>()), 0..3);
    let switch = (0_u8..2, gpus, cards).prop_map(|(numa, gpus, cards)| Switch { numa, gpus, cards });
    prop::collection::vec(switch, 1..4)
}

/// Profile lines of a host. Addresses grow with the order of devices; `step` spreads them out.
fn lines(switches: &[Switch], nic_name: impl Fn(usize) -> String, step: u8) -> Vec<String> {
    let mut out = vec!["numa 0".to_owned(), "numa 1".to_owned()];
    let mut nics = 0;
    for (domain, switch) in switches.iter().enumerate() {
        let root = format!("{:04x}", domain * usize::from(step));
        out.push(format!("root pci{root}:00 numa={}", switch.numa));
        out.push(format!("pci {root}:00:01.0 1022:1483 060400 pci{root}:00 16x16"));
        out.push(format!("pci {root}:01:00.0 1000:c010 060400 {root}:00:01.0 16x16"));
        let mut slot = 0;
        let mut place = |is_deep: bool, out: &mut Vec<String>| {
            slot += 1;
            let bus = slot * 4 * step;
            out.push(format!("pci {root}:02:{slot:02x}.0 1000:c010 060400 {root}:01:00.0 16x16"));
            if !is_deep {
                return (format!("{root}:02:{slot:02x}.0"), bus);
            }
            out.push(format!("pci {root}:{bus:02x}:00.0 1000:c010 060400 {root}:02:{slot:02x}.0 16x16"));
            out.push(format!("pci {root}:{:02x}:00.0 1000:c010 060400 {root}:{bus:02x}:00.0 16x16", bus + 1));
            (format!("{root}:{:02x}:00.0", bus + 1), bus + 2)
        };
        for is_deep in &switch.gpus {
            let (parent, bus) = place(*is_deep, &mut out);
            out.push(format!("pci {root}:{bus:02x}:00.0 10de:2330 030200 {parent} 16x16"));
        }
        for (ports, is_deep) in &switch.cards {
            let (parent, bus) = place(*is_deep, &mut out);
            for function in 0..*ports {
                let name = nic_name(nics);
                nics += 1;
                out.push(format!("pci {root}:{bus:02x}:00.{function} 15b3:1021 020000 {parent} 16x16"));
                out.push(format!("hca {name} {root}:{bus:02x}:00.{function}\nport {name} 1 ACTIVE Ethernet 200"));
            }
        }
    }
    out
}

fn plan_of(lines: &[String]) -> Plan {
    let text = format!("gdrd-host-profile 1\n{}\n", lines.join("\n"));
    let snapshot = profile::snapshot(&text, None, &ReadOptions::default()).expect("the lines are a profile");
    plan(&snapshot, &PlanOptions::default())
}

fn pairs(plan: &Plan) -> Vec<Vec<String>> {
    plan.gpus.iter().map(|gpu| gpu.assigned.clone()).collect()
}

fn mlx5(place: usize) -> String {
    format!("mlx5_{place}")
}

/// Levels of the NICs of each GPU, as the plan lists them; the choice itself is not looked at.
fn nearest(plan: &Plan) -> Vec<Vec<String>> {
    let of_gpu = |gpu: &gdrd_topology::plan::contract::GpuPlan| {
        let best = gpu.nics.iter().filter_map(|nic| nic.level).min();
        let same_node = |name: &String| plan.nics.iter().any(|nic| nic.name == *name && nic.numa == gpu.numa);
        let equals = gpu.nics.iter().filter(|nic| nic.level == best).map(|nic| nic.name.clone());
        let equals: Vec<String> = equals.collect();
        // Only between root buses does the node say more than the level, and there NODE already says it.
        if best == Some(Level::Phb) && equals.iter().any(same_node) {
            return equals.into_iter().filter(same_node).collect();
        }
        equals
    };
    plan.gpus.iter().map(of_gpu).collect()
}

/// How unevenly NICs are shared: 0 if none is, growing with the square of the GPUs on one.
fn unevenness<'a>(chosen: impl Iterator<Item = &'a String> + Clone) -> usize {
    let load = |name: &String| chosen.clone().filter(|other| *other == name).count();
    chosen.clone().map(|name| load(name) - 1).sum()
}

/// The least unevenness over every choice of one nearest NIC for each GPU.
fn brute_force(nearest: &[Vec<String>]) -> usize {
    let mut best = usize::MAX;
    let mut at = vec![0_usize; nearest.len()];
    loop {
        let chosen: Vec<&String> = nearest.iter().zip(&at).filter_map(|(nics, place)| nics.get(*place)).collect();
        best = best.min(unevenness(chosen.iter().copied()));
        let Some(place) = (0..at.len()).find(|place| at[*place] + 1 < nearest[*place].len()) else { return best };
        at[place] += 1;
        at[..place].fill(0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_order_of_the_listing_changes_nothing(host in switches(), seed in any::<u64>()) {
        let ordered = lines(&host, mlx5, 1);
        let mut shuffled = ordered.clone();
        let mut state = seed | 1;
        for last in (1..shuffled.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let other = usize::try_from(state >> 33).expect("31 bits fit") % (last + 1);
            shuffled.swap(last, other);
        }
        prop_assert_eq!(plan_of(&shuffled), plan_of(&ordered));
    }

    #[test]
    fn other_names_and_addresses_in_the_same_order_relabel_the_answer(host in switches()) {
        let named = |place: usize| format!("roce_z{}", 99 - place);
        let relabelled = plan_of(&lines(&host, named, 3));
        let expected: Vec<Vec<String>> = pairs(&plan_of(&lines(&host, mlx5, 1)))
            .into_iter()
            .map(|nics| nics.iter().map(|name| named(name[5..].parse().expect("names are mlx5_N"))).collect())
            .collect();
        prop_assert_eq!(pairs(&relabelled), expected);
    }

    #[test]
    fn a_strictly_worse_nic_changes_no_pair(host in switches()) {
        let before = lines(&host, mlx5, 1);
        let plan = plan_of(&before);
        let far = "root pcif000:00\npci f000:00:01.0 1022:1483 060400 pcif000:00 16x16\n\
            pci f000:01:00.0 15b3:1021 020000 f000:00:01.0 16x16\nhca far f000:01:00.0\nport far 1 ACTIVE Ethernet 200";
        let mut after = before;
        after.push(far.to_owned());
        let is_worse = plan.gpus.iter().all(|gpu| gpu.nics.first().is_some_and(|nic| nic.level < Some(Level::Sys)));
        prop_assume!(is_worse);
        prop_assert_eq!(pairs(&plan_of(&after)), pairs(&plan));
    }

    #[test]
    fn every_gpu_gets_its_nearest_nics_and_no_choice_shares_less(host in switches()) {
        let plan = plan_of(&lines(&host, mlx5, 1));
        let nearest = nearest(&plan);
        for (gpu, nearest) in plan.gpus.iter().zip(&nearest) {
            prop_assert_eq!(gpu.assigned.is_empty(), nearest.is_empty(), "{}", gpu.name);
            prop_assert!(gpu.assigned.iter().all(|nic| nearest.contains(nic)), "{}: {:?}", gpu.name, gpu.assigned);
        }
        let given: Vec<String> = pairs(&plan).concat();
        prop_assert_eq!(unevenness(given.iter()), brute_force(&nearest));
    }

    #[test]
    fn gpus_with_the_same_nearest_nics_get_the_same_number(host in switches()) {
        let plan = plan_of(&lines(&host, mlx5, 1));
        let nearest = nearest(&plan);
        for (a, first) in nearest.iter().enumerate() {
            for (b, second) in nearest.iter().enumerate() {
                let near = plan.gpus[a].nics.first().map(|nic| nic.level);
                if first == second && near == plan.gpus[b].nics.first().map(|nic| nic.level) {
                    prop_assert_eq!(plan.gpus[a].assigned.len(), plan.gpus[b].assigned.len());
                }
            }
        }
    }
}
