//! A device that is joined with those of other ranks (E3): what one brings goes to all by a link of the driver's, and each adds it up in the
//! order of the ranks, so that a sum's bits are those of the ranks' shared memory, and of a row alone (EP4). A device says when it has come
//! to a collective; whose device has not is named when time is up.

use std::sync::Arc;
use std::time::Duration;

use super::device::Device;
use super::driver::{Driver, DriverError, LINK_NAME_BYTES, Launch, LinkName};
use super::launches::{args, values};
use super::memory::{Matrix, Slice};
use crate::backend::{DeviceFault, Peers};
use crate::stuck::Stuck;
use crate::waits::Patience;

/// How long all devices may take to join.
const JOIN_MAX: Duration = Duration::from_secs(30);
const YES: u32 = 1;

/// The other ranks, and the link to their devices.
pub(super) struct Joined<L> {
    link: L,
    peers: Arc<dyn Peers>,
}

impl<L> Joined<L> {
    pub(super) fn peers(&self) -> Arc<dyn Peers> {
        self.peers.clone()
    }

    pub(super) fn reached(&self, collective: u64) {
        self.peers.reached(collective);
    }

    /// Gives the link up: what waits in it ends, also at the other ranks, who may take it for done. So they are told first.
    pub(super) fn part<D: Driver<Link = L>>(self, driver: &D, stuck: &Stuck) {
        self.peers.fails(stuck);
        driver.part(self.link);
    }
}

impl<D: Driver> Device<D> {
    /// Joins the other ranks' devices. Where one rank cannot, none does: values go through the ranks' memory, and the log says why.
    pub(super) fn join(&mut self, peers: &Arc<dyn Peers>) {
        // who gives the name answers those who come to it
        let name = if peers.rank() == 0 {
            self.driver.link_name()
        } else {
            self.driver.can_link().map(|()| LinkName::default())
        };
        let made = match agreed(peers.as_ref(), &name) {
            // all ranks hear of this, and nobody makes a link
            None => name.map_err(|error| error.to_string()).and_then(|_| Err("another rank has none".to_owned())),
            Some(name) => {
                let made = self.linked(&name, peers.as_ref());
                self.all_have(made, peers.as_ref())
            }
        };
        match made {
            Ok(link) => {
                tracing::info!(rank = peers.rank(), ranks = peers.world(), "the ranks' devices are joined");
                self.joined = Some(Joined { link, peers: peers.clone() });
            }
            Err(error) => {
                tracing::warn!(
                    rank = peers.rank(),
                    error,
                    "no link of the devices: values go through this machine's memory"
                );
            }
        }
    }

    /// This rank's end of the link, once it is whole.
    fn linked(&self, name: &LinkName, peers: &dyn Peers) -> Result<D::Link, String> {
        let link = self.driver.link(name, peers.rank(), peers.world()).map_err(|error| error.to_string())?;
        let mut patience = Patience::new(Some(JOIN_MAX));
        let error = loop {
            match self.driver.is_linked(&link) {
                Ok(true) => return Ok(link),
                Ok(false) if patience.turn() => (),
                Ok(false) => break format!("the other devices have not come for {} s", JOIN_MAX.as_secs()),
                Err(error) => break error.to_string(),
            }
        };
        self.driver.part(link);
        Err(error)
    }

    /// The link, if every rank has its end of it.
    fn all_have(&self, made: Result<D::Link, String>, peers: &dyn Peers) -> Result<D::Link, String> {
        let told = peers.tell_all(&[u32::from(made.is_ok())]);
        let all = told.is_some_and(|told| told.iter().all(|words| words == &[YES]));
        match made {
            Ok(link) if !all => {
                self.driver.part(link);
                Err("another rank could not join".to_owned())
            }
            made => made,
        }
    }

    /// `x` summed over the ranks, in their order. False: there is no link.
    pub(super) fn sum_over_ranks(&mut self, x: &mut Matrix) -> Result<bool, DeviceFault> {
        let Some(peers) = self.joined.as_ref().map(Joined::peers) else { return Ok(false) };
        let len = x.len();
        if len > 0 {
            let parts = self.brought_by_all(x, len, peers.as_ref())?;
            self.launch(Launch::new("sum_ranks", values(len), args![&*x, &parts, peers.world(), len]))?;
        }
        Ok(true)
    }

