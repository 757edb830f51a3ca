//! The writer's shared mapping of its page: the only `unsafe` of this crate.
//!
//! Only the writer maps (H7: stores without a syscall). The reader never does: a mapping of a file that somebody else
//! can truncate is a SIGBUS (H8).
#![allow(unsafe_code, reason = "mmap and munmap have no safe form; each block argues for itself")]

use std::fs::File;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use crate::layout::FILE_LEN;

/// The page as the words that both sides agree on.
pub(crate) type PageWords = [AtomicU64; FILE_LEN / 8];

/// A shared, writable mapping of one whole page file; unmapped on drop.
#[derive(Debug)]
pub(crate) struct Map {
    words: NonNull<PageWords>,
}

impl Map {
    /// Maps the first [`FILE_LEN`] bytes of `file`, which must be open for reading and writing and that long.
    ///
    /// # Errors
    /// `EINVAL` for a file that is too short (a store beyond its end would be a SIGBUS), else what mmap says.
    pub(crate) fn shared(file: &File) -> Result<Self, Errno> {
        let long_enough = file.metadata().is_ok_and(|m| m.len() >= FILE_LEN as u64);
        let length = NonZeroUsize::new(FILE_LEN).filter(|_| long_enough).ok_or(Errno::EINVAL)?;
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses aliases no Rust object; `length` is not 0.
        let address = unsafe { mmap(None, length, access, MapFlags::MAP_SHARED, file, 0)? };
        Ok(Self { words: address.cast() })
    }

    /// The page's words. Other processes may change them at any time, which is why they are atomics.
    #[inline]
    pub(crate) fn words(&self) -> &PageWords {
        // SAFETY: the mapping is FILE_LEN bytes, page-aligned (so 8-aligned), readable and writable, and lives as long
        // as `self`. Any bytes are a valid AtomicU64, and all access to them in this process is by these atomics.
        unsafe { self.words.as_ref() }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: address and length are those of `shared`; `words` borrows from `self`, so no reference is left.
        // A failure would leave 20 KiB mapped, which harms nobody: nothing to do about it in a drop.
        let _ = unsafe { munmap(self.words.cast(), FILE_LEN) };
    }
}

// SAFETY: the mapping belongs to no thread, and `words` gives atomics alone.
unsafe impl Send for Map {}
// SAFETY: as above: shared access is by atomics.
unsafe impl Sync for Map {}
