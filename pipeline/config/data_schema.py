"""The recipe's data section. See schema.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from pipeline.config.model_schema import IMPORT_PATH, RecipeSection, get_kind_tag

SOURCE_NAME = r"^[A-Za-z0-9][\w.-]*$"
"""Pattern of the name of a source or an evaluation set."""


class TokenizerConfig(RecipeSection):
    """The tokenizer: loaded, or trained on the data."""

    pretrained: str | None = None
    """Local folder, `tokenizer.json` file or hub name. Default: the tokenizer of `model.pretrained`;
    without a pretrained model, a tokenizer is trained on the data."""
    vocab_size: int = Field(8192, gt=256, le=2**24)
    """Number of entries of the byte-level BPE that is trained on the data. Not read with `pretrained`."""


def interpolate_weight(weight: float | Mapping[int, float], step: int) -> float:
    """Return the weight of a source after `step` steps, linear between the steps that `weight` states.

    Before the first stated step and after the last, the weight is constant.
    """
    if not isinstance(weight, Mapping):
        return weight
    before = max((stated for stated in weight if stated <= step), default=min(weight))
    after = min((stated for stated in weight if stated > step), default=before)
    share = max(0, step - before) / (after - before) if after > before else 0.0
    return weight[before] + (weight[after] - weight[before]) * share


class SourceConfig(RecipeSection):
    """A source of documents: exactly one of `paths`, `dataset` and `iterable`."""

    name: str | None = Field(None, pattern=SOURCE_NAME)
    """Name of the source in metrics and messages. Default: `source1`, `source2`, ..."""
    paths: list[str] | None = Field(None, min_length=1)
    """Files, folders or globs. A file of .txt, .md, .rst or source code is one document; each row of
    .jsonl, .csv, .parquet and .arrow is one. Text, .jsonl and .csv may be compressed as .gz or .zst.
    `python_stdlib` stands for the source code and documentation of the Python standard library, which every
    machine has."""
    dataset: str | None = None
    """Hugging Face dataset: hub name, or a folder that `save_to_disk` wrote."""
    subset: str | None = None
    """Configuration of the `dataset`, if it has several."""
    split: str = "train"
    """Split of the `dataset`."""
    revision: str | None = None
    """Commit, tag or branch of the hub `dataset`."""
    streaming: bool = False
    """Whether to read the `dataset` over the network, without storing its files on this machine."""
    iterable: str | None = Field(None, pattern=IMPORT_PATH)
    """Import path `package.module:function` of a function that returns an iterable of texts or dicts. The key
    runs that code; `--no-import-paths` refuses it."""
    args: dict[str, Any] = Field({})
    """Keyword arguments of the `iterable`."""
    text_field: str = "text"
    """Field of a row that holds the text."""
    fields: dict[str, str] = Field({})
    """Field of a chat or preference layout -> name of that field in the rows: `{messages: dialogue}`."""
    weight: float | dict[int, float] | None = None
    """Share of the training samples that come from this source, relative to the other weights. Give all
    sources a weight, or none. `{0: 1.0, 500: 0.2}` changes the weight with the step: it is linear between two
    steps, and constant after the last."""
    epochs: float = Field(1.0, gt=0, le=1e9)
    """Number of passes over the source in one epoch of the mixture. Not with `weight`."""
    max_documents: int | None = Field(None, gt=0)
    """Largest number of documents to read, from the first on. Default: all."""
    bad_records: Literal["error", "skip"] = "error"
    """Treatment of a row that is not valid JSON, or has no text or no usable conversation. `error`: stop
    with an error that names file and line. `skip`: leave the row out and count it."""

    @field_validator("weight", mode="wrap")
    @classmethod
    def _accept_number_or_steps(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        given = value
        if isinstance(value, dict):  # recipe.yaml has the steps as texts
            value = {int(key) if str(key).isdecimal() else key: each for key, each in value.items()}
        try:
            weight: float | dict[int, float] | None = validate(value)
        except ValidationError:
            weight = -1  # refused below, with the same message as a negative weight
        numbers = [*weight, *weight.values()] if isinstance(weight, dict) else [weight or 0.0]
        if not numbers or min(numbers) < 0:
            raise ValueError(
                f"expected a number of 0 or more, or such numbers by step: {{0: 1.0, 500: 0.2}}; "
                f"given {given!r}"
            )
        return weight

    @model_validator(mode="after")
    def _check_origin(self) -> SourceConfig:
        origins = [name for name in ("paths", "dataset", "iterable") if getattr(self, name) is not None]
        if len(origins) != 1:
            raise ValueError(
                f"give exactly one of paths, dataset and iterable (given: {', '.join(origins) or 'none'})"
            )
        if self.weight is not None and self.epochs != 1.0:
            raise ValueError("give weight or epochs, not both")
        return self


class DataSection(RecipeSection):
    """Base of the sections of all kinds of data.

    Properties such as `text` return the section if it is of that kind, else `None`. They replace
    `isinstance` tests outside of config/.
    """

    @property
    def tokens_per_row(self) -> int | None:
        """Number of tokens in a row of the training data; `None` if rows are not tokens."""
        return None

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width of a sample; `None` if samples are not images, or of unknown size."""
        return None

    @property
    def documents(self) -> DocumentsConfig | None:
        """This section if its kind is text, chat or preference, else `None`."""
        return self if isinstance(self, DocumentsConfig) else None

    @property
    def text(self) -> TextDataConfig | None:
        """This section if its kind is text, else `None`."""
        return self if isinstance(self, TextDataConfig) else None

    @property
    def conversations(self) -> ConversationsConfig | None:
        """This section if a chat template formats its rows (chat, preference), else `None`."""
        return self if isinstance(self, ConversationsConfig) else None

    @property
    def chat(self) -> ChatDataConfig | None:
        """This section if its kind is chat, else `None`."""
        return self if isinstance(self, ChatDataConfig) else None

    @property
    def preferences(self) -> PreferenceDataConfig | None:
        """This section if its kind is preference, else `None`."""
        return self if isinstance(self, PreferenceDataConfig) else None

    @property
    def images(self) -> ImagesDataConfig | None:
        """This section if its kind is images, else `None`."""
        return self if isinstance(self, ImagesDataConfig) else None

    @property
    def custom(self) -> CustomDataConfig | None:
        """This section if it names a function of the user, else `None`."""
        return self if isinstance(self, CustomDataConfig) else None


