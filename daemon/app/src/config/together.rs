//! Values that are each in range but contradict each other: a part that is larger than its whole, and what would never take
//! effect.

use super::Config;
use super::file::LeaseRule;
use super::range::Ranges;
use super::who::Who;

/// Least length of GPU memory, bytes: the granularity of CUDA's and of simulated memory.
const LEAST_CLASS_BYTES: u64 = 2 << 20;

pub(super) fn check(config: &Config, ranges: &mut Ranges) {
    let Config { limits, cache, server, executor, .. } = config;
    let parts: [(&str, u32, &str, u32); 6] = [
        (
            "server.max_grpc_connections_per_uid",
            server.max_grpc_connections_per_uid,
            "server.max_grpc_connections",
            server.max_grpc_connections,
        ),
        (
            "server.max_session_connections_per_uid",
            server.max_session_connections_per_uid,
            "server.max_session_connections",
            server.max_session_connections,
        ),
        // Each session is one connection.
        ("limits.max_sessions", limits.max_sessions, "server.max_session_connections", server.max_session_connections),
        // Acquires that waited may all be granted at once, and a session whose queue is full is ended.
        (
            "limits.max_waiting_acquires_per_session",
            limits.max_waiting_acquires_per_session,
            "server.max_queued_deliveries",
            server.max_queued_deliveries,
        ),
        ("cache.max_idle_regions", cache.max_idle_regions, "cache.max_regions", cache.max_regions),
        ("executor.calls_per_device", executor.calls_per_device, "executor.threads", executor.threads),
    ];
    for (key, value, other, most) in parts {
        ranges.at_most_other((key, value.into()), (other, most.into()));
    }
    for (index, rule) in config.policy.lease.iter().enumerate() {
        check_order(&config.policy.lease, index, ranges);
        check_prewarm(config, index, rule, ranges);
    }
}

/// The first rule that fits counts, so that one behind another of the same subject, or behind everyone's, never does.
fn check_order(rules: &[LeaseRule], index: usize, ranges: &mut Ranges) {
    let Some(rule) = rules.get(index) else { return };
    let before = rules.iter().take(index).position(|before| before.who == rule.who || before.who == Who::Anyone);
    if let Some((at, before)) = before.and_then(|at| Some((at, rules.get(at)?))) {
        let problem =
            format!("below policy.lease[{at}].who = \"{}\", which fits first, it would never count", before.who);
        ranges.refuse_text(&format!("policy.lease[{index}].who"), &format!("\"{}\"", rule.who), problem);
    }
}

