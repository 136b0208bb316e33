"""The server with OpenAI's own client and lm-eval's: every field does what it says, or is refused by name."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import time
import urllib.request
from dataclasses import replace

import openai
import pytest
import torch
from starlette.testclient import TestClient
from support.base_model import write_base_model
from support.serving import serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.distributed.process_group import start_job
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation.conversation import ChatFormat
from pipeline.evaluation.from_checkpoint import InferenceEngine
from pipeline.evaluation.serving import Service
from pipeline.evaluation.sources import open_source
from pipeline.models.generation import GenerationSettings

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What colour is grass? (1)"}]
TEXT = "What colour is the sky?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_base_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder.parent, folder, "--max-batch", "8", "--name", "assistant") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(folder):
    return open_source(folder).load(start_job(Ranks(0, 0, 1, 1), distributed=False)).engine


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def ask(client, messages=QUESTION, **options):
    options = {"model": "assistant", "max_tokens": 12, "seed": 7} | options
    return client.chat.completions.create(messages=messages, **options)


def complete(client, prompt=TEXT, **options):
    options = {"model": "assistant", "max_tokens": 12, "seed": 7} | options
    return client.completions.create(prompt=prompt, **options)


def greedy_ids(model, ids, number):
    ids = list(ids)
    for _ in range(number):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-number:]


def logprobs_of(model, ids):
    """Return the log-probabilities (T, V) of the token after each position."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def test_a_chat_is_the_models_greedy_answer(client, model, tokenizer):
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    answer = ask(client, temperature=0)
    expected = greedy_ids(model, ids, 12)
    assert answer.choices[0].message.content == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": len(ids),
        "completion_tokens": 12,
        "total_tokens": len(ids) + 12,
    }
    parts = [{"type": "text", "text": QUESTION[0]["content"]}]
    again = ask(client, [{"role": "user", "content": parts}], temperature=0)
    assert again.choices[0].message == answer.choices[0].message
    # An answer of this server can be sent back as it is.
    ask(client, [*QUESTION, answer.choices[0].message.model_dump(), *QUESTION])


@pytest.mark.parametrize("call", [ask, complete])
def test_a_stream_is_the_whole_answer_in_parts(client, call):
    options = {"n": 2, "logprobs": True if call is ask else 2, "temperature": 0.9}
    whole = call(client, **options)
    chunks = list(call(client, stream=True, stream_options={"include_usage": True}, **options))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert len(chunks) > 8
    for choice in whole.choices:
        own = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert [part.finish_reason for part in own if part.finish_reason] == [choice.finish_reason]
        if call is ask:
            assert own[0].delta.role == "assistant"
            text = "".join(part.delta.content or "" for part in own)
            entries = [each for part in own if part.logprobs for each in part.logprobs.content]
            assert text == choice.message.content
            assert entries == choice.logprobs.content
        else:
            assert "".join(part.text for part in own) == choice.text
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                parts = [each for part in own for each in getattr(part.logprobs, name)]
                assert parts == getattr(choice.logprobs, name)


