//! No wait without a deadline in the engine's process (E1), as far as clippy's list cannot see it: loops over a receiver, futures that are awaited
//! outside a timeout, pauses in loops of one's own. That the list holds for every crate of the process, and that each line of it forbids
//! something, is looked at in `waits/list.rs`.

mod list;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use crate::paths;
use crate::tree::{Finding, Tree, is_test};

pub use list::{LIST, idle_lines, of_each_crate};

/// What runs in the engine's process.
const CRATES: [&str; 3] = ["engine", "role", "heartbeat"];

/// Methods without arguments whose futures wait for somebody else, and those of `Semaphore` and `watch` that have some.
const FUTURES: [&str; 10] = [
    "recv",
    "changed",
    "wait_for",
    "notified",
    "lock",
    "wait",
    "acquire",
    "acquire_owned",
    "acquire_many",
    "acquire_many_owned",
];
/// A stream's next item comes when somebody else brings it. (Iterators have a method of this name, too.)
const NEXT: &str = "next";
/// What begins so gives a handle that waits for a whole task.
const TASKS: &str = "spawn";
/// What a timeout is: whatever is awaited within its arguments has a deadline.
const TIMEOUTS: [&str; 2] = ["timeout", "timeout_at"];
/// What a wait of one's own is made of. What goes through `waits::Patience` names none.
const PAUSES: [&str; 4] = ["sleep", "spin_loop", "yield_now", "park_timeout"];

struct Exception {
    path: &'static str,
    what: &'static str,
    /// What ends it.
    #[expect(dead_code, reason = "for whoever reads the list")]
    why: &'static str,
}

const fn but(path: &'static str, what: &'static str, why: &'static str) -> Exception {
    Exception { path, what, why }
}

const EXCEPTIONS: [Exception; 34] = [
    but("engine/src/waits.rs", "spin_loop", "the one way to wait: its caller asks whether time is up"),
    but("engine/src/waits.rs", "yield_now", "as above"),
    but("engine/src/waits.rs", "park_timeout", "as above"),
    but(
        "engine/src/backend/cpu/pool.rs",
        "spin_loop",
        "a caller waits for arithmetic on what it lent: raw.rs says what ends it",
    ),
    but("engine/src/backend/cpu/pool.rs", "yield_now", "as above"),
    but("engine/src/backend/cpu/pool.rs", "park_timeout", "a thread without work, which nobody waits for"),
    but("engine/src/device/event.rs", "spin_loop", "the wait that must not be, for --guards off"),
    but("engine/src/fault/strike.rs", "spin_loop", "this very wait is the fault"),
    but("engine/src/fault/strike.rs", "sleep", "this very wait is the fault"),
    but("engine/src/fault/strike.rs", "yield_now", "for another thread of the fault"),
    but("engine/src/grammar/compile.rs", "sleep", "gives up after COMPILE_TIME_MAX"),
    but("engine/src/stack_dump.rs", "sleep", "a rest of the dump thread, which nobody waits for"),
    but("engine/src/stack_dump/capture.rs", "sleep", "gives up after the time that it is given"),
    but("engine/src/backend/cuda/open.rs", "sleep", "`awaited` gives up after its time"),
    but(
        "engine/src/ranks/heart.rs",
        "sleep",
        "between two looks of a thread beside the engine, which nobody waits for",
    ),
    but("engine/src/start/mod.rs", "sleep", "between two looks at a lease, which is taken over from a silent owner"),
    but(
        "engine/src/handle.rs",
        "changed",
        "the word that the engine gave up: who asks for it waits for nothing else of it",
    ),
    but("engine/src/handle.rs", "recv", "a request's events; the caller brings the deadline"),
    but("engine/src/handle.rs", "wait_for", "beside it: ends it when the engine gives up"),
    but("engine/src/server/intake.rs", "acquire_many_owned", "`turn`, which its caller gives a deadline"),
    but("engine/src/server/intake.rs", "acquire_owned", "as above"),
    but("engine/src/cli.rs", "recv", "signals: the program's life is this wait"),
    but("engine/src/server/generate.rs", "next", "pieces of choices, each of which ends with the request's deadline"),
    but("engine/src/server/choice.rs", "next", "a request's events; the caller brings the deadline"),
    but("engine/src/server/intake.rs", "next", "`drain`, which runs within a timeout"),
    but("engine/src/server/exchange.rs", "answer", "the handler, whose waits have the request's deadline"),
    but(
        "engine/src/server/socket.rs",
        "connection",
        "a task of its own, which ends with its client's patience or its last answer",
    ),
    but("engine/src/server/serve.rs", "closing", "the word to close: a server's life is this wait"),
    but("engine/src/cli.rs", "saving", "`explain`, whose caller waits for it no longer than the last words may take"),
    but("engine/src/cli.rs", "told", "a worker rank's end: the program's life is this wait"),
    but("role/src/crowd.rs", "answer", "the handler of a program's own pages, which waits for nobody"),
    but("role/src/onward.rs", "sleep", "the writer's thread, which nobody waits for"),
    but("role/src/pulse.rs", "wait_for", "a heart between two questions, which nobody waits for longer than a moment"),
    but("role/src/stderr.rs", "sleep", "gives up after the time that it is given"),
];

