"""The DeepSpeed JSON: its text, its keys, its values, and what does not go together."""

from __future__ import annotations

from typing import Any

from bad_inputs.case import Case


def split(wrong: str, tree: Any, *says: str, **given: Any) -> Case:
    """A file that is wrong: the error names it."""
    return Case(wrong, ["split.json", *says], split=tree, **given)


TEXTS = [
    split("a split that is empty", "", "not valid JSON"),
    split("a split cut off", '{"zero_optimization": {', "not valid JSON"),
    split("a split with a comma too many", '{"bf16": {"enabled": true},}', ":1:", "not valid JSON"),
    split("a split with a comment", '{\n// two\n"bf16": {}}', ":2:1", "not valid JSON"),
    split("a split in single quotes", "{'bf16': {}}", ":1:2", "not valid JSON"),
    split("a split that is a list", [], "expected an object"),
    split("a split that is a word", '"zero2"', "expected an object"),
    split("a split that is YAML", "zero_optimization:\n  stage: 2\n", "not valid JSON"),
    split("a split in latin-1", '{"caf\xe9": 1}'.encode("latin-1"), "not UTF-8"),
    split("a key of the split given twice", '{"bf16": {}, "bf16": {}}', "bf16", "given twice"),
    split("a nested key given twice", '{"bf16": {"enabled": true, "enabled": false}}', "enabled", "twice"),
]

TYPOS = [
    split("typo at the top of the split", {"zero_optimisation": {}}, 'did you mean "zero_optimization"'),
    split(
        "typo in zero_optimization", {"zero_optimization": {"stge": 2}}, "zero_optimization.stge", '"stage"'
    ),
    split("typo in bf16", {"bf16": {"enable": True}}, "bf16.enable", 'did you mean "enabled"'),
    split("typo in fp16", {"fp16": {"enabled": True, "loss_scal": 0}}, "fp16.loss_scal", '"loss_scale"'),
    split(
        "typo in offload_optimizer",
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}}},
        "zero_optimization.offload_optimizer.devise",
        'did you mean "device"',
    ),
    split(
        "typo in offload_param",
        {"zero_optimization": {"stage": 3, "offload_param": {"pin_memry": True}}},
        "zero_optimization.offload_param.pin_memry",
        'did you mean "pin_memory"',
    ),
    split("typo in tensor_parallel", {"tensor_parallel": {"autotp_sizes": 2}}, 'did you mean "autotp_size"'),
    split("typo in pipeline", {"pipeline": {"stage": 2}}, "pipeline.stage", 'did you mean "stages"'),
    split("typo in compile", {"compile": {"enable": True}}, "compile.enable", "enabled"),
    split("typo in torch", {"torch": {"paralel": "ddp"}}, "torch.paralel", 'did you mean "parallel"'),
    split(
        "typo in the optimizer's parameters",
        {"optimizer": {"type": "AdamW", "params": {"lrr": 1e-3}}},
        "optimizer.params.lrr",
    ),
    split(
        "typo in the scheduler's parameters",
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
        "scheduler.params.warmup_steps",
    ),
]

