"""Strings as keys of tables: every method that takes keys, and readers of their dumps."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

WORDS = ["alice", "bob", "Zoë 花子", "12", ""]
IDS = tf.strings.to_hash_bucket_fast(tf.constant(WORDS), 2**63 - 1)

FORMS = {
    "list": list,
    "list of bytes": lambda words: [word.encode() for word in words],
    "both": lambda words: [words[0].encode(), *words[1:]],
    "tuple": tuple,
    "array": np.array,
    "array of bytes": lambda words: np.char.encode(np.array(words), "utf-8"),
    "array of objects": lambda words: np.array(words, object),
    "tensor": tf.constant,
    "list of tensors": lambda words: [tf.constant(word) for word in words],
}


def table(**options):
    made = de.DynamicVariable(2, hash_strings=True, name="t", seed=1, **options)
    made.lookup(IDS[:3])
    return made


def layer_table():
    layer = de.layers.Embedding(2, hash_strings=True)
    layer(tf.constant(WORDS[:3]), training=True)
    return layer.table


VECTORS = np.arange(10, dtype=np.float32).reshape(5, 2)

METHODS = {
    "lookup": lambda t, keys: t.lookup(keys, insert=False),
    "lookup and insert": lambda t, keys: t.lookup(keys),
    "lookup with existence": lambda t, keys: t.lookup(keys, return_exists=True),
    "find_or_insert": lambda t, keys: t.find_or_insert(keys),
    "sparse_read": lambda t, keys: t.sparse_read(keys),
    "embedding_lookup": tf.nn.embedding_lookup,
    "lookup_sparse": lambda t, keys: de.lookup_sparse(t, keys, combiners="sum"),
    "contains": lambda t, keys: t.contains(keys),
    "erase": lambda t, keys: t.erase(keys),
    "forget": lambda t, keys: t.forget(keys),
    "upsert": lambda t, keys: t.upsert(keys, VECTORS),
    "de.assign": lambda t, keys: de.assign(t, keys, VECTORS),
    "assign": lambda t, keys: t.assign(keys, VECTORS),
    "insert_or_assign": lambda t, keys: t.insert_or_assign(keys, VECTORS),
    "insert_and_evict": lambda t, keys: t.insert_and_evict(keys, VECTORS),
    "accum_or_assign": lambda t, keys: t.accum_or_assign(keys, VECTORS, [1, 1, 1, 0, 0]),
    "scatter_add": lambda t, keys: t.scatter_add(tf.IndexedSlices(VECTORS, keys)),
    "scatter_sub": lambda t, keys: t.scatter_sub(tf.IndexedSlices(VECTORS, keys)),
    "scatter_update": lambda t, keys: t.scatter_update(tf.IndexedSlices(VECTORS, keys)),
    "scores": lambda t, keys: t.scores(keys),
    "set_scores": lambda t, keys: t.set_scores(keys, np.arange(5)),
}


def rows_of(table):
    keys, vectors = de.export(table)
    order = np.argsort(keys)
    return keys.numpy()[order].tolist(), vectors.numpy()[order].tolist()


def plain(result):
    if isinstance(result, (tuple, list)):
        return [plain(each) for each in result]
    if isinstance(result, de.DynamicVariable) or not tf.is_tensor(result):
        return None
    return result.numpy().tolist()


@pytest.mark.parametrize("method", METHODS)
def test_strings_are_their_hashes(method):
    options = {"evict_strategy": "score"} if method == "set_scores" else {}
    call = METHODS[method]
    expected = table(**options)
    result = plain(call(expected, IDS))
    if method == "scores":  # those are numbers of batches
        result = [int(score >= 0) for score in result]
    for form in FORMS.values():
        found = table(**options)
        again = plain(call(found, form(WORDS)))
        if method == "scores":
            again = [int(score >= 0) for score in again]
        assert again == result
        assert rows_of(found) == rows_of(expected)
        if method == "set_scores":
            assert plain(found.scores(IDS)) == plain(expected.scores(IDS))


def test_explain():
    for string_table in (table(), layer_table()):
        string_table.explain([])
        string_table.erase("bob")
        found = string_table.explain(WORDS)
        assert [each.key for each in found] == IDS.numpy().tolist()
        assert [each.has_row for each in found] == [True, False, True, False, False]
        assert found[1].lost_because == "erased"


def test_tables_of_layers():
    string_table = layer_table()
    assert string_table.contains(WORDS).numpy().tolist() == [True] * 3 + [False] * 2
    assert string_table.contains([["alice"], ["eve"]]).numpy().tolist() == [[True], [False]]
    assert string_table.contains("alice").numpy()
    assert int(string_table.forget(["alice", "eve"])) == 1
    assert string_table.contains(IDS).numpy().tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_lookup_sparse_of_bags(kind):
    string_table = table()
    bags = tf.ragged.constant([["alice", "bob"], [], ["alice"]])
    hashed = bags.with_flat_values(tf.gather(IDS, [0, 1, 0]))
    if kind == "sparse":
        bags, hashed = bags.to_sparse(), hashed.to_sparse()
    found = de.lookup_sparse(string_table, bags, combiners="sum")
    np.testing.assert_array_equal(found, de.lookup_sparse(string_table, hashed, combiners="sum"))


def test_in_a_function_and_with_a_gradient():
    string_table = table()

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def step(words):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(string_table.lookup(words))
        (gradient,) = tape.gradient(loss, [string_table])
        return gradient.indices, string_table.contains(words)

    keys, found = step(tf.constant(WORDS[:2]))
    assert sorted(keys.numpy()) == sorted(IDS[:2].numpy())
    assert found.numpy().tolist() == [True, True]


def test_uint64_keys():
    string_table = de.DynamicVariable(2, hash_strings=True, key_type=tf.uint64)
    string_table.lookup(WORDS)
    assert sorted(de.export(string_table)[0].numpy().tolist()) == sorted(IDS.numpy().tolist())


def test_dumps_and_readers(tmp_path):
    string_table = table()
    de.dump(tmp_path, string_table)
    reader = de.serving.Reader(tmp_path)
    for name, form in FORMS.items():
        if name == "list of tensors":
            continue  # the reader needs no TensorFlow
        assert reader.contains(form(WORDS)).tolist() == [True] * 3 + [False] * 2
        np.testing.assert_array_equal(
            reader.lookup(form(WORDS)), string_table.lookup(IDS, insert=False).numpy()
        )
    other = de.DynamicVariable(2, hash_strings=True, name="t")
    de.load(tmp_path, other)
    assert other.contains(WORDS[:3]).numpy().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", [*METHODS, "explain"])
def test_a_table_of_integers_says_what_to_do(method, form):
    integer_table = de.DynamicVariable(2, evict_strategy="score")
    call = METHODS.get(method, lambda t, keys: t.explain(keys))
    with pytest.raises(TypeError, match=r"must be integers, got strings.*hash_strings=True"):
        call(integer_table, FORMS[form](WORDS))
    assert len(integer_table) == 0


def test_a_reader_of_integers_says_what_to_do(tmp_path):
    integer_table = de.DynamicVariable(2, name="t")
    integer_table.lookup([1])
    de.dump(tmp_path, integer_table)
    with pytest.raises(TypeError, match=r"must be integers, got strings.*hash_strings=True"):
        de.serving.Reader(tmp_path).lookup(["a"])


def test_mixtures_and_other_values_are_errors():
    string_table = table()
    for keys in (["a", 1], [1, "a"], ["a", None], [None], [1.5], np.array(["a", 1.5], object)):
        with pytest.raises(TypeError):
            string_table.contains(keys)
    with pytest.raises(ValueError, match="64 bits"):
        de.DynamicVariable(2, hash_strings=True, key_type=tf.int32)
    assert string_table.contains([]).numpy().tolist() == []
