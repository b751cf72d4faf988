"""`python -m tf_dynemb.serve`: serves exported models."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from tf_dynemb.serve.options import parse


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


if __name__ == "__main__":
    sys.exit(main())