    /// The ranks' columns side by side, `widths` of each. False: there is no link.
    pub(super) fn gather_over_ranks(&mut self, x: &mut Matrix, widths: &[usize]) -> Result<bool, DeviceFault> {
        let Some(peers) = self.joined.as_ref().map(Joined::peers) else { return Ok(false) };
        // every rank brings as much as the widest
        let (rows, widest) = (x.rows, widths.iter().copied().max().unwrap_or(0));
        if rows * widest == 0 {
            return Ok(true);
        }
        let mut wide = Matrix::default();
        self.shape(&mut wide, rows, widest)?;
        self.launch(Launch::new("copy_f32", values(x.len().div_ceil(16)), args![&wide, &*x, x.len()]))?;
        let parts = self.brought_by_all(&wide, rows * widest, peers.as_ref())?;
        let mut end = 0;
        let ends = widths.iter().flat_map(|width| {
            end += *width as u32;
            end.to_le_bytes()
        });
        let ends = self.put_once(ends.collect())?;
        self.shape(x, rows, widths.iter().sum())?;
        let args = args![&*x, &parts, &ends, peers.world(), rows, widest];
        self.launch(Launch::new("join_ranks", values(x.len()), args))?;
        Ok(true)
    }

    /// The first `len` values of each rank's `mine`, one rank behind the other.
    fn brought_by_all(&mut self, mine: &Matrix, len: usize, peers: &dyn Peers) -> Result<Slice, DeviceFault> {
        let (parts, len_bytes) = (self.take((peers.world() * len * 4) as u64)?, (len * 4) as u64);
        self.mark_before(peers.begins())?;
        if let Some(joined) = &self.joined {
            let begun = self.driver.all_gather(&joined.link, mine.at(), parts.at(), len_bytes);
            begun.map_err(|error| self.broken(&error))?;
        }
        self.begun(peers)?;
        Ok(parts)
    }

    /// Waits until the driver has begun what it was asked for: its calls do not wait for the other ranks, and nothing may be asked meanwhile.
    fn begun(&mut self, peers: &dyn Peers) -> Result<(), DeviceFault> {
        let (mut patience, mut watch) = (Patience::yielding(self.step.allowed), peers.watch());
        while !self.is_linked()? {
            if self.count_done()? {
                patience.renew();
            }
            watch.look(&mut patience)?;
            if !patience.turn() {
                return Err(watch.blame(&patience).unwrap_or_else(|| self.given_up(patience.waited())).into());
            }
        }
        Ok(())
    }

    /// Whether the link has begun all that it was asked for.
    ///
    /// # Errors
    /// What went wrong in it since: the others' words, if one of them left it.
    pub(super) fn is_linked(&self) -> Result<bool, DeviceFault> {
        let Some(joined) = &self.joined else { return Ok(true) };
        self.driver.is_linked(&joined.link).map_err(|error| match joined.peers.are_well() {
            Ok(()) => self.broken(&error),
            Err(stuck) => stuck.into(),
        })
    }

    /// What was brought in this step counts only if no rank left the link: a collective may end without it, with anything.
    pub(super) fn others_are_well(&self) -> Result<(), DeviceFault> {
        let Some(joined) = &self.joined else { return Ok(()) };
        Ok(joined.peers.are_well()?)
    }
}

/// The first rank's name for the link, if all ranks can have one.
fn agreed(peers: &dyn Peers, mine: &Result<LinkName, DriverError>) -> Option<LinkName> {
    let mut words = vec![u32::from(mine.is_ok())];
    let bytes = mine.as_ref().map_or([0; LINK_NAME_BYTES], |name| name.0);
    words.extend(bytes.as_chunks().0.iter().map(|chunk| u32::from_le_bytes(*chunk)));
    let told = peers.tell_all(&words)?;
    if !told.iter().all(|words| words.first() == Some(&YES)) {
        return None;
    }
    let mut name = [0; LINK_NAME_BYTES];
    name.as_chunks_mut().0.iter_mut().zip(&told.first()?[1..]).for_each(|(bytes, word)| *bytes = word.to_le_bytes());
    Some(LinkName(name))
}
