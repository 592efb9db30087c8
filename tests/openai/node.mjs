// The official JavaScript clients of OpenAI's and Anthropic's APIs against a running server, as npm has them. Arguments: its URL, the model's
// name, a key, the folder with `node_modules`. The model is small and its text noise, so that what is checked is form. Prints a line a check;
// the first that fails ends the process with its reason.

import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [url, model, key, folder] = process.argv.slice(2);
const load = createRequire(`${folder}/`);
const { OpenAI } = load("openai");
const { Anthropic } = load("@anthropic-ai/sdk");
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "Hello, wörld 🙂" }];
const greedy = { model, messages, max_tokens: 12, temperature: 0 };
// A model of random weights ends a text anywhere; what the client does not know it sends as it is.
const on = { ...greedy, ignore_eos: true };
const schema = { type: "object", properties: { unit: { enum: ["c", "f"] } }, required: ["unit"], additionalProperties: false };
const weather = { type: "function", function: { name: "weather", strict: true, parameters: schema } };
const tool = { name: "weather", input_schema: schema };
const oneCall = { tools: [tool], max_tokens: 400, tool_choice: { type: "any", disable_parallel_tool_use: true } };
const isUnit = ({ unit }) => assert.ok(["c", "f"].includes(unit), unit);

const checks = {
  async "chat.completions"() {
    const answer = await openai.chat.completions.create(on);
    const [choice] = answer.choices;
    assert.deepEqual([choice.finish_reason, answer.usage.completion_tokens], ["length", 12]);
    const stream = openai.chat.completions.stream({ ...on, stream_options: { include_usage: true } });
    let text = "";
    stream.on("content", part => { text += part; });
    const whole = await stream.finalChatCompletion();
    assert.deepEqual([text, whole.choices[0].message.content], [choice.message.content, choice.message.content]);
    assert.equal(whole.usage.completion_tokens, 12);
  },
  async "tools"() {
    const asked = { ...greedy, tools: [weather], tool_choice: "required", parallel_tool_calls: false, max_tokens: 400, temperature: 1 };
    const { choices: [{ message, finish_reason }] } = await openai.chat.completions.create(asked);
    assert.equal(finish_reason, "tool_calls");
    isUnit(JSON.parse(message.tool_calls[0].function.arguments));
    const streamed = await openai.chat.completions.stream(asked).finalChatCompletion();
    isUnit(JSON.parse(streamed.choices[0].message.tool_calls[0].function.arguments));
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" };
    assert.ok((await openai.chat.completions.create({ ...on, messages: [...messages, message, result] })).choices.length);
  },
  async "parse"() {
    const response_format = { type: "json_schema", json_schema: { name: "x", strict: true, schema } };
    const answer = await openai.chat.completions.parse({ ...greedy, temperature: 1, max_tokens: 400, response_format });
    isUnit(JSON.parse(answer.choices[0].message.content));
  },
  async "responses"() {
    const asked = { model, input: "Hello", max_output_tokens: 16, temperature: 0 };
    const answer = await openai.responses.create(asked);
    const streamed = await openai.responses.stream(asked).finalResponse();
    assert.equal(streamed.output_text, answer.output_text);
    const more = await openai.responses.create({ ...asked, previous_response_id: answer.id });
    assert.ok(more.usage.input_tokens > answer.usage.input_tokens);
  },
  async "embeddings"() {
    // The client asks for base64 by itself; the floats are the same.
    const input = ["One", "Two"];
    const [packed, plain] = await Promise.all([{}, { encoding_format: "float" }].map(more => openai.embeddings.create({ model, input, ...more })));
    packed.data.forEach(({ embedding }, i) => embedding.forEach((x, at) => assert.ok(Math.abs(x - plain.data[i].embedding[at]) < 1e-6)));
    assert.ok(Math.abs(packed.data[0].embedding.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-3);
  },
  async "messages"() {
    const answer = await anthropic.messages.create(greedy);
    const { input_tokens, cache_read_input_tokens } = answer.usage;
    const counted = await anthropic.messages.countTokens({ model, messages });
    assert.equal(counted.input_tokens, input_tokens + (cache_read_input_tokens ?? 0));
    const stream = anthropic.messages.stream(greedy);
    assert.equal(await stream.finalText(), answer.content[0].text);
    const { content, stop_reason } = await anthropic.messages.stream({ ...greedy, ...oneCall, temperature: 1 }).finalMessage();
    assert.equal(stop_reason, "tool_use");
    isUnit(content.at(-1).input);
  },
  async "models and errors"() {
    for (const client of [openai, anthropic]) {
      const names = [];
      for await (const { id } of client.models.list()) names.push(id);
      assert.deepEqual(names, [model]);
    }
    await assert.rejects(openai.chat.completions.create({ ...greedy, model: "other" }), OpenAI.NotFoundError);
    await assert.rejects(openai.chat.completions.create({ ...greedy, messages: [] }), OpenAI.BadRequestError);
    await assert.rejects(anthropic.messages.create({ ...greedy, max_tokens: 0 }), Anthropic.BadRequestError);
    await assert.rejects(new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 }).models.list(), OpenAI.AuthenticationError);
    await assert.rejects(new Anthropic({ baseURL: url, apiKey: "wrong", maxRetries: 0 }).messages.create(greedy), Anthropic.AuthenticationError);
  },
  async "leaving"() {
    for await (const _ of await openai.chat.completions.create({ ...on, max_tokens: 3000, stream: true })) break;
    const running = async () => Number((await (await fetch(`${url}/metrics`, { headers: { authorization: `Bearer ${key}` } })).text()).match(/^astrai_num_requests_running (\d+)/m)[1]);
    for (let left = 500; await running() > 0; left--) {
      assert.ok(left > 0, "a request that nobody waits for runs on");
      await new Promise(done => setTimeout(done, 20));
    }
  },
};
for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`${name}: good`);
}
