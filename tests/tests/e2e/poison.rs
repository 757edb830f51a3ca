//! A request that is in flight when one replica stalls, and again at the next one, reaches no third; the prompt of all other clients, which was
//! there both times as well, is served as ever (I7).

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use crds::EngineIncident;
use crds::poison::{ANNOTATION_POISON, read};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::time::timeout;
use truebeat_tests::load::{post, small_window};
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;

use crate::world::{BOUND, World, answered, members, told};

/// A kubelet shows an annotation to the containers of a pod at its next look, once a minute or so.
const SHOWN: Duration = Duration::from_secs(180);
/// It is more than its client takes: it must be in flight when the engine freezes, however fast that is.
const DEADLY: &str = r#"{"model":"demo","prompt":"a deadly word","max_tokens":4000,"ignore_eos":true,"stream":true}"#;

pub async fn story(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let endpoints = world.endpoints("chat");
    let load = world.load("chat").await?;
    let pods = members(&world.pods, "chat");
    ensure!(pods.len() == 2, "{pods:?}");
    let begun = Instant::now();
    for pod in &pods {
        answered(&load).await?;
        let (status, mut answer) = ask(world.gate_of(pod)?).await?;
        ensure!(status == 200, "the first two replicas take it: {status}");
        timeout(BOUND, answer.next_line()).await??.context("the deadly request got no first line")?;
        let frozen = times.act(&format!("{pod} begins to answer a request of its own, and SIGUSR2 to its engine"));
        world.freeze(pod)?;
        times.seen("its endpoint is away", endpoints.flip(pod, false, frozen, BOUND).await?);
        let strangers = |incident: &EngineIncident| {
            let list = &incident.status.as_ref()?.in_flight;
            (!list.is_empty()).then(|| list.iter().filter(|one| one.completed_at.is_none()).count())
        };
        let (at, strangers) = world.incident("who was in flight", pod, frozen, strangers).await?;
        times.seen("the incident tells who was in flight", at);
        ensure!(strangers >= 1, "all of them had been answered before");
        world.quiet("chat").await?;
    }
    let refused: Vec<String> = until_async("the annotation of both pods", BOUND, || async {
        let texts = pods.iter().filter_map(|pod| {
            let pod = world.pod(pod).ok()?;
            pod.metadata.annotations.as_ref()?.get(ANNOTATION_POISON).cloned()
        });
        let texts: Vec<String> = texts.collect();
        Ok((texts.len() == pods.len()).then_some(texts))
    })
    .await?;
    let lists: Vec<_> = refused.iter().map(|text| read(text)).collect();
    ensure!(
        lists.iter().all(|list| list.len() == 1 && list == &lists[0]),
        "one request, the same everywhere: {lists:?}"
    );
    times.note(&lists[0][0].words());
    times.act("the same request to both, once more");
    for pod in &pods {
        until_async("the gate to refuse it", SHOWN, || async {
            let (status, _) = ask(world.gate_of(pod)?).await?;
            Ok((status == 422).then_some(()))
        })
        .await?;
        times.now(&format!("{pod} answers 422"));
    }
    answered(&load).await?;
    times.note(&told(&load.felt(begun)));
    let stalls = world.incidents_since(begun).into_iter().filter(|incident| incident.is_stall()).count();
    ensure!(stalls == 2, "{stalls} stalls");
    Ok(())
}

/// The status of the answer to the deadly request, and its further lines.
async fn ask(gate: SocketAddr) -> Result<(u16, Lines<BufReader<TcpStream>>)> {
    let mut stream = small_window(gate).await?;
    stream.write_all(post(DEADLY).as_bytes()).await?;
    let mut lines = BufReader::with_capacity(1 << 10, stream).lines();
    let line = timeout(BOUND, lines.next_line()).await??.context("no answer")?;
    let status =
        line.split(' ').nth(1).and_then(|code| code.parse().ok()).with_context(|| format!("answered {line}"))?;
    Ok((status, lines))
}
