"""Anthropic's official client against `astrai serve`. Arguments: the server's address, the model's name, its key. The client is used as it
comes; the model is small and its text noise, so that what is checked is form."""

import sys

import anthropic

URL, MODEL, KEY = sys.argv[1:4]
client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60)
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "weather", "description": "tells it", "input_schema": {
    "type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"], "additionalProperties": False}}


GREEDY = {"temperature": 0}


def ask(temperature=None, **fields):
    # The client has no temperature of its own any more; what it does not know it sends as it is.
    body = {} if temperature is None else {"extra_body": {"temperature": temperature}}
    return client.messages.create(**{"model": MODEL, "max_tokens": 8, "messages": HELLO, **body, **fields})


def refuses(kind, call, word):
    try:
        call()
    except kind as e:
        assert word in str(e) and e.request_id, (str(e), e.request_id)
        return
    raise AssertionError(f"no {kind.__name__}")


def messages():
    answer = ask(system="Be brief.", temperature=0)
    assert answer.role == "assistant" and answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 8
    assert answer.content[0].type == "text"
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.")
    cached = answer.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == answer.usage.input_tokens + cached, (counted, answer.usage)
    again = ask(system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}], temperature=0)
    assert again.content[0].text == answer.content[0].text
    long = ask(max_tokens=60, temperature=0).content[0].text
    letter = next(c for c in long[1:] if c.isascii())
    stopped = ask(stop_sequences=[letter], max_tokens=60, temperature=0)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", letter), stopped


def streams():
    whole = ask(temperature=0)
    with client.messages.stream(model=MODEL, max_tokens=8, messages=HELLO, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 8
    kinds = [event.type for event in ask(temperature=0, stream=True)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]


def tools():
    # One call: of many the last may be cut off by max_tokens.
    one = {"disable_parallel_tool_use": True}
    for choice in ({"type": "any", **one}, {"type": "tool", "name": "weather", **one}):
        answer = ask(tools=[TOOL], tool_choice=choice, max_tokens=400, temperature=1)
        assert answer.stop_reason == "tool_use", answer
        call = answer.content[-1]
        assert call.type == "tool_use" and call.name == "weather" and call.input["unit"] in ("c", "f")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}
    turn = {"role": "assistant", "content": [block.model_dump() for block in answer.content]}
    assert ask(tools=[TOOL], messages=[*HELLO, turn, result], temperature=0).content
    with client.messages.stream(model=MODEL, max_tokens=400, messages=HELLO, tools=[TOOL], tool_choice={"type": "any", **one}) as stream:
        final = stream.get_final_message()
    assert final.content[-1].input["unit"] in ("c", "f")


def models():
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).display_name == MODEL


def errors():
    bad = anthropic.BadRequestError
    refuses(bad, lambda: ask(max_tokens=0), "max_tokens")
    refuses(bad, lambda: ask(messages=[]), "messages")
    refuses(bad, lambda: ask(temperature=-1), "temperature")
    refuses(bad, lambda: ask(tools=[TOOL], tool_choice={"type": "tool", "name": "other"}), "other")
    refuses(anthropic.NotFoundError, lambda: ask(model="other"), "other")
    stranger = anthropic.Anthropic(base_url=URL, api_key="wrong", max_retries=0)
    refuses(anthropic.AuthenticationError, lambda: stranger.messages.create(model=MODEL, max_tokens=1, messages=HELLO), "key")
    assert ask(), "the server lives on"


for check in (messages, streams, tools, models, errors):
    check()
    print(f"{check.__name__}: good", flush=True)
