//! The acts themselves: traffic through the gate, and what the engine is asked to do meanwhile. Each ends with a request that is answered,
//! so that a run in which nothing worked proves nothing.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::json;

use super::hold;
use super::kinds::{Act, Kind};
use crate::bench::healthy::long_prompts;
use crate::clients::Clients;
use crate::http::{get, post_json};
use crate::stage::{CALL, Stage};

/// Streams run so long before anything happens: a warm engine is judged by its own rhythm.
const WARM_UP: Duration = Duration::from_secs(5);
const ACT: Duration = Duration::from_secs(8);
/// What may come after an act before the machine's load lets an answer through.
const ANSWER_MAX: Duration = Duration::from_secs(90);
/// Between two looks at a replica that is fenced.
const FENCED_LOOK: Duration = Duration::from_millis(500);
const CLIENTS: u16 = 4;
/// Tokens of a whole answer: eight seconds of the stranger's.
const WHOLE_TOKENS: u32 = 400;

/// Does what the kind says, in this round of all kinds. The stranger's server has its debugger beside it.
///
/// # Errors
/// When the act could not be done, or a healthy engine lost a request.
pub async fn perform(stage: &mut Stage, kind: &Kind, round: usize, server: &Path) -> anyhow::Result<()> {
    stage.wait_ready().await?;
    match kind.act {
        Act::Idle => tokio::time::sleep(ACT).await,
        Act::SlowStart => {}
        Act::Lumps => whole_answers(stage).await?,
        Act::LongPrompts => {
            let done = long_prompts(stage, WARM_UP + ACT).await;
            ensure!(done > 0, "not one long prompt was answered");
        }
        Act::Compile => beside_streams(stage, ask(stage, "/act?what=compile&seconds=8")).await?,
        Act::BusyFront => beside_streams(stage, ask(stage, "/act?what=front&seconds=8")).await?,
        Act::Crawl => beside_streams(stage, ask(stage, "/act?what=crawl&seconds=8")).await?,
        Act::Asleep => sleep(stage).await?,
        Act::Held => beside_streams(stage, hold::hold(stage, round, &server.with_file_name("hold.py"))).await?,
    }
    answered_at_last(stage).await.context("the request at the end")
}

/// Warm streams, then the act, and streams on until it is over.
async fn beside_streams(stage: &Stage, act: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let clients = Clients::start(&stage.gate, CLIENTS);
    tokio::time::sleep(WARM_UP).await;
    let before = clients.requests().tokens;
    act.await?;
    tokio::time::sleep(ACT).await;
    let after = clients.stop(Duration::from_secs(5)).await;
    ensure!(before > 0, "the streams got nothing before the act");
    ensure!(after.lost == 0, "{} requests of a healthy engine were lost", after.lost);
    Ok(())
}

async fn whole_answers(stage: &Stage) -> anyhow::Result<()> {
    let one = || answered(stage, WHOLE_TOKENS);
    tokio::try_join!(one(), one(), one()).map(|_| ())
}

/// Asleep, with a request that came meanwhile and is answered when it is awake.
async fn sleep(stage: &Stage) -> anyhow::Result<()> {
    let clients = Clients::start(&stage.gate, CLIENTS);
    tokio::time::sleep(WARM_UP).await;
    clients.stop(Duration::from_secs(5)).await;
    ask(stage, "/sleep").await?;
    let wake = async {
        tokio::time::sleep(ACT).await;
        ask(stage, "/wake_up").await
    };
    tokio::try_join!(answered(stage, 8), wake).map(|_| ())
}

/// Asks the engine itself, not through the gate.
async fn ask(stage: &Stage, path: &str) -> anyhow::Result<()> {
    let url = format!("{}{path}", stage.engine);
    let (status, _) = post_json(&stage.http, &url, &json!({}), ANSWER_MAX).await?;
    ensure!(status == 200, "{url} answered {status}");
    Ok(())
}

/// A fence that a crowded machine brought just before the end is told by the figures, and is undone by itself: it is waited for as long as an
/// answer is.
async fn answered_at_last(stage: &Stage) -> anyhow::Result<()> {
    let since = Instant::now();
    loop {
        let (ready, _) = get(&stage.http, &format!("{}/readyz", stage.agent), CALL).await?;
        if ready == 200 || since.elapsed() >= ANSWER_MAX {
            return answered(stage, 8).await;
        }
        tokio::time::sleep(FENCED_LOOK).await;
    }
}

/// A whole answer through the gate.
async fn answered(stage: &Stage, tokens: u32) -> anyhow::Result<()> {
    let body = json!({ "model": "demo", "prompt": "is anybody there", "max_tokens": tokens, "ignore_eos": true });
    let (status, body) = post_json(&stage.http, &format!("{}/v1/completions", stage.gate), &body, ANSWER_MAX).await?;
    ensure!(status == 200, "{status}: {}", String::from_utf8_lossy(&body));
    let (lives, _) = get(&stage.http, &format!("{}/livez", stage.agent), CALL).await?;
    ensure!(lives == 200, "the agent's /livez says {lives}");
    Ok(())
}
