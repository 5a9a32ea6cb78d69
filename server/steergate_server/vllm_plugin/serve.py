"""`steergate-serve MODEL [steering flags] [any vLLM flag]`: vLLM's own server with steering on.

It reads the steering flags, sets worker, scheduler, additional config and plugin allow-list, then hands over to vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec

from steergate_server.runtime.config import SPOOL_ENVIRONMENT, EngineConfig
from steergate_server.runtime.front_config import FrontConfig, store_front_config
from steergate_server.schema.decode import decode
from steergate_server.schema.errors import SteeringError
from steergate_server.schema.hooks import HOOKS
from steergate_server.schema.registry import ServerDefault

DEMO_MODEL = Path(__file__).parent.parent / "demo" / "model"

DEMO_DEFAULTS = {
    "--host": "127.0.0.1",
    "--served-model-name": "demo",
    "--dtype": "float32",
    "--max-num-seqs": "64",
    "--kv-cache-memory-bytes": str(256 * 2**20),
    "--enforce-eager": None,
}
"""vLLM flags that suit the small model: for this machine alone, up in seconds, and little memory."""

_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
    "vllm.endpoint_plugins",
)

_SPOOL_PREFIX = "steergate-spool-"

_REFUSED = {
    "--worker-cls": "steering brings its own worker",
    "--scheduler-cls": "steering brings its own scheduler",
    "--api-server-count": "registered vectors live in one API server process",
    "--data-parallel-size": "it starts several API server processes, and registered vectors live in one",
    "--headless": "it starts no API server",
    "--grpc": "only the HTTP server carries steering",
}
"""vLLM flags that cannot be honoured, and why."""


def build_parser() -> argparse.ArgumentParser:
    """The steering flags. Everything else is vLLM's and is passed on as it is."""
    parser = argparse.ArgumentParser(
        prog="steergate-serve",
        usage="steergate-serve MODEL [steering flags] [any vLLM flag]",
        description="Serve a model with stock vLLM and activation steering.",
        epilog="Any other flag is vLLM's own: see `vllm serve --help`.",
        allow_abbrev=False,
    )
    parser.add_argument("--demo", action="store_true", help="serve the bundled demonstration model")
    parser.add_argument(
        "--steer-algorithms",
        type=_words,
        default=EngineConfig().algorithms,
        metavar="A,B",
        help="algorithms that requests may use, or `all` (default: direct,erase,replace,clamp)",
    )
    parser.add_argument(
        "--steer-graph-mode",
        choices=("auto", "eager", "split", "in_graph"),
        default="auto",
        help="how static vectors run (default: auto, which is in_graph where the declared algorithms allow it)",
    )
    parser.add_argument(
        "--steer-graph-max-rank",
        type=_positive,
        default=32,
        metavar="R",
        help="summed rank of the low-rank maps at one site that fits the graph (default: 32)",
    )
    parser.add_argument(
        "--steer-hooks",
        type=_words,
        default=("post_block",),
        metavar="A,B",
        help="hooks that carry steering (default: post_block)",
    )
    parser.add_argument(
        "--steer-sources",
        type=_words,
        default=("name", "inline"),
        metavar="A,B",
        help="where numbers may come from: name, inline (default: both)",
    )
    parser.add_argument(
        "--steering-memory",
        type=_positive,
        default=512,
        metavar="MIB",
        help="size of the payload pool in MiB (default: 512)",
    )
    parser.add_argument(
        "--max-gates-per-request", type=_positive, default=4, metavar="N", help="gate lanes of a request (default: 4)"
    )
    parser.add_argument(
        "--max-steering-slots",
        type=_positive,
        default=0,
        metavar="N",
        help="columns of the per-site index (default: 4 x vLLM's max_num_seqs)",
    )
    parser.add_argument(
        "--max-inline-bytes",
        type=_positive,
        default=16 * 2**20,
        metavar="N",
        help="bytes of inline numbers in one request (default: 16 MiB)",
    )
    parser.add_argument(
        "--enable-declarative-gates",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether requests may carry gates (default: on)",
    )
    parser.add_argument(
        "--steering-default",
        type=_default_file,
        default=None,
        metavar="FILE",
        help="the server default: JSON as PUT /v1/steering/default takes it (default: none)",
    )
    parser.add_argument(
        "--steering-api-key",
        action="append",
        default=None,
        metavar="KEY",
        help="key for changing vectors; repeatable (environment: STEERGATE_STEERING_API_KEY)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command."""
    parser = build_parser()
    words = [_dashed(word) for word in (sys.argv[1:] if argv is None else argv)]
    flags, rest = parser.parse_known_args(words)
    rest = _vllm_arguments(parser, flags, rest)
    keys = flags.steering_api_key or [key for key in [os.environ.get("STEERGATE_STEERING_API_KEY")] if key]
    store_front_config(
        FrontConfig(
            sources=flags.steer_sources,
            max_inline_bytes=flags.max_inline_bytes,
            default_file=flags.steering_default,
            keys=tuple(keys),
            development=os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
        )
    )
    _sweep_spools()
    spool = tempfile.mkdtemp(prefix=f"{_SPOOL_PREFIX}{os.getpid()}-")
    os.environ[SPOOL_ENVIRONMENT] = spool
    os.environ["VLLM_PLUGINS"] = ",".join(_plugins())
    try:
        _hand_over(rest)
    finally:
        shutil.rmtree(spool, ignore_errors=True)


def _sweep_spools() -> None:
    """Remove the spools of servers that were killed: their names hold a process number that nobody has."""
    for path in Path(tempfile.gettempdir()).glob(f"{_SPOOL_PREFIX}*-*"):
        number = path.name.removeprefix(_SPOOL_PREFIX).partition("-")[0]
        if not number.isdecimal() or _is_alive(int(number)):
            continue
        shutil.rmtree(path, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _vllm_arguments(parser: argparse.ArgumentParser, flags: argparse.Namespace, rest: list[str]) -> list[str]:
    """vLLM's command line. Ends the program with a usage error for what cannot be honoured."""
    unknown = [word for word in rest if word.startswith(("--steer", "--max-steering", "--no-steer"))]
    if unknown:
        parser.error(f"unknown or not yet built steering flag: {unknown[0]}")
    for flag, why in _REFUSED.items():
        if any(_is_flag(word, flag) for word in rest):
            parser.error(f"{flag} cannot be combined with steering: {why}")
    if flags.demo:
        if rest and not rest[0].startswith("-"):
            parser.error("give a MODEL or --demo, not both")
        rest = [str(DEMO_MODEL), *_with_defaults(rest, DEMO_DEFAULTS)]
    elif not rest or rest[0].startswith("-"):
        parser.error("MODEL comes first: steergate-serve MODEL [flags], or steergate-serve --demo")
    additional, rest = _take_additional_config(parser, rest)
    algorithms = _known(parser, "--steer-algorithms", flags.steer_algorithms, _algorithms())
    mode, reason = _graph_mode(flags.steer_graph_mode, algorithms)
    if mode == "eager" and not any(_is_flag(word, "--enforce-eager") for word in rest):
        rest.append("--enforce-eager")
    engine = EngineConfig(
        hooks=_known(parser, "--steer-hooks", flags.steer_hooks, HOOKS),
        algorithms=algorithms,
        graph_mode=mode,
        graph_reason=reason,
        graph_max_rank=flags.steer_graph_max_rank,
        memory_mib=flags.steering_memory,
        max_gates=flags.max_gates_per_request,
        max_slots=flags.max_steering_slots,
        gates=flags.enable_declarative_gates,
    )
    _known(parser, "--steer-sources", flags.steer_sources, ("name", "inline"))
    return [
        *rest,
        "--middleware",
        "steergate_server.vllm_plugin.contract.ContractHeader",
        "--worker-cls",
        "steergate_server.vllm_plugin.worker.SteeringWorker",
        "--scheduler-cls",
        "steergate_server.vllm_plugin.scheduler.SteeringScheduler",
        "--additional-config",
        json.dumps({**additional, "steering": msgspec.to_builtins(engine)}),
    ]


def _with_defaults(rest: list[str], defaults: dict[str, str | None]) -> list[str]:
    """A command line with the flags of `defaults` that it does not give itself."""
    missing = {flag: value for flag, value in defaults.items() if not any(_is_flag(word, flag) for word in rest)}
    return [*rest, *(word for pair in missing.items() for word in pair if word is not None)]


def _take_additional_config(parser: argparse.ArgumentParser, rest: list[str]) -> tuple[dict[str, object], list[str]]:
    """The user's own `--additional-config`, which ours is merged into, and the rest of the command line."""
    taker = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    taker.add_argument("--additional-config", default="{}")
    found, others = taker.parse_known_args(rest)
    try:
        config = json.loads(found.additional_config)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        parser.error(f"--additional-config: expected a JSON object, got {found.additional_config!r}")
    if "steering" in config:
        parser.error("--additional-config: the key 'steering' is set by the steering flags")
    return config, others


def _hand_over(arguments: list[str]) -> None:
    """Run vLLM's `serve` subcommand: its own entry point wants a distribution named `vllm`, unlike the CPU build's."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    command = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="steergate-serve")
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    # vLLM reads the command line again for some of its own decisions.
    sys.argv = ["vllm", "serve", *arguments]
    args = parser.parse_args(sys.argv[1:])
    configure_logging_from_args(args)
    command.validate(args)
    command.cmd(args)


def _plugins() -> list[str]:
    """Every plugin that vLLM would load without an allow-list, and ours, which it loads only by name."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None:
        return [*dict.fromkeys([*filter(None, allowed.split(",")), "steergate"])]
    others = {point.name for group in _PLUGIN_GROUPS[:-1] for point in entry_points(group=group)}
    return [*sorted(others), "steergate"]


def _algorithms() -> tuple[str, ...]:
    from steergate_server.algorithms.extensions import load_extensions
    from steergate_server.algorithms.registry import registered_algorithms

    load_extensions()
    return registered_algorithms()


def _graph_mode(asked: str, algorithms: tuple[str, ...]) -> tuple[Any, str | None]:
    from steergate_server.runtime.lowering import auto_mode

    return auto_mode(algorithms) if asked == "auto" else (asked, None)


def _known(parser: argparse.ArgumentParser, flag: str, given: tuple[str, ...], known: Sequence[str]) -> tuple[str, ...]:
    """The words given to a flag, each of which must be known; `all` stands for all algorithms."""
    if given == ("all",) and flag == "--steer-algorithms":
        return tuple(known)
    for word in given:
        if word not in known:
            parser.error(f"{flag}: {word!r} is unknown or not built yet; choose from {', '.join(known)}")
    return given


def _is_flag(word: str, flag: str) -> bool:
    return word == flag or word.startswith(f"{flag}=")


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise argparse.ArgumentTypeError("expected a comma-separated list")
    return words


def _default_file(text: str) -> str:
    """The absolute path of a file that holds a server default. What it says of the model is checked at start."""
    path = Path(text).absolute()
    try:
        decode(path.read_bytes(), ServerDefault)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read: {error.strerror}") from None
    except SteeringError as error:
        raise argparse.ArgumentTypeError(f"{text} is no server default: {error}") from None
    return str(path)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _dashed(word: str) -> str:
    """A flag with dashes in its name, as vLLM itself reads it; values stay as they are."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


if __name__ == "__main__":
    main()
