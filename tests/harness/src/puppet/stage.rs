//! What a puppet has, and what it does with it.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use anyhow::{Context as _, bail};
use gdrd_client::v1::lease_event::Event;
use gdrd_client::{
    AcquireOptions, AdoptOptions, AdoptedMemory, Buffer, Client, ClientError, ClientOptions, Completion, Endpoint,
    LeaseWatch, QueuePair, QueuePairOptions, RangeOf, RegisterOptions, RegisteredRange, RuntimeDir, Session,
    Submission, SubmissionFlags, TopologyWatch,
};
use gdrd_harness::script::{Command, Work};
use gdrd_shm::{Access, Segment};
use serde_json::{Value, json};

use crate::hits::Hits;
use crate::{content, descriptors, hex, timing, work};

/// Longest wait for a completion, and longest call.
const PATIENCE: Duration = Duration::from_secs(120);
/// Turns of the runtime after which a request is on its way: one for the call, one for the connection, and many more.
const TURNS: usize = 64;

/// A call that is on its way, and stands still.
type Started = Pin<Box<dyn Future<Output = ()>>>;

#[derive(Default)]
pub(crate) struct Stage {
    client: Option<Client>,
    session: Option<Session>,
    buffers: HashMap<String, Buffer>,
    kept: HashMap<String, (OwnedFd, Segment)>,
    queue_pairs: HashMap<String, QueuePair>,
    adopted: HashMap<String, AdoptedMemory>,
    ranges: Vec<RegisteredRange>,
    hits: Option<Hits>,
    started: Vec<Started>,
    lease_watch: Option<LeaseWatch>,
    topology_watch: Option<TopologyWatch>,
}

impl Stage {
    pub(crate) async fn run(&mut self, command: Command) -> anyhow::Result<Value> {
        match command {
            Command::Connect { runtime_dir } => self.connect(&runtime_dir).await,
            Command::Topology { runtime_dir } => topology(&runtime_dir).await,
            Command::WhoAmI => Ok(json!(rustix::process::geteuid().as_raw())),
            Command::ForkHolder => Ok(json!(descriptors::start_holder()?)),
            Command::CloseSession => self.with_session(Session::close),
            Command::SessionEnd => Ok(json!(self.session()?.ended().await.reason)),
            Command::Leases => self.leases().await,
            Command::QueuePairs => self.list_queue_pairs().await,
            Command::WatchLeases => {
                self.lease_watch = Some(self.session()?.watch_leases().await?);
                Ok(Value::Null)
            }
            Command::NextLeaseEvent => self.next_lease_event().await,
            Command::NextTopology => self.next_topology().await,
            other => self.run_on_buffer(other).await,
        }
    }

    async fn run_on_buffer(&mut self, command: Command) -> anyhow::Result<Value> {
        match command {
            Command::Acquire { buffer, gpu, size, host } => self.acquire(buffer, &gpu, size, host).await,
            Command::AcquireHost { buffer, hca, size } => {
                let options = AcquireOptions::on_host([hca], size).label(buffer.clone());
                let acquired = self.session()?.acquire(options).await?;
                Ok(self.keep(buffer, acquired))
            }
            Command::StartAcquire { gpu, size } => self.start_acquire(&gpu, size).await,
            Command::Open { buffer, lease_id } => {
                let opened = self.session()?.open_lease(lease_id).await?;
                Ok(self.keep(buffer, opened))
            }
            Command::ReleaseLease { lease_id, generation } => {
                self.session()?.release_lease(lease_id, generation).await?;
                Ok(Value::Null)
            }
            Command::Release { buffer } => {
                self.take_buffer(&buffer)?.release().await?;
                Ok(Value::Null)
            }
            Command::StartRelease { buffer } => {
                let release = self.take_buffer(&buffer)?.release();
                self.start(Box::pin(async move { drop(release.await) })).await;
                Ok(Value::Null)
            }
            Command::ReleaseAndKeep { buffer, kept } => self.release_and_keep(&buffer, kept).await,
            Command::Detach { buffer, ttl_ms } => {
                let handle = self.buffers.get_mut(&buffer).with_context(|| format!("no buffer {buffer}"))?;
                handle.detach(Duration::from_millis(ttl_ms)).await?;
                Ok(Value::Null)
            }
            other => self.run_on_memory(other).await,
        }
    }

