//! 64-bit GUIDs as sysfs prints them: four groups of four hexadecimal digits.

/// Reads `b8ce:f603:00d1:2e3a`; `None` if it is no GUID.
pub(crate) fn parse(text: &str) -> Option<u64> {
    let mut value = 0_u64;
    let mut groups = 0;
    for group in text.trim().split(':') {
        let is_hex = group.len() == 4 && group.bytes().all(|byte| byte.is_ascii_hexdigit());
        groups += 1;
        if !is_hex || groups > 4 {
            return None;
        }
        value = value << 16 | u64::from_str_radix(group, 16).ok()?;
    }
    (groups == 4).then_some(value)
}

/// Prints what [`parse`] reads.
pub(crate) fn print(guid: u64) -> String {
    let group = |shift: u32| guid >> shift & 0xffff;
    format!("{:04x}:{:04x}:{:04x}:{:04x}", group(48), group(32), group(16), group(0))
}
