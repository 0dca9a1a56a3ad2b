//! What happens to a GPU while it is in use: Xid errors, and memory errors that ECC could not correct.

use std::ffi::OsStr;

use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError as Told;
use serde::{Deserialize, Serialize};

use crate::NvmlError;

/// One wait for an event, ms. The waiting thread ends with its process; this is how long a wait goes without asking
/// whether the GPU is still there.
const WAIT_MS: u32 = 60_000;

/// Xids after which a GPU is of no use before it is reset, with what each means ('XID Errors', NVIDIA data center
/// documentation). All others are of one application, or may pass.
const FATAL_XIDS: [(u64, &str); 9] = [
    (48, "double-bit ecc error"),
    (62, "internal micro-controller halt"),
    (64, "memory row that could not be remapped"),
    (79, "gpu has fallen off the bus"),
    (95, "uncontained memory error"),
    (119, "gsp does not answer"),
    (120, "gsp error"),
    (140, "unrecovered ecc error"),
    (143, "gpu initialisation error"),
];

/// Something that the driver reports of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum HealthEvent {
    /// An Xid error; `None` where the driver does not tell the number.
    Xid(Option<u64>),
    /// Memory content that ECC found wrong and could not correct.
    UncorrectedEcc,
    /// The GPU answers no more.
    Lost(String),
}

impl HealthEvent {
    /// Why the GPU is of no use from now on; `None` where it goes on.
    #[must_use]
    pub fn ends_service(&self) -> Option<String> {
        match self {
            Self::Xid(Some(xid)) => {
                let (_, meaning) = FATAL_XIDS.iter().find(|(fatal, _)| fatal == xid)?;
                Some(format!("xid {xid}: {meaning}"))
            }
            Self::Xid(None) => None,
            Self::UncorrectedEcc => Some("uncorrected ecc error".to_owned()),
            Self::Lost(reason) => Some(reason.clone()),
        }
    }
}

impl std::fmt::Display for HealthEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Xid(Some(xid)) => write!(f, "xid {xid}"),
            Self::Xid(None) => f.write_str("xid of unknown number"),
            Self::UncorrectedEcc => f.write_str("uncorrected ecc error"),
            Self::Lost(reason) => write!(f, "lost: {reason}"),
        }
    }
}

/// Tells the events of one GPU as they come, until `tell` says no or the GPU is lost. Blocks. `library` is where NVML is,
/// unless it is to be found by name. The library opens the device files of **all** GPUs while it is loaded
/// (`NVML_INIT_FLAG_NO_ATTACH` does not help: no GPU is found then), so a process that watches blocks the reset of any.
///
/// # Errors
/// Without the library, the GPU, or events of it.
pub fn watch(library: Option<&OsStr>, uuid: &str, mut tell: impl FnMut(&HealthEvent) -> bool) -> Result<(), NvmlError> {
    let nvml = crate::ask::start(library)?;
    let events = register(&nvml, uuid).map_err(NvmlError::Watch)?;
    loop {
        let event = match events.wait(WAIT_MS) {
            Ok(event) if event.event_type.contains(EventTypes::CRITICAL_XID_ERROR) => {
                HealthEvent::Xid(event.event_data.and_then(|xid| match xid {
                    XidError::Value(xid) => Some(xid),
                    XidError::Unknown => None,
                }))
            }
            Ok(_) => HealthEvent::UncorrectedEcc,
            Err(Told::Timeout) => continue,
            Err(error @ (Told::GpuLost | Told::ResetRequired)) => HealthEvent::Lost(error.to_string()),
            Err(error) => return Err(NvmlError::Watch(error)),
        };
        if !tell(&event) || matches!(event, HealthEvent::Lost(_)) {
            return Ok(());
        }
    }
}

fn register<'n>(nvml: &'n Nvml, uuid: &str) -> Result<nvml_wrapper::EventSet<'n>, Told> {
    let device = nvml.device_by_uuid(uuid)?;
    let wanted = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
    // Consumer GPUs have no ECC.
    let events = wanted & device.supported_event_types()?;
    device.register_events(events, nvml.create_event_set()?).map_err(|error| error.error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xids_of_applications_do_not_end_service() {
        for xid in [13, 31, 43, 45, 63, 92, 94] {
            assert_eq!(HealthEvent::Xid(Some(xid)).ends_service(), None, "{xid}");
        }
        let fatal = HealthEvent::Xid(Some(79)).ends_service().expect("it is off the bus");
        assert!(fatal.contains("79") && fatal.contains("bus"), "{fatal}");
        assert!(HealthEvent::UncorrectedEcc.ends_service().is_some());
    }

    #[test]
    fn events_travel_as_json() {
        for event in [HealthEvent::Xid(Some(79)), HealthEvent::UncorrectedEcc, HealthEvent::Lost("gone".to_owned())] {
            let text = serde_json::to_string(&event).expect("plain data");
            assert_eq!(serde_json::from_str::<HealthEvent>(&text).expect("written just now"), event);
        }
    }
}
