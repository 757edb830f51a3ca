//! Paged KV blocks, owned by type. At every moment a block is one of four things, and nothing else can name it:
//!
//! - free: a number in the pool's list;
//! - [`Open`]: one owner, who alone writes into it;
//! - [`Sealed`]: full and known by its content; read by every table that holds a reference, written by nobody;
//! - idle: sealed once, held by nobody now; found again by its content, or given up, oldest first, when blocks are wanted.
//!
//! References come back by `Drop`: no path through the scheduler can lose a block or use it twice (EP3, E7). Only full blocks are
//! shared, so nothing is ever copied before a write.
//!
//! Single-threaded on purpose (`Rc`): the pool lives and dies with the engine thread.

use std::{cell::RefCell, collections::VecDeque, rc::Rc};

use prefix::{Found, IdleBlock, Key, PrefixIndex, Seal};

mod prefix;
#[cfg(test)]
mod tests;

/// All blocks that there are; cheap to clone, every clone is the same pool.
#[derive(Debug, Clone)]
pub struct BlockPool(Rc<Pool>);

#[derive(Debug)]
struct Pool {
    state: RefCell<State>,
    num_blocks: usize,
    block_size: usize,
    /// Are full blocks kept and shared?
    shares: bool,
}

#[derive(Debug)]
struct State {
    free: Vec<u32>,
    prefixes: PrefixIndex,
}

impl BlockPool {
    /// A pool of `num_blocks` blocks that hold `block_size` tokens each; with `shares`, full blocks are a prefix cache.
    pub fn new(num_blocks: usize, block_size: usize, shares: bool) -> Self {
        // Popped from the end: low ids are handed out first, which keeps the working set of a quiet engine small.
        let free = (0..u32::try_from(num_blocks).unwrap_or(u32::MAX)).rev().collect();
        let state = RefCell::new(State { free, prefixes: PrefixIndex::default() });
        Self(Rc::new(Pool { state, num_blocks, block_size: block_size.max(1), shares }))
    }

    /// An empty table on this pool.
    pub fn table(&self) -> BlockTable {
        BlockTable { sealed: Vec::new(), open: VecDeque::new(), pool: self.clone() }
    }

    /// Blocks that can be had now: free ones, and idle ones, which are given up when they are wanted.
    pub fn free_blocks(&self) -> usize {
        let state = self.0.state.borrow();
        state.free.len() + state.prefixes.idle_blocks()
    }

    pub fn num_blocks(&self) -> usize {
        self.0.num_blocks
    }

    /// Blocks that `tokens` tokens need.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.0.block_size)
    }

    /// `count` blocks to write into, or none.
    fn take(&self, count: usize) -> Option<Vec<Open>> {
        if count > self.free_blocks() {
            return None;
        }
        let mut state = self.0.state.borrow_mut();
        let State { free, prefixes } = &mut *state;
        let ids = std::iter::from_fn(|| free.pop().or_else(|| prefixes.give_up_oldest())).take(count);
        Some(ids.map(|id| Open(Block { id, seal: None, pool: self.clone() })).collect())
    }

    /// The block that is known by this content, taken into use.
    fn find(&self, key: &Key) -> Option<Rc<Sealed>> {
        let mut state = self.0.state.borrow_mut();
        match state.prefixes.find(key)? {
            Found::Held(sealed) => Some(sealed),
            Found::Idle(IdleBlock { id, seal }) => {
                let sealed = Rc::new(Sealed(Block { id, seal: Some(seal), pool: self.clone() }));
                state.prefixes.hold(key, &sealed);
                Some(sealed)
            }
        }
    }
}

/// A block in somebody's hands; goes back to its pool when dropped.
#[derive(Debug)]
struct Block {
    id: u32,
    seal: Option<Seal>,
    pool: BlockPool,
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut state = self.pool.0.state.borrow_mut();
        let kept = self.seal.take().is_some_and(|seal| state.prefixes.rest(self.id, seal));
        if !kept {
            state.free.push(self.id);
        }
    }
}

/// A block with one owner. It cannot be cloned: nobody else reads it while it is written.
#[derive(Debug)]
struct Open(Block);

