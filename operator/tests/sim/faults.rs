//! What goes wrong: by seed a fate for each request, by rule the same fate for requests of one kind, outages for a time,
//! and the write at which an operator dies.

use super::{
    kube::{Refusal, wire::Call},
    rng::Rng,
};

/// How often each thing happens, in thousandths of the requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rates {
    /// 500, 503, 429 (with Retry-After) or 504 before anything took effect.
    pub refused: u64,
    /// 504 or a broken connection after the write took effect.
    pub applied_unheard: u64,
    /// Somebody on the way sends the write twice; the answer is the second one's.
    pub repeated: u64,
    /// No answer ever.
    pub silent: u64,
    /// 409 on a write.
    pub conflict: u64,
    /// Seconds instead of milliseconds.
    pub slow: u64,
    /// A watch ends with an error, its version is gone, one of its events is lost, or comes twice.
    pub watch_broken: u64,
    pub watch_gone: u64,
    pub watch_elided: u64,
    pub watch_doubled: u64,
    /// Events come up to so many milliseconds late.
    pub watch_lag_ms: u64,
}

/// What becomes of one request.
#[derive(Debug, Clone, PartialEq)]
pub enum Fate {
    /// It takes effect after so many milliseconds and is answered after so many more.
    Served { effect_ms: u64, answer_ms: u64 },
    /// It waits so long before it takes effect, as long as somebody waits for it (somebody's webhook), and has none once its sender has gone.
    Held { ms: u64 },
    /// It is answered so without effect.
    Refused { refusal: Refusal, retry_after_s: u64 },
    /// It takes effect; the answer is 504.
    Applied504,
    /// It takes effect; the connection breaks.
    AppliedBroken,
    /// It takes effect twice.
    Repeated,
    /// Somebody else writes the object just before.
    Overtaken,
    /// No effect and no answer.
    Silent,
    /// The connection is refused.
    Unreachable,
    /// The client's own code panics on the answer.
    Panic,
    /// It takes effect, and its writer dies before it hears of that.
    Death,
}

/// On which side of its effect a write kills its writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
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

/// Requests of one kind meet one fate for a time.
#[derive(Debug, Clone)]
pub struct Rule {
    pub from_ms: u64,
    pub to_ms: u64,
    /// `get list watch create patch replace delete`; empty: all of them. The same for kinds.
    pub verbs: &'static [&'static str],
    pub plurals: &'static [&'static str],
    /// Only where the path ends so.
    pub path: &'static str,
    /// In thousandths.
    pub chance: u64,
    pub fate: Fate,
}

impl Rule {
    pub fn refuse(
        (from_ms, to_ms): (u64, u64),
        verbs: &'static [&'static str],
        plurals: &'static [&'static str],
        (code, reason, message): (u16, &'static str, &'static str),
    ) -> Self {
        let fate = Fate::Refused { refusal: Refusal::new(code, reason, message), retry_after_s: 0 };
        Rule { from_ms, to_ms, verbs, plurals, path: "", chance: 1000, fate }
    }

    fn concerns(&self, now_ms: u64, call: &Call) -> bool {
        let listed = |list: &[&str], word: &str| list.is_empty() || list.contains(&word);
        (self.from_ms..self.to_ms).contains(&now_ms)
            && listed(self.verbs, call.verb())
            && listed(self.plurals, call.target.kind.plural)
            && call.path.ends_with(self.path)
    }
}

/// The plan, and the dice.
#[derive(Debug, Clone)]
pub struct Faults {
    pub rates: Rates,
    pub rules: Vec<Rule>,
    pub outages: Vec<Outage>,
    /// Does the server send bookmarks?
    pub bookmarks: bool,
    /// Nothing goes wrong by rate from here on.
    pub end_ms: u64,
    /// The operators' writes are counted; these kill.
    pub crashes: Vec<(u64, Side)>,
    pub rng: Rng,
}

impl Faults {
    /// None at all.
    pub fn none(seed: u64) -> Self {
        Faults {
            rates: Rates::default(),
            rules: Vec::new(),
            outages: Vec::new(),
            bookmarks: true,
            end_ms: 0,
            crashes: Vec::new(),
            rng: Rng::new(seed),
        }
    }

    /// Does no request ever fail or wait?
    pub fn never(&self) -> bool {
        self.rates == Rates::default() && self.rules.is_empty() && self.outages.is_empty()
    }

    /// When the last of them is over.
    pub fn over_ms(&self) -> u64 {
        let rules = self.rules.iter().map(|rule| rule.to_ms);
        rules.chain(self.outages.iter().map(|outage| outage.to_ms)).fold(self.end_ms, u64::max)
    }

    pub fn outage(&self, now_ms: u64) -> Option<&Outage> {
        self.outages.iter().find(|outage| (outage.from_ms..outage.to_ms).contains(&now_ms))
    }

    /// The fate that a rule has for this request.
    pub fn ruled(&mut self, now_ms: u64, call: &Call) -> Option<Fate> {
        let rule = self.rules.iter().find(|rule| rule.concerns(now_ms, call))?;
        (rule.chance >= 1000 || self.rng.permille(rule.chance)).then(|| rule.fate.clone())
    }

    /// The fate of a request that arrives now.
    pub fn fate(&mut self, now_ms: u64, call: &Call) -> Fate {
        let usual = Fate::Served { effect_ms: self.rng.range(1, 8), answer_ms: self.rng.range(1, 4) };
        match self.outage(now_ms) {
            Some(outage) if outage.black_hole => return Fate::Silent,
            Some(_) => return Fate::Unreachable,
            None => {}
        }
        match self.ruled(now_ms, call) {
            Some(fate) => fate,
            None if now_ms >= self.end_ms => usual,
            None => self.by_chance(call.is_write()).unwrap_or(usual),
        }
    }

    fn by_chance(&mut self, write: bool) -> Option<Fate> {
        let rates = self.rates.clone();
        if self.rng.permille(rates.refused) {
            let code = *self.rng.pick(&[500, 503, 429, 504]);
            let retry_after_s = *self.rng.pick(&[0, 1, 3600]);
            return Some(Fate::Refused {
                refusal: Refusal::new(code, "InternalError", "simulated fault"),
                retry_after_s,
            });
        }
        if write && self.rng.permille(rates.applied_unheard) {
            return Some(self.rng.pick(&[Fate::Applied504, Fate::AppliedBroken]).clone());
        }
        if write && self.rng.permille(rates.repeated) {
            return Some(Fate::Repeated);
        }
        if self.rng.permille(rates.silent) {
            return Some(Fate::Silent);
        }
        if write && self.rng.permille(rates.conflict) {
            let refusal = Refusal::new(409, "Conflict", "simulated fault");
            return Some(Fate::Refused { refusal, retry_after_s: 0 });
        }
        if self.rng.permille(rates.slow) {
            // later than this a server has noticed that the client is gone
            return Some(Fate::Served { effect_ms: self.rng.range(100, 3500), answer_ms: self.rng.range(1, 30_000) });
        }
        None
    }
}
