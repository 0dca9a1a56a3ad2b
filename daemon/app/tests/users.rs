//! What the kernel says of a peer decides, whatever the peer says: two real users on one daemon.

mod support;

use std::os::unix::process::CommandExt as _;
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
        let mut thief = Command::new(std::env::current_exe().expect("a path"));
        thief.args(["--exact", TEST, "--nocapture"]).env(TOKEN, &token).env(SOCKET, &socket);
        assert!(thief.uid(OTHER_UID).gid(OTHER_UID).status().expect("it starts").success());
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
