"""Everything the user said, checked: recipe and DeepSpeed JSON together. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from pipeline.config.batch_plan import BatchPlan, plan_batch
from pipeline.config.deepspeed_adoption import adopt_stated_numbers, adopt_torch_section
from pipeline.config.deepspeed_json import decide_precision, load_deepspeed_json, resolve_deepspeed
from pipeline.config.deepspeed_keys import ADOPTED
from pipeline.config.loading import ConfigFile, Dumper, Tree, get_dotted, parse_override, read_yaml
from pipeline.config.optional_packages import require
from pipeline.config.recipe import refuse_code, validate_recipe
from pipeline.config.schema import RunConfig
from pipeline.config.shipped import find_deepspeed_json, find_recipe
from pipeline.config.split import Device, Split, deepspeed_split
from pipeline.config.split_conflicts import Choice, refuse_impossible
from pipeline.errors import ConfigError
from pipeline.files import CONFIGURATION_LIMIT, is_path, read_plain
from pipeline.redaction import redact


def refuse_missing(choice: Choice) -> None:
    """Check packages and the GPU before data and model are built.

    Raises:
        ConfigError: A package is not installed, or the GPU has no products in fp8.
    """
    fp8 = f"model.fp8: {choice.model('fp8')}"
    adapter, split = choice.config.adapter, choice.split
    if choice.multiplies_in_fp8:
        require("torchao", fp8, "set model.fp8=none")
    if choice.quantizes_base:
        require("bitsandbytes", "adapter.quantize: nf4", "leave adapter.quantize out")
    if adapter is not None:
        require("peft", f"adapter: {adapter.kind or 'lora'}", "leave adapter out to train all weights")
    if split.tensor_parallel > 1:
        require("accelerate", "tensor_parallel", "leave tensor_parallel out")
    if split.pipeline_stages > 1:
        require("accelerate", "pipeline", "leave pipeline out")
    if split.zero_stage == 3 and choice.model("pretrained") is not None:
        require("accelerate", "model.pretrained with ZeRO-3", "set zero_optimization.stage to 2")
    if choice.multiplies_in_fp8 and not choice.device.fp8:
        raise ConfigError(
            f"{fp8}: this GPU does not multiply in fp8, which NVIDIA's do from "
            "Ada and Hopper on (8.9) and AMD's from MI300 on; set model.fp8=none"
        )


# Of two ways to say one thing, the one on the command line takes the place of the other in the file.
ALTERNATIVES = (
    ("max_steps", "max_epochs"),
    ("data.paths", "data.sources"),
    ("schedule.warmup", "schedule.warmup_steps"),
)
# Sections that may be written as their kind.
KIND_ALONE = ("adapter",)


@dataclass(frozen=True)
class Resolved:
    """The settings for one number of ranks on one kind of device."""

    plan: BatchPlan
    deepspeed: Tree | None
    """The dict DeepSpeed gets; None for plain PyTorch."""
    split: Split
    tf32: bool
    compile: bool

    def divided(self, micro_batch_size: int) -> Resolved:
        """With the same global batch in micro-batches of another size."""
        plan, filled = self.plan.divided(micro_batch_size), self.deepspeed
        if filled is not None:
            filled = filled | {
                "train_micro_batch_size_per_gpu": plan.micro_batch_size,
                "gradient_accumulation_steps": plan.gradient_accumulation_steps,
            }
        return replace(self, plan=plan, deepspeed=filled)

    def slow_precision(self, device: Device) -> str | None:
        """What to say of a half precision in which this machine's processor is not faster than in fp32."""
        precision = self.split.precision
        if not device.is_slow_in(precision):
            return None
        cure = "engine.precision=fp32" if self.deepspeed is None else f"ds.{precision}.enabled=false"
        return f"this CPU is not faster in {precision} than in fp32: {cure}"

    def told_of_bf16(self, device: Device) -> str | None:
        """What to say of a CPU that has instructions for bf16: which they are, or that they lie idle."""
        if self.split.precision == "bf16" and device.bf16_by:
            return f"bf16 is multiplied by this CPU's {device.bf16_by}"
        if self.split.precision == "fp32" and device.bf16_by == "AMX":
            told = "engine.precision=bf16" if self.deepspeed is None else "ds.bf16.enabled=true"
            return f"this CPU multiplies bf16 by AMX, several times as fast as fp32: {told}"
        return None


