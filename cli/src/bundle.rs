//! `truebeat bundle FILE`: what an evidence bundle holds, or one entry of it. Reading is `agent::forensics::bundle`.

use std::process::ExitCode;

use anyhow::{Context, bail};

use crate::args::{BundleArgs, Output};

pub fn run(args: &BundleArgs) -> anyhow::Result<ExitCode> {
    let contents = agent::forensics::bundle::read(&args.file)
        .with_context(|| format!("could not read the bundle {}", args.file.display()))?;
    if let Some(name) = &args.show {
        let Some(entry) = contents.entries.iter().find(|entry| &entry.name == name) else {
            let names: Vec<&str> = contents.entries.iter().map(|entry| entry.name.as_str()).collect();
            bail!("{} has no entry {name}; it has: {}", args.file.display(), names.join(", "));
        };
        print!("{}", entry.text);
        return Ok(ExitCode::SUCCESS);
    }
    match args.output {
        Output::Json => print_json(&contents),
        Output::Text => print_text(&contents),
    }
    Ok(ExitCode::SUCCESS)
}

fn print_json(contents: &agent::forensics::bundle::BundleContents) {
    let entries: Vec<_> = contents
        .entries
        .iter()
        .map(|entry| serde_json::json!({ "name": entry.name, "bytes": entry.text.len() }))
        .collect();
    println!("{}", serde_json::json!({ "manifest": contents.manifest, "entries": entries }));
}

fn print_text(contents: &agent::forensics::bundle::BundleContents) {
    if let Some(summary) = contents.entries.iter().find(|entry| entry.name == "summary.txt") {
        println!("{}\n", summary.text.trim_end());
    }
    for entry in &contents.entries {
        println!("{:>9} bytes  {}", entry.text.len(), entry.name);
    }
    println!("(--show NAME prints an entry)");
}
