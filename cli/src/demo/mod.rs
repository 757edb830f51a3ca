//! `truebeat demo`: the main job end to end on this machine, with real parts only.
//!
//! Each scenario starts `truebeat run -- ENGINE` as a child (`stage`), streams through its gate, makes the engine hang by a signal to the
//! engine alone, and watches from outside what the agent does. Nothing here tells the agent that a fault was injected.

mod report;
mod scene;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;

use crate::args::{DemoArgs, Output};
use report::{Report, ScenarioReport};
use scene::Scene;

use crate::stage::EngineKind;

/// What is run and what must come of it.
#[derive(Debug, Clone)]
pub struct Scenario {
    pub name: &'static str,
    /// One sentence for the timeline's head.
    pub story: &'static str,
    pub engine: EngineKind,
    /// Classes that are a right answer for this hang; empty: no alarm at all is the right answer.
    pub classes: &'static [&'static str],
}

pub async fn run(args: DemoArgs) -> anyhow::Result<ExitCode> {
    let out = make_folder(&args.out)?;
    let model = out.join("model");
    let loud = args.output == Output::Text;
    let (llama, seed) = (engine::demo_model::DemoArch::Llama, 1);
    let written =
        engine::demo_model::write_demo_model(&model, llama, seed).context("could not make the demo's model")?;
    if loud {
        println!("Truebeat demo\n\n{written}\n");
    }
    let mut report = Report::default();
    for scenario in scenarios(&args, &model)? {
        let facts = Scene { args: &args, out: &out, scenario: &scenario }.play().await?;
        if loud {
            report::print(&facts);
        }
        report.scenarios.push(facts);
    }
    finish(report, &out, args.output)
}

/// The scenarios asked for, in the order in which they are told.
fn scenarios(args: &DemoArgs, model: &Path) -> anyhow::Result<Vec<Scenario>> {
    let ours = |name, fault: Option<&str>, classes, story| Scenario {
        name,
        story,
        engine: EngineKind::Truebeat { model: model.to_owned(), fault: fault.map(str::to_owned) },
        classes,
    };
    let mut all = vec![
        ours("healthy", None, &[], "the same engine without a fault: the detector must stay silent"),
        ours("step-stall", Some("step-stall"), &["StepStalled"], "a step stops in the middle, as in vllm #37729 (S0)"),
        ours(
            "device-wait",
            Some("device-wait"),
            &["DeviceWait"],
            "a device wait spins and never ends, as in vllm #42897 (S2)",
        ),
        ours(
            "livelock",
            Some("livelock"),
            &["Livelock"],
            "steps turn and turn, no token is delivered, as in mlx-lm #1493",
        ),
    ];
    if let Some(server) = &args.stranger {
        let server = server.canonicalize().with_context(|| format!("no stranger's server at {}", server.display()))?;
        all.push(Scenario {
            name: "stranger",
            story: "an engine that knows nothing of Truebeat freezes; its port, its metrics and /proc are all there is to see",
            engine: EngineKind::Stranger { server, more: Vec::new() },
            classes: &["StepStalled", "DeviceWait", "DecodeStalled", "AdmissionStalled"],
        });
    }
    for name in &args.only {
        let names: Vec<_> = all.iter().map(|scenario| scenario.name).collect();
        anyhow::ensure!(
            names.contains(&name.as_str()),
            "--only {name}: no such scenario; there are {}",
            names.join(", ")
        );
    }
    all.retain(|scenario| args.only.is_empty() || args.only.iter().any(|name| name == scenario.name));
    Ok(all)
}

fn make_folder(out: &Path) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(out).with_context(|| format!("could not make the folder {}", out.display()))?;
    out.canonicalize().with_context(|| format!("could not resolve {}", out.display()))
}

fn finish(mut report: Report, out: &Path, output: Output) -> anyhow::Result<ExitCode> {
    report.passed = report.scenarios.iter().all(|scenario| scenario.problems.is_empty());
    let path = out.join("report.json");
    let text = serde_json::to_string_pretty(&report)?;
    std::fs::write(&path, &text).with_context(|| format!("could not write {}", path.display()))?;
    match output {
        Output::Json => println!("{}", serde_json::to_string(&report)?),
        Output::Text => print_verdict(&report.scenarios, &path),
    }
    Ok(if report.passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print_verdict(scenarios: &[ScenarioReport], path: &Path) {
    println!("{}", report::TABLE_HEAD);
    for facts in scenarios {
        println!("{}", report::table_row(facts));
    }
    println!("\nThe same facts as JSON: {}", path.display());
}
