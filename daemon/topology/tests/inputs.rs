//! Inputs by their content: every kind is told from the others, archives read as the folder they were made of,
//! and what is broken or hostile ends in an error that names it.
#![allow(clippy::panic, clippy::unwrap_used, reason = "helpers of tests, which clippy does not know as such")]

use std::io::{self, Read, Write};
use std::path::Path;

use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::model::{FabricState, GpuId, Host, NvLinkEnd, NvLinkKind, Snapshot};
use gdrd_topology::source::SourceKind;
use gdrd_topology::{TopologyError, profile, read_input, read_nccl_topology, read_root, read_stream, read_text, sysfs};
use tar::{Builder, EntryType, Header};

const FORM: &str = "capture";

fn read(bytes: &[u8]) -> Result<Snapshot, TopologyError> {
    read_stream(bytes, Path::new(FORM), &ReadOptions::default())
}

fn error(bytes: &[u8]) -> String {
    let error = read(bytes).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(FORM), "{text}");
    text
}

/// A built-in host as a folder.
fn folder(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    sysfs::build::build(&profile::builtin(name).unwrap().host, folder.path()).unwrap();
    folder
}

/// A folder as a tar file, below a name.
fn tape(folder: &Path, below: &str) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    builder.follow_symlinks(false);
    builder.append_dir_all(below, folder).unwrap();
    builder.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    writer.write_all(bytes).unwrap();
    writer.finish().unwrap()
}

fn xz(bytes: &[u8]) -> Vec<u8> {
    let mut writer = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(0)).unwrap();
    writer.write_all(bytes).unwrap();
    writer.finish().unwrap()
}

fn bzip2(bytes: &[u8]) -> Vec<u8> {
    let mut writer = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
    writer.write_all(bytes).unwrap();
    writer.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
}

#[test]
fn an_archive_reads_as_the_folder_it_was_made_of() {
    for (name, below) in [("dgx-a100", "."), ("two-socket-2gpu", "some/host")] {
        let folder = folder(name);
        let host = read_root(folder.path(), &ReadOptions::default()).unwrap().host;
        let tape = tape(folder.path(), below);
        let packers = [<[u8]>::to_vec as fn(&[u8]) -> Vec<u8>, gzip, xz, bzip2, zstd];
        // Packing the large one is slow in a debug build, and tells no more.
        for pack in packers.into_iter().take(if name == "dgx-a100" { 1 } else { packers.len() }) {
            let snapshot = read(&pack(&tape)).unwrap();
            assert_eq!(snapshot.host, host, "{name}");
            assert_eq!(snapshot.source.kind, SourceKind::Sysfs);
            assert_eq!(snapshot.source.path.as_deref(), Some(Path::new(FORM)));
        }
    }
}

#[test]
fn parts_packed_one_by_one_and_put_together_read_as_one() {
    let folder = folder("two-socket-2gpu");
    let tape = tape(folder.path(), ".");
    let (first, second) = tape.split_at(tape.len() / 3);
    let host = read(&tape).unwrap().host;
    for pack in [gzip, bzip2, zstd, xz] {
        assert_eq!(read(&[pack(first), pack(second)].concat()).unwrap().host, host);
    }
}

#[test]
fn an_archive_of_what_sys_holds_is_a_capture_too() {
    let folder = folder("two-socket-2gpu");
    let host = read_root(folder.path(), &ReadOptions::default()).unwrap().host;
    let inner = read(&tape(&folder.path().join("sys"), "sysfs")).unwrap().host;
    // UUIDs are not of /sys but of the driver's files in /proc.
    let gpus = |host: &Host| host.gpus.iter().map(|gpu| (gpu.bdf, gpu.numa)).collect::<Vec<_>>();
    assert_eq!((gpus(&inner), &inner.hcas), (gpus(&host), &host.hcas));
}

