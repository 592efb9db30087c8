"""EleutherAI's lm-evaluation-harness against `astrai serve`, by its model `local-completions`, as it comes. Arguments: the server's address,
the model's name, its key, a folder with tasks (choices.jsonl, texts.jsonl, answers.jsonl) and what `astrai eval --json` said of them (eval.json).
Every metric that both have is the same."""

import json
import math
import os
import pathlib
import sys

URL, MODEL, KEY, FOLDER = sys.argv[1:5]
os.environ.update(OPENAI_API_KEY=KEY, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=f"{FOLDER}/home")

import lm_eval
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
task: {name}
"""
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {max_gen_toks: 6, do_sample: false, until: []}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}

yaml = pathlib.Path(FOLDER, "yaml")
yaml.mkdir(exist_ok=True)
for name, body in TASKS.items():
    (yaml / f"{name}.yaml").write_text(COMMON.format(folder=FOLDER, name=name) + body)
server = LocalCompletionsAPI(base_url=f"{URL}/v1/completions", model=MODEL, auth_token=KEY, tokenized_requests=True, num_concurrent=4, max_length=65)
told = lm_eval.simple_evaluate(
    model=server, tasks=list(TASKS), task_manager=TaskManager(include_path=str(yaml), include_defaults=False), bootstrap_iters=0)
ours = json.load(open(f"{FOLDER}/eval.json"))["tasks"]
compared = 0
for task, metrics in told["results"].items():
    for key, value in metrics.items():
        name, _, kind = key.partition(",")
        if kind == "none" and not name.endswith("_stderr"):
            want = ours[task][name]
            print(f"{task} {name}: {value} there, {want} here", flush=True)
            assert math.isclose(value, want, rel_tol=1e-4), (task, name, value, want)
            compared += 1
assert compared == 6, told["results"]
