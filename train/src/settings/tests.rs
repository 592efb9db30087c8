//! The table against itself (help, defaults, file and flags agree), and every refusal's line.

use clap::{CommandFactory, Parser};
use proptest::prelude::*;

use super::*;

#[derive(Parser)]
#[command(no_binary_name = true)]
struct Command {
    #[command(flatten)]
    settings: Partial,
}

fn flags(line: &str) -> Partial {
    Command::try_parse_from(line.split_whitespace()).unwrap_or_else(|e| panic!("{line}: {e}")).settings
}

fn file(text: &str) -> Partial {
    Partial::parse(text, "run.toml").unwrap_or_else(|e| panic!("{e}"))
}

/// The same as YAML.
fn yaml(text: &str) -> Partial {
    Partial::parse(text, "run.yaml").unwrap_or_else(|e| panic!("{e}"))
}

const LEAST: &str = "--config c.json --data a --out o";

fn refusal(line: &str) -> String {
    let all = format!("{LEAST} {line}");
    let line = Settings::merge(Partial::default(), flags(&all)).expect_err(&all).to_string();
    assert!(!line.contains('\n'), "{line}");
    line
}

#[test]
fn help_shows_the_defaults_that_hold() {
    let json = serde_json::to_value(Settings::default()).expect("JSON");
    for (key, shown) in SHOWN {
        let value = &json[key];
        let same = match value.as_f64() {
            Some(number) => shown.parse::<f64>() == Ok(number),
            None => value.as_str() == Some(shown),
        };
        assert!(same, "{key}: the help says {shown}, the default is {value}");
    }
    Command::command().debug_assert();
    let help = Command::command().render_long_help().to_string();
    for text in ["--weight-decay <RATE>", "[default: 0.0003]", "- cosine: ", "Half a cosine"] {
        assert!(help.contains(text), "{help}");
    }
    for key in KEYS {
        assert!(help.contains(&format!("--{} ", key.replace('_', "-"))), "{key}: {help}");
    }
}

#[test]
fn flags_and_file_say_the_same() {
    let line = "--data a b --out o --config c.json --steps 9 --lr 1e-3 --schedule wsd --dtype bf16 --min-lr 1e-5 \
                --optimizer adamw --weight-decay 0 --recompute full --strategy seq --batch 2 --threads 1";
    let text = "data = ['a', 'b']\nout = 'o'\nconfig = 'c.json'\nsteps = 9\nlr = 1e-3\nschedule = 'wsd'\n\
                dtype = 'bf16'\nmin_lr = 1e-5\noptimizer = 'adamw'\nweight_decay = 0\nrecompute = 'full'\n\
                strategy = 'seq'\nbatch = 2\nthreads = 1\n";
    assert_eq!(flags(line), file(text));
    assert_eq!(flags(line), yaml(&text.replace(" = ", ": ")));
    let line = "--lora-rank 8 --lora-alpha 4 --lora-targets q_proj v_proj --rslora --dora true";
    let lora = "rank = 8\nalpha = 4.0\ntargets = ['q_proj', 'v_proj']\nrslora = true\ndora = true";
    assert_eq!(flags(line), file(&format!("[lora]\n{lora}")));
    assert_eq!(flags(line), yaml(&format!("lora: {{{}}}", lora.replace(" = ", ": ").replace('\n', ", "))));
    let groups =
        flags("--group *norm*:rate=0.1,decay=0 --group a:decay=0.5 --freeze *.0.* --neftune-alpha 5");
    let text = "freeze = '*.0.*'\nneftune_alpha = 5.0\n[[group]]\npattern = '*norm*'\nrate = 0.1\ndecay = 0\n[[group]]\npattern = 'a'\ndecay = 0.5";
    let as_written = |p: Partial| Settings::merge(p, flags(LEAST)).expect("merged").recipe();
    let (a, b) = (as_written(groups), as_written(file(text)));
    assert_eq!((a.optimizer.groups, a.frozen, a.neftune), (b.optimizer.groups, b.frozen, b.neftune));
    let of_yaml = yaml(
        "freeze: '*.0.*'\nneftune_alpha: 5\ngroup:\n  - {pattern: '*norm*', rate: 0.1, decay: 0}\n  - pattern: a\n    decay: 0.5\n",
    );
    assert_eq!(of_yaml, file(text));
    assert!(
        Partial::parse("[[group]]\nrate = 0.1", "run.toml").expect_err("group").to_string().contains("group")
    );
    assert_eq!(flags("--data a --data b").data, flags("--data a b").data);
    assert_eq!(file("data = 'a'").data, Some(vec![PathBuf::from("a")]));
    assert_eq!(file("eval_task = 'a'").eval_task, Some(vec![PathBuf::from("a")]));
    // A word as the flag has it, unless it would be read as something else.
    let types = flags("--precision *norm*=f32 --precision attention=f32").precision;
    assert_eq!(types, file("[precision]\n'*norm*' = 'f32'\nattention = 'f32'").precision);
    let words = file("[set]\na = 'ipo'\nb = '1'").set;
    assert_eq!(words, Some(vec!["a=ipo".to_string(), "b=\"1\"".to_string()]));
    let options = ["beta=0.5", "loss_type=[\"ipo\",\"sft\"]"].map(str::to_string).to_vec();
    let text = "[set]\nbeta = 0.5\nloss_type = ['ipo', 'sft']";
    assert_eq!(file(text).set, Some(options));
    // What is written once may be named again.
    let text = "lr: &rate 1e-3\nmin_lr: *rate\non: {begin: [a, b], 'every:2': c}\nset:\n  beta: 0.5\n";
    let as_toml = "lr = 1e-3\nmin_lr = 1e-3\non = {begin = ['a', 'b'], 'every:2' = 'c'}\n[set]\nbeta = 0.5\n";
    assert_eq!(yaml(text), file(as_toml));
}