class DocumentsConfig(DataSection):
    """Base of the sections of data that is made of documents: text, chat and preference."""

    paths: list[str] | None = Field(None, min_length=1)
    """Short form of `sources` for a single source with these `paths`."""
    sources: list[SourceConfig] | None = Field(None, min_length=1)
    """Sources of the training data, in place of `paths`, with all their keys."""
    curriculum: str | None = Field(None, pattern=IMPORT_PATH)
    """Import path `package.module:function` of a function that sets the weights of the sources by the step,
    in place of their `weight`. `function(step)` returns `{name: weight}`, and must return the same for the
    same step (docs/how-to/extending.md). The key runs that code; `--no-import-paths` refuses it."""
    eval_sets: dict[Annotated[str, Field(pattern=SOURCE_NAME)], SourceConfig] = Field({})
    """Further evaluation sets, by name. A message names files that are in the training data as well."""
    eval_fraction: float = Field(0.02, ge=0, lt=1)
    """Share of each source's documents that is held out for evaluation. A hash of the document decides, so
    a document stays held out when others are added."""
    sequence_length: int = Field(256, gt=1, le=2**30)
    """Number of input tokens in a sequence. The targets are the same tokens shifted by one."""
    separate_documents: bool = True
    """Whether documents that share a sequence are separated: position ids restart, attention stays within a
    document, and the first token of a document is not predicted from the document before. `false`: one
    stream."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    prepare_workers: int | None = Field(None, gt=0, le=1024)
    """Number of processes that tokenise. Default: one for each core of this machine."""
    cache_dir: str = "~/.cache/deepspeed-pipeline"
    """Folder for tokenised data, which is found again by its content, tokenizer and settings."""

    @model_validator(mode="after")
    def _check_sources(self) -> DocumentsConfig:
        if (self.paths is None) == (self.sources is None):
            raise ValueError("give exactly one of paths and sources")
        weights = [source.weight for source in self.all_sources()]
        if self.curriculum is not None and (self.sources is None or any(w is not None for w in weights)):
            raise ValueError("curriculum sets the weights of sources: give sources, without weight")
        if any(weight is not None for weight in weights):
            if any(weight is None for weight in weights):
                raise ValueError(
                    "some sources have a weight and others have none; give all of them one, or none"
                )
            steps = {0}.union(*(weight for weight in weights if isinstance(weight, dict)))
            for step in sorted(steps):
                if not any(interpolate_weight(weight or 0.0, step) for weight in weights):
                    at_step = f" at step {step}" if len(steps) > 1 else ""
                    raise ValueError(
                        f"the weights of sources sum to 0{at_step}; give at least one a weight above 0"
                    )
        names = [source.name for source in self.all_sources()] + list(self.eval_sets)
        repeated = sorted({name for name in names if names.count(name) > 1 and name is not None})
        if repeated:
            raise ValueError(f"two sources are called {repeated[0]!r}; give each its own name")
        return self

    def all_sources(self) -> list[SourceConfig]:
        """Return every source of the training data. One without a name gets `source1`, `source2`, ..."""
        if self.sources is None:
            return [SourceConfig(name="source1", paths=self.paths, text_field=self._text_field)]
        return [
            source if source.name is not None else source.model_copy(update={"name": f"source{number}"})
            for number, source in enumerate(self.sources, start=1)
        ]

    @property
    def _text_field(self) -> str:
        return "text"

    @property
    def tokens_per_row(self) -> int:
        """Number of tokens in a row of the training data."""
        return self.sequence_length


class TextDataConfig(DocumentsConfig):
    """Text cut into sequences of equal length. An end-of-document token ends each document."""

    kind: Literal["text"]
    text_field: str = "text"
    """Field of a row that holds the text, for `paths`; each of `sources` has its own `text_field`."""
    packing: Literal["concatenate", "best_fit", "none"] = "concatenate"
    """Way in which documents fill sequences. `concatenate`: one after the other, cut where a sequence is
    full. `best_fit`: whole documents, combined so that little padding is needed; only a document longer
    than a sequence is cut. `none`: each document alone, padded."""

    @property
    def _text_field(self) -> str:
        return self.text_field


class ConversationsConfig(DocumentsConfig):
    """Base of the sections of chat and preference data.

    Subclasses state the choices and the documentation of `kind`, `layout` and `learn_from`.
    """

    kind: str
    layout: str
    learn_from: str
    chat_template: str | None = None
    """File with a Jinja template to use in place of the tokenizer's; `chatml` is built in."""
    append_eos: bool = True
    """Whether to add the end-of-document token to a conversation whose template does not end with it.
    `false`: the tokens are those of the template, and nothing after an answer's own text counts in the
    loss."""


