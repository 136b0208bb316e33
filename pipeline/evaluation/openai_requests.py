"""Checks the requests of OpenAI's API.

A field that has no effect here is an error that names it, so that no client believes it was heeded.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

MAX_LOGPROBS = 20  # likeliest tokens at each position
WITHOUT_EFFECT = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Fields that are accepted, and change nothing."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "web_search_options": (),
}
"""Fields that are not supported, with the values that ask for nothing."""


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form.

    Args:
        message: What is wrong, and what to change.
        param: Field of the request; `None` if no field is at fault.
        code: OpenAI's code of the error, if it has one.
        status: HTTP status.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # random padding, which is not needed where nothing is encrypted


class Options(_Strict):
    """Fields of both endpoints."""

    model: str | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: list[str] = Field([], max_length=32)

    @field_validator("stop", mode="before")
    @classmethod
    def _make_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Options:
        if not all(self.stop):
            raise ValueError("stop: a string is empty; give it one character or more")
        if self.stream_options and not self.stream:
            raise ValueError("stream_options: give it only with stream=true")
        return self


class _TextPart(_Strict):
    type: Literal["text"]
    text: str


class _Message(_Strict):
    """A message; fields that are null count as absent, as in the answers that clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: list[_TextPart] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = {key: each for key, each in value.items() if each is not None}
        if isinstance(fields.get("content"), str):
            fields["content"] = [{"type": "text", "text": fields["content"]}]
        if fields.get("annotations") == []:
            del fields["annotations"]
        if fields.get("content") is None and not fields.get("tool_calls"):
            raise ValueError("content: a message needs text")
        return fields

    def as_turn(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        turn = self.model_dump(exclude_none=True)
        turn["content"] = "\n".join(part.text for part in self.content or [])
        turn["role"] = "system" if self.role == "developer" else self.role  # OpenAI's new name
        return turn


class ChatOptions(Options):
    """Fields of /v1/chat/completions."""

    messages: list[_Message] = Field(min_length=1)
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatOptions:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: it is the old name of max_completion_tokens; give one of them")
        if self.max_tokens == 0:
            raise ValueError("max_tokens: expected 1 or more")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: give it only with logprobs=true")
        return self


class TextOptions(Options):
    """Fields of /v1/completions."""

    prompt: Any = Field()
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @field_validator("prompt", mode="before")
    @classmethod
    def _read_prompts(cls, value: Any) -> list[str | list[int]]:
        """Return a list of prompts, each a text or a list of token ids."""
        is_one = isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int)
        prompts = [value] if is_one else value
        if not isinstance(prompts, list) or not prompts or not all(map(_is_prompt, prompts)):
            raise ValueError("expected a text, a list of token ids, or a list of texts or of such lists")
        return prompts

    @model_validator(mode="after")
    def _check_echo(self) -> TextOptions:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 is for echo=true; give 1 or more")
        if self.echo and self.logprobs is not None and self.logprobs > 1:
            raise ValueError("logprobs: with echo the prompt has one likeliest token a position; give 0 or 1")
        return self


def _is_prompt(value: Any) -> bool:
    is_ids = isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
    return isinstance(value, str) or is_ids


OptionsT = TypeVar("OptionsT", bound=Options)


def parse_request(raw: bytes, kind: type[OptionsT]) -> OptionsT:
    """Return the options of a request.

    Raises:
        ApiError: The request is no JSON object, or a field is unknown, not supported or not valid.
    """
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # UnicodeEncodeError: a half of a surrogate pair
        raise ApiError(f"the request is no valid JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise ApiError("the request is no JSON object; send one with model, and messages or prompt")
    fields = {}
    for key, value in body.items():
        if value is None or key in WITHOUT_EFFECT:
            continue
        if key not in UNSUPPORTED:
            fields[key] = value
        elif value not in UNSUPPORTED[key]:
            raise ApiError(f"{key} is not supported; leave it out", key, "unsupported_parameter")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _explain(error) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _explain(error: ValidationError) -> ApiError:
    """Return the answer for the first invalid field."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, first["loc"])))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return ApiError(f"{place}: unknown, or not supported; leave it out", place, "unknown_parameter")
    if first["type"] == "value_error" and (named := re.match(r"([a-z_]+): ", message)):
        place = f"{place}.{named[1]}" if place else named[1]  # a validator of several fields
        message = message[named.end() :]
    got = "" if first["type"] in ("missing", "value_error") else f"; got {str(first['input'])[:60]!r}"
    return ApiError(f"{place}: {message[0].lower()}{message[1:]}{got}", place)
