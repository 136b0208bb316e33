"""DeepSpeed files of other people's projects: taken as they stand there, or told what to change."""

from __future__ import annotations

import json

import pytest

from pipeline.config.settings import load_settings
from pipeline.config.split import Device

DEVICE = Device("cuda", bf16=True, fp16=True)
AUTO = dict.fromkeys(
    (
        "gradient_accumulation_steps", "gradient_clipping", "train_batch_size",
        "train_micro_batch_size_per_gpu",
    ),
    "auto",
)  # fmt: skip
STAGE3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}

TAKEN = {
    "transformers nvme": {
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            **STAGE3,
            "offload_optimizer": {
                "device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4,
                "fast_init": False,
            },
            "offload_param": {
                "device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 5,
                "buffer_size": 1e8, "max_in_cpu": 1e9,
            },
        },
        "aio": {
            "block_size": 262144, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": False,
            "overlap_events": True,
        },
        **AUTO,
    },
    "axolotl zero3_bf16": {
        "zero_optimization": {
            "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "max_live_parameters": 0, "max_reuse_distance": 0,
            "gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": True},
        **AUTO, "wall_clock_breakdown": False,
    },
    "DeepSpeedExamples CIFAR": {
        "train_batch_size": 16, "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "gradient_clipping": 1.0, "prescale_gradients": False, "bf16": {"enabled": True},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 0, "allgather_partitions": True, "reduce_scatter": True,
            "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000, "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    },
    "DeepSpeed-Chat": {
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
        "zero_optimization": {
            "stage": 2, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"},
            "stage3_param_persistence_threshold": 1e4, "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7, "memory_efficient_linear": False,
        },
        "fp16": {"enabled": True, "loss_scale_window": 100},
        "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False,
        "hybrid_engine": {
            "enabled": False, "max_out_tokens": 512, "inference_tp_size": 1, "release_inference_cache": False,
            "pin_parameters": True, "tp_gather_partition_size": 8,
        },
        "tensorboard": {"enabled": False, "output_path": "step1/ds_tensorboard_logs/", "job_name": "step1"},
    },
    "Megatron-DeepSpeed GPT": {
        "_comment": "examples_deepspeed, written by the script",
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 1,
        "zero_optimization": {"stage": 1, "elastic_checkpoint": True},
        "gradient_clipping": 1.0, "prescale_gradients": False,
        "fp16": {
            "enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
            "initial_scale_power": 11,
        },
        "wall_clock_breakdown": False, "zero_allow_untested_optimizer": True,
        "curriculum_learning": {"enabled": False},
    },
    "Megatron-DeepSpeed BLOOM": {
        "train_micro_batch_size_per_gpu": 2, "train_batch_size": 16, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "bfloat16": {"enabled": True},
        "steps_per_print": 2000, "wall_clock_breakdown": False,
    },
    "accelerate zero3 with comments": {
        "//": "from accelerate's examples", "$schema": "https://json.schemastore.org/deepspeed",
        "bf16": {"enabled": True, "_comment": "A100"},
        "zero_optimization": {
            "_comment": "ZeRO-3", "stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto",
            "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"},
        },
        **AUTO, "steps_per_print": 2000, "zero_allow_untested_optimizer": True,
    },
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    def function(split, world_size=2):
        (tmp_path / "split.json").write_text(json.dumps(split, indent=4))
        recipe = (
            "max_steps: 10\nmodel: {kind: causal_lm, architecture: llama}\ndata: {kind: text, paths: [a]}\n"
        )
        (tmp_path / "recipe.yaml").write_text(recipe)
        settings = load_settings(tmp_path / "recipe.yaml", tmp_path / "split.json", [])
        return settings, settings.resolve(world_size, DEVICE)

    return function


@pytest.mark.parametrize("name", TAKEN)
def test_a_file_of_another_project_is_taken_as_it_is(read, name):
    from deepspeed.runtime.config import DeepSpeedConfig

    settings, resolved = read(TAKEN[name])
    assert '"auto"' not in json.dumps(resolved.deepspeed)
    alone = resolved.deepspeed | {"train_batch_size": resolved.deepspeed["train_batch_size"] // 2}
    config = DeepSpeedConfig(alone)
    assert config.zero_optimization_stage == TAKEN[name]["zero_optimization"]["stage"]
    # every key is passed on, is the recipe's, or has a line
    given = json.dumps(TAKEN[name])
    for note in settings.deepspeed_file.notes:
        assert "/split.json:" in note.partition(": ")[0] + ":"
    assert ("_comment" in given) == any("a comment" in note for note in settings.deepspeed_file.notes)


def test_names_of_axolotls_file_arrive_where_deepspeed_reads_them(read):
    _, resolved = read(TAKEN["axolotl zero3_bf16"])
    zero = resolved.deepspeed["zero_optimization"]
    assert (zero["stage3_max_live_parameters"], zero["stage3_max_reuse_distance"]) == (0, 0)
    assert "max_live_parameters" not in zero


@pytest.mark.parametrize("key", [{"prescale_gradients": True}, {"gradient_predivide_factor": 8.0}])
@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 1}, {"stage": 2, "reduce_scatter": False}])
def test_gradients_divided_beforehand_are_taken_where_deepspeed_does_it(read, key, zero):
    _, resolved = read({**key, "zero_optimization": zero})
    assert resolved.deepspeed.items() >= key.items()


def test_the_old_name_of_a_number_of_threads_is_taken(read):
    _, resolved = read({"aio": {"thread_count": 2}})
    assert resolved.deepspeed["aio"] == {"intra_op_parallelism": 2}


def test_a_norm_among_the_optimizers_parameters_is_gradient_clipping(read):
    optimizer = {"type": "AdamW", "params": {"max_grad_norm": 0.5}}
    settings, resolved = read({"optimizer": optimizer, "gradient_clipping": 0.5})
    assert settings.config.optimizer.max_grad_norm == resolved.deepspeed["gradient_clipping"] == 0.5
