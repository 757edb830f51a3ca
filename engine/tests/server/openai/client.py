"""The engine as the official OpenAI client sees it: `client.py PORT`, a tiny random model behind that port.

The client checks types as it parses, so an answer that comes through has OpenAI's shape; what it says is checked here."""

import asyncio
import json
import sys
import unittest
from typing import Literal

import openai
from pydantic import BaseModel, Field

URL = f"http://127.0.0.1:{sys.argv.pop()}"
CLIENT = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, timeout=300)
GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
HI = [{"role": "user", "content": "say hi"}]


class Weather(BaseModel):
    """Tells the weather."""

    city: str = Field(max_length=6)
    unit: Literal["c", "f"]
    days: int = Field(ge=1, le=9)


class Clock(BaseModel):
    """Tells the time."""

    utc: bool


TOOLS = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Clock)]


def complete(prompt="Once upon a time", **more):
    return CLIENT.completions.create(prompt=prompt, **{**GREEDY, "max_tokens": 12, **more})


def chat(**more):
    return CLIENT.chat.completions.create(messages=HI, **{**GREEDY, "max_tokens": 12, **more})


class Models(unittest.TestCase):
    def test_models_are_listed_and_retrieved(self):
        self.assertEqual([m.id for m in CLIENT.models.list()], ["tiny"])
        self.assertEqual(CLIENT.models.retrieve("tiny").owned_by, "truebeat")
        with self.assertRaises(openai.NotFoundError) as caught:
            CLIENT.models.retrieve("other")
        self.assertEqual(caught.exception.code, "model_not_found")


class Completions(unittest.TestCase):
    def test_whole_streamed_and_counted(self):
        whole = complete()
        self.assertEqual(whole.choices[0].finish_reason, "length")
        self.assertEqual(whole.usage.completion_tokens, 12)
        chunks = list(complete(stream=True, stream_options={"include_usage": True}))
        self.assertEqual("".join(c.choices[0].text for c in chunks[:-1]), whole.choices[0].text)
        self.assertEqual((chunks[-1].choices, chunks[-1].usage), ([], whole.usage))
        self.assertTrue(all(c.usage is None for c in chunks[:-1]))

    def test_n_seeds_and_lists_of_prompts(self):
        sampled = {"temperature": 1.0, "seed": 7}
        both = complete(["one", "two"], n=2, **sampled)
        self.assertEqual([c.index for c in both.choices], [0, 1, 2, 3])
        again = complete("two", temperature=1.0, seed=8)
        self.assertEqual(both.choices[3].text, again.choices[0].text)
        self.assertEqual(complete("one", **sampled).choices[0].text, both.choices[0].text)

    def test_echo_logprobs_stop_and_bias(self):
        echoed = complete(echo=True, logprobs=3, max_tokens=4).choices[0]
        self.assertTrue(echoed.text.startswith("Once upon a time"))
        self.assertIsNone(echoed.logprobs.token_logprobs[0])
        self.assertTrue(all(len(top) >= 3 for top in echoed.logprobs.top_logprobs[1:]))
        full = complete(max_tokens=30).choices[0].text
        cut = complete(max_tokens=30, stop=[full[8:11]]).choices[0]
        self.assertEqual((cut.text, cut.finish_reason), (full[: full.index(full[8:11])], "stop"))
        same = complete(logit_bias={"300": 100}, logprobs=0, max_tokens=5).choices[0].logprobs.tokens
        self.assertEqual(len(set(same)), 1)
        other = complete(frequency_penalty=2.0, presence_penalty=2.0, logit_bias={"300": 10}, logprobs=0).choices[0]
        self.assertGreater(len(set(other.logprobs.tokens)), 1)


