//! Answers of NCCL's RAS service, in the forms of its documentation, and what is no answer.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]

use proptest::prelude::*;
use vitals::ras::{RasError, Report, Tracker, parse};

const JSON: &str = include_str!("samples/ras/stopped.json");
const TEXT: &str = include_str!("samples/ras/stopped.txt");
const TEXT_2_24: &str = include_str!("samples/ras/stopped-2.24.txt");
const HEALTHY: &str = include_str!("samples/ras/healthy.txt");

fn silent(tracker: &mut Tracker, answer: &str) -> Vec<u32> {
    tracker.take(parse(answer).unwrap()).silent_ranks
}

#[test]
fn a_rank_that_does_not_answer_is_named_at_once_and_one_that_stays_behind_at_the_second_answer() {
    let mut tracker = Tracker::default();
    assert_eq!(silent(&mut tracker, JSON), [2], "rank 3 answers, it is only no member");
    assert_eq!(silent(&mut tracker, JSON), [1, 2]);
    let mut tracker = Tracker::default();
    let first = tracker.take(parse(TEXT).unwrap());
    assert_eq!(first.silent_ranks, [21]);
    assert_eq!(first.text, "RAS lost a process: Process 3487984 on node 172.16.64.213 managing GPU 5");
    assert_eq!(silent(&mut tracker, TEXT), [4, 5, 7, 21]);
}

#[test]
fn ranks_that_are_behind_and_move_are_no_news() {
    let mut tracker = Tracker::default();
    for step in 0..5 {
        let moving = JSON.replace("41", &(50 + step * 2).to_string()).replace("40", &(49 + step * 2).to_string());
        assert_eq!(silent(&mut tracker, &moving), [2], "{step}");
    }
    let mut tracker = Tracker::default();
    for step in 0..5 {
        let moving = TEXT.replace("6650", &(7_000 + step).to_string()).replace("6649", &(6_990 + step).to_string());
        assert_eq!(silent(&mut tracker, &moving), [21], "{step}");
    }
}

/// Rank 1 of two in a part of the pipeline is nobody's rank 1: it may be rank 5 of the eight, or any other.
#[test]
fn a_rank_of_a_part_of_the_job_is_told_in_words_and_never_named() {
    let rank = |rank: u32, pid: u32| format!("{{\"rank\":{rank},\"host\":\"10.0.0.1\",\"pid\":{pid},\"cuda_dev\":0}}");
    let part = |first: u32, missing: &str| {
        let ranks = rank(0, first);
        format!("{{\"hash\":\"{first}\",\"size\":2,\"ranks\":[{ranks}],\"missing_ranks\":[{missing}]}}")
    };
    let silent = rank(1, 9).replace('}', ",\"status\":{\"unresponsive\":true}}");
    let told = |answer: &str| Tracker::default().take(parse(answer).unwrap());
    let key = "\"communicators\": [";
    let with_world =
        told(&JSON.replace(key, &format!("{key}{},", part(100, "{\"rank\":1,\"status\":{\"unresponsive\":true}}"))));
    let with_world = (with_world.silent_ranks, with_world.silent_elsewhere);
    assert_eq!(with_world, (vec![2], true));
    // where no communicator is of the whole job there is nobody to name
    let halves = told(&format!("{{{key}{},{}]}}", part(1, &silent), part(2, &rank(1, 3))));
    assert_eq!((halves.silent_ranks, halves.silent_elsewhere), (vec![], true));
    assert!(halves.text.contains("rank 1 of communicator 1, which has 2 ranks"), "{}", halves.text);
    let halves = told(&TEXT.replace("0         1         4       7-8        32        32", "0 2 4 4 16 32"));
    assert_eq!((halves.silent_ranks, halves.silent_elsewhere), (vec![], true));
}

#[test]
fn the_list_of_2_24_and_a_job_without_complaint() {
    assert_eq!(silent(&mut Tracker::default(), TEXT_2_24), [5, 6, 21]);
    let obs = Tracker::default().take(parse(HEALTHY).unwrap());
    assert!(obs.answered && obs.silent_ranks.is_empty() && obs.text.is_empty(), "{obs:?}");
}

#[test]
fn what_is_no_status_is_an_error_that_says_so() {
    assert_eq!(parse(" \n"), Err(RasError::Empty));
    assert_eq!(parse("HTTP/1.1 400 Bad Request\r\n\r\n"), Err(RasError::NoStatus("HTTP/1.1 400 Bad Request".into())));
    assert!(matches!(parse("{\"hello\": 1}"), Err(RasError::Json(_))));
    assert!(matches!(parse(&JSON[..JSON.len() / 2]), Err(RasError::Json(_))), "half an answer is none");
    assert!(matches!(
        parse("{\"communicators\":[{\"hash\":\"x\",\"ranks\":[{\"rank\":-1}]}]}"),
        Err(RasError::Json(_))
    ));
}

#[test]
fn a_list_of_four_billion_ranks_is_cut() {
    let endless = TEXT_2_24.replace("5-6,21", "0-4294967295,0-4294967295");
    assert!(silent(&mut Tracker::default(), &endless).len() <= 4_096);
}

proptest! {
    #[test]
    fn nothing_panics_on_answers_with_damage(
        which in 0_usize..4, cut in 0_usize..2_000, at in 0_usize..2_000, with in "\\PC{0,8}",
    ) {
        let mut answer = [JSON, TEXT, TEXT_2_24, HEALTHY][which].to_owned();
        answer.truncate(cut);
        let at = at.min(answer.len());
        answer.insert_str(at, &with);
        let mut tracker = Tracker::default();
        for _ in 0..2 {
            let report = parse(&answer).unwrap_or_else(|_| Report::default());
            prop_assert!(tracker.take(report).text.chars().count() <= 300);
        }
    }
}
