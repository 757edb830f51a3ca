//! Every engine's page through the tables; resets, ranks and nonsense. Pages are made by the engine's own definitions where their first
//! lines say so (`samples/metrics/make`), the others are written by hand from its sources. Versions of one engine: `engine_versions.rs`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]

use std::fmt::Write;

use vitals::engine_metrics::tables::{COMMON, ENGINES};
use vitals::engine_metrics::{EngineKind, Meter, detect_engine, is_known, map};
use vitals::exposition::{Limits, parse, parse_where};
use vitals::observation::MetricsObs;

const VLLM_OLD: &str = include_str!("samples/metrics/vllm-0.8.5.txt");
const VLLM_DP: &str = include_str!("samples/metrics/vllm-0.32.0-dp2.txt");
const SGLANG: &str = include_str!("samples/metrics/sglang-0.5.23-tp2-dp2.txt");
const SGLANG_OLD: &str = include_str!("samples/metrics/sglang-0.4.0.txt");
const TRTLLM: &str = include_str!("samples/metrics/trtllm.txt");
const TGI: &str = include_str!("samples/metrics/tgi.txt");
const LLAMA_CPP: &str = include_str!("samples/metrics/llamacpp.txt");
const TRUEBEAT: &str = include_str!("samples/metrics/truebeat.txt");

fn mapped(text: &str) -> MetricsObs {
    let page = parse(text, Limits::default());
    assert_eq!(page.errors, 0, "{:?}", page.first_error);
    let obs = map(&page);
    assert_eq!(obs, map(&parse_where(text, Limits::default(), is_known)), "what is left out means nothing");
    obs
}

/// running, waiting, tokens, prompt tokens, iterations, finished, cache.
fn figures(text: &str) -> [Option<f64>; 7] {
    let obs = mapped(text);
    [
        obs.running,
        obs.waiting,
        obs.generation_tokens,
        obs.prompt_tokens,
        obs.iterations,
        obs.requests_finished,
        obs.kv_usage,
    ]
}

#[test]
fn every_engine_says_what_its_series_mean() {
    let s = Some;
    assert_eq!(figures(VLLM_OLD), [s(3.0), s(1.0), s(84.0), s(1536.0), s(43.0), s(3.0), s(0.25)]);
    assert_eq!(figures(VLLM_DP), [s(7.0), s(3.0), s(369.0), s(3536.0), s(115.0), s(6.0), s(0.4)]);
    assert_eq!(figures(SGLANG), [s(6.0), s(3.0), s(369.0), s(3280.0), None, s(4.0), s(0.5)]);
    assert_eq!(figures(SGLANG_OLD), [s(4.0), s(1.0), s(169.0), s(3600.0), None, None, s(0.28)]);
    assert_eq!(figures(TRTLLM), [s(5.0), s(2.0), s(700.0), s(9000.0), None, s(31.0), s(0.42)]);
    assert_eq!(figures(TGI), [s(4.0), s(2.0), s(3300.0), None, s(935.0), s(33.0), None]);
    assert_eq!(figures(LLAMA_CPP), [s(2.0), s(1.0), s(555.0), s(1234.0), s(600.0), None, None]);
    assert_eq!(figures(TRUEBEAT), [s(2.0), s(0.0), s(64.0), None, s(80.0), s(4.0), None]);
    assert_eq!(mapped(TRUEBEAT).server_load, Some(6.0));
    let old = mapped(VLLM_OLD);
    assert!(old.open_fds.is_some_and(|fds| fds > 2.0) && old.process_start_seconds.is_some_and(|start| start > 1e9));
    assert_eq!((mapped(VLLM_OLD).sleeping, mapped(VLLM_DP).sleeping), (None, Some(false)));
    assert_eq!(figures(&TRTLLM.replace("trtllm_", "trtllm:")), figures(TRTLLM), "the prefix of older Dynamo releases");
    let by_process = TRTLLM.replace("model_name=\"m\"", "model_name=\"m\",pid=\"7\"");
    assert_eq!(figures(&by_process), figures(TRTLLM), "its own server's gauges name the process");
}

