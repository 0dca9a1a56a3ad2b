//! The daemon, for verbs that need it: a runtime for their calls, a connection, a session.

use std::fs::File;
use std::os::fd::AsFd;

use gdrd_client::{Client, ClientError, ClientOptions, RuntimeDir, Session};

use crate::args::Global;

/// Name under which the daemon lists this program's sessions.
const CLIENT_NAME: &str = "gdrctl";

/// Runs `work` to its end on this thread.
pub(crate) fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

/// Connects to the daemon that the options or the environment name.
pub(crate) async fn connect(global: &Global) -> Result<Client, ClientError> {
    let options = ClientOptions::default().deadline(global.timeout);
    match &global.runtime_dir {
        Some(dir) => options.runtime_dir(RuntimeDir::new(dir)).connect().await,
        None => options.connect().await,
    }
}

/// Connects and opens a session, which lists and leases need.
pub(crate) async fn open_session(global: &Global) -> Result<(Client, Session), ClientError> {
    let client = connect(global).await?;
    let session = client.open_session(CLIENT_NAME).await?;
    Ok((client, session))
}

/// The same with the right to every GPU whose device node this user may open. A daemon that wants such proof refuses
/// leases on the others, and says so then.
pub(crate) async fn open_session_for_gpus(global: &Global) -> anyhow::Result<(Client, Session)> {
    let (client, session) = open_session(global).await?;
    let nodes = device_nodes();
    if nodes.is_empty() {
        return Ok((client, session));
    }
    let nodes: Vec<_> = nodes.iter().map(AsFd::as_fd).collect();
    match session.prove_gpus(&nodes).await {
        // On a simulated host they are of no GPU that the daemon knows.
        Ok(_) | Err(ClientError::InvalidArgument { .. }) => Ok((client, session)),
        Err(error) => Err(error.into()),
    }
}

/// Most GPUs that a message can prove (SCM_MAX_FD of unix(7)).
const MOST_NODES: usize = 253;

/// `/dev/nvidia0` and so on, as far as they are there and this user may open them.
fn device_nodes() -> Vec<File> {
    (0..MOST_NODES).filter_map(|minor| File::open(format!("/dev/nvidia{minor}")).ok()).collect()
}
