"""A process whose locale writes 0,25."""

import os
import shutil
import subprocess
import sys

import pytest

SCRIPT = """
import locale, pathlib, sys
import numpy as np
import tensorflow as tf
import tf_dynemb as de

locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")
assert locale.localeconv()["decimal_point"] == ","

folder = pathlib.Path(sys.argv[1])
table = de.DynamicVariable(2, 0.5, "host", name="t")
table.upsert([1, 2], np.full([2, 2], 0.25))
de.dump(folder / "dump", table)


class Model(tf.Module):
    def __init__(self):
        super().__init__()
        self.t = table

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def __call__(self, ids):
        return self.t.lookup(ids, insert=False)


path, dump = str(folder / "model"), folder / "dump"
de.export_saved_model(Model(), path, dump=dump, follow=dump, follow_seconds=0.25)
loaded = tf.saved_model.load(path)
assert loaded(tf.constant([1, 3], tf.int64)).numpy().tolist() == [[0.25, 0.25], [0.5, 0.5]]
assert de.serving.Reader(folder / "dump").lookup([1]).tolist() == [[0.25, 0.25]]
de.load(folder / "dump", table)
try:
    de.DynamicVariable(2, tf.keras.initializers.RandomUniform(0.5, 0.25), "host").lookup([1])
except (ValueError, tf.errors.InvalidArgumentError) as error:
    assert "0.5, 0.25" in str(error), error
else:
    raise AssertionError("low is above high")
print("done")
"""


@pytest.mark.slow
def test_a_decimal_comma(tmp_path):
    if shutil.which("localedef") is None:
        pytest.skip("needs localedef")
    command = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"the sources of locales are not installed: {made.stderr[:80]}")
    environment = {**os.environ, "LOCPATH": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.stdout.endswith("done\n"), run.stderr[-2000:]
