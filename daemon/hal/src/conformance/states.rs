//! The queue pair state machine (ibv_modify_qp(3)).

use super::Fixture;
use super::rig::{DEPTH, End, config, pair, request};
use crate::{
    CqId, Endpoint, HcaError, LinkLayer, Opcode, PostError, QueuePairConfig, QueuePairState, QueuePairType,
    ReceiveRequest, WorkStatus,
};

fn fresh(fixture: &dyn Fixture) -> End<'_> {
    End::new(fixture, &fixture.hcas()[0], &config(QueuePairType::Rc))
}

fn in_init(fixture: &dyn Fixture) -> End<'_> {
    let end = fresh(fixture);
    end.control.to_init().expect("a fresh queue pair goes to INIT");
    end
}

fn endpoint(end: &End<'_>) -> Endpoint {
    end.control.endpoint().expect("a queue pair in INIT has an endpoint")
}

fn is_invalid<T>(result: Result<T, HcaError>) -> bool {
    matches!(result, Err(HcaError::Invalid { .. }))
}

fn write_to_self(end: &End<'_>) -> crate::WorkRequest {
    request(1, Opcode::Write, end.local(0, 8), end.remote(64))
}

pub(super) fn a_fresh_queue_pair_is_in_reset_and_takes_nothing(fixture: &dyn Fixture) {
    let mut end = fresh(fixture);
    end.expect_state(QueuePairState::Reset);
    let send = write_to_self(&end);
    assert_eq!(end.work.post_send(&[send]), Err((0, PostError::BadState)));
    let receive = ReceiveRequest { wr_id: 1, local: end.local(0, 8) };
    assert_eq!(end.work.post_recv(&[receive]), Err((0, PostError::BadState)));
    end.expect_nothing();
}

pub(super) fn init_takes_receives_and_no_sends(fixture: &dyn Fixture) {
    let mut end = in_init(fixture);
    end.expect_state(QueuePairState::Init);
    let receive = end.local(0, 8);
    end.receive(1, receive);
    let send = write_to_self(&end);
    assert_eq!(end.work.post_send(&[send]), Err((0, PostError::BadState)));
    end.expect_nothing();
}

pub(super) fn states_are_not_skipped_or_repeated(fixture: &dyn Fixture) {
    let (a, b) = (fresh(fixture), in_init(fixture));
    assert!(is_invalid(a.control.connect(&endpoint(&b))), "RESET to RTS");
    connected_from_init(&a, &b);
    assert!(is_invalid(a.control.to_init()), "RTS to INIT");
    assert!(is_invalid(a.control.connect(&endpoint(&b))), "RTS to RTS");
    a.control.to_error().expect("any state goes to ERR");
    a.expect_state(QueuePairState::Err);
    a.control.to_error().expect("ERR goes to ERR");
    assert!(is_invalid(a.control.connect(&endpoint(&b))), "ERR to RTS");
    assert!(is_invalid(a.control.to_init()), "ERR to INIT");
}

fn connected_from_init(a: &End<'_>, b: &End<'_>) {
    a.control.to_init().expect("a fresh queue pair goes to INIT");
    assert!(is_invalid(a.control.to_init()), "INIT to INIT");
    a.control.connect(&endpoint(b)).expect("a queue pair in INIT connects");
    a.expect_state(QueuePairState::Rts);
}

pub(super) fn an_endpoint_is_there_from_init_on(fixture: &dyn Fixture) {
    let end = fresh(fixture);
    assert!(is_invalid(end.control.endpoint()), "endpoint in RESET");
    end.control.to_init().expect("a fresh queue pair goes to INIT");
    let at = endpoint(&end);
    assert_eq!(at.qp_num, end.control.qp_num());
    assert_eq!(at.port_num, 1);
    assert!(at.qp_num < 1 << 24 && at.psn < 1 << 24, "both have 24 bits");
    assert_eq!(at, endpoint(&end), "an endpoint does not change");
    let ports = end.hca.ports().expect("the device is there");
    assert_eq!((at.link_layer, at.lid), (ports[0].link_layer, ports[0].lid));
    if at.gid.0 != [0; 16] {
        let known = ports[0].gids.iter().find(|entry| entry.gid_index == at.gid_index);
        assert_eq!(known.map(|entry| entry.gid), Some(at.gid));
    }
}

pub(super) fn connecting_across_link_layers_is_refused(fixture: &dyn Fixture) {
    let (a, b) = (in_init(fixture), in_init(fixture));
    let mut remote = endpoint(&b);
    remote.link_layer = match remote.link_layer {
        LinkLayer::Ethernet => LinkLayer::InfiniBand,
        _ => LinkLayer::Ethernet,
    };
    assert!(is_invalid(a.control.connect(&remote)));
    a.expect_state(QueuePairState::Init);
}

pub(super) fn connecting_with_an_unknown_mtu_is_refused(fixture: &dyn Fixture) {
    let (a, b) = (in_init(fixture), in_init(fixture));
    for mtu_bytes in [0, 1, 1500, 9000, u32::MAX] {
        let remote = Endpoint { mtu_bytes, ..endpoint(&b) };
        assert!(is_invalid(a.control.connect(&remote)), "MTU {mtu_bytes}");
    }
    a.control.connect(&endpoint(&b)).expect("a refused connect changes nothing");
}

