//! Worker ranks as processes: they serve what one process serves, each has its page, a rank that dies, stops or drifts ends the engine in
//! time and by name, and no rank outlives its engine (E3, S1, S3). Neither guesses nor neighbours change what ranks say (EP4).

use std::path::Path;
use std::time::{Duration, Instant};

use engine::demo_model::{DemoArch, write_demo_model};
use engine::stuck::EXIT_STUCK;
use heartbeat::Reader;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::client::{metric, open, post, whole};
use crate::guards::{GaveUp, evidence, gives_up, gives_up_when, streaming};
use crate::process::Engine;
use crate::support::{page_of, wait_until};

/// A rank that is dead or frozen ends the step with an error within a second; a loaded machine gets more.
const TOLD_MAX: Duration = Duration::from_secs(5);
/// `TRUEBEAT_RANK_FAULTS=20` engines for each fault of a rank, whose times are the figures of docs/faults.md; without it one.
const FAULTS: &str = "TRUEBEAT_RANK_FAULTS";

async fn engine(dir: &Path, more: &[&str]) -> Engine {
    let pages = dir.join("pages");
    let args = ["--page-dir", pages.to_str().unwrap(), "--nonce", "7", "--tensor-parallel", "2"];
    Engine::ready(dir, &[&args, more].concat()).await
}

fn pid_of(dir: &Path, rank: u32) -> Pid {
    let page = page_of(Reader::open(&dir.join("pages"), rank).with_nonce(7));
    assert_eq!((page.identity.rank, page.identity.world_size), (rank, 2));
    Pid::from_raw(page.identity.pid as i32)
}

/// Ended, or waiting to be reaped by whoever took it over.
fn is_gone(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.map_or(true, |stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z')))
}

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_say_what_one_says_and_end_together() {
    let dir = tempfile::tempdir().unwrap();
    let ask = json!({"prompt": "once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": true});
    let alone = Engine::ready(dir.path(), &[]).await;
    let want = post(alone.addr, "/v1/completions", &ask).await.json()["choices"][0]["text"].clone();
    drop(alone);
    let mut engine = engine(dir.path(), &[]).await;
    assert_eq!(post(engine.addr, "/v1/completions", &ask).await.json()["choices"][0]["text"], want);
    let worker = pid_of(dir.path(), 1);
    assert_eq!(pid_of(dir.path(), 0).as_raw() as u32, engine.child.id());
    let beat = |rank| page_of(Reader::open(&dir.path().join("pages"), rank)).beat;
    wait_until("the worker's page counts as the first rank's", || {
        let (first, worker) = (beat(0), beat(1));
        worker.steps_completed == first.steps_completed && worker.tokens_delivered > 0
    })
    .await;
    engine.signal(Signal::SIGTERM);
    assert_eq!(engine.ended().await.code(), Some(0));
    assert!(is_gone(worker), "no rank outlives its engine");
}

/// Prompts as text, of several lengths; the last one repeats itself.
fn prompts() -> Vec<Value> {
    let texts = ["once upon a time", "a", "the quick brown fox", "one two one two one two one two"];
    texts.map(Value::from).to_vec()
}

/// What is said to a prompt, greedily, with the logprob of each token.
async fn said(engine: &Engine, prompt: &Value, tokens: usize) -> Value {
    let ask = json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "logprobs": 1,
        "return_tokens_as_token_ids": true});
    let answer = post(engine.addr, "/v1/completions", &ask).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let choice = answer.json()["choices"][0].clone();
    assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), tokens);
    choice
}

