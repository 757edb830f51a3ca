//! Ownership and sharing of blocks, each rule by itself; random histories are in `tests/scheduler`.

use super::*;

const SIZE: usize = 4;

fn pool(blocks: usize) -> BlockPool {
    BlockPool::new(blocks, SIZE, true)
}

fn ids(table: &BlockTable) -> Vec<u32> {
    table.ids().collect()
}

/// A table that has run `tokens`.
fn ran(pool: &BlockPool, tokens: &[u32]) -> BlockTable {
    let mut table = pool.table();
    table.adopt(tokens);
    assert!(table.grow_to(tokens.len()));
    table.seal(tokens);
    table
}

#[test]
fn growth_is_all_or_nothing_and_a_dropped_table_returns_its_blocks() {
    let pool = pool(4);
    let mut a = pool.table();
    assert!(a.grow_to(9));
    assert_eq!(ids(&a), [0, 1, 2]);
    let mut b = pool.table();
    assert!(!b.grow_to(5), "two blocks are wanted, one is free");
    assert_eq!((b.len(), pool.free_blocks()), (0, 1));
    drop(a);
    assert!(b.grow_to(16));
    assert_eq!(pool.free_blocks(), 0);
    b.clear();
    assert_eq!(pool.free_blocks(), 4);
}

#[test]
fn full_blocks_are_found_by_content_while_held_and_while_idle() {
    let pool = pool(8);
    let first = ran(&pool, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    let mut second = pool.table();
    assert_eq!(second.adopt(&[1, 2, 3, 4, 5, 6, 7, 8, 0]), 8);
    assert_eq!(ids(&second), ids(&first)[..2], "the very same blocks");
    assert_eq!(pool.free_blocks(), 5);
    drop((first, second));
    assert_eq!(pool.free_blocks(), 8, "idle blocks can be had");
    let mut third = pool.table();
    assert_eq!(third.adopt(&[1, 2, 3, 4, 5, 6, 7, 8]), 4, "the last token must run");
    assert_eq!(pool.free_blocks(), 7);
}

#[test]
fn the_same_tokens_after_another_prefix_are_another_content() {
    let pool = pool(8);
    let _a = ran(&pool, &[1, 1, 1, 1, 5, 5, 5, 5]);
    let mut b = pool.table();
    assert_eq!(b.adopt(&[2, 2, 2, 2, 5, 5, 5, 5, 0]), 0);
    assert_eq!(b.adopt(&[5, 5, 5, 5, 0]), 0);
    assert_eq!(b.adopt(&[1, 1, 1, 1, 5, 5, 5, 6, 0]), 4);
}

#[test]
fn two_that_computed_the_same_share_one_block_afterwards() {
    let pool = pool(4);
    let (mut a, mut b) = (pool.table(), pool.table());
    assert!(a.grow_to(4) && b.grow_to(4));
    a.seal(&[1, 2, 3, 4]);
    b.seal(&[1, 2, 3, 4]);
    assert_eq!(ids(&a), ids(&b));
    assert_eq!(pool.free_blocks(), 3);
}

#[test]
fn the_oldest_idle_block_is_given_up_first_and_a_prefix_from_its_end() {
    let pool = pool(3);
    drop(ran(&pool, &[1, 1, 1, 1, 2, 2, 2, 2]));
    drop(ran(&pool, &[3, 3, 3, 3]));
    let mut taken = pool.table();
    assert!(taken.grow_to(4));
    let mut again = pool.table();
    assert_eq!(again.adopt(&[1, 1, 1, 1, 2, 2, 2, 2, 0]), 4, "the end of the oldest prefix is gone");
    again.clear();
    assert_eq!(again.adopt(&[3, 3, 3, 3, 0]), 4);
}

#[test]
fn what_hung_on_a_block_that_was_given_up_is_not_found_through_its_next_content() {
    let pool = pool(3);
    let mut parent = ran(&pool, &[1, 1, 1, 1]);
    let child = ran(&pool, &[1, 1, 1, 1, 2, 2, 2, 2]);
    parent.condemn();
    drop(parent);
    drop(child);
    // The parent's block is free again and gets the same content under a new seal.
    let again = ran(&pool, &[1, 1, 1, 1]);
    drop(again);
    let mut table = pool.table();
    assert_eq!(table.adopt(&[1, 1, 1, 1, 2, 2, 2, 2, 0]), 4);
}

#[test]
fn condemned_blocks_are_free_and_not_found() {
    let pool = pool(4);
    let mut bad = ran(&pool, &[1, 2, 3, 4, 5]);
    bad.condemn();
    assert_eq!(pool.table().adopt(&[1, 2, 3, 4, 5]), 0);
    drop(bad);
    assert_eq!(pool.free_blocks(), 4);
    assert_eq!(pool.table().adopt(&[1, 2, 3, 4, 5]), 0);
}

#[test]
fn a_pool_that_does_not_share_finds_nothing() {
    let pool = BlockPool::new(4, SIZE, false);
    drop(ran(&pool, &[1, 2, 3, 4, 5]));
    assert_eq!(pool.table().adopt(&[1, 2, 3, 4, 5]), 0);
    assert_eq!(pool.free_blocks(), 4);
}