#[test]
fn every_engine_is_known_by_its_page() {
    let kinds =
        [VLLM_OLD, SGLANG, TRTLLM, TGI, LLAMA_CPP, TRUEBEAT].map(|text| detect_engine(&parse(text, Limits::default())));
    use EngineKind::{LlamaCpp, Sglang, TensorRtLlm, Tgi, Truebeat, Vllm};
    assert_eq!(kinds, [Vllm, Sglang, TensorRtLlm, Tgi, LlamaCpp, Truebeat].map(Some));
    assert_eq!(detect_engine(&parse("up 1\n", Limits::default())), None);
}

#[test]
fn arrivals_alone_move_nothing_and_every_progress_series_does() {
    for (text, arrival, work) in [
        (VLLM_OLD, "num_requests_waiting", "gpu_cache_usage_perc"),
        (VLLM_DP, "num_requests_running", "vllm:prefix_cache_queries_total"),
        (SGLANG, "num_queue_reqs", "num_used_tokens"),
        (TRTLLM, "num_requests_waiting", "kv_cache_gen_alloc_blocks_total"),
        (TGI, "tgi_batch_inference_count", "tgi_batch_forward_duration_count"),
        (TGI, "tgi_request_input_length_sum", "tgi_batch_inference_success"),
        (LLAMA_CPP, "requests_deferred", "n_decode_total"),
        (TRUEBEAT, "requests_in_flight", "steps_total"),
    ] {
        let mut meter = Meter::default();
        let mut digest = |text: &str| meter.map(&parse(text, Limits::default())).progress_digest;
        let base = digest(text);
        let arrived = bumped(text, arrival);
        assert_ne!(arrived, text, "{arrival} is in the sample");
        assert_eq!(digest(&arrived), base, "{arrival}");
        let worked = bumped(&arrived, work);
        assert_ne!(worked, arrived, "{work} is in the sample");
        assert_eq!(digest(&worked), base + 1, "{work}");
        assert_eq!(digest(&worked), base + 1, "a page that stands still is no progress");
    }
}

#[test]
fn what_was_counted_is_told_from_room_that_changed() {
    let mut meter = Meter::default();
    let mut digests = |text: &str| {
        let page = parse(text, Limits::default());
        let (obs, alone) = (meter.map(&page), map(&page).counters_digest);
        (obs.progress_digest, obs.counters_digest, alone)
    };
    let (moved, counted, alone) = digests(VLLM_OLD);
    let room = bumped(VLLM_OLD, "gpu_cache_usage_perc");
    assert_eq!(digests(&room), (moved + 1, counted, alone));
    let both = bumped(&room, "gpu_prefix_cache_queries_total");
    let (moved_then, counted_then, alone_then) = digests(&both);
    assert_eq!((moved_then, counted_then), (moved + 2, counted + 1));
    assert_ne!(alone_then, alone);
}

/// The page with the last sample of this name a little larger.
fn bumped(text: &str, name: &str) -> String {
    let is = |line: &str| !line.starts_with('#') && line.split(['{', ' ']).next().is_some_and(|n| n.ends_with(name));
    let last = text.lines().enumerate().filter(|(_, line)| is(line)).last().map(|(number, _)| number);
    let mut page = String::new();
    for (number, line) in text.lines().enumerate() {
        match line.rsplit_once(' ').filter(|_| Some(number) == last) {
            Some((head, value)) => writeln!(page, "{head} {}", value.parse::<f64>().unwrap() + 0.125).unwrap(),
            None => writeln!(page, "{line}").unwrap(),
        }
    }
    page
}

