//! What an archive is packed with, told by its first bytes, and unpacking within bounds.

use std::io::{self, BufRead, BufReader, Read};

use bzip2::bufread::MultiBzDecoder;
use flate2::bufread::MultiGzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::{FrameDecoder, StreamingDecoder};

/// Bytes that tell the kind of a file: a tar header says what it is near the end of its 512.
pub(crate) const HEAD_BYTES: usize = 512;

/// Most bytes that an archive may unpack to. All attributes of a large host, as whole pages, have less.
const MAX_UNPACKED_BYTES: u64 = 256 << 20;
/// Most bytes where the packer's window is large, since the window fills with what is unpacked.
const MAX_UNPACKED_BYTES_LARGE_WINDOW: u64 = 24 << 20;
/// Largest window that does not count as large: more than the usual settings of xz and zstd use.
const USUAL_WINDOW_BYTES: u64 = 16 << 20;
/// Largest window at all, in KiB: what `xz -9` uses, and some more for the decoder's tables.
const MAX_XZ_KIB: u32 = 66 << 10;

/// How an archive is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    /// A tar file as it is.
    Plain,
    /// gzip.
    Gzip,
    /// xz.
    Xz,
    /// Zstandard.
    Zstd,
    /// bzip2.
    Bzip2,
}

impl Packing {
    /// The packing by the first [`HEAD_BYTES`] of a file; `None` if it is no archive.
    pub(crate) fn of(head: &[u8]) -> Option<Self> {
        const MAGICS: [(&[u8], Packing); 4] = [
            (&[0xfd, b'7', b'z', b'X', b'Z', 0], Packing::Xz),
            (&[0x28, 0xb5, 0x2f, 0xfd], Packing::Zstd),
            (&[0x1f, 0x8b], Packing::Gzip),
            (b"BZh", Packing::Bzip2),
        ];
        let packed = MAGICS.iter().find(|(magic, _)| head.starts_with(magic)).map(|(_, packing)| *packing);
        packed.or_else(|| (head.get(257..262) == Some(b"ustar")).then_some(Self::Plain))
    }

    /// What messages call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "tar archive",
            Self::Gzip => "gzip archive",
            Self::Xz => "xz archive",
            Self::Zstd => "zstd archive",
            Self::Bzip2 => "bzip2 archive",
        }
    }

    /// The tar file inside.
    pub(super) fn unpack<'a>(self, packed: impl Read + 'a, head: &[u8]) -> io::Result<Limited<Box<dyn Read + 'a>>> {
        let packed = BufReader::new(packed);
        let mut limit = MAX_UNPACKED_BYTES;
        let unpacked: Box<dyn Read + 'a> = match self {
            Self::Plain => Box::new(packed),
            Self::Gzip => Box::new(MultiGzDecoder::new(packed)),
            Self::Bzip2 => Box::new(MultiBzDecoder::new(packed)),
            Self::Xz => {
                if xz_window_bytes(head).is_none_or(|window| window > USUAL_WINDOW_BYTES) {
                    limit = MAX_UNPACKED_BYTES_LARGE_WINDOW;
                }
                Box::new(XzReader::new_mem_limit(packed, true, MAX_XZ_KIB))
            }
            Self::Zstd => Box::new(ZstdFrames::new(packed)?),
        };
        Ok(Limited { inner: unpacked, left: limit, limit })
    }
}

/// Ends in an error, not in silence, when more comes than is allowed.
pub(super) struct Limited<R> {
    inner: R,
    left: u64,
    limit: u64,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        let counted = u64::try_from(count).unwrap_or(u64::MAX);
        self.left = self.left.checked_sub(counted).ok_or_else(|| {
            let message = format!("unpacks to more than {} bytes", self.limit);
            io::Error::new(io::ErrorKind::FileTooLarge, message)
        })?;
        Ok(count)
    }
}

/// Zstandard files may hold several frames, one behind the other.
struct ZstdFrames<R: BufRead> {
    frame: Option<StreamingDecoder<R, FrameDecoder>>,
}

impl<R: BufRead> ZstdFrames<R> {
    fn new(packed: R) -> io::Result<Self> {
        Ok(Self { frame: Some(Self::frame(packed)?) })
    }

