//! One version of an object. A write changes one or two of its fields (`metadata`, `spec`, `status` …); the others, and their texts,
//! are shared with the versions before and after it.

use std::{
    fmt,
    ops::{Index, IndexMut},
    sync::{Arc, OnceLock},
};

use bytes::Bytes;
use serde_json::{Map, Value};

#[derive(Debug, Clone, Default)]
pub struct Object {
    fields: Vec<Arc<Field>>,
    /// All of it, once somebody has asked for it: most versions are read many times.
    text: OnceLock<Bytes>,
}

#[derive(Debug, Clone, Default)]
struct Field {
    name: String,
    value: Value,
    /// `"name":value`
    text: OnceLock<String>,
    /// The schema of its kind has been applied to it and found no fault.
    sound: bool,
}

impl Object {
    /// A list, which is text alone.
    pub fn list(text: Vec<u8>) -> Arc<Self> {
        Arc::new(Object { fields: Vec::new(), text: Bytes::from(text).into() })
    }

    pub fn get(&self, name: &str) -> Option<&Value> {
        self.field(name).map(|field| &field.value)
    }

    pub fn fields(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.fields.iter().map(|field| (field.name.as_str(), &field.value))
    }

    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    /// Do both say the same in this field?
    pub fn agrees(&self, other: &Object, name: &str) -> bool {
        match (self.field(name), other.field(name)) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b) || a.value == b.value,
            (a, b) => a.is_none() && b.is_none(),
        }
    }

    /// The same in all fields but these?
    pub fn agrees_but(&self, other: &Object, names: &[&str]) -> bool {
        let asked = |field: &&Arc<Field>| !names.contains(&field.name.as_str());
        self.fields.iter().filter(asked).all(|field| self.agrees(other, &field.name))
            && other.fields.iter().filter(asked).all(|field| self.field(&field.name).is_some())
    }

    /// Null takes the field away.
    pub fn set(&mut self, name: &str, value: Value) {
        match value {
            Value::Null => self.retain(|other| other != name),
            value => self[name] = value,
        }
    }

    /// Takes the field as it is in `other`, or away if it is not there.
    pub fn share(&mut self, other: &Object, name: &str) {
        self.text.take();
        match (other.field(name), self.fields.iter_mut().find(|field| field.name == name)) {
            (Some(theirs), Some(ours)) => ours.clone_from(theirs),
            (Some(theirs), None) => self.fields.push(theirs.clone()),
            (None, _) => self.retain(|other| other != name),
        }
    }

    pub fn retain(&mut self, kept: impl Fn(&str) -> bool) {
        self.text.take();
        self.fields.retain(|field| kept(&field.name));
    }

    /// Lets `check` have its way with the field, unless it has had it before; what it finds wrong.
    pub fn admit(&mut self, name: &str, check: impl FnOnce(&mut Value) -> Vec<String>) -> Vec<String> {
        if self.field(name).is_some_and(|field| field.sound) {
            return Vec::new();
        }
        let field = self.own(name);
        let faults = check(&mut field.value);
        field.sound = faults.is_empty();
        faults
    }

    pub fn json(&self) -> Value {
        Value::Object(self.fields.iter().map(|field| (field.name.clone(), field.value.clone())).collect::<Map<_, _>>())
    }

    pub fn text(&self) -> Bytes {
        let write = || Bytes::from(joined(self.fields.iter().map(|field| field.text())));
        self.text.get_or_init(write).clone()
    }

    /// The text of the `PartialObjectMetadata` that a client gets who asks for the metadata alone.
    pub fn partial(&self) -> Bytes {
        let head = r#""kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1""#;
        let metadata = self.field("metadata").map(|field| field.text());
        Bytes::from(joined([head].into_iter().chain(metadata)))
    }

    fn field(&self, name: &str) -> Option<&Arc<Field>> {
        self.fields.iter().find(|field| field.name == name)
    }

    /// The field to write to, which is nobody else's from here on.
    fn own(&mut self, name: &str) -> &mut Field {
        self.text.take();
        let at = self.fields.iter().position(|field| field.name == name).unwrap_or_else(|| {
            self.fields.push(Arc::new(Field { name: name.to_owned(), ..Field::default() }));
            self.fields.len() - 1
        });
        let field = Arc::make_mut(&mut self.fields[at]);
        field.text.take();
        field.sound = false;
        field
    }
}

impl Field {
    fn text(&self) -> &str {
        self.text.get_or_init(|| format!("{}:{}", Value::from(self.name.as_str()), self.value))
    }
}

fn joined<'a>(texts: impl Iterator<Item = &'a str>) -> Vec<u8> {
    let mut out = vec![b'{'];
    for (nth, text) in texts.enumerate() {
        out.extend((nth > 0).then_some(b','));
        out.extend_from_slice(text.as_bytes());
    }
    out.push(b'}');
    out
}

impl From<Value> for Object {
    fn from(value: Value) -> Self {
        let Value::Object(map) = value else { return Object::default() };
        let field = |(name, value)| Arc::new(Field { name, value, ..Field::default() });
        Object { fields: map.into_iter().map(field).collect(), text: OnceLock::new() }
    }
}

impl From<&Value> for Object {
    fn from(value: &Value) -> Self {
        value.clone().into()
    }
}

impl Index<&str> for Object {
    type Output = Value;

    fn index(&self, name: &str) -> &Value {
        self.get(name).unwrap_or(&Value::Null)
    }
}

impl IndexMut<&str> for Object {
    fn index_mut(&mut self, name: &str) -> &mut Value {
        &mut self.own(name).value
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.text()))
    }
}
