//! The engine as a process of its own: what its threads look like from outside under each fault, and how it ends.

use std::{
    fs,
    net::SocketAddr,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use engine::codec::{Chat, HfCodec, TextCodec};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::client::{get, open, post, whole};
use crate::free_addresses::free_addresses;
use crate::support::wait_until;

/// A running engine; killed when the test is done with it.
pub struct Engine {
    pub child: Child,
    pub addr: SocketAddr,
}

impl Drop for Engine {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Engine {
    pub async fn ready(dir: &Path, more: &[&str]) -> Self {
        Self::launched(dir, more).until_ready().await
    }

    pub async fn until_ready(self) -> Self {
        let engine = self;
        let since = Instant::now();
        let addr = engine.addr;
        while tokio::net::TcpStream::connect(addr).await.is_err() || get(addr, "/health").await.status != 200 {
            assert!(since.elapsed() < Duration::from_secs(120), "not ready");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        engine
    }

    /// Its log is the file `log` in `dir`.
    pub fn launched(dir: &Path, more: &[&str]) -> Self {
        Self::launched_with(dir, more, |_| ())
    }

    /// As [`Self::launched`], with another chat template.
    fn launched_with_template(dir: &Path, text: &str) -> Self {
        Self::launched_with(dir, &[], |model| fs::write(model.join("chat_template.jinja"), text).unwrap())
    }

    /// As [`Self::launched`], after `change` of the model's folder.
    pub fn launched_with(dir: &Path, more: &[&str], change: impl FnOnce(&Path)) -> Self {
        Self::launched_to(fs::File::create(dir.join("log")).unwrap().into(), dir, more, change)
    }

    /// As [`Self::launched_with`], with its log there.
    pub fn launched_to(log: Stdio, dir: &Path, more: &[&str], change: impl FnOnce(&Path)) -> Self {
        let model = dir.join("tiny");
        engine::demo_model::write_demo_model(&model, engine::demo_model::DemoArch::Qwen3, 0).unwrap();
        change(&model);
        let [addr] = free_addresses();
        let mut command = Command::new(env!("CARGO_BIN_EXE_truebeat-engine"));
        command.args(["engine", "--listen", &addr.to_string(), "--model"]).arg(model).args(more);
        let child = command.env_remove("TRUEBEAT_PAGE_DIR").stderr(log).spawn().unwrap();
        Self { child, addr }
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    pub async fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        wait_until("the process ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        })
        .await;
        status.unwrap()
    }

    /// State letter of the process.
    pub fn process_state(&self) -> char {
        state_of(Path::new(&format!("/proc/{}", self.child.id())))
    }

    /// State letter of the engine thread.
    fn thread_state(&self) -> char {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let is_engine = |p: &std::path::PathBuf| fs::read_to_string(p.join("comm")).is_ok_and(|c| c.trim() == "engine");
        let task = tasks.map(|t| t.unwrap().path()).find(is_engine).expect("an engine thread");
        state_of(&task)
    }

    /// Fires the fault with a stream open, and waits until `/health` tells of it.
    pub async fn freeze(&self) {
        let body = json!({"prompt": "abc", "max_tokens": 200, "ignore_eos": true, "stream": true});
        self.signal(Signal::SIGUSR2);
        let since = Instant::now();
        while get(self.addr, "/health").await.status == 200 {
            // Each asks for a step in which the fault can fire; the client leaves at once.
            drop(
                tokio::time::timeout(Duration::from_millis(200), open(self.addr, "/v1/completions", &body, &[])).await,
            );
            assert!(since.elapsed() < Duration::from_secs(60), "healthy all the time");
        }
    }
}

fn state_of(task: &Path) -> char {
    let stat = fs::read_to_string(task.join("stat")).unwrap();
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_stall_sleeps_and_a_device_wait_spins() {
    for (fault, state) in [("step-stall@sigusr2", 'S'), ("device-wait@sigusr2", 'R')] {
        let dir = tempfile::tempdir().unwrap();
        let engine = Engine::ready(dir.path(), &["--fault", fault]).await;
        let answer = post(engine.addr, "/v1/completions", &json!({"prompt": "abc", "max_tokens": 3})).await;
        assert_eq!(answer.status, 200, "armed, not fired: {}", answer.text);
        engine.freeze().await;
        assert_eq!(engine.thread_state(), state, "{fault}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_is_an_abort() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::ready(dir.path(), &["--fault", "crash@sigusr2"]).await;
    engine.signal(Signal::SIGUSR2);
    assert_eq!(engine.ended().await.signal(), Some(Signal::SIGABRT as i32));
}

/// Its process ends right after it.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_still_waits_when_a_drain_is_over_hears_that_the_engine_has_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::ready(dir.path(), &["--drain-timeout", "1ms"]).await;
    let long = json!({"prompt": "abc", "max_tokens": 200, "n": 128, "ignore_eos": true, "stream": true});
    let running = open(engine.addr, "/v1/completions", &long, &[]).await;
    engine.signal(Signal::SIGTERM);
    let answer = whole(running).await;
    let last: serde_json::Value = serde_json::from_str(answer.events().last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "shutdown", "{}", answer.text);
    assert_eq!(engine.ended().await.code(), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_ends_a_well_engine_with_0_and_a_frozen_one_with_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    let mut well = Engine::ready(dir.path(), &[]).await;
    well.signal(Signal::SIGTERM);
    assert_eq!(well.ended().await.code(), Some(0));
    let mut frozen = Engine::ready(dir.path(), &["--fault", "step-stall@sigusr2", "--drain-timeout", "100ms"]).await;
    frozen.freeze().await;
    frozen.signal(Signal::SIGTERM);
    assert_eq!(frozen.ended().await.code(), Some(1));
}

/// By the first message: doubles a text until no memory holds it, prints a list of few elements that has 2^60 of them by its printing,
/// compares two such lists; or is a good template.
const HARM: &str = "\
{%- set ns = namespace(text='x', a=['x'], b=['x']) %}
{%- for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}
{%- if messages[0].content == 'text' %}
{%- for i in range(40) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}
{%- elif messages[0].content == 'list' %}{{ ns.a | string | length }}
{%- elif messages[0].content == 'time' %}{{ ns.a == ns.b }}
{%- elif messages[0].content == 'no' %}{{ raise_exception('not so') }}
{%- endif %}
{{- messages[0].content }} {{ 'more ' ~ more }} {{ tools | tojson }} {{ strftime_now('%Y') | length }} {{ eos_token }}";

#[tokio::test(flavor = "multi_thread")]
async fn a_harmful_chat_template_ends_its_renderer_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::launched_with_template(dir.path(), HARM).until_ready().await;
    let chat = |word: &str| json!({"messages": [{"role": "user", "content": word}], "max_tokens": 2});
    for (word, needle) in
        [("text", "gave no answer"), ("list", "gave no answer"), ("time", "gave no answer"), ("no", "not so")]
    {
        let answer = post(engine.addr, "/v1/chat/completions", &chat(word)).await;
        assert!(answer.status == 400 && answer.text.contains(needle), "{word}: {} {}", answer.status, answer.text);
        let answer = post(engine.addr, "/v1/chat/completions", &chat("é")).await;
        assert_eq!(answer.status, 200, "after {word}: {}", answer.text);
    }
    assert!(engine.child.try_wait().unwrap().is_none());
    // what a renderer makes of a chat is what this process makes of it
    let messages = [json!({"role": "user", "content": "<é>"})];
    let body = json!({"messages": messages, "chat_template_kwargs": {"more": 1.25}});
    let tokens = post(engine.addr, "/tokenize", &body).await.json()["tokens"].clone();
    let codec = HfCodec::from_dir(&dir.path().join("tiny")).unwrap();
    let (messages, extra) = (&body["messages"], body["chat_template_kwargs"].as_object());
    let prompt = codec.chat_prompt(Chat { messages, tools: None, extra, opens_answer: true }).unwrap();
    assert_eq!(prompt, "<é> more 1.25 null 4 <|end|>");
    assert_eq!(tokens, json!(codec.encode(&prompt, false).unwrap()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_template_that_harms_as_it_is_compiled_is_a_model_that_does_not_load() {
    let dir = tempfile::tempdir().unwrap();
    // constants are computed at once
    let template = format!("{{{{ {} }}}}", vec!["('x' * 99999999)"; 20].join(" ~ "));
    let mut engine = Engine::launched_with_template(dir.path(), &template);
    assert_eq!(engine.ended().await.code(), Some(1));
    let log = fs::read_to_string(dir.path().join("log")).unwrap();
    assert!(log.contains("chat_template.jinja") && log.contains("gave no answer"), "{log}");
}