    async fn run_on_memory(&mut self, command: Command) -> anyhow::Result<Value> {
        match command {
            Command::Map { buffer } => self.buffer(&buffer)?.memory().map(|_| Value::Null).map_err(Into::into),
            Command::Fill { buffer, seed } => {
                content::fill(self.buffer(&buffer)?.memory()?, seed).map(|()| Value::Null)
            }
            Command::Poke { buffer, offset, bytes } => {
                self.buffer(&buffer)?.write_from(offset, &hex::decode(&bytes)?)?;
                Ok(Value::Null)
            }
            Command::Peek { buffer, offset, len } => {
                let mut bytes = vec![0; len];
                self.buffer(&buffer)?.read_into(offset, &mut bytes)?;
                Ok(json!(hex::encode(&bytes)))
            }
            Command::Digest { buffer, offset, len } => {
                Ok(json!(content::digest(self.buffer(&buffer)?.reader(offset, len)?)?))
            }
            Command::Remote { buffer, hca } => {
                Ok(json!(hex::encode(&self.buffer(&buffer)?.registration(&hca)?.remote().to_bytes())))
            }
            Command::AwaitRestart { restarts } => {
                let waited = tokio::time::timeout(PATIENCE, self.session()?.restarted(restarts - 1)).await;
                Ok(json!(waited.context("the daemon was not started again")?.context("the session ended")?))
            }
            Command::Refresh { buffer } => {
                self.buffer(&buffer)?.refresh().await?;
                Ok(lease_shown(self.buffer(&buffer)?))
            }
            Command::IsCurrent { buffer } => Ok(json!(self.buffer(&buffer)?.is_current())),
            Command::DigestKept { kept } => self.digest_kept(&kept),
            Command::CountKept { kept } => Ok(json!(content::count_nonzero(reader_of(self.kept(&kept)?)?)?)),
            Command::FillKept { kept, seed } => content::fill(self.kept(&kept)?, seed).map(|()| Value::Null),
            Command::Adopt { memory, size, gpu } => self.adopt(memory, size, &gpu).await,
            Command::AdoptInherited { memory } => self.adopt_inherited(memory).await,
            Command::RegisterRange { memory, offset, len, hca } => self.register(&memory, offset, len, hca).await,
            Command::PeekAdopted { memory, offset, len } => {
                let mut bytes = vec![0; len];
                self.adopted(&memory)?.memory()?.read_into(offset, &mut bytes)?;
                Ok(json!(hex::encode(&bytes)))
            }
            Command::Hits { memory } => self.hits(&memory).await,
            Command::Disown { memory } => {
                let taken = self.adopted.remove(&memory).with_context(|| format!("no memory {memory}"))?;
                taken.disown().await?;
                Ok(Value::Null)
            }
            other => self.run_on_queue_pair(other).await,
        }
    }

    async fn run_on_queue_pair(&mut self, command: Command) -> anyhow::Result<Value> {
        match command {
            Command::QueuePair { queue_pair, gpu, hca, depth } => {
                let options =
                    if hca.is_empty() { QueuePairOptions::near_gpu(gpu) } else { QueuePairOptions::on_hca(hca) };
                self.make(queue_pair, options.depths(depth, depth)).await
            }
            Command::DatagramQueuePair { queue_pair, hca } => {
                self.make(queue_pair, QueuePairOptions::on_hca(hca).ud()).await
            }
            Command::ConnectQueuePair { queue_pair, endpoint } => {
                let endpoint = Endpoint::from_bytes(&hex::decode(&endpoint)?)?;
                self.queue_pair(&queue_pair)?.connect(&endpoint).await?;
                Ok(Value::Null)
            }
            Command::Post { queue_pair, work, first_wr_id, only_last_signaled } => {
                self.post(&queue_pair, &work, first_wr_id, only_last_signaled)
            }
            Command::Flood { queue_pair, work } => self.flood(&queue_pair, &work),
            Command::Completion { queue_pair } => {
                let waited = tokio::time::timeout(PATIENCE, self.queue_pair(&queue_pair)?.completion()).await;
                Ok(shown(waited.context("no completion came")??))
            }
            Command::CompletionBusy { queue_pair } => {
                let polled = self.queue_pair(&queue_pair)?.poll_busy(PATIENCE)?;
                Ok(shown(polled.context("no completion came")?))
            }
            Command::TimeWork { queue_pair, work, rounds, window, polling } => {
                let queue_pair = self.queue_pair(&queue_pair)?;
                let operation = work::operation(&self.buffers, queue_pair.hca(), &work)?;
                timing::time(queue_pair, operation, timing::Way { rounds, window, polling }).await
            }
            Command::ScribbleRing { queue_pair, offset, bytes } => self.scribble(&queue_pair, offset, &bytes),
            Command::Destroy { queue_pair } => {
                let taken =
                    self.queue_pairs.remove(&queue_pair).with_context(|| format!("no queue pair {queue_pair}"))?;
                taken.destroy().await?;
                Ok(Value::Null)
            }
            other => bail!("{other:?} has no handler"),
        }
    }

