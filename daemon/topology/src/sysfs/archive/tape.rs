//! The entries of a tar file, as they become files, folders and links in memory.

use std::io::{self, Read};

use tar::{Archive, Entry, EntryType, PaxExtensions};

use crate::sysfs::memory::{BadEntry, Memory};
use crate::sysfs::tree::{MAX_FILE_BYTES, MAX_TABLE_BYTES};

/// Longest name or link text: PATH_MAX of Linux.
const MAX_NAME_BYTES: usize = 4096;
/// Most bytes of an extended header.
const MAX_EXTENSION_BYTES: usize = 65_536;
/// Most warnings kept.
const MAX_WARNINGS: usize = 100;
/// Folders above the one that holds `sys/`, and that folder itself, where what is held can begin.
const MAX_ABOVE: usize = 8;

/// Why an archive is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(super) enum BadArchive {
    #[error("cannot be unpacked")]
    TooLarge(#[source] io::Error),
    #[error("is cut or damaged")]
    Damaged(#[source] io::Error),
    #[error("is cut or damaged: it stops before the zero blocks that end a tar file")]
    NoEnd,
    #[error("entry `{name}` {why}, refused")]
    Entry { name: String, why: &'static str },
    #[error("entry `{name}`")]
    Tree { name: String, source: BadEntry },
}

impl From<io::Error> for BadArchive {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::FileTooLarge | io::ErrorKind::OutOfMemory => Self::TooLarge(error),
            _ => Self::Damaged(error),
        }
    }
}

/// Names that the extended headers before an entry give it.
#[derive(Default)]
struct LongNames {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
}

/// Takes in a tar file, to its end. The second part are warnings.
pub(super) fn read(unpacked: impl Read) -> Result<(Memory, Vec<String>), BadArchive> {
    let mut reader = Reader { memory: Memory::new(), warnings: Vec::new(), long: LongNames::default() };
    let mut tape = Tape { inner: unpacked, has_ended: false };
    // Raw, since otherwise the library reads extended headers whole, however long they say they are.
    for entry in Archive::new(&mut tape).entries()?.raw(true) {
        reader.entry(&mut entry?)?;
    }
    // The library takes the end of the stream for the end of the archive, which two zero blocks mark (tar(5)).
    // It reads no further than the first of them, so it has seen the stream end only where there was none.
    if tape.has_ended {
        return Err(BadArchive::NoEnd);
    }
    // What packers put last, checksums above all, is checked when all is read.
    io::copy(&mut tape, &mut io::sink())?;
    Ok((reader.memory, reader.warnings))
}

/// A stream that knows whether it has told its reader that it is at its end.
struct Tape<R> {
    inner: R,
    has_ended: bool,
}

impl<R: Read> Read for Tape<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.has_ended |= count == 0 && !buffer.is_empty();
        Ok(count)
    }
}

struct Reader {
    memory: Memory,
    warnings: Vec<String>,
    long: LongNames,
}

/// What is shown of a name that is refused.
fn shown(name: &[u8]) -> String {
    String::from_utf8_lossy(name).chars().take(200).collect()
}

impl Reader {
    fn warn(&mut self, name: &[u8], why: &str) {
        if self.warnings.len() < MAX_WARNINGS {
            self.warnings.push(format!("{}: {why}", shown(name)));
        }
    }

    fn entry<R: Read>(&mut self, entry: &mut Entry<'_, R>) -> Result<(), BadArchive> {
        let kind = entry.header().entry_type();
        match kind {
            EntryType::GNULongName => self.long.path = Some(extension(entry, MAX_NAME_BYTES)?),
            EntryType::GNULongLink => self.long.link = Some(extension(entry, MAX_NAME_BYTES)?),
            EntryType::XHeader => self.pax(&extension(entry, MAX_EXTENSION_BYTES)?),
            EntryType::XGlobalHeader => {}
            _ => {
                let long = std::mem::take(&mut self.long);
                let name = long.path.unwrap_or_else(|| entry.path_bytes().into_owned());
                let link = long.link.or_else(|| entry.link_name_bytes().map(std::borrow::Cow::into_owned));
                self.item(entry, kind, &name, &link.unwrap_or_default())?;
            }
        }
        Ok(())
    }

    /// `path` and `linkpath` of an extended header (pax, POSIX.1-2001).
    fn pax(&mut self, bytes: &[u8]) {
        for record in PaxExtensions::new(bytes).flatten() {
            match record.key_bytes() {
                b"path" => self.long.path = Some(record.value_bytes().to_vec()),
                b"linkpath" => self.long.link = Some(record.value_bytes().to_vec()),
                _ => {}
            }
        }
    }