/// Every wait of these kinds outside tests, but for the exceptions; and exceptions that nothing needs any more.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut unused: Vec<&Exception> = EXCEPTIONS.iter().collect();
    for (file, source) in tree.sources().filter(|(file, _)| of_process(&file.path)) {
        for (what, line) in found(source) {
            let known = |exception: &Exception| exception.path == file.path && exception.what == what;
            unused.retain(|exception| !known(exception));
            if !EXCEPTIONS.iter().any(known) {
                let what = format!(
                    "`{what}` waits without a deadline (E1): use `waits::Patience`, a timeout, or list it in tests/tidy/waits.rs"
                );
                findings.push(Finding { path: file.path.clone(), line, what });
            }
        }
    }
    // (a tree of one file, in the rules' own tests, has none of the others)
    let there = |path: &str| tree.files.iter().any(|file| file.path == path);
    findings.extend(unused.iter().filter(|exception| there(exception.path)).map(|exception| Finding {
        path: exception.path.to_owned(),
        line: 1,
        what: format!("has no `{}` any more: tests/tidy/waits.rs lists it", exception.what),
    }));
    findings
}

fn of_process(path: &str) -> bool {
    path.split_once("/src/").is_some_and(|(of, _)| CRATES.contains(&of))
}

/// Names of waits and their lines.
fn found(source: &syn::File) -> Vec<(String, usize)> {
    let mut names = Receivers::default();
    names.visit_file(source);
    let mut finder = Finder { receivers: names.0, timeouts: 0, found: Vec::new() };
    finder.visit_file(source);
    // (tokio's own `sleep` is a future, in another module)
    let pauses = paths::named(source).into_iter().filter_map(|path| match &path.segments[..] {
        [.., of, name] if ["thread", "hint"].contains(&of.as_str()) && PAUSES.contains(&name.as_str()) => {
            Some((name.clone(), path.line))
        }
        _ => None,
    });
    finder.found.into_iter().chain(pauses).collect()
}

/// Names that a file gives to the receiving ends of channels.
#[derive(Default)]
struct Receivers(Vec<String>);

impl Receivers {
    fn typed(&mut self, name: Option<&syn::Ident>, kind: &syn::Type) {
        self.0.extend(name.filter(|_| names(kind, "Receiver")).map(ToString::to_string));
    }
}

fn names(kind: &syn::Type, wanted: &str) -> bool {
    struct Looks<'a>(&'a str, bool);
    impl<'ast> Visit<'ast> for Looks<'_> {
        fn visit_path_segment(&mut self, segment: &'ast syn::PathSegment) {
            self.1 |= segment.ident == self.0;
            visit::visit_path_segment(self, segment);
        }
    }
    let mut looks = Looks(wanted, false);
    looks.visit_type(kind);
    looks.1
}

fn name_of(pattern: &syn::Pat) -> Option<&syn::Ident> {
    match pattern {
        syn::Pat::Ident(named) => Some(&named.ident),
        syn::Pat::Type(typed) => name_of(&typed.pat),
        _ => None,
    }
}

