//! Bytes that should be text.

/// The bytes themselves where they are text, so that a page of megabytes is not held twice; else with a sign for each that is none.
pub fn lossy(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_text_is_told_by_a_sign() {
        assert_eq!(lossy("überall".into()), "überall");
        assert_eq!(lossy(vec![b'a', 0xff, b'b']), "a\u{fffd}b");
    }
}
