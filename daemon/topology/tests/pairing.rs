//! The rules of pairing, each on a small host made for it.

use std::collections::BTreeMap;
use std::fmt::Write;

use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::gdr::{Gdr, GdrState};
use gdrd_topology::level::Level;
use gdrd_topology::model::{PciClass, Snapshot};
use gdrd_topology::plan::contract::Plan;
use gdrd_topology::plan::{Pin, PlanOptions, explain, plan, replan};
use gdrd_topology::profile;

/// A host of switches, each on a root bus of its own: `switch(numa)`, then GPUs and NICs below it.
#[derive(Clone, Default)]
struct Sketch {
    text: String,
    switches: u8,
    /// Next bus below the switch in work.
    bus: u8,
    nics: usize,
}

impl Sketch {
    fn new() -> Self {
        Self { text: "gdrd-host-profile 1\nnuma 0\nnuma 1\n".to_owned(), ..Self::default() }
    }

    fn line(mut self, line: &str) -> Self {
        writeln!(self.text, "{line}").expect("text grows");
        self
    }

    fn switch(mut self, numa: u8) -> Self {
        self.switches += 1;
        let base = self.switches * 16;
        self.bus = base + 2;
        writeln!(
            self.text,
            "root pci0000:{base:02x} numa={numa}\n\
             pci 0000:{base:02x}:00.0 1022:1483 060400 pci0000:{base:02x} 16x16\n\
             pci 0000:{:02x}:00.0 1000:c010 060400 0000:{base:02x}:00.0 16x16",
            base + 1
        )
        .expect("text grows");
        self
    }

    /// A downstream port of the switch in work, and the bus below it.
    fn downstream(&mut self) -> (String, u8) {
        let upstream_bus = self.switches * 16 + 1;
        self.bus += 1;
        let port = format!("0000:{:02x}:{:02x}.0", self.switches * 16 + 2, self.bus % 16);
        writeln!(self.text, "pci {port} 1000:c010 060400 0000:{upstream_bus:02x}:00.0 16x16").expect("text grows");
        (port, self.bus)
    }

    fn gpu(mut self) -> Self {
        let (port, bus) = self.downstream();
        self.line(&format!("pci 0000:{bus:02x}:00.0 10de:2330 030200 {port} 16x16"))
    }

    fn gpus(self, count: usize) -> Self {
        (0..count).fold(self, |sketch, _| sketch.gpu())
    }

    /// A card with ports `state rate`, each a function with an RDMA device.
    fn card(mut self, ports: &[(&str, &str)]) -> Self {
        let (port, bus) = self.downstream();
        for (function, (state, rate)) in ports.iter().enumerate() {
            let name = format!("mlx5_{}", self.nics);
            self.nics += 1;
            let number = self.nics;
            self = self
                .line(&format!("pci 0000:{bus:02x}:00.{function} 15b3:1021 020000 {port} 16x16 driver=mlx5_core"))
                .line(&format!("hca {name} 0000:{bus:02x}:00.{function}"))
                .line(&format!("port {name} 1 {state} Ethernet {rate}"))
                .line(&format!("net eth{number} 0000:{bus:02x}:00.{function}"));
        }
        self
    }

    fn nic(self) -> Self {
        self.card(&[("ACTIVE", "200")])
    }

    fn nics(self, count: usize) -> Self {
        (0..count).fold(self, |sketch, _| sketch.nic())
    }

    fn read(&self) -> Snapshot {
        profile::snapshot(&self.text, None, &ReadOptions::default()).expect("the sketch is a profile")
    }

    fn plan(&self) -> Plan {
        plan(&self.read(), &PlanOptions::default())
    }
}

fn assigned(plan: &Plan) -> Vec<Vec<&str>> {
    plan.gpus.iter().map(|gpu| gpu.assigned.iter().map(String::as_str).collect()).collect()
}