impl<'ast> Visit<'ast> for Receivers {
    fn visit_pat_type(&mut self, typed: &'ast syn::PatType) {
        self.typed(name_of(&typed.pat), &typed.ty);
        visit::visit_pat_type(self, typed);
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        self.typed(field.ident.as_ref(), &field.ty);
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        // `let (sender, receiver) = channel();`
        let made = local.init.as_ref().is_some_and(|init| match &*init.expr {
            syn::Expr::Call(call) => last_name(&call.func).is_some_and(|name| name.to_string().ends_with("channel")),
            _ => false,
        });
        if let (true, syn::Pat::Tuple(both)) = (made, &local.pat) {
            self.0.extend(both.elems.last().and_then(name_of).map(ToString::to_string));
        }
        visit::visit_local(self, local);
    }
}

/// Is a future of this method's a wait for somebody else?
fn waits(method: &syn::Ident) -> bool {
    FUTURES.iter().any(|name| method == name) || method == NEXT || is_task(method)
}

fn is_task(name: &syn::Ident) -> bool {
    name.to_string().starts_with(TASKS)
}

/// The last name of a path or a field, whatever is borrowed or bracketed.
fn last_name(of: &syn::Expr) -> Option<&syn::Ident> {
    match of {
        syn::Expr::Path(path) => path.path.segments.last().map(|segment| &segment.ident),
        syn::Expr::Field(field) => match &field.member {
            syn::Member::Named(name) => Some(name),
            syn::Member::Unnamed(_) => None,
        },
        syn::Expr::Reference(inner) => last_name(&inner.expr),
        syn::Expr::Paren(inner) => last_name(&inner.expr),
        _ => None,
    }
}

struct Finder {
    receivers: Vec<String>,
    /// How many timeouts we are inside of.
    timeouts: usize,
    found: Vec<(String, usize)>,
}

impl Finder {
    fn outside_tests(&mut self, attributes: &[syn::Attribute], visit: impl FnOnce(&mut Self)) {
        if !is_test(attributes) {
            visit(self);
        }
    }

    fn find(&mut self, name: &syn::Ident) {
        self.found.push((name.to_string(), name.span().start().line));
    }

    fn receiver(&mut self, of: &syn::Expr) {
        if let Some(name) = last_name(of).filter(|name| self.receivers.iter().any(|known| *name == known)) {
            self.found.push((format!("for … in {name}"), name.span().start().line));
        }
    }