#[test]
fn flags_win_and_displace_the_alternative() {
    let base = file("config = 'c'\ndata = 'a'\nout = 'o'\nsteps = 5\nlr = 1.0\nbatch = 3\nvocab = 300");
    let got = Settings::merge(base, flags("--model m --epochs 2 --lr 0.5 --tokenizer t")).expect("merged");
    assert_eq!((got.config, got.model), (None, Some(PathBuf::from("m"))));
    assert_eq!((got.steps, got.epochs, got.lr, got.batch), (None, Some(2), 0.5, 3));
    assert_eq!((got.vocab, got.tokenizer), (None, Some(PathBuf::from("t"))));
    assert_eq!(got.seq, Settings::default().seq);
    let base =
        file("config = 'c'\ndata = 'a'\nout = 'o'\nstrategy = 'dpo'\n[set]\nbeta = 0.5\nreduction = 'mean'");
    let got = Settings::merge(base, flags("--set beta=0.2")).expect("merged");
    assert_eq!(got.set, Some(vec!["beta=0.2".to_string(), "reduction=mean".to_string()]));
    let base = file("config = 'c'\ndata = 'a'\nout = 'o'\nvocab = 300\nspecial_tokens = ['<|user|>']");
    let got = Settings::merge(base.clone(), flags("--tokenizer t")).expect("merged");
    assert_eq!((got.vocab, got.special_tokens), (None, None));
    let got = Settings::merge(base, flags("--special-tokens <|x|> --special-tokens <|y|>")).expect("merged");
    assert_eq!(got.special_tokens, Some(vec!["<|x|>".to_string(), "<|y|>".to_string()]));
    assert!(refusal("--special-tokens <|x|>").starts_with("special_tokens: no tokenizer is trained"));
    assert_eq!(refusal("--stride 0"), "stride: 0 is outside 1 to 16777216");
}