/// Captured with 'gdrctl capture' on a virtual machine with two H200, whose NVSwitches it does not see. The answers are
/// typed from what nvidia-smi printed there: `topo -m` (NV18, NUMA affinity 0), `topo -p2p n` (OK), `nvlink -s` (18 links
/// each), `-q` (fabric state Completed, success; BAR1 262144 MiB; MIG disabled; 143771 MiB; PCIe generation 5, x16).
#[test]
fn two_h200_behind_switches_that_the_machine_does_not_see() {
    let case = format!("{}/../../tests/cases/sysfs/h200-x2-nvswitch-vm.tar.zst", env!("CARGO_MANIFEST_DIR"));
    let host = read_input(case.as_ref(), &ReadOptions::default()).unwrap().host;
    assert_eq!(host.nvlink_kind(), Some(NvLinkKind::Switched));
    assert_eq!(
        host.nvlinks.iter().map(|link| (link.gpu, link.end, link.links)).collect::<Vec<_>>(),
        [(GpuId(0), NvLinkEnd::Switch, 18), (GpuId(1), NvLinkEnd::Switch, 18),]
    );
    for (a, b) in [(GpuId(0), GpuId(1)), (GpuId(1), GpuId(0))] {
        assert_eq!(host.gpu_level(a, b).map(|level| level.to_string()).as_deref(), Some("NV18"));
        // 18 links of 25 GB/s; nvidia-smi prints the line rate, 26.562.
        assert_eq!(host.nvlink_gbps(a, b), Some(18.0 * 200.0));
    }
    for (gpu, bdf) in host.gpus.iter().zip(["0000:00:06.0", "0000:00:07.0"]) {
        assert_eq!(gpu.bdf.unwrap().to_string(), bdf);
        assert_eq!(gpu.product.as_ref().unwrap().value, "NVIDIA H200");
        assert_eq!(gpu.memory_bytes.as_ref().unwrap().value >> 20, 143_771);
        assert_eq!(gpu.bar1_bytes.as_ref().unwrap().value >> 20, 262_144);
        assert_eq!(gpu.fabric.as_ref().unwrap().value.state, FabricState::Completed);
        assert!(!gpu.mig.as_ref().unwrap().value.enabled);
        assert_eq!(host.numa_of(gpu.bdf.unwrap()).map(|numa| numa.0), Some(0));
        let link = host.function(gpu.bdf.unwrap()).unwrap().link.current.unwrap();
        assert_eq!((link.speed.to_string().as_str(), link.width.lanes()), ("32", 16));
    }
    assert_eq!(host.hcas, []);
    assert_eq!(host.warnings, Vec::<String>::new());
}

/// One entry under exactly this name, whatever the library thinks of it.
fn entry(kind: EntryType, name: &str, link: &str, content: &[u8]) -> Vec<u8> {
    let mut header = Header::new_gnu();
    header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
    header.as_gnu_mut().unwrap().linkname[..link.len()].copy_from_slice(link.as_bytes());
    header.set_entry_type(kind);
    header.set_size(content.len().try_into().unwrap());
    header.set_cksum();
    let padding = content.len().next_multiple_of(512) - content.len();
    [header.as_bytes().as_slice(), content, &vec![0; padding]].concat()
}

#[test]
fn names_that_leave_the_archive_and_devices_are_refused_by_name() {
    for (kind, name, reason) in [
        (EntryType::Regular, "sys/../../etc/passwd", "`..`"),
        (EntryType::Regular, "/sys/class/x", "root of the file system"),
        (EntryType::Symlink, "../sys", "`..`"),
        (EntryType::Char, "sys/class/mem", "device"),
        (EntryType::Block, "sys/class/sda", "device"),
        (EntryType::Fifo, "sys/class/pipe", "fifo"),
        (EntryType::GNUSparse, "sys/class/large", "sparse"),
    ] {
        let text = error(&entry(kind, name, "x", b""));
        assert!(text.contains(name) && text.contains(reason) && text.contains("refused"), "{text}");
    }
    let below_link = [entry(EntryType::Symlink, "sys/a", "/etc", b""), entry(EntryType::Regular, "sys/a/b", "", b"x")];
    let text = error(&below_link.concat());
    assert!(text.contains("sys/a/b") && text.contains("no folder"), "{text}");
}

