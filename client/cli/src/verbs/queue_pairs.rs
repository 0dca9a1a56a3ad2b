//! `gdrctl queue-pairs`: the queue pairs of the caller's tenant, or all for an administrator.

use gdrd_client::v1;
use serde_json::{Value, json};

use crate::args::Global;
use crate::exit::Outcome;
use crate::host;
use crate::output::{self, Column};

#[inline(never)]
pub(crate) fn run(global: &Global) -> anyhow::Result<Outcome> {
    let queue_pairs = host::block_on(async {
        let (_client, session) = host::open_session(global).await?;
        Ok(session.queue_pairs().await?)
    })?;
    let rows = || queue_pairs.iter().map(as_json).collect::<Vec<_>>();
    let json = || json!({ "schema": "gdrd.queue-pairs/v1", "queue_pairs": rows() });
    output::print(global.format, json, || as_text(&queue_pairs))
}

fn type_of(queue_pair: &v1::QueuePair) -> &'static str {
    match queue_pair.r#type() {
        v1::QueuePairType::Rc => "RC",
        v1::QueuePairType::Ud => "UD",
        v1::QueuePairType::Unspecified => "unknown",
    }
}

fn as_json(queue_pair: &v1::QueuePair) -> Value {
    json!({
        "queue_pair_id": queue_pair.queue_pair_id,
        "hca": queue_pair.hca,
        "port_num": queue_pair.port_num,
        "qp_num": queue_pair.qp_num,
        "type": type_of(queue_pair),
        "state": queue_pair.state,
        "send_depth": queue_pair.send_depth,
        "recv_depth": queue_pair.recv_depth,
        "max_inline_bytes": queue_pair.max_inline_bytes,
        "tenant": queue_pair.tenant,
        "provider_note": queue_pair.provider_note,
    })
}

fn as_text(queue_pairs: &[v1::QueuePair]) -> String {
    if queue_pairs.is_empty() {
        return "there are no queue pairs\n".to_owned();
    }
    let columns = [
        Column::Right("ID"),
        Column::Left("HCA"),
        Column::Right("PORT_NUM"),
        Column::Right("QP_NUM"),
        Column::Left("TYPE"),
        Column::Left("STATE"),
        Column::Right("DEPTHS"),
        Column::Left("TENANT"),
    ];
    output::table(&columns, queue_pairs.iter().map(row))
}

fn row(queue_pair: &v1::QueuePair) -> Vec<String> {
    vec![
        queue_pair.queue_pair_id.to_string(),
        queue_pair.hca.clone(),
        queue_pair.port_num.to_string(),
        queue_pair.qp_num.to_string(),
        type_of(queue_pair).to_owned(),
        queue_pair.state.clone(),
        format!("{}/{}", queue_pair.send_depth, queue_pair.recv_depth),
        queue_pair.tenant.clone(),
    ]
}
