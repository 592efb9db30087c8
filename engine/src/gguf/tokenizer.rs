//! The tokenizer of a GGUF file. In: its metadata. Out: `tokenizer.json` and `tokenizer_config.json` as transformers lays them out.

use astrai_runtime::weights::Gguf;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

/// A way to split texts.
struct Splits {
    /// What files call it.
    names: &'static [&'static str],
    /// Rules, one after another.
    rules: &'static [&'static str],
    /// Whether GPT-2's own rule follows.
    gpt2: bool,
    /// Whether a word that is a token is taken whole, whatever is merged.
    whole: bool,
    /// Whether texts begin with the token for it where files do not say.
    begins: bool,
}

const SPLITS: [Splits; 10] = [
    Splits { names: &["gpt-2", "olmo"], rules: &[], gpt2: true, whole: false, begins: false },
    Splits { names: &["smollm"], rules: &[r"\p{N}"], gpt2: true, whole: false, begins: false },
    Splits {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3"],
        rules: &[THREES],
        gpt2: false,
        whole: true,
        begins: true,
    },
    Splits {
        names: &["dbrx", "smaug-bpe", "chatglm-bpe"],
        rules: &[THREES],
        gpt2: false,
        whole: false,
        begins: false,
    },
    Splits { names: &["glm4"], rules: &[THREES], gpt2: false, whole: true, begins: false },
    Splits {
        names: &["qwen2", "deepseek-r1-qwen", "megrez"],
        rules: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        gpt2: false,
        whole: false,
        begins: false,
    },
    Splits {
        names: &["gpt-4o"],
        rules: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        gpt2: false,
        whole: false,
        begins: false,
    },
    // Mistral's since Nemo.
    Splits {
        names: &["tekken"],
        rules: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        gpt2: false,
        whole: true,
        begins: true,
    },
    // DeepSeek's up to V2: line ends, cased letters, marks, spaces at the end, letters of East Asia, digits.
    Splits {
        names: &["deepseek-llm"],
        rules: &[
            r"[\r\n]",
            CASED,
            "\\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+",
            r"\s+$",
            "[一-龥\u{800}-一가-\u{D7FF}]+",
            r"\p{N}",
        ],
        gpt2: false,
        whole: false,
        begins: false,
    },
    // DeepSeek-V3's: numbers, then Chinese and Japanese, then the rest.
    Splits {
        names: &["deepseek-v3"],
        rules: &[
            r"\p{N}{1,3}",
            "[一-龥\u{3040}-ゟ゠-ヿ]+",
            r"[!\x22#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        gpt2: false,
        whole: false,
        begins: false,
    },
];

/// Words with their contractions, and up to three digits together.
const THREES: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Cased letters as DeepSeek's tokenizers name them, which are not all that Unicode has today.
const CASED: &str = "\\s?[\
    A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u{1F7D}ᾀ-ᾴᾶ-ᾼ\
    \u{1FBE}ῂ-ῄῆ-ῌῐ-\u{1FD3}ῖ-\u{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u{2126}ℨ\u{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆ\
    ﬓ-ﬗＡ-Ｚａ-ｚ\u{10400}-\u{1044F}\u{104B0}-\u{104D3}\u{104D8}-\u{104FB}\u{10C80}-\u{10CB2}\u{10CC0}-\u{10CF2}\
    \u{118A0}-\u{118DF}\u{1E900}-\u{1E943}\
    ]+";

/// Bytes of the longest token of SentencePiece's that is made of two others.
const LONGEST: usize = 512;

/// `tokenizer.json`. Its long lists are written from where the file has them: with 150,000 tokens a tree of JSON takes longer than a small model's
/// weights.
#[derive(Serialize)]
struct Made<'a> {
    #[serde(flatten)]
    rest: Value,
    model: Bpe<'a>,
}

