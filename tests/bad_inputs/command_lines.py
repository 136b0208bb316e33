"""Flags and overrides."""

from __future__ import annotations

from bad_inputs.case import Case


def more(wrong: str, argument: str, *says: str, base: str = "text") -> Case:
    """One argument behind a recipe that is right."""
    return Case(wrong, says, base=base, more=argument.split("|"))


FLAGS = [
    more("a flag misspelt", "--dry-rnu", "unrecognized argument --dry-rnu", "did you mean --dry-run?"),
    more("a flag with a value it does not take", "--dry-run=yes", "--dry-run", "yes"),
    more("a level that is none", "--log-level|loud", "--log-level", "'loud'"),
    more("quiet, and a level", "--quiet|--log-level|info", "--log-level", "not allowed with", "--quiet"),
    Case("a recipe without a name", ["--config", "expected one argument"], argv=["--config"]),
    Case(
        "a recipe that is not there",
        ["recipes.yaml", "no such file", 'did you mean "recipe.yaml"'],
        argv=["--config", "{here}/recipes.yaml"],
    ),
    Case(
        "a recipe below a file",
        ["recipe.yaml/x", "Not a directory"],
        argv=["--config", "{here}/recipe.yaml/x"],
    ),
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
        "an override of an unknown section",
        "modle.num_layers=3",
        "command line: modle",
        'did you mean "model"',
    ),
    more(
        "an override of 5000 digits", f"max_steps={'9' * 5000}", "command line", "max_steps", "5,000 digits"
    ),
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
        "a DeepSpeed override inside of a value",
        "ds.zero_optimization.stage.x=2",
        "command line",
        "zero_optimization.stage is a value",
    ),
    split(
        "a DeepSpeed override of 5000 digits",
        f"ds.zero_optimization.reduce_bucket_size={'9' * 5000}",
        "5,000 digits",
    ),
]

CASES = [*FLAGS, *OVERRIDES, *OF_THE_SPLIT]