VALUES = [
    split("steps_per_print in words", {"steps_per_print": "often"}, "steps_per_print"),
    split(
        "a bucket in words",
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": "many"}},
        "reduce_bucket_size",
    ),
    split(
        "a bucket below zero",
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": -5}},
        "reduce_bucket_size",
    ),
    split(
        "an unknown device to offload to",
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "disk"}}},
        "device",
    ),
    split(
        "NVMe without a path",
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
        "nvme_path",
    ),
    split("stage 4", {"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "given 4"),
    split("stage true", {"zero_optimization": {"stage": True}}, "zero_optimization.stage", "given True"),
    split("stage in quotes", {"zero_optimization": {"stage": "2"}}, "zero_optimization.stage", "given '2'"),
    split("zero_optimization is a number", {"zero_optimization": 2}, "zero_optimization", "given 2"),
    split("bf16 is true", {"bf16": True}, "bf16", "expected an object"),
    split("bf16 in words in the file", {"bf16": {"enabled": "yes"}}, "bf16.enabled", "given 'yes'"),
    split("fp16 is a number", {"fp16": {"enabled": 1}}, "fp16.enabled", "given 1"),
    split("both half precisions", {"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "choose one"),
    split("a partition that is not there", {"pipeline": {"stages": 2, "partition": "even"}}, "'even'"),
    split("compile in words in the file", {"compile": {"enabled": "yes"}}, "compile.enabled", "given 'yes'"),
    split("tf32 in words", {"tf32": {"enabled": "maybe"}}, "tf32.enabled", "'maybe'"),
    split(
        "an optimizer that is not built", {"optimizer": {"type": "Lion"}}, "optimizer.type", "'Lion'", "AdamW"
    ),
    split(
        "a scheduler that is not built",
        {"scheduler": {"type": "OneCycle"}},
        "scheduler.type",
        "schedule.kind in the recipe",
    ),
    split("an optimizer that is a word", {"optimizer": "AdamW"}, "optimizer"),
    split(
        "parameters of the optimizer as a list",
        {"optimizer": {"type": "AdamW", "params": [1]}},
        "optimizer.params",
        "expected an object",
    ),
]

REMOVED = [
    split("amp", {"amp": {"enabled": True}}, "amp", "use bf16 or fp16"),
    split("sparse attention", {"sparse_attention": {"mode": "fixed"}}, "model.attention in the recipe"),
    split("data efficiency", {"data_efficiency": {"enabled": True}}, "the recipe's data section"),
    split("the csv monitor", {"csv_monitor": {"enabled": True}}, "metrics.jsonl holds every number"),
    split("nebula", {"nebula": {"enabled": True}}, "checkpoint.every in the recipe"),
    split("expert parallelism", {"expert_parallel": {"size": 2}}, "does not split experts"),
    split(
        "zenflow", {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "no run could go on"
    ),
    split(
        "super offload",
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        "where no checkpoint sees them",
    ),
    split(
        "weights in 8 bits", {"weight_quantization": {"quantized_initialization": {"num_bits": 8}}}, "export"
    ),
    split(
        "frozen weights in 8 bits",
        {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
        "use zero_quantized_weights",
    ),
    split("memory told by DeepSpeed", {"memory_breakdown": True}, "every row of metrics.jsonl"),
    split("deep compile", {"compile": {"deepcompile": True}}, "compile.deepcompile"),
]

TOGETHER = [
    split(
        "an optimizer's rate against the recipe's",
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
        "optimizer.params.lr is 0.001",
        "0.1",
        'write "auto" here',
        recipe={"optimizer.learning_rate": 0.1},
    ),
    split(
        "a batch against the recipe's",
        {"train_batch_size": 16},
        "train_batch_size is 16",
        "is 4",
        'write "auto" here',
    ),
    split(
        "clipping against the recipe's",
        {"gradient_clipping": 0.5},
        "gradient_clipping is 0.5",
        "optimizer.max_grad_norm is 2",
        recipe={"optimizer.max_grad_norm": 2.0},
    ),
    split(
        "a weight decay nobody can take",
        {"optimizer": {"type": "AdamW", "params": {"weight_decay": -1}}},
        "optimizer.params.weight_decay",
        "given -1",
    ),
    split("a clipping in words", {"gradient_clipping": "little"}, "gradient_clipping", "'little'"),
    Case(
        "an engine section beside the JSON",
        ["recipe.yaml:", "engine", "the JSON decides the precision"],
        split={"bf16": {"enabled": False}},
        recipe={"engine": {"precision": "bf16"}},
    ),
    split(
        "torch beside zero", {"torch": {}, "zero_optimization": {"stage": 1}}, "torch", "zero_optimization"
    ),
    split(
        "torch beside an engine",
        {"torch": {"parallel": "ddp"}},
        "torch",
        "engine section too",
        recipe={"engine": {"precision": "bf16"}},
    ),
    split("torch in fp16", {"torch": {}, "fp16": {"enabled": True}}, "fp16.enabled", "ds_configs/"),
    *[
        split(
            f"{name} of {value} at stage {stage}",
            {"zero_optimization": {"stage": stage}, name: value},
            f": {name}: DeepSpeed does not",
            "set zero_optimization.stage 1",
            more=["--dry-run"],
        )
        for name, value in (("prescale_gradients", True), ("gradient_predivide_factor", 8.0))
        for stage in (2, 3)
    ],
    split(
        "a norm in the optimizer against clipping",
        {"gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
        "optimizer.params.max_grad_norm is 1.0",
        "gradient_clipping is 0.5",
    ),
    split(
        "a norm in the optimizer against the recipe's",
        {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
        "optimizer.params.max_grad_norm is 1.0",
        "optimizer.max_grad_norm is 2",
        recipe={"optimizer.max_grad_norm": 2.0},
    ),
    split(
        "a batch in quotes",
        {"train_batch_size": "4"},
        "train_batch_size: expected a whole number",
        "given '4', which is a text",
    ),
    split(
        "axolotl's compile",
        {"compile": {"disable": False, "backend": "inductor"}},
        "compile.disable",
        'write "compile": {"enabled": true}',
    ),
    split("threads given twice", {"aio": {"thread_count": 2, "intra_op_parallelism": 1}}, "drop one"),
    split("a precision of torch's in words", {"torch": {"parallel": "fsdp"}}, "torch.parallel", "'fsdp'"),
    split("more stages than ranks", {"pipeline": {"stages": 2}}, "pipeline", "2"),
    split(
        "tensors over more than all ranks", {"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel", "2"
    ),
    split("sequences over more than all ranks", {"sequence_parallel_size": 2}, "sequence_parallel_size", "2"),
    split(
        "a pipeline under ZeRO 2",
        {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 2}},
        "pipeline",
        more=["--dry-run", "--world-size", "2"],
    ),
    split(
        "a pipeline under ZeRO 3",
        {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 3}},
        "pipeline",
        more=["--dry-run", "--world-size", "2"],
    ),
    split(
        "a pipeline of a cnn",
        {"pipeline": {"stages": 2}},
        "pipeline",
        base="digits",
        more=["--dry-run", "--world-size", "2"],
    ),
    split(
        "sequences of a cnn",
        {"sequence_parallel_size": 2},
        "sequence",
        base="digits",
        more=["--dry-run", "--world-size", "2"],
    ),
    split(
        "tensors of a cnn",
        {"tensor_parallel": {"autotp_size": 2}},
        "tensor",
        base="digits",
        more=["--dry-run", "--world-size", "2"],
    ),
    split(
        "parameters offloaded under ZeRO 2",
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "offload_param",
    ),
    split(
        "tensor and pipeline that do not divide",
        {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}},
        "3",
        more=["--dry-run", "--world-size", "3"],
    ),
    Case(
        "a batch that does not divide over four ranks",
        ["6", "4", "global_batch_size"],
        split={},
        more=["--dry-run", "--world-size", "4", "batch.global_batch_size=6"],
    ),
]

CASES = [*TEXTS, *TYPOS, *VALUES, *REMOVED, *TOGETHER]
