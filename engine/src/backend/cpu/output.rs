//! A matrix that several threads fill at once, each its own cells. Relaxed atomics compile to plain stores, and a mistake
//! about who owns a cell would give a wrong number that a test sees, not undefined behaviour.

use std::sync::atomic::{AtomicU32, Ordering};

use super::Matrix;
use crate::raw::{Simd, cells_of, values_of};

/// `rows × cols` f32 values.
#[derive(Debug)]
pub struct Output {
    cols: usize,
    cells: Vec<AtomicU32>,
}

impl Output {
    /// In the memory of a matrix that is done with; cells that are there keep their old values until they are set.
    pub fn over(mut old: Matrix, rows: usize, cols: usize) -> Self {
        old.resize(rows, cols);
        Self { cols, cells: cells_of(std::mem::take(&mut old.values)) }
    }

    /// Writes the sums of some lanes from `col` on.
    #[inline(always)]
    pub fn set_sums<S: Simd, const N: usize>(&self, s: S, (row, col): (usize, usize), lanes: &[S::V; N]) {
        let start = row * self.cols + col;
        let (cells, last_cells) = self.cells[start..start + N].as_chunks();
        let (lanes, last_lanes) = lanes.as_chunks();
        for (cells, lanes) in cells.iter().zip(lanes) {
            s.fold_into(*lanes, cells);
        }
        for (cell, lanes) in last_cells.iter().zip(last_lanes) {
            cell.store(s.fold(*lanes).to_bits(), Ordering::Relaxed);
        }
    }

    /// Writes `values` from `col` on.
    #[inline(always)]
    pub fn set_run<S: Simd>(&self, s: S, (row, col): (usize, usize), values: &[f32]) {
        let start = row * self.cols + col;
        let (cells, last_cells) = self.cells[start..start + values.len()].as_chunks();
        let (values, last_values) = values.as_chunks();
        for (cells, values) in cells.iter().zip(values) {
            s.store_cells(s.load(values), cells);
        }
        for (cell, value) in last_cells.iter().zip(last_values) {
            cell.store(value.to_bits(), Ordering::Relaxed);
        }
    }

    /// Writes sixteen lanes from `col` on, or the first `len` of them.
    #[inline(always)]
    pub fn set_lanes<S: Simd>(&self, s: S, (row, col): (usize, usize), lanes: S::V, len: usize) {
        let start = row * self.cols + col;
        if let Some(cells) = self.cells[start..start + len].as_array() {
            return s.store_cells(lanes, cells);
        }
        let mut values = [0.0; 16];
        s.store(lanes, &mut values);
        self.set_run(s, (row, col), &values[..len]);
    }

    pub fn into_matrix(self) -> Matrix {
        let rows = self.cells.len().checked_div(self.cols).unwrap_or(0);
        Matrix { rows, cols: self.cols, values: values_of(self.cells) }
    }
}
