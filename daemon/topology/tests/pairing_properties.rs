//! What holds of pairing on every small host: order and names change nothing, a worse NIC changes nothing,
//! and no other choice would be better.

use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::bdf::Bdf;
use gdrd_topology::level::Level;
use gdrd_topology::model::{Host, LinkLayer, Snapshot};
use gdrd_topology::plan::contract::{NicPlan, Plan};
use gdrd_topology::plan::{PlanOptions, plan};
use gdrd_topology::profile;
use proptest::prelude::*;

/// Devices below one switch: GPUs and cards, and how deep each hangs.
#[derive(Clone, Debug)]
struct Switch {
    numa: u8,
    gpus: Vec<bool>,
    cards: Vec<Card>,
}

#[derive(Clone, Debug)]
struct Card {
    ports: u8,
    is_deep: bool,
    rate_gbps: u32,
    layer: &'static str,
}

fn switches() -> impl Strategy<Value = Vec<Switch>> {
    let gpus = prop::collection::vec(any::<bool>(), 0..3);
    let card = (1_u8..3, any::<bool>(), prop::sample::select(vec![50, 100, 200, 200, 200]), 0..6_u8);
    let card = card.prop_map(|(ports, is_deep, rate_gbps, layer)| Card {
        ports,
        is_deep,
        rate_gbps,
        layer: if layer == 0 { "InfiniBand" } else { "Ethernet" },
    });
    let cards = prop::collection::vec(card, 0..3);
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
        for Card { ports, is_deep, rate_gbps, layer } in &switch.cards {
            let (parent, bus) = place(*is_deep, &mut out);
            for function in 0..*ports {
                let name = nic_name(nics);
                nics += 1;
                out.push(format!("pci {root}:{bus:02x}:00.{function} 15b3:1021 020000 {parent} 16x16"));
                out.push(format!(
                    "hca {name} {root}:{bus:02x}:00.{function}\nport {name} 1 ACTIVE {layer} {rate_gbps}"
                ));
            }
        }
    }
    out
}

fn read(lines: &[String]) -> Snapshot {
    let text = format!("gdrd-host-profile 1\n{}\n", lines.join("\n"));
    profile::snapshot(&text, None, &ReadOptions::default()).expect("the lines are a profile")
}

fn plan_of(lines: &[String]) -> Plan {
    plan(&read(lines), &PlanOptions::default())
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

/// What a choice costs, by the rules as documented and in their order: the time that one byte takes on NICs that are
/// shared, how often a GPU shares, what comes after its equals, GPUs on a card that another has too, and how much
/// above the deepest bridge of all the paths meet.
type Cost = [u64; 5];

/// Time units of a byte: all rates of these hosts divide it.
const TIME_GBPS: f64 = 200.0;
/// More bridges than any path of these hosts has.
const DEEPEST: usize = 8;

struct Rules<'a> {
    host: &'a Host,
    nics: &'a [NicPlan],
    usual_rate: Option<f64>,
    usual_layer: Option<LinkLayer>,
}

fn majority<T: PartialEq + Copy>(values: &[T]) -> Option<T> {
    values.iter().find(|value| values.iter().filter(|other| other == value).count() * 2 > values.len()).copied()
}

fn count(number: usize) -> u64 {
    u64::try_from(number).expect("few devices")
}

/// 0 + 1 + … of so many.
fn pairs_of(number: u64) -> u64 {
    number * number.saturating_sub(1) / 2
}

impl<'a> Rules<'a> {
    /// What is usual is told by the NICs that are nearest to some GPU.
    fn of(host: &'a Host, nics: &'a [NicPlan], nearest: &[Vec<String>]) -> Self {
        let stands_to_choice = |nic: &&NicPlan| nearest.iter().flatten().any(|name| *name == nic.name);
        let rates: Vec<f64> = nics.iter().filter(stands_to_choice).filter_map(|nic| nic.rate_gbps).collect();
        let layers: Vec<LinkLayer> = nics.iter().filter(stands_to_choice).map(|nic| nic.ports[0].link_layer).collect();
        Self { host, nics, usual_rate: majority(&rates), usual_layer: majority(&layers) }
    }

    /// Cost of GPUs, by place, each with one NIC.
    fn cost(&self, chosen: &[(usize, &String)]) -> Cost {
        let mut cost = [0; 5];
        let users = |wanted: &dyn Fn(&NicPlan) -> bool| {
            let is_wanted = |name: &String| self.nics.iter().any(|nic| nic.name == *name && wanted(nic));
            count(chosen.iter().filter(|(_, name)| is_wanted(name)).count())
        };
        for nic in self.nics {
            let own = users(&|other| other.name == nic.name);
            let rate = nic.rate_gbps.expect("all have a rate");
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small whole number")]
            let byte = (TIME_GBPS / rate) as u64;
            let odd_rate = u64::from(self.usual_rate.is_some_and(|usual| (usual - rate).abs() > 0.1));
            let odd_layer = u64::from(self.usual_layer.is_some_and(|usual| usual != nic.ports[0].link_layer));
            cost[0] += (pairs_of(own) + own) * byte;
            cost[1] += pairs_of(own);
            cost[2] += own * (odd_rate * 2 + odd_layer * 4);
            if nic.card == nic.bdf {
                cost[3] += pairs_of(users(&|other| other.card == nic.card));
            }
        }
        for (gpu, name) in chosen {
            let nic = self.nics.iter().find(|nic| nic.name == **name).and_then(|nic| nic.bdf);
            let meeting = self.host.gpus[*gpu].bdf.zip(nic).and_then(|(gpu, nic)| self.host.meeting(gpu, nic));
            cost[4] += count(DEEPEST - meeting.map_or(0, |meeting| meeting.depth));
        }
        cost
    }

