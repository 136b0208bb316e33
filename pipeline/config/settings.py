"""Loads and checks recipe and DeepSpeed JSON together, and resolves both for a job. Imports no torch."""

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
    remove_replaced_keys,
)
from pipeline.config.deepspeed_json import decide_precision, load_deepspeed_json, resolve_deepspeed
from pipeline.config.deepspeed_keys import ADOPTED
from pipeline.config.loading import ConfigFile, Tree, YamlDumper, get_dotted, parse_override, read_yaml
from pipeline.config.optional_packages import require_package
from pipeline.config.recipe import refuse_code, refuse_placeholders, validate_recipe
from pipeline.config.schema import RunConfig
from pipeline.config.shipped import DEFAULT_RECIPE, find_deepspeed_json, find_recipe
from pipeline.config.split import Device, Split, read_deepspeed_split
from pipeline.config.split_conflicts import Combination, check_combination
from pipeline.errors import ConfigError
from pipeline.files import MAX_CONFIGURATION_BYTES, is_path, read_regular_file
from pipeline.redaction import redact


def check_packages(combination: Combination) -> None:
    """Check that the packages that the settings need are installed.

    Raises:
        MissingPackageError: A package is not installed.
    """
    if combination.config.eval.tasks:
        require_package("lm_eval", "eval.tasks", "remove eval.tasks")
    if combination.quantizes_base:
        require_package("bitsandbytes", "adapter.quantize: nf4", "remove adapter.quantize")
    if combination.multiplies_in_fp8:
        fp8 = f"model.fp8: {combination.model_value('fp8')}"
        require_package("torchao", fp8, "set model.fp8=none")


def _check_fp8_device(combination: Combination) -> None:
    """Check that the device multiplies in fp8 if the settings need it.

    Raises:
        ConfigError: It does not.
    """
    if combination.multiplies_in_fp8 and not combination.device.fp8:
        raise ConfigError(
            f"model.fp8: {combination.model_value('fp8')}: this GPU does not multiply in fp8, which takes "
            "Ada, Hopper (compute capability 8.9) or newer of NVIDIA, or MI300 or newer of AMD; "
            "set model.fp8=none"
        )


# Pairs of keys that exclude each other. One on the command line replaces the other in the file.
ALTERNATIVES = (("max_steps", "max_epochs"), ("data.paths", "data.sources"))


@dataclass(frozen=True)
class ResolvedSettings:
    """Settings for a number of ranks on a kind of device.

    Every "auto" is decided. Only the micro-batch size may still be open: see `batch_plan`.
    """

    batch_plan: BatchPlan
    """Division of the global batch.

    It is provisional, with micro-batches of one sample, while the recipe's micro-batch size is `auto`.
    """
    deepspeed: Tree | None
    """Dict that DeepSpeed gets; `None` for plain PyTorch."""
    split: Split
    tf32: bool
    """Whether fp32 matrices are multiplied in TF32."""
    compile: bool
    """Whether blocks are compiled."""

    def with_micro_batch_size(self, micro_batch_size: int) -> ResolvedSettings:
        """Return the same settings with the global batch in micro-batches of another size.

        Args:
            micro_batch_size: Samples per rank; one of `batch_plan.candidates` (not checked).
        """
        plan = self.batch_plan.with_micro_batch_size(micro_batch_size)
        filled = self.deepspeed
        if filled is not None:
            filled = filled | {
                "train_micro_batch_size_per_gpu": plan.micro_batch_size,
                "gradient_accumulation_steps": plan.gradient_accumulation_steps,
            }
        return replace(self, batch_plan=plan, deepspeed=filled)

    def warn_of_slow_precision(self, device: Device) -> str | None:
        """Return a warning if a CPU is not faster in this precision than in fp32; else `None`."""
        precision = self.split.precision
        is_fast = {"fp32": True, "bf16": device.bf16, "fp16": device.fp16}
        if device.kind != "cpu" or is_fast[precision]:
            return None
        remedy = "engine.precision=fp32" if self.deepspeed is None else f"ds.{precision}.enabled=false"
        return f"this CPU is not faster in {precision} than in fp32; set {remedy}"


