//! What a person reads first. Pure.

use crds::episode::Episode;
use vitals::verdict::Outcome;

use super::fingerprint::{Places, frames};

/// A termination message holds no more (bytes).
pub const SUMMARY_BYTES_MAX: usize = 4_096;
const REASONS_MAX: usize = 8;
const LINE_CHARS_MAX: usize = 300;

/// What the summary is made of.
#[derive(Debug)]
pub struct Facts<'a> {
    pub episode: &'a Episode,
    pub outcome: &'a Outcome,
    pub places: Places<'a>,
    pub gpu_note: &'a str,
    pub fingerprint: &'a str,
    /// Where the bundle is, or what became of it.
    pub bundle: &'a str,
    pub notes: &'a [String],
}

/// The human text, at most [`SUMMARY_BYTES_MAX`]: what matters most comes first, so that a cut costs least.
pub fn summary(facts: &Facts<'_>) -> String {
    let episode = facts.episode;
    let mut lines = vec![format!(
        "truebeat: {} ({}), episode {}",
        class_of(facts.episode, facts.outcome),
        facts.outcome.verdict.name(),
        episode.id
    )];
    for reason in facts.outcome.reasons.iter().take(REASONS_MAX) {
        lines.push(format!("  {}: {}", reason.source, reason.text));
    }
    lines.push(format!("times: {}", times(episode)));
    lines.push(format!("bundle: {}", facts.bundle));
    lines.push(format!("fingerprint: {}", facts.fingerprint));
    for (pid, calls) in facts.places.told {
        lines.push(format!("stands {pid}: {}", calls.join(" < ")));
    }
    for (pid, thread) in facts.places.pythons {
        lines.push(format!("python {pid} {}: {}", thread.name, frames(thread).join(" < ")));
    }
    for main in facts.places.mains {
        lines.push(format!("process {} {}: state {}, wchan {}", main.pid, main.comm, main.state, main.wchan));
    }
    lines.push(format!("gpu: {}", facts.gpu_note));
    lines.extend(facts.notes.iter().map(|note| format!("note: {note}")));
    cut(&lines)
}

/// The episode's class by name; where it has none yet, the verdict's.
pub fn class_of<'a>(episode: &'a Episode, outcome: &'a Outcome) -> &'a str {
    if episode.class.is_empty() {
        outcome.verdict.class().map_or(outcome.verdict.name(), |class| class.name())
    } else {
        &episode.class
    }
}

fn times(episode: &Episode) -> String {
    let steps = [
        ("suspect", &episode.suspect_at),
        ("fenced", &episode.fenced_at),
        ("confirmed", &episode.confirmed_at),
        ("evidence", &episode.evidence_at),
        ("granted", &episode.granted_at),
    ];
    let known: Vec<String> =
        steps.iter().filter_map(|(name, at)| at.as_ref().map(|at| format!("{name} {at}"))).collect();
    if known.is_empty() { "not known".to_owned() } else { known.join(", ") }
}

fn cut(lines: &[String]) -> String {
    let mut text = String::new();
    for line in lines {
        let line: String = line.chars().take(LINE_CHARS_MAX).map(|c| if c.is_control() { ' ' } else { c }).collect();
        if text.len() + line.len() + 1 > SUMMARY_BYTES_MAX {
            break;
        }
        text.push_str(&line);
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forensics::proc_facts::MainThread;

    #[test]
    fn a_summary_fits_a_termination_message_whatever_it_is_made_of() {
        let episode = Episode { id: "e-1".to_owned(), class: "StepStalled".to_owned(), ..Default::default() };
        let outcome = Outcome {
            verdict: vitals::verdict::Verdict::Stalled(vitals::verdict::StallClass::StepStalled),
            since_ms: 0,
            reasons: vec![vitals::verdict::Reason { source: "gate".to_owned(), text: "5 owed\nü".repeat(500) }],
            actions: Vec::new(),
            check_again_in_ms: 100,
            fenced: true,
            health_lies: true,
        };
        let mains: Vec<MainThread> = (0..300)
            .map(|_| MainThread { pid: 7, comm: "engine".to_owned(), state: 'R', wchan: "0".to_owned() })
            .collect();
        let facts = Facts {
            episode: &episode,
            outcome: &outcome,
            places: Places { mains: &mains, ..Places::default() },
            gpu_note: "NVML absent",
            fingerprint: "f",
            bundle: "/b/e-1.tar.zst",
            notes: &[],
        };
        let text = summary(&facts);
        assert!(text.len() <= SUMMARY_BYTES_MAX && text.len() > 2_000);
        assert!(text.starts_with("truebeat: StepStalled (Stalled), episode e-1\n  gate: 5 owed ü"), "{text}");
        assert!(text.contains("bundle: /b/e-1.tar.zst\n"));
    }
}
