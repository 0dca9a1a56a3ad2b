//! Gives a string of bytes to a reader and asks the host that comes out everything there is to ask. The fuzz
//! targets (tests/fuzz) and the replay of their corpora share it.

use std::path::Path;

use gdrd_topology::assemble::{ReadOptions, assemble};
use gdrd_topology::model::{GpuId, HcaId, HcaOrigin, Host, RawHost, Snapshot};
use gdrd_topology::nccl_xml::NcclTopology;
use gdrd_topology::plan::{PlanOptions, plan};
use gdrd_topology::source::{Source, SourceKind};
use gdrd_topology::{profile, read_stream, render, rocm_topo, topo_m};

/// What came of an input.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    Refused,
    /// With so many GPUs and NICs.
    Read(usize, usize),
}

const NAME: &str = "input";

/// NCCL topology XML, alone and laid over a host.
pub(crate) fn nccl_xml(data: &[u8]) -> Seen {
    let Ok(topology) = NcclTopology::parse(&String::from_utf8_lossy(data)) else { return Seen::Refused };
    let mut below = profile::parse(profile::builtin_text("dgx-a100").expect("it is built in")).expect("it parses");
    topology.lay_over(&mut below);
    examine(below);
    examine(topology.host())
}

pub(crate) fn topo_m(data: &[u8]) -> Seen {
    let text = String::from_utf8_lossy(data);
    let parsed = topo_m::parse(&text);
    // One with too many columns is taken for a matrix, so that its refusal says that.
    assert!(parsed.is_err() || topo_m::is_topo_m(&text), "what is read as a matrix is taken for one");
    parsed.map_or(Seen::Refused, examine)
}

pub(crate) fn rocm_topo(data: &[u8]) -> Seen {
    rocm_topo::parse(&String::from_utf8_lossy(data)).map_or(Seen::Refused, examine)
}

pub(crate) fn host_profile(data: &[u8]) -> Seen {
    profile::parse(&String::from_utf8_lossy(data)).map_or(Seen::Refused, examine)
}

/// Any input by its content, archives too.
pub(crate) fn input(data: &[u8]) -> Seen {
    let read = read_stream(data, Path::new(NAME), &ReadOptions::default());
    read.map_or_else(
        |error| {
            assert!(error.to_string().contains(NAME), "{error} names the input");
            Seen::Refused
        },
        |snapshot| examine_host(snapshot.host, snapshot.source.kind),
    )
}

/// A sysfs tree written as lines: `path content` for a file, `path -> target` for a link, `path/` for a folder.
pub(crate) fn tree(data: &[u8]) -> Seen {
    let mut tape = tar::Builder::new(Vec::new());
    for line in String::from_utf8_lossy(data).lines() {
        let (path, content) = line.split_once(' ').unwrap_or((line, ""));
        let mut header = tar::Header::new_gnu();
        header.set_size(0);
        let added = if let Some(target) = content.strip_prefix("-> ") {
            header.set_entry_type(tar::EntryType::Symlink);
            tape.append_link(&mut header, path, target)
        } else if path.ends_with('/') {
            header.set_entry_type(tar::EntryType::Directory);
            tape.append_data(&mut header, path, std::io::empty())
        } else {
            header.set_size(content.len().try_into().expect("a line is short"));
            tape.append_data(&mut header, path, content.as_bytes())
        };
        // Names that tar itself cannot hold are left out.
        let _ = added;
    }
    tape.into_inner().map_or(Seen::Refused, |bytes| input(&bytes))
}

fn examine(raw: RawHost) -> Seen {
    let kind = raw.source;
    examine_host(assemble(raw, &ReadOptions::default()), kind)
}

/// Most GPUs and NICs that all questions are asked of; more only cost time.
const MAX_ASKED: usize = 24;

fn examine_host(host: Host, kind: SourceKind) -> Seen {
    let seen = Seen::Read(host.gpus.len(), host.hcas.len());
    let snapshot = Snapshot { generation: 1, source: Source { kind, path: None }, host };
    let host = &snapshot.host;
    for gpu in (0..host.gpus.len()).take(MAX_ASKED).map(GpuId) {
        for other in (0..host.gpus.len()).take(MAX_ASKED).map(GpuId) {
            assert_eq!(host.gpu_level(gpu, other), host.gpu_level(other, gpu));
        }
        for hca in (0..host.hcas.len()).take(MAX_ASKED).map(HcaId) {
            let _ = (host.gpu_hca_level(gpu, hca), host.gpu_hca_bottleneck(gpu, hca));
        }
    }
    if host.gpus.len() <= MAX_ASKED && host.hcas.len() <= MAX_ASKED {
        ask_for_a_plan(&snapshot);
    }
    let text = profile::render(host);
    let again = profile::snapshot(&text, None, &ReadOptions::default());
    let again = again.unwrap_or_else(|error| panic!("{error}\n{text}")).host;
    assert_eq!((again.gpus.len(), again.hcas.len()), (host.gpus.len(), host.hcas.len()), "{text}");
    seen
}

fn ask_for_a_plan(snapshot: &Snapshot) {
    let plan = plan(snapshot, &PlanOptions::default());
    for nic in plan.gpus.iter().flat_map(|gpu| &gpu.assigned) {
        let hca = snapshot.host.hcas.iter().find(|hca| hca.name == *nic).expect("a plan gives NICs of the host");
        assert_ne!(hca.origin, HcaOrigin::Socket, "{nic} has no RDMA");
    }
    let host = &snapshot.host;
    let _ = (
        render::matrix(host, Some(&plan)),
        render::tree(host, Some(&plan)),
        render::topo(snapshot, &plan),
        plan.to_json(),
    );
}