@dataclass(frozen=True)
class Settings:
    """A validated recipe with, if given, a checked DeepSpeed JSON. `resolve` completes both for a job."""

    config: RunConfig
    """The validated recipe, with overrides, defaults and numbers of the JSON."""
    recipe_path: Path
    """YAML file of the recipe."""
    deepspeed_file: ConfigFile | None
    """File after --deepspeed; `None` if the option was not given."""
    overrides: tuple[str, ...] = ()
    """Overrides of the command line, as they were given."""
    is_default: bool = False
    """Whether the recipe is the default one, which is used if no recipe is given."""
    import_paths: bool = True
    """Whether files that the recipe names may name code to run."""

    def with_arguments(self, words: Sequence[str]) -> Settings:
        """Return the settings of the same command with further arguments. The files are read again.

        Advice and `plan --suggest` propose a change only if this method accepts its arguments.

        Args:
            words: Overrides, and possibly `--deepspeed` and its FILE.

        Raises:
            ConfigError: The files or overrides are wrong; see `load_settings`.
        """
        path = self.deepspeed_path
        added = list(words)
        if "--deepspeed" in added:
            position = added.index("--deepspeed")
            path = Path(added[position + 1])
            del added[position : position + 2]
        words = [*self.overrides, *added]
        recipe = None if self.is_default else self.recipe_path
        return load_settings(recipe, path, words, import_paths=self.import_paths)

    @property
    def deepspeed_path(self) -> Path | None:
        """Path of the file after --deepspeed; `None` if the option was not given."""
        return None if self.deepspeed_file is None else self.deepspeed_file.path

    @property
    def deepspeed(self) -> Tree | None:
        """Checked tree of the DeepSpeed JSON; `None` for plain PyTorch."""
        if self.deepspeed_file is None or "torch" in self.deepspeed_file.tree:
            return None
        return self.deepspeed_file.tree

    @property
    def adopted(self) -> dict[str, str]:
        """JSON key -> key of the recipe, of all values that the JSON states in place of the recipe."""
        tree = {} if self.deepspeed_file is None else self.deepspeed_file.tree
        stated = {}
        for json_key, recipe_key in ADOPTED.items():
            value = get_dotted(tree, json_key)
            if value is not None and value != "auto":
                stated[json_key] = recipe_key
        if "scheduler.type" in stated:  # the kind of schedule also decides the last learning rate
            stated["scheduler.params.cos_min_ratio"] = ADOPTED["scheduler.params.cos_min_ratio"]
        return stated

    def resolve(self, world_size: int, device: Device, *, needs_packages: bool = True) -> ResolvedSettings:
        """Return the settings for this many ranks on this device.

        Args:
            world_size: Number of ranks.
            device: Device of each rank.
            needs_packages: Whether the run's optional packages must be installed here. A plan for another
                machine does not need them.

        Raises:
            ConfigError: Numbers do not fit these ranks or this device, two settings exclude each other, or a
                package is not installed.
        """
        if self.deepspeed_file is None or self.deepspeed is None:
            resolved = self._resolve_plain(world_size, device)
        else:
            resolved = self._resolve_deepspeed(self.deepspeed_file, world_size, device)
        combination = Combination(
            self.config, resolved.deepspeed or {}, resolved.split, device, resolved.compile
        )
        check_combination(combination, self.deepspeed_file)
        if needs_packages:
            check_packages(combination)
        _check_fp8_device(combination)
        return resolved

    def _resolve_plain(self, world_size: int, device: Device) -> ResolvedSettings:
        engine = self.config.engine
        precision: str = engine.precision
        if precision == "auto":
            precision = "bf16" if device.bf16 else "fp32"
        parallel: str = engine.parallel
        if parallel == "auto":
            parallel = "ddp" if world_size > 1 else "single"
        split = Split(world_size, precision, parallel)
        plan = plan_batch(self.config.batch, world_size)
        return ResolvedSettings(
            plan, None, split, engine.tf32, _decide_compilation(engine.compile, split, device)
        )

    def _resolve_deepspeed(self, file: ConfigFile, world_size: int, device: Device) -> ResolvedSettings:
        tree = file.tree
        precision = decide_precision(file, device)
        split = read_deepspeed_split(file, world_size, precision)
        plan = plan_batch(self.config.batch, split.dp_world_size)
        filled = resolve_deepspeed(file, self.config, plan, precision)
        needs_modules = get_dotted(tree, "zero_optimization.offload_param.device") == "nvme"
        compiled = _decide_compilation(get_dotted(tree, "compile.enabled"), split, device, needs_modules)
        tf32 = get_dotted(tree, "tf32.enabled") in (True, "auto")
        return ResolvedSettings(plan, filled, split, tf32, compiled)

    def with_micro_batch_size(self, micro_batch_size: int) -> Settings:
        """Return the same settings with this micro-batch size in the recipe."""
        batch = self.config.batch.model_copy(update={"micro_batch_size": micro_batch_size})
        return replace(self, config=self.config.model_copy(update={"batch": batch}))

    def resolve_before_torch(self, world_size: int) -> ResolvedSettings:
        """Return the settings for this many ranks, on a device that is guessed without loading torch.

        torch may not be able to use a GPU that the driver reports. So settings that do not work on that GPU
        are resolved for the CPU.

        Raises:
            ConfigError: The settings work neither on that GPU nor on the CPU; see `resolve`.
        """
        device = Device.probe()
        try:
            return self.resolve(world_size, device)
        except ConfigError:
            if device.kind != "cpu":
                with suppress(ConfigError):
                    return self.resolve(world_size, Device.cpu())
            raise


