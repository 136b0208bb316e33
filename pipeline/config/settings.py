"""Reads and checks recipe and DeepSpeed JSON together, and fills both in. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from pipeline.config.batch_plan import BatchPlan, plan_batch
from pipeline.config.deepspeed_adoption import (
    adopt_stated_numbers,
    adopt_torch_section,
    drop_replaced_keys,
)
from pipeline.config.deepspeed_json import decide_precision, load_deepspeed_json, resolve_deepspeed
from pipeline.config.deepspeed_keys import ADOPTED
from pipeline.config.loading import ConfigFile, Tree, YamlDumper, get_dotted, parse_override, read_yaml
from pipeline.config.optional_packages import require_package
from pipeline.config.recipe import refuse_code, validate_recipe
from pipeline.config.schema import RunConfig
from pipeline.config.shipped import DEFAULT_RECIPE, find_deepspeed_json, find_recipe
from pipeline.config.split import Device, Split, read_deepspeed_split
from pipeline.config.split_conflicts import Combination, check_combination
from pipeline.errors import ConfigError
from pipeline.files import CONFIGURATION_LIMIT, is_path, read_regular_file
from pipeline.redaction import redact


def check_requirements(choice: Combination) -> None:
    """Check packages and the GPU before data and model are built.

    Raises:
        ConfigError: A package is not installed, or the GPU does not multiply in fp8.
    """
    if choice.quantizes_base:
        require_package("bitsandbytes", "adapter.quantize: nf4", "leave adapter.quantize out")
    if choice.multiplies_in_fp8:
        fp8 = f"model.fp8: {choice.model_value('fp8')}"
        require_package("torchao", fp8, "set model.fp8=none")
        if not choice.device.fp8:
            raise ConfigError(
                f"{fp8}: this GPU does not multiply in fp8, which NVIDIA's do from "
                "Ada and Hopper on (8.9) and AMD's from MI300 on; set model.fp8=none"
            )


# Of two ways to say one thing, the one on the command line takes the place of the other in the file.
ALTERNATIVES = (("max_steps", "max_epochs"), ("data.paths", "data.sources"))


@dataclass(frozen=True)
class ResolvedSettings:
    """Settings for one number of ranks on one kind of device."""

    batch_plan: BatchPlan
    deepspeed: Tree | None
    """Dict that DeepSpeed gets; `None` for plain PyTorch."""
    split: Split
    tf32: bool
    compile: bool

    def with_micro_batch_size(self, micro_batch_size: int) -> ResolvedSettings:
        """Return the same with the global batch in micro-batches of another size."""
        plan, filled = self.batch_plan.with_micro_batch_size(micro_batch_size), self.deepspeed
        if filled is not None:
            filled = filled | {
                "train_micro_batch_size_per_gpu": plan.micro_batch_size,
                "gradient_accumulation_steps": plan.gradient_accumulation_steps,
            }
        return replace(self, batch_plan=plan, deepspeed=filled)

    def slow_precision(self, device: Device) -> str | None:
        """Return a warning if the device is a CPU that is not faster in this half precision than in fp32."""
        precision = self.split.precision
        has = {"fp32": True, "bf16": device.bf16, "fp16": device.fp16}
        if device.kind != "cpu" or has[precision]:
            return None
        cure = "engine.precision=fp32" if self.deepspeed is None else f"ds.{precision}.enabled=false"
        return f"this CPU is not faster in {precision} than in fp32: {cure}"


@dataclass(frozen=True)
class Settings:
    """A validated recipe and, if DeepSpeed is asked for, its checked JSON."""

    config: RunConfig
    recipe_path: Path
    deepspeed_file: ConfigFile | None
    """File after --deepspeed."""
    overrides: tuple[str, ...] = ()
    """Overrides of the command line, as they were given."""
    is_default: bool = False
    """Whether nobody chose the recipe."""

    def with_arguments(self, words: Sequence[str]) -> Settings:
        """Return the settings of the same command with further words: overrides, `--deepspeed FILE`.

        Raises:
            ConfigError: As `load_settings`.
        """
        path, added = self.deepspeed_path, list(words)
        if "--deepspeed" in added:
            at = added.index("--deepspeed")
            path = Path(added[at + 1])
            del added[at : at + 2]
        words = [*self.overrides, *added]
        return load_settings(None if self.is_default else self.recipe_path, path, words)

    @property
    def deepspeed_path(self) -> Path | None:
        """Path of the file after --deepspeed."""
        return None if self.deepspeed_file is None else self.deepspeed_file.path

    @property
    def deepspeed(self) -> Tree | None:
        """What the JSON says to DeepSpeed; `None` for plain PyTorch."""
        return (
            None
            if self.deepspeed_file is None or "torch" in self.deepspeed_file.tree
            else self.deepspeed_file.tree
        )

    @property
    def adopted(self) -> dict[str, str]:
        """JSON key -> the recipe's key, of what the JSON states in place of the recipe."""
        tree = {} if self.deepspeed_file is None else self.deepspeed_file.tree
        found = {key: own for key, own in ADOPTED.items() if get_dotted(tree, key) not in (None, "auto")}
        if "scheduler.type" in found:  # it decides where the rate ends, whether or not the JSON says so
            found["scheduler.params.cos_min_ratio"] = ADOPTED["scheduler.params.cos_min_ratio"]
        return found

    def resolve(self, world_size: int, device: Device) -> ResolvedSettings:
        """Return everything filled in for this many ranks.

        Raises:
            ConfigError: Numbers do not fit these ranks or this device, or two choices exclude each other.
        """
        if self.deepspeed_file is None or self.deepspeed is None:
            resolved = self._plain(world_size, device)
        else:
            resolved = self._of_deepspeed(self.deepspeed_file, world_size, device)
        choice = Combination(self.config, resolved.deepspeed or {}, resolved.split, device, resolved.compile)
        check_combination(choice, self.deepspeed_file)
        check_requirements(choice)
        return resolved

    def _plain(self, world_size: int, device: Device) -> ResolvedSettings:
        engine = self.config.engine
        precision: str = engine.precision
        if precision == "auto":
            precision = "bf16" if device.bf16 else "fp32"
        parallel: str = engine.parallel
        if parallel == "auto":
            parallel = "ddp" if world_size > 1 else "single"
        split = Split(world_size, precision, parallel)
        plan = plan_batch(self.config.batch, world_size)
        return ResolvedSettings(plan, None, split, engine.tf32, _compiles(engine.compile, split, device))

    def _of_deepspeed(self, file: ConfigFile, world_size: int, device: Device) -> ResolvedSettings:
        tree = file.tree
        precision = decide_precision(file, device)
        split = read_deepspeed_split(file, world_size, precision)
        plan = plan_batch(self.config.batch, split.dp_world_size)
        filled = resolve_deepspeed(file, self.config, plan, precision)
        needs_modules = get_dotted(tree, "zero_optimization.offload_param.device") == "nvme"
        compiled = _compiles(get_dotted(tree, "compile.enabled"), split, device, needs_modules)
        tf32 = get_dotted(tree, "tf32.enabled") in (True, "auto")
        return ResolvedSettings(plan, filled, split, tf32, compiled)

    def with_micro_batch_size(self, micro_batch_size: int) -> Settings:
        """Return the same with this number in the recipe."""
        batch = self.config.batch.model_copy(update={"micro_batch_size": micro_batch_size})
        return replace(self, config=self.config.model_copy(update={"batch": batch}))

    def resolve_before_torch(self, world_size: int) -> ResolvedSettings:
        """Return `resolve` on the device that most likely is there, before torch is loaded.

        torch may not use a GPU that the driver knows, so what fits a CPU alone is left to the run.

        Raises:
            ConfigError: As `resolve`.
        """
        device = Device.probe()
        try:
            return self.resolve(world_size, device)
        except ConfigError:
            if device.kind != "cpu":
                with suppress(ConfigError):
                    return self.resolve(world_size, Device.cpu())
            raise


