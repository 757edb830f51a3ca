//! The bytes of a GGUF head, one thing after the other. Every read is checked against what is left.

/// Lists within lists are read to this depth.
const DEPTH_MAX: usize = 4;
/// Elements that all lists of a file may have together: several times what the largest vocabulary takes. One byte of the file can be an
/// element, and each becomes a [`Value`] of many.
const ELEMENTS_MAX: u64 = 1 << 23;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    List(Vec<Value>),
}

impl Value {
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(value) => Some(*value),
            Self::Signed(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Float(value) => Some(*value),
            other => other.as_u64().map(|value| value as f64),
        }
    }

    pub fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(value) = self { Some(*value) } else { None }
    }

    pub fn as_str(&self) -> Option<&str> {
        if let Self::Text(value) = self { Some(value) } else { None }
    }

    pub fn as_list(&self) -> Option<&[Self]> {
        if let Self::List(values) = self { Some(values) } else { None }
    }
}

/// Where reading stands.
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    elements_left: u64,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0, elements_left: ELEMENTS_MAX }
    }

    pub fn position(&self) -> usize {
        self.at
    }

    pub fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..len).ok_or_else(|| {
            format!("at byte {} it should have {len} more, but has {}: is the copy complete?", self.at, rest.len())
        })?;
        self.at += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    /// `count`, if as many things of at least `bytes_each` can follow.
    pub fn plausible(&self, count: u64, bytes_each: u64) -> Result<u64, String> {
        let left = (self.bytes.len() - self.at) as u64;
        if count.checked_mul(bytes_each).is_some_and(|bytes| bytes <= left) {
            return Ok(count);
        }
        Err(format!("at byte {} it claims {count} entries, but has {left} bytes left: is the copy complete?", self.at))
    }

    pub fn text(&mut self) -> Result<String, String> {
        let len = self.u64()?;
        let (len, at) = (self.plausible(len, 1)?, self.at);
        // some vocabularies hold pieces of characters; they are kept as well as can be
        let bytes = self.take(usize::try_from(len).map_err(|_| format!("the text at byte {at} has {len} bytes"))?)?;
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }

    pub fn value(&mut self) -> Result<Value, String> {
        let kind = self.u32()?;
        self.value_of(kind, 0)
    }

    fn value_of(&mut self, kind: u32, depth: usize) -> Result<Value, String> {
        Ok(match kind {
            0 => Value::Unsigned(self.array::<1>()?[0].into()),
            1 => Value::Signed(i8::from_le_bytes(self.array()?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.array()?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.array()?).into()),
            4 => Value::Unsigned(self.u32()?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.array()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array()?).into()),
            7 => Value::Bool(self.array::<1>()?[0] != 0),
            8 => Value::Text(self.text()?),
            9 => self.list(depth)?,
            10 => Value::Unsigned(self.u64()?),
            11 => Value::Signed(i64::from_le_bytes(self.array()?)),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(format!("its value is of type {other}, which there is not")),
        })
    }

    fn list(&mut self, depth: usize) -> Result<Value, String> {
        let (kind, count) = (self.u32()?, self.u64()?);
        if depth >= DEPTH_MAX || count > self.elements_left {
            return Err(format!(
                "a list of {count} elements at depth {depth} is more than can be read: all lists of a file may have \
                 {ELEMENTS_MAX} elements, {DEPTH_MAX} deep"
            ));
        }
        self.elements_left -= count;
        let count = self.plausible(count, 1)?;
        (0..count).map(|_| self.value_of(kind, depth + 1)).collect::<Result<_, _>>().map(Value::List)
    }
}
