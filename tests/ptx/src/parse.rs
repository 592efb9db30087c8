//! PTX text to statements. In: a module as NVRTC writes it. Out: variables, kernels, and the statements of their bodies, names
//! still as they are written; [`crate::decode`] resolves them.

use crate::kernel::{Param, Ty};

/// A module.
#[derive(Default, Debug)]
pub(crate) struct Text {
    pub variables: Vec<Declared>,
    pub entries: Vec<Entry>,
    pub files: Vec<(u32, String)>,
}

/// A variable: its place, name, size, and first bytes where they are given.
#[derive(Clone, Debug)]
pub(crate) struct Declared {
    pub space: &'static str,
    pub align: usize,
    pub size: usize,
    pub name: String,
    pub init: Option<Vec<u8>>,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub name: String,
    pub params: Vec<(String, Param)>,
    pub max_threads: u32,
    pub body: Vec<Stmt>,
}

#[derive(Debug)]
pub(crate) enum Stmt {
    Open,
    Close,
    Label(String),
    /// Registers of a type, by name, or by prefix and number.
    Reg(Ty, Vec<(String, Option<usize>)>),
    Var(Declared),
    Targets(Vec<String>),
    Ins(Written),
}

/// An instruction as it is written.
#[derive(Debug)]
pub(crate) struct Written {
    pub line: u32,
    pub loc: (u32, u32),
    pub guard: Option<(bool, String)>,
    pub op: String,
    pub args: Vec<Arg>,
    pub text: String,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Arg {
    Name(String),
    Not(String),
    Int(u64),
    /// A literal's value, and its bits where it was given by bits of 32 or 64.
    F32(u32),
    F64(u64),
    /// Name or number, and an offset.
    Mem(Box<Arg>, i64),
    Vector(Vec<Arg>),
    /// `p|q`.
    Pair(Box<Arg>, Box<Arg>),
}

/// Comments become blanks; lines stay.
fn without_comments(src: &str) -> String {
    let mut out = String::with_capacity(src.len());
    let mut rest = src;
    while let Some(at) = rest.find('/') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        if rest.starts_with("//") {
            rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
        } else if rest.starts_with("/*") {
            let end = rest.find("*/").map_or(rest.len(), |e| e + 2);
            out.extend(rest[..end].chars().filter(|c| *c == '\n'));
            out.push(' ');
            rest = &rest[end..];
        } else {
            out.push('/');
            rest = &rest[1..];
        }
    }
    out + rest
}

struct Reader<'a> {
    rest: &'a str,
    line: u32,
    loc: (u32, u32),
}

impl<'a> Reader<'a> {
    fn skip(&mut self, n: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(n);
        self.line += taken.matches('\n').count() as u32;
        self.rest = rest;
        taken
    }

    fn blanks(&mut self) {
        let n = self.rest.len() - self.rest.trim_start().len();
        self.skip(n);
    }

    fn through(&mut self, end: char) -> Result<&'a str, String> {
        let n = self.rest.find(end).ok_or(format!("line {}: no `{end}` follows", self.line))?;
        let taken = self.skip(n);
        self.skip(end.len_utf8());
        Ok(taken.trim())
    }

    fn rest_of_line(&mut self) -> &'a str {
        let n = self.rest.find('\n').unwrap_or(self.rest.len());
        self.skip(n).trim()
    }

    /// Passes over what is between braces, nested ones included.
    fn braces(&mut self) -> Result<(), String> {
        self.through('{')?;
        let mut depth = 1;
        while depth > 0 {
            let n = self.rest.find(['{', '}']).ok_or("a brace is not closed")?;
            self.skip(n);
            depth = if self.skip(1) == "{" { depth + 1 } else { depth - 1 };
        }
        Ok(())
    }
}

