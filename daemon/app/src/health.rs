//! What the driver reports of GPUs while workers use them: Xid errors, and memory errors that ECC could not correct.
//!
//! Workers print it; here it is put down, told to the pool where it ends a GPU's service, and made known to whoever keeps
//! an eye on the host. A GPU that no worker uses is not watched, for NVML would hold its device file: what the driver says of
//! it when it is asked, as at each rescan, is put down here too.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use gdrd_cuda::WorkerPool;
use gdrd_hal::GpuUuid;
use gdrd_nvml::{HealthEvent, ProcessMemory};
use tokio::sync::Notify;

/// Most kinds of events that are counted; there are fewer Xids.
const MAX_KINDS: usize = 1024;

/// What was heard since the daemon started.
#[derive(Debug, Default)]
pub(crate) struct Health {
    pool: OnceLock<Weak<WorkerPool>>,
    counts: Mutex<BTreeMap<(GpuUuid, String), u64>>,
    news: Notify,
}

impl Health {
    /// Who is told of GPUs that are of no use any more; said once.
    pub(crate) fn serve(&self, pool: Weak<WorkerPool>) {
        // Said twice, the first stays.
        let _ = self.pool.set(pool);
    }

    /// A line that the worker of `gpu` printed.
    pub(crate) fn hear(&self, gpu: &GpuUuid, line: &str) {
        let Ok(event) = serde_json::from_str::<HealthEvent>(line) else {
            tracing::debug!(%gpu, line, "a worker printed something else than events");
            return;
        };
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.len() < MAX_KINDS {
            *counts.entry((gpu.clone(), event.to_string())).or_default() += 1;
        }
        drop(counts);
        match event.ends_service() {
            Some(reason) => {
                tracing::error!(%gpu, %reason, "a gpu is of no use until it is reset; 'gdrctl drain' lets go of it");
                if let Some(pool) = self.pool() {
                    pool.lose(gpu, &reason);
                }
            }
            None => tracing::warn!(%gpu, %event, "the driver reports an error of a gpu"),
        }
        self.news.notify_one();
    }

    /// The driver, asked, says that the GPU is of no use. Of one that is lost, or not served anyway, that is no news.
    pub(crate) fn found_ill(&self, gpu: &GpuUuid, reason: &str) {
        let Some(pool) = self.pool().filter(|pool| pool.lost(gpu).is_none()) else { return };
        pool.lose(gpu, reason);
        if pool.lost(gpu).is_some() {
            tracing::error!(%gpu, %reason, "a gpu is of no use until it is mended; 'gdrctl drain' lets go of it");
            self.news.notify_one();
        }
    }

    /// Why a GPU is served no more, by what was heard of it.
    pub(crate) fn lost(&self, gpu: &GpuUuid) -> Option<String> {
        self.pool()?.lost(gpu)
    }

    /// The driver was asked at `asked`, and says that the GPU works.
    pub(crate) fn found_well(&self, gpu: &GpuUuid, asked: Instant) {
        if let Some(pool) = self.pool() {
            pool.found_well(gpu, asked);
        }
    }

    /// Whether a GPU was resumed after that.
    pub(crate) fn was_resumed_after(&self, time: Instant) -> bool {
        self.pool().and_then(|pool| pool.last_resumed()).is_some_and(|resumed| resumed > time)
    }

    /// Bytes of the context of the process that serves a GPU, by what the driver says that its processes use.
    pub(crate) fn context_bytes(&self, gpu: &GpuUuid, processes: &[ProcessMemory]) -> u64 {
        let Some((pid, mapped_bytes)) = self.pool().and_then(|pool| pool.worker_process(gpu)) else { return 0 };
        let process = processes.iter().find(|process| process.pid == pid);
        process.and_then(|process| process.used_bytes).unwrap_or_default().saturating_sub(mapped_bytes)
    }

    /// Returns when something was heard since the last call. Cancel-safe.
    pub(crate) async fn news(&self) {
        self.news.notified().await;
    }

    /// One sentence for each kind of event of each GPU.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let sentence = |((gpu, event), count): (&(GpuUuid, String), &u64)| match count {
            1 => format!("{gpu}: {event} since gdrd started"),
            count => format!("{gpu}: {count} times {event} since gdrd started"),
        };
        counts.iter().map(sentence).collect()
    }

    fn pool(&self) -> Option<std::sync::Arc<WorkerPool>> {
        self.pool.get()?.upgrade()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gdrd_cuda::{Launch, PoolConfig, ProcessLauncher, ServedGpu};

    use super::*;

    fn gpu() -> GpuUuid {
        GpuUuid("GPU-1".to_owned())
    }

    #[tokio::test]
    async fn fatal_events_lose_the_gpu_and_others_are_counted() {
        let launcher: Arc<dyn Launch> = Arc::new(ProcessLauncher::new("/nonexistent".into(), Vec::new()));
        let served = vec![ServedGpu { uuid: gpu(), skipped: None }];
        let pool = Arc::new(WorkerPool::new(served, &launcher, PoolConfig::default()));
        let health = Health::default();
        health.serve(Arc::downgrade(&pool));
        let line = |event: HealthEvent| serde_json::to_string(&event).expect("plain data");
        health.hear(&gpu(), &line(HealthEvent::Xid(Some(31))));
        health.hear(&gpu(), &line(HealthEvent::Xid(Some(31))));
        health.hear(&gpu(), "no event");
        assert_eq!(health.lost(&gpu()), None);
        health.news().await;
        health.hear(&gpu(), &line(HealthEvent::Xid(Some(79))));
        assert!(health.lost(&gpu()).is_some_and(|reason| reason.contains("bus")), "{:?}", health.lost(&gpu()));
        let told = health.warnings();
        assert_eq!(told, ["GPU-1: 2 times xid 31 since gdrd started", "GPU-1: xid 79 since gdrd started"]);
    }
}
