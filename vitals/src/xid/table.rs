//! What NVIDIA's public Xid catalogue says is to be done at once, by code.
//!
//! Source of every row: "Xid Catalog", <https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>, column "Resolution
//! Bucket (Immediate Action)", whose word stands in `bucket`; for codes whose bucket is a workflow its definition on that page
//! (`WORKFLOW_XID_48`: alone a reset, with 63 or 64 a drain and a reset), and the column of trigger conditions for what is an
//! application's own fault. Recovery actions of Xid 154: "GPU memory error management", response flags. Codes that the catalogue
//! calls unused are not here.

use super::{Remedy, Whose};

/// One code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    pub code: u32,
    /// For people.
    pub what: &'static str,
    /// The catalogue's word.
    pub bucket: &'static str,
    pub whose: Whose,
    pub remedy: Remedy,
}

/// The row of a code.
pub fn look_up(code: u32) -> Option<&'static Row> {
    ROWS.binary_search_by_key(&code, |row| row.code).ok().and_then(|at| ROWS.get(at))
}

const fn row(code: u32, what: &'static str, bucket: &'static str, whose: Whose, remedy: Remedy) -> Row {
    Row { code, what, bucket, whose, remedy }
}

/// The GPU is at fault, its process must be started anew.
const fn restart(code: u32, what: &'static str) -> Row {
    row(code, what, "RESTART_APP", Gpu, RestartApplication)
}

/// An application is at fault, and ends by it.
const fn own_fault(code: u32, what: &'static str) -> Row {
    row(code, what, "RESTART_APP", Application, RestartApplication)
}

/// The GPU must be reset.
const fn reset(code: u32, what: &'static str) -> Row {
    row(code, what, "RESET_GPU", Gpu, ResetGpu)
}

/// Nothing need be done.
const fn ignore(code: u32, what: &'static str) -> Row {
    row(code, what, "IGNORE", Nobody, Nothing)
}

/// One link of NVLink 5: the message's registers say what is to be done, which the driver sums up in a Xid 154.
const fn link(code: u32, what: &'static str) -> Row {
    row(code, what, "WORKFLOW_NVLINK5_ERR", Gpu, RestartApplication)
}

use Remedy::{ContactSupport, Nothing, ResetGpu, RestartApplication, RestartNode};
use Whose::{Application, Gpu, Nobody};

/// By code, ascending.
pub static ROWS: &[Row] = &[
    restart(8, "GPU stopped processing"),
    own_fault(11, "invalid push buffer"),
    own_fault(13, "graphics engine exception: out of bounds, illegal instruction"),
    ignore(14, "injected from user space"),
    own_fault(25, "illegal push buffer"),
    own_fault(31, "memory page fault: illegal address"),
    restart(32, "corrupted push buffer, mostly by the PCIe link"),
    ignore(37, "firmware method not implemented"),
    ignore(38, "firmware watchdog"),
    restart(39, "copy engine 0"),
    restart(40, "copy engine 1"),
    restart(41, "copy engine 2"),
    row(43, "application ended by a fault that it induced", "IGNORE", Application, Nothing),
    ignore(44, "fault during a context switch"),
    row(45, "channels taken down after an abort, a kill or another Xid", "WORKFLOW_XID_45", Nobody, Nothing),
    reset(46, "GPU timed out"),
    row(48, "uncorrectable ECC error", "WORKFLOW_XID_48", Gpu, ResetGpu),
    row(54, "auxiliary power is not connected", "CHECK_MECHANICALS", Gpu, ContactSupport),
    restart(60, "video processor exception"),
    reset(62, "internal micro-controller halted"),
    ignore(63, "memory row remapped"),
    reset(64, "memory row could not be remapped"),
    ignore(66, "illegal access by the driver"),
    ignore(67, "illegal access by the driver"),
    restart(68, "video decoder 0"),
    own_fault(69, "graphics engine class error"),
    restart(70, "copy engine 3"),
    restart(71, "copy engine 4"),
    restart(72, "copy engine 5"),
    row(74, "NVLink error", "WORKFLOW_NVLINK_ERR", Gpu, ResetGpu),
    restart(75, "copy engine 6"),
    restart(76, "copy engine 7"),
    restart(77, "copy engine 8"),
    row(78, "vGPU could not start", "UPDATE_SWFW", Gpu, ContactSupport),
    row(79, "fallen off the bus", "RESTART_BM", Gpu, RestartNode),
    own_fault(80, "corrupted data sent to the GPU"),
    restart(82, "JPEG engine 0"),
    restart(83, "video decoder 1"),
    restart(84, "video decoder 2"),
    restart(85, "copy engine 9"),
    restart(86, "optical flow engine"),
    restart(88, "video decoder 3"),
    restart(89, "video decoder 4"),
    ignore(92, "many corrected ECC errors"),
    ignore(93, "InfoROM wear limit"),
    restart(94, "contained memory error"),
    reset(95, "uncontained memory error"),
    restart(96, "video decoder 5"),
    restart(97, "video decoder 6"),
    restart(98, "video decoder 7"),
    restart(99, "JPEG engine 1"),
    restart(100, "JPEG engine 2"),
    restart(101, "JPEG engine 3"),
    restart(102, "JPEG engine 4"),
    restart(103, "JPEG engine 5"),
    restart(104, "JPEG engine 6"),
    restart(105, "JPEG engine 7"),
    ignore(106, "test message"),
    ignore(107, "silent test message"),
    ignore(108, "NVLink remote translation"),
    reset(109, "context switch timed out"),
    reset(110, "security fault"),
    reset(119, "GSP did not answer in time"),
    reset(120, "GSP error"),
    ignore(121, "corrected errors of the link to the CPU"),
    restart(126, "copy engine 10"),
    restart(127, "copy engine 11"),
    restart(128, "copy engine 12"),
    restart(129, "copy engine 13"),
    restart(130, "copy engine 14"),
    restart(131, "copy engine 15"),
    restart(132, "copy engine 16"),
    restart(133, "copy engine 17"),
    restart(134, "copy engine 18"),
    restart(135, "copy engine 19"),
    reset(136, "link training failed"),
    row(137, "illegal access to a peer over NVLink", "IGNORE", Application, Nothing),
    restart(139, "second optical flow engine"),
    reset(140, "ECC error that was not recovered"),
    ignore(141, "CUDA fast path error"),
    row(142, "video encoder 3", "CONTACT_SUPPORT", Gpu, ContactSupport),
    reset(143, "GPU could not be initialized"),
    link(144, "NVLink: SAW"),
    link(145, "NVLink: RLW"),
    link(146, "NVLink: TLW"),
    link(147, "NVLink: TREX"),
    link(148, "NVLink: power control"),
    link(149, "NVLink: network"),
    link(150, "NVLink: management engine"),
    row(151, "key rotation failed", "RESTART_VM", Gpu, RestartNode),
    ignore(152, "DLA memory fault"),
    ignore(153, "DLA timeout"),
    // what the driver wants stands in the message or in NVML's recovery action; without either nothing follows from the code
    row(154, "the driver's own recovery action", "XID_154", Gpu, Nothing),
    reset(155, "NVLink taken down by software"),
    reset(156, "a resource was retired"),
    ignore(157, "a resource could not be retired"),
    reset(158, "GPU timed out for good"),
    ignore(160, "a channel was retired"),
    ignore(161, "a channel could not be retired"),
];
