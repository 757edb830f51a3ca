//! The rule on made-up histories, and over random ones.

use super::*;
use proptest::prelude::*;

const HOUR: i64 = 3_600_000;
const NOW: i64 = 100 * HOUR;

fn name(n: u64) -> String {
    format!("{n:016x}")
}

fn at(ms: i64) -> String {
    jiff::Timestamp::from_millisecond(ms).unwrap().to_string()
}

/// Requests with the time at which the stalled replica last answered each, if it did.
fn in_flight(requests: &[(u64, Option<i64>)]) -> Vec<InFlight> {
    let one = |(n, completed): &(u64, Option<i64>)| InFlight { request: name(*n), completed_at: completed.map(at) };
    requests.iter().map(one).collect()
}

type Told = (&'static str, i64, Vec<InFlight>);

fn rule(told: &[Told], replica: &str) -> Vec<Refused> {
    let stalls: Vec<Stall<'_>> =
        told.iter().map(|(of, at_ms, list)| Stall { replica: of, at_ms: *at_ms, in_flight: list }).collect();
    refused(&stalls, replica, HOUR, NOW)
}

fn names(told: &[Told], replica: &str) -> Vec<String> {
    rule(told, replica).into_iter().map(|one| one.request).collect()
}

#[test]
fn what_was_in_flight_at_two_stalls_is_refused_everywhere_and_nothing_else() {
    let told = [
        ("a", NOW - 3_000, in_flight(&[(1, None), (2, None)])),
        ("b", NOW - 1_000, in_flight(&[(1, None), (3, None)])),
    ];
    let expected = Refused { request: name(1), since_ms: NOW - 1_000 - HOUR, until_ms: NOW - 1_000 + HOUR, stalls: 2 };
    assert_eq!(rule(&told, "c"), [expected]);
    assert_eq!(names(&told[..1], "a"), Vec::<String>::new(), "once is chance");
}

#[test]
fn a_popular_prompt_is_innocent_also_when_replicas_stall_at_once() {
    let probe = |answered_ms| in_flight(&[(7, answered_ms)]);
    let known = Some(NOW - 9_500);
    let told = [("a", NOW - 9_000, probe(known)), ("b", NOW - 8_900, probe(None)), ("c", NOW - 8_800, probe(known))];
    assert_eq!(names(&told, "d"), Vec::<String>::new(), "somebody answered it within the hour");
    let long_ago = Some(NOW - 2 * HOUR);
    let told = [("a", NOW - 9_000, probe(long_ago)), ("b", NOW - 8_900, probe(None))];
    assert_eq!(names(&told, "d"), [name(7)], "what was answered long ago is no popular prompt");
}

#[test]
fn one_replica_condemns_for_itself_alone() {
    let told = [("owned", NOW - 3_000, in_flight(&[(1, None)])), ("owned", NOW - 1_000, in_flight(&[(1, None)]))];
    assert_eq!(names(&told, "owned"), [name(1)]);
    assert_eq!(names(&told, "other"), Vec::<String>::new(), "an owned pod harms its own replica");
}

#[test]
fn very_many_that_are_equally_suspect_are_not_the_cause_and_a_third_stall_tells_who_is() {
    let crowd: Vec<(u64, Option<i64>)> = (0..40).map(|n| (n, None)).collect();
    let mut told = vec![("a", NOW - 9_000, in_flight(&crowd)), ("b", NOW - 5_000, in_flight(&crowd))];
    assert_eq!(names(&told, "c"), Vec::<String>::new());
    told.push(("c", NOW - 1_000, in_flight(&crowd[..1])));
    assert_eq!(names(&told, "d"), [name(0)]);
}

#[test]
fn what_one_replica_refuses_for_itself_finds_room_as_what_all_refuse() {
    let many: Vec<(u64, Option<i64>)> = (0..REFUSED_MAX as u64).map(|n| (n, None)).collect();
    let own = (1_000, None);
    let all = |requests: &[(u64, Option<i64>)], own_stalls: i64| -> Vec<Told> {
        let told = |replica, at_ms, requests: &[_]| (replica, at_ms, in_flight(requests));
        let shared = [told("a", NOW - 9, requests), told("b", NOW - 8, requests)];
        let own = (0..own_stalls).map(|n| told("a", NOW - 7 + n, &[own]));
        shared.into_iter().chain(own).collect()
    };
    let count = |told: &[Told], replica| names(told, replica).len();
    let full = all(&many, 2);
    assert_eq!((count(&full, "a"), count(&full, "b")), (0, REFUSED_MAX), "one more than all of that number may be");
    let surer = all(&many, 3);
    assert_eq!(names(&surer, "a"), [name(1_000)], "the surest first, and the others find no room");
    let more: Vec<_> = (0..100).map(|n| (n, None)).collect();
    assert_eq!((names(&all(&more, 3), "a"), count(&all(&more, 3), "b")), (vec![name(1_000)], 0));
    assert_eq!(count(&all(&many[1..], 2), "a"), REFUSED_MAX);
}

/// Each of a large deployment's replicas has stalled twice, with as many requests as are told.
#[test]
fn a_thousand_stalls_are_judged_in_one_go() {
    let requests: Vec<_> = (0..IN_FLIGHT_MAX as u64).map(|n| (n, None)).collect();
    let told = in_flight(&requests);
    let replicas: Vec<String> = (0..500).map(|n| format!("replica-{n}")).collect();
    let own: Vec<_> = (0..500).map(|n| in_flight(&[(10_000 + n, None)])).collect();
    let twice = replicas.iter().zip(&own).flat_map(|(replica, own)| {
        let stall = |at_ms, in_flight| Stall { replica, at_ms, in_flight };
        [stall(NOW - 9, own.as_slice()), stall(NOW - 8, told.as_slice()), stall(NOW - 7, own.as_slice())]
    });
    let all = Refusals::of(&twice.collect::<Vec<_>>(), HOUR, NOW);
    assert_eq!((all.others.len(), all.own.len()), (0, 500), "128 are equally suspect");
    assert!(all.own.values().all(Vec::is_empty), "and what is less sure than they finds no room either");
}

#[test]
fn a_stall_counts_for_its_time_and_no_longer_also_by_a_clock_that_runs_ahead() {
    let both = |first, second| [("a", first, in_flight(&[(1, None)])), ("b", second, in_flight(&[(1, None)]))];
    assert_eq!(names(&both(NOW - HOUR, NOW), "c"), Vec::<String>::new());
    let ahead = both(NOW - 10, NOW + AHEAD_MS_MAX);
    assert_eq!(rule(&ahead, "c")[0].until_ms, NOW + AHEAD_MS_MAX + HOUR, "the same at each look");
    assert_eq!(names(&both(NOW - 10, NOW + AHEAD_MS_MAX + 1), "c"), Vec::<String>::new(), "no clock that counts");
}

#[test]
fn the_annotation_reads_back_and_nonsense_refuses_nothing() {
    let list = vec![Refused { request: name(9), since_ms: 1, until_ms: 2, stalls: 3 }];
    assert_eq!(read(&write(&list).unwrap()), list);
    let words = "such requests as 0000000000000009 get 422 until 1970-01-01T00:00:00Z: in flight at 3 stalls";
    assert_eq!(list[0].words(), words);
    assert_eq!(write(&[]), None);
    for odd in ["", "{}", "[1]", "[{\"request\":\"x\"}]", &"x".repeat(1 << 20)] {
        assert_eq!(read(odd), Vec::new(), "{odd:.20}");
    }
    let long = "0".repeat(17);
    let text = format!(r#"[{{"request":"{long}","since_ms":1,"until_ms":2,"stalls":2}}]"#);
    assert_eq!(read(&text), Vec::new());
}

fn histories() -> impl Strategy<Value = Vec<Told>> {
    let one = (0..12_u64, proptest::option::of(NOW - 2 * HOUR..NOW));
    let list = proptest::collection::vec(one, 0..9).prop_map(|requests| in_flight(&requests));
    let replica = prop_oneof![Just("a"), Just("b"), Just("c")];
    proptest::collection::vec((replica, NOW - 2 * HOUR..NOW + HOUR, list), 0..9)
}

proptest! {
    #[test]
    fn whatever_is_refused_stalled_twice_and_nobody_answered_it_in_that_time(told in histories(), mine in 0..3_usize) {
        let mine = ["a", "b", "c"][mine];
        for one in rule(&told, mine) {
            let seen: Vec<&Told> = told.iter().filter(|(.., list)| list.iter().any(|f| f.request == one.request)).collect();
            let timely = told.iter().filter(|(_, at_ms, _)| *at_ms <= NOW + AHEAD_MS_MAX);
            let answers = timely.flat_map(|(.., list)| list).filter(|f| f.request == one.request);
            let answered = answers.filter_map(|f| milliseconds(f.completed_at.as_deref()?)).max();
            prop_assert!(answered.is_none_or(|at_ms| at_ms < one.since_ms));
            let counted: Vec<_> = seen.iter().filter(|(_, at_ms, _)| *at_ms > one.since_ms && *at_ms <= NOW + AHEAD_MS_MAX).collect();
            prop_assert!(counted.len() >= 2 && one.stalls >= 2);
            let strangers = counted.iter().map(|(of, ..)| of).collect::<std::collections::BTreeSet<_>>().len() > 1;
            prop_assert!(strangers || counted.iter().all(|(of, ..)| *of == mine));
            prop_assert!(NOW < one.until_ms && one.until_ms <= NOW + AHEAD_MS_MAX + HOUR);
        }
    }

    #[test]
    fn the_order_of_stalls_changes_nothing_and_telling_one_twice_neither(told in histories()) {
        let list = rule(&told, "a");
        prop_assert!(list.len() <= REFUSED_MAX && list.is_sorted_by(|a, b| a.request < b.request));
        let backwards: Vec<Told> = told.iter().rev().cloned().collect();
        prop_assert_eq!(&rule(&backwards, "a"), &list);
        let twice: Vec<Told> = told.iter().chain(&told).cloned().collect();
        prop_assert_eq!(&rule(&twice, "a"), &list);
        prop_assert_eq!(read(&write(&list).unwrap_or_default()), list);
    }

    #[test]
    fn a_success_frees(told in histories(), n in 0..12_u64) {
        let mut told = told;
        told.push(("c", NOW - 3 * HOUR, in_flight(&[(n, Some(NOW))])));
        prop_assert!(!names(&told, "a").contains(&name(n)));
    }
}
