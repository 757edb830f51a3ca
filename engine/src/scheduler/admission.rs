//! Who gets in: what can never be served, or not in time, is refused at once with the reason; the rest waits by rank and is admitted
//! from the head of the queue, never past it.

use super::plan::{Limits, NewSeq, PROMPT_ROWS_MAX, Refusal, StepPlan};
use super::seq::{Rank, Seq};
use super::{Scheduler, push};

impl Scheduler {
    /// Puts a sequence into the queue, behind those of its priority.
    ///
    /// # Errors
    /// [`Refusal`]: it is malformed, can never fit, cannot be served by its deadline, or the queue is full.
    pub fn submit(&mut self, new: NewSeq, now_ns: u64) -> Result<(), Refusal> {
        check_fit(&new, &self.limits)?;
        if self.running.iter().chain(self.waiting.values()).any(|seq| seq.spec.id == new.id) {
            return Err(Refusal::Duplicate(new.id));
        }
        if self.waiting.len() >= self.limits.waiting_max {
            return Err(Refusal::QueueFull { waiting: self.waiting.len() });
        }
        self.arrivals += 1;
        let mut seq = Seq::new(new, self.arrivals, self.pool.table());
        self.note_shared(&mut seq);
        self.check_deadline(&seq, now_ns).inspect_err(|_| self.pace.doubt())?;
        if self.limits.prefix_cache {
            let size = self.limits.block_size.max(1);
            self.waiting.range_mut(seq.rank..).for_each(|(_, other)| other.goes_after(&seq, size));
        }
        self.waiting.insert(seq.rank, seq);
        Ok(())
    }

    /// A prefix that several have runs once, and one that is cached not at all: the newcomer notes what that is of its prompt. That is looked
    /// up once for each, so that a queue of long prompts is not gone through, token by token, for everybody who comes.
    fn note_shared(&self, new: &mut Seq) {
        if !self.limits.prefix_cache {
            return;
        }
        let size = self.limits.block_size.max(1);
        // What decodes have run is found in the cache.
        let under_way = self.running.iter().filter(|other| other.prefill_owed() > 0);
        let before = under_way.chain(self.waiting.range(..new.rank).map(|(_, other)| other));
        before.for_each(|other| new.goes_after(other, size));
        if new.to_run() >= size {
            new.look_for_cached();
        }
    }

    /// Can the first token come by the deadline? Only what must happen first is counted: this sequence's prompt and the prompts before it,
    /// without what is cached or will be by then; not the decodes of others, not a second token. Whoever is refused could not have been
    /// served at the pace of the last steps; before the first prompt nobody is.
    fn check_deadline(&self, seq: &Seq, now_ns: u64) -> Result<(), Refusal> {
        let Some(deadline_ns) = seq.spec.deadline_ns else { return Ok(()) };
        let left_ns = deadline_ns.saturating_sub(now_ns);
        let before = self.running.iter().filter(|other| other.rank < seq.rank);
        let before = before.chain(self.waiting.range(..seq.rank).map(|(_, other)| other));
        let tokens = before.map(Seq::to_run).sum::<usize>() + seq.to_run().max(1);
        match self.pace.prefill_ns(tokens).filter(|needed_ns| *needed_ns > left_ns) {
            None => Ok(()),
            Some(ns) => Err(too_late(ns, left_ns)),
        }
    }

    /// Ends the waiting ones whose deadline cannot be met any more, were they the next: a step spent on them would be taken from those who
    /// can be served. This is asked every turn, hence without a look at the tokens unless the answer would be no.
    pub(super) fn turn_away_late(&mut self, now_ns: u64, plan: &mut StepPlan) {
        let pace = &self.pace;
        let check = |(rank, seq): (&Rank, &mut Seq)| {
            let left_ns = seq.spec.deadline_ns?.saturating_sub(now_ns);
            let needed_ns = |tokens: usize| pace.prefill_ns(tokens).filter(|needed_ns| *needed_ns > left_ns);
            let needed_ns = needed_ns(seq.still_to_run(|tokens| needed_ns(tokens).is_some()))?;
            Some((*rank, seq.was_admitted(), too_late(needed_ns, left_ns)))
        };
        let late: Vec<_> = self.waiting.iter_mut().filter_map(check).collect();
        for (rank, gave_way, refusal) in late {
            let Some(seq) = self.waiting.remove(&rank) else { continue };
            // as at the door; one that gave way has run, and what it waits for is no estimate's fault
            if !gave_way {
                self.pace.doubt();
            }
            plan.late.push((seq.spec.id, refusal));
        }
    }

