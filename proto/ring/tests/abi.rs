//! The layout that the C client and other versions of this crate rely on, field by field. A change
//! here is a new RING_VERSION.
#![forbid(unsafe_code)]

mod common;

use std::mem::{align_of, offset_of, size_of};

use common::{local, remote};
use gdrd_ring::abi::{self, CompletionEntry, Header, SubmissionEntry};
use gdrd_ring::{InlineData, Operation, Source, Submission, SubmissionFlags};

macro_rules! assert_offsets {
    ($type:ty, $($field:ident: $offset:literal),* $(,)?) => {
        $(assert_eq!(offset_of!($type, $field), $offset, stringify!($field));)*
    };
}

#[test]
fn structures_have_the_published_offsets_and_sizes() {
    assert_offsets!(
        Header, magic: 0, version: 8, sq_depth: 12, rq_depth: 16, submission_capacity: 20,
        completion_capacity: 24, reserved: 28, submission_offset: 32, completion_offset: 40,
    );
    assert_offsets!(
        SubmissionEntry, opcode: 0, flags: 1, reserved0: 2, imm: 4, wr_id: 8, local_slot: 16, len_bytes: 20,
        local_generation: 24, local_offset: 32, remote_rkey: 40, reserved1: 44, remote_iova: 48, operand: 56,
        swap: 64, inline: 72,
    );
    assert_offsets!(
        CompletionEntry, wr_id: 0, status: 8, opcode: 9, flags: 10, byte_len: 12, imm: 16, qp_num: 20,
        sq_retired: 24, vendor_error: 28,
    );
    assert_eq!((size_of::<Header>(), align_of::<Header>()), (48, 8));
    assert_eq!((size_of::<SubmissionEntry>(), align_of::<SubmissionEntry>()), (128, 8));
    assert_eq!((size_of::<CompletionEntry>(), align_of::<CompletionEntry>()), (32, 8));
}

#[test]
fn numbers_of_the_protocol_are_the_published_ones() {
    assert_eq!(abi::RING_MAGIC.to_le_bytes(), *b"gdrdring");
    assert_eq!(
        [
            abi::SUBMISSION_TAIL,
            abi::SUBMISSION_HEAD,
            abi::COMPLETION_TAIL,
            abi::COMPLETION_HEAD,
            abi::BROKER_SLEEPING,
            abi::CLIENT_WAITING,
            abi::WAKE_COUNT,
            abi::STATE,
            abi::RINGS_OFFSET,
        ],
        [128, 256, 384, 512, 640, 768, 896, 1024, 4096]
    );
    assert_eq!(
        [
            abi::OP_WRITE,
            abi::OP_WRITE_IMM,
            abi::OP_READ,
            abi::OP_SEND,
            abi::OP_SEND_IMM,
            abi::OP_RECV,
            abi::OP_FETCH_ADD,
            abi::OP_COMPARE_SWAP,
            abi::OP_FLUSH,
            abi::OP_RECV_WRITE_IMM,
        ],
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 0x86]
    );
    assert_eq!([abi::FLAG_SIGNALED, abi::FLAG_INLINE, abi::FLAG_FENCE, abi::FLAG_SOLICITED], [1, 2, 4, 8]);
    assert_eq!([abi::STATE_OPEN, abi::STATE_CLOSED, abi::STATE_CORRUPT], [0, 1, 2]);
    assert_eq!(abi::COMPLETION_FLAG_IMM, 1);
}

#[test]
fn an_encoded_request_has_its_values_at_those_offsets() {
    let operation = Operation::CompareSwap { local: local(8), remote: remote(), compare: 0xc0, swap: 0x5a };
    let submission = Submission { wr_id: 0x11, flags: SubmissionFlags::SIGNALED, operation };
    let words = submission.encode().expect("it is well formed");
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    assert_eq!(bytes[..8], [abi::OP_COMPARE_SWAP, abi::FLAG_SIGNALED, 0, 0, 0, 0, 0, 0]);
    assert_eq!(words[1], 0x11);
    assert_eq!(bytes[16..20], 3_u32.to_ne_bytes());
    assert_eq!(bytes[20..24], 8_u32.to_ne_bytes());
    assert_eq!(words[3..5], [9, 4096]);
    assert_eq!(bytes[40..44], remote().rkey.to_ne_bytes());
    assert_eq!(words[6..9], [remote().iova, 0xc0, 0x5a]);
    assert!(bytes[72..].iter().all(|byte| *byte == 0));
}

#[test]
fn inline_payload_lies_at_the_end_of_the_entry() {
    let source = Source::Inline(InlineData::new(b"abc").expect("it is short"));
    let operation = Operation::Send { source, imm: Some(0x0403_0201) };
    let submission = Submission { wr_id: 0, flags: SubmissionFlags::empty(), operation };
    let words = submission.encode().expect("it is well formed");
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    assert_eq!(bytes[..2], [abi::OP_SEND_IMM, abi::FLAG_INLINE]);
    assert_eq!(bytes[4..8], 0x0403_0201_u32.to_ne_bytes());
    assert_eq!(bytes[20..24], 3_u32.to_ne_bytes());
    assert_eq!(bytes[72..76], *b"abc\0");
}
