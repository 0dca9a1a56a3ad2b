//! `gdrd worker`: the processes in which libcuda and NVML live. Started by the daemon alone.

use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::process::ExitCode;
use std::time::Duration;

use gdrd_cuda::CudaDevice;
use gdrd_cuda::worker::{End, serve};
use gdrd_topology::driver_file;
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

        /// Print Xid and ECC errors of the GPU as they come; holds the device files of all GPUs
        #[arg(long)]
        watch: bool,
    },
    /// Print what NVML says as a capture carries it, and end
    Facts,
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
        WorkerCommand::Serve { gpu, idle_s, watch } => serve_gpu(gpu, Duration::from_secs(*idle_s), *watch),
        WorkerCommand::Facts => facts(),
        WorkerCommand::Probe => probe(),
    }
}

fn serve_gpu(gpu: &str, idle: Duration, watch: bool) -> ExitCode {
    let stdin = std::io::stdin();
    let open = || {
        let opened = CudaDevice::open(gpu)?;
        // Once the device is there: the two would wait for each other's locks in the driver.
        if watch {
            let gpu = gpu.to_owned();
            std::thread::spawn(move || watch_gpu(&gpu));
        }
        Ok(opened)
    };
    match serve(stdin.as_fd(), idle, open) {
        End::HungUp | End::Idle => ExitCode::SUCCESS,
        // The daemon has it as well, and logs it with the call that it was for.
        End::Spoilt(_) => ExitCode::FAILURE,
        end => {
            eprintln!("gdrd worker of {gpu}: {end:?}");
            ExitCode::FAILURE
        }
    }
}

/// Prints the events of the GPU until the process ends or nobody reads.
fn watch_gpu(gpu: &str) {
    let watched = gdrd_nvml::watch(None, gpu, |event| {
        let line = serde_json::to_string(event).unwrap_or_default();
        writeln!(std::io::stdout(), "{line}").is_ok()
    });
    if let Err(error) = watched {
        eprintln!("gdrd worker of {gpu}: {error}");
    }
}

fn facts() -> ExitCode {
    match gdrd_nvml::read() {
        Ok(report) => {
            let text = driver_file::to_text(&crate::gpus::told(&report));
            if writeln!(std::io::stdout(), "{text}").is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("{error}");
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
