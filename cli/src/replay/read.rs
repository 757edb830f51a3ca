//! The files of a replay: traces, the labels beside them, and accounts of other histories.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use agent::record::TEXT_BYTES_MAX as TRACE_BYTES_MAX;
use anyhow::Context;
use vitals::replay::rules::History;
use vitals::rivals::judge::{Labels, Span};
use vitals::rivals::score::RuleScore;

use super::Case;

/// How the points of our curve begin that are not our rule itself.
const CURVE: &str = "truebeat@";

/// So begins what is gzipped, whatever its name.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// A trace and its labels.
///
/// # Errors
/// A file that cannot be opened or read, a line that is no sample, labels that are none.
pub fn case(path: &Path) -> anyhow::Result<Case> {
    let name = trace_name(path);
    let text = read_trace(path)?;
    let history = History::read(&name, text.lines()).with_context(|| format!("could not replay {}", path.display()))?;
    let truth = read_labels(&path.with_file_name(format!("{name}.labels.json")))?;
    Ok(Case { history, truth })
}

/// Adds the accounts of a file to those of the same rules; a rule that is not there yet comes behind. The points of our curve are
/// added to it; one that the file does not have leaves it, for it would stand for other histories than the rest.
///
/// # Errors
/// A file that cannot be read, or a line that is no account.
pub fn add_scores(path: &Path, scores: &mut Vec<RuleScore>, curve: &mut Vec<RuleScore>) -> anyhow::Result<()> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("could not read the scores {}", path.display()))?;
    let mut has = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let more: RuleScore = serde_json::from_str(line).with_context(|| {
            format!("line {} of {} is no account of a rule, as --write-scores writes them", i + 1, path.display())
        })?;
        if let Some(point) = curve.iter_mut().find(|point| point.rule == more.rule) {
            point.add(&more);
        }
        match scores.iter_mut().find(|score| score.rule == more.rule) {
            Some(score) => score.add(&more),
            None if more.rule.starts_with(CURVE) => {}
            None => scores.push(more.clone()),
        }
        has.push(more.rule);
    }
    curve.retain(|point| has.contains(&point.rule));
    Ok(())
}

/// File name without `.jsonl`, `.gz` and `.part`.
fn trace_name(path: &Path) -> String {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let name = name.strip_suffix(".part").unwrap_or(&name);
    let name = name.strip_suffix(".gz").unwrap_or(name);
    name.strip_suffix(".jsonl").unwrap_or(name).to_owned()
}

/// A trace whose recorder was killed, or met a full disk, ends in the middle (`….gz.part`): its whole lines are what was seen until then.
fn read_trace(path: &Path) -> anyhow::Result<String> {
    let unread = || format!("could not read the trace {} (is it JSON lines, or those gzipped?)", path.display());
    let mut file = File::open(path).with_context(|| format!("could not open the trace {}", path.display()))?;
    let mut begin = Vec::new();
    (&mut file).take(GZIP.len() as u64).read_to_end(&mut begin).with_context(unread)?;
    let zipped = begin == GZIP;
    let whole = begin.as_slice().chain(file);
    let reader: Box<dyn Read> =
        if zipped { Box::new(flate2::read::MultiGzDecoder::new(whole)) } else { Box::new(whole) };
    let mut bytes = Vec::new();
    let ended = match reader.take(TRACE_BYTES_MAX + 1).read_to_end(&mut bytes) {
        Ok(_) => true,
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => false,
        Err(error) => return Err(error).with_context(unread),
    };
    anyhow::ensure!(
        bytes.len() as u64 <= TRACE_BYTES_MAX,
        "{} unpacks to more than {} MiB, which no recorder writes",
        path.display(),
        TRACE_BYTES_MAX >> 20
    );
    if !ended {
        let lines = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        bytes.truncate(lines);
        let count = bytes.iter().filter(|byte| **byte == b'\n').count();
        eprintln!("truebeat: {} ends in the middle; its first {count} lines are replayed", path.display());
    }
    String::from_utf8(bytes).with_context(unread)
}

/// What really happened; `None` where there is no such file.
fn read_labels(path: &PathBuf) -> anyhow::Result<Option<Vec<Span>>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("could not read the labels {}", path.display())),
    };
    let labels: Labels = serde_json::from_str(&text).with_context(|| {
        format!(
            "{} is no labels file: it needs `truth`, a list of {{\"from\": s, \"to\": s, \"state\": \"hang\"}}",
            path.display()
        )
    })?;
    Ok(Some(labels.truth))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_loses_its_endings_only() {
        assert_eq!(trace_name(Path::new("a/b.c.jsonl.gz")), "b.c");
        assert_eq!(trace_name(Path::new("x.jsonl")), "x");
        assert_eq!(trace_name(Path::new("plain")), "plain");
    }

    #[test]
    fn a_trace_whose_recorder_was_killed_is_read_as_far_as_it_goes() {
        use std::io::Write;
        let dir = tempfile::tempdir().unwrap();
        let (whole, cut) = (dir.path().join("a.jsonl.gz"), dir.path().join("b.jsonl.gz.part"));
        let mut zipped = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        zipped.write_all(b"{\"t\":1}\n{\"t\":2}\n{\"t\"").unwrap();
        zipped.flush().unwrap();
        std::fs::write(&cut, zipped.get_ref()).unwrap();
        assert_eq!(read_trace(&cut).unwrap(), "{\"t\":1}\n{\"t\":2}\n");
        zipped.write_all(b":3}\n").unwrap();
        std::fs::write(&whole, zipped.finish().unwrap()).unwrap();
        assert_eq!(read_trace(&whole).unwrap().lines().count(), 3);
        assert_eq!(trace_name(&cut), "b");
    }

    #[test]
    fn accounts_add_up_by_rule_and_bad_lines_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("scores.jsonl");
        let mine = RuleScore { hangs: 2, ..RuleScore::new("gonka") };
        let line = |score: &RuleScore| serde_json::to_string(score).unwrap();
        std::fs::write(&path, format!("{}\n{}\n", line(&mine), line(&RuleScore::new("other")))).unwrap();
        let (mut scores, mut curve) = (vec![mine], Vec::new());
        add_scores(&path, &mut scores, &mut curve).unwrap();
        assert_eq!((scores.len(), scores[0].hangs), (2, 4));
        let point = |rule: &str| RuleScore { hangs: 1, ..RuleScore::new(rule) };
        std::fs::write(&path, line(&point("truebeat@50"))).unwrap();
        curve = vec![point("truebeat@50"), point("truebeat@800")];
        add_scores(&path, &mut scores, &mut curve).unwrap();
        assert_eq!((scores.len(), curve.len(), curve[0].hangs), (2, 1, 2), "a point without the other histories goes");
        std::fs::write(&path, "{}\n").unwrap();
        let error = format!("{:#}", add_scores(&path, &mut scores, &mut curve).unwrap_err());
        assert!(error.contains("line 1") && error.contains("--write-scores"), "{error}");
    }

    #[test]
    fn labels_are_optional_but_must_be_labels() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.labels.json");
        assert_eq!(read_labels(&path).unwrap(), None);
        std::fs::write(&path, "[]").unwrap();
        assert!(format!("{:#}", read_labels(&path).unwrap_err()).contains("truth"));
        std::fs::write(&path, r#"{"truth":[{"from":0,"to":1,"state":"idle"}],"other":1}"#).unwrap();
        assert_eq!(read_labels(&path).unwrap().unwrap().len(), 1);
    }
}
