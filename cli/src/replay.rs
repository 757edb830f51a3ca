//! `truebeat replay`: reads traces, runs the detector over them in virtual time, prints each change of verdict.
//! The replay itself is `vitals::replay`, which is pure; this file only opens files.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;

use crate::args::{Output, ReplayArgs};

/// A trace that unpacks to more than this is refused (a compressed file can lie about its size).
const TRACE_BYTES_MAX: u64 = 1 << 30;

pub fn run(args: &ReplayArgs) -> anyhow::Result<ExitCode> {
    for path in &args.traces {
        let name = trace_name(path);
        let text = read_trace(path)?;
        let timeline = vitals::replay::replay(&name, text.lines(), &vitals::detector::Policy::default())
            .with_context(|| format!("could not replay {}", path.display()))?;
        match args.output {
            Output::Json => println!("{}", serde_json::to_string(&timeline)?),
            Output::Text => print_timeline(&timeline),
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// File name without `.jsonl` and `.gz`.
fn trace_name(path: &Path) -> String {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    name.strip_suffix(".jsonl").unwrap_or(name).to_owned()
}

fn read_trace(path: &Path) -> anyhow::Result<String> {
    let file = File::open(path).with_context(|| format!("could not open the trace {}", path.display()))?;
    let zipped = path.extension().is_some_and(|extension| extension == "gz");
    let reader: Box<dyn Read> = if zipped { Box::new(flate2::read::MultiGzDecoder::new(file)) } else { Box::new(file) };
    let mut text = String::new();
    let bytes = reader.take(TRACE_BYTES_MAX + 1).read_to_string(&mut text).with_context(|| {
        format!("could not read the trace {} (is it JSON lines, gzipped if it ends in .gz?)", path.display())
    })?;
    anyhow::ensure!(bytes as u64 <= TRACE_BYTES_MAX, "{} unpacks to more than {TRACE_BYTES_MAX} bytes", path.display());
    Ok(text)
}

fn print_timeline(timeline: &vitals::replay::Timeline) {
    println!("{} (rule {})", timeline.trace, timeline.rule);
    for change in &timeline.timeline {
        let class = change.class.as_deref().map(|class| format!(" {class}")).unwrap_or_default();
        println!("  {:>9.1} s  {}{class}", change.t, change.verdict);
        for reason in &change.reasons {
            println!("               {reason}");
        }
    }
}
