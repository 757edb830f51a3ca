//! How the engine thread comes to its model: alone, or with worker ranks that load their shares at the same time.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::EngineArgs;
use crate::backend::cuda::open::DeviceChoice;
use crate::codec::HfCodec;
use crate::core::{CoreConfig, LoadFailure, Loaded, Loader};
use crate::fault::Faults;
use crate::model::{LoadOptions, LoadProgress, Model, load_model_with, longest_sequence};
use crate::ranks::{Fleet, LOAD_SILENCE_MAX, LeaderModel, PlanLimits, RANK_THREADS_MAX};
use crate::scheduler::plan::CHUNK_TOKENS_MIN;
use crate::speculation::SpeculationSpec;
use crate::start::CacheOptions;

/// A loader for a model on disk, alone or with worker ranks, which it starts, and for that of a draft model.
pub(super) fn loader(args: &EngineArgs, device: Option<DeviceChoice>, fleet: &Fleet, config: &CoreConfig) -> Loader {
    let (dir, speculation) = (args.model.clone(), args.speculative.clone());
    let options = LoadOptions { device, ..options(args, fleet, config) };
    let (ranks, fleet, config) = (args.tensor_parallel, fleet.clone(), config.clone());
    Box::new(move |progress| {
        // what cannot be is told before minutes of loading
        let longest = config.seq_len_of(longest_sequence(&dir)?)?;
        if ranks == 1 {
            return alone(dir, options, speculation, HfCodec::sandboxed)(progress);
        }
        let codec = Arc::new(HfCodec::sandboxed(&dir)?);
        let draft = of_draft(&options);
        let limits = plan_limits(&config, longest);
        let model = load_shared((&dir, options), (ranks, &fleet), (limits, config.guards), progress)?;
        Ok(Loaded { model, codec, draft: load_draft(speculation, &draft, progress)? })
    })
}

/// How the first rank computes the model, but for its device.
fn options(args: &EngineArgs, fleet: &Fleet, config: &CoreConfig) -> LoadOptions {
    let cache = args.cache_dir.clone().map(|dir| CacheOptions {
        dir,
        stage: config.stage.clone(),
        faults: Faults::new(args.fault.clone()),
        guards: config.guards,
        fleet: Some(fleet.clone()),
    });
    // alone it may have all of the processor
    let threads = (args.tensor_parallel > 1).then(|| threads_of_rank(args.tensor_parallel));
    let (eager, head) = (args.enforce_eager, wants_head(&args.speculative));
    LoadOptions { cache, threads, eager, head, ..LoadOptions::default() }
}

/// How a draft model is computed beside a model of these options: small, it is not divided among ranks, has no head of its own and stays on
/// the processor; but it may take no thread from the other ranks.
fn of_draft(options: &LoadOptions) -> LoadOptions {
    LoadOptions { team: None, device: None, head: false, ..options.clone() }
}

/// A loader for a Hugging Face folder, and for that of a draft model; chats are rendered in this process.
pub fn folder_loader(dir: &Path, speculation: Option<SpeculationSpec>) -> Loader {
    let options = LoadOptions { head: wants_head(&speculation), ..LoadOptions::default() };
    alone(dir.to_owned(), options, speculation, HfCodec::from_dir)
}

fn wants_head(speculation: &Option<SpeculationSpec>) -> bool {
    *speculation == Some(SpeculationSpec::Mtp)
}

fn alone(
    dir: PathBuf,
    options: LoadOptions,
    speculation: Option<SpeculationSpec>,
    codec: fn(&Path) -> Result<HfCodec, LoadFailure>,
) -> Loader {
    Box::new(move |progress| {
        let codec = Arc::new(codec(&dir)?);
        let model = load_model_with(&dir, &options, progress)?;
        Ok(Loaded { model, codec, draft: load_draft(speculation, &of_draft(&options), progress)? })
    })
}

/// Starts the workers and loads this rank's share while they load theirs. Progress counts all ranks.
fn load_shared(
    (dir, options): (&Path, LoadOptions),
    (ranks, fleet): (u32, &Fleet),
    (limits, guards): (PlanLimits, bool),
    progress: LoadProgress<'_>,
) -> Result<Box<dyn Model>, LoadFailure> {
    let team = fleet.start(ranks as usize, limits)?;
    let options = LoadOptions { team: Some(team.clone()), ..options };
    let mut mine = |done, total| {
        team.loading(done, total);
        progress(done, total);
    };
    let model = load_model_with(dir, &options, &mut mine)?;
    team.loaded();
    // without guards a rank that never comes is waited for, as in the field
    let tend = || if guards { fleet.tend() } else { Ok(()) };
    team.wait_loaded(guards.then_some(LOAD_SILENCE_MAX), progress, &tend)?;
    Ok(Box::new(LeaderModel::new(model, team)))
}