#[test]
fn two_gpus_and_two_nics_on_one_switch_get_one_each() {
    let plan = Sketch::new().switch(0).gpus(2).nics(2).plan();
    assert_eq!(assigned(&plan), [["mlx5_0"], ["mlx5_1"]]);
    assert_eq!(plan.gpus[1].rail, Some(1));
    assert!(plan.gpus[0].nics.iter().all(|nic| nic.level == Some(Level::Pix)));
}

#[test]
fn twice_as_many_nics_as_gpus_are_two_each() {
    let plan = Sketch::new().switch(0).gpus(2).nics(4).plan();
    assert_eq!(assigned(&plan), [["mlx5_0", "mlx5_1"], ["mlx5_2", "mlx5_3"]]);
}

#[test]
fn what_cannot_be_shared_out_evenly_is_left_over() {
    let plan = Sketch::new().switch(0).gpus(2).nics(3).plan();
    assert_eq!(assigned(&plan).iter().map(Vec::len).collect::<Vec<_>>(), [1, 1]);
    assert_ne!(plan.gpus[0].assigned, plan.gpus[1].assigned);
}

#[test]
fn a_nic_is_shared_only_where_no_nearest_one_is_free() {
    let plan = Sketch::new().switch(0).gpus(2).nics(1).switch(1).gpus(1).nics(2).plan();
    assert_eq!(assigned(&plan), [vec!["mlx5_0"], vec!["mlx5_0"], vec!["mlx5_1", "mlx5_2"]]);
    assert!(plan.gpus[0].reason.contains("shared with GPU1"), "{}", plan.gpus[0].reason);
}

#[test]
fn sharing_is_even() {
    let plan = Sketch::new().switch(0).gpus(6).nics(2).plan();
    let users: Vec<usize> = plan.nics.iter().map(|nic| nic.gpus.len()).collect();
    assert_eq!(users, [3, 3]);
}

#[test]
fn level_comes_before_numa_and_numa_before_the_rest() {
    // A switch without NIC: its GPU takes the NIC of its own node rather than the free one of the other.
    let plan = Sketch::new().switch(0).gpu().nic().switch(1).gpu().nics(2).switch(0).gpu().plan();
    assert_eq!(assigned(&plan), [vec!["mlx5_0"], vec!["mlx5_1", "mlx5_2"], vec!["mlx5_0"]]);
    let nics: Vec<Option<Level>> = plan.gpus[2].nics.iter().map(|nic| nic.level).collect();
    assert_eq!(nics, [Some(Level::Node), Some(Level::Sys), Some(Level::Sys)]);
    assert!(plan.warnings.iter().any(|warning| warning.starts_with("GPU2-mlx5_0: NODE")), "{:?}", plan.warnings);
}

#[test]
fn whole_cards_come_before_ports_of_one_card() {
    let dual = [("ACTIVE", "200"), ("ACTIVE", "200")];
    let plan = Sketch::new().switch(0).gpus(2).card(&dual).nic().plan();
    assert_eq!(assigned(&plan), [["mlx5_0"], ["mlx5_2"]]);
    // Two ports each: the ports of one card go to one GPU.
    let plan = Sketch::new().switch(0).gpus(2).card(&dual).card(&dual).plan();
    assert_eq!(assigned(&plan), [["mlx5_0", "mlx5_1"], ["mlx5_2", "mlx5_3"]]);
    // One card alone: a port each.
    let plan = Sketch::new().switch(0).gpus(2).card(&dual).plan();
    assert_eq!(assigned(&plan), [["mlx5_0"], ["mlx5_1"]]);
}

#[test]
fn down_ports_are_never_given_and_say_so() {
    let plan = Sketch::new().switch(0).gpu().card(&[("DOWN", "200")]).card(&[("INIT", "200")]).nic().plan();
    assert_eq!(assigned(&plan), [["mlx5_2"]]);
    assert!(plan.warnings.contains(&"mlx5_0 is not assigned: port 1 is DOWN".to_owned()), "{:?}", plan.warnings);
    let plan = Sketch::new().switch(0).gpu().card(&[("DOWN", "200")]).plan();
    assert_eq!(assigned(&plan), [Vec::<&str>::new()]);
    assert_eq!(plan.gpus[0].reason, "no NIC may be used: mlx5_0 (port 1 is DOWN)");
}

