//! Tenants, sessions, leases, pools, registrations and the broker.
#![forbid(unsafe_code)]