    /// Ends the running ones whose deadline has passed. Mostly whoever asked has gone by then; one whose answer waits for a slow reader has
    /// not, and what it says would be taken from those who can be served.
    pub(super) fn end_expired(&mut self, now_ns: u64, plan: &mut StepPlan) {
        self.running.retain(|seq| {
            let expired = seq.spec.deadline_ns.is_some_and(|deadline_ns| deadline_ns <= now_ns);
            plan.late.extend(expired.then_some((seq.spec.id, Refusal::Expired)));
            !expired
        });
    }

    /// Where the head of the queue is of a higher priority than running sequences, these give way until it fits.
    pub(super) fn make_way(&mut self, plan: &mut StepPlan) {
        while let (Some((rank, head)), Some(last)) = (self.waiting.first_key_value(), self.running.last()) {
            let full = self.running.len() >= self.limits.num_seqs_max;
            // What decodes take in this very step is not there any more when the head is admitted.
            let growing = self.running.iter().filter(|seq| seq.is_decode() && seq.lacks_room()).count();
            let blocks = self.pool.blocks_for(head.len()) + self.running.len() + growing;
            if last.rank.priority <= rank.priority || !(full || blocks > self.pool.free_blocks()) {
                return;
            }
            self.preempt_last(plan);
        }
    }

    /// Admits from the head of the queue, as many as there is room for.
    pub(super) fn admit(&mut self, plan: &mut StepPlan, budget: &mut usize) {
        while self.admit_head(plan, budget) {}
    }

    /// Admits the head of the queue. False: there is none, or no room. It gets the blocks of all its present tokens at once, and one block a
    /// running sequence is left over, so that admission does not cause the next preemption.
    pub(super) fn admit_head(&mut self, plan: &mut StepPlan, budget: &mut usize) -> bool {
        if *budget == 0 || self.running.len() >= self.limits.num_seqs_max {
            return false;
        }
        let Some(mut head) = self.waiting.first_entry() else { return false };
        let Some(cached) = head.get_mut().take_room(&self.pool, self.running.len()) else { return false };
        let mut seq = head.remove();
        if seq.is_first_admission() && !seq.spec.prompt_rows {
            self.prefixes.queried_tokens += seq.len() as u64;
            self.prefixes.hit_tokens += cached as u64;
        }
        plan.admitted.push(seq.spec.id);
        let count = seq.chunk(*budget, PROMPT_ROWS_MAX.saturating_sub(plan.prompt_rows));
        push(plan, budget, &mut seq, (count, 0));
        let place = self.running.partition_point(|other| other.rank < seq.rank);
        self.running.insert(place, seq);
        true
    }
}

fn too_late(needed_ns: u64, left_ns: u64) -> Refusal {
    Refusal::TooLate { needed_ms: needed_ns / 1_000_000, left_ms: left_ns / 1_000_000 }
}

/// Can this sequence ever run to its end?
///
/// # Errors
/// [`Refusal`] when it cannot. The front end asks the same before it accepts a request.
pub fn check_fit(new: &NewSeq, limits: &Limits) -> Result<(), Refusal> {
    let tokens = new.prompt.len().saturating_add(new.max_new_tokens);
    let blocks = tokens.div_ceil(limits.block_size.max(1));
    if new.prompt.is_empty() {
        Err(Refusal::EmptyPrompt)
    } else if tokens > limits.seq_len_max {
        Err(Refusal::TooLong { tokens, tokens_max: limits.seq_len_max })
    } else if blocks > limits.num_blocks {
        Err(Refusal::CacheTooSmall { blocks, blocks_max: limits.num_blocks })
    } else {
        Ok(())
    }
}
