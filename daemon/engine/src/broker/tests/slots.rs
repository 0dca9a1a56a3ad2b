//! The slot table as the engine and a broker thread see it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use gdrd_hal::Access;

use crate::broker::slots::{HcaIndex, SlotEntry, SlotError, SlotRefusal, SlotTable, Wanted};
use crate::{Generation, SlotId};

const SLOT: SlotId = SlotId(70);
const LEN_BYTES: u64 = 4096;

fn entry() -> SlotEntry {
    SlotEntry { hca: HcaIndex(3), lkey: 0x8765_4321, iova: 1 << 40, len_bytes: LEN_BYTES, access: Access::DATA }
}

fn table() -> SlotTable {
    let table = SlotTable::new(128);
    assert_eq!(table.publish(SLOT, entry()), Ok(Generation(1)));
    table
}

fn wanted() -> Wanted {
    Wanted {
        slot: SLOT.0,
        generation: 1,
        offset: 64,
        len_bytes: 8,
        hca: HcaIndex(3),
        local_write: true,
        receive: false,
    }
}

#[test]
fn an_admitted_request_gets_the_key_and_the_address_of_its_offset() {
    let table = table();
    let admitted = table.admit(&wanted()).expect("admitted");
    assert_eq!((admitted.lkey, admitted.addr), (0x8765_4321, (1 << 40) + 64));
    assert_eq!(table.in_flight(SLOT), 1);
    table.leave(SLOT.0, false);
    assert_eq!(table.in_flight(SLOT), 0);
}

#[test]
fn each_wrong_field_is_refused_by_its_own_reason_and_leaves_no_count() {
    let table = table();
    let read_only = SlotEntry { access: Access { local_write: false, ..Access::default() }, ..entry() };
    table.publish(SlotId(0), read_only).expect("free slot");
    let cases = [
        (Wanted { slot: 128, ..wanted() }, SlotRefusal::NoSuchSlot),
        (Wanted { slot: u32::MAX, ..wanted() }, SlotRefusal::NoSuchSlot),
        (Wanted { slot: 127, ..wanted() }, SlotRefusal::Stale),
        (Wanted { slot: 1, ..wanted() }, SlotRefusal::Stale),
        (Wanted { generation: 0, ..wanted() }, SlotRefusal::Stale),
        (Wanted { generation: 2, ..wanted() }, SlotRefusal::Stale),
        (Wanted { generation: u64::MAX, ..wanted() }, SlotRefusal::Stale),
        (Wanted { generation: 1 << 63 | 1, ..wanted() }, SlotRefusal::Stale),
        (Wanted { hca: HcaIndex(2), ..wanted() }, SlotRefusal::OtherHca),
        (Wanted { offset: LEN_BYTES - 7, ..wanted() }, SlotRefusal::Range),
        (Wanted { offset: u64::MAX, ..wanted() }, SlotRefusal::Range),
        (Wanted { offset: 0, len_bytes: u32::MAX, ..wanted() }, SlotRefusal::Range),
        (Wanted { slot: 0, ..wanted() }, SlotRefusal::Access),
    ];
    for (wanted, refusal) in cases {
        assert_eq!(table.admit(&wanted), Err(refusal), "{wanted:?}");
    }
    assert_eq!(table.in_flight(SLOT) + table.in_flight(SlotId(0)), 0);
    assert!(table.admit(&Wanted { offset: LEN_BYTES - 8, ..wanted() }).is_ok(), "the last bytes are in range");
}

#[test]
fn quiesce_waits_for_the_last_request_of_the_retired_generation() {
    let table = table();
    let told = Arc::new(AtomicU32::new(0));
    table.admit(&wanted()).expect("admitted");
    table.admit(&Wanted { receive: true, ..wanted() }).expect("admitted");
    assert_eq!(table.posted_receives(SLOT), 1);
    assert_eq!(table.retire(SLOT), Ok(Generation(2)));
    assert_eq!(table.admit(&wanted()), Err(SlotRefusal::Stale));
    let count = Arc::clone(&told);
    table
        .quiesce(SLOT, move || {
            count.fetch_add(1, Ordering::Relaxed);
        })
        .expect("retired");
    assert!(matches!(table.publish(SLOT, entry()), Err(SlotError::Busy { in_flight: 2, .. })));
    table.leave(SLOT.0, false);
    assert_eq!(told.load(Ordering::Relaxed), 0);
    table.leave(SLOT.0, true);
    assert_eq!((told.load(Ordering::Relaxed), table.posted_receives(SLOT)), (1, 0));
    assert_eq!(table.publish(SLOT, entry()), Ok(Generation(2)));
    assert_eq!(table.admit(&wanted()), Err(SlotRefusal::Stale));
    assert!(table.admit(&Wanted { generation: 2, ..wanted() }).is_ok());
}

#[test]
fn quiesce_of_an_unused_slot_is_done_at_once() {
    let table = table();
    let told = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&told);
    table.retire(SLOT).expect("published");
    table
        .quiesce(SLOT, move || {
            count.fetch_add(1, Ordering::Relaxed);
        })
        .expect("retired");
    assert_eq!(told.load(Ordering::Relaxed), 1);
}

#[test]
fn the_writer_is_told_what_it_did_out_of_turn() {
    let table = table();
    assert_eq!(table.publish(SLOT, entry()), Err(SlotError::Published { slot: SLOT }));
    assert_eq!(table.quiesce(SLOT, || ()), Err(SlotError::Published { slot: SLOT }));
    assert_eq!(table.retire(SlotId(5)), Err(SlotError::NotPublished { slot: SlotId(5) }));
    let missing = SlotId(128);
    assert_eq!(table.retire(missing), Err(SlotError::NoSuchSlot { slot: missing, capacity: 128 }));
}

#[test]
fn retiring_races_with_admission_and_no_request_sees_the_next_tenant_of_the_slot() {
    // Real threads beside the model check: the entry of generation g carries lkey g.
    let table = Arc::new(SlotTable::new(1));
    let slot = SlotId(0);
    let of = |generation: u32| SlotEntry { lkey: generation, ..entry() };
    let mut generation = table.publish(slot, of(1)).expect("free");
    let newest = Arc::new(AtomicU32::new(1));
    let broker = {
        let (table, newest) = (Arc::clone(&table), Arc::clone(&newest));
        std::thread::spawn(move || {
            let mut admitted = 0_u64;
            loop {
                let now = newest.load(Ordering::Acquire);
                if now == 0 {
                    return admitted;
                }
                let wanted = Wanted { slot: 0, generation: u64::from(now), ..wanted() };
                if let Ok(got) = table.admit(&wanted) {
                    assert_eq!(got.lkey, now);
                    admitted += 1;
                    table.leave(0, false);
                }
            }
        })
    };
    for round in 2..2000_u32 {
        table.retire(slot).expect("published");
        let (tell, told) = std::sync::mpsc::channel();
        table.quiesce(slot, move || tell.send(()).expect("waited for")).expect("retired");
        told.recv().expect("quiet");
        generation = table.publish(slot, of(round)).expect("quiet");
        assert_eq!(generation, Generation(u64::from(round)));
        newest.store(round, Ordering::Release);
    }
    newest.store(0, Ordering::Release);
    broker.join().expect("no stale admission");
    assert_eq!(table.generation(slot), Ok(generation));
}
