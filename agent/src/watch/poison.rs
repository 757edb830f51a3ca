//! Poison requests (I7), the detector's part: who was in flight when an episode began, and what the gate must refuse. In a pod the operator
//! knows of every replica's stalls and says it in a note; in `truebeat run` the agent applies the same rule to its own book.

use std::time::Duration;

use crds::episode::Episode;
use crds::poison::{InFlight, Refused, Stall, milliseconds, refused};
use vitals::recovery::Mode;

use super::Watch;
use super::ear::GateEar;
use crate::gate::suspects::{Poison, Suspect};
use crate::incidents::Incidents;

/// Who says what is refused.
#[derive(Debug)]
enum Source {
    Nobody,
    Operator,
    /// This replica's own stalls, each remembered for so many milliseconds; and the newest episode when they were looked at.
    Own {
        keep_ms: i64,
        newest: Option<(String, String)>,
    },
}

/// What is refused, and which episode's suspects are known.
#[derive(Debug)]
pub struct PoisonBook {
    source: Source,
    list: Vec<Refused>,
    /// The gate goes by this book, and not by what a forerunner told it.
    told: bool,
    /// The episode about which the gate has answered.
    asked_about: Option<String>,
}

impl Watch {
    /// Who was in flight when an episode began is noted, and what is refused is told to the gate at once (I7).
    pub(super) async fn watch_poison(&mut self, now_ms: u64) {
        self.poison.note_suspects(now_ms, &mut self.gate, &mut self.acts.incidents).await;
        let (told, observes) = (&self.notes.look(now_ms).refused, self.recovery.mode() == Mode::Observe);
        if let Some(poison) = self.poison.look(now_ms, &self.acts.incidents, told, observes) {
            self.control.poison = poison;
            self.ask_gate().await;
        }
    }
}

impl PoisonBook {
    /// `keep` is how long a request stays refused after its last stall, in `truebeat run`; `None`: nothing is refused.
    pub fn new(keep: Option<Duration>, standalone: bool) -> Self {
        let source = match keep {
            None => Source::Nobody,
            Some(keep) if standalone => {
                Source::Own { keep_ms: i64::try_from(keep.as_millis()).unwrap_or(i64::MAX), newest: None }
            }
            Some(_) => Source::Operator,
        };
        Self { source, list: Vec::new(), told: false, asked_about: None }
    }

    /// What is refused now, for people.
    pub fn list(&self) -> &[Refused] {
        &self.list
    }

    /// What the gate must refuse from now on; `None`: what it refuses already. `by_operator` is what its note says. Who only `observes` refuses
    /// nothing. The first look always says: the gate may still go by the word of an earlier run, whose time is over or whose policy was another.
    pub fn look(
        &mut self,
        now_ms: u64,
        book: &Incidents,
        by_operator: &[Refused],
        observes: bool,
    ) -> Option<Vec<Poison>> {
        let newest_now = book.list().first().map(|episode| (episode.id.as_str(), episode.stage.as_str()));
        let list = match &mut self.source {
            Source::Nobody => Vec::new(),
            Source::Operator if observes => Vec::new(),
            Source::Own { newest, .. } if observes => {
                *newest = None;
                Vec::new()
            }
            Source::Operator => by_operator.to_vec(),
            Source::Own { newest, .. } if newest.as_ref().map(|(id, stage)| (&**id, &**stage)) == newest_now => {
                self.list.clone()
            }
            Source::Own { keep_ms, newest } => {
                *newest = newest_now.map(|(id, stage)| (id.to_owned(), stage.to_owned()));
                own(book, *keep_ms, wall_ms())
            }
        };
        // most ticks end here: nothing is refused, and nothing was
        if self.told && list.is_empty() && self.list.is_empty() {
            return None;
        }
        self.change(list, now_ms)
    }

    fn change(&mut self, mut list: Vec<Refused>, now_ms: u64) -> Option<Vec<Poison>> {
        let wall_ms = wall_ms();
        list.retain(|one| one.until_ms > wall_ms);
        let told = std::mem::replace(&mut self.told, true);
        if told && list == self.list {
            return None;
        }
        for one in list.iter().filter(|one| !self.list.contains(one)) {
            tracing::warn!(request = one.request, stalls = one.stalls, "a poison request is refused from now on");
        }
        self.list = list;
        let since_ms = |one: &Refused| {
            let age_ms = u64::try_from(wall_ms.saturating_sub(one.since_ms)).unwrap_or(0);
            now_ms.saturating_sub(age_ms)
        };
        let poison = |one: &Refused| Poison { request: one.request.clone(), since_ms: since_ms(one) };
        Some(self.list.iter().map(poison).collect())
    }

    /// Asks the gate who was in flight when the open episode began: once, as soon as it answers.
    pub async fn note_suspects(&mut self, now_ms: u64, gate: &mut GateEar, book: &mut Incidents) {
        let Some(open) = book.open().filter(|open| open.in_flight.is_empty()) else { return };
        if self.asked_about.as_ref() == Some(&open.id) {
            return;
        }
        let id = open.id.clone();
        if let Some(suspects) = gate.suspects().await {
            book.suspects(told(suspects, now_ms, wall_ms()));
            self.asked_about = Some(id);
        }
    }
}

fn wall_ms() -> i64 {
    jiff::Timestamp::now().as_millisecond()
}

/// The gate's words in the API's times.
fn told(suspects: Vec<Suspect>, now_ms: u64, wall_ms: i64) -> Vec<InFlight> {
    let at = |answered_ms: u64| {
        let age_ms = i64::try_from(now_ms.saturating_sub(answered_ms)).ok()?;
        let at = jiff::Timestamp::from_millisecond(wall_ms.checked_sub(age_ms)?).ok()?;
        Some(format!("{at:.3}"))
    };
    let one = |suspect: Suspect| InFlight { request: suspect.request, completed_at: suspect.answered_ms.and_then(at) };
    suspects.into_iter().map(one).collect()
}

