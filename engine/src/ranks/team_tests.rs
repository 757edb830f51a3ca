//! Collectives among threads: each has its own mapping of one memory, as processes have.
#![allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]

use std::sync::Arc;

use super::super::{LeaderModel, RankBackend};
use super::*;
use crate::backend::cpu::CpuBackend;
use crate::model::{Model, RandomShape, random_model_on};
use crate::weights::WeightType;

fn together<T: Send>(world: usize, run: impl Fn(&Team) -> T + Sync) -> Vec<T> {
    let (first, file) = Team::create(world).unwrap();
    first.allow(Some(Duration::from_secs(20)));
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..world)
            .map(|rank| {
                let (file, run) = (&file, &run);
                scope.spawn(move || {
                    let team = Team::join(file, rank, world).unwrap();
                    team.allow(Some(Duration::from_secs(20)));
                    run(&team)
                })
            })
            .collect();
        let mut results = vec![run(&first)];
        results.extend(others.into_iter().map(|thread| thread.join().unwrap()));
        results
    })
}

#[test]
fn sums_and_rows_are_the_same_on_every_rank_whatever_their_length() {
    // longer than a chunk as well
    for len in [1, 5, CHUNK_WORDS + 3] {
        let sums = together(3, |team| {
            let mut values: Vec<f32> = (0..len).map(|i| (i % 7 + 10 * team.rank()) as f32).collect();
            for _ in 0..3 {
                team.all_reduce(&mut values);
            }
            assert_eq!(team.fault(), None);
            values
        });
        let want: Vec<f32> = (0..len).map(|i| (9 * (3 * (i % 7) + 30)) as f32).collect();
        assert!(sums.iter().all(|sum| *sum == want), "{len}");
    }
}

#[test]
fn a_gather_puts_uneven_columns_side_by_side() {
    let gathered = together(3, |team| {
        let widths = [2, 1, 3];
        let value = |row: usize, col: usize| (100 * row + 10 * team.rank() + col) as f32;
        let mine: Vec<f32> = (0..2).flat_map(|row| (0..widths[team.rank()]).map(move |col| value(row, col))).collect();
        team.all_gather(&mine, &widths)
    });
    let row = [0.0, 1.0, 10.0, 20.0, 21.0, 22.0];
    let want: Vec<f32> = row.iter().copied().chain(row.iter().map(|v| v + 100.0)).collect();
    assert!(gathered.iter().all(|rows| *rows == want), "{gathered:?}");
}