@pytest.mark.daily("1", "3")
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_stop_string_ends_the_text_and_is_never_shown(client, length):
    text = complete(client, temperature=0, max_tokens=20).choices[0].text
    start = len(text) // 2
    stop = text[start : start + length]
    expected = text[: text.index(stop)]
    for stops in (stop, ["nowhere", stop, "nor here", "not at all", "never"]):
        answer = complete(client, temperature=0, max_tokens=20, stop=stops, logprobs=0).choices[0]
        assert (answer.text, answer.finish_reason) == (expected, "stop")
        assert all(offset < len(expected) for offset in answer.logprobs.text_offset)
        chunks = list(complete(client, temperature=0, max_tokens=20, stop=stops, logprobs=0, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        offsets = [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset]
        assert offsets == answer.logprobs.text_offset
    usage = complete(client, temperature=0, max_tokens=20, stop=stop).usage
    assert usage.completion_tokens < 20


def test_an_end_token_ends_the_text_and_is_no_part_of_it(client):
    options = {"n": 8, "max_tokens": 90, "temperature": 2}
    answer = ask(client, logprobs=True, **options)
    ended = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert ended
    shown = sum(len(choice.logprobs.content) for choice in answer.choices)
    assert answer.usage.completion_tokens == shown + len(ended)
    answer = complete(client, logprobs=0, **options)
    ended = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert ended
    for choice in ended:  # lm-eval's client counts on the entry of the last token
        assert choice.logprobs.tokens[-1] in ("<|endoftext|>", "<|im_end|>")
        assert choice.logprobs.text_offset[-1] <= len(choice.text)  # less after half a character
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in answer.choices)


def test_the_same_seed_gives_the_same_text_whatever_else_is_asked(client, server):
    alone = [ask(client, seed=seed).choices[0].message.content for seed in range(4)]
    assert len(set(alone)) == 4
    assert ask(client, seed=None).choices[0].message != ask(client, seed=None).choices[0].message
    several = ask(client, seed=1, n=3).choices
    assert several[0].message.content == alone[1]
    assert len({choice.message.content for choice in several}) == 3

    equal_prompts = client.completions.create(model="assistant", prompt=[TEXT] * 3, max_tokens=8, seed=1)
    assert len({choice.text for choice in equal_prompts.choices}) == 3

    async def together():
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            calls = []
            for number in range(50):
                # Other lengths, settings and endpoints in one batch.
                options = {"max_tokens": 3 + number % 11, "temperature": number % 3 / 2, "top_k": number % 5}
                extra = {"top_k": options.pop("top_k"), "min_p": number % 2 / 10}
                calls.append(complete(client, TEXT[: 1 + number % 20], **options, extra_body=extra))
                calls += [ask(client, seed=number // 10)] if number % 10 == 0 and number < 40 else []
            return await asyncio.gather(*calls)

    answers = asyncio.run(together())
    assert len(answers) == 54
    assert [each.choices[0].message.content for each in answers if each.object == "chat.completion"] == alone


def test_settings_of_the_draw_are_heeded(client):
    greedy = complete(client, temperature=0).choices[0].text
    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        assert complete(client, extra_body=extra).choices[0].text == greedy
    assert complete(client, top_p=1e-9).choices[0].text == greedy
    assert complete(client, extra_body={"top_k": 0}).choices[0].text != greedy


def test_log_probabilities_are_those_of_a_plain_forward(client, model, tokenizer, engine):
    question = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    options = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 20}
    chat = ask(client, logprobs=True, top_logprobs=4, **options).choices[0]
    entries = chat.logprobs.content
    drawn = GenerationSettings(20, temperature=0.8, top_p=0.9, seed=7)
    (ids,) = engine.generate([question], drawn)
    assert chat.message.content == tokenizer.decode(ids, skip_special_tokens=True)
    assert [entry.token for entry in entries] == [tokenizer.decode(i) for i in ids]
    for entry in entries:
        assert entry.bytes == (None if "\ufffd" in entry.token else list(entry.token.encode()))
    rows = logprobs_of(model, [*question, *ids])[len(question) - 1 : -1]
    for token_id, entry, row in zip(ids, entries, rows, strict=True):
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(
            row.topk(4).values.tolist(), abs=1e-4
        )
    # The same prompt, seed and settings: the same tokens in the older form.
    text = complete(client, question, logprobs=4, **options).choices[0]
    assert text.text == chat.message.content
    assert text.logprobs.tokens == [entry.token for entry in entries]
    assert text.logprobs.token_logprobs == [entry.logprob for entry in entries]
    assert all(
        token in top for token, top in zip(text.logprobs.tokens, text.logprobs.top_logprobs, strict=True)
    )
    placed = zip(text.logprobs.text_offset, ["", *text.logprobs.tokens], text.logprobs.tokens, strict=False)
    for offset, before, token in placed:
        if "\ufffd" not in before + token:  # otherwise the place of a character is not certain yet
            assert text.text[offset:].startswith(token)


def test_a_prompt_is_echoed_with_its_log_probabilities(client, model, tokenizer):
    ids = tokenizer(TEXT)["input_ids"]
    expected = logprobs_of(model, ids)
    for prompt, max_tokens in ((ids, 1), (TEXT, 2), ([ids, ids[:3]], 1)):
        answer = complete(client, prompt, max_tokens=max_tokens, logprobs=1, echo=True, temperature=0)
        choice = answer.choices[0]
        assert choice.text.startswith(TEXT)
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.tokens) == len(ids) + max_tokens
        assert "".join(choice.logprobs.tokens[: len(ids)]) == TEXT
        assert choice.logprobs.text_offset[len(ids)] == len(TEXT)
        for position in range(1, len(ids)):
            row = expected[position - 1]
            assert choice.logprobs.token_logprobs[position] == pytest.approx(
                float(row[ids[position]]), abs=1e-4
            )
            assert max(choice.logprobs.top_logprobs[position].values()) == pytest.approx(
                float(row.max()), abs=1e-4
            )
    assert len(answer.choices) == 2
    assert answer.usage.prompt_tokens == len(ids) + 3
    assert complete(client, echo=True, max_tokens=2).choices[0].text.startswith(TEXT)


def test_lm_evals_client_gets_what_its_own_model_computes(server, folder):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    texts = [
        ("What colour is", " grass?"),
        ("It is", " green."),
        ("a", " lemon is yellow"),
        ("The", " sky é"),
    ]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(texts)]
    served = LocalCompletionsAPI(
        base_url=f"{server.url}/completions",
        model="assistant",
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        max_length=128,
        batch_size=3,
    )
    own = HFLM(str(folder), dtype="float32", device="cpu")
    for (got, is_greedy), (expected, was_greedy) in zip(
        served.loglikelihood(requests), own.loglikelihood(requests), strict=True
    ):
        assert got == pytest.approx(expected, abs=1e-4)
        assert is_greedy == was_greedy
    until = [Instance("generate_until", {}, ("What colour is", {"until": ["a"], "max_gen_toks": 8}), 0)]
    assert served.generate_until(until) == own.generate_until(until)