@dataclass(frozen=True)
class Settings:
    """A validated recipe and, where DeepSpeed is asked for, its JSON with names checked."""

    config: RunConfig
    recipe_path: Path
    split: ConfigFile | None
    """The file after --deepspeed."""
    overrides: tuple[str, ...] = ()
    """Of the command line, as they were given."""
    is_default: bool = False
    """Whether nobody chose the recipe."""

    def followed_by(self, words: Sequence[str]) -> Settings:
        """The settings of the same command with further words behind it: overrides, `--deepspeed FILE`.

        Raises:
            ConfigError: as `load_settings`.
        """
        path, added = self.split_path, list(words)
        if "--deepspeed" in added:
            at = added.index("--deepspeed")
            path = Path(added[at + 1])
            del added[at : at + 2]
        words = [*self.overrides, *added]
        return load_settings(self.recipe_path, path, words, is_default=self.is_default)

    @property
    def split_path(self) -> Path | None:
        """The file after --deepspeed."""
        return None if self.split is None else self.split.path

    @property
    def deepspeed(self) -> Tree | None:
        """What the JSON says to DeepSpeed; None for plain PyTorch."""
        return None if self.split is None or "torch" in self.split.tree else self.split.tree

    @property
    def adopted(self) -> dict[str, str]:
        """Keys by which the JSON says what else the recipe says -> the recipe's key."""
        tree = {} if self.split is None else self.split.tree
        found = {key: own for key, own in ADOPTED.items() if get_dotted(tree, key) not in (None, "auto")}
        if "scheduler.type" in found:  # it decides where the rate ends, whether or not the JSON says so
            found["scheduler.params.cos_min_ratio"] = ADOPTED["scheduler.params.cos_min_ratio"]
        return found

    def resolve(self, world_size: int, device: Device) -> Resolved:
        """Everything filled in for this many ranks.

        Raises:
            ConfigError: the numbers do not fit these ranks or this device, or two choices exclude each other.
        """
        if self.split is None or self.deepspeed is None:
            engine = self.config.engine
            precision: str = engine.precision
            if precision == "auto":
                precision = "bf16" if device.bf16 else "fp32"
            parallel: str = engine.parallel
            if parallel == "auto":
                parallel = "ddp" if world_size > 1 else "single"
            split = Split(world_size, precision, parallel)
            resolved = Resolved(
                plan_batch(self.config.batch, world_size),
                None,
                split,
                engine.tf32,
                _compiles(engine.compile, split, device, False),
            )
        else:
            precision = decide_precision(self.split, device)
            split = deepspeed_split(self.split, world_size, precision)
            plan = plan_batch(self.config.batch, split.dp_world_size)
            filled = resolve_deepspeed(self.split, self.config, plan, precision)
            tf32 = get_dotted(self.deepspeed, "tf32.enabled") in (True, "auto")
            needs_modules = (
                get_dotted(self.deepspeed, "zero_optimization.offload_param.device") == "nvme"
                or get_dotted(self.deepspeed, "flops_profiler.enabled") is True
            )
            asked = get_dotted(self.deepspeed, "compile.enabled")
            compiled = _compiles(asked, split, device, needs_modules)
            resolved = Resolved(plan, filled, split, tf32, compiled)
        choice = Choice(self.config, resolved.deepspeed or {}, split, device, resolved.compile)
        refuse_impossible(choice, self.split)
        refuse_missing(choice)
        return resolved

    def divided(self, micro_batch_size: int) -> Settings:
        """With this number where the recipe leaves it open."""
        batch = self.config.batch.model_copy(update={"micro_batch_size": micro_batch_size})
        return replace(self, config=self.config.model_copy(update={"batch": batch}))

    def plan(self, world_size: int) -> Resolved:
        """`resolve` on the device that there most likely is: before torch is loaded and any data prepared.

        A GPU that the driver knows may be none of torch's: what a CPU would take is left to the run.

        Raises:
            ConfigError: as `resolve`.
        """
        device = Device.probe()
        try:
            return self.resolve(world_size, device)
        except ConfigError:
            if device.kind != "cpu":
                with suppress(ConfigError):
                    return self.resolve(world_size, Device.cpu())
            raise


def _compiles(asked: bool | str | None, split: Split, device: Device, needs_modules: bool) -> bool:
    """Left open: on a GPU. Few runs on a CPU gain what the compiler takes there."""
    if isinstance(asked, bool):
        return asked
    talks_inside = split.tensor_parallel * split.sequence_parallel > 1
    return device.kind == "cuda" and split.parallel != "dp" and not (talks_inside or needs_modules)