impl Open {
    /// Makes the block known by its content, for good: there is no way back to [`Open`]. Where the same content is known already,
    /// that block is taken and this one is free again; both hold the same bits, because a row's result depends on its own
    /// sequence alone (EP4).
    fn seal(self, key: Key) -> Rc<Sealed> {
        let Self(mut block) = self;
        let pool = block.pool.clone();
        if let Some(same) = pool.find(&key) {
            return same;
        }
        let mut state = pool.0.state.borrow_mut();
        block.seal = Some(state.prefixes.seal(key.clone()));
        let sealed = Rc::new(Sealed(block));
        state.prefixes.hold(&key, &sealed);
        sealed
    }
}

/// A full block, shared by reference and never written again.
#[derive(Debug)]
struct Sealed(Block);

/// The blocks of one sequence, in order of position: shared ones first, then its own.
#[derive(Debug)]
pub struct BlockTable {
    sealed: Vec<Rc<Sealed>>,
    open: VecDeque<Open>,
    pool: BlockPool,
}

impl BlockTable {
    /// Grows the table until it holds `tokens` tokens; all or nothing. False: the pool has too few blocks.
    pub fn grow_to(&mut self, tokens: usize) -> bool {
        let missing = self.pool.blocks_for(tokens).saturating_sub(self.len());
        if missing == 0 {
            return true;
        }
        let Some(blocks) = self.pool.take(missing) else { return false };
        self.open.extend(blocks);
        true
    }

    /// Takes the cached blocks that `tokens` begins with into an empty table; returns how many tokens they hold. The last token is
    /// never among them: it must run for there to be a next one.
    pub fn adopt(&mut self, tokens: &[u32]) -> usize {
        let pool = &self.pool.0;
        if !pool.shares || !self.is_empty() {
            return 0;
        }
        let usable = &tokens[..tokens.len().saturating_sub(1)];
        for chunk in usable.chunks_exact(pool.block_size) {
            let Some(block) = self.pool.find(&self.next_key(chunk)) else { break };
            self.sealed.push(block);
        }
        self.sealed.len() * pool.block_size
    }

    /// How many tokens [`BlockTable::adopt`] would find now.
    pub fn cached(&self, tokens: &[u32]) -> usize {
        self.pool.table().adopt(tokens)
    }

    /// `computed` is all that is in the cache: its full blocks become known by their content.
    pub fn seal(&mut self, computed: &[u32]) {
        if !self.pool.0.shares {
            return;
        }
        let size = self.pool.0.block_size;
        let full = (computed.len() / size).min(self.len());
        for index in self.sealed.len()..full {
            let key = self.next_key(&computed[index * size..(index + 1) * size]);
            let Some(block) = self.open.pop_front() else { return };
            self.sealed.push(block.seal(key));
        }
    }

    /// Nobody else shall find these blocks: what is in them is not to be trusted (EP5).
    pub fn condemn(&mut self) {
        let mut state = self.pool.0.state.borrow_mut();
        self.sealed.iter().filter_map(|block| block.0.seal.as_ref()).for_each(|seal| state.prefixes.forget(seal));
    }

    /// The block ids, in order.
    pub fn ids(&self) -> impl Iterator<Item = u32> {
        self.sealed.iter().map(|block| block.0.id).chain(self.open.iter().map(|block| block.0.id))
    }

    /// Tokens in blocks that are known by their content.
    pub fn sealed_tokens(&self) -> usize {
        self.sealed.len() * self.pool.0.block_size
    }

    /// Blocks.
    pub fn len(&self) -> usize {
        self.sealed.len() + self.open.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens that fit without growing.
    pub fn capacity(&self) -> usize {
        self.len() * self.pool.0.block_size
    }

    /// Gives every block back, the last one first: a prefix is given up from its end, so that what is left is still a prefix.
    pub fn clear(&mut self) {
        while self.open.pop_back().is_some() {}
        while self.sealed.pop().is_some() {}
    }

    fn next_key(&self, tokens: &[u32]) -> Key {
        let parent = self.sealed.last().and_then(|block| block.0.seal.as_ref());
        Key::new(parent, tokens)
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        self.clear();
    }
}