#[test]
fn links_are_followed_inside_the_archive_alone() {
    let mut tape = entry(EntryType::Directory, "sys/class/", "", b"");
    let devices = "sys/bus/pci/devices";
    for (name, target) in
        [("0000:01:00.0", "/etc"), ("0000:02:00.0", "../../../../../etc"), ("0000:03:00.0", "0000:03:00.0")]
    {
        tape.extend(entry(EntryType::Symlink, &format!("{devices}/{name}"), target, b""));
    }
    tape.extend(entry(
        EntryType::Symlink,
        &format!("{devices}/0000:04:00.0"),
        "../../../devices/pci0000:00/0000:04:00.0",
        b"",
    ));
    tape.extend(entry(EntryType::Regular, "sys/devices/pci0000:00/0000:04:00.0/class", "", b"0x030200\n"));
    tape.extend([0; 1024]);
    let host = read(&tape).unwrap().host;
    assert_eq!(host.gpus.len(), 1);
    for name in ["0000:01:00.0", "0000:02:00.0"] {
        assert!(host.warnings.iter().any(|warning| warning.contains(name)), "{name}: {:?}", host.warnings);
    }
}

/// tar stores an attribute as the page that sysfs says it has, filled up with zeros.
#[test]
fn attributes_filled_up_to_a_page_are_read() {
    let folder = "sys/bus/pci/devices/0000:04:00.0";
    let page = |text: &str| {
        let mut page = text.as_bytes().to_vec();
        page.resize(4096, 0);
        page
    };
    let tape = [
        entry(EntryType::Regular, &format!("{folder}/class"), "", &page("0x030200\n")),
        entry(EntryType::Regular, &format!("{folder}/vendor"), "", &page("0x10de\n")),
        entry(EntryType::Link, &format!("{folder}/numa_node"), &format!("{folder}/class"), b""),
        entry(EntryType::Link, &format!("{folder}/device"), "sys/absent", b""),
        vec![0; 1024],
    ];
    let host = read(&tape.concat()).unwrap().host;
    assert_eq!(host.gpus.len(), 1);
    assert!(host.warnings.iter().any(|warning| warning.contains("not held")), "{:?}", host.warnings);
}

#[test]
fn long_names_are_whole_and_overlong_ones_refused() {
    let deep = format!("{}sys/class/infiniband/{}", "a/".repeat(4), "m".repeat(120));
    for tape in [
        [
            entry(EntryType::GNULongName, "././@LongLink", "", deep.as_bytes()),
            entry(EntryType::Directory, "sys", "", b""),
            vec![0; 1024],
        ],
        [
            entry(EntryType::XHeader, "x", "", pax("path", &deep).as_bytes()),
            entry(EntryType::Directory, "sys", "", b""),
            vec![0; 1024],
        ],
    ] {
        assert_eq!(read(&tape.concat()).unwrap().host.hcas[0].name, "m".repeat(120));
    }
    let overlong = entry(EntryType::GNULongName, "././@LongLink", "", &vec![b'a'; 1 << 20]);
    assert!(error(&overlong).contains("longer than any name"));
}

fn pax(key: &str, value: &str) -> String {
    // The length of a record counts its own digits.
    let rest = format!(" {key}={value}\n");
    let length =
        (1..9).map(|digits| rest.len() + digits).find(|length| length.to_string().len() + rest.len() == *length);
    format!("{}{rest}", length.unwrap())
}

