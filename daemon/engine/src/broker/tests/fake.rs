//! An HCA driven by hand, for what the simulator rightly never does: refuse in the middle of a batch, complete
//! out of order, never flush. By hand it serves one queue pair each; completing by itself, any number.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use gdrd_hal::{
    CompletionQueue, CqId, Endpoint, Hca, HcaCapabilities, HcaError, HcaEvent, MemoryRegion, MemorySource, Opcode,
    PortAttributes, PostError, ProtectionDomain, QueuePair, QueuePairConfig, QueuePairParts, QueuePairState,
    ReceiveRequest, SharedReceiveQueue, SrqId, WorkCompletion, WorkQueue, WorkRequest, WorkStatus,
};
use gdrd_sim::Provider;

const SUCCESS: WorkCompletion = WorkCompletion { status: WorkStatus::Success, ..WorkCompletion::EMPTY };

#[derive(Default)]
pub(super) struct State {
    /// What was posted and not completed, in order.
    pub(super) sends: VecDeque<WorkRequest>,
    pub(super) receives: VecDeque<ReceiveRequest>,
    /// Whether sends succeed as soon as they are posted.
    pub(super) completes: bool,
    /// What the next polls find.
    pub(super) completions: VecDeque<WorkCompletion>,
    /// Operations that every post refuses.
    pub(super) refuses: Vec<(Opcode, PostError)>,
    /// What polling answers.
    pub(super) cq_error: Option<HcaError>,
    /// What moving to ERR answers; it never flushes.
    pub(super) stop_error: Option<HcaError>,
    pub(super) stopped: bool,
    pub(super) destroyed: bool,
    pub(super) cq_destroyed: bool,
    /// What happens in the next call that makes something.
    interruption: Option<Box<dyn FnOnce() + Send>>,
}

#[derive(Clone, Default)]
pub(crate) struct Fake(Arc<Mutex<State>>);

impl Fake {
    pub(super) fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.0.lock().expect("no test panics under the lock"))
    }

    pub(super) fn posted(&self) -> Vec<Opcode> {
        self.with(|state| state.sends.iter().map(|request| request.opcode).collect())
    }

    /// Completes the send at `index` of those posted.
    pub(super) fn complete(&self, index: usize, status: WorkStatus) {
        self.with(|state| {
            let request = state.sends.remove(index).expect("posted");
            let done = WorkCompletion { wr_id: request.wr_id, status, opcode: request.opcode, ..WorkCompletion::EMPTY };
            state.completions.push_back(done);
        });
    }

    /// In the next call that makes a domain or a completion queue, before it does.
    pub(crate) fn at_next_call(&self, interruption: impl FnOnce() + Send + 'static) {
        self.with(|state| state.interruption = Some(Box::new(interruption)));
    }

    fn interrupt(&self) {
        if let Some(interruption) = self.with(|state| state.interruption.take()) {
            interruption();
        }
    }

    pub(super) fn gone() -> HcaError {
        HcaError::Gone { hca: "fake_0".to_owned(), reason: "pulled".to_owned() }
    }
}

impl Hca for Fake {
    fn name(&self) -> &str {
        "fake_0"
    }
    fn capabilities(&self) -> HcaCapabilities {
        Provider::Mlx5.capabilities()
    }
    fn ports(&self) -> Result<Vec<PortAttributes>, HcaError> {
        Ok(Vec::new())
    }
    fn alloc_pd(&self) -> Result<Arc<dyn ProtectionDomain>, HcaError> {
        self.interrupt();
        Ok(Arc::new(self.clone()))
    }
    fn create_cq(&self, _depth: u32) -> Result<Box<dyn CompletionQueue>, HcaError> {
        self.interrupt();
        Ok(Box::new(Queue(self.clone())))
    }
    fn take_events(&self) -> Vec<HcaEvent> {
        Vec::new()
    }
}

impl ProtectionDomain for Fake {
    fn register(&self, _: MemorySource<'_>, _: gdrd_hal::Access, _: u64) -> Result<Box<dyn MemoryRegion>, HcaError> {
        Err(Self::gone())
    }
    fn create_queue_pair(&self, _: CqId, _: &QueuePairConfig) -> Result<QueuePairParts, HcaError> {
        let owner = Arc::new(Owner(self.clone()));
        Ok(QueuePairParts { control: Arc::clone(&owner) as Arc<dyn QueuePair>, work: Box::new(Work(owner)) })
    }
    fn create_shared_receive_queue(&self, _: u32) -> Result<Box<dyn SharedReceiveQueue>, HcaError> {
        Err(Self::gone())
    }
    fn create_queue_pair_on(&self, _: CqId, _: SrqId, _: &QueuePairConfig) -> Result<QueuePairParts, HcaError> {
        Err(Self::gone())
    }
}

struct Queue(Fake);

impl Drop for Queue {
    fn drop(&mut self) {
        self.0.with(|state| state.cq_destroyed = true);
    }
}

impl CompletionQueue for Queue {
    fn id(&self) -> CqId {
        CqId(1)
    }
    fn poll(&mut self, out: &mut [WorkCompletion]) -> Result<usize, HcaError> {
        self.0.with(|state| {
            if let Some(error) = &state.cq_error {
                return Err(error.clone());
            }
            let count = out.len().min(state.completions.len());
            for (place, completion) in out.iter_mut().zip(state.completions.drain(..count)) {
                *place = completion;
            }
            Ok(count)
        })
    }
    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn arm(&mut self) -> Result<(), HcaError> {
        Ok(())
    }
}

struct Owner(Fake);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.with(|state| state.destroyed = true);
    }
}

impl QueuePair for Owner {
    fn qp_num(&self) -> u32 {
        77
    }
    fn state(&self) -> Result<QueuePairState, HcaError> {
        Ok(QueuePairState::Rts)
    }
    fn to_init(&self) -> Result<(), HcaError> {
        Ok(())
    }
    fn endpoint(&self) -> Result<Endpoint, HcaError> {
        Err(Fake::gone())
    }
    fn connect(&self, _: &Endpoint) -> Result<(), HcaError> {
        Ok(())
    }
    fn to_error(&self) -> Result<(), HcaError> {
        self.0.with(|state| {
            state.stopped = true;
            state.stop_error.clone().map_or(Ok(()), Err)
        })
    }
}

struct Work(Arc<Owner>);

impl WorkQueue for Work {
    fn post_send(&mut self, requests: &[WorkRequest]) -> Result<(), (usize, PostError)> {
        self.0.0.with(|state| {
            for (taken, request) in requests.iter().enumerate() {
                if let Some((_, why)) = state.refuses.iter().find(|(opcode, _)| *opcode == request.opcode) {
                    return Err((taken, *why));
                }
                if state.completes {
                    let (wr_id, opcode) = (request.wr_id, request.opcode);
                    state.completions.push_back(WorkCompletion { wr_id, opcode, ..SUCCESS });
                } else {
                    state.sends.push_back(*request);
                }
            }
            Ok(())
        })
    }
    fn post_recv(&mut self, requests: &[ReceiveRequest]) -> Result<(), (usize, PostError)> {
        self.0.0.with(|state| state.receives.extend(requests));
        Ok(())
    }
}
