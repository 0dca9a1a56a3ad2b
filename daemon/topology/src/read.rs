//! Ways to get a snapshot: this machine, a captured tree, a file of any known kind.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::assemble::{ReadOptions, assemble};
use crate::error::TopologyError;
use crate::model::{RawHost, Snapshot};
use crate::nccl_xml::{MAX_XML_BYTES, NcclTopology};
use crate::source::{Source, SourceKind};
use crate::sysfs::{self, archive};
use crate::{foreign, pasted, profile, rocm_topo, topo_m};

/// Reads this machine from its `/sys`, as generation 1. Takes milliseconds; sets [`Snapshot::generation`]
/// for the caller to raise.
///
/// # Errors
/// `/sys` is absent or cannot be listed.
pub fn read_live(options: &ReadOptions) -> Result<Snapshot, TopologyError> {
    let source = Source { kind: SourceKind::Live, path: None };
    Ok(Snapshot { generation: 1, source, host: assemble(sysfs::read_live(&options.gpu_ids)?, options) })
}

/// Reads a captured sysfs tree below a folder that holds `sys/` or is it.
///
/// # Errors
/// The folder cannot be read or holds no sysfs tree.
pub fn read_root(root: &Path, options: &ReadOptions) -> Result<Snapshot, TopologyError> {
    let source = Source { kind: SourceKind::Sysfs, path: Some(root.to_owned()) };
    let raw = sysfs::read(root, SourceKind::Sysfs, &options.gpu_ids)?;
    Ok(Snapshot { generation: 1, source, host: assemble(raw, options) })
}

/// Reads an input by what it is. A folder is a captured sysfs tree; a file is told by its content:
/// - an archive of such a tree: tar, as it is or packed with xz, zstd, gzip or bzip2;
/// - NCCL topology XML;
/// - a host profile;
/// - text with a matrix of `nvidia-smi topo -m`, or with what `rocm-smi --showtopo` or `amd-smi topology` prints.
///
/// # Errors
/// The input cannot be read, is larger than any of its kind, is broken, or is of no known kind.
pub fn read_input(path: &Path, options: &ReadOptions) -> Result<Snapshot, TopologyError> {
    let failed = |source| TopologyError::Read { path: path.to_owned(), source };
    let kind = std::fs::metadata(path).map_err(failed)?;
    if kind.is_dir() {
        return read_root(path, options);
    }
    if !kind.is_file() {
        // A fifo would wait for a writer that never comes.
        return Err(TopologyError::UnknownInput { path: path.to_owned(), reason: "neither a folder nor a file" });
    }
    read_stream(File::open(path).map_err(failed)?, path, options)
}

/// Reads an input by its content, as [`read_input`] does of files, from any stream (standard input, bytes
/// in memory). `path` is what messages and the snapshot call it.
///
/// # Errors
/// As [`read_input`].
// Its decoders need 50 KiB of stack, each page of which is a page fault: a folder is read without.
#[inline(never)]
pub fn read_stream(mut stream: impl Read, path: &Path, options: &ReadOptions) -> Result<Snapshot, TopologyError> {
    let head = take(&mut stream, archive::HEAD_BYTES, path)?;
    if let Some(packing) = archive::Packing::of(&head) {
        let raw = archive::read(packing, &head, stream, path, &options.gpu_ids)?;
        return Ok(snapshot(raw, path, options));
    }
    let mut bytes = head;
    bytes.append(&mut take(&mut stream, MAX_TEXT_BYTES, path)?);
    if bytes.len() > MAX_TEXT_BYTES {
        return Err(TopologyError::TooLarge { path: path.to_owned(), limit: MAX_TEXT_BYTES, unit: "bytes" });
    }
    if let Some(text) = foreign::utf16(&bytes) {
        return read_text(&text, path, options);
    }
    if bytes.contains(&0) {
        return Err(TopologyError::UnknownInput { path: path.to_owned(), reason: NOT_TEXT });
    }
    // A paste may hold a character of another encoding; what counts is plain ASCII.
    read_text(&String::from_utf8_lossy(&bytes), path, options)
}

