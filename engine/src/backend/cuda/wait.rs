//! The one way to wait for a device, which ends at the step's deadline (E1): an event is asked until it is done, and what is done meanwhile
//! (layers, collectives that the device has come to) begins the time anew.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::device::Device;
use super::driver::{Driver, DriverError};
use super::graphs::Way;
use super::link::Joined;
use crate::backend::{DeviceFault, Peers};
use crate::stuck::{Stuck, StuckKind};
use crate::waits::Patience;

/// Work whose launches are all made, and what its end says.
pub(super) type Mark<E> = (E, Done);

/// What a device has done when it comes to a mark.
pub(super) enum Done {
    /// A layer; who counts it.
    Layer(Arc<AtomicU64>),
    /// All that is before a collective: the other ranks are told.
    Before(u64),
}

impl<D: Driver> Device<D> {
    /// All launches of a layer are made: `pulse` counts it when they are done.
    ///
    /// # Errors
    /// [`DeviceFault`].
    pub fn mark_layer(&mut self, pulse: &Arc<AtomicU64>) -> Result<(), DeviceFault> {
        // a graph has no marks inside: its steps are short
        if self.way != Way::Held {
            let event = self.mark()?;
            self.marks.push_back((event, Done::Layer(pulse.clone())));
        }
        Ok(())
    }

    /// All that is before a collective is asked for: the other ranks hear of it when it is done.
    pub(super) fn mark_before(&mut self, collective: u64) -> Result<(), DeviceFault> {
        let event = self.mark()?;
        self.marks.push_back((event, Done::Before(collective)));
        Ok(())
    }

    /// An event behind all that was asked for.
    pub(super) fn mark(&mut self) -> Result<D::Event, DeviceFault> {
        let event = match self.idle.pop() {
            Some(event) => event,
            None => self.driver.event().map_err(|error| self.broken(&error))?,
        };
        self.driver.record(&event).map_err(|error| self.broken(&error))?;
        Ok(event)
    }

    /// The one wait for the device: asks the event until it is done, or until the step's time has passed without a sign of life. Where other
    /// ranks' devices may be what it waits for they are looked at as well.
    pub(super) fn wait(&mut self, event: D::Event) -> Result<(), DeviceFault> {
        let mut patience = Patience::yielding(self.step.allowed);
        let peers = self.joined.as_ref().map(Joined::peers);
        let mut watch = peers.as_deref().map(Peers::watch);
        while !self.driver.query(&event).map_err(|error| self.broken(&error))? {
            if self.count_done()? {
                patience.renew();
            }
            if let Some(watch) = &mut watch
                && watch.look(&mut patience)?
            {
                self.is_linked()?;
            }
            if !patience.turn() {
                let blamed = watch.and_then(|watch| watch.blame(&patience));
                return Err(blamed.unwrap_or_else(|| self.given_up(patience.waited())).into());
            }
        }
        self.count_done()?;
        self.idle.push(event);
        Ok(())
    }

    /// Says what is done to whoever counts it. True: there was something.
    pub(super) fn count_done(&mut self) -> Result<bool, DeviceFault> {
        let mut any = false;
        while let Some((event, _)) = self.marks.front() {
            if !self.driver.query(event).map_err(|error| self.broken(&error))? {
                break;
            }
            let Some((event, done)) = self.marks.pop_front() else { break };
            self.idle.push(event);
            any = true;
            match done {
                Done::Layer(pulse) => {
                    pulse.fetch_add(1, Ordering::Relaxed);
                    self.layers_done += 1;
                }
                Done::Before(collective) => self.joined.iter().for_each(|joined| joined.reached(collective)),
            }
        }
        Ok(any)
    }

    pub(super) fn given_up(&self, waited: Duration) -> Stuck {
        let (ms, layers, kernel) = (waited.as_millis(), self.layers_done, self.last_kernel);
        let text = format!(
            "the device's event did not come for {ms} ms (E1); {layers} layers of the step were done, the last launch was {kernel}"
        );
        Stuck { kind: StuckKind::DeviceWait, text, waited }
    }

    /// A device that refused a call, or a kernel of which failed, does nothing more for this process.
    pub(super) fn broken(&self, error: &DriverError) -> DeviceFault {
        let text = format!("the device failed: {error}; the last launch was {}", self.last_kernel);
        Stuck { kind: StuckKind::DeviceWait, text, waited: Duration::ZERO }.into()
    }
}