#[test]
fn rails_stay_when_a_port_goes_down() {
    let up = Sketch::new().switch(0).gpu().nic().switch(0).gpu().nic();
    let down = Sketch::new().switch(0).gpu().card(&[("DOWN", "200")]).switch(0).gpu().nic();
    assert_eq!(up.plan().gpus[1].rail, Some(1));
    assert_eq!(down.plan().gpus[1].rail, Some(1));
}

#[test]
fn nics_with_the_default_route_or_unlike_the_others_come_after_their_equals() {
    let base = Sketch::new().switch(0).gpu().nic().switch(0).gpu().nic().switch(1).gpu();
    for odd in [
        "net front 0000:35:00.0 default-route\nport mlx5_9 1 ACTIVE Ethernet 200",
        "port mlx5_9 1 ACTIVE InfiniBand 200",
        "port mlx5_9 1 ACTIVE Ethernet 25",
    ] {
        let (net, port) = odd.split_once("\nport").map_or(("", odd), |(net, _)| (net, &odd[net.len() + 1..]));
        let mut sketch = base.clone();
        let (downstream, bus) = sketch.downstream();
        let with_odd = sketch
            .line(&format!("pci 0000:{bus:02x}:00.0 15b3:1021 020000 {downstream} 16x16"))
            .line(&format!("hca mlx5_9 0000:{bus:02x}:00.0"))
            .line(port)
            .line(&net.replace("0000:35:00.0", &format!("0000:{bus:02x}:00.0")))
            .nic();
        let plan = with_odd.plan();
        assert_eq!(plan.gpus[2].assigned, ["mlx5_2"], "{odd}");
        let why = explain(&with_odd.read(), &PlanOptions::default(), None, "GPU2").unwrap();
        let lost = why.losers.iter().find(|loser| loser.nic == "mlx5_9").unwrap();
        assert!(lost.why.starts_with("equally near, but it "), "{}", lost.why);
    }
}

#[test]
fn a_slow_equal_is_not_taken_where_sharing_gives_more() {
    let plan = Sketch::new().switch(0).gpus(2).card(&[("ACTIVE", "400")]).card(&[("ACTIVE", "25")]).plan();
    assert_eq!(assigned(&plan), [["mlx5_0"], ["mlx5_0"]]);
    let plan = Sketch::new().switch(0).gpus(2).card(&[("ACTIVE", "200")]).card(&[("ACTIVE", "100")]).plan();
    assert_eq!(assigned(&plan), [["mlx5_0"], ["mlx5_1"]]);
}

#[test]
fn virtual_functions_stay_out_beside_their_physical_one() {
    let sketch = Sketch::new().switch(0).gpu().nic();
    let vf = "pci 0000:14:00.2 15b3:101e 020000 0000:12:04.0 - physfn=0000:14:00.0";
    let plan = sketch.clone().line(&format!("{vf} driver=mlx5_core")).line("hca mlx5_7 0000:14:00.2").plan();
    assert_eq!(assigned(&plan), [["mlx5_0"]]);
    assert!(plan.warnings.iter().any(|warning| warning.contains("mlx5_7 is not assigned: it is a virtual function")));
    // The same wire given to a guest: the physical function is not for us either.
    let plan = sketch.line(&format!("{vf} driver=vfio-pci")).plan();
    assert_eq!(assigned(&plan), [Vec::<&str>::new()]);
    assert!(plan.gpus[0].reason.contains("0000:14:00.2 is in use elsewhere"), "{}", plan.gpus[0].reason);
}

