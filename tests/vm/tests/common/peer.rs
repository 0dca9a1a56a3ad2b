//! The other of two guests, by TCP on the same wire.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};

use gdrd_vm::node;

const MEETING_PORT: u16 = 7471;

/// The other guest, line by line.
pub(crate) struct Peer {
    reader: BufReader<TcpStream>,
    writer: TcpStream,
}

impl Peer {
    pub(crate) fn meet() -> Self {
        let stream = if node() == 2 {
            let listener = TcpListener::bind(("10.77.0.2", MEETING_PORT)).expect("the guest has this address");
            listener.accept().expect("the other guest comes").0
        } else {
            let meet = || TcpStream::connect(("10.77.0.2", MEETING_PORT));
            gdrd_harness::wait_until("the other guest listens", meet)
        };
        stream.set_read_timeout(Some(gdrd_harness::PATIENCE)).expect("a bound is valid");
        let reader = BufReader::new(stream.try_clone().expect("a descriptor is left"));
        Self { reader, writer: stream }
    }

    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.writer, "{line}").expect("the other guest listens");
    }

    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).expect("the other guest speaks");
        assert!(line.ends_with('\n'), "the other guest ended early");
        line.trim_end().to_owned()
    }

    pub(crate) fn trade(&mut self, own: &str) -> String {
        self.tell(own);
        self.hear()
    }
}
