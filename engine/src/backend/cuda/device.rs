//! The device as one thread uses it: memory out of the budget, copies through pinned memory, launches in order, and waits that end at the
//! step's deadline (`wait`). What goes wrong is kept, and told once the step ends.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::arena::Arena;
use super::capture::Capture;
use super::driver::{Address, Driver, DriverError, Launch};
use super::graphs::{GraphCache, GraphCounts, Way};
use super::link::Joined;
use super::memory::Slice;
use super::staging::{Halves, Room};
use super::wait::Mark;
use super::warpgroups::Variant;
use super::workplace::Workplace;
use crate::backend::{DeviceFault, OutOfMemory, StepStart};

/// Pinned memory for copies to the device, half of it, and for copies from it.
const STAGING_HALF_BYTES: usize = 8 << 20;
const OUT_BYTES: usize = 4 << 20;
/// Kinds of tables that the layers of a step share.
const BROUGHT_MAX: usize = 16;
/// What a copy may take outside of steps.
const LOAD_ALLOWED: Duration = Duration::from_secs(10);

/// One device.
pub struct Device<D: Driver> {
    pub(super) driver: Arc<D>,
    /// Products of many rows go by warpgroups; and by which kernel, where not by the fastest.
    warpgroups: bool,
    many_rows: Option<&'static Variant>,
    base: Address,
    arena: Arena,
    giver: Sender<u64>,
    given_back: Receiver<u64>,
    staging: (Halves, D::Pinned),
    /// When the device has copied each half.
    copied: [Option<D::Event>; 2],
    out: D::Pinned,
    /// Events that nobody uses.
    pub(super) idle: Vec<D::Event>,
    pub(super) marks: VecDeque<Mark<D::Event>>,
    /// The other ranks, where their devices have a link.
    pub(super) joined: Option<Joined<D::Link>>,
    /// What was brought for all layers of this step, and where it lies.
    brought: Vec<(Vec<u8>, Arc<Slice>)>,
    pub(super) workplace: Workplace,
    pub(super) step: StepStart,
    pub(super) way: Way,
    noted: Vec<Launch>,
    graphs: GraphCache<D::Graph>,
    capture: Capture<D>,
    fault: Option<DeviceFault>,
    pub(super) last_kernel: &'static str,
    pub(super) layers_done: u64,
}

