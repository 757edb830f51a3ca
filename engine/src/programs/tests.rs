//! The cache of programs: a program leaves it for steps of its own shape alone, and it stays within its bounds.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::backend::HeadShape;
use crate::model::{LogitsWanted, SeqInput};

const SIZES: Sizes =
    Sizes { layers: 1, hidden: 8, intermediate: 8, vocab: 10, heads: HeadShape { heads: 2, kv_heads: 1, head_dim: 4 } };

fn batch(seqs: &[(usize, LogitsWanted)]) -> StepBatch {
    let seq = |(len, logits): &(usize, LogitsWanted)| SeqInput {
        tokens: vec![0; *len],
        start_pos: 3,
        block_table: vec![0],
        logits: *logits,
    };
    StepBatch::of(seqs.iter().map(seq).collect())
}

/// Asks for `batch` until its program is there.
fn captured(programs: &mut Programs, batch: &StepBatch) -> Program {
    let since = Instant::now();
    loop {
        if let Some(program) = programs.take(batch) {
            return program;
        }
        assert!(since.elapsed() < Duration::from_secs(60), "never captured");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_shape_is_captured_at_its_second_time_and_prompts_never() {
    let (mut programs, counts) = (Programs::new(SIZES), |p: &Programs| p.counts());
    let decode = batch(&[(1, LogitsWanted::Last); 3]);
    assert!(programs.take(&decode).is_none() && programs.capture.is_idle());
    let program = captured(&mut programs, &decode);
    assert_eq!(counts(&programs).last_key.load(Relaxed), program.key.number());
    assert_eq!((program.key.rows(), program.wanted.clone(), program.units.len()), (3, vec![0, 1, 2], 3));
    programs.put_back(program);
    let prompt = batch(&[(1, LogitsWanted::Last), (key::TOKENS_MAX + 1, LogitsWanted::Last)]);
    for _ in 0..5 {
        assert!(programs.take(&prompt).is_none());
    }
    assert!(programs.capture.is_idle() && programs.seen.is_empty());
    assert_eq!(counts(&programs).last_key.load(Relaxed), 0);
    assert_eq!((counts(&programs).captured.load(Relaxed), counts(&programs).replayed.load(Relaxed)), (1, 1));
}

#[test]
fn the_one_that_was_not_used_for_longest_goes_first() {
    let mut programs = Programs::new(SIZES).bounded(2, usize::MAX);
    let batches = [1, 2, 3].map(|n| batch(&vec![(1, LogitsWanted::Last); n]));
    for batch in [&batches[0], &batches[1], &batches[0], &batches[2]] {
        let program = captured(&mut programs, batch);
        programs.put_back(program);
    }
    assert_eq!((programs.kept.len(), programs.counts().evicted.load(Relaxed)), (2, 1));
    assert!(programs.take(&batches[1]).is_none() && programs.take(&batches[0]).is_some());
}

#[test]
fn buffers_are_bounded_in_bytes_and_a_shape_that_is_too_large_is_not_wanted() {
    let (small, large) = (batch(&[(1, LogitsWanted::Last)]), batch(&[(9, LogitsWanted::All); 9]));
    let bytes = |batch| lower::bytes(&ProgramKey::of(batch).unwrap(), &SIZES);
    let mut programs = Programs::new(SIZES).bounded(9, bytes(&small));
    for _ in 0..5 {
        assert!(programs.take(&large).is_none());
    }
    assert!(programs.capture.is_idle() && programs.seen.is_empty());
    let program = captured(&mut programs, &small);
    programs.put_back(program);
    assert_eq!(programs.kept.len(), 1);
}

/// Programs that round steps up, as a worker rank's with the fault `padded-graph` do.
fn rounding_up(guarded: bool) -> Programs {
    let faults = Faults::of_rank(vec!["padded-graph".parse().unwrap()], 1);
    faults.arm(1);
    let mut programs = Programs::new(SIZES).struck_by(faults);
    programs.guard(guarded);
    programs
}

#[test]
fn s1_with_guards_a_program_that_a_step_was_rounded_up_to_is_refused_each_time_and_stays() {
    let (mut programs, decode) = (rounding_up(true), batch(&[(1, LogitsWanted::Last); 15]));
    for times in 1..=3 {
        assert!(programs.take(&decode).is_none());
        let counts = programs.counts();
        assert_eq!((counts.refused.load(Relaxed), counts.eager.load(Relaxed)), (times, times));
        assert_eq!((counts.replayed.load(Relaxed), counts.last_key.load(Relaxed)), (0, 0));
    }
    // a step of that very shape may have it
    let large = batch(&[(2, LogitsWanted::All); 16]);
    programs.faults = Faults::default();
    assert!(programs.take(&large).is_some_and(|program| program.key.is_of(&large)));
    assert_eq!(programs.counts().refused.load(Relaxed), 3);
}

#[test]
fn s1_without_guards_it_is_laid_over_the_step_and_gathers_as_many_rows_as_it_was_made_for() {
    let mut programs = rounding_up(false);
    for requests in [15, 9] {
        let program = programs.take(&batch(&vec![(1, LogitsWanted::Last); requests])).unwrap();
        assert_eq!((program.key.rows(), program.wanted.len()), (32, 32));
        assert_eq!(program.units.iter().map(|unit| unit.rows).sum::<usize>(), requests);
        assert!(
            program.wanted.iter().all(|row| *row < requests) && program.units.iter().all(|unit| unit.seq < requests)
        );
        programs.put_back(program);
    }
    // what is kept is whole
    programs.faults = Faults::default();
    let program = programs.take(&batch(&[(2, LogitsWanted::All); 16])).unwrap();
    assert_eq!(program.units.iter().map(|unit| unit.rows).sum::<usize>(), 32);
    assert_eq!((programs.kept.len(), programs.counts().refused.load(Relaxed)), (0, 0));
}

#[test]
fn without_any_fault_a_program_of_another_shape_and_the_same_number_is_refused() {
    let (mut programs, decode) = (Programs::new(SIZES), batch(&[(1, LogitsWanted::Last); 3]));
    let other = ProgramKey::of(&batch(&[(2, LogitsWanted::All); 4])).unwrap().numbered(ProgramKey::number_of(&decode));
    programs.put_back(Program::new(other, &SIZES));
    assert!(programs.take(&decode).is_none());
    assert_eq!((programs.counts().refused.load(Relaxed), programs.kept.len()), (1, 1));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Whatever is asked for in whatever order: what comes is of exactly that shape, and covers its rows.
    #[test]
    fn a_program_is_for_its_own_shape_alone(asked in prop::collection::vec(prop::collection::vec((1usize..4, 0u8..3), 1..4), 1..40)) {
        let mut programs = Programs::new(SIZES).bounded(3, usize::MAX);
        let kinds = [LogitsWanted::None, LogitsWanted::Last, LogitsWanted::All];
        for shape in &asked {
            let batch = batch(&shape.iter().map(|(len, kind)| (*len, kinds[usize::from(*kind)])).collect::<Vec<_>>());
            for _ in 0..2 {
                let Some(program) = programs.take(&batch) else { continue };
                let key = ProgramKey::of(&batch);
                prop_assert_eq!(Some(&program.key), key.as_ref());
                let rows: usize = batch.seqs.iter().map(|seq| seq.tokens.len()).sum();
                let attended: usize = program.units.iter().map(|unit| unit.rows).sum();
                prop_assert_eq!((attended, program.wanted.len()), (rows, program.key.rows_wanted()));
                programs.put_back(program);
            }
        }
        prop_assert!(programs.kept.len() <= 3);
    }
}
