"""The official client of OpenAI's API against a server of a model whose answers are known: after each letter comes the next,
after 9 the end of the text, after ! a face. Arguments: the server's address, its API key, and whether it is slow: then only
what needs time is checked. The client is used as it comes."""

import asyncio
import sys
import time

import openai

address, key, pace = sys.argv[1:]
client = openai.OpenAI(base_url=address + "/v1", api_key=key, max_retries=0, timeout=20)
MODEL = "org/alphabet"


def chat(said="hi", **fields):
    fields = {"model": MODEL, "temperature": 0, **fields}
    return client.chat.completions.create(messages=[{"role": "user", "content": said}], **fields)


def complete(prompt, **fields):
    return client.completions.create(**{"model": MODEL, "prompt": prompt, "temperature": 0, **fields})


def refused(kind, call, **want):
    try:
        call()
    except kind as e:
        for name, value in want.items():
            assert getattr(e, name) == value, (name, getattr(e, name), value)
        assert e.request_id, "no request id"
        return e
    raise AssertionError(f"no {kind.__name__}")


def models():
    assert [m.id for m in client.models.list()] == [MODEL, "alias"]
    assert client.models.retrieve(MODEL).object == "model"
    refused(openai.NotFoundError, lambda: client.models.retrieve("other"), code="model_not_found", param="model")


def plain():
    answer = chat(max_tokens=3)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "abc", "length")
    assert choice.message.refusal is None and choice.message.tool_calls is None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 3
    assert answer._request_id
    assert chat("6", max_completion_tokens=9, extra_body={"add_generation_prompt": False}).choices[0].message.content == "789"
    stopped = chat(stop=["x", "de"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("abc", "stop")
    several = chat(n=3, temperature=1, seed=1, max_tokens=2)
    assert [(c.index, c.message.content) for c in several.choices] == [(i, "ab") for i in range(3)]


def streamed():
    chunks = list(chat(max_tokens=3, stream=True))
    assert all(len(c.choices) == 1 and c.usage is None for c in chunks)
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "abc"
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    chunks = list(chat(max_tokens=3, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 3
    face = chat("!", max_tokens=5, stream=True, extra_body={"add_generation_prompt": False})
    assert "".join(c.choices[0].delta.content or "" for c in face) == "🙂a"
    several = {0: "", 1: ""}
    for chunk in chat(n=2, temperature=1, seed=1, stop="d", stream=True):
        several[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert several == {0: "abc", 1: "abc"}
    said = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    with client.chat.completions.stream(**said, stop="d") as stream:
        kinds = {event.type for event in stream}
        assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
        assert stream.get_final_completion().choices[0].message.content == "abc"
    with client.chat.completions.stream(**said, max_tokens=3) as stream:
        try:
            stream.get_final_completion()
        except openai.LengthFinishReasonError as e:
            assert e.completion.usage is None
        else:
            raise AssertionError("a text that was cut off was taken for whole")


def completions():
    answer = complete(["x", "b"], max_tokens=2, echo=True)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "xyz"), (1, "bcd")]
    assert complete([120], max_tokens=1).choices[0].text == "y"
    assert complete([[120], [98]], max_tokens=1).choices[1].text == "c"
    shown = complete("x", max_tokens=2, logprobs=2).choices[0].logprobs
    assert (shown.tokens, shown.text_offset, len(shown.top_logprobs[0])) == (["y", "z"], [0, 1], 2)
    chunks = list(complete("x", max_tokens=3, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == "yza" and chunks[-1].usage.completion_tokens == 3


def logprobs():
    content = chat(max_tokens=2, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [(e.token, e.bytes, len(e.top_logprobs)) for e in content] == [("a", [97], 3), ("b", [98], 3)]
    assert all(-1e-3 < e.logprob <= 0 for e in content)
    entries = []
    for chunk in chat(max_tokens=2, logprobs=True, stream=True):
        if chunk.choices[0].logprobs:
            entries += chunk.choices[0].logprobs.content
    assert [e.token for e in entries] == ["a", "b"]
    forced = chat(max_tokens=1, logprobs=True, top_logprobs=1, logit_bias={"53": 100}).choices[0].logprobs.content[0]
    assert forced.token == "5" and forced.top_logprobs[0].token == "a" and forced.logprob >= -9999


def errors():
    bad = openai.BadRequestError
    refused(bad, lambda: chat(temperature=-1), param="temperature", type="invalid_request_error")
    refused(bad, lambda: chat(n=2), param="n")
    refused(bad, lambda: chat("x" * 300), code="context_length_exceeded", param="messages")
    refused(bad, lambda: chat("x" * 300, stream=True), code="context_length_exceeded")
    refused(bad, lambda: chat("raise"), param="messages")
    refused(bad, lambda: chat(response_format={"type": "sound"}), param="response_format.type")
    refused(openai.NotFoundError, lambda: chat(model="gpt"), code="model_not_found", param="model")
    other = client.with_options(api_key="wrong")
    refused(openai.AuthenticationError, other.models.list, code="invalid_api_key")
    e = refused(openai.InternalServerError, lambda: complete([9, 7]), type="server_error")
    assert "NaN" in str(e)
    broken = chat(max_tokens=5, logit_bias={"7": 100}, stream=True)
    try:
        list(broken)
    except openai.APIError as e:
        assert "NaN" in e.message
    else:
        raise AssertionError("a stream that broke off was taken for whole")


def waiting():
    started = time.monotonic()
    try:
        client.with_options(timeout=0.3).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=200
        )
    except openai.APITimeoutError:
        pass
    else:
        raise AssertionError("no timeout")
    assert time.monotonic() - started < 10
    stream = chat(max_tokens=200, stream=True)
    for seen, _ in enumerate(stream):
        if seen == 3:
            break
    stream.close()


async def cancelled():
    async with openai.AsyncOpenAI(base_url=address + "/v1", api_key=key, max_retries=0) as other:
        messages = [{"role": "user", "content": "hi"}]
        call = lambda: other.chat.completions.create(model=MODEL, messages=messages, max_tokens=200)
        tasks = [asyncio.create_task(call()) for _ in range(4)]
        await asyncio.sleep(0.2)
        [task.cancel() for task in tasks]
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(e, asyncio.CancelledError) for e in ended), ended


if pace == "slow":
    waiting()
    asyncio.run(cancelled())
else:
    for check in [models, plain, streamed, completions, logprobs, errors]:
        check()
print("all is well")