/// Reads a module.
pub(crate) fn parse(src: &str) -> Result<Text, String> {
    let clean = without_comments(src);
    let mut r = Reader { rest: clean.trim_end_matches('\0'), line: 1, loc: (0, 0) };
    let mut text = Text::default();
    loop {
        r.blanks();
        if r.rest.is_empty() {
            return Ok(text);
        }
        let word = r.rest.split(|c: char| c.is_whitespace() || c == '{').next().unwrap_or("");
        match word {
            ".version" | ".target" | ".address_size" => drop(r.rest_of_line()),
            ".file" => {
                let line = r.rest_of_line();
                let name = line.split('"').nth(1).unwrap_or("").to_string();
                let number = line[5..].split_whitespace().next().and_then(|n| n.parse().ok());
                text.files.push((number.unwrap_or(0), name));
            }
            ".section" => r.braces()?,
            _ => {
                let n = r.rest.find(['{', ';', '(']).ok_or(format!("line {}: `{word}`", r.line))?;
                let head: Vec<&str> = r.rest[..n].split_whitespace().collect();
                if head.contains(&".entry") {
                    text.entries.push(entry(&mut r)?);
                } else if head.contains(&".func") {
                    // Only functions of the system are called: printf, assertions. Bodies of others are not.
                    let (semi, brace) = (r.rest.find(';'), r.rest.find('{'));
                    match (semi, brace) {
                        (semi, Some(brace)) if semi.is_none_or(|semi| brace < semi) => r.braces()?,
                        _ => drop(r.through(';')?),
                    }
                } else {
                    let line = r.line;
                    let s = r.through(';')?;
                    text.variables.push(declared(s).map_err(|e| format!("line {line}: {e}"))?);
                }
            }
        }
    }
}

fn entry(r: &mut Reader) -> Result<Entry, String> {
    let head = r.through('(')?;
    let name = head.split_whitespace().last().unwrap_or("").to_string();
    let (mut params, mut at) = (vec![], 0usize);
    for p in r.through(')')?.split(',').map(str::trim).filter(|p| !p.is_empty()) {
        let d = declared(p)?;
        at = at.next_multiple_of(d.align);
        params.push((d.name, Param { at, size: d.size }));
        at += d.size;
    }
    let directives = &r.rest[..r.rest.find('{').ok_or("an entry without a body")?];
    let mut max_threads = 1024;
    for key in [".maxntid", ".reqntid"] {
        if let Some((_, after)) = directives.split_once(key) {
            let numbers = after.split('.').next().unwrap_or("");
            max_threads = numbers.split(',').filter_map(|n| n.trim().parse::<u32>().ok()).product();
        }
    }
    r.through('{')?;
    let mut e = Entry { name, params, max_threads, body: vec![] };
    r.loc = (0, 0);
    let mut depth = 1;
    while depth > 0 {
        let line = r.line;
        if let Some(s) = statement(r).map_err(|m| format!("line {line}: {m}"))? {
            match s {
                Stmt::Open => depth += 1,
                Stmt::Close => depth -= 1,
                _ => {}
            }
            e.body.push(s);
        }
    }
    e.body.pop();
    Ok(e)
}

