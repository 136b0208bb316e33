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

from pipeline.config.model_schema import IMPORT_PATH, RecipeSection, kind_tag

SOURCE_NAME = r"^[A-Za-z0-9][\w.-]*$"


class TokenizerConfig(RecipeSection):
    """Where the tokenizer comes from: trained on the data here, or loaded."""

    pretrained: str | None = None
    """Local folder, `tokenizer.json` file or hub name. Default: that of `model.pretrained`; without one, a
    tokenizer is trained on the data."""
    vocab_size: int = Field(8192, gt=256, le=2**24)
    """Entries of the byte-level BPE trained on the data. Not read with `pretrained`."""


def interpolate_weight(weight: float | Mapping[int, float], step: int) -> float:
    """Return the weight of a source for the step after `step` of them."""
    if not isinstance(weight, Mapping):
        return weight
    before = max((at for at in weight if at <= step), default=min(weight))
    after = min((at for at in weight if at > step), default=before)
    passed = max(0, step - before) / (after - before) if after > before else 0.0
    return weight[before] + (weight[after] - weight[before]) * passed


class SourceConfig(RecipeSection):
    """Where documents come from: exactly one of `paths`, `dataset` and `iterable`."""

    name: str | None = Field(None, pattern=SOURCE_NAME)
    """What metrics and messages call it. Default: `source1`, `source2`, ..."""
    paths: list[str] | None = Field(None, min_length=1)
    """Files, folders or globs: .txt, .md, .rst and source code (a document a file), .jsonl and .csv (a
    document a row), each also as .gz or .zst, .parquet and .arrow; `python_stdlib` is the Python standard
    library's own source and documentation, which every machine has."""
    dataset: str | None = None
    """A Hugging Face dataset: hub name, or a folder that `save_to_disk` wrote."""
    subset: str | None = None
    """Configuration of the `dataset`, where it has several."""
    split: str = "train"
    """Split of the `dataset`."""
    revision: str | None = None
    """Commit, tag or branch of the hub `dataset`."""
    streaming: bool = False
    """Read the `dataset` over the network, without a copy of its files on this machine."""
    iterable: str | None = Field(None, pattern=IMPORT_PATH)
    """Import path `package.module:function` of a function that returns an iterable of texts or dicts. It runs
    that code; `--no-import-paths` refuses it."""
    args: dict[str, Any] = Field({})
    """Keyword arguments of the `iterable`."""
    text_field: str = "text"
    """Field of a row that holds the text."""
    fields: dict[str, str] = Field({})
    """Other names that the rows have for fields of chat and preference layouts: `{messages: dialogue}`."""
    weight: float | dict[int, float] | None = None
    """Share of the training samples that come from this source, relative to the other weights. Give all
    sources a weight, or none. `{0: 1.0, 500: 0.2}` changes with the step: linear between two of them, and
    constant after the last."""
    epochs: float = Field(1.0, gt=0, le=1e9)
    """How often the source is gone through in one epoch of the mixture. Not with `weight`."""
    max_documents: int | None = Field(None, gt=0)
    """Read no more than the first ones. Default: all."""
    bad_records: Literal["error", "skip"] = "error"
    """What to do with a row that is no JSON, or lacks the text or a usable conversation: stop with an error
    that names file and line, or leave it out and count it."""

    @field_validator("weight", mode="wrap")
    @classmethod
    def _number_or_steps(cls, value: Any, validated: ValidatorFunctionWrapHandler) -> Any:
        given = value
        if isinstance(value, dict):  # recipe.yaml has the steps as text
            value = {int(key) if str(key).isdecimal() else key: each for key, each in value.items()}
        try:
            weight: float | dict[int, float] | None = validated(value)
        except ValidationError:
            weight = -1
        numbers = [*weight, *weight.values()] if isinstance(weight, dict) else [weight or 0.0]
        if not numbers or min(numbers) < 0:
            raise ValueError(
                f"expected a number from 0 on, or one for each of some steps as {{0: 1.0, 500: 0.2}}; given "
                f"{given!r}"
            )
        return weight

    @model_validator(mode="after")
    def _one_origin(self) -> SourceConfig:
        given = [name for name in ("paths", "dataset", "iterable") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of paths, dataset and iterable (given: {', '.join(given) or 'none'})"
            )
        if self.weight is not None and self.epochs != 1.0:
            raise ValueError("give weight or epochs, not both")
        return self


