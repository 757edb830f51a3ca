//! Rules on the code itself: where `unsafe` may live, nothing that panics or exits outside tests, reasons for exceptions, file heads.
//! Clippy denies most of this too; here it holds also for what clippy does not build (other targets, other features).

use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::tree::{Finding, Tree, is_test};

/// The modules that may contain `unsafe`, and what for: as few as the kinds of thing that have no safe form.
const UNSAFE: [(&str, &str); 21] = [
    ("heartbeat/src/map.rs", "mmap and munmap have no safe form"),
    ("agent/src/footprint.rs", "giving pages back has no safe form"),
    ("agent/src/short_slice.rs", "asking for the length of one's turns has no safe form"),
    ("engine/src/backend/cuda/nccl.rs", "a foreign library has no safe form"),
    ("engine/src/backend/cuda/nccl_tests.rs", "memory that a foreign library writes has no safe form"),
    ("engine/src/backend/cuda/nvidia.rs", "a foreign library has no safe form"),
    ("engine/src/backend/cuda/nvidia/graph.rs", "a foreign library has no safe form"),
    ("engine/tests/cuda/host.rs", "kernels compiled into a library have no safe form"),
    ("engine/src/stack_dump/capture.rs", "signal handlers and the unwinder have no safe form"),
    ("engine/src/memory.rs", "the allocator's books have no safe form"),
    ("engine/src/raw.rs", "mmap and a closure lent to other threads have no safe form"),
    ("engine/src/raw/amx.rs", "tiles have no safe form"),
    ("engine/src/raw/amx/attention.rs", "tiles have no safe form"),
    ("engine/src/raw/cells.rs", "one vector taken for another has no safe form"),
    ("engine/src/raw/large.rs", "pieces of one mapping have no safe form"),
    ("engine/src/raw/shared.rs", "memory of several processes has no safe form"),
    ("engine/src/raw/avx2.rs", "vector instructions have no safe form"),
    ("engine/src/raw/avx512.rs", "vector instructions have no safe form"),
    ("engine/tests/scheduler/held.rs", "an allocator that counts has no safe form"),
    ("operator/tests/confine.rs", "most of the system calls that are to be refused have no safe form"),
    ("vitals/tests/cost.rs", "an allocator that counts has no safe form"),
];

/// `unsafe` outside the list.
pub fn unsafe_places(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files.iter().filter(|file| !UNSAFE.iter().any(|(path, _)| *path == file.path)) {
        let what = "`unsafe` outside the modules listed in tests/tidy/code.rs";
        findings.extend(look(file.rust.as_ref()).unsafes.iter().map(|span| finding(&file.path, *span, what)));
    }
    findings
}

/// `.unwrap()`, `.expect("…")`, `panic!`, `todo!`, `unimplemented!` and `process::exit` outside tests.
pub fn panics(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (file, source) in tree.sources() {
        let found = look(Some(source)).panics;
        findings.extend(
            found
                .iter()
                .map(|(span, what)| finding(&file.path, *span, &format!("{what} outside tests: errors are values"))),
        );
    }
    findings
}

/// `#[allow]` and `#[expect]` without a reason, in tests as well.
pub fn reasons(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in &tree.files {
        let what = "an exception to a lint without `reason = \"…\"`";
        findings.extend(look(file.rust.as_ref()).reasonless.iter().map(|span| finding(&file.path, *span, what)));
    }
    findings
}

/// Rust files that do not begin with `//!`.
pub fn heads(tree: &Tree) -> Vec<Finding> {
    let headless = tree.files.iter().filter(|file| file.rust.is_some() && !file.text.starts_with("//!"));
    let what = "begins without `//!`: why it exists, what it may touch";
    headless.map(|file| Finding { path: file.path.clone(), line: 1, what: what.to_owned() }).collect()
}

fn finding(path: &str, span: Span, what: &str) -> Finding {
    Finding { path: path.to_owned(), line: span.start().line, what: what.to_owned() }
}

fn look(source: Option<&syn::File>) -> Finder {
    let mut finder = Finder::default();
    source.into_iter().for_each(|source| finder.visit_file(source));
    finder
}

#[derive(Default)]
struct Finder {
    unsafes: Vec<Span>,
    panics: Vec<(Span, String)>,
    reasonless: Vec<Span>,
    /// How many test items we are inside of.
    test_depth: usize,
}

