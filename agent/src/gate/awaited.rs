//! A request whose client leaves before it is answered takes the engine's connection with it. Left alone it would end when all that is held of the
//! request was taken: an engine that takes nothing would keep the body and a descriptor for ever, and more of both each time a client tries again.

use std::sync::{Arc, OnceLock};

use futures::future::{AbortHandle, Abortable};
use hyper::rt::Executor;

tokio::task_local! {
    /// Ends the task in which this is asked for.
    static END: AbortHandle;
}

/// Runs the engine's connections, each so that it can be ended from outside.
#[derive(Debug, Clone, Copy)]
pub struct Endable;

impl<T: Future<Output = ()> + Send + 'static> Executor<T> for Endable {
    fn execute(&self, task: T) {
        let (end, ended) = AbortHandle::new_pair();
        tokio::spawn(END.scope(end, Abortable::new(task, ended)));
    }
}

/// The connection by which a request's body goes, as soon as it is known.
#[derive(Debug, Default)]
pub struct Way(Arc<OnceLock<AbortHandle>>);

impl Way {
    /// Its connection asks for the body, in the task that runs it.
    pub fn found(&self) {
        if self.0.get().is_none() {
            let _ = END.try_with(|end| self.0.set(end.clone()));
        }
    }

    /// For as long as what is given back is there, somebody waits for the answer.
    pub fn awaited(&self) -> Awaited {
        Awaited(Some(Arc::clone(&self.0)))
    }
}

/// An answer that is waited for. Dropped before it is here, it ends the connection: no other request goes by that one yet.
#[derive(Debug)]
pub struct Awaited(Option<Arc<OnceLock<AbortHandle>>>);

impl Awaited {
    /// The engine has answered, or will not.
    pub fn ends(mut self) {
        self.0 = None;
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        if let Some(end) = self.0.take().as_ref().and_then(|way| way.get()) {
            end.abort();
        }
    }
}
