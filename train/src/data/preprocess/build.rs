//! One record. In: a JSON object and the configuration. Out: its keys with ids and masks, why it was left out, or what is wrong with
//! it. Everything here is a function of the record, so that threads may share the work.

use super::chat::{Conversation, Rendered, encode};
use super::config::{Action, Config, Degenerate, Fields, Section, Source};
use super::fields::{answer, as_messages, field, numbers, prompt};
use super::state::DATASET;
use crate::data::DataError;
use crate::data::packing::pieces;
use crate::data::store::PROGRESS;
use crate::data::text::PASSED;
use crate::preference::Sample;
use astrai_files::one_line;
use astrai_serve::template::{ChatTemplate, Message};
use astrai_serve::tokenizer::{self, Tokenizer};
use serde_json::{Map, Value};
use std::cell::Cell;
use std::ops::Deref;

/// A JSON record.
pub(super) type Record = Map<String, Value>;

/// Numbers of several answers.
type Rows = Vec<Vec<i32>>;

/// The domain of records that name none.
const DEFAULT: &str = "__default__";

/// What a key of a record holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Ids or a mask.
    Ints(Vec<i32>),
    /// The same for each of several answers.
    Rows(Vec<Vec<i32>>),
    /// Rewards and the like.
    Floats(Vec<f32>),
}

/// A record that was made.
#[derive(Clone, Debug, PartialEq)]
pub struct Prepared {
    /// Its domain.
    pub domain: String,
    /// Its keys, the first of which counts its tokens.
    pub keys: Vec<(String, Values)>,
    /// Whether `max_seq_len` cut something of it.
    pub cut: bool,
}

impl Prepared {
    /// Tokens of its first key.
    pub fn tokens(&self) -> u64 {
        match self.keys.first() {
            Some((_, Values::Ints(ids))) => ids.len() as u64,
            Some((_, Values::Rows(rows))) => rows.iter().map(|row| row.len() as u64).sum(),
            _ => 0,
        }
    }
}

/// Why a record gives nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Nothing {
    /// It is left out, for a reason that is counted.
    Dropped(&'static str),
    /// It is wrong, as this line says.
    Wrong(String),
}

impl From<String> for Nothing {
    fn from(line: String) -> Nothing {
        Nothing::Wrong(line)
    }
}

/// Makes records.
pub struct Builder {
    config: Config,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    bos: Option<u32>,
}

impl Builder {
    /// A builder for a configuration, with the tokenizer's own template.
    ///
    /// # Errors
    /// The configuration wants a template, and the tokenizer has none.
    pub fn new(config: Config, tokenizer: Tokenizer) -> Result<Builder, DataError> {
        let folder = tokenizer.path().parent().unwrap_or(std::path::Path::new("")).to_path_buf();
        let template = ChatTemplate::open(&folder).map_err(|e| DataError::Options(e.to_string()))?;
        let of_sources = config.input.sources.iter().flatten().flat_map(|(_, s)| &s.sections);
        let mut sections = config.input.sections.iter().flatten().chain(of_sources);
        let needs = sections.any(|s| s.template)
            || config.input.dpo.is_some()
            || config.input.grpo.is_some()
            || config.input.kto.is_some();
        if needs && template.is_none() {
            let message =
                "has no chat template beside it, and conversations need one; put chat_template.jinja there";
            return Err(DataError::refused(tokenizer.path(), message));
        }
        let bos = tokenizer.special().bos.as_ref().map(|token| token.id);
        Ok(Builder { config, tokenizer, template, bos })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// What a run's results depend on beside the configuration and the input.
    pub(super) fn identity(&self) -> String {
        let source = self.template.as_ref().map(|t| t.source(None, false).unwrap_or_default().to_string());
        format!("{} {}", self.tokenizer.sha256(), source.unwrap_or_default())
    }

    /// A record from a line of JSON.
    pub fn line(&self, line: &[u8]) -> Result<Prepared, Nothing> {
        let record: Record = serde_json::from_slice(line)
            .map_err(|e| format!("is no JSON object ({}); mend or remove it", one_line(&e.to_string())))?;
        self.record(&record)
    }

    /// A record.
    pub fn record(&self, record: &Record) -> Result<Prepared, Nothing> {
        let (input, one) = (&self.config.input, One { builder: self, cut: Cell::new(false) });
        let keys = match (&input.sections, &input.sources, &input.dpo, &input.grpo, &input.kto) {
            (Some(sections), ..) => one.sequence(record, sections)?,
            (_, Some(sources), ..) => one.sources(record, sources)?,
            (_, _, Some(fields), ..) => one.preference(record, fields)?,
            (.., Some(fields), _) => one.group(record, fields)?,
            (.., Some(fields)) => one.labelled(record, fields)?,
            _ => return Err("the configuration says of no field what to read".to_string().into()),
        };
        Ok(Prepared { domain: self.domain(record)?, keys, cut: one.cut.get() })
    }

    fn domain(&self, record: &Record) -> Result<String, Nothing> {
        let Some(key) = &self.config.output.domain_key else { return Ok(DEFAULT.into()) };
        let name = match record.get(key).filter(|value| !value.is_null()) {
            None => return Ok(DEFAULT.into()),
            Some(Value::String(name)) => name,
            Some(_) => {
                return Err(format!("`{key}` is no text, and names the record's domain; mend it").into());
            }
        };
        let taken = |known: &str| name.eq_ignore_ascii_case(known);
        let plain = !name.is_empty() && name.len() <= 100 && !name.starts_with('.');
        let free =
            !PASSED.iter().chain(&tokenizer::FILES).chain(&[PROGRESS, DATASET]).any(|known| taken(known));
        match plain && free && name.chars().all(|c| !c.is_control() && c != '/' && c != '\\') {
            true => Ok(name.clone()),
            false => Err(format!("`{key}` {:?} is no name of a folder; mend it", one_line(name)).into()),
        }
    }
}

/// The making of a record.
struct One<'a> {
    builder: &'a Builder,
    /// Whether something was cut.
    cut: Cell<bool>,
}

