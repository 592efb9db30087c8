//! The declarative configuration of preprocessing, as AstrAI's pipelines have it, with what is this program's own marked. In: JSON,
//! hostile until checked. Out: what to read from a record, what of it is learnt, how sequences are cut, packed and stored.

use crate::data::packing::{Bins, Truncation};
use crate::data::store::{Element, Layout};
use crate::data::{DataError, Kind};
use astrai_files::one_line;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Longest configuration that is read, bytes.
const LONGEST: u64 = 1 << 24;

/// A pipeline.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Version of the format: 1.
    pub version: u64,
    /// What to read from a record.
    pub input: Input,
    /// What of a conversation is learnt, by role.
    pub mask: BTreeMap<String, Action>,
    /// The same for roles that `mask` does not name.
    pub mask_default: Action,
    /// How the turns of a conversation are found in its text. Own key.
    pub mask_by: MaskBy,
    /// Lengths, packing.
    pub preprocessing: Processing,
    /// Where and how results are written.
    pub output: Output,
    /// The tokenizer's file or folder; a flag wins.
    #[serde(alias = "tokenizer_path")]
    pub tokenizer: Option<PathBuf>,
    /// Further variables of the chat template (`enable_thinking`, …). Own key.
    pub template_variables: Map<String, Value>,
}

/// What is read: one of these.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Input {
    /// Files and folders of JSON lines; flags win. Own key.
    pub files: Vec<PathBuf>,
    /// One sequence a record.
    pub sections: Option<Vec<Section>>,
    /// Several keys a record.
    pub sources: Option<BTreeMap<String, Source>>,
    /// Preferences as published: `prompt` (or `input`), `chosen`, `rejected`, each a text or messages. Own key.
    pub dpo: Option<Fields>,
    /// Answers with rewards: `prompt`, `responses`, `rewards`. Own key.
    pub grpo: Option<Fields>,
    /// Answers with a label: `prompt`, `completion`, `label`. Own key.
    pub kto: Option<Fields>,
}

/// Under which names a record has fields that are called otherwise here.
pub type Fields = BTreeMap<String, String>;

/// What happens to the tokens of a field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub enum Action {
    /// They are learnt.
    #[serde(rename = "train")]
    Train,
    /// They are read only.
    #[default]
    #[serde(rename = "mask")]
    Mask,
    /// As `mask` says of the speaker's role.
    #[serde(rename = "$role")]
    Role,
    /// The field is a number or a list of them, and no text.
    #[serde(rename = "value")]
    Value,
}

/// A field of a record.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Section {
    /// Its name.
    pub field: String,
    /// What happens to its tokens.
    pub action: Action,
    /// Whether it is a list of messages for the chat template.
    #[serde(default)]
    pub template: bool,
    /// Whether the tokenizer's own special tokens surround it; by default those of the first text.
    #[serde(default)]
    pub add_special_tokens: Option<bool>,
}

impl Section {
    /// Whether every token of it is learnt, whatever a record holds.
    pub fn learns_all(&self) -> bool {
        self.action == Action::Train && !self.template
    }
}

/// A key made of fields.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// The fields.
    pub sections: Vec<Section>,
    /// Whether the field is a list, each element a row.
    #[serde(default)]
    pub list_field: bool,
    /// The key of the mask; `KEY_mask` where it is not named.
    #[serde(default)]
    pub mask_key: Option<String>,
}

/// How the turns of a conversation are found in its text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MaskBy {
    /// By `{% generation %}` blocks where the template has them, else by difference
    #[default]
    Auto,
    /// By the template's `{% generation %}` blocks
    Generation,
    /// By rendering the conversation up to each turn
    Difference,
}

/// What is done with a record of which nothing, or everything, would be learnt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Degenerate {
    /// It ends the run
    #[default]
    Error,
    /// It is left out, and counted
    Drop,
}

/// Lengths and packing.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Processing {
    /// Tokens of a sequence; the rest is cut off its end.
    pub max_seq_len: usize,
    /// Texts that are learnt whole and are shorter are left out; characters.
    pub min_chars: usize,
    /// And those that are longer.
    pub max_chars: usize,
    /// Records to write at most.
    pub max_items: Option<u64>,
    /// Records that a thread takes at a time.
    pub batch_size: usize,
    /// How documents share sequences.
    #[serde(alias = "packing_strategy")]
    pub packing: Bins,
    /// Tokens of a sequence that documents share.
    pub max_packed_len: usize,
    /// What stays of a document longer than that.
    #[serde(alias = "truncation_mode")]
    pub truncation: Truncation,
    /// What is done with a mask that is all 0 or all 1. Own key.
    pub degenerate: Degenerate,
}

