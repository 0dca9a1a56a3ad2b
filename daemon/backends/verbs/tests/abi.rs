//! The layouts that this crate relies on are those of the C headers: the compiler of the host is asked for each size,
//! offset and constant, and its answers are compared with those of the bindings.
#![allow(unsafe_code)]

use std::mem::{offset_of, size_of};
use std::process::Command;

use rdma_sys::{
    atomic_t, ibv_access_flags, ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_context_ops, ibv_cq, ibv_device,
    ibv_device_attr, ibv_event_type, ibv_gid_entry, ibv_global_route, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp,
    ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_cap, ibv_qp_init_attr, ibv_qp_state, ibv_recv_wr, ibv_send_flags,
    ibv_send_wr, ibv_sge, ibv_srq_attr, ibv_srq_attr_mask, ibv_srq_init_attr, ibv_wc, ibv_wc_flags, ibv_wc_opcode,
    ibv_wc_status, ibv_wr_opcode, rdma_t, ud_t,
};

/// One question to the C compiler and our own answer.
type Fact = (String, usize);

macro_rules! layout {
    ($facts:ident, $type:ident { $($field:ident),* }) => {
        $facts.push((format!("sizeof(struct {})", stringify!($type)), size_of::<$type>()));
        $($facts.push((
            format!("offsetof(struct {}, {})", stringify!($type), stringify!($field)),
            offset_of!($type, $field),
        ));)*
    };
}

fn facts() -> Vec<Fact> {
    let mut facts = Vec::new();
    layout!(facts, ibv_device { node_type, transport_type, name });
    layout!(facts, ibv_context { device, ops, cmd_fd, async_fd });
    layout!(
        facts,
        ibv_device_attr {
            vendor_id,
            max_qp_wr,
            max_cqe,
            max_mr,
            max_qp_rd_atom,
            max_qp_init_rd_atom,
            atomic_cap,
            phys_port_cnt
        }
    );
    layout!(
        facts,
        ibv_port_attr { state, active_mtu, gid_tbl_len, max_msg_sz, lid, active_width, active_speed, link_layer }
    );
    layout!(facts, ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex });
    layout!(facts, ibv_mr { handle, lkey, rkey });
    layout!(facts, ibv_pd { handle });
    // The inline verbs jump through these.
    layout!(facts, ibv_context_ops { poll_cq, req_notify_cq, post_srq_recv, post_send, post_recv });
    layout!(facts, ibv_comp_channel { fd });
    layout!(facts, ibv_cq { context, channel });
    layout!(facts, ibv_qp { context, qp_num });
    layout!(facts, ibv_qp_cap { max_send_wr, max_recv_wr, max_inline_data });
    layout!(facts, ibv_qp_init_attr { send_cq, recv_cq, srq, cap, qp_type, sq_sig_all });
    layout!(facts, ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class });
    layout!(facts, ibv_ah_attr { grh, dlid, sl, is_global, port_num });
    layout!(
        facts,
        ibv_qp_attr {
            qp_state,
            path_mtu,
            qkey,
            rq_psn,
            sq_psn,
            dest_qp_num,
            qp_access_flags,
            ah_attr,
            pkey_index,
            max_rd_atomic,
            max_dest_rd_atomic,
            min_rnr_timer,
            port_num,
            timeout,
            retry_cnt,
            rnr_retry
        }
    );
    layout!(facts, ibv_sge { addr, length, lkey });
    layout!(facts, ibv_recv_wr { wr_id, next, sg_list, num_sge });
    layout!(facts, ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, wr });
    layout!(facts, ibv_srq_init_attr { srq_context, attr });
    layout!(facts, ibv_srq_attr { max_wr, max_sge, srq_limit });
    layout!(facts, ibv_wc { wr_id, status, opcode, vendor_err, byte_len, qp_num, wc_flags });
    within_unions(&mut facts);
    // The crate's own form of struct ibv_async_event: a union of pointers, then a 32-bit number.
    facts.push(("sizeof(struct ibv_async_event)".into(), 16));
    facts.push(("offsetof(struct ibv_async_event, event_type)".into(), 8));
    facts.push(("sizeof(enum ibv_event_type)".into(), 4));
    constants(&mut facts);
    facts
}

/// Members that the bindings name otherwise than the headers, by their place in the outer structure.
fn within_unions(facts: &mut Vec<Fact>) {
    let send = |member: &str, place: usize| (format!("offsetof(struct ibv_send_wr, {member})"), place);
    let wr = offset_of!(ibv_send_wr, wr);
    facts.extend([
        send("imm_data", offset_of!(ibv_send_wr, imm_data_invalidated_rkey_union)),
        send("wr.rdma.remote_addr", wr + offset_of!(rdma_t, remote_addr)),
        send("wr.rdma.rkey", wr + offset_of!(rdma_t, rkey)),
        send("wr.atomic.remote_addr", wr + offset_of!(atomic_t, remote_addr)),
        send("wr.atomic.compare_add", wr + offset_of!(atomic_t, compare_add)),
        send("wr.atomic.swap", wr + offset_of!(atomic_t, swap)),
        send("wr.atomic.rkey", wr + offset_of!(atomic_t, rkey)),
        send("wr.ud.ah", wr + offset_of!(ud_t, ah)),
        send("wr.ud.remote_qpn", wr + offset_of!(ud_t, remote_qpn)),
        send("wr.ud.remote_qkey", wr + offset_of!(ud_t, remote_qkey)),
    ]);
    let imm_data = offset_of!(ibv_wc, imm_data_invalidated_rkey_union);
    facts.push(("offsetof(struct ibv_wc, imm_data)".to_owned(), imm_data));
}

