//! Which content is in which sealed block. A block is known by its own tokens and by the seal of the block before it, compared token
//! for token: a hash that collides would answer one user out of another one's prompt.
//!
//! A seal has a number of its own that is never used again. What hung on a block that was given up can therefore not be found through
//! the next content of that block.

use std::{
    collections::{BTreeMap, HashMap},
    rc::{Rc, Weak},
};

use super::Sealed;

/// The content of a block and of all before it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Key {
    /// Number of the seal before it; 0: it is the first.
    parent: u64,
    tokens: Rc<[u32]>,
}

impl Key {
    pub fn new(parent: Option<&Seal>, tokens: &[u32]) -> Self {
        Self { parent: parent.map_or(0, |seal| seal.number), tokens: tokens.into() }
    }
}

/// What a block is known by.
#[derive(Debug)]
pub struct Seal {
    number: u64,
    key: Key,
}

/// A sealed block that nobody holds.
#[derive(Debug)]
pub struct IdleBlock {
    pub id: u32,
    pub seal: Seal,
}

/// Where a content is.
pub enum Found {
    Held(Rc<Sealed>),
    /// It has left the idle ones: whoever asked has it now.
    Idle(IdleBlock),
}

#[derive(Debug)]
struct Entry {
    number: u64,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Held(Weak<Sealed>),
    /// When it was released, in releases.
    Idle(u64),
}

/// All sealed blocks of a pool, by content.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    entries: HashMap<Key, Entry>,
    /// By moment of release: the first one is given up first.
    idle: BTreeMap<u64, IdleBlock>,
    seals: u64,
    releases: u64,
}

impl PrefixIndex {
    pub fn idle_blocks(&self) -> usize {
        self.idle.len()
    }

    /// A new seal for a content that is in no other block.
    pub fn seal(&mut self, key: Key) -> Seal {
        self.seals += 1;
        self.entries.insert(key.clone(), Entry { number: self.seals, place: Place::Held(Weak::new()) });
        Seal { number: self.seals, key }
    }

    /// The block of this content is in use.
    pub fn hold(&mut self, key: &Key, block: &Rc<Sealed>) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.place = Place::Held(Rc::downgrade(block));
        }
    }

    pub fn find(&mut self, key: &Key) -> Option<Found> {
        match &self.entries.get(key)?.place {
            Place::Held(block) => block.upgrade().map(Found::Held),
            Place::Idle(released) => self.idle.remove(released).map(Found::Idle),
        }
    }

    /// The last holder let go of the block. False: its content is not known any more, the block is free.
    pub fn rest(&mut self, id: u32, seal: Seal) -> bool {
        let Some(entry) = self.entries.get_mut(&seal.key).filter(|entry| entry.number == seal.number) else {
            return false;
        };
        self.releases += 1;
        entry.place = Place::Idle(self.releases);
        self.idle.insert(self.releases, IdleBlock { id, seal });
        true
    }

    /// The block that was released first, its content forgotten.
    pub fn give_up_oldest(&mut self) -> Option<u32> {
        let (_, IdleBlock { id, seal }) = self.idle.pop_first()?;
        self.entries.remove(&seal.key);
        Some(id)
    }

    /// A block that is in use shall not be found again.
    pub fn forget(&mut self, seal: &Seal) {
        if self.entries.get(&seal.key).is_some_and(|entry| entry.number == seal.number) {
            self.entries.remove(&seal.key);
        }
    }
}
