//! `truebeat bundle FILE`: an evidence bundle in one screen, or one entry of it. Reading, with all its bounds, is
//! `agent::forensics::bundle`; nothing is ever unpacked to disk, and nothing that a bundle says reaches the terminal as a control code.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitCode;

use agent::forensics::bundle::{BundleContents, Manifest};
use anyhow::{Context, bail};
use serde_json::{Value, json};

use crate::args::{BundleArgs, Output};

/// Lines of each part: the whole fits one screen.
const STEPS_SHOWN: usize = 8;
const REASONS_SHOWN: usize = 5;
const FRAMES_SHOWN: usize = 4;
const NOTES_SHOWN: usize = 6;
const GROUPS_SHOWN: usize = 14;
const LINE_CHARS_MAX: usize = 160;

pub fn run(args: &BundleArgs) -> anyhow::Result<ExitCode> {
    let contents = agent::forensics::bundle::read(&args.file)
        .with_context(|| format!("could not read the bundle {}", args.file.display()))?;
    if let Some(name) = &args.show {
        let Some(entry) = contents.entries.iter().find(|entry| &entry.name == name) else {
            let names: Vec<&str> = contents.entries.iter().map(|entry| entry.name.as_str()).collect();
            bail!("{} has no entry {name}; it has: {}", args.file.display(), names.join(", "));
        };
        print!("{}", printable(&entry.text));
        return Ok(ExitCode::SUCCESS);
    }
    match args.output {
        Output::Json => println!("{}", as_json(&contents)),
        Output::Text => print!("{}", screen(&contents)),
    }
    Ok(ExitCode::SUCCESS)
}

/// For programs: the index, the verdict, the last steps, and the names and lengths of the entries.
fn as_json(contents: &BundleContents) -> Value {
    let entries: Vec<Value> =
        contents.entries.iter().map(|entry| json!({ "name": entry.name, "bytes": entry.text.len() })).collect();
    let steps = parsed(contents, "steps.json");
    let steps = in_order(&steps);
    let last = &steps[steps.len().saturating_sub(STEPS_SHOWN)..];
    json!({ "manifest": contents.manifest, "verdict": parsed(contents, "verdict.json"), "last_steps": last, "entries": entries })
}

/// For people.
fn screen(contents: &BundleContents) -> String {
    let manifest = &contents.manifest;
    let mut out = String::new();
    let verdict = parsed(contents, "verdict.json");
    line(&mut out, "episode", &format!("{} (agent {})", manifest.episode, manifest.agent_version));
    line(&mut out, "class", &format!("{}, fingerprint {}", manifest.class, manifest.fingerprint));
    line(&mut out, "image", if manifest.image.is_empty() { "not known" } else { &manifest.image });
    reasons(&mut out, &verdict);
    times(&mut out, &verdict["episode"]);
    part(&mut out, "stands", &manifest.top_frames, FRAMES_SHOWN);
    steps(&mut out, &parsed(contents, "steps.json"));
    line(&mut out, "took", &pieces(manifest));
    part(&mut out, "note", &manifest.notes, NOTES_SHOWN);
    entries(&mut out, contents);
    out.push_str("(--show NAME prints an entry, --output json is for programs)\n");
    out
}

/// `what` and a value, on one printable line.
fn line(out: &mut String, what: &str, value: &str) {
    let value: String = on_one_line(value).take(LINE_CHARS_MAX).collect();
    let _ = writeln!(out, "{what:<9} {value}");
}

/// What a program elsewhere said, without anything that could move a cursor.
pub fn on_one_line(text: &str) -> impl Iterator<Item = char> {
    text.chars().map(|c| if c.is_control() { ' ' } else { c })
}

fn part(out: &mut String, what: &str, values: &[String], max: usize) {
    values.iter().take(max).for_each(|value| line(out, what, value));
    if values.len() > max {
        line(out, "", &format!("… and {} more", values.len() - max));
    }
}

fn reasons(out: &mut String, verdict: &Value) {
    let list = verdict["outcome"]["reasons"].as_array().cloned().unwrap_or_default();
    let text = |reason: &Value| {
        format!("{}: {}", reason["source"].as_str().unwrap_or("?"), reason["text"].as_str().unwrap_or("?"))
    };
    part(out, "why", &list.iter().map(text).collect::<Vec<_>>(), REASONS_SHOWN);
}

fn times(out: &mut String, episode: &Value) {
    let names = ["suspectAt", "fencedAt", "confirmedAt", "evidenceAt", "grantedAt", "killedAt"];
    let known: Vec<String> = names
        .iter()
        .filter_map(|name| Some(format!("{} {}", name.trim_end_matches("At"), episode[*name].as_str()?)))
        .collect();
    part(out, "when", &known, names.len());
}

/// The steps of all ranks, the last ones last; the file has each rank's together.
fn in_order(steps: &Value) -> Vec<&Value> {
    let mut all: Vec<&Value> = steps.as_array().into_iter().flatten().collect();
    all.sort_by_key(|step| step["started_ns"].as_u64());
    all
}

