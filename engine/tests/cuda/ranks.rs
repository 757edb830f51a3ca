//! Models that ranks share, each with a device of its own: joined, or through the machine's memory, with the same bits; and who is named when
//! a device does not come (E3). Threads in place of processes, each with its own mapping of the ranks' memory.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use engine::backend::Backend;
use engine::backend::cuda::driver::Driver;
use engine::backend::cuda::{CudaBackend, CudaOptions};
use engine::fault::{FaultSpec, Faults};
use engine::model::{
    KvShape, LoadOptions, LogitsWanted, Model, ModelError, SeqInput, StepBatch, StepTerms, load_model_on, load_share_on,
};
use engine::ranks::Team;
use engine::stuck::{Stuck, StuckKind};

use crate::host;
use crate::models::folder;
use crate::ops::{EXACT, Numbers, bits};
use crate::stuck_driver::{Knobs, StuckDriver};
use crate::wire::Wire;

const PATIENCE: Duration = Duration::from_secs(120);
const ALLOWED: Duration = Duration::from_millis(300);
/// A rank that has not ended a step of the smallest model so long after its peer waits, and is not slow.
const FOR_EVER: Duration = Duration::from_secs(2);
/// Sums over ranks are taken in another order than one rank's.
const TOLERANCE: f32 = 2e-3;
/// And where what is summed was rounded to bf16 before, of the spread of the logits.
const TOLERANCE_BF16: f32 = 0.03;

