"""tf_dynemb.serve: inputs, batches, sources of versions, and chains that a server follows."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import shutil
import time

from serve_helpers import ROWS, build, change, export, scores

# isort: split
import hypothesis
import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from grpc_interceptor import exceptions
from hypothesis import strategies as st

import tf_dynemb as de
from tf_dynemb.serve import rest, rpc, v1
from tf_dynemb.serve.batches import Answer, Batches
from tf_dynemb.serve.inputs import Dense, Ragged, Sparse, Tensor, collect, rows_of
from tf_dynemb.serve.loaded_model import LoadedModel, Signature, Watermark
from tf_dynemb.serve.model import Limits, Model
from tf_dynemb.serve.sources import PathSource

BODY = {"instances": ROWS}
INT64, FLOAT32, TEXT = np.dtype(np.int64), np.dtype(np.float32), np.dtype(object)
LIMITS = Limits(rows=100, elements=10_000, seconds=30.0)

BAGS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), min_size=1, max_size=6)


def ragged(levels=1):
    splits = [Tensor(f"r_{i + 1}", INT64, (None,)) for i in range(levels)]
    return Ragged("r", [Tensor("r", INT64, (None,)), *splits])


def sparse(shape=(None, None)):
    tensors = [Tensor("s", INT64, (None, 2)), Tensor("s_1", INT64, (None,))]
    return Sparse("s", [*tensors, Tensor("s_2", INT64, (2,))], shape)


def same(value, other):
    assert len(value) == len(other)
    for one, two in zip(value, other, strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)


@hypothesis.given(BAGS)
def test_bags_are_those_of_tensorflow(bags):
    expected = tf.ragged.constant(bags, dtype=tf.int64, ragged_rank=1)
    same(ragged().parse(bags), [expected.values.numpy(), expected.row_splits.numpy()])
    expected = expected.to_sparse()
    found = sparse().parse(bags)
    same(found[:2], [expected.indices.numpy(), expected.values.numpy()])
    assert found[2].tolist() == expected.dense_shape.numpy().tolist()


@hypothesis.given(st.lists(BAGS, min_size=1, max_size=4))
def test_joined_rows_are_the_rows(parts):
    whole = [bag for part in parts for bag in part]
    for each in (ragged(), sparse()):
        joined = each.join([each.parse(part) for part in parts])
        same(joined, each.parse(whole))
        assert each.rows(joined) == len(whole)
        same(each.check(joined), joined)


def test_nested_bags():
    nested = [[[1, 2], []], [], [[3]]]
    expected = tf.ragged.constant(nested, dtype=tf.int64, ragged_rank=2)
    components = [expected.flat_values, *expected.nested_row_splits]
    same(ragged(2).parse(nested), [each.numpy() for each in components])
    joined = ragged(2).join([ragged(2).parse(nested[:1]), ragged(2).parse(nested[1:])])
    same(joined, ragged(2).parse(nested))


@pytest.mark.parametrize("data", [5, [1], [[1], 2], [1, [2]], ["ab"]])
def test_bags_that_are_no_lists(data):
    for each in (ragged(), sparse()):
        with pytest.raises(ValueError, match="is a list for each row"):
            each.parse(data)


@pytest.mark.parametrize(
    ("splits", "values"),
    [
        ([0, 2**63 - 1, -2, 2], 2),
        ([0, 2], 1),
        ([1, 2], 2),
        ([0, 2, 1], 1),
        ([], 0),
        ([0, -1, 1], 1),
        ([0, 1], 2),
    ],
)
def test_row_splits_that_divide_nothing(splits, values):
    with pytest.raises(ValueError, match="do not divide"):
        ragged().check([np.zeros(values, np.int64), np.array(splits, np.int64)])


@pytest.mark.parametrize(
    ("indices", "values", "shape"),
    [
        ([[0, 0]], 2, [1, 1]),
        ([[0, 5]], 1, [1, 5]),
        ([[-1, 0]], 1, [1, 5]),
        ([[1, 0], [0, 0]], 2, [2, 5]),
        ([[0, 0], [0, 0]], 2, [2, 5]),
        ([[0, 0]], 1, [1, 6]),
        ([], 0, [-1, 5]),
    ],
)
def test_sparse_values_that_are_none(indices, values, shape):
    indices = np.reshape(np.array(indices, np.int64), [-1, 2])
    with pytest.raises(ValueError, match="is sparse, and has"):
        sparse((None, 5)).check([indices, np.zeros(values, np.int64), np.array(shape)])


@pytest.mark.parametrize(
    ("dtype", "data", "expected"),
    [
        (FLOAT32, [1, 2.5], [1, 2.5]),
        (INT64, [2**63 - 1, -(2**63)], [2**63 - 1, -(2**63)]),
        (np.dtype(np.uint64), [2**64 - 1, 1], [2**64 - 1, 1]),
        (np.dtype(np.int8), [-128, 127], [-128, 127]),
        (np.dtype(bool), [True, False], [True, False]),
        (TEXT, ["a", {"b64": "/w=="}, "é"], [b"a", b"\xff", "é".encode()]),
        (np.dtype(np.float16), [0.5], [0.5]),
    ],
)
def test_numbers_and_strings(dtype, data, expected):
    (found,) = Dense("x", [Tensor("x", dtype, (None,))]).parse(data)
    assert found.dtype == dtype
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "data", "message"),
    [
        (INT64, [1.0], "got float"),
        (INT64, [1, True], "got bool"),
        (FLOAT32, [1.5, False], "got bool"),
        (FLOAT32, [1e300], "out of range"),
        (np.dtype(np.float16), [1e5], "out of range"),
        (INT64, [2**63], "out of range"),
        (INT64, [2**64], "out of range"),
        (INT64, [-(2**63) - 1], "out of range"),
        (np.dtype(np.int8), [128], "out of range"),
        (np.dtype(np.uint64), [-1], "out of range"),
        (np.dtype(bool), [1], "got int"),
        (INT64, [None], "got null"),
        (FLOAT32, ["1"], "got strings"),
        (FLOAT32, [True], "got bool"),
        (FLOAT32, [[1], [2, 3]], "different shapes"),
        (FLOAT32, [[1]], "got the shape [1, 1]"),
        (FLOAT32, 5, "got the shape []"),
        (TEXT, [5], "has int where a string"),
        (TEXT, [{"b64": "x"}], "invalid base64"),
        (TEXT, [["a"], []], "different shapes"),
        (TEXT, [["a"], "b"], "different shapes"),
    ],
)
def test_values_that_do_not_fit(dtype, data, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("]", r"\]")):
        Dense("x", [Tensor("x", dtype, (None,))]).parse(data)


def test_rows_of_a_request():
    inputs = {each.name: each for each in (ragged(), Dense("x", [Tensor("x", INT64, (None,))]))}
    read = {"part": lambda t, d: t.parse(d), "whole": lambda i, d: i.parse(d)}
    assert rows_of(inputs, collect(inputs, {"r": [[1], []], "x": [1, 2]}, **read)) == 2
    with pytest.raises(ValueError, match="'r' has 1, 'x' has 2"):
        rows_of(inputs, collect(inputs, {"r": [[1]], "x": [1, 2]}, **read))


def saved(tmp_path, model, **options):
    folder = tmp_path / "saved"
    keras_model = isinstance(model, keras.Model)
    if keras_model:
        model.export(folder, verbose=False, **options)
    else:
        tf.saved_model.save(model, str(folder), **options)
    return LoadedModel(folder)


def test_a_model_without_tables(tmp_path):
    ids = keras.Input([3], dtype="int64", name="ids")
    model = keras.Model(ids, keras.layers.Flatten()(keras.layers.Embedding(50, 4)(ids)))
    loaded = saved(tmp_path, model)
    signature = loaded.signatures[loaded.default]
    assert signature.try_joining() == ""
    outputs, watermark = signature({"ids": (np.array([[1, 2, 3]]),)})
    (output,) = outputs.values()
    np.testing.assert_array_equal(output, model.predict_on_batch(np.array([[1, 2, 3]])))
    assert watermark == Watermark()
    assert loaded.stats() == {}
    with pytest.raises(ValueError, match="has no tables"):
        loaded.apply(tmp_path)


def module(function, *specs):
    made = tf.Module()
    made.answer = tf.function(function, input_signature=specs, autograph=False)
    return made


@pytest.mark.parametrize(
    ("function", "spec", "why"),
    [
        (lambda x: x / tf.reduce_sum(x), tf.TensorSpec([None]), "depends on the other rows"),
        (lambda x: tf.reduce_sum(x), tf.TensorSpec([None]), "does not have a row"),
        (lambda x: x[1:], tf.TensorSpec([None]), "does not have a row"),
        (lambda x: x, tf.TensorSpec([4]), "no free first dimension"),
        (lambda x: tf.reverse(x, [0]), tf.TensorSpec([None]), "depends on the other rows"),
        (
            lambda x: tf.strings.to_number(tf.strings.join([x, "x"])),
            tf.TensorSpec([None], tf.string),
            "refuses random rows",
        ),
    ],
)
def test_models_whose_requests_are_not_joined(tmp_path, function, spec, why):
    model = module(function, spec)
    signature = saved(tmp_path, model, signatures=model.answer).signatures["serving_default"]
    assert why in signature.try_joining()
    assert not signature.joins


def test_strings_in_and_out(tmp_path):
    model = module(lambda x: tf.strings.upper(x), tf.TensorSpec([None, 2], tf.string, "text"))
    signature = saved(tmp_path, model, signatures=model.answer).signatures["serving_default"]
    assert signature.try_joining() == ""
    values = {"text": signature.inputs["text"].parse([["a", {"b64": "/w=="}]])}
    (output,) = signature(values)[0].values()
    assert output.tolist() == [[b"A", b"\xff"]]


class FakeSignature:
    """Adds the inputs of rows, after a while; refuses the number 13."""

    joins = True
    join, differ = Signature.join, staticmethod(Signature.differ)

    def __init__(self):
        self.inputs = {"x": Dense("x", [Tensor("x", INT64, (None,))])}
        self.sizes = []

    def __call__(self, values):
        time.sleep(0.02)
        (x,) = values["x"]
        self.sizes.append(len(x))
        if 13 in x:
            raise tf.errors.InvalidArgumentError(None, None, "13 is not allowed")
        return {"y": x * 10}, Watermark()


def run_batches(requests, max_rows=100, threads=1, seconds=10.0):
    """Asks all at once; returns the answers, the sizes of batches, and what was timed."""
    signature, timed = FakeSignature(), []

    async def ask():
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            batches = Batches(signature, pool, threads, max_rows, timed.append)
            asked = [
                batches.answer({"x": (np.array(each, np.int64),)}, len(each), seconds)
                for each in requests
            ]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            while not batches.is_idle:
                await asyncio.sleep(0.01)
            return answers

    return asyncio.run(ask()), signature.sizes, timed


def test_requests_that_wait_form_one_batch():
    requests = [[n] * (n + 1) for n in range(12)]
    answers, sizes, timed = run_batches(requests)
    assert [answer.outputs["y"].tolist() for answer in answers] == [
        [10 * n] * (n + 1) for n in range(12)
    ]
    # The first one, those that came meanwhile, and one of them alone, to compare.
    assert sizes == [1, 77, 2]
    assert sum(each.rows for each in timed) == sum(map(len, requests))
    assert [len(each.queued) for each in timed] == [1, 11]


def test_a_batch_has_a_limit():
    answers, sizes, _ = run_batches([[1, 2, 3]] * 6 + [[1] * 9], max_rows=8)
    assert all(isinstance(each, Answer) for each in answers)
    # A request alone may be larger; one of each batch is compared with its answer alone.
    assert sizes == [3, 6, 3, 6, 3, 3, 9]


def test_one_wrong_request_does_not_fail_others():
    answers, _, _ = run_batches([[1], [2], [13], [3]])
    kinds = [type(each) for each in answers]
    assert kinds == [Answer, Answer, exceptions.InvalidArgument, Answer]
    assert answers[2].details == "13 is not allowed"


def test_requests_that_wait_too_long():
    answers, sizes, _ = run_batches([[n] for n in range(3)], max_rows=1, seconds=0.03)
    assert [type(each) for each in answers[1:]] == [exceptions.DeadlineExceeded] * 2
    assert len(sizes) < 3  # nobody waits for the last one


def test_requests_that_turn_out_to_depend_on_each_other(caplog):
    """The answer to a request is the one that it has alone, whatever the random rows have shown."""

    class Largest(FakeSignature):
        def __call__(self, values):
            time.sleep(0.02)
            (x,) = values["x"]
            return {"y": x / x.max()}, Watermark()

    signature = Largest()

    async def ask():
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            batches = Batches(signature, pool, 1, 100, lambda timing: None)
            asked = [batches.answer({"x": (np.array([n]),)}, 1, 10.0) for n in range(1, 8)]
            return await asyncio.gather(*asked)

    assert [answer.outputs["y"].tolist() for answer in asyncio.run(ask())] == [[1.0]] * 7
    assert not signature.joins
    assert "depends on the other rows" in caplog.text


def test_rows_of_known_keys_show_a_padded_mean(tmp_path):
    """Rows of unknown keys are all alike, so that random ids alone would show nothing."""

    class PaddedMean(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = de.layers.Embedding(1, initializer="zeros", name="table")

        def call(self, tags):
            return tf.reduce_mean(self.embedding(tags).to_tensor(), 1)

    model = PaddedMean()
    model(tf.ragged.constant([[1]], dtype=tf.int64))
    model.embedding.table.upsert(np.arange(1000, 1100), np.ones([100, 1], np.float32))
    de.export_saved_model(model, tmp_path / "model")
    loaded = LoadedModel(tmp_path / "model")
    keys = loaded.known_keys()
    assert sorted(keys) == list(range(1000, 1100))
    signature = loaded.signatures[loaded.default]
    assert "alike" in signature.try_joining()
    assert "depends on the other rows" in signature.try_joining(keys)
    assert not signature.joins


def test_a_snapshot_between_the_answers_that_are_compared(tmp_path, monkeypatch):
    trained = build()
    export(trained, tmp_path, "1", follow=None)
    change(trained, 7)
    de.incremental_dump(tmp_path / "chain", trained)
    loaded = LoadedModel(tmp_path / "models/1")
    signature = loaded.signatures[loaded.default]
    call, marks = Signature.__call__, []

    def follow(self, values):
        found = call(self, values)
        marks.append(found[1].watermark)
        loaded.apply(tmp_path / "chain")
        return found

    monkeypatch.setattr(Signature, "__call__", follow)
    assert signature.try_joining(loaded.known_keys()) == ""
    assert signature.joins
    assert marks[0] < marks[1]


def test_an_error_that_is_not_expected_tells_its_client_nothing():
    answer = rest._failure(OSError("/where/secrets/are"))
    assert (answer.status, answer.body) == (500, b'{"error":"OSError"}')
    code, text = rpc._status(OSError("/where/secrets/are"))
    assert (code.name, text) == ("INTERNAL", "OSError")


def test_a_model_whose_outputs_no_protocol_has(tmp_path):
    model = module(lambda x: tf.complex(x, x), tf.TensorSpec([None]))
    with pytest.raises(ValueError, match="is complex64"):
        saved(tmp_path, model, signatures=model.answer)


def test_limits_hold_for_requests_that_are_not_joined(tmp_path):
    trained = build()
    export(trained, tmp_path, "1")

    async def run():
        model = served(tmp_path, tmp_path / "models", joins=False)
        model._limits = LIMITS._replace(rows=2)
        await model.refresh()
        with pytest.raises(exceptions.InvalidArgument, match="3 rows; it can have 1 to 2"):
            await answer(model)
        body = {"inputs": {"users": [[1]], "tags": [[1], [2]]}}
        with pytest.raises(exceptions.InvalidArgument, match="numbers of rows"):
            await model.predict(body)
        await model.close()

    asyncio.run(run())


def test_names_that_are_versions(tmp_path):
    for name in ("3", "0010", "9", "x", "\uff19\uff19", "99999999999999999999"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "saved_model.pb").touch()
    (tmp_path / "70").symlink_to("70")  # to itself
    (tmp_path / "80").mkdir()
    names = [version.name for version in PathSource(tmp_path).versions()]
    assert names == ["99999999999999999999", "0010", "9", "3"]


def served(tmp_path, place, **options):
    pool = concurrent.futures.ThreadPoolExecutor(1)
    return Model("ctr", str(place), tmp_path / "cache", pool, 1, LIMITS, **options)


async def answer(model):
    headers = {}
    found = await model.predict(BODY, {}, headers)
    return json.loads(
        json.dumps([float(each["score"][0]) for each in found["predictions"]])
    ), headers


def check_answer(found, trained):
    np.testing.assert_allclose(found, scores(trained).ravel(), rtol=1e-5)


def test_a_model_in_a_store(tmp_path, s3):
    import fsspec

    trained = build()
    export(trained, tmp_path, "1", follow=None)
    store, root = fsspec.core.url_to_fs(s3)
    chain = f"{s3}/chain"

    def upload(version):
        store.put(f"{tmp_path}/models/{version}/", f"{root}/models/{version}/", recursive=True)

    async def run():
        model = served(tmp_path, f"{s3}/models", follow=chain)
        await model.refresh()
        assert model.loaded is None
        with pytest.raises(exceptions.Unavailable):
            await answer(model)
        upload("1")
        await model.refresh()
        assert model.version == "1"
        assert "chain" in model.watermark().error  # it is not there yet
        check_answer((await answer(model))[0], trained)
        # A chain that a trainer publishes to the store.
        de.publish(chain, from_=tmp_path / "chain")
        change(trained, 7)
        mark = de.incremental_dump(tmp_path / "chain", trained)
        de.publish(chain, from_=tmp_path / "chain")
        await model.refresh()
        assert model.watermark().error == ""
        found, headers = await answer(model)
        assert headers["x-watermark-id"] == mark.id
        check_answer(found, trained)
        # A new version, of which half is there; then all of it.
        export(trained, tmp_path, "2", follow=None)
        shutil.copytree(tmp_path / "models/2", tmp_path / "whole")
        half = tmp_path / "models/2"
        for file in half.glob("assets.extra/tf_dynemb/*/*.vectors.npy"):
            file.unlink()
        upload("2")
        await model.refresh()
        assert model.version == "1"
        assert "2" in model.failures
        check_answer((await answer(model))[0], trained)
        store.put(f"{tmp_path}/whole/", f"{root}/models/2/", recursive=True)
        await model.refresh()
        assert (model.version, model.failures) == ("2", {})
        while len(list((tmp_path / "cache/models/ctr").iterdir())) > 1:
            await asyncio.sleep(0.01)
        change(trained, 8)
        de.incremental_dump(tmp_path / "chain", trained)
        de.publish(chain, from_=tmp_path / "chain")
        await model.refresh()
        check_answer((await answer(model))[0], trained)
        await model.close()

    asyncio.run(run())


def test_a_model_that_is_exported_again(tmp_path):
    trained = build()
    export(trained, tmp_path, "")
    other = build(factor=3.0)

    async def run():
        model = served(tmp_path, tmp_path / "models")
        await model.refresh()
        first = model.loaded
        await model.refresh()
        assert model.loaded is first
        check_answer((await answer(model))[0], trained)
        shutil.rmtree(tmp_path / "chain")
        export(other, tmp_path, "")
        await model.refresh()
        assert model.loaded is not first
        check_answer((await answer(model))[0], other)
        await model.close()

    asyncio.run(run())


def test_a_version_stays_while_a_request_is_decoded(tmp_path, monkeypatch):
    trained = build()
    export(trained, tmp_path, "1")
    decode = v1.decode

    def slowly(*arguments):
        time.sleep(1)
        return decode(*arguments)

    async def run():
        model = served(tmp_path, tmp_path / "models")
        await model.refresh()
        first = model.loaded
        monkeypatch.setattr(v1, "decode", slowly)
        asked = asyncio.create_task(answer(model))
        await asyncio.sleep(0.1)
        export(trained, tmp_path, "2")
        await model.refresh()
        assert model.loaded is not first
        found, headers = await asked
        assert headers["x-model-version"] == "1"
        check_answer(found, trained)
        assert (await answer(model))[1]["x-model-version"] == "2"
        await model.close()

    asyncio.run(run())


def test_a_local_chain_to_follow(tmp_path):
    trained = build()
    export(trained, tmp_path, "3", follow=None)

    async def run():
        model = served(tmp_path, tmp_path / "models", follow=str(tmp_path / "chain"))
        await model.refresh()
        change(trained, 3)
        mark = de.incremental_dump(tmp_path / "chain", trained)
        await model.refresh()
        found, headers = await answer(model)
        assert headers["x-watermark-id"] == mark.id
        check_answer(found, trained)
        await model.close()

    asyncio.run(run())


@pytest.mark.parametrize("by", ["the server", "the model"])
def test_folders_of_mapped_files(tmp_path, by):
    trained = build()
    chain = tmp_path / "chain"
    models = export(trained, tmp_path, "1", **({"follow": None} if by == "the server" else {}))

    async def run():
        model = served(tmp_path, models, follow=str(chain) if by == "the server" else None)
        await model.refresh()
        change(trained, 4)
        mark = de.dump(chain, trained)  # a base: its files are mapped instead of the export's
        while (await answer(model))[1]["x-watermark-id"] != mark.id:
            await model.refresh()
        found = [each.path for each in psutil.Process().memory_maps()]
        mapped = [path for path in found if path.startswith(f"{tmp_path.resolve()}/")]
        assert any(path.startswith(f"{chain.resolve()}/") for path in mapped)
        folders = tuple(f"{each}/" for each in model.loaded.folders())
        assert [path for path in mapped if not path.startswith(folders)] == []
        await model.close()

    asyncio.run(run())
