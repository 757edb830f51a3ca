//! Whom a tick is about: the engine that is followed, and of one that has ended whatever is left, before anybody else (P16).

use vitals::recovery::Mode;
use vitals::verdict::{Outcome, Reason, Verdict};

use super::follow::{Follow, started_ms};
use super::killed::Killed;
use super::memory::Memory;
use super::{DISK_WAIT_MAX, Watch, WatchConfig};
use crate::sources::EngineProcess;

/// Whom a detector that begins is about, and what is left of whom its forerunner followed.
pub async fn first(config: &WatchConfig, memory: &Memory, now_ms: u64) -> (Follow, Option<EngineProcess>, Killed) {
    let known = memory.engine.map(|(pid, start_ticks)| EngineProcess { pid, start_ticks });
    let agent_dir = config.standalone.then(|| config.agent_dir.clone());
    let mut follow = Follow::new(agent_dir, &config.sources.page_dir, known.clone(), memory.container.clone());
    if config.standalone {
        let engine = follow.look_first(now_ms, DISK_WAIT_MAX).await;
        return (follow, engine, Killed::default());
    }
    let container = memory.container.as_deref();
    let mut killed = Killed::recalled(memory.left.clone(), known.as_ref(), container, now_ms);
    let engine = match known.filter(|known| killed.look(now_ms, Some(known))) {
        Some(left) => follow.stay_with(now_ms, left),
        None => follow.look_first(now_ms, DISK_WAIT_MAX).await,
    };
    (follow, engine, killed)
}

impl Watch {
    pub(super) fn follow_engine(&mut self, now_ms: u64) {
        if !self.config.standalone {
            self.look_for_remains(now_ms);
        }
        let stays = self.acts.killed.look(now_ms, self.engine.as_ref()) && !self.config.standalone;
        let engine = if stays { self.follow.stay(now_ms) } else { self.follow.look(now_ms) };
        if engine.is_none() {
            // Its container waits, or its image is on the way: a start-up that has not begun is not late (V3).
            self.detector.engine_restarted(now_ms);
        }
        if engine == self.engine {
            return;
        }
        let first = self.engine.is_none();
        self.sources.set_nonce(self.follow.nonce());
        tracing::info!(?engine, "the engine is another process");
        self.sources.set_engine(engine.clone());
        self.detector.engine_restarted(started_ms(engine.as_ref(), now_ms));
        self.engine = engine;
        self.hold = None;
        self.proof.engine_changed();
        if !first && !self.drain.borrow().ends {
            // A drain was meant for the process that has gone.
            self.drain_ended = self.drain.borrow().id;
        }
    }

    /// An engine that has died by itself may leave workers that hold its GPU. (`truebeat run` ends what an engine left before it starts the
    /// next, as it does after a kill.)
    fn look_for_remains(&mut self, now_ms: u64) {
        let Some(engine) = self.engine.as_ref().filter(|_| !self.follow.lives_now()) else { return };
        // what was but a guess and never served may be a sidecar, and nobody waits for what one of those has left
        let was_engine = !self.follow.is_guess() || self.fit;
        if was_engine && !self.acts.killed.knows(engine) && engine.is_gone() {
            self.acts.killed.ended(engine, now_ms, self.sources.left(), !self.follow.is_guess());
        }
        if self.recovery.mode() == Mode::Recover && !self.seen.maintenance {
            self.acts.end_remains(now_ms);
        }
    }