class DataSection(RecipeSection):
    """What every kind of data answers. Each kind but one answers `None` to the question for a kind."""

    @property
    def tokens_per_row(self) -> int | None:
        """Number of tokens in a row of the training data; `None` where rows are no tokens."""
        return None

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width of a sample; `None` where samples are no images or of unknown size."""
        return None

    @property
    def documents(self) -> DocumentsConfig | None:
        """This section, of text, conversations or preferences."""
        return self if isinstance(self, DocumentsConfig) else None

    @property
    def text(self) -> TextDataConfig | None:
        """This section, of text."""
        return self if isinstance(self, TextDataConfig) else None

    @property
    def conversations(self) -> ConversationsConfig | None:
        """This section, of chat or preferences, which a chat template writes out."""
        return self if isinstance(self, ConversationsConfig) else None

    @property
    def chat(self) -> ChatDataConfig | None:
        """This section, of chat."""
        return self if isinstance(self, ChatDataConfig) else None

    @property
    def preferences(self) -> PreferenceDataConfig | None:
        """This section, of judged answers."""
        return self if isinstance(self, PreferenceDataConfig) else None

    @property
    def images(self) -> ImagesDataConfig | None:
        """This section, of image files."""
        return self if isinstance(self, ImagesDataConfig) else None

    @property
    def custom(self) -> CustomDataConfig | None:
        """This section, of a user's own data."""
        return self if isinstance(self, CustomDataConfig) else None


class DocumentsConfig(DataSection):
    """What text and chat have in common."""

    paths: list[str] | None = Field(None, min_length=1)
    """Short for one source with these `paths`."""
    sources: list[SourceConfig] | None = Field(None, min_length=1)
    """Several sources, or one with more to say of it, in place of `paths`."""
    curriculum: str | None = Field(None, pattern=IMPORT_PATH)
    """Import path `package.module:function` of a function that gives the weights of the sources by the step:
    `function(step)` returns `{name: weight}`, always the same for a step (docs/extending.md). In place of
    their `weight`. It runs that code; `--no-import-paths` refuses it."""
    eval_sets: dict[Annotated[str, Field(pattern=SOURCE_NAME)], SourceConfig] = Field({})
    """Further sets to evaluate on, by name; files that are trained on as well are told."""
    eval_fraction: float = Field(0.02, ge=0, lt=1)
    """Share of each source's documents held out for evaluation, chosen by a hash of the document: it stays
    held out whatever is added."""
    sequence_length: int = Field(256, gt=1, le=2**30)
    """Tokens a sequence (the inputs; the targets are the same tokens shifted by one)."""
    separate_documents: bool = True
    """Documents that share a sequence do not see each other: position ids restart, attention stays within a
    document, and no document's first token is predicted from the one before. `false`: one stream."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    prepare_workers: int | None = Field(None, gt=0, le=1024)
    """Processes that tokenise. Default: one a core of this machine."""
    cache_dir: str = "~/.cache/deepspeed-pipeline"
    """Where tokenised data is kept; keyed by content, tokenizer and settings."""

    @model_validator(mode="after")
    def _sources_add_up(self) -> DocumentsConfig:
        if (self.paths is None) == (self.sources is None):
            raise ValueError("give exactly one of paths and sources")
        weights = [source.weight for source in self.all_sources()]
        if self.curriculum is not None and (self.sources is None or any(w is not None for w in weights)):
            raise ValueError("curriculum gives the weights of sources: give sources, without weight")
        if any(weight is not None for weight in weights):
            if any(weight is None for weight in weights):
                raise ValueError("some sources have a weight and some have none; give all of them one")
            steps = {0}.union(*(weight for weight in weights if isinstance(weight, dict)))
            if not all(any(interpolate_weight(weight or 0.0, step) for weight in weights) for step in steps):
                raise ValueError("the weights of sources sum to 0; give at least one a weight above 0")
        names = [source.name for source in self.all_sources()] + list(self.eval_sets)
        twice = sorted({name for name in names if names.count(name) > 1 and name is not None})
        if twice:
            raise ValueError(f"two sources are called {twice[0]!r}; give each its own name")
        return self

    def all_sources(self) -> list[SourceConfig]:
        """Return every source of the training data, each with a name."""
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
    """Text cut into sequences of equal length, documents divided by the end-of-document token."""

    kind: Literal["text"]
    text_field: str = "text"
    """Field of a row that holds the text, for `paths`; each of `sources` has its own."""
    packing: Literal["concatenate", "best_fit", "none"] = "concatenate"
    """How documents fill sequences. `concatenate`: one behind the other, cut where a sequence is full.
    `best_fit`: whole documents, put together so that little is left over; only what is longer than a sequence
    is cut. `none`: each document alone, padded."""

    @property
    def _text_field(self) -> str:
        return self.text_field


class ConversationsConfig(DocumentsConfig):
    """What chat and preference data have in common."""

    kind: str
    layout: str
    learn_from: str
    chat_template: str | None = None
    """File with a Jinja template, where the tokenizer brings none or another is wanted; `chatml` is built
    in."""
    append_eos: bool = True
    """Add the end-of-document token behind a conversation that the template ends otherwise. `false`: the
    tokens are what the template writes, and nothing behind an answer's own text counts in the loss."""


