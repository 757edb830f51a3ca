//! The same work in every version's own page gives the same figures: names that came, went and changed, several API servers, a front end
//! of another language. The pages come from `samples/metrics/make`, all of vLLM from one recorded sequence.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]

use std::fmt::Write;

use vitals::engine_metrics::{EngineKind, Meter, detect_engine, map};
use vitals::exposition::{Exposition, Limits, parse};
use vitals::observation::MetricsObs;

macro_rules! sample {
    ($name:literal) => {
        ($name, include_str!(concat!("samples/metrics/", $name, ".txt")))
    };
}

/// One engine, the first of the sequence.
const VLLM_ONE: &[(&str, &str)] = &[sample!("vllm-0.8.5"), sample!("vllm-0.8.5-v0")];
/// Two data-parallel engines.
const VLLM_TWO: &[(&str, &str)] = &[
    sample!("vllm-0.10.1-dp2"),
    sample!("vllm-0.10.1-dp2-api2"),
    sample!("vllm-0.12.0-dp2"),
    sample!("vllm-0.12.0-dp2-api2"),
    sample!("vllm-0.18.0-dp2"),
    sample!("vllm-0.18.0-dp2-api2"),
    sample!("vllm-0.32.0-dp2"),
    sample!("vllm-0.32.0-dp2-api2"),
    sample!("vllm-0.33.0-rust-dp2"),
];
const VLLM_BY_SERVER: &str = include_str!("samples/metrics/vllm-0.11.0-dp2-api2.txt");
const VLLM_LAST_OF_TWO: &str = include_str!("samples/metrics/vllm-0.8.5-dp2.txt");
const SGLANG: &str = include_str!("samples/metrics/sglang-0.5.23-tp2-dp2.txt");
const LLAMA_CPP: &[(&str, &str)] = &[sample!("llamacpp"), sample!("llamacpp-2026-10")];

/// Series that mean an arrival, progress, and nothing at all: the names that every version has.
const OWED: [&str; 2] = ["vllm:num_requests_running", "vllm:num_requests_waiting"];
const PROGRESS: [&str; 5] = [
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:iteration_tokens_total_count",
    "vllm:num_preemptions_total",
    "vllm:request_success_total{stop}",
];

fn page(text: &str) -> Exposition {
    let page = parse(text, Limits::default());
    assert_eq!(page.errors, 0, "{:?}", page.first_error);
    page
}

fn mapped(text: &str) -> MetricsObs {
    map(&page(text))
}

/// running, waiting, tokens, prompt tokens, iterations, finished, cache.
fn figures(obs: &MetricsObs) -> [Option<f64>; 7] {
    let MetricsObs {
        running, waiting, generation_tokens, prompt_tokens, iterations, requests_finished, kv_usage, ..
    } = *obs;
    [running, waiting, generation_tokens, prompt_tokens, iterations, requests_finished, kv_usage]
}

/// The page with the last sample of a name (and, in braces, of a label's value) a little larger.
fn bumped(text: &str, series: &str) -> String {
    let (name, value) = series.trim_end_matches('}').split_once('{').unwrap_or((series, ""));
    let is = |line: &str| line.split(['{', ' ']).next() == Some(name) && line.contains(value);
    let last = text.lines().enumerate().filter(|(_, line)| is(line)).last().map(|(number, _)| number);
    let mut page = String::new();
    for (number, line) in text.lines().enumerate() {
        match line.rsplit_once(' ').filter(|_| Some(number) == last) {
            Some((head, figure)) => writeln!(page, "{head} {}", figure.parse::<f64>().unwrap() + 0.125).unwrap(),
            None => writeln!(page, "{line}").unwrap(),
        }
    }
    assert!(last.is_some(), "{series} is not on the page");
    page
}

/// Pages on which something moved, first the page itself and then each of these.
fn moves(first: &str, then: &[&str]) -> Vec<u64> {
    let mut meter = Meter::default();
    let told = std::iter::once(first).chain(then.iter().copied());
    told.map(|text| meter.map(&page(text)).progress_digest).collect()
}

