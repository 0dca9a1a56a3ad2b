//! gRPC services, peer credentials and the session socket.
#![forbid(unsafe_code)]
