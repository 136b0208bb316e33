"""The image task under every engine: float inputs in half precision, class weights in fp32, one curve."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from support.tiny import deepspeed_json, make_engine, recipe

from pipeline.config.data_schema import DigitsDataConfig, ImagesDataConfig
from pipeline.data import prepare_data
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine.interface import mean_loss
from pipeline.objectives import Classification

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
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


@pytest.mark.slow
@pytest.mark.daily("2")
@pytest.mark.parametrize("world_size", [1, 2])
def test_ddp_gives_the_oracles_curve(ranks, world_size):
    curve = ranks(world_size).run(image_curve, {"torch": {"parallel": "ddp"}})[0]
    assert curve == pytest.approx(image_curve(ALONE, None), rel=1e-5)


@pytest.mark.daily("2-bf16-0.02-2", "3-fp32-1e-05-2")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("stage", "precision", "band"),
    [(0, "fp16", 3e-3), (2, "bf16", 2e-2), (2, "fp16", 3e-3), (3, "fp32", 1e-5)],
)
def test_the_cnn_gives_the_oracles_curve(ranks, stage, precision, band, world_size):
    curve = ranks(world_size).run(image_curve, deepspeed_json(stage, precision))[0]
    assert curve == pytest.approx(image_curve(ALONE, None), rel=band)


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
