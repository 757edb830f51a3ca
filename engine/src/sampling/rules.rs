//! What a request does to its logits before a token is chosen: what may come at all, bias, penalties. Pure.

use std::collections::HashMap;
use std::sync::Arc;

use crate::grammar::Mask;

/// A request's rules; the default changes nothing.
#[derive(Debug, Clone, PartialEq)]
pub struct LogitRules {
    /// Taken from the logit of every token that the output has already.
    pub presence_penalty: f32,
    /// Taken once for each time that the output has it.
    pub frequency_penalty: f32,
    /// Divides the positive logits, multiplies the negative ones, of every token of prompt and output; 1: nothing.
    pub repetition_penalty: f32,
    /// Added to these tokens' logits.
    pub bias: Vec<(u32, f32)>,
    /// Only these may come; empty: all.
    pub allowed: Vec<u32>,
    /// The output does not end by a stop token before it has so many tokens.
    pub min_tokens: usize,
}

impl Default for LogitRules {
    fn default() -> Self {
        Self {
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            bias: Vec::new(),
            allowed: Vec::new(),
            min_tokens: 0,
        }
    }
}

impl LogitRules {
    fn penalises_output(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    fn penalises_repetition(&self) -> bool {
        self.repetition_penalty != 1.0
    }
}

/// Rules at work: they remember what came.
#[derive(Debug, Clone)]
pub(super) struct Adjuster {
    rules: Arc<LogitRules>,
    stop_ids: Arc<[u32]>,
    /// How often the output has a token; 0 for one of the prompt. Only what the penalties need.
    seen: HashMap<u32, u32>,
    generated: usize,
    /// The row as changed; kept to be filled again.
    row: Vec<f32>,
}

impl Adjuster {
    pub fn new(rules: Arc<LogitRules>) -> Self {
        Self { rules, stop_ids: Arc::default(), seen: HashMap::new(), generated: 0, row: Vec::new() }
    }

    pub fn begin(&mut self, prompt: &[u32], stop_ids: Arc<[u32]>) {
        self.stop_ids = stop_ids;
        if self.rules.penalises_repetition() {
            self.seen.extend(prompt.iter().map(|id| (*id, 0)));
        }
    }

    /// The changed row, or nothing where the row stays as it is.
    pub fn apply(&mut self, logits: &[f32], mask: Option<&Mask>) -> Option<&[f32]> {
        let holds_open = self.generated < self.rules.min_tokens && !self.stop_ids.is_empty();
        let idle = self.rules.bias.is_empty() && self.rules.allowed.is_empty() && self.seen.is_empty();
        if mask.is_none() && idle && !holds_open {
            return None;
        }
        self.row.clear();
        match mask {
            Some(mask) => self.row.extend((0u32..).zip(logits).map(|(id, l)| if mask.allows(id) { *l } else { OUT })),
            None => self.row.extend_from_slice(logits),
        }
        self.keep_allowed(logits);
        if holds_open {
            self.hold_open();
        }
        self.add_bias();
        self.penalise();
        Some(&self.row)
    }

    /// Does it leave every row as it is, now and after more tokens?
    pub fn is_idle(&self) -> bool {
        let rules = &self.rules;
        let holds_open = self.generated < rules.min_tokens && !self.stop_ids.is_empty();
        let penalises = rules.penalises_output() || rules.penalises_repetition();
        rules.bias.is_empty() && rules.allowed.is_empty() && !penalises && !holds_open
    }

    /// A token was chosen.
    pub fn note(&mut self, token: u32) {
        self.generated += 1;
        if self.rules.penalises_output() || self.rules.penalises_repetition() {
            *self.seen.entry(token).or_insert(0) += 1;
        }
    }

    fn keep_allowed(&mut self, logits: &[f32]) {
        if self.rules.allowed.is_empty() {
            return;
        }
        self.row.fill(OUT);
        for id in &self.rules.allowed {
            if let (Some(slot), Some(logit)) = (self.row.get_mut(*id as usize), logits.get(*id as usize)) {
                *slot = *logit;
            }
        }
    }

    fn add_bias(&mut self) {
        for (id, bias) in &self.rules.bias {
            if let Some(slot) = self.row.get_mut(*id as usize) {
                *slot += bias;
            }
        }
    }

    fn penalise(&mut self) {
        let LogitRules { presence_penalty, frequency_penalty, repetition_penalty, .. } = *self.rules;
        for (id, count) in &self.seen {
            let Some(slot) = self.row.get_mut(*id as usize) else { continue };
            *slot = if *slot > 0.0 { *slot / repetition_penalty } else { *slot * repetition_penalty };
            *slot -= frequency_penalty * *count as f32;
            *slot -= if *count > 0 { presence_penalty } else { 0.0 };
        }
    }

    fn hold_open(&mut self) {
        for id in &*self.stop_ids {
            if let Some(slot) = self.row.get_mut(*id as usize) {
                *slot = OUT;
            }
        }
    }
}

/// The logit of what may not come.
const OUT: f32 = f32::NEG_INFINITY;