class ChatDataConfig(ConversationsConfig):
    """Conversations and instructions, formatted by the tokenizer's chat template.

    The assistant's turns count in the loss; all else is context.
    """

    kind: Literal["chat"]
    layout: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "row"] = "auto"
    """Layout of a row's conversation: `messages` with role and content, ShareGPT's `conversations` with
    from and value, Alpaca's instruction, input and output, or prompt and completion. `auto`: chosen by the
    row's fields. `row`: the template reads the fields of the row itself (docs/how-to/data.md)."""
    learn_from: Literal["assistant", "content", "all"] = "assistant"
    """Tokens that count in the loss. `assistant`: the assistant's turns to their end. `content`: the
    content of these turns and an end-of-document token that follows it. `all`: every token."""
    packing: Literal["best_fit", "none"] = "best_fit"
    """`best_fit`: whole conversations share a sequence if they fit. `none`: each alone, padded."""
    too_long: Literal["shorten", "drop", "error"] = "shorten"
    """Treatment of a conversation longer than a sequence. `shorten`: leave out its last turns, so that it
    ends with the last answer that fits completely; leave the conversation out if not even the first answer
    fits. `drop`: leave the conversation out. Both are counted and reported. `error`: stop."""


class PreferenceDataConfig(ConversationsConfig):
    """Judged answers: a prompt with a chosen and a rejected answer, or with one answer that was liked or not.

    The tokenizer's chat template formats conversations; plain strings stay as they are.
    """

    kind: Literal["preference"]
    sequence_length: int = Field(256, gt=1, le=2**30)
    """Number of tokens in a sequence. A sequence holds whole examples: both answers, each after a copy of the
    prompt. It may be longer than the model's positions, which restart at each answer."""
    answer_length: int | None = Field(None, gt=1, le=2**30)
    """Largest number of tokens of an answer with its prompt; `too_long` decides about longer ones. Default:
    as many as fit in a sequence. If answers may exceed the model's positions, give the number of
    positions."""
    separate_documents: bool = True
    """Always `true`: attention never crosses from one answer to another."""
    layout: Literal[
        "auto", "trl", "sharegpt", "messages", "alpaca", "argilla", "intel", "icr", "prompt_pairs", "row"
    ] = "auto"
    """Layout of a row's prompt and answers; docs/how-to/adapters-and-preferences.md lists the fields of each.
    `auto`: chosen by the row's fields. `row`: the template reads the fields of the row itself.
    `prompt_pairs`: TRL's fields, with strings that the chat template formats; `auto` takes such strings for
    plain text."""
    examples: Literal["pairs", "unpaired"] | None = None
    """`pairs`: every row has a chosen and a rejected answer. `unpaired`: a row has one answer and whether
    it was liked (`label`, `kto_tag`), or a pair whose answers count separately. In `unpaired`, each example
    also holds its prompt with the next row's answer, from which KTO estimates its KL term. Default:
    `unpaired` with objective kto, else `pairs`."""
    learn_from: Literal["assistant", "content"] = "assistant"
    """Tokens of an answer that count in the loss. `assistant`: all that the template writes for the answer.
    `content`: the answer's content and an end-of-document token that follows it."""
    packing: Literal["best_fit", "none"] = "best_fit"
    """`best_fit`: whole examples share a sequence if they fit. `none`: each alone, padded."""
    too_long: Literal["drop", "error"] = "drop"
    """Treatment of an example longer than a sequence. `drop`: leave it out, count and report it. `error`:
    stop. An answer that counts in the loss is never cut."""

    @model_validator(mode="after")
    def _check_separation(self) -> PreferenceDataConfig:
        if not self.separate_documents:
            raise ValueError("separate_documents: it is always true for preference data; remove the key")
        return self

    @property
    def is_unpaired(self) -> bool:
        """Return whether rows may have a single answer."""
        return self.examples == "unpaired"


