//! Grammars in GBNF, the form of llama.cpp: `name ::= …` with texts, classes of characters, groups, `* + ? {m,n}`. In: a text. Out: the same
//! language in Lark, whose terminals are single characters, so that no choice of a lexer narrows it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::bounds::MOST;
use super::quoted;

/// Groups in each other.
const DEEPEST: usize = 64;

/// What a rule's text says.
#[derive(Debug)]
enum Node {
    Text(String),
    /// A class of characters as a regular expression has it.
    Class(String),
    Rule(String),
    All(Vec<Node>),
    Any(Vec<Node>),
    Repeat(Box<Node>, u64, Option<u64>),
}

/// The language in Lark.
///
/// # Errors
/// One line: what is no GBNF, a rule that is not there, or no text that ends.
pub(super) fn to_lark(text: &str) -> Result<String, String> {
    let rules = Reader { text, at: 0, depth: 0 }.rules()?;
    if !rules.contains_key("root") {
        return Err("has no rule `root`".into());
    }
    for (name, node) in &rules {
        let mut used = BTreeSet::new();
        names(node, &mut used);
        if let Some(missing) = used.into_iter().find(|used| !rules.contains_key(*used)) {
            return Err(format!("rule {name}: there is no rule {missing:?}"));
        }
        let size = size(node);
        if size > MOST {
            return Err(format!("rule {name} is too large: {size} symbols, {MOST} are the limit"));
        }
    }
    if !ends(&rules).contains("root") {
        return Err("has no text that ends: every way of `root` leads on for ever".into());
    }
    let numbers: BTreeMap<&str, usize> =
        rules.keys().enumerate().map(|(i, name)| (name.as_str(), i)).collect();
    let mut lark = format!("start: r{}\n", numbers["root"]);
    for (name, node) in &rules {
        let mut body = String::new();
        write_node(node, &numbers, &mut body);
        // Writing to memory does not fail.
        let _ = writeln!(lark, "r{}: {body}", numbers[name.as_str()]);
    }
    Ok(lark)
}

fn names<'a>(node: &'a Node, used: &mut BTreeSet<&'a str>) {
    match node {
        Node::Rule(name) => drop(used.insert(name)),
        Node::All(nodes) | Node::Any(nodes) => nodes.iter().for_each(|node| names(node, used)),
        Node::Repeat(node, ..) => names(node, used),
        Node::Text(_) | Node::Class(_) => {}
    }
}

fn size(node: &Node) -> u64 {
    match node {
        Node::Text(text) => text.chars().count() as u64,
        Node::Class(_) | Node::Rule(_) => 1,
        Node::All(nodes) | Node::Any(nodes) => nodes.iter().map(size).fold(1, u64::saturating_add),
        Node::Repeat(node, least, most) => size(node).saturating_mul(most.unwrap_or(*least).max(1)),
    }
}

/// Rules of which a text can come to an end.
fn ends(rules: &BTreeMap<String, Node>) -> BTreeSet<&str> {
    fn finite(node: &Node, known: &BTreeSet<&str>) -> bool {
        match node {
            Node::Text(_) | Node::Class(_) => true,
            Node::Rule(name) => known.contains(name.as_str()),
            Node::All(nodes) => nodes.iter().all(|node| finite(node, known)),
            Node::Any(nodes) => nodes.iter().any(|node| finite(node, known)),
            Node::Repeat(node, least, _) => *least == 0 || finite(node, known),
        }
    }
    let mut known = BTreeSet::new();
    loop {
        let new = rules.iter().filter(|(name, node)| !known.contains(name.as_str()) && finite(node, &known));
        let new: Vec<&str> = new.map(|(name, _)| name.as_str()).collect();
        if new.is_empty() {
            return known;
        }
        known.extend(new);
    }
}

fn write_node(node: &Node, numbers: &BTreeMap<&str, usize>, out: &mut String) {
    let list = |nodes: &[Node], between: &str, out: &mut String| {
        out.push('(');
        for (i, node) in nodes.iter().enumerate() {
            out.push_str(if i == 0 { "" } else { between });
            write_node(node, numbers, out);
        }
        out.push(')');
    };
    match node {
        Node::Text(text) if text.is_empty() => out.push_str("\"\""),
        Node::Text(text) => {
            let characters: Vec<String> = text.chars().map(|c| quoted(c.encode_utf8(&mut [0; 4]))).collect();
            out.push_str(&characters.join(" "));
        }
        Node::Class(class) => {
            let _ = write!(out, "/{class}/");
        }
        Node::Rule(name) => {
            let _ = write!(out, "r{}", numbers.get(name.as_str()).copied().unwrap_or(0));
        }
        Node::All(nodes) if nodes.is_empty() => out.push_str("\"\""),
        Node::All(nodes) => list(nodes, " ", out),
        Node::Any(nodes) => list(nodes, " | ", out),
        Node::Repeat(node, least, most) => {
            list(std::slice::from_ref(node), "", out);
            let _ = match (least, most) {
                (0, None) => write!(out, "*"),
                (1, None) => write!(out, "+"),
                (0, Some(1)) => write!(out, "?"),
                (least, None) => write!(out, "{{{least},}}"),
                (least, Some(most)) => write!(out, "{{{least},{most}}}"),
            };
        }
    }
}

/// Reads GBNF.
struct Reader<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
}

