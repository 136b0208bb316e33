"""Every file of ds_configs/ trains the language model and, where the split is not made for one, the CNN."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
import torch
from parity.measure import ALONE, has_async_io
from PIL import Image
from support.launch import ROOT
from support.tiny import make_engine, recipe, settings, train_curve

from pipeline.config.data_schema import DigitsDataConfig, ImagesDataConfig
from pipeline.config.deepspeed_json import load_deepspeed_json
from pipeline.config.loading import parse_override
from pipeline.config.split import Device
from pipeline.data import prepare_data
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import mean_loss
from pipeline.errors import ConfigError
from pipeline.objectives import Classification

pytestmark = pytest.mark.slow

WEIGHTS = [1.0, 2.0, 0.5, 1.0, 1.0, 3.0, 1.0, 1.0, 1.5, 0.25]


def image_recipe():
    return recipe(
        model={"kind": "cnn", "channels": 4, "dropout": 0.0},
        objective={"kind": "classification", "class_weights": WEIGHTS},
        batch={"micro_batch_size": 2, "gradient_accumulation_steps": 2},
    )


def image_curve(job: Job, deepspeed):
    """Losses of four steps over 16 images a step (this rank's share of them), and of one evaluation batch."""
    data = prepare_data(DigitsDataConfig(kind="digits"))
    tree = image_recipe()
    tree["batch"]["gradient_accumulation_steps"] = 8 // job.ranks.world_size
    engine = make_engine(job, tree, deepspeed, data)
    objective = Classification(WEIGHTS)
    losses = []
    for step in range(4):
        mine = range(16 * step + job.ranks.rank, 16 * (step + 1), job.ranks.world_size)
        images = [data.train[i] for i in mine]
        pairs = [data.collate(images[i : i + 2]) for i in range(0, len(images), 2)]
        result = engine.train_step(pairs, objective, 1e-2, False)
        total = job.all_reduce_sum(result.loss_sum.to(torch.float64))
        losses.append(float(mean_loss(total, result.global_count)))
    held_out = engine.eval_step(data.collate([data.eval["digits"][i] for i in range(16)]), objective)
    return [*losses, float(mean_loss(held_out.loss_sum, held_out.count))]


alone = cache(partial(image_curve, ALONE, None))
FILES = sorted((ROOT / "ds_configs").glob("*.json"))
ONE_PROCESS = {"single", "dp"}
LANGUAGE_ONLY = {"tensor2", "pipeline2", "sequence2"}
# Eight GPUs of one machine, in the file; two ranks here.
CHANGED = {"zero3_hpz": ["zero_optimization.zero_hpz_partition_size=2"]}


def split_of(path, folder):
    overrides = [parse_override(each) for each in CHANGED.get(path.stem, [])]
    if "nvme" in path.stem:
        if not has_async_io():
            pytest.skip("no libaio to link with (apt-get install libaio-dev)")
        for section in ("offload_optimizer", "offload_param"):
            overrides.append(parse_override(f"zero_optimization.{section}.nvme_path={folder}"))
    return load_deepspeed_json(path, overrides).tree


@pytest.mark.daily(
    *("zero2", "zero2_fp16", "zero3", "zero3_zeropp", "torch_ddp"),
    *("tensor2", "pipeline2", "sequence2", "zero2_offload", "zero3_offload", "zero3_nvme", "zero3_hpz"),
    *("zero2_fp16_static", "zero1_fp32_accumulation"),
)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_trains(ranks, tmp_path, path):
    split = split_of(path, tmp_path)
    if path.stem == "zero3_zeropp":  # whose kernels a CPU has not
        with pytest.raises(ConfigError, match="kernels exist for CUDA only"):
            settings(recipe(batch={"micro_batch_size": 2}), split).resolve(8, Device("cpu", True, True))
        return
    pool = ranks(1 if path.stem in ONE_PROCESS else 2)
    curves = pool.run(train_curve, recipe(), split, 2, timeout=400)
    assert all(curve == curves[0] for curve in curves)
    assert curves[0][0][0] == pytest.approx(5.6, abs=0.2), "not the loss of guessing one of 257"
    if path.stem not in LANGUAGE_ONLY:
        assert pool.run(image_curve, split, timeout=400)[0] == pytest.approx(alone(), rel=1e-3)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_model_has_the_channels_of_the_images(tmp_path, channels):
    for number, name in enumerate(("dark", "light")):
        (tmp_path / name).mkdir()
        for index in range(4):
            pixels = np.full((9, 9, 3), 100 * number + index, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{index}.png")
    given = ImagesDataConfig(
        kind="images", path=str(tmp_path), image_size=8, channels=channels, eval_fraction=0.0
    )
    data = prepare_data(given)
    tree = image_recipe() | {"objective": {"kind": "classification"}}
    engine = make_engine(ALONE, tree, None, data)
    batch = data.collate([data.train[i] for i in range(8)])
    assert batch["inputs"].shape == (8, channels, 8, 8)
    assert float(engine.eval_step(batch, Classification()).count) == 8.0