/// How results are written.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Output {
    /// The field that names a record's domain, which has a folder of its own.
    pub domain_key: Option<String>,
    /// `bin`, `h5` or `jsonl`.
    pub storage_format: String,
    /// Tokens after which shards are closed.
    pub max_tokens_per_shard: u64,
    /// Types of numbers, by key.
    pub dtype: BTreeMap<String, String>,
    /// Whether and how `position_ids` are written.
    pub position_ids_mode: Positions,
    /// Shares in which `astrai train` mixes the domains. Own key.
    pub weights: BTreeMap<String, f64>,
    /// HDF5 in packed chunks. Own key.
    pub gzip: bool,
}

/// Positions beside a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Positions {
    /// None: documents are not told apart
    None,
    /// From 0 in each document
    #[default]
    DocReset,
    /// From 0 in each shard, on and on
    Continuous,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            version: 1,
            input: Input::default(),
            mask: BTreeMap::new(),
            mask_default: Action::Mask,
            mask_by: MaskBy::Auto,
            preprocessing: Processing::default(),
            output: Output::default(),
            tokenizer: None,
            template_variables: Map::new(),
        }
    }
}

impl Default for Processing {
    fn default() -> Processing {
        Processing {
            max_seq_len: 2048,
            min_chars: 50,
            max_chars: 2_000_000,
            max_items: None,
            batch_size: 256,
            packing: Bins::Simple,
            max_packed_len: 8192,
            truncation: Truncation::KeepStart,
            degenerate: Degenerate::Error,
        }
    }
}

impl Default for Output {
    fn default() -> Output {
        Output {
            domain_key: None,
            storage_format: "bin".into(),
            max_tokens_per_shard: 100_000_000,
            dtype: BTreeMap::new(),
            position_ids_mode: Positions::DocReset,
            weights: BTreeMap::new(),
            gzip: false,
        }
    }
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// It is no configuration, or asks for what cannot be.
    pub fn read(path: &Path) -> Result<Config, DataError> {
        let text = astrai_files::read_text(path, LONGEST)?;
        Config::parse(&text).map_err(|message| DataError::refused(path, message))
    }

    /// The same of a text.
    ///
    /// # Errors
    /// As [`read`](Self::read), in words without a file.
    pub fn parse(text: &str) -> Result<Config, String> {
        let config: Config = serde_json::from_str(text).map_err(|e| {
            format!("is no configuration ({}); see docs/training.md", one_line(&e.to_string()))
        })?;
        config.check()?;
        Ok(config)
    }

    /// The configuration for records in the usual form of a strategy: text under `text`, chats under `messages`, and what
    /// [`Input`] says of the others; sequences of at most `length` tokens, packed where several fit.
    pub fn of(kind: Kind, length: usize) -> Config {
        let section = |field: &str, action, template| Section {
            field: field.into(),
            action,
            template,
            add_special_tokens: None,
        };
        let mut config = Config::default();
        config.mask.insert("assistant".into(), Action::Train);
        let input = &mut config.input;
        match kind {
            Kind::Seq => input.sections = Some(vec![section("text", Action::Train, false)]),
            Kind::Sft => input.sections = Some(vec![section("messages", Action::Role, true)]),
            Kind::Dpo => input.dpo = Some(Fields::new()),
            Kind::Grpo => input.grpo = Some(Fields::new()),
            Kind::Kto => input.kto = Some(Fields::new()),
        }
        let p = &mut config.preprocessing;
        (p.max_seq_len, p.max_packed_len, p.min_chars) = (length, length, 0);
        if matches!(kind, Kind::Seq | Kind::Sft) {
            p.packing = Bins::Bfd;
        }
        config
    }

    /// What becomes of its records.
    pub fn kind(&self) -> Option<Kind> {
        let input = &self.input;
        match (&input.sections, &input.dpo, &input.grpo, &input.kto) {
            (Some(_), ..) => Some(if self.learns_all() { Kind::Seq } else { Kind::Sft }),
            (_, Some(_), ..) => Some(Kind::Dpo),
            (_, _, Some(_), _) => Some(Kind::Grpo),
            (.., Some(_)) => Some(Kind::Kto),
            _ => None,
        }
    }

    /// Whether every token of a sequence is learnt, so that no mask is written.
    pub fn learns_all(&self) -> bool {
        self.input.sections.as_ref().is_some_and(|sections| sections.iter().all(Section::learns_all))
    }

    /// How results are laid out.
    pub fn layout(&self) -> Option<Layout> {
        match self.output.storage_format.as_str() {
            "bin" => Some(Layout::Bin),
            "h5" | "hdf5" => Some(Layout::Hdf5),
            "jsonl" => Some(Layout::Jsonl),
            _ => None,
        }
    }

