"""TFRA's path of its Keras layers: `tfra.keras.layers`."""

from tf_dynemb.tfra import layers

__all__ = ["layers"]
