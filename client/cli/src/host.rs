//! The daemon, for verbs that need it: a runtime for their calls, a connection, a session.

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
