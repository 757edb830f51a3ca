//! An in-process Kubernetes API server: objects, versions, field managers, preconditions, watches. It is what
//! `kube::Client` talks to in the simulation, and is itself checked against a real kube-apiserver (`differential`).

pub mod evict;
pub mod fields;
pub mod kinds;
pub mod object;
pub mod schema;
pub mod select;
pub mod store;
pub mod verbs;
pub mod wire;

use serde_json::{Value, json};

/// An answer that is no success.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    pub code: u16,
    pub reason: &'static str,
    pub message: String,
    /// `null`: none.
    pub details: Value,
}

impl Refusal {
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Refusal { code, reason, message: message.into(), details: Value::Null }
    }

    /// The `Status` object of the API.
    pub fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        });
        if !self.details.is_null() {
            status["details"].clone_from(&self.details);
        }
        status
    }
}
