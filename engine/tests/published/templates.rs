//! Published chat templates, rendered here and by jinja2 as `transformers` sets it up: the same bytes, or refused with the same words.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

use engine::chat_template::{ChatInput, ChatTemplate, ChatTemplateError};
use jiff::civil::DateTime;
use serde_json::{Map, Value, json};

use crate::{files, folder, here};

const NOW: DateTime = DateTime::constant(2026, 3, 9, 8, 5, 0, 0);

/// Where this engine prints something else, and means to: there, jinja2 makes HTML of whatever is added to a text that is marked as safe.
const OTHERWISE: [(&str, &str); 2] =
    [("meetkai-functionary-medium-v3.1", "offered"), ("meetkai-functionary-medium-v3.1", "called")];

/// Those of the folder, and what they ask of the language beyond what happens in them, one thing a template.
fn sources() -> Map<String, Value> {
    let mut sources = json_file("small.json");
    for path in files(&folder().join("templates"), ".jinja") {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        sources.insert(name, std::fs::read_to_string(&path).unwrap().into());
    }
    sources
}

#[test]
fn published_templates_print_what_they_print_in_transformers() {
    let (chats, sources) = (json_file("chats.json"), sources());
    let told = reference(&json!({"templates": sources, "chats": chats, "now": NOW.to_string()}));
    let (mut otherwise, mut wrong, mut printed) = (Vec::new(), Vec::new(), 0);
    for (name, source) in &sources {
        let template = template(source.as_str().unwrap());
        for (chat, words) in &chats {
            let (got, want) = (render(&template, words), &told[name][chat]);
            match (&got, want["text"].as_str(), want["refused"].as_str()) {
                (Ok(text), Some(want), _) if text == want => printed += 1,
                (Err(ChatTemplateError::Refused(text)), _, Some(want)) if text == want => (),
                // what ends in an error of Python's has no right answer
                (Ok(_) | Err(ChatTemplateError::Render(_)), None, None) => (),
                (Ok(_), Some(_), _) if OTHERWISE.contains(&(name, chat)) => {
                    otherwise.push((name.as_str(), chat.as_str()))
                }
                _ => wrong.push(format!("{name}, {chat}:\n{}", apart(&got, want))),
            }
        }
    }
    println!("{printed} prompts the same");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(otherwise, OTHERWISE);
    // a chat that nearly no template can print would compare nothing
    assert!(2 * printed > sources.len() * chats.len(), "only {printed} prompts were compared");
}

fn json_file(name: &str) -> Map<String, Value> {
    serde_json::from_slice(&std::fs::read(here().join(name)).unwrap()).unwrap()
}

fn template(source: &str) -> ChatTemplate {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
    let config = json!({"bos_token": "<s>", "eos_token": "</s>"});
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    ChatTemplate::from_dir(dir.path()).unwrap().unwrap()
}

fn render(template: &ChatTemplate, words: &Value) -> Result<String, ChatTemplateError> {
    let mut extra = words.as_object().unwrap().clone();
    let messages = extra.shift_remove("messages").unwrap();
    let tools = extra.shift_remove("tools").filter(|tools| !tools.is_null());
    let add_generation_prompt = extra.shift_remove("add_generation_prompt").unwrap().as_bool().unwrap();
    for name in ["bos_token", "eos_token"] {
        extra.shift_remove(name);
    }
    template.render(ChatInput {
        messages: &messages,
        tools: tools.as_ref(),
        add_generation_prompt,
        extra: Some(&extra),
        now: NOW,
    })
}

/// Where two answers begin to differ.
fn apart(got: &Result<String, ChatTemplateError>, want: &Value) -> String {
    let (Ok(got), Some(want)) = (got, want["text"].as_str()) else { return format!("  {got:?}\n  {want}") };
    let same = got.chars().zip(want.chars()).take_while(|(a, b)| a == b).count();
    let part = |text: &str| text.chars().skip(same.saturating_sub(40)).take(120).collect::<String>();
    format!("  {:?}\n  {:?}", part(got), part(want))
}

/// What jinja2 makes of all templates and chats.
fn reference(asked: &Value) -> BTreeMap<String, Value> {
    let mut command = Command::new(folder().join("venv/bin/python"));
    let python = command.arg("-B").arg(here().join("render.py")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut python = python.spawn().unwrap();
    python.stdin.take().unwrap().write_all(asked.to_string().as_bytes()).unwrap();
    let told = python.wait_with_output().unwrap();
    assert!(told.status.success());
    serde_json::from_slice(&told.stdout).unwrap()
}
