//! `/tokenize` and `/detokenize`, as vLLM has them: what a prompt or a conversation costs, and what tokens say.

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

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

type Work = fn(&Fields<'_>, &Ready) -> Result<Value, ApiError>;

/// Neither needs the engine thread, but both need what is known once the model is there.
async fn answer(app: AppState, request: Request, work: Work) -> Response {
    let answer = async {
        let told = tell(&app, request, work).await;
        told.map_or_else(|error| refuse(&app.handle.shared.metrics, &error), |value| Json(value).into_response())
    };
    app.exchanges.counted(answer).await
}

async fn tell(app: &AppState, request: Request, work: Work) -> Result<Value, ApiError> {
    let (head, body) = request.into_parts();
    let (deadline, ready, body) = intake::head(app, &head.headers, body, || Ok(app.admit()?.clone()))?;
    let served = app.served_name.clone();
    let parse = move |value: &Value| {
        let f = Fields::new(value)?;
        request::check_model(&f, &served)?;
        let answer = work(&f, &ready)?;
        f.refuse_rest().map(|()| answer)
    };
    intake::read(app, deadline, body, parse).await
}

fn tokens_of(f: &Fields<'_>, ready: &Ready) -> Result<Value, ApiError> {
    let tokens = if f.get("messages").is_some() {
        let tools = ToolUse::of(f, ready)?;
        request::chat_input(f, ready, tools.as_ref().and_then(ToolUse::described))?
    } else {
        request::one_prompt(f, ready)?
    };
    let texts = f.bool("return_token_strs")?.unwrap_or(false);
    let texts: Option<Vec<String>> = texts.then(|| tokens.iter().map(|id| ready.codec.token_text(*id)).collect());
    let max_model_len = ready.limits.seq_len_max;
    Ok(json!({"count": tokens.len(), "max_model_len": max_model_len, "tokens": tokens, "token_strs": texts}))
}

fn text_of(f: &Fields<'_>, ready: &Ready) -> Result<Value, ApiError> {
    if f.get("tokens").is_none() {
        return Err(f.wrong("tokens", "a list of token ids"));
    }
    let tokens = f.token_ids("tokens", ready.info.vocab_size)?;
    let mut stream = ready.codec.stream(true);
    let mut text = String::new();
    for id in tokens {
        text += &stream.push(id)?;
    }
    Ok(json!({"prompt": text + &stream.finish()?}))
}
