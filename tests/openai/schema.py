"""schemathesis over the server's OpenAPI document: requests of every shape that it allows, and of some that it does not. Arguments: the
server's address, the model's name, its key, how many requests of each operation; of many, also each edge of each field. No answer is a fault of the server's, and each has
a status, a type and a body that the document names."""

import os
import random
import sys
import tempfile

import schemathesis
from schemathesis.cli import schemathesis as command

URL, MODEL, KEY, EACH = sys.argv[1:5]
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@schemathesis.hook
def map_body(context, body):
    # Most that names another model is refused for that alone; and what takes long is nothing that is tried here.
    if isinstance(body, dict):
        if isinstance(body.get("model"), str) and random.random() < 0.9:
            body["model"] = MODEL
        for length in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(length), int) and body[length] > 64:
                body[length] = 1 + body[length] % 64
    return body


# It leaves files where it runs.
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    phases = "examples,coverage,fuzzing" if int(EACH) >= 10 else "fuzzing"
    command(["run", f"{URL}/openapi.json", "--header", f"Authorization: Bearer {KEY}", "--checks", CHECKS, "--max-examples", EACH,
             "--phases", phases, "--seed", "1", "--generation-database", "none", "--request-timeout", "60", "--no-color", "--warnings", "off"])