    fn item<R: Read>(
        &mut self,
        entry: &mut Entry<'_, R>,
        kind: EntryType,
        name: &[u8],
        link: &[u8],
    ) -> Result<(), BadArchive> {
        let refused = |why| BadArchive::Entry { name: shown(name), why };
        let Ok(text) = std::str::from_utf8(name) else {
            self.warn(name, "a name that is no text, left out");
            return Ok(());
        };
        if text.len() > MAX_NAME_BYTES || link.len() > MAX_NAME_BYTES {
            return Err(refused("has a name of more than 4096 bytes"));
        }
        let path = parts(text).map_err(refused)?;
        if path.is_empty() || !belongs(&path) {
            return Ok(());
        }
        let tree = |source| BadArchive::Tree { name: shown(name), source };
        match kind {
            EntryType::Directory => self.memory.add_folder(&path).map_err(tree),
            EntryType::Regular | EntryType::Continuous => {
                let bytes = content(entry, &path)?;
                self.memory.add_file(&path, &bytes).map_err(tree)
            }
            EntryType::Symlink => match std::str::from_utf8(link) {
                Ok(target) => self.memory.add_link(&path, target).map_err(tree),
                Err(_) => {
                    self.warn(name, "links to a name that is no text, left out");
                    Ok(())
                }
            },
            EntryType::Link => self.hard_link(name, &path, link),
            EntryType::Char | EntryType::Block => Err(refused("is a device")),
            EntryType::Fifo => Err(refused("is a fifo")),
            EntryType::GNUSparse => Err(refused("is a sparse file, which sysfs has none of")),
            _ => {
                self.warn(name, "an entry of unknown kind, left out");
                Ok(())
            }
        }
    }

    /// A second name of a file that came before.
    fn hard_link(&mut self, name: &[u8], path: &[&str], link: &[u8]) -> Result<(), BadArchive> {
        let refused = |why| BadArchive::Entry { name: shown(name), why };
        let target = std::str::from_utf8(link).ok().map(parts).transpose().map_err(refused)?;
        let Some(bytes) = target.and_then(|target| self.memory.file(&target)).map(<[u8]>::to_vec) else {
            self.warn(name, "links to a file that is not held, left out");
            return Ok(());
        };
        self.memory.add_file(path, &bytes).map_err(|source| BadArchive::Tree { name: shown(name), source })
    }
}

/// The parts of a name inside the archive.
fn parts(text: &str) -> Result<Vec<&str>, &'static str> {
    if text.starts_with('/') {
        return Err("is named from the root of the file system");
    }
    let parts: Vec<&str> = text.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if parts.contains(&"..") { Err("leaves the archive (`..`)") } else { Ok(parts) }
}

/// Whether a name can be part of a tree that is read here.
fn belongs(path: &[&str]) -> bool {
    path.iter().take(MAX_ABOVE).any(|part| matches!(*part, "sys" | "proc" | "bus" | "class" | "devices" | "module"))
}

fn extension<R: Read>(entry: &mut Entry<'_, R>, limit: usize) -> Result<Vec<u8>, BadArchive> {
    let mut bytes = Vec::new();
    let most = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    entry.take(most).read_to_end(&mut bytes)?;
    if bytes.len() > limit {
        let name = "extended header".to_owned();
        return Err(BadArchive::Entry { name, why: "is longer than any name" });
    }
    while bytes.last() == Some(&0) {
        bytes.pop();
    }
    Ok(bytes)
}

/// As much of a file as is ever read of it, and one byte more, which shows that there was more.
fn content<R: Read>(entry: &mut Entry<'_, R>, path: &[&str]) -> Result<Vec<u8>, BadArchive> {
    let is_table = path.contains(&"proc");
    let limit = if is_table { MAX_TABLE_BYTES } else { MAX_FILE_BYTES + 1 };
    let mut bytes = Vec::new();
    entry.take(u64::try_from(limit).unwrap_or(u64::MAX)).read_to_end(&mut bytes)?;
    if matches!(path.last(), Some(&("config" | "vpd"))) {
        // Of configuration space and VPD, which are no text, the zeros count.
        return Ok(bytes);
    }
    // sysfs says that each attribute has a page, so tar fills up what it read with zeros.
    let text_bytes = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    if !bytes.iter().take(text_bytes).any(|byte| *byte == 0) {
        bytes.truncate(text_bytes);
    }
    Ok(bytes)
}