/// Ranks of a model that guess say what they say without guesses, each request alone and all at once. Returns how many guesses were right.
async fn guesses(spec: &str, (prompts, tokens): (&[Value], usize), change: impl Fn(&Path)) -> f64 {
    let dir = tempfile::tempdir().unwrap();
    let ready = |more: &[&str]| {
        let args = [&["--tensor-parallel", "2", "--guards", "on"], more].concat();
        Engine::launched_with(dir.path(), &args, &change).until_ready()
    };
    let plain = ready(&[]).await;
    let mut want = Vec::new();
    for prompt in prompts {
        want.push(said(&plain, prompt, tokens).await);
    }
    drop(plain);
    let engine = ready(&["--speculative", spec, "--speculative-always"]).await;
    for (prompt, want) in prompts.iter().zip(&want) {
        assert_eq!(said(&engine, prompt, tokens).await, *want, "{spec}: {prompt}");
    }
    let together = futures::future::join_all(prompts.iter().map(|prompt| said(&engine, prompt, tokens))).await;
    assert_eq!(together, want, "{spec}, together");
    let drafts = metric(engine.addr, "vllm:spec_decode_num_draft_tokens_total", &[]).await;
    let accepted = metric(engine.addr, "vllm:spec_decode_num_accepted_tokens_total", &[]).await;
    println!("{spec}: {accepted} of {drafts} guesses were right");
    assert!(drafts > 0.0, "the test wants guesses");
    accepted
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_that_guess_say_what_ranks_say_that_do_not() {
    guesses("ngram", (&prompts(), 60), |_| ()).await;
    // the model itself is mostly right, another one of its kind mostly wrong
    let drafts = tempfile::tempdir().unwrap();
    for seed in [0, 1] {
        let draft = drafts.path().join(seed.to_string());
        write_demo_model(&draft, DemoArch::Qwen3, seed).unwrap();
        let right = guesses(&format!("draft={}", draft.to_str().unwrap()), (&prompts(), 40), |_| ()).await;
        assert!(seed == 1 || right > 0.0, "nobody guesses as the model itself");
    }
}

/// The golden model with an MTP head, whose tokens have the demo's names.
#[tokio::test(flavor = "multi_thread")]
async fn ranks_whose_head_guesses_say_what_ranks_say_that_do_not() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/mimo");
    let change = |model: &Path| {
        for file in ["config.json", "generation_config.json", "model.safetensors"] {
            std::fs::copy(golden.join(file), model.join(file)).unwrap();
        }
    };
    let prompts = [json!([5, 9, 2, 7, 7]), json!([80]), json!([3, 4, 3, 4, 3, 4, 3])];
    guesses("mtp", (&prompts, 60), change).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_of_requests_is_told_by_ranks_what_each_is_told_alone() {
    let dir = tempfile::tempdir().unwrap();
    // prompts are computed among the others' decodes, in pieces
    let engine = engine(dir.path(), &["--no-prefix-cache", "--max-step-tokens", "80"]).await;
    let ids = (1..=4).map(|len| json!((0..len * 23).map(|at| 100 + at * 7 % 50 + len).collect::<Vec<u32>>()));
    let prompts: Vec<Value> = prompts().into_iter().chain(ids).collect();
    assert_eq!(prompts.len(), 8);
    let mut alone = Vec::new();
    for prompt in &prompts {
        alone.push(said(&engine, prompt, 80).await);
    }
    let since = Instant::now();
    let crowded = || {
        let steps = Reader::open(&dir.path().join("pages"), 0).steps().unwrap();
        steps.iter().any(|step| step.requests >= 6 && step.decode_tokens >= 5)
    };
    while !crowded() {
        assert!(since.elapsed() < Duration::from_secs(60), "they never run together");
        let together = futures::future::join_all(prompts.iter().map(|prompt| said(&engine, prompt, 80))).await;
        assert_eq!(together, alone);
    }
}

/// From the fault to the error of the step, in as many engines as are wanted: prints `name value unit goal`.
async fn times(what: &str, strike: impl AsyncFn() -> Duration) {
    let count = std::env::var(FAULTS).ok().and_then(|count| count.parse().ok()).unwrap_or(1);
    let mut times = Vec::new();
    for _ in 0..count {
        let told = strike().await;
        assert!(told < TOLD_MAX, "{what}: {told:?}");
        times.push(told.as_millis());
    }
    times.sort_unstable();
    for (name, percent) in [("p50", 50), ("p99", 99), ("max", 100)] {
        let at = (times.len() * percent).div_ceil(100).max(1) - 1;
        println!("rank_{what}_to_error_{name} {} ms <=1000", times[at]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_dies_or_stops_ends_the_engine_by_name() {
    for (what, signal, kind) in [("killed", Signal::SIGKILL, "rank-gone"), ("stopped", Signal::SIGSTOP, "rank-silent")]
    {
        times(what, async || {
            let dir = tempfile::tempdir().unwrap();
            let mut engine = engine(dir.path(), &[]).await;
            let stream = streaming(&engine).await;
            let worker = pid_of(dir.path(), 1);
            let since = Instant::now();
            kill(worker, signal).unwrap();
            let GaveUp { doc, told } = gives_up_when(&mut engine, stream, &dir.path().join("pages"), since).await;
            assert_eq!((doc["kind"].as_str(), &doc["ranks"]), (Some(kind), &json!([1])), "{doc}");
            assert!(is_gone(worker));
            told
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_would_launch_another_step_is_an_error_that_names_both() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = engine(dir.path(), &["--fault", "plan-drift:1@sigusr2", "--guards", "on"]).await;
    let stream = streaming(&engine).await;
    engine.signal(Signal::SIGUSR2);
    let doc = gives_up(&mut engine, stream, &dir.path().join("pages"), Instant::now()).await;
    assert!(doc["text"].as_str().unwrap().contains("nothing was launched (E3)"), "{doc}");
}

/// In the midst of its part of a step: its device that never says that it is done, its thread that sleeps or wants a lock; or its whole
/// process, stopped by itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_hangs_in_its_part_ends_the_engine_by_name() {
    for fault in ["device-wait", "sleep", "lock-held", "sigstop"] {
        times(&fault.replace('-', "_"), async || {
            let dir = tempfile::tempdir().unwrap();
            let mut engine = engine(dir.path(), &["--fault", &format!("{fault}:1@sigusr2"), "--guards", "on"]).await;
            let stream = streaming(&engine).await;
            let worker = pid_of(dir.path(), 1);
            let since = Instant::now();
            engine.signal(Signal::SIGUSR2);
            let GaveUp { doc, told } = gives_up_when(&mut engine, stream, &dir.path().join("pages"), since).await;
            assert_eq!((doc["kind"].as_str(), &doc["ranks"]), (Some("rank-silent"), &json!([1])), "{fault}: {doc}");
            assert!(is_gone(worker));
            told
        })
        .await;
    }
}

/// The lease of the step under way, in the evidence's words.
fn lease_of(doc: &serde_json::Value) -> Duration {
    let beat = doc["details"]["beat"].as_str().unwrap();
    let lease = beat.split_once("lease_ms: ").unwrap().1.split(',').next().unwrap();
    Duration::from_millis(lease.parse().unwrap())
}

/// A prompt that takes seconds, as real models' do: what it may be silent for is as much again and more.
#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_is_frozen_in_a_long_step_is_not_waited_for_as_long_as_that_may_last() {
    for fault in ["sleep:1@sigusr2", "sigstop:1@sigusr2"] {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("pages");
        let args = ["--page-dir", pages.to_str().unwrap(), "--nonce", "7", "--tensor-parallel", "2"];
        let more = ["--max-step-tokens", "8192", "--fault", fault, "--guards", "on"];
        let mut engine = Engine::launched_with(dir.path(), &[&args[..], &more].concat(), |model| {
            drop(write_demo_model(model, DemoArch::Qwen3Medium, 0).unwrap());
        })
        .until_ready()
        .await;
        engine.signal(Signal::SIGUSR2);
        let log = dir.path().join("log");
        wait_until("the fault is due", || std::fs::read_to_string(&log).unwrap().contains("injected fault is due"))
            .await;
        let prompt: Vec<u32> = (0..4000).map(|at| 100 + at % 50).collect();
        let (addr, body) = (engine.addr, json!({"prompt": prompt, "max_tokens": 4, "stream": true}));
        let since = Instant::now();
        let stream = tokio::spawn(async move { whole(open(addr, "/v1/completions", &body, &[]).await).await });
        let GaveUp { doc, told } = gives_up_when(&mut engine, stream, &pages, since).await;
        assert_eq!((doc["kind"].as_str(), &doc["ranks"]), (Some("rank-silent"), &json!([1])), "{fault}: {doc}");
        // a step whose layers are told of may be silent for a quarter of its lease
        let silence = lease_of(&doc) / 4;
        assert!(told < silence / 2, "{fault}: {told:?}, of {silence:?}: {doc}");
    }
}

/// Of the processors' time, what a process used in a while.
async fn used(pid: u32, within: Duration) -> f64 {
    let ticks = || -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).unwrap().unwrap() as f64;
    let (since, before) = (Instant::now(), ticks());
    tokio::time::sleep(within).await;
    (ticks() - before) as f64 / per_second / since.elapsed().as_secs_f64()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_has_nothing_to_do_uses_next_to_nothing_of_the_processors() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(dir.path(), &[]).await;
    let ask = json!({"prompt": "once upon a time", "max_tokens": 24, "ignore_eos": true});
    assert_eq!(post(engine.addr, "/v1/completions", &ask).await.status, 200);
    // a rank looks less often after a second of rest
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let pids = [engine.child.id(), pid_of(dir.path(), 1).as_raw() as u32];
    let [first, worker] = pids.map(|pid| used(pid, Duration::from_secs(2)));
    let (first, worker) = tokio::join!(first, worker);
    // a thread that spins uses one, or half of one beside another that does
    assert!(first < 0.2 && worker < 0.2, "{first}, {worker} of a processor");
    println!("idle: {first:.3} of a processor, and {worker:.3} for a worker rank");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fault_of_a_rank_that_is_not_there_is_refused_before_anything_is_loaded() {
    for fault in ["sigstop:1@1steps", "rank-hang"] {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = Engine::launched(dir.path(), &["--fault", fault]);
        assert_eq!(engine.ended().await.code(), Some(1));
        let said = std::fs::read_to_string(dir.path().join("log")).unwrap();
        assert!(
            said.contains("--fault strikes rank 1") && said.contains("there is none after rank 0"),
            "{fault}: {said}"
        );
        assert!(!said.contains("listening"), "{fault}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_die_with_an_engine_that_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = engine(dir.path(), &[]).await;
    let worker = pid_of(dir.path(), 1);
    engine.signal(Signal::SIGKILL);
    engine.ended().await;
    wait_until("the worker is gone", || is_gone(worker)).await;
}

/// Signals rank 1 as soon as it has a page that is not `before`'s; its process.
async fn strike_while_it_loads(dir: &Path, signal: Signal, before: Option<Pid>) -> Pid {
    let mut found = None;
    wait_until("rank 1 has a page", || {
        let page = Reader::open(&dir.join("pages"), 1).with_nonce(7).read().ok();
        found = page.map(|page| Pid::from_raw(page.identity.pid as i32)).filter(|pid| Some(*pid) != before);
        found.is_some()
    })
    .await;
    kill(found.unwrap(), signal).unwrap();
    found.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_dies_or_stops_while_it_loads_ends_the_start_by_name_and_nobody_waits_for_it() {
    for (signal, kind) in [(Signal::SIGKILL, "rank-gone"), (Signal::SIGSTOP, "rank-silent")] {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("pages");
        let (fault, page_dir) = ("startup-stall:1", pages.to_str().unwrap());
        let args =
            ["--nonce", "7", "--page-dir", page_dir, "--tensor-parallel", "2", "--fault", fault, "--guards", "on"];
        let mut engine = Engine::launched(dir.path(), &args);
        let mut worker = strike_while_it_loads(dir.path(), signal, None).await;
        // one that a signal ends is started again, twice
        for _ in 0..if signal == Signal::SIGKILL { 2 } else { 0 } {
            worker = strike_while_it_loads(dir.path(), signal, Some(worker)).await;
        }
        assert_eq!(engine.ended().await.code(), Some(i32::from(EXIT_STUCK)), "{signal}");
        let doc = evidence(&pages, engine.child.id());
        assert_eq!((doc["kind"].as_str(), &doc["ranks"]), (Some(kind), &json!([1])), "{doc}");
        assert!(is_gone(worker));
    }
}
