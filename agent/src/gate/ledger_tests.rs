//! The books, entry by entry.

use super::*;
use crate::gate::suspects::BREAK_MS;

fn ledger() -> Ledger {
    Ledger::new(7, Control::default())
}

fn asked(prompt_tokens: u64) -> Asked {
    Asked { prompt_tokens, stream: true, print: None }
}

#[test]
fn answers_that_do_not_stream_and_the_longest_prompt_are_told_until_they_begin() {
    let books = ledger();
    books.open(100, asked(1));
    let whole = books.open(100, Asked { stream: false, ..asked(90) });
    let told = |at| books.reply(at).obs;
    assert_eq!((told(200).unstreamed, told(200).longest_prompt_owed), (Some(1), Some(90)));
    books.delivered(whole, 250, 10);
    assert_eq!((told(300).unstreamed, told(300).longest_prompt_owed), (Some(0), Some(1)));
}

#[test]
fn what_is_not_here_as_a_whole_is_no_stream_that_could_begin() {
    let books = ledger();
    let unread = Asked { stream: false, ..asked(1) };
    let [streams, whole, left] = [(); 3].map(|()| books.open(100, unread));
    let told = || books.reply(200).obs.unstreamed;
    assert_eq!(told(), Some(3));
    books.uploaded(streams, &asked(9));
    books.uploaded(streams, &asked(9));
    books.uploaded(whole, &Asked { stream: false, ..asked(9) });
    assert_eq!(told(), Some(2), "one of them is known to stream");
    books.delivered(streams, 250, 1);
    assert_eq!(told(), Some(2));
    books.close(left, 300, End::Abandoned);
    books.uploaded(left, &asked(9));
    books.delivered(whole, 350, 1);
    assert_eq!(told(), Some(0));
}

#[test]
fn work_owed_ends_with_the_first_byte_and_flight_with_the_close() {
    let books = ledger();
    let first = books.open(100, asked(40));
    let second = books.open(200, asked(2));
    books.delivered(first, 250, 10);
    let reply = books.reply(300);
    assert_eq!((reply.obs.in_flight, reply.obs.awaiting_first_byte, reply.obs.prompt_tokens_owed), (2, 1, 2));
    assert!(reply.obs.prompt_tokens_taken > 2, "who has been answered was taken in as well");
    assert_eq!((reply.obs.oldest_in_flight_ms, reply.obs.last_delivery_ms), (Some(100), Some(250)));
    books.close(first, 350, End::Completed);
    books.close(first, 350, End::Failed);
    books.close(second, 350, End::Abandoned);
    let reply = books.reply(400);
    assert_eq!((reply.obs.in_flight, reply.obs.requests_done, reply.obs.oldest_in_flight_ms), (0, 2, None));
    assert_eq!((reply.requests_completed, reply.requests_failed, reply.obs.requests_abandoned), (1, 0, 1));
}

#[test]
fn a_client_is_blocked_only_while_a_chunk_waits_for_it() {
    let books = ledger();
    let id = books.open(0, asked(1));
    books.handed(id, Some(1_000));
    assert_eq!(books.reply(2_000).obs.client_blocked, 0);
    assert_eq!(books.reply(2_001).obs.client_blocked, 1);
    books.handed(id, None);
    assert_eq!(books.reply(9_000).obs.client_blocked, 0);
}

#[test]
fn a_prompt_is_owed_when_all_of_it_has_come() {
    let books = ledger();
    let (short, long) = (books.open(100, asked(30)), books.open(100, asked(1)));
    let told = || {
        let obs = books.reply(200).obs;
        (
            obs.in_flight,
            obs.awaiting_first_byte,
            obs.prompt_tokens_owed,
            obs.longest_prompt_owed,
            obs.prompt_tokens_taken,
        )
    };
    assert_eq!(told(), (2, 2, 31, Some(30), 31));
    books.uploaded(long, &asked(40_000));
    assert_eq!(told(), (2, 2, 40_030, Some(40_000), 40_030));
    books.delivered(long, 150, 1);
    books.uploaded(long, &asked(90_000));
    assert_eq!(told(), (2, 1, 30, Some(30), 40_030), "one that was answered before its end owes nothing");
    books.close(short, 200, End::Completed);
    books.uploaded(short, &asked(1));
    assert_eq!(told(), (1, 0, 0, Some(0), 40_030));
}

