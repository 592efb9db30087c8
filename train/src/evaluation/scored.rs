//! Texts and choices as sequences to be scored. In: text, a tokenizer, the longest sequence a model takes. Out: token ids, and from
//! which on their log-probabilities are summed.

use crate::batch::PackedBatch;
use astrai_serve::tokenizer::Tokenizer;

/// A sequence whose tokens from `from` on are scored, each by those before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scored {
    /// Token ids; at least two.
    pub ids: Vec<u32>,
    /// The first that is scored, at least 1.
    pub from: usize,
}

impl Scored {
    /// How many tokens are scored.
    pub fn tokens(&self) -> usize {
        self.ids.len() - self.from
    }

    /// Adds it to a batch as a sequence whose other targets are masked.
    pub fn append_to(&self, batch: &mut PackedBatch) {
        let ids: Vec<i32> = self.ids.iter().map(|&id| id as i32).collect();
        let trained: Vec<bool> = (0..ids.len()).map(|t| t >= self.from).collect();
        batch.push_trained(&ids, &trained);
    }
}

/// Makes sequences for a model.
#[derive(Debug)]
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    /// Tokens of a sequence at most.
    longest: usize,
    /// What the tokenizer puts before a text by itself.
    bos: Option<u32>,
    /// What the first token of a text is scored by where nothing is before it.
    prefix: Option<u32>,
}

impl<'a> Encoder<'a> {
    /// An encoder for a model that takes at most `longest` tokens, the last one scored among them.
    ///
    /// # Errors
    /// The tokenizer cannot encode, or the model takes less than two tokens.
    pub fn new(tokenizer: &'a Tokenizer, longest: usize) -> Result<Encoder<'a>, String> {
        if longest < 2 {
            return Err(format!("sequences of {longest} tokens are too short to score one by another"));
        }
        let special = tokenizer.special();
        let [bos, eos] = [&special.bos, &special.eos].map(|token| token.as_ref().map(|token| token.id));
        let added = tokenizer.encode("", true).map_err(|e| e.to_string())?;
        let bos_added = bos.filter(|bos| added.first() == Some(bos));
        Ok(Encoder { tokenizer, longest, bos: bos_added, prefix: bos.or(eos) })
    }

    /// A text whole, in windows as long as the model takes, each token scored once. The first is scored by the bos, or the eos where
    /// there is none; where there is neither, it is not scored.
    ///
    /// # Errors
    /// The text cannot be encoded, or has no token to score.
    pub fn text(&self, text: &str) -> Result<Vec<Scored>, String> {
        let ids = self.tokenizer.encode(text, false).map_err(|e| e.to_string())?;
        let prefix = self.prefix.filter(|prefix| ids.first() != Some(prefix));
        let ids: Vec<u32> = prefix.into_iter().chain(ids).collect();
        // As the harness does it: windows do not overlap, but the last one has what comes before it in full.
        let step = self.longest - 1;
        let window = |from: usize| {
            let end = (from + step).min(ids.len());
            let begin = end.saturating_sub(self.longest).min(from - 1);
            Scored { ids: ids[begin..end].to_vec(), from: from - begin }
        };
        let windows: Vec<Scored> = (1..ids.len()).step_by(step).map(window).collect();
        if windows.is_empty() { Err("has too few tokens to score".into()) } else { Ok(windows) }
    }

    /// Each continuation behind a context; white space at the context's end counts to the continuation. Where both are too long, the
    /// context's beginning is cut off; says for how many it was.
    ///
    /// # Errors
    /// One cannot be encoded, or alone is longer than the model takes.
    pub fn choices(
        &self,
        context: &str,
        delimiter: &str,
        choices: &[String],
    ) -> Result<(Vec<Scored>, u64), String> {
        let mut cut = 0;
        let mut one = |choice: &String| {
            let parted = context.is_empty()
                || delimiter == " "
                    && (context.ends_with(char::is_whitespace) || choice.starts_with(char::is_whitespace));
            let whole = [context, if parted { "" } else { delimiter }, choice].concat();
            let border = context.trim_end().len();
            let spans = self.tokenizer.encode_spans(&whole).map_err(|e| e.to_string())?;
            let before = spans.iter().take_while(|(_, span)| span.end <= border && border > 0).count();
            let bos = self.bos.or(self.prefix.filter(|_| before == 0));
            let bos = bos.filter(|bos| spans.first().is_none_or(|(id, _)| id != bos));
            let mut ids: Vec<u32> = bos.into_iter().chain(spans.iter().map(|(id, _)| *id)).collect();
            let mut from = before + ids.len() - spans.len();
            if ids.len() <= from || from == 0 {
                return Err(format!(
                    "choice {choice:?} has no token to score, or none before it; give a prompt"
                ));
            }
            let over = ids.len().saturating_sub(self.longest);
            if over >= from {
                return Err(format!(
                    "a choice of {} tokens is longer than the {} the model takes",
                    ids.len() - from,
                    self.longest
                ));
            }
            ids.drain(..over);
            from -= over;
            cut += u64::from(over > 0);
            Ok(Scored { ids, from })
        };
        let all = choices.iter().map(&mut one).collect::<Result<_, String>>()?;
        Ok((all, cut))
    }
}
