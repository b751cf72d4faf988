"""Thousands of tables in one process with limited address space."""

import json
import pathlib
import resource
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
LIMIT = 32 << 30


@pytest.mark.slow
def test_a_thousand_tables_within_32_gib_of_addresses(tmp_path):
    """Tables without max_capacity reserve addresses only as they need them (`ulimit -v`)."""
    result = subprocess.run(
        [sys.executable, str(HERE / "many_tables.py"), str(tmp_path), "1000"],
        capture_output=True,
        text=True,
        timeout=900,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT)),
    )
    assert result.returncode == 0, result.stderr[-3000:]
    used = json.loads(result.stdout.splitlines()[-1])
    assert used["tables"] == 1000
    assert used["size"] < LIMIT
    assert used["rss"] < 2 << 30
