"""OneFlow's scripts over tf_dynemb.oneembedding, and the code of the page for its users."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from example_runs import EXAMPLES, code_blocks, run_python

pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def scripts():
    """The scripts and their modules. examples/dlrm.py is another module, so names differ."""
    before = list(sys.path)
    sys.path[:0] = [str(EXAMPLES / "oneembedding")]
    found = {}
    for name in ("dlrm", "wide_and_deep", "clicks", "flags"):
        path = EXAMPLES / "oneembedding" / f"{name}.py"
        module_name = name if name in ("clicks", "flags") else f"oneembedding_{name}"
        if module_name not in sys.modules:
            spec = importlib.util.spec_from_file_location(module_name, path)
            sys.modules[module_name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module_name])
        found[name] = sys.modules[module_name]
    sys.path[:] = before
    return SimpleNamespace(**found)


def samples(clicks, count, seed=0):
    rng = np.random.default_rng(seed)
    sparse = rng.integers(0, 50, [count, 26])
    return clicks.Batch(
        (sparse[:, 0] % 2).astype(np.float32),
        rng.integers(0, 100, [count, 13]).astype(np.float32),
        sparse * 2**40 - 2**44,  # ids of 64 bits, some negative
    )


def write(folder, clicks, batch, sizes):
    """Writes files of these numbers of rows, in groups of 7."""
    import pyarrow as pa

    folder.mkdir(parents=True)
    columns = [batch.labels, *batch.dense.T, *batch.sparse.T]
    begin = 0
    for number, size in enumerate(sizes):
        rows = [column[begin : begin + size] for column in columns]
        table = pa.table(dict(zip(clicks.COLUMNS, rows, strict=True)))
        pq.write_table(table, folder / f"part_{number}.parquet", row_group_size=7)
        begin += size


@pytest.mark.parametrize("sizes", [[30], [1, 2, 3, 24], [10, 10, 10], [4, 26], [29, 1]], ids=str)
@pytest.mark.parametrize("size", [4, 10, 30])
def test_batches_of_parquet_files(tmp_path, scripts, sizes, size):
    every = samples(scripts.clicks, 30)
    write(tmp_path / "train", scripts.clicks, every, sizes)
    batches = list(scripts.clicks.parquet_batches(tmp_path / "train", size)())
    assert [len(batch.labels) for batch in batches] == [size] * (30 // size)
    for found, expected in zip(zip(*batches, strict=True), every, strict=True):
        found = np.concatenate(found)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected[: len(found)])


def test_data_that_is_not_there(tmp_path, scripts):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no Parquet files"):
        scripts.clicks.parquet_batches(tmp_path, 4)
    import pyarrow as pa

    pq.write_table(pa.table({"label": [0.0], "I1": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet lacks the columns C1, C10"):
        scripts.clicks.parquet_batches(tmp_path, 4)
    write(tmp_path / "few", scripts.clicks, samples(scripts.clicks, 3), [3])
    few = scripts.clicks.parquet_batches(tmp_path / "few", 4)
    with pytest.raises(ValueError, match="do not fill one batch"):
        next(scripts.clicks.endless(few))


def test_synthetic_batches(scripts):
    make = scripts.clicks.synthetic_batches
    train, again = (list(make([50] * 26, 64, 4, 0, 1)()) for _ in range(2))
    (test,) = make([50] * 26, 64, 1, 256, 1)()
    for one, other in zip(train, again, strict=True):
        for column, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(column, same)
    assert (train[0].dense >= 0).all()
    assert all((test.sparse != batch.sparse).any() for batch in train)
    parts = [train[0].part(rank, 3) for rank in range(3)]
    for column, whole in zip(zip(*parts, strict=True), train[0], strict=True):
        np.testing.assert_array_equal(np.concatenate(column), whole)


def test_crossed_ids(scripts):
    """Each pair of ids has another id, and the order counts."""
    first, second = (side.reshape(-1) for side in np.meshgrid(np.arange(60), np.arange(60)))
    sparse = np.zeros([3600, 26], np.int64)
    sparse[:, 0], sparse[:, 1], sparse[:, 2], sparse[:, 3] = first, second, second, first
    crossed = scripts.clicks.crosses(sparse)
    assert crossed.shape == (3600, 2)
    assert crossed.dtype == np.int64
    for column in crossed.T:
        assert len(np.unique(column)) == 3600
    assert (crossed[:, 0] == crossed[:, 1]).sum() == 60  # where both ids are equal


@pytest.mark.parametrize("with_itself", [False, True])
def test_interaction(scripts, with_itself):
    rng = np.random.default_rng(0)
    dense, vectors = rng.normal(size=[5, 4]), rng.normal(size=[5, 3, 4])
    output = scripts.dlrm.interaction(
        keras.ops.convert_to_tensor(dense), keras.ops.convert_to_tensor(vectors), with_itself
    )
    together = np.concatenate([dense[:, None], vectors], 1)
    expected = [dense] + [
        (together[:, i] * together[:, j]).sum(1)[:, None]
        for i in range(4)
        for j in range(i + with_itself)
    ]
    np.testing.assert_allclose(output, np.concatenate(expected, 1), rtol=1e-6)


def run(script, capsys, *arguments):
    script.run(script.parse_flags([str(argument) for argument in arguments]))
    return capsys.readouterr().out


SHORT = ["--train_batches", "40", "--eval_interval", "40", "--loss_print_interval", "20"]


@pytest.mark.slow
def test_dlrm_learns_saves_and_loads(tmp_path, scripts, capsys):
    place = ["--persistent_path", tmp_path / "store", "--model_save_dir", tmp_path / "models"]
    saving = ["--save_model_after_each_eval", "--save_initial_model", "--learning_rate", 1]
    printed = run(scripts.dlrm, capsys, *place, *SHORT, *saving)
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", printed)]
    assert len(losses) == 2
    (auc,) = re.findall(r"step 40: AUC ([0-9.]+)", printed)
    assert 0.55 < float(auc) < 0.9
    saved = sorted(path.name for path in (tmp_path / "models").iterdir())
    assert saved == ["initial_checkpoint", f"step_40_val_auc_{auc}"]
    assert len(list((tmp_path / "store" / "snapshots").iterdir())) == 2
    still = ["--train_batches", 0]
    for name, like in ((saved[1], True), (saved[0], False)):
        load = ["--model_load_dir", tmp_path / "models" / name]
        printed = run(scripts.dlrm, capsys, *place[:2], *still, *load)
        assert (f"step 0: AUC {auc}" in printed) == like


def test_dlrm_reads_parquet_files(tmp_path, scripts, capsys):
    for name in ("train", "test"):
        write(tmp_path / name, scripts.clicks, samples(scripts.clicks, 96), [50, 46])
    sizes = ["--embedding_vec_size", 4, "--bottom_mlp", "8,4", "--top_mlp", "8"]
    batches = ["--train_batch_size", 32, "--eval_batch_size", 48, "--eval_batches", 2]
    rows = ["--table_size_array", ",".join(["50"] * 26), "--learning_rate", 0.1, *SHORT]
    place = ["--data_dir", tmp_path, "--persistent_path", tmp_path / "store"]
    printed = run(scripts.dlrm, capsys, *place, *sizes, *batches, *rows)
    seen = samples(scripts.clicks, 96).sparse
    distinct = sum(len(np.unique(column)) for column in seen.T)
    assert f"rows of each rank: {distinct:,}" in printed


@pytest.mark.slow
def test_wide_and_deep_learns_saves_and_loads(tmp_path, scripts, capsys):
    place = ["--persistent_path", tmp_path / "store"]
    short = ["--max_iter", 40, "--print_interval", 20, "--eval_batchs", 4]
    saving = ["--model_save_dir", tmp_path / "models"]
    printed = run(scripts.wide_and_deep, capsys, *place, *short, *saving)
    first, last = (float(loss) for loss in re.findall(r"mean loss ([0-9.]+)", printed))
    assert last < first
    (scores,) = re.findall(r"test: (loss [0-9.]+, AUC [0-9.]+)", printed)
    assert 0.65 < float(scores.split()[-1]) < 0.95
    assert (tmp_path / "models" / "final_checkpoint" / "dense.npz").is_file()
    folders = {
        path.name for path in (tmp_path / "store" / "snapshots" / "final_checkpoint").iterdir()
    }
    assert folders == {"wide_embedding", "deep_embedding"}
    load = ["--model_load_dir", tmp_path / "models" / "final_checkpoint"]
    still = ["--max_iter", 0, "--eval_batchs", 4]
    printed = run(scripts.wide_and_deep, capsys, *place, *still, *load)
    assert f"test: {scores}" in printed


@pytest.mark.parametrize("name", ["dlrm", "wide_and_deep"])
def test_help_explains_every_option(scripts, name, capsys):
    with pytest.raises(SystemExit):
        getattr(scripts, name).parse_flags(["--help"])
    described = re.sub(r"\n {10,}", "  ", capsys.readouterr().out.partition("options:")[2])
    options = [line for line in described.splitlines() if line.startswith("  -")]
    assert len(options) > 15
    for line in options:
        assert re.search(r"\S {2,}\S", line[2:]), f"no explanation: {line}"


def test_oneflows_defaults_are_for_its_data(scripts):
    flags = scripts.dlrm.parse_flags(["--data_dir", "x"])
    assert (flags.embedding_vec_size, flags.learning_rate) == (128, 24)
    assert len(flags.table_size_array) == 26
    flags = scripts.wide_and_deep.parse_flags(["--data_dir", "x", "--hidden_size", "5"])
    assert (flags.batch_size, flags.hidden_size, flags.hidden_units_num) == (16384, 5, 7)


@pytest.mark.slow
def test_the_scripts_run_by_themselves(tmp_path):
    printed = run_python(
        [str(EXAMPLES / "oneembedding" / "dlrm.py"), *SHORT, "--persistent_path", "p"], tmp_path
    )
    assert "step 40: AUC" in printed


@pytest.mark.slow
def test_code_for_users_of_oneembedding_runs(tmp_path):
    blocks = code_blocks("docs/migrating_from_oneembedding.md")
    if not blocks:
        pytest.skip("no documents: this tests a wheel")
    assert len(blocks) == 4
    run_python(["-c", "\n".join(blocks)], tmp_path)
    assert (tmp_path / "embedding" / "snapshots" / "first" / "my_embedding").is_dir()
