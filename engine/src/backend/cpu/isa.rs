//! Which instructions this process computes with: the best the CPU has, asked once.

use crate::raw::{Op, Portable, Simd as _};

/// An instruction set that this CPU has.
#[derive(Debug, Clone, Copy)]
pub enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512(crate::raw::Avx512<true>),
    /// The same without products of bf16.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(crate::raw::Avx512<false>),
    #[cfg(target_arch = "x86_64")]
    Avx2(crate::raw::Avx2),
    Portable(Portable),
}

impl Isa {
    /// The best one.
    pub fn best() -> Self {
        Self::all()[0]
    }

    /// All that this CPU has, the best first; tests compare them with each other.
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(crate::raw::Avx512::detect().map(Self::Avx512));
            all.extend(crate::raw::Avx512::detect().map(Self::Avx512Vnni));
            all.extend(crate::raw::Avx2::detect().map(Self::Avx2));
        }
        all.push(Self::Portable(Portable));
        all
    }

    /// Tiles of bytes, where this set is the one that goes with them.
    #[cfg(target_arch = "x86_64")]
    pub fn tiles(self) -> Option<crate::raw::amx::Amx> {
        matches!(self, Self::Avx512(_)).then(crate::raw::amx::Amx::detect).flatten()
    }

    /// Whether the best set of this processor goes with tiles, whatever set is computed with.
    pub fn processor_has_tiles() -> bool {
        #[cfg(target_arch = "x86_64")]
        return crate::raw::amx::Amx::detect().is_some();
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Has it an instruction for products of bf16?
    pub fn multiplies_bf16(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => true,
            _ => false,
        }
    }

    /// `avx512`, `avx512-vnni`, `avx2`, `portable`.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(_) => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            Self::Portable(_) => "portable",
        }
    }

    /// Runs a computation with it.
    pub fn run<O: Op>(self, op: O) -> O::Out {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(s) => s.run(op),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(s) => s.run(op),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(s) => s.run(op),
            Self::Portable(s) => s.run(op),
        }
    }
}
