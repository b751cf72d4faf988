"""Serves an exported model with Ray Serve, by the `LoadedModel` of `tf_dynemb.serve`.

    pip install "tf_dynemb[cpu,serve]" "ray[serve]"
    cd examples && serve run ray_serve:app model=/models/ctr
    curl localhost:8000 -d '{"ids": [[1], [2]]}'

A request has the rows of each input by name. The answer has the rows of each output, and the
snapshot that they were computed from. A model that was exported with `follow=` follows here, too.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse


@serve.deployment(max_ongoing_requests=16)
class Scorer:
    def __init__(self, model: str) -> None:
        # Here, in the replica: these import TensorFlow.
        from tf_dynemb.serve import loaded_model, v1

        self._decode = v1.decode
        loaded = loaded_model.LoadedModel(model)
        self._signature = loaded.signatures[loaded.default]

    async def __call__(self, request: Request) -> JSONResponse:
        try:
            body = {"inputs": await request.json()}
            values = self._decode(body, self._signature.inputs)
        except (json.JSONDecodeError, ValueError) as error:
            return JSONResponse({"error": str(error)}, 400)
        outputs, mark = await asyncio.to_thread(self._signature, values)
        scores = {name: rows.tolist() for name, rows in outputs.items()}
        return JSONResponse(
            {"scores": scores, "watermark": {"watermark": mark.watermark, "id": mark.id}}
        )


def app(options: dict[str, Any]) -> serve.Application:
    """Returns the application of `serve run ray_serve:app model=PATH`."""
    return Scorer.options(num_replicas=int(options.get("replicas", 1))).bind(options["model"])