class ChatDataConfig(ConversationsConfig):
    """Conversations and instructions, written out by the tokenizer's chat template. What the assistant says
    counts in the loss, the rest is context."""

    kind: Literal["chat"]
    layout: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "row"] = "auto"
    """How a row holds its conversation: `messages` of role and content, ShareGPT's `conversations` of
    from and value, Alpaca's instruction, input and output, or prompt and completion. `auto`: by the row's
    fields. `row`: the template reads the fields of the row itself (docs/data.md)."""
    learn_from: Literal["assistant", "content", "all"] = "assistant"
    """Which tokens count in the loss: the assistant's turns, each to its end; of these turns the content and
    the end-of-document token that follows it; or all."""
    packing: Literal["best_fit", "none"] = "best_fit"
    """`best_fit`: whole conversations share a sequence where they fit. `none`: each alone, padded."""
    too_long: Literal["shorten", "drop", "error"] = "shorten"
    """A conversation longer than a sequence. `shorten`: its last turns are left out, up to an answer that
    fits whole; where not even the first fits, it is dropped. Both are counted and reported."""


class PreferenceDataConfig(ConversationsConfig):
    """Answers that were judged: a prompt with a chosen and a rejected one, or with one that was liked or not.
    Conversations are written out by the tokenizer's chat template, plain strings as they are."""

    kind: Literal["preference"]
    sequence_length: int = Field(256, gt=1, le=2**30)
    """Tokens a sequence, which holds an example whole: both answers, each behind a copy of the prompt. It may
    be longer than the model's positions, which restart at each answer."""
    answer_length: int | None = Field(None, gt=1, le=2**30)
    """Most tokens of an answer together with its prompt; `too_long` decides about longer ones. Default: as
    many as fit in a sequence. Set it to the model's positions where answers may be longer."""
    separate_documents: bool = True
    """Always `true`: answers do not see each other."""
    layout: Literal[
        "auto", "trl", "sharegpt", "messages", "alpaca", "argilla", "intel", "icr", "prompt_pairs", "row"
    ] = "auto"
    """How a row holds prompt and answers (docs/data.md has the fields of each). `auto`: by the row's fields.
    `row`: the template reads the fields of the row itself.
    `prompt_pairs` has TRL's fields, with strings that the chat template is to write out; `auto` takes
    strings for plain text there."""
    examples: Literal["pairs", "unpaired"] | None = None
    """`pairs`: every row has a chosen and a rejected answer. `unpaired`: rows have one answer and whether it
    was liked (`label`, `kto_tag`), or a pair, of which each answer counts by itself; beside each answer
    stands its prompt with the next row's answer, from which KTO estimates its KL term. Default: `unpaired`
    with objective kto, else `pairs`."""
    learn_from: Literal["assistant", "content"] = "assistant"
    """Which tokens of an answer count: all that the template writes for it, or its content and the
    end-of-document token that follows it."""
    packing: Literal["best_fit", "none"] = "best_fit"
    """`best_fit`: whole examples share a sequence where they fit. `none`: each alone, padded."""
    too_long: Literal["drop", "error"] = "drop"
    """An example that does not fit in a sequence: left out, counted and reported, or an error. No answer that
    is learned from is ever cut."""

    @model_validator(mode="after")
    def _kept_apart(self) -> PreferenceDataConfig:
        if not self.separate_documents:
            raise ValueError("separate_documents: answers of a row never see each other; drop it")
        return self

    @property
    def is_unpaired(self) -> bool:
        """Whether rows may have one answer alone."""
        return self.examples == "unpaired"