/// Reads a text by what it is.
///
/// # Errors
/// As [`read_input`].
pub fn read_text(text: &str, path: &Path, options: &ReadOptions) -> Result<Snapshot, TopologyError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let bad = |what, message| TopologyError::BadInput { path: Some(path.to_owned()), what, message };
    let is_comment = |line: &&str| line.trim().is_empty() || line.trim_start().starts_with('#');
    let first = text.lines().find(|line| !is_comment(line)).unwrap_or_default().trim_start();
    if first.starts_with(profile::MAGIC) {
        return profile::snapshot(text, Some(path.to_owned()), options);
    }
    let unknown = |reason| TopologyError::UnknownInput { path: path.to_owned(), reason };
    if text.trim().is_empty() {
        return Err(unknown("is empty"));
    }
    let xml = Xml::whole(text, first);
    if let Some(reason) = foreign::name(text).filter(|_| first.starts_with('<') && xml.is_none()) {
        return Err(unknown(reason));
    }
    let mut raw = if let Some(xml) = xml.or_else(|| Xml::without_system(text, first)) {
        let topology = NcclTopology::parse(xml.body).map_err(|error| bad("NCCL topology XML", error.to_string()))?;
        let mut raw = topology.host();
        let others = [xml.before, xml.after].into_iter().filter_map(other_input);
        raw.warnings.extend(
            others.map(|other| {
                format!("the text also holds {other}: left out, only the first whole NCCL topology counts")
            }),
        );
        raw
    } else if topo_m::is_topo_m(text) {
        topo_m::parse(text).map_err(|error| bad("nvidia-smi topo -m", error.to_string()))?
    } else if let Some(text) = pasted::unescaped(text).filter(|text| topo_m::is_topo_m(text)) {
        topo_m::parse(&text).map_err(|error| bad("nvidia-smi topo -m", error.to_string()))?
    } else if text.contains(XML_BEGIN) {
        return Err(bad("NCCL topology XML", format!("is cut off before its end, `{XML_END}`; use the whole file")));
    } else if rocm_topo::is_rocm_topo(text) {
        rocm_topo::parse(text).map_err(|error| bad("rocm-smi --showtopo", error.to_string()))?
    } else if topo_m::is_p2p_alone(text) {
        return Err(unknown(topo_m::P2P));
    } else {
        return Err(unknown(foreign::name(text).unwrap_or(NO_KNOWN_TEXT)));
    };
    if raw.source == SourceKind::TopoM && rocm_topo::is_rocm_topo(text) {
        raw.warnings.push("the text also holds tables of `rocm-smi --showtopo`: left out".to_owned());
    }
    Ok(snapshot(raw, path, options))
}

/// Reads NCCL topology XML to lay over other inputs (`ReadOptions::nccl_topology`).
///
/// # Errors
/// The file cannot be read, is larger than any such text, or is none.
pub fn read_nccl_topology(path: &Path) -> Result<NcclTopology, TopologyError> {
    let failed = |source| TopologyError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(TopologyError::UnknownInput { path: path.to_owned(), reason: "no file" });
    }
    let bytes = take(file, MAX_XML_BYTES, path)?;
    let text = String::from_utf8_lossy(&bytes);
    NcclTopology::parse(text.strip_prefix('\u{feff}').unwrap_or(&text)).map_err(|error| TopologyError::BadInput {
        path: Some(path.to_owned()),
        what: "NCCL topology XML",
        message: error.to_string(),
    })
}

/// Largest text of any kind, in bytes.
const MAX_TEXT_BYTES: usize =
    if MAX_XML_BYTES > profile::MAX_PROFILE_BYTES { MAX_XML_BYTES } else { profile::MAX_PROFILE_BYTES };

