//! `/tokenize` and `/detokenize`, as vLLM has them: what a prompt or a conversation costs, and what tokens say.

use axum::extract::{Request, State};
use axum::response::Response;
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::codec::{TextCodec, TextStream};
use crate::handle::Ready;
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::tools::ToolUse;
use crate::server::{AppState, intake, refuse, request};

/// `{"prompt"}` or `{"messages"}` → `{"count", "max_model_len", "tokens", "token_strs"}`.
pub async fn tokenize(State(app): State<AppState>, request: Request) -> Response {
    answer(app, request, tokens_of).await
}

/// `{"tokens"}` → `{"prompt"}`.
pub async fn detokenize(State(app): State<AppState>, request: Request) -> Response {
    answer(app, request, text_of).await
}

/// Longest text that either gives: tokens of a few bytes may each stand for hundreds.
const TEXT_BYTES_MAX: usize = 16 << 20;

/// What `/tokenize` answers.
#[derive(Serialize)]
struct Tokens<'a> {
    count: usize,
    max_model_len: usize,
    tokens: &'a [u32],
    token_strs: Option<Names<'a>>,
}

/// A text for each token, of which one at a time is there.
struct Names<'a> {
    tokens: &'a [u32],
    codec: &'a dyn TextCodec,
}

impl<'a> Names<'a> {
    /// Unless they are longer than `bytes_max` together.
    fn of(tokens: &'a [u32], codec: &'a dyn TextCodec, bytes_max: usize) -> Result<Self, ApiError> {
        let mut left = bytes_max;
        for id in tokens {
            let bytes = codec.token_text(*id).len();
            left = left.checked_sub(bytes).ok_or_else(|| too_long("return_token_strs", bytes_max))?;
        }
        Ok(Self { tokens, codec })
    }
}

impl Serialize for Names<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.tokens.iter().map(|id| self.codec.token_text(*id)))
    }
}

/// What `/detokenize` answers.
#[derive(Serialize)]
struct Text {
    prompt: String,
}

/// Gives the answer's JSON: a million tokens take a while to write, too.
type Work = fn(&Fields<'_>, &Ready) -> Result<String, ApiError>;

/// Neither needs the engine thread, but both need what is known once the model is there.
async fn answer(app: AppState, request: Request, work: Work) -> Response {
    let answer = async {
        let told = tell(&app, request, work).await.and_then(|json| app.outgoing.json(json));
        told.unwrap_or_else(|error| refuse(&app.handle.shared.metrics, &error))
    };
    app.exchanges.counted(answer).await
}

async fn tell(app: &AppState, request: Request, work: Work) -> Result<String, ApiError> {
    let (head, body) = request.into_parts();
    let (deadline, ready, body) = intake::head(app, &head.headers, body, || Ok(app.admit()?.clone()))?;
    let served = app.served_name.clone();
    let parse = move |value: &Value| {
        let f = Fields::new(value)?;
        request::check_model(&f, &served)?;
        let answer = work(&f, &ready)?;
        f.refuse_rest().map(|()| answer)
    };
    intake::read(app, deadline, body, parse).await.map(|(answer, _room)| answer)
}

fn tokens_of(f: &Fields<'_>, ready: &Ready) -> Result<String, ApiError> {
    let tokens = if f.get("messages").is_some() {
        let tools = ToolUse::of(f, ready)?;
        request::chat_input(f, ready, tools.as_ref().and_then(ToolUse::described))?
    } else {
        request::one_prompt(f, ready)?
    };
    let texts = f.bool("return_token_strs")?.unwrap_or(false);
    let token_strs = texts.then(|| Names::of(&tokens, &*ready.codec, TEXT_BYTES_MAX)).transpose()?;
    let max_model_len = ready.limits.seq_len_max;
    json_of(&Tokens { count: tokens.len(), max_model_len, tokens: &tokens, token_strs })
}

fn text_of(f: &Fields<'_>, ready: &Ready) -> Result<String, ApiError> {
    if f.get("tokens").is_none() {
        return Err(f.wrong("tokens", "a list of token ids"));
    }
    request::check_tokens(f)?;
    let tokens = f.token_ids("tokens", ready.info.vocab_size)?;
    json_of(&Text { prompt: said(&tokens, ready.codec.stream(true), TEXT_BYTES_MAX)? })
}

/// The tokens' text, unless it is longer than `bytes_max`, which is told before the memory for all of it is needed.
fn said(tokens: &[u32], mut stream: Box<dyn TextStream>, bytes_max: usize) -> Result<String, ApiError> {
    let mut text = String::new();
    for id in tokens {
        text += &stream.push(*id)?;
        if text.len() > bytes_max {
            return Err(too_long("tokens", bytes_max));
        }
    }
    Ok(text + &stream.finish()?)
}

fn too_long(param: &str, bytes_max: usize) -> ApiError {
    ApiError::invalid(param, format!("the tokens' text has more than {bytes_max} bytes, the most that are given here"))
}

fn json_of(answer: &impl Serialize) -> Result<String, ApiError> {
    serde_json::to_string(answer).map_err(|e| ApiError::internal(format!("the answer could not be written: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::CodecError;
    use crate::grammar::tests::Bytes;

    /// Every token says the same.
    struct Says(&'static str);

    impl TextStream for Says {
        fn push(&mut self, _: u32) -> Result<String, CodecError> {
            Ok(self.0.to_owned())
        }

        fn finish(&mut self) -> Result<String, CodecError> {
            Ok("!".to_owned())
        }
    }

    #[test]
    fn a_text_is_given_up_as_soon_as_it_is_too_long() {
        let text = |tokens: usize| said(&vec![7; tokens], Box::new(Says("four")), 12);
        assert_eq!(text(3), Ok("fourfourfour!".to_owned()));
        let error = text(4).unwrap_err();
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("tokens")));
        assert!(error.message.contains("more than 12 bytes"), "{}", error.message);
    }

    #[test]
    fn the_texts_of_single_tokens_have_the_same_bound() {
        let names = |tokens: &[u32]| Names::of(tokens, &Bytes, 3).and_then(|names| json_of(&names));
        assert_eq!(names(&b"a\"b".map(u32::from)), Ok(r#"["a","\"","b"]"#.to_owned()));
        let error = names(&[97; 4]).unwrap_err();
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("return_token_strs")));
    }
}