fn check_prewarm(config: &Config, index: usize, rule: &LeaseRule, ranges: &mut Ranges) {
    let mut all_bytes = 0_u64;
    for (entry, prewarm) in rule.prewarm.iter().enumerate() {
        let at = format!("policy.lease[{index}].prewarm[{entry}]");
        let (size_key, count_key) = (format!("{at}.size_bytes"), format!("{at}.count"));
        let class = prewarm.size_bytes.checked_next_power_of_two().unwrap_or(u64::MAX).max(LEAST_CLASS_BYTES);
        if class != prewarm.size_bytes {
            let problem = format!("size classes are, powers of two from {LEAST_CLASS_BYTES}; the next is {class}");
            ranges.refuse_text(&size_key, &prewarm.size_bytes.to_string(), problem);
        }
        ranges
            .at_most_other((&size_key, prewarm.size_bytes), ("limits.max_lease_bytes", config.limits.max_lease_bytes));
        let count = u64::from(prewarm.count);
        ranges.at_most_other((&count_key, count), ("pool.ready_max_per_class", config.pool.ready_max_per_class.into()));
        let bytes = count.saturating_mul(prewarm.size_bytes);
        // One buffer is kept whatever its length.
        if count > 1 {
            let key = format!("{at}, {} of {} bytes, together", prewarm.count, prewarm.size_bytes);
            ranges.at_most_other(
                (&key, bytes),
                ("pool.ready_max_bytes_per_class", config.pool.ready_max_bytes_per_class),
            );
        }
        all_bytes = all_bytes.saturating_add(bytes);
    }
    ranges.at_most_other(
        (&format!("policy.lease[{index}].prewarm in all"), all_bytes),
        (&format!("policy.lease[{index}].max_bytes"), rule.quota.max_bytes),
    );
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::Config;

    fn refused(text: &str) -> String {
        Config::parse(text, Path::new("gdrd.toml")).expect_err(text).to_string()
    }

    fn rule(rest: &str) -> String {
        format!("[[policy.lease]]\nwho = \"uid:7\"\n{rest}\n")
    }

    #[test]
    fn a_part_larger_than_its_whole_is_refused_with_both_keys_and_values() {
        for (text, wrong, other) in [
            (
                "[server]\nmax_grpc_connections = 100",
                "server.max_grpc_connections_per_uid = 256",
                "server.max_grpc_connections, 100,",
            ),
            (
                "[server]\nmax_session_connections_per_uid = 2000",
                "server.max_session_connections_per_uid = 2000",
                "server.max_session_connections, 1280,",
            ),
            ("[limits]\nmax_sessions = 1281", "limits.max_sessions = 1281", "server.max_session_connections, 1280,"),
            (
                "[server]\nmax_queued_deliveries = 63",
                "limits.max_waiting_acquires_per_session = 64",
                "server.max_queued_deliveries, 63,",
            ),
            ("[cache]\nmax_idle_regions = 4097", "cache.max_idle_regions = 4097", "cache.max_regions, 4096,"),
            ("[executor]\nthreads = 3", "executor.calls_per_device = 4", "executor.threads, 3,"),
        ] {
            let message = refused(text);
            assert!(message.starts_with(&format!("{wrong} is not allowed")) && message.contains(other), "{message}");
        }
    }

    #[test]
    fn buffers_made_ready_have_a_size_class_and_fit_into_pool_and_quota() {
        for (prewarm, more, parts) in [
            ("size_bytes = 3, count = 1", "", ["prewarm[0].size_bytes = 3", "the next is 2097152"]),
            ("size_bytes = 6291456, count = 1", "", ["prewarm[0].size_bytes = 6291456", "the next is 8388608"]),
            (
                "size_bytes = 34359738368, count = 1",
                "",
                ["size_bytes = 34359738368", "limits.max_lease_bytes, 17179869184,"],
            ),
            ("size_bytes = 2097152, count = 65", "", ["prewarm[0].count = 65", "pool.ready_max_per_class, 64,"]),
            (
                "size_bytes = 1073741824, count = 2",
                "",
                ["2 of 1073741824 bytes, together = 2147483648", "pool.ready_max_bytes_per_class, 1073741824,"],
            ),
            (
                "size_bytes = 2097152, count = 2",
                "max_bytes = 4194303\n",
                ["policy.lease[0].prewarm in all = 4194304", "policy.lease[0].max_bytes, 4194303,"],
            ),
        ] {
            let message = refused(&rule(&format!("{more}prewarm = [{{ gpu = \"GPU0\", {prewarm} }}]")));
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
        let right = rule("prewarm = [{ gpu = \"GPU0\", size_bytes = 2097152, count = 64 }]");
        assert!(Config::parse(&right, Path::new("gdrd.toml")).is_ok());
    }

    #[test]
    fn a_rule_that_can_never_count_is_refused() {
        let rules = |second: &str| format!("{}[[policy.lease]]\nwho = \"{second}\"\n", rule(""));
        let message = refused(&rules("uid:7"));
        assert!(message.starts_with("policy.lease[1].who = \"uid:7\" is not allowed"), "{message}");
        assert!(message.contains("policy.lease[0].who = \"uid:7\""), "{message}");
        let message = refused(&format!("[[policy.lease]]\nwho = \"anyone\"\n{}", rule("")));
        assert!(message.contains("policy.lease[0].who = \"anyone\""), "{message}");
        assert!(Config::parse(&rules("anyone"), Path::new("gdrd.toml")).is_ok());
    }
}