/// Each rank's end of a team does `f` on a thread of its own.
fn on_ranks<T: Send>(world: usize, f: impl Fn(Arc<Team>) -> T + Sync) -> Vec<T> {
    let (first, file) = Team::create(world).unwrap();
    let others = (1..world).map(|rank| Team::join(&file, rank, world).unwrap());
    let teams: Vec<Team> = std::iter::once(first).chain(others).collect();
    std::thread::scope(|scope| {
        let run = |team: Team| {
            team.allow(Some(PATIENCE));
            let f = &f;
            scope.spawn(move || f(Arc::new(team)))
        };
        let ranks: Vec<_> = teams.into_iter().map(run).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Waits until so many ranks are here; one that fell over is waited for no longer than this.
fn meet(here: &AtomicUsize, ranks: usize) {
    here.fetch_add(1, Relaxed);
    let since = Instant::now();
    while here.load(Relaxed) < ranks {
        assert!(since.elapsed() < PATIENCE, "another rank did not come");
        std::thread::yield_now();
    }
}

fn shape() -> KvShape {
    KvShape { num_blocks: 8, block_size: 16 }
}

fn seq(tokens: &[u32], start_pos: usize, block: u32) -> SeqInput {
    SeqInput { tokens: tokens.to_vec(), start_pos, block_table: vec![block], logits: LogitsWanted::All }
}

/// A prompt and its neighbour, then a token of each: every row of logits.
fn run(model: &mut dyn Model) -> Vec<f32> {
    let prompts = vec![seq(&[5, 9, 2, 7, 7], 0, 3), seq(&[1, 3], 0, 6)];
    let steps = [prompts, vec![seq(&[4], 5, 3), seq(&[8], 2, 6)]];
    let rows = steps.map(|seqs| model.forward(&StepBatch::of(seqs)).unwrap().rows);
    rows.into_iter().flatten().flatten().flatten().collect()
}

fn eager(eager: bool) -> LoadOptions {
    LoadOptions { eager, ..LoadOptions::default() }
}

fn share<D: Driver>(backend: CudaBackend<D>, team: &Arc<Team>, name: &str) -> Box<dyn Model> {
    let mut model = load_share_on(backend, team, &folder(name), &eager(true), &mut |_, _| {}).unwrap();
    model.allocate_kv(shape()).unwrap();
    model
}

/// Logits of two ranks on the shim.
fn shared(name: &str, options: CudaOptions, wire: Option<&Arc<Wire>>) -> Vec<Vec<f32>> {
    on_ranks(2, |team| {
        let logits = run(share(host::wired(options, wire), &team, name).as_mut());
        assert_eq!(team.fault(), None);
        logits
    })
}

#[test]
fn joined_devices_give_the_bits_of_the_ranks_memory_and_the_logits_of_one_device() {
    for name in ["llama", "llama-rope3-bias", "qwen3-tied-bf16", "qwen3-moe"] {
        let mut alone = load_model_on(host::backend(EXACT), &folder(name), &eager(true), &mut |_, _| {}).unwrap();
        alone.allocate_kv(shape()).unwrap();
        let alone = run(alone.as_mut());
        let (wire, unused) = (Arc::default(), Arc::default());
        let joined = shared(name, EXACT, Some(&wire));
        let apart = shared(name, CudaOptions { stays_alone: true, ..EXACT }, Some(&unused));
        assert!(wire.rounds() > 0 && unused.rounds() == 0);
        assert!(bits(&joined[0]) == bits(&joined[1]), "{name}: ranks differ from one another");
        assert!(bits(&joined[0]) == bits(&apart[0]) && bits(&apart[0]) == bits(&apart[1]), "{name}: the ways differ");
        let worst = alone.iter().zip(&joined[0]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let spread = alone.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
        let tolerance = if name.starts_with("llama") { TOLERANCE } else { TOLERANCE_BF16 * spread };
        assert!(alone.len() == joined[0].len() && worst <= tolerance, "{name}: off by {worst}, of {spread}");
    }
}

#[test]
fn where_one_rank_cannot_be_joined_none_is_and_nothing_else_changes() {
    let joined = shared("llama", EXACT, Some(&Arc::default()));
    let wire = Arc::new(Wire::default());
    wire.refuses.store(true, Relaxed);
    let apart = shared("llama", EXACT, Some(&wire));
    assert!(wire.is_parted() && wire.rounds() == 0, "the one that could has given its end up");
    assert_eq!(joined, apart);
    assert_eq!(joined, shared("llama", EXACT, None), "a machine without NCCL");
    let some = on_ranks(2, |team| {
        let wire = (team.rank() == 0).then(Arc::default);
        run(share(host::wired(EXACT, wire.as_ref()), &team, "llama").as_mut())
    });
    assert_eq!(joined, some, "a rank without NCCL");
}

#[test]
fn columns_of_ranks_of_several_widths_are_put_side_by_side() {
    const WIDTHS: [usize; 3] = [3, 1, 2];
    const ROWS: usize = 5;
    let wire = Arc::new(Wire::default());
    let value = |rank: usize, row: usize, col: usize| Numbers((rank * 100 + row * 10 + col) as u64).value();
    let got = on_ranks(3, |team| {
        let (rank, backend) = (team.rank(), host::wired(EXACT, Some(&wire)));
        let peers: Arc<dyn engine::backend::Peers> = team;
        backend.join(&peers);
        let width = WIDTHS[rank];
        let mine = (0..ROWS * width).map(|at| value(rank, at / width, at % width)).collect();
        let mut columns = backend.upload(ROWS, width, mine);
        assert!(backend.gather_over_ranks(&mut columns, &WIDTHS));
        let mut sums = backend.upload(ROWS, 2, (0..ROWS * 2).map(|at| value(rank, at / 2, at % 2)).collect());
        assert!(backend.sum_over_ranks(&mut sums));
        (backend.rows(&columns), backend.rows(&sums))
    });
    let row = |row| (0..3).flat_map(move |rank| (0..WIDTHS[rank]).map(move |col| value(rank, row, col))).collect();
    let columns: Vec<Vec<f32>> = (0..ROWS).map(row).collect();
    let sum = |row, col| (0..3).fold(0.0, |sum, rank| sum + value(rank, row, col));
    let sums: Vec<Vec<f32>> = (0..ROWS).map(|row| vec![sum(row, 0), sum(row, 1)]).collect();
    assert!(got.iter().all(|ranks| *ranks == (columns.clone(), sums.clone())), "{got:?}");
}

/// A rank's device that computes nothing, joined with the others'.
fn stuck_share(knobs: Arc<Knobs>, team: &Arc<Team>) -> Box<dyn Model> {
    let backend = CudaBackend::new(StuckDriver(knobs), 64 << 20, EXACT).unwrap();
    let mut model = share(backend, team, "qwen3-tied-bf16");
    model.terms(&StepTerms { allowed: Some(ALLOWED), ..StepTerms::default() });
    model
}

fn stuck(model: &mut dyn Model) -> engine::stuck::Stuck {
    match model.forward(&StepBatch::of(vec![seq(&[1], 0, 0)])) {
        Err(ModelError::Stuck(stuck)) => stuck,
        other => panic!("not stuck: {other:?}"),
    }
}

/// What two ranks say of the second one's device, that hangs: the first comes to the second collective, which never ends. The rank that is
/// `patient` has far more time than the other.
fn said_of_a_device_that_hangs(patient: usize) -> Vec<engine::stuck::Stuck> {
    let wire = Arc::new(Wire::default());
    let said = on_ranks(2, |team| {
        let hangs = team.rank() == 1;
        let collectives_max = (!hangs).then(|| AtomicUsize::new(1));
        let knobs = Arc::new(Knobs { wire: Some(wire.clone()), collectives_max, ..Knobs::default() });
        let mut model = stuck_share(knobs.clone(), &team);
        if team.rank() == patient {
            model.terms(&StepTerms { allowed: Some(PATIENCE), ..StepTerms::default() });
        }
        team.agree(1, 7).unwrap();
        knobs.stuck.store(hangs, Relaxed);
        stuck(model.as_mut())
    });
    assert!(wire.is_parted(), "what waits in the link ends");
    said
}

/// Whose time is up first tells the other.
#[test]
fn a_device_that_does_not_come_to_a_collective_is_named_by_those_that_wait_for_it() {
    let text = "rank 1 has a device that has not come to collective 2 of the step; rank 0 waited";
    let silent = StuckKind::RankSilent { ranks: vec![1] };
    let said = said_of_a_device_that_hangs(1);
    assert_eq!((&said[0].kind, &said[1].kind), (&silent, &silent));
    assert!(said[0].text.starts_with(text), "{}", said[0].text);
    assert!(said[1].text.starts_with(&format!("rank 0 gave up: {text}")), "{}", said[1].text);
    let said = said_of_a_device_that_hangs(0);
    assert_eq!((&said[0].kind, &said[1].kind), (&silent, &StuckKind::DeviceWait));
    assert!(said[0].text.starts_with("rank 1 gave up: "), "{}", said[0].text);
}

#[test]
fn a_rank_that_ends_and_a_link_that_fails_end_the_step_of_the_others_before_its_time() {
    let forever = StepTerms { allowed: Some(PATIENCE), ..StepTerms::default() };
    let knobs = |wire: &Arc<Wire>| {
        let collectives_max = Some(AtomicUsize::new(1));
        Arc::new(Knobs { wire: Some(wire.clone()), collectives_max, ..Knobs::default() })
    };
    let wire = Arc::new(Wire::default());
    let said = on_ranks(2, |team| {
        let mut model = stuck_share(knobs(&wire), &team);
        model.terms(&forever);
        if team.rank() == 1 {
            let kind = StuckKind::Panic;
            return team.fail(Stuck { kind, text: "it fell over".into(), waited: Duration::ZERO });
        }
        stuck(model.as_mut())
    });
    assert_eq!(said[0].kind, StuckKind::RankSilent { ranks: vec![1] });
    assert!(said[0].text.contains("rank 1 gave up: it fell over"), "{}", said[0].text);
    let wire = Arc::new(Wire::default());
    let said = on_ranks(2, |team| {
        let mut model = stuck_share(knobs(&wire), &team);
        model.terms(&forever);
        if team.rank() == 1 {
            // as NCCL tells the other ranks of one that aborted
            Wire::link(Some(&wire), &Wire::name(Some(&wire)).unwrap(), 0, 2).unwrap().part();
            return None;
        }
        Some(stuck(model.as_mut()))
    });
    let stuck = said[0].as_ref().unwrap();
    assert!(stuck.text.contains("a collective of NCCL: a rank gave up"), "{}", stuck.text);
}

/// A collective that another rank has left may end, and with anything: NVIDIA's kernels that are aborted still tell their peers to go on.
#[test]
fn what_was_brought_does_not_count_where_a_rank_left_the_link_meanwhile() {
    let (wire, stepped, left) = (Arc::new(Wire::default()), AtomicUsize::new(0), AtomicUsize::new(0));
    let said = on_ranks(2, |team| {
        // every event comes
        let knobs = Arc::new(Knobs { wire: Some(wire.clone()), ..Knobs::default() });
        let mut model = stuck_share(knobs, &team);
        assert!(model.forward(&StepBatch::of(vec![seq(&[1], 0, 0)])).is_ok());
        meet(&stepped, 2);
        if team.rank() == 1 {
            let (kind, text) = (StuckKind::DeviceWait, "its event did not come".to_owned());
            team.fail(Stuck { kind, text, waited: Duration::ZERO });
            meet(&left, 2);
            return None;
        }
        meet(&left, 2);
        Some(stuck(model.as_mut()))
    });
    let stuck = said[0].as_ref().unwrap();
    assert_eq!(stuck.kind, StuckKind::RankSilent { ranks: vec![1] });
    assert_eq!(stuck.text, "rank 1 gave up: its event did not come");
}

/// Steps of one shape again and again, which programs run from some step on, by both ways.
#[test]
fn steps_by_programs_have_the_bits_of_eager_ones_by_either_way() {
    let logits = |wire: Option<Arc<Wire>>, calls: bool| {
        on_ranks(2, |team| {
            let (backend, folder) = (host::wired(EXACT, wire.as_ref()), folder("qwen3-tied-bf16"));
            let mut model = load_share_on(backend, &team, &folder, &eager(calls), &mut |_, _| {}).unwrap();
            model.allocate_kv(shape()).unwrap();
            let steps = (0..12).map(|pos| StepBatch::of(vec![seq(&[3 + pos as u32], pos, 3), seq(&[9], pos, 6)]));
            let rows = steps.map(|step| model.forward(&step).unwrap().rows.concat().concat());
            rows.collect::<Vec<_>>().concat()
        })
    };
    let eager = logits(None, true);
    assert!(eager[0] == eager[1]);
    assert!(logits(None, false) == eager, "through the machine's memory");
    assert!(logits(Some(Arc::default()), false) == eager, "joined");
}

/// What S1 did: rows of all steps, the steps that a program of another shape was refused for, and why the rank gave up.
type Padded = (Vec<f32>, u64, Option<Stuck>);

/// Steps of a token of each of 15 requests on two ranks that are not joined, of which the second may look for programs of rounded-up shapes.
fn padded(fault: bool, allowed: Option<Duration>, steps: usize) -> Vec<Padded> {
    const REQUESTS: u32 = 15;
    let specs: Vec<FaultSpec> = fault.then(|| "padded-graph".parse().unwrap()).into_iter().collect();
    let others_done = AtomicUsize::new(0);
    on_ranks(2, |team| {
        let faults = Faults::of_rank(specs.clone(), team.rank());
        faults.arm(1);
        let (backend, options) = (host::wired(EXACT, None), LoadOptions { faults, ..LoadOptions::default() });
        let mut model = load_share_on(backend, &team, &folder("llama"), &options, &mut |_, _| {}).unwrap();
        model.allocate_kv(KvShape { num_blocks: REQUESTS as usize, block_size: 16 }).unwrap();
        team.allow(allowed);
        model.terms(&StepTerms { allowed, ..StepTerms::default() });
        let seq = |block, start_pos| SeqInput {
            tokens: vec![block],
            start_pos,
            block_table: vec![block],
            logits: LogitsWanted::Last,
        };
        let batches = (0..steps).map(|pos| StepBatch::of((0..REQUESTS).map(|block| seq(block, pos)).collect()));
        // of a rank that gave up nothing counts
        let rows: Vec<_> = batches.filter_map(|batch| Some(model.forward(&batch).ok()?.rows)).collect();
        if team.rank() == 1 {
            others_done.store(1, Relaxed);
        } else if allowed.is_none() {
            // one that is merely behind still looks at what its peers say, and so must come to its end before this is said
            let (since, patience) = (Instant::now(), if fault { FOR_EVER } else { PATIENCE });
            while others_done.load(Relaxed) == 0 && since.elapsed() < patience {
                std::thread::yield_now();
            }
            team.fail(Stuck { kind: StuckKind::Loop, text: "seen".to_owned(), waited: Duration::ZERO });
        }
        (rows.concat().concat().concat(), model.programs().unwrap().refused.load(Relaxed), team.fault())
    })
}

#[test]
fn s1_with_guards_a_rank_whose_device_would_run_a_larger_program_refuses_it() {
    let (well, struck) = (padded(false, Some(PATIENCE), 4), padded(true, Some(PATIENCE), 4));
    assert_eq!(struck.iter().map(|(_, refused, _)| *refused).collect::<Vec<_>>(), [0, 4]);
    for ((rows, refused, _), (struck, _, fault)) in well.iter().zip(&struck) {
        assert!(!rows.is_empty() && bits(rows) == bits(struck), "the same numbers");
        assert_eq!((*refused, fault), (0, &None));
    }
}

#[test]
fn s1_without_guards_a_rank_waits_for_rows_that_no_other_ranks_device_made() {
    let words =
        |ranks: Vec<Padded>| ranks.into_iter().map(|(.., fault)| fault.unwrap_or_else(none).text).collect::<Vec<_>>();
    assert_eq!(words(padded(true, None, 1)), ["seen", "rank 0 gave up: seen"]);
    assert_eq!(words(padded(false, None, 1)), ["seen", "none"], "and without the fault it does not");
}

fn none() -> Stuck {
    Stuck { kind: StuckKind::Loop, text: "none".to_owned(), waited: Duration::ZERO }
}

/// NCCL itself joins a device with nobody else: its interface, on a machine that has it.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a GPU: make test-gpu"]
fn nccl_brings_what_it_was_given() {
    on_ranks(1, |team| {
        let backend = crate::on_device(EXACT);
        let peers: Arc<dyn engine::backend::Peers> = team;
        backend.join(&peers);
        let values: Vec<f32> = (0..1000).map(|at| at as f32).collect();
        let mut x = backend.upload(10, 100, values.clone());
        assert!(backend.sum_over_ranks(&mut x), "there is no NCCL, or it did not join");
        assert_eq!(backend.download(x), values);
    });
}
