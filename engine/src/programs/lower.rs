//! From the sizes of a decoder and the shape of a step to a program: which call reads and writes which buffer. Pure.

use super::key::ProgramKey;
use crate::backend::{AttentionUnit, HeadShape, attention_units};
use crate::model::StepBatch;

/// Sizes of this rank's share of a dense decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    pub layers: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub vocab: usize,
    pub heads: HeadShape,
}

/// A matrix that programs work in. Their number is the same for all steps; only their rows differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Buffer {
    /// The stream that layers add to.
    Stream,
    Normed,
    Q,
    K,
    V,
    Mixed,
    Gate,
    Up,
    /// What attention, and the MLP, adds to the stream.
    Added,
    /// Rows whose logits are wanted.
    Last,
    Logits,
}

pub(super) const BUFFERS: usize = 11;

/// A weight of a layer, or of the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
    Head,
}

/// A norm of a layer, or of the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norm {
    Input,
    Post,
    Last,
}

/// One call of a kernel. `layer` means nothing to those of the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Embed,
    Copy {
        from: Buffer,
        to: Buffer,
    },
    Norm {
        over: Buffer,
        norm: Norm,
        layer: usize,
    },
    /// `same`: the call before had the same input, which is prepared already.
    Linear {
        from: Buffer,
        weight: Matrix,
        layer: usize,
        to: Buffer,
        same: bool,
    },
    /// Norms of heads, rotation of Q and K, and K and V to the cache.
    Place {
        layer: usize,
    },
    Attention {
        layer: usize,
    },
    SiluMul,
    Add {
        layer_ends: bool,
    },
    Gather,
}

/// A step's calls, flattened. It is for steps of its own key and no other, and runs them in the [`Workspace`](super::Workspace) of its decoder.
pub struct Program {
    pub key: ProgramKey,
    pub calls: Vec<Call>,
    /// The parts that attention is cut into.
    pub units: Vec<AttentionUnit>,
    /// Rows whose logits are wanted.
    pub wanted: Vec<usize>,
}

impl Program {
    /// The program for steps of `key`.
    pub fn new(key: ProgramKey, sizes: &Sizes) -> Self {
        let units = attention_units(key.rows_of_seqs(), sizes.heads);
        let (calls, wanted) = (calls(sizes, key.rows_wanted()), key.wanted());
        Self { key, calls, units, wanted }
    }

    /// The same program, for a step that has fewer rows than it: attention leaves out what is not there, and where the program wants a row
    /// that is not there it takes the last one. It still gathers, and brings to the other ranks, as many rows as it was made for (S1).
    pub fn laid_over(&self, batch: &StepBatch, sizes: &Sizes) -> Self {
        let rows_of_seqs = || batch.seqs.iter().map(|seq| seq.tokens.len());
        let last = rows_of_seqs().sum::<usize>().saturating_sub(1);
        let units = attention_units(rows_of_seqs(), sizes.heads);
        let wanted = self.wanted.iter().map(|row| last.min(*row)).collect();
        Self { key: self.key.clone(), calls: self.calls.clone(), units, wanted }
    }
}

/// Bytes of the buffers that a step of this shape works in.
pub fn bytes(key: &ProgramKey, sizes: &Sizes) -> usize {
    (0..BUFFERS).map(|index| size_of_buffer(index, key, sizes)).map(|(rows, cols)| rows * cols * size_of::<f32>()).sum()
}

fn size_of_buffer(index: usize, key: &ProgramKey, sizes: &Sizes) -> (usize, usize) {
    let HeadShape { heads, kv_heads, head_dim } = sizes.heads;
    let (rows, wanted, hidden) = (key.rows(), key.rows_wanted(), sizes.hidden);
    // in the order of `Buffer`
    let table: [(usize, usize); BUFFERS] = [
        (rows, hidden),
        (rows, hidden),
        (rows, heads * head_dim),
        (rows, kv_heads * head_dim),
        (rows, kv_heads * head_dim),
        (rows, heads * head_dim),
        (rows, sizes.intermediate),
        (rows, sizes.intermediate),
        (rows, hidden),
        (wanted, hidden),
        (wanted, sizes.vocab),
    ];
    table[index]
}

fn calls(sizes: &Sizes, rows_wanted: usize) -> Vec<Call> {
    let mut calls = vec![Call::Embed];
    (0..sizes.layers).for_each(|layer| calls.extend(layer_calls(layer)));
    if rows_wanted > 0 {
        let (layer, same) = (0, false);
        calls.push(Call::Gather);
        calls.push(Call::Norm { over: Buffer::Last, norm: Norm::Last, layer });
        calls.push(Call::Linear { from: Buffer::Last, weight: Matrix::Head, layer, to: Buffer::Logits, same });
    }
    calls
}

fn layer_calls(layer: usize) -> Vec<Call> {
    let linear = |from, weight, to, same| Call::Linear { from, weight, layer, to, same };
    let norm = |over, norm| Call::Norm { over, norm, layer };
    vec![
        Call::Copy { from: Buffer::Stream, to: Buffer::Normed },
        norm(Buffer::Normed, Norm::Input),
        linear(Buffer::Normed, Matrix::Q, Buffer::Q, false),
        linear(Buffer::Normed, Matrix::K, Buffer::K, true),
        linear(Buffer::Normed, Matrix::V, Buffer::V, true),
        Call::Place { layer },
        Call::Attention { layer },
        linear(Buffer::Mixed, Matrix::O, Buffer::Added, false),
        Call::Add { layer_ends: false },
        Call::Copy { from: Buffer::Stream, to: Buffer::Normed },
        norm(Buffer::Normed, Norm::Post),
        linear(Buffer::Normed, Matrix::Gate, Buffer::Gate, false),
        linear(Buffer::Normed, Matrix::Up, Buffer::Up, true),
        Call::SiluMul,
        linear(Buffer::Gate, Matrix::Down, Buffer::Added, false),
        Call::Add { layer_ends: true },
    ]
}
