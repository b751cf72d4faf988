"""tf_dynemb.tfra: the behaviour that TFRA's documentation and tests describe."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import tfra
from tf_dynemb.variables.transfer import export_rows


def content(variable):
    keys, values = variable.export()
    return dict(zip(keys.numpy().tolist(), values.numpy().tolist(), strict=True))


def variable(name="v", dim=2, **options):
    return tfra.Variable(name=name, dim=dim, **options)


# Variable


def test_a_lookup_gives_no_row_and_an_upsert_does():
    v = variable(initializer=-1.0)
    assert v.lookup([3, 4]).numpy().tolist() == [[-1.0, -1.0]] * 2
    assert tfra.embedding_lookup(v, [3, 4], name="ignored").numpy().tolist() == [[-1.0] * 2] * 2
    assert tf.nn.embedding_lookup(v, [3]).numpy().tolist() == [[-1.0, -1.0]]
    assert int(v.size()) == 0
    v.upsert([3, 4, 3], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert content(v) == {3: [5.0, 6.0], 4: [3.0, 4.0]}
    assert v.size().dtype == tf.int64
    assert int(v.size(0)) == 2


def test_lookup_returns_which_keys_exist():
    v = variable()
    v.upsert([1], [[1.0, 1.0]])
    values, exists = v.lookup(tf.constant([[1, 2], [2, 1]], tf.int64), return_exists=True)
    assert exists.numpy().tolist() == [[True, False], [False, True]]
    assert values.shape == [2, 2, 2]
    assert values.numpy()[0].tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_remove_and_clear():
    v = variable()
    v.upsert([1, 2, 3], tf.ones([3, 2]))
    assert int(v.remove([2, 9])) == 1
    assert set(content(v)) == {1, 3}
    v.clear()
    assert content(v) == {}


def test_accum_adds_to_rows_that_existed_and_creates_the_others():
    v = variable()
    v.upsert([1, 2], [[1.0, 1.0], [2.0, 2.0]])
    old, exists = v.lookup([1, 2, 3, 4], return_exists=True)
    # Other writers meanwhile: 1 has changed, 2 is gone, 4 has come.
    v.upsert([1, 4], [[10.0, 10.0], [40.0, 40.0]])
    v.remove([2])
    v.accum([1, 2, 3, 4], old, old + 0.5, exists)
    assert content(v) == {1: [10.5, 10.5], 3: [0.5, 0.5], 4: [40.0, 40.0]}


@pytest.mark.parametrize(
    ("initializer", "expected"),
    [
        (None, [0.0, 0.0]),
        (2, [2.0, 2.0]),
        (np.array([3.0]), [3.0, 3.0]),
        (np.array([1.0, 2.0]), [1.0, 2.0]),
        (tf.constant([[4.0, 5.0]]), [4.0, 5.0]),
        (lambda shape: tf.fill(shape, 6.0), [6.0, 6.0]),
        (lambda: 7.0, [7.0, 7.0]),
        (lambda dims: tf.ones(dims), [1.0, 1.0]),
        (np.float32(0.5), [0.5, 0.5]),
        (tf.zeros_initializer(), [0.0, 0.0]),
        (tf.constant_initializer(8.0), [8.0, 8.0]),
        (keras.initializers.Ones(), [1.0, 1.0]),
    ],
)
def test_initializers(initializer, expected):
    assert variable(initializer=initializer).lookup([5]).numpy().tolist() == [expected]


@pytest.mark.parametrize(
    "initializer",
    [
        tf.random_normal_initializer(1.0, 2.0, seed=3),
        tf.keras.initializers.RandomNormal(1.0, 2.0, seed=3),
    ],
)
def test_random_initializers_of_tensorflow_draw_as_in_keras(initializer):
    values = variable(dim=8, initializer=initializer).lookup(np.arange(4000)).numpy()
    assert abs(values.mean() - 1.0) < 0.05
    assert abs(values.std() - 2.0) < 0.05
    again = variable("other", dim=8, initializer=initializer).lookup(np.arange(4000)).numpy()
    np.testing.assert_array_equal(values, again)


def test_get_variable_returns_the_variable_of_a_name():
    name = "unique"
    first = tfra.get_variable(name, tf.int64, tf.float32, 3, initializer=1.0)
    assert first.dim == 3
    assert tfra.get_variable(name, dim=3) is first
    assert tfra.get_variable(name) is first
    with pytest.raises(ValueError, match=f"Variable {name} already exists, with dim=3, got 4"):
        tfra.get_variable(name, dim=4)
    with tf.compat.v1.variable_scope("scope"):
        scoped = tfra.get_variable(name, dim=3)
    assert scoped.name == f"scope/{name}:0"
    with pytest.raises(TypeError, match="dim twice"):
        tfra.get_variable("x", tf.int64, tf.float32, 3, dim=3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"key_dtype": tf.string}, TypeError, r"key_dtype .* tf.string.*to_hash_bucket_fast"),
        ({"value_dtype": tf.int32}, TypeError, r"value_dtype must be one of .*, got tf.int32"),
        ({"devices": ["/job:ps/task:0/CPU:0"]}, ValueError, "no parameter servers"),
        ({"devices": ["/GPU:0", "/GPU:1"]}, ValueError, "one process for each, as `tf-dynemb run`"),
        ({"initializer": np.ones(5)}, ValueError, "one number or 2 numbers, got 5"),
        ({"kv_creator": object()}, TypeError, "kv_creator must be"),
        ({"dim": 0}, ValueError, "dimension"),
        ({"restrict_policy": "oldest"}, TypeError, "restrict_policy must be a subclass"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message) as caught:
        variable(**options)
    assert len(str(caught.value)) <= 400


def test_attributes_are_as_in_tfra():
    v = variable(key_dtype=tf.int32, value_dtype=tf.float16, devices="/CPU:0", initializer=1.0)
    assert (v.dim, v.key_dtype, v.value_dtype) == (2, tf.int32, tf.float16)
    assert (v.devices, v.initializer, v.trainable) == (["/CPU:0"], 1.0, True)
    assert v.params is v
    assert v.get_trainable_by_name("any") is v
    assert v.options.var_type == "host"


def test_creators_give_the_size():
    config = tfra.HkvHashTableConfig(init_capacity=64, max_capacity=128, max_hbm_for_values=2**30)
    v = variable(kv_creator=tfra.HkvHashTableCreator(config, saver=tfra.FileSystemSaver()))
    assert (v.options.init_capacity, v.options.max_capacity) == (64, 128)
    assert v.options.max_hbm_for_vectors == 1.0
    for creator in (tfra.HkvHashTableCreator(), tfra.CuckooHashTableCreator()):
        assert variable(kv_creator=creator).options.max_capacity is None
    with pytest.raises(NotImplementedError, match="gen_scores_fn is not supported"):
        tfra.HkvHashTableConfig(gen_scores_fn=lambda keys: keys)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("LRU", "lru"), ("LFU", "lfu"), ("EPOCHLRU", "epoch_lru"), ("CUSTOMIZED", "score")],
)
def test_creators_give_the_strategy(strategy, expected):
    config = tfra.HkvHashTableConfig(4, 4, evict_strategy=tfra.HkvEvictStrategy[strategy])
    v = variable(kv_creator=tfra.HkvHashTableCreator(config))
    assert v.options.strategy == expected


def test_a_customized_table_takes_scores():
    strategy = tfra.HkvEvictStrategy.CUSTOMIZED
    config = tfra.HkvHashTableConfig(4, 4, evict_strategy=strategy)
    v = variable(kv_creator=tfra.HkvHashTableCreator(config))
    v.insert_or_assign([1, 2], tf.ones([2, 2]), scores=[5, 6])
    v.upsert([3], tf.ones([1, 2]), scores=7)
    values, exists = v.lookup([1, 9], return_exists=True, scores=[8, 9])
    assert values.shape == [2, 2]
    assert exists.numpy().tolist() == [True, False]
    assert v.scores([1, 2, 3, 9]).numpy().tolist() == [8, 6, 7, -1]


def test_an_epoch_lfu_table_counts_steps_and_epochs():
    strategy = tfra.HkvEvictStrategy.EPOCHLFU
    config = tfra.HkvHashTableConfig(8, 8, evict_strategy=strategy, step_per_epoch=2)
    v = variable(kv_creator=tfra.HkvHashTableCreator(config))
    optimizer = tfra.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1))
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tfra.embedding_lookup(v, tf.constant([1, 1, 2], tf.int64)))
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])
    assert v.scores([1, 2, 3]).numpy().tolist() == [1 << 20 | 3, 1 << 20 | 3, -1]


def test_names_without_an_equivalent_say_what_to_use():
    with pytest.raises(AttributeError, match=r"no RedisTableCreator: .*Reader"):
        _ = tfra.RedisTableCreator
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tfra.nonsense
    assert tfra.dynamic_embedding.get_variable is tfra.get_variable


# Training


def train(v, ids, optimizer, steps=3, lookup=tfra.embedding_lookup):
    for _ in range(steps):
        with tf.GradientTape() as tape:
            vectors, trainable = lookup(v, ids, name="x", return_trainable=True)
            loss = tf.reduce_sum(vectors**2)
        optimizer.apply_gradients([(tape.gradient(loss, trainable), trainable)])


@pytest.mark.parametrize("lookup", [tfra.embedding_lookup, tfra.embedding_lookup_unique])
@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_a_step_creates_rows_and_equals_a_step_of_a_dense_variable(optimizer, lookup):
    ids = [[1, 5], [5, 9]]
    v = variable(initializer=0.5)
    train(v, ids, tfra.DynamicEmbeddingOptimizer(optimizer(0.1)), lookup=lookup)
    dense, reference = tf.Variable(tf.fill([3, 2], 0.5)), optimizer(0.1)
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(dense, [[0, 1], [1, 2]]) ** 2)
        gradient = tf.convert_to_tensor(tape.gradient(loss, dense))
        reference.apply_gradients([(gradient, dense)])
    assert int(v.size()) == 3
    np.testing.assert_allclose(v.lookup([1, 5, 9]), dense.numpy(), rtol=1e-6)


def test_minimize_in_a_function_with_trainables_by_name():
    v = variable(initializer=1.0)
    optimizer = tfra.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.25))

    @tf.function
    def step(ids):
        loss = lambda: tf.reduce_sum(tfra.embedding_lookup(v, ids, name="user"))  # noqa: E731
        optimizer.minimize(loss, var_list=lambda: [v.get_trainable_by_name("user")])

    step(tf.constant([3, 3], tf.int64))
    assert content(v) == {3: [0.5, 0.5]}


def test_shadow_variables_are_the_variable():
    v = variable(initializer=1.0)
    shadow = tfra.shadow_ops.ShadowVariable(v, name="shadow")
    optimizer = tfra.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.25))
    for lookup in (tfra.shadow_ops.embedding_lookup, tfra.shadow_ops.embedding_lookup_unique):
        optimizer.minimize(lambda lookup=lookup: tf.reduce_sum(lookup(shadow, [7])), [shadow])
    assert content(v) == {7: [0.5, 0.5]}
    assert shadow.params is v


def test_an_untrainable_variable_is_not_trained():
    v = variable(trainable=False, initializer=1.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tfra.embedding_lookup(v, [1]))
    assert tape.gradient(loss, v) is None


def test_inference_mode_stops_gradients():
    v = variable()
    assert tfra.get_model_mode() == "train"
    tfra.enable_inference_mode()
    try:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tfra.embedding_lookup(v, [1]))
        assert tape.gradient(loss, v) is None
    finally:
        tfra.enable_train_mode()
    assert tfra.ModelMode.CURRENT_SETTING == tfra.ModelMode.TRAIN


def test_max_norm_is_as_in_tensorflow():
    vectors = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 2.0]], np.float32)
    v, dense = variable(), tf.Variable(vectors)
    v.upsert([0, 1, 2], vectors)
    with tf.GradientTape(persistent=True) as tape:
        pooled = tfra.embedding_lookup(v, [0, 1, 2], max_norm=1.0)
        expected = tf.nn.embedding_lookup(dense, [0, 1, 2], max_norm=1.0)
        losses = [tf.reduce_sum(x * [[1.0, 2.0]]) for x in (pooled, expected)]
    np.testing.assert_allclose(pooled, expected, rtol=1e-6)
    gradient = tape.gradient(losses[0], v)
    dense_gradient = tf.convert_to_tensor(tape.gradient(losses[1], dense)).numpy()
    np.testing.assert_allclose(
        gradient.values, dense_gradient[gradient.indices.numpy()], rtol=1e-5, atol=1e-7
    )


# Sparse lookups

SPARSE = tf.SparseTensor(
    [[0, 0], [0, 1], [2, 0], [3, 1]], tf.constant([7, -2, 7, 9], tf.int64), [5, 3]
)
WEIGHTS = tf.SparseTensor(SPARSE.indices, [0.5, 2.0, -1.0, 3.0], SPARSE.dense_shape)
ROWS = {7: [1.0, 2.0], -2: [3.0, 4.0], 9: [5.0, 6.0], 4: [7.0, 8.0]}


@pytest.fixture
def filled():
    v = variable(initializer=100.0)
    v.upsert(list(ROWS), list(ROWS.values()))
    return v


def dense_ids(sparse):
    order = {key: i for i, key in enumerate(ROWS)}
    values = [order[key] for key in sparse.values.numpy().tolist()]
    return tf.SparseTensor(sparse.indices, tf.constant(values, tf.int64), sparse.dense_shape)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("max_norm", [None, 4.0])
def test_sparse_lookups_are_as_in_tensorflow(filled, combiner, weights, max_norm):
    dense = tf.Variable(list(ROWS.values()))
    expected = tf.nn.embedding_lookup_sparse(
        dense, dense_ids(SPARSE), weights, combiner=combiner, max_norm=max_norm
    ).numpy()
    pooled = tfra.embedding_lookup_sparse(
        filled, SPARSE, weights, combiner=combiner, max_norm=max_norm, name="x"
    )
    assert pooled.shape == [5, 2]
    np.testing.assert_allclose(pooled[:4], expected, rtol=1e-6)
    assert pooled[4].numpy().tolist() == [0.0, 0.0]

    for default in (None, 4):
        expected = tf.nn.safe_embedding_lookup_sparse(
            dense,
            dense_ids(SPARSE),
            weights,
            combiner=combiner,
            default_id=None if default is None else 3,
            max_norm=max_norm,
        )
        safe, trainable = tfra.safe_embedding_lookup_sparse(
            filled,
            SPARSE,
            weights,
            combiner,
            default_id=default,
            max_norm=max_norm,
            return_trainable=True,
        )
        np.testing.assert_allclose(safe, expected, rtol=1e-6)
        assert trainable is filled


def test_a_sparse_lookup_of_rank_3_pools_the_last_dimension(filled):
    ids = tf.sparse.reshape(SPARSE, [5, 1, 3])
    pooled = tfra.safe_embedding_lookup_sparse(filled, ids)
    assert pooled.shape == [5, 1, 2]
    expected = tfra.safe_embedding_lookup_sparse(filled, SPARSE)
    np.testing.assert_array_equal(pooled[:, 0], expected)


def test_sparse_gradients_reach_the_rows(filled):
    optimizer = tfra.DynamicEmbeddingOptimizer(keras.optimizers.SGD(1.0))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tfra.embedding_lookup_sparse(filled, SPARSE, None, combiner="sum"))
    optimizer.apply_gradients([(tape.gradient(loss, filled), filled)])
    # 7 is in two rows of the batch.
    assert content(filled) == {7: [-1.0, 0.0], -2: [2.0, 3.0], 9: [4.0, 5.0], 4: [7.0, 8.0]}


def test_only_variables_of_tfra_are_looked_up():
    # A table of tf_dynemb would never get rows: its steps do not create any.
    with pytest.raises(TypeError, match=r"params must be a Variable of tf_dynemb\.tfra, got plain"):
        tfra.embedding_lookup(de.DynamicVariable(2, name="plain"), [1])


def test_lookup_sparse_of_tf_dynemb_creates_no_row_either():
    v = variable(initializer=1.0)
    ids = tf.constant([[1, 2]], tf.int64)
    assert de.lookup_sparse(v, ids, combiners="sum").numpy().tolist() == [[2.0, 2.0]]
    assert v.lookup([1], insert=None).shape == [1, 2]
    assert int(v.size()) == 0
    de.lookup_sparse(v, ids, combiners="sum", insert=True)
    assert int(v.size()) == 2


def test_a_skipped_step_creates_no_row():
    v = variable(initializer=1.0)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer = tfra.DynamicEmbeddingOptimizer(scaled)
    for value, rows in ((np.inf, 0), (1.0, 1)):
        gradient = tf.IndexedSlices(tf.constant([[value, 1.0]]), tf.constant([5], tf.int64))
        optimizer.apply_gradients([(gradient, v)])
        assert int(v.size()) == rows


@pytest.mark.parametrize("max_norm", [-1.0, 0])
def test_bad_max_norm(max_norm):
    with pytest.raises(ValueError, match="max_norm must be a positive number"):
        tfra.embedding_lookup(variable(), [1], max_norm=max_norm)
    with pytest.raises(ValueError, match="max_norm must be a positive number"):
        tfra.keras.layers.Embedding(2, max_norm=max_norm)


def test_bad_sparse_arguments(filled):
    with pytest.raises(ValueError, match="combiner must be one of mean, sqrtn, sum, got 'max'"):
        tfra.embedding_lookup_sparse(filled, SPARSE, None, combiner="max")
    with pytest.raises(TypeError, match="must be a SparseTensor"):
        tfra.safe_embedding_lookup_sparse(filled, [[1]])
    with pytest.raises(ValueError, match="one Variable, got a list of 2"):
        tfra.embedding_lookup([filled, filled], [1])


# Restriction


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "ftrl", "rmsprop"])
@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (tfra.TimestampRestrictPolicy, [4, 5, 6, 7, 8]),  # of the second step
        (tfra.FrequencyRestrictPolicy, [4, 5]),  # in both steps
    ],
)
def test_restrict_keeps_the_latest_or_the_most_frequent(policy, kept, optimizer):
    v = variable(initializer=-0.1, restrict_policy=policy)
    wrapper = tfra.DynamicEmbeddingOptimizer(keras.optimizers.get(optimizer))
    for ids in (np.arange(6), np.arange(4, 9)):
        train(v, ids, wrapper, steps=1)
    before = content(v)
    assert set(before) == set(range(9))
    assert v.restrict(len(kept), trigger=100) == 0
    assert content(v) == before
    assert v.restrict(len(kept)) == 9 - len(kept)
    assert content(v) == {key: before[key] for key in kept}
    # The state of the optimizer went with the rows: a returning key starts afresh.
    train(v, [0], wrapper, steps=1)
    keys, _, state = (part.numpy() for part in export_rows(v))
    fresh = variable("fresh", initializer=-0.1)
    train(fresh, [0], tfra.DynamicEmbeddingOptimizer(keras.optimizers.get(optimizer)), steps=1)
    if optimizer != "adam":  # whose step depends on the number of steps
        np.testing.assert_array_equal(state[keys == 0][0], export_rows(fresh)[2].numpy()[0])


def test_frequencies_count_once_a_call_and_go_with_their_rows():
    v = variable(restrict_policy=tfra.FrequencyRestrictPolicy)
    v.upsert([0, 1, 2, 3], tf.zeros([4, 2]))
    policy = v.restrict_policy
    policy.apply_update([0, 1, 2, 2])
    policy.apply_update(tf.constant([[1, 2], [3, 1]], tf.int64))
    counts = policy.status.lookup([0, 1, 2, 3], insert=False).numpy()[:, 0].tolist()
    assert counts == [1.0, 2.0, 2.0, 1.0]
    assert v.restrict(2) == 2
    assert set(content(v)) == {1, 2}
    assert len(policy.status) == 2


def test_apply_update_makes_rows_the_latest():
    v = variable(restrict_policy=tfra.TimestampRestrictPolicy)
    v.upsert([0, 1, 2], tf.ones([3, 2]))
    v.restrict_policy.apply_update([0, 77])
    assert v.restrict(1) == 2
    assert content(v) == {0: [1.0, 1.0]}


def test_bad_restrictions():
    with pytest.raises(ValueError, match="v:0 has no restrict_policy"):
        variable().restrict(3)
    v = variable(restrict_policy=tfra.FrequencyRestrictPolicy)
    with pytest.raises(TypeError, match=r"num_reserved must be an integer, got 1\.5"):
        v.restrict(1.5)
    with pytest.raises(ValueError, match="trigger must not be negative, got -1"):
        v.restrict(1, trigger=-1)
    with pytest.raises(TypeError, match="no argument triger"):
        v.restrict(1, triger=1)


def test_a_policy_of_the_user_learns_of_each_step():
    class Recorder(tfra.RestrictPolicy):
        def apply_update(self, ids):
            seen.append(sorted(ids.numpy().tolist()))

    seen = []
    v = variable(restrict_policy=Recorder)
    train(v, [3, 1, 3], tfra.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1)), steps=2)
    assert seen == [[1, 3], [1, 3]]
    assert v.restrict_policy.var is v