    /// The type of a key's numbers.
    pub fn element(&self, key: &str, float: bool) -> Element {
        let named = self.output.dtype.get(key).and_then(|name| Element::parse(name));
        let usual = match (float, is_mask(key)) {
            (true, _) => Element::Float32,
            (false, true) => Element::Bool,
            (false, false) => Element::Int32,
        };
        named.unwrap_or(usual)
    }

    fn check(&self) -> Result<(), String> {
        let refuse = |line: String| Err(one_line(&line));
        if self.version != 1 {
            return refuse(format!("`version` is {}; 1 is what is read here", self.version));
        }
        let input = &self.input;
        let given = [
            input.sections.is_some(),
            input.sources.is_some(),
            input.dpo.is_some(),
            input.grpo.is_some(),
            input.kto.is_some(),
        ];
        if given.iter().filter(|g| **g).count() != 1 {
            return refuse("`input` must have exactly one of sections, sources, dpo, grpo and kto".into());
        }
        let named = [(&input.dpo, DPO), (&input.grpo, GRPO), (&input.kto, KTO)];
        for (fields, known) in named {
            let unknown = fields.iter().flatten().find(|(name, _)| !known.contains(&name.as_str()));
            if let Some((name, _)) = unknown {
                return refuse(format!("`input`: field {name:?} is none of {}", known.join(", ")));
            }
        }
        let p = &self.preprocessing;
        let sizes = [
            ("max_seq_len", p.max_seq_len as u64),
            ("max_packed_len", p.max_packed_len as u64),
            ("batch_size", p.batch_size as u64),
            ("max_tokens_per_shard", self.output.max_tokens_per_shard),
        ];
        // A shard may have one sequence more than its tokens: positions in it fit 32 bits.
        if let Some((name, n)) = sizes.iter().find(|(_, n)| !(1..=1 << 30).contains(n)) {
            return refuse(format!("`{name}` is {n}; choose one from 1 to {}", 1 << 30));
        }
        if p.packing != Bins::Simple && input.sections.is_none() {
            return refuse("`packing`: only records of `sections` share sequences; choose simple".into());
        }
        if let Some(name) = self.output.dtype.values().find(|name| Element::parse(name).is_none()) {
            return refuse(format!("`dtype`: {name:?} is no type of number; write int32, say"));
        }
        if self.layout().is_none() {
            let format = &self.output.storage_format;
            return refuse(format!("`storage_format` {format:?} is none of bin, h5, jsonl"));
        }
        if let Some((domain, w)) = self.output.weights.iter().find(|(_, w)| !w.is_finite() || **w <= 0.0) {
            return refuse(format!("`weights`: {domain:?} has {w}; give each domain one above 0"));
        }
        if self.output.gzip && self.layout() != Some(Layout::Hdf5) {
            return refuse("`gzip` packs chunks of h5; set `storage_format` to h5, or leave it out".into());
        }
        if !self.output.weights.is_empty() && self.output.domain_key.is_none() {
            return refuse(
                "`weights` are of domains; name the field of a record's domain with `domain_key`".into(),
            );
        }
        self.check_sections()
    }

    fn check_sections(&self) -> Result<(), String> {
        let of_sources = self.input.sources.iter().flatten().map(|(key, s)| (key.as_str(), &s.sections));
        let of_input = self.input.sections.iter().map(|s| ("sequence", s));
        for (key, sections) in of_sources.chain(of_input) {
            if sections.is_empty() {
                return Err(format!("`{key}` has no sections; name a field"));
            }
            let has_value = sections.iter().any(|s| s.action == Action::Value);
            if has_value && (sections.len() > 1 || self.input.sections.is_some()) {
                return Err(format!("`{key}`: a value stands alone, in a source of its own"));
            }
            if let Some(s) = sections.iter().find(|s| s.action == Action::Role && !s.template) {
                return Err(format!(
                    "`{}`: only messages have roles; set template, or choose train or mask",
                    s.field
                ));
            }
        }
        match self
            .mask
            .values()
            .chain([&self.mask_default])
            .any(|a| matches!(a, Action::Role | Action::Value))
        {
            true => Err("`mask` says train or mask of each role".into()),
            false => Ok(()),
        }
    }
}

/// Whether a key holds which tokens of another are learnt.
pub(super) fn is_mask(key: &str) -> bool {
    key.ends_with("mask") || key == "masks"
}

/// Fields of the records that need no sections.
const DPO: &[&str] = &["prompt", "chosen", "rejected"];
const GRPO: &[&str] = &["prompt", "responses", "rewards"];
const KTO: &[&str] = &["prompt", "completion", "label"];
