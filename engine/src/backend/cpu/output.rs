//! A matrix that several threads fill at once, each its own cells. Relaxed atomics compile to plain stores, and a mistake
//! about who owns a cell would give a wrong number that a test sees, not undefined behaviour.

use std::sync::atomic::{AtomicU32, Ordering};

use super::Matrix;

/// `rows × cols` f32 values, at first zero.
#[derive(Debug)]
pub struct Output {
    cols: usize,
    cells: Vec<AtomicU32>,
}

impl Output {
    pub fn new(rows: usize, cols: usize) -> Self {
        Self { cols, cells: (0..rows * cols).map(|_| AtomicU32::new(0)).collect() }
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