def _compiles(asked: bool | str | None, split: Split, device: Device, needs_modules: bool = False) -> bool:
    """Return whether blocks are compiled. "auto": on a GPU, since few runs on a CPU gain what it takes."""
    if isinstance(asked, bool):
        return asked
    talks_inside = split.tensor_parallel * split.sequence_parallel > 1
    return device.kind == "cuda" and split.parallel != "dp" and not (talks_inside or needs_modules)


def load_settings(
    recipe: str | Path | None,
    deepspeed: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    import_paths: bool = True,
) -> Settings:
    """Read and check both files with the command line's overrides.

    Args:
        recipe: YAML, what is trained. A path, or the name of a shipped file. `None`: the default recipe, in
            which the JSON's numbers replace the file's.
        deepspeed: JSON, how the work is split. A path, or the name of a shipped file. `None`: plain PyTorch.
        overrides: `key=value` for the recipe, `ds.key=value` for the JSON.
        import_paths: Whether the recipe may name code to run.

    Raises:
        ConfigError: See pipeline.config.loading, pipeline.config.recipe and pipeline.config.deepspeed_json.
    """
    is_default = recipe is None
    recipe = find_recipe(DEFAULT_RECIPE if recipe is None else Path(recipe))
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
    split = None if deepspeed is None else load_deepspeed_json(deepspeed, for_deepspeed)
    if split is not None and is_default:
        drop_replaced_keys(file, split)
    for parts, value in for_recipe:
        if parts[0] == "adapter" and len(parts) > 1 and isinstance(kind := file.tree.get("adapter"), str):
            file.tree["adapter"] = {"kind": kind}  # `adapter: lora` is short for a section
        file.override(parts, value)
    _set_aside_alternatives(file.tree, {".".join(parts) for parts, _ in for_recipe})
    if split is not None:
        adopt_stated_numbers(file, split)
        if "torch" in split.tree:
            adopt_torch_section(file, split)
    config = _with_examples(_with_own_tokenizer(validate_recipe(file)))
    if not import_paths:
        refuse_code(config, file)
    settings = Settings(config, recipe, split, tuple(overrides), is_default)
    if settings.deepspeed is not None and "engine" in config.model_fields_set:
        given = [file.location_of(f"engine.{key}") for key in config.engine.model_fields_set]
        place = "command line" if "command line" in given else [*given, file.location_of("engine")][0]
        raise ConfigError(
            f"{place}: engine: with --deepspeed the JSON decides the precision (bf16, fp16); drop the section"
        )
    return settings