#[test]
fn bad_files_are_named_with_their_key_and_line() {
    // An alias of an alias, nine times each: 9^9 words.
    let row = |i: usize| format!("a{i}: &a{i} [{}]\n", vec![format!("*a{}", i.max(1) - 1); 9].join(", "));
    let bomb = (1..9).map(row).fold("a0: &a0 x\n".to_string(), |all, row| all + &row);
    let deep = format!("lr: {}", "[".repeat(5000));
    for (file, text, says) in [
        ("run.toml", "stepz = 3", "line 1: unknown key \"stepz\"; did you mean \"steps\"?"),
        (
            "run.toml",
            "lr = 1\nweight-decay = 3",
            "line 2: unknown key \"weight-decay\"; did you mean \"weight_decay\"?",
        ),
        ("run.toml", "[train]\nlr = 1", "line 1: unknown key \"train\"; the keys are data, out"),
        ("run.toml", "steps = 'many'", "line 1: steps: invalid type: string \"many\", expected u64"),
        ("run.toml", "\nbatch = -1", "line 2: batch: invalid value: integer `-1`"),
        ("run.toml", "schedule = 'cosin'", "line 1: schedule: unknown variant `cosin`"),
        ("run.toml", "lr = 1\nlr = 2", "line 2: duplicate key"),
        ("run.toml", "lr = ", "line 1: "),
        ("run.toml", "lora_rank = 8\n[lora]\nrank = 8", "line 1: \"lora_rank\" is given twice"),
        ("run.toml", "\n[lora]\ndropout = 0.1", "line 2: unknown key \"lora_dropout\""),
        ("run.yaml", "# first\nstepz: 3", "line 2: unknown key \"stepz\"; did you mean \"steps\"?"),
        ("run.YML", "train:\n  lr: 1", "line 2: unknown key \"train\"; the keys are data, out"),
        ("run.yaml", "lr: 1\nsteps: many", "line 2: steps: invalid type: string \"many\", expected u64"),
        ("run.yaml", "rslora: yes", "line 1: rslora: invalid type: string \"yes\", expected a boolean"),
        ("run.yaml", "lr: 1\nlr: 2", "line 2: duplicate mapping key: lr"),
        ("run.yaml", "lr: 1\nsteps:\n", "line 2: invalid type: nothing, expected a value"),
        ("run.yaml", "- lr", "line 1: "),
        ("run.yaml", "lr: [1", "line 1: unclosed bracket"),
        ("run.yaml", "lr: 1\n---\nlr: 2", "line 3: multiple YAML documents"),
        ("run.yaml", "lr: *rate", "line 1: alias references unknown anchor"),
        ("run.yaml", &bomb, "line 6: more than 16384 values"),
        ("run.yaml", &deep, "line 1: "),
    ] {
        let got = Partial::parse(text, file).expect_err(text).to_string();
        assert!(got.starts_with(&format!("{file}: {says}")) && !got.contains('\n'), "{text}: {got}");
    }
    let missing =
        Partial::read(std::path::Path::new("/nonexistent/run.toml")).expect_err("absent").to_string();
    assert!(missing.starts_with("/nonexistent/run.toml: cannot open it: "), "{missing}");
}

