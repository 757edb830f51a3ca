//! The decoder of the Llama family, once for all of its members, over any backend: all tokens of all sequences of a
//! step go through each weight in one multiplication; only attention looks at one sequence at a time.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::backend::{Backend, HeadShape, KvSize, StepStart};
use crate::fault::Faults;
use crate::programs::{Buffer, ProgramCounts, Programs, Sizes, Workspace};

use super::batch;
use super::config::DecoderConfig;
use super::frame::StepFrame;
use super::head::{Head, States};
use super::rope::Rope;
use super::routing;
use super::{KvShape, Model, ModelError, ModelInfo, Pass, Pulse, StepBatch, StepLogits, StepTerms, Threads};

/// A weight matrix (`outputs × inputs`) with its bias, if the model has one.
pub(super) struct Linear<B: Backend> {
    pub weight: B::Weight,
    pub bias: Option<B::Matrix>,
}

/// One transformer block. Names follow the tensors: `input_layernorm`, `self_attn.q_proj`, …
pub(super) struct Layer<B: Backend> {
    pub input_norm: B::Matrix,
    pub q: Linear<B>,
    pub k: Linear<B>,
    pub v: Linear<B>,
    pub o: Linear<B>,
    /// RMSNorm of each head of Q and of K (Qwen3).
    pub qk_norm: Option<(B::Matrix, B::Matrix)>,
    pub post_norm: B::Matrix,
    pub feed: FeedForward<B>,
}

/// What follows attention.
pub(super) enum FeedForward<B: Backend> {
    Dense(Mlp<B>),
    Experts(Mixture<B>),
}

/// `down(silu(gate) × up)`.
pub(super) struct Mlp<B: Backend> {
    pub gate: Linear<B>,
    pub up: Linear<B>,
    pub down: Linear<B>,
}

/// A router and the experts it chooses from.
pub(super) struct Mixture<B: Backend> {
    pub router: Linear<B>,
    pub experts: Vec<Mlp<B>>,
    pub per_token: usize,
    pub normalised: bool,
}

/// All weights.
pub(super) struct DecoderWeights<B: Backend> {
    pub embed: B::Weight,
    pub layers: Vec<Layer<B>>,
    pub norm: B::Matrix,
    /// `None`: tied, the embedding is used.
    pub lm_head: Option<B::Weight>,
}

/// The paged cache.
pub(super) struct Cache<B: Backend> {
    pub shape: KvShape,
    /// Of all blocks of the model, and of its head, which comes last.
    pub kv: B::Kv,
    /// For the head, where there is one.
    pub states: Option<States>,
}

/// A loaded decoder and its KV cache.
pub(super) struct Decoder<B: Backend> {
    pub(super) backend: B,
    pub(super) config: DecoderConfig,
    info: ModelInfo,
    pub(super) weights: DecoderWeights<B>,
    rope: Rope,
    /// Guesses further ahead.
    head: Option<Head<B>>,
    cache: Option<Cache<B>>,
    pub(super) pulse: Pulse,
    /// How long a step's device may be silent.
    allowed: Option<Duration>,
    /// `None`: every step runs eagerly.
    programs: Option<Programs>,
    /// What programs work in.
    pub(super) workspace: Workspace<B>,
    /// What eager multiplications work in.
    scratch: Cell<B::Scratch>,
}

