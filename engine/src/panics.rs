//! A panic as an error with the panic's own words.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What `part` returns; a panic in it is an error with the panic's words. Only for parts whose state is whole at any time or gone with
/// whoever asked: KV slots that are written again before they are read, a sampler that is dropped.
///
/// # Errors
/// `part`'s own, or its panic.
pub fn guarded<T>(part: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(part)).unwrap_or_else(|panic| Err(words(panic.as_ref())))
}

fn words(panic: &(dyn Any + Send)) -> String {
    let words = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    let words = words.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("the engine panicked: {}", words.unwrap_or_else(|| "no reason was given".into()))
}
