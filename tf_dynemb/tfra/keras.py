"""TFRA's path of its Keras layers: `tfra.keras.layers`."""

from __future__ import annotations

from typing import Any

from tf_dynemb.tfra import layers

__all__ = ["layers"]


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "models"):
        raise AttributeError(
            f"tf_dynemb.tfra.keras has no {name}: use tf_dynemb.callbacks.SynchronizeRanks, and "
            "the callbacks and model.save of Keras, which include the tables."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
