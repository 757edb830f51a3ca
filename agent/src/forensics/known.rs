//! The entries of a bundle that are made of what the caller knew already: no I/O, so nothing here can be late.

use heartbeat::page::StepRecord;
use vitals::observation::Observation;

use super::bundle::BundleEntry;
use super::{CaptureRequest, entry, redact};

/// Flight-recorder lines of one bundle: every rank has 256.
const STEPS_MAX: usize = 256 * 64;

/// The entries made of what the caller gave: no I/O.
pub fn entries(request: &CaptureRequest, command_line: &[String], log: &[String]) -> Vec<BundleEntry> {
    let verdict = serde_json::json!({
        "episode": request.episode, "outcome": request.outcome, "command_line": command_line, "gpu": request.gpu_note,
    });
    let steps = &request.steps[request.steps.len().saturating_sub(STEPS_MAX)..];
    let mut entries = vec![
        entry("verdict.json", format!("{verdict:#}\n")),
        entry("steps.json", steps_json(steps)),
        entry("steps.txt", steps_text(steps)),
        entry("log-tail.txt", redact::redact_log(&log.join("\n"))),
        entry("gpu.txt", format!("{}\n", request.gpu_note)),
    ];
    entries.extend(request.observation.clone().map(|seen| entry("observation.json", observation_json(seen))));
    if let Some((at_ms, text)) = &request.metrics_before {
        entries.push(entry("metrics-before.txt", format!("# scraped at {at_ms} ms of CLOCK_MONOTONIC\n{text}")));
    }
    entries
}

/// The last observation, without the lines that the log's signatures were found in.
fn observation_json(mut seen: Observation) -> String {
    for hit in &mut seen.log {
        hit.line = redact::redact_log(&hit.line);
    }
    serde_json::to_string_pretty(&seen).map_or_else(|error| format!("cannot be told: {error}\n"), |text| text + "\n")
}

fn steps_json(steps: &[StepRecord]) -> String {
    let steps: Vec<serde_json::Value> = steps
        .iter()
        .map(|step| {
            serde_json::json!({
                "step": step.step, "started_ns": step.started_ns, "ended_ns": step.ended_ns, "requests": step.requests,
                "prefill_tokens": step.prefill_tokens, "decode_tokens": step.decode_tokens,
                "graph_key": step.graph_key, "outcome": format!("{:?}", step.outcome),
            })
        })
        .collect();
    format!("{:#}\n", serde_json::Value::Array(steps))
}

fn steps_text(steps: &[StepRecord]) -> String {
    if steps.is_empty() {
        return "the engine publishes no steps\n".to_owned();
    }
    let mut text = format!(
        "{:>10} {:>16} {:>10} {:>8} {:>8} {:>7} {:>16} outcome\n",
        "step", "started ms", "took us", "requests", "prefill", "decode", "graph"
    );
    for step in steps {
        text.push_str(&format!(
            "{:>10} {:>16} {:>10} {:>8} {:>8} {:>7} {:>16x} {:?}\n",
            step.step,
            step.started_ns / 1_000_000,
            step.ended_ns.saturating_sub(step.started_ns) / 1_000,
            step.requests,
            step.prefill_tokens,
            step.decode_tokens,
            step.graph_key,
            step.outcome
        ));
    }
    text
}
