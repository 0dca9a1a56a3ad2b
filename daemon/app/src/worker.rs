//! `gdrd worker`: the processes in which libcuda and NVML live. Started by the daemon alone.

use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::process::ExitCode;
use std::time::Duration;

use gdrd_cuda::CudaDevice;
use gdrd_cuda::worker::{End, serve};
use serde::{Deserialize, Serialize};

/// What a worker does.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum WorkerCommand {
    /// Serve one GPU on the socket that is standard input
    Serve {
        /// UUID of the GPU
        #[arg(long)]
        gpu: String,

        /// End after this long without a request, seconds
        #[arg(long)]
        idle_s: u64,
    },
    /// Print what NVML says and whether libcuda is there, as JSON, and end
    Probe,
}

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Probe {
    /// NVML's report, or why there is none.
    pub(crate) nvml: Result<gdrd_nvml::Report, String>,
    /// Whether libcuda has all that a worker calls, or what is missing.
    pub(crate) cuda: Result<(), String>,
}

pub(crate) fn run(command: &WorkerCommand) -> ExitCode {
    match command {
        WorkerCommand::Serve { gpu, idle_s } => serve_gpu(gpu, Duration::from_secs(*idle_s)),
        WorkerCommand::Probe => probe(),
    }
}

fn serve_gpu(gpu: &str, idle: Duration) -> ExitCode {
    let stdin = std::io::stdin();
    match serve(stdin.as_fd(), idle, || CudaDevice::open(gpu)) {
        End::HungUp | End::Idle => ExitCode::SUCCESS,
        // The daemon has it as well, and logs it with the call that it was for.
        End::Spoilt(_) => ExitCode::FAILURE,
        end => {
            eprintln!("gdrd worker of {gpu}: {end:?}");
            ExitCode::FAILURE
        }
    }
}

fn probe() -> ExitCode {
    let found = Probe {
        nvml: gdrd_nvml::read().map_err(|error| error.to_string()),
        cuda: CudaDevice::look_for_library().map_err(|error| error.to_string()),
    };
    let written = serde_json::to_vec(&found).map(|text| std::io::stdout().write_all(&text));
    if matches!(written, Ok(Ok(()))) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
