//! O4: what upstream knows against engine flags is told by the API server, entry by entry as Rust tells it, and nobody is refused for it.

use anyhow::{Context, Result, ensure};
use crds::InferenceDeployment;
use crds::inference_deployment::{Engine, EngineKind};
use crds::known_bad::{self, Clue, ENTRIES, KnownBad, Version};
use kube::Resource;
use kube::api::PostParams;
use kube::client::Body;
use kube::core::Request;
use serde_json::{Value, json};
use truebeat_tests::wait::until_async;

use crate::world::{BOUND, World, infd};

const NAMESPACE: &str = "known-bad";
const POLICY: &str = "truebeat-known-bad";
/// Of a time before any entry.
const OLD: Version = [0, 1, 0, 0];

/// Each entry with an engine of a version that it is about, and of one that it is not.
pub async fn warned(world: &World<'_>) -> Result<()> {
    world.tenant(NAMESPACE)?;
    let first = ENTRIES.first().context("an entry")?;
    until_async("the policy to be heard", BOUND, || async {
        Ok((!warnings(world, &engine_of(first, first.versions.from)).await?.is_empty()).then_some(()))
    })
    .await?;
    let (mut told, mut silent) = (0, 0);
    for entry in ENTRIES {
        let versions = [entry.versions.from, entry.versions.before, None, Some(OLD)];
        for engine in versions.map(|version| engine_of(entry, version)) {
            let wanted = wanted(&engine)?;
            let heard = warnings(world, &engine).await?;
            ensure!(heard == wanted, "{}: of {engine} the API server says {heard:?}, and Rust {wanted:?}", entry.name);
            told += wanted.len();
            silent += usize::from(wanted.is_empty());
        }
    }
    ensure!(told >= ENTRIES.len() && silent > 0, "{told} warnings, {silent} engines without one");
    for odd in [json!({"image": "/:@"}), json!({"args": ["'\"\\\n\t ä 漢"], "env": [{"name": "A"}]})] {
        let engine = with(json!({"kind": "VLLM", "image": "engine:1"}), &odd);
        ensure!(warnings(world, &engine).await? == [""; 0], "{engine}");
    }
    understood(world).await?;
    println!("      {told} warnings as Rust has them, {silent} engines without one");
    world.leave(NAMESPACE).await
}

/// What Rust says of it, in the order of the table.
fn wanted(engine: &Value) -> Result<Vec<String>> {
    let engine: Engine = serde_json::from_value(engine.clone())?;
    Ok(known_bad::of(&engine).iter().map(|entry| entry.words()).collect())
}

/// What the API server says when an InferenceDeployment with this engine is applied, which it takes.
async fn warnings(world: &World<'_>, engine: &Value) -> Result<Vec<String>> {
    let object = infd(NAMESPACE, "chat", json!({"engine": engine, "replicas": 0}));
    let path = InferenceDeployment::url_path(&(), Some(NAMESPACE));
    let params = PostParams { dry_run: true, ..PostParams::default() };
    let request = Request::new(path).create(&params, object.to_string().into_bytes())?;
    let answer = world.client.send(request.map(Body::from)).await?;
    ensure!(answer.status().is_success(), "{} for {engine}", answer.status());
    let heard = answer.headers().get_all("warning").iter().map(|header| text_of(header.as_bytes()));
    Ok(heard.filter_map(|text| Some(text.split_once(&format!("binding '{POLICY}': "))?.1.to_owned())).collect())
}

/// The quoted text of a header `299 - "…"`.
fn text_of(header: &[u8]) -> String {
    let header = String::from_utf8_lossy(header);
    let quoted = header.split_once('"').map_or("", |(_, rest)| rest);
    let (mut text, mut escaped) = (String::new(), false);
    for c in quoted.chars() {
        match c {
            '\\' if !escaped => escaped = true,
            '"' if !escaped => break,
            c => {
                text.push(c);
                escaped = false;
            }
        }
    }
    text
}

/// The API server has read every expression by the schema of the kind, and found none odd.
async fn understood(world: &World<'_>) -> Result<()> {
    let policy = until_async("the policy to be read", BOUND, || async {
        let policy = world.json(&["validatingadmissionpolicy", POLICY])?;
        Ok(policy["status"]["observedGeneration"].is_number().then_some(policy))
    })
    .await?;
    let odd = &policy["status"]["typeChecking"]["expressionWarnings"];
    ensure!(odd.as_array().is_none_or(Vec::is_empty), "{odd}");
    Ok(())
}

/// An engine that says what the entry looks for, by the first clue of each group.
fn engine_of(entry: &KnownBad, version: Option<Version>) -> Value {
    let kind = if entry.engine == EngineKind::SGLang { "SGLang" } else { "VLLM" };
    let tag = version.map_or_else(|| "latest".to_owned(), |[a, b, c, d]| format!("v{a}.{b}.{c}.{d}-cu130"));
    let (mut args, mut env) = (Vec::new(), Vec::new());
    for clue in entry.when.iter().filter_map(|group| group.first()) {
        match clue {
            Clue::Flag(names, []) => args.push(names[0].to_owned()),
            Clue::Flag(names, values) => args.push(format!("{}={}", names[0], values[0])),
            Clue::Many(names) => args.extend([names[0].to_owned(), "2".to_owned()]),
            Clue::Setting(key, values) => args.extend(["--config".to_owned(), json!({*key: values[0]}).to_string()]),
            Clue::Word(words) => args.push(format!("models/{}-x", words[0].to_uppercase())),
            Clue::Env(name, values) => env.push(json!({"name": name, "value": values[0]})),
        }
    }
    with(json!({"kind": kind, "image": format!("registry:5000/engine:{tag}")}), &json!({"args": args, "env": env}))
}

fn with(mut object: Value, more: &Value) -> Value {
    for (key, value) in more.as_object().into_iter().flatten() {
        object[key] = value.clone();
    }
    object
}