class Chats(unittest.TestCase):
    def test_whole_streamed_and_with_logprobs(self):
        whole = chat(logprobs=True, top_logprobs=2, user="me", max_completion_tokens=9)
        self.assertEqual(whole.choices[0].message.role, "assistant")
        self.assertEqual([len(t.top_logprobs) for t in whole.choices[0].logprobs.content], [2] * 9)
        spelled = b"".join(bytes(t.bytes) for t in whole.choices[0].logprobs.content)
        self.assertEqual(spelled.decode(errors="replace"), whole.choices[0].message.content)
        chunks = list(chat(stream=True, max_completion_tokens=9))
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        self.assertEqual(text, whole.choices[0].message.content)

    def test_a_pydantic_model_comes_back(self):
        for seed in range(3):
            parsed = CLIENT.chat.completions.parse(
                model="tiny", messages=HI, response_format=Weather, max_tokens=900, seed=seed
            )
            self.assertIsInstance(parsed.choices[0].message.parsed, Weather)

    def test_other_forms(self):
        answer = chat(extra_body={"guided_choice": ["red", "green"]})
        self.assertIn(answer.choices[0].message.content, ["red", "green"])
        answer = chat(extra_body={"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, max_tokens=30)
        self.assertRegex(answer.choices[0].message.content, r"^[0-9]{3}-[a-f]{2}$")


class Tools(unittest.TestCase):
    def ask(self, **more):
        body = {"model": "tiny", "messages": HI, "tools": TOOLS, "max_tokens": 900, "temperature": 0, **more}
        return CLIENT.chat.completions.create(**body)

    def test_a_required_call_has_arguments_that_fit(self):
        choice = self.ask(tool_choice="required", parallel_tool_calls=False).choices[0]
        self.assertEqual((choice.finish_reason, len(choice.message.tool_calls)), ("tool_calls", 1))
        call = choice.message.tool_calls[0]
        {"Weather": Weather, "Clock": Clock}[call.function.name].model_validate_json(call.function.arguments)

    def test_a_named_call_streams(self):
        named = {"type": "function", "function": {"name": "Weather"}}
        whole = self.ask(tool_choice=named).choices[0].message.tool_calls[0].function
        deltas = [c.choices[0].delta for c in self.ask(tool_choice=named, stream=True)]
        pieces = [p for d in deltas for p in d.tool_calls or []]
        self.assertEqual((pieces[0].function.name, pieces[0].index), ("Weather", 0))
        self.assertGreater(len(pieces), 3)
        self.assertEqual("".join(p.function.arguments for p in pieces), whole.arguments)

    def test_the_clients_own_reader_of_streams_finds_the_call(self):
        body = {"model": "tiny", "messages": HI, "tools": TOOLS, "tool_choice": "required", "max_tokens": 900}
        with CLIENT.chat.completions.stream(**body, seed=1, parallel_tool_calls=False) as stream:
            done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        self.assertEqual(len(done), 1)
        self.assertIsInstance(done[0].parsed_arguments, (Weather, Clock))

    def test_a_conversation_goes_on_after_a_call(self):
        message = self.ask(tool_choice="required", parallel_tool_calls=False).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        answer = self.ask(messages=[*HI, message, result], tool_choice="none", max_tokens=5)
        self.assertIsNone(answer.choices[0].message.tool_calls)


class Errors(unittest.TestCase):
    def test_a_field_that_is_wrong_is_named(self):
        for more, param in [
            ({"n": 0}, "n"),
            ({"suffix": "x"}, "suffix"),
            ({"best_of": 2}, "best_of"),
            ({"extra_body": {"max_token": 3}}, "max_token"),
            ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
        ]:
            with self.assertRaises(openai.BadRequestError) as caught:
                complete(**more)
            self.assertEqual(caught.exception.param, param)
            self.assertTrue(caught.exception.request_id)

    def test_paths_methods_and_deadlines(self):
        with self.assertRaises(openai.NotFoundError):
            CLIENT.embeddings.create(model="tiny", input="x")
        with self.assertRaises(openai.APIStatusError) as caught:
            CLIENT.get("/completions", cast_to=object)
        self.assertEqual(caught.exception.status_code, 405)
        with self.assertRaises(openai.APIStatusError) as caught:
            complete(max_tokens=5000, extra_headers={"x-request-timeout-ms": "1"})
        # not done in time, known at once that it cannot be, or so late with its body
        self.assertIn(caught.exception.status_code, (408, 503, 504))

    def test_ids_come_back(self):
        raw = CLIENT.completions.with_raw_response.create(
            model="tiny", prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine-7"}
        )
        self.assertEqual(raw.headers["x-request-id"], "mine-7")


class Tokens(unittest.TestCase):
    def test_there_and_back(self):
        text = "Grüße, 漢字 and 🦀"
        told = CLIENT.post(URL + "/tokenize", body={"prompt": text, "add_special_tokens": False}, cast_to=object)
        self.assertEqual(told["count"], len(told["tokens"]))
        back = CLIENT.post(URL + "/detokenize", body={"tokens": told["tokens"]}, cast_to=object)
        self.assertEqual(back["prompt"], text)


class Neighbours(unittest.TestCase):
    def test_many_at_once_get_what_each_gets_alone(self):
        prompts = [f"story number {i}" for i in range(8)]
        alone = [complete(p).choices[0].text for p in prompts]

        async def together():
            async with openai.AsyncOpenAI(base_url=URL + "/v1", api_key="none", max_retries=0) as client:
                asked = [client.completions.create(prompt=p, **{**GREEDY, "max_tokens": 12}) for p in prompts]
                return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

        self.assertEqual(asyncio.run(together()), alone)
        self.assertEqual(len({json.dumps(t) for t in alone}), 8)


if __name__ == "__main__":
    unittest.main()