/// The rule over this replica's own stalls.
fn own(book: &Incidents, keep_ms: i64, wall_ms: i64) -> Vec<Refused> {
    let stalls: Vec<Stall<'_>> = book.list().iter().filter_map(stall).collect();
    refused(&stalls, "", keep_ms, wall_ms)
}

fn stall(episode: &Episode) -> Option<Stall<'_>> {
    let at_ms = milliseconds(episode.suspect_at.as_deref()?)?;
    episode.is_stall().then_some(Stall { replica: "", at_ms, in_flight: &episode.in_flight })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINT: &str = "00000000000000aa";

    /// A book with stalls so many seconds ago, newest first, of the same request.
    fn book(ages_s: &[i64], class: &str) -> Incidents {
        let mut book = Incidents::default();
        for (n, age_s) in ages_s.iter().rev().enumerate() {
            let at = jiff::Timestamp::from_millisecond(wall_ms() - age_s * 1_000).unwrap();
            book.begin(&format!("host-{n}-9"), 1, class, &format!("{at:.3}"));
            book.suspects(vec![InFlight { request: PRINT.to_owned(), completed_at: None }]);
        }
        book
    }

    fn standalone() -> PoisonBook {
        PoisonBook::new(Some(Duration::from_secs(3_600)), true)
    }

    #[test]
    fn a_run_refuses_what_it_met_at_two_of_its_own_stalls_and_only_while_they_count() {
        let refuses = |ages_s: &[i64], class| standalone().look(10_000_000, &book(ages_s, class), &[], false);
        let nothing = Some(Vec::new());
        assert_eq!(refuses(&[5], "Dead"), nothing, "once");
        assert_eq!(refuses(&[5, 90], "StepStalled"), nothing, "suspicions that were never confirmed");
        let poison = refuses(&[5, 90], "Dead").unwrap();
        assert_eq!((poison.len(), poison[0].request.as_str()), (1, PRINT));
        assert!((6_390_000..=6_400_000).contains(&poison[0].since_ms), "an hour before the last of them: {poison:?}");
        assert_eq!(refuses(&[3_601, 3_700], "Dead"), nothing, "long ago");
    }

    #[test]
    fn the_first_look_speaks_though_nothing_is_refused_and_the_next_ones_say_nothing() {
        let nothing = Some(Vec::new());
        let hour = Some(Duration::from_secs(3_600));
        for (keep, standalone, observes) in
            [(hour, true, false), (hour, true, true), (hour, false, false), (hour, false, true), (None, true, false)]
        {
            let mut poison = PoisonBook::new(keep, standalone);
            let book = if observes || keep.is_none() { book(&[5, 90], "Dead") } else { Incidents::default() };
            let looks = [1_000_000, 1_000_100].map(|now_ms| poison.look(now_ms, &book, &[], observes));
            assert_eq!(looks, [nothing.clone(), None], "{keep:?} {standalone} {observes}");
        }
    }

    #[test]
    fn the_gate_is_told_of_changes_alone() {
        let (mut poison, book) = (standalone(), book(&[5, 90], "Dead"));
        assert!(poison.look(1_000_000, &book, &[], false).is_some());
        assert_eq!((poison.look(1_000_100, &book, &[], false), poison.list().len()), (None, 1));
        poison.list[0].until_ms = 0;
        assert_eq!(poison.look(1_000_200, &book, &[], false), Some(Vec::new()), "its time is over");
    }

    #[test]
    fn who_only_observes_refuses_nothing_and_begins_with_the_change_of_mode() {
        let (mut poison, book) = (standalone(), book(&[5, 90], "Dead"));
        assert_eq!(poison.look(1_000_000, &book, &[], true), Some(Vec::new()));
        assert_eq!(poison.look(1_000_100, &book, &[], false).map(|list| list.len()), Some(1));
        assert_eq!(poison.look(1_000_200, &book, &[], true), Some(Vec::new()));
        assert_eq!(poison.look(1_000_300, &book, &[], false).map(|list| list.len()), Some(1));
    }

    #[test]
    fn in_a_pod_the_operators_note_is_what_counts() {
        let mut poison = PoisonBook::new(Some(Duration::ZERO), false);
        assert_eq!(poison.look(1_000, &book(&[5, 90], "Dead"), &[], false), Some(Vec::new()));
        let one =
            Refused { request: PRINT.to_owned(), since_ms: wall_ms() - 500, until_ms: wall_ms() + 600_000, stalls: 2 };
        let (note, nothing) = ([one], Incidents::default());
        let told = poison.look(2_000, &nothing, &note, false).unwrap();
        assert!(told.len() == 1 && (1_000..=1_500).contains(&told[0].since_ms), "{told:?}");
        assert_eq!(poison.look(2_100, &nothing, &note, true), Some(Vec::new()), "mode Observe");
        assert_eq!(poison.look(2_200, &nothing, &note, false).map(|list| list.len()), Some(1));
        assert_eq!(poison.look(2_500, &nothing, &[], false), Some(Vec::new()));
    }

    #[test]
    fn times_of_the_gate_become_times_of_the_api() {
        let suspects = vec![Suspect { request: PRINT.to_owned(), answered_ms: Some(7_000) }];
        let told = told(suspects, 8_500, 1_767_225_600_000);
        assert_eq!(told[0].completed_at.as_deref(), Some("2025-12-31T23:59:58.500Z"));
    }
}
