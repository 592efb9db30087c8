#!/usr/bin/env python3
"""Measures astrai and a peer in turn and prints rows of the tables of RESULTS.md.

usage: bench/run.py ROW... [--dtype f32|bf16] [--rounds N] [--threads N] [--size M,N,K] [--simd SIMD] [--astrai PROGRAM]
                    [--python PYTHON | --peer COMMAND] [--made DIR] [--steps N]
       bench/run.py --list

A row is a piece of work of the table below. In every round both sides run once, the second round in the other order, and so on:
what else happens on the machine meets both. A side is a process that prints JSON lines; its figure is `gflops`, `tokens_per_s`
or llama-bench's `avg_ts`. The peer is torch_lm.py beside this file, run by --python (a virtual environment with torch and
transformers, for rows of adapters also peft), or any --peer command, {dtype} and {threads} filled in. Without either, ours stands
alone. The rows of sft and dpo are whole runs of `astrai train` beside TRL's trainers (torch_post.py) on what `torch_post.py make` wrote
to --made: tokens of records, without padding, in a second of the steps behind the first. preprocess is MB of records in a second of
processor time, all of ours beside encoding alone. The peer of lora-of-full is our own full step.

A row says: median (least-greatest) of each side's rounds, the median (least-greatest) of the rounds' ratios, the spread
of our rounds, (greatest - least) / median, both sides' peak memory and the update's part of our step. Run it on an otherwise idle machine, from a release build.
"""
import argparse
import datetime
import json
import os
import pathlib
import resource
import shlex
import shutil
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent

# Name: job, shape, arguments of both sides, arguments of ours alone.
ROWS = {
    "gemm": ("gemm", None, "--repeat 100", ""),
    "prefill-smollm2-135m": ("prefill", "smollm2-135m", "--seq 512 --repeat 7", ""),
    "prefill-llama-125m-gqa": ("prefill", "llama-125m-gqa", "--seq 512 --repeat 5", ""),
    "decode-smollm2-135m": ("decode", "smollm2-135m", "--seq 512 --new 32", ""),
    "decode-qwen3-0.6b": ("decode", "qwen3-0.6b", "--seq 512 --new 32", ""),
    "decode-qwen3-moe-tiny": ("decode", "qwen3-moe-tiny", "--seq 512 --new 32", ""),
    "decode-llama-125m-gqa": ("decode", "llama-125m-gqa", "--seq 16 --new 64", ""),
    "train-llama-124m": ("train", "llama-124m", "--batch 4 --seq 256 --repeat 5", ""),
    "train-llama-124m-muon": ("train", "llama-124m", None, "--batch 8 --seq 1024 --repeat 3 --optimizer muon"),
    "lora-llama-124m": ("train", "llama-124m", "--batch 4 --seq 256 --repeat 5 --lora-rank 16", ""),
    "lora-of-full-llama-124m": ("train", "llama-124m", "--batch 4 --seq 256 --repeat 5", "--lora-rank 16"),
    "sft-llama-124m": ("sft", "chats.jsonl", "--batch 8 --seq 1024", ""),
    "dpo-llama-124m": ("dpo", "pairs.jsonl", "--batch 8 --seq 1024", ""),
    "preprocess": ("preprocess", "many", "", ""),
    "train-qwen3-moe-tiny": ("train", "qwen3-moe-tiny", "--batch 4 --seq 256 --repeat 3", ""),
    "serve-smollm2-135m-1": ("serve", "smollm2-135m", None, "--batch 1 --seq 128 --new 64 --requests 6"),
    "serve-smollm2-135m-16": ("serve", "smollm2-135m", None, "--batch 16 --seq 128 --new 64 --requests 48"),
    "serve-llama-125m-gqa-16": ("serve", "llama-125m-gqa", None, "--batch 16 --seq 128 --new 64 --requests 32"),
    # A prompt of 1,024 tokens, eight times: as choices of one request, and as prompts apart.
    "serve-smollm2-135m-n8": ("serve", "smollm2-135m", None, "--n 8 --batch 1 --seq 1024 --new 8 --requests 1"),
    "serve-smollm2-135m-8-apart": ("serve", "smollm2-135m", None, "--batch 8 --seq 1024 --new 8 --requests 8"),
}