    fn frame(packed: R) -> io::Result<StreamingDecoder<R, FrameDecoder>> {
        StreamingDecoder::new_with_max_window_size(packed, USUAL_WINDOW_BYTES)
            .map_err(|error| io::Error::other(error.to_string()))
    }
}

impl<R: BufRead> Read for ZstdFrames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(frame) = &mut self.frame {
            let count = frame.read(buffer)?;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            let Some(done) = self.frame.take() else { break };
            let (mut packed, decoder) = done.into_parts();
            // The library leaves this to its callers (RFC 8878, section 3.1.1, Content_Checksum).
            let told = decoder.get_checksum_from_data();
            if told.is_some() && told != decoder.get_calculated_checksum() {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the content differs from its checksum"));
            }
            if !packed.fill_buf()?.is_empty() {
                self.frame = Some(Self::frame(packed)?);
            }
        }
        Ok(0)
    }
}

/// The dictionary size that the first block of an xz file names (section 3.1 and 5.3.1 of the .xz file
/// format, version 1.2.1); `None` if the block is not as xz writes it.
fn xz_window_bytes(head: &[u8]) -> Option<u64> {
    const STREAM_HEADER_BYTES: usize = 12;
    const LZMA2: u64 = 0x21;
    let flags = *head.get(STREAM_HEADER_BYTES + 1)?;
    let mut rest = head.get(STREAM_HEADER_BYTES + 2..)?;
    for is_present in [flags & 0x40 != 0, flags & 0x80 != 0] {
        if is_present {
            variable_length(&mut rest)?;
        }
    }
    for _ in 0..=flags & 0x03 {
        let (id, size) = (variable_length(&mut rest)?, variable_length(&mut rest)?);
        let (properties, next) = rest.split_at_checked(usize::try_from(size).ok()?)?;
        if id == LZMA2 {
            let bits = *properties.first()?;
            return (bits <= 40).then(|| (2 | u64::from(bits & 1)) << (bits / 2 + 11));
        }
        rest = next;
    }
    None
}

/// A number of seven bits a byte, the lowest first (section 1.2 of the same).
fn variable_length(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..63).step_by(7) {
        let (byte, next) = rest.split_first()?;
        *rest = next;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First bytes of files that `xz -9` and plain `xz` wrote.
    #[test]
    fn the_window_of_an_xz_file_is_read_from_its_first_block() {
        let mut head = [0xfd, b'7', b'z', b'X', b'Z', 0, 0, 4, 0xe6, 0xd6, 0xb4, 0x46, 2, 0, 0x21, 1, 0x1c, 0];
        assert_eq!(xz_window_bytes(&head), Some(64 << 20));
        head[16] = 0x16;
        assert_eq!(xz_window_bytes(&head), Some(8 << 20));
        head[16] = 41;
        assert_eq!(xz_window_bytes(&head), None);
        assert_eq!(xz_window_bytes(&head[..14]), None);
        // Sizes before the filters are passed over.
        let sized = [&head[..12], &[3, 0xc0, 0x80, 0x01, 0xff, 0xff, 0x03, 0x21, 1, 0x18]].concat();
        assert_eq!(xz_window_bytes(&sized), Some(16 << 20));
    }

    #[test]
    fn more_than_the_limit_is_an_error_and_exactly_the_limit_is_not() {
        let read = |bytes: u64| {
            let mut limited = Limited { inner: io::repeat(1).take(bytes), left: 1000, limit: 1000 };
            io::copy(&mut limited, &mut io::sink())
        };
        assert_eq!(read(1000).unwrap(), 1000);
        assert_eq!(read(1001).unwrap_err().to_string(), "unpacks to more than 1000 bytes");
    }

    #[test]
    fn archives_are_told_by_their_first_bytes() {
        let mut tar = [0; HEAD_BYTES];
        tar[257..262].copy_from_slice(b"ustar");
        for (head, packing) in [
            (&tar[..], Some(Packing::Plain)),
            (b"BZh91AY", Some(Packing::Bzip2)),
            (&[0x1f, 0x8b, 8], Some(Packing::Gzip)),
            (&[0x28, 0xb5, 0x2f, 0xfd], Some(Packing::Zstd)),
            (b"<system", None),
            (&[], None),
        ] {
            assert_eq!(Packing::of(head), packing);
        }
    }
}
