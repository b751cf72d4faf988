"""The flags that both scripts have, and the store that they choose."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import clicks

import tf_dynemb.oneembedding as one_embedding

FIRST_TEST_SAMPLE = 2**30  # of synthetic clicks; the training ends before
STORES = ("device_mem", "cached_host_mem", "cached_ssd")
# Distinct ids of Criteo's features in OneFlow's data.
# fmt: off
ROWS = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208,
    11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)
# fmt: on


def numbers(text: str) -> list[int]:
    """Parses numbers that are separated by commas."""
    return [int(number) for number in text.split(",")]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of data, store and saved models."""
    add = parser.add_argument
    add("--data_dir", type=Path, help="folder of OneFlow's Criteo data; default: synthetic clicks")
    add(
        "--persistent_path",
        default="outputs/oneembedding",
        help="folder of snapshots and files (default: outputs/oneembedding)",
    )
    add("--store_type", choices=STORES, default="cached_host_mem", help="where rows are stored")
    add("--cache_memory_budget_mb", type=int, default=8192, help="cache of each rank (8192)")
    add("--model_load_dir", type=Path, help="a saved model to continue from")
    add("--model_save_dir", type=Path, help="folder to save models in")
    add("--save_initial_model", action="store_true", help="save the model before training, too")
    add("--seed", type=int, default=0, help="seed of initial weights and synthetic clicks (0)")


def with_defaults(
    parser: argparse.ArgumentParser,
    arguments: list[str] | None,
    full: dict[str, Any],
    small: dict[str, Any],
) -> argparse.Namespace:
    """Parses the command line; OneFlow's defaults are for its data, the small ones for ours."""
    flags = parser.parse_args(arguments)
    for name, value in (small if flags.data_dir is None else full).items():
        if getattr(flags, name) is None:
            setattr(flags, name, value)
    return flags


def store_options(flags: argparse.Namespace, capacity: int) -> dict[str, Any]:
    """Returns the options of the store for `capacity` rows."""
    path, budget = flags.persistent_path, flags.cache_memory_budget_mb
    if flags.store_type == "device_mem":
        return one_embedding.make_device_mem_store_options(path, capacity=capacity)
    if flags.store_type == "cached_host_mem":
        return one_embedding.make_cached_host_mem_store_options(budget, path, capacity=capacity)
    return one_embedding.make_cached_ssd_store_options(budget, path, capacity=capacity)


def uniform_tables(rows: list[int]) -> list[dict[str, Any]]:
    """Returns the options of tables whose initial vectors depend on their numbers of ids."""
    return [
        one_embedding.make_table_options(
            one_embedding.make_uniform_initializer(low=-(count**-0.5), high=count**-0.5)
        )
        for count in rows
    ]


def open_data(
    flags: argparse.Namespace, size: int, count: int, test_size: int, test_count: int
) -> tuple[clicks.Batches, clicks.Batches]:
    """Opens the batches of training and of the test."""
    if flags.data_dir is not None:
        return (
            clicks.parquet_batches(flags.data_dir / "train", size),
            clicks.parquet_batches(flags.data_dir / "test", test_size),
        )
    rows = flags.table_size_array
    return (
        clicks.synthetic_batches(rows, size, count, 0, flags.seed),
        clicks.synthetic_batches(rows, test_size, test_count, FIRST_TEST_SAMPLE, flags.seed),
    )
