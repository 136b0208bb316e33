"""Every file of ds_configs/ trains the language model and, where the split is not made for one, the CNN."""

from __future__ import annotations

from functools import cache, partial

import pytest
from parity.measure import has_async_io
from support.launch import ROOT
from support.tiny import recipe, settings, train_curve
from test_images import ALONE, image_curve

from pipeline.config.deepspeed_json import load_deepspeed_json
from pipeline.config.loading import parse_override
from pipeline.config.split import Device
from pipeline.errors import ConfigError

pytestmark = pytest.mark.slow

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
    *("ddp", "zero2", "zero2_fp16", "zero3", "zero3_zeropp", "torch_ddp"),
    *("tensor2", "pipeline2", "sequence2"),
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