impl<B: Backend + 'static> Decoder<B> {
    pub fn new(backend: B, config: DecoderConfig, info: ModelInfo, weights: DecoderWeights<B>) -> Self {
        let rope = Rope::new(config.head_dim, config.rope_theta, config.rope_scaling).divided(&config.rope_factors);
        Self {
            backend,
            config,
            info,
            weights,
            rope,
            head: None,
            cache: None,
            pulse: Pulse::default(),
            allowed: None,
            programs: None,
            workspace: Workspace::default(),
            scratch: Cell::default(),
        }
    }

    /// The same, with a head.
    pub fn with_head(self, head: Option<Head<B>>) -> Self {
        Self { head, ..self }
    }

    /// The same, with programs for the shapes of steps that come again (E2).
    pub fn with_programs(mut self) -> Self {
        // which experts run depends on values: their steps have no shape
        let dense = self.weights.layers.iter().all(|layer| matches!(layer.feed, FeedForward::Dense(_)));
        let DecoderConfig { layers, hidden, intermediate, vocab, .. } = self.config;
        let sizes = Sizes { layers, hidden, intermediate, vocab, heads: self.head_shape() };
        let waits = self.backend.waits();
        self.programs = dense.then(|| Programs::new(sizes)).map(|all| if waits { all.on_device() } else { all });
        self
    }

    /// The same, whose programs are struck by faults.
    pub fn struck_by(self, faults: &Faults) -> Self {
        Self { programs: self.programs.map(|programs| programs.struck_by(faults.clone())), ..self }
    }

    pub(super) fn head_shape(&self) -> HeadShape {
        let DecoderConfig { heads, kv_heads, head_dim, .. } = self.config;
        HeadShape { heads, kv_heads, head_dim }
    }

    /// Of all layers, and of the head's.
    fn kv_size(&self, KvShape { num_blocks, block_size }: KvShape) -> KvSize {
        KvSize { layers: self.config.layers + usize::from(self.head.is_some()), num_blocks, block_size }
    }

    /// Hidden states of the step's tokens after the last block; K and V are written on the way.
    fn run_layers(&self, kv: &mut B::Kv, batch: &StepBatch, frame: &StepFrame<'_, B::Matrix>) -> B::Matrix {
        let tokens: Vec<u32> = batch.seqs.iter().flat_map(|seq| seq.tokens.iter().copied()).collect();
        let mut x = self.backend.embed(&self.weights.embed, &tokens);
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.layer((kv, index), layer, &mut x, frame);
        }
        x
    }

    /// One block, over the stream; its K and V are written on the way, as those of block `index`.
    pub(super) fn layer(
        &self,
        (kv, index): (&mut B::Kv, usize),
        layer: &Layer<B>,
        x: &mut B::Matrix,
        frame: &StepFrame<'_, B::Matrix>,
    ) {
        let attended = self.attention(kv, (index, layer), x, frame);
        self.backend.add(x, &attended);
        let fed = self.feed_forward(layer, x);
        self.backend.add(x, &fed);
        self.backend.end_layer(&self.pulse);
    }

    fn attention(
        &self,
        kv: &mut B::Kv,
        (index, layer): (usize, &Layer<B>),
        x: &B::Matrix,
        frame: &StepFrame<'_, B::Matrix>,
    ) -> B::Matrix {
        let b = &self.backend;
        let x = b.rms_norm(x, &layer.input_norm, self.config.norm_eps);
        let (mut q, mut k) = (self.linear((&x, false), &layer.q), self.linear((&x, true), &layer.k));
        let v = self.linear((&x, true), &layer.v);
        // written before they are read: a row attends to itself and to the rows of its chunk before it
        b.place_qkv((&mut q, &mut k, &v), self.qk_norms(layer), (&frame.cos, &frame.sin), (kv, index), &frame.slots);
        let mixed = b.attention(&q, (kv, index), &frame.seqs, self.head_shape(), self.window(index));
        self.linear((&mixed, false), &layer.o)
    }

    /// What block `index` sees; the head's, which has none of its own, sees all.
    fn window(&self, index: usize) -> Option<usize> {
        self.config.windows.get(index).copied().flatten()
    }

    /// Norms of the heads of Q and K, with their epsilon.
    pub(super) fn qk_norms<'a>(&self, layer: &'a Layer<B>) -> Option<(&'a B::Matrix, &'a B::Matrix, f32)> {
        layer.qk_norm.as_ref().map(|(q, k)| (q, k, self.config.norm_eps))
    }

    fn feed_forward(&self, layer: &Layer<B>, x: &B::Matrix) -> B::Matrix {
        let x = self.backend.rms_norm(x, &layer.post_norm, self.config.norm_eps);
        match &layer.feed {
            FeedForward::Dense(mlp) => self.mlp(mlp, &x),
            FeedForward::Experts(mixture) => self.mixture(mixture, &x),
        }
    }

    fn mlp(&self, mlp: &Mlp<B>, x: &B::Matrix) -> B::Matrix {
        let mut gate = self.linear((x, false), &mlp.gate);
        self.backend.silu_mul(&mut gate, &self.linear((x, true), &mlp.up));
        self.linear((&gate, false), &mlp.down)
    }

    /// Each expert sees the rows that chose it; a row adds its experts' answers in the order of their numbers, whoever else
    /// chose them (EP4).
    fn mixture(&self, mixture: &Mixture<B>, x: &B::Matrix) -> B::Matrix {
        let b = &self.backend;
        let scores = b.download(self.linear((x, false), &mixture.router));
        let experts = mixture.experts.len();
        let mut chosen: Vec<(Vec<usize>, Vec<f32>)> = vec![Default::default(); experts];
        let rows = scores.len() / experts.max(1);
        for (row, scores) in scores.chunks_exact(experts.max(1)).enumerate() {
            for (expert, share) in routing::choose(scores, mixture.per_token, mixture.normalised) {
                chosen[expert].0.push(row);
                chosen[expert].1.push(share);
            }
        }
        let hidden = self.config.hidden;
        let mut out = b.upload(rows, hidden, vec![0.0; rows * hidden]);
        for (expert, (rows, shares)) in mixture.experts.iter().zip(&chosen).filter(|(_, (rows, _))| !rows.is_empty()) {
            b.scatter_add(&mut out, rows, &self.mlp(expert, &b.gather_rows(x, rows)), shares);
        }
        out
    }

    /// `same`: the input of the call before.
    pub(super) fn linear(&self, (x, same): (&B::Matrix, bool), linear: &Linear<B>) -> B::Matrix {
        self.product((x, same), &linear.weight, linear.bias.as_ref())
    }

    fn product(&self, input: (&B::Matrix, bool), weight: &B::Weight, bias: Option<&B::Matrix>) -> B::Matrix {
        let (mut out, mut scratch) = (B::Matrix::default(), self.scratch.take());
        self.backend.linear_into(input, weight, bias, (&mut out, &mut scratch));
        self.scratch.set(scratch);
        out
    }

    /// A step call by call, each with matrices of its own.
    fn eager(&self, cache: &mut Cache<B>, batch: &StepBatch, frame: &StepFrame<'_, B::Matrix>) -> StepLogits {
        let x = self.run_layers(&mut cache.kv, batch, frame);
        self.keep_states(cache, &x, frame);
        self.logits(frame, &x)
    }

    /// What a step gave, if the device is done and well.
    fn ended(&self, logits: StepLogits) -> Result<StepLogits, ModelError> {
        self.backend.end_step()?;
        Ok(logits)
    }

    fn frame<'a>(&self, batch: &'a StepBatch, shape: KvShape) -> StepFrame<'a, B::Matrix> {
        let positions = batch::positions(batch);
        let (cos, sin) = self.rope.angles(&positions);
        let half = self.config.head_dim / 2;
        StepFrame {
            seqs: batch::attention_seqs(batch),
            slots: batch::slots(batch, shape.block_size),
            cos: self.backend.upload(positions.len(), half, cos),
            sin: self.backend.upload(positions.len(), half, sin),
            wanted: batch::rows_wanted(batch),
            draws: batch::draws(batch),
        }
    }

    /// Logits of the rows that somebody wants; the vocabulary is multiplied for those alone.
    fn logits(&self, frame: &StepFrame<'_, B::Matrix>, x: &B::Matrix) -> StepLogits {
        let rows = frame.rows_wanted();
        if rows.is_empty() {
            return frame.answer(Vec::new());
        }
        let x = self.backend.gather_rows(x, &rows);
        let x = self.backend.rms_norm(&x, &self.weights.norm, self.config.norm_eps);
        self.told(frame, &self.head_product(&x))
    }

    /// The rows of logits that are wanted, or the tokens that are drawn of them.
    pub(super) fn told(&self, frame: &StepFrame<'_, B::Matrix>, logits: &B::Matrix) -> StepLogits {
        let drawn = (!frame.draws.is_empty()).then(|| self.backend.draw(logits, &frame.draws)).flatten();
        drawn.map_or_else(|| frame.answer(self.backend.rows(logits)), |tokens| frame.tokens(tokens))
    }

    /// Normed rows, multiplied with the vocabulary.
    pub(super) fn head_product(&self, x: &B::Matrix) -> B::Matrix {
        self.product((x, false), self.weights.lm_head.as_ref().unwrap_or(&self.weights.embed), None)
    }

    /// Runs a batch that was found good.
    fn run(&mut self, cache: &mut Cache<B>, batch: &StepBatch) -> Result<StepLogits, ModelError> {
        let programs = self.programs.as_mut().filter(|_| batch.pass == Pass::Model);
        let program = programs.and_then(|programs| programs.take(batch));
        let shape_number = program.as_ref().map_or(0, |program| program.key.number());
        self.backend.begin_step(&StepStart { shape: shape_number, allowed: self.allowed });
        let frame = self.frame(batch, cache.shape);
        let Some(program) = program else {
            let head = self.head.as_ref().filter(|_| batch.pass == Pass::Head);
            let logits = match head {
                Some(head) => self.guess(head, cache, (batch, &frame)),
                None => self.eager(cache, batch, &frame),
            };
            return self.ended(logits);
        };
        // a step that goes wrong loses it: the next one begins with an empty one
        let mut space = std::mem::take(&mut self.workspace);
        let logits = self.replay((&program, &mut space), &mut cache.kv, (batch, &frame));
        self.keep_states(cache, space.buffer(Buffer::Stream), &frame);
        let logits = self.ended(logits)?;
        self.workspace = space;
        if let Some(programs) = &mut self.programs {
            programs.put_back(program);
            programs.counts().graphs.store(self.backend.graphs_run(), Relaxed);
        }
        Ok(logits)
    }
}

