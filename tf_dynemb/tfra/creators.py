"""TFRA's creators of tables: here they only describe the size of a table."""

from __future__ import annotations

import enum
from typing import Any


class HkvEvictStrategy(enum.IntEnum):
    """The eviction strategies of HierarchicalKV."""

    LRU = 0
    LFU = 1
    EPOCHLRU = 2
    EPOCHLFU = 3
    CUSTOMIZED = 4


_STRATEGIES = {
    HkvEvictStrategy.LRU: "lru",
    HkvEvictStrategy.LFU: "lfu",
    HkvEvictStrategy.EPOCHLRU: "epoch_lru",
    HkvEvictStrategy.EPOCHLFU: "epoch_lfu",
    HkvEvictStrategy.CUSTOMIZED: "score",
}


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
        max_capacity: the maximum number of rows; a full table evicts rows, by `evict_strategy`.
            None: no limit. (TFRA's default is 2^20.)
        max_hbm_for_values: the bytes of GPU memory for rows. None: as in `TableOptions`.
        evict_strategy: which rows a full table evicts. `TableOptions.evict_strategy` describes the
            strategies; CUSTOMIZED is "score".
        step_per_epoch: the number of training steps in an epoch of EPOCHLRU or EPOCHLFU. 0: epochs
            begin with `advance_epoch()` of the table only.
        gen_scores_fn: not supported: None. Set scores with `set_scores` of the table.
        reserved_key_start_bit: unused: every key is legal.

    Raises:
        NotImplementedError: `gen_scores_fn` is given.
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
        if gen_scores_fn is not None:
            raise NotImplementedError(
                "gen_scores_fn is not supported: pass scores to insert_or_assign, or set them with "
                "set_scores."
            )
        self.step_per_epoch = step_per_epoch
        self.init_capacity = init_capacity
        self.max_capacity = max_capacity
        self.max_hbm_for_values = max_hbm_for_values
        self.evict_strategy = strategy

    def table_options(self) -> dict[str, Any]:
        """Returns the configuration as fields of `TableOptions`."""
        options: dict[str, Any] = {"evict_strategy": _STRATEGIES[self.evict_strategy]}
        if self.step_per_epoch:
            options["epoch_steps"] = self.step_per_epoch
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

    def __init__(
        self,
        config: CuckooHashTableConfig | HkvHashTableConfig | None = None,
        saver: FileSystemSaver | None = None,
    ) -> None:
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
