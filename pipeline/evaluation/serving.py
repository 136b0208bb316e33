"""Serves one language model over HTTP in the form of OpenAI's API.

One thread generates the texts, batch by batch; rows that come meanwhile wait for the next batch. A row ends
early if its client leaves. Prompts and answers are not logged.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from socket import socket
from typing import Any, NamedTuple

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pipeline.distributed.process_group import Job
from pipeline.errors import ConfigError, ModelError, PipelineError
from pipeline.evaluation.conversation import INCOMPLETE, ChatFormat, TextStream
from pipeline.evaluation.openai_requests import AnyOptions, ApiError, ChatOptions, TextOptions, parse_request
from pipeline.evaluation.scoring import ScoredTokens, score_continuations
from pipeline.evaluation.sources import LoadedModel
from pipeline.models.generation import GeneratedToken, GenerationSettings, check_prompts, number_samples

DEFAULT_CHAT_TOKENS = 4096  # or up to the end of the context, if that is nearer
MAX_BODY_BYTES = 2**24
STOP_SECONDS = 3  # for answers that are being written when the server stops
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
log = logging.getLogger(__name__)
_Tokens = list[tuple[GeneratedToken, int]]
"""Tokens with the offset of each in the text of its row."""


class _Piece(NamedTuple):
    """Further text of a row. The last one has the reason of the end."""

    row: int
    text: str
    tokens: _Tokens
    finish_reason: str | None


class _ApiRequest:
    """A request with its rows, and the pieces that the device's thread passes to the server's."""

    def __init__(self, options: AnyOptions, prompts: list[list[int]], model: LoadedModel) -> None:
        self.options = options
        self.is_chat = isinstance(options, ChatOptions)
        self.has_echo = isinstance(options, TextOptions) and options.echo
        if self.has_echo and (options.num_logprobs or 0) > 1:
            raise ApiError("logprobs: with echo give 0 or 1, as a prompt has one likeliest token", "logprobs")
        self.has_left = False  # whether the client has closed the connection
        self.pieces: asyncio.Queue[_Piece | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        max_tokens = options.max_tokens or DEFAULT_CHAT_TOKENS
        if options.max_tokens is None and model.max_positions is not None:
            max_tokens = max(1, min(max_tokens, model.max_positions - len(prompts[0])))
        sampling = options.model_dump(include={"temperature", "top_k", "top_p", "min_p", "seed"})
        settings = GenerationSettings(max_tokens, num_logprobs=options.num_logprobs, **sampling)
        check_prompts(model.engine.module, prompts, [settings] * len(prompts))
        self.rows: list[_Row] = []
        repeated = [prompt for prompt in prompts for _ in range(options.n)]
        for prompt, sample in zip(repeated, number_samples(repeated), strict=True):
            self.rows.append(_Row(self, prompt, replace(settings, sample=sample), model))

    def post(self, item: _Piece | Exception) -> None:
        """Pass on a piece, or why there is none."""
        if not self.has_left:
            self._loop.call_soon_threadsafe(self.pieces.put_nowait, item)

    def count_tokens(self) -> dict[str, int]:
        """Return the numbers of tokens, in OpenAI's form."""
        prompt = sum(len(row.prompt) for row in self.rows[:: self.options.n])
        generated = sum(row.num_generated for row in self.rows)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


