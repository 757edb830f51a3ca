//! What leaves the engine at the end of a step: tokens to clients, ends of requests.

use super::book::{At, Book, Request};
use super::counters::Counters;
use super::engine::Engine;
use super::profile::Us;

/// Tokens of one request leave the engine, whose front end passes them on if it lives.
pub(super) fn hand_out(request: &mut Request, tokens: u64, at: Us, counters: &mut Counters, book: Option<&mut Book>) {
    let tokens = tokens.min(u64::from(request.out.saturating_sub(request.generated)));
    let let_out = request.let_out(request.generated);
    request.generated += tokens as u32;
    counters.generated += tokens;
    counters.output = true;
    let tokens = u64::from(request.let_out(request.generated) - let_out);
    let Some(book) = book.filter(|_| request.stream && !request.gone && tokens > 0) else { return };
    if request.unread_until <= at {
        book.deliver(request, tokens, at);
    } else if !request.answered {
        // the gate reads a first chunk, and no more before its client takes that
        book.deliver(request, tokens.min(1), at);
    }
}

impl Engine {
    /// So many tokens of everybody who decodes.
    pub(super) fn hand_out_all(&mut self, tokens: u32, at: Us) {
        let lives = !self.mood.front_dead;
        for request in self.live.decoding(tokens) {
            hand_out(request, u64::from(tokens), at, &mut self.counters, Some(&mut self.book).filter(|_| lives));
        }
    }

    /// Requests whose last token is out end.
    pub(super) fn drop_finished(&mut self, at: Us) {
        if self.live.count().left > 0 {
            return;
        }
        let live = self.live.change();
        for index in (0..live.len()).rev() {
            let request = &mut live[index];
            if request.at != At::Decode || request.generated < request.out {
                continue;
            }
            self.counters.finished += 1;
            self.counters.lumps += u64::from(request.generated);
            self.counters.lump_prompt += u64::from(request.prompt);
            if request.calls_tool(at) {
                continue;
            }
            if self.mood.front_dead {
                request.at = At::Held;
                continue;
            }
            if !request.gone {
                self.book.deliver(request, 1, at);
                self.book.close(request);
            }
            live.swap_remove(index);
        }
    }
}
