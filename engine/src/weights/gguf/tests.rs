//! A small file in memory, whole, damaged and lying.

use proptest::prelude::*;

use super::*;

fn small() -> Vec<u8> {
    Builder::default()
        .string("general.architecture", "llama")
        .u32("llama.attention.head_count", 2)
        .pair(
            "list",
            9,
            &[&5u32.to_le_bytes()[..], &2u64.to_le_bytes(), &7i32.to_le_bytes(), &(-1i32).to_le_bytes()].concat(),
        )
        .tensor("blk.3.attn_q.weight", &[32, 8], 8, &[3; 8 * 34])
        .tensor("blk.3.ffn_up_exps.weight", &[2, 3, 4], 0, &[0; 96])
        .tensor("output_norm.weight", &[4], 0, &[0; 16])
        .build()
}

#[test]
fn a_good_file_is_read_under_the_names_of_a_folder() {
    let bytes = small();
    let gguf = Gguf::parse(&bytes).unwrap();
    assert_eq!(gguf.number("llama.attention.head_count"), Some(2));
    assert_eq!(gguf.list("list").unwrap(), [Value::Signed(7), Value::Signed(-1)]);
    assert_eq!(gguf.shape("model.norm.weight"), Some(&[4][..]));
    let q = &gguf.tensors["model.layers.3.self_attn.q_proj.weight"];
    assert_eq!((&q.shape[..], q.len_bytes, q.interleaved_heads), (&[8, 32][..], 272, Some(2)));
    assert_eq!(bytes[q.offset as usize..][..272], [3; 272]);
    let experts: Vec<u64> = (0..4)
        .map(|e| gguf.tensors[&format!("model.layers.3.mlp.experts.{e}.up_proj.weight")].offset - q.offset)
        .collect();
    assert_eq!(experts, [288, 312, 336, 360]);
}

#[test]
fn each_lie_is_told() {
    let lie = |from: &[u8], to: &[u8]| {
        let bytes = small();
        let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
        let mut bytes = bytes;
        bytes[at..at + to.len()].copy_from_slice(to);
        Gguf::parse(&bytes).unwrap_err()
    };
    let huge = u64::MAX.to_le_bytes();
    assert!(lie(b"GGUF", b"GGML").reason.contains("begin"));
    assert!(lie(&3u32.to_le_bytes(), &[9, 0, 0, 0]).reason.contains("version 9"));
    assert!(lie(&3u64.to_le_bytes(), &huge).reason.contains("claims"));
    assert!(lie(&20u64.to_le_bytes(), &huge).reason.contains("claims"));
    let fault = lie(&[32, 0, 0, 0, 0, 0, 0, 0, 8], &[33]);
    assert_eq!((fault.tensor.as_deref(), fault.reason.contains("whole blocks")), (Some("blk.3.attn_q.weight"), true));
    let fault = lie(&[32, 0, 0, 0, 0, 0, 0, 0, 8], &[0, 0, 0, 0, 0, 0, 0, 64]);
    assert!(fault.reason.contains("larger than") || fault.reason.contains("claims"), "{fault:?}");
    let whole = small();
    for len in 0..whole.len() - 16 {
        assert!(Gguf::parse(&whole[..len]).is_err(), "cut at {len}");
    }
}

/// One-byte elements become values of many bytes: lists that are short enough each are too many together.
#[test]
fn all_lists_share_one_budget() {
    let list = |count: usize| [&[0; 4][..], &(count as u64).to_le_bytes(), &vec![7; count]].concat();
    let file = |counts: &[usize]| {
        let pairs = counts.iter().enumerate();
        pairs.fold(Builder::default(), |file, (key, count)| file.pair(&format!("{key}"), 9, &list(*count))).build()
    };
    let half = 1 << 22;
    assert!(Gguf::parse(&file(&[half, half])).is_ok());
    let fault = Gguf::parse(&file(&[half, half, 1])).map(drop).unwrap_err();
    assert!(fault.reason.contains("key `2`") && fault.reason.contains("elements"), "{fault:?}");
}

fn stays_inside(bytes: &[u8]) {
    for (name, info) in Gguf::parse(bytes).unwrap_or_default().tensors {
        assert!(info.offset + info.len_bytes <= bytes.len() as u64, "{name}");
    }
}

proptest! {
    #[test]
    fn any_bytes_end_in_an_error_or_stay_inside(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        stays_inside(&[&b"GGUF\x03\0\0\0"[..], &bytes].concat());
    }

    #[test]
    fn a_damaged_file_ends_in_an_error_or_stays_inside(
        changes in proptest::collection::vec((0usize..400, prop_oneof![any::<u8>(), Just(255), Just(0)]), 1..12),
    ) {
        let mut bytes = small();
        for (at, byte) in changes {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        stays_inside(&bytes);
    }
}
