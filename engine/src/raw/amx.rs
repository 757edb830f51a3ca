//! Tiles (AMX): one instruction multiplies sixteen rows with sixteen columns. Of bytes, whose sums are those of the vector instructions,
//! bit for bit; and of bf16, whose sums have an order of their own that depends on the length of a row alone.
#![allow(unsafe_code, reason = "tiles have no safe form: they are state of the thread, reached by assembly")]

pub mod attention;

use std::arch::asm;
use std::marker::PhantomData;
use std::sync::OnceLock;

use super::Line;

/// A CPU with tiles for bytes, in a process that may use them.
#[derive(Debug, Clone, Copy)]
pub struct Amx(());

/// Sums of up to sixteen rows of inputs, sixteen columns each.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub struct Sums(pub [[i32; 16]; 16]);

/// Sixteen rows of 32 inputs, signed bytes.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub struct Rows(pub [[u8; 32]; 16]);

/// The same with tiles of bf16.
#[derive(Debug, Clone, Copy)]
pub struct AmxPairs(());

/// Tiles set up on this thread, for products of `R` rows over `4 × G` inputs; given back when it is dropped.
#[derive(Debug)]
pub struct Tiles<const R: usize, const G: usize>(PhantomData<*const ()>);

impl Amx {
    /// The token, where CPU and kernel have it; asked once.
    pub fn detect() -> Option<Self> {
        static FOUND: OnceLock<bool> = OnceLock::new();
        #[allow(clippy::disallowed_methods, reason = "two questions to processor and kernel, which do not wait")]
        FOUND.get_or_init(|| has_tiles() && allowed()).then_some(Self(()))
    }

    /// The token for bf16, where the CPU has that too; asked once, for a hypervisor answers that question itself.
    pub fn pairs(self) -> Option<AmxPairs> {
        static FOUND: OnceLock<bool> = OnceLock::new();
        let bf16 = 1 << 22;
        #[allow(clippy::disallowed_methods, reason = "a question to the processor, which does not wait")]
        let found = FOUND.get_or_init(|| std::arch::x86_64::__cpuid_count(7, 0).edx & bf16 != 0);
        found.then_some(AmxPairs(()))
    }

    /// Sets tiles up for `R` (at most 16) rows over `4 × G` (at most 32) inputs.
    pub fn tiles<const R: usize, const G: usize>(self) -> Tiles<R, G> {
        const { assert!(R <= 16 && G <= 8) };
        let set = [(R, 4 * G), (G, 64), (R, 64)];
        configure([set[0], set[1], set[2], set[0], set[1], set[2], (0, 0), (0, 0)]);
        Tiles(PhantomData)
    }
}

impl AmxPairs {
    /// Sets tiles up for `N` (at most 16) rows of inputs.
    pub fn tiles<const N: usize>(self) -> PairTiles<N> {
        const { assert!(N <= 16) };
        let (sums, weights, inputs) = ((16, 4 * N), (16, 64), (16, 4 * N));
        configure([sums, sums, sums, sums, weights, weights, inputs, inputs]);
        PairTiles(PhantomData)
    }
}

/// Tiles for bf16 set up on this thread, for `N` rows of inputs; given back when it is dropped.
#[derive(Debug)]
pub struct PairTiles<const N: usize>(PhantomData<*const ()>);

/// Sets up eight tiles of so many rows and bytes a row.
fn configure(tiles: [(usize, usize); 8]) {
    let mut config = Config { bytes: [0; 64] };
    config.bytes[0] = 1; // palette 1: eight tiles of 1 KiB
    for (tile, (rows, row_bytes)) in tiles.into_iter().enumerate() {
        config.bytes[16 + 2 * tile] = row_bytes as u8;
        config.bytes[48 + tile] = rows as u8;
    }
    // SAFETY: whoever has a token knows that the CPU has the instruction and the kernel allows it; 64 bytes of a valid set-up are read.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
}

#[repr(align(64))]
struct Config {
    bytes: [u8; 64],
}