/// Also where nothing but the end is missing, and what is left would read as a smaller host.
#[test]
fn a_cut_archive_is_an_error_that_names_it() {
    let folder = folder("two-socket-2gpu");
    let tape = tape(folder.path(), ".");
    let blocks = (1..tape.len() / 512 - 1).step_by(97).map(|blocks| 512 * blocks);
    let end = tape.len() - 1024;
    for part in blocks.chain([3, 40, 500, 513, end - 1, end, end + 1]) {
        error(tape.get(..part).unwrap());
    }
    assert!(error(&tape[..end]).contains("is cut or damaged"));
    assert_eq!(read(&tape[..end + 512]).unwrap(), read(&tape).unwrap(), "one block marks the end as well");
    for pack in [gzip, xz, zstd, bzip2] {
        let packed = pack(&tape);
        for part in [3, 40, 500, 513, packed.len() / 2, packed.len() - 20, packed.len() - 4, packed.len() - 1] {
            error(packed.get(..part).unwrap());
        }
        // Packed whole, but of a file that was cut.
        assert!(error(&pack(&tape[..end])).contains("is cut or damaged"));
    }
}

/// What packers put last is checked: checksums and sizes of gzip and zstd, the index of xz, the sum of bzip2.
#[test]
fn an_archive_with_another_checksum_is_an_error_that_says_so() {
    let folder = folder("two-socket-2gpu");
    let tape = tape(folder.path(), ".");
    for (pack, from_end) in [(gzip as fn(&[u8]) -> Vec<u8>, 8), (gzip, 4), (xz, 3), (xz, 20), (zstd, 2), (bzip2, 3)] {
        let mut packed = pack(&tape);
        let at = packed.len() - from_end;
        packed[at] ^= 0x10;
        let text = error(&packed);
        assert!(text.contains("is cut or damaged"), "{from_end} from the end: {text}");
    }
}

/// A tar file that never ends: one entry after the other.
struct Endless {
    number: u64,
    block: io::Cursor<Vec<u8>>,
}

impl Read for Endless {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.block.read(buffer)?;
        if count > 0 || buffer.is_empty() {
            return Ok(count);
        }
        self.number += 1;
        self.block = io::Cursor::new(entry(EntryType::Regular, &format!("sys/class/net/{}", self.number), "", b""));
        self.block.read(buffer)
    }
}

#[test]
fn endless_archives_end_in_an_error() {
    let endless = Endless { number: 0, block: io::Cursor::new(Vec::new()) };
    let text = read_stream(endless, Path::new(FORM), &ReadOptions::default()).unwrap_err().to_string();
    assert!(text.contains("more than 131072"), "{text}");
    let mut large = Header::new_gnu();
    large.set_path("sys/class/large").unwrap();
    large.set_size(4 << 30);
    large.set_cksum();
    let stream = large.as_bytes().chain(io::repeat(0));
    let text = read_stream(stream, Path::new(FORM), &ReadOptions::default()).unwrap_err().to_string();
    assert!(text.contains("more than 268435456 bytes"), "{text}");
}

#[test]
fn files_are_told_by_their_content() {
    let profile = profile::builtin_text("two-socket-2gpu").unwrap();
    let matrix = "\tGPU0\tNIC0\nGPU0\t X \tPIX\nNIC0\tPIX\t X \n";
    let rocm = "GPU[0]\t\t: (Topology) Numa Node: 1\n";
    let xml = "<system version=\"1\"><cpu numaid=\"0\"/></system>";
    for (text, kind) in [
        (profile.to_owned(), SourceKind::Profile),
        (format!("\n# of host a\n\n{profile}"), SourceKind::Profile),
        (matrix.to_owned(), SourceKind::TopoM),
        (format!("\u{feff}{matrix}"), SourceKind::TopoM),
        (rocm.to_owned(), SourceKind::RocmTopo),
        (xml.to_owned(), SourceKind::NcclXml),
        (format!("<!-- of host a -->\n{xml}"), SourceKind::NcclXml),
        (format!("host:1 NCCL INFO dump\n{xml}\nhost:1 done\n"), SourceKind::NcclXml),
    ] {
        let snapshot = read(text.as_bytes()).unwrap();
        assert_eq!(snapshot.source.kind, kind, "{text}");
        assert_eq!(snapshot, read_text(&text, Path::new(FORM), &ReadOptions::default()).unwrap());
    }
    let latin = [matrix.as_bytes(), &[0xe9, b'\n']].concat();
    assert_eq!(read(&latin).unwrap().source.kind, SourceKind::TopoM);
}

