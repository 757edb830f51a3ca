//! S1 on two ranks that share a real model: one finds a larger program for a step. Threads in place of processes.
#![allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]

use super::super::LeaderModel;
use super::super::layout::Word;
use super::*;
use crate::demo_model::{DemoArch, write_demo_model};
use crate::model::{KvShape, LogitsWanted, SeqInput, StepLogits};
use crate::stuck::StuckKind;

const PATIENCE: Duration = Duration::from_secs(60);
const REQUESTS: u32 = 15;

fn load(dir: &Path, team: &Arc<Team>, faults: Faults) -> Box<dyn Model> {
    let (threads, team) = (Some(1), Some(team.clone()));
    load_model_with(dir, &LoadOptions { threads, team, faults, ..LoadOptions::default() }, &mut |_, _| {}).unwrap()
}

/// A token of each of 15 requests.
fn decodes(start_pos: usize) -> StepBatch {
    let seq = |block| SeqInput { tokens: vec![block], start_pos, block_table: vec![block], logits: LogitsWanted::Last };
    StepBatch::of((0..REQUESTS).map(seq).collect())
}

/// Two ranks; `lead` is what the first one does, and the second ends as it ends.
fn ranks<T>(fault: bool, lead: impl FnOnce(&mut LeaderModel, &Team) -> T) -> (T, Result<(), WorkerError>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model");
    write_demo_model(&path, DemoArch::Llama, 3).unwrap();
    let (first, file) = Team::create(2).unwrap();
    let (team, second) = (Arc::new(first), Arc::new(Team::join(&file, 1, 2).unwrap()));
    let specs = fault.then(|| "padded-graph".parse().unwrap()).into_iter().collect();
    std::thread::scope(|scope| {
        let path = &path;
        let worker = scope.spawn(move || {
            let faults = Faults::of_rank(specs, 1);
            let (mut model, heart) =
                (load(path, &second, faults.clone()), RankHeart::new(Heart::new(None, Arc::default())));
            let (tally, parent) = (Tally::default(), getppid().as_raw());
            Worker { team: second, heart, faults, tally, parent }.serve(model.as_mut())
        });
        let mut leader = LeaderModel::new(load(path, &team, Faults::default()), team.clone());
        leader.allocate_kv(KvShape { num_blocks: REQUESTS as usize, block_size: 16 }).unwrap();
        let led = lead(&mut leader, &team);
        drop(leader);
        (led, worker.join().unwrap())
    })
}

fn terms(allowed: Option<Duration>) -> StepTerms {
    StepTerms { allowed, armed: 1, ..StepTerms::default() }
}

#[test]
fn with_guards_a_rank_that_finds_a_larger_program_refuses_it_and_every_step_is_as_without_it() {
    let run = |fault| {
        let steps = |leader: &mut LeaderModel, _: &Team| -> (Vec<StepLogits>, [u64; 2]) {
            leader.terms(&terms(Some(PATIENCE)));
            let steps = (0..10).map(|step| leader.forward(&decodes(step)).unwrap()).collect();
            let counts = leader.programs().unwrap();
            (steps, [&counts.refused, &counts.refused_elsewhere].map(|count| count.load(Ordering::Relaxed)))
        };
        let (led, ended) = ranks(fault, steps);
        ended.unwrap();
        led
    };
    let ((well, none), (struck, refused)) = (run(false), run(true));
    assert!(well == struck, "the same numbers");
    assert_eq!(none, [0, 0]);
    // the last step's may not be told yet
    assert!(refused[0] == 0 && refused[1] >= 9, "{refused:?}");
}

#[test]
fn without_guards_its_gather_waits_for_rows_that_nobody_sends() {
    let lead = |leader: &mut LeaderModel, team: &Team| {
        leader.terms(&terms(None));
        leader.forward(&decodes(0)).unwrap();
        let arrived = [0, 1].map(|rank| team.layout().of(rank, Word::Arrived).load(Ordering::Acquire));
        let word = if arrived[0].is_multiple_of(2) { Word::LenEven } else { Word::LenOdd };
        let brought = [0, 1].map(|rank| team.layout().of(rank, word).load(Ordering::Relaxed));
        // ends the second rank's wait, if it waits: one that does not has no reason to look at this
        team.fail(Stuck { kind: StuckKind::Loop, text: "seen".to_owned(), waited: Duration::ZERO });
        (arrived, brought)
    };
    let ((arrived, brought), ended) = ranks(true, lead);
    assert_eq!(arrived[0], arrived[1], "both are at the step's last collective");
    assert_eq!(brought[1] * 15, brought[0] * 32, "15 rows of logits, and 16 times 2");
    let stuck = ended.unwrap_err().to_string();
    assert!(stuck.contains("rank 0 gave up: seen"), "{stuck}");
}
