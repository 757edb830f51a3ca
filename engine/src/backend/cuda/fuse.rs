//! Launches that become one when a step is made into a graph: each rule takes neighbours that one kernel does with the same bits, so that a
//! graph and the eager step that it was made of cannot differ. Eager steps are not fused: it is the graph that steps run by. Pure.

use super::driver::Launch;
use super::products::Few;
use super::warpgroups::{self, Variant};

/// The same step in fewer launches.
pub fn fused(launches: &[Launch]) -> Vec<Launch> {
    let (mut out, mut rest) = (Vec::with_capacity(launches.len()), launches);
    while let Some((first, later)) = rest.split_first() {
        let (launch, taken) = RULES.iter().find_map(|rule| rule(rest)).unwrap_or((first.clone(), 1));
        out.push(launch);
        rest = later.get(taken - 1..).unwrap_or_default();
    }
    out
}

/// One launch for so many that stand first, if the rule is about them.
type Rule = fn(&[Launch]) -> Option<(Launch, usize)>;

const RULES: [Rule; 6] = [three_products, gate_and_up, three_of_many, gate_of_many, add_and_norm, copy_and_norm];

/// Arguments of a product, in its kernel's order.
enum Product {
    Out,
    X,
    Weight,
    Bias,
    Rows,
    Cols,
    Outputs,
}

fn arg(launch: &Launch, which: Product) -> u64 {
    launch.args()[which as usize]
}

/// `names` are the kernels of the launches that stand first.
fn first<'a, const N: usize>(launches: &'a [Launch], names: [&str; N]) -> Option<&'a [Launch; N]> {
    let first = launches.first_chunk::<N>()?;
    first.iter().zip(names).all(|(launch, name)| launch.kernel() == name).then_some(first)
}

/// Products of the same few rows: Q, K and V.
fn three_products(launches: &[Launch]) -> Option<(Launch, usize)> {
    let few = Few::named(launches.first()?.kernel())?;
    let three = first(launches, [few.kernel; 3])?;
    if !of_same_rows(three) {
        return None;
    }
    let blocks = three.iter().map(|one| few.blocks(arg(one, Product::Outputs) as usize)).sum::<usize>();
    let (grid, block, shared) = (three[0].grid(), three[0].block(), three[0].shared_bytes());
    let grid = [u32::try_from(blocks).ok()?, grid[1], grid[2]];
    Some((Launch::new(few.three, (grid, block, shared), &args_of_three(three)), 3))
}

fn args_of_three(three: &[Launch; 3]) -> Vec<u64> {
    let of = |which: fn() -> Product| three.iter().map(move |one| arg(one, which()));
    let mut args: Vec<u64> = of(|| Product::Out).collect();
    args.push(arg(&three[0], Product::X));
    args.extend(of(|| Product::Weight).chain(of(|| Product::Bias)));
    args.extend([arg(&three[0], Product::Rows), arg(&three[0], Product::Cols)]);
    args.extend(of(|| Product::Outputs));
    args
}

/// Products of the same many rows: by the fastest kernel for three, or by the one that was asked for in spite of a faster one.
fn three_of_many(launches: &[Launch]) -> Option<(Launch, usize)> {
    let three = launches.first_chunk::<3>()?;
    if !(three.iter().all(is_of_many) && of_same_x(three)) {
        return None;
    }
    let outputs = [0, 1, 2].map(|which: usize| arg(&three[which], Product::Outputs) as usize);
    let [rows, cols] = [Product::Rows, Product::Cols].map(|which| arg(&three[0], which) as usize);
    let fastest = |outputs: &[usize]| Variant::of(rows, cols, outputs);
    let asked_for = three.iter().zip(outputs).find(|(one, outputs)| one.kernel() != fastest(&[*outputs]).kernel);
    let variant = asked_for.and_then(|(one, _)| Variant::named(one.kernel())).unwrap_or_else(|| fastest(&outputs));
    Some((Launch::new(variant.three, variant.geometry(rows, &outputs), &args_of_three(three)), 3))
}

