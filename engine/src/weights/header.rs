//! The safetensors header: 8 bytes of length, then JSON that names each tensor's dtype, shape and place in the file.
//! Pure: bytes in, a checked table out. Every claim of the header is tested against the file's true length by tensor
//! name, so nothing later can read outside the file, whatever the bytes are.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::WeightType;

/// Longest header accepted, in bytes (the format's own limit).
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes of the length field in front of the header.
pub const LENGTH_BYTES: u64 = 8;

/// Where a tensor lies and what it is; checked against the file's length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// As the file spells it; only a [`WeightType`] can be read.
    pub dtype: String,
    pub shape: Vec<usize>,
    /// From the start of the file, in bytes.
    pub offset: u64,
    pub len_bytes: u64,
    /// Rows belong to so many heads, the two halves of each interleaved (GGUF files of the llama family).
    pub interleaved_heads: Option<usize>,
}

impl TensorInfo {
    /// The type, if it is one the engine reads.
    pub fn weight_type(&self) -> Option<WeightType> {
        match self.dtype.as_str() {
            "F32" => Some(WeightType::F32),
            "BF16" => Some(WeightType::Bf16),
            "F16" => Some(WeightType::F16),
            "Q8_0" => Some(WeightType::Q8_0),
            "Q4_K" => Some(WeightType::Q4K),
            "Q6_K" => Some(WeightType::Q6K),
            _ => None,
        }
    }
}

/// What is wrong with a header: the tensor at fault, if it is one's, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderFault {
    pub tensor: Option<String>,
    pub reason: String,
}

impl HeaderFault {
    fn file(reason: String) -> Self {
        Self { tensor: None, reason }
    }
}

