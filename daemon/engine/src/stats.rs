//! Figures of the engine.

/// One counter or gauge, named like its Prometheus metric.
#[derive(Debug, Clone, PartialEq)]
pub struct Stat {
    /// Name; the unit last, counters end in `_total`.
    pub name: &'static str,
    /// Label names and values.
    pub labels: Vec<(&'static str, String)>,
    /// Value.
    pub value: f64,
    /// One line of help.
    pub help: &'static str,
}
