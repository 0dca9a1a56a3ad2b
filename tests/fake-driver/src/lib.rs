//! An NVIDIA driver for tests on machines without a GPU: `libcuda.so.1` and `libnvidia-ml.so.1` over memfds, and as much
//! of `nvidia-smi` as checks ask for.
//!
//! Role: lays them into a folder with a description of the GPUs. A process that starts with [`FakeDriver::library_path`]
//! as its LD_LIBRARY_PATH finds them by name, as real ones are found; gdrd-nvml also takes the path itself. The sources
//! are C, as the ABI is.
//!
//! What the fake knows of memory is what the kernel says: bytes in use are those of descriptors and mappings that any
//! process has, so that what a killed process held comes back, and what only a descriptor holds is in use by no process.
//! It says nothing about how fast a real driver is, nor about faults of one.
#![forbid(unsafe_code)]

use std::fmt::Write as _;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

static LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/driver.so"));
static SMI: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/nvidia-smi"));

/// One GPU of the fake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FakeGpu {
    /// `GPU-…`.
    pub uuid: String,
    /// Address as NVML pads it.
    pub bdf: String,
    /// Its memory, MiB.
    pub memory_mib: u64,
    /// More words: `mode=N` (`nvmlComputeMode_t`), `mig=1`, `has_mig=0`, `lost=1`, `fabric=N`
    /// (`nvmlGpuFabricState_t`), `peers=0`, `coherent=1`, `late=1` (memsets are done once they are waited for), `context_mib=N`, `links=switch/N`, `links=BDF/N`.
    pub words: Vec<String>,
}

impl FakeGpu {
    /// The GPU of that number, with 1 GiB of memory and 18 links to switches whose fabric is ready.
    #[must_use]
    pub fn switched(number: u8) -> Self {
        Self {
            uuid: format!("GPU-{number:08x}-0000-4000-8000-00000000fa4e"),
            bdf: format!("00000000:{number:02X}:00.0"),
            memory_mib: 1024,
            words: vec!["links=switch/18".to_owned(), "fabric=3".to_owned()],
        }
    }

    /// With one more word.
    #[must_use]
    pub fn word(mut self, word: impl Into<String>) -> Self {
        self.words.push(word.into());
        self
    }
}

/// The driver in a folder.
#[derive(Debug, Clone)]
pub struct FakeDriver {
    folder: PathBuf,
}

impl FakeDriver {
    /// Lays the libraries, the tool and the description of the GPUs into `folder`.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn install(folder: &Path, gpus: &[FakeGpu]) -> io::Result<Self> {
        for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
            std::fs::write(folder.join(name), LIBRARY)?;
        }
        let smi = folder.join("nvidia-smi");
        std::fs::write(&smi, SMI)?;
        std::fs::set_permissions(&smi, std::fs::Permissions::from_mode(0o755))?;
        let mut text = String::new();
        for FakeGpu { uuid, bdf, memory_mib, words } in gpus {
            let words = words.join(" ");
            // A String takes everything.
            let _ = writeln!(text, "gpu {uuid} {bdf} {memory_mib} {words}");
        }
        std::fs::write(folder.join("gpus"), text)?;
        Ok(Self { folder: folder.to_owned() })
    }

    /// What LD_LIBRARY_PATH must be; PATH, for the tool, begins with it too.
    #[must_use]
    pub fn library_path(&self) -> &Path {
        &self.folder
    }

    /// The NVML library.
    #[must_use]
    pub fn nvml(&self) -> PathBuf {
        self.folder.join("libnvidia-ml.so.1")
    }

    /// The same without a function, as an older driver is. For processes that load it from here on.
    ///
    /// # Errors
    /// When the folder cannot be written; for a function that it does not have.
    pub fn without(self, symbol: &str) -> io::Result<Self> {
        // The name in the table of symbols: under another one nobody finds it.
        let name = format!("\0{symbol}\0").into_bytes();
        let mut library = LIBRARY.to_vec();
        let places: Vec<usize> = (0..library.len()).filter(|at| library[*at..].starts_with(&name)).collect();
        if places.is_empty() {
            return Err(io::Error::other(format!("the fake has no {symbol}")));
        }
        places.into_iter().for_each(|at| library[at + 1] = b'_');
        std::fs::write(self.folder.join("unfinished"), library)?;
        std::fs::rename(self.folder.join("unfinished"), self.folder.join("libcuda.so.1"))?;
        Ok(self)
    }

    /// Has whoever waits for events of the GPU in this place get an Xid.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn raise_xid(&self, gpu: usize, xid: u64) -> io::Result<()> {
        self.number(&format!("xid-{gpu}"), xid)
    }

    /// Has the driver say what it takes to mend the GPU in this place (`nvmlDeviceGpuRecoveryAction_t`, nvml.h; 0: nothing).
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn take_to_mend(&self, gpu: usize, action: u64) -> io::Result<()> {
        self.number(&format!("recovery-{gpu}"), action)
    }

    /// Has the driver count so many uncorrected ECC errors of the GPU in this place.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn count_ecc_errors(&self, gpu: usize, errors: u64) -> io::Result<()> {
        self.number(&format!("ecc-count-{gpu}"), errors)
    }

    fn number(&self, name: &str, number: u64) -> io::Result<()> {
        let unfinished = self.folder.join("unfinished");
        std::fs::write(&unfinished, number.to_string())?;
        std::fs::rename(unfinished, self.folder.join(name))
    }

    /// The same as [`FakeDriver::raise_xid`] with a double-bit ECC error.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn raise_ecc(&self, gpu: usize) -> io::Result<()> {
        std::fs::write(self.folder.join(format!("ecc-{gpu}")), "")
    }
}
