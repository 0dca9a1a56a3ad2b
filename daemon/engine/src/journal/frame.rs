//! Records as bytes: length, CRC-32 and JSON, which a person can read too. The first frame names the format.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::core::{Journaled, Record};

/// Format of this version. Another one is not read: its sessions end, as they would without a journal.
const FORMAT: u32 = 1;
/// Longest payload of a frame, bytes. A lease of 4096 holders with a label takes less than half.
const MAX_PAYLOAD_BYTES: usize = 256 << 10;
/// Length and CRC-32, both little-endian.
const HEAD_BYTES: usize = 8;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Format {
    gdrd_journal: u32,
}

/// Why a journal is not believed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum FrameError {
    #[error("frame at byte {at} is {len_bytes} bytes long, at most {MAX_PAYLOAD_BYTES} are allowed")]
    Length { at: usize, len_bytes: usize },
    #[error("frame at byte {at} has another checksum than its content")]
    Checksum { at: usize },
    #[error("frame at byte {at} is no record: {reason}")]
    Content { at: usize, reason: String },
    #[error("its first frame is missing")]
    Cut,
    #[error("format {found}; this daemon knows {FORMAT}")]
    Format { found: u32 },
}

/// The frame of one record; `None` for one that is longer than any may be.
pub(crate) fn frame_of(record: &Record) -> Option<Vec<u8>> {
    frame(record)
}

/// The frame that starts a journal.
pub(crate) fn first_frame() -> Option<Vec<u8>> {
    frame(&Format { gdrd_journal: FORMAT })
}

fn frame<T: Serialize>(content: &T) -> Option<Vec<u8>> {
    let mut bytes = vec![0; HEAD_BYTES];
    serde_json::to_writer(&mut bytes, content).ok()?;
    let payload = bytes.get(HEAD_BYTES..)?;
    if payload.len() > MAX_PAYLOAD_BYTES {
        return None;
    }
    let (len, crc) = (u32::try_from(payload.len()).ok()?, crc32fast::hash(payload));
    bytes.get_mut(..4)?.copy_from_slice(&len.to_le_bytes());
    bytes.get_mut(4..HEAD_BYTES)?.copy_from_slice(&crc.to_le_bytes());
    Some(bytes)
}

/// What a journal holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Read {
    pub(crate) journaled: Journaled,
    /// Bytes of a last frame that was cut off.
    pub(crate) torn_bytes: usize,
}

/// Reads a whole journal, which begins with a first record whatever becomes of the last.
pub(crate) fn read(bytes: &[u8]) -> Result<Read, FrameError> {
    let mut read = Read::default();
    let mut at = 0;
    let mut first = true;
    while at < bytes.len() {
        let left = bytes.get(at..).unwrap_or_default();
        let Some(payload) = payload_at(left, at)? else {
            read.torn_bytes = left.len();
            break;
        };
        let failed = |error: serde_json::Error| FrameError::Content { at, reason: error.to_string() };
        if std::mem::take(&mut first) {
            let format: Format = serde_json::from_slice(payload).map_err(failed)?;
            if format.gdrd_journal != FORMAT {
                return Err(FrameError::Format { found: format.gdrd_journal });
            }
        } else {
            read.journaled.add(serde_json::from_slice(payload).map_err(failed)?);
        }
        at += HEAD_BYTES + payload.len();
    }
    if first {
        return Err(FrameError::Cut);
    }
    Ok(read)
}

/// The payload of the frame that `left` starts with; `None` when it is cut off.
fn payload_at(left: &[u8], at: usize) -> Result<Option<&[u8]>, FrameError> {
    let word = |from: usize| left.get(from..from + 4).and_then(|word| word.try_into().ok()).map(u32::from_le_bytes);
    let (Some(len), Some(crc)) = (word(0), word(4)) else { return Ok(None) };
    let len_bytes = usize::try_from(len).unwrap_or(usize::MAX);
    if len_bytes > MAX_PAYLOAD_BYTES {
        return Err(FrameError::Length { at, len_bytes });
    }
    let Some(payload) = left.get(HEAD_BYTES..HEAD_BYTES + len_bytes) else { return Ok(None) };
    if crc32fast::hash(payload) != crc {
        return Err(FrameError::Checksum { at });
    }
    Ok(Some(payload))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ids::{LeaseId, SessionId};

    /// A journal of these records.
    fn bytes_of<'a>(records: impl IntoIterator<Item = &'a Record>) -> Vec<u8> {
        let mut bytes = first_frame().unwrap();
        records.into_iter().for_each(|record| bytes.extend(frame_of(record).unwrap()));
        bytes
    }

    fn sample() -> Vec<u8> {
        let gone = |id| Record::LeaseGone(LeaseId(id));
        bytes_of(&[Record::Numbers(7), gone(1), Record::SessionGone(SessionId(2)), Record::Numbers(9), gone(3)])
    }

    #[test]
    fn records_read_back() {
        assert_eq!(read(&sample()).unwrap().journaled.numbers, 9);
        assert_eq!(read(&[]), Err(FrameError::Cut));
    }

    #[test]
    fn a_last_frame_that_is_cut_off_is_left_out() {
        let (whole, first) = (sample(), first_frame().unwrap().len());
        for len in 0..first {
            assert_eq!(read(&whole[..len]).unwrap_err(), FrameError::Cut, "written whole or not at all");
        }
        for len in first..whole.len() {
            let read = read(&whole[..len]).unwrap_or_else(|error| panic!("cut to {len} bytes: {error}"));
            assert!(read.journaled.numbers <= 9);
        }
    }

    #[test]
    fn another_format_is_not_read() {
        let bytes = frame(&Format { gdrd_journal: 2 }).unwrap();
        assert_eq!(read(&bytes), Err(FrameError::Format { found: 2 }));
        assert!(matches!(read(&frame(&Record::Numbers(1)).unwrap()), Err(FrameError::Content { at: 0, .. })));
    }

    proptest! {
        #[test]
        fn any_changed_byte_is_noticed(at in 0_usize..1000, bit in 0_u8..8) {
            let whole = sample();
            let at = at % whole.len();
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << bit;
            // A length that grew past the end looks as if the rest were cut off.
            match read(&bytes) {
                Err(_) => {}
                Ok(read) => prop_assert!(read.torn_bytes > 0),
            }
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
        }
    }
}
