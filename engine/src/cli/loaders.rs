//! How the engine thread comes to its model: alone, or with worker ranks that load their shares at the same time.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::EngineArgs;
use super::device::device_choice;
use crate::codec::HfCodec;
use crate::core::{CoreConfig, LoadFailure, Loaded, Loader};
use crate::fault::Faults;
use crate::model::{LoadOptions, LoadProgress, Model, load_model, load_model_with};
use crate::ranks::{Fleet, LOAD_SILENCE_MAX, LeaderModel};
use crate::speculation::SpeculationSpec;
use crate::start::CacheOptions;

/// A loader for a model on disk, alone or with worker ranks, which it starts, and for that of a draft model.
pub(super) fn loader(args: &EngineArgs, fleet: &Fleet, config: &CoreConfig) -> Loader {
    let (dir, speculation) = (args.model.clone(), args.speculative.clone());
    let cache = args.cache_dir.clone().map(|dir| CacheOptions {
        dir,
        stage: config.stage.clone(),
        faults: Faults::new(args.fault.clone()),
        guards: config.guards,
        fleet: Some(fleet.clone()),
    });
    let (eager, device) = (args.enforce_eager, device_choice(args));
    let options = LoadOptions { cache, eager, device, head: wants_head(&speculation), ..LoadOptions::default() };
    if args.tensor_parallel == 1 {
        return alone(dir, options, speculation, HfCodec::sandboxed);
    }
    let (ranks, fleet, guards) = (args.tensor_parallel, fleet.clone(), config.guards);
    Box::new(move |progress| {
        let codec = Arc::new(HfCodec::sandboxed(&dir)?);
        let model = load_shared((&dir, options), ranks, (&fleet, guards), progress)?;
        Ok(Loaded { model, codec, draft: load_draft(speculation, progress)? })
    })
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
        Ok(Loaded { model, codec, draft: load_draft(speculation, progress)? })
    })
}

/// Starts the workers and loads this rank's share while they load theirs. Progress counts all ranks.
fn load_shared(
    (dir, options): (&Path, LoadOptions),
    ranks: u32,
    (fleet, guards): (&Fleet, bool),
    progress: LoadProgress<'_>,
) -> Result<Box<dyn Model>, LoadFailure> {
    let team = fleet.start(ranks as usize)?;
    let options = LoadOptions { threads: Some(threads_of_rank(ranks)), team: Some(team.clone()), ..options };
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

/// A draft model is small: it is not divided among ranks.
fn load_draft(
    speculation: Option<SpeculationSpec>,
    progress: LoadProgress<'_>,
) -> Result<Option<Box<dyn Model>>, LoadFailure> {
    match speculation {
        Some(SpeculationSpec::Draft(dir)) => Ok(Some(load_model(&dir, progress)?)),
        _ => Ok(None),
    }
}

pub(super) fn threads_of_rank(ranks: u32) -> usize {
    let all = std::thread::available_parallelism().map_or(1, |n| n.get().min(16));
    (all / ranks.max(1) as usize).max(1)
}