/// Products by one of two sets of three tiles, so that two can be under way.
macro_rules! products {
    ($(#[$doc:meta])* $name:ident, $x:literal, $w:literal, $sums:literal) => {
        $(#[$doc])*
        #[inline(always)]
        pub fn $name(&self, x: &Rows, part: usize, w: &[Line; G], sums: &mut Sums) {
            let x = x.0.as_flattened()[part * 4 * G..][..15 * 32 + 4 * G].as_ptr();
            // SAFETY: `self` says that tiles are set up on this thread. `R` rows of `4 × G` bytes, 32 apart, are read from `x`, the last
            // of which ends within the slice; `G` rows of 64 from `w`; `R` rows of 64 are written to `sums`, which has sixteen.
            unsafe {
                asm!(
                    concat!("tilezero tmm", $sums),
                    concat!("tileloadd tmm", $x, ", [{x} + {x_step}]"),
                    concat!("tileloadd tmm", $w, ", [{w} + {step}]"),
                    concat!("tdpbssd tmm", $sums, ", tmm", $x, ", tmm", $w),
                    concat!("tilestored [{sums} + {step}], tmm", $sums),
                    x = in(reg) x,
                    x_step = in(reg) 32usize,
                    w = in(reg) w.as_ptr(),
                    step = in(reg) 64usize,
                    sums = in(reg) sums.0.as_mut_ptr(),
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                    options(nostack, preserves_flags)
                );
            }
        }
    };
}

impl<const R: usize, const G: usize> Tiles<R, G> {
    products!(
        /// Sums of the products of part `part` (of `4 × G` inputs) of each row of `x` with `w`, whose lines hold four inputs of
        /// sixteen columns each; signed bytes both.
        products_even, "0", "1", "2"
    );
    products!(
        /// The same with other tiles.
        products_odd, "3", "4", "5"
    );
}

impl<const R: usize, const G: usize> Drop for Tiles<R, G> {
    fn drop(&mut self) {
        // SAFETY: tiles were set up by whoever made this value.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Inputs of one instruction.
pub const PAIR_STEP: usize = 32;
/// Rows of weights of one call: two tiles.
pub const PAIR_ROWS: usize = 32;

impl<const N: usize> PairTiles<N> {
    /// `sums[tile][row][n]`: products of 32 rows of weights, `row_len` bytes apart, with `N` rows of inputs, or twice `N`: for each
    /// step of 32 inputs `x` has sixteen pairs of each row, pair by pair. `None` where the lengths do not fit together.
    #[inline(always)]
    pub fn products<const X: usize>(
        &self,
        w: &[u8],
        row_len: usize,
        x: [&[u8]; X],
    ) -> Option<[[[[f32; N]; 16]; 2]; X]> {
        const { assert!(X == 1 || X == 2) };
        let (steps, step_bytes) = (row_len / (2 * PAIR_STEP), 2 * PAIR_STEP * N);
        let fits = w.len() >= PAIR_ROWS * row_len && x.iter().all(|x| x.len() >= steps * step_bytes);
        if !fits || steps == 0 {
            return None;
        }
        let mut sums = [[[[0.0; N]; 16]; 2]; X];
        // SAFETY: `self` says that tiles are set up on this thread. In each of `steps` steps 64 bytes of each of 32 rows of `w` are read, and
        // `step_bytes` of each of `x`: within them, as was checked. `X × 2` tiles of sixteen rows of `4 × N` bytes are written to `sums`.
        unsafe {
            macro_rules! run {
                ([$($product:literal),*], [$($store:literal),*]) => {
                    asm!(
                        "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                        "2:",
                        "tileloadd tmm6, [{x} + {x_row}]",
                        "tileloadd tmm4, [{w} + {row_len}]",
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        "tileloadd tmm5, [{v} + {row_len}]",
                        "tdpbf16ps tmm1, tmm5, tmm6",
                        $($product,)*
                        "add {w}, 64", "add {v}, 64", "add {x}, {step_bytes}", "add {y}, {step_bytes}",
                        "dec {steps}",
                        "jnz 2b",
                        "tilestored [{sums} + {x_row}], tmm0",
                        "add {sums}, {tile}",
                        "tilestored [{sums} + {x_row}], tmm1",
                        $($store,)*
                        w = inout(reg) w.as_ptr() => _,
                        v = inout(reg) w[16 * row_len..].as_ptr() => _,
                        x = inout(reg) x[0].as_ptr() => _,
                        y = inout(reg) x[X - 1].as_ptr() => _,
                        steps = inout(reg) steps => _,
                        sums = inout(reg) sums.as_mut_ptr() => _,
                        row_len = in(reg) row_len,
                        x_row = in(reg) 4 * N,
                        step_bytes = in(reg) step_bytes,
                        tile = in(reg) 64 * N,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack)
                    )
                };
            }
            if X == 1 {
                run!([], []);
            } else {
                run!(
                    ["tileloadd tmm7, [{y} + {x_row}]", "tdpbf16ps tmm2, tmm4, tmm7", "tdpbf16ps tmm3, tmm5, tmm7"],
                    [
                        "add {sums}, {tile}",
                        "tilestored [{sums} + {x_row}], tmm2",
                        "add {sums}, {tile}",
                        "tilestored [{sums} + {x_row}], tmm3"
                    ]
                );
            }
        }
        Some(sums)
    }
}

impl<const N: usize> Drop for PairTiles<N> {
    fn drop(&mut self) {
        // SAFETY: tiles were set up by whoever made this value.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

fn has_tiles() -> bool {
    let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
    let (tile, bytes) = (1 << 24, 1 << 25);
    features & tile != 0 && features & bytes != 0
}

/// Asks the kernel for the state of tiles, which a process does not have by itself.
fn allowed() -> bool {
    const ARCH_PRCTL: isize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XTILEDATA: usize = 18;
    let mut result = ARCH_PRCTL;
    // SAFETY: a system call with two numbers; the kernel changes rax, rcx and r11 alone.
    unsafe {
        asm!("syscall", inlateout("rax") result, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") XTILEDATA, out("rcx") _, out("r11") _, options(nostack));
    }
    result == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<const R: usize, const G: usize>(amx: Amx) {
        let byte = |i: usize| ((i * 2_654_435_761) >> 7) as u8;
        let x = Rows(std::array::from_fn(|row| std::array::from_fn(|i| byte(row * 32 + i))));
        let w: [Line; G] = std::array::from_fn(|g| Line(std::array::from_fn(|i| byte(7777 + g * 64 + i))));
        let tiles = amx.tiles::<R, G>();
        for part in 0..8 / G {
            let (mut even, mut odd) = (Sums([[7; 16]; 16]), Sums([[7; 16]; 16]));
            tiles.products_even(&x, part, &w, &mut even);
            tiles.products_odd(&x, part, &w, &mut odd);
            for (row, column) in (0..16).flat_map(|row| (0..16).map(move |column| (row, column))) {
                let product = |k: usize| {
                    let (x, w) = (x.0[row][part * 4 * G + k] as i8, w[k / 4].0[column * 4 + k % 4] as i8);
                    i32::from(x) * i32::from(w)
                };
                let want = if row < R { (0..4 * G).map(product).sum() } else { 7 };
                assert_eq!((even.0[row][column], odd.0[row][column]), (want, want), "{R} {G} {row} {column}");
            }
        }
    }

    #[test]
    fn tiles_of_bf16_sum_in_one_order_whatever_stands_beside() {
        let Some(pairs) = Amx::detect().and_then(Amx::pairs) else { return };
        let (steps, row_len) = (3, 3 * 2 * PAIR_STEP);
        let value = |i: usize| half::bf16::from_f32((i * 37 % 101) as f32 / 50.0 - 1.0);
        let bytes =
            |count: usize, from: usize| (0..count).flat_map(|i| value(from + i).to_le_bytes()).collect::<Vec<u8>>();
        let w = bytes(PAIR_ROWS * steps * PAIR_STEP, 0);
        let one = bytes(steps * PAIR_STEP, 11);
        // the same row as the fourth of sixteen
        let mut many = bytes(16 * steps * PAIR_STEP, 5);
        for (pair, place) in one.as_chunks::<4>().0.iter().zip(many.as_chunks_mut::<64>().0) {
            place[12..16].copy_from_slice(pair);
        }
        let alone = pairs.tiles::<1>().products(&w, row_len, [&one]).unwrap();
        let beside = pairs.tiles::<16>().products(&w, row_len, [&many, &many]).unwrap();
        for row in 0..PAIR_ROWS {
            let got = alone[0][row / 16][row % 16][0];
            let want: f64 = (0..steps * PAIR_STEP)
                .map(|k| value(row * steps * PAIR_STEP + k).to_f64() * value(11 + k).to_f64())
                .sum();
            assert!((f64::from(got) - want).abs() < 1e-4, "{row}: {got} {want}");
            assert!(beside.iter().all(|x| x[row / 16][row % 16][3].to_bits() == got.to_bits()), "{row}");
        }
        assert!(pairs.tiles::<1>().products(&w[1..], row_len, [&one]).is_none());
    }

    #[test]
    fn tiles_sum_the_products_of_signed_bytes() {
        let Some(amx) = Amx::detect() else { return };
        check::<16, 8>(amx);
        check::<16, 4>(amx);
        check::<8, 8>(amx);
        check::<8, 4>(amx);
    }
}