    async fn connect(&mut self, runtime_dir: &str) -> anyhow::Result<Value> {
        let client = client(runtime_dir).await?;
        let session = client.open_session("puppet").await?;
        let id = session.id();
        self.client = Some(client);
        self.session = Some(session);
        Ok(json!(id))
    }

    fn adopted(&self, name: &str) -> anyhow::Result<&AdoptedMemory> {
        self.adopted.get(name).with_context(|| format!("no memory {name}"))
    }

    async fn adopt(&mut self, name: String, size: u64, gpu: &str) -> anyhow::Result<Value> {
        let memory = self.session()?.adopt(AdoptOptions::memfd(descriptors::memfd(size)?).near(gpu)).await?;
        let id = memory.id();
        self.adopted.insert(name, memory);
        Ok(json!(id))
    }

    async fn adopt_inherited(&mut self, name: String) -> anyhow::Result<Value> {
        let mut dma_buf = None;
        for (is, fd) in sd_listen_fds::get()? {
            let fd = fd.into_std();
            match is.as_deref() {
                Some("dma-buf") => dma_buf = Some(fd),
                Some("memory") => {
                    let mapped = Segment::map(fd.try_clone()?, Access::ReadWrite)?;
                    self.kept.insert(name.clone(), (fd, mapped));
                }
                _ => bail!("started with something else"),
            }
        }
        let dma_buf = dma_buf.context("not started with a dma-buf")?;
        let memory = self.session()?.adopt(AdoptOptions::dma_buf(dma_buf, "")).await?;
        let id = memory.id();
        self.adopted.insert(name, memory);
        Ok(json!(id))
    }

    async fn register(&mut self, name: &str, offset: u64, len: u64, hca: String) -> anyhow::Result<Value> {
        let range = RangeOf::adopted(self.adopted(name)?, offset, len);
        let options = RegisterOptions::new().hcas([hca.clone()]);
        let ranges = self.session()?.register(vec![range], options).await?;
        let blob = ranges.first().context("a registration")?.remote(&hca, 0)?.to_bytes();
        self.ranges.extend(ranges);
        Ok(json!(hex::encode(&blob)))
    }

    async fn hits(&mut self, name: &str) -> anyhow::Result<Value> {
        if self.hits.is_none() {
            let address = self.adopted(name)?.memory()?.address();
            self.hits = Some(Hits::start(self.session()?, address).await?);
        }
        Ok(json!(self.hits.as_ref().map(Hits::count)))
    }

    async fn acquire(&mut self, name: String, gpu: &str, size: u64, host: bool) -> anyhow::Result<Value> {
        let options = if host { AcquireOptions::on_host_near(gpu, size) } else { AcquireOptions::on_gpu(gpu, size) };
        let buffer = self.session()?.acquire(options.label(name.clone())).await?;
        Ok(self.keep(name, buffer))
    }

    async fn start_acquire(&mut self, gpu: &str, size: u64) -> anyhow::Result<Value> {
        let session = self.session()?.clone();
        let options = AcquireOptions::on_gpu(gpu, size);
        // What it gets is kept: dropped, it would be released.
        let call = async move { std::mem::forget(session.acquire(options).await) };
        self.start(Box::pin(call)).await;
        Ok(Value::Null)
    }