def post(server, path, body, **headers):
    """Return the status and the JSON of a raw request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{server.url}{path}", data, {"content-type": "application/json"} | headers
    )
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


CHAT = {"model": "assistant", "messages": QUESTION}
PLAIN = {"model": "assistant", "prompt": TEXT}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("chat", b"{", 400, None, "no valid JSON"),
        ("chat", b" " * (2**24 + 1), 413, None, "more than 16,777,216 bytes"),
        ("chat", b"\xff", 400, None, "no valid JSON"),
        ("chat", b'{"temperature": NaN}', 400, None, "no valid JSON"),
        ("chat", b"[" * 100_000, 400, None, "no valid JSON"),
        ("chat", b"[]", 400, None, "no JSON object"),
        ("chat", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, None, "hex escape"),
        ("chat", {"model": "assistant"}, 400, "messages", "field required"),
        ("chat", CHAT | {"messages": []}, 400, None, "messages: the conversation is empty"),
        ("chat", CHAT | {"messages": "hi"}, 400, "messages", "got 'hi'"),
        (
            "chat",
            CHAT | {"messages": [{"role": "robot", "content": "x"}]},
            400,
            None,
            "messages: turn 1 of 'messages' has the role 'robot'",
        ),
        ("chat", CHAT | {"messages": [{"role": "user"}]}, 400, None, "in place of text"),
        (
            "chat",
            CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            None,
            "image_url",
        ),
        ("chat", CHAT | {"model": "gpt-4"}, 404, "model", "gpt-4"),
        ("chat", CHAT | {"temperature": "hot"}, 400, "temperature", "got 'hot'"),
        ("chat", CHAT | {"temperature": 3}, 400, "temperature", "less than or equal to 2"),
        ("chat", CHAT | {"temperature": 1e-9}, 400, None, "temperature is 1e-09"),
        ("chat", CHAT | {"max_tokens": 0}, 400, "max_tokens", "equal to 1; got 0"),
        ("chat", CHAT | {"max_tokens": 2.5}, 400, "max_tokens", "integer"),
        ("chat", CHAT | {"max_tokens": 1, "max_completion_tokens": 1}, 400, "max_tokens", "leave it out"),
        ("chat", CHAT | {"max_tokens": 1000}, 400, None, "the model has 128 positions"),
        ("chat", CHAT | {"n": 0}, 400, "n", "greater than or equal to 1"),
        ("chat", CHAT | {"n": True}, 400, "n", "valid integer"),
        ("chat", CHAT | {"top_k": 2**31}, 400, "top_k", "less than"),
        ("chat", CHAT | {"stop": [""]}, 400, None, "a stop string is empty"),
        ("chat", CHAT | {"stop": [1]}, 400, "stop[0]", "valid string"),
        ("chat", CHAT | {"stream_options": {"x": True}}, 400, "stream_options.x.[key]", "include_usage"),
        (
            "chat",
            CHAT | {"response_format": {"type": "json_object"}},
            400,
            "response_format",
            "not supported",
        ),
        ("chat", CHAT | {"logit_bias": {"1": 5}}, 400, "logit_bias", "not supported"),
        ("chat", CHAT | {"presence_penalty": 0.5}, 400, "presence_penalty", "not supported"),
        ("chat", CHAT | {"tool_choice": "required"}, 400, "tool_choice", "required"),
        ("chat", CHAT | {"modalities": ["text", "audio"]}, 400, "modalities", "not supported"),
        ("chat", CHAT | {"guided_json": {}}, 400, "guided_json", "unknown"),
        ("text", {"model": "assistant"}, 400, "prompt", "field required"),
        ("text", PLAIN | {"prompt": []}, 400, "prompt", "at least 1 item"),
        ("text", PLAIN | {"prompt": [1, "a"]}, 400, "prompt[0].list[int][1]", "valid integer; got 'a'"),
        ("text", PLAIN | {"prompt": [100_000]}, 400, None, "prompts[0] has ids from 100000 to 100000"),
        ("text", PLAIN | {"prompt": [5] * 150}, 400, None, "150"),
        ("text", PLAIN | {"max_tokens": 0}, 400, "max_tokens", "equal to 1; got 0"),
        ("text", PLAIN | {"logprobs": 2, "echo": True}, 400, "logprobs", "0 or 1"),
        ("text", PLAIN | {"suffix": "end"}, 400, "suffix", "not supported"),
        ("text", PLAIN | {"best_of": 2}, 400, "best_of", "not supported"),
    ],
)
def test_a_broken_request_is_refused_by_name(server, path, body, status, param, words):
    got, answer = post(server, {"chat": "/chat/completions", "text": "/completions"}[path], body)
    error = answer["error"]
    assert (got, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_a_too_long_prompt_has_openais_code_and_harmless_fields_pass(client):
    with pytest.raises(openai.BadRequestError, match="150 ") as caught:
        complete(client, [5] * 150)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        ask(client, model="gpt-4")
    assert missing.value.code == "model_not_found"
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "stop": None}
    harmless |= {"frequency_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}}
    assert ask(client, extra_body=harmless).choices[0].message == ask(client).choices[0].message


def test_models_and_unknown_paths(client, server, folder):
    (card,) = client.models.list().data
    assert card.id == "assistant"
    for name in (folder.name, str(folder)):
        assert ask(client, model=name, max_tokens=1).model == "assistant"
    status, answer = post(server, "/embeddings", {})
    assert status == 404
    assert "/v1/embeddings" in answer["error"]["message"]
    assert post(server, "/models", {})[0] == 405
    for page in ({"host": "evil.example:80"}, {"origin": "https://evil.example"}, {"origin": "null"}):
        status, answer = post(server, "/completions", PLAIN, **page)
        assert (status, answer["error"]["code"]) == (403, "unknown_host")
    assert post(server, "/completions", PLAIN, origin="http://localhost:3000")[0] == 200


TEMPLATE = """\
{% for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}
{% if 'for ever' in message.content %}
{%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{% endif %}<|im_start|>{{ message.role }}
{{ message.content }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}<|im_start|>assistant
"""


@pytest.fixture(scope="module")
def tool_user(tmp_path_factory):
    """A server whose template writes tools, and its client, its tokenizer and its folder."""
    folder = write_base_model(tmp_path_factory.mktemp("tools") / "tools", TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with (
        serving(folder.parent, folder) as running,
        openai.OpenAI(base_url=running.url, api_key="none", max_retries=0) as client,
    ):
        yield client, ChatFormat(tokenizer)


def test_tools_and_their_results_go_through_the_template(tool_user):
    client, chat = tool_user
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    with_object = {
        **turns[1],
        "content": "",
        "tool_calls": [call | {"function": {"name": "f", "arguments": {"a": 1}}}],
    }
    for messages, extra, expected in (
        (turns[:1], {"tools": tools}, (turns[:1], tools)),
        (turns[:1], {"tools": tools, "tool_choice": "none"}, (turns[:1], None)),
        (turns, {}, ([turns[0], with_object, turns[2]], None)),
    ):
        ids = chat.render(*expected)
        answer = ask(client, messages, model="tools", temperature=0, max_tokens=5, **extra)
        assert answer.usage.prompt_tokens == len(ids)
        text = complete(client, ids, model="tools", temperature=0, max_tokens=5).choices[0].text
        assert answer.choices[0].message.content == text
    with pytest.raises(openai.BadRequestError, match="no system message"):
        ask(client, [{"role": "system", "content": "x"}, *turns[:1]], model="tools")


@pytest.mark.nightly  # five seconds of processor time
def test_a_template_that_does_not_end_is_stopped_and_the_next_question_is_answered(tool_user):
    client, _ = tool_user
    with pytest.raises(openai.BadRequestError, match="did not end within 5 s"):
        ask(client, [{"role": "user", "content": "for ever"}], model="tools")
    assert ask(client, model="tools", max_tokens=2).usage.completion_tokens == 2


class FaultyEngine(InferenceEngine):
    """An engine that fails, or runs out of memory, where a text begins with a certain token."""

    def generate(self, prompts, settings, on_token=None):
        if prompts[0][0] == 7:
            raise RuntimeError("a fault")
        if prompts[0][0] == 8:
            raise torch.OutOfMemoryError("none left")
        return super().generate(prompts, settings, on_token)


def test_a_fault_is_a_500_with_a_number_and_the_server_goes_on(folder, caplog):
    job = start_job(Ranks(0, 0, 1, 1), distributed=False)
    loaded = open_source(folder).load(job)
    engine = FaultyEngine(loaded.engine.module, "fp32", job.device, casts=False, autocast=False)
    service = Service(replace(loaded, engine=engine), job, ["tiny"], max_batch=4, api_key=None)
    client = TestClient(service.build_app(), base_url="http://localhost")
    answer = client.post("/v1/completions", json={"prompt": [7, 1]})
    assert answer.status_code == 500
    number = re.fullmatch("internal error (\\w+); .*", answer.json()["error"]["message"])[1]
    assert f"internal error {number}" in caplog.text
    assert "RuntimeError: a fault" in caplog.text
    streamed = client.post("/v1/completions", json={"prompt": [7, 1], "stream": True})
    (event,) = streamed.text.strip().split("\n\n")
    assert json.loads(event.removeprefix("data: "))["error"]["type"] == "server_error"
    full = client.post("/v1/completions", json={"prompt": [8, 1]})
    assert (full.status_code, full.json()["error"]["type"]) == (503, "server_error")
    assert client.post("/v1/completions", json={"prompt": [9, 1]}).status_code == 200


def count_rows(server):
    with urllib.request.urlopen(server.url.replace("/v1", "/health")) as response:
        return json.load(response)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(server, stream):
    """A row whose client has gone ends at its next token and not at `max_tokens`."""
    body = json.dumps(PLAIN | {"n": 8, "max_tokens": 115, "stream": stream, "temperature": 0}).encode()
    address = server.url.removeprefix("http://").removesuffix("/v1").split(":")
    before = count_rows(server)["generated_tokens"]
    with socket.create_connection((address[0], int(address[1]))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        if stream:
            assert b"200 OK" in connection.recv(100)
        while not count_rows(server)["running"]:
            time.sleep(0.005)
    while count_rows(server)["running"]:
        time.sleep(0.01)
    assert count_rows(server)["generated_tokens"] - before < 8 * 115


def test_nothing_of_a_prompt_or_an_answer_is_logged(server, client):
    ask(client, [{"role": "user", "content": "unmistakable words"}])
    assert "unmistakable" not in server.log.read_text()
    assert "Traceback" not in server.log.read_text()
    assert math.isfinite(count_rows(server)["waiting"])
