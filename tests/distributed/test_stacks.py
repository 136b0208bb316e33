"""Where a thread stands, by its stack and by the flight recorder; what is written of it."""

from __future__ import annotations

import os
import sysconfig
import threading
import traceback
from traceback import FrameSummary as Frame

import pytest

from pipeline.distributed.stacks import InFlight, main_frames, thread_position, write_stacks

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
