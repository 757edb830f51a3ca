//! What is stopped from outside and goes on later.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context as TaskContext, Poll, Waker},
};

/// SIGSTOP for a task.
#[derive(Default)]
pub struct Ice(Mutex<(bool, Option<Waker>)>);

impl Ice {
    pub fn holds(&self) -> bool {
        self.0.lock().expect("no panic").0
    }

    pub fn freeze(&self) {
        self.0.lock().expect("no panic").0 = true;
    }

    pub fn thaw(&self) {
        let mut ice = self.0.lock().expect("no panic");
        ice.0 = false;
        ice.1.take().into_iter().for_each(Waker::wake);
    }
}

pub struct Freezable<'a> {
    pub ice: Arc<Ice>,
    pub inner: Pin<Box<dyn Future<Output = ()> + Send + 'a>>,
}

impl Future for Freezable<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<()> {
        {
            let mut ice = self.ice.0.lock().expect("no panic");
            ice.1 = Some(context.waker().clone());
            if ice.0 {
                return Poll::Pending;
            }
        }
        self.inner.as_mut().poll(context)
    }
}
