//! The fault script: what goes wrong on a simulated host, and when.
//!
//! Triggers count calls and operations, not time, so that a run repeats. Names are checked against
//! the host when a script is injected; this module knows neither GPUs nor HCAs.

mod parse;
mod rules;

use std::time::Duration;

pub use parse::ScriptError;
pub(crate) use rules::FaultRules;

/// Most rules of one script.
pub const MAX_RULES: usize = 1024;
/// Longest script text, bytes.
pub const MAX_SCRIPT_BYTES: usize = 64 * 1024;
/// Longest delay that a rule may ask for.
pub const MAX_DELAY: Duration = Duration::from_secs(60);

/// A parsed script. Its text form has one rule a line, blank lines, and comments from `#` on:
///
/// ```text
/// at 100 ops on mlx5_0: link-down port 1     # once mlx5_0 has executed 100 work requests
/// at 200 ops on mlx5_0: gpu GPU0 lost
/// hca mlx5_0: link-up port 1                 # now; also gid-change port 1, fatal
/// gpu GPU0: lost                             # now; also healthy
/// register on mlx5_0: fail enomem times 2    # the next two registrations there
/// register on mlx5_0 after 3: fail enomem    # from the fourth on
/// register: delay 20ms                       # each, on every HCA
/// register: cost 1900us and 5us a MiB        # each, by its length
/// completion on mlx5_1: delay 5ms
/// allocate on GPU1: fail eio times 1
/// register on mlx5_0: hang                   # until
/// hca mlx5_0: go-on                          # and `gpu GPU1: go-on` for calls on it
/// ```
///
/// Calls: `register`, `deregister`, `alloc-pd`, `create-cq`, `create-qp`, `connect`, `completion` (delay only)
/// on HCAs; `allocate`, `scrub` on GPUs. Errors: `enomem`, `einval`, `eopnotsupp`, `enodev`, `eio`, `eagain`,
/// `ebusy`, `eperm`, `emfile`, `efault`, `enotsupp` (524). An HCA whose call fails with `enodev` is gone with it, as by `fatal`; `eio` is of that call alone. A later rule for the same call and target acts only once earlier ones are used up.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultScript {
    /// Rules in the order of the text.
    pub rules: Vec<FaultRule>,
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultRule {
    /// Happens at once.
    Now(FaultEvent),
    /// Happens when an HCA has executed so many more work requests, before it executes the next one.
    AtOps {
        /// The HCA whose work requests are counted.
        hca: String,
        /// How many more, from the moment of injection.
        ops: u64,
        /// What happens.
        event: FaultEvent,
    },
    /// Changes how calls end.
    OnCall {
        /// Which calls.
        call: Call,
        /// Only on this HCA (name) or GPU (name or UUID); on all otherwise.
        target: Option<String>,
        /// This many calls are let pass first.
        after: u64,
        /// What happens to the call.
        effect: Effect,
        /// How often; without end otherwise.
        times: Option<u64>,
    },
}

/// Something that happens to a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultEvent {
    /// The port loses its link.
    LinkDown {
        /// The HCA.
        hca: String,
        /// The port, counted from 1.
        port_num: u8,
    },
    /// The port is active again.
    LinkUp {
        /// The HCA.
        hca: String,
        /// The port, counted from 1.
        port_num: u8,
    },
    /// All GIDs of the port are replaced; connections made with the old ones get no answer any more.
    GidChange {
        /// The HCA.
        hca: String,
        /// The port, counted from 1.
        port_num: u8,
    },
    /// The HCA is unusable from now on.
    DeviceFatal {
        /// The HCA.
        hca: String,
    },
    /// The GPU fell off the bus.
    GpuLost {
        /// Name or UUID.
        gpu: String,
    },
    /// The GPU is usable again.
    GpuHealthy {
        /// Name or UUID.
        gpu: String,
    },
    /// Calls that hang on the HCA go on, and none hangs there any more.
    HcaGoesOn {
        /// The HCA.
        hca: String,
    },
    /// Calls that hang on the GPU go on, and none hangs there any more.
    GpuGoesOn {
        /// Name or UUID.
        gpu: String,
    },
}

/// Calls that rules can change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Call {
    /// Registration of memory.
    Register,
    /// Deregistration; the region ends even so.
    Deregister,
    /// A new protection domain.
    AllocPd,
    /// A new completion queue.
    CreateCq,
    /// A new queue pair.
    CreateQp,
    /// INIT to RTS.
    Connect,
    /// A completion becoming visible.
    Completion,
    /// GPU memory allocation.
    Allocate,
    /// Zeroing of GPU memory.
    Scrub,
}

impl Call {
    /// All calls, with their words in scripts.
    pub const ALL: [(&'static str, Self); 9] = [
        ("register", Self::Register),
        ("deregister", Self::Deregister),
        ("alloc-pd", Self::AllocPd),
        ("create-cq", Self::CreateCq),
        ("create-qp", Self::CreateQp),
        ("connect", Self::Connect),
        ("completion", Self::Completion),
        ("allocate", Self::Allocate),
        ("scrub", Self::Scrub),
    ];

    /// Whether the call is made on a GPU rather than an HCA.
    #[must_use]
    pub fn is_on_gpu(self) -> bool {
        matches!(self, Self::Allocate | Self::Scrub)
    }
}

/// What happens to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Effect {
    /// It fails with this errno.
    Fail(i32),
    /// It takes that much longer. Calls block; completions are held back, in order.
    Delay(Duration),
    /// It blocks until its device goes on.
    Hang,
    /// A registration takes that much, and that much more for each MiB begun, as on hardware.
    Cost {
        /// Of each call.
        call: Duration,
        /// Of each MiB.
        per_mib: Duration,
    },
}