class DigitsDataConfig(DataSection):
    """The handwritten digits of scikit-learn: 1,797 real images of 8 x 8 pixels in 10 classes."""

    kind: Literal["digits"]
    eval_fraction: float = Field(0.2, gt=0, lt=1)
    """Share of the images that is held out for evaluation."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a digit."""
        return 1, 8, 8


class ImagesDataConfig(DataSection):
    """Images to classify, in one folder for each class."""

    kind: Literal["images"]
    path: str
    """Folder with one folder of images for each class."""
    eval_path: str | None = None
    """Folder of held-out images, one folder for each class. Default: `eval_fraction` of the training
    images."""
    eval_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the images that is held out for evaluation, chosen by a hash of the image."""
    image_size: int = Field(224, gt=0, le=2**14)
    """Width and height in pixels. An image is resized so that its shorter side has this length, and its
    centre is cropped."""
    channels: Literal[1, 3] = 3
    """Number of channels. 1: grey, 3: colour."""
    mean: list[float] | None = None
    """Mean of each channel, which is subtracted from its pixels (0 to 1). Default: ImageNet's; 0.5 for
    grey."""
    std: list[float] | None = None
    """Standard deviation of each channel, by which its pixels are divided. Default: ImageNet's; 0.5 for
    grey."""
    augmentations: dict[str, dict[str, Any]] = Field({})
    """Random changes of training images, in this order: name and arguments of each, for example
    `RandomHorizontalFlip: {p: 0.5}` (docs/how-to/data.md)."""

    @model_validator(mode="after")
    def _check_channels(self) -> ImagesDataConfig:
        for name in ("mean", "std"):
            numbers = getattr(self, name)
            if numbers is not None and len(numbers) != self.channels:
                raise ValueError(
                    f"{name}: {len(numbers)} numbers for {self.channels} channels; give one for each"
                )
        return self

    @field_validator("std")
    @classmethod
    def _check_above_zero(cls, value: list[float] | None) -> list[float] | None:
        if value is not None and min(value) <= 0:
            raise ValueError("must be above 0")
        return value

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a sample."""
        return self.channels, self.image_size, self.image_size


class CustomDataConfig(DataSection):
    """Your own data: `kind: package.module:function`, called as `function(split, **args)`."""

    kind: str = Field(pattern=IMPORT_PATH)
    """Import path `package.module:function`. The function is called with `"train"` and `"eval"`. It returns
    a torch Dataset of dicts, tuples or tensors, or None if there is no such split; for `"eval"` also a dict
    of several datasets by name. The key runs that code; `--no-import-paths` refuses it."""
    args: dict[str, Any] = Field({})
    """Keyword arguments of the function."""
    collate_fn: str | None = Field(None, pattern=IMPORT_PATH)
    """Import path of a function that makes a batch from a list of samples. The key runs that code, as
    `kind` does. Default: the dataset's own `collate_fn`, or a function that stacks samples of equal
    shape."""


DataConfig = Annotated[
    Annotated[TextDataConfig, Tag("text")]
    | Annotated[ChatDataConfig, Tag("chat")]
    | Annotated[PreferenceDataConfig, Tag("preference")]
    | Annotated[DigitsDataConfig, Tag("digits")]
    | Annotated[ImagesDataConfig, Tag("images")]
    | Annotated[CustomDataConfig, Tag("custom")],
    Discriminator(get_kind_tag),
]