#[test]
fn every_version_of_vllm_tells_the_same_of_the_same_work() {
    let s = Some;
    for (name, text) in VLLM_ONE {
        let told = mapped(text);
        assert_eq!(figures(&told), [s(3.0), s(1.0), s(84.0), s(1536.0), told.iterations, s(3.0), s(0.25)], "{name}");
        assert!(
            told.iterations.is_some_and(|steps| (43.0..=44.0).contains(&steps)),
            "{name}: V0 counts the empty step"
        );
    }
    for (name, text) in VLLM_TWO {
        let told = mapped(text);
        assert_eq!(detect_engine(&page(text)), Some(EngineKind::Vllm), "{name}");
        assert_eq!(figures(&told), [s(7.0), s(3.0), s(369.0), s(3536.0), s(115.0), s(6.0), s(0.4)], "{name}");
        let ranks: Vec<_> = told.ranks.iter().map(|rank| (rank.rank, rank.running, rank.waiting)).collect();
        assert_eq!(ranks, [(0, s(3.0), s(1.0)), (1, s(4.0), s(2.0))], "{name}");
        // of several API servers no single process serves the page, and the front end in Rust tells nothing of its own
        let one_process = !name.contains("api2") && !name.contains("rust");
        assert_eq!(
            (told.process_start_seconds.is_some(), told.open_fds.is_some()),
            (one_process, one_process),
            "{name}"
        );
    }
}

#[test]
fn cache_use_that_each_api_server_tells_for_itself_is_unknown_above_one_and_moves_all_the_same() {
    let told = mapped(VLLM_BY_SERVER);
    let wanted = [Some(7.0), Some(3.0), Some(369.0), Some(3536.0), Some(115.0), Some(6.0), None];
    assert_eq!((figures(&told), told.sleeping), (wanted, None), "engine 1 has 0.9 of before and 0.4");
    let moved = VLLM_BY_SERVER.replace("} 0.4\n", "} 0.5\n");
    assert_eq!(moves(VLLM_BY_SERVER, &[&moved]), [0, 1]);
    assert_eq!(mapped(&VLLM_BY_SERVER.replace("} 0.9\n", "} 0.1\n")).kv_usage, Some(0.5), "below it nobody can tell");
}

#[test]
fn the_phase_is_told_where_the_version_tells_it() {
    let asleep = |text: &str| {
        let lines = text.lines().map(|line| match line.split_once("sleep_state=\"awake\"} 1") {
            Some((head, tail)) => format!("{head}sleep_state=\"awake\"}} 0{tail}\n"),
            None => format!("{line}\n"),
        });
        mapped(&lines.collect::<String>()).sleeping
    };
    for (name, text) in VLLM_ONE.iter().chain(VLLM_TWO) {
        let tells = !["0.8.5", "0.10.1", "rust"].iter().any(|silent| name.contains(silent));
        assert_eq!(mapped(text).sleeping, tells.then_some(false), "{name}");
        assert_eq!(asleep(text), tells.then_some(true), "{name}");
    }
    for (name, text) in VLLM_TWO {
        let one = text.lines().map(|line| match line.split_once("sleep_state=\"awake\"} 1") {
            Some((head, tail)) if head.contains("engine=\"1\"") => format!("{head}sleep_state=\"awake\"}} 0{tail}\n"),
            _ => format!("{line}\n"),
        });
        let told = mapped(&one.collect::<String>()).sleeping;
        assert!(!told.unwrap_or(false), "{name}: the other one is awake");
    }
}

