//! Draining GPUs while others do the same, ask the driver or bring another plan.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use gdrd_engine::{Engine, EngineConfig, Hardware, Viewer, boot_id};
use gdrd_hal::{GpuAllocation, GpuMemory, GpuMemoryCapabilities, GpuMemoryError, GpuMemoryUsage, GpuUuid, KeptMemory};

use crate::world::{MIB, World, config, hardware, hca, peer, plan, request};

/// GPU memory whose owner is told of drains while they are made.
struct Drained<F> {
    memory: Arc<dyn GpuMemory>,
    told: F,
}

impl<F: Fn(&GpuUuid) + Send + Sync> GpuMemory for Drained<F> {
    fn capabilities(&self) -> GpuMemoryCapabilities {
        self.memory.capabilities()
    }

    fn usage(&self, gpu: &GpuUuid) -> Result<GpuMemoryUsage, GpuMemoryError> {
        self.memory.usage(gpu)
    }

    fn allocate(&self, gpu: &GpuUuid, len_bytes: u64) -> Result<Box<dyn GpuAllocation>, GpuMemoryError> {
        self.memory.allocate(gpu, len_bytes)
    }

    fn import(&self, gpu: &GpuUuid, len: u64, kept: KeptMemory) -> Result<Box<dyn GpuAllocation>, GpuMemoryError> {
        self.memory.import(gpu, len, kept)
    }

    fn is_device_memory(&self, fd: BorrowedFd<'_>) -> bool {
        self.memory.is_device_memory(fd)
    }

    fn drain(&self, gpu: &GpuUuid) -> Result<(), GpuMemoryError> {
        (self.told)(gpu);
        self.memory.drain(gpu)
    }

    fn resume(&self, gpu: &GpuUuid) -> Result<(), GpuMemoryError> {
        self.memory.resume(gpu)
    }
}

/// A host whose engine, started with this plan, tells of drains.
fn world(config: EngineConfig, plan: gdrd_engine::HostPlan, told: impl Fn(&GpuUuid) + Send + Sync + 'static) -> World {
    let sim = World::over(self::config(), vec![hca(0), hca(1), hca(2)]).sim;
    let hardware = hardware(&sim, plan);
    let gpu_memory: Option<Arc<dyn GpuMemory>> = Some(Arc::new(Drained { memory: sim.gpu_memory(), told }));
    let engine = Engine::start(config, Hardware { gpu_memory, ..hardware }).expect("the engine starts");
    World { sim, engine }
}

fn admin() -> Viewer {
    Viewer::Peer(peer(0))
}

fn drained(world: &World) -> Vec<String> {
    world.engine.drained_gpus().into_iter().map(|gpu| gpu.name).collect()
}

#[test]
fn a_gpu_resumed_while_all_are_being_drained_is_served() {
    let (began, has_begun) = mpsc::channel();
    let (resume, resumes) = mpsc::channel::<()>();
    let resumes = Mutex::new(resumes);
    let world = world(config(), plan(), move |gpu| {
        if gpu.0 == "GPU-0" {
            began.send(()).expect("somebody resumes");
            resumes.lock().unwrap_or_else(PoisonError::into_inner).recv().expect("somebody resumes");
            // Whoever does not wait for its turn is done now.
            (0..10_000).for_each(|_| std::thread::yield_now());
        }
    });
    std::thread::scope(|scope| {
        let draining = scope.spawn(|| world.engine.drain_gpus(&admin(), "").expect("an administrator"));
        has_begun.recv().expect("it drains");
        resume.send(()).expect("it waits");
        let resumed = world.engine.resume_gpus(&admin(), "GPU1").expect("an administrator");
        assert_eq!((resumed.len(), draining.join().expect("it ends").uuids.len()), (1, 2));
    });
    assert_eq!(drained(&world), ["GPU0"]);
    let session = world.session(1);
    world.try_acquire(session, request("GPU1", MIB)).expect("it was resumed");
    assert!(world.try_acquire(session, request("GPU0", MIB)).is_err());
}

#[test]
fn a_resumed_gpu_that_the_driver_says_is_lost_stays_lost() {
    let world = World::new();
    world.engine.drain_gpus(&admin(), "GPU0").expect("an administrator");
    world.sim.inject_text("gpu GPU0: lost").expect("a script");
    assert_eq!(world.engine.resume_gpus(&admin(), "GPU0").expect("an administrator").len(), 1);
    assert_eq!((drained(&world), world.stat("gdrd_gpus_out_of_use")), (Vec::new(), 1));
    let lost = world.try_acquire(world.session(1), request("GPU0", MIB)).expect_err("lost");
    assert!(lost.reason() == "DEVICE_LOST" && !lost.to_string().contains("drained"), "{lost}");
}

#[test]
fn a_gpu_that_comes_and_was_drained_before_is_let_go_of_and_not_served() {
    let folder = tempfile::tempdir().expect("a folder");
    let drains = folder.path().join("drained");
    std::fs::write(&drains, format!("boot {}\nGPU-1\nend\n", boot_id())).expect("written");
    let mut before = plan();
    before.gpus.truncate(1);
    let let_go_of = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&let_go_of);
    let told = move |gpu: &GpuUuid| told.lock().unwrap_or_else(PoisonError::into_inner).push(gpu.0.clone());
    let world = world(EngineConfig { drains: Some(drains), ..config() }, before, told);
    assert!(drained(&world).is_empty());
    for _ in 0..2 {
        world.engine.update_plan(plan);
    }
    assert_eq!(*let_go_of.lock().expect("whole"), ["GPU-1"], "once");
    assert_eq!(drained(&world), ["GPU1"]);
    let refused = world.try_acquire(world.session(1), request("GPU1", MIB)).expect_err("drained");
    assert!(refused.to_string().contains("drained by an administrator"), "{refused}");
}