    /// Macros are tokens to a parser. What `select!` has is awaited, elsewhere it must say so.
    fn tokens(&mut self, tokens: TokenStream, awaited: bool) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let is = |at: usize, word: &str| tokens.get(at).is_some_and(|token| token.to_string() == word);
        for (at, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Ident(name)
                    if self.timeouts == 0
                        && at > 0
                        && is(at - 1, ".")
                        && FUTURES.iter().any(|future| name == future)
                        && (awaited || is(at + 2, ".") && is(at + 3, "await")) =>
                {
                    self.find(name);
                }
                // `name.await`, or of a call what `visit_expr_await` finds
                TokenTree::Ident(name)
                    if self.timeouts == 0
                        && (is(at + 1, ".") && is(at + 2, "await")
                            || (name == NEXT || is_task(name)) && is(at + 2, ".") && is(at + 3, "await")) =>
                {
                    self.find(name);
                }
                TokenTree::Group(group) => {
                    let within = usize::from(at > 0 && TIMEOUTS.iter().any(|timeout| is(at - 1, timeout)));
                    self.timeouts += within;
                    self.tokens(group.stream(), awaited);
                    self.timeouts -= within;
                }
                _ => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Finder {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.outside_tests(&item.attrs, |finder| visit::visit_item_mod(finder, item));
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.outside_tests(&item.attrs, |finder| visit::visit_item_fn(finder, item));
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.outside_tests(&item.attrs, |finder| visit::visit_item_impl(finder, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.outside_tests(&item.attrs, |finder| visit::visit_impl_item_fn(finder, item));
    }

    fn visit_expr_for_loop(&mut self, item: &'ast syn::ExprForLoop) {
        self.receiver(&item.expr);
        visit::visit_expr_for_loop(self, item);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        if call.method == "into_iter" || call.method == "iter" {
            self.receiver(&call.receiver);
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_await(&mut self, item: &'ast syn::ExprAwait) {
        if self.timeouts == 0 {
            match &*item.base {
                syn::Expr::MethodCall(call) if waits(&call.method) => self.find(&call.method),
                syn::Expr::Call(call) => {
                    last_name(&call.func).filter(|name| is_task(name)).into_iter().for_each(|name| self.find(name));
                }
                // what was begun elsewhere: a task, a channel's end, a future that somebody else made
                made @ (syn::Expr::Path(_) | syn::Expr::Field(_) | syn::Expr::Paren(_)) => match last_name(made) {
                    Some(name) => self.find(name),
                    None => self.found.push(("await".to_owned(), item.await_token.span.start().line)),
                },
                _ => (),
            }
        }
        visit::visit_expr_await(self, item);
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        let timeout = last_name(&call.func).is_some_and(|name| TIMEOUTS.iter().any(|timeout| name == timeout));
        self.timeouts += usize::from(timeout);
        visit::visit_expr_call(self, call);
        self.timeouts -= usize::from(timeout);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        let select = item.path.segments.last().is_some_and(|name| name.ident == "select");
        self.tokens(item.tokens.clone(), select);
    }
}

#[test]
fn waits_that_clippy_cannot_see_are_found() {
    let found = |path: &str, body: &str| check(&Tree::one(path, body)).len();
    for path in ["engine/src/a.rs", "role/src/a.rs", "heartbeat/src/a.rs"] {
        for bad in [
            "fn f(inbox: &Receiver<u8>) { for x in inbox {} }",
            "struct S { inbox: Receiver<u8> } impl S { fn f(self) { for x in self.inbox {} } }",
            "fn f() { let (tell, told) = sync_channel(1); told.into_iter().count(); }",
            "async fn f() { told.changed().await; }",
            "async fn f() { gate.acquire_many_owned(3).await; }",
            "async fn f() { select! { x = told.recv() => x } }",
            "async fn f() { select! { () = async { drop(told.wait_for(is_some).await) } => None } }",
            "async fn f() { handle.await; }",
            "async fn f(self) { self.handle.await; }",
            "async fn f(self) { self.0.await; }",
            "async fn f() { (&mut handle).await; }",
            "async fn f() { stream.next().await; }",
            "async fn f() { tokio::task::spawn_blocking(work).await; }",
            "async fn f() { tasks.spawn(work()).await; }",
            "async fn f() { select! { () = async { drop(told.await) } => None } }",
            "async fn f() { select! { () = async { drop(stream.next().await) } => None } }",
            "fn f() { while !done() { std::thread::sleep(LOOK); } }",
            "fn f() { while !done() { hint::spin_loop(); } }",
        ] {
            assert_eq!(found(path, bad), 1, "{path}: {bad}");
            assert_eq!(found(path, &format!("#[cfg(test)] mod tests {{ {bad} }}")), 0, "{path}: {bad}");
            assert_eq!(found("agent/src/a.rs", bad), 0, "{bad}");
        }
        for fine in [
            "fn f(many: &[u8]) { for x in many {} many.iter().count(); }",
            "fn f(inbox: &Receiver<u8>) { while let Ok(x) = inbox.recv_timeout(LOOK) {} }",
            "async fn f() { timeout(LOOK, async { told.changed().await }).await; }",
            "async fn f() { timeout_at(end, gate.acquire_owned()).await; }",
            "async fn f() { select! { x = timeout(LOOK, told.recv()) => x } }",
            "async fn f() { tokio::time::sleep(LOOK).await; }",
            "async fn f() { timeout(LOOK, handle).await; }",
            "async fn f() { timeout(LOOK, async { drop(handle.await) }).await; }",
            "async fn f() { timeout_at(end, spawn_blocking(work)).await; }",
            "async fn f() { timeout_at(end, stream.next()).await; }",
            "async fn f() { answer(app, request).await; }",
            "fn f() { tokio::spawn(work()); items.next(); }",
        ] {
            assert_eq!(found(path, fine), 0, "{path}: {fine}");
        }
    }
    // an exception is one place and one call, and does not outlive it
    assert_eq!(found("engine/src/grammar/compile.rs", "fn f() { std::thread::sleep(LOOK); }"), 0);
    assert_eq!(found("engine/src/grammar/compile.rs", "fn f() { std::thread::yield_now(); }"), 2);
}
