"""TFRA's switch between training and inference, for the whole process."""

from __future__ import annotations


class ModelMode:
    """The modes, and the current one."""

    TRAIN = "train"
    INFERENCE = "inference"

    CURRENT_SETTING = TRAIN


def get_model_mode() -> str:
    """Returns "train" or "inference"."""
    return ModelMode.CURRENT_SETTING


def enable_train_mode() -> None:
    """Makes lookups differentiable, as they are at the start."""
    ModelMode.CURRENT_SETTING = ModelMode.TRAIN


def enable_inference_mode() -> None:
    """Makes the lookups of this module return vectors without a gradient."""
    ModelMode.CURRENT_SETTING = ModelMode.INFERENCE


def is_inference() -> bool:
    """Whether lookups have no gradient."""
    return ModelMode.CURRENT_SETTING == ModelMode.INFERENCE
