"""Starts processes with their imports done, as forks of a server that has torch, DeepSpeed and transformers.

A fresh interpreter spends six seconds of processor time on these imports, for every rank of a pool or launch.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

from pipeline.distributed.accelerator import choose_accelerator

# Modules that the server imports. None may start a thread, because a fork has only the thread that forked;
# tests/test_support_fork_server.py checks it.
PRELOAD = [
    "pipeline.training.run_rank",
    "torch",
    "torch._dynamo",
    "torch.distributed.run",
    "deepspeed",
    "deepspeed.launcher.runner",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
]
HAS_GPU = choose_accelerator() == "cuda"
# Prefixes of variables that modules read at their import. The server has imported them, so a fork ignores a
# new value.
READ_AT_IMPORT = ("OMP_", "MKL_", "HF_", "TRANSFORMERS_", "DS_", "CUDA_", "PYTHON", "TORCH_", "LD_")

# Options of subprocess.Popen that `_execute_child` does not imitate: with one of them it starts the program.
NOT_IN_FORK = (
    "executable",
    "preexec_fn",
    "pass_fds",
    "cwd",
    "shell",
    "p2cread",
    "gid",
    "gids",
    "uid",
    "process_group",
)


def process_context(on_gpu: bool = HAS_GPU) -> ForkServerContext | SpawnContext:
    """Return the context that starts test processes: the fork server, or `spawn` on a machine with a GPU.

    DeepSpeed chooses the accelerator at its import, so with a GPU each process imports for itself.
    """
    if on_gpu or HAS_GPU:
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOAD)
    return server


def is_same_in_fork(extra: Mapping[str, str]) -> bool:
    """Return whether a program with these extra variables behaves in a fork as in a fresh interpreter."""
    return not HAS_GPU and not any(key.startswith(READ_AT_IMPORT) and key != "PYTHONPATH" for key in extra)


class ForkedProgram:
    """Runs `python *arguments` in a fork that leads a new session; its methods are those of subprocess.Popen.

    Programs that it starts with sys.executable, as launchers start ranks, are forks too. Each is a child of
    the process that started it, with its own id, signals and exit code.

    Args:
        output: File for stdout, and for stderr if `errors` is `None`.
        errors: File for stderr.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
        cwd: Path = Path(),
    ):
        files = [str(output), str(errors or output)]
        self._process = process_context().Process(
            target=_run_as_session_leader,
            args=(list(arguments), dict(environment), _ignored_signals(), str(cwd.absolute()), *files),
        )
        self._process.start()
        self.pid: int = self._process.pid  # type: ignore[assignment]

    def poll(self) -> int | None:
        """Return the exit code; `None` while the program runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Send SIGKILL to the program."""
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; -N if signal N ended the program.

        Raises:
            subprocess.TimeoutExpired: The program still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0)
        return self._process.exitcode


_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _execute_child(popen: Any, args: Any, *options: Any) -> None:
    """Fork a script or module of this interpreter, and start any other program as subprocess.Popen does.

    It replaces `subprocess.Popen._execute_child` in forks.
    """
    values = dict(zip(list(inspect.signature(_execute).parameters)[2:], options, strict=True))
    unsupported = {name for name in NOT_IN_FORK if values[name] not in (None, (), False, -1)}
    if (
        isinstance(args, (str, bytes))
        or args[0] != sys.executable
        or list(args[1:2]) in ([], ["-c"])
        or unsupported
    ):
        _execute(popen, args, *options)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    popen.pid = os.fork()
    popen._child_created = True
    if popen.pid == 0:
        if values["start_new_session"]:
            os.setsid()
        for number, file in ((1, values["c2pwrite"]), (2, values["errwrite"])):
            if file != -1:
                os.dup2(file, number)
        environment = dict(os.environ if values["env"] is None else values["env"])
        run_program(list(args[1:]), environment, _ignored_signals())
    popen._close_pipe_fds(
        *(values[name] for name in ["p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"])
    )


def _ignored_signals() -> list[int]:
    """Return the signals that this process ignores: a program that it starts would inherit that."""
    return [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]


def _run_as_session_leader(
    arguments: list[str], environment: dict[str, str], ignored: Sequence[int], cwd: str, *files: str
) -> None:
    """Start a session, redirect stdin, stdout and stderr, and run the program. Never returns."""
    os.setsid()
    os.chdir(cwd)
    for number, file in enumerate((os.devnull, *files)):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    run_program(arguments, environment, ignored)


def run_program(arguments: list[str], environment: dict[str, str], ignored: Sequence[int]) -> None:
    """Run a script or module as a fresh interpreter does, from its start to its exit. Never returns."""
    _reset_process(environment, ignored)
    code: Any = 0
    interrupted = False
    try:
        if unbuffered := arguments[0] == "-u":
            arguments = arguments[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=unbuffered)
        if arguments[0] == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv[:] = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
            sys.argv[:] = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        traceback.print_exc()
        code = 1
        interrupted = isinstance(error, KeyboardInterrupt)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def _reset_process(environment: dict[str, str], ignored: Sequence[int]) -> None:
    """Undo everything that a fork inherits from its parent, except for the imports."""
    gc.freeze()  # a collection would write to every imported object, and so copy its memory page
    handlers = dict.fromkeys(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}, signal.SIG_DFL)
    handlers |= {signal.SIGINT: signal.default_int_handler}
    handlers |= dict.fromkeys([*ignored, signal.SIGPIPE, signal.SIGXFSZ], signal.SIG_IGN)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environment)
    warnings.filterwarnings(environment.get("PYTHONWARNINGS", "default"), append=True)  # type: ignore[arg-type]
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    main: Any = multiprocessing.current_process()  # the fork server's child until now
    main._identity = ()
    main._name = "MainProcess"
    main._parent_pid = None
    main._popen = None
    main._config = {
        "authkey": multiprocessing.process.AuthenticationString(os.urandom(32)),
        "semprefix": "/mp",
    }
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
