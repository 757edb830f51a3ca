//! The expressions of the admission policy, evaluated here as the API server does: each variable once, then each entry. An error of any is the
//! test's. (This evaluator counts the bytes of a text where the API server's counts its characters; the texts that are longer than the bound are
//! ASCII.)

use std::collections::HashMap;

use crds::known_bad::{ENTRIES, cel_variables};
use kube::core::cel::KubeCelExt;
use kube::core::cel::cel::objects::Key;
use kube::core::cel::cel::{Context, Program, Value as Cel, to_value};
use serde_json::{Value, json};

/// All expressions, compiled.
pub struct Policy {
    variables: Vec<(&'static str, Program)>,
    entries: Vec<(&'static str, Program)>,
}

impl Policy {
    pub fn new() -> Self {
        let compile = |cel: &str| Program::compile(cel).unwrap_or_else(|error| panic!("{error}: {cel}"));
        Policy {
            variables: cel_variables().iter().map(|(name, cel)| (*name, compile(cel))).collect(),
            entries: ENTRIES.iter().map(|entry| (entry.name, compile(&entry.cel()))).collect(),
        }
    }

    /// The entries that an object with this engine is warned of.
    pub fn hits(&self, engine: &Value) -> Vec<&'static str> {
        let object = to_value(json!({"spec": {"engine": engine}})).unwrap();
        let mut known: HashMap<Key, Cel> = HashMap::new();
        for (name, program) in &self.variables {
            let value = evaluate(program, &object, &known);
            known.insert(Key::from(*name), value);
        }
        let passes = |program: &Program| match evaluate(program, &object, &known) {
            Cel::Bool(passes) => passes,
            other => panic!("no answer: {other:?}"),
        };
        self.entries.iter().filter(|(_, program)| !passes(program)).map(|(name, _)| *name).collect()
    }
}

fn evaluate(program: &Program, object: &Cel, known: &HashMap<Key, Cel>) -> Cel {
    let mut context = Context::default().with_all();
    context.add_variable_from_value("object", object.clone());
    context.add_variable_from_value("variables", known.clone());
    program.execute(&context).unwrap_or_else(|error| panic!("{error}"))
}