/// The products of the gate and of what it lets through, and `silu(gate) × up`. What is left out is the place that `up` would have been
/// written to: nobody reads it before it is written again, for it is the fused kernel's own operand and no other's.
fn gate_and_up(launches: &[Launch]) -> Option<(Launch, usize)> {
    let few = Few::named(launches.first()?.kernel())?;
    let [gate, up, silu] = first(launches, [few.kernel, few.kernel, "silu_mul"])?;
    let alike = of_same_rows(&launches[..2]) && is_gate([gate, up, silu]);
    if !(alike && is_dead(arg(up, Product::Out), &launches[3..])) {
        return None;
    }
    let outputs = arg(gate, Product::Outputs);
    let grid = [u32::try_from((outputs as usize).div_ceil(Few::TALL)).ok()?, gate.grid()[1], gate.grid()[2]];
    let words = [Product::Out, Product::X, Product::Weight].map(|which| arg(gate, which));
    let args =
        [&words[..], &[arg(up, Product::Weight), arg(gate, Product::Rows), arg(gate, Product::Cols), outputs]].concat();
    Some((Launch::new(few.pair, (grid, gate.block(), few.shared_bytes(2)), &args), 3))
}

/// The same of many rows, and the result packed for the product that comes next. What is left out are both places in f32.
fn gate_of_many(launches: &[Launch]) -> Option<(Launch, usize)> {
    let [gate, up, silu, pack] = launches.first_chunk::<4>()?;
    if !(is_of_many(gate) && is_of_many(up) && silu.kernel() == "silu_mul" && pack.kernel() == "pack_rows") {
        return None;
    }
    let outputs = arg(gate, Product::Outputs);
    let packs = pack.args()[1..] == [arg(gate, Product::Out), arg(gate, Product::Rows), outputs];
    // it is written while x is read
    let apart = pack.args()[0] != arg(gate, Product::X);
    let dead = [gate, up].iter().all(|one| is_dead(arg(one, Product::Out), &launches[4..]));
    if !(of_same_x(&launches[..2]) && is_gate([gate, up, silu]) && packs && apart && dead) {
        return None;
    }
    let (kernel, geometry) = warpgroups::gate(arg(gate, Product::Rows) as usize, outputs as usize);
    let args = [pack.args()[0], arg(gate, Product::X), arg(gate, Product::Weight), arg(up, Product::Weight)];
    Some((Launch::new(kernel, geometry, &[&args[..], &[arg(gate, Product::Cols), outputs]].concat()), 4))
}

/// `silu` takes both products, which are of the same width and without a bias.
fn is_gate([gate, up, silu]: [&Launch; 3]) -> bool {
    arg(gate, Product::Outputs) == arg(up, Product::Outputs)
        && silu.args()[..2] == [arg(gate, Product::Out), arg(up, Product::Out)]
        && [gate, up].iter().all(|one| arg(one, Product::Bias) == 0)
}

/// Nobody reads what is in `place`: where it comes again it comes as what a product writes.
fn is_dead(place: u64, later: &[Launch]) -> bool {
    later.iter().find(|later| later.args().contains(&place)).is_none_or(|later| {
        let (args, product) = (later.args(), Few::named(later.kernel()).is_some() || is_of_many(later));
        product && args[0] == place && !args[1..].contains(&place)
    })
}

fn is_of_many(launch: &Launch) -> bool {
    Variant::named(launch.kernel()).is_some()
}

/// The same rows, of the same length.
fn of_same_x(products: &[Launch]) -> bool {
    let same = |launch: &Launch| [Product::X, Product::Rows, Product::Cols].map(|which| arg(launch, which));
    products.windows(2).all(|two| same(&two[0]) == same(&two[1]))
}

/// And in the same blocks.
fn of_same_rows(products: &[Launch]) -> bool {
    of_same_x(products) && products.windows(2).all(|two| two[0].grid()[1] == two[1].grid()[1])
}