#[test]
fn in_every_version_of_vllm_arrivals_move_nothing_and_work_does() {
    for (name, text) in VLLM_ONE.iter().chain(VLLM_TWO) {
        for series in OWED {
            assert_eq!(moves(text, &[&bumped(text, series)]), [0, 0], "{name}: {series}");
        }
        let aborted = bumped(text, "vllm:request_success_total{abort}");
        assert_eq!(moves(text, &[&aborted]), [0, 0], "{name}: who leaves proves nothing");
        let [old, both, v0] = ["0.8.5", "0.10.1", "v0"].map(|version| name.contains(version));
        let cache = if old || both { "vllm:gpu_cache_usage_perc" } else { "vllm:kv_cache_usage_perc" };
        let queries = if old { "vllm:gpu_prefix_cache_queries_total" } else { "vllm:prefix_cache_queries_total" };
        let of_this_version = [cache].into_iter().chain((!v0).then_some(queries));
        for series in PROGRESS.into_iter().chain(of_this_version) {
            let worked = bumped(text, series);
            assert_eq!(moves(text, &[&worked, &worked]), [0, 1, 1], "{name}: {series}");
        }
    }
}

#[test]
fn an_engine_that_stands_among_others_is_told_apart_in_every_version() {
    for (name, text) in VLLM_TWO {
        let mut meter = Meter::default();
        meter.map(&page(text));
        let moved = meter.map(&page(&bumped(text, "vllm:iteration_tokens_total_count{engine=\"1\"")));
        let ranks: Vec<_> = moved.ranks.iter().map(|rank| (rank.rank, rank.progress_digest)).collect();
        assert_eq!(ranks, [(0, 0), (1, 1)], "{name}");
    }
    let last = mapped(VLLM_LAST_OF_TWO);
    let wanted = [4.0, 2.0, 285.0, 2000.0, 72.0, 3.0, 0.4].map(Some);
    assert_eq!((figures(&last), last.ranks.len()), (wanted, 0), "0.8.5 shows the last of its engines alone");
}

#[test]
fn requests_of_a_priority_are_parts_where_no_total_stands_beside_them() {
    let told = mapped(SGLANG);
    // the gauges have a total (priority=""), of what the tokenizer counts "" are those without a priority
    assert_eq!((told.running, told.waiting, told.requests_finished), (Some(6.0), Some(3.0), Some(4.0)));
    let without = SGLANG.lines().filter(|line| !line.starts_with("sglang:realtime")).collect::<Vec<_>>().join("\n");
    assert_eq!((mapped(&without).generation_tokens, mapped(&without).prompt_tokens), (Some(169.0), Some(3600.0)));
}

#[test]
fn what_no_rank_wrote_is_no_ranks_progress() {
    let mut meter = Meter::default();
    meter.map(&page(SGLANG));
    let finished = meter.map(&page(&bumped(SGLANG, "sglang:num_requests_total")));
    let ranks: Vec<_> = finished.ranks.iter().map(|rank| (rank.rank, rank.progress_digest)).collect();
    assert_eq!((finished.progress_digest, ranks), (1, vec![(0, 0), (1, 0)]), "the tokenizer serves them all");
}

#[test]
fn names_that_sglang_gave_up_are_read_all_the_same() {
    let series = "sglang:forward_execution_seconds_total";
    assert_eq!(moves(SGLANG, &[&bumped(SGLANG, series)]), [0, 1]);
    let older = SGLANG.replace(series, "sglang:gpu_execution_seconds_total");
    assert_eq!(moves(&older, &[&bumped(&older, "sglang:gpu_execution_seconds_total")]), [0, 1]);
}

#[test]
fn llama_cpp_tells_the_same_as_before() {
    for (name, text) in LLAMA_CPP {
        let told = mapped(text);
        let wanted = [Some(2.0), Some(1.0), Some(555.0), Some(1234.0), Some(600.0), None, None];
        assert_eq!((detect_engine(&page(text)), figures(&told)), (Some(EngineKind::LlamaCpp), wanted), "{name}");
        for series in ["llamacpp:n_decode_total", "llamacpp:n_tokens_max"] {
            assert_eq!(moves(text, &[&bumped(text, series)]), [0, 1], "{name}: {series}");
        }
    }
}