/// Its model.
#[derive(Serialize)]
struct Bpe<'a> {
    #[serde(flatten)]
    rest: Value,
    #[serde(serialize_with = "ids")]
    vocab: &'a [Cow<'a, str>],
    merges: Merges<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Merges<'a> {
    Lines(Vec<Cow<'a, str>>),
    Pairs(Vec<[&'a str; 2]>),
}

/// Each token with its place, the first one where it is there twice.
fn ids<S: Serializer>(tokens: &&[Cow<str>], to: S) -> Result<S::Ok, S::Error> {
    let mut seen = HashSet::with_capacity(tokens.len());
    to.collect_map(tokens.iter().enumerate().filter(|(_, token)| seen.insert(&***token)).map(|(i, t)| (t, i)))
}

/// `tokenizer.json` and `tokenizer_config.json`.
pub(super) fn tokenizer(file: &Gguf) -> Result<(String, Value), String> {
    let all = file.metadata();
    let get = |key: &str| all.get(&format!("tokenizer.ggml.{key}"));
    let list = |key: &str| get(key).and_then(Value::as_array);
    let texts = |key: &str| file.texts(&format!("tokenizer.ggml.{key}"));
    let tokens =
        texts("tokens").ok_or("has no `tokenizer.ggml.tokens`; convert the model with its tokenizer")?;
    let tokens: Vec<Cow<str>> = tokens.collect();
    let kinds = list("token_type");
    let kind = |i: usize| kinds.and_then(|l| l.get(i)?.as_u64()).unwrap_or(1);
    // Phi-3's own tokenizer takes the space behind its tokens for their part; files do not say so.
    let phi3 =
        all.get("general.architecture") == Some(&json!("phi3")) && get("model") == Some(&json!("llama"));
    let strips = |token: &str| phi3 && !["<unk>", "<s>", "<|endoftext|>"].contains(&token);
    // 3 is a control token, 4 one that users defined: neither is split.
    let added = (0..tokens.len()).filter(|i| matches!(kind(*i), 3 | 4)).map(|i| {
        json!({
            "id": i, "content": tokens[i], "single_word": false, "lstrip": false, "rstrip": strips(&tokens[i]),
            "normalized": false, "special": kind(i) == 3,
        })
    });
    let mut made = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
    });
    let named = |key: &str| {
        let id = get(&format!("{key}_token_id")).and_then(Value::as_u64)?;
        tokens.get(usize::try_from(id).ok()?).map(|t| (&**t, id))
    };
    let (model, pre) = (get("model").and_then(Value::as_str), get("pre").and_then(Value::as_str));
    let mut usual = model == Some("llama");
    let model = match model {
        Some("gpt2") => {
            let splits = splits(pre.unwrap_or("default"))?;
            usual = splits.begins;
            let merges = texts("merges").ok_or("has no `tokenizer.ggml.merges`")?;
            byte_level(&mut made, splits, &tokens, merges.collect())
        }
        Some("llama") => sentence_pieces(&mut made, &tokens, list("scores"), get("add_space_prefix")),
        Some(other) => {
            return Err(format!(
                "`tokenizer.ggml.model` is {other:?}; tokenizers of gpt2 and llama are read"
            ));
        }
        None => return Err("has no `tokenizer.ggml.model`".into()),
    };
    // SentencePiece's and some others begin every text with their token unless the file says otherwise.
    let begins = get("add_bos_token").and_then(Value::as_bool).unwrap_or(usual);
    if let Some((bos, id)) = named("bos").filter(|_| begins) {
        let first = json!({ "SpecialToken": { "id": bos, "type_id": 0 } });
        let text = |id: &str| json!({ "Sequence": { "id": id, "type_id": 0 } });
        made["post_processor"] = json!({
            "type": "TemplateProcessing", "single": [first, text("A")], "pair": [first, text("A"), text("B")],
            "special_tokens": { bos: { "id": bos, "ids": [id], "tokens": [bos] } },
        });
    }
    let mut config = json!({ "add_bos_token": begins, "clean_up_tokenization_spaces": false });
    for (key, of) in
        [("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")]
    {
        if let Some((token, _)) = named(of) {
            config[key] = token.into();
        }
    }
    if let Some(template) = all.get("tokenizer.chat_template") {
        config["chat_template"] = template.clone();
    }
    let made = serde_json::to_string(&Made { rest: made, model }).map_err(|e| e.to_string())?;
    Ok((made, config))
}

/// How texts are split that files call `pre`.
fn splits(pre: &str) -> Result<&'static Splits, String> {
    SPLITS.iter().find(|s| s.names.contains(&pre)).ok_or_else(|| {
        let known: Vec<&str> = SPLITS.iter().flat_map(|s| s.names).copied().collect();
        format!("its tokenizer splits texts as `{pre}` does; read are {}", known.join(", "))
    })
}

/// Byte-level BPE.
fn byte_level<'a>(
    made: &mut Value,
    splits: &Splits,
    vocab: &'a [Cow<'a, str>],
    merges: Vec<Cow<'a, str>>,
) -> Bpe<'a> {
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": splits.gpt2 });
    made["decoder"] = bytes.clone();
    let split = |regex: &&str| json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false });
    made["pre_tokenizer"] = match splits.rules.is_empty() {
        true => bytes,
        false => {
            let all: Vec<Value> = splits.rules.iter().map(split).chain([bytes]).collect();
            json!({ "type": "Sequence", "pretokenizers": all })
        }
    };
    let rest = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
        "fuse_unk": false, "byte_fallback": false, "ignore_merges": splits.whole,
    });
    Bpe { rest, vocab, merges: Merges::Lines(merges) }
}

