//! Data held to what other readers made of them. In: a folder with files of records beside what a reference read in them
//! (`expected.json`), made of them (`chat_expected.json`), or packed (`packing.json`). Out: a row a check; every number must be
//! equal.

use super::Row;
use crate::Error;
use astrai_serve::template::{Chat, ChatTemplate, Message};
use astrai_serve::tokenizer::Tokenizer;
use astrai_train::batch::Items;
use astrai_train::data::packing::{Bins, Slice, Truncation, pack, pieces};
use astrai_train::data::preprocess::{Builder, Config, Nothing, Prepared, Values, arrange};
use astrai_train::data::{DataError, Kind, Packing, Records, Rows, Store, WindowOptions, Windows, padded};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::Arc;

/// Longest file of what is expected, bytes.
const LONGEST: u64 = 1 << 28;

/// A file that says what is expected, and what checks it.
type Check = (&'static str, fn(&Path) -> Result<Vec<Row>, Error>);

/// What a folder of data may hold.
const CHECKS: [Check; 3] = [("expected.json", files), ("chat_expected.json", chats), ("packing.json", bins)];

/// The checks of a folder of data; none of a folder without any of these files.
///
/// # Errors
/// A file cannot be read.
pub fn rows(folder: &Path) -> Result<Vec<Row>, Error> {
    let mut rows = Vec::new();
    for (_, check) in CHECKS.iter().filter(|(file, _)| folder.join(file).exists()) {
        rows.extend(check(folder)?);
    }
    Ok(rows)
}

/// Counts comparisons and keeps the first that fails.
#[derive(Default)]
struct Tally {
    equal: usize,
    off: Option<String>,
}

impl Tally {
    fn compare(&mut self, what: &str, got: Value, want: &Value) {
        if &got == want {
            self.equal += 1;
        } else if self.off.is_none() {
            let short = |v: &Value| v.to_string().chars().take(60).collect::<String>();
            self.off = Some(format!("{what} is {} instead of {}", short(&got), short(want)));
        }
    }

    /// A check that cannot be made at all is off.
    fn attempt<T>(&mut self, what: &str, got: Result<T, impl std::fmt::Display>) -> Option<T> {
        got.inspect_err(|e| _ = self.off.get_or_insert(format!("{what}: {e}"))).ok()
    }

    fn row(self, check: String) -> Row {
        match self.off {
            None if self.equal == 0 => Row::without(check, "missing", "nothing is expected"),
            None => Row::without(check, "ok", &format!("{} comparisons, all equal", self.equal)),
            Some(off) => Row::without(check, "off", &off),
        }
    }
}

fn read(path: &Path) -> Result<Value, Error> {
    let bytes = astrai_files::read(path, LONGEST).map_err(|e| e.to_string())?;
    serde_json::from_slice(&bytes).map_err(|e| format!("{}: is no JSON ({e})", path.display()).into())
}

fn object<'a>(value: &'a Value, key: &str, path: &Path) -> Result<&'a Map<String, Value>, Error> {
    let found = value.get(key).and_then(Value::as_object);
    found.ok_or_else(|| format!("{}: has no object `{key}`", path.display()).into())
}

fn list<'a>(value: &'a Value, key: &str, path: &Path) -> Result<&'a Vec<Value>, Error> {
    let found = value.get(key).and_then(Value::as_array);
    found.ok_or_else(|| format!("{}: has no list `{key}`", path.display()).into())
}

fn size(value: &Value, key: &str) -> usize {
    value.get(key).and_then(Value::as_u64).unwrap_or(0) as usize
}

/// Stores of several keys, and the windows and batches of them.
fn files(folder: &Path) -> Result<Vec<Row>, Error> {
    let path = folder.join("expected.json");
    let expected = read(&path)?;
    let sets = object(&expected, "sets", &path)?;
    let one = |(name, set): (&String, &Value)| {
        let mut tally = Tally::default();
        if let Some(store) = tally.attempt("opening", Store::open(&folder.join(name))) {
            let store = Arc::new(store);
            let root = store.path().to_path_buf();
            let files = store.files().map(|f| f.strip_prefix(&root).unwrap_or(f).display().to_string());
            tally.compare("files", files.collect(), &set["files"]);
            let done = if set.get("records").is_some() {
                records(&store, set, &mut tally)
            } else {
                river(&store, set, &mut tally)
            };
            tally.attempt("reading", done);
        }
        tally.row(format!("data.{name}"))
    };
    Ok(sets.iter().map(one).collect())
}