/// The next statement of a body; none where a directive says nothing about what is computed.
fn statement(r: &mut Reader) -> Result<Option<Stmt>, String> {
    r.blanks();
    let end = r.rest.find(|c: char| !(c.is_alphanumeric() || "_$%.".contains(c))).ok_or("the text ends")?;
    let (word, next) = (&r.rest[..end], r.rest[end..].chars().next());
    if end == 0 {
        match next {
            Some('{') => return Ok(r.skip(1)).map(|_| Some(Stmt::Open)),
            Some('}') => return Ok(r.skip(1)).map(|_| Some(Stmt::Close)),
            _ => {}
        }
    }
    if next == Some(':') && end > 0 {
        r.skip(end + 1);
        return Ok(Some(Stmt::Label(word.into())));
    }
    match word {
        ".loc" => {
            let line = r.rest_of_line();
            let n: Vec<u32> =
                line[4..].split([' ', '\t', ',']).filter_map(|w| w.parse().ok()).take(2).collect();
            r.loc = (n.first().copied().unwrap_or(0), n.get(1).copied().unwrap_or(0));
            return Ok(None);
        }
        ".pragma" => return r.through(';').map(|_| None),
        ".branchtargets" => {
            let names = r.through(';')?[14..].split(',').map(|s| s.trim().to_string()).collect();
            return Ok(Some(Stmt::Targets(names)));
        }
        ".reg" => return registers(r.through(';')?).map(Some),
        ".shared" | ".local" | ".param" | ".const" | ".global" => {
            return declared(r.through(';')?).map(|d| Some(Stmt::Var(d)));
        }
        _ if word.starts_with('.') => return Err(format!("directive {word} is not known")),
        _ => {}
    }
    let (line, loc) = (r.line, r.loc);
    let text = r.through(';')?;
    if text.is_empty() {
        return Ok(None);
    }
    written(text, line, loc).map(|w| Some(Stmt::Ins(w)))
}

fn registers(s: &str) -> Result<Stmt, String> {
    let mut words = s[4..].split_whitespace();
    let ty = words.next().and_then(|t| t.strip_prefix('.')).and_then(Ty::of).ok_or(format!("`{s}`"))?;
    let names = words.collect::<String>();
    let one = |n: &str| match n.split_once('<') {
        Some((p, c)) => c.trim_end_matches('>').parse().map(|c| (p.to_string(), Some(c))),
        None => Ok((n.to_string(), None)),
    };
    let names = names.split(',').map(one).collect::<Result<Vec<_>, _>>();
    Ok(Stmt::Reg(ty, names.map_err(|e| format!("`{s}`: {e}"))?))
}

/// `.visible .const .align 4 .b8 name[64] = {1, 2}` and the like, parameters too.
fn declared(s: &str) -> Result<Declared, String> {
    let (head, init) = match s.split_once('=') {
        Some((h, i)) => (h.trim(), Some(i.trim())),
        None => (s.trim(), None),
    };
    let (mut space, mut align, mut ty) = ("", 0, None);
    let mut words = head.split_whitespace().peekable();
    while let Some(w) = words.next_if(|w| w.starts_with('.')) {
        match &w[1..] {
            "shared" => space = "shared",
            "local" => space = "local",
            "param" => space = "param",
            "const" => space = "const",
            "global" => space = "global",
            "align" => align = words.next().and_then(|n| n.parse().ok()).ok_or(format!("`{s}`"))?,
            t => ty = Ty::of(t).or(ty),
        }
    }
    let ty = ty.ok_or(format!("a variable without a type: `{s}`"))?;
    let name: String = words.collect();
    let (name, dims) = name.split_once('[').unwrap_or((&name, ""));
    let mut count = 1usize;
    for d in dims.split(['[', ']']).filter(|d| !d.is_empty()) {
        count = count.saturating_mul(d.parse().map_err(|_| format!("`{s}`"))?);
    }
    if dims.starts_with(']') {
        count = 0;
    }
    let init = init.map(|i| bytes(i, ty, count * ty.bytes())).transpose()?;
    let align = if align == 0 { ty.bytes() } else { align };
    Ok(Declared { space, align, size: count * ty.bytes(), name: name.into(), init })
}

fn bytes(s: &str, ty: Ty, size: usize) -> Result<Vec<u8>, String> {
    let mut out = vec![];
    for word in s.split(['{', '}', ',']).map(str::trim).filter(|w| !w.is_empty()) {
        let value = match arg(word)? {
            Arg::Int(v) | Arg::F64(v) => v,
            Arg::F32(v) => u64::from(v),
            _ => return Err(format!("a first value `{word}`, which is no number")),
        };
        out.extend_from_slice(&value.to_le_bytes()[..ty.bytes()]);
    }
    out.resize(size.max(out.len()), 0);
    Ok(out)
}

