"""What programs put between themselves and a server: langchain-openai, or litellm, as they come. Arguments: the server's address, the model's
name, its key, which of the two. The model is small and its text noise, so that what is checked is form."""

import asyncio
import json
import os
import sys
import typing

# A list of prices that litellm would fetch; the one in its package does.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
URL, MODEL, KEY, WHICH = sys.argv[1:5]


def langchain():
    import langchain_openai
    import pydantic
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage

    class Weather(pydantic.BaseModel):
        """Tells the weather."""
        unit: typing.Literal["c", "f"]

    def chat(**fields):
        return langchain_openai.ChatOpenAI(
            **{"base_url": f"{URL}/v1", "api_key": KEY, "model": MODEL, "temperature": 0, "max_tokens": 12, "max_retries": 0, **fields})

    asked = [SystemMessage("Be brief."), HumanMessage("Hello")]
    plain = chat().invoke(asked)
    assert plain.content and plain.usage_metadata["output_tokens"] == 12 and plain.response_metadata["finish_reason"] == "length", plain
    chunks = list(chat(stream_usage=True).stream(asked))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == plain.content and whole.usage_metadata["output_tokens"] == 12, whole
    shown = chat(logprobs=True, top_logprobs=2).invoke(asked).response_metadata["logprobs"]["content"]
    assert len(shown) == 12 and len(shown[0]["top_logprobs"]) == 2
    both = chat().batch([asked, [HumanMessage("Hello")]])
    assert both[0].content == plain.content
    assert asyncio.run(chat().ainvoke(asked)).content == plain.content
    bound = chat(max_tokens=600, temperature=1, seed=3).bind_tools([Weather], tool_choice="Weather", strict=True)
    called = bound.invoke(asked)
    assert called.tool_calls[0]["args"]["unit"] in ("c", "f"), called
    merged = None
    for chunk in bound.stream(asked):
        merged = chunk if merged is None else merged + chunk
    assert merged.tool_calls[0]["args"]["unit"] in ("c", "f"), merged
    told = ToolMessage("sunny", tool_call_id=called.tool_calls[0]["id"])
    assert chat().invoke([*asked, called, told]).content
    for method in ("json_schema", "function_calling"):
        shaped = chat(max_tokens=600, temperature=1, seed=4).with_structured_output(Weather, method=method, strict=True).invoke(asked)
        assert shaped.unit in ("c", "f"), shaped
    responses = chat(use_responses_api=True, max_tokens=16).invoke(asked)
    assert responses.text and responses.usage_metadata["output_tokens"] == 16, responses
    text = langchain_openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, temperature=0, max_tokens=8, max_retries=0)
    assert text.invoke("Once upon") == "".join(text.stream("Once upon"))
    vectors = langchain_openai.OpenAIEmbeddings(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
    first, second = vectors.embed_documents(["Hello", "Once upon a time"])
    assert first == vectors.embed_query("Hello") != second


def litellm():
    import litellm

    litellm.drop_params = True
    litellm.suppress_debug_info = True
    asked = [{"role": "user", "content": "Hello"}]

    def chat(provider="openai", **fields):
        base = URL if provider == "anthropic" else f"{URL}/v1"
        return litellm.completion(**{"model": f"{provider}/{MODEL}", "api_base": base, "api_key": KEY, "messages": asked,
                                     "temperature": 0, "max_tokens": 12, "num_retries": 0, **fields})

    tool = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": {
        "type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"], "additionalProperties": False}}}
    for provider in ("openai", "hosted_vllm", "anthropic"):
        plain = chat(provider)
        text = plain.choices[0].message.content
        assert text and plain.choices[0].finish_reason == "length" and plain.usage.completion_tokens == 12, plain
        streamed = list(chat(provider, stream=True, stream_options={"include_usage": True}))
        joined = "".join(c.choices[0].delta.content or "" for c in streamed if c.choices)
        assert joined == text and streamed[-1].usage.completion_tokens == 12, (provider, joined, text, streamed[-1])
        named = {"type": "function", "function": {"name": "weather"}}
        called = chat(provider, tools=[tool], tool_choice=named, parallel_tool_calls=False, max_tokens=600, temperature=1, seed=3)
        arguments = json.loads(called.choices[0].message.tool_calls[0].function.arguments)
        assert arguments["unit"] in ("c", "f"), called
        pieces = list(chat(provider, tools=[tool], tool_choice=named, parallel_tool_calls=False, max_tokens=600, temperature=1, seed=3, stream=True))
        whole = litellm.stream_chunk_builder(pieces)
        assert json.loads(whole.choices[0].message.tool_calls[0].function.arguments)["unit"] in ("c", "f"), whole
    many = chat(n=3, temperature=1, seed=5)
    assert len(many.choices) == 3
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": tool["function"]["parameters"]}}
    assert json.loads(chat(response_format=form, max_tokens=600, temperature=1).choices[0].message.content)["unit"] in ("c", "f")
    said = litellm.text_completion(model=f"text-completion-openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, prompt="Once upon",
                                   max_tokens=8, temperature=0)
    assert said.choices[0].text and said.usage.completion_tokens == 8, said
    vectors = litellm.embedding(model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, input=["Hello", "Once"])
    assert [len(e["embedding"]) for e in vectors.data] == [32, 32], vectors
    answer = litellm.responses(model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, input="Hello", max_output_tokens=16,
                              temperature=0)
    assert answer.status == "incomplete" and answer.usage.output_tokens == 16, answer
    for wrong, kind in ((dict(api_key="other"), litellm.AuthenticationError), (dict(temperature=-1), litellm.BadRequestError),
                        (dict(model="openai/other"), litellm.NotFoundError),
                        (dict(messages=[{"role": "user", "content": "long " * 9000}]), litellm.ContextWindowExceededError)):
        try:
            chat(**wrong)
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


{"langchain": langchain, "litellm": litellm}[WHICH]()
print(f"{WHICH}: good", flush=True)
