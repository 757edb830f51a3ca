//! The entries of a bundle that are made of what the caller knew already: no I/O, so nothing here can be late.

use heartbeat::page::StepRecord;
use vitals::observation::Observation;

use super::bundle::BundleEntry;
use super::{CaptureRequest, entry, redact};
use crate::sources::RankSteps;

/// Flight-recorder lines of one bundle: up to so many ranks have all their 256 in it.
const STEPS_MAX: usize = 256 * 64;

/// The entries made of what the caller gave: no I/O. `tree`: the engine's processes.
pub fn entries(request: &CaptureRequest, command_line: &[String], log: &[String], tree: &[i32]) -> Vec<BundleEntry> {
    let verdict = serde_json::json!({
        "episode": request.episode, "outcome": request.outcome, "command_line": command_line, "gpu": request.gpu_note,
    });
    let mut entries = vec![
        entry("verdict.json", format!("{verdict:#}\n")),
        entry("steps.json", steps_json(&request.steps)),
        entry("steps.txt", steps_text(&request.steps, tree)),
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

/// How many steps of each rank there is room for, so that no rank is left out.
fn steps_of_rank_max(ranks: usize) -> usize {
    (STEPS_MAX / ranks.max(1)).max(1)
}

/// The newest of them.
fn newest(rank: &RankSteps, max: usize) -> &[StepRecord] {
    &rank.steps[rank.steps.len().saturating_sub(max)..]
}

fn steps_json(ranks: &[RankSteps]) -> String {
    let max = steps_of_rank_max(ranks.len());
    let steps = ranks.iter().flat_map(|rank| newest(rank, max).iter().map(move |step| (rank, step)));
    let steps: Vec<serde_json::Value> = steps
        .map(|(rank, step)| {
            serde_json::json!({
                "rank": rank.rank, "pid": rank.pid,
                "step": step.step, "started_ns": step.started_ns, "ended_ns": step.ended_ns, "requests": step.requests,
                "prefill_tokens": step.prefill_tokens, "decode_tokens": step.decode_tokens,
                "graph_key": step.graph_key, "outcome": format!("{:?}", step.outcome),
            })
        })
        .collect();
    format!("{:#}\n", serde_json::Value::Array(steps))
}

fn steps_text(ranks: &[RankSteps], tree: &[i32]) -> String {
    if ranks.iter().all(|rank| rank.steps.is_empty()) {
        return "the engine publishes no steps\n".to_owned();
    }
    let mut text = String::new();
    // of an engine that is gone all pages are a dead process's, which says nothing of any of them
    let is_left = |pid: &i32| !tree.is_empty() && !tree.contains(pid);
    for rank in ranks.iter().filter(|rank| rank.pid.as_ref().is_some_and(is_left)) {
        let pid = rank.pid.unwrap_or_default();
        text.push_str(&format!(
            "rank {}: process {pid} is none of the engine's, its page was left behind\n",
            rank.rank
        ));
    }
    text.push_str(&format!(
        "{:>4} {:>10} {:>16} {:>10} {:>8} {:>8} {:>7} {:>16} outcome\n",
        "rank", "step", "started ms", "took us", "requests", "prefill", "decode", "graph"
    ));
    let max = steps_of_rank_max(ranks.len());
    for (rank, step) in ranks.iter().flat_map(|rank| newest(rank, max).iter().map(move |step| (rank.rank, step))) {
        text.push_str(&format!(
            "{rank:>4} {:>10} {:>16} {:>10} {:>8} {:>8} {:>7} {:>16x} {:?}\n",
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

#[cfg(test)]
mod tests {
    use super::*;
    use heartbeat::page::StepOutcome;

    fn rank(rank: u32, pid: i32, steps: u64) -> RankSteps {
        let step = |step| StepRecord {
            step,
            started_ns: 0,
            ended_ns: 0,
            requests: 1,
            prefill_tokens: 0,
            decode_tokens: 1,
            graph_key: 0,
            outcome: StepOutcome::Ok,
        };
        RankSteps { rank, pid: Some(pid), steps: (0..steps).map(step).collect() }
    }

    #[test]
    fn each_step_says_whose_it_is_and_a_page_that_was_left_behind_is_named() {
        let ranks = [rank(0, 70, 2), rank(1, 71, 1), rank(7, 12, 1)];
        let text = steps_text(&ranks, &[70, 71]);
        let ranks_told: Vec<&str> = text.lines().skip(2).filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(ranks_told, ["0", "0", "1", "7"]);
        assert!(text.starts_with("rank 7: process 12 is none of the engine's"), "{text}");
        assert!(!steps_text(&ranks, &[]).contains("none of the engine's"), "all of them are gone");
        let json: serde_json::Value = serde_json::from_str(&steps_json(&ranks)).unwrap();
        assert_eq!((&json[3]["rank"], &json[3]["pid"]), (&7.into(), &12.into()));
    }

    #[test]
    fn of_many_ranks_each_has_its_newest_steps() {
        let ranks: Vec<RankSteps> = (0..256).map(|number| rank(number, 1, 256)).collect();
        let json: Vec<serde_json::Value> = serde_json::from_str(&steps_json(&ranks)).unwrap();
        assert_eq!((json.len(), &json[0]["rank"], &json[0]["step"]), (STEPS_MAX, &0.into(), &192.into()));
    }
}
