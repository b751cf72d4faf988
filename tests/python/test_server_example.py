"""examples/server: the server's answers, and a short run of all of its processes."""

from __future__ import annotations

import asyncio
import json
import time

import numpy as np
import pytest
from example_runs import EXAMPLES, run_python

import tf_dynemb as de

pytest.importorskip("fastapi")


@pytest.fixture(scope="module")
def modules():
    """The modules `model` and `server` of the example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES / "server"))
        import model
        import server

        yield model, server


@pytest.fixture(scope="module")
def exported(modules, tmp_path_factory):
    """A model, and its SavedModel, which follows `published`."""
    built = modules[0].build()
    folder = tmp_path_factory.mktemp("server")
    ids = np.arange(50)[:, None]
    built([ids, ids], training=True)
    de.dump(folder / "published", built)
    follow = folder / "published"
    de.export_saved_model(
        built, folder / "model", "link", follow, follow=follow, follow_seconds=0.01
    )
    return built, folder


@pytest.fixture
def client(modules, exported):
    from starlette.testclient import TestClient

    with TestClient(modules[1].create_app(exported[1] / "model")) as client:
        yield client


def wait_until(client, condition, seconds=30):
    """Returns the first answer about readiness that fulfills a condition."""
    end = time.monotonic() + seconds
    while not condition(answer := client.get("/ready")):
        assert time.monotonic() < end, answer.json()
        time.sleep(0.02)
    return answer.json()


def test_readiness_answers_and_invalid_requests(client, exported):
    built, folder = exported
    assert client.get("/live").json() == {"status": "live"}
    ready = wait_until(client, lambda answer: answer.status_code == 200)
    users, items = [1, 2, 2**60], [3, -4, 5]
    given = {"users": users, "items": items}
    answer = client.post("/score", json=given).json()
    assert answer["watermark"]["id"] == ready["watermark"]["id"]
    expected = built.predict_on_batch([np.array(users)[:, None], np.array(items)[:, None]])
    np.testing.assert_allclose(answer["scores"], np.ravel(expected), rtol=0, atol=1e-6)
    for wrong in (
        {"users": [1], "items": []},
        {"users": [], "items": []},
        {"users": [2**63], "items": [1]},
        {"users": ["x"], "items": [1]},
        {"users": [1] * 1025, "items": [1] * 1025},
        {"items": [1]},
    ):
        assert client.post("/score", json=wrong).status_code == 422
    # A delta is followed; after a damaged one, the server is not ready, and it goes on serving.
    table = built.get_layer("users_table").table
    table.upsert([1], np.ones([1, table.dimension]))
    mark = de.incremental_dump(folder / "published", built)
    wait_until(client, lambda a: a.json()["watermark"]["id"] == mark.id)
    table.upsert([1], np.zeros([1, table.dimension]))
    de.incremental_dump(folder / "elsewhere", built, since=mark)
    (delta,) = (folder / "elsewhere").glob("*-delta-*")
    for file in delta.glob("*.vectors.npy"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    delta.rename(folder / "published" / f"00000009{delta.name[8:]}")
    failed = wait_until(client, lambda answer: answer.status_code == 503)
    assert "vectors.npy is damaged" in failed["error"]
    assert client.post("/score", json=given).json()["watermark"]["id"] == mark.id


def test_requests_that_wait_form_one_batch(modules):
    server, batches = modules[1], []
    pairs = [server.Pairs(users=[n] * (n + 1), items=[7] * (n + 1)) for n in range(20)]

    def score(users, items):
        time.sleep(0.02)  # the others arrive meanwhile
        batches.append(len(users))
        return (users * 10 + items).astype(np.float32), server.Watermark("id", 1, 0, "")

    async def ask():
        waiting = server.Batches(score)
        running = asyncio.create_task(waiting.run())
        answers = await asyncio.gather(*(waiting.answer(each) for each in pairs))
        running.cancel()
        return answers, waiting.count

    answers, count = asyncio.run(ask())
    assert [answer["scores"] for answer in answers] == [[n * 10 + 7.0] * (n + 1) for n in range(20)]
    assert count == len(batches) <= 3
    assert sum(batches) == sum(range(21))


def test_a_batch_has_a_limit_and_its_requests_get_its_error(modules, monkeypatch):
    server, batches = modules[1], []
    monkeypatch.setattr(server, "MOST_ROWS", 8)
    pairs = [server.Pairs(users=[n] * 3, items=[n] * 3) for n in range(6)]

    def score(users, items):
        batches.append(len(users))
        if 5 in users:
            raise RuntimeError("planted")
        return users.astype(np.float32), server.Watermark("id", 1, 0, "")

    async def ask():
        waiting = server.Batches(score)
        running = asyncio.create_task(waiting.run())
        asked = (waiting.answer(each) for each in pairs)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        running.cancel()
        return answers

    answers = asyncio.run(ask())
    assert max(batches) <= 8
    assert sum(batches) == 18
    assert str(answers[5]) == "planted"
    assert [answer["scores"] for answer in answers[:4]] == [[float(n)] * 3 for n in range(4)]


@pytest.mark.slow
def test_server_trainer_and_load(tmp_path):
    """All processes: every answer is the trainer's at its watermark, and none is older."""
    short = ["--users=2000", "--warm-up=20", "--deltas=5", "--pause=0.1", "--seconds=0.5"]
    command = [str(EXAMPLES / "server/run.py"), *short, "--connections=4", "--json=found.json"]
    printed = run_python(command, tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["wrong"] == found["older"] == 0
    assert len(found["fresh"]) == 5  # the answers reach the last delta
    assert found["snapshots"] > 1
    assert found["change"] > 1e-4  # so that another snapshot would be a wrong answer
    assert min(found[part]["answers"] for part in ("before", "during", "after")) > 10
    assert "older than an earlier answer: 0" in printed
