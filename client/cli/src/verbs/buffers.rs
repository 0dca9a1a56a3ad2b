//! `gdrctl buffers`: the leases of the caller's tenant, or all for an administrator.

use gdrd_client::v1;
use serde_json::{Value, json};

use crate::args::Global;
use crate::exit::Outcome;
use crate::host;
use crate::output::{self, Column};

#[inline(never)]
pub(crate) fn run(global: &Global) -> anyhow::Result<Outcome> {
    let leases = host::block_on(async {
        let (_client, session) = host::open_session(global).await?;
        Ok(session.leases().await?)
    })?;
    let json = || json!({ "schema": "gdrd.buffers/v1", "buffers": leases.iter().map(as_json).collect::<Vec<_>>() });
    output::print(global.format, json, || as_text(&leases))
}

fn as_json(lease: &v1::Lease) -> Value {
    let registrations = lease.registrations.iter().map(|registration| {
        json!({
            "hca": registration.hca,
            "slot": registration.slot,
            "generation": registration.generation,
            "iova": registration.iova,
            "length_bytes": registration.length_bytes,
        })
    });
    json!({
        "lease_id": lease.lease_id,
        "generation": lease.generation,
        "size_bytes": lease.size_bytes,
        "gpu_uuid": Some(&lease.gpu_uuid).filter(|uuid| !uuid.is_empty()),
        "memory_kind": lease.memory_kind,
        "label": lease.label,
        "holders": lease.holders,
        "tenant": lease.tenant,
        "ttl_s": lease.ttl.as_ref().map(|ttl| ttl.seconds),
        "registrations": registrations.collect::<Vec<_>>(),
    })
}

fn as_text(leases: &[v1::Lease]) -> String {
    if leases.is_empty() {
        return "no buffers are leased\n".to_owned();
    }
    let columns = [
        Column::Right("LEASE"),
        Column::Right("SIZE"),
        Column::Left("PLACE"),
        Column::Left("REGISTERED WITH"),
        Column::Right("HOLDERS"),
        Column::Left("TENANT"),
        Column::Left("LABEL"),
    ];
    output::table(&columns, leases.iter().map(row))
}

fn row(lease: &v1::Lease) -> Vec<String> {
    let hcas: Vec<&str> = lease.registrations.iter().map(|registration| registration.hca.as_str()).collect();
    let holders = match &lease.ttl {
        Some(ttl) => format!("detached, {} s left", ttl.seconds),
        None => lease.holders.to_string(),
    };
    vec![
        lease.lease_id.to_string(),
        output::bytes(lease.size_bytes),
        if lease.gpu_uuid.is_empty() { "host".to_owned() } else { lease.gpu_uuid.clone() },
        hcas.join(","),
        holders,
        lease.tenant.clone(),
        lease.label.clone(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease() -> v1::Lease {
        let registration = v1::Registration { hca: "mlx5_0".into(), rkey: 99_887_766, ..Default::default() };
        v1::Lease { lease_id: 4, size_bytes: 2 << 20, registrations: vec![registration], ..Default::default() }
    }

    #[test]
    fn no_output_holds_a_key() {
        assert!(!as_json(&lease()).to_string().contains("99887766"));
        assert!(!as_text(&[lease()]).contains("99887766"));
    }

    #[test]
    fn host_memory_and_an_empty_list_are_named() {
        assert!(as_text(&[lease()]).contains("host"));
        assert_eq!(as_json(&lease())["gpu_uuid"], Value::Null);
        assert_eq!(as_text(&[]), "no buffers are leased\n");
    }
}