impl Deref for One<'_> {
    type Target = Builder;

    fn deref(&self) -> &Builder {
        self.builder
    }
}

impl One<'_> {
    fn sequence(&self, record: &Record, sections: &[Section]) -> Result<Vec<(String, Values)>, Nothing> {
        let sample = self.sections(record, sections, true)?;
        if self.config.learns_all() {
            return Ok(vec![("sequence".into(), Values::Ints(sample.ids))]);
        }
        self.check("loss_mask", self.kept(&sample.trained))?;
        Ok(masked("sequence", "loss_mask", sample))
    }

    /// What stays of a sequence's mask where packing cuts it; all of it where the rest becomes a sequence of its own.
    fn kept<'a>(&self, mask: &'a [bool]) -> &'a [bool] {
        let p = &self.config.preprocessing;
        match pieces(&[mask.len()], p.max_packed_len, p.packing, p.truncation).as_slice() {
            [one] => &mask[one.begin..one.end],
            _ => mask,
        }
    }

    /// Refuses a mask that teaches nothing, or everything.
    fn check(&self, key: &str, mask: &[bool]) -> Result<(), Nothing> {
        let learnt = mask.iter().filter(|m| **m).count();
        if learnt > 0 && learnt < mask.len() {
            return Ok(());
        }
        if self.config.preprocessing.degenerate == Degenerate::Drop {
            return Err(Nothing::Dropped("mask all 0 or all 1"));
        }
        let what = if learnt == 0 { "none of" } else { "all of" };
        let n = mask.len();
        Err(format!("`{key}` would be the same throughout: {what} its {n} tokens (max_seq_len {}) would be learnt; mend the record or the roles in `mask`, or set `degenerate` to drop", self.config.preprocessing.max_seq_len).into())
    }

    /// The ids of fields one after another.
    fn sections(&self, record: &Record, sections: &[Section], top: bool) -> Result<Sample, Nothing> {
        let has_template = sections.iter().any(|s| s.template);
        let all_text = sections.iter().all(Section::learns_all);
        let (mut sample, mut first, mut found) = (Sample::default(), true, false);
        for section in sections {
            let value = record.get(&section.field).filter(|v| !v.is_null());
            let part = match (section.template, value) {
                (_, None) => continue,
                (true, Some(messages)) => match self.messages(record, section, messages)? {
                    Some(done) => done,
                    None => continue,
                },
                (false, Some(Value::String(text))) if text.trim().is_empty() => continue,
                (false, Some(Value::String(text))) => {
                    self.check_length(text, all_text && self.config.input.sections.is_some())?;
                    let special = section.add_special_tokens.unwrap_or(!section.template && first);
                    let ids = self.tokenizer.encode(text, special).map_err(|e| e.to_string())?;
                    let trained = vec![section.action == Action::Train; ids.len()];
                    Sample { ids: ids.into_iter().map(|id| id as i32).collect(), trained }
                }
                (false, Some(_)) => return Err(format!("`{}` is no text; mend it", section.field).into()),
            };
            if let Some(bos) = self.bos.filter(|_| top && has_template && first)
                && part.ids.first() != Some(&(bos as i32))
            {
                sample.ids.push(bos as i32);
                sample.trained.push(false);
            }
            sample.ids.extend(part.ids);
            sample.trained.extend(part.trained);
            (first, found) = (false, true);
        }
        if !found {
            return Err(Nothing::Dropped(if has_template { "no messages" } else { "no text" }));
        }
        self.cut(&mut sample);
        Ok(sample)
    }

    fn cut(&self, sample: &mut Sample) {
        let most = self.config.preprocessing.max_seq_len;
        self.cut.set(self.cut.get() || sample.ids.len() > most);
        sample.ids.truncate(most);
        sample.trained.truncate(most);
    }

    fn check_length(&self, text: &str, bounded: bool) -> Result<(), Nothing> {
        let p = &self.config.preprocessing;
        // Characters are counted only where bytes do not tell.
        if bounded && text.len() < p.min_chars.saturating_mul(4) && text.chars().count() < p.min_chars {
            return Err(Nothing::Dropped("shorter than min_chars"));
        }
        if bounded && text.len() > p.max_chars && text.chars().count() > p.max_chars {
            return Err(Nothing::Dropped("longer than max_chars"));
        }
        Ok(())
    }

    /// A conversation's ids and mask; none where it is empty.
    fn messages(
        &self,
        record: &Record,
        section: &Section,
        messages: &Value,
    ) -> Result<Option<Sample>, Nothing> {
        if messages.as_array().is_some_and(Vec::is_empty) {
            return Ok(None);
        }
        let messages = Message::list(messages.clone()).map_err(|e| format!("`{}`: {e}", section.field))?;
        let conversation = self.conversation(record, messages)?;
        let action = |role: &str| match section.action {
            Action::Role => self.config.mask.get(role).copied().unwrap_or(self.config.mask_default),
            other => other,
        };
        let rendered = conversation.render(self.config.mask_by, &|role| action(role) == Action::Train)?;
        Ok(Some(encode(&self.tokenizer, &rendered)?))
    }

    fn conversation(&self, record: &Record, messages: Vec<Message>) -> Result<Conversation<'_>, Nothing> {
        let template = self.template.as_ref().ok_or("the tokenizer has no chat template".to_string())?;
        let variables = &self.config.template_variables;
        Ok(Conversation::new(template, messages, record.get("tools"), variables)?)
    }

    fn sources(
        &self,
        record: &Record,
        sources: &std::collections::BTreeMap<String, Source>,
    ) -> Result<Vec<(String, Values)>, Nothing> {
        let mut keys = Vec::new();
        for (key, source) in sources {
            let field = &source.sections[0].field;
            if source.sections[0].action == Action::Value {
                keys.push((key.clone(), Values::Floats(numbers(record, field)?)));
                continue;
            }
            if source.list_field {
                let [ids, masks] = self.list(record, source)?;
                keys.push((key.clone(), Values::Rows(ids)));
                let mask = source.mask_key.clone().unwrap_or(format!("{key}_mask"));
                keys.push((mask, Values::Rows(masks)));
                continue;
            }
            let sample = self.sections(record, &source.sections, true)?;
            // The configuration decides, and not the record: a key that only some records have would belong to others.
            match &source.mask_key {
                None if source.sections.iter().all(Section::learns_all) => {
                    keys.push((key.clone(), Values::Ints(sample.ids)));
                }
                mask => {
                    let mask = mask.clone().unwrap_or(format!("{key}_mask"));
                    self.check(&mask, &sample.trained)?;
                    keys.extend(masked(key, &mask, sample));
                }
            }
        }
        // Ids first: they count a record's tokens.
        keys.sort_by_key(|(_, values)| matches!(values, Values::Floats(_)));
        Ok(keys)
    }

    /// A list of answers: their ids, and their masks.
    fn list(&self, record: &Record, source: &Source) -> Result<[Rows; 2], Nothing> {
        let (mut ids, mut masks) = (Vec::new(), Vec::new());
        for section in &source.sections {
            let field = &section.field;
            let Some(Value::Array(items)) = record.get(field) else {
                return Err(format!("`{field}` is no list; mend it, or unset list_field").into());
            };
            let section = [Section { add_special_tokens: Some(false), ..section.clone() }];
            let tools = record.get("tools").map(|tools| ("tools".to_string(), tools.clone()));
            let mut one: Record = tools.into_iter().collect();
            for item in items {
                one.insert(field.clone(), item.clone());
                let sample = self.sections(&one, &section, false)?;
                masks.push(ints(&sample.trained));
                ids.push(sample.ids);
            }
        }
        if ids.is_empty() { Err(Nothing::Dropped("no answers")) } else { Ok([ids, masks]) }
    }

    fn preference(&self, record: &Record, fields: &Fields) -> Result<Vec<(String, Values)>, Nothing> {
        let side = |name: &str| answer(record, field(fields, name), name);
        let (chosen, rejected) = (side("chosen")?, side("rejected")?);
        let prompt = match prompt(record, fields)? {
            Some(prompt) => prompt,
            None => {
                let same = chosen.iter().zip(&rejected).take_while(|(a, b)| a == b).count();
                chosen[..same].to_vec()
            }
        };
        let mut keys = Vec::new();
        for (key, answer) in [("chosen", chosen), ("rejected", rejected)] {
            let (mut sample, _) = self.completion(record, &prompt, answer)?;
            self.cut(&mut sample);
            let mask = format!("{key}_mask");
            self.check(&mask, &sample.trained)?;
            keys.extend(masked(key, &mask, sample));
        }
        Ok(keys)
    }

    /// Prompt and answer, the answer learnt; and how many tokens the prompt has.
    fn completion(
        &self,
        record: &Record,
        prompt: &[Message],
        answer: Vec<Message>,
    ) -> Result<(Sample, usize), Nothing> {
        // Some publish the whole conversation as the answer.
        let begins = answer.len() > prompt.len() && answer.starts_with(prompt);
        let answer = if begins { answer[prompt.len()..].to_vec() } else { answer };
        if prompt.is_empty() || answer.is_empty() {
            return Err("prompt or answer is empty; give both".to_string().into());
        }
        let conversation = self.conversation(record, [prompt, &answer].concat())?;
        let text = conversation.text(prompt.len() + answer.len(), false)?;
        let begin = conversation.begin(&text, prompt.len(), answer[0].role() == "assistant")?;
        let rendered = Rendered { learnt: std::iter::once(begin..text.len()).collect(), text };
        let sample = encode(&self.tokenizer, &rendered)?;
        let tokens = sample.prompt();
        Ok((sample, tokens))
    }

    fn group(&self, record: &Record, fields: &Fields) -> Result<Vec<(String, Values)>, Nothing> {
        let prompt = prompt(record, fields)?.ok_or("has no `prompt`; give a text or messages".to_string())?;
        let name = field(fields, "responses");
        let Some(Value::Array(answers)) = record.get(name) else {
            return Err(format!("`{name}` is no list of answers; mend it").into());
        };
        let rewards = numbers(record, field(fields, "rewards"))?;
        if rewards.len() != answers.len() {
            let (a, r) = (answers.len(), rewards.len());
            return Err(format!("has {a} answers and {r} rewards; give each answer one").into());
        }
        let (mut prompts, mut responses) = (Vec::new(), Vec::new());
        for one in answers {
            let (sample, tokens) = self.completion(record, &prompt, as_messages(one, name, "assistant")?)?;
            let (ids, mut response) = (sample.ids[..tokens].to_vec(), sample.ids[tokens..].to_vec());
            if !responses.is_empty() && ids != prompts {
                return Err(
                    "the tokenizer joins the prompt's end with an answer's beginning; change the template"
                        .to_string()
                        .into(),
                );
            }
            let most = self.config.preprocessing.max_seq_len;
            if ids.len() >= most {
                return Err(Nothing::Dropped("prompt of max_seq_len"));
            }
            self.cut.set(self.cut.get() || response.len() > most - ids.len());
            response.truncate(most - ids.len());
            prompts = ids;
            responses.push(response);
        }
        if responses.is_empty() {
            return Err(Nothing::Dropped("no answers"));
        }
        let masks = responses.iter().map(|row: &Vec<i32>| vec![1; row.len()]).collect();
        Ok(vec![
            ("prompts".into(), Values::Ints(prompts)),
            ("responses".into(), Values::Rows(responses)),
            ("masks".into(), Values::Rows(masks)),
            ("rewards".into(), Values::Floats(rewards)),
        ])
    }

    fn labelled(&self, record: &Record, fields: &Fields) -> Result<Vec<(String, Values)>, Nothing> {
        let prompt = prompt(record, fields)?.ok_or("has no `prompt`; give a text or messages".to_string())?;
        let answer = answer(record, field(fields, "completion"), "completion")?;
        let (mut sample, _) = self.completion(record, &prompt, answer)?;
        self.cut(&mut sample);
        self.check("loss_mask", &sample.trained)?;
        let label = numbers(record, field(fields, "label"))?;
        if !matches!(label.as_slice(), [0.0 | 1.0]) {
            return Err("`label` is not one truth value; mend it".to_string().into());
        }
        let mut keys = masked("sequence", "loss_mask", sample);
        keys.push(("label".into(), Values::Floats(label)));
        Ok(keys)
    }
}

fn ints(mask: &[bool]) -> Vec<i32> {
    mask.iter().map(|&m| i32::from(m)).collect()
}

fn masked(ids: &str, mask: &str, sample: Sample) -> Vec<(String, Values)> {
    let learnt = ints(&sample.trained);
    vec![(ids.into(), Values::Ints(sample.ids)), (mask.into(), Values::Ints(learnt))]
}
