//! Paged KV blocks, owned by type: a block is in the pool or in exactly one [`BlockTable`], and comes back when the table is
//! cleared or dropped. Nothing else can name a free block, so none can leak or be used twice (E7: blocks are conserved).
//!
//! Single-threaded on purpose (`Rc`): the pool lives and dies with the engine thread.

use std::{cell::RefCell, rc::Rc};

/// The free list, shared by every table cut from it.
#[derive(Debug, Clone)]
pub struct BlockPool {
    free: Rc<RefCell<Vec<u32>>>,
    num_blocks: usize,
    block_size: usize,
}

impl BlockPool {
    /// A pool of `num_blocks` blocks that hold `block_size` tokens each.
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        // Popped from the end: low ids are handed out first, which keeps the working set of a quiet engine small.
        let free = (0..u32::try_from(num_blocks).unwrap_or(u32::MAX)).rev().collect();
        Self { free: Rc::new(RefCell::new(free)), num_blocks, block_size: block_size.max(1) }
    }

    /// An empty table on this pool.
    pub fn table(&self) -> BlockTable {
        BlockTable { blocks: Vec::new(), pool: self.clone() }
    }

    pub fn free_blocks(&self) -> usize {
        self.free.borrow().len()
    }

    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Blocks that `tokens` tokens need.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }
}

/// The blocks of one sequence, in order of position.
#[derive(Debug)]
pub struct BlockTable {
    blocks: Vec<u32>,
    pool: BlockPool,
}

impl BlockTable {
    /// Grows the table until it holds `tokens` tokens; all or nothing. False: the pool has too few free blocks.
    pub fn grow_to(&mut self, tokens: usize) -> bool {
        let missing = self.pool.blocks_for(tokens).saturating_sub(self.blocks.len());
        let mut free = self.pool.free.borrow_mut();
        let Some(keep) = free.len().checked_sub(missing) else { return false };
        self.blocks.extend(free.drain(keep..).rev());
        true
    }

    /// The block ids, in order.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Gives every block back.
    pub fn clear(&mut self) {
        // Reversed, so that the next table gets them in the order in which this one had them.
        self.pool.free.borrow_mut().extend(self.blocks.drain(..).rev());
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_all_or_nothing_and_a_dropped_table_returns_its_blocks() {
        let pool = BlockPool::new(4, 16);
        let mut a = pool.table();
        assert!(a.grow_to(33));
        assert_eq!(a.blocks(), &[0, 1, 2]);
        let mut b = pool.table();
        assert!(!b.grow_to(17), "two blocks are wanted, one is free");
        assert_eq!((b.blocks().len(), pool.free_blocks()), (0, 1));
        drop(a);
        assert!(b.grow_to(64));
        assert_eq!(pool.free_blocks(), 0);
        b.clear();
        assert_eq!(pool.free_blocks(), 4);
    }
}
