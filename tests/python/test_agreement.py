"""Stages of collective calls, with ranks that are threads."""

import numpy as np
import pytest
import tensorflow as tf
from rank_threads import RankGoneError, outcomes, ranks_are_threads, run

from tf_dynemb.parallel.agreement import OtherRankError, Ranks, check_alike


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    with ranks_are_threads(monkeypatch):
        yield


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_gets_the_values_of_all(size):
    def call(comm):
        ranks = Ranks("call")
        assert (ranks.rank, ranks.size) == (comm.rank, size)
        with ranks.stage() as stage:
            stage.say({"rank": comm.rank, "text": "ü" * comm.rank, "list": [1.5, None]})
        with ranks.stage() as silent:
            pass
        return stage.said, silent.said

    expected = [{"rank": r, "text": "ü" * r, "list": [1.5, None]} for r in range(size)]
    assert run(size, call) == [(expected, [None] * size)] * size


def test_a_stage_is_one_collective_operation():
    def call(comm):
        ranks = Ranks("call")
        for _ in range(3):
            with ranks.stage():
                pass
        return len(comm.calls)

    assert run(3, call) == [3 * 2] * 3  # lengths and texts


@pytest.mark.parametrize("failing", [[0], [2], [1, 2], [0, 1, 2]])
def test_a_failure_on_some_ranks_fails_all(failing):
    passed = set()

    def call(comm):
        ranks = Ranks("call")
        with ranks.stage():
            passed.add(comm.rank)
        assert ranks.failures == ()
        try:
            with ranks.stage():
                if comm.rank in failing:
                    raise KeyError(f"of {comm.rank}")
        finally:
            assert [f.rank for f in ranks.failures] == failing
            assert {f.kind for f in ranks.failures} == {"KeyError"}
        raise AssertionError("the stage raised no error")

    for rank, outcome in enumerate(outcomes(3, call)):
        if rank in failing:
            assert type(outcome.error) is KeyError
            assert outcome.error.args == (f"of {rank}",)
        else:
            assert type(outcome.error) is OtherRankError
            assert isinstance(outcome.error, RuntimeError)
            said = f"call failed on rank {failing[0]}: KeyError: 'of {failing[0]}'"
            assert str(outcome.error) == said
    assert passed == {0, 1, 2}


def test_stages_after_a_failure():
    def call(comm):
        for failing in (0, 1, 0):
            ranks = Ranks("call")
            expected = IndexError if comm.rank == failing else OtherRankError
            with pytest.raises(expected), ranks.stage():
                [0][comm.rank == failing]
            with ranks.stage() as stage:
                stage.say(comm.rank)
            assert ranks.failures == ()
            assert stage.said == [0, 1]

    run(2, call)


def test_the_end_of_a_rank_releases_the_others():
    def call(comm):
        ranks = Ranks("call")
        with ranks.stage():
            if comm.rank == 1:
                raise KeyboardInterrupt

    errors = [type(outcome.error) for outcome in outcomes(3, call)]
    assert errors == [RankGoneError, KeyboardInterrupt, RankGoneError]


def test_an_error_that_cannot_be_reported_is_chained():
    def call(comm):
        ranks = Ranks("call")
        with ranks.stage():
            raise (SystemExit if comm.rank else ValueError)(comm.rank)

    found = outcomes(2, call)
    assert type(found[0].error) is RankGoneError
    assert type(found[0].error.__context__) is ValueError


def test_different_calls_are_an_error():
    def call(comm):
        with Ranks("dump" if comm.rank < 2 else "load").stage():
            if comm.rank == 1:
                raise ValueError("no")

    for outcome in outcomes(3, call):
        assert type(outcome.error) is RuntimeError
        assert "dump on rank 0, dump on rank 1, load on rank 2" in str(outcome.error)


def test_check_alike():
    check_alike([[1, "a"]] * 3, "it")
    with pytest.raises(ValueError, match=r"it must be the same .* 1 on rank 0, 2 on rank 1"):
        check_alike([1, 2], "it")


def test_messages_of_any_text():
    def call(comm):
        with Ranks("call").stage():
            if comm.rank:
                raise OSError(28, "No space", "/ü\udcff\n")

    first, second = outcomes(2, call)
    assert "\udcff" in str(first.error) or "\\udcff" in str(first.error)
    assert second.error.errno == 28


def test_calls_in_a_function_are_refused():
    @tf.function
    def traced():
        Ranks("load")

    with pytest.raises(RuntimeError, match=r"load runs eagerly only.*outside tf\.function"):
        traced()


def test_the_communicator_of_threads():
    def call(comm):
        parts = [np.full([r + comm.rank, 2], 10 * comm.rank + r, np.int32) for r in range(3)]
        splits = [len(part) for part in parts]
        received, lengths = comm.alltoall(tf.constant(np.concatenate(parts)), splits, "a")
        expected = [np.full([s + comm.rank, 2], 10 * s + comm.rank) for s in range(3)]
        np.testing.assert_array_equal(received, np.concatenate(expected))
        np.testing.assert_array_equal(lengths, [s + comm.rank for s in range(3)])
        (mean,) = comm.allreduce([tf.constant(float(comm.rank))], True, "b")
        assert float(mean) == 1.0
        assert int(comm.broadcast(tf.constant(comm.rank), 2, "c")) == 2

    run(3, call)
    different = outcomes(2, lambda comm: comm.barrier(f"of {comm.rank}"))
    assert {type(outcome.error) for outcome in different} == {RankGoneError}
