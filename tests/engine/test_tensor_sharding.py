"""A model that will be cut, while it is made: the whole model's values, and of them a rank's own parts."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from parity.splits import FUSED, LARGE, LLAMA, PHI3, QWEN2, TENSOR_2, TWO_STAGES, zero
from safetensors.torch import load_file, save_file
from support.memory import anonymous_bytes, reachable_tensor_bytes, track_peak_anonymous_bytes
from support.resume_across_splits import GatheredShards, assemble_tensors, copy_shards
from support.tiny import make_engine, recipe, resolve, token_bundle
from support.weights import SIZES

from pipeline.config.model_schema import CausalLMConfig
from pipeline.distributed.process_group import Job
from pipeline.errors import ModelError
from pipeline.models import build_model
from pipeline.models.sharding import ModelRequest, NoSharding
from pipeline.training.assemble import build_model_request

pytestmark = pytest.mark.slow

TENSORS = zero(0) | TENSOR_2


def made(model: dict[str, Any], seed: int = 5):
    """One that another run may have trained."""
    sizes = {key: value for key, value in model.items() if key != "kind"}
    return build_model(CausalLMConfig(**sizes), ModelRequest(NoSharding(), 257, sequence_length=24), seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of a large model's tensors, in fp32 and in bf16."""
    folder = tmp_path_factory.mktemp("large")
    model = made(LARGE)
    model.save_pretrained(folder / "fp32")
    model.bfloat16().save_pretrained(folder / "bf16")
    return folder


def most_while_made(job: Job, model: dict[str, Any], split: dict[str, Any]) -> tuple[float, float]:
    """(most anonymous memory while the engine is made, tensors held after it), in sizes of the fp32 model."""
    data = token_bundle()
    make_engine(job, recipe(model=LARGE | SIZES), split, data)  # what is imported and allocated once
    gc.collect()
    held = reachable_tensor_bytes()
    before = anonymous_bytes()
    with track_peak_anonymous_bytes() as most:
        engine = make_engine(job, recipe(model=model), split, data)
    size = 4 * engine.num_parameters
    gc.collect()
    return (most[0] - before) / size, (reachable_tensor_bytes() - held) / size


@pytest.mark.daily("tensor-pretrained", "stages-pretrained")
@pytest.mark.parametrize("source", ["new", "weights", "pretrained"])
@pytest.mark.parametrize("split", ["tensor", "stages"])
def test_a_rank_never_has_all_of_the_model(ranks, folder, split, source):
    model = {
        "new": LARGE,
        "weights": LARGE | {"weights": str(folder / "fp32")},
        "pretrained": {"kind": "causal_lm", "pretrained": str(folder / "bf16")},  # cast to fp32 on the way
    }[source]
    json = {"tensor": TENSORS, "stages": zero(0) | TWO_STAGES}[split]
    for most, held in ranks(2).run(most_while_made, model, json):
        assert 0.45 < held < 0.55
        assert most < 0.85


def weights_at_start(job: Job, model: dict[str, Any], split: dict[str, Any]) -> list[Any]:
    """This rank's shards."""
    written = copy_shards(make_engine(job, recipe(model=model), split, token_bundle()))
    return [shard for shard in written if shard[1] == "weight"]


TIED = {"extra": {"tie_word_embeddings": True}}
MODELS = {
    "llama": (LLAMA, {}),
    "tied": (LLAMA | TIED, {}),
    "biased and grouped": (QWEN2, {}),
    "norms of heads": (LLAMA | {"architecture": "qwen3", "num_key_value_heads": 2}, {}),
    "two matrices in one": (PHI3, {"partition_config": FUSED}),
}


def tensors(how: dict[str, Any]) -> dict[str, Any]:
    return zero(0) | {"tensor_parallel": {"autotp_size": 2} | how}


def hold_to_the_whole(ranks, model: dict[str, Any], cut: dict[str, Any], expected: dict[str, Any]) -> None:
    shards = [shard for rank in ranks(2).run(weights_at_start, model, cut) for shard in rank]
    found = {name: values for (name, _), values in assemble_tensors(GatheredShards({}, shards)).items()}
    assert found.keys() == {name for name in expected if name != "lm_head.weight" or name in found}
    for name, values in found.items():
        assert torch.equal(torch.from_numpy(values), expected[name].reshape(-1).float()), name