class DigitsDataConfig(DataSection):
    """scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels, 10 classes."""

    kind: Literal["digits"]
    eval_fraction: float = Field(0.2, gt=0, lt=1)
    """Share of the images held out for evaluation."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a digit."""
        return 1, 8, 8


class ImagesDataConfig(DataSection):
    """Images to classify: a folder of one folder a class."""

    kind: Literal["images"]
    path: str
    """Folder with one folder of images for each class."""
    eval_path: str | None = None
    """Folder of held-out images, by class. Default: `eval_fraction` of the training images."""
    eval_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the images held out for evaluation, chosen by a hash of the image."""
    image_size: int = Field(224, gt=0, le=2**14)
    """Pixels a side: the shorter side is resized to it and the middle cut out."""
    channels: Literal[1, 3] = 3
    """1: grey, 3: colour."""
    mean: list[float] | None = None
    """Subtracted from each channel (pixels are 0 to 1). Default: ImageNet's; 0.5 for grey."""
    std: list[float] | None = None
    """Each channel is divided by it. Default: ImageNet's; 0.5 for grey."""
    augmentations: dict[str, dict[str, Any]] = Field({})
    """Random changes to training images, in order, by name and each with its arguments (docs/data.md), as
    `RandomHorizontalFlip: {p: 0.5}`."""

    @model_validator(mode="after")
    def _one_number_a_channel(self) -> ImagesDataConfig:
        for name in ("mean", "std"):
            given = getattr(self, name)
            if given is not None and len(given) != self.channels:
                raise ValueError(f"{name}: {len(given)} numbers for {self.channels} channels")
        return self

    @field_validator("std")
    @classmethod
    def _positive(cls, value: list[float] | None) -> list[float] | None:
        if value is not None and min(value) <= 0:
            raise ValueError("must be above 0")
        return value

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a sample."""
        return self.channels, self.image_size, self.image_size


class CustomDataConfig(DataSection):
    """Data of your own: `kind: package.module:function`, called as `function(split, **args)`."""

    kind: str = Field(pattern=IMPORT_PATH)
    """Import path `package.module:function`. It runs that code; `--no-import-paths` refuses it. It is called
    with `"train"` and `"eval"` and returns a torch Dataset of dicts, tuples or tensors (or None where there
    is no such split); for `"eval"` also a dict of several, by name."""
    args: dict[str, Any] = Field({})
    """Keyword arguments of the function."""
    collate_fn: str | None = Field(None, pattern=IMPORT_PATH)
    """Import path of a function that makes a batch of a list of samples; it runs as `kind` does. Default: the
    data set's own `collate_fn`, or what stacks samples of one shape."""


DataConfig = Annotated[
    Annotated[TextDataConfig, Tag("text")]
    | Annotated[ChatDataConfig, Tag("chat")]
    | Annotated[PreferenceDataConfig, Tag("preference")]
    | Annotated[DigitsDataConfig, Tag("digits")]
    | Annotated[ImagesDataConfig, Tag("images")]
    | Annotated[CustomDataConfig, Tag("custom")],
    Discriminator(kind_tag),
]