/// The last steps of the flight recorder, whichever rank began them; the oldest of them first.
fn steps(out: &mut String, all: &Value) {
    let all = in_order(all);
    if all.is_empty() {
        return line(out, "steps", "none: the engine publishes no page, or did not get to one");
    }
    let head = ["step", "took us", "requests", "prefill", "decode"];
    let head =
        format!("{:>4} {:>10} {:>10} {:>8} {:>8} {:>7}  outcome", "rank", head[0], head[1], head[2], head[3], head[4]);
    line(out, &format!("steps {}", all.len()), &head);
    for step in &all[all.len().saturating_sub(STEPS_SHOWN)..] {
        let number = |name: &str| step[name].as_u64().unwrap_or(0);
        let took_us = number("ended_ns").saturating_sub(number("started_ns")) / 1_000;
        let row = format!(
            "{:>4} {:>10} {took_us:>10} {:>8} {:>8} {:>7}  {}",
            step["rank"].as_u64().map_or_else(|| "?".to_owned(), |rank| rank.to_string()),
            number("step"),
            number("requests"),
            number("prefill_tokens"),
            number("decode_tokens"),
            step["outcome"].as_str().unwrap_or("?")
        );
        line(out, "", &row);
    }
}

fn pieces(manifest: &Manifest) -> String {
    let pieces = manifest.pieces.iter();
    pieces.map(|piece| format!("{} {} ms", piece.name, piece.took_ms)).collect::<Vec<_>>().join(", ")
}

/// The entries, those of one folder in one line.
fn entries(out: &mut String, contents: &BundleContents) {
    let mut groups: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for entry in &contents.entries {
        let name = match entry.name.rsplit_once('/') {
            Some((folder, _)) => format!("{folder}/…"),
            None => entry.name.clone(),
        };
        let group = groups.entry(name).or_default();
        *group = (group.0 + 1, group.1 + entry.text.len());
    }
    let total: usize = contents.entries.iter().map(|entry| entry.text.len()).sum();
    line(out, "entries", &format!("{} of {total} bytes", contents.entries.len()));
    for (name, (count, bytes)) in groups.iter().take(GROUPS_SHOWN) {
        let many = if *count > 1 { format!(" ({count})") } else { String::new() };
        line(out, "", &format!("{bytes:>9} bytes  {name}{many}"));
    }
    if groups.len() > GROUPS_SHOWN {
        line(out, "", &format!("… and {} more", groups.len() - GROUPS_SHOWN));
    }
}

fn parsed(contents: &BundleContents, name: &str) -> Value {
    let entry = contents.entries.iter().find(|entry| entry.name == name);
    entry.and_then(|entry| serde_json::from_str(&entry.text).ok()).unwrap_or(Value::Null)
}

/// What is shown may come from anywhere: lines and tabs stay, codes that command a terminal do not.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && !matches!(c, '\n' | '\t') { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use agent::forensics::bundle::{BundleEntry, Piece, manifest};

    fn contents() -> BundleContents {
        let mut manifest = manifest("host-7-42.1", "StepStalled", "0123456789abcdef");
        manifest.image = "truebeat, 9 bytes".to_owned();
        manifest.top_frames = vec!["sleep_for_ever (fault.rs) < at (fault.rs)".to_owned()];
        manifest.pieces = vec![Piece { name: "fast part".to_owned(), took_ms: 412, note: None }];
        manifest.notes = vec!["python stacks: \u{1b}[2Jnone".to_owned()];
        let verdict = json!({
            "episode": { "suspectAt": "2026-11-21T06:00:00.000Z" },
            "outcome": { "reasons": [{ "source": "gate", "text": "5 requests owed" }] },
        });
        let steps: Vec<Value> = (0..20)
            .map(|n| {
                json!({ "rank": n % 2, "pid": 7, "step": n, "started_ns": n * 1_000_000, "ended_ns": n * 1_000_000 + 7_000, "requests": 2,
                    "prefill_tokens": 0, "decode_tokens": 2, "outcome": "Ok" })
            })
            .collect();
        let entry = |name: &str, text: String| BundleEntry { name: name.to_owned(), text };
        let mut entries =
            vec![entry("verdict.json", verdict.to_string()), entry("steps.json", json!(steps).to_string())];
        entries.extend((0..40).map(|n| entry(&format!("proc/7/file{n}"), "x".repeat(10))));
        BundleContents { manifest, entries }
    }

    #[test]
    fn a_bundle_is_one_screen_with_verdict_place_and_last_steps() {
        let text = screen(&contents());
        for wanted in [
            "host-7-42.1",
            "StepStalled, fingerprint 0123456789abcdef",
            "gate: 5 requests owed",
            "suspect 2026-11-21T06:00:00.000Z",
            "sleep_for_ever (fault.rs)",
            "steps 20",
            "fast part 412 ms",
            "400 bytes  proc/7/… (40)",
            "   1         19          7",
        ] {
            assert!(text.contains(wanted), "{wanted} is not in\n{text}");
        }
        assert!(text.lines().count() <= 40, "{text}");
        assert!(!text.contains('\u{1b}'), "no code reaches the terminal");
        assert_eq!(printable("a\u{1b}[2J\tb\n"), "a\u{fffd}[2J\tb\n");
    }

    #[test]
    fn programs_get_index_verdict_and_steps() {
        let value = as_json(&contents());
        assert_eq!(value["manifest"]["fingerprint"], "0123456789abcdef");
        assert_eq!(value["verdict"]["outcome"]["reasons"][0]["source"], "gate");
        assert_eq!(value["last_steps"].as_array().unwrap().len(), STEPS_SHOWN);
        assert_eq!(value["entries"][0]["name"], "verdict.json");
    }

    #[test]
    fn a_bundle_with_nothing_in_it_is_told_too() {
        let empty = BundleContents { manifest: manifest("e", "c", "f"), entries: Vec::new() };
        let text = screen(&empty);
        assert!(text.contains("publishes no page") && text.contains("0 of 0 bytes"), "{text}");
        assert_eq!(as_json(&empty)["verdict"], Value::Null);
    }
}
