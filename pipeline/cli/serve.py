"""Command `python -m pipeline serve SOURCE`: serves a language model in the form of OpenAI's API."""

from __future__ import annotations

import argparse
import ipaddress
import os
import shlex
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.inputs import (
    ParagraphHelpFormatter,
    add_overrides,
    add_source_arguments,
    report_file_errors,
)
from pipeline.config.optional_packages import require_package
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.signals import raise_on_stop_signals
from pipeline.errors import ConfigError, escape_unprintable
from pipeline.monitoring.logs import log_to_console
from pipeline.redaction import declare_secret_variable

if TYPE_CHECKING:
    from pipeline.evaluation.sources import ModelSource

HELP = "serve a language model over an OpenAI-compatible API"
DESCRIPTION = """\
Serve one model under /v1/chat/completions, /v1/completions and /v1/models, for OpenAI's clients. One process
computes on one device. Requests that wait are answered together, and later ones after them; for many users,
export the model and serve it with vLLM (--engine vllm)."""
EPILOG = """\
To talk to it in a browser, with Open WebUI:

  OPENAI_API_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none open-webui serve
"""
AFTER_INTERRUPT = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = ParagraphHelpFormatter
    add_source_arguments(parser)
    parser.add_argument("--name", help="name of the model for clients (default: the source's last part)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0: any free one (default: 8000)")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the key that clients must send"
    )
    parser.add_argument(
        "--max-batch", type=int, default=16, metavar="N", help="texts generated at once at most (default: 16)"
    )
    parser.add_argument(
        "--engine",
        choices=("torch", "vllm"),
        default="torch",
        help="vllm: print vLLM's command for an exported folder, and run it where vLLM is installed",
    )
    add_overrides(parser, argparse.SUPPRESS)


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Serve the model until Ctrl-C or SIGTERM.

    Raises:
        PipelineError: An argument cannot be used, or the model cannot be found or loaded.
    """
    log_to_console(Ranks(0, 0, 1, 1), "warning")
    if not 0 <= arguments.port < 2**16:
        raise ConfigError(f"--port {arguments.port}: expected 0 to 65535")
    if not 1 <= arguments.max_batch <= 1024:
        raise ConfigError(f"--max-batch {arguments.max_batch}: expected 1 to 1024")
    api_key = _read_api_key(arguments.api_key_env)
    if api_key is None and not _is_loopback(arguments.host):
        raise ConfigError(
            f"--host {arguments.host}: other machines could use the model; set a key in an environment "
            "variable and name it: --api-key-env NAME"
        )
    from pipeline.evaluation.sources import open_source

    source = open_source(
        arguments.source,
        arguments.step,
        arguments.overrides,
        base=arguments.base,
        import_paths=not arguments.no_import_paths,
    )
    name = arguments.name or source.name
    if arguments.engine == "vllm":
        _run_vllm(source, name, arguments, api_key)
        return
    for module in ("starlette", "uvicorn"):
        require_package(module, "serve")
    with raise_on_stop_signals(), _listen(arguments.host, arguments.port) as listener:
        from pipeline.distributed.process_group import start_job
        from pipeline.evaluation.serving import Service, run_server

        job = start_job(Ranks(0, 0, 1, 1), distributed=False)
        model = source.load(job)
        service = Service(
            model,
            job,
            [name, source.name, arguments.source, str(Path(arguments.source).absolute())],
            host=arguments.host,
            max_batch=arguments.max_batch,
            api_key=api_key,
        )
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        url = f"http://{host}:{listener.getsockname()[1]}/v1"
        print(
            f"serving {escape_unprintable(name)} ({model.engine.precision}) on {url}; Ctrl-C stops it",
            flush=True,
        )
        run_server(service, listener)


def _read_api_key(variable: str | None) -> str | None:
    """Return the API key, and hide it from messages and logs from now on.

    Raises:
        ConfigError: There is no such environment variable, or it cannot be used.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii():
        # The name is not repeated: it may be the key itself.
        raise ConfigError("--api-key-env: the environment has no key under this name; export NAME=KEY first")
    declare_secret_variable(variable)
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens, before minutes are spent on loading the model.

    Raises:
        ConfigError: The address is not one of this machine, or the port is in use.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:  # also socket.gaierror
        reason = str(error.strerror or error).partition(" (")[0]
        advice = "choose another port, or 0 for any free one" if port else "choose another address"
        raise ConfigError(f"--host {host} --port {port}: {reason}; {advice}") from None


def _run_vllm(source: ModelSource, name: str, arguments: argparse.Namespace, api_key: str | None) -> None:
    """Print vLLM's command, and become vLLM if it is installed and the source is a folder that it reads.

    Raises:
        ConfigError: vLLM is not installed, or the source must be exported first.
    """
    is_exported = source.kind in ("folder", "hub")
    model = arguments.source if source.kind == "hub" else str(Path(arguments.source).absolute())
    command = ["vllm", "serve", model if is_exported else "FOLDER", f"--served-model-name={name}"]
    command += [f"--host={arguments.host}", f"--port={arguments.port}"]
    if not is_exported:
        has_adapter = source.run is None or source.run.config.adapter is not None
        export = ["python", "-m", "pipeline", "export", arguments.source, "FOLDER"]
        export += ["--merge"] * has_adapter
        export += [f"--step={arguments.step}"] if arguments.step != "last" else []
        print(shlex.join(export))
    print(shlex.join(command), flush=True)
    if not is_exported:
        raise ConfigError(f"vLLM reads no {source.kind}; export it first, by the command above")
    if shutil.which("vllm") is None:
        raise ConfigError("vLLM is not installed here; pip install vllm, or run the command above elsewhere")
    if api_key is not None:
        os.environ["VLLM_API_KEY"] = api_key  # not an argument, which other users can see
    os.execvp(command[0], command)
