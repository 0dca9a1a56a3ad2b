//! Why the daemon refused a request before it reached the HCA.

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $text:literal;)*) => {
        /// Detail of [`crate::Status::Refused`], in [`crate::Completion::vendor_error`]. Nothing was done, and
        /// the queue pair goes on.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum RefusalReason {
            $($(#[$doc])* $variant,)*
        }

        impl RefusalReason {
            /// Every reason.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The number in the completion.
            #[must_use]
            pub const fn code(self) -> u32 {
                match self {
                    $(Self::$variant => $code,)*
                }
            }

            /// The reason of a number; `None` for one that this version does not know.
            #[must_use]
            pub const fn from_code(code: u32) -> Option<Self> {
                match code {
                    $($code => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// What is wrong, as errors and the CLI print it.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }
    };
}

reasons! {
    /// Unknown opcode or flag, reserved field, inline or atomic length.
    Malformed = 1, "the entry is malformed";
    /// No such registration slot.
    NoSuchSlot = 2, "there is no such registration slot";
    /// The registration is on another HCA than the queue pair.
    OtherHca = 3, "the registration is on another hca than the queue pair";
    /// The range does not lie in the registration.
    Range = 4, "the range does not lie in the registration";
    /// The HCA may not write to the registration, as a read, an atomic or a receive would.
    Access = 5, "the registration has no local write access";
    /// More inline payload than the queue pair carries.
    InlineTooLong = 6, "the inline payload is longer than the queue pair carries";
    /// Longer than a message of this HCA may be, or past the end of the peer's address space.
    MessageTooLong = 7, "the message is too long";
    /// The queue pair's type or its HCA cannot do this.
    Unsupported = 8, "the queue pair cannot do this operation";
    /// The remote address of an atomic is not a multiple of 8.
    Misaligned = 9, "the remote address of an atomic is not a multiple of 8";
    /// The queue pair is not connected.
    NotConnected = 10, "the queue pair is not connected";
    /// The provider would not take it.
    Provider = 11, "the provider did not take the request";
}

impl std::fmt::Display for RefusalReason {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(self.text())
    }
}

#[cfg(test)]
mod tests {
    use super::RefusalReason;

    #[test]
    fn codes_are_the_published_ones_and_read_back() {
        for (code, reason) in (1..).zip(RefusalReason::ALL) {
            assert_eq!((reason.code(), RefusalReason::from_code(code)), (code, Some(*reason)));
        }
        assert_eq!(RefusalReason::from_code(0), None);
        assert_eq!(RefusalReason::from_code(12), None);
    }
}