impl<B: Backend + 'static> Model for Decoder<B> {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn pulse(&self) -> Option<Pulse> {
        Some(self.pulse.clone())
    }

    fn programs(&self) -> Option<Arc<ProgramCounts>> {
        self.programs.as_ref().map(Programs::counts)
    }

    fn has_head(&self) -> bool {
        self.head.is_some()
    }

    fn draws(&self) -> bool {
        self.backend.draws()
    }

    fn threads(&self) -> Threads {
        let helpers = self.backend.helpers();
        Arc::new(move || helpers.iter().map(|tid| tid.load(Relaxed)).collect())
    }

    fn waits(&self) -> bool {
        self.backend.waits()
    }

    fn hang(&mut self) -> bool {
        self.backend.hang()
    }

    fn terms(&mut self, terms: &StepTerms) {
        self.allowed = terms.allowed;
        self.programs.iter_mut().for_each(|programs| programs.guard(terms.allowed.is_some()));
    }

    fn kv_bytes(&self, shape: KvShape) -> Option<u64> {
        let of_layers = self.backend.kv_bytes(self.kv_size(shape), self.head_shape())?;
        Some(of_layers.saturating_add(self.head.as_ref().map_or(0, |_| States::bytes(shape, self.config.hidden))))
    }

    fn allocate_kv(&mut self, shape: KvShape) -> Result<(), ModelError> {
        batch::check_shape(shape)?;
        let kv = self.backend.kv_cache(self.kv_size(shape), self.head_shape()).map_err(ModelError::of_cache)?;
        let states = self.head.as_ref().map(|_| States::new(shape, self.config.hidden)).transpose()?;
        self.cache = Some(Cache { shape, kv, states });
        Ok(())
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<StepLogits, ModelError> {
        if batch.seqs.is_empty() {
            return Ok(StepLogits::default());
        }
        // taken out for the step, so that the weights can be borrowed beside it
        let Some(mut cache) = self.cache.take() else {
            return Err(ModelError::BadBatch("the KV cache was not allocated before the first step".to_owned()));
        };
        let result = catch_unwind(AssertUnwindSafe(|| -> Result<StepLogits, ModelError> {
            batch::check(batch, cache.shape, &self.info)?;
            if batch.pass == Pass::Head && self.head.is_none() {
                return Err(ModelError::BadBatch("the model has no head that guesses".to_owned()));
            }
            self.run(&mut cache, batch)
        }));
        // put back even then: the other sequences go on from it (EP5)
        self.cache = Some(cache);
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }
}
