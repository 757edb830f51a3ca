//! Whose turn it is: what a process makes of the lease that it sees, and of how long nothing of it has moved. Pure.

use std::time::Duration;

use super::lease::{LeaseDoc, Owner, SILENCE_MAX};

/// More than this between two looks is a machine that did not run us, nor perhaps the owner; the rest is not counted.
const PASSED_MAX: Duration = Duration::from_millis(100);

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    Wait,
    /// The owner got on: so much of so much is done.
    Moved(u64, u64),
    /// Nobody has it, or nobody that will go on.
    Take,
    /// It cannot be done.
    GiveUp,
}

/// One wait.
#[derive(Debug)]
pub struct Watch {
    seen: Option<LeaseDoc>,
    /// How long what is seen has stood.
    stood: Duration,
    /// How long this process lets others go first.
    turn: Duration,
    guards: bool,
}

impl Watch {
    pub fn new(turn: Duration, guards: bool) -> Self {
        Self { seen: None, stood: Duration::ZERO, turn, guards }
    }

    /// Takes in what the lease says, and what is known of its owner, `passed` after the last look.
    pub fn look(&mut self, now: Option<(&LeaseDoc, Owner)>, passed: Duration) -> Turn {
        let doc = now.map(|(doc, _)| doc);
        if doc == self.seen.as_ref() {
            self.stood += passed.min(PASSED_MAX);
        } else {
            self.stood = Duration::ZERO;
            self.seen = doc.cloned();
            if let Some(doc) = doc.filter(|doc| doc.failed.is_none()) {
                return Turn::Moved(doc.done, doc.total);
            }
        }
        let Some((doc, owner)) = now else { return self.take_after(Duration::ZERO) };
        match (self.guards, owner) {
            // as in the field: whoever has the lease is believed to be at it
            (false, _) => Turn::Wait,
            (true, Owner::Gone) => self.take_after(Duration::ZERO),
            // the word of one who lives binds; a stranger may have been dead since before this machine began
            (true, Owner::Alive) if doc.failed.is_some() => Turn::GiveUp,
            (true, _) => self.take_after(Duration::from_millis(doc.silence_ms_max).min(SILENCE_MAX)),
        }
    }

    fn take_after(&self, silence: Duration) -> Turn {
        if self.stood >= silence + self.turn { Turn::Take } else { Turn::Wait }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(20);

    fn doc(done: u64) -> LeaseDoc {
        let text = format!(
            r#"{{"pid":9,"start_ticks":1,"place":"x","generation":1,"silence_ms_max":90000,"done":{done},"total":9,"failed":null}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    /// After how many ms of the same look it takes the lease.
    fn takes(mut watch: Watch, now: Option<(&LeaseDoc, Owner)>) -> Option<u128> {
        let looks = (0..1000u32).map(|i| (STEP * i, watch.look(now, STEP)));
        looks.filter(|(_, turn)| *turn == Turn::Take).map(|(at, _)| at.as_millis()).next()
    }

    #[test]
    fn the_dead_are_followed_at_once_the_silent_in_five_seconds_and_each_waits_his_turn() {
        let doc = doc(3);
        let watch = |turn_ms| Watch::new(Duration::from_millis(turn_ms), true);
        assert_eq!(takes(watch(0), None), Some(0));
        assert_eq!(takes(watch(200), None), Some(180));
        assert_eq!(takes(watch(0), Some((&doc, Owner::Gone))), Some(20));
        assert_eq!(takes(watch(400), Some((&doc, Owner::Gone))), Some(400));
        for owner in [Owner::Alive, Owner::Unseen] {
            assert_eq!(takes(watch(0), Some((&doc, owner))), Some(5000), "its own promise counts up to a bound");
        }
    }

    #[test]
    fn without_guards_a_dead_owner_is_waited_for() {
        assert_eq!(takes(Watch::new(Duration::ZERO, false), Some((&doc(3), Owner::Gone))), None);
        assert_eq!(takes(Watch::new(Duration::ZERO, false), None), Some(0));
    }

    #[test]
    fn work_that_goes_on_is_told_and_renews_the_time() {
        let mut watch = Watch::new(Duration::ZERO, true);
        for done in 0..100 {
            let doc = doc(done);
            assert_eq!(watch.look(Some((&doc, Owner::Alive)), STEP), Turn::Moved(done, 9));
            for _ in 0..200 {
                assert_eq!(watch.look(Some((&doc, Owner::Alive)), STEP), Turn::Wait);
            }
        }
    }

    #[test]
    fn an_owner_in_one_big_piece_is_not_silent() {
        let mut watch = Watch::new(Duration::ZERO, true);
        for words in 0..100 {
            let doc = LeaseDoc { words, ..doc(3) };
            assert_eq!(watch.look(Some((&doc, Owner::Alive)), STEP), Turn::Moved(3, 9));
            assert!((0..200).all(|_| watch.look(Some((&doc, Owner::Alive)), STEP) == Turn::Wait));
        }
    }

    #[test]
    fn a_failure_of_a_living_owner_ends_the_wait_and_one_of_a_dead_or_unseen_does_not_bind() {
        let failed = LeaseDoc { failed: Some("no space".into()), ..doc(1) };
        let look = |owner| Watch::new(Duration::ZERO, true).look(Some((&failed, owner)), STEP);
        assert_eq!((look(Owner::Alive), look(Owner::Gone)), (Turn::GiveUp, Turn::Take));
        assert_eq!(takes(Watch::new(Duration::ZERO, true), Some((&failed, Owner::Unseen))), Some(5000));
    }

    #[test]
    fn a_pause_of_this_process_is_hardly_counted() {
        let (mut watch, doc) = (Watch::new(Duration::ZERO, true), doc(3));
        watch.look(Some((&doc, Owner::Alive)), STEP);
        assert_eq!(watch.look(Some((&doc, Owner::Alive)), Duration::from_secs(60)), Turn::Wait);
    }
}
