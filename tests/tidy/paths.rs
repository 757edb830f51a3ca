//! Every path a source file names outside its tests: in `use` (groups unfolded), in types and expressions, and inside macros, where
//! the parser sees only tokens. Pure.

use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::tree::is_test;

/// A named path and its line.
#[derive(Debug)]
pub struct Named {
    pub segments: Vec<String>,
    pub line: usize,
}

/// All of them.
pub fn named(source: &syn::File) -> Vec<Named> {
    let mut finder = Finder(Vec::new());
    finder.visit_file(source);
    finder.0
}

struct Finder(Vec<Named>);

impl<'ast> Visit<'ast> for Finder {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes: &[syn::Attribute] = match item {
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Use(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            _ => &[],
        };
        if !is_test(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        unfold(&item.tree, &mut Vec::new(), &mut self.0);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.0.push(Named { segments, line: path.span().start().line });
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.visit_path(&item.path);
        in_tokens(item.tokens.clone(), &mut self.0);
    }
}

fn unfold(tree: &syn::UseTree, prefix: &mut Vec<String>, found: &mut Vec<Named>) {
    let leaf = |prefix: &[String], last: &syn::Ident| Named {
        segments: prefix.iter().cloned().chain([last.to_string()]).collect(),
        line: last.span().start().line,
    };
    match tree {
        syn::UseTree::Path(path) => {
            prefix.push(path.ident.to_string());
            unfold(&path.tree, prefix, found);
            prefix.pop();
        }
        syn::UseTree::Name(name) => found.push(leaf(prefix, &name.ident)),
        syn::UseTree::Rename(rename) => found.push(leaf(prefix, &rename.ident)),
        syn::UseTree::Glob(glob) => found.push(Named { segments: prefix.clone(), line: glob.span().start().line }),
        syn::UseTree::Group(group) => group.items.iter().for_each(|item| unfold(item, prefix, found)),
    }
}

/// Runs of `name :: name` in a macro's tokens.
fn in_tokens(tokens: TokenStream, found: &mut Vec<Named>) {
    let (mut segments, mut line, mut colons) = (Vec::<String>::new(), 0, 0);
    for token in tokens {
        match token {
            TokenTree::Ident(ident) => {
                if colons != 2 && !segments.is_empty() {
                    found.push(Named { segments: std::mem::take(&mut segments), line });
                }
                if segments.is_empty() {
                    line = ident.span().start().line;
                }
                segments.push(ident.to_string());
                colons = 0;
            }
            TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
            TokenTree::Group(group) => {
                in_tokens(group.stream(), found);
                colons = 0;
            }
            _ => colons = 0,
        }
    }
    if !segments.is_empty() {
        found.push(Named { segments, line });
    }
}

#[test]
fn groups_types_and_macros_are_seen_and_tests_are_not() {
    let source = "use a::{b::C, d as e};\nfn f(x: g::H) { m!(i::j(1), 2); }\n#[cfg(test)]\nmod tests { use never::x; }";
    let all: Vec<_> =
        named(&syn::parse_file(source).unwrap()).into_iter().map(|named| named.segments.join("::")).collect();
    for expected in ["a::b::C", "a::d", "g::H", "i::j"] {
        assert!(all.contains(&expected.to_owned()), "{expected} not in {all:?}");
    }
    assert!(!all.iter().any(|path| path.contains("never")));
}
