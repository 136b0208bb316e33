"""Flags and overrides."""

from __future__ import annotations

from bad_inputs.case import Case


def more(wrong: str, argument: str, *says: str, base: str = "text") -> Case:
    """One argument behind a recipe that is right."""
    return Case(wrong, says, base=base, more=argument.split("|"))


FLAGS = [
    more("a flag that is not there", "--resume", "unrecognized argument --resume", "--help"),
    more("a flag misspelt", "--dry-rnu", "unrecognized argument --dry-rnu", "did you mean --dry-run?"),
    more("an override with dashes", "--model.num_layers=3", "written without dashes: model.num_layers=3"),
    more("a flag with a value it does not take", "--dry-run=yes", "--dry-run", "yes"),
    more("a world size without a plan", "--world-size|4", "--world-size", "--dry-run"),
    more("a world of nobody", "--dry-run|--world-size|0", "--world-size"),
    more("a world size in words", "--dry-run|--world-size|two", "--world-size", "'two'"),
    more("a level that is none", "--log-level|loud", "--log-level", "'loud'"),
    more("quiet, and a level", "--quiet|--log-level|info", "--log-level", "not allowed with", "--quiet"),
    more("a word in place of an override", "fast", "'fast' is not an override; write section.key=value"),
    Case("a recipe without a name", ["--config", "expected one argument"], argv=["--config"]),
    Case(
        "a recipe that is not there",
        ["recipes.yaml", "no such file", 'did you mean "recipe.yaml"'],
        argv=["--config", "{here}/recipes.yaml"],
    ),
    Case(
        "a recipe in a folder that is not there",
        ["{here}/x/recipe.yaml", "no such file"],
        argv=["--config", "{here}/x/recipe.yaml"],
    ),
    Case("a recipe that is a folder", ["{here}", "Is a directory"], argv=["--config", "{here}"]),
    Case(
        "a recipe below a file",
        ["recipe.yaml/x", "Not a directory"],
        argv=["--config", "{here}/recipe.yaml/x"],
    ),
    Case("a recipe of a very long name", ["File name too long"], argv=["--config", "x" * 5000]),
    Case(
        "a split that is not there",
        ["zero9.json", "no such file", 'did you mean "zero'],
        more=["--deepspeed", "ds_configs/zero9.json"],
        files={"ds_configs/zero1.json": "{}"},
    ),
    Case("a split that is a folder", ["{here}", "Is a directory"], more=["--deepspeed", "{here}"]),
    Case(
        "recipe and split exchanged",
        ["recipe.yaml"],
        argv=["--config", "{here}/s.json", "--deepspeed", "{here}/recipe.yaml"],
        files={"s.json": "{}"},
    ),
]

OVERRIDES = [
    more(
        "an override's key misspelt",
        "model.num_layer=3",
        "command line: model.num_layer: unknown key",
        'did you mean "num_layers"',
    ),
    more(
        "an override of an unknown section",
        "modle.num_layers=3",
        "command line: modle",
        'did you mean "model"',
    ),
    more(
        "an override of another type", "model.num_layers=two", "command line: model.num_layers", "given 'two'"
    ),
    more("an override that is a list", "model.num_layers=[1]", "command line: model.num_layers", "given [1]"),
    more("an override without a key", "=3", "'=3' is not an override"),
    more("an override that begins with a dot", ".model=3", "'.model=3' is not an override"),
    more("an override with two dots", "model..num_layers=3", "is not an override"),
    more("an override of ds alone", "ds=3", "'ds=3' is not an override"),
    more("an override that is no YAML", "model.extra={a: [1}", "the value of model.extra is not valid YAML"),
    more("an override inside of a value", "max_steps.x=3", "max_steps is a value, not a section"),
    more(
        "a DeepSpeed override without a file",
        "ds.bf16.enabled=true",
        "ds.bf16.enabled",
        "add --deepspeed FILE.json",
    ),
    more(
        "an override of a number out of range",
        "optimizer.learning_rate=-1",
        "command line:",
        "optimizer.learning_rate",
        "given -1",
    ),
    more(
        "an override of 5000 digits", f"max_steps={'9' * 5000}", "command line", "max_steps", "5,000 digits"
    ),
    more("a kind overridden to nothing", "data.kind=nothing", "command line: data.kind", "'nothing'"),
    more(
        "a DeepSpeed key in the recipe's place",
        "zero_optimization.stage=2",
        "command line",
        "zero_optimization",
        "ds.KEY=VALUE",
    ),
]


def split(wrong: str, argument: str, *says: str) -> Case:
    """One override of a DeepSpeed JSON that is right."""
    return Case(wrong, says, split={"zero_optimization": {"stage": 1}}, more=[argument])


OF_THE_SPLIT = [
    split(
        "a DeepSpeed override misspelt",
        "ds.zero_optimisation.stage=2",
        "command line: ds.zero_optimisation",
        'did you mean "zero_optimization"',
    ),
    split(
        "a nested DeepSpeed override misspelt",
        "ds.zero_optimization.stag=2",
        "command line: ds.zero_optimization.stag",
        'did you mean "stage"',
    ),
    split(
        "a stage that is not there",
        "ds.zero_optimization.stage=4",
        "command line: ds.zero_optimization.stage",
        "given 4",
    ),
    split("a stage in words", "ds.zero_optimization.stage=two", "ds.zero_optimization.stage", "'two'"),
    split(
        "a DeepSpeed override inside of a value",
        "ds.zero_optimization.stage.x=2",
        "command line",
        "zero_optimization.stage is a value",
    ),
    split("bf16 in words", "ds.bf16.enabled=maybe", "command line: ds.bf16.enabled", "'maybe'"),
    split(
        "a DeepSpeed override of 5000 digits",
        f"ds.zero_optimization.reduce_bucket_size={'9' * 5000}",
        "5,000 digits",
    ),
]

CASES = [*FLAGS, *OVERRIDES, *OF_THE_SPLIT]