fn constants(facts: &mut Vec<Fact>) {
    let numbers: [(&str, u32); 30] = [
        ("IBV_ACCESS_LOCAL_WRITE", ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0),
        ("IBV_ACCESS_REMOTE_WRITE", ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0),
        ("IBV_ACCESS_REMOTE_READ", ibv_access_flags::IBV_ACCESS_REMOTE_READ.0),
        ("IBV_ACCESS_REMOTE_ATOMIC", ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0),
        ("IBV_ACCESS_RELAXED_ORDERING", ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0),
        ("IBV_QP_STATE", ibv_qp_attr_mask::IBV_QP_STATE.0),
        ("IBV_QP_AV", ibv_qp_attr_mask::IBV_QP_AV.0),
        ("IBV_QP_DEST_QPN", ibv_qp_attr_mask::IBV_QP_DEST_QPN.0),
        ("IBV_QPS_INIT", ibv_qp_state::IBV_QPS_INIT),
        ("IBV_QPS_RTS", ibv_qp_state::IBV_QPS_RTS),
        ("IBV_QPS_ERR", ibv_qp_state::IBV_QPS_ERR),
        ("IBV_SEND_FENCE", ibv_send_flags::IBV_SEND_FENCE.0),
        ("IBV_SEND_SIGNALED", ibv_send_flags::IBV_SEND_SIGNALED.0),
        ("IBV_SEND_INLINE", ibv_send_flags::IBV_SEND_INLINE.0),
        ("IBV_WC_WITH_IMM", ibv_wc_flags::IBV_WC_WITH_IMM.0),
        ("IBV_WC_RECV_RDMA_WITH_IMM", ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM),
        ("IBV_WC_WR_FLUSH_ERR", ibv_wc_status::IBV_WC_WR_FLUSH_ERR),
        ("IBV_WC_REM_ACCESS_ERR", ibv_wc_status::IBV_WC_REM_ACCESS_ERR),
        ("IBV_WR_RDMA_WRITE_WITH_IMM", ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM),
        ("IBV_WR_RDMA_READ", ibv_wr_opcode::IBV_WR_RDMA_READ),
        ("IBV_WR_ATOMIC_CMP_AND_SWP", ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP),
        ("IBV_WR_ATOMIC_FETCH_AND_ADD", ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD),
        ("IBV_EVENT_CQ_ERR", ibv_event_type::IBV_EVENT_CQ_ERR as u32),
        ("IBV_EVENT_DEVICE_FATAL", ibv_event_type::IBV_EVENT_DEVICE_FATAL as u32),
        ("IBV_EVENT_PORT_ERR", ibv_event_type::IBV_EVENT_PORT_ERR as u32),
        ("IBV_EVENT_SRQ_ERR", ibv_event_type::IBV_EVENT_SRQ_ERR as u32),
        ("IBV_EVENT_SRQ_LIMIT_REACHED", ibv_event_type::IBV_EVENT_SRQ_LIMIT_REACHED as u32),
        ("IBV_EVENT_QP_LAST_WQE_REACHED", ibv_event_type::IBV_EVENT_QP_LAST_WQE_REACHED as u32),
        ("IBV_SRQ_LIMIT", ibv_srq_attr_mask::IBV_SRQ_LIMIT.0),
        ("IBV_EVENT_GID_CHANGE", ibv_event_type::IBV_EVENT_GID_CHANGE as u32),
    ];
    let number = |value: u32| usize::try_from(value).expect("32 bits fit a word");
    facts.extend(numbers.into_iter().map(|(name, value)| (name.to_owned(), number(value))));
}

#[test]
fn layouts_and_numbers_are_those_of_the_headers() {
    let facts = facts();
    let folder = tempfile::tempdir().expect("a folder can be made");
    let (source, program) = (folder.path().join("abi.c"), folder.path().join("abi"));
    let mut text =
        String::from("#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\nint main(void) {\n");
    for (question, _) in &facts {
        text.push_str(&format!("  printf(\"%zu\\n\", (size_t)({question}));\n"));
    }
    text.push_str("  return 0;\n}\n");
    std::fs::write(&source, text).expect("the folder takes a file");
    let compiled = Command::new("cc").arg(&source).arg("-o").arg(&program).status().expect("there is a C compiler");
    assert!(compiled.success(), "cc: {compiled}");
    let output = Command::new(&program).output().expect("the program runs");
    let answers = String::from_utf8(output.stdout).expect("numbers are text");
    let answers: Vec<usize> = answers.lines().map(|line| line.parse().expect("a number a line")).collect();
    assert_eq!(answers.len(), facts.len());
    for ((question, ours), headers) in facts.iter().zip(answers) {
        assert_eq!(*ours, headers, "{question}");
    }
}
