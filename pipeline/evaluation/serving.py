"""Serves one language model over HTTP in the form of OpenAI's API.

One thread owns the device. It takes rows that wait, up to a batch, whatever their settings are, and generates
their texts with one call of the engine. A row ends early if its client leaves. Rows that come meanwhile wait
for the next batch. Prompts and answers are not logged.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from threading import Condition, Thread
from typing import Any, NamedTuple, TypeVar

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pipeline.distributed.process_group import Job
from pipeline.errors import ConfigError, DataError, PipelineError
from pipeline.evaluation.conversation import ChatFormat, TextStream
from pipeline.evaluation.openai_requests import ApiError, ChatOptions, Options, TextOptions, parse_request
from pipeline.evaluation.scoring import ScoredTokens, score_continuations
from pipeline.evaluation.sources import LoadedModel
from pipeline.models.embeddings import get_vocabulary_size
from pipeline.models.generation import GeneratedToken, GenerationSettings

MAX_BODY_BYTES = 4 << 20
MAX_WAITING_ROWS = 4096
DEFAULT_CHAT_TOKENS = 4096  # or up to the end of the context, if that is nearer
DEFAULT_TEXT_TOKENS = 16  # as OpenAI's
STOP_SECONDS = 3
KEEP_ALIVE_SECONDS = 65  # longer than clients keep a connection, so that none is closed while it is used
LOWEST_LOGPROB = -9999.0  # as OpenAI's; JSON has no infinity
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]
T = TypeVar("T")
STOPPING = ApiError("the server stops; send the request again later", status=503)
log = logging.getLogger(__name__)


class _Entry(NamedTuple):
    """A token with its log-probability, which the first token of a text has not."""

    id: int
    logprob: float | None
    top: Sequence[tuple[int, float]]
    offset: int  # of its text


class _Piece(NamedTuple):
    """Further text of a row. The last one has the reason of the end."""

    row: int
    text: str
    entries: list[_Entry] | None
    finish_reason: str | None


class _Answer:
    """Passes what the rows of a request write from the device's thread to the server's."""

    def __init__(self) -> None:
        self.has_left = False  # whether the client has
        self.queue: asyncio.Queue[_Piece | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def post(self, item: _Piece | Exception) -> None:
        with suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)

    async def leave(self) -> None:
        """End the rows at their next token, as nobody reads them any more."""
        self.has_left = True

    async def read(self, num_rows: int) -> AsyncIterator[_Piece]:
        """Yield the pieces of all rows until the last row has ended.

        Raises:
            Exception: The rows cannot be answered.
        """
        while num_rows:
            item = await self.queue.get()
            if isinstance(item, Exception):
                raise item
            yield item
            num_rows -= item.finish_reason is not None


@dataclass(eq=False)
class _Row:
    """One text to generate. The device's thread calls its methods."""

    answer: _Answer
    index: int
    prompt: list[int]
    settings: GenerationSettings | None  # `None`: only the prompt is shown
    stream: TextStream
    places: TextStream | None  # decodes every token, stop strings included; `None`: no log-probabilities
    echo: str | None  # text of the prompt; `None`: it is not shown
    num_generated: int = 0
    _length: int = 0  # of the text that `places` has decoded
    _num_shown: int = 0
    _entries: list[_Entry] = field(default_factory=list)  # of tokens whose text is not shown yet

    @property
    def needs_scores(self) -> bool:
        """Whether the prompt is shown with log-probabilities."""
        return self.echo is not None and self.places is not None

    def show_prompt(self, scores: ScoredTokens | None) -> None:
        """Show the prompt, with the scores of its tokens after the first if they are needed."""
        assert self.echo is not None
        if self.needs_scores:
            self._add(self.prompt[0], None, ())
        if scores is not None:
            records = zip(scores.logprobs, scores.top_ids, scores.top_logprobs, strict=True)
            for token_id, (logprob, *top) in zip(self.prompt[1:], records, strict=True):
                self._add(token_id, logprob, [(int(top[0]), top[1])])
        self._length = len(self.echo)
        self._show(self.echo, self._length + 1)

    def push(self, token: GeneratedToken) -> bool:
        """Show what a token adds to the text; return whether the text ends with it."""
        assert self.settings is not None
        self.num_generated += 1
        self._add(token.id, token.logprob, token.top)
        text = self.stream.push(token.id)
        is_end = self.stream.finish_reason is not None or self.num_generated == self.settings.max_new_tokens
        if is_end:
            self.finish(text)
        elif text:
            self._show(text, self._num_shown + len(text))
        return is_end

    def finish(self, text: str = "") -> None:
        """Show the rest of the text after `text`, and end it."""
        text += self.stream.finish()
        end = self._num_shown + len(text)
        reason = self.stream.finish_reason
        # The tokens of a stop string are not shown. An end token has no text, and is shown.
        has_stop_string = reason == "stop" and end < self._length
        self._show(text, end if has_stop_string else self._length + 1, reason)

    def _add(self, token_id: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> None:
        if self.places is not None:
            self._entries.append(_Entry(token_id, logprob, top, self._length))
            self._length += len(self.places.push(token_id))

    def _show(self, text: str, end: int, finish_reason: str | None = None) -> None:
        """Pass on text, and the tokens whose text begins before `end`."""
        self._num_shown += len(text)
        entries = None
        if self.places is not None:
            number = sum(entry.offset < end for entry in self._entries)
            entries = self._entries[:number]
            del self._entries[:number]
        self.answer.post(_Piece(self.index, text, entries, finish_reason))


class _Worker:
    """Generates the texts of rows, batch by batch, on a thread that owns the device."""

    def __init__(self, model: LoadedModel, job: Job, max_batch: int):
        self._model = model
        self._job = job
        self._max_batch = max_batch
        self._waiting: deque[_Row] = deque()
        self._running: list[_Row] = []
        self._num_generated = 0
        self._is_stopping = False
        self._condition = Condition()
        self._thread = Thread(target=self._work, name="device", daemon=True)
        self._thread.start()

    def get_counts(self) -> dict[str, int]:
        """Return the numbers of rows that run and that wait, and of all tokens generated so far."""
        num_rows = {"running": len(self._running), "waiting": len(self._waiting)}
        return num_rows | {"generated_tokens": self._num_generated}

    def submit(self, rows: Sequence[_Row]) -> None:
        """Let rows wait for a batch.

        Raises:
            ApiError: Too many rows wait, or the server stops.
        """
        with self._condition:
            if self._is_stopping:
                raise STOPPING
            if len(self._waiting) + len(rows) > MAX_WAITING_ROWS:
                raise ApiError("too many requests wait; try again later", None, "rate_limit_exceeded", 429)
            self._waiting.extend(rows)
            self._condition.notify()

    def stop(self) -> None:
        """End all rows at their next token, and their answers with an error."""
        with self._condition:
            self._is_stopping = True
            for row in (*self._running, *self._waiting):
                row.answer.post(STOPPING)
            self._condition.notify()

    def join(self) -> None:
        """Wait some seconds for the end of the thread."""
        self._thread.join(STOP_SECONDS)

    def _work(self) -> None:
        while rows := self._take():
            try:
                self._answer(rows)
            except Exception as error:
                failure = _report_fault(error)
                for row in rows:
                    row.answer.post(failure)
            self._running.clear()

    def _take(self) -> list[_Row]:
        """Wait for rows, and return those of the next batch; none if the worker stops."""
        with self._condition:
            while not self._is_stopping:
                while self._waiting and len(self._running) < self._max_batch:
                    row = self._waiting.popleft()
                    if not row.answer.has_left:
                        self._running.append(row)
                if self._running:
                    return list(self._running)
                self._condition.wait()
        return []

    def _answer(self, rows: Sequence[_Row]) -> None:
        """Score the prompts for which it is asked, and generate the texts."""
        engine = self._model.engine
        scored = [row for row in rows if row.needs_scores and len(row.prompt) > 1]
        longest = max((len(row.prompt) for row in scored), default=1)
        scores = score_continuations(
            engine,
            self._model.call,
            self._job,
            [(row.prompt[:1], row.prompt[1:]) for row in scored],
            max_tokens=longest,
            tokens_per_batch=longest * self._max_batch,
        )
        scores_of_row = dict(zip(scored, scores, strict=True))
        for row in rows:
            if row.echo is not None:
                row.show_prompt(scores_of_row.get(row))
            if row.settings is None:
                row.finish()
                self._running.remove(row)
        pairs = [(row, row.settings) for row in rows if row.settings is not None]

        def on_token(index: int, token: GeneratedToken) -> bool:
            row = pairs[index][0]
            self._num_generated += 1
            is_end = self._is_stopping or row.answer.has_left or row.push(token)
            if is_end:
                self._running.remove(row)
            return is_end

        if pairs:
            engine.generate([row.prompt for row, _ in pairs], [settings for _, settings in pairs], on_token)
        for row in self._running:  # none, unless the engine ends a text by a rule of its own
            row.finish()


def _report_fault(error: Exception) -> ApiError:
    """Log an exception that is no fault of the client, and return the answer that refers to it."""
    if isinstance(error, torch.OutOfMemoryError):
        log.error("the device's memory does not suffice for a batch; start with a smaller --max-batch")
        return ApiError("the device ran out of memory; ask for fewer or shorter texts", status=503)
    number = secrets.token_hex(4)
    log.error("internal error %s", number, exc_info=error)
    return ApiError(f"internal error {number}; the server's log has its traceback", status=500)


class _TokenWriter:
    """Writes single tokens of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.write = cache(self._write)
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        # Alphabet of byte-level BPE, as in GPT-2 (Radford et al. 2019).
        self._bytes = {chr(i): i for i in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}

    def _write(self, token_id: int) -> tuple[str, list[int] | None]:
        r"""Return the text and the bytes of a token; `None` for bytes that are not known.

        The text of bytes that are no character is `bytes:\xf0\x9f`, as in OpenAI's answers.
        """
        once, twice = (self._tokenizer.decode([token_id] * number) for number in (1, 2))
        text = twice[len(once) :]  # some decoders remove the space at the start of a text
        if "\ufffd" not in text:
            return text, list(text.encode())
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id))
        raw = [self._bytes.get(letter, -1) for letter in piece]
        if fallback := re.fullmatch("<0x([0-9A-F]{2})>", piece):
            raw = [int(fallback[1], 16)]
        return (text, None) if -1 in raw else ("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)


class _ChatReply:
    """Form of the answers of /v1/chat/completions."""

    def __init__(self, writer: _TokenWriter, end_ids: frozenset[int]):
        self.prefix = "chatcmpl"
        self.kind = "chat.completion"
        self.kind_of_chunk = "chat.completion.chunk"
        self.opening = [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}]
        self._writer = writer
        self._end_ids = end_ids

    def choice(self, text: str, entries: list[_Entry] | None) -> dict[str, Any]:
        """Return the fields of a whole text."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._write(entries)}

    def chunk(self, text: str, entries: list[_Entry] | None) -> dict[str, Any]:
        """Return the fields of a part of a text."""
        return {"delta": {"content": text} if text else {}, "logprobs": self._write(entries)}

    def _write(self, entries: list[_Entry] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        content = [
            self._write_token(entry.id, entry.logprob)
            | {"top_logprobs": [self._write_token(*each) for each in entry.top]}
            for entry in entries
            if entry.id not in self._end_ids
        ]
        return {"content": content, "refusal": None}

    def _write_token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text, raw = self._writer.write(token_id)
        return {"token": text, "logprob": _bound(logprob), "bytes": raw}


class _TextReply:
    """Form of the answers of /v1/completions."""

    def __init__(self, writer: _TokenWriter):
        self.prefix = "cmpl"
        self.kind = self.kind_of_chunk = "text_completion"
        self.opening: list[dict[str, Any]] = []
        self._writer = writer

    def choice(self, text: str, entries: list[_Entry] | None) -> dict[str, Any]:
        """Return the fields of a text, or of a part of it."""
        return {"text": text, "logprobs": None if entries is None else self._write(entries)}

    chunk = choice

    def _write(self, entries: list[_Entry]) -> dict[str, Any]:
        tops: list[dict[str, float | None] | None] = []
        for entry in entries:
            top: dict[str, float | None] = {}
            # The token itself is added, as by OpenAI. If two tokens have one text, the likelier counts.
            for token_id, logprob in (*entry.top, (entry.id, entry.logprob)):
                top.setdefault(self._writer.write(token_id)[0], _bound(logprob))
            tops.append(None if entry.logprob is None else top)
        return {
            "tokens": [self._writer.write(entry.id)[0] for entry in entries],
            "token_logprobs": [_bound(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": [entry.offset for entry in entries],
        }


def _bound(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


class Service:
    """Answers requests to one model.

    Args:
        model: Model to serve.
        job: Job of this process.
        names: Names of the model in requests; the first one is shown.
        host: Address that the server listens on.
        max_batch: Maximum number of rows in a batch.
        api_key: Key that clients must send; `None`: only clients on this machine are answered.
    """

    def __init__(
        self,
        model: LoadedModel,
        job: Job,
        names: Sequence[str],
        *,
        host: str,
        max_batch: int,
        api_key: str | None,
    ):
        self._model = model
        self._names = names
        self._hosts = {*LOOPBACK_NAMES, host}
        self._api_key = api_key
        self._chat: ChatFormat | None = None
        self._end_ids = model.end_ids
        if model.tokenizer.chat_template:
            self._chat = ChatFormat(model.tokenizer)
            self._end_ids |= self._chat.end_ids
        writer = _TokenWriter(model.tokenizer)
        self._chat_reply = _ChatReply(writer, self._end_ids)
        self._text_reply = _TextReply(writer)
        card = {"id": names[0], "object": "model", "created": int(time.time()), "owned_by": "ds-pipeline"}
        self._card = card | {"max_model_len": model.max_positions}
        model.tokenizer("")  # sets its options now, and not while another thread uses it
        self._encoding = ThreadPoolExecutor(1, "encoding")  # a text of megabytes takes seconds
        self.worker = _Worker(model, job, max_batch)

    def build_app(self) -> Starlette:
        """Return the ASGI application."""

        async def refuse(request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            place = f"{request.method} {request.url.path}"
            return _respond(ApiError(f"{place}: {error.detail}", status=error.status_code))

        routes = [
            Route("/v1/chat/completions", self._guard(self.answer_chat), methods=["POST"]),
            Route("/v1/completions", self._guard(self.answer_text), methods=["POST"]),
            Route("/v1/models", self._guard(self.show_models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guard(self.show_models), methods=["GET"]),
            Route("/health", self.show_health, methods=["GET"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: refuse})

    def _guard(self, endpoint: Endpoint) -> Endpoint:
        """Return an endpoint that checks the client first, and answers errors in OpenAI's form."""

        async def answer(request: Request) -> Response:
            try:
                self._check_client(request)
                return await endpoint(request)
            except ApiError as error:
                return _respond(error)
            except PipelineError as error:  # refused by the chat template or GenerationSettings
                return _respond(ApiError(str(error)))
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                return _respond(_report_fault(error))

        return answer

    def _check_client(self, request: Request) -> None:
        """Check the API key. If there is none, check the names by which a browser calls this machine.

        Otherwise any web page could use the server, also by a name of its own that points to this machine.

        Raises:
            ApiError: The key or a name is wrong.
        """
        if self._api_key is None:
            origin = request.headers.get("origin", "").rpartition("://")[2]
            for name in filter(None, (request.headers.get("host"), origin)):
                if re.sub(r":\d+$", "", name.lower()) not in self._hosts:
                    message = f"without an API key, {name[:200]!r} is not answered; set --api-key-env"
                    raise ApiError(message, None, "unknown_host", 403)
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_key = hmac.compare_digest(key.strip().encode(), self._api_key.encode())
        if scheme.lower() != "bearer" or not is_key:
            message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            raise ApiError(message, None, "invalid_api_key", 401)

    def _check_name(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            message = f"there is no model {name[:200]!r}; this server has {self._names[0]!r}"
            raise ApiError(message, "model", "model_not_found", 404)

    async def show_health(self, request: Request) -> Response:
        """Answer GET /health."""
        return JSONResponse({"status": "ok"} | self.worker.get_counts())

    async def show_models(self, request: Request) -> Response:
        """Answer GET /v1/models and /v1/models/NAME."""
        name = request.path_params.get("name")
        self._check_name(name)
        return JSONResponse(self._card if name else {"object": "list", "data": [self._card]})

    async def answer_chat(self, request: Request) -> Response:
        """Answer POST /v1/chat/completions."""
        options = parse_request(await _read_body(request), ChatOptions)
        self._check_name(options.model)
        prompt = await self._in_thread(partial(self._render, options))
        max_tokens = options.max_completion_tokens or options.max_tokens
        if max_tokens is None:
            room = (self._model.max_positions or DEFAULT_CHAT_TOKENS + len(prompt)) - len(prompt)
            max_tokens = max(1, min(DEFAULT_CHAT_TOKENS, room))
        num_logprobs = options.top_logprobs if options.logprobs else None
        rows = self._make_rows(options, [(prompt, None)], max_tokens, num_logprobs, is_text=False)
        return await self._reply(request, options, self._chat_reply, rows)

    async def answer_text(self, request: Request) -> Response:
        """Answer POST /v1/completions."""
        options = parse_request(await _read_body(request), TextOptions)
        self._check_name(options.model)
        prompts = await self._in_thread(lambda: [self._encode(each) for each in options.prompt])
        max_tokens = DEFAULT_TEXT_TOKENS if options.max_tokens is None else options.max_tokens
        if not options.echo:
            prompts = [(ids, None) for ids, _ in prompts]
        rows = self._make_rows(options, prompts, max_tokens, options.logprobs, is_text=True)
        return await self._reply(request, options, self._text_reply, rows)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._encoding, work)

    def _render(self, options: ChatOptions) -> list[int]:
        """Return the ids of a conversation.

        Raises:
            ApiError: The model has no chat template, or the template refuses the conversation.
            ConfigError: The template takes too much time or memory.
        """
        if not self._model.tokenizer.chat_template:
            raise ApiError("the model has no chat template; use /v1/completions", "messages")
        if self._chat is None:
            self._chat = ChatFormat(self._model.tokenizer)
        tools = options.tools if options.tool_choice == "auto" else []
        try:
            return self._chat.render([message.as_turn() for message in options.messages], tools or None)
        except DataError as error:
            raise ApiError(str(error), "messages") from None
        except (ConfigError, OSError):  # the process of the template has ended
            self._chat = None
            raise

    def _encode(self, prompt: str | list[int]) -> tuple[list[int], str | None]:
        """Return the ids and the text of a prompt.

        Raises:
            ApiError: An id is outside of the vocabulary.
        """
        tokenizer = self._model.tokenizer
        if isinstance(prompt, str):
            ids: list[int] = tokenizer(prompt, verbose=False)["input_ids"]
            return ids or [tokenizer.eos_token_id], prompt  # an empty prompt: a new document
        size = get_vocabulary_size(self._model.engine.module)
        if min(prompt) < 0 or (size is not None and max(prompt) >= size):
            expected = "0 or more" if size is None else f"0 to {size - 1}, the model's vocabulary"
            raise ApiError(f"prompt: ids from {min(prompt)} to {max(prompt)}; expected {expected}", "prompt")
        return prompt, str(tokenizer.decode(prompt, skip_special_tokens=True))

    def _make_rows(
        self,
        options: Options,
        prompts: Sequence[tuple[list[int], str | None]],
        max_tokens: int,
        num_logprobs: int | None,
        *,
        is_text: bool,
    ) -> list[_Row]:
        """Return the rows of a request: `n` for each prompt, which has ids and the text to show, if any.

        Raises:
            ApiError: A prompt and `max_tokens` exceed the model's positions.
            DataError: The temperature is too close to 0.
        """
        limit = self._model.max_positions
        longest = max(len(ids) for ids, _ in prompts)
        if limit is not None and longest + max_tokens > limit:
            param = "prompt" if is_text else "messages"
            message = f"this model's maximum context length is {limit:,} tokens, but the {param} have "
            message += (
                f"{longest:,} and max_tokens is {max_tokens:,}; shorten the {param}, or lower max_tokens"
            )
            raise ApiError(message, param, "context_length_exceeded")
        settings = GenerationSettings(
            max_new_tokens=max(1, max_tokens),
            temperature=options.temperature,
            top_k=max(0, options.top_k),
            top_p=options.top_p,
            min_p=options.min_p,
            seed=secrets.randbits(63) if options.seed is None else options.seed,
            num_logprobs=num_logprobs,
        )
        answer = _Answer()
        tokenizer = self._model.tokenizer
        rows = []
        for index in range(len(prompts) * options.n):
            ids, echo = prompts[index // options.n]
            before = ids if is_text else ()  # which the text continues
            places = None
            if num_logprobs is not None:  # an echoed prompt is pushed
                places = TextStream(tokenizer, prompt_ids=before if echo is None else ())
            row = _Row(
                answer,
                index,
                ids,
                replace(settings, sample=index % options.n) if max_tokens else None,
                stream=TextStream(tokenizer, end_ids=self._end_ids, stop=options.stop, prompt_ids=before),
                places=places,
                echo=echo,
            )
            rows.append(row)
        return rows

    async def _reply(
        self, request: Request, options: Options, reply: _ChatReply | _TextReply, rows: Sequence[_Row]
    ) -> Response:
        """Let the rows be generated, and return the answer, whole or as a stream."""
        self.worker.submit(rows)
        answer = rows[0].answer
        head = {"id": f"{reply.prefix}-{secrets.token_hex(16)}", "created": int(time.time())}
        head |= {"model": self._names[0], "system_fingerprint": None}
        count = partial(_count, rows, options.n)
        if options.stream:
            head["object"] = reply.kind_of_chunk
            wants_usage = options.stream_options is not None and options.stream_options.include_usage
            return StreamingResponse(
                _stream(answer, len(rows), head, reply, count if wants_usage else None),
                media_type="text/event-stream",
                headers={"cache-control": "no-cache"},
                background=BackgroundTask(answer.leave),  # also runs if the client has left
            )
        watch = asyncio.create_task(_watch(request, answer))
        try:
            pieces = [piece async for piece in answer.read(len(rows))]
        finally:
            answer.has_left = True
            watch.cancel()
        choices = []
        for row in rows:
            own = [piece for piece in pieces if piece.row == row.index]
            entries = None if own[0].entries is None else [entry for p in own for entry in p.entries or ()]
            choice = reply.choice("".join(piece.text for piece in own), entries)
            choices.append({"index": row.index, **choice, "finish_reason": own[-1].finish_reason})
        return JSONResponse(head | {"object": reply.kind, "choices": choices, "usage": count()})


def _respond(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status)


def _count(rows: Sequence[_Row], rows_per_prompt: int) -> dict[str, int]:
    """Return the usage of a request."""
    prompt = sum(len(row.prompt) for row in rows[::rows_per_prompt])
    generated = sum(row.num_generated for row in rows)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


async def _read_body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: It is too large.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(f"the request has more than {MAX_BODY_BYTES:,} bytes; shorten it", status=413)
    return bytes(body)


async def _watch(request: Request, answer: _Answer) -> None:
    """Wait until the client leaves, and then end the answer."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    answer.queue.put_nowait(ClientDisconnect())


async def _stream(
    answer: _Answer,
    num_rows: int,
    head: dict[str, Any],
    reply: _ChatReply | _TextReply,
    count: Callable[[], dict[str, int]] | None,
) -> AsyncIterator[str]:
    """Yield the answer as server-sent events, with the usage if `count` returns it. An error ends them."""

    def write(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        event = head | {"choices": choices} | ({} if count is None else {"usage": usage})
        return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"

    try:
        for opening in reply.opening:
            for index in range(num_rows):
                yield write([{"index": index, **opening, "finish_reason": None}])
        async for row, text, entries, finish_reason in answer.read(num_rows):
            yield write([{"index": row, **reply.chunk(text, entries), "finish_reason": finish_reason}])
        if count is not None:
            yield write([], count())
        yield "data: [DONE]\n\n"
    except Exception as error:
        failure = error if isinstance(error, ApiError) else _report_fault(error)
        yield f"data: {json.dumps(failure.body)}\n\n"


class _Server(uvicorn.Server):
    """Gives answers that are being written some seconds to end, when the server stops."""

    def __init__(self, config: uvicorn.Config, worker: _Worker):
        super().__init__(config)
        self._worker = worker

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop as uvicorn does."""
        asyncio.get_running_loop().call_later(STOP_SECONDS, self._worker.stop)
        await super().shutdown(sockets)


def run_server(service: Service, listener: socket.socket) -> None:
    """Answer requests until Ctrl-C or SIGTERM, which then act as without a server."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each client that leaves
    config = uvicorn.Config(
        service.build_app(),
        log_config=None,
        log_level="critical",  # faults are logged above
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
        timeout_graceful_shutdown=2 * STOP_SECONDS,
    )
    try:
        _Server(config, service.worker).run(sockets=[listener])
    finally:
        service.worker.stop()
        service.worker.join()
