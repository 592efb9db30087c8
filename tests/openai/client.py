"""The official client of OpenAI's API against a running server. Arguments: its URL, the model's name, a key, the URL of a second
server that takes one request and lets one wait. Prints a line a check; the first that fails ends the process with its reason."""

import asyncio
import sys
import time
import urllib.request

import openai

URL, MODEL, KEY, NARROW = sys.argv[1:5]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
HELLO = [{"role": "user", "content": "Hello, wörld 🙂"}]
# A model of random weights ends a text anywhere; these tests want lengths they know.
ON = {"ignore_eos": True}


def chat(**more):
    given = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0, "extra_body": ON}
    return client.chat.completions.create(**{**given, **more})


def complete(**more):
    given = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "extra_body": ON}
    return client.completions.create(**{**given, **more})


def refuses(kind, call, *words):
    try:
        call()
    except kind as e:
        body = e.body or {}
        told = f"{body.get('message')} {body.get('param')} {body.get('code')} {body.get('type')}"
        assert type(e) is kind and all(w in told for w in words), (kind, type(e), told)
        return e
    raise AssertionError(f"not refused with {kind}")


def gauge(name, url=URL):
    asked = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    text = urllib.request.urlopen(asked).read().decode()
    lines = [line for line in text.splitlines() if line.startswith(name) and not line.startswith("#")]
    assert lines, f"no {name} in the metrics"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def comes_to_rest(url=URL):
    until = time.monotonic() + 20
    while gauge("astrai_num_requests_running", url) + gauge("astrai_num_requests_waiting", url) > 0:
        assert time.monotonic() < until, "a request that nobody waits for runs on"
        time.sleep(0.02)


def models():
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    refuses(openai.NotFoundError, lambda: client.models.retrieve("other/one"), "model_not_found")


def plain():
    answer = chat()
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == MODEL
    assert choice.message.role == "assistant" and choice.message.content and choice.finish_reason == "length"
    u = answer.usage
    assert u.completion_tokens == 12 and u.total_tokens == u.prompt_tokens + 12
    assert chat().choices[0].message.content == choice.message.content
    warm = {"temperature": 1.0, "seed": 7, "max_tokens": 40}
    assert chat(**warm).choices[0].message.content == chat(**warm).choices[0].message.content
    assert chat(**warm).choices[0].message.content != chat(**{**warm, "seed": 8}).choices[0].message.content