def commands(name, a):
    """The two command lines of a row; the peer's is None where there is none."""
    job, shape, both, alone = ROWS[name]
    if job in ("sft", "dpo", "preprocess"):
        return post(job, shape, both, a)
    file = str(HERE / "shapes" / f"{shape}.json") if shape else None
    common = f"--dtype {a.dtype} --threads {a.threads} {both or ''}".split()
    sizes = [part for size in a.size for part in ("--size", size)] if job == "gemm" else []
    level = ["--simd", a.simd] if a.simd else []
    head, rest = [a.astrai, "bench", job, *(["--shape", file] if file else []), *common], [*sizes, *level]
    ours = [*head, *alone.split(), *rest]
    if name.startswith("lora-of-full"):
        return ours, [*head, *rest]
    if a.peer:
        return ours, shlex.split(a.peer.replace("{dtype}", a.dtype).replace("{threads}", str(a.threads)))
    if a.python and both is not None:
        return ours, [a.python, str(HERE / "torch_lm.py"), file or "x", job, *common]
    return ours, None


def post(job, data, both, a):
    """The two command lines of a run on records."""
    if not a.made:
        sys.exit(f"{job}: give --made DIR, which `torch_post.py make DIR {HERE / 'shapes' / 'llama-124m.json'}` writes")
    if a.peer:
        sys.exit(f"{job}: its peer is torch_post.py; give --python, not --peer")
    made = pathlib.Path(a.made)
    if job == "preprocess":
        ours = [a.astrai, job, "--config", str(made / f"{data}.json"), "--input", str(made / data), "--tokenizer", str(made / "model"),
                "--out", str(made / "prepared")]
        return ours, [a.python, str(HERE / "torch_post.py"), job, a.made] if a.python else None
    common = f"{both} --steps {a.steps} --dtype {a.dtype} --threads {a.threads}".split()
    ours = [a.astrai, "train", "--strategy", job, "--model", str(made / "model"), "--data", str(made / data), "--out",
            str(made / "ours"), "--lr", "1e-4", "--save-every", "0", *common, "--json"]
    return ours, [a.python, str(HERE / "torch_post.py"), job, a.made, *common] if a.python else None


def of_steps(rows):
    """The figure of a run's rows of metrics: tokens in a second of the steps behind the first, which warms up."""
    seconds = sum(row["seconds"] for row in rows[1:])
    return (rows[-1]["tokens"] - rows[0]["tokens"]) / seconds if seconds else None


def figures(command):
    """Runs a side. A dictionary: what was measured -> (figure, floor's part or None, peak memory or None, update's part or None)."""
    job = command[1] if len(command) > 1 else ""
    if job in ("train", "preprocess") and "--out" in command:
        shutil.rmtree(command[command.index("--out") + 1], ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if out.returncode != 0:
        sys.exit(f"{shlex.join(command)}: exit code {out.returncode}")
    found = {}
    # Trainers also print their metrics, as Python shows dictionaries.
    lines = [json.loads(line) for line in out.stdout.splitlines() if line.startswith('{"')]
    if job == "preprocess":
        files = pathlib.Path(command[command.index("--input") + 1]).glob("*.jsonl")
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"": (sum(f.stat().st_size for f in files) / 1e6 / seconds, None, None, None)}
    steps = [row for row in lines if "grad_norm" in row]
    if steps:
        return {"": (of_steps(steps), None, None, None)}
    for row in lines:
        value = next((row[key] for key in ("gflops", "tokens_per_s", "avg_ts", "mb_per_cpu_s") if key in row), None)
        if value is not None:
            size = ",".join(str(row[key]) for key in "mnk") if "m" in row else ""
            found[size] = (value, row.get("of_floor"), row.get("peak_rss_mb"), row.get("update_of_step"))
    if not found:
        sys.exit(f"{shlex.join(command)}: printed no figure")
    return found


