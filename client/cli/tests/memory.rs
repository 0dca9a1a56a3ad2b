//! What gdrctl holds of an input that means it ill: measured of the process, from outside. Alone in its binary, since the
//! kernel tells the largest of all children.

use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use nix::sys::resource::{UsageWho, getrusage};

/// What every reader must stay below, in KiB.
const MAX_RESIDENT_KIB: i64 = 64 << 10;

/// Runs `gdrctl plan` on an input, fed by `feed` where it is standard input.
fn plan(input: &str, feed: impl FnOnce(&mut dyn Write) -> io::Result<()> + Send + 'static) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gdrctl"));
    command.args(["plan", "--input", input]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("gdrctl starts");
    let mut stdin = child.stdin.take().expect("it is piped");
    // It ends in an error once gdrctl has seen enough.
    let feeder = std::thread::spawn(move || feed(&mut io::BufWriter::with_capacity(1 << 16, &mut stdin)));
    let output = child.wait_with_output().expect("gdrctl ends");
    let _ = feeder.join().expect("the feeder ends");
    output
}

/// A block of a tar file: an entry without content, or the begin of one with it.
fn header(kind: u8, name: &str, link: &str, len_bytes: u64) -> [u8; 512] {
    let mut block = [0; 512];
    let mut put = |at: usize, text: &str| block[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, name);
    put(100, "0000644\0");
    put(124, &format!("{len_bytes:011o}\0"));
    put(148, "        ");
    put(157, link);
    put(257, "ustar\0");
    block[156] = kind;
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

/// A folder that is as deep, cyclic and full as a hostile capture may be.
fn bad_tree() -> io::Result<tempfile::TempDir> {
    let folder = tempfile::tempdir()?;
    let sys = folder.path().join("sys");
    let devices = sys.join("bus/pci/devices");
    std::fs::create_dir_all(&devices)?;
    std::fs::create_dir_all(sys.join("class/infiniband"))?;
    symlink("devices", sys.join("bus/pci/ring"))?;
    symlink("../devices/0000:00:00.0", devices.join("0000:00:00.0"))?;
    symlink("/etc", devices.join("0000:00:01.0"))?;
    symlink("../../../../../../../../proc/self", sys.join("class/infiniband/mlx5_0"))?;
    let deep = format!("../../../devices/pci0000:00/{}", "0000:00:02.0/".repeat(250));
    symlink(deep.trim_end_matches('/'), devices.join("0000:00:02.0"))?;
    let huge = devices.join("0000:00:03.0");
    std::fs::create_dir_all(&huge)?;
    // Sparse: 4 GiB that take no room.
    for name in ["uevent", "class", "current_link_speed", "config"] {
        std::fs::File::create(huge.join(name))?.set_len(4 << 30)?;
    }
    for number in 0..4096 {
        symlink("../ring", devices.join(format!("{number:04x}:01:00.0")))?;
    }
    Ok(folder)
}

type Feed = Box<dyn FnOnce(&mut dyn Write) -> io::Result<()> + Send>;

/// What is fed to standard input, and a part of the error that it ends in.
fn streams() -> Vec<(&'static str, Feed, &'static str)> {
    vec![
        (
            "a million entries",
            Box::new(|out| {
                (0..1_000_000).try_for_each(|n| out.write_all(&header(b'0', &format!("sys/class/net/{n}"), "", 0)))
            }),
            "is one of more than",
        ),
        (
            "an entry that leaves the archive",
            Box::new(|out| out.write_all(&header(b'0', "sys/../../etc/passwd", "", 0))),
            "leaves the archive",
        ),
        ("a device node", Box::new(|out| out.write_all(&header(b'3', "sys/class/net/lo", "", 0))), "is a device"),
        (
            "a bomb of entities",
            Box::new(|out| {
                let entities: String =
                    (1..40).map(|n| format!("<!ENTITY e{n} \"&e{};&e{};\">", n - 1, n - 1)).collect();
                write!(out, "<!DOCTYPE system [<!ENTITY e0 \"x\">{entities}]><system name=\"&e39;\"/>")
            }),
            "NCCL topology XML",
        ),
        (
            "elements in elements",
            Box::new(|out| {
                out.write_all(b"<system>")?;
                (0..1 << 20).try_for_each(|_| out.write_all(b"<pci>"))
            }),
            "standard input",
        ),
        (
            "a text without end",
            Box::new(|out| (0..1 << 14).try_for_each(|_| out.write_all(&[b'a'; 4096]))),
            "has more than",
        ),
        (
            "noise",
            Box::new(|out| {
                let mut state = 1_u32;
                (0..1 << 20).try_for_each(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    out.write_all(&state.to_le_bytes())
                })
            }),
            "standard input",
        ),
    ]
}

#[test]
fn no_input_makes_gdrctl_hold_more_than_64_mib() {
    let tree = bad_tree().expect("a folder");
    let sparse = tree.path().join("sparse.xml");
    std::fs::File::create(&sparse).and_then(|file| file.set_len(4 << 30)).expect("a sparse file");
    let name = |path: &Path| path.to_str().expect("a plain path").to_owned();
    for (what, feed, error) in streams() {
        check(what, "-", feed, Some(error));
    }
    check("a sparse file", &name(&sparse), Box::new(|_| Ok(())), Some("sparse.xml"));
    check("a folder", &name(tree.path()), Box::new(|_| Ok(())), None);
}

fn check(what: &str, input: &str, feed: Feed, error: Option<&str>) {
    let output = plan(input, feed);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(if error.is_some() { 2 } else { 0 }), "{what}: {message}");
    assert!(error.is_none_or(|error| message.contains(error)), "{what}: {message}");
    let resident = getrusage(UsageWho::RUSAGE_CHILDREN).expect("it is always told").max_rss();
    assert!(resident < MAX_RESIDENT_KIB, "{what}: {resident} KiB");
}