/// `out = x`, and the norm of `out` over itself.
fn copy_and_norm(launches: &[Launch]) -> Option<(Launch, usize)> {
    let copy = launches.first().filter(|launch| launch.kernel() == "copy_f32")?;
    let (to, from) = (copy.args()[0], copy.args()[1]);
    let norm = normed(launches.get(1)?, to)?;
    let args = [&[to, from], &norm.args()[1..]].concat();
    let kernel = if norm.kernel() == WIDE { "rms_norm_to_wide" } else { "rms_norm_to" };
    Some((Launch::new(kernel, (norm.grid(), norm.block(), norm.shared_bytes()), &args), 2))
}

/// `x += y`, and then the norm of x.
fn add_and_norm(launches: &[Launch]) -> Option<(Launch, usize)> {
    let [add, copy] = first(launches, ["add_f32", "copy_f32"])?;
    let (to, from) = (copy.args()[0], copy.args()[1]);
    let norm = normed(launches.get(2)?, to).filter(|norm| norm.kernel() == WIDE && from == add.args()[0])?;
    let args = [&[from, add.args()[1], to], &norm.args()[1..]].concat();
    Some((Launch::new("add_norm_wide", (norm.grid(), norm.block(), norm.shared_bytes()), &args), 3))
}

const WIDE: &str = "rms_norm_wide";