#[test]
fn a_shut_gate_refuses_and_counts_each_refusal() {
    let books = ledger();
    assert!(books.admit().is_ok());
    books.set_control(Control { fenced: true, reason: "no byte for 2 s".into(), ..Control::default() });
    let refusal = books.admit().unwrap_err();
    assert_eq!((refusal.retry_after_s, refusal.reason.as_str()), (1, "no byte for 2 s"));
    let shut = || (books.reply(0).shut, books.reply(0).draining);
    assert_eq!(shut(), (true, false));
    books.set_control(Control { draining: true, ..Control::default() });
    assert_eq!(shut(), (true, true));
    books.set_control(Control::default());
    assert!(books.admit().is_ok());
    assert_eq!((books.reply(0).requests_refused, shut()), (1, (false, false)));
}

#[test]
fn a_request_that_was_cut_off_is_suspect_and_one_that_the_engine_refused_is_not() {
    let books = ledger();
    let with = |n| Asked { print: Some(Print(n)), ..asked(1) };
    let opened = [1, 2, 3, 4].map(|n| books.open(100, with(n)));
    books.delivered(opened[0], 150, 1);
    for (id, end) in opened.into_iter().zip([End::Completed, End::Failed, End::Broken, End::Abandoned]) {
        books.close(id, 200, end);
    }
    books.open(300, with(5));
    let names: Vec<String> = books.suspects(400).into_iter().map(|one| one.request).collect();
    assert_eq!(names, [5, 4, 3].map(|n| Print(n).to_string()));
    let poison = [1, 3].map(|n| Poison { request: Print(n).to_string(), since_ms: 150 }).to_vec();
    books.set_control(Control { poison, ..Control::default() });
    let refused = [Some(Print(1)), Some(Print(3)), Some(Print(5)), None].map(|print| books.is_poison(print));
    assert_eq!(refused, [false, true, false, false], "the first has succeeded since");
    assert_eq!(books.reply(400).requests_poisonous, 1);
}

#[test]
fn who_comes_to_an_engine_that_has_just_died_is_no_suspect_and_pushes_nobody_out() {
    let books = ledger();
    let with = |n| Asked { print: Some(Print(n)), ..asked(1) };
    let culprit = books.open(100, with(1));
    books.delivered(culprit, 150, 1);
    books.close(culprit, 1_000, End::Broken);
    for n in 2..500 {
        let id = books.open(1_000 + n, with(n));
        books.close(id, 1_001 + n, End::Broken);
    }
    let names = || books.suspects(2_000).into_iter().map(|one| one.request).collect::<Vec<_>>();
    assert_eq!(names(), [Print(1).to_string()]);
    // so long after, or when it has delivered, it is another break
    let later = books.open(1_000 + BREAK_MS, with(600));
    books.close(later, 1_001 + BREAK_MS, End::Broken);
    let served = books.open(1_002 + BREAK_MS, with(601));
    books.delivered(served, 1_003 + BREAK_MS, 1);
    let next = books.open(1_004 + BREAK_MS, with(602));
    books.close(next, 1_005 + BREAK_MS, End::Broken);
    assert_eq!(names(), [601, 602, 600, 1].map(|n| Print(n).to_string()));
}

#[test]
fn what_ends_behind_a_fence_or_without_a_token_is_no_success() {
    let ended = |fenced, delivers: bool| {
        let books = ledger();
        let id = books.open(100, Asked { print: Some(Print(1)), ..asked(1) });
        delivers.then(|| books.delivered(id, 150, 1));
        books.set_control(Control { fenced, ..Control::default() });
        books.close(id, 200, End::Completed);
        books.open(300, Asked { print: Some(Print(1)), ..asked(1) });
        books.suspects(400)[0].answered_ms
    };
    assert_eq!((ended(false, true), ended(true, true), ended(false, false)), (Some(200), None, None));
}

#[test]
fn the_reply_is_one_flat_json_object_with_the_detectors_fields() {
    let text = serde_json::to_string(&ledger().reply(0)).unwrap();
    assert_eq!(serde_json::from_str::<GateObs>(&text).unwrap().epoch, 7);
    assert_eq!(serde_json::from_str::<GateReply>(&text).unwrap(), ledger().reply(0));
}
