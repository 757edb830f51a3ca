//! A step by its program: the calls of the eager decoder, in its order, on the buffers that programs share. Every kernel is the one that
//! the eager way calls, so that both give the same bits.

use crate::backend::Backend;
use crate::programs::{Buffer, Call, Matrix, Norm, Program, Workspace};

use super::decoder::{Decoder, FeedForward, Layer};
use super::frame::StepFrame;
use super::{StepBatch, StepLogits};

impl<B: Backend + 'static> Decoder<B> {
    /// Runs a step whose shape is the program's, or over which it was laid.
    pub(super) fn replay(
        &self,
        (program, space): (&Program, &mut Workspace<B>),
        kv: &mut B::Kv,
        (batch, frame): (&StepBatch, &StepFrame<'_, B::Matrix>),
    ) -> StepLogits {
        for call in &program.calls {
            self.call(*call, (program, space), kv, (batch, frame));
        }
        let nobody = frame.wanted.iter().all(|rows| rows.is_empty());
        if nobody { frame.answer(Vec::new()) } else { self.told(frame, space.buffer(Buffer::Logits)) }
    }

    fn call(
        &self,
        call: Call,
        (program, space): (&Program, &mut Workspace<B>),
        kv: &mut B::Kv,
        (batch, frame): (&StepBatch, &StepFrame<'_, B::Matrix>),
    ) {
        let (b, heads) = (&self.backend, self.head_shape());
        match call {
            Call::Embed => {
                let tokens = batch.seqs.iter().flat_map(|seq| seq.tokens.iter().copied());
                space.write(Buffer::Stream, |x, _, _| b.embed_into(&self.weights.embed, &mut { tokens }, x));
            }
            Call::Copy { from, to } => space.write(to, |to, all, _| b.copy(all.buffer(from), to)),
            Call::Norm { over, norm, layer } => {
                space.write(over, |x, _, _| b.rms_norm_over(x, self.norm_of(norm, layer), self.config.norm_eps));
            }
            Call::Linear { from, weight, layer, to, same } => {
                let (weight, bias) = self.weight_of(weight, layer);
                space.write(to, |to, all, scratch| {
                    b.linear_into((all.buffer(from), same), weight, bias, (to, scratch));
                });
            }
            Call::Place { layer } => {
                let norms = self.qk_norms(&self.weights.layers[layer]);
                let mut k = space.lend(Buffer::K);
                space.write(Buffer::Q, |q, all, _| {
                    let qkv = (q, &mut k, all.buffer(Buffer::V));
                    b.place_qkv(qkv, norms, (&frame.cos, &frame.sin), (kv, layer), &frame.slots);
                });
                space.give_back(Buffer::K, k);
            }
            Call::Attention { layer } => space.write(Buffer::Mixed, |out, all, _| {
                let (q, window) = (all.buffer(Buffer::Q), self.config.windows[layer]);
                b.attention_into(q, (kv, layer), (&frame.seqs, &program.units), (heads, window), out);
            }),
            Call::SiluMul => space.write(Buffer::Gate, |gate, all, _| b.silu_mul(gate, all.buffer(Buffer::Up))),
            Call::Add { layer_ends } => {
                space.write(Buffer::Stream, |x, all, _| b.add(x, all.buffer(Buffer::Added)));
                if layer_ends {
                    b.end_layer(&self.pulse);
                }
            }
            Call::Gather => space.write(Buffer::Last, |out, all, _| {
                b.gather_into(all.buffer(Buffer::Stream), &program.wanted, out);
            }),
        }
    }
}

impl<B: Backend + 'static> Decoder<B> {
    fn norm_of(&self, norm: Norm, layer: usize) -> &B::Matrix {
        let layer = &self.weights.layers[layer];
        match norm {
            Norm::Input => &layer.input_norm,
            Norm::Post => &layer.post_norm,
            Norm::Last => &self.weights.norm,
        }
    }

    fn weight_of(&self, weight: Matrix, layer: usize) -> (&B::Weight, Option<&B::Matrix>) {
        let Layer { q, k, v, o, feed, .. } = &self.weights.layers[layer];
        let linear = match (weight, feed) {
            (Matrix::Head, _) => return (self.weights.lm_head.as_ref().unwrap_or(&self.weights.embed), None),
            (Matrix::Q, _) => q,
            (Matrix::K, _) => k,
            (Matrix::V, _) => v,
            (Matrix::Gate, FeedForward::Dense(mlp)) => &mlp.gate,
            (Matrix::Up, FeedForward::Dense(mlp)) => &mlp.up,
            (Matrix::Down, FeedForward::Dense(mlp)) => &mlp.down,
            // a mixture's calls depend on its values: it has no program
            (Matrix::O, _) | (_, FeedForward::Experts(_)) => o,
        };
        (&linear.weight, linear.bias.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::backend::cpu::CpuBackend;
    use crate::fault::Faults;
    use crate::model::random::{RandomShape, decoder};
    use crate::model::{KvShape, LogitsWanted, Model, SeqInput, StepTerms};
    use crate::weights::WeightType;

    const SHAPE: RandomShape = RandomShape {
        hidden: 32,
        intermediate: 64,
        layers: 2,
        heads: 2,
        kv_heads: 1,
        head_dim: 16,
        vocab: 64,
        seq_len_max: 64,
    };
    const REQUESTS_MAX: u32 = 8;

    /// Decodes of so many requests, until one is replayed.
    fn until_replayed(model: &mut Decoder<CpuBackend>, requests: u32) {
        let seq =
            |block| SeqInput { tokens: vec![1], start_pos: 3, block_table: vec![block], logits: LogitsWanted::Last };
        let (batch, since) = (StepBatch::of((0..requests).map(seq).collect()), Instant::now());
        let replayed =
            |model: &Decoder<CpuBackend>| Model::programs(model).map_or(0, |counts| counts.replayed.load(Relaxed));
        let before = replayed(model);
        while replayed(model) == before {
            assert!(since.elapsed() < Duration::from_secs(60), "never replayed");
            model.forward(&batch).unwrap();
        }
    }

    /// Where the buffers lie, and the values that they have room for.
    fn buffers(model: &Decoder<CpuBackend>) -> Vec<(*const f32, usize)> {
        let all = [Buffer::Stream, Buffer::Q, Buffer::K, Buffer::Mixed, Buffer::Gate, Buffer::Added, Buffer::Logits];
        let values = all.map(|buffer| &model.workspace.buffer(buffer).values);
        values.iter().map(|values| (values.as_ptr(), values.capacity())).collect()
    }

    #[test]
    fn a_program_that_is_laid_over_a_smaller_step_gives_its_rows() {
        let kinds = (WeightType::F32, WeightType::F32);
        let seq =
            |block| SeqInput { tokens: vec![1], start_pos: 3, block_table: vec![block], logits: LogitsWanted::Last };
        let batch = StepBatch::of((0..5).map(seq).collect());
        let [eager, laid] = [None, Some("padded-graph".parse().unwrap())].map(|fault| {
            let faults = Faults::of_rank(fault.into_iter().collect(), 1);
            faults.arm(1);
            let mut model = decoder(SHAPE, kinds, CpuBackend::new(1)).unwrap().with_programs().struck_by(&faults);
            model.allocate_kv(KvShape { num_blocks: REQUESTS_MAX as usize, block_size: 16 }).unwrap();
            model.terms(&StepTerms::default());
            let rows = model.forward(&batch).unwrap().rows;
            (rows, Model::programs(&model).unwrap().replayed.load(Relaxed))
        });
        assert_eq!((eager.1, laid.1), (0, 1));
        assert!(eager.0 == laid.0);
    }

    #[test]
    fn programs_of_all_shapes_work_in_the_memory_of_the_largest() {
        let kinds = (WeightType::F32, WeightType::F32);
        let mut model = decoder(SHAPE, kinds, CpuBackend::new(1)).unwrap().with_programs();
        model.allocate_kv(KvShape { num_blocks: REQUESTS_MAX as usize, block_size: 16 }).unwrap();
        until_replayed(&mut model, REQUESTS_MAX);
        let largest = buffers(&model);
        for requests in (1..=REQUESTS_MAX).rev() {
            until_replayed(&mut model, requests);
            assert_eq!(buffers(&model), largest, "{requests} requests");
        }
    }
}
