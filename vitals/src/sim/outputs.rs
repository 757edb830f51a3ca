//! What leaves the engine at the end of a step: tokens to clients, ends of requests.

use super::book::At;
use super::engine::Engine;
use super::profile::Us;

impl Engine {
    /// Tokens of one request leave the engine.
    pub(super) fn hand_out(&mut self, index: usize, tokens: u64, at: Us) {
        let request = &mut self.live[index];
        let tokens = tokens.min(u64::from(request.out.saturating_sub(request.generated)));
        request.generated += tokens as u32;
        self.counters.generated += tokens;
        self.counters.output = true;
        if request.stream && !request.gone && !self.mood.front_dead && request.unread_until <= at {
            self.book.deliver(request, tokens, at);
        }
    }

    /// So many tokens of everybody who decodes.
    pub(super) fn hand_out_all(&mut self, tokens: u64, at: Us) {
        for index in 0..self.live.len() {
            if self.live[index].at == At::Decode {
                self.hand_out(index, tokens, at);
            }
        }
    }

    /// Requests whose last token is out end.
    pub(super) fn drop_finished(&mut self, at: Us) {
        for index in (0..self.live.len()).rev() {
            let request = &mut self.live[index];
            if request.at != At::Decode || request.generated < request.out {
                continue;
            }
            self.counters.finished += 1;
            self.counters.lumps += u64::from(request.generated);
            self.counters.lump_prompt += u64::from(request.prompt);
            if self.mood.front_dead {
                request.at = At::Held;
                continue;
            }
            if !request.gone {
                self.book.deliver(request, 1, at);
                self.book.close(request);
            }
            self.live.swap_remove(index);
        }
    }
}
