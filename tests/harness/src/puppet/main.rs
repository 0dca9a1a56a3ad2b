//! A client process that tests drive: one command a line on stdin, one answer a line on stdout, both JSON.
//!
//! Role: it reaches a stage of a lease or transfer, says so, and stands still until the next line. It uses the client
//! library as any program would.
//!
//! It must not know which test drives it.
#![forbid(unsafe_code)]

mod content;
mod descriptors;
mod hex;
mod hits;
mod stage;
mod timing;
mod work;

use std::io::{BufRead as _, Write as _};

use gdrd_client::ClientError;
use gdrd_harness::script::{Command, Reply};

use crate::stage::Stage;

fn main() -> anyhow::Result<()> {
    // Beside the test's pipes this process has one holder's job: to keep a socket open until it is killed.
    if std::env::args().nth(1).as_deref() == Some(descriptors::HOLD) {
        return descriptors::hold();
    }
    // One thread: between two commands nothing runs, so a stage stays where it is.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut stage = Stage::default();
    for line in std::io::stdin().lock().lines() {
        let command: Command = serde_json::from_str(&line?)?;
        let reply = match runtime.block_on(stage.run(command)) {
            Ok(value) => Reply::Done(value),
            Err(error) => failed(&error),
        };
        let mut out = std::io::stdout().lock();
        serde_json::to_writer(&mut out, &reply)?;
        out.write_all(b"\n")?;
        out.flush()?;
    }
    Ok(())
}

fn failed(error: &anyhow::Error) -> Reply {
    let reason = error.downcast_ref::<ClientError>().and_then(ClientError::reason).unwrap_or_default();
    Reply::Failed { message: format!("{error:#}"), reason: reason.to_owned() }
}
