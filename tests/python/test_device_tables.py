"""Tables on a GPU, or on the fake one (tests/fake_gpu): var_type, tiers, errors."""

import types
import warnings

import gpu
import keras
import numpy as np
import op_helpers as h
import pytest
import tensorflow as tf
from row_memory import device_memory
from tensorflow.python.framework import kernels, op_def_registry

import tf_dynemb as de
from tf_dynemb.parallel import placement
from tf_dynemb.parallel.placement import Placement
from tf_dynemb.tables.options import TableOptions

CPU = "/device:CPU:0"
GB = 2.0**-30
DIM = 4


@pytest.fixture
def device():
    """Tables on a GPU can be created."""
    if not gpu.ON:
        pytest.skip("tables are not on a GPU")


@pytest.fixture
def no_device():
    if tf.config.list_logical_devices("GPU"):
        pytest.skip("there is a GPU")


def make(**options):
    return de.DynamicVariable(**{"dimension": DIM, "initializer": "normal", "seed": 3, **options})


class TestPlace:
    def test_hybrid_without_a_gpu_is_host_memory(self, no_device):
        for var_type in ("hybrid", "host", None):
            assert make(var_type=var_type).placement == Placement(CPU, "host")

    def test_hbm_without_a_gpu_is_an_error(self, no_device):
        with pytest.raises(ValueError, match=r"var_type='hbm'.*needs a GPU"):
            make(var_type="hbm")

    @pytest.mark.parametrize("tier", ["hbm", "hybrid"])
    def test_a_device_tier_without_a_gpu_is_an_error(self, no_device, tier):
        with pytest.raises(tf.errors.FailedPreconditionError, match="GPU"):
            h.make_table(tier=tier)

    def test_the_gpu_is_the_place_of_hybrid_and_hbm(self, device):
        assert make().placement == Placement("/device:GPU:0", "hybrid")
        assert make(var_type="hbm").placement == Placement("/device:GPU:0", "hbm")
        assert make(var_type="host").placement == Placement(CPU, "host")

    def test_hybrid_on_a_cpu_is_host_memory(self, device):
        with tf.device("CPU"):
            assert make().placement.tier == "host"
            assert make(var_type="hbm").placement.tier == "hbm"

    def test_the_helper_of_tests_puts_tables_where_their_rows_are(self):
        """Otherwise they would be on the GPU of a machine that has one."""
        with tf.Graph().as_default():
            assert h.make_table(tier="host").op.device == CPU
            for tier in ("hbm", "hybrid"):
                assert h.make_table(tier=tier).op.device == ""

    def test_the_device_of_several_tables(self, monkeypatch):
        """The device that all tables share, by any of its names; otherwise the CPU."""

        def dynamic(device):
            return types.SimpleNamespace(placement=Placement(device, "hybrid"))

        def static(device):
            return types.SimpleNamespace(handle=types.SimpleNamespace(device=device))

        full = "/job:localhost/replica:0/task:0/device:GPU:0"
        gpu = [dynamic("/device:GPU:0"), static(full), static("/device:GPU:0")]
        monkeypatch.setattr(placement, "has_gpu_kernels", lambda: True)
        monkeypatch.setattr(placement.context, "num_gpus", lambda: 2)
        assert placement.common_device(gpu) == "/device:GPU:0"
        assert placement.common_device(gpu[:1]) == "/device:GPU:0"
        for other in (dynamic("/device:GPU:1"), static("/device:CPU:0"), dynamic(CPU)):
            assert placement.common_device([*gpu, other]) == CPU
        monkeypatch.setattr(placement, "has_gpu_kernels", lambda: False)
        assert placement.common_device(gpu[1:]) == CPU
        monkeypatch.setattr(placement.context, "num_gpus", lambda: 0)
        assert placement.common_device(gpu) == CPU

    def test_gpus(self, monkeypatch):
        """The choice of a GPU, with fake GPUs."""
        gpus = [tf.config.LogicalDevice(f"/device:GPU:{i}", "GPU") for i in range(2)]
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: gpus)
        monkeypatch.setattr(placement, "has_gpu_kernels", lambda: True)
        assert placement.place("hybrid") == Placement("/device:GPU:0", "hybrid")
        assert placement.place("hbm") == Placement("/device:GPU:0", "hbm")
        assert placement.place("host") == Placement(CPU, "host")
        with tf.device("CPU:0"):
            assert placement.place("hybrid") == Placement(CPU, "host")
            assert placement.place("hbm") == Placement("/device:GPU:0", "hbm")
        with tf.device("GPU:1"):
            assert placement.place("host") == Placement(CPU, "host")
            assert placement.place("hybrid").device.endswith("/device:GPU:1")
        monkeypatch.setattr(placement, "has_gpu_kernels", lambda: False)
        assert placement.place("hybrid") == Placement(CPU, "host")
        with pytest.raises(ValueError, match=r"no CUDA code.*TF_DYNEMB_CUDA=1 make build"):
            placement.place("hbm")

    def test_a_gpu_that_no_table_can_use_is_reported_once(self, monkeypatch):
        monkeypatch.setattr(placement, "has_gpu_kernels", lambda: False)
        seen = []
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: seen)
        placement._say_that_no_gpu_is_used.cache_clear()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            placement.place("hybrid")
            assert not told
            seen.append("a GPU")
            placement.place("host")
            assert not told
            placement.place("hybrid")
            placement.place("hybrid")
        (warning,) = told
        assert "sees a GPU, but this build of tf_dynemb has no CUDA code" in str(warning.message)
        assert "TF_DYNEMB_CUDA=1 make build" in str(warning.message)
        assert warning.filename == __file__
        placement._say_that_no_gpu_is_used.cache_clear()