/// What is left out is told: a person who hands in two inputs in one file means both.
#[test]
fn of_two_inputs_in_one_text_one_counts_and_the_other_is_named() {
    let matrix = "\tGPU0\tNIC0\nGPU0\t X \tPIX\nNIC0\tPIX\t X \n";
    let xml = "<system version=\"1\"><cpu numaid=\"0\"/></system>\n";
    let rocm = "==== Numa Nodes ====\nGPU[0]\t\t: (Topology) Numa Node: 1\n";
    for (text, kind, told) in [
        (format!("{matrix}{xml}"), SourceKind::NcclXml, "a matrix of `nvidia-smi topo -m`"),
        (format!("{xml}{matrix}"), SourceKind::NcclXml, "a matrix of `nvidia-smi topo -m`"),
        (format!("{xml}{rocm}"), SourceKind::NcclXml, "tables of `rocm-smi --showtopo`"),
        (format!("node1:\n{xml}node2:\n{xml}"), SourceKind::NcclXml, "another NCCL topology"),
        (format!("{xml}{xml}"), SourceKind::NcclXml, "another NCCL topology"),
        (
            format!("```\n<system version=\"1\">\n<cpu numaid=\"0\">\n```\n{xml}"),
            SourceKind::NcclXml,
            "a part of another NCCL topology: left out, only the first whole NCCL topology counts",
        ),
        (
            format!("<system version=\"1\">\n<cpu numaid=\"0\">\n```\n{xml}"),
            SourceKind::NcclXml,
            "a part of another NCCL topology: left out, only the first whole NCCL topology counts",
        ),
        (
            format!("<graphs version=\"1\"><graph id=\"0\"/></graphs>\n<!-- <a> -->\n{xml}"),
            SourceKind::NcclXml,
            "a graph that NCCL",
        ),
        (format!("{xml}<graphs version=\"1\"/>\n"), SourceKind::NcclXml, "a graph that NCCL"),
        (format!("{rocm}{matrix}"), SourceKind::TopoM, "tables of `rocm-smi --showtopo`"),
    ] {
        let snapshot = read(text.as_bytes()).unwrap();
        assert_eq!(snapshot.source.kind, kind, "{text}");
        let is_told = |warning: &String| warning.starts_with("the text also holds ") && warning.contains(told);
        assert!(snapshot.host.warnings.iter().any(is_told), "{text}: {:?}", snapshot.host.warnings);
    }
    let one = read(format!("```\n{xml}```\n").as_bytes()).unwrap();
    assert_eq!(one.host.warnings, Vec::<String>::new());
}

#[test]
fn a_topology_that_was_cut_is_told() {
    let cut = "<system version=\"1\">\n  <cpu numaid=\"0\">\n    <pci busid=\"0000:01:00.0\"/>\n ...\n";
    for text in [cut.to_owned(), format!("```\n{cut}```\n")] {
        assert!(error(text.as_bytes()).contains("cut off before its end, `</system>`"), "{text}");
    }
}

/// As PowerShell writes what is piped into a file.
#[test]
fn text_of_windows_is_read_as_any_other() {
    let matrix = "\tGPU0\tNIC0\r\nGPU0\t X \tPIX\r\nNIC0\tPIX\t X \r\n\r\nNIC Legend:\r\n\r\n  NIC0: mlx5_0\r\n";
    let plain = read(matrix.as_bytes()).unwrap();
    let utf16: Vec<u8> = [0xff, 0xfe].into_iter().chain(matrix.encode_utf16().flat_map(u16::to_le_bytes)).collect();
    assert_eq!(read(&utf16).unwrap(), plain);
    assert_eq!(plain.host.hcas[0].name, "mlx5_0");
}

