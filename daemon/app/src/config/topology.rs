//! Table `topology`: how often the host is read, and the operator's word on what is a GPU and which NICs it uses.

use std::collections::BTreeMap;
use std::path::PathBuf;

use gdrd_topology::assemble::{GpuIds, ReadOptions};
use gdrd_topology::bdf::Bdf;
use gdrd_topology::level::Level;
use gdrd_topology::nccl_xml::NcclTopology;
use gdrd_topology::plan::{NicFilter, Pin, PlanOptions};
use gdrd_topology::read_nccl_topology;
use serde::{Deserialize, Serialize};

use super::ConfigError;
use super::range::Ranges;

/// Most entries of a list here.
const MAX_ENTRIES: usize = 1024;

/// Table `topology`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TopologyKeys {
    /// How often the host is read again, seconds; 0 for never.
    pub(crate) rescan_interval_s: u64,
    /// PCI ids that count as GPU beside the built-in rule.
    pub(crate) gpu_ids: Vec<String>,
    /// NCCL topology XML to lay over the host's own tree; empty for none.
    pub(crate) nccl_topology: PathBuf,
    /// NICs that may be used, in the syntax of NCCL_IB_HCA; empty for all.
    pub(crate) nic_filter: String,
    /// Farthest level that is still assigned.
    pub(crate) max_level: String,
    /// GPUs with NICs fixed by hand.
    pub(crate) pins: Vec<PinKeys>,
    /// Rails by NIC name, over those by PCI order.
    pub(crate) rails: BTreeMap<String, u32>,
}

/// One pin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PinKeys {
    pub(crate) gpu: String,
    pub(crate) nics: Vec<String>,
}

impl Default for TopologyKeys {
    fn default() -> Self {
        Self {
            rescan_interval_s: 60,
            gpu_ids: Vec::new(),
            nccl_topology: PathBuf::new(),
            nic_filter: String::new(),
            max_level: Level::Sys.to_string(),
            pins: Vec::new(),
            rails: BTreeMap::new(),
        }
    }
}

impl TopologyKeys {
    pub(super) fn check(&self, ranges: &mut Ranges) -> Result<(), ConfigError> {
        // 0 stands for never; more often than every 30 s would make an idle daemon a busy one.
        if self.rescan_interval_s != 0 {
            ranges.within("topology.rescan_interval_s", self.rescan_interval_s, 30, 24 * 3600);
        }
        for (key, entries) in [("gpu_ids", self.gpu_ids.len()), ("pins", self.pins.len()), ("rails", self.rails.len())]
        {
            ranges.at_most(&format!("topology.{key}"), entries, MAX_ENTRIES);
        }
        for (index, pin) in self.pins.iter().enumerate() {
            // Which NICs a GPU may not use is for nic_filter to say.
            ranges.not_empty(&format!("topology.pins[{index}].nics"), pin.nics.len());
            ranges.at_most(&format!("topology.pins[{index}].nics"), pin.nics.len(), MAX_ENTRIES);
            if self.pins.iter().take(index).any(|other| other.gpu == pin.gpu) {
                let allowed = "one pin for each GPU, with all of its nics, is".to_owned();
                ranges.refuse_text(&format!("topology.pins[{index}].gpu"), &format!("{:?}", pin.gpu), allowed);
            }
        }
        self.read_options()?;
        let filter = self.plan_options()?.filter;
        for (index, pin) in self.pins.iter().enumerate() {
            // Of one by address the name is known on the host only.
            let is_name = |nic: &&String| nic.parse::<Bdf>().is_err();
            let is_filtered = |nic: &&String| filter.as_ref().is_some_and(|filter| !filter.allows_name(nic));
            if let Some(nic) = pin.nics.iter().filter(is_name).find(is_filtered) {
                let allowed = format!("a NIC that topology.nic_filter = {:?} leaves in is", self.nic_filter);
                ranges.refuse_text(&format!("topology.pins[{index}].nics"), &format!("{nic:?}"), allowed);
            }
        }
        Ok(())
    }

    /// How the host is read.
    ///
    /// # Errors
    /// `Value`.
    pub(crate) fn read_options(&self) -> Result<ReadOptions, ConfigError> {
        let gpu_ids = GpuIds::parse(self.gpu_ids.iter().map(String::as_str));
        let gpu_ids = gpu_ids.map_err(|error| refused("gpu_ids", &self.gpu_ids.join(", "), &error))?;
        Ok(ReadOptions { gpu_ids, nccl_topology: self.nccl_topology()?, driver: None })
    }

    /// The operator's topology, read and checked.
    fn nccl_topology(&self) -> Result<Option<NcclTopology>, ConfigError> {
        if self.nccl_topology.as_os_str().is_empty() {
            return Ok(None);
        }
        let wrong = |error: &dyn std::error::Error| {
            let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
            let path = self.nccl_topology.display().to_string();
            refused("nccl_topology", &path, &format!("it must be NCCL topology XML, but {error}{cause}"))
        };
        read_nccl_topology(&self.nccl_topology).map(Some).map_err(|error| wrong(&error))
    }

