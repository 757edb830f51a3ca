//! `x · weightᵀ` for repacked weights and inputs quantised to bytes: whole numbers inside a block of 32 (offsets of Q4_K: inside a unit of 256,
//! `dots/units.rs`), f32 between blocks, in the order of the blocks whatever the tile (EP4).

use std::marker::PhantomData;
use std::ops::Range;

use super::dots::units::{Q4KUnits, Q6KUnits};
use super::dots::{Kind, Q4K, Q6K, Q8};
use super::inputs::InputForms;
use super::output::Output;
use super::panels::{LANES, PanelKind, Panels};
use super::pool::Pool;
use super::quantised::{QuantBlock, QuantInputs, QuantUnit};
#[cfg(target_arch = "x86_64")]
use super::tiles::{self, TileOp};
use super::{Isa, Matrix};
use crate::raw::{Op, Simd};

/// Bytes of panels that many inputs go by in turn: they stay in the second-level cache, while a few inputs stay near, in the first up to some 2,800
/// columns. Panel by panel all inputs would come from further away for each.
const PANELS_BYTES: usize = 192 << 10;

/// `x · weightᵀ` into `out`, by tiles where there are some and they are worth it.
pub fn multiply((isa, pool): (Isa, &Pool), (x, forms): (&Matrix, &mut InputForms), weight: &Panels, out: &Output) {
    let (panels, work) = (weight.rows.div_ceil(LANES), weight.rows * weight.cols * x.rows);
    #[cfg(target_arch = "x86_64")]
    if let Some(amx) = isa.tiles().filter(|_| x.rows >= tiles::ROWS_MIN) {
        let x = forms.tiles((isa, pool), x);
        pool.split(panels, 1, work, |panels| isa.run(TileOp { amx, x, weight, panels, out }));
        return;
    }
    // A few rows must give the bits that many give by tiles. It is the processor that decides and not the set, so that all sets agree on it;
    // and those with tiles were measured asking for weights the nearer way, and not yet the far one.
    let far = !Isa::processor_has_tiles();
    match weight.kind {
        PanelKind::Q4K if far => {
            let x = forms.units((isa, pool), x);
            pool.split(panels, 1, work, |panels| by_units::<Q4KUnits>(isa, x, (weight, panels), out));
        }
        PanelKind::Q6K if far => {
            let x = forms.units((isa, pool), x);
            pool.split(panels, 1, work, |panels| by_units::<Q6KUnits>(isa, x, (weight, panels), out));
        }
        _ => {
            let x = forms.quantised((isa, pool), x);
            pool.split(panels, 1, work, |panels| by_blocks((isa, far), x, (weight, panels), out));
        }
    }
}

/// Some panels of a multiplication with inputs whose blocks have scales of their own.
pub fn by_blocks((isa, far): (Isa, bool), x: &QuantInputs<QuantBlock>, weight: (&Panels, Range<usize>), out: &Output) {
    match weight.0.kind {
        PanelKind::Q8 => isa.run(QuantOp::<Q8>::new(x, weight, far, out)),
        PanelKind::Q4K => isa.run(QuantOp::<Q4K>::new(x, weight, far, out)),
        PanelKind::Q6K => isa.run(QuantOp::<Q6K>::new(x, weight, far, out)),
    }
}

/// Some panels, of the kind that `K` is for, of a multiplication with inputs in units.
pub fn by_units<K: Kind<X = QuantUnit>>(
    isa: Isa,
    x: &QuantInputs<QuantUnit>,
    weight: (&Panels, Range<usize>),
    out: &Output,
) {
    isa.run(QuantOp::<K>::new(x, weight, true, out));
}

/// Some panels of a multiplication, for all inputs.
struct QuantOp<'a, K: Kind> {
    x: &'a QuantInputs<K::X>,
    weight: &'a Panels,
    panels: Range<usize>,
    /// Weights are asked for in the second-level cache.
    far: bool,
    out: &'a Output,
    kind: PhantomData<K>,
}

impl<'a, K: Kind> QuantOp<'a, K> {
    fn new(x: &'a QuantInputs<K::X>, (weight, panels): (&'a Panels, Range<usize>), far: bool, out: &'a Output) -> Self {
        Self { x, weight, panels, far, out, kind: PhantomData }
    }
}

impl<K: Kind> Op for QuantOp<'_, K> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (lines, scales) = self.weight.panel(self.panels.start);
        let together = (PANELS_BYTES / (lines.as_flattened().len() + scales.len()).max(1)).max(1);
        for first in self.panels.clone().step_by(together) {
            let panels = first..self.panels.end.min(first + together);
            if S::WIDE && self.far {
                self.panels::<S, 8, true>(s, panels);
            } else if S::WIDE {
                self.panels::<S, 8, false>(s, panels);
            } else {
                self.panels::<S, 4, false>(s, panels);
            }
        }
    }
}

impl<K: Kind> QuantOp<'_, K> {
    /// Each few inputs go by all of these panels, then the next.
    #[inline(always)]
    fn panels<S: Simd, const M: usize, const F: bool>(&self, s: S, panels: Range<usize>) {
        let mut token = 0;
        while token + M <= self.x.rows {
            self.blocks::<S, M, F>(s, panels.clone(), token);
            token += M;
        }
        if S::WIDE && token + 4 <= self.x.rows {
            self.blocks::<S, 4, F>(s, panels.clone(), token);
            token += 4;
        }
        if token + 2 <= self.x.rows {
            self.blocks::<S, 2, F>(s, panels.clone(), token);
            token += 2;
        }
        while token < self.x.rows {
            self.blocks::<S, 1, F>(s, panels.clone(), token);
            token += 1;
        }
    }

    #[inline(always)]
    fn blocks<S: Simd, const M: usize, const F: bool>(&self, s: S, panels: Range<usize>, token: usize) {
        for panel in panels {
            self.block::<S, M, F>(s, panel, token);
        }
    }

    #[inline(always)]
    fn block<S: Simd, const M: usize, const F: bool>(&self, s: S, panel: usize, token: usize) {
        let x: [&[K::X]; M] = std::array::from_fn(|m| self.x.row(token + m));
        let (lines, scales) = self.weight.panel(panel);
        let rows = LANES.min(self.weight.rows - panel * LANES);
        for (m, sums) in K::dots::<S, M, F>(s, x, lines, scales).iter().enumerate() {
            self.out.set_lanes(s, (token + m, panel * LANES), *sums, rows);
        }
    }
}