class TestTiers:
    def test_rows_fill_the_device_tier_first(self, device):
        row = make(var_type="hbm").stats()
        assert row["device_rows"] == 0
        table = make(max_hbm_for_vectors=4096 * GB)
        table.lookup(tf.range(1000, dtype=tf.int64))
        stats = table.stats()
        assert 0 < stats["device_rows"] <= 4096 // (4 * DIM)
        assert stats["size"] == 1000
        everything = make(var_type="hbm")
        everything.lookup(tf.range(1000, dtype=tf.int64))
        assert everything.stats()["device_rows"] == 1000
        nothing = make(max_hbm_for_vectors=0)
        nothing.lookup(tf.range(1000, dtype=tf.int64))
        assert nothing.stats()["device_rows"] == 0

    def test_the_default_device_tier_has_16_gib(self):
        assert TableOptions().max_hbm_bytes in (16 << 30, gpu.HBM_BYTES)

    def test_host_tables_have_no_device_rows(self):
        table = make(var_type="host")
        table.lookup([1, 2])
        table.lookup([1, 2])
        stats = table.stats()
        assert (stats["device_rows"], stats["device_hits"], stats["promotions"]) == (0, 0, 0)

    def test_training_promotes_frequently_read_rows(self, device):
        table = make(max_hbm_for_vectors=4096 * GB)
        optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.1))
        table.lookup(tf.range(2000, dtype=tf.int64))
        often = tf.constant([1990, 1995, 1999], tf.int64)  # there is no space for them
        random = np.random.default_rng(5)
        for _ in range(30):
            ids = tf.concat([often, random.integers(0, 1900, 20)], 0)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(table.lookup(ids) ** 2)
            (gradient,) = tape.gradient(loss, [table])
            optimizer.apply_gradients([(gradient, table)])
        assert table.stats()["promotions"] > 0
        assert table.stats()["dropped_gradients"] == 0
        before = table.stats()["device_hits"]
        table.lookup(often)
        assert table.stats()["device_hits"] == before + 3


def train(tables, steps=6):
    """Returns the vectors of all tables after some steps on the same random batches."""
    optimizer = de.OptimizerWrapper(keras.optimizers.Adam(0.05))
    random = np.random.default_rng(11)
    for _ in range(steps):
        ids = [tf.constant(random.integers(0, 300, [16, 3])) for _ in tables]
        weights = [tf.constant(random.random([16, 3]), tf.float32) for _ in tables]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            pooled = de.lookup_sparse(tables, ids, weights, ["mean", "sum", "max"][: len(tables)])
            loss = tf.add_n([tf.reduce_sum(tf.sin(p)) for p in pooled])
        gradients = tape.gradient(loss, [*tables, *weights])
        assert all(g is not None for g in gradients)
        optimizer.apply_gradients(zip(gradients[: len(tables)], tables, strict=True))
    keys = tf.range(300, dtype=tf.int64)
    return [table.lookup(keys, insert=False).numpy() for table in tables], gradients[len(tables) :]