    /// The least cost over every choice of one NIC of each GPU's list.
    fn least(&self, lists: &[Vec<String>]) -> Cost {
        let mut best = [u64::MAX; 5];
        let mut at = vec![0_usize; lists.len()];
        loop {
            let nics = lists.iter().zip(&at).enumerate();
            let chosen: Vec<(usize, &String)> =
                nics.filter_map(|(gpu, (nics, place))| Some((gpu, nics.get(*place)?))).collect();
            best = best.min(self.cost(&chosen));
            let Some(place) = (0..at.len()).find(|place| at[*place] + 1 < lists[*place].len()) else { return best };
            at[place] += 1;
            at[..place].fill(0);
        }
    }
}

/// NICs that are worse for every GPU: another one on a root of its own in no NUMA node, one without a link, a virtual
/// function, a software device.
fn worse_nic(kind: u8, of: Option<&NicPlan>) -> String {
    let far = "root pcif000:00\npci f000:00:01.0 1022:1483 060400 pcif000:00 16x16\n\
               pci f000:01:00.0 15b3:1021 020000 f000:00:01.0 16x16\n"
        .to_owned();
    match (kind, of.and_then(|nic| nic.bdf)) {
        (1, Some(bdf)) => {
            let function = Bdf { device: bdf.device + 1, function: 0, ..bdf };
            format!("pci {function} 15b3:1021 020000 {} 16x16\nhca w {function}\nport w 1 DOWN Ethernet 200", "PARENT")
        }
        (2, Some(bdf)) => {
            let function = Bdf { device: bdf.device + 1, function: 0, ..bdf };
            format!(
                "pci {function} 15b3:101e 020000 PARENT - physfn={bdf}\nhca w {function}\nport w 1 ACTIVE Ethernet 200"
            )
        }
        (3, _) => "hca w -\nport w 1 ACTIVE Ethernet 200".to_owned(),
        _ => far + "hca w f000:01:00.0\nport w 1 ACTIVE Ethernet 200",
    }
}

fn shuffled(lines: &[String], seed: u64) -> Vec<String> {
    let mut shuffled = lines.to_vec();
    let mut state = seed | 1;
    for last in (1..shuffled.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let other = usize::try_from(state >> 33).expect("31 bits fit") % (last + 1);
        shuffled.swap(last, other);
    }
    shuffled
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_order_of_the_listing_changes_nothing(host in switches(), seed in any::<u64>()) {
        let ordered = lines(&host, mlx5, 1);
        prop_assert_eq!(plan_of(&shuffled(&ordered, seed)), plan_of(&ordered));
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
    fn rails_are_the_same_on_every_host_of_a_kind(host in switches(), seed in any::<u64>()) {
        let one = lines(&host, mlx5, 1);
        let other = shuffled(&lines(&host, |place| format!("roce_z{}", 99 - place), 3), seed);
        // Names and addresses differ, so that a NIC is known by its place.
        let rails = |plan: &Plan| -> Vec<(Option<u32>, Vec<Option<usize>>)> {
            let place = |name: &String| plan.nics.iter().position(|nic| nic.name == *name);
            plan.gpus.iter().map(|gpu| (gpu.rail, gpu.assigned.iter().map(place).collect())).collect()
        };
        prop_assert_eq!(rails(&plan_of(&other)), rails(&plan_of(&one)));
    }

    #[test]
    fn a_strictly_worse_nic_changes_no_pair(host in switches(), kind in 0..4_u8, beside in any::<prop::sample::Index>()) {
        let before = lines(&host, mlx5, 1);
        let plan = plan_of(&before);
        let of = (!plan.nics.is_empty()).then(|| beside.get(&plan.nics));
        let parent = of.and_then(|nic| nic.bdf).and_then(|bdf| {
            let own = before.iter().find(|line| line.starts_with(&format!("pci {bdf} ")))?;
            own.split(' ').nth(4).map(str::to_owned)
        });
        let mut after = before;
        after.push(worse_nic(kind, of).replace("PARENT", &parent.unwrap_or_default()));
        let is_worse = plan.gpus.iter().all(|gpu| gpu.nics.first().is_some_and(|nic| nic.level < Some(Level::Sys)));
        prop_assume!(is_worse);
        prop_assert_eq!(pairs(&plan_of(&after)), pairs(&plan), "{}", after.last().expect("it was pushed"));
    }

    #[test]
    fn every_gpu_gets_its_nearest_nics_and_no_choice_costs_less(host in switches()) {
        let snapshot = read(&lines(&host, mlx5, 1));
        let plan = plan(&snapshot, &PlanOptions::default());
        let nearest = nearest(&plan);
        for (gpu, nearest) in plan.gpus.iter().zip(&nearest) {
            prop_assert_eq!(gpu.assigned.is_empty(), nearest.is_empty(), "{}", gpu.name);
            prop_assert!(gpu.assigned.iter().all(|nic| nearest.contains(nic)), "{}: {:?}", gpu.name, gpu.assigned);
        }
        let rules = Rules::of(&snapshot.host, &plan.nics, &nearest);
        prop_assert_eq!(rules.least(&pairs(&plan)), rules.least(&nearest));
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
