"""DeepSpeed's compiled ops: which are needed, what a killed build leaves, machines that cannot build one."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.captured_logs import capture_logs
from support.launch import DIGITS, ROOT, launch, write_recipe
from support.tiny import deepspeed_json

from pipeline.distributed.process_group import Job

pytestmark = pytest.mark.slow

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("zero", "ops"),
    [
        ({}, []),
        ({"offload_param": {"device": "cpu"}}, []),
        ({"offload_optimizer": {"device": "none"}}, []),
        ({"offload_optimizer": {"device": "cpu"}}, ["cpu_adam"]),
        ({"offload_optimizer": {"device": "nvme"}}, ["cpu_adam", "async_io"]),
        ({"offload_param": {"device": "nvme"}}, ["async_io"]),
        ({"zero_hpz_partition_size": 2}, []),
        ({"zero_quantized_weights": True}, ["quantizer"]),
        (
            {"zero_quantized_gradients": True, "offload_optimizer": {"device": "cpu"}},
            ["cpu_adam", "quantizer"],
        ),
    ],
)
def test_only_what_the_split_uses_is_built(zero, ops):
    from pipeline.engine.native_ops import needed_ops

    assert [op.folders[-1] for op in needed_ops({"zero_optimization": zero})] == ops


def test_torchs_adamw_asked_for_needs_no_build():
    from pipeline.engine.native_ops import needed_ops

    assert needed_ops({"zero_force_ds_cpu_optimizer": False, "zero_optimization": OFFLOAD}) == []


def lines_while_preparing(job: Job, deepspeed, extensions: str) -> list[str]:
    """Messages while the ops are prepared in another extensions directory."""
    from pipeline.engine.native_ops import prepare_native_ops

    before = os.environ.get("TORCH_EXTENSIONS_DIR")
    prepare_native_ops(deepspeed, job)  # where it is kept on this machine
    os.environ["TORCH_EXTENSIONS_DIR"] = extensions
    try:
        with capture_logs() as lines:
            prepare_native_ops(deepspeed, job)
    finally:
        del os.environ["TORCH_EXTENSIONS_DIR"]
        if before is not None:
            os.environ["TORCH_EXTENSIONS_DIR"] = before
    return lines


def prepared(job: Job, deepspeed) -> None:
    from pipeline.engine.native_ops import prepare_native_ops

    prepare_native_ops(deepspeed, job)


def test_no_collective_of_training_would_use_the_op_that_is_not_built():
    """The shared-memory all-reduce: where this fails, measure whether to build it."""
    from deepspeed.comm.torch import TorchBackend

    members = {name: inspect.getsource(each) for name, each in vars(TorchBackend).items() if callable(each)}
    assert [name for name, source in members.items() if "torch.ops.deepspeed." in source] == [
        "inference_all_reduce"
    ]


def locked_long_ago(extensions: Path) -> Path:
    """The lock that torch's build of CPU Adam leaves where it is killed."""
    lock = extensions / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    for path in (lock, lock.parent):
        os.utime(path, (time.time() - 3600,) * 2)
    return lock


def test_what_is_built_is_loaded_without_a_word(ranks, tmp_path):
    said = ranks(2).run(lines_while_preparing, deepspeed_json(2, **OFFLOAD), str(tmp_path), timeout=500)
    assert said == [[], []]


def test_a_killed_builds_lock_is_named_and_removed_by_one_rank(ranks, tmp_path):
    lock = locked_long_ago(tmp_path)
    said = ranks(2).run(lines_while_preparing, deepspeed_json(2, **OFFLOAD), str(tmp_path), timeout=500)
    assert not lock.exists()
    line = f"an earlier build of DeepSpeed's CPU Adam was killed and left {lock}; removed it"
    assert sorted(said) == [[], [line]]


@pytest.mark.nightly
def test_a_run_trains_on_after_a_killed_build(ranks, tmp_path):
    """Hangs for ever without the fix. The build is copied, since other tests use it too."""
    from torch.utils.cpp_extension import _get_build_directory

    ranks(1).run(prepared, deepspeed_json(2, **OFFLOAD), timeout=500)
    split = ["--deepspeed", str(ROOT / "ds_configs" / "zero2_offload.json")]
    recipe = ["--config", str(write_recipe(tmp_path, **DIGITS)), "max_steps=2"]
    built = Path(_get_build_directory("cpu_adam", verbose=False))
    folder = tmp_path / "extensions"
    shutil.copytree(built, folder / "cpu_adam")
    lock = folder / "cpu_adam" / "lock"
    lock.touch()
    (folder / "cpu_adam.pipeline-state").write_text("process 1 on here")  # of a run that was killed
    result = launch(*recipe, *split, f"run_dir={tmp_path / 'run'}", TORCH_EXTENSIONS_DIR=str(folder))
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(f"was killed and left {lock}; removed it") == 1
    assert "ninja" not in result.stdout + result.stderr


SMALL = """
#include <Python.h>
static struct PyModuleDef small = {PyModuleDef_HEAD_INIT, "small", 0, -1, 0};
extern "C" PyObject *PyInit_small(void) { return PyModule_Create(&small); }
"""


