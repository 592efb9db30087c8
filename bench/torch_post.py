"""What a user would run instead of `astrai train` for post-training: TRL's trainers on the same records. Prints one JSON line.

usage: torch_post.py make DIR SHAPE.json [--records N] [--megabytes N] [--seed N]
       torch_post.py preprocess DIR
       torch_post.py {sft|dpo} DIR [--steps N] [--batch B] [--seq S] [--threads T] [--dtype f32|bf16]

make  writes what both sides read: DIR/model (random weights of the shape, a byte-level BPE tokenizer with a chat template),
      DIR/chats.jsonl and DIR/pairs.jsonl, and with --megabytes as much of chats in DIR/many/chats.jsonl, with DIR/many.json to
      preprocess them by. Lengths of answers are log-normal, as those of chats are: many short ones, a few long.
preprocess  nothing but `tokenizers` on the texts of DIR/many, templates rendered beforehand, in CPU seconds  -> mb_per_cpu_s of JSONL
sft   SFTTrainer, each batch padded to its longest record, loss on the assistant's tokens    -> tokens_per_s
dpo   DPOTrainer, log-probabilities of the reference computed before the first step           -> tokens_per_s
Tokens are those of records, without padding. The first step, which warms up, does not count.
"""
import argparse, json, pathlib, random, resource, statistics, time

TEMPLATE = ("{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
            "{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")
p = argparse.ArgumentParser()
p.add_argument("job", choices=["make", "preprocess", "sft", "dpo"]); p.add_argument("dir", type=pathlib.Path); p.add_argument("shape", nargs="?")
p.add_argument("--records", type=int, default=96); p.add_argument("--megabytes", type=int, default=0); p.add_argument("--seed", type=int, default=0); p.add_argument("--steps", type=int, default=12)
p.add_argument("--batch", type=int, default=8); p.add_argument("--seq", type=int, default=1024)
p.add_argument("--threads", type=int, default=0); p.add_argument("--dtype", default="f32", choices=["f32", "bf16"])
a = p.parse_args()


def make():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    import torch
    root = pathlib.Path(__file__).resolve().parent.parent
    text = "\n".join(f.read_text() for f in sorted((root / "docs").glob("*.md")))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False); bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|user|>", "<|assistant|>"]
    bpe.train_from_iterator([text], trainers.BpeTrainer(vocab_size=4096, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[0], pad_token=special[0], chat_template=TEMPLATE)
    config = AutoConfig.for_model(**json.load(open(a.shape)))
    torch.manual_seed(a.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(a.dir / "model"); tokenizer.save_pretrained(a.dir / "model")
    words, rng = text.split(), random.Random(a.seed)

    def some(mean):
        n = min(max(int(rng.lognormvariate(mean, 0.9)), 4), 380); at = rng.randrange(len(words) - n)
        return " ".join(words[at:at + n])
    with open(a.dir / "chats.jsonl", "w") as chats, open(a.dir / "pairs.jsonl", "w") as pairs:
        for _ in range(a.records):
            turns = [{"role": role, "content": some(mean)} for role, mean in (("user", 3.0), ("assistant", 4.0))]
            chats.write(json.dumps({"messages": turns}) + "\n")
            pairs.write(json.dumps({"prompt": some(3.0), "chosen": some(4.0), "rejected": some(4.0)}) + "\n")
    if a.megabytes:
        (a.dir / "many").mkdir(exist_ok=True)
        config = {"input": {"sections": [{"field": "messages", "action": "$role", "template": True}]}, "mask": {"assistant": "train"}}
        (a.dir / "many.json").write_text(json.dumps(config))
        with open(a.dir / "many" / "chats.jsonl", "w") as chats:
            while chats.tell() < a.megabytes << 20:
                turns = [{"role": ("user", "assistant")[i % 2], "content": some((3.0, 5.0)[i % 2])} for i in range(2 * rng.randint(1, 3))]
                chats.write(json.dumps({"messages": turns}) + "\n")


def preprocess():
    from tokenizers import Tokenizer
    tokenizer, texts, size = Tokenizer.from_file(str(a.dir / "model" / "tokenizer.json")), [], 0
    with open(a.dir / "many" / "chats.jsonl") as lines:
        for line in lines:
            size += len(line.encode())
            texts.append("".join(f"<|{m['role']}|>{m['content']}<|endoftext|>" for m in json.loads(line)["messages"]))
    begun = time.process_time()
    tokens = sum(len(e.ids) for at in range(0, len(texts), 1000) for e in tokenizer.encode_batch(texts[at:at + 1000]))
    seconds = time.process_time() - begun
    print(json.dumps(dict(peer="tokenizers", job=a.job, tokens=tokens, cpu_seconds=round(seconds, 3), mb_per_cpu_s=round(size / 1e6 / seconds, 3))))


def train():
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
    if a.threads: torch.set_num_threads(a.threads)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[a.dtype]
    tokenizer = AutoTokenizer.from_pretrained(a.dir / "model")
    model = AutoModelForCausalLM.from_pretrained(a.dir / "model", dtype=dtype)
    data = load_dataset("json", data_files=str(a.dir / ("chats.jsonl" if a.job == "sft" else "pairs.jsonl")), split="train")
    data = data.select(range(min(len(data), a.steps * a.batch)))
    if a.job == "dpo":
        turn = lambda role, text: [{"role": role, "content": text}]
        data = data.map(lambda r: {"prompt": turn("user", r["prompt"]), "chosen": turn("assistant", r["chosen"]), "rejected": turn("assistant", r["rejected"])})
    common = dict(output_dir=str(a.dir / "trl"), per_device_train_batch_size=a.batch, max_steps=a.steps, max_length=a.seq, learning_rate=1e-4,
                  gradient_checkpointing=False, bf16=False, fp16=False, use_cpu=True, report_to="none", save_strategy="no", logging_steps=1, seed=0)
    if a.job == "sft":
        trainer = SFTTrainer(model, args=SFTConfig(assistant_only_loss=True, packing=False, **common), train_dataset=data, processing_class=tokenizer)
    else:
        trainer = DPOTrainer(model, args=DPOConfig(precompute_ref_log_probs=True, **common), train_dataset=data, processing_class=tokenizer)
    counts, times = [0], []
    plain = trainer.compute_loss

    def counted(model, inputs, *more, **named):
        counts[0] += int(sum(v.sum() for k, v in inputs.items() if k.endswith("attention_mask"))) if any(k.endswith("attention_mask") for k in inputs) else 0
        return plain(model, inputs, *more, **named)
    trainer.compute_loss = counted

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__): counts[0] = 0; self.begun = time.perf_counter()
        def on_step_end(self, *_, **__): times.append((counts[0], time.perf_counter() - self.begun))
    trainer.add_callback(Clock())
    trainer.train()
    tokens, seconds = (sum(x) for x in zip(*times[1:]))
    print(json.dumps(dict(peer="torch " + torch.__version__, job=a.job, dtype=a.dtype, batch=a.batch, seq=a.seq, threads=torch.get_num_threads(),
                          steps=len(times) - 1, seconds_median=round(statistics.median(t for _, t in times[1:]), 5), tokens=tokens,
                          peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, tokens_per_s=round(tokens / seconds, 2))))


{"make": make, "preprocess": preprocess}.get(a.job, train)()