def _set_aside_alternatives(tree: Tree, overridden: set[str]) -> None:
    for pair in ALTERNATIVES:
        for given, other in (pair, pair[::-1]):
            if given in overridden and other not in overridden and get_dotted(tree, given) is not None:
                section, _, key = other.rpartition(".")
                (get_dotted(tree, section) if section else tree).pop(key, None)


def _with_own_tokenizer(config: RunConfig) -> RunConfig:
    """Give the data a pretrained model's own tokenizer, unless the recipe names another one.

    Raises:
        ConfigError: The model's folder is not there, or holds an adapter alone.
    """
    given = config.model.pretrained_from
    if given is None:
        return config
    folder = Path(given).expanduser()
    description = folder / "adapter_config.json"
    if description.is_file():  # transformers would load the adapter and its base
        base = None
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            base = json.loads(read_regular_file(description, CONFIGURATION_LIMIT)).get(
                "base_model_name_or_path"
            )
        raise ConfigError(
            f"model.pretrained: {given!r} is an adapter (adapter_config.json), no whole model; write "
            f"model.pretrained={base or 'ITS_BASE'} and adapter.weights={given} to train it further, or "
            "merge it into its base and give that"
        )
    data = config.data.documents
    if data is None or data.tokenizer.pretrained is not None:
        return config
    if is_path(given) and not folder.is_dir():
        raise ConfigError(f"model.pretrained: {given!r}: there is no such folder")
    tokenizer = data.tokenizer.model_copy(update={"pretrained": given})
    return config.model_copy(update={"data": data.model_copy(update={"tokenizer": tokenizer})})


def _with_examples(config: RunConfig) -> RunConfig:
    """Fill in how the objective reads preference data. A reward model writes no samples."""
    if config.objective.kind == "reward":
        sample = config.sample.model_copy(update={"max_new_tokens": 0})
        config = config.model_copy(update={"sample": sample})
    data = config.data.preferences
    if data is None or data.examples is not None:
        return config
    examples = "unpaired" if config.objective.kind == "kto" else "pairs"
    return config.model_copy(update={"data": data.model_copy(update={"examples": examples})})


def recipe_yaml(config: RunConfig) -> str:
    """Return the resolved recipe without secrets, every default written out. It is valid as a recipe.

    It has `engine` only if the user wrote it: beside a DeepSpeed JSON that section must be absent.
    """
    left_out = set() if "engine" in config.model_fields_set else {"engine"}
    tree = config.model_dump(mode="json", exclude_none=True, exclude=left_out)
    return yaml.dump(redact(tree), Dumper=YamlDumper, sort_keys=False, allow_unicode=True)
