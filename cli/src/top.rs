//! `truebeat top`: the verdicts of one or more agents, side by side and again and again. Plain text; for programs, `--output json`.

use std::fmt::Write as _;
use std::io::{ErrorKind, IsTerminal, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use futures::future::join_all;
use serde_json::{Value, json};
use vitals::exposition::{self, Exposition};

use crate::args::Output;
use crate::bundle::printable;
use crate::http::{self, HttpClient};

const DEADLINE: Duration = Duration::from_secs(2);
/// Characters of the first reason that fit into a row.
const REASON_CHARS_MAX: usize = 80;
/// Home, and clear to the end of the screen.
const CLEAR: &str = "\x1b[H\x1b[2J";

#[derive(Debug, clap::Args)]
pub struct TopArgs {
    /// The agents to ask, by their HTTP addresses; several with commas.
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',', default_value = "127.0.0.1:9400")]
    pub agent: Vec<String>,
    /// Seconds between two looks.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub every: u16,
    /// Look once and end; the exit status says whether every agent answered.
    #[arg(long)]
    pub once: bool,
    #[arg(long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

/// What one agent said, or why it did not.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    agent: String,
    said: Result<Said, String>,
}

#[derive(Debug, Clone, PartialEq)]
struct Said {
    verdict: Value,
    ready: Option<f64>,
    in_flight: Option<f64>,
    prompt_tokens_owed: Option<f64>,
    kills: Option<f64>,
}

pub async fn run(args: TopArgs) -> anyhow::Result<ExitCode> {
    let client = http::client();
    let clear = !args.once && args.output == Output::Text && std::io::stdout().is_terminal();
    loop {
        let rows = join_all(args.agent.iter().map(|agent| look(&client, agent))).await;
        let mut text = if clear { CLEAR.to_owned() } else { String::new() };
        match args.output {
            Output::Text => text += &printable(&table(&rows)),
            Output::Json => rows.iter().for_each(|row| _ = writeln!(text, "{}", object(row))),
        }
        let mut out = std::io::stdout().lock();
        if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            // whoever read has seen enough
            return if error.kind() == ErrorKind::BrokenPipe {
                Ok(ExitCode::from(role::UNREAD))
            } else {
                Err(error.into())
            };
        }
        if args.once {
            return Ok(if rows.iter().all(|row| row.said.is_ok()) { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        tokio::time::sleep(Duration::from_secs(args.every.into())).await;
    }
}

async fn look(client: &HttpClient, agent: &str) -> Row {
    let base = http::base_of(agent);
    let metrics = format!("{base}/metrics");
    let (verdict, metrics) =
        tokio::join!(http::of_agent(client, &base, "verdict", DEADLINE), http::get(client, &metrics, DEADLINE));
    let said = verdict.map_err(|error| format!("{error:#}")).map(|verdict| {
        let text = metrics.map(|(_, body)| String::from_utf8_lossy(&body).into_owned()).unwrap_or_default();
        said(verdict, &exposition::parse(&text, exposition::Limits::default()))
    });
    Row { agent: agent.to_owned(), said }
}

fn said(verdict: Value, metrics: &Exposition) -> Said {
    let value = |name: &str| metrics.named(name).next().map(|sample| sample.value);
    Said {
        verdict,
        ready: value("truebeat_ready"),
        in_flight: value("truebeat_gate_in_flight"),
        prompt_tokens_owed: value("truebeat_gate_prompt_tokens_owed"),
        kills: value("truebeat_kills_total"),
    }
}

fn object(row: &Row) -> Value {
    match &row.said {
        Ok(said) => json!({
            "agent": row.agent,
            "error": null,
            "verdict": said.verdict,
            "ready": said.ready.map(|ready| ready > 0.0),
            "in_flight": said.in_flight,
            "prompt_tokens_owed": said.prompt_tokens_owed,
            "kills": said.kills,
        }),
        Err(error) => json!({ "agent": row.agent, "error": error, "verdict": null }),
    }
}

fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<24} {:<26} {:>8} {:>6} {:>6} {:>9} {:>8} {:>6}  {}\n",
        "agent", "verdict", "for s", "ready", "fenced", "in flight", "prompt", "kills", "why"
    );
    for row in rows {
        match &row.said {
            Ok(said) => push_row(&mut text, &row.agent, said),
            Err(error) => _ = writeln!(text, "{:<24} no answer: {error}", row.agent),
        }
    }
    text
}

fn push_row(text: &mut String, agent: &str, said: &Said) {
    let verdict = &said.verdict;
    let class = verdict["class"].as_str().map(|class| format!(" {class}")).unwrap_or_default();
    let name = format!("{}{class}", verdict["verdict"].as_str().unwrap_or("Unknown"));
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.0}"));
    let yes = |value: bool| if value { "yes" } else { "no" };
    let why = verdict["reasons"].get(0).and_then(|reason| reason["text"].as_str().or(reason.as_str()));
    let _ = writeln!(
        text,
        "{agent:<24} {name:<26} {:>8.1} {:>6} {:>6} {:>9} {:>8} {:>6}  {}",
        verdict["since_ms"].as_f64().unwrap_or(0.0) / 1000.0,
        said.ready.map_or("-", |ready| yes(ready > 0.0)),
        yes(verdict["fenced"].as_bool() == Some(true)),
        number(said.in_flight),
        number(said.prompt_tokens_owed),
        number(said.kills),
        why.unwrap_or_default().chars().take(REASON_CHARS_MAX).collect::<String>(),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Row> {
        let text = "truebeat_ready 0\ntruebeat_gate_in_flight 5\ntruebeat_kills_total 2\n";
        let verdict = json!({
            "verdict": "Stalled", "class": "StepStalled", "since_ms": 1_500, "fenced": true,
            "reasons": [{"source": "gate", "text": "5 requests owed and no byte"}],
        });
        let said = said(verdict, &exposition::parse(text, exposition::Limits::default()));
        vec![
            Row { agent: "a:9400".to_owned(), said: Ok(said) },
            Row { agent: "b:9400".to_owned(), said: Err("no answer within 2s".to_owned()) },
        ]
    }

    #[test]
    fn a_row_says_what_is_wrong_and_a_silent_agent_is_a_row_as_well() {
        let text = table(&rows());
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        for word in ["a:9400", "Stalled StepStalled", "1.5", "no", "yes", "5 requests owed"] {
            assert!(lines[1].contains(word), "{word}: {}", lines[1]);
        }
        assert!(lines[2].contains("no answer within 2s"), "{}", lines[2]);
    }

    #[test]
    fn json_has_one_object_an_agent() {
        let rows = rows();
        let first = object(&rows[0]);
        assert_eq!((&first["verdict"]["class"], &first["in_flight"]), (&json!("StepStalled"), &json!(5.0)));
        assert_eq!((&first["ready"], &first["prompt_tokens_owed"]), (&json!(false), &Value::Null));
        assert!(object(&rows[1])["error"].is_string());
    }
}