#[test]
fn refusals_name_the_setting() {
    let rows = [
        ("--steps 3 --epochs 1", "steps and epochs are both given"),
        ("--model m", "config and model are both given"),
        ("--tokenizer t --vocab 300", "tokenizer and vocab are both given"),
        ("--lr inf", "lr: inf is not a rate above 0"),
        ("--lr nan", "lr: NaN is not"),
        ("--lr 0", "lr: 0 is not"),
        ("--min-lr 1", "min_lr: 1 is not between 0 and lr"),
        ("--batch 0", "batch: 0 is outside 1 to"),
        ("--seq 0", "seq: 0 is outside"),
        ("--accum 99999999", "accum: 99999999 is outside"),
        ("--batch 1000000 --seq 1000000", "tokens an update"),
        ("--steps 0", "steps: 0 is outside"),
        ("--keep-every 0", "keep_every: 0 is outside"),
        ("--keep 0 --keep-every 5", "keep_every: with keep 0"),
        ("--steps 5 --warmup 6", "warmup: 6 steps exceed the run's 5"),
        ("--beta2 1", "beta2: 1 is not at least 0 and below 1"),
        ("--eps 0", "eps: 0 is not"),
        ("--clip inf", "clip: inf is not"),
        ("--vocab 5", "vocab: 5 is outside 256"),
        ("--momentum 0.5", "momentum: adamw has none"),
        ("--optimizer sgd --beta1 0.5", "beta1: sgd has none"),
        ("--nesterov true", "nesterov: adamw has none"),
        ("--optimizer sgd --muon-scale original", "muon_scale: sgd has none"),
        ("--stable 5", "stable: only schedule wsd"),
        ("--schedule inverse-sqrt --min-lr 0", "min_lr: schedule inverse-sqrt"),
        ("--group x", "is not PATTERN:rate=X"),
        ("--group x:lr=2", "is not PATTERN:rate=X"),
        ("--ema 1", "ema: it is a decay"),
        ("--schedule constant --min-lr 0", "min_lr: schedule constant has no end rate"),
        ("--precision attention=f32", "precision: with dtype f32 all is f32"),
        ("--dtype bf16 --precision attention", "precision: `attention` is not NAME=f32"),
        ("--dtype bf16 --precision attention=fp8", "precision: attention cannot be fp8"),
        ("--dtype f16 --rounding stochastic", "rounding: only weights of bf16"),
        ("--dtype bf16 --rounding stochastic --lora-rank 4", "rounding: an adapter is f32"),
        ("--lora-rank 8", "lora_rank: an adapter belongs to a model"),
        ("--rslora", "rslora: no adapter is trained"),
        ("--lora-targets q_proj", "lora_targets: no adapter is trained"),
    ];
    for (line, starts) in rows {
        let got = refusal(line);
        assert!(got.contains(starts), "{line}: {got}");
    }
    for (line, has) in
        [("--data a --out o", "--config"), ("--config c --out o", "--data"), ("--config c --data a", "--out")]
    {
        let got = Settings::merge(Partial::default(), flags(line)).expect_err(line).to_string();
        assert!(got.contains(has), "{got}");
    }
}

#[test]
fn length_and_schedule_follow_the_settings() {
    let merged = |line: &str| {
        Settings::merge(Partial::default(), flags(&format!("{LEAST} {line}")))
            .unwrap_or_else(|e| panic!("{e}"))
    };
    assert_eq!(merged("").length(), Length::Epochs(1));
    assert_eq!(merged("--steps 7").length(), Length::Steps(7));
    let schedule = merged("--lr 1e-3").schedule(200).expect("a schedule");
    assert_eq!((schedule.warmup, schedule.total, schedule.min_lr), (10, 200, 1e-4));
    let line = merged("--warmup 30").schedule(20).expect_err("too long").to_string();
    assert!(line.contains("warmup: 30 steps exceed the run's 20"), "{line}");
}

#[test]
fn recorded_settings_merge_to_themselves() {
    for line in [
        "",
        "--optimizer sgd --momentum 0.5",
        "--optimizer muon --adamw-lr 1e-3 --group *q_proj*:rate=0.5,decay=0",
        "--schedule constant --steps 3",
        "--min-lr 1e-6 --vocab 300",
        "--strategy dpo --set beta=0.2 --set loss_type=ipo,sft --reference r",
    ] {
        let first = Settings::merge(Partial::default(), flags(&format!("{LEAST} {line}"))).expect("merged");
        let again = Settings::merge(Partial::from(&first), Partial::default()).expect("merged");
        assert_eq!(first, again);
        let json = serde_json::to_string(&first).expect("JSON");
        assert_eq!(first, serde_json::from_str(&json).expect("read back"));
    }
}

proptest! {
    #[test]
    fn hostile_files_never_panic(text in "\\PC{0,200}", key in "[a-z_]{1,12}", value in "[-0-9a-z.'\\[\\]{}=]{0,20}") {
        let _read = Partial::parse(&text, "run.toml");
        let _read = Partial::parse(&text, "run.yaml");
        let _read = Partial::parse(&format!("{key}: {value}\nlr: {value}\ndata: {value}"), "run.yaml");
        let _read = Partial::parse(&format!("{key} = {value}\nlr = {value}\ndata = {value}"), "run.toml");
    }
}
