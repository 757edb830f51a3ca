//! Log signatures of hung and dying engines, each with the upstream report that made it known ([`table`]).
//!
//! A signature corroborates or excuses; it never makes a stall by itself (V4). A log also holds what clients wrote, so a signature
//! counts only where its own writer's message begins ([`head`]); a request log that quotes one is no hit. What is left: a client that
//! gets a line break into the text of an exception which is printed without a head.

pub(crate) mod head;
mod table;

use self::head::Writer;
pub use self::table::SIGNATURES;

/// What a signature tells the detector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// A rank does not answer the others (S1, S3).
    RankSilent,
    /// The device or the collective library gave up waiting (S2).
    Device,
    /// The engine's core says that it is dead or dying.
    Fatal,
    /// A watchdog of the engine itself saw no progress.
    Stuck,
    /// Generation was paused through the engine's API: silence is intended (V5).
    Paused,
    /// That pause ended.
    Resumed,
}

/// Who may write a signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// vLLM's logger, in one of these files.
    Vllm(&'static [&'static str]),
    Sglang,
    TensorRtLlm,
    Tgi,
    Torch,
    LlamaCpp,
    Kernel,
    /// The access log of the server in front of the engine.
    Access,
    /// A line without a head, from its first column on.
    Bare,
}

/// One known line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signature {
    pub name: &'static str,
    pub sources: &'static [Source],
    /// The message begins with one of these …
    pub starts: &'static [&'static str],
    /// … and has this somewhere; empty where the beginning says it all.
    pub contains: &'static str,
    pub meaning: Meaning,
    /// Where the line is reported, and behind a colon what it corroborates; what no person on call needs stands behind a semicolon.
    pub origin: &'static str,
}

/// The signature that a line matches, if any.
pub fn scan(line: &str) -> Option<&'static Signature> {
    let line = head::plain(line);
    let (writer, message) = head::split(&line);
    SIGNATURES.iter().find(|signature| signature.matches(writer, message))
}

/// A signature by its name.
pub fn by_name(name: &str) -> Option<&'static Signature> {
    SIGNATURES.iter().find(|signature| signature.name == name)
}

impl Signature {
    /// In a reason: the name, what the line means, and where others reported it.
    pub fn told(&self) -> String {
        let first = |text: &'static str| text.split("; ").next().unwrap_or(text);
        match self.origin.split_once(": ") {
            Some((reports, meaning)) => format!("{}: {} ({reports})", self.name, first(meaning)),
            None => format!("{} ({})", self.name, first(self.origin)),
        }
    }

    fn matches(&self, writer: Writer<'_>, message: &str) -> bool {
        self.sources.iter().any(|source| source.is(writer))
            && self.starts.iter().any(|start| message.starts_with(start))
            && message.contains(self.contains)
    }
}

impl Source {
    fn is(self, writer: Writer<'_>) -> bool {
        match (self, writer) {
            (Self::Vllm(files), Writer::Vllm(file)) => files.contains(&file),
            (Self::Sglang, Writer::Sglang)
            | (Self::TensorRtLlm, Writer::TensorRtLlm)
            | (Self::Tgi, Writer::Tgi)
            | (Self::Torch, Writer::Torch)
            | (Self::LlamaCpp, Writer::LlamaCpp)
            | (Self::Kernel, Writer::Kernel)
            | (Self::Access, Writer::Access)
            | (Self::Bare, Writer::Bare) => true,
            _ => false,
        }
    }
}