class _Row:
    """One text to generate. The device's thread calls its methods."""

    def __init__(
        self, request: _ApiRequest, prompt: list[int], settings: GenerationSettings, model: LoadedModel
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.settings = settings
        self.num_generated = 0
        self._index = len(request.rows)
        self._model = model
        continued_ids = () if request.is_chat else prompt
        self._stream = TextStream(
            model.tokenizer, end_ids=model.end_ids, stop=request.options.stop, prompt_ids=continued_ids
        )
        self._num_shown = 0  # number of characters
        self._tokens: _Tokens = []  # tokens whose text is not shown yet

    def show_prompt(self, scores: ScoredTokens | None) -> None:
        """Show the prompt, with the scores of its tokens after the first."""
        tokens = [GeneratedToken(self.prompt[0], None, ())]
        if scores is not None:
            tops = zip(scores.top_ids, scores.top_logprobs, strict=True)
            columns = zip(self.prompt[1:], scores.logprobs, tops, strict=True)
            tokens += [GeneratedToken(token_id, logprob, (top,)) for token_id, logprob, top in columns]
        stream = TextStream(self._model.tokenizer)
        text = ""
        for token in tokens:
            self._tokens.append((token, len(text)))
            text += stream.push(token.id)
        self._show(text)

    def push(self, token: GeneratedToken) -> bool:
        """Show what a token adds to the text; return whether the text ends with it."""
        self.num_generated += 1
        self._tokens.append((token, self._num_shown))
        text = self._stream.push(token.id)
        if self.num_generated == self.settings.max_new_tokens:
            text += self._stream.finish()
        reason = self._stream.finish_reason
        if reason == "stop" and not text and token.id not in self._model.end_ids:
            self._tokens = []  # their text is a stop string
        if text or reason is not None:
            self._show(text, reason)
        return reason is not None

    def _show(self, text: str, finish_reason: str | None = None) -> None:
        self.request.post(_Piece(self._index, text, self._tokens, finish_reason))
        self._num_shown += len(text)
        self._tokens = []


class Service:
    """Answers requests to one model.

    Args:
        model: Model to serve.
        job: Job of this process.
        names: Names of the model in requests; the first one is shown.
        max_batch: Maximum number of rows in a batch.
        api_key: Key that clients must send; `None`: only clients on this machine are answered.
    """

    def __init__(
        self, model: LoadedModel, job: Job, names: Sequence[str], max_batch: int, api_key: str | None
    ):
        self._model = model
        self._job = job
        self._names = names
        self._max_batch = max_batch
        self._api_key = api_key
        # Forks a process, which is safe before there are threads.
        self._chat = ChatFormat(model.tokenizer) if model.tokenizer.chat_template else None
        model.tokenizer("")  # sets its options now, and not while another thread uses it
        self._encoding_thread = ThreadPoolExecutor(1, "encoding")  # a text of megabytes takes seconds
        self._device_thread = ThreadPoolExecutor(1, "device")
        self._waiting: deque[_Row] = deque()
        self._running: list[_Row] = []
        self._num_generated = 0

    def build_app(self) -> Starlette:
        """Return the ASGI application."""
        routes = [
            Route("/v1/chat/completions", partial(self._answer, ChatOptions), methods=["POST"]),
            Route("/v1/completions", partial(self._answer, TextOptions), methods=["POST"]),
            Route("/v1/models", self._show_models),
            Route("/health", self._show_health),
        ]
        errors = (ApiError, PipelineError, HTTPException, ClientDisconnect, Exception)
        return Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, _respond_to_error))

    async def _show_health(self, http: Request) -> Response:
        counts = {"running": len(self._running), "waiting": len(self._waiting)}
        return JSONResponse({"status": "ok", **counts, "generated_tokens": self._num_generated})

    async def _show_models(self, http: Request) -> Response:
        _check_client(http, self._api_key)
        card = {"id": self._names[0], "object": "model", "created": 0, "owned_by": "pipeline"}
        return JSONResponse({"object": "list", "data": [card]})

    async def _answer(self, kind: type[AnyOptions], http: Request) -> Response:
        """Answer a POST, whole or as a stream."""
        _check_client(http, self._api_key)
        options = parse_request(await _read_body(http), kind)
        if options.model not in (None, *self._names):
            message = f"there is no model {options.model!r}; this server has {self._names[0]!r}"
            raise ApiError(message, "model", "model_not_found", 404)
        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(self._encoding_thread, self._encode, options)
        request = _ApiRequest(options, prompts, self._model)
        if options.stream:
            return StreamingResponse(self._stream(request), media_type="text/event-stream")
        texts = [_Piece(index, "", [], None) for index in range(len(request.rows))]
        async for piece in self._generate(request):
            if await http.is_disconnected():
                request.has_left = True
                raise ClientDisconnect
            before = texts[piece.row]
            texts[piece.row] = piece._replace(
                text=before.text + piece.text, tokens=before.tokens + piece.tokens
            )
        choices = [self._write_choice(request, text) for text in texts]
        return JSONResponse(self._make_head(request) | {"choices": choices, "usage": request.count_tokens()})

    async def _stream(self, request: _ApiRequest) -> AsyncIterator[str]:
        """Yield the answer as server-sent events. An error ends them."""
        head = self._make_head(request)

        def write(*choices: dict[str, Any], **fields: Any) -> str:
            return f"data: {json.dumps(head | {'choices': choices} | fields, ensure_ascii=False)}\n\n"

        try:
            for index in range(len(request.rows) if request.is_chat else 0):
                role = {"role": "assistant", "content": ""}
                yield write({"index": index, "delta": role, "finish_reason": None})
            async for piece in self._generate(request):
                yield write(self._write_choice(request, piece))
            if request.options.stream_options.get("include_usage"):
                yield write(usage=request.count_tokens())
            yield "data: [DONE]\n\n"
        except Exception as error:  # of any kind: it is too late for a handler's response
            yield f"data: {json.dumps(_to_api_error(error).body)}\n\n"

    async def _generate(self, request: _ApiRequest) -> AsyncIterator[_Piece]:
        """Queue the rows for the device's thread, and yield their pieces until the last row has ended."""
        self._waiting.extend(request.rows)
        self._device_thread.submit(self._run_batches)
        num_open = len(request.rows)
        try:
            while num_open:
                piece = await request.pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                num_open -= piece.finish_reason is not None
        except asyncio.CancelledError:
            raise ApiError("the server stops; send the request again later", status=503) from None
        finally:
            request.has_left = True

    def _encode(self, options: AnyOptions) -> list[list[int]]:
        """Return the ids of the prompts. Runs in a thread of its own."""
        tokenizer = self._model.tokenizer
        if isinstance(options, TextOptions):
            rows = [
                tokenizer(prompt, verbose=False)["input_ids"] if isinstance(prompt, str) else prompt
                for prompt in options.prompt
            ]
            return [ids or [tokenizer.eos_token_id] for ids in rows]  # an empty text begins a new document
        assert isinstance(options, ChatOptions)
        tools = options.tools if options.tool_choice == "auto" else None
        self._chat = self._chat or ChatFormat(tokenizer)
        try:
            return [self._chat.render(options.messages, tools)]
        except (ConfigError, OSError):  # the process of the template has ended
            self._chat = None
            raise

    def _run_batches(self) -> None:
        """Generate the rows that wait. Runs in the device's thread."""
        while self._waiting:
            size = min(len(self._waiting), self._max_batch)
            batch = [self._waiting.popleft() for _ in range(size)]
            self._running = [row for row in batch if not row.request.has_left]
            try:
                self._show_prompts([row for row in self._running if row.request.has_echo])
                prompts = [row.prompt for row in self._running]
                if prompts:
                    settings = [row.settings for row in self._running]
                    self._model.engine.generate(prompts, settings, self._on_token)
            except Exception as error:  # of any kind, or the clients would wait forever
                failure = _to_api_error(error)
                for row in self._running:
                    row.request.post(failure)
            self._running = []

    def _on_token(self, index: int, token: GeneratedToken) -> bool:
        self._num_generated += 1
        row = self._running[index]
        return row.request.has_left or row.push(token)

    def _show_prompts(self, rows: Sequence[_Row]) -> None:
        """Score the tokens of prompts after the first, and show the prompts."""
        model = self._model
        pairs = [(row.prompt[:1], row.prompt[1:]) for row in rows if len(row.prompt) > 1]
        longest = max((len(row.prompt) for row in rows), default=1)
        size = longest * self._max_batch
        scores = score_continuations(
            model.engine, model.call, self._job, pairs, max_tokens=longest, tokens_per_batch=size
        )
        scores_of_pairs = iter(scores)
        for row in rows:
            row.show_prompt(next(scores_of_pairs) if len(row.prompt) > 1 else None)

    def _make_head(self, request: _ApiRequest) -> dict[str, Any]:
        kind = "text_completion"
        if request.is_chat:
            kind = "chat.completion.chunk" if request.options.stream else "chat.completion"
        answer_id = f"cmpl-{secrets.token_hex(16)}"
        return {"id": answer_id, "object": kind, "created": int(time.time()), "model": self._names[0]}

    def _write_choice(self, request: _ApiRequest, piece: _Piece) -> dict[str, Any]:
        """Return a text, or a part of one, in OpenAI's form."""
        body: dict[str, Any] = {"text": piece.text}
        if request.is_chat:
            body = {"delta": {"content": piece.text}}
            if not request.options.stream:
                body = {"message": {"role": "assistant", "content": piece.text}}
        body["logprobs"] = None
        if request.options.num_logprobs is not None:
            write = self._write_chat_logprobs if request.is_chat else self._write_text_logprobs
            body["logprobs"] = write(piece.tokens)
        return {"index": piece.row, **body, "finish_reason": piece.finish_reason}

    def _write_chat_logprobs(self, tokens: _Tokens) -> dict[str, Any]:
        def write(token_id: int, logprob: float | None) -> dict[str, Any]:
            text = self._decode(token_id)
            raw = None if INCOMPLETE in text else list(text.encode())
            return {"token": text, "logprob": logprob, "bytes": raw}

        content = [
            write(token.id, token.logprob) | {"top_logprobs": [write(*top) for top in token.top]}
            for token, _ in tokens
            if token.id not in self._model.end_ids
        ]
        return {"content": content}

    def _write_text_logprobs(self, tokens: _Tokens) -> dict[str, Any]:
        tops = []
        for token, _ in tokens:
            # The token itself is added, as by OpenAI. If two tokens have one text, the likelier counts.
            entries = [(token.id, token.logprob), *reversed(token.top)]
            top = {self._decode(token_id): logprob for token_id, logprob in entries}
            tops.append(None if token.logprob is None else top)
        return {
            "tokens": [self._decode(token.id) for token, _ in tokens],
            "token_logprobs": [token.logprob for token, _ in tokens],
            "top_logprobs": tops,
            "text_offset": [offset for _, offset in tokens],
        }

    def _decode(self, token_id: int) -> str:
        once, twice = (self._model.tokenizer.decode([token_id] * number) for number in (1, 2))
        return str(twice[len(once) :])  # some decoders remove the space at the start of a text


