"""`python -m tf_dynemb.serve`: serves exported models."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

import uvloop

from tf_dynemb.serve.options import parse
from tf_dynemb.serve.server import ServerError, serve


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until a signal; returns the exit code: 1 if the server could not start."""
    options = parse(arguments)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        asyncio.run(serve(options))
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
