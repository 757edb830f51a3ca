//! From a request's grammar to a constraint at its beginning: bounded in time, in stack, in how many at once, and kept for the next
//! request that asks for the same.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use llguidance::api::ParserLimits;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};

use crate::codec::TextCodec;
use crate::grammar::constraint::{Constraint, Start};
use crate::grammar::workers::Workers;
use crate::grammar::{GrammarError, GrammarSpec, vocabulary};
use crate::model::ModelInfo;

/// Grammars that are compiled at the same time; more wait for a place.
const COMPILING_MAX: usize = 4;
/// One compilation, the first mask with it.
const COMPILE_TIME_MAX: Duration = Duration::from_secs(10);
/// Outputs that follow a grammar at the same time: each may hold tens of megabytes.
pub const LIVE_MAX: usize = 128;
/// Compiled grammars that are kept.
const KEPT_MAX: usize = 32;
/// The library recurses over what it compiles; pages of the stack that are not touched cost nothing.
const STACK_BYTES: usize = 64 << 20;
const PLACE_POLL: Duration = Duration::from_millis(2);

/// Compiles the grammars of one engine.
#[derive(Default)]
pub struct Grammars {
    factory: OnceLock<Result<Arc<ParserFactory>, String>>,
    kept: Mutex<VecDeque<(GrammarSpec, Arc<Start>)>>,
    compiling: Arc<AtomicUsize>,
    live: Arc<AtomicUsize>,
    pub(super) workers: Workers,
}

/// A place that is counted; given back when dropped.
#[derive(Debug)]
pub(super) struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(count: &Arc<AtomicUsize>, max: usize) -> Option<Self> {
        let more = |n: usize| (n < max).then_some(n + 1);
        count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| Self(count.clone()))
    }

    fn live(count: &Arc<AtomicUsize>) -> Result<Self, GrammarError> {
        Self::take(count, LIVE_MAX).ok_or(GrammarError::Busy("too many requests follow a grammar"))
    }

    /// One more of a request that follows a grammar.
    pub fn another(&self) -> Result<Self, GrammarError> {
        Self::live(&self.0)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Grammars {
    /// A constraint at its beginning. Takes milliseconds or more: not for the engine thread, nor for one that serves sockets.
    ///
    /// # Errors
    /// [`GrammarError`]: the grammar is bad, or too many are here already.
    pub fn compile(
        &self,
        spec: &GrammarSpec,
        codec: &dyn TextCodec,
        info: &ModelInfo,
    ) -> Result<Constraint, GrammarError> {
        let place = Place::live(&self.live)?;
        let start = match self.kept(spec) {
            Some(start) => start,
            None => self.start(spec, codec, info)?,
        };
        Ok(Constraint::new(start, place, self.workers.clone()))
    }

    fn start(&self, spec: &GrammarSpec, codec: &dyn TextCodec, info: &ModelInfo) -> Result<Arc<Start>, GrammarError> {
        let grammar = spec.grammar()?;
        #[allow(
            clippy::disallowed_methods,
            reason = "made once of the vocabulary, which has an end; who waits is a thread that reads one request"
        )]
        let factory = self.factory.get_or_init(|| factory(codec, info).map(Arc::new));
        let factory = factory.as_ref().map_err(|e| GrammarError::Vocabulary(e.clone()))?.clone();
        let place = self.place_to_compile()?;
        let (tell, told) = sync_channel(1);
        let body = move || {
            let parser = factory.create_parser(grammar);
            let start = Start::new(Matcher::new(parser)).map_err(GrammarError::Invalid);
            // Held until here: a compilation that runs for ever keeps its place, so that there are never many of them.
            drop(place);
            // Who asked may have gone.
            drop(tell.try_send(start));
        };
        let thread = std::thread::Builder::new().name("grammar-compile".into()).stack_size(STACK_BYTES).spawn(body);
        thread.map_err(|_| GrammarError::Busy("no thread could be started for the grammar"))?;
        let start = Arc::new(told.recv_timeout(COMPILE_TIME_MAX).map_err(no_answer)??);
        self.keep(spec, &start);
        Ok(start)
    }

    fn place_to_compile(&self) -> Result<Place, GrammarError> {
        let since = Instant::now();
        loop {
            if let Some(place) = Place::take(&self.compiling, COMPILING_MAX) {
                return Ok(place);
            }
            if since.elapsed() > COMPILE_TIME_MAX {
                return Err(GrammarError::Busy("other grammars are being compiled"));
            }
            std::thread::sleep(PLACE_POLL);
        }
    }

    /// Nobody waits for this lock: who meets another there compiles again.
    fn kept(&self, spec: &GrammarSpec) -> Option<Arc<Start>> {
        let kept = self.kept.try_lock().ok()?;
        kept.iter().find(|(kept, _)| kept == spec).map(|(_, start)| start.clone())
    }

    fn keep(&self, spec: &GrammarSpec, start: &Arc<Start>) {
        let Ok(mut kept) = self.kept.try_lock() else { return };
        kept.push_front((spec.clone(), start.clone()));
        kept.truncate(KEPT_MAX);
    }
}

/// Why a thread that compiles said nothing: it still does, or it panicked.
fn no_answer(error: RecvTimeoutError) -> GrammarError {
    match error {
        RecvTimeoutError::Timeout => GrammarError::TooSlow(COMPILE_TIME_MAX.as_millis()),
        RecvTimeoutError::Disconnected => GrammarError::Died,
    }
}

fn factory(codec: &dyn TextCodec, info: &ModelInfo) -> Result<ParserFactory, String> {
    let env = vocabulary::environment(codec, info)?;
    let slices = llguidance::earley::SlicedBiasComputer::general_slices();
    // no fast-forward: the model says every token itself, so that logprobs and counts stay true
    let mut factory =
        ParserFactory::new(&env, InferenceCapabilities::default(), &slices).map_err(|error| error.to_string())?;
    factory.quiet();
    *factory.limits_mut() = ParserLimits {
        // a state is 1–2 kB: at most about 40 MB a request
        max_lexer_states: 20_000,
        // errors go to clients: without the whole grammar and everything said so far
        verbose_errors: false,
        ..ParserLimits::default()
    };
    Ok(factory)
}

#[test]
fn a_thread_that_panicked_is_not_a_slow_grammar() {
    let (tell, told) = sync_channel::<()>(1);
    let error = || no_answer(told.recv_timeout(Duration::from_millis(1)).unwrap_err());
    assert!(matches!(error(), GrammarError::TooSlow(_)));
    drop(tell);
    assert_eq!(error(), GrammarError::Died);
}