pub(super) fn an_address_that_nobody_has_leaves_the_queue_pair_as_it_was(fixture: &dyn Fixture) {
    let (a, b) = (in_init(fixture), in_init(fixture));
    let mut remote = endpoint(&b);
    if remote.gid.0 == [0; 16] {
        // By LID nothing is looked up when a queue pair connects.
        return a.control.connect(&remote).expect("a queue pair in INIT connects");
    }
    // Another host of the same network.
    remote.gid.0[15] ^= 0x55;
    let refused = a.control.connect(&remote).expect_err("no neighbour answers");
    assert!(matches!(refused, HcaError::Unreachable { .. }), "{refused}");
    a.expect_state(QueuePairState::Init);
    a.control.connect(&endpoint(&b)).expect("a refused connect changes nothing");
}

pub(super) fn to_error_flushes_receives_in_order(fixture: &dyn Fixture) {
    let (_a, mut b) = pair(fixture);
    for wr_id in 0..10 {
        let place = b.local(wr_id * 64, 64);
        b.receive(wr_id, place);
    }
    b.control.to_error().expect("any state goes to ERR");
    for wr_id in 0..10 {
        b.expect(wr_id, WorkStatus::Flushed);
    }
    b.expect_nothing();
}

pub(super) fn to_error_flushes_waiting_sends_in_order(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    for wr_id in 0..10 {
        // The first waits for a receive that never comes, the others wait behind it; unsignaled ones are flushed too.
        let mut send = request(wr_id, Opcode::Send, a.local(0, 8), b.remote(0));
        send.signaled = wr_id % 2 == 0;
        a.send(send);
    }
    a.expect_nothing();
    a.control.to_error().expect("any state goes to ERR");
    for wr_id in 0..10 {
        a.expect(wr_id, WorkStatus::Flushed);
    }
    a.expect_nothing();
}

pub(super) fn posts_in_error_are_flushed(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    a.control.to_error().expect("any state goes to ERR");
    a.expect_state(QueuePairState::Err);
    let before = b.content(0, 8);
    a.fill(0, &[0xff; 8]);
    a.send(request(1, Opcode::Write, a.local(0, 8), b.remote(0)));
    a.expect(1, WorkStatus::Flushed);
    let place = a.local(0, 8);
    a.receive(2, place);
    a.expect(2, WorkStatus::Flushed);
    assert_eq!(b.content(0, 8), before);
}

pub(super) fn queue_pairs_out_of_bounds_are_refused(fixture: &dyn Fixture) {
    let end = fresh(fixture);
    let capabilities = end.hca.capabilities();
    let good = config(QueuePairType::Rc);
    let too_deep = capabilities.max_work_requests + 1;
    for (what, bad) in [
        ("no send depth", QueuePairConfig { send_depth: 0, ..good.clone() }),
        ("no receive depth", QueuePairConfig { recv_depth: 0, ..good.clone() }),
        ("send depth", QueuePairConfig { send_depth: too_deep, ..good.clone() }),
        ("receive depth", QueuePairConfig { recv_depth: too_deep, ..good.clone() }),
        ("inline", QueuePairConfig { inline_bytes: capabilities.max_inline_bytes + 1, ..good.clone() }),
        ("port 0", QueuePairConfig { port_num: 0, ..good.clone() }),
        ("port", QueuePairConfig { port_num: u8::MAX, ..good }),
    ] {
        assert!(is_invalid(end.pd.create_queue_pair(end.cq.id(), &bad)), "{what}");
    }
}

pub(super) fn a_queue_pair_needs_a_completion_queue_that_is_there(fixture: &dyn Fixture) {
    let end = fresh(fixture);
    let good = config(QueuePairType::Rc);
    assert!(is_invalid(end.pd.create_queue_pair(CqId(u64::MAX), &good)));
    let gone = end.hca.create_cq(DEPTH).expect("a completion queue can be made").id();
    assert!(is_invalid(end.pd.create_queue_pair(gone, &good)), "its owner dropped it");
    let [_, other] = fixture.hcas();
    if other.name() != end.hca.name() {
        let elsewhere = other.create_cq(DEPTH).expect("a completion queue can be made");
        assert!(is_invalid(end.pd.create_queue_pair(elsewhere.id(), &good)), "it is on another HCA");
    }
}

fn assert_type_refused(fixture: &dyn Fixture, qp_type: QueuePairType) {
    let hca = &fixture.hcas()[0];
    let pd = hca.alloc_pd().expect("a protection domain can be made");
    let cq = hca.create_cq(DEPTH).expect("a completion queue can be made");
    let result = pd.create_queue_pair(cq.id(), &config(qp_type));
    assert!(matches!(result, Err(HcaError::Unsupported { .. })));
}

pub(super) fn rc_is_refused_where_the_capability_says_so(fixture: &dyn Fixture) {
    assert_type_refused(fixture, QueuePairType::Rc);
}

pub(super) fn ud_is_refused_where_the_capability_says_so(fixture: &dyn Fixture) {
    assert_type_refused(fixture, QueuePairType::Ud);
}