#[test]
fn bond_slaves_stay_out_and_the_bond_itself_is_used() {
    let dual = [("ACTIVE", "200"), ("ACTIVE", "200")];
    let sketch = Sketch::new().switch(0).gpu().card(&dual);
    let slaves = sketch.text.replace("net eth1 0000:14:00.0", "net eth1 0000:14:00.0 master=bond0");
    let slaves = slaves.replace("net eth2 0000:14:00.1", "net eth2 0000:14:00.1 master=bond0") + "net bond0 - bond\n";
    let plan = Sketch { text: slaves.clone(), ..sketch.clone() }.plan();
    assert_eq!(assigned(&plan), [Vec::<&str>::new()]);
    assert!(plan.gpus[0].reason.contains("it is a slave of bond0"), "{}", plan.gpus[0].reason);
    // RoCE LAG: one RDMA device for both ports.
    let lag = slaves.replace("hca mlx5_1 0000:14:00.1\nport mlx5_1 1 ACTIVE Ethernet 200\n", "");
    let plan = Sketch { text: lag, ..sketch }.plan();
    assert_eq!(assigned(&plan), [["mlx5_0"]]);
}

#[test]
fn software_devices_come_after_all_hardware() {
    let sketch = Sketch::new().switch(0).gpu().line("hca siw0 -").line("hca rxe0 - parent=eth1");
    let plan = sketch.clone().plan();
    assert_eq!(plan.gpus[0].assigned.len(), 2);
    assert_eq!(plan.gpus[0].nics[0].gdr.state, GdrState::Impossible);
    let plan = sketch.switch(1).nic().plan();
    assert_eq!(assigned(&plan), [["mlx5_0"]]);
    // rxe has the place of its interface, and still comes after the NIC below it.
    let rxe = plan.gpus[0].nics.iter().find(|nic| nic.name == "rxe0").unwrap();
    assert_eq!(rxe.level, Some(Level::Sys));
}

#[test]
fn filters_levels_and_pins_have_the_last_word() {
    let snapshot = Sketch::new().switch(0).gpu().nics(2).switch(0).gpu().read();
    let with = |options: PlanOptions| plan(&snapshot, &options);
    let filtered = with(PlanOptions { filter: Some("^=mlx5_0".parse().unwrap()), ..PlanOptions::default() });
    assert_eq!(assigned(&filtered), [["mlx5_1"], ["mlx5_1"]]);
    let near = with(PlanOptions { max_level: Level::Pxb, ..PlanOptions::default() });
    assert_eq!(assigned(&near)[1], Vec::<&str>::new());
    assert_eq!(near.gpus[1].reason, "nearest NIC mlx5_0 is NODE, beyond max_level PXB");
    let pin = Pin { gpu: "GPU1".to_owned(), nics: vec!["mlx5_1".to_owned()] };
    let pinned = with(PlanOptions { pins: vec![pin], ..PlanOptions::default() });
    assert_eq!(assigned(&pinned), [["mlx5_0"], ["mlx5_1"]]);
    assert_eq!(pinned.gpus[1].reason, "pinned by the operator to mlx5_1");
    let wrong = Pin { gpu: "GPU7".to_owned(), nics: vec![] };
    let warned = with(PlanOptions { pins: vec![wrong], ..PlanOptions::default() });
    assert!(warned.warnings.iter().any(|warning| warning.contains("GPU7")), "{:?}", warned.warnings);
}

#[test]
fn rails_of_nics_that_are_not_there_are_told() {
    let snapshot = profile::builtin("two-socket-2gpu").unwrap();
    let warned = |names: &[&str]| {
        let rails = names.iter().map(|name| ((*name).to_owned(), 0)).collect();
        let warnings = plan(&snapshot, &PlanOptions { rails, ..PlanOptions::default() }).warnings;
        warnings.into_iter().find(|warning| warning.starts_with("rails of "))
    };
    assert_eq!(warned(&["mlx5_0"]), None);
    assert_eq!(warned(&["mlx5_0", "mlx_5"]).as_deref(), Some("rails of mlx_5: no NIC of that name on this host"));
    assert_eq!(warned(&["a", "b"]).as_deref(), Some("rails of a, b: no NICs of these names on this host"));
}

