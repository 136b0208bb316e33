"""Command `python -m pipeline serve SOURCE`: serves a language model in the form of OpenAI's API."""

from __future__ import annotations

import argparse
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
    open_argument_source,
    report_file_errors,
)
from pipeline.config.command_lines import format_pipeline_command
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
AFTER_INTERRUPT = ""  # `pipeline/__main__.py` prints nothing more than "stopped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = ParagraphHelpFormatter
    add_source_arguments(parser)
    add = parser.add_argument
    add("--name", help="name of the model for clients (default: the source's last part)")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="port; 0: any free one (default: 8000)")
    add("--api-key-env", metavar="NAME", help="environment variable with the key that clients must send")
    add("--max-batch", type=int, default=16, metavar="N", help="most texts generated at once (default: 16)")
    text = "vllm: print vLLM's command for an exported folder, and run it where vLLM is installed"
    add("--engine", choices=("torch", "vllm"), default="torch", help=text)
    add_overrides(parser, argparse.SUPPRESS)


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Serve the model until Ctrl-C or SIGTERM.

    Raises:
        PipelineError: An argument cannot be used, or the model cannot be found or loaded.
    """
    log_to_console(Ranks(0, 0, 1, 1), "warning")
    host = arguments.host
    if arguments.max_batch < 1:
        raise ConfigError(f"--max-batch {arguments.max_batch}: expected 1 or more")
    api_key = None
    if arguments.api_key_env is not None:
        api_key = os.environ.get(arguments.api_key_env, "").strip()
        declare_secret_variable(arguments.api_key_env)
        if not api_key:  # the name is not repeated: it may be the key itself
            raise ConfigError(
                "--api-key-env: the environment has no key under this name; export NAME=KEY first"
            )
    elif host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(
            f"--host {host}: other machines could use the model; set a key in an environment variable and "
            "name it: --api-key-env NAME"
        )
    source = open_argument_source(arguments)
    name = arguments.name or source.name
    if arguments.engine == "vllm":
        _run_vllm(source, name, arguments, api_key)
    require_package("uvicorn", "serve")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:  # before minutes are spent on loading the model
        listener = socket.create_server((host, arguments.port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {arguments.port}: {error}; choose another one") from None
    with raise_on_stop_signals(), listener:
        from pipeline.distributed.process_group import start_job
        from pipeline.evaluation.serving import Service, run_server

        job = start_job(Ranks(0, 0, 1, 1), distributed=False)
        model = source.load(job)
        names = [name, source.name, arguments.source, str(Path(arguments.source).absolute())]
        service = Service(model, job, names, arguments.max_batch, api_key)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/v1"
        print(
            f"serving {escape_unprintable(name)} ({model.engine.precision}) on {url}; Ctrl-C stops it",
            flush=True,
        )
        run_server(service, listener)


def _run_vllm(source: ModelSource, name: str, arguments: argparse.Namespace, api_key: str | None) -> None:
    """Print vLLM's command, and become vLLM if it is installed and reads the source."""
    if source.kind not in ("folder", "hub"):
        has_adapter = source.run is None or source.run.config.adapter is not None
        command = format_pipeline_command("export", arguments.source, "FOLDER", f"--step={arguments.step}")
        command += " --merge" * has_adapter
        raise ConfigError(f"vLLM reads no {source.kind}; export it first: {command}")
    model = arguments.source if source.kind == "hub" else str(Path(arguments.source).absolute())
    address = [f"--host={arguments.host}", f"--port={arguments.port}"]
    words = ["vllm", "serve", model, f"--served-model-name={name}", *address]
    print(shlex.join(words), flush=True)
    if shutil.which("vllm") is None:
        raise ConfigError("vLLM is not installed here; pip install vllm, or run the command above elsewhere")
    if api_key is not None:
        os.environ["VLLM_API_KEY"] = api_key  # not an argument, which other users can see
    os.execvp(words[0], words)