fn river(store: &Arc<Store>, set: &Value, tally: &mut Tally) -> Result<(), DataError> {
    let of_keys = |one: &dyn Fn(&str) -> Result<Value, DataError>| -> Result<Value, DataError> {
        store
            .keys()
            .map(|(key, _)| Ok((key.to_string(), one(key)?)))
            .collect::<Result<Map<_, _>, _>>()
            .map(Value::Object)
    };
    tally.compare("segments", of_keys(&|key| Ok(json!(store.need(key)?.segments())))?, &set["segments"]);
    tally.compare("lengths", of_keys(&|key| Ok(json!(store.need(key)?.len())))?, &set["lengths"]);
    let stream = of_keys(&|key| {
        let mut all = vec![0; store.need(key)?.len() as usize];
        store.ints(key, 0, &mut all)?;
        Ok(json!(all))
    })?;
    tally.compare("stream", stream, &set["stream"]);
    let shortest = store.keys().map(|(_, column)| column.len()).min();
    tally.compare("total", json!(shortest), &set["total"]);
    let masked = store.column("loss_mask").is_some();
    for case in set["cases"].as_array().into_iter().flatten() {
        let (seq, stride) = (size(case, "window"), size(case, "stride"));
        let options = WindowOptions { seq, stride: Some(stride), packing: Packing::Joined };
        let windows = Windows::new(Rows::of(store, masked)?, &options);
        let what = format!("window {seq} stride {stride}");
        if case["samples"] == json!(0) {
            tally.compare(&what, json!(windows.is_err()), &json!(true));
            continue;
        }
        let windows = windows?;
        tally.compare(&format!("{what}, samples"), json!(windows.len()), &case["samples"]);
        for (name, want) in case.as_object().into_iter().flatten() {
            let Some(i) = name.strip_prefix("sample_").and_then(|i| i.parse().ok()) else { continue };
            let window = windows.window(i)?;
            let mut got = json!({"begin": window.begin, "input_ids": window.input_ids, "target_ids": window.target_ids});
            let beside = [("loss_mask", window.loss_mask), ("position_ids", window.position_ids)];
            beside
                .into_iter()
                .filter_map(|(key, v)| Some((key, v?)))
                .for_each(|(key, v)| got[key] = json!(v));
            tally.compare(&format!("{what}, {name}"), got, want);
        }
    }
    Ok(())
}

fn records(store: &Arc<Store>, set: &Value, tally: &mut Tally) -> Result<(), DataError> {
    let kind = Kind::of(store).unwrap_or(Kind::Seq);
    let records = Records::new(store.clone(), kind, usize::MAX, Packing::Joined)?;
    tally.compare("records", json!(records.count()), &set["records"]);
    let stored = |i: usize, key: &str| -> Result<Value, DataError> {
        Ok(match key {
            "rewards" => json!(store.floats(key, i)?.into_iter().map(f64::from).collect::<Vec<_>>()),
            "responses" | "masks" => json!(store.rows(key, i)?),
            _ => json!(store.record(key, i)?),
        })
    };
    for (i, want) in set["record"].as_object().into_iter().flatten() {
        let i = i.parse().unwrap_or(usize::MAX);
        for (key, want) in want.as_object().into_iter().flatten() {
            tally.compare(&format!("record {i}, {key}"), stored(i, key)?, want);
        }
    }
    let Some(batch) = set.get("batch").and_then(Value::as_object) else { return Ok(()) };
    let numbers = batch.get("of_records").and_then(Value::as_array).into_iter().flatten();
    let numbers: Vec<u64> = numbers.filter_map(Value::as_u64).collect();
    let mut got = Map::new();
    match kind {
        Kind::Grpo => {
            let groups = numbers.iter().map(|&i| records.group(i)).collect::<Result<Vec<_>, _>>()?;
            let (prompts, mask) = padded(&groups.iter().map(|g| g.prompt.clone()).collect::<Vec<_>>(), true);
            let answers = groups.iter().flat_map(|g| &g.responses);
            let (responses, masks) = padded(&answers.map(|r| r.ids.clone()).collect::<Vec<_>>(), false);
            let each = groups.first().map_or(1, |g| g.responses.len()).max(1);
            let rewards = groups.iter().map(|g| g.rewards.iter().map(|r| f64::from(*r)).collect::<Vec<_>>());
            got.extend([
                ("prompts".into(), json!(prompts)),
                ("prompt_mask".into(), json!(mask)),
                ("responses".into(), json!(responses.chunks(each).collect::<Vec<_>>())),
                ("masks".into(), json!(masks.chunks(each).collect::<Vec<_>>())),
                ("rewards".into(), json!(rewards.collect::<Vec<_>>())),
            ]);
        }
        _ => {
            let pairs = numbers.iter().map(|&i| records.pair(i)).collect::<Result<Vec<_>, _>>()?;
            for (key, side) in [("chosen", 0), ("rejected", 1)] {
                let of = pairs.iter().map(|p| if side == 0 { &p.chosen } else { &p.rejected });
                let mask = of.clone().map(|s| s.trained.iter().map(|t| i32::from(*t)).collect::<Vec<_>>());
                let ids = padded(&of.map(|s| s.ids.clone()).collect::<Vec<_>>(), false).0;
                got.insert(key.into(), json!(ids));
                got.insert(format!("{key}_mask"), json!(padded(&mask.collect::<Vec<_>>(), false).0));
            }
        }
    }
    for (key, want) in batch.iter().filter(|(key, _)| *key != "of_records") {
        tally.compare(&format!("batch, {key}"), got.remove(key).unwrap_or_default(), want);
    }
    Ok(())
}

