//! Tables for people. In: cells. Out: aligned lines; numbers to the right, text to the left.

pub use astrai_engine::figures::{bytes, count};

/// Lines of a table under its head, each ended.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let cell = |row: &[String], c: usize| row.get(c).cloned().unwrap_or_default();
    let wide = |s: &str| s.chars().count();
    let width = |c: usize| rows.iter().map(|r| wide(&cell(r, c))).chain([wide(head[c])]).max().unwrap_or(0);
    let number = |s: String| s.is_empty() || s.starts_with(|c: char| c.is_ascii_digit() || c == '-');
    let right = |c: usize| rows.iter().all(|r| number(cell(r, c)));
    let columns: Vec<(usize, bool)> = (0..head.len()).map(|c| (width(c), right(c))).collect();
    let mut out = String::new();
    let head: Vec<String> = head.iter().map(|h| h.to_string()).collect();
    for row in std::iter::once(&head).chain(rows) {
        let mut line = String::new();
        for (c, &(width, right)) in columns.iter().enumerate() {
            let text = cell(row, c);
            let pad = " ".repeat(width - wide(&text));
            let parts = if right { [pad, text] } else { [text, pad] };
            line += &parts.concat();
            line += "  ";
        }
        out += line.trim_end();
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_align_to_the_right() {
        let rows = [vec!["a".to_string(), "1".to_string()], vec!["bcd".to_string(), "22".to_string()]];
        assert_eq!(table(&["x", "n"], &rows), "x     n\na     1\nbcd  22\n");
        assert_eq!([bytes(1536), count(5_050_000), count(12)], ["1.50 KiB", "5.05 M", "12"]);
    }
}