const NOT_TEXT: &str = "neither text nor an archive (tar, plain or packed with xz, zstd, gzip or bzip2)";
const NO_KNOWN_TEXT: &str = "no input that is known here: tried a host profile (its first line is `gdrd-host-profile 1`), \
                             NCCL topology XML (`<system>`), the matrix of `nvidia-smi topo -m` (a row such as `GPU0  X  PIX`) \
                             and the output of `rocm-smi --showtopo`; archives and folders must hold sys/";

const XML_BEGIN: &str = "<system";
const XML_END: &str = "</system>";

/// The NCCL topology of a text, with the lines around it.
struct Xml<'a> {
    before: &'a str,
    body: &'a str,
    after: &'a str,
}

impl<'a> Xml<'a> {
    /// All of a text that is XML without a `system` element, for its parser to say what is wrong with it.
    fn without_system(text: &'a str, first: &str) -> Option<Self> {
        let is_matrix = || topo_m::is_topo_m(text) || pasted::unescaped(text).is_some();
        let is_other = !first.starts_with('<') || text.contains(XML_BEGIN) || is_matrix();
        (!is_other).then_some(Self { before: "", body: text, after: "" })
    }

    /// The first whole `system` element and what an XML text has before it that is no element.
    fn whole(text: &'a str, first: &str) -> Option<Self> {
        let is_begin = |at: &usize| {
            text.get(*at..).is_some_and(|rest| rest.starts_with("<system ") || rest.starts_with("<system>"))
        };
        let begins: Vec<usize> = text.match_indices(XML_BEGIN).map(|(at, _)| at).filter(is_begin).collect();
        let ends = begins.iter().skip(1).copied().chain([text.len()]);
        let whole = begins.iter().copied().zip(ends).find_map(|(begin, next)| {
            let end = text.get(begin..next)?.rfind(XML_END)?;
            Some((begin, begin.checked_add(end)?.checked_add(XML_END.len())?))
        });
        let (system, end) = whole?;
        let is_first = begins.first() == Some(&system);
        let begin = if first.starts_with('<') && is_first && !has_element(text.get(..system)?) { 0 } else { system };
        Some(Self { before: text.get(..begin)?, body: text.get(begin..end)?, after: text.get(end..)? })
    }
}

/// Whether an element begins in a text, outside of comments.
fn has_element(text: &str) -> bool {
    let mut rest = text;
    while let Some((_, after)) = rest.split_once('<') {
        rest = match after.strip_prefix("!--") {
            Some(comment) => comment.split_once("-->").map_or("", |(_, after)| after),
            None if after.starts_with(|c: char| c.is_ascii_alphabetic()) => return true,
            None => after,
        };
    }
    false
}

/// What else a text holds that could be read, or be meant.
fn other_input(text: &str) -> Option<&'static str> {
    if text.trim().is_empty() {
        None
    } else if text.contains("<graphs") || text.contains("<graph ") {
        Some("a graph that NCCL chose")
    } else if topo_m::is_topo_m(text) {
        Some("a matrix of `nvidia-smi topo -m`")
    } else if rocm_topo::is_rocm_topo(text) {
        Some("tables of `rocm-smi --showtopo`")
    } else if text.contains(XML_BEGIN) {
        Some(if text.contains(XML_END) { "another NCCL topology" } else { "a part of another NCCL topology" })
    } else {
        None
    }
}

fn snapshot(raw: RawHost, path: &Path, options: &ReadOptions) -> Snapshot {
    let source = Source { kind: raw.source, path: Some(path.to_owned()) };
    Snapshot { generation: 1, source, host: assemble(raw, options) }
}

/// At most `limit` bytes and one more, which shows that there was more.
fn take(stream: impl Read, limit: usize, path: &Path) -> Result<Vec<u8>, TopologyError> {
    let mut bytes = Vec::new();
    let most = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    let read = stream.take(most).read_to_end(&mut bytes);
    read.map_err(|source| TopologyError::Read { path: path.to_owned(), source })?;
    Ok(bytes)
}