/// SentencePiece's BPE: merges are all ways to make a token of two, the likeliest first; bytes stand for characters that no token has.
fn sentence_pieces<'a>(
    made: &mut Value,
    tokens: &'a [Cow<'a, str>],
    scores: Option<&Vec<Value>>,
    prefix: Option<&Value>,
) -> Bpe<'a> {
    let ids: HashMap<&str, usize> = tokens.iter().enumerate().rev().map(|(i, t)| (&**t, i)).collect();
    let score = |i: usize| scores.and_then(|s| s.get(i)?.as_f64()).unwrap_or(0.0);
    let mut merges = Vec::new();
    // Longer ones are no words: each of their cuts would be looked up whole.
    for (i, token) in tokens.iter().enumerate().filter(|(_, t)| t.len() <= LONGEST) {
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let mut ways: Vec<_> = cuts.filter_map(|(a, b)| Some((*ids.get(a)?, *ids.get(b)?))).collect();
        ways.sort_unstable();
        merges.extend(ways.into_iter().map(|(a, b)| (score(i), [&*tokens[a], &*tokens[b]])));
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0));
    let merges = Merges::Pairs(merges.into_iter().map(|(_, pair)| pair).collect());
    let space = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let prefixed = prefix.and_then(Value::as_bool).unwrap_or(true);
    made["normalizer"] = match prefixed {
        true => json!({ "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": "▁" }, space] }),
        false => space,
    };
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefixed {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    made["decoder"] = json!({ "type": "Sequence", "decoders": decoders });
    let rest = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
        "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
    });
    Bpe { rest, vocab: tokens, merges }
}

#[cfg(test)]
mod tests {
    use super::*;
    use astrai_serve::tokenizer::Tokenizer;
    use std::collections::BTreeSet;

    /// A byte as byte-level vocabularies write it.
    fn written(byte: u8) -> char {
        let shown = |b: &u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
        let hidden = (0..byte).filter(|b| !shown(b)).count() as u32;
        char::from_u32(if shown(&byte) { u32::from(byte) } else { 256 + hidden }).unwrap()
    }

    #[test]
    fn the_documents_name_every_rule_of_splitting() {
        let text = include_str!("../../../docs/serving.md");
        let list = text
            .split("whose texts are split as")
            .nth(1)
            .and_then(|rest| rest.split("; others").next())
            .unwrap();
        let told: BTreeSet<&str> = list.split('`').skip(1).step_by(2).collect();
        assert_eq!(told, SPLITS.iter().flat_map(|rule| rule.names).copied().collect());
    }

    /// Where texts are split, by the rules of tiktoken, mistral-common and published tokenizers in Hugging Face's library.
    #[test]
    fn texts_are_split_as_files_say() {
        const TEXT: &str = "It's theXMLParser/ 1234 你好 été!!\n\n  END ա ";
        for (name, pieces) in [
            ("gpt-2", "It|'s| theXMLParser|/| 1234| 你好| été|!!|\n\n | END| ա| "),
            ("smollm", "It|'s| theXMLParser|/| |1|2|3|4| 你好| été|!!|\n\n | END| ա| "),
            ("glm4", "It|'s| theXMLParser|/| |123|4| 你好| été|!!\n\n| | END| ա| "),
            ("gpt-4o", "It's| the|XMLParser|/| |123|4| 你好| été|!!\n\n| | END| ա| "),
            ("tekken", "It|'s| the|XMLParser|/| |1|2|3|4| 你好| été|!!\n\n| | END| ա| "),
            ("deepseek-llm", "It|'|s| theXMLParser|/| |1|2|3|4| |你好| é|t|é|!!|\n|\n| | END| ա| "),
        ] {
            let pieces: Vec<&str> = pieces.split('|').collect();
            assert_eq!(pieces.concat(), TEXT);
            let mut tokens: Vec<Cow<str>> = (0..=255).map(|b| written(b).to_string().into()).collect();
            let ids: Vec<u32> = pieces
                .iter()
                .map(|piece| {
                    let piece: String = piece.bytes().map(written).collect();
                    let known = tokens.iter().position(|token| *token == piece);
                    let id = known.unwrap_or(tokens.len());
                    tokens.extend(known.is_none().then(|| piece.into()));
                    u32::try_from(id).unwrap()
                })
                .collect();
            // A piece that is a token is taken whole; no others come about, for nothing is merged.
            let splits = Splits { whole: true, ..*splits(name).unwrap() };
            let mut rest = json!({ "version": "1.0", "added_tokens": [] });
            let model = byte_level(&mut rest, &splits, &tokens, vec![]);
            let made = serde_json::to_string(&Made { rest, model }).unwrap();
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join("tokenizer.json"), made).unwrap();
            let got = Tokenizer::open(folder.path()).unwrap().encode(TEXT, false).unwrap();
            assert_eq!(got, ids, "{name}");
        }
        let refused = splits("viking").err().unwrap();
        assert!(refused.contains("`viking`") && refused.contains("gpt-4o, tekken"), "{refused}");
    }
}
