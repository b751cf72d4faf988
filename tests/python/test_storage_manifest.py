"""MANIFEST.json: its members, and the errors for invalid members."""

import json

import pytest
import storage_helpers as helpers

from tf_dynemb.format import crc32c
from tf_dynemb.storage import DataLossError, Manifest


def rewrite(snapshot, change):
    """Returns the manifest's text with a change to its members, and the matching checksum."""
    members = json.loads((snapshot.directory / "MANIFEST.json").read_text())
    del members["crc32c"]
    change(members)
    canonical = json.dumps(members, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**members, "crc32c": f"{crc32c.crc32c(canonical):08x}"})


def test_manifest_is_as_documented(tmp_path):
    snapshot = helpers.publish_chain(tmp_path)[1]
    text = (snapshot.directory / "MANIFEST.json").read_text()
    members = json.loads(text)
    assert " ".join(members) == (
        "format version kind id parent since watermark watermark_utc_ns world_size "
        "writer block_bytes optimizer tables continues after dense extra copy crc32c"
    )
    (table,) = members["tables"]
    assert " ".join(table) == (
        "name dimension key_type dtype seed initializer state shards default_vector padding_id "
        "string_hash evict_strategy ttl_clock admission_lines history vector_format matrix"
    )
    (shard,) = table["shards"]
    assert " ".join(shard) == (
        "rank rows deleted base_tick files index_salt expiry_marks first_admission_line "
        "admission_lines steps"
    )
    assert set(shard["files"]) == {"keys", "vectors", "state", "updates", "accesses", "deleted"}
    for file in shard["files"].values():
        content = (snapshot.directory / file["file"]).read_bytes()
        blocks = [content[i : i + 192] for i in range(0, len(content), 192)]
        assert file["bytes"] == len(content)
        assert file["crc32c"] == "".join(f"{crc32c.crc32c(block):08x}" for block in blocks)
    assert Manifest.from_json(text, "") == snapshot.manifest
    assert Manifest.from_json(snapshot.manifest.to_json(), "") == snapshot.manifest


def test_unknown_members_are_ignored(tmp_path):
    snapshot = helpers.publish(tmp_path)

    def add(members):
        members["later"] = members["tables"][0]["later"] = [None]

    assert Manifest.from_json(rewrite(snapshot, add), "") == snapshot.manifest


def test_continues_may_be_missing(tmp_path):
    snapshot = helpers.publish(tmp_path)
    text = rewrite(snapshot, lambda members: members.pop("continues"))
    assert Manifest.from_json(text, "") == snapshot.manifest


def test_ttl_clock_and_marks_may_be_missing_but_not_unknown(tmp_path):
    snapshot = helpers.publish(tmp_path)

    def without(members):
        members["tables"][0].pop("ttl_clock")
        members["tables"][0]["shards"][0].pop("expiry_marks")

    _, table = Manifest.from_json(rewrite(snapshot, without), "").table(0)
    assert (table.ttl_clock, table.expiry_marks) == (None, ())
    text = rewrite(snapshot, lambda members: members["tables"][0].update(ttl_clock="moon"))
    with pytest.raises(DataLossError, match=r"ttl_clock.*moon"):
        Manifest.from_json(text, "")


def test_evict_strategy_may_be_missing_but_not_unknown(tmp_path):
    snapshot = helpers.publish(tmp_path)
    text = rewrite(snapshot, lambda members: members["tables"][0].pop("evict_strategy"))
    (table, *_) = Manifest.from_json(text, "").tables
    assert table.evict_strategy is None
    assert table.accesses_are_times
    text = rewrite(snapshot, lambda members: members["tables"][0].update(evict_strategy="fifo"))
    with pytest.raises(DataLossError, match=r"evict_strategy.*fifo"):
        Manifest.from_json(text, "")


def test_delta_continues_only_its_parent(tmp_path):
    snapshot = helpers.publish_chain(tmp_path)[1]
    text = rewrite(snapshot, lambda members: members.update(continues=["0" * 32]))
    with pytest.raises(DataLossError, match="continues must be empty in a delta"):
        Manifest.from_json(text, "F")


def test_unknown_version_is_refused(tmp_path):
    snapshot = helpers.publish(tmp_path)
    text = rewrite(snapshot, lambda members: members.update(version=6))
    with pytest.raises(ValueError, match=r"F is of version 6; .* reads versions 1 to 5") as caught:
        Manifest.from_json(text, "F")
    assert not isinstance(caught.value, DataLossError)


def test_version_1_has_no_salts(tmp_path):
    snapshot = helpers.publish(tmp_path)
    assert snapshot.manifest.tables[0].shards[0].index_salt != 0
    text = rewrite(snapshot, lambda members: members.update(version=1))
    assert Manifest.from_json(text, "").tables[0].shards[0].index_salt == 0


WRONG = [None, True, -1, 1.5, "", "x", [], [1], {}, {"x": 1}, 2**70, "/", ["x"], float("nan")]


def places(value, at=()):
    """Returns the place of every member of a JSON value."""
    for name, member in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*at, name)
        if isinstance(member, (dict, list)):
            yield from places(member, (*at, name))


def test_members_of_wrong_type_or_range_are_refused(tmp_path):
    """With a valid checksum: an error names the file, or the value is valid for the member."""
    snapshot = helpers.publish_chain(tmp_path)[1]
    members = json.loads(snapshot.manifest.to_json())
    del members["crc32c"]
    refused = set()
    for place in places(members):
        for wrong in WRONG:

            def change(members, place=place, wrong=wrong):
                for name in place[:-1]:
                    members = members[name]
                members[place[-1]] = wrong

            problem = None
            try:
                read = Manifest.from_json(rewrite(snapshot, change), "F")
            except ValueError as error:
                problem = error
            if problem:
                assert str(problem).startswith("F")
                assert isinstance(problem, DataLossError) or place == ("version",)
                refused.add(place)
            else:
                assert Manifest.from_json(read.to_json(), "F") == read
    assert refused >= set(places(members))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: m.pop("tables"), "tables is missing"),
        (lambda m: m["tables"].append(m["tables"][0]), "tables has a name twice"),
        (lambda m: m["tables"][0]["shards"].append(m["tables"][0]["shards"][0]), "a rank twice"),
        (lambda m: m["tables"][0]["shards"][0].update(rank=1), "below world_size=1"),
        (lambda m: m["tables"][0]["shards"][0].update(rows=6), "has 168 bytes, but must have 176"),
        (lambda m: m["tables"][0]["shards"][0]["files"].pop("index"), "index is missing"),
        (lambda m: m.update(block_bytes=128), "needs 16 digits"),
        (lambda m: m.update(since=3), "must be 0 in a base"),
        (lambda m: m.update(parent="0" * 32), "must be null in a base"),
        (lambda m: m.update(continues=["x"]), "continues must be a list of ids"),
        (lambda m: m["tables"][0]["initializer"].update(args=[1]), "two for each kind"),
        (lambda m: m["tables"][0]["initializer"].update(args=[1, 10**400]), "finite numbers"),
        (
            lambda m: m["tables"][0]["shards"][0]["files"]["keys"].update(file="../keys"),
            "without a directory",
        ),
    ],
)
def test_contradictory_manifests(tmp_path, change, problem):
    text = rewrite(helpers.publish(tmp_path), change)
    with pytest.raises(DataLossError, match=problem):
        Manifest.from_json(text, "F")
