//! F1: Xids name what broke and what mends it; they move the time of a confirmation and never make a stall.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use std::fmt::Write;

use common::{Sim, stalled, suspect};
use vitals::observation::{GpuObs, LogHit, Ms, XidObs};
use vitals::verdict::Verdict;
use vitals::xid::{LATELY_MS, Pci, ROWS, Remedy, Whose, XIDS_MAX, look_up, parse};

const UUID: &str = "GPU-8c5f";
const LINE: &str =
    "[ 1843.308145] NVRM: Xid (PCI:0000:44:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.";

fn event(code: u32, at_ms: Ms) -> XidObs {
    XidObs { uuid: UUID.into(), code, remedy: None, at_ms }
}

fn line(code: u32, pci: &str, at_ms: Ms) -> LogHit {
    let line = format!("[ 1843.308145] NVRM: Xid (PCI:{pci}): {code}, pid=7, name=python3");
    LogHit { signature: "xid".into(), at_ms, line }
}

fn card() -> GpuObs {
    GpuObs { uuid: UUID.into(), pci: Some("00000000:44:00.0".into()), ..GpuObs::default() }
}

/// A foreign engine in mid-traffic, whose step then spins.
fn spinning() -> Sim {
    let mut sim = Sim::foreign().up().busy(10_000);
    sim.process().state = Some('R');
    sim
}

fn codes(sim: &Sim) -> Vec<u32> {
    sim.detector.xids().iter().map(|xid| xid.code).collect()
}

fn said(sim: &Sim, word: &str) -> bool {
    sim.last.as_ref().unwrap().reasons.iter().any(|reason| reason.source == "gpu" && reason.text.contains(word))
}

/// How long a suspicion takes to be confirmed beside these Xids.
fn confirmed_after(xids: &[u32]) -> Ms {
    let mut sim = spinning();
    sim.silence_until(10_000, suspect).unwrap();
    sim.xids = xids.iter().map(|code| event(*code, sim.now)).collect();
    let took = sim.silence_until(60_000, stalled).unwrap();
    assert!(xids.iter().all(|code| said(&sim, &format!("Xid {code} of {UUID}"))), "{:?}", sim.last);
    took
}

#[test]
fn fault_f1_a_broken_gpu_confirms_sooner_and_an_applications_fault_does_not() {
    let alone = confirmed_after(&[]);
    for broken in [48, 79, 94, 95, 119, 120] {
        assert!(confirmed_after(&[broken]) < alone, "Xid {broken}");
    }
    for own in [13, 31, 43] {
        assert_eq!(confirmed_after(&[own]), alone, "Xid {own} neither blames nor excuses: whose it is nobody knows");
    }
    assert_eq!(confirmed_after(&[900]), alone, "a code that nobody knows");
}

#[test]
fn fault_f1_a_xid_alone_is_never_a_stall() {
    for code in ROWS.iter().map(|row| row.code).chain([900]) {
        let mut sim = Sim::foreign().up().busy(1_000);
        sim.xids = vec![event(code, sim.now)];
        sim.log = vec![line(code, "0000:44:00", sim.now)];
        assert!(sim.decode(20_000).iter().all(|outcome| outcome.verdict == Verdict::Progressing), "Xid {code}");
        sim.depart();
        sim.xids = vec![event(code, sim.now)];
        assert_eq!(sim.silence(60_000).verdict, Verdict::Idle, "Xid {code}");
    }
}

#[test]
fn fault_f1_an_engine_that_dies_with_a_xid_names_it() {
    for (code, words) in [(79, "the node must be drained and restarted"), (31, "perhaps not this engine's")] {
        let mut sim = Sim::native().up().busy(1_000);
        sim.xids = vec![event(code, sim.now)];
        sim.process().alive = false;
        assert_eq!(sim.tick(100).verdict, Verdict::Dead);
        assert!(said(&sim, words) && said(&sim, &format!("Xid {code} of {UUID}")), "{:?}", sim.last);
    }
}