#[test]
fn operator_rails_order_equal_nics() {
    let snapshot = Sketch::new().switch(0).gpus(2).nics(2).read();
    let rails = BTreeMap::from([("mlx5_0".to_owned(), 1), ("mlx5_1".to_owned(), 0)]);
    let plan = plan(&snapshot, &PlanOptions { rails, ..PlanOptions::default() });
    assert_eq!(assigned(&plan), [["mlx5_1"], ["mlx5_0"]]);
    assert_eq!(plan.gpus[0].rail, Some(0));
}

#[test]
fn probe_results_are_a_field_of_their_own_and_change_no_pair() {
    let snapshot = Sketch::new().switch(0).gpus(2).nics(2).read();
    let failed = Gdr { state: GdrState::Failed, reason: "loopback transfer timed out".to_owned() };
    let key = (snapshot.host.gpus[0].bdf.unwrap().to_string(), "mlx5_0".to_owned());
    let probed =
        plan(&snapshot, &PlanOptions { gdr: BTreeMap::from([(key, failed.clone())]), ..PlanOptions::default() });
    assert_eq!(probed.gpus[0].nics[0].gdr, failed);
    assert_eq!(assigned(&probed), [["mlx5_0"], ["mlx5_1"]]);
}

#[test]
fn a_new_snapshot_moves_only_pairs_whose_nic_is_gone() {
    let before = Sketch::new().switch(0).gpu().switch(0).gpu().nics(2);
    let old = before.plan();
    assert_eq!(assigned(&old), [["mlx5_0"], ["mlx5_1"]]);
    // A NIC appears on the first switch: better for GPU0, and yet it stays.
    let more = before.text.replace(
        "root pci0000:20",
        "pci 0000:12:07.0 1000:c010 060400 0000:11:00.0 16x16\npci 0000:17:00.0 15b3:1021 020000 0000:12:07.0 16x16\n\
         hca mlx5_5 0000:17:00.0\nport mlx5_5 1 ACTIVE Ethernet 200\nroot pci0000:20",
    );
    let more = Sketch { text: more, ..before.clone() };
    let kept = replan(&old, &more.read(), &PlanOptions::default());
    assert_eq!(assigned(&kept.plan), [["mlx5_0"], ["mlx5_1"]]);
    assert_eq!(kept.moved, []);
    assert!(kept.plan.gpus[0].reason.contains("kept from the plan before; mlx5_5 would be nearer (PIX)"));
    let better = kept.better.unwrap();
    assert_eq!(assigned(&better)[0], ["mlx5_5"]);
    // mlx5_0 goes: GPU0 moves, GPU1 does not.
    let text =
        more.text.lines().filter(|line| !line.contains("mlx5_0")).fold(String::new(), |text, line| text + line + "\n");
    let less = Sketch { text, ..before.clone() };
    let moved = replan(&old, &less.read(), &PlanOptions::default());
    assert_eq!(assigned(&moved.plan), [["mlx5_5"], ["mlx5_1"]]);
    assert_eq!(moved.moved.len(), 1);
    assert_eq!(moved.moved[0].from, ["mlx5_0"]);
    // A renamed NIC is the same one.
    let renamed = Sketch { text: before.text.replace("mlx5_1", "roce_rail1"), ..before };
    let same = replan(&old, &renamed.read(), &PlanOptions::default());
    assert_eq!(assigned(&same.plan), [["mlx5_0"], ["roce_rail1"]]);
    assert_eq!((same.moved.len(), same.better), (0, None));
}