def spread(values):
    return (max(values) - min(values)) / statistics.median(values)


def told(values):
    """Median (least-greatest), to three digits."""
    digits = max(0, 2 - len(str(int(statistics.median(values)))) + 1)
    middle, least, most = (f"{x:.{digits}f}" for x in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least}-{most})"


def machine():
    """Model of the processor, cores, and what matters of its instructions."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{os.cpu_count()} cores"
    fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = fields.get("flags", fields.get("Features", "")).split()
    names = {"amx_bf16": "AMX", "avx512_bf16": "AVX512_BF16", "avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}
    best = [name for flag, name in names.items() if flag in flags][:2]
    return f"{fields.get('model name', 'processor')}, {os.cpu_count()} cores, {' '.join(best)}"


def shown(part, a):
    """A part of a command as another reads it."""
    return part.replace(str(HERE), "bench").replace(a.made, "made") if a.made else part.replace(str(HERE), "bench")


def measure(name, a):
    """Rows of one piece of work."""
    ours, peer = commands(name, a)
    sides = [side for side in (ours, peer) if side]
    rounds = []
    for i in range(a.rounds):
        done = [(id(side), figures(side)) for side in (sides if i % 2 == 0 else sides[::-1])]
        rounds.append(dict(done))
        print(f"{name} {a.dtype}: round {i + 1} of {a.rounds}", file=sys.stderr)
    for size in rounds[0][id(ours)]:
        mine = [r[id(ours)][size][0] for r in rounds]
        floors = [r[id(ours)][size][1] for r in rounds]
        theirs = [r[id(peer)].get(size, (None,) * 4)[0] for r in rounds] if peer else [None]
        peaks = [max((r[id(side)].get(size, (None,) * 4)[2] or 0) for r in rounds) for side in sides]
        updates = [r[id(ours)][size][3] for r in rounds]
        known = None not in theirs
        ratio = told([x / y for x, y in zip(mine, theirs)]) if known else ""
        floor = told(floors) if None not in floors else ""
        command = shlex.join(["astrai", *[shown(p, a) for p in ours[1:]]])
        memory = ", ".join(str(peak) for peak in peaks) if all(peaks) else ""
        update = told(updates) if None not in updates else ""
        cells = [f"{name} {size}".strip(), a.dtype, machine(), told(mine), told(theirs) if known else "", ratio, floor,
                 f"{100 * spread(mine):.0f} %", memory, update, datetime.date.today().isoformat(), f"`{command}`"]
        print("| " + " | ".join(cells) + " |", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("rows", nargs="*", metavar="ROW")
    p.add_argument("--list", action="store_true")
    p.add_argument("--dtype", default="f32", choices=["f32", "bf16"])
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--size", action="append", default=[], metavar="M,N,K")
    p.add_argument("--simd")
    p.add_argument("--astrai", default="astrai")
    p.add_argument("--made", metavar="DIR")
    p.add_argument("--steps", type=int, default=12)
    side = p.add_mutually_exclusive_group()
    side.add_argument("--python")
    side.add_argument("--peer")
    a = p.parse_args()
    if a.list:
        print("\n".join(ROWS))
        return
    wrong = [row for row in a.rows if row not in ROWS]
    if wrong or not a.rows or a.rounds < 1:
        p.error(f"rows are {', '.join(ROWS)}; rounds are at least 1")
    print("| work | dtype | machine | ours | peer | ratio | of floor | spread | MB | update | date | command |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for row in a.rows:
        measure(row, a)


if __name__ == "__main__":
    main()
