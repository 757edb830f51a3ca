//! Which steps run by a graph (E2). A graph is made of the launches of one step and runs for a step of exactly those launches, with every
//! address and size equal: the comparison is made each time, so that there is nothing to prove about masks or padding. Any other step runs
//! launch by launch, at once; what it launched is made into a graph elsewhere. Pure.

use std::collections::VecDeque;

use super::driver::Launch;

/// Graphs that are kept; the one that was not used for longest goes first.
const GRAPHS_MAX: usize = 64;
/// Of one shape of steps: its launches differ by how many parts the longest context has.
const OF_SHAPE_MAX: usize = 4;
/// Shapes that are kept in mind after their first step.
const SEEN_MAX: usize = 64;

/// How a step is to be run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Launch by launch; its shape is not worth a graph, or not yet.
    Eager,
    /// Launch by launch, noting what is launched.
    Recorded,
    /// Noting only: at the end there is a graph of the same launches, or they are made then.
    Held,
}

struct Entry<G> {
    shape: u64,
    launches: Vec<Launch>,
    graph: G,
}

/// What became of steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GraphCounts {
    pub replayed: u64,
    pub captured: u64,
    /// Steps of a shape that has graphs, none of which was of the same launches.
    pub missed: u64,
}

/// The graphs of one device.
pub struct GraphCache<G> {
    /// The one that was used last stands last.
    kept: Vec<Entry<G>>,
    seen: VecDeque<u64>,
    /// Asked for and not there yet.
    asked: Vec<(u64, usize)>,
    counts: GraphCounts,
}

impl<G> Default for GraphCache<G> {
    fn default() -> Self {
        Self { kept: Vec::new(), seen: VecDeque::new(), asked: Vec::new(), counts: GraphCounts::default() }
    }
}

impl<G> GraphCache<G> {
    /// How to run a step of `shape`; 0 is a shape that does not come again.
    pub fn way(&mut self, shape: u64) -> Way {
        if shape == 0 {
            return Way::Eager;
        }
        if self.kept.iter().any(|entry| entry.shape == shape) {
            return Way::Held;
        }
        if self.seen.contains(&shape) {
            return Way::Recorded;
        }
        self.seen.truncate(SEEN_MAX - 1);
        self.seen.push_front(shape);
        Way::Eager
    }

    /// The graph of exactly these launches.
    pub fn find(&mut self, shape: u64, launches: &[Launch]) -> Option<&G> {
        let same = |entry: &Entry<G>| entry.shape == shape && entry.launches == launches;
        let Some(at) = self.kept.iter().position(same) else {
            self.counts.missed += 1;
            return None;
        };
        self.counts.replayed += 1;
        let entry = self.kept.remove(at);
        self.kept.push(entry);
        self.kept.last().map(|entry| &entry.graph)
    }

    /// Whether a graph of these launches is to be made: not when one of as many is on its way for the same shape.
    pub fn wants(&mut self, shape: u64, launches: &[Launch]) -> bool {
        let mark = (shape, launches.len());
        if shape == 0 || launches.is_empty() || self.asked.contains(&mark) {
            return false;
        }
        self.asked.push(mark);
        true
    }

    /// A graph that was made of these launches, or could not be (then its shape stays eager until it is asked for anew).
    pub fn put(&mut self, shape: u64, launches: Vec<Launch>, graph: Option<G>) {
        self.asked.retain(|mark| *mark != (shape, launches.len()));
        let Some(graph) = graph else { return };
        self.counts.captured += 1;
        if self.kept.iter().filter(|entry| entry.shape == shape).count() >= OF_SHAPE_MAX
            && let Some(oldest) = self.kept.iter().position(|entry| entry.shape == shape)
        {
            self.kept.remove(oldest);
        }
        if self.kept.len() >= GRAPHS_MAX {
            self.kept.remove(0);
        }
        self.kept.push(Entry { shape, launches, graph });
    }

    /// Nothing was asked of anybody: the capture is busy.
    pub fn not_asked(&mut self, shape: u64, launches: &[Launch]) {
        self.asked.retain(|mark| *mark != (shape, launches.len()));
    }

    pub fn counts(&self) -> GraphCounts {
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launches(args: &[u64]) -> Vec<Launch> {
        args.iter().map(|arg| Launch::new("add_f32", ([1, 1, 1], 32, 0), &[*arg])).collect()
    }

    #[test]
    fn a_shape_is_recorded_at_its_second_step_and_replayed_for_equal_launches_alone() {
        let mut cache = GraphCache::default();
        assert_eq!((cache.way(7), cache.way(7), cache.way(0)), (Way::Eager, Way::Recorded, Way::Eager));
        assert!(cache.wants(7, &launches(&[1, 2])) && !cache.wants(7, &launches(&[1, 2])), "asked for once");
        cache.put(7, launches(&[1, 2]), Some('a'));
        assert_eq!((cache.way(7), cache.way(8)), (Way::Held, Way::Eager));
        assert_eq!(cache.find(7, &launches(&[1, 2])), Some(&'a'));
        for other in [&[1, 3][..], &[1], &[1, 2, 3], &[2, 1], &[]] {
            assert_eq!(cache.find(7, &launches(other)), None, "{other:?}");
        }
        assert_eq!(cache.find(8, &launches(&[1, 2])), None, "another shape");
        assert_eq!(cache.counts(), GraphCounts { replayed: 1, captured: 1, missed: 6 });
    }

    #[test]
    fn it_is_bounded_and_a_failed_capture_leaves_nothing() {
        let mut cache = GraphCache::default();
        for shape in 1..=3 * GRAPHS_MAX as u64 {
            cache.put(shape, launches(&[shape]), Some(shape));
        }
        assert_eq!((cache.kept.len(), cache.way(3)), (GRAPHS_MAX, Way::Eager), "the oldest went");
        for arg in 0..10 {
            cache.put(500, launches(&[arg]), Some(arg));
        }
        let of_shape = cache.kept.iter().filter(|entry| entry.shape == 500).map(|entry| entry.graph);
        assert_eq!(of_shape.collect::<Vec<_>>(), [6, 7, 8, 9]);
        assert!(cache.wants(9, &launches(&[1])));
        cache.put(9, launches(&[1]), None);
        assert!(cache.wants(9, &launches(&[1])), "it may be asked for again");
        cache.not_asked(9, &launches(&[1]));
        assert!(cache.wants(9, &launches(&[1])));
    }
}