#[test]
fn hosts_larger_than_any_are_planned_in_bounded_time_or_not_at_all() {
    let flat = |gpus: usize, nics: usize| {
        let mut text = "gdrd-host-profile 1\n".to_owned();
        for gpu in 0..gpus {
            writeln!(text, "pci {gpu:04x}:00:01.0 10de:2330 030200 pci{gpu:04x}:00 -").expect("text grows");
        }
        for nic in 0..nics {
            writeln!(text, "pci f{nic:04x}:00:01.0 15b3:1021 020000 pcif{nic:04x}:00 -\nhca m{nic} f{nic:04x}:00:01.0")
                .expect("text grows");
        }
        Sketch { text, ..Sketch::new() }.plan()
    };
    let large = flat(96, 64);
    let users: Vec<usize> = large.nics.iter().map(|nic| nic.gpus.len()).collect();
    assert!(users.iter().all(|count| (1..=2).contains(count)), "{users:?}");
    let beyond = flat(512, 512);
    assert!(beyond.warnings.iter().any(|warning| warning.contains("none is planned")), "{:?}", beyond.warnings);
}

#[test]
fn explanations_name_every_nic_once() {
    let snapshot = profile::builtin("dgx-a100").unwrap();
    let why = explain(&snapshot, &PlanOptions::default(), None, "0000:0F:00.0").unwrap();
    assert_eq!(why.gpu, "GPU1");
    assert_eq!(why.winners.len() + why.losers.len(), 12);
    assert_eq!(why.winners[0].nic, "mlx5_0");
    assert_eq!(why.winners[0].bottleneck.as_ref().unwrap().hop, "mlx5_0:1");
    assert_eq!(
        why.losers[0].why,
        "equally near, given to GPU0 so that each has its own share; \
         mlx5_0 meets this GPU deeper, at 0000:0a:00.0 below 0000:01:00.0"
    );
    assert!(
        why.reason.ends_with("; mlx5_0 meets the GPU at the deepest common bridge, 0000:0a:00.0"),
        "{}",
        why.reason
    );
    assert_eq!(why.losers[1].why, "SYS is farther than PXB of mlx5_0");
    assert!(explain(&snapshot, &PlanOptions::default(), None, "GPU8").is_err());
}

#[test]
fn a_narrow_link_is_the_bottleneck_and_is_reported() {
    let text =
        Sketch::new().switch(0).gpu().nic().text.replace("020000 0000:12:04.0 16x16", "020000 0000:12:04.0 8x8/16x16");
    let snapshot = Sketch { text, ..Sketch::new() }.read();
    let plan = plan(&snapshot, &PlanOptions::default());
    assert_eq!(plan.gpus[0].nics[0].gbps, Some(63.02));
    let warning = plan.warnings.iter().find(|warning| warning.contains("0000:14:00.0")).unwrap();
    assert!(warning.contains("8x8 of 16x16 (63 of 252 Gbit/s)"), "{warning}");
}

#[test]
fn a_flat_guest_is_called_flat() {
    let text = "gdrd-host-profile 1\nnuma 0\nnuma 1\nroot pci0000:00\n\
        pci 0000:00:05.0 10de:2330 030200 pci0000:00 -\npci 0000:00:06.0 10de:2330 030200 pci0000:00 -\n\
        pci 0000:00:07.0 15b3:101e 020000 pci0000:00 -\npci 0000:00:08.0 15b3:101e 020000 pci0000:00 -\n\
        hca mlx5_0 0000:00:07.0\nhca mlx5_1 0000:00:08.0\n";
    let plan = Sketch { text: text.to_owned(), ..Sketch::new() }.plan();
    assert_eq!(assigned(&plan), [["mlx5_0"], ["mlx5_1"]]);
    assert!(plan.gpus[0].nics.iter().all(|nic| nic.level == Some(Level::Phb)));
    assert!(plan.warnings.iter().any(|warning| warning.contains("the PCI tree is flat")), "{:?}", plan.warnings);
}

