//! A line of the kernel that reports a Xid, and the PCI address in it. Untrusted text: a line that is cut or odd is none.

use std::fmt;

use super::{CODE_MAX, Remedy};
use crate::log_signs::head;

/// A PCI address without its function: what kernel and NVML both call a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pci {
    domain: u32,
    bus: u8,
    device: u8,
}

impl Pci {
    /// `0000:44:00`, `PCI:0000:44:00`, NVML's `00000000:44:00.0`.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.strip_prefix("PCI:").unwrap_or(text).split(':');
        let [domain, bus, device] = [parts.next()?, parts.next()?, parts.next()?];
        let device = device.split_once('.').map_or(device, |(device, _)| device);
        // without the check a sign would pass
        let hex = [domain, bus, device].iter().all(|part| part.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let pci = Self {
            domain: u32::from_str_radix(domain, 16).ok()?,
            bus: u8::from_str_radix(bus, 16).ok()?,
            device: u8::from_str_radix(device, 16).ok()?,
        };
        (hex && parts.next().is_none()).then_some(pci)
    }
}

impl fmt::Display for Pci {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}", self.domain, self.bus, self.device)
    }
}

/// What such a line says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct XidLine {
    pub code: u32,
    pub pci: Option<Pci>,
    /// What the driver itself asks for: only Xid 154 says it.
    pub remedy: Option<Remedy>,
}

/// Reads `NVRM: Xid (PCI:0000:44:00): 79, pid=…` behind whatever head its writer put before it; of a slice of a GPU (MIG) the place is
/// `PCI:0000:b1:00 GPU-I:05`, and the whole GPU is what is named.
pub fn parse(line: &str) -> Option<XidLine> {
    let line = head::plain(line);
    let (_, message) = head::split(&line);
    let (place, rest) = message.strip_prefix("NVRM: Xid (")?.split_once("): ")?;
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let code = rest.get(..digits)?.parse().ok().filter(|code| (1..=CODE_MAX).contains(code))?;
    let pci = place.split(' ').next().and_then(Pci::parse);
    Some(XidLine { code, pci, remedy: recovery_action(rest) })
}

/// `… recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)`.
fn recovery_action(text: &str) -> Option<Remedy> {
    let (_, number) = text.split_once("recovery action changed from ")?.1.split_once(" to 0x")?;
    let digits = number.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(number.len());
    Remedy::of_recovery_action(u64::from_str_radix(number.get(..digits)?, 16).ok()?)
}
