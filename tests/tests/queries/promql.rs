//! What a PromQL expression asks for: series with their labels, and the labels that it groups and joins by, in their order. It reads words
//! and brackets and takes for granted that the expression parses, which promtool is asked. Pure.

/// A part of an expression that names labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    Series(Series),
    Clause { clause: Clause, labels: Vec<String> },
}

/// What is asked of a metric.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Series {
    pub name: String,
    pub matchers: Vec<Matcher>,
}

/// `label` `=` `"value"`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Matcher {
    pub label: String,
    /// `=`, `!=`, `=~` or `!~`.
    pub sign: String,
    pub value: String,
}

/// A word that a list of labels follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clause {
    /// What is left of what comes next.
    By,
    /// What both sides have.
    On,
    /// `without`, `ignoring`, `group_left`, `group_right`: what one of them has.
    Other,
}

impl Clause {
    fn of(word: &str) -> Option<Self> {
        match word {
            "by" => Some(Self::By),
            "on" => Some(Self::On),
            "without" | "ignoring" | "group_left" | "group_right" => Some(Self::Other),
            _ => None,
        }
    }
}

/// Words that are neither series nor functions.
const WORDS: [&str; 7] = ["and", "or", "unless", "bool", "offset", "inf", "nan"];

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Word(String),
    Text(String),
    Number,
    Sign(char),
}

/// The parts of an expression.
///
/// # Errors
/// What of it this reader does not know.
pub fn parts(expr: &str) -> Result<Vec<Part>, String> {
    let tokens = tokens(expr)?;
    let (mut parts, mut at) = (Vec::new(), 0);
    while let Some(token) = tokens.get(at) {
        let before = at.checked_sub(1).map(|before| &tokens[before]);
        at += 1;
        match token {
            Token::Word(word) => {
                if let Some(clause) = Clause::of(word) {
                    if clause == Clause::By && before == Some(&Token::Sign(')')) {
                        return Err(format!("`{word}` stands behind what it is about: write it before the brackets"));
                    }
                    let listed = until(&tokens, &mut at, '(', ')').unwrap_or_default();
                    parts.push(Part::Clause { clause, labels: listed.iter().filter_map(word_of).collect() });
                } else if !WORDS.contains(&word.as_str()) && !is_called(tokens.get(at)) {
                    let matchers = until(&tokens, &mut at, '{', '}').map(matchers).transpose()?;
                    parts.push(Part::Series(Series { name: word.clone(), matchers: matchers.unwrap_or_default() }));
                }
            }
            Token::Sign('[') => {
                at -= 1;
                until(&tokens, &mut at, '[', ']');
            }
            Token::Sign('{') => return Err("a series without a name".to_owned()),
            _ => (),
        }
    }
    Ok(parts)
}

/// Is the word before this a function or an aggregation?
fn is_called(next: Option<&Token>) -> bool {
    match next {
        Some(Token::Sign('(')) => true,
        Some(Token::Word(word)) => matches!(word.as_str(), "by" | "without"),
        _ => false,
    }
}

/// What stands between these brackets, if the next is the first of them; goes behind them.
fn until<'a>(tokens: &'a [Token], at: &mut usize, open: char, close: char) -> Option<&'a [Token]> {
    let rest = tokens.get(*at..)?.split_first().filter(|(first, _)| **first == Token::Sign(open))?.1;
    let inside = rest.iter().position(|token| *token == Token::Sign(close)).unwrap_or(rest.len());
    *at += inside + 2;
    Some(&rest[..inside])
}

fn word_of(token: &Token) -> Option<String> {
    if let Token::Word(word) = token { Some(word.clone()) } else { None }
}

fn matchers(inside: &[Token]) -> Result<Vec<Matcher>, String> {
    let each = inside.split(|token| *token == Token::Sign(',')).filter(|one| !one.is_empty());
    let matcher = |one: &[Token]| match one {
        [Token::Word(label), signs @ .., Token::Text(value)] => {
            let sign = signs.iter().filter_map(|t| if let Token::Sign(c) = t { Some(*c) } else { None }).collect();
            Ok(Matcher { label: label.clone(), sign, value: value.clone() })
        }
        other => Err(format!("no matcher of labels: {other:?}")),
    };
    each.map(matcher).collect()
}

fn tokens(expr: &str) -> Result<Vec<Token>, String> {
    let (mut tokens, mut rest) = (Vec::new(), expr);
    while let Some(first) = rest.chars().next() {
        let length = |is_of: fn(char) -> bool| rest.find(|c| !is_of(c)).unwrap_or(rest.len());
        let taken = match first {
            '#' => rest.find('\n').unwrap_or(rest.len()),
            '"' | '\'' | '`' => {
                let text = quoted(&rest[1..], first).ok_or_else(|| format!("no end of a text: {rest}"))?;
                tokens.push(Token::Text(text.replace("\\\\", "\\")));
                text.len() + 2
            }
            _ if first.is_ascii_digit() || first == '.' => {
                tokens.push(Token::Number);
                length(|c| c.is_ascii_alphanumeric() || c == '.')
            }
            _ if is_of_a_name(first) => {
                let taken = length(is_of_a_name);
                tokens.push(Token::Word(rest[..taken].to_owned()));
                taken
            }
            _ if first.is_whitespace() => first.len_utf8(),
            _ => {
                tokens.push(Token::Sign(first));
                first.len_utf8()
            }
        };
        rest = &rest[taken..];
    }
    Ok(tokens)
}

/// The text before the quote that ends it.
fn quoted(text: &str, quote: char) -> Option<&str> {
    let mut escaped = false;
    let ends = |c: char| {
        let ends = c == quote && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    };
    text.find(ends).map(|end| &text[..end])
}

fn is_of_a_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == ':'
}

#[test]
fn series_and_clauses_are_read_in_their_order() {
    let of = |expr: &str| -> Vec<String> {
        let told = |part: &Part| match part {
            Part::Series(series) => {
                let matchers = series.matchers.iter().map(|one| format!(" {}{}{}", one.label, one.sign, one.value));
                format!("{}{}", series.name, matchers.collect::<String>())
            }
            Part::Clause { clause, labels } => format!("{clause:?} {}", labels.join(" ")),
        };
        parts(expr).unwrap().iter().map(told).collect()
    };
    assert_eq!(
        of("sum by (a, b) (rate(x_total{l=~\"p|q\", m!='}'}[5m])) / 2 > bool 0.5 # y"),
        ["By a b", "x_total l=~p|q m!=}"]
    );
    assert_eq!(
        of("max(x) offset 30m unless on (a) group_left () s:y:z or (vector(1e3))[30m:30s]"),
        ["x", "On a", "Other ", "s:y:z"]
    );
    assert_eq!(of("count without (c) (x == 1) and x"), ["Other c", "x", "x"]);
    assert!(parts("sum(x) by (a)").is_err() && parts("{a=\"b\"}").is_err() && parts("x{a}").is_err());
}