#[test]
fn what_others_print_is_refused_by_its_name_with_what_to_use() {
    for (text, name, instead) in [
        (
            "<?xml version=\"1.0\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n<topology version=\"2.0\"/>",
            "hwloc",
            "gdrctl capture",
        ),
        ("<?xml version=\"1.0\"?>\n<nvidia_smi_log/>", "nvidia-smi -q -x", "topo -m"),
        (" +-[0000:40]-+-00.0  AMD Root Complex\n", "lspci", "gdrctl capture"),
        ("CA 'mlx5_0'\n", "ibstat", "topo -m"),
        ("a:1:2 [5] NCCL INFO CPU/0-0 (1/2/-1)\n", "log of NCCL", "NCCL_TOPO_DUMP_FILE"),
        ("<graph id=\"0\" pattern=\"4\"/>\n", "graph", "NCCL_TOPO_DUMP_FILE"),
        ("== Weight between two GPUs ==\n", "showtopoweight", "--showtopo`"),
    ] {
        let text = error(text.as_bytes());
        assert!(text.contains(name) && text.contains(instead), "{text}");
    }
}

#[test]
fn what_is_known_of_no_input_says_what_was_tried() {
    let text = error(b"hello\n");
    for tried in ["gdrd-host-profile", "<system>", "nvidia-smi topo -m", "rocm-smi --showtopo", "archives"] {
        assert!(text.contains(tried), "{tried}: {text}");
    }
    assert!(error(&[0; 4096]).contains("neither text nor an archive"));
    assert!(error(b"<html></html>").contains("`html`"));
    assert!(error(&gzip(b"no tar")).contains("gzip archive"));
    assert!(error(&tape(tempfile::tempdir().unwrap().path(), "empty")).contains("no sysfs tree"));
    assert!(error(&vec![b'a'; (4 << 20) + 1]).contains("4194304 bytes"));
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).unwrap();
    let text = read_input(&fifo, &ReadOptions::default()).unwrap_err().to_string();
    assert!(text.contains("neither a folder nor a file"), "{text}");
}

/// A 4 GiB file of nothing costs no more than its first bytes.
#[test]
fn a_sparse_file_is_refused_unread() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(4 << 30).unwrap();
    let text = read_input(file.path(), &ReadOptions::default()).unwrap_err().to_string();
    assert!(text.contains("4194304 bytes"), "{text}");
    file.write_all(b"<system>").unwrap();
    let text = read_nccl_topology(file.path()).unwrap_err().to_string();
    assert!(text.contains("bytes"), "{text}");
}

#[test]
fn an_operators_topology_is_laid_over_what_is_read() {
    let folder = folder("two-socket-2gpu");
    let file = folder.path().join("topo.xml");
    let gpu = read_root(folder.path(), &ReadOptions::default()).unwrap().host.gpus[0].bdf.unwrap();
    std::fs::write(&file, format!("<system version=\"1\"><cpu numaid=\"5\"><pci busid=\"{gpu}\"/></cpu></system>"))
        .unwrap();
    let topology = read_nccl_topology(&file).unwrap();
    let options = ReadOptions { nccl_topology: Some(topology), ..ReadOptions::default() };
    let host = read_root(folder.path(), &options).unwrap().host;
    assert_eq!(host.gpus[0].numa.map(|numa| numa.0), Some(5));
    assert_eq!(host.function(gpu).unwrap().source, SourceKind::NcclXml);
    // A pasted matrix has no addresses that it could move.
    let matrix = "\tGPU0\tNIC0\nGPU0\t X \tPIX\nNIC0: mlx5_0\n";
    assert_eq!(read_text(matrix, Path::new(FORM), &options).unwrap().host.warnings, Vec::<String>::new());
}
