//! Texts that people hand in and that no reader takes: what they are, and what to hand in instead. And the encodings
//! in which a text may come.

/// Most bytes looked at to tell a text.
const HEAD_BYTES: usize = 4096;
/// Most lines looked at to find one of lspci: prompts and prose come before.
const MAX_LSPCI_LINES: usize = 16;

const HWLOC: &str = "an XML export of hwloc (lstopo), which has no reader here: it lacks link speeds, NIC ports and much of the tree; \
                     use `gdrctl capture -o host.tar.zst`, or the archive of hwloc-gather-topology";
const LSTOPO: &str = "text of lstopo, which has no reader here; use `gdrctl capture -o host.tar.zst`, or the archive of \
                      hwloc-gather-topology";
const SMI_LOG: &str = "a log of `nvidia-smi -q -x`, which does not tell what lies between devices; use the text of \
                       `nvidia-smi topo -m`, or `gdrctl capture -o host.tar.zst`";
const SMI_TABLE: &str = "the table of `nvidia-smi`, which does not tell what lies between devices; use the text of \
                         `nvidia-smi topo -m`";
const GRAPHS: &str = "a graph that NCCL chose (NCCL_GRAPH_DUMP_FILE), not the topology it chose on; use what \
                      NCCL_TOPO_DUMP_FILE writes";
const XML_PART: &str = "a part of an NCCL topology, without the `<system>` element that holds all; use the whole file that \
                        NCCL_TOPO_DUMP_FILE wrote";
const NCCL_LOG: &str = "a log of NCCL, which has no reader here; use what NCCL_TOPO_DUMP_FILE writes, or the text of \
                        `nvidia-smi topo -m`";
const SMI_JSON: &str =
    "JSON of rocm-smi or amd-smi, which has no reader here; use the text that they print without `--json`";
const WEIGHTS: &str = "weights between GPUs (`rocm-smi --showtopoweight`), which do not tell by what they are joined; use the text \
                       of `rocm-smi --showtopo`";
const LSPCI: &str = "text of lspci, which has no reader here: it names no NUMA nodes and no RDMA devices; use \
                     `gdrctl capture -o host.tar.zst`, or a copy of /sys";
const VERBS: &str = "a list of RDMA devices (ibstat, ibv_devinfo), which does not tell where GPUs are; use \
                     `gdrctl capture -o host.tar.zst`, or the text of `nvidia-smi topo -m`";
const AMD_SMI: &str = "tables of `amd-smi topology` without those of hops and link types; use the whole text, or \
                       `gdrctl capture -o host.tar.zst`";
const ANSWER: &str = "an answer of gdrctl, not an input; `gdrctl export profile` writes a host that can be read again";

/// What a text is that no reader takes; `None` if that is not known either.
pub(crate) fn name(text: &str) -> Option<&'static str> {
    let head = text.get(..floor(text, HEAD_BYTES)).unwrap_or(text);
    let has = |part: &str| head.contains(part);
    let capitals = head.to_ascii_uppercase();
    let mut lines = head.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let first = lines.next().unwrap_or_default();
    let found = [
        (has("<nvidia_smi_log"), SMI_LOG),
        (has("<topology") || has("hwloc.dtd") || has("hwloc2.dtd"), HWLOC),
        (has("<graphs") || has("<graph id="), GRAPHS),
        (has("<pci busid=") && !has("<system"), XML_PART),
        (first.starts_with("Machine (") || first.starts_with("Machine L#") || first.starts_with("Package L#"), LSTOPO),
        (["ACCESS TABLE:", "WEIGHT TABLE:", "NUMA BW TABLE:"].iter().any(|title| capitals.contains(title)), AMD_SMI),
        (is_lspci(first) || lines.take(MAX_LSPCI_LINES).any(is_lspci), LSPCI),
        (first.starts_with("CA '") || first.starts_with("hca_id:"), VERBS),
        (has("NVIDIA-SMI") && has("Driver Version"), SMI_TABLE),
        (has("NCCL INFO"), NCCL_LOG),
        (is_json(first) && (has("(Topology) ") || has("\"link_type\"")), SMI_JSON),
        (has("Weight between two GPUs"), WEIGHTS),
        (first.starts_with('{') && has("\"schema\"") && has("\"gdrd."), ANSWER),
    ];
    found.into_iter().find(|(is_it, _)| *is_it).map(|(_, name)| name)
}

fn is_json(line: &str) -> bool {
    line.starts_with(['{', '['])
}

/// `-[0000:00]-+-`, `+-[0000:40]-`, `+-08.0-[5c-5f]----00.0`, `00:00.0 Host bridge: …` or `0000:00:00.0 …`.
fn is_lspci(line: &str) -> bool {
    let tree = line.trim_start_matches(['-', '+', '|', ' ', '\\']);
    if tree.starts_with('[') && tree.get(1..).is_some_and(|rest| rest.split(['-', ']']).next().is_some_and(is_bus)) {
        return true;
    }
    if tree.len() < line.len() && tree.split_once("-[").is_some_and(|(slot, _)| is_slot(slot)) {
        return true;
    }
    let Some((address, rest)) = line.split_once(' ') else { return false };
    let full = if address.matches(':').count() == 1 { format!("0000:{address}") } else { address.to_owned() };
    full.parse::<crate::bdf::Bdf>().is_ok() && rest.contains(':')
}

