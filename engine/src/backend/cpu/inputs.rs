//! An input of multiplications in the forms that weights want it in, each made when the first of them asks: Q, K and V have one input, as
//! gate and up do, and a program makes its forms once.

use super::dense::Inputs;
#[cfg(target_arch = "x86_64")]
use super::pairs::{self, PairInputs};
use super::pool::Pool;
use super::quantised::{QuantBlock, QuantInputs, QuantUnit};
#[cfg(target_arch = "x86_64")]
use super::tiles::TileInputs;
use super::{Isa, Matrix};
use crate::raw::Line;

/// The forms of one matrix.
#[derive(Debug, Default)]
pub struct InputForms {
    quantised: Form<QuantInputs<QuantBlock>>,
    units: Form<QuantInputs<QuantUnit>>,
    #[cfg(target_arch = "x86_64")]
    tiles: Form<TileInputs>,
    #[cfg(target_arch = "x86_64")]
    pairs: Form<PairInputs<{ pairs::TILE }>>,
    #[cfg(target_arch = "x86_64")]
    pairs_of_one: Form<PairInputs<1>>,
    bf16: Form<Inputs<Line>>,
    f32: Form<Inputs<[Line; 1]>>,
    /// The same, two lines a step.
    f32_pairs: Form<Inputs<[Line; 2]>>,
}

/// One form, and whether it is that of this matrix or of an earlier one.
#[derive(Debug, Default)]
struct Form<T> {
    made: bool,
    inputs: T,
}

impl<T> Form<T> {
    fn get(&mut self, make: impl FnOnce(&mut T)) -> &T {
        if !std::mem::replace(&mut self.made, true) {
            make(&mut self.inputs);
        }
        &self.inputs
    }
}

impl InputForms {
    /// Another matrix comes; the forms keep their memory.
    pub fn renew(&mut self) {
        (self.quantised.made, self.units.made) = (false, false);
        (self.bf16.made, self.f32.made, self.f32_pairs.made) = (false, false, false);
        #[cfg(target_arch = "x86_64")]
        {
            (self.tiles.made, self.pairs.made, self.pairs_of_one.made) = (false, false, false);
        }
    }

    pub fn quantised(&mut self, on: (Isa, &Pool), x: &Matrix) -> &QuantInputs<QuantBlock> {
        self.quantised.get(|inputs| inputs.take(on, x))
    }

    /// For weights whose units have 256 inputs.
    pub fn units(&mut self, on: (Isa, &Pool), x: &Matrix) -> &QuantInputs<QuantUnit> {
        self.units.get(|inputs| inputs.take(on, x))
    }

    #[cfg(target_arch = "x86_64")]
    pub fn tiles(&mut self, on: (Isa, &Pool), x: &Matrix) -> &TileInputs {
        self.tiles.get(|inputs| inputs.take(on, x))
    }

    #[cfg(target_arch = "x86_64")]
    pub fn pairs(&mut self, on: (Isa, &Pool), x: &Matrix) -> &PairInputs<{ pairs::TILE }> {
        self.pairs.get(|inputs| inputs.take(on, x))
    }

    /// For a single row.
    #[cfg(target_arch = "x86_64")]
    pub fn pairs_of_one(&mut self, on: (Isa, &Pool), x: &Matrix) -> &PairInputs<1> {
        self.pairs_of_one.get(|inputs| inputs.take(on, x))
    }

    pub fn bf16(&mut self, on: (Isa, &Pool), x: &Matrix) -> &Inputs<Line> {
        self.bf16.get(|inputs| inputs.bf16(on, x))
    }

    pub fn f32(&mut self, x: &Matrix) -> &Inputs<[Line; 1]> {
        self.f32.get(|inputs| inputs.f32(x))
    }

    /// For weights of 16 bits.
    pub fn f32_pairs(&mut self, x: &Matrix) -> &Inputs<[Line; 2]> {
        self.f32_pairs.get(|inputs| inputs.f32(x))
    }
}
