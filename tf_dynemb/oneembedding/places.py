"""The options of tables for a store: the one place that maps OneEmbedding's stores to ours."""

from __future__ import annotations

import os
from typing import Any

from tf_dynemb._warn import warn
from tf_dynemb.oneembedding.stores import Store
from tf_dynemb.parallel.placement import place

_MB_PER_GB = 1024


def table_options(
    store: Store, name: str, tables: int, rank: int, ranks: int
) -> list[dict[str, Any]]:
    """Returns the options of each table of an embedding, as in `TableOptions`.

    Args:
        store: the store of the embedding.
        name: the name of the embedding.
        tables: the number of its tables.
        rank: the number of this rank.
        ranks: the number of ranks.
    """
    options: dict[str, Any] = {}
    if store.capacity is not None:
        # OneEmbedding evicts nothing.
        options = {"max_capacity": store.capacity, "evict_strategy": "none"}
    if store.kind == "device_mem":
        has_gpu = place("hybrid").tier != "host"
        if not has_gpu:
            warn(
                f"make_device_mem_store_options keeps the rows of {name!r} in GPU memory, but "
                "there is no GPU: they are in host memory."
            )
        return [{"var_type": "hbm" if has_gpu else "host", **options}] * tables
    device_gb, host_gb = (mb / _MB_PER_GB / tables for mb in (store.device_mb, store.host_mb))
    if store.kind == "cached_host_mem":
        return [{"var_type": "hybrid", "max_hbm_for_vectors": device_gb, **options}] * tables
    folder = os.path.join(store.folder_of_rank(rank, ranks), name)
    if store.device_mb and place("hybrid").tier != "host":
        options |= {"var_type": "hybrid", "max_hbm_for_vectors": device_gb}
    else:
        options |= {"var_type": "file"}
        host_gb = host_gb or device_gb
    return [
        {
            "file_path": os.path.join(folder, f"table_{i}"),
            "max_dram_for_vectors": host_gb,
            **options,
        }
        for i in range(tables)
    ]
