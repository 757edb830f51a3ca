//! From the sizes of a decoder and the shape of a step to a program: which buffers there are, and which call reads and writes which. Pure.

use super::key::ProgramKey;
use crate::backend::{AttentionUnit, Backend, HeadShape, attention_units};

/// Sizes of this rank's share of a dense decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    pub layers: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub vocab: usize,
    pub heads: HeadShape,
}

/// A matrix of a program. Their number is the same for all steps; only their rows differ.
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

const BUFFERS: usize = 11;

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

/// A step's calls, flattened, with their buffers. It runs steps of its own key and no other.
pub struct Program<B: Backend> {
    pub key: ProgramKey,
    pub calls: Vec<Call>,
    /// The parts that attention is cut into.
    pub units: Vec<AttentionUnit>,
    /// Rows whose logits are wanted.
    pub wanted: Vec<usize>,
    pub scratch: B::Scratch,
    buffers: [B::Matrix; BUFFERS],
}

impl<B: Backend> Program<B> {
    /// The program for steps of `key`.
    pub fn new(key: ProgramKey, sizes: &Sizes) -> Self {
        let buffers = std::array::from_fn(|index| {
            let (rows, cols) = size_of_buffer(index, &key, sizes);
            B::blank(rows, cols)
        });
        let units = attention_units(key.rows_of_seqs(), sizes.heads);
        let (calls, wanted) = (calls(sizes, key.rows_wanted()), key.wanted());
        Self { calls, units, wanted, scratch: B::Scratch::default(), buffers, key }
    }

    pub fn buffer(&self, buffer: Buffer) -> &B::Matrix {
        &self.buffers[buffer as usize]
    }

    /// Takes a buffer out, to be written beside another; [`Self::give_back`] brings it back.
    pub fn lend(&mut self, buffer: Buffer) -> B::Matrix {
        std::mem::take(&mut self.buffers[buffer as usize])
    }

    pub fn give_back(&mut self, buffer: Buffer, matrix: B::Matrix) {
        self.buffers[buffer as usize] = matrix;
    }

    /// Runs `f` on a buffer that is written, with all others to read.
    pub fn write<T>(&mut self, buffer: Buffer, f: impl FnOnce(&mut B::Matrix, &Self, &mut B::Scratch) -> T) -> T {
        let mut taken = std::mem::take(&mut self.buffers[buffer as usize]);
        let mut scratch = std::mem::take(&mut self.scratch);
        let result = f(&mut taken, self, &mut scratch);
        (self.buffers[buffer as usize], self.scratch) = (taken, scratch);
        result
    }
}

/// Bytes of the buffers of a program.
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