/// `08.0`, device and function in two and one hexadecimal digits.
fn is_slot(text: &str) -> bool {
    text.len() == 4
        && text.split_once('.').is_some_and(|(device, function)| {
            [device, function].iter().all(|part| part.bytes().all(|byte| byte.is_ascii_hexdigit()))
        })
}

fn is_bus(text: &str) -> bool {
    text.len() >= 7 && text.contains(':') && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b':')
}

/// The greatest boundary of characters that is not above `most`.
fn floor(text: &str, most: usize) -> usize {
    (0..=most.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

/// A text in UTF-16, as shells of Windows write it: with its mark, or by every second byte of its beginning being zero.
pub(crate) fn utf16(bytes: &[u8]) -> Option<String> {
    let zeros = |first: usize| {
        let head: Vec<&u8> = bytes.iter().skip(first).step_by(2).take(32).collect();
        head.len() >= 8 && head.iter().all(|byte| **byte == 0)
    };
    let (body, is_little) = match bytes {
        [0xff, 0xfe, body @ ..] => (body, true),
        [0xfe, 0xff, body @ ..] => (body, false),
        _ if zeros(1) && !zeros(0) => (bytes, true),
        _ if zeros(0) && !zeros(1) => (bytes, false),
        _ => return None,
    };
    let unit = |pair: &[u8]| {
        let pair: [u8; 2] = pair.try_into().ok()?;
        Some(if is_little { u16::from_le_bytes(pair) } else { u16::from_be_bytes(pair) })
    };
    let units = body.chunks(2).filter_map(unit);
    Some(char::decode_utf16(units).map(|unit| unit.unwrap_or(char::REPLACEMENT_CHARACTER)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_print_is_named_with_what_to_use_instead() {
        for (text, part) in [
            ("<?xml version=\"1.0\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n<topology version=\"2.0\">", "hwloc"),
            ("<topology>\n", "hwloc-gather-topology"),
            ("Machine (1007GB total)\n  Package L#0", "lstopo"),
            ("# of host a\nPackage L#0\n  NUMANode P#0\n    HostBridge", "lstopo"),
            ("<?xml version=\"1.0\" ?>\n<nvidia_smi_log>", "topo -m"),
            ("Sun Nov 29 12:00:00 2026\n| NVIDIA-SMI 570.1   Driver Version: 570.1 |", "topo -m"),
            ("<graphs version=\"1\">", "NCCL_TOPO_DUMP_FILE"),
            ("00:00.0 Host bridge: Intel Corporation\n", "lspci"),
            ("0000:17:00.0 Ethernet controller: x\n", "lspci"),
            (" +-[0000:40]-+-00.0  AMD\n", "lspci"),
            ("-[0000:00]-+-00.0  Intel\n", "lspci"),
            ("root@a:~# lspci -tv\n | |  +-03.4  x\n |  +-08.0-[5c-5f]----00.0  NVIDIA\n", "lspci"),
            ("  <pci busid=\"0000:b8:00.0\">\n", "whole file"),
            ("{\"system\": {\"(Topology) Hops between DRM devices 0 and 1\": \"1\"}}", "--json"),
            ("[\n  {\n    \"gpu\": 0,\n    \"links\": [{\"link_type\": \"SELF\"}]", "--json"),
            ("<graph id=\"0\">", "NCCL_TOPO_DUMP_FILE"),
            ("a:1:2 [5] NCCL INFO CPU/0-0 (1/2/-1)\n", "NCCL_TOPO_DUMP_FILE"),
            ("==== Weight between two GPUs ====\n", "--showtopo`"),
            ("-+-[10000:e0-e1]---06.0 x\n", "lspci"),
            ("CA 'mlx5_0'\n\tCA type: MT4129", "ibstat"),
            ("hca_id:\tmlx5_0\n", "ibv_devinfo"),
            ("ACCESS TABLE:\n             0000:05:00.0 \n0000:05:00.0 ENABLED\n", "whole text"),
            ("WEIGHT TABLE:\n             0000:05:00.0 \n0000:05:00.0 0\n", "whole text"),
            ("access table:\n             0000:05:00.0 \n0000:05:00.0 enabled: 1\n", "whole text"),
            ("{\n  \"schema\": \"gdrd.plan/v1\",", "gdrctl export profile"),
        ] {
            assert!(name(text).is_some_and(|name| name.contains(part)), "{text}: {:?}", name(text));
        }
        for text in ["", "hello", "GPU0 X PIX", "[INFO] a", "12:30 noon: lunch", "{}", "é".repeat(9000).as_str()] {
            assert_eq!(name(text), None, "{text}");
        }
    }

    #[test]
    fn utf16_is_read_with_and_without_its_mark() {
        let text = "\tGPU0\tNIC0\r\nGPU0\t X \tPIX\r\n";
        let little: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
        let big: Vec<u8> = text.encode_utf16().flat_map(u16::to_be_bytes).collect();
        for bytes in [[&[0xff, 0xfe][..], &little].concat(), [&[0xfe, 0xff][..], &big].concat(), little, big] {
            assert_eq!(utf16(&bytes).as_deref(), Some(text));
        }
        assert_eq!(utf16(&[0; 64]), None);
        assert_eq!(utf16(text.as_bytes()), None);
        assert_eq!(utf16(&[0xff, 0xfe, 0x41]).as_deref(), Some(""), "half a unit at the end");
    }
}
