"""Checks the requests of OpenAI's API.

A field that would change the answer, but is unknown or not supported, is an error that names the field.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

TokenIds = Annotated[list[int], Field(min_length=1)]
TokenLimit = Annotated[int, Field(ge=1, lt=2**31)]
MAX_LOGPROBS = 20  # likeliest tokens at each position
WITHOUT_EFFECT = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Fields that are accepted and ignored, since they do not describe the answer."""
UNSUPPORTED = {
    "frequency_penalty": 0,
    "logit_bias": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "store": False,
}
"""Field that is not supported -> its only accepted value, which changes nothing."""


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


def _make_list(value: Any) -> Any:
    """Return a list of values; a single text, or the ids of one, becomes a list of one."""
    is_one = isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int)
    return [value] if is_one else value


class SharedOptions(BaseModel):
    """Fields that both endpoints have."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = {}
    max_tokens: TokenLimit | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=128)
    seed: int = Field(default_factory=lambda: secrets.randbits(63), ge=-(2**63), lt=2**63)
    stop: Annotated[list[str], BeforeValidator(_make_list)] = Field([], max_length=32)


class ChatOptions(SharedOptions):
    """Fields of /v1/chat/completions. The chat template's reader checks the messages and tools."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_tokens: TokenLimit | None = Field(
        None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens to show at each position; `None`: no log-probabilities."""
        return self.top_logprobs if self.logprobs or self.top_logprobs else None


class TextOptions(SharedOptions):
    """Fields of /v1/completions."""

    prompt: Annotated[list[str | TokenIds], BeforeValidator(_make_list)] = Field(min_length=1)
    max_tokens: TokenLimit | None = 16
    echo: bool = False
    num_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, alias="logprobs")


AnyOptions = ChatOptions | TextOptions


def parse_request(raw: bytes, kind: type[AnyOptions]) -> AnyOptions:
    """Return the options of a request.

    Raises:
        ApiError: The request is no JSON object, or a field is unknown, not supported or not valid.
    """
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the request is no valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError("the request is no JSON object; send one with model, and messages or prompt")
    fields = {key: value for key, value in body.items() if value is not None and key not in WITHOUT_EFFECT}
    for key, neutral in UNSUPPORTED.items():
        if fields.pop(key, neutral) != neutral:
            raise ApiError(f"{key} is not supported; leave it out", key, "unsupported_parameter")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _to_field_error(error) from None


def _to_field_error(error: ValidationError) -> ApiError:
    """Return the answer for an invalid field; of the forms that a field may have, the closest one counts."""
    detail = max(error.errors(include_url=False, include_context=False), key=lambda each: len(each["loc"]))
    place = re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, detail["loc"])))
    if detail["type"] == "extra_forbidden":
        return ApiError(f"{place}: unknown, or not supported; leave it out", place, "unknown_parameter")
    got = "" if detail["type"] == "missing" else f"; got {detail['input']!r:.60}"
    return ApiError(f"{place}: {detail['msg'][0].lower()}{detail['msg'][1:]}{got}", place)