    /// Polls a call once and lets the connection write it out, then leaves both where they are.
    async fn start(&mut self, mut call: Started) {
        std::future::poll_fn(|context| {
            let _ = call.as_mut().poll(context);
            Poll::Ready(())
        })
        .await;
        for _ in 0..TURNS {
            tokio::task::yield_now().await;
        }
        self.started.push(call);
    }

    async fn release_and_keep(&mut self, name: &str, kept: String) -> anyhow::Result<Value> {
        let buffer = self.take_buffer(name)?;
        let (fd, mapped) = (buffer.try_clone_fd()?, Segment::map(buffer.try_clone_fd()?, Access::ReadWrite)?);
        buffer.release().await?;
        self.kept.insert(kept, (fd, mapped));
        Ok(Value::Null)
    }

    fn digest_kept(&self, kept: &str) -> anyhow::Result<Value> {
        let (fd, old) = self.kept.get(kept).with_context(|| format!("nothing kept as {kept}"))?;
        let new = Segment::map(fd.try_clone()?, Access::ReadOnly)?;
        Ok(json!([content::digest(reader_of(old)?)?, content::digest(reader_of(&new)?)?]))
    }

    async fn make(&mut self, name: String, options: QueuePairOptions) -> anyhow::Result<Value> {
        let made = self.session()?.create_queue_pair(options).await?;
        let shown = json!({
            "id": made.id(),
            "hca": made.hca(),
            "endpoint": hex::encode(&made.endpoint().to_bytes()),
            "max_inline": made.max_inline_bytes(),
            "depths": made.depths(),
        });
        self.queue_pairs.insert(name, made);
        Ok(shown)
    }

    fn post(&self, name: &str, work: &[Work], first: u64, only_last: bool) -> anyhow::Result<Value> {
        let queue_pair = self.queue_pair(name)?;
        let mut batch = Vec::with_capacity(work.len());
        for (index, work) in work.iter().enumerate() {
            let silent = only_last && index + 1 < batch.capacity();
            let flags = if silent { SubmissionFlags::empty() } else { SubmissionFlags::SIGNALED };
            let operation = work::operation(&self.buffers, queue_pair.hca(), work)?;
            batch.push(Submission { wr_id: first + index as u64, flags, operation });
        }
        Ok(json!(queue_pair.post_batch(&batch)?))
    }