/// Lines of a file that are not blank.
fn lines(path: &Path) -> Result<Vec<String>, Error> {
    let text = astrai_files::read_text(path, LONGEST).map_err(|e| e.to_string())?;
    Ok(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_string).collect())
}

fn values(record: &Prepared, key: &str) -> Value {
    values_of(&record.keys, key)
}

fn values_of(keys: &[(String, Values)], key: &str) -> Value {
    match keys.iter().find(|(k, _)| k == key) {
        Some((_, Values::Ints(list))) => json!(list),
        Some((_, Values::Rows(rows))) => json!(rows),
        Some((_, Values::Floats(list))) => json!(list),
        None => Value::Null,
    }
}

/// Chats and preferences, rendered, tokenised, masked and packed.
fn chats(folder: &Path) -> Result<Vec<Row>, Error> {
    let path = folder.join("chat_expected.json");
    let expected = read(&path)?;
    let named = expected.get("tokenizer").and_then(Value::as_str).unwrap_or(".");
    let tokenizer = Tokenizer::open(&folder.join(named)).map_err(|e| e.to_string())?;
    let template = ChatTemplate::open(&folder.join(named)).map_err(|e| e.to_string())?;
    let template = template.ok_or_else(|| format!("{named}: has no chat template"))?;
    let config = Config::read(&folder.join("preprocess.json")).map_err(|e| e.to_string())?;
    let mut long = config.clone();
    long.preprocessing.max_seq_len = 1 << 30;
    let builder = |config| Builder::new(config, tokenizer.clone()).map_err(|e| Error::from(e.to_string()));
    let (builder, long) = (builder(config)?, builder(long)?);
    let (records, text) = (list(&expected, "records", &path)?, lines(&folder.join("chat.jsonl"))?);
    let mut tally = Tally::default();
    tally.compare("records", json!(text.len()), &json!(records.len()));
    let (mut built, mut of) = (Vec::new(), Vec::new());
    for (i, (line, want)) in text.iter().zip(records).enumerate() {
        match (builder.line(line.as_bytes()), want.get("dropped")) {
            (Err(Nothing::Dropped(why)), Some(said)) => {
                tally.compare(&format!("record {i}"), json!(why), said)
            }
            (Ok(record), None) => {
                tally.compare(&format!("record {i}, domain"), json!(record.domain), &want["domain"]);
                for key in ["sequence", "loss_mask"] {
                    tally.compare(&format!("record {i}, {key}"), values(&record, key), &want[key]);
                }
                let whole = long.line(line.as_bytes()).map_or(0, |record| record.tokens());
                tally.compare(
                    &format!("record {i}, tokens"),
                    json!(whole),
                    &want["tokens_before_truncation"],
                );
                let rendered = rendered(&template, line).unwrap_or_else(|e| e);
                tally.compare(&format!("record {i}, rendered"), json!(rendered), &want["rendered"]);
                built.push(record);
                of.push(i);
            }
            (Ok(_), Some(said)) => tally.compare(&format!("record {i}"), Value::Null, said),
            (Err(e), _) => _ = tally.attempt(&format!("record {i}"), Err::<(), _>(format!("{e:?}"))),
        }
    }
    let packed = packed(&builder, &built, &of, object(&expected, "packed", &path)?);
    let pairs = pairs(&tokenizer, folder, list(&expected, "pairs", &path)?)?;
    Ok(vec![
        tally.row("chat.records".into()),
        packed.row("chat.packed".into()),
        pairs.row("chat.pairs".into()),
    ])
}