#[test]
fn a_rank_that_stands_still_among_others_that_move_is_told_apart() {
    let mut meter = Meter::default();
    let first = meter.map(&parse(VLLM_DP, Limits::default()));
    let ranks: Vec<_> = first.ranks.iter().map(|rank| (rank.rank, rank.running, rank.waiting)).collect();
    assert_eq!(ranks, [(0, Some(3.0), Some(1.0)), (1, Some(4.0), Some(2.0))]);
    let moved = bumped(&VLLM_DP.replace("2000.0", "2100.0"), "process_open_fds");
    let second = meter.map(&parse(&moved, Limits::default()));
    let digests: Vec<_> = second.ranks.iter().map(|rank| rank.progress_digest).collect();
    assert_eq!((digests, second.progress_digest), (vec![0, 1], 1));
    assert!(mapped(VLLM_OLD).ranks.is_empty(), "one rank is no list");
}

#[test]
fn g04_a_counter_that_falls_is_a_new_baseline_and_never_progress() {
    let page = |tokens: &str| parse(&format!("vllm:generation_tokens_total {tokens}\n"), Limits::default());
    let mut meter = Meter::default();
    let mut moves = |tokens: &str| {
        let obs = meter.map(&page(tokens));
        (obs.progress_digest, obs.resets)
    };
    assert_eq!([moves("1000"), moves("1010")], [(0, 0), (1, 0)]);
    assert_eq!(moves("3"), (1, 1), "the engine began anew");
    assert_eq!([moves("2"), moves("3"), moves("2")], [(1, 2), (2, 2), (2, 3)], "one that wavers moves only upwards");
    assert_eq!(moves("9223372036854775808"), (2, 3), "2^63 is no count: unknown, neither progress nor a reset");
    assert_eq!(moves("3"), (3, 3));
}

#[test]
fn g04_a_count_that_a_float_cannot_hold_is_unknown() {
    let tokens = |value: &str| mapped(&format!("vllm:generation_tokens_total {value}\n")).generation_tokens;
    assert_eq!(tokens("9007199254740992"), Some(9_007_199_254_740_992.0));
    assert_eq!(
        tokens("9007199254740994"),
        None,
        "above 2^53 an increment may be lost: a live counter would look frozen"
    );
    let two =
        "vllm:generation_tokens_total{engine=\"0\"} 9007199254740992\nvllm:generation_tokens_total{engine=\"1\"} 9\n";
    assert_eq!(mapped(two).generation_tokens, None, "nor does a sum overflow into progress");
}

#[test]
fn g03_values_that_make_no_sense_are_unknown_and_series_that_come_twice_count_once() {
    for value in ["NaN", "+Inf", "-Inf", "-1", "1e308", "1e999", &"9".repeat(10_000)] {
        let obs = mapped(&format!("vllm:num_requests_running {value}\nvllm:kv_cache_usage_perc {value}\n"));
        assert_eq!((obs.running, obs.kv_usage), (None, None), "{value:.20}");
    }
    for wrong in ["0x10", "1_000", "inf", "nan", "--1", "1.2.3"] {
        let page = parse(&format!("vllm:num_requests_running {wrong}\n"), Limits::default());
        assert_eq!((page.errors, map(&page).running), (1, None), "{wrong}");
    }
    assert_eq!(mapped("vllm:num_requests_running -0\n").running, Some(0.0));
    assert_eq!(mapped("vllm:kv_cache_usage_perc 1.5\n").kv_usage, None);
    let twice = "vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 2\nvllm:num_requests_running{model_name=\"m\",engine=\"0\"} 9\n";
    assert_eq!(mapped(twice).running, Some(2.0));
    let half = "vllm:num_requests_running{engine=\"0\"} 2\nvllm:num_requests_running{engine=\"1\"} NaN\n";
    assert_eq!(mapped(half).running, None, "a sum with a hole is no sum");
}