#[test]
fn devices_in_different_domains_pair_by_numa_node() {
    let text = "gdrd-host-profile 1\nnuma 0\nnuma 1\n\
        root pci0008:00 numa=0\nroot pci0018:00 numa=1\nroot pci0000:00 numa=0\nroot pci0010:00 numa=1\n\
        pci 0008:00:00.0 10de:22b8 060400 pci0008:00 -\npci 0008:01:00.0 10de:2941 030200 0008:00:00.0 -\n\
        pci 0018:00:00.0 10de:22b8 060400 pci0018:00 -\npci 0018:01:00.0 10de:2941 030200 0018:00:00.0 -\n\
        pci 0000:00:00.0 10de:22b1 060400 pci0000:00 -\npci 0000:03:00.0 15b3:1021 020700 0000:00:00.0 -\n\
        pci 0010:00:00.0 10de:22b1 060400 pci0010:00 -\npci 0010:03:00.0 15b3:1021 020700 0010:00:00.0 -\n\
        hca ibp3s0 0000:03:00.0\nhca ibP16p3s0 0010:03:00.0\n";
    let plan = Sketch { text: text.to_owned(), ..Sketch::new() }.plan();
    assert_eq!(assigned(&plan), [["ibp3s0"], ["ibP16p3s0"]]);
    assert_eq!(plan.gpus[0].nics[0].level, Some(Level::Node));
}

#[test]
fn a_data_direct_function_is_a_second_path_of_its_nic() {
    let sketch = Sketch::new().switch(0).gpu();
    let text = sketch
        .line("pci 0000:12:0a.0 1000:c010 060400 0000:11:00.0 16x16")
        .line("pci 0000:1a:00.0 15b3:2100 020000 0000:12:0a.0 16x16")
        .switch(1)
        .nic()
        .text;
    let text = text.replace("hca mlx5_0 0000:23:00.0\n", "hca mlx5_0 0000:23:00.0 data_direct=0000:1a:00.0\n");
    let plan = Sketch { text, ..Sketch::new() }.plan();
    assert_eq!(plan.gpus[0].nics[0].level, Some(Level::Pix));
}

#[test]
fn the_plan_reads_back_from_its_json_and_keeps_its_field_order() {
    let plan = profile::builtin("two-socket-2gpu").map(|snapshot| plan(&snapshot, &PlanOptions::default())).unwrap();
    let json = plan.to_json();
    assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), plan);
    let keys = ["schema", "generation", "source", "gpus", "nics", "nvlink", "warnings"];
    let places: Vec<usize> = keys.iter().map(|key| json.find(&format!("\n  \"{key}\":")).unwrap()).collect();
    assert!(places.is_sorted(), "{places:?}");
    let value: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(value["schema"], "gdrd.plan/v1");
    assert_eq!(value["source"]["kind"], "profile");
    let first = &value["gpus"][0];
    assert_eq!((&first["numa"], &first["rail"]), (&0.into(), &0.into()));
    assert_eq!(first["nics"][0]["gdr"]["state"], "unknown");
    assert_eq!(value["nics"][0]["ports"][0]["link_layer"], "Ethernet");
}

#[test]
fn a_link_layer_that_no_port_tells_is_not_called_another() {
    let mut snapshot = profile::builtin("dgx-a100").expect("the profile is built in");
    for hca in &mut snapshot.host.hcas {
        hca.ports.clear();
    }
    let changed = snapshot.host.find_hca("mlx5_1").and_then(|id| snapshot.host.hca(id)?.bdf);
    for function in snapshot.host.functions.iter_mut().filter(|function| Some(function.bdf) == changed) {
        function.class = Some(PciClass(0x02_0000));
    }
    let plan = plan(&snapshot, &PlanOptions::default());
    let reasons: Vec<&str> = plan.gpus.iter().map(|gpu| gpu.reason.as_str()).collect();
    assert!(reasons.iter().any(|reason| reason.contains("mlx5_1 is of another PCI class than most")), "{reasons:?}");
    assert!(!plan.to_json().contains("another link layer"), "{reasons:?}");
}
