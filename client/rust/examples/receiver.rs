//! Lends a buffer on a GPU, lets a peer write into it, and digests what has come.
//!
//! usage: receiver SOCKET GPU BYTES
//!
//! It listens on the unix socket SOCKET for one sender (see sender.rs), hands over its endpoint and registration, and
//! waits for the sender's last message, which comes as an immediate value. Both blobs could as well travel by MPI, by
//! a key-value store or by hand: gdrd does not care.

mod common;

use anyhow::{Context as _, ensure};
use common::{Channel, Greeting, sha256_of};
use gdrd_client::{AcquireOptions, Client, CompletionOpcode, Endpoint, Operation, QueuePairOptions, Status};
use tokio::net::UnixListener;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut next = |what| arguments.next().with_context(|| format!("usage: receiver SOCKET GPU BYTES: no {what}"));
    let (socket, gpu, bytes) = (next("SOCKET")?, next("GPU")?, next("BYTES")?.parse()?);

    let listener = UnixListener::bind(&socket).with_context(|| format!("listen on {socket}"))?;
    let session = Client::connect().await?.open_session("demo-receiver").await?;
    let buffer = session.acquire(AcquireOptions::on_gpu(&gpu, bytes).label("demo-receiver")).await?;
    let queue_pair = session.create_queue_pair(QueuePairOptions::near_gpu(&gpu)).await?;
    println!("leased {} MiB on {gpu}, registered with {}", buffer.len_bytes() >> 20, queue_pair.hca());

    let (stream, _) = listener.accept().await?;
    let mut channel = Channel::new(stream);
    let registration = buffer.registration(queue_pair.hca())?;
    channel
        .send(&Greeting { endpoint: queue_pair.endpoint().to_bytes(), buffer: registration.remote().to_bytes() })
        .await?;
    let peer: Greeting = channel.receive().await?;
    queue_pair.connect(&Endpoint::from_bytes(&peer.endpoint)?).await?;
    // The sender's last write consumes this receive, and brings the number of its rounds.
    queue_pair.post(1, Operation::Recv { local: registration.span(0, 0)? })?;
    channel.send(&common::Ready).await?;

    let last = queue_pair.completion().await?;
    ensure!(last.status == Status::Success, "the transfer ended as {}", last.status);
    ensure!(last.opcode == CompletionOpcode::RecvWriteImm, "a write with immediate was awaited, not {:?}", last.opcode);
    println!("sha256 {}", sha256_of(buffer.reader(0, bytes)?)?);

    common::stay_until_told().await
}
