//! Products of many rows by warpgroups (`kernels/wgmma.cu`): which kernel makes them, with how many blocks. All give a row the same bits: the
//! choice is one of speed alone. Pure.

/// Outputs of a block; rows of a packed tile.
const TILE: usize = 128;
/// Columns of a stage.
const STAGE_COLS: usize = 64;
/// Threads that add, and those that bring stages.
const THREADS: u32 = 256 + 128;
/// Blocks of a cluster.
const CLUSTER: usize = 2;
/// Blocks that run at once: one on each multiprocessor of an H100 or H200 (SXM; where there are fewer the choice is a guess).
const AT_ONCE: usize = 132;

/// Dynamic shared memory that a block of any of these kernels takes, at most: more than a kernel gets without asking.
#[cfg(any(test, feature = "cuda"))]
pub const SHARED_BYTES_MAX: u32 = shared_bytes(128);

/// A kernel for products, and the same for three of them at once.
#[derive(Debug, PartialEq, Eq)]
pub struct Variant {
    pub kernel: &'static str,
    pub three: &'static str,
    /// Rows of a block.
    rows: usize,
    /// The blocks of a cluster have half of the columns each, and not two tiles.
    halves: bool,
    /// What a block takes for a stage, and beside its stages, in nanoseconds on an H100: what variants are compared by.
    stage_ns: usize,
    block_ns: usize,
}

#[rustfmt::skip] // a table
pub static VARIANTS: [Variant; 4] = [
    Variant { kernel: "wgmma_128", three: "wgmma_three_128", rows: 128, halves: false, stage_ns: 385, block_ns: 5000 },
    Variant { kernel: "wgmma_64", three: "wgmma_three_64", rows: 64, halves: false, stage_ns: 320, block_ns: 5000 },
    Variant { kernel: "wgmma_128_halves", three: "wgmma_three_128_halves", rows: 128, halves: true, stage_ns: 450, block_ns: 8000 },
    Variant { kernel: "wgmma_64_halves", three: "wgmma_three_64_halves", rows: 64, halves: true, stage_ns: 390, block_ns: 8000 },
];

impl Variant {
    /// The fastest for products of so many outputs each, of the same `rows` rows of `cols` values.
    pub fn of(rows: usize, cols: usize, outputs: &[usize]) -> &'static Self {
        let [first, rest @ ..] = &VARIANTS;
        let faster = |a: &'static Self, b: &'static Self| {
            if b.nanoseconds(rows, cols, outputs) < a.nanoseconds(rows, cols, outputs) { b } else { a }
        };
        rest.iter().fold(first, faster)
    }

    /// That of a kernel for one product.
    pub fn named(kernel: &str) -> Option<&'static Self> {
        VARIANTS.iter().find(|variant| variant.kernel == kernel)
    }

    /// Grid, threads and shared memory.
    pub fn geometry(&self, rows: usize, outputs: &[usize]) -> ([u32; 3], u32, u32) {
        grid(rows.div_ceil(self.rows), self.clusters(outputs), self.rows)
    }

    fn clusters(&self, outputs: &[usize]) -> usize {
        let each = if self.halves { TILE } else { CLUSTER * TILE };
        outputs.iter().map(|outputs| outputs.div_ceil(each)).sum()
    }

    fn nanoseconds(&self, rows: usize, cols: usize, outputs: &[usize]) -> usize {
        let blocks = CLUSTER * self.clusters(outputs) * rows.div_ceil(self.rows);
        let stages = cols.div_ceil(STAGE_COLS).div_ceil(if self.halves { 2 } else { 1 });
        blocks.div_ceil(AT_ONCE) * (stages * self.stage_ns + self.block_ns)
    }
}

/// The kernel that makes `silu(x · gateᵀ) × (x · upᵀ)`, packed, and its geometry.
pub fn gate(rows: usize, outputs: usize) -> (&'static str, ([u32; 3], u32, u32)) {
    let (kernel, block_rows) = if rows <= 64 { ("wgmma_gate_64", 64) } else { ("wgmma_gate_128", 128) };
    let clusters = outputs.div_ceil(STAGE_COLS).div_ceil(CLUSTER);
    (kernel, grid(rows.div_ceil(block_rows), clusters, block_rows))
}

fn grid(row_tiles: usize, clusters: usize, block_rows: usize) -> ([u32; 3], u32, u32) {
    let count = |of: usize| u32::try_from(of).unwrap_or(u32::MAX).max(1);
    ([CLUSTER as u32, count(row_tiles), count(clusters)], THREADS, shared_bytes(block_rows as u32))
}

/// As many stages as there is room for, with two barriers each, from a multiple of 1,024 on (`Room` of wgmma_tile.cuh).
const fn shared_bytes(block_rows: u32) -> u32 {
    let (depth, line) = (if block_rows == 128 { 7 } else { 9 }, STAGE_COLS as u32 * 2);
    depth * ((TILE as u32 + block_rows) * line + 16) + 1024
}

/// Memory of packed rows, and threads that pack them.
pub fn packed(rows: usize, cols: usize) -> (u64, usize) {
    let (rows, stages) = (rows.next_multiple_of(TILE), cols.div_ceil(STAGE_COLS));
    ((rows * stages * STAGE_COLS * 2) as u64, rows * stages * 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(rows: usize, cols: usize, outputs: &[usize]) -> &'static str {
        Variant::of(rows, cols, outputs).kernel
    }

    #[test]
    fn few_tiles_share_their_columns_and_many_do_not() {
        assert_eq!(chosen(256, 4096, &[14336]), "wgmma_128");
        assert_eq!(chosen(2048, 4096, &[4096]), "wgmma_128");
        assert_eq!(chosen(256, 4096, &[4096]), "wgmma_128_halves");
        assert_eq!(chosen(256, 14336, &[4096]), "wgmma_128_halves");
        assert_eq!(chosen(256, 4096, &[4096, 1024, 1024]), "wgmma_128");
        assert_eq!(chosen(128, 4096, &[4096]), "wgmma_64_halves");
        assert_eq!(chosen(64, 14336, &[4096]), "wgmma_64_halves");
        assert_eq!(chosen(64, 4096, &[14336]), "wgmma_64");
        assert_eq!(chosen(40, 8, &[1]), "wgmma_64");
    }

    #[test]
    fn every_tile_has_a_block_and_each_fits_a_multiprocessor() {
        let geometry = |kernel: &str, rows, outputs: &[usize]| {
            VARIANTS.iter().find(|variant| variant.kernel == kernel).unwrap().geometry(rows, outputs)
        };
        assert_eq!(geometry("wgmma_128", 129, &[257, 1]), ([2, 2, 3], 384, 230_512));
        assert_eq!(geometry("wgmma_64_halves", 129, &[257, 1]), ([2, 3, 4], 384, 222_352));
        assert_eq!(gate(64, 200), ("wgmma_gate_64", ([2, 1, 2], 384, 222_352)));
        assert_eq!(gate(300, 14336), ("wgmma_gate_128", ([2, 3, 112], 384, 230_512)));
        const { assert!(SHARED_BYTES_MAX <= 227 << 10, "what a block of a device of 9.0 may have") };
        assert_eq!((packed(1, 8), packed(130, 72)), ((128 * 128, 256), (256 * 256, 1024)));
        assert!(Variant::named("wgmma_64").is_some() && Variant::named("wgmma_three_64").is_none());
    }
}