    /// What an engine left and nobody here ends is told of as long as it is there: replaced, the pod is rid of it, and nothing else helps.
    pub(super) fn tell_of_remains(&mut self, now_ms: u64, outcome: &mut Outcome) {
        let killed = &mut self.acts.killed;
        self.metrics.processes_left.set(i64::try_from(killed.count_left()).unwrap_or(i64::MAX));
        let Some(text) = killed.plea(now_ms).filter(|_| outcome.verdict == Verdict::Dead) else { return };
        if killed.is_to_be_told() {
            tracing::error!(text, "the engine has ended and left processes behind, which nobody here ends");
        }
        outcome.reasons.push(Reason { source: "proc".to_owned(), text });
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    use clap::Parser;
    use tokio::sync::watch as channel;

    use super::*;
    use crate::options::WatchArgs;
    use crate::sources::clock::monotonic_ms;
    use crate::sources::procs::ProcRoot;

    #[derive(Parser)]
    struct Words {
        #[command(flatten)]
        watch: WatchArgs,
    }

    fn config(dir: &Path) -> WatchConfig {
        let words = ["detect", "--no-nvml", "--engine-url=http://127.0.0.1:1"].map(Into::into).into_iter();
        let words = words.chain(["--page-dir".into(), dir.join("pages").into_os_string()]);
        Words::try_parse_from(words).unwrap().watch.into_config(dir.join("agent")).unwrap()
    }

    /// Turns until `done`, for a minute at most.
    async fn until(what: &str, mut done: impl AsyncFnMut() -> bool) {
        let begun = Instant::now();
        while !done().await {
            assert!(begun.elapsed() < Duration::from_secs(60), "never: {what}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// A worker in a session of its own, which a crash of the first process leaves behind, and in its middle another detector.
    #[tokio::test]
    async fn nobody_else_is_followed_while_a_worker_of_an_engine_that_died_lives() {
        let dir = tempfile::tempdir().unwrap();
        let mut root = tokio::process::Command::new("setsid");
        // the worker ends with what it reads, which ends with this test, whatever comes of it
        root.args(["sh", "-c", "exec 3<&0; setsid cat <&3 & wait"]).stdin(Stdio::piped()).kill_on_drop(true);
        let mut root = root.spawn().unwrap();
        let _ends_with_this = root.stdin.take();
        let engine = EngineProcess::of(root.id().unwrap().cast_signed()).unwrap();
        let memory = Memory {
            engine: Some((engine.pid, engine.start_ticks)),
            boot_id: crate::files::boot_id(),
            ..Memory::default()
        };
        let written = Memory { fit: true, ..memory.clone() };
        std::fs::create_dir(dir.path().join("agent")).unwrap();
        crate::files::write_json(&dir.path().join("agent/detector.json"), &written).unwrap();
        let (_orders, drain) = channel::channel(super::super::Drain::default());
        let mut watch = Watch::new(config(dir.path()), drain).await.unwrap();
        let mut worker = None;
        until("its worker is seen", async || {
            watch.follow_engine(monotonic_ms());
            watch.seen = watch.observe(monotonic_ms(), 0).await;
            let reads = |one: &EngineProcess| ProcRoot::live().stat(one.pid).is_some_and(|stat| stat.comm == "cat");
            worker = watch.sources.left().into_iter().find(reads);
            worker.is_some()
        })
        .await;
        let worker = worker.unwrap();
        assert!(!watch.acts.killed.is_left() && watch.acts.killed.kept().is_none(), "it lives");
        root.kill().await.unwrap();
        until("its end is seen", async || {
            watch.follow_engine(monotonic_ms());
            watch.acts.killed.is_left()
        })
        .await;
        assert_eq!((watch.engine.as_ref(), watch.acts.killed.others()), (Some(&engine), vec![worker.pid]));
        let told = |watch: &mut Watch, after_ms| {
            let mut outcome = Outcome { verdict: Verdict::Dead, ..Outcome::default() };
            watch.tell_of_remains(monotonic_ms() + after_ms, &mut outcome);
            outcome.reasons.pop().map(|reason| reason.text)
        };
        assert_eq!(told(&mut watch, 0), None);
        let text = told(&mut watch, 60_000).expect("nobody ends what a guess left, and nobody is told");
        assert!(text.contains(&format!("(pids {})", worker.pid)), "{text}");
        assert!(watch.metrics.text().contains("truebeat_engine_processes_left 1"), "{}", watch.metrics.text());
        let memory = Memory { left: watch.acts.killed.kept().cloned(), ..memory };
        let (_, followed, killed) = first(&watch.config, &memory, monotonic_ms()).await;
        assert_eq!((followed.as_ref(), killed.is_left()), (Some(&engine), true), "whoever comes next knows it as well");
        crate::kill::send_to(std::slice::from_ref(&worker), nix::sys::signal::Signal::SIGKILL);
        until("it has gone", async || worker.is_gone()).await;
        watch.follow_engine(monotonic_ms());
        assert!(!watch.acts.killed.is_left() && watch.acts.killed.kept().is_none());
        assert_eq!(told(&mut watch, 60_000), None);
        assert!(watch.metrics.text().contains("truebeat_engine_processes_left 0"), "{}", watch.metrics.text());
        let memory = Memory { container: Some("0::/../a".to_owned()), ..memory };
        let (follow, followed, killed) = first(&watch.config, &memory, monotonic_ms()).await;
        assert_eq!((followed, killed.is_left()), (None, false));
        assert_eq!(follow.container_of(&engine), memory.container.as_deref(), "nobody in there is the next");
    }
}