    fn flood(&self, name: &str, work: &Work) -> anyhow::Result<Value> {
        let queue_pair = self.queue_pair(name)?;
        let operation = work::operation(&self.buffers, queue_pair.hca(), work)?;
        let mut posted = 0;
        loop {
            match queue_pair.post(posted, operation) {
                Ok(()) => posted += 1,
                Err(ClientError::Submit(_)) => return Ok(json!(posted)),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Writes into the ring past the client library. With several queue pairs every ring is written.
    fn scribble(&self, name: &str, offset: u64, bytes: &str) -> anyhow::Result<Value> {
        self.queue_pair(name)?;
        let rings = descriptors::own("/memfd:gdrd-ring")?;
        for ring in &rings {
            Segment::map(ring.try_clone()?, Access::ReadWrite)?.write_from(offset, &hex::decode(bytes)?)?;
        }
        Ok(json!(rings.len()))
    }

    async fn leases(&self) -> anyhow::Result<Value> {
        let leases = self.session()?.leases().await?;
        let shown = leases.iter().map(|lease| {
            json!({ "id": lease.lease_id, "label": lease.label, "holders": lease.holders, "size": lease.size_bytes,
                    "detached": lease.ttl.is_some(), "tenant": lease.tenant })
        });
        Ok(shown.collect())
    }

    async fn list_queue_pairs(&self) -> anyhow::Result<Value> {
        let queue_pairs = self.session()?.queue_pairs().await?;
        let shown = queue_pairs.iter().map(|queue_pair| {
            json!({ "id": queue_pair.queue_pair_id, "hca": queue_pair.hca, "state": queue_pair.state,
                    "tenant": queue_pair.tenant })
        });
        Ok(shown.collect())
    }

    async fn next_lease_event(&mut self) -> anyhow::Result<Value> {
        let watch = self.lease_watch.as_mut().context("no watch was begun")?;
        let event = tokio::time::timeout(PATIENCE, watch.next()).await.context("no event came")??;
        let (kind, lease_id) = match event.context("the watch ended")?.event.context("an event of an unknown kind")? {
            Event::Present(lease) => ("present", lease.lease_id),
            Event::Synced(_) => ("synced", 0),
            Event::Acquired(lease) => ("acquired", lease.lease_id),
            Event::Released(ended) => ("released", ended.lease_id),
            Event::Revoked(ended) => ("revoked", ended.lease_id),
            Event::Rekeyed(lease) => ("rekeyed", lease.lease_id),
            Event::NicDown(_) => ("nic down", 0),
            Event::Resync(_) => ("resync", 0),
        };
        Ok(json!([kind, lease_id]))
    }

    async fn next_topology(&mut self) -> anyhow::Result<Value> {
        if self.topology_watch.is_none() {
            let client = self.client.as_ref().context("not connected")?;
            self.topology_watch = Some(client.watch_topology());
        }
        let watch = self.topology_watch.as_mut().context("it was made above")?;
        let snapshot = tokio::time::timeout(PATIENCE, watch.next()).await.context("no snapshot came")??;
        let hcas: Vec<&str> = snapshot.host_profile.lines().filter_map(hca_of_line).collect();
        Ok(json!({ "generation": snapshot.generation, "hcas": hcas }))
    }

    fn keep(&mut self, name: String, buffer: Buffer) -> Value {
        let shown = lease_shown(&buffer);
        self.buffers.insert(name, buffer);
        shown
    }

    fn with_session(&self, act: impl FnOnce(&Session)) -> anyhow::Result<Value> {
        act(self.session()?);
        Ok(Value::Null)
    }

    fn session(&self) -> anyhow::Result<&Session> {
        self.session.as_ref().context("not connected")
    }

    fn buffer(&self, name: &str) -> anyhow::Result<&Buffer> {
        self.buffers.get(name).with_context(|| format!("no buffer {name}"))
    }

    fn take_buffer(&mut self, name: &str) -> anyhow::Result<Buffer> {
        self.buffers.remove(name).with_context(|| format!("no buffer {name}"))
    }

    fn kept(&self, name: &str) -> anyhow::Result<&Segment> {
        self.kept.get(name).map(|(_, segment)| segment).with_context(|| format!("nothing kept as {name}"))
    }

    fn queue_pair(&self, name: &str) -> anyhow::Result<&QueuePair> {
        self.queue_pairs.get(name).with_context(|| format!("no queue pair {name}"))
    }
}

/// The HCA that a line of a host profile is about, of those that begin with `hca`.
fn hca_of_line(line: &str) -> Option<&str> {
    line.strip_prefix("hca ")?.split_whitespace().next()
}

fn lease_shown(buffer: &Buffer) -> Value {
    let registrations: Vec<Value> = buffer
        .registrations()
        .map(|own| json!({ "hca": own.hca(), "slot": own.slot(), "generation": own.generation() }))
        .collect();
    json!({
        "lease_id": buffer.lease_id(),
        "generation": buffer.generation(),
        "size": buffer.len_bytes(),
        "gpu": buffer.gpu_uuid(),
        "registrations": registrations,
    })
}

async fn client(runtime_dir: &str) -> anyhow::Result<Client> {
    let options = ClientOptions::default().runtime_dir(RuntimeDir::new(runtime_dir)).deadline(PATIENCE);
    Ok(options.connect().await?)
}

async fn topology(runtime_dir: &str) -> anyhow::Result<Value> {
    let plan = client(runtime_dir).await?.topology().await?.plan.context("no plan")?;
    Ok(json!({ "gpus": plan.gpus.len(), "nics": plan.nics.len() }))
}

fn shown(completion: Completion) -> Value {
    json!({
        "wr_id": completion.wr_id,
        "status": completion.status.to_string(),
        "opcode": format!("{:?}", completion.opcode),
        "bytes": completion.byte_len,
        "imm": completion.imm,
        "detail": completion.vendor_error,
    })
}

fn reader_of(segment: &Segment) -> anyhow::Result<impl std::io::Read> {
    let mut bytes = vec![0; usize::try_from(segment.len_bytes())?];
    segment.read_into(0, &mut bytes)?;
    Ok(std::io::Cursor::new(bytes))
}