@pytest.mark.daily("tied", "two matrices in one")
@pytest.mark.parametrize("name", MODELS)
def test_new_weights_are_the_whole_models(ranks, name):
    model, how = MODELS[name]
    hold_to_the_whole(ranks, model, tensors(how), made(model, seed=0).state_dict())


@pytest.mark.daily("bfloat16-tied-tensor", "bfloat16-norms of heads-stages")
@pytest.mark.parametrize("split", ["tensor", "stages"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pretrained_weights_are_the_whole_models(ranks, tmp_path, name, dtype, split):
    model, how = MODELS[name]
    old = made(model).to(getattr(torch, dtype))
    old.save_pretrained(tmp_path / "old")
    pretrained = {"kind": "causal_lm", "pretrained": str(tmp_path / "old")}
    cut = tensors(how) if split == "tensor" else zero(0) | TWO_STAGES
    hold_to_the_whole(ranks, pretrained, cut, old.state_dict())


def refusal(job: Job, model: dict[str, Any], split: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as caught:
        make_engine(job, recipe(model=model), split, token_bundle())
    return str(caught.value)


def test_two_tensors_for_a_tied_one_are_refused(ranks, tmp_path):
    """A single note for both would be that of the last one."""
    made(LLAMA | TIED).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    model = {"kind": "causal_lm", "pretrained": str(tmp_path)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert len(ranks(2).run(weights_at_start, model, TENSORS)) == 2
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for told in ranks(2).run(refusal, model, TENSORS):
        assert "its files have two different tensors" in told


def test_a_plan_that_deepspeed_does_not_take_is_told_in_a_line(ranks):
    model = LLAMA | {"architecture": "mixtral", "extra": {"num_local_experts": 2}}
    for told in ranks(2).run(refusal, model, TENSORS):
        assert told.startswith("tensor_parallel: ")
        assert "unsupported partition style" in told
        assert "\n" not in told


def cut(job: Job, section: dict[str, Any], name: str, change: str):
    """A rank's part of one parameter, frozen, after a change of the whole one."""
    from pipeline.engine.deepspeed_base import start_deepspeed
    from pipeline.engine.tensor_sharding import TensorSharding

    start_deepspeed(job)
    json = zero(0) | {"tensor_parallel": {"autotp_size": 2} | section}
    config, resolved = resolve(recipe(model=LLAMA), json, job.ranks.world_size)
    sharding = TensorSharding(resolved.deepspeed, resolved.split)
    model = build_model(config.model, build_model_request(config, token_bundle(), sharding), 0)
    parameter = model.get_parameter(name).requires_grad_(False)
    with sharding.gather([parameter]), torch.no_grad():
        {"twice": lambda: parameter.mul_(2), "normed": lambda: parameter.div_(parameter.norm())}[change]()
    sharding.cut(model)
    assert not model.get_parameter(name).requires_grad
    return model.get_parameter(name).detach()


UP = "model.layers.1.mlp.up_proj.weight"


def test_what_comes_back_may_be_changed_element_by_element(ranks):
    whole = 2 * made(LLAMA, seed=0).get_parameter(UP)
    for rank, part in enumerate(ranks(2).run(cut, {}, UP, "twice")):
        assert torch.equal(part, whole.chunk(2)[rank])
    for part in ranks(2).run(cut, {}, UP, "normed"):
        assert part.isnan().all(), "of all of its values only a part is known"


def test_an_embedding_is_cut_too_where_the_file_says_so(ranks):
    name = "model.embed_tokens.weight"
    section = {
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [{"patterns": [r".*embed_tokens\.weight$"], "partition_type": "row"}],
        }
    }
    whole = 2 * made(LLAMA, seed=0).get_parameter(name)
    for rank, part in enumerate(ranks(2).run(cut, section, name, "twice")):
        assert torch.equal(part, whole.chunk(2, dim=1)[rank])
