//! From the ranges of a request to those that are registered: rounded out to pages, cut into pieces, merged.

use std::ops::Range;
use std::sync::Arc;

use super::HcaIndex;
use super::region::Source;
use crate::error::EngineError;
use crate::registration::{MemoryRef, RangeRequest};

/// Page that ranges of host memory are rounded out to, bytes.
pub(super) const HOST_PAGE_BYTES: u64 = 4 << 10;
/// Page that ranges of a GPU's memory are rounded out to, bytes: what its exporter maps at a time (nv-p2p.h).
pub(super) const GPU_PAGE_BYTES: u64 = 64 << 10;
/// Least length of a piece, bytes, and what it is a multiple of.
pub(super) const PIECE_BYTES: u64 = 2 << 20;

/// Longest region of an HCA whose accesses an IOMMU translates, bytes: dma-bufs of tens of GiB are refused there with ENOMEM,
/// and pieces of 1 GiB work (uccl-project/uccl#761).
pub(crate) const TRANSLATED_PIECE_BYTES: u64 = 1 << 30;

/// The bound on regions when that of the IOMMU comes to the one asked for; 0 for none.
pub(super) fn bounded_piece(asked_bytes: u64, is_translated: bool) -> u64 {
    match (asked_bytes, is_translated) {
        (asked, false) => asked,
        (0, true) => TRANSLATED_PIECE_BYTES,
        (asked, true) => asked.min(TRANSLATED_PIECE_BYTES),
    }
}

/// A range with everything that follows from the request.
pub(super) struct Planned {
    pub(super) memory: MemoryRef,
    pub(super) source: Source,
    pub(super) range: Range<u64>,
    pub(super) hcas: Arc<[HcaIndex]>,
    /// The same, rounded out to pages and cut into pieces.
    pub(super) pieces: Vec<Range<u64>>,
}

/// What a memory of a request comes down to.
pub(super) struct Known {
    pub(super) source: Source,
    pub(super) len_bytes: u64,
    pub(super) page_bytes: u64,
    pub(super) hcas: Arc<[HcaIndex]>,
    /// Longest region, bytes; 0 for no bound.
    pub(super) piece_bytes: u64,
}

pub(super) fn plan_range(index: usize, asked: &RangeRequest, memory: &Known) -> Result<Planned, EngineError> {
    let RangeRequest { memory: name, offset, len_bytes } = *asked;
    let end = offset.checked_add(len_bytes).filter(|end| len_bytes > 0 && *end <= memory.len_bytes);
    let Some(end) = end else {
        let whole = memory.len_bytes;
        let problem = match len_bytes {
            0 => format!("range {index} has no bytes; a range has at least one"),
            _ => format!("range {index} is {len_bytes} bytes at offset {offset}, and its memory ends at {whole}"),
        };
        return Err(EngineError::BadArgument { what: "ranges", problem });
    };
    let page = memory.page_bytes;
    let rounded = offset / page * page..end.next_multiple_of(page).min(memory.len_bytes);
    let pieces = cut(rounded, memory.piece_bytes);
    Ok(Planned { memory: name, source: memory.source, range: offset..end, hcas: Arc::clone(&memory.hcas), pieces })
}

/// Cuts a range at multiples of `piece_bytes`; 0 leaves it whole.
fn cut(range: Range<u64>, piece_bytes: u64) -> Vec<Range<u64>> {
    if piece_bytes == 0 {
        return vec![range];
    }
    let first = range.start / piece_bytes;
    let last = (range.end - 1) / piece_bytes;
    // As many as fit a call, and one more to be refused for.
    let pieces = (first..=last).take(usize::from(u16::MAX) + 1);
    pieces
        .map(|piece| (piece * piece_bytes).max(range.start)..((piece + 1).saturating_mul(piece_bytes)).min(range.end))
        .collect()
}

/// The same ranges in order, each within one of the result; neighbours up to a gap joined, where there is one, but not
/// across pieces.
pub(super) fn merged(mut ranges: Vec<Range<u64>>, gap_bytes: Option<u64>, piece_bytes: u64) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| (range.start, std::cmp::Reverse(range.end)));
    let piece = |at: u64| at.checked_div(piece_bytes).unwrap_or(0);
    let mut merged: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.end <= last.end => {}
            Some(last)
                if gap_bytes.is_some_and(|gap| range.start <= last.end.saturating_add(gap))
                    && piece(last.start) == piece(range.end - 1) =>
            {
                last.end = range.end;
            }
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "a list of one range is meant")]
mod tests {
    use super::*;

    #[test]
    fn neighbours_within_the_gap_are_one_range_and_pieces_stay_apart() {
        let ranges = vec![40..50, 0..10, 12..20, 41..45, 31..40];
        assert_eq!(merged(ranges.clone(), Some(2), 0), [0..20, 31..50]);
        assert_eq!(merged(ranges.clone(), Some(u64::MAX), 0), [0..50]);
        assert_eq!(merged(ranges.clone(), Some(100), 25), [0..20, 31..50]);
        assert_eq!(merged(ranges, None, 0), [0..10, 12..20, 31..40, 40..50]);
    }

    #[test]
    fn a_range_is_cut_at_multiples_of_a_piece() {
        assert_eq!(cut(5..27, 10), [5..10, 10..20, 20..27]);
        assert_eq!(cut(10..20, 10), [10..20]);
        assert_eq!(cut(5..27, 0), [5..27]);
    }

    #[test]
    fn an_interior_range_is_rounded_to_pages_inside_of_the_memory() {
        // Mellanox/nv_peer_memory#121: an unaligned range of 256 bytes.
        let memory = Known {
            source: Source::Adopted(crate::ids::MemoryId(1)),
            len_bytes: 0x2_0200,
            page_bytes: GPU_PAGE_BYTES,
            hcas: Arc::from([HcaIndex(0)]),
            piece_bytes: 0,
        };
        let memory_ref = MemoryRef::Adopted(crate::ids::MemoryId(1));
        let plan = |offset, len_bytes| {
            plan_range(0, &RangeRequest { memory: memory_ref, offset, len_bytes }, &memory).map(|plan| plan.pieces)
        };
        assert_eq!(plan(0x1_c200, 256).unwrap(), [0x1_0000..0x2_0000]);
        assert_eq!(plan(0x1_ff80, 256).unwrap(), [0x1_0000..0x2_0200]);
        assert!(plan(0x2_0200, 1).is_err());
        assert!(plan(u64::MAX, 2).is_err());
        assert!(plan(0, 0).is_err());
    }
}