/// What is not linear in the page takes hours for these.
#[test]
fn g03_a_page_of_a_million_samples_labels_or_nonsense_costs_its_length_and_is_told() {
    const MANY: usize = 1_000_000;
    let limits = Limits { bytes_max: usize::MAX, samples_max: 8_192 };
    let known = "vllm:num_requests_running 3\n";
    let labels: String = (0..MANY).map(|label| format!("l{label}=\"\",")).collect();
    let escapes = "\\\"".repeat(MANY);
    let too_much = "what is beyond 8192 samples, or the cap in bytes, was not read";
    for (what, page, kept, fault) in [
        ("samples that mean nothing", "a 1\n".repeat(MANY), 1, None),
        ("samples that mean something", "vllm:num_requests_waiting 1\n".repeat(MANY), 8_192, Some(too_much)),
        ("labels of one", format!("x{{{labels}}} 1\n"), 1, Some("line 2: too many labels (1 such lines)")),
        ("escapes in one label", format!("x{{a=\"{escapes}\"}} 1\n"), 1, None),
        (
            "a label without an end",
            format!("x{{a=\"{escapes}"),
            1,
            Some("line 2: a label value without an end (1 such lines)"),
        ),
        ("blanks", format!("x{}1\n", " ".repeat(MANY)), 1, None),
        ("braces", format!("x{}\n", "{".repeat(MANY)), 1, Some("line 2: a label without a value (1 such lines)")),
        ("nonsense", "?\n".repeat(MANY), 1, Some("line 2: no metric name (1000000 such lines)")),
    ] {
        let page = parse_where(&format!("{known}{page}"), limits, is_known);
        assert_eq!((page.samples.len(), page.fault().as_deref()), (kept, fault), "{what}");
        assert_eq!(map(&page).running, Some(3.0), "{what}");
    }
}

#[test]
fn the_tables_are_in_order_and_in_the_documentation() {
    for table in ENGINES {
        for (at, series) in table.series.iter().enumerate() {
            let again =
                table.series.iter().skip(at + 1).any(|other| {
                    other.name == series.name && other.only == series.only && other.meaning == series.meaning
                });
            assert!(!again, "{} {} stands twice", table.title, series.name);
            assert!(table.prefixes.iter().all(|prefix| is_known(&format!("{prefix}{}", series.name))));
        }
    }
    let wanted = documentation();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/engine-signals.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (head, rest) = text.split_once("<!-- tables -->\n").unwrap();
    let (_, tail) = rest.split_once("<!-- end of tables -->").unwrap();
    let whole = format!("{head}<!-- tables -->\n{wanted}<!-- end of tables -->{tail}");
    if std::env::var_os("TRUEBEAT_REGENERATE").is_some() {
        std::fs::write(path, &whole).unwrap();
    }
    assert!(text == whole || std::env::var_os("TRUEBEAT_REGENERATE").is_some(), "run `make regenerate`");
}

fn documentation() -> String {
    let mut text = String::new();
    for table in ENGINES {
        let note: String = table.note.split_whitespace().collect::<Vec<_>>().join(" ");
        writeln!(text, "\n### {}\n\n{note}\n\n| series | read as | note |\n|---|---|---|", table.title).unwrap();
        for series in table.series {
            let filter = match (series.only, series.but) {
                (Some((label, value)), _) => format!("{{{label}=\"{value}\"}}"),
                (_, Some((label, [value]))) => format!("{{{label}!=\"{value}\"}}"),
                // a bar alone would end the table's cell
                (_, Some((label, values))) => format!("{{{label}!~\"{}\"}}", values.join("\\|")),
                _ => String::new(),
            };
            let name = format!("{}{}{filter}", table.prefixes[0], series.name);
            writeln!(text, "| `{name}` | {} | {} |", series.meaning.role(), series.note).unwrap();
        }
    }
    writeln!(text, "\n### Of every engine\n\n| series | note |\n|---|---|").unwrap();
    COMMON.iter().for_each(|(name, note)| writeln!(text, "| `{name}` | {note} |").unwrap());
    writeln!(text).unwrap();
    text
}