/// Length of the header that the first 8 bytes announce.
///
/// # Errors
/// A [`HeaderFault`] when the file cannot hold it.
pub fn header_len(length_field: [u8; 8], file_len: u64) -> Result<u64, HeaderFault> {
    let len = u64::from_le_bytes(length_field);
    if len > HEADER_BYTES_MAX {
        return Err(HeaderFault::file(format!(
            "its header claims {len} bytes; at most {HEADER_BYTES_MAX} are allowed"
        )));
    }
    if len + LENGTH_BYTES > file_len {
        let reason = format!("its header claims {len} bytes but the whole file has {file_len}: is the copy complete?");
        return Err(HeaderFault::file(reason));
    }
    Ok(len)
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// Parses the header's JSON and checks each tensor against a file of `file_len` bytes.
///
/// # Errors
/// A [`HeaderFault`] naming the tensor whose place or shape is impossible.
pub fn parse(header: &[u8], file_len: u64) -> Result<BTreeMap<String, TensorInfo>, HeaderFault> {
    let text = std::str::from_utf8(header)
        .map_err(|error| HeaderFault::file(format!("its header is not UTF-8 (byte {})", error.valid_up_to())))?;
    let raw: BTreeMap<String, serde_json::Value> = serde_json::from_str(text)
        .map_err(|error| HeaderFault::file(format!("its header is not a JSON object of tensors: {error}")))?;
    let data_start = LENGTH_BYTES + header.len() as u64;
    let data_len = file_len.saturating_sub(data_start);
    let tensors = raw.into_iter().filter(|(name, _)| name != "__metadata__");
    let checked = tensors.map(|(name, value)| match check(value, data_start, data_len) {
        Ok(info) => Ok((name, info)),
        Err(reason) => Err(HeaderFault { tensor: Some(name), reason }),
    });
    checked.collect()
}

fn check(value: serde_json::Value, data_start: u64, data_len: u64) -> Result<TensorInfo, String> {
    let raw: RawTensor = serde_json::from_value(value).map_err(|error| format!("its entry is malformed: {error}"))?;
    let [begin, end] = raw.data_offsets;
    if begin > end || end > data_len {
        return Err(format!("it claims bytes {begin}..{end} of {data_len} bytes of data: is the copy complete?"));
    }
    let shape: Option<Vec<usize>> = raw.shape.iter().map(|size| usize::try_from(*size).ok()).collect();
    let elements = raw.shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
    let (Some(shape), Some(elements)) = (shape, elements) else {
        return Err(format!("its shape {:?} is larger than any memory", raw.shape));
    };
    let info = TensorInfo {
        dtype: raw.dtype,
        shape,
        offset: data_start + begin,
        len_bytes: end - begin,
        interleaved_heads: None,
    };
    if let Some(kind) = info.weight_type() {
        let needed = usize::try_from(elements).ok().and_then(|elements| kind.len_bytes(elements));
        if needed.map(|bytes| bytes as u64) != Some(info.len_bytes) {
            let (shape, dtype, have) = (&info.shape, &info.dtype, info.len_bytes);
            return Err(format!("shape {shape:?} of {dtype} does not fill its {have} bytes"));
        }
    }
    Ok(info)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOOD: &str = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;

    fn parse_text(text: &str, data_len: usize) -> Result<BTreeMap<String, TensorInfo>, HeaderFault> {
        parse(text.as_bytes(), 8 + (text.len() + data_len) as u64)
    }

    #[test]
    fn a_good_header_gives_places_in_the_file() {
        let tensors = parse_text(GOOD, 24).unwrap();
        let offset = 8 + GOOD.len() as u64;
        assert_eq!(
            tensors["a"],
            TensorInfo { dtype: "F32".into(), shape: vec![2, 3], offset, len_bytes: 24, interleaved_heads: None }
        );
    }

    #[test]
    fn each_fault_names_its_tensor() {
        let cases = [
            (GOOD.to_owned(), 20, "0..24"),
            (GOOD.replace("[0,24]", "[24,0]"), 24, "24..0"),
            (GOOD.replace("[2,3]", "[2,4]"), 24, "does not fill"),
            (GOOD.replace("[2,3]", "[4294967296,4294967296]"), 24, "larger than any memory"),
            (GOOD.replace("[2,3]", "[-1]"), 24, "malformed"),
            (GOOD.replace("[0,24]", "[0]"), 24, "malformed"),
        ];
        for (text, data_len, needle) in cases {
            let fault = parse_text(&text, data_len).unwrap_err();
            assert_eq!(fault.tensor.as_deref(), Some("a"), "{fault:?}");
            assert!(fault.reason.contains(needle), "{fault:?}");
        }
        assert!(parse(b"\xff\xfe{}", 10).unwrap_err().reason.contains("UTF-8"));
        assert!(parse_text("[1,2]", 0).unwrap_err().reason.contains("JSON object"));
        assert!(header_len(u64::MAX.to_le_bytes(), 100).unwrap_err().reason.contains("at most"));
        assert!(header_len(93u64.to_le_bytes(), 100).unwrap_err().reason.contains("whole file"));
    }

    proptest! {
        /// Whatever the bytes say, the answer is an error or a table that stays inside the file.
        #[test]
        fn any_bytes_end_in_an_error_or_stay_inside(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes, bytes.len() as u64 + 8);
        }

        #[test]
        fn any_numbers_stay_inside(begin in any::<u64>(), end in any::<u64>(), a in any::<u64>(), b in any::<u64>(),
                                   data_len in 0u64..1000, dtype in "F32|BF16|F16|I64|x") {
            let text = format!(r#"{{"t":{{"dtype":"{dtype}","shape":[{a},{b}],"data_offsets":[{begin},{end}]}}}}"#);
            let file_len = 8 + text.len() as u64 + data_len;
            if let Ok(tensors) = parse(text.as_bytes(), file_len) {
                let info = &tensors["t"];
                prop_assert!(info.offset + info.len_bytes <= file_len);
            }
        }

        /// One byte of a good header changed: never a panic, never outside the file.
        #[test]
        fn a_damaged_header_stays_inside(at in 0..GOOD.len(), byte in any::<u8>()) {
            let mut bytes = GOOD.as_bytes().to_vec();
            bytes[at] = byte;
            let file_len = 8 + bytes.len() as u64 + 24;
            for info in parse(&bytes, file_len).unwrap_or_default().values() {
                prop_assert!(info.offset + info.len_bytes <= file_len);
            }
        }
    }
}
