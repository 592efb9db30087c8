//! Tags in text that comes character by character. A tag begins with a character that it does not have again, so that where a comparison
//! fails a new one can only begin at the character that failed it: nothing is read twice.

/// Compares text with one tag after the other, from its first character.
#[derive(Debug)]
pub(super) struct Tag {
    text: &'static str,
    at: usize,
}

/// How a comparison stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compared {
    /// Equal so far.
    More,
    /// Equal.
    Whole,
    /// Different.
    Differs,
}

impl Tag {
    pub fn new(text: &'static str) -> Tag {
        Tag { text, at: 0 }
    }

    /// Compares the next character.
    pub fn push(&mut self, c: char) -> Compared {
        if !self.text[self.at..].starts_with(c) {
            return Compared::Differs;
        }
        self.at += c.len_utf8();
        if self.at == self.text.len() { Compared::Whole } else { Compared::More }
    }

    /// What was equal.
    pub fn compared(&self) -> &'static str {
        &self.text[..self.at]
    }
}

/// Finds a tag anywhere in a text.
#[derive(Debug)]
pub(super) struct Marker {
    tag: Tag,
}

impl Marker {
    pub fn new(text: &'static str) -> Marker {
        Marker { tag: Tag::new(text) }
    }

    /// Whether nothing is held back.
    pub fn is_idle(&self) -> bool {
        self.tag.at == 0
    }

    pub fn is_complete(&self) -> bool {
        self.tag.at == self.tag.text.len()
    }

    /// What is held back: the beginning of the tag.
    pub fn held(&self) -> String {
        self.tag.compared().into()
    }

    pub fn restart(&mut self) {
        self.tag.at = 0;
    }

    /// Takes the next character; gives text that is not of the tag.
    pub fn push(&mut self, c: char) -> String {
        if self.tag.push(c) != Compared::Differs {
            return String::new();
        }
        let mut shown = self.held();
        self.restart();
        if self.tag.push(c) == Compared::Differs {
            shown.push(c);
        }
        shown
    }
}

/// Which of several tags comes, with space before it or none.
#[derive(Debug)]
pub(super) struct OneOf {
    tags: &'static [&'static str],
    /// One bit for each tag that is equal so far.
    alive: u8,
    at: usize,
}

impl OneOf {
    pub fn new(tags: &'static [&'static str]) -> OneOf {
        OneOf { tags, alive: (1 << tags.len()) - 1, at: 0 }
    }

    /// Whether no tag has begun.
    pub fn is_idle(&self) -> bool {
        self.at == 0
    }

    /// Compares the next character; the place of the tag that is whole, `Err` where none can be any more.
    pub fn push(&mut self, c: char) -> Result<Option<usize>, ()> {
        if self.at == 0 && c.is_whitespace() {
            return Ok(None);
        }
        for (i, tag) in self.tags.iter().enumerate() {
            if !tag.get(self.at..).is_some_and(|rest| rest.starts_with(c)) {
                self.alive &= !(1 << i);
            }
        }
        self.at += c.len_utf8();
        let whole = |i: &usize| self.alive >> i & 1 == 1 && self.tags[*i].len() == self.at;
        match (0..self.tags.len()).find(whole) {
            Some(i) => Ok(Some(i)),
            None if self.alive == 0 => Err(()),
            None => Ok(None),
        }
    }
}