def _decide_compilation(
    value: bool | str | None, split: Split, device: Device, needs_modules: bool = False
) -> bool:
    """Return whether blocks are compiled.

    "auto" compiles on a GPU only, since few runs on a CPU are long enough to gain.

    Args:
        value: `compile` of the settings; `None` means "auto".
        split: Split of the job. Ranks that communicate inside a block prevent compilation.
        device: Device of the job.
        needs_modules: Whether DeepSpeed needs hooks on the modules inside a block.
    """
    if isinstance(value, bool):
        return value
    communicates_in_block = split.tensor_parallel * split.sequence_parallel > 1
    return device.kind == "cuda" and split.parallel != "dp" and not (communicates_in_block or needs_modules)


def load_settings(
    recipe: str | Path | None,
    deepspeed: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    import_paths: bool = True,
) -> Settings:
    """Load and check both files with the overrides of the command line.

    Values of a file replace the defaults, and values of the command line replace both.

    Args:
        recipe: YAML that says what is trained: a path, or the name of a shipped file. `None`: the default
            recipe; numbers that the JSON states replace its own.
        deepspeed: JSON that says how the work is split: a path, or the name of a shipped file. `None`:
            plain PyTorch.
        overrides: `key=value` for the recipe, `ds.key=value` for the JSON.
        import_paths: Whether the recipe may name code to run.

    Returns:
        The settings, for `Run`.

    Raises:
        ConfigError: A file is missing or malformed; a key is unknown, or its value is not valid; keys
            contradict each other; or the recipe names code and `import_paths` is off.
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
    deepspeed_file = None if deepspeed is None else load_deepspeed_json(deepspeed, for_deepspeed)
    if deepspeed_file is not None and is_default:
        remove_replaced_keys(file, deepspeed_file)
    for parts, value in for_recipe:
        adapter = file.tree.get("adapter")
        if parts[0] == "adapter" and len(parts) > 1 and isinstance(adapter, str):
            file.tree["adapter"] = {"kind": adapter}  # `adapter: lora` is a short form of a section
        file.override(parts, value)
    _remove_replaced_alternatives(file.tree, {".".join(parts) for parts, _ in for_recipe})
    config = combine_files(file, deepspeed_file)
    if not import_paths:
        refuse_code(config, file)
    return Settings(config, recipe, deepspeed_file, tuple(overrides), is_default, import_paths)


def combine_files(file: ConfigFile, deepspeed_file: ConfigFile | None) -> RunConfig:
    """Return the validated recipe, completed by the numbers of a checked DeepSpeed JSON.

    Raises:
        ConfigError: The recipe is not valid or not filled in, or it and the JSON contradict each other.
    """
    refuse_placeholders(file)
    if deepspeed_file is not None:
        adopt_stated_numbers(file, deepspeed_file)
        if "torch" in deepspeed_file.tree:
            adopt_torch_section(file, deepspeed_file)
    config = _fill_by_objective(_fill_tokenizer(validate_recipe(file)))
    uses_deepspeed = deepspeed_file is not None and "torch" not in deepspeed_file.tree
    if uses_deepspeed and "engine" in config.model_fields_set:
        locations = [file.location_of(f"engine.{key}") for key in config.engine.model_fields_set]
        locations.append(file.location_of("engine"))
        location = "command line" if "command line" in locations else locations[0]
        raise ConfigError(
            f"{location}: engine: with --deepspeed the JSON decides the precision (bf16, fp16); "
            "remove the section"
        )
    return config


def _remove_replaced_alternatives(tree: Tree, overridden: set[str]) -> None:
    """Remove keys of the file that the command line replaces by their alternative.

    Args:
        tree: Recipe with the overrides.
        overridden: Dotted keys that the command line gives.
    """
    for pair in ALTERNATIVES:
        for given, other in (pair, pair[::-1]):
            only_one_given = given in overridden and other not in overridden
            if only_one_given and get_dotted(tree, given) is not None:
                section, _, key = other.rpartition(".")
                values = get_dotted(tree, section) if section else tree
                values.pop(key, None)


def _fill_tokenizer(config: RunConfig) -> RunConfig:
    """Return the recipe with a pretrained model's tokenizer for the data, unless it names a tokenizer.

    Raises:
        ConfigError: The model's folder does not exist, or contains an adapter instead of a model.
    """
    pretrained = config.model.pretrained_from
    if pretrained is None:
        return config
    folder = Path(pretrained).expanduser()
    description = folder / "adapter_config.json"
    if description.is_file():  # transformers would load the adapter together with its base
        base = None
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            adapter = json.loads(read_regular_file(description, MAX_CONFIGURATION_BYTES))
            base = adapter.get("base_model_name_or_path")
        raise ConfigError(
            f"model.pretrained: {pretrained!r} is an adapter (adapter_config.json), no whole model; write "
            f"model.pretrained={base or 'ITS_BASE'} and adapter.weights={pretrained} to train it further, or "
            "merge it into its base and give the merged model's folder"
        )
    data = config.data.documents
    if data is None or data.tokenizer.pretrained is not None:
        return config
    if is_path(pretrained) and not folder.is_dir():
        raise ConfigError(
            f"model.pretrained: {pretrained!r}: there is no such folder; give a folder or a hub name"
        )
    tokenizer = data.tokenizer.model_copy(update={"pretrained": pretrained})
    return config.model_copy(update={"data": data.model_copy(update={"tokenizer": tokenizer})})


def _fill_by_objective(config: RunConfig) -> RunConfig:
    """Return the recipe with the settings that the objective decides.

    These are `data.examples` of preference data; and for a reward model `sample.max_new_tokens: 0`, since it
    generates no text.
    """
    if config.objective.kind == "reward":
        sample = config.sample.model_copy(update={"max_new_tokens": 0})
        config = config.model_copy(update={"sample": sample})
    data = config.data.preferences
    if data is None or data.examples is not None:
        return config
    examples = "unpaired" if config.objective.kind == "kto" else "pairs"
    return config.model_copy(update={"data": data.model_copy(update={"examples": examples})})


def format_recipe_yaml(config: RunConfig) -> str:
    """Return the recipe as YAML, without secrets and with every default written out. It is a valid recipe.

    It has an `engine` section only if the user wrote one, since that section is an error with a DeepSpeed
    JSON.
    """
    excluded = set() if "engine" in config.model_fields_set else {"engine"}
    tree = config.model_dump(mode="json", exclude_none=True, exclude=excluded)
    return yaml.dump(redact(tree), Dumper=YamlDumper, sort_keys=False, allow_unicode=True)