impl Reader<'_> {
    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn take(&mut self, text: &str) -> bool {
        let found = self.text[self.at..].starts_with(text);
        self.at += if found { text.len() } else { 0 };
        found
    }

    fn wrong<T>(&self, what: &str) -> Result<T, String> {
        let line = self.text[..self.at].matches('\n').count() + 1;
        Err(format!("line {line}: {what}"))
    }

    /// Passes space and comments; line ends too where they mean nothing.
    fn space(&mut self, lines: bool) {
        while let Some(c) = self.peek() {
            match c {
                '#' => {
                    let rest = &self.text[self.at..];
                    self.at += rest.find('\n').unwrap_or(rest.len());
                }
                '\n' if !lines => return,
                c if c.is_whitespace() => self.at += c.len_utf8(),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Option<String> {
        let rest = &self.text[self.at..];
        let end =
            rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '_').unwrap_or(rest.len());
        self.at += end;
        (end > 0).then(|| rest[..end].to_owned())
    }

    fn rules(mut self) -> Result<BTreeMap<String, Node>, String> {
        let mut rules = BTreeMap::new();
        loop {
            self.space(true);
            if self.peek().is_none() {
                return Ok(rules);
            }
            let Some(name) = self.name() else { return self.wrong("a rule begins with its name") };
            self.space(false);
            if !self.take("::=") {
                return self.wrong("`::=` must follow the name of a rule");
            }
            let node = self.any()?;
            self.space(false);
            if !matches!(self.peek(), None | Some('\n')) {
                return self.wrong("the rule does not end here, and cannot go on so");
            }
            if rules.insert(name, node).is_some() {
                return self.wrong("the rule is there twice");
            }
        }
    }

    /// Alternatives. In a group, and after `|`, they may go on in the next line.
    fn any(&mut self) -> Result<Node, String> {
        self.depth += 1;
        if self.depth > DEEPEST {
            return self.wrong("too many groups in each other");
        }
        let mut ways = Vec::new();
        loop {
            self.space(true);
            ways.push(self.all()?);
            if !self.take("|") {
                break;
            }
        }
        self.depth -= 1;
        Ok(if ways.len() == 1 { ways.remove(0) } else { Node::Any(ways) })
    }

    fn all(&mut self) -> Result<Node, String> {
        let mut nodes = Vec::new();
        loop {
            self.space(self.depth > 1);
            let node = match self.peek() {
                Some('"') => self.quoted()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.at += 1;
                    Node::Class(r"[\s\S]".into())
                }
                Some('(') => {
                    self.at += 1;
                    let inner = self.any()?;
                    self.space(true);
                    if !self.take(")") {
                        return self.wrong("a group is not closed");
                    }
                    inner
                }
                Some(c) if c.is_ascii_alphanumeric() || c == '_' => {
                    Node::Rule(self.name().unwrap_or_default())
                }
                _ => return Ok(Node::All(nodes)),
            };
            nodes.push(self.repeated(node)?);
        }
    }

    fn repeated(&mut self, node: Node) -> Result<Node, String> {
        let (least, most) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => return self.counted(node),
            _ => return Ok(node),
        };
        self.at += 1;
        self.repeated(Node::Repeat(Box::new(node), least, most))
    }

    fn counted(&mut self, node: Node) -> Result<Node, String> {
        let rest = &self.text[self.at + 1..];
        let Some(end) = rest.find('}') else { return self.wrong("a count is not closed") };
        let (least, most) = match rest[..end].split_once(',') {
            Some((least, most)) => (least.trim(), Some(most.trim())),
            None => (rest[..end].trim(), None),
        };
        let number = |text: &str| text.parse::<u64>().ok();
        let counts = match (number(least), most) {
            (Some(n), None) => Some((n, Some(n))),
            (Some(n), Some("")) => Some((n, None)),
            (Some(n), Some(most)) => number(most).filter(|most| *most >= n).map(|most| (n, Some(most))),
            (None, _) => None,
        };
        let Some((least, most)) = counts else { return self.wrong("a count must be {m}, {m,} or {m,n}") };
        self.at += end + 2;
        Ok(Node::Repeat(Box::new(node), least, most))
    }

    fn quoted(&mut self) -> Result<Node, String> {
        self.at += 1;
        let mut text = String::new();
        loop {
            match self.next() {
                Some('"') => return Ok(Node::Text(text)),
                Some('\\') => text.push(self.escape()?),
                None | Some('\n') => return self.wrong("a text is not closed"),
                Some(c) => text.push(c),
            }
        }
    }

    fn escape(&mut self) -> Result<char, String> {
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(c) if !c.is_alphanumeric() => return Ok(c),
            _ => {
                return self.wrong("`\\` must be followed by n, r, t, x, u, U, or what is not to be special");
            }
        };
        let code =
            self.text.get(self.at..self.at + digits).and_then(|text| u32::from_str_radix(text, 16).ok());
        self.at += if code.is_some() { digits } else { 0 };
        match code.and_then(char::from_u32) {
            Some(c) => Ok(c),
            None => self.wrong("this is no code of a character"),
        }
    }

    /// A class, as a regular expression writes it.
    fn class(&mut self) -> Result<Node, String> {
        self.at += 1;
        let mut class = String::from(if self.take("^") { "[^" } else { "[" });
        let empty = class.len();
        loop {
            let from = match self.next() {
                Some(']') if class.len() > empty => return Ok(Node::Class(class + "]")),
                Some(']') => return self.wrong("a class is empty"),
                Some('\\') => self.escape()?,
                None | Some('\n') => return self.wrong("a class is not closed"),
                Some(c) => c,
            };
            let ranged = self.peek() == Some('-') && !self.text[self.at..].starts_with("-]");
            let to = match ranged.then(|| self.next()).and_then(|_| self.next()) {
                Some('\\') => self.escape()?,
                Some(c) => c,
                None => from,
            };
            if to < from {
                return self.wrong("a range of a class is the wrong way round");
            }
            let _ = write!(class, "\\u{{{:x}}}-\\u{{{:x}}}", u32::from(from), u32::from(to));
        }
    }
}
