//! What a GPU driver tells, as a file: how a capture carries NVLinks, fabric and slices, of which sysfs says nothing.

use serde::{Deserialize, Serialize};

use crate::error::TopologyError;
use crate::model::DriverFacts;

/// Name and version of the form.
pub const DRIVER_SCHEMA: &str = "gdrd.driver/v1";
/// Its place in a captured tree, beside the driver's own files.
pub(crate) const DRIVER_FILE: &str = "proc/driver/nvidia/nvml.json";
/// Longest file that is read; a GPU takes about 1 KiB. As much as of a table in `/proc`.
pub const MAX_DRIVER_BYTES: usize = 65_536;

#[derive(Serialize, Deserialize)]
struct File {
    schema: String,
    #[serde(flatten)]
    facts: DriverFacts,
}

/// As text, for [`from_text`] and captures.
#[must_use]
pub fn to_text(facts: &DriverFacts) -> String {
    let file = File { schema: DRIVER_SCHEMA.to_owned(), facts: facts.clone() };
    serde_json::to_string(&file).expect("facts hold only strings, numbers and lists of them")
}

/// What [`to_text`] wrote, by this version or a later one that added keys.
///
/// # Errors
/// Text of another form.
pub fn from_text(text: &str) -> Result<DriverFacts, TopologyError> {
    let bad = |message| TopologyError::BadInput { path: None, what: "facts of a GPU driver", message };
    let file: File = serde_json::from_str(text).map_err(|error| bad(error.to_string()))?;
    if file.schema != DRIVER_SCHEMA {
        return Err(bad(format!("its schema is {:?}, not {DRIVER_SCHEMA}", file.schema)));
    }
    Ok(file.facts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Fabric, FabricState, GpuDetail, GpuFacts, NvLinkBundle, NvLinkRemote};
    use crate::source::SourceKind;

    #[test]
    fn what_is_written_reads_back_and_another_form_is_an_error() {
        let fabric = Fabric { state: FabricState::Completed, cluster_uuid: None, clique_id: Some(0), problems: vec![] };
        let links = [NvLinkRemote::Switch, NvLinkRemote::Gpu("0000:07:00.0".parse().expect("an address"))];
        let bundle = |remote| NvLinkBundle { remote, links: 18, link_gbps: Some(200.0) };
        let detail =
            GpuDetail { nvlinks: Some(links.map(bundle).to_vec()), fabric: Some(fabric), ..GpuDetail::default() };
        let bdf = "0000:06:00.0".parse().expect("an address");
        let gpu = GpuFacts { bdf, uuid: Some("GPU-1".to_owned()), device_node: None, detail };
        let facts = DriverFacts { source: SourceKind::Nvml, gpus: vec![gpu], warnings: Vec::new() };
        let text = to_text(&facts);
        assert_eq!(from_text(&text).expect("it was written just now"), facts);
        assert!(from_text(&text.replace("driver/v1", "driver/v9")).is_err());
        assert!(from_text("{}").is_err() && from_text("").is_err());
    }
}
