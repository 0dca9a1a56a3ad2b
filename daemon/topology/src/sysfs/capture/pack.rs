//! A capture as an archive: tar, plain or packed with zst or gz, the same bytes for the same tree.

use std::io;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use tar::{Builder, EntryType, Header};

use super::{Capture, Entry};

/// How an archive is packed, told by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packed {
    /// `.tar`
    Plain,
    /// `.tar.gz`, `.tgz`
    Gzip,
    /// `.tar.zst`
    Zstd,
}

/// Why a capture cannot be packed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackingError {
    /// The name tells no kind of archive.
    #[error("{name}: the name must end in .tar.zst, .tar.gz or .tar")]
    UnknownName {
        /// The name.
        name: String,
    },
    /// A path or link that tar cannot hold.
    #[error("cannot pack {path}")]
    Entry {
        /// The path in the tree.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl Packed {
    /// The kind that a file's name asks for.
    ///
    /// # Errors
    /// It asks for none of them.
    pub fn by_name(path: &Path) -> Result<Self, PackingError> {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let kinds = [(".tar.zst", Self::Zstd), (".tar.gz", Self::Gzip), (".tgz", Self::Gzip), (".tar", Self::Plain)];
        let kind = kinds.into_iter().find(|(end, _)| name.ends_with(end)).map(|(_, kind)| kind);
        kind.ok_or(PackingError::UnknownName { name })
    }
}

/// The archive's bytes.
///
/// # Errors
/// An entry that tar cannot hold.
pub fn pack(capture: &Capture, packed: Packed) -> Result<Vec<u8>, PackingError> {
    let plain = tar_of(capture)?;
    let failed = |source| PackingError::Entry { path: "the end of the archive".to_owned(), source };
    match packed {
        Packed::Plain => Ok(plain),
        Packed::Zstd => Ok(compress_to_vec(plain.as_slice(), CompressionLevel::Fastest)),
        Packed::Gzip => {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
            io::Write::write_all(&mut encoder, &plain).map_err(failed)?;
            encoder.finish().map_err(failed)
        }
    }
}

fn tar_of(capture: &Capture) -> Result<Vec<u8>, PackingError> {
    let mut builder = Builder::new(Vec::new());
    for (path, entry) in &capture.entries {
        let added = match entry {
            Entry::Folder => builder.append_data(&mut header(EntryType::Directory, 0o755, 0), path, io::empty()),
            Entry::File(bytes) => {
                let len = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
                builder.append_data(&mut header(EntryType::Regular, 0o644, len), path, bytes.as_slice())
            }
            Entry::Link(target) => {
                let mut header = header(EntryType::Symlink, 0o777, 0);
                builder.append_link(&mut header, path, relative(path, target))
            }
        };
        added.map_err(|source| PackingError::Entry { path: path.clone(), source })?;
    }
    builder.into_inner().map_err(|source| PackingError::Entry { path: "the end of the archive".to_owned(), source })
}

/// Times and owners say when and by whom a capture was made: they stay zero.
fn header(kind: EntryType, mode: u32, len: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(len);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}

/// A path inside the tree as a link at `at` has it.
fn relative(at: &str, target: &str) -> String {
    let folder = at.rsplit_once('/').map_or("", |(folder, _)| folder);
    let shared = folder.split('/').zip(target.split('/')).take_while(|(a, b)| a == b).count();
    let ups = folder.split('/').filter(|part| !part.is_empty()).count().saturating_sub(shared);
    let down = target.split('/').skip(shared);
    std::iter::repeat_n("..", ups).chain(down).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_relative_to_their_folder() {
        assert_eq!(relative("sys/bus/pci/devices/x", "sys/devices/pci0/x"), "../../../devices/pci0/x");
        assert_eq!(relative("sys/devices/a/physfn", "sys/devices/b"), "../b");
        assert_eq!(relative("a", "b/c"), "b/c");
    }

    #[test]
    fn the_name_of_the_file_tells_the_packing() {
        for (name, packed) in [("a.tar.zst", Packed::Zstd), ("x/a.tar.gz", Packed::Gzip), ("a.tar", Packed::Plain)] {
            assert_eq!(Packed::by_name(Path::new(name)).unwrap(), packed);
        }
        assert!(Packed::by_name(Path::new("a.zip")).unwrap_err().to_string().contains("a.zip"));
    }
}