/// What bounds the steps of an engine whose longest sequence is `longest`.
fn plan_limits(config: &CoreConfig, longest: usize) -> PlanLimits {
    let blocks = longest.div_ceil(config.block_size.max(1)).max(1);
    let seqs = config.num_seqs_max.max(1);
    PlanLimits {
        seqs,
        tokens: config.step_tokens_max.max(seqs + CHUNK_TOKENS_MIN),
        blocks_a_seq: config.num_blocks.map_or(blocks, |all| blocks.min(all.max(1))),
    }
}

fn load_draft(
    speculation: Option<SpeculationSpec>,
    options: &LoadOptions,
    progress: LoadProgress<'_>,
) -> Result<Option<Box<dyn Model>>, LoadFailure> {
    match speculation {
        Some(SpeculationSpec::Draft(dir)) => Ok(Some(load_model_with(&dir, options, progress)?)),
        _ => Ok(None),
    }
}

pub(super) fn threads_of_rank(ranks: u32) -> usize {
    let all = std::thread::available_parallelism().map_or(1, |n| n.get().min(RANK_THREADS_MAX));
    (all / ranks.max(1) as usize).max(1)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::Parser;

    use super::*;
    use crate::cli::core_config;
    use crate::core::CoreError;
    use crate::demo_model::{DemoArch, write_demo_model};

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        engine: EngineArgs,
    }

    fn args(words: &[&str]) -> EngineArgs {
        Cli::try_parse_from([&["x"], words].concat()).unwrap().engine
    }

    #[test]
    fn every_step_that_the_limits_allow_can_be_told_to_the_ranks() {
        let config = CoreConfig { num_seqs_max: 256, ..CoreConfig::default() };
        let limits = plan_limits(&config, 131_072);
        assert_eq!(limits, PlanLimits { seqs: 256, tokens: 512, blocks_a_seq: 8192 });
        assert!(limits.bytes() > 8 << 20, "one document, read by 256");
        let config = CoreConfig { num_blocks: Some(2), num_seqs_max: 1000, ..config };
        assert_eq!(plan_limits(&config, 40), PlanLimits { seqs: 1000, tokens: 1016, blocks_a_seq: 2 });
        let dir = tempfile::tempdir().unwrap();
        write_demo_model(&dir.path().join("m"), DemoArch::Llama, 1).unwrap();
        let model = crate::model::load_model(&dir.path().join("m"), &mut |_, _| ()).unwrap();
        assert_eq!(longest_sequence(&dir.path().join("m")).unwrap(), model.info().seq_len_max);
    }

    #[test]
    fn a_length_that_the_model_has_not_is_told_before_its_weights_are_read() {
        let dir = tempfile::tempdir().unwrap();
        write_demo_model(dir.path(), DemoArch::Llama, 1).unwrap();
        std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
        let config = CoreConfig { seq_len_max: Some(9000), ..CoreConfig::default() };
        for ranks in ["1", "2"] {
            let args = args(&["--model", dir.path().to_str().unwrap(), "--tensor-parallel", ranks]);
            let refused = loader(&args, None, &Fleet::default(), &config)(&mut |_, _| ()).err().unwrap();
            let told = refused.downcast_ref::<CoreError>();
            assert!(matches!(told, Some(CoreError::SeqLen { asked: 9000, model: 8192 })), "{refused}");
        }
    }

    #[test]
    fn the_makers_sampling_parameters_hold_unless_nobodys_are_asked_for() {
        let holds = |more: &[&str]| core_config(&args(&[&["--model", "m"], more].concat())).generation_defaults;
        assert!(holds(&[]) && holds(&["--generation-config", "auto"]));
        assert!(!holds(&["--generation-config", "none"]));
    }

    #[test]
    fn a_draft_model_takes_no_thread_from_the_other_ranks() {
        let args = args(&["--model", "m", "--tensor-parallel", "4", "--enforce-eager", "--speculative", "draft=d"]);
        let draft = of_draft(&LoadOptions { head: true, ..options(&args, &Fleet::default(), &CoreConfig::default()) });
        assert_eq!((draft.threads, draft.eager), (Some(threads_of_rank(4)), true));
        assert!(draft.team.is_none() && draft.device.is_none() && !draft.head);
    }

    #[test]
    fn a_draft_model_is_prepared_in_the_cache_too() {
        let dir = tempfile::tempdir().unwrap();
        let place = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        for (seed, name) in [(1, "model"), (2, "draft")] {
            write_demo_model(Path::new(&place(name)), DemoArch::LlamaQ8, seed).unwrap();
            // without a template: this program is none that renders chats
            std::fs::write(Path::new(&place(name)).join("tokenizer_config.json"), "{}").unwrap();
        }
        let draft = format!("draft={}", place("draft"));
        let args = args(&["--model", &place("model"), "--speculative", &draft, "--cache-dir", &place("cache")]);
        let load = loader(&args, None, &Fleet::default(), &CoreConfig::default());
        assert!(load(&mut |_, _| ()).unwrap().draft.is_some());
        let files = std::fs::read_dir(place("cache")).unwrap().map(|file| file.unwrap().path());
        assert_eq!(files.filter(|path| path.extension().is_some_and(|end| end == "pack")).count(), 2);
    }
}