def _check_client(http: Request, api_key: str | None) -> None:
    """Check the API key. If there is none, check that Host and Origin name this machine.

    Without the second check, any web page in a browser here could use the server, even by a host name of the
    page's owner that resolves to this machine.
    """
    if api_key is not None:
        authorization = http.headers.get("authorization", "")
        if not hmac.compare_digest(authorization.encode(), f"Bearer {api_key}".encode()):
            raise ApiError("API key is missing or wrong; send Authorization: Bearer KEY", status=401)
        return
    for header in ("host", "origin"):
        name = http.headers.get(header, LOOPBACK_NAMES[0]).rpartition("://")[2]
        if re.sub(r":\d+$", "", name.lower()) not in LOOPBACK_NAMES:
            message = f"without an API key, {name[:200]!r} is not answered; set --api-key-env"
            raise ApiError(message, code="unknown_host", status=403)


async def _read_body(http: Request) -> bytes:
    """Return the body of a request, and refuse one that is too large before it fills the memory."""
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(f"the request has more than {MAX_BODY_BYTES:,} bytes; send less", status=413)
    return bytes(body)


async def _respond_to_error(http: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(f"{http.method} {http.url.path}: {error.detail}", status=error.status_code)
    failure = _to_api_error(error)
    return JSONResponse(failure.body, failure.status)


def _to_api_error(error: Exception) -> ApiError:
    """Return the answer for an exception, and log it if it is no fault of the client."""
    match error:
        case ApiError():
            return error
        case ClientDisconnect():
            return ApiError("the client has left", status=499)
        case PipelineError():  # of the chat template, the settings or the prompts
            code = "context_length_exceeded" if isinstance(error, ModelError) else None
            return ApiError(str(error), code=code)
        case torch.OutOfMemoryError():
            log.error("the device's memory does not suffice for a batch; start with a smaller --max-batch")
            return ApiError("the device ran out of memory; ask for fewer or shorter texts", status=503)
    number = secrets.token_hex(4)
    log.error("internal error %s", number, exc_info=error)
    return ApiError(f"internal error {number}; the server's log has its traceback", status=500)


def run_server(service: Service, listener: socket) -> None:
    """Answer requests until Ctrl-C or SIGTERM, which then act as without a server."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each client that leaves
    config = uvicorn.Config(
        service.build_app(),
        log_config=None,
        log_level="critical",  # faults are logged above
        timeout_keep_alive=65,  # longer than clients keep a connection, so none is closed while in use
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    uvicorn.Server(config).run(sockets=[listener])
