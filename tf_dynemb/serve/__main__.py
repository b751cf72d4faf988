"""`python -m tf_dynemb.serve`: serves exported models."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence


def main() -> int:
    """Serves until a signal; returns the exit code: 1 if the server could not start."""
    options = parse()  # before the imports, which take seconds
    sys.argv = sys.argv[:1]  # KServe reads the command line of the process when it is imported
    try:
        import uvloop

        from tf_dynemb.serve.server import ServerError, serve
    except ImportError as error:
        print(f"error: {error}: pip install 'tf_dynemb[serve]'", file=sys.stderr)
        return 1
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # a line for each malformed request
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        asyncio.run(serve(options))
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    logging.shutdown()
    os._exit(0)  # does not wait for the threads of calls that do not end


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of a command line; exits with 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tf_dynemb.serve",
        description="Serves exported models over KServe's protocols V1 (REST) and V2 (REST, gRPC).",
    )
    models = parser.add_argument_group("models")
    models.add_argument(
        "--model",
        action="append",
        required=True,
        type=_named,
        metavar="NAME=PATH",
        help="a SavedModel, or a directory of numbered ones, of which the newest is served: a path "
        "or a URL such as s3://bucket/ctr. May be repeated",
    )
    models.add_argument(
        "--follow",
        action="append",
        default=[],
        type=_named,
        metavar="NAME=PATH",
        help="a chain of snapshots, a path or URL, that a model applies besides the path that it "
        "was exported to follow",
    )
    models.add_argument(
        "--poll-seconds",
        type=_positive(float),
        default=1.0,
        metavar="S",
        help="seconds between two checks for versions, and for snapshots at --follow; default: 1",
    )
    models.add_argument(
        "--cache",
        type=pathlib.Path,
        metavar="DIR",
        help="a directory for copies of what is at URLs; default: a temporary one",
    )
    models.add_argument(
        "--batching",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether requests that wait together are one batch; auto: if a model answers random "
        "rows alike alone and together",
    )
    models.add_argument(
        "--threads",
        type=_positive(int),
        default=os.cpu_count() or 1,
        metavar="N",
        help="the most calls of models at a time; default: the number of cores",
    )
    models.add_argument(
        "--device",
        default="CPU",
        metavar="NAME",
        help="the device of the models' tables: CPU, or a GPU such as GPU:0; default: CPU",
    )
    models.add_argument(
        "--max-hbm-for-vectors",
        type=_not_negative,
        default=16.0,
        metavar="GB",
        help="GB of GPU memory for the vectors of each table, if --device is a GPU; default: 16",
    )
    network = parser.add_argument_group("network")
    network.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1; 0.0.0.0: all")
    network.add_argument(
        "--http-port", type=_port, default=8080, metavar="PORT", help="default: 8080; 0: a free one"
    )
    network.add_argument(
        "--grpc-port",
        type=_port,
        default=8081,
        metavar="PORT",
        help="default: 8081; 0: a free one; -1: no gRPC",
    )
    network.add_argument("--tls-cert", metavar="FILE", help="the certificates, as PEM")
    network.add_argument("--tls-key", metavar="FILE", help="their private key, as PEM")
    network.add_argument(
        "--token-file",
        metavar="FILE",
        help="has a token, which requests have to send as `authorization: Bearer TOKEN`",
    )
    network.add_argument(
        "--model-control",
        action="store_true",
        help="let clients unload models, and load them again (V2's repository)",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-request-bytes",
        type=_positive(int),
        default=4 << 20,
        metavar="N",
        help="bytes of the body of a request; default: 4 MiB",
    )
    limits.add_argument(
        "--max-rows",
        type=_positive(int),
        default=8192,
        metavar="N",
        help="rows of a request, and of a batch; default: 8192",
    )
    limits.add_argument(
        "--max-elements",
        type=_positive(int),
        default=4_000_000,
        metavar="N",
        help="elements of all inputs of a request together; default: 4,000,000",
    )
    limits.add_argument(
        "--max-requests",
        type=_positive(int),
        default=256,
        metavar="N",
        help="requests that are answered at a time, others get 429; default: 256",
    )
    limits.add_argument(
        "--timeout-seconds",
        type=_positive(float),
        default=10.0,
        metavar="S",
        help="for the body of a request, and for its answer; default: 10",
    )
    limits.add_argument(
        "--drain-seconds",
        type=_not_negative,
        default=5.0,
        metavar="S",
        help="after SIGTERM: not ready, but answering, for so long; default: 5",
    )
    options = parser.parse_args(arguments)
    names = [name for name, _ in options.model]
    for argument, given in (("--model", names), ("--follow", [name for name, _ in options.follow])):
        if len(set(given)) < len(given):
            parser.error(f"{argument}: a name can be given once, got {', '.join(given)}")
    for name, _ in options.follow:
        if name not in names:
            parser.error(f"--follow {name}: there is no --model of this name")
    if (options.tls_cert is None) != (options.tls_key is None):
        parser.error("--tls-cert and --tls-key: pass both")
    return options


def _named(text: str) -> tuple[str, str]:
    name, equals, place = text.partition("=")
    if not equals or not place or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", name):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=PATH with a name of letters and digits"
        )
    return name, place


def _port(text: str) -> int:
    port = int(text)
    if not -1 <= port < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port")
    return port


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def _positive(kind: type[int] | type[float]) -> Callable[[str], int | float]:
    def positive(text: str) -> int | float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    positive.__name__ = f"positive {kind.__name__}"
    return positive


if __name__ == "__main__":
    sys.exit(main())