impl<D: Driver> Device<D> {
    /// Takes `budget_bytes` of the device's memory.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(driver: D, budget_bytes: u64) -> Result<Self, DriverError> {
        let arena = Arena::new(budget_bytes);
        let base = driver.allocate(arena.budget_bytes())?;
        let halves = Halves::new(STAGING_HALF_BYTES);
        let staging = (driver.pin(halves.len_bytes())?, driver.pin(OUT_BYTES)?);
        let (giver, given_back) = channel();
        Ok(Self {
            warpgroups: driver.has_warpgroups(),
            many_rows: None,
            driver: Arc::new(driver),
            base,
            arena,
            giver,
            given_back,
            staging: (halves, staging.0),
            copied: [None, None],
            out: staging.1,
            idle: Vec::new(),
            marks: VecDeque::new(),
            joined: None,
            brought: Vec::new(),
            workplace: Workplace::default(),
            step: StepStart { shape: 0, allowed: Some(LOAD_ALLOWED) },
            way: Way::Eager,
            noted: Vec::new(),
            graphs: GraphCache::default(),
            capture: Capture::default(),
            fault: None,
            last_kernel: "nothing",
            layers_done: 0,
        })
    }

    /// Whether products of many rows go by warpgroups.
    pub(super) fn has_warpgroups(&self) -> bool {
        self.warpgroups
    }

    pub(super) fn forgo_warpgroups(&mut self) {
        self.warpgroups = false;
    }

    /// By which kernel they go; `None`: by the fastest.
    pub(super) fn set_many_rows(&mut self, variant: Option<&'static Variant>) {
        self.many_rows = variant;
    }

    pub(super) fn variant(&self, rows: usize, cols: usize, outputs: usize) -> &'static Variant {
        self.many_rows.unwrap_or_else(|| Variant::of(rows, cols, &[outputs]))
    }

    /// Does `f`, unless something has gone wrong before, and keeps what goes wrong in it.
    pub fn run<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T, DeviceFault>) -> Option<T> {
        if self.fault.is_some() {
            return None;
        }
        f(self).map_err(|fault| self.fails(fault)).ok()
    }

    /// What went wrong, if anything did.
    pub fn fault(&self) -> Option<DeviceFault> {
        self.fault.clone()
    }

    fn fails(&mut self, fault: DeviceFault) {
        if let DeviceFault::Stuck(stuck) = &fault
            && let Some(joined) = self.joined.take()
        {
            // what it waits for in the others' devices is not to outlive the step
            joined.part(self.driver.as_ref(), stuck);
        }
        self.fault = Some(fault);
    }

    /// A step begins.
    pub fn begin(&mut self, step: &StepStart) {
        while let Some((shape, launches, graph)) = self.capture.made() {
            self.graphs.put(shape, launches, graph);
        }
        self.brought.clear();
        self.workplace.begin();
        self.take_back();
        self.step = step.clone();
        // what goes by a link is no launch: it cannot be in a graph
        self.way = if self.joined.is_none() { self.graphs.way(step.shape) } else { Way::Eager };
        self.noted.clear();
        self.layers_done = 0;
    }

    /// Waits until all that was asked for is done, and says what went wrong since the last step. What only lacked memory is forgotten
    /// then: a smaller step may go well. Anything else is for good.
    ///
    /// # Errors
    /// [`DeviceFault`].
    pub fn end(&mut self) -> Result<(), DeviceFault> {
        self.run(Self::finish);
        self.way = Way::Eager;
        self.brought.clear();
        match &self.fault {
            None => Ok(()),
            Some(DeviceFault::OutOfMemory(_)) => {
                // its halves begin with all the room that there is
                self.workplace = Workplace::default();
                self.fault.take().map_or(Ok(()), Err)
            }
            Some(fault) => Err(fault.clone()),
        }
    }

    /// A piece of the budget.
    ///
    /// # Errors
    /// [`DeviceFault::OutOfMemory`].
    pub fn take(&mut self, len_bytes: u64) -> Result<Slice, DeviceFault> {
        // a step that is noted must not write twice to one place: its copies all run before its graph
        if self.way == Way::Eager {
            self.take_back();
        }
        let Some(offset) = self.arena.take(len_bytes) else {
            let (free, all) = (self.arena.free_bytes(), self.arena.budget_bytes());
            let reason = format!("{free} of the device's budget of {all} bytes are free");
            return Err(OutOfMemory { needed_bytes: len_bytes, reason }.into());
        };
        Ok(Slice::new((self.base, offset), len_bytes, self.giver.clone()))
    }

    /// Bytes of the budget that nobody has.
    pub fn free_bytes(&mut self) -> u64 {
        self.take_back();
        self.arena.free_bytes()
    }

    /// Brings bytes to the device.
    ///
    /// # Errors
    /// [`DeviceFault`].
    pub fn put(&mut self, to: Address, bytes: &[u8]) -> Result<(), DeviceFault> {
        let mut done = 0;
        while done < bytes.len() {
            match self.staging.0.room(bytes.len() - done) {
                Room::Here(range) => {
                    let piece = &bytes[done..done + range.len()];
                    self.driver.write(&mut self.staging.1, range.start, piece);
                    self.driver.copy_in(to.plus(done as u64), &self.staging.1, range).map_err(|e| self.broken(&e))?;
                    done += piece.len();
                }
                Room::Full => self.turn()?,
            }
        }
        Ok(())
    }

    /// Brings bytes that nobody changes to the device, for the rest of the step: the same ones are brought once, however many layers ask.
    ///
    /// # Errors
    /// [`DeviceFault`].
    pub fn put_once(&mut self, bytes: Vec<u8>) -> Result<Arc<Slice>, DeviceFault> {
        if let Some((_, slice)) = self.brought.iter().find(|(kept, _)| *kept == bytes) {
            return Ok(slice.clone());
        }
        let slice = Arc::new(self.put_new(&bytes)?);
        if self.brought.len() < BROUGHT_MAX {
            self.brought.push((bytes, slice.clone()));
        }
        Ok(slice)
    }

    /// The same, to a piece of its own.
    ///
    /// # Errors
    /// [`DeviceFault`].
    pub fn put_new(&mut self, bytes: &[u8]) -> Result<Slice, DeviceFault> {
        let slice = self.take(bytes.len() as u64)?;
        self.put(slice.at(), bytes)?;
        Ok(slice)
    }

    /// Brings bytes from the device, once all that was asked for is done, to `parts`, one behind another.
    ///
    /// # Errors
    /// [`DeviceFault`].
    pub fn get<'a>(
        &mut self,
        from: Address,
        len_bytes: usize,
        mut parts: impl Iterator<Item = &'a mut [u8]>,
    ) -> Result<(), DeviceFault> {
        self.flush()?;
        let mut part: &mut [u8] = &mut [];
        for start in (0..len_bytes).step_by(OUT_BYTES) {
            let len = OUT_BYTES.min(len_bytes - start);
            self.driver.copy_out(&mut self.out, from.plus(start as u64), len).map_err(|error| self.broken(&error))?;
            let event = self.mark()?;
            self.wait(event)?;
            let mut read = 0;
            while read < len {
                if part.is_empty() {
                    let Some(next) = parts.next() else { return Ok(()) };
                    part = next;
                }
                let here = part.len().min(len - read);
                let (now, later) = std::mem::take(&mut part).split_at_mut(here);
                self.driver.read(&self.out, read, now);
                (read, part) = (read + here, later);
            }
        }
        Ok(())
    }

    /// Launches a kernel, or notes it.
    ///
    /// # Errors
    /// [`DeviceFault`].
    pub fn launch(&mut self, launch: Launch) -> Result<(), DeviceFault> {
        if self.way != Way::Held {
            self.last_kernel = launch.kernel();
            self.driver.launch(&launch).map_err(|error| self.broken(&error))?;
        }
        if self.way != Way::Eager {
            self.noted.push(launch);
        }
        Ok(())
    }

    /// What became of steps and graphs.
    pub fn graph_counts(&self) -> GraphCounts {
        self.graphs.counts()
    }

    fn finish(&mut self) -> Result<(), DeviceFault> {
        self.flush()?;
        let event = self.mark()?;
        self.wait(event)?;
        self.others_are_well()
    }

    /// Runs what was held back: by a graph of exactly these launches, or one by one. Asks for a graph where there is none.
    fn flush(&mut self) -> Result<(), DeviceFault> {
        let (way, shape) = (std::mem::replace(&mut self.way, Way::Eager), self.step.shape);
        if way == Way::Eager {
            return Ok(());
        }
        let noted = std::mem::take(&mut self.noted);
        if way == Way::Held {
            self.last_kernel = "a graph";
            if let Some(graph) = self.graphs.find(shape, &noted) {
                let replayed = self.driver.replay(graph);
                return replayed.map_err(|error| self.broken(&error));
            }
            for launch in &noted {
                self.last_kernel = launch.kernel();
                self.driver.launch(launch).map_err(|error| self.broken(&error))?;
            }
        }
        if self.graphs.wants(shape, &noted) && !self.capture.want(&self.driver, shape, noted.clone()) {
            self.graphs.not_asked(shape, &noted);
        }
        Ok(())
    }

    /// Fills the other half of the pinned memory from now on, once the device has read it.
    fn turn(&mut self) -> Result<(), DeviceFault> {
        let event = self.mark()?;
        self.copied[self.staging.0.active()] = Some(event);
        self.staging.0.turn();
        match self.copied[self.staging.0.active()].take() {
            Some(event) => self.wait(event),
            None => Ok(()),
        }
    }

    fn take_back(&mut self) {
        while let Ok(offset) = self.given_back.try_recv() {
            self.arena.give(offset);
        }
    }
}
