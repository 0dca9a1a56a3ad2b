//! `make install` into a staged root, and systemd's own opinion of the units that it put there.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gdrd_house::{root, sources};
use tempfile::TempDir;

/// A staged root and a build folder with stand-ins for the binaries: what is installed matters here, not what it does.
struct Stage {
    dest: TempDir,
    build: TempDir,
}

/// They write pages into a folder and say a script, as the real ones do; whose own tests look at what is in them.
const GDRD: &str = r#"touch "$2/gdrd.8" "$2/gdrd-keeper.8""#;
const GDRCTL: &str = r#"case $1 in
  man) touch "$2/gdrctl.1" "$2/gdrctl-topo.1" ;;
  completions) echo "for $2" ;;
esac
"#;

impl Stage {
    fn new() -> Self {
        let stage = Self { dest: temporary_folder(), build: temporary_folder() };
        for (name, body) in [("gdrd", GDRD), ("gdrctl", GDRCTL)] {
            let path = stage.build.path().join(name);
            fs::write(&path, format!("#!/bin/sh\n{body}")).expect("the build folder is writable");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("the file is ours");
        }
        stage
    }

    fn make(&self, target: &str, prefix: &str) {
        // Not the variables of the make that runs the tests.
        let output = Command::new("make")
            .env_clear()
            .env("PATH", env::var_os("PATH").unwrap_or_default())
            .arg("--no-print-directory")
            .arg(target)
            .arg(format!("DESTDIR={}", self.dest.path().display()))
            .arg(format!("BUILD_DIR={}", self.build.path().display()))
            .arg(format!("PREFIX={prefix}"))
            .current_dir(root())
            .output()
            .expect("make runs");
        assert!(output.status.success(), "make {target}: {}", text_of(&output));
    }

    fn path(&self, absolute: &str) -> PathBuf {
        self.dest.path().join(absolute.trim_start_matches('/'))
    }

    fn files(&self) -> BTreeSet<String> {
        let found = sources::read_tree(self.dest.path()).expect("the staged root is readable");
        found.into_iter().map(|source| format!("/{}", source.path.display())).collect()
    }
}

fn temporary_folder() -> TempDir {
    tempfile::tempdir().expect("the temporary folder is writable")
}