def streamed():
    want = chat(max_tokens=30)
    chunks = list(chat(max_tokens=30, stream=True))
    assert all(len(c.choices) == 1 and c.usage is None for c in chunks)
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert all(c.choices[0].finish_reason is None for c in chunks[:-1])
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == want.choices[0].message.content
    chunks = list(chat(max_tokens=30, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage == want.usage.model_copy(update={
        "prompt_tokens_details": chunks[-1].usage.prompt_tokens_details})
    assert all(c.usage is None and c.choices for c in chunks[:-1])


def several():
    answer = chat(n=3, temperature=1.0, seed=3, max_tokens=20)
    assert [c.index for c in answer.choices] == [0, 1, 2] and answer.usage.completion_tokens == 60
    texts = [""] * 3
    for chunk in chat(n=3, temperature=1.0, seed=3, max_tokens=20, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [c.message.content for c in answer.choices] and len(set(texts)) > 1


def texts():
    answer = complete()
    assert answer.object == "text_completion" and answer.choices[0].finish_reason == "length"
    text = answer.choices[0].text
    assert "".join(c.choices[0].text for c in complete(stream=True)) == text
    assert complete(echo=True).choices[0].text == "Once upon a time" + text
    many = complete(prompt=["Once upon a time", "Another"], n=2, temperature=1.0, seed=1)
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    ids = complete(prompt=[5, 6, 7], max_tokens=3)
    assert ids.usage.prompt_tokens == 3 and ids.usage.completion_tokens == 3


def stops():
    whole = complete(max_tokens=40).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    cut = complete(max_tokens=40, stop=[stop, "never there"])
    assert cut.choices[0].text == whole[: whole.index(stop)] and cut.choices[0].finish_reason == "stop"
    assert "".join(c.choices[0].text for c in complete(max_tokens=40, stop=stop, stream=True)) == cut.choices[0].text


def logprobs():
    answer = chat(logprobs=True, top_logprobs=3, max_tokens=5)
    content = answer.choices[0].logprobs.content
    assert len(content) == 5
    for token in content:
        assert -60 < token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob, "greedy takes the likeliest"
    # A token may be a part of a character: bytes say what the text of a token cannot.
    whole = b"".join(bytes(t.bytes) for t in content).decode(errors="replace")
    assert whole == answer.choices[0].message.content
    lp = complete(logprobs=2, max_tokens=4, echo=False).choices[0].logprobs
    assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == 4 and lp.text_offset == sorted(lp.text_offset)


def tools():
    tool = {"type": "function", "function": {"name": "weather", "description": "tells it", "parameters": {"type": "object", "properties": {}}}}
    assert chat(tools=[tool]).usage.prompt_tokens > chat().usage.prompt_tokens + 10
    asked = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"}]
    assert chat(messages=asked, tools=[tool]).choices[0].message.content


def errors():
    bad = openai.BadRequestError
    refuses(openai.NotFoundError, lambda: chat(model="other"), "model_not_found", "other")
    refuses(bad, lambda: chat(temperature=-1), "temperature")
    refuses(bad, lambda: chat(top_p=0), "top_p")
    refuses(bad, lambda: chat(n=0), "n")
    refuses(bad, lambda: chat(n=10**9), "n")
    refuses(bad, lambda: chat(max_tokens=0), "max_tokens")
    refuses(bad, lambda: chat(messages=[]), "messages")
    refuses(bad, lambda: chat(messages=[{"role": "user", "content": 5}]), "messages[0]")
    refuses(bad, lambda: chat(messages=[{"role": "clown", "content": "x"}]), "role")
    refuses(bad, lambda: chat(messages=[{"role": "user", "content": "raise"}]), "the template's own words")
    refuses(bad, lambda: chat(logprobs=True, top_logprobs=99), "top_logprobs")
    refuses(bad, lambda: chat(logit_bias={"x": 1}), "logit_bias")
    refuses(bad, lambda: chat(stop=[""]), "stop")
    refuses(bad, lambda: complete(prompt="long " * 9000), "context_length_exceeded")
    refuses(bad, lambda: complete(prompt=[10**6]), "prompt")
    stranger = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0)
    refuses(openai.AuthenticationError, lambda: stranger.models.list(), "invalid_api_key")
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"})
    assert raw.headers["x-request-id"] == "mine-1"
    assert chat(), "the server lives on"


def timeouts():
    # So small a model writes ten thousand tokens a second.
    hasty = client.with_options(timeout=0.1)
    long = {"model": MODEL, "messages": HELLO, "max_tokens": 3500, "n": 16, "extra_body": ON}
    try:
        hasty.chat.completions.create(**long)
        raise AssertionError("no timeout")
    except openai.APITimeoutError:
        comes_to_rest()


def cancels():
    stream = chat(stream=True, max_tokens=3500)
    for _, _ in zip(stream, range(3)):
        pass
    stream.close()
    comes_to_rest()


def vectors():
    # The client asks for base64 and unpacks it.
    got = client.embeddings.create(model=MODEL, input=["Hello", "Once upon a time", "Hello"])
    length = lambda v: sum(x * x for x in v) ** 0.5
    data = [e.embedding for e in got.data]
    assert [e.index for e in got.data] == [0, 1, 2] and data[0] == data[2] != data[1]
    assert all(abs(length(v) - 1) < 1e-5 for v in data) and got.usage.prompt_tokens == got.usage.total_tokens > 3
    plain = client.embeddings.create(model=MODEL, input="Hello", encoding_format="float", dimensions=8).data[0].embedding
    assert len(plain) == 8 and all(abs(a - b / length(data[0][:8])) < 1e-5 for a, b in zip(plain, data[0]))
    refuses(openai.BadRequestError, lambda: client.embeddings.create(model=MODEL, input=""), "input")


async def at_once():
    many = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120)

    def ask(i):
        return many.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * i}], seed=i,
                                            temperature=0.9, max_tokens=10 + i, extra_body=ON)

    together = await asyncio.gather(*(ask(i) for i in range(16)))
    for i, answer in enumerate(together):
        alone = await ask(i)
        assert alone.choices[0].message.content == answer.choices[0].message.content, i
    long = many.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3500, n=16, extra_body=ON)
    task = asyncio.create_task(long)
    await asyncio.sleep(0.2)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass
    comes_to_rest()


async def overload():
    crowd = openai.AsyncOpenAI(base_url=f"{NARROW}/v1", api_key=KEY, max_retries=0, timeout=120)
    ask = lambda: crowd.completions.create(model=MODEL, prompt="a", max_tokens=300, extra_body=ON)
    answers = await asyncio.gather(*(ask() for _ in range(12)), return_exceptions=True)
    refused = [a for a in answers if isinstance(a, openai.RateLimitError)]
    good = [a for a in answers if not isinstance(a, Exception)]
    assert len(refused) + len(good) == 12 and refused and len(good) >= 2, answers
    assert all(int(a.response.headers["retry-after"]) >= 1 for a in refused)
    comes_to_rest(NARROW)


for check in (models, plain, streamed, several, texts, stops, logprobs, vectors, tools, errors, timeouts, cancels, at_once, overload):
    asyncio.run(check()) if asyncio.iscoroutinefunction(check) else check()
    print(f"{check.__name__}: good", flush=True)
