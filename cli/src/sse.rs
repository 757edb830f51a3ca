//! Server-sent events out of a body that comes in pieces. Pure.

/// What has come and is no whole event yet.
#[derive(Debug, Default)]
pub struct Events {
    bytes: Vec<u8>,
}

impl Events {
    /// A piece of the body, cut anywhere.
    pub fn push(&mut self, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
    }

    /// The data of the next whole event; comments and others without data are passed over.
    pub fn next_data(&mut self) -> Option<String> {
        while let Some(end) = self.bytes.windows(2).position(|pair| pair == b"\n\n") {
            let event: Vec<u8> = self.bytes.drain(..end + 2).collect();
            if let Some(data) = String::from_utf8_lossy(&event).trim().strip_prefix("data:") {
                return Some(data.trim().to_owned());
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_the_same_wherever_the_body_is_cut() {
        let body = "data: {\"text\": \"ä\"}\n\n: a comment\n\ndata:[DONE]\n\ndata: not whole".as_bytes();
        for size in 1..=body.len() {
            let (mut events, mut data) = (Events::default(), Vec::new());
            for piece in body.chunks(size) {
                events.push(piece);
                data.extend(std::iter::from_fn(|| events.next_data()));
            }
            assert_eq!(data, ["{\"text\": \"ä\"}", "[DONE]"], "pieces of {size} bytes");
        }
    }
}
