//! What the kernel says of a peer decides, whatever the peer says: two real users on one daemon.

mod support;

use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use gdrd_harness::as_root_of_a_user_namespace;
use gdrd_proto::v1;
use gdrd_proto::v1::buffers_client::BuffersClient;
use support::{Stage, block_on, channel, raw_session};
use tonic::metadata::MetadataValue;

const TEST: &str = "token_of_another_user_is_worth_nothing";
/// Set in the process that runs as another user: the token it has come by, byte by byte.
const TOKEN: &str = "GDRD_TEST_TOKEN";
/// And the socket it uses it on.
const SOCKET: &str = "GDRD_TEST_SOCKET";
const OTHER_UID: u32 = 12_345;
const REFUSED: &str = "refused_connections_of_one_user_keep_no_answer_from_another";

#[test]
fn token_of_another_user_is_worth_nothing() {
    if let (Ok(token), Ok(socket)) = (std::env::var(TOKEN), std::env::var(SOCKET)) {
        return use_token(&token, &socket, Err("SESSION_TOKEN_INVALID"));
    }
    as_root_of_a_user_namespace(TEST, || {
        let stage = Stage::new();
        let path = stage.path("gdrd.toml");
        std::fs::write(&path, "[[policy.lease]]\nwho = \"anyone\"\n").expect("written");
        let config = path.to_string_lossy();
        let _daemon = stage.start(stage.command(&["--sim", "dgx-a100", "--config", &config]));
        let (_session, token) = raw_session(&stage.runtime_dir().join("session.sock"));
        let token = token.iter().map(u8::to_string).collect::<Vec<_>>().join(" ");
        let socket = stage.runtime_dir().join("gdrd.sock").to_string_lossy().into_owned();
        as_another_user(TEST, &[(TOKEN, &token), (SOCKET, &socket)]);
        use_token(&token, &socket, Ok(()));
    });
}

/// Lists with a token; `expected` is the reason of the refusal, if any.
fn use_token(token: &str, socket: &str, expected: Result<(), &str>) {
    let mut request = tonic::Request::new(v1::ListLeasesRequest::default());
    let bytes: Vec<u8> = token.split(' ').map(|byte| byte.parse().expect("a byte")).collect();
    request.metadata_mut().insert_bin(gdrd_proto::SESSION_TOKEN_KEY, MetadataValue::from_bytes(&bytes));
    let socket = socket.into();
    let answer = block_on(async move { BuffersClient::new(channel(socket).await).list(request).await });
    let got = answer.map(drop).map_err(|refused| {
        let reason = refused.metadata().get("gdrd-reason").and_then(|reason| reason.to_str().ok());
        reason.unwrap_or_default().to_owned()
    });
    assert_eq!(got, expected.map_err(str::to_owned));
}

#[test]
fn refused_connections_of_one_user_keep_no_answer_from_another() {
    if let Ok(socket) = std::env::var(SOCKET) {
        return be_refused_by_name(Path::new(&socket), OTHER_UID);
    }
    as_root_of_a_user_namespace(REFUSED, || {
        let stage = Stage::new();
        let path = stage.path("gdrd.toml");
        // Nobody's time is up meanwhile.
        let server = "[server]\nmax_grpc_connections_per_uid = 1\nhello_timeout_ms = 600000\n";
        std::fs::write(&path, server).expect("written");
        let _daemon = stage.start(stage.command(&["--sim", "dgx-a100", "--config", &path.to_string_lossy()]));
        let socket = stage.runtime_dir().join("gdrd.sock");
        // Most are to be told that they are too many, and none of them listens.
        let deaf: Vec<UnixStream> = (0..32).map(|_| UnixStream::connect(&socket).expect("it is accepted")).collect();
        as_another_user(REFUSED, &[(SOCKET, &socket.to_string_lossy())]);
        drop(deaf);
    });
}

/// The first connection takes the only place, and the second is told so.
fn be_refused_by_name(socket: &Path, uid: u32) {
    let connect = || UnixStream::connect(socket).expect("it is accepted");
    let (_first, mut second) = (connect(), connect());
    let mut heard = Vec::new();
    second.read_to_end(&mut heard).expect("it is closed");
    let heard = String::from_utf8_lossy(&heard);
    assert!(heard.contains(&format!("CONNECTIONS_EXHAUSTED: uid {uid}")), "{heard:?}");
}

/// Runs this test in a process of another user, with these variables.
fn as_another_user(test: &str, variables: &[(&str, &str)]) {
    let mut other = Command::new(std::env::current_exe().expect("a path"));
    other.args(["--exact", test, "--nocapture"]).envs(variables.iter().copied());
    assert!(other.uid(OTHER_UID).gid(OTHER_UID).status().expect("it starts").success());
}
