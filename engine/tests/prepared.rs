//! Weights out of the cache against weights made at load: the same bits, whoever prepared them, whatever is in the cache's files (E5).
#![allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests: a surprise must fail the test")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use engine::demo_model::{DemoArch, write_demo_model};
use engine::fault::Faults;
use engine::model::{KvShape, LoadOptions, LogitsWanted, Model, SeqInput, StepBatch, load_model_with};
use engine::ranks::Team;
use engine::start::{CacheOptions, Stage};

const PATIENCE: Duration = Duration::from_secs(60);

fn cache(dir: &Path) -> CacheOptions {
    let (stage, faults) = (Stage::default(), Faults::default());
    CacheOptions { dir: dir.to_owned(), stage, faults, guards: true, fleet: None }
}

/// Loads the model and runs a prompt and a token; gives all logits, and whether weights were prepared on the way.
fn run(model: &Path, cache: Option<CacheOptions>, team: Option<Arc<Team>>) -> (Vec<f32>, bool) {
    let stage = cache.as_ref().map(|cache| cache.stage.clone()).unwrap_or_default();
    let options = LoadOptions { threads: Some(1), team, cache, ..LoadOptions::default() };
    let mut compiled = false;
    let mut model = load_model_with(model, &options, &mut |_, _| compiled |= stage.is_compiling()).unwrap();
    model.allocate_kv(KvShape { num_blocks: 4, block_size: 16 }).unwrap();
    let seq = |tokens: &[u32], start_pos| SeqInput {
        tokens: tokens.to_vec(),
        start_pos,
        block_table: vec![2],
        logits: LogitsWanted::All,
    };
    let steps = [seq(&[5, 9, 2, 7, 7], 0), seq(&[4], 5)];
    let rows = steps.into_iter().flat_map(|seq| forward(model.as_mut(), seq));
    (rows.collect(), compiled)
}

fn forward(model: &mut dyn Model, seq: SeqInput) -> Vec<f32> {
    model.forward(&StepBatch::of(vec![seq])).unwrap().rows.into_iter().flatten().flatten().collect()
}

fn the_pack(dir: &Path) -> PathBuf {
    let packs = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut packs = packs.filter(|path| path.extension().is_some_and(|end| end == "pack"));
    let first = packs.next().expect("a file of prepared weights");
    assert!(packs.next().is_none(), "one file for all");
    first
}

#[test]
fn prepared_weights_give_the_same_bits_and_are_prepared_once() {
    for name in ["llama-q8_0.gguf", "qwen3-k.gguf"] {
        let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gguf").join(name);
        let dir = tempfile::tempdir().unwrap();
        let (want, _) = run(&model, None, None);
        let first = run(&model, Some(cache(dir.path())), None);
        assert!(first == (want.clone(), true), "{name}: prepared and used");
        let pack = the_pack(dir.path());
        assert!(run(&model, Some(cache(dir.path())), None) == (want.clone(), false), "{name}: from the cache");
        // any damage: the answer stays right, and sooner or later the file is whole again
        let whole = std::fs::read(&pack).unwrap();
        for at in (0..whole.len()).step_by(whole.len() / 7).chain([0, 8, whole.len() - 1]) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x40;
            std::fs::write(&pack, &bytes).unwrap();
            let (logits, _) = run(&model, Some(cache(dir.path())), None);
            assert!(logits == want, "{name}: byte {at}");
        }
        for len in [0, 1, 40, whole.len() / 2] {
            std::fs::write(&pack, &whole[..len]).unwrap();
            assert!(run(&model, Some(cache(dir.path())), None) == (want.clone(), true), "{name}: {len} bytes");
        }
    }
}

#[test]
fn another_model_of_the_same_name_has_prepared_weights_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let (model, store) = (dir.path().join("model"), dir.path().join("cache"));
    let answer = |seed| {
        write_demo_model(&model, DemoArch::LlamaQ8, seed).unwrap();
        (run(&model, None, None).0, run(&model, Some(cache(&store)), None))
    };
    for seed in [1, 2] {
        let (want, (got, compiled)) = answer(seed);
        assert!(got == want && compiled, "seed {seed}");
    }
}

#[test]
fn eight_ranks_share_one_file_that_one_of_them_made() {
    let dir = tempfile::tempdir().unwrap();
    let (model, store) = (dir.path().join("model"), dir.path().join("cache"));
    write_demo_model(&model, DemoArch::LlamaQ8, 3).unwrap();
    let ranks = |cached: bool| -> Vec<Vec<f32>> {
        let (first, file) = Team::create(8).unwrap();
        std::thread::scope(|scope| {
            let others = (1..8).map(|rank| Team::join(&file, rank, 8).unwrap());
            let teams: Vec<_> = std::iter::once(first).chain(others).collect();
            let start = |team: Team| {
                team.allow(Some(PATIENCE));
                let (model, store) = (&model, &store);
                scope.spawn(move || run(model, cached.then(|| cache(store)), Some(Arc::new(team))).0)
            };
            let ranks: Vec<_> = teams.into_iter().map(start).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    };
    let want = ranks(false);
    assert!(ranks(true) == want, "made for all");
    let made = std::fs::metadata(the_pack(&store)).unwrap().modified().unwrap();
    assert!(ranks(true) == want, "from the cache");
    assert_eq!(std::fs::metadata(the_pack(&store)).unwrap().modified().unwrap(), made, "made once");
}
