"""Ranks on fake GPUs exchange by a stand-in for NCCL: the cases of nccl_cases.py, and faults."""

import os
import pathlib
import re
import sys
import textwrap

import pytest
from parallel import launch
from parallel.cases import Launch

FOLDER = pathlib.Path(__file__).resolve().parent
CASES = FOLDER / "nccl_cases.py"
LAST = "test_rank_1_ends_while_the_others_wait"


@pytest.fixture(scope="module", params=[2, 4])
def ran(request):
    """All cases, run by ranks; the last one apart, because it ends a rank."""
    root = request.config.rootpath
    names = re.findall(r"^def (test_\w+)", CASES.read_text("utf-8"), re.MULTILINE)
    parameters = {"test_values_arrive_unchanged": 5, "test_sums_have_the_bits_of_the_host": 4}
    cases = []
    for name in names:
        if name in parameters:
            cases += [f"{name}[dtype{i}]" for i in range(parameters[name])]
        elif name != LAST:
            cases.append(name)
    prefix = f"{CASES.relative_to(root)}::"
    return Launch("nccl", request.param, [prefix + case for case in cases], root), prefix, cases


def test_the_cases_pass(ran):
    launched, prefix, cases = ran
    failed = {}
    for case in cases:
        result = launched.result(prefix + case)
        if result.outcome != "passed":
            failed[case] = result.text
    assert not failed, "\n".join(f"{case}: {text}" for case, text in failed.items())


def test_a_rank_that_ends_is_an_error_of_the_others(request):
    root = request.config.rootpath
    case = f"{CASES.relative_to(root)}::{LAST}"
    launched = Launch("nccl", 2, [case], root)
    text = launched.result(case).text
    # Only the rank that has ended has no result.
    assert "----- no result: rank 1 of 2" in text, text
    assert "failed" not in text.splitlines()[0], text


def run(tmp_path, program, **environment):
    """Runs a program as two ranks."""
    script = tmp_path / "program.py"
    script.write_text("import fake_gpu\nimport tf_dynemb as de\n" + textwrap.dedent(program))
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return launch.run(
        "gloo", 2, [sys.executable, str(script)], tmp_path / "log", 120, **environment
    )


class TestInit:
    def test_none_uses_nccl_if_all_ranks_can(self, tmp_path):
        ended = run(
            tmp_path,
            """
            import logging
            logging.basicConfig(level=logging.INFO)
            de.init()
            from tf_dynemb import communicator
            print("on gpu:", communicator.get().alltoall_on_gpu)
            de.init("nccl")
            """,
        )
        assert ended.status == 0, ended.output
        assert ended.output.count("on gpu: True") == 2
        assert "tensors on GPUs are exchanged by NCCL" in ended.output

    def test_gloo_does_not(self, tmp_path):
        ended = run(
            tmp_path,
            """
            de.init("gloo")
            from tf_dynemb import communicator
            print("on gpu:", communicator.get().alltoall_on_gpu)
            de.init("nccl")
            """,
        )
        assert "on gpu: True" not in ended.output
        assert "this process has joined its ranks by 'gloo'" in ended.output

    SAME = 'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = "5"\n'

    @pytest.mark.parametrize(
        ("prepare", "environment", "reason"),
        [
            (SAME, {}, r"ranks 0 and 1 have the same GPU, 5 of"),
            ("", {"TF_DYNEMB_NCCL": "/no/such.so"}, r"rank 0: .*/no/such.so"),
            ("", {"FAKE_NCCL_FAULT": "version"}, r"rank 0: .*NCCL 2.14 or later is required"),
            (
                "import os\nimport tensorflow as tf\n"
                'if os.environ["RANK"] == "1":\n    tf.config.set_visible_devices([], "GPU")\n',
                {},
                r"rank 1: TensorFlow sees no GPU",
            ),
        ],
        ids=["same_gpu", "no_library", "old_version", "no_gpu"],
    )
    def test_an_obstacle_on_one_rank_is_one_of_all(self, tmp_path, prepare, environment, reason):
        program = prepare + "de.init({})\nfrom tf_dynemb import communicator\n"
        program += 'print("on gpu:", communicator.get().alltoall_on_gpu)\n'
        ended = run(tmp_path, program.format('"nccl"'), **environment)
        assert ended.status != 0
        assert re.search(rf"RuntimeError: init\('nccl'\): {reason}", ended.output), ended.output
        ended = run(tmp_path, program.format(""), **environment)
        assert ended.status == 0, ended.output
        assert ended.output.count("on gpu: False") == 2, ended.output

    def test_a_failure_of_the_library_is_an_error_of_all(self, tmp_path):
        program = """
            import tensorflow as tf
            de.init("nccl")
            from tf_dynemb import communicator
            with tf.device("GPU:0"):
                data = tf.constant([[1.0], [2.0]])
            try:
                communicator.get().alltoall(data, [1, 1], "any")
            except tf.errors.AbortedError as error:
                print("aborted:", error.message)
            """
        ended = run(tmp_path, program, FAKE_NCCL_FAULT="join")
        assert ended.output.count("aborted:") == 2, ended.output
        assert ended.output.count("unhandled system error") >= 2, ended.output


def test_a_rank_that_ends_inside_an_exchange_does_not_block_the_gpu_of_the_others(tmp_path):
    ended = run(
        tmp_path,
        """
        import os
        import time
        import tensorflow as tf
        de.init("nccl", timeout=100)
        from tf_dynemb import communicator
        with tf.device("GPU:0"):
            data = tf.constant([[1.0], [2.0]])
        communicator.get().alltoall(data, [1, 1], "first")
        if os.environ["RANK"] == "1":
            os.environ["FAKE_NCCL_FAULT"] = "exit"
        start = time.monotonic()
        try:
            communicator.get().alltoall(data, [1, 1], "second")
        except tf.errors.AbortedError as error:
            print("aborted:", error.message)
        assert time.monotonic() - start < 60, "only after the timeout"
        with tf.device("GPU:0"):
            print("the GPU has", tf.constant([[5.0], [6.0]]).numpy().tolist())
        """,
    )
    assert re.search(r"aborted: .* on rank 0: rank 1 has ended", ended.output), ended.output
    assert "the GPU has [[5.0], [6.0]]" in ended.output