fn rendered(template: &ChatTemplate, line: &str) -> Result<String, String> {
    let record: Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
    let messages = Message::list(record["messages"].clone()).map_err(|e| e.to_string())?;
    let tools = record.get("tools").and_then(Value::as_array).map(Vec::as_slice);
    let chat = Chat { messages: &messages, tools, ..Chat::default() };
    template.render(&chat).map_err(|e| e.to_string())
}

/// Bins of each domain: which records, and their keys one after another.
fn packed(builder: &Builder, built: &[Prepared], of: &[usize], want: &Map<String, Value>) -> Tally {
    let mut tally = Tally::default();
    let (config, p) = (builder.config(), &builder.config().preprocessing);
    for (domain, want) in want {
        let members: Vec<usize> = (0..built.len()).filter(|&i| &built[i].domain == domain).collect();
        let lengths: Vec<usize> = members.iter().map(|&i| built[i].tokens() as usize).collect();
        let slices = pieces(&lengths, p.max_packed_len, p.packing, p.truncation);
        let bins = pack(&slices, p.max_packed_len, p.packing);
        let arranged: Vec<_> = arrange(config, members.iter().map(|&i| built[i].clone()).collect()).collect();
        let bin = |(bin, keys): (&Vec<usize>, &Vec<(String, Values)>)| {
            let records: Vec<usize> = bin.iter().map(|&s| of[members[slices[s].document]]).collect();
            let key = |key| values_of(keys, key);
            json!({"records": records, "sequence": key("sequence"), "loss_mask": key("loss_mask"),
                "position_ids": key("position_ids")})
        };
        let got: Vec<Value> = bins.iter().zip(&arranged).map(bin).collect();
        let wanted = want.as_array().map_or(&[][..], Vec::as_slice);
        tally.compare(&format!("{domain}, bins"), json!(got.len()), &json!(wanted.len()));
        for (i, (got, want)) in got.iter().zip(wanted).enumerate() {
            for (key, want) in want.as_object().into_iter().flatten() {
                tally.compare(&format!("{domain}, bin {i}, {key}"), got[key].clone(), want);
            }
        }
    }
    tally
}

fn pairs(tokenizer: &Tokenizer, folder: &Path, want: &[Value]) -> Result<Tally, Error> {
    let mut tally = Tally::default();
    let config = Config::of(Kind::Dpo, 2048);
    let builder = Builder::new(config, tokenizer.clone()).map_err(|e| e.to_string())?;
    let text = lines(&folder.join("pairs.jsonl"))?;
    tally.compare("pairs", json!(text.len()), &json!(want.len()));
    for (i, (line, want)) in text.iter().zip(want).enumerate() {
        let built = builder.line(line.as_bytes()).map_err(|e| format!("{e:?}"));
        let Some(record) = tally.attempt(&format!("pair {i}"), built) else { continue };
        for (key, want) in want.as_object().into_iter().flatten() {
            tally.compare(&format!("pair {i}, {key}"), values(&record, key), want);
        }
    }
    Ok(tally)
}

/// Lengths packed into bins.
fn bins(folder: &Path) -> Result<Vec<Row>, Error> {
    let path = folder.join("packing.json");
    let expected = read(&path)?;
    let mut tally = Tally::default();
    for (i, case) in list(&expected, "cases", &path)?.iter().enumerate() {
        let strategy: Result<Bins, _> = serde_json::from_value(case["strategy"].clone());
        let Some(bins) = tally.attempt(&format!("case {i}"), strategy) else { continue };
        let lengths = case["lengths"].as_array().into_iter().flatten();
        let lengths: Vec<usize> = lengths.map(|n| n.as_u64().unwrap_or(0) as usize).collect();
        let most = size(case, "max_packed_len");
        let slice = |s: &Slice| json!([s.document, s.begin, s.end]);
        for (key, want) in case.as_object().into_iter().flatten() {
            let truncation =
                if key == "content_keep_end" { Truncation::KeepEnd } else { Truncation::KeepStart };
            let slices = pieces(&lengths, most, bins, truncation);
            let packed = pack(&slices, most, bins);
            let of = |one: &dyn Fn(&Vec<usize>) -> Value| Value::Array(packed.iter().map(one).collect());
            let got = match key.as_str() {
                "bins" => json!(packed),
                "packed_lengths" => of(&|bin| json!(bin.iter().map(|&i| slices[i].len()).sum::<usize>())),
                "pieces" => Value::Array(slices.iter().map(slice).collect()),
                "content" | "content_keep_start" | "content_keep_end" => {
                    of(&|bin| Value::Array(bin.iter().map(|&i| slice(&slices[i])).collect()))
                }
                _ => continue,
            };
            tally.compare(&format!("case {i}, {key}"), got, want);
        }
    }
    Ok(vec![tally.row("packing".into())])
}