    /// How its GPUs are paired.
    ///
    /// # Errors
    /// `Value`.
    pub(crate) fn plan_options(&self) -> Result<PlanOptions, ConfigError> {
        let filter = match self.nic_filter.as_str() {
            "" => None,
            text => Some(text.parse::<NicFilter>().map_err(|error| refused("nic_filter", text, &error))?),
        };
        let max_level = Level::parse(&self.max_level).filter(|level| !matches!(level, Level::Same | Level::NvLink(_)));
        let levels = &"PIX, PXB, PHB, NODE and SYS are";
        let max_level = max_level.ok_or_else(|| refused("max_level", &self.max_level, levels))?;
        let pin = |pin: &PinKeys| Pin { gpu: pin.gpu.clone(), nics: pin.nics.clone() };
        Ok(PlanOptions {
            filter,
            pins: self.pins.iter().map(pin).collect(),
            max_level,
            rails: self.rails.clone(),
            ..PlanOptions::default()
        })
    }
}

fn refused(key: &str, value: &str, allowed: &dyn std::fmt::Display) -> ConfigError {
    ConfigError::Value { key: format!("topology.{key}"), value: format!("{value:?}"), allowed: allowed.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(keys: &TopologyKeys) -> Result<(), String> {
        let mut ranges = Ranges::default();
        let checked = keys.check(&mut ranges).and_then(|()| ranges.finish());
        checked.map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_those_of_the_library() {
        let keys = TopologyKeys::default();
        assert_eq!(checked(&keys), Ok(()));
        assert_eq!(keys.read_options().expect("valid"), ReadOptions::default());
        assert_eq!(keys.plan_options().expect("valid"), PlanOptions::default());
    }

    #[test]
    fn wrong_words_are_named_with_their_key() {
        let keys = TopologyKeys { max_level: "PIXX".to_owned(), ..TopologyKeys::default() };
        let message = checked(&keys).expect_err("no level");
        assert_eq!(message, "topology.max_level = \"PIXX\" is not allowed; PIX, PXB, PHB, NODE and SYS are");
        let keys = TopologyKeys { gpu_ids: vec!["1bcf".to_owned()], ..TopologyKeys::default() };
        assert!(checked(&keys).expect_err("no id").starts_with("topology.gpu_ids"));
        let keys = TopologyKeys { nic_filter: "^".to_owned(), ..TopologyKeys::default() };
        assert!(checked(&keys).expect_err("no name").starts_with("topology.nic_filter"));
    }

    #[test]
    fn a_pin_names_at_least_one_nic() {
        let pin = PinKeys { gpu: "GPU1".to_owned(), nics: Vec::new() };
        let keys = TopologyKeys { pins: vec![pin], ..TopologyKeys::default() };
        let message = checked(&keys).expect_err("no NIC");
        assert_eq!(message, "topology.pins[0].nics = 0 is not allowed; lists of at least one entry are");
    }

    #[test]
    fn pins_of_one_gpu_and_to_nics_that_are_filtered_out_are_refused_by_name() {
        let pin = |nic: &str| PinKeys { gpu: "GPU1".to_owned(), nics: vec![nic.to_owned()] };
        let keys = TopologyKeys { pins: vec![pin("mlx5_0"), pin("mlx5_1")], ..TopologyKeys::default() };
        let message = checked(&keys).expect_err("two pins");
        assert_eq!(
            message,
            "topology.pins[1].gpu = \"GPU1\" is not allowed; one pin for each GPU, with all of its nics, is"
        );
        let filter = "^=mlx5_0".to_owned();
        let keys = TopologyKeys { nic_filter: filter.clone(), pins: vec![pin("mlx5_0")], ..TopologyKeys::default() };
        let message = checked(&keys).expect_err("it is filtered out");
        assert_eq!(
            message,
            "topology.pins[0].nics = \"mlx5_0\" is not allowed; a NIC that topology.nic_filter = \"^=mlx5_0\" leaves in is"
        );
        let keys = TopologyKeys { nic_filter: filter, pins: vec![pin("mlx5_1")], ..TopologyKeys::default() };
        assert_eq!(checked(&keys), Ok(()));
    }

    #[test]
    fn a_topology_file_is_read_before_anything_starts() {
        let file = tempfile::NamedTempFile::new().expect("the temporary folder is writable");
        let keys = TopologyKeys { nccl_topology: file.path().to_owned(), ..TopologyKeys::default() };
        let message = checked(&keys).expect_err("an empty file");
        assert!(message.starts_with("topology.nccl_topology"), "{message}");
        let absent = TopologyKeys { nccl_topology: "/no/such/file".into(), ..TopologyKeys::default() };
        assert!(checked(&absent).expect_err("no file").contains("No such file"));
        std::fs::write(file.path(), "<system version=\"1\"/>").expect("it is ours");
        assert_eq!(checked(&keys), Ok(()));
        assert!(keys.read_options().expect("valid").nccl_topology.is_some());
    }

    #[test]
    fn the_operators_word_reaches_the_plan() {
        let keys = TopologyKeys {
            nic_filter: "^mlx5_0".to_owned(),
            max_level: "PXB".to_owned(),
            pins: vec![PinKeys { gpu: "GPU1".to_owned(), nics: vec!["mlx5_3".to_owned()] }],
            ..TopologyKeys::default()
        };
        let options = keys.plan_options().expect("valid");
        assert!(options.filter.is_some_and(|filter| !filter.allows_name("mlx5_0")));
        assert_eq!((options.max_level, options.pins.len()), (Level::Pxb, 1));
    }
}
