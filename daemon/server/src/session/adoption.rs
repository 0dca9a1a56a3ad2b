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
    check_counts(&items, fds.len()).map_err(|refusal| (refusal.reason(), refusal.to_string()))?;
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

/// Each item has its fds, and no fd is of none.
fn check_counts(items: &[v1::AdoptItem], fds: usize) -> Result<(), EngineError> {
    let others = items.iter().filter(|item| item.has_other_mapping).count();
    let wanted = items.len() + others;
    let problem = match items.len() {
        0 => "none; name each piece of memory, and attach its fd to the same packet".to_owned(),
        _ if wanted == fds => return Ok(()),
        all => format!(
            "{all} pieces of memory, {others} with an other mapping, need {wanted} fds, and the packet has {fds}; attach \
             one fd for each and one for each other mapping, in order"
        ),
    };
    Err(EngineError::BadArgument { what: "items", problem })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_counts_are_told_with_what_is_needed() {
        let item = |has_other_mapping| v1::AdoptItem { has_other_mapping, ..Default::default() };
        let told = |items: &[v1::AdoptItem], fds| check_counts(items, fds).map_err(|refusal| refusal.to_string());
        assert_eq!(told(&[item(false), item(true)], 3), Ok(()));
        for fds in [0, 1, 2, 4] {
            let refused = told(&[item(false), item(true)], fds).expect_err("too few or too many");
            assert!(refused.contains(&format!("need 3 fds, and the packet has {fds}; attach")), "{refused}");
        }
        assert!(told(&[], 1).expect_err("nothing is named").contains("name each piece"));
    }
}
