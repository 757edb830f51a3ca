//! The whole fleet as one deployment sees it, pure: how many restarts it leaves to that one (I2), and when so much of it stalls at once that
//! one cause is likely.
//!
//! Whoever owns pods can make them stall, and say so for as long as it likes. So what one deployment does is never the fleet's cause: that
//! shows in the others as well. And where there are slots enough, no namespace has all of them (S15).

use crds::HoldStatus;

use super::escalate::HOLD_COUNT_MIN;

/// Fewer stalls than this are no cause of a fleet.
const ALARM_COUNT_MIN: usize = 5;

/// What a look at the whole fleet came to, the deployment in question left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fleet {
    /// Those that are there (`standing`).
    pub replicas: usize,
    pub stalled: usize,
    /// Each deployment of which any stall: how many are there, and how many of them stall.
    pub stalls: Vec<(usize, usize)>,
    pub granted: usize,
    /// Those of the grants that are of the same namespace as the deployment in question.
    pub granted_beside: usize,
    /// Does any replica stand in another namespace?
    pub neighbours: bool,
    /// At most so many percent of all replicas (but always one) in a granted recovery at once.
    pub restarts_percent: usize,
    /// Hold when more than so many percent of all replicas (and at least five) stall at once.
    pub hold_percent: usize,
    /// Node and failure domain of each grant.
    pub grants_at: Vec<(String, String)>,
    /// Whose each of these is, as `namespace/name`.
    pub holders: Vec<String>,
    /// At most so many grants at once on one node, and in one failure domain; 0: no limit.
    pub place_max: (usize, usize),
    /// The holds that stand elsewhere.
    pub holds: Vec<HoldStatus>,
    /// It cannot be looked at now.
    pub unseen: Option<Unseen>,
}

/// What the fleet leaves to one deployment, its own grants included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slots {
    pub count: usize,
    /// One more is free, and kept for other namespaces.
    pub one_is_kept: bool,
}

/// What is known of a fleet that cannot be looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unseen {
    /// It was held when it was seen last, and stays so.
    Held,
    /// Nobody knows whether there is a slot: there is none.
    Free,
}

impl Fleet {
    /// One that cannot be looked at now: it has no slot for anybody.
    pub fn unseen(how: Unseen) -> Self {
        Fleet { unseen: Some(how), ..Fleet::default() }
    }

    /// For a deployment of which `own` replicas are there.
    pub fn slots(&self, own: usize) -> Slots {
        if self.unseen.is_some() {
            return Slots { count: 0, one_is_kept: false };
        }
        let all = ((self.replicas + own) * self.restarts_percent / 100).max(1);
        let free = all.saturating_sub(self.granted);
        if all < 2 || !self.neighbours {
            return Slots { count: free, one_is_kept: false };
        }
        let count = free.min((all - 1).saturating_sub(self.granted_beside));
        Slots { count, one_is_kept: count < free }
    }

    /// Why one cause is likely, where of a deployment's `standing` replicas `stalled` stall beside all others'; `None`: it is not.
    pub fn alarm(&self, (standing, stalled): (usize, usize)) -> Option<String> {
        if let Some(unseen) = self.unseen {
            let held = "the fleet was held, and cannot be looked at now";
            return (unseen == Unseen::Held).then(|| held.to_owned());
        }
        let (all, alarmed) = (self.replicas + standing, self.stalled + stalled);
        let many = |alarmed: usize, all: usize| alarmed > all * self.hold_percent / 100;
        let without = |(standing, stalled): (usize, usize)| {
            let (others, rest) = (all.saturating_sub(standing), alarmed.saturating_sub(stalled));
            rest >= HOLD_COUNT_MIN && many(rest, others)
        };
        let own = std::iter::once((standing, stalled));
        let common = || self.stalls.iter().copied().chain(own).all(without);
        let alarms = self.hold_percent < 100 && alarmed >= ALARM_COUNT_MIN && many(alarmed, all) && common();
        alarms.then(|| format!("{alarmed} of {all} replicas of the fleet stall at once"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a fleet of these deployments alarm, as seen by one of which `own` are there and stall?
    fn alarms(own: (usize, usize), others: &[(usize, usize)]) -> bool {
        let sum = |of: fn(&(usize, usize)) -> usize| others.iter().map(of).sum();
        let stalls = others.iter().filter(|other| other.1 > 0).copied().collect();
        let (replicas, stalled) = (sum(|other| other.0), sum(|other| other.1));
        Fleet { replicas, stalled, stalls, hold_percent: 30, ..Fleet::default() }.alarm(own).is_some()
    }

    #[test]
    fn a_cause_of_the_fleet_shows_in_more_than_one_deployment() {
        assert!(alarms((8, 8), &[(8, 8), (8, 8), (8, 0)]));
        assert!(alarms((2, 2), &[(2, 2), (2, 2)]), "six of six");
        assert!(alarms((1, 1), &[(1, 1); 4]), "five of five");
        assert!(!alarms((1, 1), &[(1, 1); 3]), "four are few");
        assert!(alarms((3, 1), &[(8, 8), (8, 8), (8, 8), (8, 0), (8, 0)]));
        assert!(!alarms((3, 1), &[(8, 1), (8, 1), (8, 1), (8, 0), (8, 1)]), "five of forty-three");
        let hostile = (90, 90);
        assert!(!alarms((3, 1), &[hostile, (3, 0), (4, 1)]), "S15: its owner holds nobody else");
        assert!(!alarms(hostile, &[(3, 1), (3, 1)]), "and it is held by its own cause");
        assert!(!alarms((3, 2), &[hostile]));
        assert!(alarms((3, 2), &[hostile, (3, 2)]), "what befalls the others as well is no work of one");
    }

    #[test]
    fn no_namespace_has_every_slot() {
        let fleet = |replicas, granted, granted_beside| Fleet {
            replicas,
            granted,
            granted_beside,
            neighbours: true,
            restarts_percent: 10,
            ..Fleet::default()
        };
        let slots = |fleet: Fleet| (fleet.slots(10).count, fleet.slots(10).one_is_kept);
        assert_eq!(slots(fleet(40, 0, 0)), (4, true), "of five");
        assert_eq!(slots(fleet(40, 4, 4)), (0, true), "its own have all but one");
        assert_eq!(slots(fleet(40, 4, 0)), (1, false), "others have them");
        assert_eq!(slots(fleet(40, 4, 3)), (1, false), "another has the one that is kept for it");
        assert_eq!(slots(fleet(5, 0, 0)), (1, false), "there is but one");
        assert_eq!(slots(Fleet { neighbours: false, ..fleet(40, 4, 4) }), (1, false), "there is nobody else");
    }
}