#[test]
fn fault_f1_a_line_of_the_log_and_an_event_are_one_fact() {
    let mut sim = spinning();
    sim.gpus = vec![card()];
    sim.tick(100);
    sim.gpus = Vec::new(); // it fell off the bus: NVML tells of it no more
    sim.xids = vec![event(79, sim.now)];
    sim.log = vec![LogHit { signature: "xid".into(), at_ms: sim.now + 40, line: LINE.into() }];
    sim.tick(100);
    let xids = sim.detector.xids();
    assert_eq!((xids.len(), xids[0].uuid.as_deref(), xids[0].pci), (1, Some(UUID), Pci::parse("0000:44:00")));
    // a line alone is known by its address
    sim.log = vec![line(119, "0000:44:00", sim.now)];
    sim.tick(100);
    assert_eq!(sim.detector.xids()[1].uuid.as_deref(), Some(UUID));
    // the kernel speaks of all GPUs of the machine
    sim.log = vec![line(95, "0000:45:00", sim.now)];
    sim.tick(100);
    assert_eq!(codes(&sim), [79, 119], "another GPU is somebody else's");
    let mut blind = spinning();
    blind.log = vec![line(95, "0000:45:00", blind.now)];
    blind.tick(100);
    assert_eq!(codes(&blind), [95], "where NVML tells of none it may be ours");
}

#[test]
fn fault_f1_deliveries_prove_a_xid_harmless() {
    let mut sim = Sim::foreign().up().busy(1_000);
    sim.xids = vec![event(79, sim.now)];
    sim.decode(LATELY_MS);
    assert_eq!(codes(&sim), [79], "what was computed before may still come");
    sim.decode(1_000);
    assert!(codes(&sim).is_empty(), "and the event, which is told again and again, is not taken for news");
    sim.xids = vec![event(79, sim.now)];
    sim.silence(1_000);
    assert_eq!(codes(&sim), [79], "the same once more is news");
}

#[test]
fn fault_f1_a_restart_cures_some_and_not_a_gpu_that_needs_a_reset() {
    let mut sim = spinning();
    sim.xids = vec![event(94, sim.now), event(31, sim.now), event(119, sim.now), event(79, sim.now)];
    sim.tick(100);
    assert_eq!(codes(&sim), [94, 31, 119, 79]);
    sim.process().started_ms = sim.now;
    sim.tick(100);
    assert_eq!(codes(&sim), [119, 79]);
    sim.xids.clear(); // the agent forgets in time
    sim.silence(1_000);
    assert_eq!(codes(&sim), [119, 79], "no delivery has said otherwise");
}

#[test]
fn fault_f1_the_drivers_own_word_counts_and_its_silence_does_not() {
    let said = |remedy| {
        let mut sim = spinning();
        sim.xids = vec![XidObs { remedy, ..event(154, sim.now) }];
        sim.tick(100);
        sim.detector.xids().iter().filter_map(|xid| xid.remedy).collect::<Vec<_>>()
    };
    assert!(said(None).is_empty() && said(Some(Remedy::Nothing)).is_empty());
    assert_eq!(said(Some(Remedy::RestartNode)), [Remedy::RestartNode]);
    let slice = "NVRM: Xid (PCI:0000:b1:00 GPU-I:05): 94, pid=7, name=python3, Ch 00000008";
    assert_eq!(parse(slice).unwrap().pci, Pci::parse("0000:b1:00"), "a slice (MIG) is of a GPU that has a place");
    let action = |text: &str| parse(&format!("NVRM: Xid (PCI:0000:44:00): 154, {text}")).unwrap().remedy;
    let reboot = action("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)");
    assert_eq!(reboot, Some(Remedy::RestartNode));
    assert_eq!(action("recovery action changed from 0x2 (x) to 0x0 (None)"), Some(Remedy::Nothing));
    assert_eq!(action("recovery action changed from 0x0 (None) to 0x1"), Some(Remedy::ResetGpu));
    assert_eq!(action("recovery action changed from 0x0 (None) to 0x77 (Something New)"), None);
    assert_eq!(action("recovery action changed"), None);
}

