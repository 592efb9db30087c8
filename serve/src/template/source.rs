//! Source of a template, made fit for the engine. In: Jinja as transformers reads it. Out: the same with `generation` blocks,
//! which mark what the assistant wrote and print it unaltered, spelt as the plain scope that they are; or with marks printed where they
//! begin and end.

/// What is printed where a `generation` block begins and where it ends: no characters of any text, as Unicode says.
pub(super) const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// Replaces `{% generation %}` by `{% with %}` and its end alike; whitespace control stays. Comments, raw blocks and strings
/// are left alone. Every end of a line becomes `\n`, as Jinja reads it.
pub(super) fn plain(source: &str) -> String {
    rewrite(source, &mut |tag, word, made, _rest| {
        made.push_str(&tag.replacen(word, if word == "generation" { "with" } else { "endwith" }, 1));
        0
    })
}

/// The same, with [`MARKS`] printed; `None` where there are no such blocks.
pub(super) fn marked(source: &str) -> Option<String> {
    let mut blocks = 0;
    let made = rewrite(source, &mut |tag, word, made, rest| {
        blocks += 1;
        // What the tag would strip is stripped here, because what takes its place prints.
        let kept = match tag.as_bytes()[2] {
            b'-' => made.trim_end().len(),
            b'+' => made.len(),
            _ => {
                let line = made.trim_end_matches([' ', '\t']);
                if line.is_empty() || line.ends_with('\n') { line.len() } else { made.len() }
            }
        };
        made.truncate(kept);
        made.push_str(&match word {
            "generation" => format!("{{%+ with %}}{{{{ \"{}\" }}}}", MARKS[0]),
            _ => format!("{{{{ \"{}\" }}}}{{% endwith +%}}", MARKS[1]),
        });
        match tag.as_bytes()[tag.len() - 3] {
            b'-' => rest.len() - rest.trim_start().len(),
            b'+' => 0,
            _ => usize::from(rest.starts_with('\n')),
        }
    });
    (blocks > 0).then_some(made)
}

/// What takes the place of a tag, given the tag, its word, what is made so far and what follows; gives how much of the latter is
/// passed by.
type Replace<'a> = &'a mut dyn FnMut(&str, &str, &mut String, &str) -> usize;

fn rewrite(source: &str, replace: Replace<'_>) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut made = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(at) = rest.find('{') {
        made.push_str(&rest[..at]);
        rest = &rest[at..];
        let taken = match rest.as_bytes().get(1) {
            Some(b'#') => rest.find("#}").map_or(rest.len(), |end| end + 2),
            Some(b'{') => code(rest, "}}"),
            Some(b'%') => match keyword(rest) {
                "raw" => raw(rest),
                _ => code(rest, "%}"),
            },
            _ => 1,
        };
        let (tag, after) = rest.split_at(taken);
        match keyword(tag) {
            word @ ("generation" | "endgeneration") if tag.starts_with("{%") && tag.ends_with("%}") => {
                let passed = replace(tag, word, &mut made, after);
                rest = &after[passed..];
            }
            _ => {
                made.push_str(tag);
                rest = after;
            }
        }
    }
    made + rest
}

/// The first word of a tag.
fn keyword(tag: &str) -> &str {
    let inner = tag.get(2..).unwrap_or("").trim_start_matches(['-', '+']).trim_start();
    let end = inner.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(inner.len());
    &inner[..end]
}

/// Length of a tag that ends with `close`, outside of strings and of braces.
fn code(tag: &str, close: &str) -> usize {
    let bytes = tag.as_bytes();
    let (mut at, mut braces) = (2, 0usize);
    while at < bytes.len() {
        match bytes[at] {
            b'{' => {
                braces += 1;
                at += 1;
            }
            b'}' if braces > 0 => {
                braces -= 1;
                at += 1;
            }
            quote @ (b'"' | b'\'') => {
                at += 1;
                while at < bytes.len() && bytes[at] != quote {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                at += 1;
            }
            _ if bytes[at..].starts_with(close.as_bytes()) => return at + close.len(),
            _ => at += 1,
        }
    }
    tag.len()
}

/// Length of a raw block with its ends.
fn raw(block: &str) -> usize {
    let mut at = 2;
    while let Some(next) = block[at..].find("{%") {
        at += next;
        if keyword(&block[at..]) == "endraw" {
            return at + code(&block[at..], "%}");
        }
        at += 2;
    }
    block.len()
}