fn written(text: &str, line: u32, loc: (u32, u32)) -> Result<Written, String> {
    let mut rest = text;
    let mut guard = None;
    if let Some(g) = text.strip_prefix('@') {
        let (name, after) = g.split_once(char::is_whitespace).ok_or("a guard alone")?;
        let bare = name.trim_start_matches('!');
        guard = Some((bare.len() < name.len(), bare.to_string()));
        rest = after.trim_start();
    }
    let (op, args) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let args = split(args).into_iter().map(arg).collect::<Result<_, _>>()?;
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    Ok(Written { line, loc, guard, op: op.into(), args, text })
}

/// At commas outside brackets.
fn split(s: &str) -> Vec<&str> {
    let (mut out, mut depth, mut start) = (vec![], 0, 0);
    for (i, c) in s.char_indices() {
        match c {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                out.push(s[start..i].trim());
                start = i + 1;
            }
            _ => {}
        }
    }
    let last = s[start..].trim();
    if !last.is_empty() {
        out.push(last);
    }
    out
}

fn arg(s: &str) -> Result<Arg, String> {
    let bad = || format!("operand `{s}`");
    if let Some(inner) = s.strip_prefix(['{', '(']) {
        let inner = inner.trim_end().trim_end_matches(['}', ')']);
        return Ok(Arg::Vector(split(inner).into_iter().map(arg).collect::<Result<_, _>>()?));
    }
    if let Some(inner) = s.strip_prefix('[') {
        let inner = inner.trim_end_matches(']').trim();
        let (base, off) = match inner.find('+') {
            Some(i) => (inner[..i].trim(), integer(inner[i + 1..].trim()).ok_or_else(bad)? as i64),
            None => (inner, 0),
        };
        return Ok(Arg::Mem(Box::new(arg(base)?), off));
    }
    if let Some((p, q)) = s.split_once('|') {
        return Ok(Arg::Pair(Box::new(arg(p.trim())?), Box::new(arg(q.trim())?)));
    }
    if let Some(n) = s.strip_prefix('!') {
        return Ok(Arg::Not(n.trim().into()));
    }
    let digit = s.trim_start_matches('-').starts_with(|c: char| c.is_ascii_digit());
    if !digit {
        return match s.split_once('+') {
            Some((n, off)) => Ok(Arg::Mem(
                Box::new(Arg::Name(n.trim().into())),
                integer(off.trim()).ok_or_else(bad)? as i64,
            )),
            None if s == "WARP_SZ" => Ok(Arg::Int(32)),
            None if s.is_empty() => Err(bad()),
            None => Ok(Arg::Name(s.into())),
        };
    }
    let hex = |p: [&str; 2]| p.iter().find_map(|p| s.strip_prefix(p));
    if let Some(h) = hex(["0f", "0F"]) {
        return u32::from_str_radix(h, 16).map(Arg::F32).map_err(|_| bad());
    }
    if let Some(h) = hex(["0d", "0D"]) {
        return u64::from_str_radix(h, 16).map(Arg::F64).map_err(|_| bad());
    }
    if s.contains('.') && !s.starts_with("0x") {
        return s.parse::<f64>().map(|v| Arg::F64(v.to_bits())).map_err(|_| bad());
    }
    integer(s).map(Arg::Int).ok_or_else(bad)
}

fn integer(s: &str) -> Option<u64> {
    let (neg, s) = match s.strip_prefix('-') {
        Some(s) => (true, s),
        None => (false, s),
    };
    let s = s.trim_end_matches('U');
    let v = match s.strip_prefix("0x").or(s.strip_prefix("0X")) {
        Some(h) => u64::from_str_radix(h, 16).ok()?,
        None => s.parse().ok()?,
    };
    Some(if neg { v.wrapping_neg() } else { v })
}
