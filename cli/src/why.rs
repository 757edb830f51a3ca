//! `truebeat why`: what the agent thinks of its engine, and the last incidents, in one screen.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use crds::episode::Episode;
use crds::poison::Refused;
use crds::xid::bounded;
use serde_json::Value;

use crate::args::{Output, WhyArgs};
use crate::bundle::printable;
use crate::http;

const DEADLINE: Duration = Duration::from_secs(3);
/// Incidents that fit on one screen beside the verdict.
const INCIDENTS_SHOWN: usize = 3;
/// Places of one incident.
const PLACES_SHOWN: usize = 3;

pub async fn run(args: WhyArgs) -> anyhow::Result<ExitCode> {
    let client = http::client();
    let base = http::base_of(&args.agent);
    let verdict = http::of_agent(&client, &base, "verdict", DEADLINE).await?;
    let incidents = http::of_agent(&client, &base, "incidents", DEADLINE).await?;
    match args.output {
        Output::Json => println!("{}", serde_json::json!({ "verdict": verdict, "incidents": incidents })),
        Output::Text => print!("{}", printable(&(verdict_in_words(&verdict) + &incidents_in_words(&incidents)))),
    }
    Ok(ExitCode::SUCCESS)
}

fn verdict_in_words(verdict: &Value) -> String {
    let name = verdict["verdict"].as_str().unwrap_or("Unknown");
    let class = verdict["class"].as_str().map(|class| format!(" ({class})")).unwrap_or_default();
    let since_s = verdict["since_ms"].as_f64().unwrap_or(0.0) / 1000.0;
    let fenced = if verdict["fenced"].as_bool() == Some(true) { ", fenced: new requests get 503" } else { "" };
    let mut text = format!("{name}{class} for {since_s:.1} s{fenced}\n");
    for reason in verdict["reasons"].as_array().into_iter().flatten() {
        _ = writeln!(text, "  - {}", reason_text(reason));
    }
    let poison: Vec<Refused> = serde_json::from_value(verdict["poison"].clone()).unwrap_or_default();
    poison.iter().for_each(|one| _ = writeln!(text, "  - {} [gate]", one.words()));
    text
}

/// A reason is `{source, text}`; a plain string is taken as it is.
fn reason_text(reason: &Value) -> String {
    match (reason["source"].as_str(), reason["text"].as_str()) {
        (Some(source), Some(text)) => format!("{text} [{source}]"),
        _ => reason.as_str().unwrap_or_default().to_owned(),
    }
}

fn incidents_in_words(incidents: &Value) -> String {
    let mut text = String::new();
    let list = incidents.as_array().map(Vec::as_slice).unwrap_or_default();
    if list.is_empty() {
        _ = writeln!(text, "no incidents");
    }
    for incident in list.iter().take(INCIDENTS_SHOWN) {
        match serde_json::from_value::<Episode>(incident.clone()) {
            Ok(episode) => text += &episode_in_words(&episode),
            Err(error) => _ = writeln!(text, "an incident that this program cannot read: {error}"),
        }
    }
    if list.len() > INCIDENTS_SHOWN {
        _ = writeln!(text, "… and {} older (--output json prints them all)", list.len() - INCIDENTS_SHOWN);
    }
    text
}

fn episode_in_words(episode: &Episode) -> String {
    let mut text = format!("incident {}: {} → {}\n", episode.id, episode.class, episode.stage);
    let times = [
        ("suspect", &episode.suspect_at),
        ("fenced", &episode.fenced_at),
        ("confirmed", &episode.confirmed_at),
        ("evidence", &episode.evidence_at),
        ("granted", &episode.granted_at),
        ("killed", &episode.killed_at),
        ("serving", &episode.serving_at),
    ];
    for (what, at) in times {
        if let Some(at) = at {
            _ = writeln!(text, "  {what:<10}{at}");
        }
    }
    for reason in &episode.reasons {
        _ = writeln!(text, "  - {reason}");
    }
    for xid in bounded(episode.xids.clone()) {
        _ = writeln!(text, "  the driver reports {}", xid.words());
    }
    _ = writeln!(text, "  requests lost {}, refused {}", episode.requests_lost, episode.requests_refused);
    if !episode.in_flight.is_empty() {
        let strangers = episode.in_flight.iter().filter(|one| one.completed_at.is_none()).count();
        _ = writeln!(
            text,
            "  different requests in flight {}, of them never answered before {strangers}",
            episode.in_flight.len()
        );
    }
    if let Some(fingerprint) = &episode.fingerprint {
        _ = writeln!(text, "  fingerprint {fingerprint} (the same for the same disease)");
    }
    if let Some(bundle) = &episode.bundle {
        stands(bundle).iter().for_each(|place| _ = writeln!(text, "  stood in {place}"));
        _ = writeln!(text, "  evidence: truebeat bundle {bundle}");
    }
    text
}

/// Where the engine's processes stood, if the bundle lies on this machine. It is on screen, so it is printable.
fn stands(bundle: &str) -> Vec<String> {
    let Ok(contents) = agent::forensics::bundle::read(std::path::Path::new(bundle)) else { return Vec::new() };
    let places = contents.manifest.top_frames.into_iter().take(PLACES_SHOWN);
    places.map(|place| place.chars().filter(|c| !c.is_control()).take(160).collect()).collect()
}