#[test]
fn odd_lines_and_liars_are_no_xids() {
    assert_eq!(parse(LINE).map(|xid| (xid.code, xid.pci)), Some((79, Pci::parse("00000000:44:00.0"))));
    assert_eq!(parse("NVRM: Xid (0000:03:00): 14, Channel 00000001").map(|xid| xid.code), Some(14));
    for odd in [
        "NVRM: Xid (PCI:0000:44:00): ",
        "NVRM: Xid (PCI:0000:44:00): x",
        "NVRM: Xid (PCI:0000:44:00): 0, a",
        "NVRM: Xid (PCI:0000:44:00): 999, a",
        "NVRM: Xid (PCI:0000:44:00): 99999999999999999999, a",
        "NVRM: Xid 79",
        "tell me about NVRM: Xid (PCI:0000:44:00): 79, a",
    ] {
        assert_eq!(parse(odd), None, "{odd}");
    }
    for odd in ["", "44:00", "0000:44:00:00", "+000:44:00", "0000:444:00", "zzzz:44:00"] {
        assert_eq!(Pci::parse(odd), None, "{odd}");
    }
    let mut sim = spinning();
    sim.xids = [0, 999, u32::MAX].map(|code| event(code, sim.now)).into();
    sim.tick(100);
    assert!(codes(&sim).is_empty());
    sim.xids = (200..400).map(|code| event(code, sim.now)).chain([event(79, sim.now)]).collect();
    sim.xids.extend((400..600).map(|code| event(code, sim.now)));
    sim.tick(100);
    assert!(codes(&sim).len() == XIDS_MAX && codes(&sim).contains(&79), "{:?}", codes(&sim));
}

#[test]
fn the_table_says_what_the_catalogue_says() {
    assert!(ROWS.windows(2).all(|pair| pair[0].code < pair[1].code), "ascending, each code once");
    for row in ROWS {
        let wanted = match row.bucket {
            "IGNORE" => Remedy::Nothing,
            "RESTART_APP" | "WORKFLOW_NVLINK5_ERR" => Remedy::RestartApplication,
            "RESET_GPU" | "WORKFLOW_XID_48" | "WORKFLOW_NVLINK_ERR" => Remedy::ResetGpu,
            "RESTART_BM" | "RESTART_VM" => Remedy::RestartNode,
            "CONTACT_SUPPORT" | "CHECK_MECHANICALS" | "UPDATE_SWFW" => Remedy::ContactSupport,
            "WORKFLOW_XID_45" | "XID_154" => Remedy::Nothing,
            other => panic!("{other} is no bucket"),
        };
        assert_eq!(row.remedy, wanted, "Xid {}", row.code);
        assert!(row.whose != Whose::Nobody || row.remedy == Remedy::Nothing, "Xid {}", row.code);
    }
    let remedy = |code| look_up(code).map(|row| row.remedy);
    assert_eq!([48, 95, 119, 120].map(remedy), [Some(Remedy::ResetGpu); 4]);
    assert_eq!((remedy(94), remedy(79)), (Some(Remedy::RestartApplication), Some(Remedy::RestartNode)));
    assert_eq!((remedy(0), remedy(9), remedy(u32::MAX)), (None, None, None));
}

#[test]
fn the_table_is_in_the_documentation() {
    let mut wanted = String::from("\n| Xid | what | bucket | whose | what mends it |\n|---|---|---|---|---|\n");
    for row in ROWS {
        let whose = match row.whose {
            Whose::Gpu => "the GPU's",
            Whose::Application => "an application's",
            Whose::Nobody => "-",
        };
        writeln!(wanted, "| {} | {} | `{}` | {whose} | {:?} |", row.code, row.what, row.bucket, row.remedy).unwrap();
    }
    wanted.push('\n');
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/engine-signals.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (head, rest) = text.split_once("<!-- xids -->\n").unwrap();
    let (_, tail) = rest.split_once("<!-- end of xids -->").unwrap();
    let whole = format!("{head}<!-- xids -->\n{wanted}<!-- end of xids -->{tail}");
    if std::env::var_os("TRUEBEAT_REGENERATE").is_some() {
        std::fs::write(path, &whole).unwrap();
    }
    assert!(text == whole || std::env::var_os("TRUEBEAT_REGENERATE").is_some(), "run `make regenerate`");
}
