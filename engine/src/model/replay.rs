//! A step by its program: the calls of the eager decoder, in its order, on buffers that are there already. Every kernel is the one that
//! the eager way calls, so that both give the same bits.

use crate::backend::Backend;
use crate::programs::{Buffer, Call, Matrix, Norm, Program};

use super::decoder::{Decoder, FeedForward, Layer, StepFrame};
use super::{StepBatch, StepLogits};

impl<B: Backend + 'static> Decoder<B> {
    /// Runs a step whose shape is the program's.
    pub(super) fn replay(
        &self,
        program: &mut Program<B>,
        kv: &mut B::Kv,
        (batch, frame): (&StepBatch, &StepFrame<'_, B::Matrix>),
    ) -> StepLogits {
        let calls = std::mem::take(&mut program.calls);
        for call in &calls {
            self.call(*call, program, kv, (batch, frame));
        }
        program.calls = calls;
        let nobody = frame.wanted.iter().all(|rows| rows.is_empty());
        frame.answer(if nobody { Vec::new() } else { self.backend.rows(program.buffer(Buffer::Logits)) })
    }

    fn call(
        &self,
        call: Call,
        program: &mut Program<B>,
        kv: &mut B::Kv,
        (batch, frame): (&StepBatch, &StepFrame<'_, B::Matrix>),
    ) {
        let (b, heads) = (&self.backend, self.head_shape());
        match call {
            Call::Embed => {
                let tokens = batch.seqs.iter().flat_map(|seq| seq.tokens.iter().copied());
                program.write(Buffer::Stream, |x, _, _| b.embed_into(&self.weights.embed, &mut { tokens }, x));
            }
            Call::Copy { from, to } => program.write(to, |to, all, _| b.copy(all.buffer(from), to)),
            Call::Norm { over, norm, layer } => {
                program.write(over, |x, _, _| b.rms_norm_over(x, self.norm_of(norm, layer), self.config.norm_eps));
            }
            Call::Linear { from, weight, layer, to, same } => {
                let (weight, bias) = self.weight_of(weight, layer);
                program.write(to, |to, all, scratch| {
                    b.linear_into((all.buffer(from), same), weight, bias, (to, scratch));
                });
            }
            Call::Place { layer } => {
                let norms = self.qk_norms(&self.weights.layers[layer]);
                let mut k = program.lend(Buffer::K);
                program.write(Buffer::Q, |q, all, _| {
                    let qkv = (q, &mut k, all.buffer(Buffer::V));
                    b.place_qkv(qkv, norms, (&frame.cos, &frame.sin), (kv, layer), &frame.slots);
                });
                program.give_back(Buffer::K, k);
            }
            Call::Attention { layer } => program.write(Buffer::Mixed, |out, all, _| {
                let (q, window) = (all.buffer(Buffer::Q), self.config.windows[layer]);
                b.attention_into(q, (kv, layer), (&frame.seqs, &all.units), (heads, window), out);
            }),
            Call::SiluMul => program.write(Buffer::Gate, |gate, all, _| b.silu_mul(gate, all.buffer(Buffer::Up))),
            Call::Add { layer_ends } => {
                program.write(Buffer::Stream, |x, all, _| b.add(x, all.buffer(Buffer::Added)));
                if layer_ends {
                    b.end_layer(&self.pulse);
                }
            }
            Call::Gather => program.write(Buffer::Last, |out, all, _| {
                b.gather_into(all.buffer(Buffer::Stream), &all.wanted, out);
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