impl Finder {
    fn inside(&mut self, attributes: &[syn::Attribute], visit: impl FnOnce(&mut Self)) {
        let test = usize::from(is_test(attributes));
        self.test_depth += test;
        visit(self);
        self.test_depth -= test;
    }

    fn panic(&mut self, span: Span, what: &str) {
        if self.test_depth == 0 {
            self.panics.push((span, what.to_owned()));
        }
    }
}

impl<'ast> Visit<'ast> for Finder {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.inside(&item.attrs, |finder| visit::visit_item_mod(finder, item));
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.inside(&item.attrs, |finder| visit::visit_item_fn(finder, item));
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.unsafes.extend(item.unsafety.map(|token| token.span));
        self.inside(&item.attrs, |finder| visit::visit_item_impl(finder, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.inside(&item.attrs, |finder| visit::visit_impl_item_fn(finder, item));
    }

    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        self.unsafes.extend(signature.unsafety.map(|token| token.span));
        visit::visit_signature(self, signature);
    }

    fn visit_expr_unsafe(&mut self, block: &'ast syn::ExprUnsafe) {
        self.unsafes.push(block.unsafe_token.span);
        visit::visit_expr_unsafe(self, block);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let name = call.method.to_string();
        // a parser's own `expect(b'{')` is no panic: only the one with a message is
        let message =
            matches!(call.args.first(), Some(syn::Expr::Lit(literal)) if matches!(literal.lit, syn::Lit::Str(_)));
        if (name == "unwrap" && call.args.is_empty()) || (name == "expect" && message) {
            self.panic(call.method.span(), &format!("`.{name}()`"));
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        let name = item.path.segments.last().map(|segment| segment.ident.to_string()).unwrap_or_default();
        if ["panic", "todo", "unimplemented"].contains(&name.as_str()) {
            self.panic(item.path.span(), &format!("`{name}!`"));
        }
        visit::visit_macro(self, item);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if names.ends_with(&["process".to_owned(), "exit".to_owned()]) {
            self.panic(path.span(), "`process::exit`");
        }
        visit::visit_path(self, path);
    }

    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        let tokens = attribute.meta.require_list().map(|list| list.tokens.to_string()).unwrap_or_default();
        let bare = attribute.path().is_ident("allow") || attribute.path().is_ident("expect");
        let conditional =
            attribute.path().is_ident("cfg_attr") && (tokens.contains("allow (") || tokens.contains("allow("));
        if (bare || conditional) && !tokens.contains("reason") {
            self.reasonless.push(attribute.span());
        }
    }
}

#[test]
fn unsafe_is_found_everywhere_but_in_the_list() {
    let text = "fn f() { unsafe { g() } }\nunsafe impl Send for T {}\nunsafe fn h() {}";
    assert_eq!(unsafe_places(&Tree::one("agent/src/a.rs", text)).len(), 3);
    assert_eq!(unsafe_places(&Tree::one("heartbeat/src/map.rs", text)).len(), 0);
}

#[test]
fn panics_are_found_outside_tests_only() {
    let text =
        "fn f() { a.unwrap(); b.expect(\"c\"); panic!(); std::process::exit(1); p.expect(b'x'); q.unwrap_or(1); }";
    assert_eq!(panics(&Tree::one("agent/src/a.rs", text)).len(), 4);
    assert_eq!(panics(&Tree::one("agent/src/a.rs", &format!("#[cfg(test)]\nmod tests {{ {text} }}"))).len(), 0);
    assert_eq!(panics(&Tree::one("agent/tests/a.rs", text)).len(), 0);
}

#[test]
fn an_exception_without_a_reason_is_found_and_so_is_a_missing_head() {
    let bad = "#[allow(dead_code)]\nfn f() {}\n#[cfg_attr(x, allow(unused))]\nfn g() {}";
    assert_eq!(reasons(&Tree::one("a/src/a.rs", bad)).len(), 2);
    assert_eq!(reasons(&Tree::one("a/src/a.rs", "#![allow(dead_code, reason = \"r\")]")).len(), 0);
    assert_eq!(heads(&Tree::one("a/src/a.rs", bad)).len(), 1);
    assert_eq!(heads(&Tree::one("a/src/a.rs", "//! Why.\n")).len(), 0);
}
