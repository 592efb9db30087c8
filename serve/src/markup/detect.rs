//! Which format a model writes: found in its chat template, which shows the model's own calls and thoughts as it was trained on them.

use std::fmt;
use std::str::FromStr;

/// How a model writes calls of tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3.
    Hermes,
    /// `{"name": …, "parameters": {…}}`, after `<|python_tag|>` or by itself: Llama 3.
    Llama3Json,
    /// `[TOOL_CALLS]` with a list of objects, or with `name[ARGS]{…}`.
    Mistral,
    /// `<｜tool▁calls▁begin｜>…`: DeepSeek V3 and R1.
    DeepseekV3,
    /// `<tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>`: GLM from 4.5 on.
    Glm4,
    /// Channels: gpt-oss. Thoughts are a channel too.
    Harmony,
    /// `<tool_call><function=name><parameter=key>…`: Qwen3-Coder.
    Qwen3Coder,
}

/// Formats by name, with a text that a template of this format has. The first that is found counts.
const FORMATS: [(&str, CallFormat, &[&str]); 7] = [
    ("harmony", CallFormat::Harmony, &["<|channel|>"]),
    ("qwen3_coder", CallFormat::Qwen3Coder, &["<function="]),
    ("glm4", CallFormat::Glm4, &["<arg_key>"]),
    ("deepseek_v3", CallFormat::DeepseekV3, &["<｜tool▁calls▁begin｜>"]),
    ("mistral", CallFormat::Mistral, &["[TOOL_CALLS]"]),
    ("hermes", CallFormat::Hermes, &["<tool_call>"]),
    ("llama3_json", CallFormat::Llama3Json, &["<|python_tag|>", "Environment: ipython"]),
];

impl CallFormat {
    /// What opens calls.
    pub(super) fn marker(self) -> &'static str {
        match self {
            CallFormat::Hermes | CallFormat::Glm4 | CallFormat::Qwen3Coder => "<tool_call>",
            CallFormat::Llama3Json => "<|python_tag|>",
            CallFormat::Mistral => "[TOOL_CALLS]",
            CallFormat::DeepseekV3 => "<｜tool▁calls▁begin｜>",
            CallFormat::Harmony => "<|channel|>",
        }
    }

    /// Tokens that mark calls, and are special in some vocabularies: they are to be seen in the text.
    fn tokens(self) -> &'static [&'static str] {
        match self {
            CallFormat::Hermes | CallFormat::Qwen3Coder => &["<tool_call>", "</tool_call>"],
            CallFormat::Glm4 => {
                &["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
            }
            CallFormat::Llama3Json => &["<|python_tag|>"],
            CallFormat::Mistral => &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            CallFormat::DeepseekV3 => &[
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁calls▁end｜>",
            ],
            CallFormat::Harmony => &super::harmony::TOKENS,
        }
    }
}

impl fmt::Display for CallFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = FORMATS.iter().find(|(_, format, _)| format == self).map_or("", |(name, ..)| name);
        f.write_str(name)
    }
}

impl FromStr for CallFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<CallFormat, String> {
        let found = FORMATS.iter().find(|(known, ..)| *known == name).map(|(_, format, _)| *format);
        let names = || FORMATS.map(|(name, ..)| name).join(", ");
        found.ok_or_else(|| format!("{name:?} is no format of tool calls; name one of {}", names()))
    }
}

/// The tags of thoughts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThoughtTags {
    /// `<think>` and `</think>`.
    Think,
    /// `[THINK]` and `[/THINK]`: Magistral.
    Bracket,
}

impl ThoughtTags {
    /// Opens a thought.
    pub fn open(self) -> &'static str {
        match self {
            ThoughtTags::Think => "<think>",
            ThoughtTags::Bracket => "[THINK]",
        }
    }

    /// Closes it.
    pub fn close(self) -> &'static str {
        match self {
            ThoughtTags::Think => "</think>",
            ThoughtTags::Bracket => "[/THINK]",
        }
    }
}

/// What of a model's text is markup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Markup {
    /// How it writes calls; none if they are text.
    pub calls: Option<CallFormat>,
    /// How it writes thoughts; none if they are text.
    pub thoughts: Option<ThoughtTags>,
}

impl Markup {
    /// What a chat template shows.
    pub fn of_template(source: &str) -> Markup {
        let has = |text: &&str| source.contains(*text);
        let calls = FORMATS.iter().find(|(.., texts)| texts.iter().any(&has)).map(|(_, f, _)| *f);
        let tags = [ThoughtTags::Think, ThoughtTags::Bracket];
        Markup { calls, thoughts: tags.into_iter().find(|tags| source.contains(tags.close())) }
    }

    /// Whether a prompt ends inside a thought.
    pub fn opens_thought(&self, prompt: &str) -> bool {
        self.thoughts.is_some_and(|tags| prompt.trim_end().ends_with(tags.open()))
    }

    /// Special tokens that are to be seen in the text of an answer whose calls are read, or are not.
    pub fn tokens(&self, calls: bool) -> Vec<&'static str> {
        let format = self.calls.filter(|format| calls || *format == CallFormat::Harmony);
        let of_thoughts = self.thoughts.iter().flat_map(|tags| [tags.open(), tags.close()]);
        format.map_or(&[][..], CallFormat::tokens).iter().copied().chain(of_thoughts).collect()
    }
}