class TestTogether:
    def test_training_matches_host_tables(self, device):
        expected, weight_gradients = train([make(var_type="host", name=n) for n in "abc"])
        for var_types in (["hbm"] * 3, ["hybrid"] * 3, ["host", "hybrid", "hbm"]):
            tables = [
                make(var_type=kind, name=n, max_hbm_for_vectors=4096 * GB)
                for kind, n in zip(var_types, "abc", strict=True)
            ]
            got, got_gradients = train(tables)
            for a, b in zip(expected, got, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
            for a, b in zip(weight_gradients, got_gradients, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("unadmitted", ["zeros", "initial", "skip"])
    def test_admission_does_not_depend_on_tiers(self, device, tmp_path, unadmitted):
        """The same bags, gradients, rows and counters, which tables load from each other."""
        admissions = [
            de.Frequency(3, counters=200, unadmitted=unadmitted),
            de.Probability(0.3, unadmitted=unadmitted),
        ]
        kinds = ("host", "hybrid", "hbm")

        def pairs(kind):
            return [
                make(var_type=kind, name=n, max_hbm_for_vectors=4096 * GB, admission=a)
                for n, a in zip("ab", admissions, strict=True)
            ]

        def state(tables):
            keys = np.arange(300)
            counted = [[each.admission_count for each in t.explain(keys)] for t in tables]
            stats = [t.stats() for t in tables]
            refused = [(s["unadmitted"], s["inserts"], s["dropped_gradients"]) for s in stats]
            return counted, refused

        tables_of_kind = {kind: pairs(kind) for kind in kinds}
        expected, weight_gradients = train(tables_of_kind["host"])
        counted, refused = state(tables_of_kind["host"])
        assert all(r[0] > 0 and r[2] == 0 for r in refused)
        assert any(c for c in counted[0])
        for kind in kinds[1:]:
            got, got_gradients = train(tables_of_kind[kind])
            for a, b in zip(expected, got, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
            for a, b in zip(weight_gradients, got_gradients, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
            assert state(tables_of_kind[kind]) == (counted, refused)
        # Around in a circle.
        for n, kind in enumerate(kinds):
            de.dump(tmp_path / str(n), tables_of_kind[kind])
            other = pairs(kinds[(n + 1) % 3])
            other[0].lookup([1, 2, 3])
            de.load(tmp_path / str(n), other)
            assert state(other)[0] == counted
            for table, vectors in zip(other, expected, strict=True):
                keys = tf.range(300, dtype=tf.int64)
                got = table.lookup(keys, insert=False)
                np.testing.assert_allclose(got, vectors, rtol=1e-5, atol=1e-6)
            for table in tables_of_kind[kind]:
                table.clear()
            assert not any(state(tables_of_kind[kind])[0][0])

    @pytest.mark.parametrize(("source", "target"), [("hybrid", "host"), ("host", "hbm")])
    def test_deltas_bring_counters_to_other_tiers(self, device, tmp_path, source, target):
        def table(kind):
            admission = de.Frequency(5, counters=2000)
            return make(var_type=kind, name="t", max_hbm_for_vectors=4096 * GB, admission=admission)

        def counts(of):
            return [each.admission_count for each in of.explain(np.arange(50))]

        trained, follower = table(source), table(target)
        random = np.random.default_rng(4)
        trained.lookup(random.integers(0, 50, 100))
        mark = de.dump(tmp_path, trained)
        de.load(tmp_path, [follower])
        assert counts(follower) == counts(trained)
        trained.lookup(random.integers(0, 50, 100))
        de.incremental_dump(tmp_path, trained, mark)
        assert counts(follower) != counts(trained)
        de.apply_delta(tmp_path, [follower])
        assert counts(follower) == counts(trained)
        # The next batches are counted in the same way.
        for ids in random.integers(0, 50, [5, 20]):
            np.testing.assert_array_equal(follower.lookup(ids), trained.lookup(ids))
        assert counts(follower) == counts(trained)

    def test_an_operator_refuses_tables_in_several_places(self, device):
        """TensorFlow does: an operator on a device cannot have the resource of another one."""
        host, hbm = h.make_table(tier="host"), h.make_table(tier="hbm")
        keys, bags = tf.constant([1], tf.int64), tf.constant(1, tf.int64)
        with pytest.raises(tf.errors.InvalidArgumentError, match="device"):
            h.lookup_sparse([host, hbm], [keys, keys], [bags, bags], [1, 1], [4, 4])
        with pytest.raises(tf.errors.InvalidArgumentError, match="device"):
            h.apply_sgd([host, hbm], [keys, keys], [np.ones([1, 4], np.float32)] * 2)
        with pytest.raises(tf.errors.InvalidArgumentError, match="device"):
            h.ops.dynemb_swap_rows([host], [hbm], 0, 0)
        assert h.size(host) == h.size(hbm) == 0

    def test_dumps_do_not_depend_on_tiers(self, device, tmp_path):
        host, hybrid = (
            make(var_type="host", name="t"),
            make(name="t", max_hbm_for_vectors=1024 * GB),
        )
        hbm = make(var_type="hbm", name="t")
        keys = tf.range(500, dtype=tf.int64)
        values = np.random.default_rng(1).normal(size=[500, DIM]).astype(np.float32)
        de.assign(hybrid, keys, values)
        de.dump(tmp_path / "a", [hybrid])
        de.load(tmp_path / "a", [host])
        de.dump(tmp_path / "b", [host])
        de.load(tmp_path / "b", [hbm])
        np.testing.assert_array_equal(hbm.lookup(keys, insert=False), values)
        assert hbm.stats()["device_rows"] == 500

    def test_three_tiers(self, device, tmp_path):
        """Rows in device memory, in host memory and in files; then no memory of the host."""
        for on_host in (100, 0):
            options = {
                "var_type": "hybrid",
                "max_hbm_for_vectors": device_memory(100, DIM),
                "max_dram_for_vectors": device_memory(on_host, DIM),
            }
            table = make(file_path=str(tmp_path / str(on_host)), **options)
            memory = make(var_type="host")
            rng = np.random.default_rng(on_host)
            for step in range(40):
                keys = rng.integers(0, 1000, 60)
                values = rng.normal(size=[60, DIM]).astype(np.float32)
                for one in (table, memory):
                    one.upsert(keys, values) if step % 2 else one.lookup(keys)
                np.testing.assert_array_equal(table.lookup(keys), memory.lookup(keys))
            stats = table.stats()
            assert stats["device_rows"] == 100
            assert stats["file_rows"] == len(table) - 100 - on_host > 0
            assert stats["file_hits"] > 0
            tiers = [row.tier for row in table.explain(range(1000)) if row.tier is not None]
            assert [tiers.count(tier) for tier in ("device", "host")] == [100, on_host]
            keys = np.arange(1000)
            np.testing.assert_array_equal(table.contains(keys), memory.contains(keys))
            found = [one.lookup(keys[:50], insert=False) for one in (table, memory)]
            np.testing.assert_array_equal(*found)

    @pytest.mark.parametrize("kind", ["memory", "catch_up", "files"])
    @pytest.mark.parametrize("changes", [False, True])
    def test_evicted_rows_are_where_the_table_is(self, device, tmp_path, kind, changes):
        """They were in the table before the call, and are not afterwards."""
        most, memory = 300, {"max_hbm_for_vectors": 4000 * GB}
        if kind == "files":
            memory |= {"file_path": str(tmp_path / "files"), "max_dram_for_vectors": 4000 * GB}
        table = make(evict_strategy="score", max_capacity=most, name="t", **memory)
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer = de.OptimizerWrapper(inner, catch_up=kind == "catch_up")
        for ids in np.split(np.arange(most), 3):
            table.upsert(ids, np.ones([len(ids), DIM]), scores=ids)
        for ids in (range(120), range(50, 80), range(3)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(table.lookup(list(ids)))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        if changes:  # deletions are recorded
            de.dump(tmp_path / "chain", [table])

        def content():
            rows = [np.asarray(column) for column in table.export_if()]
            return {row[0]: row[1:] for row in zip(*rows, strict=True)}

        @tf.function
        def traced(keys):
            return table.insert_and_evict(keys, scores=tf.ones_like(keys) * 1000)

        left = set()
        for call in (table.insert_and_evict, traced):
            for first, n in ((len(left) + 1000, 90), (1000, 9), (len(left) + 2000, 120)):
                before, new = content(), np.arange(first, first + n)
                gone = call(tf.constant(new))
                assert all("GPU" in column.device for column in gone)
                gone = [column.numpy() for column in gone]
                keys = gone[0].tolist()
                assert keys == sorted(keys)
                assert len(keys) == len(set(new) - before.keys())
                for key, *row in zip(*gone, strict=True):
                    for got, wanted in zip(row, before[key], strict=True):
                        np.testing.assert_array_equal(got, wanted)
                assert content().keys() == (before.keys() | set(new)) - set(keys)
                left |= set(keys)
        assert len(left) > most
        if changes:
            de.incremental_dump(tmp_path / "chain", [table])
            other = make(name="t")
            de.load(tmp_path / "chain", [other], quiet=True)
            assert sorted(other.export_if().keys.numpy()) == sorted(content())

    def test_files_without_memory_need_a_device(self, tmp_path):
        with tf.device("CPU"), pytest.raises(ValueError, match=r"max_dram_for_vectors=0 .*GPU"):
            make(file_path=str(tmp_path), max_dram_for_vectors=0)

    def test_one_dump_of_tables_in_several_places(self, device, tmp_path):
        tables = [make(var_type=kind, name=kind) for kind in ("host", "hybrid", "hbm")]
        for i, table in enumerate(tables):
            de.assign(table, [i, 7], np.full([2, DIM], i, np.float32))
        de.dump(tmp_path, tables)
        others = [make(var_type=kind, name=kind) for kind in ("host", "hybrid", "hbm")]
        de.load(tmp_path, others)
        for i, table in enumerate(others):
            np.testing.assert_array_equal(table.lookup([7, i]), np.full([2, DIM], i))


@pytest.mark.skipif(not placement.has_gpu_kernels(), reason="a build without CUDA")
def test_gpu_kernels_declare_their_arguments_in_host_memory():
    found, on_tables = {}, set()
    for name, operator in operators():
        if any(argument.name in ("handle", "handles") for argument in operator.input_arg):
            on_tables.add(name)
        for kernel in kernels.get_registered_kernels_for_op(name).kernel:
            if kernel.device_type == "GPU":
                found[name] = set(kernel.host_memory_arg)
    # These operators run on a CPU, wherever their tables are.
    assert on_tables - found.keys() == {"DynembSnapshot", "DynembSwapRows"}
    # TensorFlow 2.18 and 2.19 lack headers for exchanges on GPUs (cc/tf/ranks/on_gpu.h).
    has_exchanges = tuple(map(int, tf.__version__.split(".")[:2])) >= (2, 20)
    of_ranks = {"DynembRanksAlltoall", "DynembRanksAllgather"} if has_exchanges else set()
    assert found.keys() - on_tables == of_ranks | {
        "DynembTable",
        "DynembServedTable",
        "DynembLookupSparseGrad",
        "DynembDedupSum",
        "DynembRoute",
        "DynembReceiveKeys",
        "DynembPackRows",
        "DynembUnpackRows",
        "DynembPoolRowsGrad",
        "DynembPoolRowsWeightGrad",
        "DynembSumReceived",
        "DynembOwners",
        "DynembExchangeStats",
    }
    for name in on_tables & found.keys():
        assert found[name] & {"handle", "handles"}
    # All arguments of operators on files.
    for name, operator in operators():
        if "Served" in name or name == "DynembApplySnapshots":
            given = [*operator.input_arg, *operator.output_arg]
            assert found[name] == {argument.name for argument in given}
    assert found["DynembTable"] == {"handle"}
    assert found["DynembLookupSparse"] == {"handles", "bags", "num_bags"}
    assert found["DynembLookupSparseGrad"] == {"bags"}
    assert found["DynembApplyGradients"] == {"handles", "hyper", "step"}
    assert found["DynembApplyPooledGradients"] == {"handles", "bags", "hyper", "step"}
    assert found["DynembWriteRows"] == {"handle", "step"}
    assert found["DynembAttachState"] == {"handle", "was_reset"}
    assert found["DynembRoute"] == {"splits", "counts"}
    assert found["DynembReceiveKeys"] == {"splits", "counts"}
    assert found["DynembPackRows"] == {"splits", "counts"}
    assert found["DynembUnpackRows"] == {"counts", "sent"}
    if has_exchanges:
        assert found["DynembRanksAlltoall"] == {"group", "splits", "received_splits"}
        assert found["DynembRanksAllgather"] == {"group"}
    counts = {"received", "sent", "asked", "served"}
    assert found["DynembPoolRows"] == {"handles", "bags", "num_bags"} | counts
    assert found["DynembPoolRowsGrad"] == {"bags", "counts", "splits"}
    assert found["DynembPoolRowsWeightGrad"] == {"bags", "received", "sent"}
    assert found["DynembSumReceived"] == {"counts"}


def operators():
    """Yields (name, OpDef) of each operator."""
    for function in dir(h.ops):
        name = "".join(part.title() for part in function.split("_"))
        operator = op_def_registry.get(name)
        # The module also has names of other libraries, such as typing.Any, TensorFlow's "Any".
        if operator is not None and name.startswith("Dynemb"):
            yield name, operator
