//! A person's word that one stalled replica be restarted now: an annotation on its pod, which a file in Git knows nothing of. It stands for the
//! operator's patience (a common cause, the pause after the last restart), never for the agent's verdict and never for a budget: a restart
//! needs the two keys as ever (I1, I2).

use serde::{Deserialize, Serialize};

use crate::fence::Fence;

/// Pod annotation, written by people (`kubectl truebeat restart`): a [`RestartWish`] as JSON.
pub const ANNOTATION_RESTART: &str = "truebeat.io/restart";

/// Who wants a replica restarted, when, why, and for which stall: a wish that is still there at the next one is none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RestartWish {
    /// The person, when, and why: what a fence says too.
    #[serde(flatten)]
    pub word: Fence,
    /// Id of the episode that it is meant for.
    pub episode: String,
}

impl RestartWish {
    /// What the annotation says; `None`: it is absent, or cannot be read. Unlike a fence it destroys something, so nonsense is no wish.
    pub fn read(text: &str) -> Option<Self> {
        #[derive(Deserialize)]
        struct Least {
            episode: String,
        }
        let word = Fence::read(text)?;
        let Least { episode } = serde_json::from_str(text).ok()?;
        (!episode.is_empty() && episode.len() <= 128).then_some(RestartWish { word, episode })
    }

    /// In words, for people.
    pub fn words(&self) -> String {
        let why = if self.word.why.is_empty() { String::new() } else { format!(": {}", self.word.why) };
        format!("asked for by {}{why}", self.word.by)
    }

    /// The same with the stall that it is meant for, on one line: whoever may write the annotation writes anything there.
    pub fn whole_words(&self) -> String {
        let episode: String = self.episode.chars().filter(|c| !c.is_control()).collect();
        format!("{} for episode {episode}", self.words())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_names_its_stall_and_nonsense_is_none() {
        let word = Fence { by: "ann".into(), at: "2026-01-01T00:00:00Z".into(), why: "I know the cause".into() };
        let wish = RestartWish { word, episode: "e-1".into() };
        assert_eq!(RestartWish::read(&serde_json::to_string(&wish).unwrap()), Some(wish.clone()));
        assert_eq!(wish.words(), "asked for by ann: I know the cause");
        let long = format!(r#"{{"episode":"{}"}}"#, "x".repeat(129));
        for odd in ["", "yes", "true", "{}", r#"{"episode":""}"#, r#"{"episode":7}"#, &long] {
            assert_eq!(RestartWish::read(odd), None, "{odd:.30}");
        }
        assert_eq!(RestartWish::read(r#"{"episode":"e"}"#).unwrap().words(), "asked for by somebody");
    }

    #[test]
    fn what_a_person_wrote_is_told_on_one_line() {
        let text =
            serde_json::json!({"by": "a\nnn", "why": "\u{1b}[2Jwhy", "episode": "e-1\n  traffic: yes\u{1b}[31m"})
                .to_string();
        let wish = RestartWish::read(&text).unwrap();
        assert_eq!(wish.whole_words(), "asked for by ann: [2Jwhy for episode e-1  traffic: yes[31m");
    }
}
