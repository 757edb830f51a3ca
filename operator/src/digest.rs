//! Short names for long texts, pure: the beginning of a SHA-256, in hexadecimal digits.

use sha2::{Digest, Sha256};

/// The first `bytes` of the digest of `text`, two digits each.
pub fn short(text: &str, bytes: usize) -> String {
    Sha256::digest(text.as_bytes()).iter().take(bytes).map(|byte| format!("{byte:02x}")).collect()
}
