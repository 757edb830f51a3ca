//! What an operator sends a request for (P10): each pass over an InferenceDeployment, and each sweep of the nodes, runs in a span of that name,
//! wherever its requests are made. All other spans and all events of the operator are off.

use std::{
    cell::RefCell,
    fmt::Debug,
    sync::{Mutex, PoisonError},
};

use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
    subscriber::Interest,
};

/// Namespace and name of an InferenceDeployment.
pub type Whose = (String, String);

/// What an operator writes for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    Pass(Whose),
    /// What all InferenceDeployments wish of nodes is made true.
    Sweep,
}

/// One operator process as the server knows it.
#[derive(Debug, Clone)]
pub struct Caller {
    pub id: u32,
    pub identity: String,
    /// What it asks for, if that is known.
    pub work: Option<Work>,
}

impl Caller {
    pub fn new(id: u32, identity: impl Into<String>) -> Self {
        Caller { id, identity: identity.into(), work: None }
    }
}

/// All work there was, by the number of its spans: a span tells nothing but whose it is, so one number is enough for all of one.
static KNOWN: Mutex<Vec<Work>> = Mutex::new(Vec::new());

thread_local! {
    /// What this thread is in the middle of, the innermost last.
    static AT_WORK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// From now on [`current`] knows.
pub fn listen() {
    tracing::subscriber::set_global_default(Passes).expect("nobody else listens");
}

/// What this thread is at work on.
pub fn current() -> Option<Work> {
    let number = AT_WORK.with_borrow(|at_work| at_work.last().copied())?;
    known().get(usize::try_from(number).ok()?.checked_sub(1)?).cloned()
}

fn known() -> std::sync::MutexGuard<'static, Vec<Work>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Passes;

impl Subscriber for Passes {
    fn register_callsite(&self, callsite: &'static Metadata<'static>) -> Interest {
        if self.enabled(callsite) { Interest::always() } else { Interest::never() }
    }

    fn enabled(&self, callsite: &Metadata<'_>) -> bool {
        let named = callsite.is_span() && matches!(callsite.name(), "pass" | "sweep");
        named && callsite.target().starts_with("operator::")
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut words = Words::default();
        span.record(&mut words);
        let is_pass = span.metadata().name() == "pass";
        let work = if is_pass { Work::Pass((words.namespace, words.name)) } else { Work::Sweep };
        let mut known = known();
        let place = known.iter().position(|other| *other == work).unwrap_or_else(|| {
            known.push(work);
            known.len() - 1
        });
        Id::from_u64(place as u64 + 1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, span: &Id) {
        AT_WORK.with_borrow_mut(|at_work| at_work.push(span.into_u64()));
    }

    fn exit(&self, _: &Id) {
        AT_WORK.with_borrow_mut(|at_work| _ = at_work.pop());
    }
}

#[derive(Default)]
struct Words {
    namespace: String,
    name: String,
}

impl Visit for Words {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "namespace" => value.clone_into(&mut self.namespace),
            "name" => value.clone_into(&mut self.name),
            _ => {}
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
}
