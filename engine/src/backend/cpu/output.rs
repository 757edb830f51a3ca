//! A matrix that several threads fill at once, each its own cells. Relaxed atomics compile to plain stores, and a mistake
//! about who owns a cell would give a wrong number that a test sees, not undefined behaviour.

use std::sync::atomic::{AtomicU32, Ordering};

use super::Matrix;

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
        let values = std::mem::take(&mut old.values);
        // in place: both have one size
        Self { cols, cells: values.into_iter().map(|value| AtomicU32::new(value.to_bits())).collect() }
    }

    #[inline(always)]
    pub fn set(&self, row: usize, col: usize, value: f32) {
        self.cells[row * self.cols + col].store(value.to_bits(), Ordering::Relaxed);
    }

    /// Writes `values` from `col` on.
    #[inline(always)]
    pub fn set_run(&self, row: usize, col: usize, values: &[f32]) {
        let start = row * self.cols + col;
        for (cell, value) in self.cells[start..start + values.len()].iter().zip(values) {
            cell.store(value.to_bits(), Ordering::Relaxed);
        }
    }

    pub fn into_matrix(self) -> Matrix {
        let rows = self.cells.len().checked_div(self.cols).unwrap_or(0);
        let values = self.cells.into_iter().map(|cell| f32::from_bits(cell.into_inner())).collect();
        Matrix { rows, cols: self.cols, values }
    }
}
