//! A GGUF file put together in memory: for the demo model, and for tests of the reader. Pure.

/// A file in the making: each call adds to it.
#[derive(Debug, Default)]
pub struct Builder {
    pairs: Vec<u8>,
    pair_count: u64,
    tensors: Vec<u8>,
    tensor_count: u64,
    data: Vec<u8>,
}

impl Builder {
    fn text(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
    }

    /// A metadata value of a type, by GGUF's numbers, as its bytes.
    pub fn pair(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.pairs.extend([&Self::text(key)[..], &kind.to_le_bytes(), value].concat());
        self.pair_count += 1;
        self
    }

    /// A text.
    pub fn string(self, key: &str, value: &str) -> Self {
        self.pair(key, 8, &Self::text(value))
    }

    /// A number.
    pub fn u32(self, key: &str, value: u32) -> Self {
        self.pair(key, 4, &value.to_le_bytes())
    }

    /// A tensor; `dims` in GGUF's order, the innermost first.
    pub fn tensor(mut self, name: &str, dims: &[u64], kind: u32, data: &[u8]) -> Self {
        let dims: Vec<u8> = dims.iter().flat_map(|size| size.to_le_bytes()).collect();
        self.tensors.extend(Self::text(name));
        self.tensors.extend((dims.len() as u32 / 8).to_le_bytes());
        self.tensors.extend(dims);
        self.tensors.extend(kind.to_le_bytes());
        self.tensors.extend((self.data.len() as u64).to_le_bytes());
        self.tensor_count += 1;
        self.data.extend(data);
        self.data.resize(self.data.len().next_multiple_of(32), 0);
        self
    }

    /// The bytes of the file.
    pub fn build(self) -> Vec<u8> {
        let counts = [self.tensor_count.to_le_bytes(), self.pair_count.to_le_bytes()].concat();
        let mut out = [b"GGUF", &3u32.to_le_bytes()[..], &counts, &self.pairs, &self.tensors].concat();
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(self.data);
        out
    }
}