@pytest.fixture
def small_op(tmp_path, monkeypatch):
    """An op that DeepSpeed and torch build as they build their own, in a second."""
    import deepspeed.ops.op_builder

    from pipeline.distributed.op_builds import NativeOp
    from pipeline.engine import native_ops

    class SmallBuilder(deepspeed.ops.op_builder.builder.OpBuilder):
        def __init__(self):
            super().__init__("small")

        def absolute_name(self):
            return "deepspeed.ops.small_op"

        def sources(self):
            return [str(tmp_path / "small.cpp")]

        def is_compatible(self, verbose=False):
            return True

    (tmp_path / "small.cpp").write_text(SMALL)
    monkeypatch.setattr(deepspeed.ops.op_builder, "SmallBuilder", SmallBuilder, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    monkeypatch.setattr(native_ops, "_LOG_AFTER_SECONDS", 0.1)
    monkeypatch.delitem(SmallBuilder._loaded_ops, "small", raising=False)
    monkeypatch.delitem(sys.modules, "small", raising=False)
    versions = native_ops.cpp_extension.JIT_EXTENSION_VERSIONER.entries
    versions.pop("small", None)
    yield NativeOp("the small op", "SmallBuilder", ("small",), "a second")
    versions.pop("small", None)
    SmallBuilder._loaded_ops.pop("small", None)


def test_a_killed_runs_lock_is_removed_once_its_compiler_has_ended(small_op, tmp_path):
    """The compiler outlives the run that started it."""
    from pipeline.engine.native_ops import _build_op

    op = small_op
    folder = tmp_path / "ops" / "small"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    (folder.parent / "small.pipeline-state").write_text("process 1 on here")
    with subprocess.Popen(["sleep", "2"], cwd=folder) as compiler, capture_logs() as lines:
        assert _build_op(op) is None
        assert compiler.poll() == 0, "its lock was taken away under a living build"
    (told,) = [line for line in lines if line.startswith("waiting for the small op: ")]
    assert told.endswith(
        f"process {compiler.pid} (sleep) builds it; "
        f"if that process hangs, end it and remove {folder / 'lock'}"
    )
    assert f"an earlier build of the small op was killed and left {folder / 'lock'}; removed it" in lines
    assert (folder / "small.so").exists()
    assert sorted(path.name for path in folder.parent.glob("small.*")) == ["small.pipeline-lock"]


@pytest.mark.nightly
def test_a_lock_of_nobody_seen_is_named_and_left_for_a_while(small_op, tmp_path, monkeypatch):
    from pipeline.engine import native_ops

    op = small_op
    folder = tmp_path / "ops" / "small"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    monkeypatch.setattr(native_ops, "_ABANDONED_AFTER_SECONDS", 1.0)
    with capture_logs() as lines:
        assert native_ops._build_op(op) is None
    told = next(line for line in lines if line.startswith("waiting for the small op: "))
    assert f"{folder / 'lock'} exists, but no process on this machine builds the op; the file" in told
    assert f"an earlier build of the small op was killed and left {folder / 'lock'}; removed it" in lines


def test_two_of_our_runs_build_once_and_one_tells_what_it_waits_for(small_op, tmp_path):
    from pipeline.engine.native_ops import _build_op

    lock = tmp_path / "ops" / "small" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    answers = []
    with subprocess.Popen(["sleep", "1000"], cwd=lock.parent) as compiler, capture_logs() as lines:
        builds = [threading.Thread(target=lambda: answers.append(_build_op(small_op))) for _ in range(2)]
        for build in builds:
            build.start()
        try:
            theirs = f"waiting for the small op: process {compiler.pid} (sleep) builds it; "
            deadline = time.monotonic() + 400
            while not any(line.startswith(theirs) for line in lines):
                assert time.monotonic() < deadline, lines
                time.sleep(0.1)
            assert not answers
        finally:
            lock.unlink()
            compiler.kill()
            for build in builds:
                build.join()
    assert answers == [None, None]
    assert (lock.parent / "small.so").exists()


def asked_to_quantize(job: Job, cuda: str | None, home: str | None) -> str:
    """The message for a split with quantized ZeRO++, with a torch of this CUDA and this CUDA_HOME."""
    import torch.utils.cpp_extension

    from pipeline.engine.native_ops import prepare_native_ops
    from pipeline.errors import ConfigError

    before = torch.version.cuda, torch.utils.cpp_extension.CUDA_HOME
    torch.version.cuda = cuda
    torch.utils.cpp_extension.CUDA_HOME = home
    try:
        prepare_native_ops(deepspeed_json(3, zero_quantized_weights=True), job)
    except ConfigError as error:
        return str(error)
    finally:
        torch.version.cuda, torch.utils.cpp_extension.CUDA_HOME = before
    return "it was built"


def test_a_quantizer_that_cannot_be_built_is_told_before_there_is_a_model(ranks, tmp_path):
    """DeepSpeed would compile it in the first forward, with whatever nvcc there is."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 11.8, V11.8.89\n")
    nvcc.chmod(0o755)
    for cuda, home, reason in (
        (None, None, "this torch is built without CUDA"),
        ("13.0", None, "CUDA_HOME does not exist, unable to compile CUDA op(s)"),
        ("13.0", str(tmp_path), "nvcc is from CUDA 11.8, torch was built with 13.0"),
    ):
        (told,) = ranks(1).run(asked_to_quantize, cuda, home)
        assert told.startswith("zero_optimization: zero_quantized_weights, zero_quantized_gradients: ")
        assert f"cannot be built ({reason}); install CUDA {cuda or ''}" in told
        assert told.endswith("or use zero_hpz_partition_size alone")


def test_without_libaio_the_run_ends_with_what_to_install(tmp_path):
    """A C compiler for which libaio does not exist: DeepSpeed's own check links with it."""
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-laio*) exit 1;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    split = ["--deepspeed", str(ROOT / "ds_configs" / "zero3_nvme.json")]
    paths = [f"ds.zero_optimization.{s}.nvme_path={tmp_path}" for s in ("offload_optimizer", "offload_param")]
    result = launch("--config", str(write_recipe(tmp_path)), *split, *paths, CC=str(compiler))
    assert result.returncode == 2, result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: zero_optimization: device nvme: ")
    assert "apt-get install g++ libaio-dev), or use device cpu" in result.stderr
    assert "Traceback" not in result.stderr
