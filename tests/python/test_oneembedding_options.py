"""OneEmbedding's functions that make options: signatures, forms, checks, and tables for a store."""

import inspect
import math
import pathlib

import gpu
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb.oneembedding as oe
from tf_dynemb.oneembedding import places
from tf_dynemb.oneembedding.stores import Store
from tf_dynemb.parallel.ownership import capacity_share

UNIFORM = {"type": "uniform", "low": -0.5, "high": 0.5}


def device_mem(**changes):
    return oe.make_device_mem_store_options(**{"persistent_path": "p", "capacity": 100, **changes})


def cached_host_mem(**changes):
    options = {"cache_budget_mb": 64, "persistent_path": "p", "capacity": 100, **changes}
    return oe.make_cached_host_mem_store_options(**options)


def cached_ssd(**changes):
    options = {"cache_budget_mb": 64, "persistent_path": "p", **changes}
    return oe.make_cached_ssd_store_options(**options)


def embedding(**changes):
    options = {
        "name": "e",
        "embedding_dim": 4,
        "dtype": "float32",
        "key_type": "int64",
        "tables": None,
        "store_options": cached_host_mem(),
        **changes,
    }
    return oe.MultiTableEmbedding(**options)


# The parameters of OneFlow 1.0, with their defaults.
STORE_END = [("size_factor", 1), ("storage_dim", -1), ("physical_block_size", 4096)]
NONE = inspect.Parameter.empty
LAYER = ["name", "embedding_dim", "dtype", "key_type", "tables", "store_options"]
SIGNATURES = {
    "make_uniform_initializer": [("low", 0.0), ("high", 1.0)],
    "make_normal_initializer": [("mean", 0.0), ("std", 1.0)],
    "make_trunc_normal_initializer": [("mean", 0.0), ("std", 1.0), ("a", -2.0), ("b", 2.0)],
    "make_constant_initializer": [("value", NONE)],
    "make_table_options": [("param", NONE)],
    "make_table": [("param", NONE)],
    "make_column_options": [("initializer", NONE)],
    "make_device_mem_store_options": [("persistent_path", NONE), ("capacity", NONE), *STORE_END],
    "make_cached_host_mem_store_options": [
        ("cache_budget_mb", NONE),
        ("persistent_path", NONE),
        ("capacity", NONE),
        *STORE_END,
    ],
    "make_cached_ssd_store_options": [
        ("cache_budget_mb", NONE),
        ("persistent_path", NONE),
        ("capacity", None),
        *STORE_END,
        ("host_cache_budget_mb", 0),
    ],
    "MultiTableEmbedding": [
        *[(name, NONE) for name in LAYER],
        ("default_initializer", None),
        ("padding_idx", None),
        ("seed", 0),
    ],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_as_in_oneflow(name):
    parameters = inspect.signature(getattr(oe, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == SIGNATURES[name]


def test_options_have_the_form_of_oneflow():
    assert oe.make_uniform_initializer(-1, 2) == {"type": "uniform", "low": -1.0, "high": 2.0}
    assert oe.make_normal_initializer(1, 2) == {"type": "normal", "mean": 1.0, "std": 2.0}
    assert oe.make_constant_initializer(3) == {"type": "constant", "value": 3.0}
    cut = oe.make_trunc_normal_initializer()
    assert cut == {"type": "trunc_normal", "mean": 0.0, "std": 1.0, "a": -2.0, "b": 2.0}
    column = oe.make_column_options(UNIFORM)
    assert column == {"initializer": UNIFORM}
    assert oe.make_table_options(UNIFORM) == oe.make_table(UNIFORM) == {"initializer": UNIFORM}
    assert oe.make_table_options([column]) == {"columns": [column]}
    full = {"policy": "full", "capacity": 100}
    lru = {"policy": "lru", "cache_memory_budget_mb": 64}
    assert device_mem() == {
        "kv_store": {
            "caches": [{**full, "value_memory_kind": "device"}],
            "persistent_table": {"path": "p", "physical_block_size": 4096, "capacity_hint": 100},
        },
        "size_factor": 1,
        "storage_dim": -1,
    }
    options = cached_host_mem(size_factor=3, physical_block_size=512, storage_dim=12)
    assert options["kv_store"]["caches"] == [
        {**lru, "value_memory_kind": "device"},
        {**full, "value_memory_kind": "host"},
    ]
    assert options["kv_store"]["persistent_table"]["physical_block_size"] == 512
    assert (options["size_factor"], options["storage_dim"]) == (3, 12)
    caches = cached_ssd(host_cache_budget_mb=64)["kv_store"]["caches"]
    assert caches == [{**lru, "value_memory_kind": kind} for kind in ("device", "host")]
    table = cached_ssd(persistent_path=["a", pathlib.Path("b")])["kv_store"]["persistent_table"]
    assert table == {"path": ["a", "b"], "physical_block_size": 4096, "capacity_hint": 0}


@pytest.mark.parametrize("make", [device_mem, cached_host_mem, cached_ssd])
@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        ({"persistent_path": 3}, TypeError, "persistent_path.*3"),
        ({"persistent_path": ["a", None]}, TypeError, "persistent_path.*None"),
        ({"persistent_path": ""}, ValueError, "persistent_path must not be empty"),
        ({"persistent_path": []}, ValueError, "persistent_path is an empty list"),
        ({"capacity": 0}, ValueError, "capacity.*0"),
        ({"capacity": -4}, ValueError, "capacity.*-4"),
        ({"capacity": 2.5}, TypeError, "capacity.*2.5"),
        ({"capacity": True}, TypeError, "capacity.*True"),
        ({"capacity": "many"}, TypeError, "capacity.*many"),
        ({"size_factor": 0}, ValueError, "size_factor.*0"),
        ({"size_factor": None}, TypeError, "size_factor.*None"),
        ({"storage_dim": -2}, ValueError, "storage_dim.*-2"),
        ({"storage_dim": "8"}, TypeError, "storage_dim.*8"),
        ({"physical_block_size": 1024}, ValueError, "physical_block_size.*512 or 4096.*1024"),
    ],
    ids=str,
)
def test_bad_options_of_a_store(make, changes, error, names):
    with pytest.raises(error, match=names):
        make(**changes)


@pytest.mark.parametrize(
    ("make", "changes", "error", "names"),
    [
        (device_mem, {"capacity": None}, TypeError, "capacity.*None"),
        (cached_host_mem, {"cache_budget_mb": 0}, ValueError, "cache_budget_mb.*0"),
        (cached_host_mem, {"cache_budget_mb": "8"}, TypeError, "cache_budget_mb.*8"),
        (cached_host_mem, {"cache_budget_mb": math.inf}, ValueError, "cache_budget_mb.*inf"),
        (cached_ssd, {"cache_budget_mb": -1}, ValueError, "cache_budget_mb.*-1"),
        (cached_ssd, {"cache_budget_mb": 0}, ValueError, "cache_budget_mb and host_cache_budget"),
        (cached_ssd, {"host_cache_budget_mb": -1}, ValueError, "host_cache_budget_mb.*-1"),
        (cached_ssd, {"host_cache_budget_mb": True}, TypeError, "host_cache_budget_mb.*True"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_bad_budgets(make, changes, error, names):
    with pytest.raises(error, match=names):
        make(**changes)


@pytest.mark.parametrize(
    ("make", "error", "names"),
    [
        (lambda: oe.make_uniform_initializer(1, 0), ValueError, "low=1.0 is above high=0.0"),
        (lambda: oe.make_uniform_initializer("0", 1), TypeError, "low.*'0'"),
        (lambda: oe.make_uniform_initializer(0, math.nan), ValueError, "high.*nan"),
        (lambda: oe.make_normal_initializer(0, -1), ValueError, "std=-1.0"),
        (lambda: oe.make_normal_initializer(None, 1), TypeError, "mean.*None"),
        (lambda: oe.make_constant_initializer(math.inf), ValueError, "value.*inf"),
        (lambda: oe.make_constant_initializer(True), TypeError, "value.*True"),
        (lambda: oe.make_trunc_normal_initializer(0, 1, -1, 1), ValueError, "a=-1.0, b=1.0.*-2, 2"),
        (lambda: oe.make_trunc_normal_initializer(0, 1, -2, 9), ValueError, "a=-2.0, b=9.0"),
        (lambda: oe.make_table_options("uniform"), TypeError, "param.*uniform"),
        (lambda: oe.make_table_options([]), ValueError, "columns of param.*\\[\\]"),
        (lambda: oe.make_table_options([UNIFORM]), TypeError, "column 0 of param"),
        (lambda: oe.make_table_options({"type": "xavier"}), ValueError, "type.*xavier"),
        (
            lambda: oe.make_table_options({"type": "normal", "std": 1}),
            ValueError,
            "needs mean, std",
        ),
        (lambda: oe.make_column_options(0.5), TypeError, "initializer.*0.5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_initializers(make, error, names):
    with pytest.raises(error, match=names):
        make()


TABLE = {"initializer": UNIFORM}
COLUMNS = {"columns": [TABLE, TABLE]}
OTHER_STORE = device_mem()
OTHER_STORE["kv_store"]["caches"] *= 2
OTHER_BLOCKS = device_mem()
OTHER_BLOCKS["kv_store"]["persistent_table"]["physical_block_size"] = 64


@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        ({"name": ""}, TypeError, "name.*''"),
        ({"name": None}, TypeError, "name.*None"),
        ({"name": ".."}, ValueError, "name must be the name of a folder, got '..'"),
        ({"name": "a/b"}, ValueError, "name must be the name of a folder, got 'a/b'"),
        ({"embedding_dim": 0}, ValueError, "embedding_dim.*0"),
        ({"embedding_dim": "4"}, TypeError, "embedding_dim.*'4'"),
        ({"embedding_dim": [4]}, TypeError, r"embedding_dim.*\[4\].*MultiColumn"),
        ({"dtype": "float64"}, TypeError, "dtype.*float64"),
        ({"dtype": 3.5}, TypeError, "dtype.*3.5"),
        ({"key_type": "int16"}, TypeError, "key_type.*int16"),
        ({"key_type": None}, TypeError, "key_type.*None"),
        ({"tables": []}, ValueError, "tables is empty"),
        ({"tables": TABLE}, TypeError, "tables must be a list"),
        ({"tables": [TABLE, UNIFORM]}, TypeError, r"tables\[1\].*make_table_options"),
        ({"tables": [{**TABLE, **COLUMNS}]}, TypeError, r"tables\[0\]"),
        ({"tables": [COLUMNS]}, ValueError, r"tables\[0\] has 2 columns.*has 1: \[4\]"),
        ({"tables": [{"initializer": 1}]}, TypeError, r"the initializer of tables\[0\].*1"),
        ({"store_options": None}, TypeError, "store_options.*None"),
        ({"store_options": {"kv_store": 3}}, TypeError, "store_options.*kv_store"),
        ({"store_options": OTHER_STORE}, ValueError, "store_options has a combination"),
        ({"store_options": OTHER_BLOCKS}, ValueError, "physical_block_size.*64"),
        (
            {"store_options": device_mem(persistent_path=["a", "b"])},
            ValueError,
            r"each of the 1 rank\(s\), got \['a', 'b'\]",
        ),
        ({"default_initializer": "normal"}, TypeError, "default_initializer.*normal"),
        ({"padding_idx": 0.5}, TypeError, "padding_idx.*0.5"),
        ({"key_type": "int32", "padding_idx": 2**31}, ValueError, "2147483648 is not a int32"),
        ({"seed": None}, TypeError, "seed.*None"),
        ({"no_such": 3}, ValueError, "no_such=3"),
    ],
    ids=str,
)
def test_bad_arguments_of_a_layer(changes, error, names):
    with pytest.raises(error, match=names):
        embedding(**changes)


def test_columns_need_widths():
    with pytest.raises(ValueError, match="embedding_dim is an empty list"):
        oe.MultiTableMultiColumnEmbedding("e", [], "float32", "int64", None, cached_host_mem())
    with pytest.raises(ValueError, match=r"tables\[0\] has 2 columns.*has 3: \[1, 2, 3\]"):
        oe.MultiTableMultiColumnEmbedding(
            "e", [1, 2, 3], "float32", "int64", [COLUMNS], cached_host_mem()
        )


def test_options_that_a_user_keeps_are_not_changed():
    """OneFlow's constructor changes the dicts that it gets."""
    tables, store = [oe.make_table_options(UNIFORM)] * 2, device_mem()
    with pytest.warns(UserWarning, match="no GPU"):
        layer = embedding(tables=tables, store_options=store)
    assert tables == [{"initializer": UNIFORM}] * 2
    assert store == device_mem()
    store["size_factor"] = 7
    assert layer.get_config()["store_options"] == device_mem()


@pytest.mark.parametrize("dtype", [tf.float16, np.float16, np.dtype("float16"), "float16", "half"])
@pytest.mark.parametrize("key_type", [tf.int32, np.int32, np.dtype("int32"), "int32"])
def test_types_by_name_or_of_a_library(dtype, key_type):
    layer = embedding(dtype=dtype, key_type=key_type)
    assert layer.tables[0].dtype == tf.float16
    assert layer.tables[0].key_type == tf.int32
    assert layer(np.array([1, 2], np.int32)).dtype == tf.float16


def test_numbers_of_numpy():
    scale = np.sqrt(1 / np.array([7]))[0]
    initializer = oe.make_uniform_initializer(low=-scale, high=scale)
    assert {type(number) for number in initializer.values()} == {str, float}
    store = device_mem(capacity=np.sum(np.array([40, 60])))
    assert store == device_mem(capacity=100.0) == device_mem()
    assert type(store["kv_store"]["caches"][0]["capacity"]) is int


def test_options_written_by_hand():
    """In OneFlow's form, with values that JSON cannot express."""
    by_hand = {
        "kv_store": {
            "caches": {"policy": "full", "capacity": np.int64(9), "value_memory_kind": "device"},
            "persistent_table": {"path": pathlib.Path("p")},
        },
        "size_factor": 1,
    }
    with pytest.warns(UserWarning, match="no GPU"):
        layer = embedding(store_options=by_hand)
    assert layer.tables[0].options.max_capacity == 9
    with pytest.warns(UserWarning, match="no GPU"):
        copy = oe.MultiTableEmbedding.from_config(layer.get_config())
    assert copy.tables[0].options.max_capacity == 9


def test_a_rank_has_room_for_its_share():
    """No draw of many exceeds the room, which is far less than the whole capacity."""
    rng = np.random.default_rng(1)
    for ranks in (2, 8):
        for capacity in (1, 10, 1000, 10**6):
            room = capacity_share(capacity, ranks)
            assert -(-capacity // ranks) <= room <= capacity
            assert (rng.binomial(capacity, 1 / ranks, 10_000) <= room).all()
            if capacity >= 1000:
                assert room <= 1.6 * capacity / ranks
    assert capacity_share(100, 1) == 100


def test_tables_of_each_store(tmp_path):
    """Budgets are of all tables together, in MB of 2^20 bytes; options of tables are in 2^30."""
    limits = {"max_capacity": 100, "evict_strategy": "none"}
    host_options = places.table_options(Store.of(cached_host_mem(), 1), "e", 2, 0, 1)
    assert host_options == [{"var_type": "hybrid", "max_hbm_for_vectors": 32 / 1024, **limits}] * 2
    with pytest.warns(UserWarning, match="'e' in GPU memory, but there is no GPU"):
        device_options = places.table_options(Store.of(device_mem(), 1), "e", 2, 0, 1)
    assert device_options == [{"var_type": "host", **limits}] * 2
    file_options = places.table_options(Store.of(cached_ssd(capacity=5), 4), "e", 2, 3, 4)
    assert file_options == [
        {
            "var_type": "file",
            "file_path": f"p/3-4/e/table_{i}",
            "max_dram_for_vectors": 32 / 1024,
        }
        for i in range(2)
    ]
    both = Store.of(cached_ssd(host_cache_budget_mb=128, persistent_path=["x", "y"]), 2)
    (table,) = places.table_options(both, "e", 1, 1, 2)
    assert table["file_path"] == "y/e/table_0"
    assert table["max_dram_for_vectors"] == 128 / 1024


@pytest.mark.skipif(not gpu.ON, reason="tables are not on a GPU")
def test_tables_in_gpu_memory():
    layer = embedding(store_options=device_mem())
    assert layer.tables[0].placement.tier == "hbm"
    layer = embedding(store_options=cached_host_mem(), tables=[TABLE] * 2)
    assert {table.placement.tier for table in layer.tables} == {"hybrid"}
    assert {table.options.max_hbm_bytes for table in layer.tables} == {32 * 2**20}
    one, both = cached_ssd(capacity=5), cached_ssd(host_cache_budget_mb=128)
    host = oe.make_cached_ssd_store_options(0, "p", host_cache_budget_mb=128)
    for store, in_gpu, in_host in ((one, 64, 0), (both, 64, 128), (host, None, 128)):
        (table,) = places.table_options(Store.of(store, 1), "e", 1, 0, 1)
        assert table["var_type"] == ("file" if in_gpu is None else "hybrid")
        assert table.get("max_hbm_for_vectors") == (in_gpu and in_gpu / 1024)
        assert table["max_dram_for_vectors"] == in_host / 1024
    with tf.device("CPU"), pytest.warns(UserWarning, match="they are in host memory"):
        layer = embedding(store_options=device_mem())
    assert layer.tables[0].placement.tier == "host"


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("Ftrl", "OptimizerWrapper"),
        ("Optimizer", "OptimizerWrapper"),
        ("SmartDecayAdam", "catch_up=True"),
        ("make_persistent_table_reader", "serving.Reader"),
        ("make_persistent_table_writer", "tf_dynemb.assign"),
    ],
)
def test_the_error_for_a_name_that_is_not_here_says_what_to_use(name, instead):
    with pytest.raises(AttributeError, match=f"has no {name}: .*{instead}"):
        getattr(oe, name)
    with pytest.raises(AttributeError, match="has no attribute 'frob'"):
        oe.frob  # noqa: B018
