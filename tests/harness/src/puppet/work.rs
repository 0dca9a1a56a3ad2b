//! Requests as a script names them, made into those of the client library.

use std::collections::HashMap;

use anyhow::Context as _;
use gdrd_client::{Buffer, InlineData, LocalSpan, Operation, RemoteBuffer, RemoteSpan, Source};
use gdrd_harness::script::{Local, Remote, Work};

use crate::hex;

type Buffers = HashMap<String, Buffer>;

/// The operation of `work` on a queue pair of `hca`.
pub(crate) fn operation(buffers: &Buffers, hca: &str, work: &Work) -> anyhow::Result<Operation> {
    let local = |local| local_span(buffers, hca, local);
    Ok(match work {
        Work::Write { local: from, remote, imm } => {
            Operation::Write { source: Source::Local(local(from)?), remote: remote_span(remote)?, imm: *imm }
        }
        Work::WriteInline { payload, remote, imm } => {
            Operation::Write { source: inline(payload)?, remote: remote_span(remote)?, imm: *imm }
        }
        Work::Read { local: to, remote } => Operation::Read { local: local(to)?, remote: remote_span(remote)? },
        Work::Send { local: from, imm } => Operation::Send { source: Source::Local(local(from)?), imm: *imm },
        Work::SendInline { payload, imm } => Operation::Send { source: inline(payload)?, imm: *imm },
        Work::Recv { local: to } => Operation::Recv { local: local(to)? },
        Work::FetchAdd { local: old, remote, add } => {
            Operation::FetchAdd { local: local(old)?, remote: remote_span(remote)?, add: *add }
        }
        Work::CompareSwap { local: old, remote, compare, swap } => {
            Operation::CompareSwap { local: local(old)?, remote: remote_span(remote)?, compare: *compare, swap: *swap }
        }
        Work::Flush { remote, len } => Operation::Flush { remote: remote_span(remote)?, len_bytes: *len },
    })
}

fn inline(payload: &str) -> anyhow::Result<Source> {
    Ok(Source::Inline(InlineData::new(&hex::decode(payload)?)?))
}

/// Not checked against the buffer: what a client could send is for the daemon to refuse.
fn local_span(buffers: &Buffers, hca: &str, local: &Local) -> anyhow::Result<LocalSpan> {
    let (own_slot, own_generation) = match buffers.get(&local.buffer) {
        Some(buffer) => {
            let registration = buffer.registration(hca)?;
            (Some(registration.slot()), Some(registration.generation()))
        }
        None => (None, None),
    };
    Ok(LocalSpan {
        slot: local.slot.or(own_slot).with_context(|| format!("no buffer {}", local.buffer))?,
        generation: local.generation.or(own_generation).with_context(|| format!("no buffer {}", local.buffer))?,
        offset: local.offset,
        len_bytes: local.len,
    })
}

fn remote_span(remote: &Remote) -> anyhow::Result<RemoteSpan> {
    let mut span = RemoteBuffer::from_bytes(&hex::decode(&remote.blob)?)?.span_unchecked(remote.offset);
    span.rkey ^= remote.rkey_flip;
    Ok(span)
}
