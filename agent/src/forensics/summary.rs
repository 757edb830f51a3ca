//! What a person reads first, and the fingerprint by which two stalls are known to be the same. Pure.

use crds::episode::Episode;
use vitals::verdict::Outcome;

use super::proc_facts::MainThread;
use super::stacks::PythonThread;

/// A termination message holds no more (bytes).
pub const SUMMARY_BYTES_MAX: usize = 4_096;
/// Frames of one Python main thread that make the fingerprint and the summary.
const FRAMES_MAX: usize = 4;
const REASONS_MAX: usize = 8;
const LINE_CHARS_MAX: usize = 300;

/// What the summary is made of.
#[derive(Debug)]
pub struct Facts<'a> {
    pub episode: &'a Episode,
    pub outcome: &'a Outcome,
    pub mains: &'a [MainThread],
    pub pythons: &'a [(i32, PythonThread)],
    pub gpu_note: &'a str,
    pub fingerprint: &'a str,
    /// Where the bundle is; `None` where it was lost.
    pub bundle: Option<&'a str>,
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
    lines.push(match facts.bundle {
        Some(path) => format!("bundle: {path}"),
        None => "bundle: none could be written".to_owned(),
    });
    lines.push(format!("fingerprint: {}", facts.fingerprint));
    for (pid, thread) in facts.pythons {
        lines.push(format!("python {pid} {}: {}", thread.name, frames(thread).join(" < ")));
    }
    for main in facts.mains {
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

/// 16 hex digits over class, where the processes stand, and the engine's flags: the same on every replica with the same disease.
/// Pids, states, line numbers and times are left out, for they differ from one stall to the next.
pub fn fingerprint(
    class: &str,
    mains: &[MainThread],
    pythons: &[(i32, PythonThread)],
    command_line: &[String],
) -> String {
    let mut places: Vec<String> = if pythons.is_empty() {
        mains.iter().map(|main| format!("{} {}", main.comm, main.wchan)).collect()
    } else {
        pythons.iter().map(|(_, thread)| frames(thread).join("<")).collect()
    };
    // eight ranks that stand in one place are one place
    places.sort();
    places.dedup();
    let mut hash = Fnv1a::default();
    hash.part(class);
    places.iter().for_each(|place| hash.part(place));
    hash.part("--");
    command_line.iter().skip(1).for_each(|flag| hash.part(flag));
    format!("{:016x}", hash.0)
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

/// The innermost calls, without lines and directories.
fn frames(thread: &PythonThread) -> Vec<String> {
    let name = |file: &str| file.rsplit('/').next().unwrap_or(file).to_owned();
    thread.frames.iter().take(FRAMES_MAX).map(|frame| format!("{} ({})", frame.function, name(&frame.file))).collect()
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

/// FNV-1a, 64 bits: stable across versions and machines, which the standard library's hasher does not promise.
struct Fnv1a(u64);

impl Default for Fnv1a {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv1a {
    /// Adds one part and a separator, so that `ab, c` is not `a, bc`.
    fn part(&mut self, text: &str) {
        for byte in text.bytes().chain(std::iter::once(0)) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn main(comm: &str, state: char, wchan: &str) -> MainThread {
        MainThread { pid: 7, comm: comm.to_owned(), state, wchan: wchan.to_owned() }
    }

    #[test]
    fn the_fingerprint_is_stable_and_tells_diseases_apart() {
        let flags = ["vllm".to_owned(), "--tp=8".to_owned()];
        let one = fingerprint("StepStalled", &[main("a", 'S', "futex"), main("b", 'R', "0")], &[], &flags);
        assert_eq!(one.len(), 16);
        let mut other = [main("b", 'S', "0"), main("a", 'S', "futex")];
        other[0].pid = 99;
        assert_eq!(fingerprint("StepStalled", &other, &[], &flags), one, "order, pid and state do not matter");
        assert_ne!(fingerprint("DeviceWait", &other, &[], &flags), one);
        assert_ne!(fingerprint("StepStalled", &other, &[], &flags[..1]), one);
        assert_ne!(fingerprint("StepStalled", &other[..1], &[], &flags), one);
    }

    #[test]
    fn the_hash_is_the_published_one() {
        let mut hash = Fnv1a::default();
        hash.part("");
        // one zero byte: the offset basis times the prime
        assert_eq!(hash.0, 0xaf63_bd4c_8601_b7df);
    }

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
        };
        let mains: Vec<MainThread> = (0..300).map(|_| main("engine", 'R', "0")).collect();
        let facts = Facts {
            episode: &episode,
            outcome: &outcome,
            mains: &mains,
            pythons: &[],
            gpu_note: "NVML absent",
            fingerprint: "f",
            bundle: Some("/b/e-1.tar.zst"),
            notes: &[],
        };
        let text = summary(&facts);
        assert!(text.len() <= SUMMARY_BYTES_MAX && text.len() > 2_000);
        assert!(text.starts_with("truebeat: StepStalled (Stalled), episode e-1\n  gate: 5 owed ü"), "{text}");
        assert!(text.contains("bundle: /b/e-1.tar.zst\n"));
    }
}
