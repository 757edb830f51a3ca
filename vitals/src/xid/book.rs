//! Which Xids may concern the engine that is watched: those of its GPUs that no delivery has proven harmless since.

use super::{CODE_MAX, Pci, Remedy, Whose, Xid, look_up, parse};
use crate::observation::{GpuObs, LogHit, Ms, Observation};

/// Kept at once; a GPU that breaks says a few things, not a hundred.
pub const XIDS_MAX: usize = 8;
/// What was computed before a fault may be delivered for so long after it.
pub const LATELY_MS: Ms = 10_000;
/// GPUs whose addresses are remembered.
const GPUS_MAX: usize = 64;
const SIGNATURE: &str = "xid";

/// The Xids of one engine's GPUs.
#[derive(Debug, Clone, Default)]
pub struct XidBook {
    xids: Vec<Xid>,
    /// Every GPU that NVML has told, lost ones among them.
    gpus: Vec<(Pci, String)>,
    /// What was reported before has been proven harmless by deliveries.
    harmless_before_ms: Ms,
    /// The engine's process started then: what a restart cures is over.
    cured_before_ms: Ms,
}

impl XidBook {
    /// Those that may concern the engine, oldest first.
    pub fn xids(&self) -> &[Xid] {
        &self.xids
    }

    /// Takes one observation in. Costs nothing while nothing is reported.
    pub fn look(&mut self, now_ms: Ms, obs: &Observation, delivered: bool) {
        obs.gpus.value.iter().flatten().for_each(|gpu| self.meet(gpu));
        if delivered {
            self.harmless_before_ms = self.harmless_before_ms.max(now_ms.saturating_sub(LATELY_MS));
            self.xids.retain(|xid| xid.at_ms >= self.harmless_before_ms);
        }
        for told in &obs.xids {
            let known = |xid: &Xid| xid.code == told.code && told.at_ms <= xid.at_ms && xid.is_of(&told.uuid);
            if told.at_ms < self.harmless_before_ms || self.xids.iter().any(known) {
                continue; // told again, as long as the agent remembers it
            }
            self.note(Xid {
                code: told.code,
                uuid: Some(told.uuid.clone()).filter(|uuid| !uuid.is_empty()),
                pci: self.address(&told.uuid),
                remedy: told.remedy,
                at_ms: told.at_ms,
            });
        }
        obs.log.iter().filter(|hit| hit.signature == SIGNATURE).for_each(|hit| self.read(hit));
    }

    /// Another process: what a restart cures is over, a GPU that needs more is as it was.
    pub fn restarted(&mut self, started_ms: Ms) {
        self.cured_before_ms = started_ms;
        self.xids.retain(|xid| !is_cured(xid, started_ms));
    }

    fn meet(&mut self, gpu: &GpuObs) {
        if self.gpus.len() >= GPUS_MAX || self.gpus.iter().any(|(_, uuid)| *uuid == gpu.uuid) {
            return;
        }
        let pci = gpu.pci.as_deref().and_then(Pci::parse);
        self.gpus.extend(pci.map(|pci| (pci, gpu.uuid.clone())));
    }

    fn address(&self, uuid: &str) -> Option<Pci> {
        self.gpus.iter().find(|(_, known)| known == uuid).map(|(pci, _)| *pci)
    }

    fn read(&mut self, hit: &LogHit) {
        let Some(line) = parse(&hit.line) else { return };
        let known = |pci: Pci| self.gpus.iter().find(|(known, _)| *known == pci).map(|(_, uuid)| uuid.clone());
        let uuid = line.pci.and_then(known);
        // the kernel speaks of every GPU of the machine; ours are those that NVML tells of
        if line.pci.is_some() && uuid.is_none() && !self.gpus.is_empty() {
            return;
        }
        self.note(Xid { code: line.code, uuid, pci: line.pci, remedy: line.remedy, at_ms: hit.at_ms });
    }

    /// Code and GPU are the fact, whoever told it.
    fn note(&mut self, mut xid: Xid) {
        let row = look_up(xid.code);
        xid.remedy = xid.remedy.or(row.map(|row| row.remedy));
        let over = xid.at_ms < self.harmless_before_ms || is_cured(&xid, self.cured_before_ms);
        let idle = row.is_some_and(|row| row.whose == Whose::Nobody || (row.whose == Whose::Gpu && xid.asks_nothing()));
        if over || idle || !(1..=CODE_MAX).contains(&xid.code) {
            return;
        }
        if let Some(known) = self.xids.iter_mut().find(|known| same(known, &xid)) {
            known.at_ms = known.at_ms.max(xid.at_ms);
            known.remedy = known.remedy.max(xid.remedy);
            known.pci = known.pci.or(xid.pci);
            if known.uuid.is_none() {
                known.uuid = xid.uuid;
            }
            return;
        }
        self.xids.push(xid);
        if self.xids.len() > XIDS_MAX {
            // what asks for least goes first, of these the oldest
            let least = self.xids.iter().enumerate().min_by_key(|(_, xid)| (xid.remedy, xid.at_ms)).map(|(at, _)| at);
            least.into_iter().for_each(|at| _ = self.xids.remove(at));
        }
    }
}

/// Was it reported before this process, and is it of a kind that ends with the process?
fn is_cured(xid: &Xid, started_ms: Ms) -> bool {
    xid.at_ms < started_ms && !xid.remedy.is_some_and(Remedy::outlasts_a_restart)
}

/// The same code, and nothing says that it is another GPU.
fn same(known: &Xid, news: &Xid) -> bool {
    let uuids = known.uuid.as_ref().zip(news.uuid.as_ref()).is_none_or(|(a, b)| a == b);
    let pcis = known.pci.zip(news.pci).is_none_or(|(a, b)| a == b);
    known.code == news.code && uuids && pcis
}