#[test]
fn ranks_that_agree_go_on_and_ranks_that_do_not_name_both_plans() {
    let said = together(2, |team| (1..5).try_for_each(|step| team.agree(step, 77)));
    assert!(said.iter().all(Result::is_ok));
    let said = together(2, |team| team.agree(1, 0xa0 + team.rank() as u64));
    for (rank, result) in said.into_iter().enumerate() {
        let stuck = result.unwrap_err();
        // the second to look may find that the first gave up already
        assert!(stuck.text.contains("00000000000000a0") && stuck.text.contains("00000000000000a1"), "{rank}: {stuck}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_and_the_team_is_done_for() {
    let (team, file) = Team::create(3).unwrap();
    let second = Team::join(&file, 1, 3).unwrap();
    second.layout.of(1, Word::Arrived).store(1, Ordering::Release);
    second.layout.of(1, Word::LenOdd).store(4, Ordering::Relaxed);
    team.allow(Some(Duration::from_millis(30)));
    team.all_reduce(&mut [1.0; 4]);
    let stuck = team.fault().unwrap();
    assert_eq!(stuck.kind, StuckKind::RankSilent { ranks: vec![2] }, "{stuck}");
    assert!(stuck.text.contains("rank 2 has not come to all-reduce 1; rank 0 waited"), "{stuck}");
    let since = std::time::Instant::now();
    team.allow(Some(Duration::from_secs(60)));
    team.all_reduce(&mut [1.0; 4]);
    assert!(since.elapsed() < Duration::from_secs(30), "an error is sticky");
    // who waits for a rank that gave up hears its words
    second.allow(Some(Duration::from_secs(60)));
    let told = second.agree(1, 1).unwrap_err();
    assert!(told.text.contains("rank 0 gave up: rank 2 has not come"), "{told}");
    assert_eq!(told.kind, StuckKind::RankSilent { ranks: vec![2] }, "and blames whom it blames");
}

#[test]
fn a_rank_whose_process_is_gone_is_known_long_before_the_deadline() {
    let (team, _file) = Team::create(2).unwrap();
    let mut child = std::process::Command::new("true").spawn().unwrap();
    team.layout.of(1, Word::Pid).store(u64::from(child.id()), Ordering::Relaxed);
    team.allow(Some(Duration::from_secs(60)));
    let stuck = team.agree(1, 1).unwrap_err();
    assert_eq!(stuck.kind, StuckKind::RankGone { rank: 1 });
    assert!(stuck.waited < Duration::from_secs(5), "{stuck}");
    drop(child.try_wait());
}

#[test]
fn a_rank_that_brings_another_number_of_values_is_an_error_at_once() {
    let faults = together(2, |team| {
        let mut values = vec![1.0; 4 + team.rank()];
        team.all_reduce(&mut values);
        team.fault()
    });
    let text = faults.iter().flatten().map(|stuck| stuck.text.clone()).collect::<Vec<_>>().join("; ");
    assert!(text.contains("values to all-reduce 1"), "{text}");
}

#[test]
fn what_a_wait_forgives_a_rank_is_told_to_who_waits_for_this_one() {
    if !std::path::Path::new("/proc/self/schedstat").exists() {
        return;
    }
    let (team, _file) = Team::create(2).unwrap();
    team.layout.of(1, Word::Tid).store(this_tid(), Ordering::Relaxed);
    let (mut witness, mut patience) = (Witness::default(), Patience::new(None));
    let since = std::time::Instant::now();
    while team.forgiven().load(Ordering::Relaxed) == 0 {
        assert!(since.elapsed() < Duration::from_secs(20), "no thread is woken in no time");
        std::thread::sleep(Duration::from_millis(1));
        team.forgive(&[1], &mut witness, &mut patience);
    }
}

/// Names of the threads that whoever waits for the step of rank 0 waits for, once they are known; rank 1 computes on `threads`.
fn waited_for(threads: usize) -> Vec<String> {
    let (first, file) = Team::create(2).unwrap();
    let (first, second) = (Arc::new(first), Arc::new(Team::join(&file, 1, 2).unwrap()));
    let shape = RandomShape {
        hidden: 32,
        intermediate: 32,
        layers: 1,
        heads: 2,
        kv_heads: 2,
        head_dim: 16,
        vocab: 32,
        seq_len_max: 16,
    };
    let share = |threads: usize, team: &Arc<Team>| {
        let backend = RankBackend::new(CpuBackend::new(threads), team.clone());
        random_model_on(backend, shape, (WeightType::F32, WeightType::F32), true).unwrap()
    };
    let (mine, _other) = (share(3, &first), share(threads, &second));
    let leader = LeaderModel::new(mine, first.clone());
    let since = std::time::Instant::now();
    loop {
        second.this_thread_takes_part();
        let tids = (leader.threads())().into_iter().filter(|tid| *tid != 0);
        let names = tids.map(|tid| std::fs::read_to_string(format!("/proc/self/task/{tid}/comm")).unwrap());
        let mut names: Vec<String> = names.map(|name| name.trim().to_owned()).collect();
        names.sort_unstable();
        let helpers = names.iter().filter(|name| name.starts_with("kernel-")).count();
        if helpers == 2 + threads - 1 {
            return names;
        }
        assert!(since.elapsed() < Duration::from_secs(60), "not all threads begin: {names:?}");
        std::thread::yield_now();
    }
}

#[test]
fn who_waits_for_a_step_knows_the_helpers_of_all_ranks_and_the_threads_of_the_others() {
    let name = std::fs::read_to_string(format!("/proc/self/task/{}/comm", this_tid())).unwrap();
    let name = name.trim().to_owned();
    let mut alone = vec!["kernel-1".to_owned(), "kernel-2".to_owned(), name.clone()];
    alone.sort_unstable();
    assert_eq!(waited_for(1), alone);
    let mut helped = ["kernel-1", "kernel-1", "kernel-2", "kernel-2", &name].map(str::to_owned).to_vec();
    helped.sort_unstable();
    assert_eq!(waited_for(3), helped);
}

#[test]
fn helpers_that_the_others_cannot_be_told_of_are_told_of_here() {
    let helped_by = |helpers: u64| {
        let (team, _file) = Team::create(1).unwrap();
        let untold = team.helped_by((1..=helpers).map(AtomicU64::new).collect());
        team.this_thread_takes_part();
        (untold, team.threads_of(&[0]).into_iter().skip(1).filter(|tid| *tid != 0).collect::<Vec<_>>())
    };
    let most = HELPERS_MAX as u64;
    assert_eq!(helped_by(most), (0, (1..=most).collect()));
    assert_eq!(helped_by(most + 3), (3, (1..=most).collect()));
}
