//! Weights that one rank prepares for all (E5): the cache asks for them, the loader walks over the model as if it loaded it.

use std::cell::Cell;
use std::collections::BTreeSet;

use super::{DecoderConfig, LoadError, LoadProgress, Loader};
use crate::backend::{Backend, Part, WeightShape};
use crate::model::share::Share;
use crate::start::{Cache, CacheOptions, PackFile, PackWriter};
use crate::weights::{RawWeight, WeightsError, WeightsFolder};

/// Where prepared weights come from, or go to.
pub(super) enum Store<'a> {
    None,
    Reads(&'a PackFile),
    /// The loader prepares a share for others, as long as the work is its own, and gives weights of no rows itself.
    Writes(&'a mut PackWriter, &'a Cell<bool>),
}

/// What all ranks need of prepared weights, from the cache or made for it (E5).
pub(super) fn prepared<B: Backend>(
    cache: &CacheOptions,
    config: &DecoderConfig,
    folder: &WeightsFolder,
    (backend, share, tied): (&B, Share, bool),
    progress: LoadProgress<'_>,
) -> Result<Option<PackFile>, LoadError> {
    let Some(preparer) = backend.preparer().filter(|preparer| folder.kinds().any(|kind| preparer.prepares(kind)))
    else {
        return Ok(None);
    };
    let world = share.world;
    let key = format!("{:016x} {} of {world} {config:?}", folder.fingerprint()?, preparer.form());
    let total = folder.len_bytes_where(|_| true) * world as u64;
    let mut prepare = |writer: &mut PackWriter, watch: &mut dyn FnMut(u64, u64) -> bool| {
        let mine = Cell::new(true);
        for rank in 0..world {
            let before = total / world as u64 * rank as u64;
            let mut progress = |done: u64, _| mine.set(watch(before + done, total) && mine.get());
            let (share, store) = (Share { rank, world }, Store::Writes(&mut *writer, &mine));
            let (progress, used) = (&mut progress, BTreeSet::new());
            let mut loader = Loader { folder, backend, config, share, store, progress, done: 0, total, used };
            loader.weights(tied).and_then(|_| loader.head()).map_err(|error| error.to_string())?;
            if !mine.get() {
                return Err("the lease is another's by now".to_owned());
            }
            if writer.is_broken() {
                break;
            }
        }
        Ok(())
    };
    Ok(Cache::new(cache, key, (share.rank, world)).file(&mut prepare, progress)?)
}

impl<B: Backend> Loader<'_, '_, B> {
    /// Prepares a weight for others; one of no rows stands in its place here.
    pub(super) fn prepare(
        &mut self,
        name: &str,
        (rows, cols): (usize, usize),
        wanted: bool,
        part: &Part,
    ) -> Result<B::Weight, WeightsError> {
        let lacks = |store: &Store<'_>| match store {
            // who lost the lease has nothing more to do than to say so
            Store::Writes(writer, mine) => mine.get() && !writer.is_broken() && !writer.has(name, part),
            _ => false,
        };
        if wanted && lacks(&self.store) {
            let raw = self.cut(name, (rows, cols), part)?;
            let (backend, done, total) = (self.backend, self.done, self.total);
            let progress = &mut self.progress;
            let bytes = backend.preparer().and_then(|preparer| preparer.prepare(&raw, &mut || progress(done, total)));
            if let (Store::Writes(writer, mine), Some(bytes)) = (&mut self.store, bytes) {
                let shape = WeightShape { rows: raw.rows, cols: raw.cols, kind: raw.kind };
                writer.add((name, part), shape, &bytes, &mut || {
                    progress(done, total);
                    mine.get()
                });
            }
        }
        Ok(self.backend.weight_part(RawWeight::empty(), part))
    }
}
