//! Work owed: by whom it is known, and whom to believe (V2).

use crate::signs::Sight;

/// Who knows of the work that is owed, by trust (V2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwedSource {
    Gate,
    Page,
    Metrics,
}

/// Work owed now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owed {
    pub source: OwedSource,
    pub requests: u32,
}

/// V2: gate in-flight > page > metrics gauges. A gauge at zero proves nothing, a gate or page above zero wins over it. A gate that
/// owes nothing outranks a gauge, which some engines leave standing after their last request; so does a port without a connection.
pub(crate) fn owed(sight: &Sight<'_>) -> Option<Owed> {
    let gate = sight.gate.map_or(0, |gate| gate.in_flight);
    let nobody = sight.proc.and_then(|proc| proc.connections) == Some(0);
    let gauges = sight.metrics.filter(|_| sight.gate.is_none()).map_or(0.0, |m| {
        let queued = if nobody { 0.0 } else { count(m.running) + count(m.waiting) };
        if m.server_load.is_some() { count(m.server_load).max(queued) } else { queued }
    });
    [(OwedSource::Gate, gate), (OwedSource::Page, sight.page_owed), (OwedSource::Metrics, gauges.min(1e9) as u32)]
        .into_iter()
        .find(|(_, requests)| *requests > 0)
        .map(|(source, requests)| Owed { source, requests })
}

fn count(gauge: Option<f64>) -> f64 {
    gauge.filter(|value| value.is_finite() && *value > 0.0).unwrap_or(0.0)
}
