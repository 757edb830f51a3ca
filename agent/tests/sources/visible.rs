//! Which GPUs are the engine's, by its environment.

use agent::sources::VisibleGpus;
use vitals::observation::{GpuObs, XidObs};

fn machine() -> Vec<GpuObs> {
    let card = |index| GpuObs {
        uuid: format!("GPU-{index}{index}-a"),
        index: Some(index),
        power_limit_watts: Some(700.0),
        ..GpuObs::default()
    };
    (0..4).map(card).collect()
}

fn kept(visible: Option<&VisibleGpus>, mut gpus: Vec<GpuObs>) -> Vec<u32> {
    if let Some(visible) = visible {
        visible.keep(&mut gpus);
    }
    gpus.iter().filter_map(|gpu| gpu.index).collect()
}

/// The numbers of the GPUs that are left of four, for an environment of these lines.
fn own(ours: bool, lines: &str) -> Vec<u32> {
    let environ = format!("HOME=/root\n{lines}\n").replace('\n', "\0");
    kept(VisibleGpus::of_environ(environ.as_bytes(), ours).as_ref(), machine())
}

const ALL: [u32; 4] = [0, 1, 2, 3];

#[test]
fn cuda_s_list_is_read_as_cuda_reads_it() {
    for (list, want) in [
        ("2", vec![2]),
        ("3,1", vec![1, 3]),
        (" 0 , 2 ", vec![0, 2]),
        ("0,-1,2", vec![0]),
        ("0,what,2", vec![0]),
        ("-1", vec![]),
        ("", vec![]),
        ("NoDevFiles", vec![]),
        ("GPU-11", vec![1]),
        ("GPU-11-a,GPU-33-a", vec![1, 3]),
        ("GPU-99", vec![]),
        ("MIG-GPU-22-a/1/0", vec![2]),
        ("MIG-5f7a-what", ALL.to_vec()),
        ("7", vec![]),
    ] {
        assert_eq!(own(true, &format!("CUDA_VISIBLE_DEVICES={list}")), want, "{list:?}");
    }
}

#[test]
fn what_is_not_said_is_all_of_them() {
    assert_eq!(own(true, "XCUDA_VISIBLE_DEVICES=1"), ALL);
    assert_eq!(own(true, "NVIDIA_VISIBLE_DEVICES=GPU-11-a"), ALL, "what we see in the same container is all of that");
    assert_eq!(own(false, "CUDA_VISIBLE_DEVICES=1"), ALL, "among what, nobody knows");
    for given in ["all", "void", "none", "", "0", "GPU-11-a,1"] {
        let given = format!("NVIDIA_VISIBLE_DEVICES={given}");
        assert_eq!(own(false, &given), ALL, "{given}");
        assert_eq!(own(false, &format!("{given}\nCUDA_VISIBLE_DEVICES=GPU-22")), [2], "{given}");
    }
}

#[test]
fn numbers_count_among_what_the_container_was_given() {
    let given = "NVIDIA_VISIBLE_DEVICES=GPU-33-a,GPU-11-a";
    assert_eq!(own(false, given), [1, 3]);
    assert_eq!(own(false, &format!("{given}\nCUDA_VISIBLE_DEVICES=1")), [3]);
    assert_eq!(own(false, &format!("{given},GPU-77-a\nCUDA_VISIBLE_DEVICES=1")), ALL, "one of them is not seen");
}

#[test]
fn numbers_of_cards_that_differ_are_believed_only_in_the_order_of_the_bus() {
    let told = Some(700.0);
    for (order, want) in [("", ALL.to_vec()), ("\nCUDA_DEVICE_ORDER=PCI_BUS_ID", vec![1])] {
        let environ = format!("CUDA_VISIBLE_DEVICES=1{order}").replace('\n', "\0");
        let visible = VisibleGpus::of_environ(environ.as_bytes(), true);
        for limits in [[Some(300.0), told, told, told], [None, told, told, told], [None; 4]] {
            let mut gpus = machine();
            gpus.iter_mut().zip(limits).for_each(|(gpu, limit)| gpu.power_limit_watts = limit);
            assert_eq!(kept(visible.as_ref(), gpus), want, "{order:?}: {limits:?}");
        }
    }
}

#[test]
fn a_card_that_is_lost_moves_no_number_and_its_xid_may_be_ours() {
    let mut gpus = machine();
    gpus.remove(1);
    let xid = |uuid: &str| XidObs { uuid: uuid.to_owned(), code: 79, ..XidObs::default() };
    let mut xids = vec![xid("GPU-11-a"), xid("GPU-22-a"), xid("GPU-33-a"), xid("")];
    let visible = VisibleGpus::of_environ(b"CUDA_VISIBLE_DEVICES=1,2", true).unwrap();
    visible.keep_xids(&gpus, &[], &mut xids);
    visible.keep(&mut gpus);
    assert_eq!((gpus.len(), gpus[0].index), (1, Some(2)));
    assert_eq!(xids.iter().map(|xid| xid.uuid.as_str()).collect::<Vec<_>>(), ["GPU-11-a", "GPU-22-a", ""]);
    // one that still has its name is known not to be ours; one that is cut into parts has no number, and then no number is believed
    for (index, left) in [(Some(3), 0), (None, 1)] {
        let lost = GpuObs { uuid: "GPU-33-a".to_owned(), index, ..GpuObs::default() };
        let mut xids = vec![xid("GPU-33-a")];
        visible.keep_xids(&machine()[..3], &[lost], &mut xids);
        assert_eq!(xids.len(), left, "{index:?}");
    }
    // a driver that never spoke is silent about ours as well
    let mut silent = vec![GpuObs { uuid: "unknown".to_owned(), ..GpuObs::default() }];
    visible.keep(&mut silent);
    assert_eq!(silent.len(), 1);
}