fn text_of(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn mode_of(path: &Path) -> u32 {
    fs::metadata(path).expect("the file was installed").permissions().mode() & 0o7777
}

#[test]
fn install_puts_every_file_in_place_and_uninstall_leaves_only_the_configuration() {
    let stage = Stage::new();
    stage.make("install-files", "/usr");
    let expected = [
        "/etc/gdrd/gdrd.toml",
        "/usr/bin/gdrctl",
        "/usr/bin/gdrd",
        "/usr/lib/systemd/system/gdrd-session.socket",
        "/usr/lib/systemd/system/gdrd.service",
        "/usr/lib/systemd/system/gdrd.socket",
        "/usr/lib/sysusers.d/gdrd.conf",
        "/usr/lib/tmpfiles.d/gdrd.conf",
        "/usr/share/bash-completion/completions/gdrctl",
        "/usr/share/fish/vendor_completions.d/gdrctl.fish",
        "/usr/share/man/man1/gdrctl-topo.1",
        "/usr/share/man/man1/gdrctl.1",
        "/usr/share/man/man8/gdrd-keeper.8",
        "/usr/share/man/man8/gdrd.8",
        "/usr/share/zsh/site-functions/_gdrctl",
        "/usr/share/doc/gdrd/CHANGELOG.md",
        "/usr/share/doc/gdrd/LICENSE",
        "/usr/share/doc/gdrd/README.md",
    ];
    assert_eq!(stage.files(), expected.map(str::to_owned).into());
    assert_eq!(mode_of(&stage.path("/usr/bin/gdrd")), 0o755);
    assert_eq!(mode_of(&stage.path("/usr/lib/systemd/system/gdrd.service")), 0o644);
    let fish = fs::read_to_string(stage.path("/usr/share/fish/vendor_completions.d/gdrctl.fish"));
    assert_eq!(fish.expect("it is there"), "for fish\n");

    stage.make("uninstall", "/usr");
    assert_eq!(stage.files(), ["/etc/gdrd/gdrd.toml".to_owned()].into());
}

#[test]
fn install_keeps_a_configuration_that_the_operator_changed() {
    let stage = Stage::new();
    let config = stage.path("/etc/gdrd/gdrd.toml");
    fs::create_dir_all(config.parent().expect("a file has a folder")).expect("the staged root is writable");
    fs::write(&config, "# mine\n").expect("the staged root is writable");
    stage.make("install-files", "/usr");
    assert_eq!(fs::read_to_string(&config).expect("it is there"), "# mine\n");
    let shipped = fs::read_to_string(root().join("config/gdrd.toml")).expect("the defaults are there");
    assert_eq!(fs::read_to_string(stage.path("/etc/gdrd/gdrd.toml.new")).expect("it is there"), shipped);
}

#[test]
fn no_installed_file_holds_an_unfilled_name() {
    let stage = Stage::new();
    stage.make("install-files", "/usr/local");
    let unit = fs::read_to_string(stage.path("/usr/local/lib/systemd/system/gdrd.service")).expect("it is there");
    assert!(unit.contains("ExecStart=/usr/local/bin/gdrd --config /etc/gdrd/gdrd.toml"), "{unit}");
    assert!(!unit.contains("@BINDIR@") && !unit.contains("@SYSCONFDIR@") && !unit.contains("@DOCDIR@"), "{unit}");
}

#[test]
fn systemd_accepts_the_installed_units_without_a_word() {
    let stage = Stage::new();
    stage.make("install-files", "/usr");
    let units = stage.path("/usr/lib/systemd/system");
    // The unit names its binary by the path it has once installed; verify looks for it on this machine.
    let service = units.join("gdrd.service");
    let text = fs::read_to_string(&service).expect("it is there");
    let staged = format!("ExecStart={}/usr/bin/gdrd", stage.dest.path().display());
    fs::write(&service, text.replace("ExecStart=/usr/bin/gdrd", &staged)).expect("the staged root is writable");
    let output = Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .args(["gdrd.service", "gdrd.socket", "gdrd-session.socket"].map(|name| units.join(name)))
        .output()
        .expect("systemd-analyze runs; `make setup` installs it");
    assert!(output.status.success(), "{}", text_of(&output));
    let text = text_of(&output);
    // Before 254 systemd does not know it, and does the same.
    let newer = "'FileDescriptorStorePreserve' in section";
    let lines: Vec<&str> = text.lines().filter(|line| !line.contains(newer)).collect();
    assert_eq!(lines, [""; 0]);
}

#[test]
fn both_sockets_start_the_service_and_their_names_fit_the_descriptor_store() {
    for (file, name, listen) in [
        ("systemd/gdrd.socket", "grpc", "ListenStream=/run/gdrd/gdrd.sock"),
        ("systemd/gdrd-session.socket", "sess", "ListenSequentialPacket=/run/gdrd/session.sock"),
    ] {
        let text = fs::read_to_string(root().join(file)).expect("the unit is there");
        let holds = |wanted: &str| text.lines().any(|line| line == wanted);
        assert!(holds(&format!("FileDescriptorName={name}")), "{file}");
        assert!(holds(listen) && holds("SocketMode=0666"), "{file}");
        assert!(name.len() <= 4, "{name} is longer than a stored descriptor's name may be");
    }
}

#[test]
fn the_descriptor_store_fits_into_one_environment_string() {
    /// MAX_ARG_STRLEN, execve(2): 32 pages of 4 KiB.
    const MAX_STRING_BYTES: usize = 32 * 4096;
    /// A name of 4 characters and its separator.
    const NAME_BYTES: usize = 5;
    const SOCKETS: usize = 2;
    let unit = fs::read_to_string(root().join("systemd/gdrd.service.in")).expect("the unit is there");
    let value = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)).expect("the unit has this line");
    let most: usize = value("FileDescriptorStoreMax=").parse().expect("the bound is a number");
    assert_eq!(value("Environment=GDRD_FDSTORE="), most.to_string(), "what the daemon is told where systemd is older");
    assert!("LISTEN_FDNAMES=".len() + (most + SOCKETS) * NAME_BYTES < MAX_STRING_BYTES);
}

#[test]
fn systemd_accepts_the_users_and_folders() {
    let stage = Stage::new();
    stage.make("install-files", "/usr");
    let root_option = format!("--root={}", stage.dest.path().display());
    let users = Command::new("systemd-sysusers").args([&root_option, "--dry-run"]).output();
    let users = users.expect("systemd-sysusers runs; `make setup` installs it");
    assert!(users.status.success(), "{}", text_of(&users));
}
