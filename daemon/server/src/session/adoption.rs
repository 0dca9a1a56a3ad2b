//! Adopt: memory that a client sends, handed to the engine item by item, all or none.
//!
//! It runs where it may block, since even closing an fd that is refused can wait for a file system of the client's.

use std::os::fd::OwnedFd;

use gdrd_engine::{AdoptRequest, AdoptedKind, AdoptedMemory, Engine, EngineError, SessionId};
use gdrd_proto::v1;

/// Adopts what the items say of the fds. What was adopted before an item is refused is given up.
///
/// # Errors
/// Reason and sentence for the client; the fds are closed.
pub(super) fn adopt(
    engine: &Engine,
    session: SessionId,
    items: Vec<v1::AdoptItem>,
    fds: Vec<OwnedFd>,
) -> Result<Vec<v1::AdoptedMemory>, (&'static str, String)> {
    let wanted: usize = items.iter().map(|item| 1 + usize::from(item.has_other_mapping)).sum();
    if items.is_empty() || wanted != fds.len() {
        let problem = format!("{} items of {wanted} fds came with {}", items.len(), fds.len());
        return Err(told(0, &EngineError::BadArgument { what: "items", problem }));
    }
    let mut fds = fds.into_iter();
    let mut adopted: Vec<AdoptedMemory> = Vec::with_capacity(items.len());
    for (index, item) in items.into_iter().enumerate() {
        let Some(fd) = fds.next() else { break };
        let other_mapping = if item.has_other_mapping { fds.next() } else { None };
        let request = AdoptRequest { fd, other_mapping, gpu: (!item.gpu.is_empty()).then_some(item.gpu) };
        match engine.adopt(session, request) {
            Ok(memory) => adopted.push(memory),
            Err(refusal) => {
                // Their end need not be waited for: nothing is registered of them.
                adopted.iter().for_each(|memory| drop(engine.disown(session, memory.id)));
                return Err(told(index, &refusal));
            }
        }
    }
    Ok(adopted.iter().map(memory).collect())
}

fn told(index: usize, refusal: &EngineError) -> (&'static str, String) {
    (refusal.reason(), format!("item {index} of the adoption: {refusal}"))
}

fn memory(adopted: &AdoptedMemory) -> v1::AdoptedMemory {
    let kind = match adopted.kind {
        AdoptedKind::Memfd => "memfd",
        AdoptedKind::DmaBuf => "dma-buf",
        _ => "unknown",
    };
    v1::AdoptedMemory { memory_id: adopted.id.0, size_bytes: adopted.len_bytes, kind: kind.to_owned() }
}