def load_settings(
    recipe: str | Path,
    deepspeed: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    import_paths: bool = True,
    is_default: bool = False,
) -> Settings:
    """Reads and checks both files with the command line's overrides.

    Args:
        recipe: YAML; what is trained. A path, or the name of a shipped file.
        deepspeed: JSON; how the work is split. A path, or the name of a shipped file. None: plain PyTorch.
        overrides: `key=value` for the recipe, `ds.key=value` for the JSON.
        import_paths: Whether the recipe may name code to run.
        is_default: Whether nobody chose the recipe: the JSON's numbers replace those of its file.

    Raises:
        ConfigError: see pipeline.config.loading, pipeline.config.recipe and pipeline.config.deepspeed_json.
    """
    recipe = find_recipe(Path(recipe))
    deepspeed = None if deepspeed is None else find_deepspeed_json(Path(deepspeed))
    parsed = [parse_override(argument) for argument in overrides]
    for_deepspeed = [(parts[1:], value) for parts, value in parsed if parts[0] == "ds"]
    for_recipe = [(parts, value) for parts, value in parsed if parts[0] != "ds"]
    if for_deepspeed and deepspeed is None:
        raise ConfigError(
            f"command line: ds.{'.'.join(for_deepspeed[0][0])} changes the DeepSpeed JSON, but none is "
            "given; add --deepspeed FILE.json"
        )
    file = read_yaml(recipe)
    for parts, value in for_recipe:
        if len(parts) > 1 and parts[0] in KIND_ALONE and isinstance(kind := file.tree.get(parts[0]), str):
            file.tree[parts[0]] = {"kind": kind}
        file.override(parts, value)
    _set_aside_alternatives(file.tree, {".".join(parts) for parts, _ in for_recipe})
    _use_first_name(file)
    split = None
    if deepspeed is not None:
        split = load_deepspeed_json(deepspeed, for_deepspeed)
        adopt_stated_numbers(file, split, is_default=is_default)
        if "torch" in split.tree:
            adopt_torch_section(file, split)
    config = _with_examples(_with_own_tokenizer(_refuse_adapter(validate_recipe(file))))
    if not import_paths:
        refuse_code(config, file)
    settings = Settings(config, recipe, split, tuple(overrides), is_default)
    if settings.deepspeed is not None and "engine" in config.model_fields_set:
        given = [file.place(f"engine.{key}") for key in config.engine.model_fields_set]
        place = "command line" if "command line" in given else [*given, file.place("engine")][0]
        raise ConfigError(
            f"{place}: engine: with --deepspeed the JSON decides the precision (bf16, fp16); drop the section"
        )
    return settings


def _use_first_name(file: ConfigFile) -> None:
    """Rename `schedule.warmup_steps` to `schedule.warmup`, so that it is compared as that.

    Raises:
        ConfigError: both are given.
    """
    schedule = file.tree.get("schedule")
    if not isinstance(schedule, dict) or "warmup_steps" not in schedule:
        return
    place = file.place("schedule.warmup_steps")
    if "warmup" in schedule:
        raise ConfigError(
            f"{place}: schedule.warmup_steps is another name of schedule.warmup "
            f"({file.place('schedule.warmup')}), which is given too; drop one"
        )
    schedule["warmup"] = schedule.pop("warmup_steps")
    file.places["schedule.warmup"] = place


def _set_aside_alternatives(tree: Tree, overridden: set[str]) -> None:
    for pair in ALTERNATIVES:
        for given, other in (pair, pair[::-1]):
            if given in overridden and other not in overridden and get_dotted(tree, given) is not None:
                section, _, key = other.rpartition(".")
                (get_dotted(tree, section) if section else tree).pop(key, None)


def _refuse_adapter(config: RunConfig) -> RunConfig:
    """Refuse the folder of an adapter in the place of a model: transformers would load both.

    Raises:
        ConfigError: `model.pretrained` names one.
    """
    given = config.model.pretrained_from
    path = Path(given or "").expanduser() / "adapter_config.json"
    if given is None or not path.is_file():
        return config
    base = None
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        base = json.loads(read_plain(path, CONFIGURATION_LIMIT)).get("base_model_name_or_path")
    place = base if isinstance(base, str) and base else "ITS_BASE"
    raise ConfigError(
        f"model.pretrained: {given!r} is an adapter (adapter_config.json), no whole model; write "
        f"model.pretrained={place} and adapter.weights={given} to train it further, or merge it into its "
        "base and give that"
    )


def _with_own_tokenizer(config: RunConfig) -> RunConfig:
    """A pretrained model reads the ids of its own tokenizer, unless the recipe names another one.

    Raises:
        ConfigError: its folder is not there.
    """
    given = config.model.pretrained_from
    data = config.data.documents
    if given is None or data is None or data.tokenizer.pretrained is not None:
        return config
    folder = Path(given).expanduser()
    if is_path(given) and not folder.is_dir():
        raise ConfigError(f"model.pretrained: {given!r}: there is no such folder")
    tokenizer = data.tokenizer.model_copy(update={"pretrained": given})
    return config.model_copy(update={"data": data.model_copy(update={"tokenizer": tokenizer})})


def _with_examples(config: RunConfig) -> RunConfig:
    """Preference data as the objective reads them, unless the recipe says how. A reward model writes
    nothing."""
    if config.objective.kind == "reward":
        sample = config.sample.model_copy(update={"max_new_tokens": 0})
        config = config.model_copy(update={"sample": sample})
    data = config.data.preferences
    if data is None or data.examples is not None:
        return config
    examples = "unpaired" if config.objective.kind == "kto" else "pairs"
    return config.model_copy(update={"data": data.model_copy(update={"examples": examples})})


def recipe_yaml(config: RunConfig) -> str:
    """The resolved recipe without secrets, every default written out; valid as a recipe itself.

    `engine` stands in it only where the user wrote it: beside a DeepSpeed JSON it must be absent.
    """
    left_out = set() if "engine" in config.model_fields_set else {"engine"}
    tree = config.model_dump(mode="json", exclude_none=True, exclude=left_out)
    return yaml.dump(redact(tree), Dumper=Dumper, sort_keys=False, allow_unicode=True)
