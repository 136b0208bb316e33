"""The place of a thread, by its stack and by the flight recorder, and the files written about it."""

from __future__ import annotations

import json
import os
import sysconfig
import threading
import time
import traceback
from traceback import FrameSummary as Frame

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from pipeline.distributed.watchdog import InFlight, in_flight_now, main_frames, thread_position, write_stacks

PACKAGES = f"{sysconfig.get_paths()['purelib']}"


def ours(text):
    return Frame("/home/me/train.py", 12, "step", line=text)


OURS = ours("loss.backward()")
AUTOGRAD = Frame(f"{PACKAGES}/torch/autograd/graph.py", 3, "_engine_run_backward")
WRAPPER = Frame(f"{PACKAGES}/torch/distributed/c10d_logger.py", 83, "wrapper")
DIST = f"{PACKAGES}/torch/distributed/distributed_c10d.py"
REDUCE = [InFlight("all_reduce", 7)]


def test_the_outermost_collective_is_named_and_the_line_that_called_it():
    frames = [OURS, WRAPPER, Frame(DIST, 1, "all_gather_object"), WRAPPER, Frame(DIST, 2, "all_gather")]
    assert thread_position(frames) == ("all_gather_object", "/home/me/train.py:12 in step (loss.backward())")


def test_through_deepspeed_too():
    comm = f"{PACKAGES}/deepspeed/comm"
    frames = [
        OURS,
        Frame(f"{PACKAGES}/deepspeed/runtime/engine.py", 1, "allreduce_gradients"),
        Frame(f"{comm}/comm.py", 1, "log_wrapper"),
        Frame(f"{comm}/comm.py", 2, "reduce_scatter_tensor"),
        Frame(f"{PACKAGES}/torch/_dynamo/eval_frame.py", 2, "_fn"),
        Frame(f"{comm}/torch.py", 3, "reduce_scatter_tensor"),
    ]
    assert thread_position(frames).collective == "reduce_scatter_tensor"


@pytest.mark.parametrize(
    ("frames", "in_flight", "collective"),
    [
        ([OURS, AUTOGRAD], REDUCE, "all_reduce"),
        ([OURS, AUTOGRAD], [], None),
        ([ours("time.sleep(5)")], REDUCE, None),
        ([ours("loss = float(total)")], REDUCE, "all_reduce"),
        ([Frame(DIST, 1, "all_reduce"), OURS], [], None),
    ],
    ids=["inside autograd", "computing", "busy beside a collective", "waiting for the device", "called back"],
)
def test_what_python_does_not_show_the_flight_recorder_does(frames, in_flight, collective):
    assert thread_position(frames, in_flight).collective == collective


def test_a_real_stack_of_another_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend(main_frames()))
    thread.start()
    thread.join()
    assert "test_a_real_stack_of_another_thread" in thread_position(found).place


def test_an_exception_tells_where_it_was():
    try:
        os.stat("/no such file")
    except OSError as error:
        place = thread_position(traceback.extract_tb(error.__traceback__)).place
        assert "os.stat(" in place


def test_every_thread_is_written(tmp_path):
    release = threading.Event()

    def a_thread_that_waits():
        release.wait()

    thread = threading.Thread(target=a_thread_that_waits)
    thread.start()
    write_stacks(tmp_path / "hang", 3, "hang: rank 3")
    release.set()
    thread.join()
    text = (tmp_path / "hang" / "rank-00003.txt").read_text()
    assert "hang: rank 3\n" in text
    assert "test_every_thread_is_written" in text
    assert "a_thread_that_waits" in text


# As a CUDA build writes it (torch's FlightRecorder.hpp): NCCL's work is in a recorder of its own.
NCCL = {
    "version": "2.10",
    "nccl_version": "2.28.9",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "entries": [
        {
            "record_id": number,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number + 1,
            "p2p_seq_id": 0,
            "op_id": number + 1,
            "profiling_name": f"nccl:{name}",
            "time_created_ns": 1790000000000000000,
            "input_sizes": [[4]],
            "input_dtypes": ["Float"],
            "output_sizes": [[4]],
            "output_dtypes": ["Float"],
            "state": state,
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": state == "completed",
            "timeout_ms": 1800000,
            "is_p2p": False,
        }
        for number, (name, state) in enumerate(
            [("broadcast", "completed"), ("all_reduce", "started"), ("_allgather_base", "scheduled")]
        )
    ],
}


def recorded_by_both(job, folder):
    """The view of a rank that has left a gloo collective and is in one of NCCL's."""
    dist.all_reduce(torch.ones(3))
    while in_flight_now():  # the recorder learns of the end a moment later
        time.sleep(0.01)
    _distributed_c10d._dump_nccl_trace_json = lambda collectives, only_active: json.dumps(NCCL).encode()
    try:
        if job.ranks.rank == 0:
            write_stacks(folder, 0, "hang")
        return in_flight_now()
    finally:
        del _distributed_c10d._dump_nccl_trace_json


@pytest.mark.slow
def test_what_nccl_is_in_is_known_beside_what_gloo_is(ranks, tmp_path):
    assert (
        ranks(2).run(recorded_by_both, tmp_path)
        == [[InFlight("all_reduce", 2), InFlight("_allgather_base", 3)]] * 2
    )
    written = json.loads((tmp_path / "rank-00000.collectives.json").read_text())
    names = [entry["profiling_name"] for entry in written["entries"]]
    assert names[:3] == ["nccl:broadcast", "nccl:all_reduce", "nccl:_allgather_base"]
    assert "gloo:all_reduce" in names
    assert written["nccl_version"] == "2.28.9"
