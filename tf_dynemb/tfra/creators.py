"""TFRA's creators of tables: here they only describe the size of a table."""

from __future__ import annotations

import enum
from typing import Any


class HkvEvictStrategy(enum.IntEnum):
    """The eviction strategies of HierarchicalKV; LRU is supported."""

    LRU = 0
    LFU = 1
    EPOCHLRU = 2
    EPOCHLFU = 3
    CUSTOMIZED = 4


class FileSystemSaver:
    """TFRA's request to keep rows in separate files beside a checkpoint.

    It is accepted and has no effect: checkpoints here contain the rows, and
    `Variable.save_to_file_system` writes TFRA's files.

    Args:
        proc_size: unused, like the others.
        proc_rank: unused.
        save_path: unused.
        buffer_size: unused.
    """

    def __init__(
        self,
        proc_size: int | None = None,
        proc_rank: int | None = None,
        save_path: str | None = None,
        buffer_size: int = 4096,
    ) -> None:
        self.proc_size = proc_size
        self.proc_rank = proc_rank
        self.save_path = save_path
        self.buffer_size = buffer_size


class CuckooHashTableConfig:
    """The configuration of a cuckoo hash table: TFRA has no options in it."""


class HkvHashTableConfig:
    """The size of a table that TFRA keeps in HierarchicalKV.

    Args:
        init_capacity: the number of rows to allocate at the start.
        max_capacity: the maximum number of rows; the least recently used rows are evicted. None: no
            limit. (TFRA's default is 2^20.)
        max_hbm_for_values: the bytes of GPU memory for rows. None: as in `TableOptions`.
        evict_strategy: `HkvEvictStrategy.LRU`.
        step_per_epoch: not supported: 0.
        gen_scores_fn: not supported: None.
        reserved_key_start_bit: unused: every key is legal.

    Raises:
        NotImplementedError: another strategy, `step_per_epoch` or `gen_scores_fn` is given.
    """

    def __init__(
        self,
        init_capacity: int | None = None,
        max_capacity: int | None = None,
        max_hbm_for_values: int | None = None,
        evict_strategy: HkvEvictStrategy = HkvEvictStrategy.LRU,
        step_per_epoch: int = 0,
        gen_scores_fn: Any = None,
        reserved_key_start_bit: int = 0,
    ) -> None:
        strategy = HkvEvictStrategy(evict_strategy)
        if strategy is not HkvEvictStrategy.LRU or step_per_epoch or gen_scores_fn is not None:
            raise NotImplementedError(
                f"evict_strategy={strategy.name} is not supported: a full table evicts the least "
                "recently used rows (LRU), without step_per_epoch and gen_scores_fn."
            )
        self.init_capacity = init_capacity
        self.max_capacity = max_capacity
        self.max_hbm_for_values = max_hbm_for_values
        self.evict_strategy = strategy

    def table_options(self) -> dict[str, Any]:
        """Returns the configuration as fields of `TableOptions`."""
        options: dict[str, Any] = {}
        if self.init_capacity:
            options["init_capacity"] = self.init_capacity
        if self.max_capacity is not None:
            options["max_capacity"] = self.max_capacity
        if self.max_hbm_for_values is not None:
            options["max_hbm_for_vectors"] = self.max_hbm_for_values / 2**30
        return options


class KVCreator:
    """The base of the creators.

    Args:
        config: the configuration.
        saver: a `FileSystemSaver`, which has no effect.
    """

    def __init__(self, config: Any = None, saver: Any = None) -> None:
        self.config = config
        self.saver = saver

    def table_options(self) -> dict[str, Any]:
        """Returns the fields of `TableOptions` that the creator sets."""
        return {}


def table_options_of(creator: Any) -> dict[str, Any]:
    """Returns the fields of `TableOptions` that a creator sets; raises TypeError for others."""
    if not isinstance(creator, KVCreator):
        raise TypeError(
            "kv_creator must be a CuckooHashTableCreator or an HkvHashTableCreator of "
            f"tf_dynemb.tfra, got {creator!r:.80}."
        )
    return creator.table_options()


class CuckooHashTableCreator(KVCreator):
    """A table in host memory, or on a GPU if `devices` says so, without a limit."""


class HkvHashTableCreator(KVCreator):
    """A table with the size of an `HkvHashTableConfig`; without one, a table without a limit."""

    def table_options(self) -> dict[str, Any]:
        """Returns the fields of `TableOptions` that the configuration sets."""
        if self.config is None:
            return {}
        if not isinstance(self.config, HkvHashTableConfig):
            raise TypeError(f"config must be an HkvHashTableConfig, got {self.config!r:.80}.")
        return self.config.table_options()
