"""Structured output of `astrai serve`, validated by jsonschema. Arguments: the server's address, the model's name, its key, the file of golden
schemas, how many answers of each. The model's weights are random and the temperature is 1.3: what holds the answers is the grammar alone."""

import asyncio
import json
import sys
import typing

import jsonschema
import openai
import pydantic

URL, MODEL, KEY, FILE, TIMES = sys.argv[1:6]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120)
many = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=4, timeout=120)
HELLO = [{"role": "user", "content": "Hello"}]


class Person(pydantic.BaseModel):
    good: bool
    digits: list[typing.Literal[1, 2]] = pydantic.Field(max_length=2)


def parsed():
    answer = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Person, max_tokens=600, temperature=0.5)
    assert isinstance(answer.choices[0].message.parsed, Person)
    answer = client.responses.parse(model=MODEL, input="Hello", text_format=Person, max_output_tokens=600, temperature=0.5)
    assert isinstance(answer.output_parsed, Person), answer


def responses():
    first = client.responses.create(model=MODEL, input="Hello", max_output_tokens=5, temperature=0)
    assert first.status == "incomplete" and first.incomplete_details.reason == "max_output_tokens"
    second = client.responses.create(model=MODEL, input="And?", previous_response_id=first.id, max_output_tokens=5)
    assert second.usage.input_tokens > first.usage.input_tokens + 4
    events = list(client.responses.create(model=MODEL, input="Hello", max_output_tokens=5, temperature=0, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == first.output_text == events[-1].response.output_text
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
            "additionalProperties": False}}
    called = client.responses.create(model=MODEL, input="Hello", tools=[tool], tool_choice="required", max_output_tokens=900, temperature=0.5)
    call = called.output[-1]
    assert call.type == "function_call" and json.loads(call.arguments)["n"] in (1, 2), called


async def schemas():
    cases = json.load(open(FILE))
    limit = asyncio.Semaphore(16)
    counts = {"whole": 0, "cut": 0}

    async def one(case, seed):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": case["schema"], "strict": True}}
        async with limit:
            answer = await many.chat.completions.create(
                model=MODEL, messages=HELLO, response_format=form, temperature=1.3, seed=seed, max_tokens=500)
        choice = answer.choices[0]
        if choice.finish_reason == "length":
            assert not case["bounded"], (case["name"], choice.message.content)
            counts["cut"] += 1
            return
        value = json.loads(choice.message.content)
        checker = jsonschema.Draft202012Validator(case["schema"], format_checker=jsonschema.FormatChecker())
        errors = [e.message for e in checker.iter_errors(value)]
        assert not errors, (case["name"], choice.message.content, errors)
        counts["whole"] += 1

    await asyncio.gather(*(one(case, seed) for case in cases for seed in range(int(TIMES))))
    print("answers:", counts, flush=True)


def tools():
    tool = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": {
        "type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"], "additionalProperties": False}}}
    fields = {"model": MODEL, "messages": HELLO, "tools": [tool], "parallel_tool_calls": False, "max_tokens": 400, "temperature": 1}
    for choice, reason in (("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")):
        answer = client.chat.completions.create(**fields, tool_choice=choice).choices[0]
        assert answer.finish_reason == reason, answer
        assert json.loads(answer.message.tool_calls[0].function.arguments)["unit"] in ("c", "f")
        with client.chat.completions.stream(**fields, tool_choice=choice) as stream:
            final = stream.get_final_completion().choices[0].message
        assert json.loads(final.tool_calls[0].function.arguments)["unit"] in ("c", "f")
    said = complete(echo=True, logprobs=1, max_tokens=1)
    assert said.logprobs.token_logprobs[0] is None and all(x < 0 for x in said.logprobs.token_logprobs[1:])


def complete(**fields):
    return client.completions.create(model=MODEL, prompt="Hello there", **fields).choices[0]


for check in (parsed, responses, tools, schemas):
    asyncio.run(check()) if asyncio.iscoroutinefunction(check) else check()
    print(f"{check.__name__}: good", flush=True)
