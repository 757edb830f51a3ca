//! What goes wrong, by seed: a fate for each request, outages for a time, and the write at which an operator dies.

use super::rng::Rng;

/// How often each thing happens, in thousandths of the requests.
#[derive(Debug, Clone, Default)]
pub struct Rates {
    /// 500, 503, 429 (with Retry-After) or 504 before anything took effect.
    pub refused: u64,
    /// 504 or a broken connection after the write took effect.
    pub applied_unheard: u64,
    /// No answer ever.
    pub silent: u64,
    /// 409 on a write.
    pub conflict: u64,
    /// Seconds instead of milliseconds.
    pub slow: u64,
    /// A watch ends with an error, its version is gone, or one of its events is lost.
    pub watch_broken: u64,
    pub watch_gone: u64,
    pub watch_elided: u64,
    /// Events come up to so many milliseconds late.
    pub watch_lag_ms: u64,
}

/// What becomes of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It takes effect after so many milliseconds and is answered after so many more.
    Served { effect_ms: u64, answer_ms: u64 },
    /// It is answered so without effect.
    Refused { code: u16, retry_after_s: u64 },
    /// It takes effect; the answer is 504.
    Applied504,
    /// It takes effect; the connection breaks.
    AppliedBroken,
    /// No effect and no answer.
    Silent,
    /// The connection is refused.
    Unreachable,
}

/// On which side of its effect a write kills its writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Before,
    After,
}

/// A time in which the API cannot be reached.
#[derive(Debug, Clone)]
pub struct Outage {
    pub from_ms: u64,
    pub to_ms: u64,
    /// Connections stand and nothing comes; else they are refused.
    pub black_hole: bool,
}

/// The plan, and the dice.
#[derive(Debug, Clone)]
pub struct Faults {
    pub rates: Rates,
    pub outages: Vec<Outage>,
    /// Nothing goes wrong from here on.
    pub end_ms: u64,
    /// The operators' writes are counted; these kill.
    pub crashes: Vec<(u64, Side)>,
    pub rng: Rng,
}

impl Faults {
    /// None at all.
    pub fn none(seed: u64) -> Self {
        Faults { rates: Rates::default(), outages: Vec::new(), end_ms: 0, crashes: Vec::new(), rng: Rng::new(seed) }
    }

    pub fn outage(&self, now_ms: u64) -> Option<&Outage> {
        self.outages.iter().find(|outage| (outage.from_ms..outage.to_ms).contains(&now_ms))
    }

    /// The fate of a request that arrives now.
    pub fn fate(&mut self, now_ms: u64, write: bool) -> Fate {
        let usual = Fate::Served { effect_ms: self.rng.range(1, 8), answer_ms: self.rng.range(1, 4) };
        match self.outage(now_ms) {
            Some(outage) if outage.black_hole => return Fate::Silent,
            Some(_) => return Fate::Unreachable,
            None if now_ms >= self.end_ms => return usual,
            None => {}
        }
        let rates = self.rates.clone();
        if self.rng.permille(rates.refused) {
            let code = *self.rng.pick(&[500, 503, 429, 504]);
            return Fate::Refused { code, retry_after_s: *self.rng.pick(&[0, 1, 3600]) };
        }
        if write && self.rng.permille(rates.applied_unheard) {
            return *self.rng.pick(&[Fate::Applied504, Fate::AppliedBroken]);
        }
        if self.rng.permille(rates.silent) {
            return Fate::Silent;
        }
        if write && self.rng.permille(rates.conflict) {
            return Fate::Refused { code: 409, retry_after_s: 0 };
        }
        if self.rng.permille(rates.slow) {
            // later than this a server has noticed that the client is gone
            return Fate::Served { effect_ms: self.rng.range(100, 3500), answer_ms: self.rng.range(1, 30_000) };
        }
        usual
    }
}