/// A norm of `place` over itself.
fn normed(launch: &Launch, place: u64) -> Option<&Launch> {
    Some(launch).filter(|launch| ["rms_norm", WIDE].contains(&launch.kernel()) && launch.args()[0] == place)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(kernel: &'static str, args: &[u64]) -> Launch {
        Launch::new(kernel, ([4, 1, 1], 256, 512), args)
    }

    fn names(launches: &[Launch]) -> Vec<&'static str> {
        launches.iter().map(Launch::kernel).collect()
    }

    fn product(out: u64, x: u64, outputs: u64) -> Launch {
        launch("mma_few_8", &[out, x, out + 1, 0, 1, 2048, outputs])
    }

    /// A layer of a decoder as it is launched.
    fn layer() -> Vec<Launch> {
        vec![
            launch("copy_f32", &[20, 10, 2048]),
            launch(WIDE, &[20, 7, 1, 2048, 3]),
            product(30, 20, 2048),
            product(40, 20, 512),
            product(50, 20, 512),
            launch("place_bf16", &[30, 40, 50]),
            product(60, 55, 2048),
            launch("add_f32", &[10, 60, 2048]),
            launch("copy_f32", &[20, 10, 2048]),
            launch(WIDE, &[20, 8, 1, 2048, 3]),
            product(70, 20, 8192),
            product(80, 20, 8192),
            launch("silu_mul", &[70, 80, 8192]),
            product(60, 70, 2048),
            launch("add_f32", &[10, 60, 2048]),
        ]
    }

    #[test]
    fn a_layer_becomes_eight_launches_with_the_arguments_of_all() {
        let fused = fused(&[layer(), layer()].concat());
        let one = ["mma_three_few_8", "place_bf16", "mma_few_8", "add_norm_wide", "mma_pair_few_8", "mma_few_8"];
        let whole = [&["rms_norm_to_wide"], &one[..], &["add_norm_wide"], &one[..], &["add_f32"]].concat();
        assert_eq!(names(&fused), whole);
        assert_eq!(fused[0].args(), [20, 10, 7, 1, 2048, 3]);
        assert_eq!(fused[1].args(), [30, 40, 50, 20, 31, 41, 51, 0, 0, 0, 1, 2048, 2048, 512, 512]);
        assert_eq!(fused[1].grid(), [128 + 32 + 32, 1, 1]);
        assert_eq!(fused[4].args(), [10, 60, 20, 8, 1, 2048, 3]);
        assert_eq!(fused[5].args(), [70, 20, 71, 81, 1, 2048, 8192]);
        assert_eq!((fused[5].grid(), fused[5].shared_bytes()), ([512, 1, 1], 9216));
    }

    /// A product of 200 rows of 2,048 values.
    fn many(out: u64, x: u64, outputs: u64) -> Launch {
        let variant = Variant::of(200, 2048, &[outputs as usize]);
        let args = [out, x, out + 1, 0, 200, 2048, outputs];
        Launch::new(variant.kernel, variant.geometry(200, &[outputs as usize]), &args)
    }

    #[test]
    fn many_rows_have_their_three_products_and_their_gate_in_one_launch() {
        let pack = |to: u64, from: u64, cols: u64| launch("pack_rows", &[to, from, 200, cols]);
        let mlp = |pack: Launch, later: Launch| {
            let silu = launch("silu_mul", &[70, 80, 200 * 8192]);
            vec![many(70, 21, 8192), many(80, 21, 8192), silu, pack, many(60, 22, 2048), later]
        };
        let again = many(70, 21, 8192);
        let layer = [&[many(30, 21, 2048), many(40, 21, 512), many(50, 21, 512)], &mlp(pack(22, 70, 8192), again)[..]];
        let (fused_ones, rest) = (fused(&layer.concat()), [many(60, 22, 2048).kernel(), many(70, 21, 8192).kernel()]);
        assert_eq!(names(&fused_ones), [&["wgmma_three_128_halves", "wgmma_gate_128"], &rest[..]].concat());
        assert_eq!(fused_ones[0].args(), [30, 40, 50, 21, 31, 41, 51, 0, 0, 0, 200, 2048, 2048, 512, 512]);
        assert_eq!(fused_ones[1].args(), [22, 21, 71, 81, 2048, 8192]);
        assert_eq!((fused_ones[0].grid(), fused_ones[1].grid()), ([2, 2, 24], [2, 2, 64]));
        let stays = [
            ("x is read while it is written", mlp(pack(21, 70, 8192), many(70, 21, 8192))),
            ("the gate is read later", mlp(pack(22, 70, 8192), launch("add_f32", &[10, 70, 64]))),
            ("up is read later", mlp(pack(22, 70, 8192), launch("add_f32", &[10, 80, 64]))),
            ("something else is packed", mlp(pack(22, 71, 8192), many(70, 21, 8192))),
        ];
        for (why, launches) in stays {
            assert_eq!(fused(&launches), launches, "{why}");
        }
        let by = |kernel: &'static str, out: u64| {
            let variant = Variant::named(kernel).unwrap();
            let args = [out, 21, out + 1, 0, 200, 2048, 512];
            Launch::new(kernel, variant.geometry(200, &[512]), &args)
        };
        let asked_for = fused(&[30, 40, 50].map(|out| by("wgmma_128", out)));
        assert_eq!(names(&asked_for), ["wgmma_three_128"], "in spite of faster ones");
        let biased = |which: usize| {
            let mut launches = mlp(pack(22, 70, 8192), many(70, 21, 8192));
            let args = [&launches[which].args()[..3], &[9], &launches[which].args()[4..]].concat();
            let (grid, block, shared) =
                (launches[which].grid(), launches[which].block(), launches[which].shared_bytes());
            launches[which] = Launch::new(launches[which].kernel(), (grid, block, shared), &args);
            launches
        };
        assert_eq!((fused(&biased(0)), fused(&biased(1))), (biased(0), biased(1)));
    }

    #[test]
    fn what_is_not_the_same_rows_or_is_read_later_stays_as_it_is() {
        let other_rows = [product(30, 20, 64), product(40, 21, 64), product(50, 20, 64)];
        assert_eq!(fused(&other_rows), other_rows);
        let mlp =
            |later: Launch| vec![product(70, 20, 64), product(80, 20, 64), launch("silu_mul", &[70, 80, 64]), later];
        let read = mlp(launch("add_f32", &[10, 80, 64]));
        assert_eq!(fused(&read), read, "what up gave is read by another");
        assert_eq!(names(&fused(&mlp(product(80, 10, 64)))), ["mma_pair_few_8", "mma_few_8"], "it is written anew");
        let biased = [
            launch("mma_few_8", &[70, 20, 71, 9, 1, 2048, 64]),
            product(80, 20, 64),
            launch("silu_mul", &[70, 80, 64]),
        ];
        assert_eq!(fused(&biased), biased);
        let plain = [launch("copy_f32", &[20, 10, 8]), launch("rms_norm", &[21, 7, 1, 8, 3])];
        assert_eq!(fused(&plain), plain, "the norm of something else");
    }
}
