//! The document and the export name the same series.

use std::collections::BTreeSet;

use super::*;
use crate::beat::BeatBoard;

fn limits() -> Limits {
    Limits { num_blocks: 8, ..Limits::default() }
}

#[test]
fn the_document_lists_every_series_with_its_type_and_no_other() {
    let metrics = Metrics::new("m").unwrap();
    metrics.cache_config(&limits());
    metrics.speculation(&SpeculationCounts { accepted_at: vec![1], ..Default::default() }, true);
    let text = metrics.text(&BeatBoard::default(), 3).unwrap();
    let exported: BTreeSet<String> =
        text.lines().filter_map(|l| l.strip_prefix("# TYPE ")).map(str::to_owned).collect();
    let doc = include_str!("../../docs/engine-metrics.md");
    let listed: BTreeSet<String> = doc
        .lines()
        .filter_map(|l| {
            let mut cells = l.strip_prefix("| `")?.splitn(3, " | ");
            Some(format!("{} {}", cells.next()?.trim_end_matches('`'), cells.next()?))
        })
        .collect();
    assert_eq!(exported, listed);
}

#[test]
fn series_carry_the_models_name_and_are_there_before_their_first_event() {
    let text = Metrics::new("a \"model\"").unwrap().text(&BeatBoard::default(), 0).unwrap();
    assert!(text.contains(r#"vllm:num_requests_running{engine="0",model_name="a \"model\""} 0"#), "{text}");
    assert!(text.contains(r#"finished_reason="length""#), "{text}");
    let of_prompts = |line: &&str| line.starts_with("vllm:request_prompt_tokens_bucket{");
    assert!(text.lines().filter(of_prompts).any(|line| line.contains(r#"le="1048576""#)), "{text}");
}
