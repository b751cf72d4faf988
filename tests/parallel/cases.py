"""A launch that runs cases, and the results that its ranks leave for each."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from parallel import launch

TESTS = pathlib.Path(__file__).resolve().parents[1]

# Limits in seconds for a case and for a launch. A case that hangs is ended by its own limit.
CASE_LIMIT = 300
LAUNCH_LIMIT = 7200

PYTEST = ["-m", "pytest", "-vv", "--tb=short", "-p", "no:cacheprovider", "-p", "parallel.inside"]
PYTEST += ["-o", "faulthandler_exit_on_timeout=true", "--runxfail"]


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a case, over all ranks.

    Attributes:
        outcome: "passed", "skipped" or "failed".
        text: the reason for skipping the case, or the failure and its rank.
        sections: titles and texts of the output of the ranks.
        seconds: the duration of the case.
    """

    outcome: str
    text: str
    sections: list[tuple[str, str]]
    seconds: float


class Launch:
    """Runs cases.

    Args:
        engine: the engine of the ranks.
        ranks: the number of ranks.
        cases: pytest's ids of the cases, relative to `root`.
        root: pytest's rootdir.
        case_limit: the seconds that a case may take on a rank.
        options: further options for pytest.
        environment: further environment variables for the ranks.
    """

    def __init__(
        self,
        engine: str,
        ranks: int,
        cases: Sequence[str],
        root: pathlib.Path,
        case_limit: float = CASE_LIMIT,
        options: Sequence[str] = (),
        **environment: str,
    ) -> None:
        self.ranks = ranks
        self._number = {case: number for number, case in enumerate(cases)}
        self._temporary = tempfile.TemporaryDirectory(prefix="dynemb_ranks_")
        self._folder = pathlib.Path(self._temporary.name)
        (self._folder / "cases.json").write_text(json.dumps(cases))
        files = dict.fromkeys(case.split("::")[0] for case in cases)
        self.ended = launch.run(
            engine,
            ranks,
            [
                *(sys.executable, *PYTEST, "-o", f"faulthandler_timeout={case_limit}"),
                *(*options, f"--rootdir={root}", *files),
            ],
            self._folder / "output.txt",
            LAUNCH_LIMIT,
            cwd=root,
            DYNEMB_LAUNCH=str(self._folder),
            DYNEMB_ENGINE=engine,
            DYNEMB_CASE_LIMIT=str(case_limit),
            PYTEST_DEBUG_TEMPROOT=str(self._folder),
            PYTHONPATH=os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
            **environment,
        )

    def result(self, case: str) -> Result:
        """Combines the results of a case on all ranks."""
        reports = {}
        for rank in range(self.ranks):
            path = self._folder / f"{self._number[case]}.{rank}.json"
            if path.exists():
                reports[rank] = json.loads(path.read_text())
        outcomes = {result["outcome"] for result in reports.values()}
        if len(reports) < self.ranks or outcomes not in ({"passed"}, {"skipped"}):
            outcome, text = "failed", self._failure(reports)
        else:
            (outcome,) = outcomes
            text = reports[0]["text"]
        return Result(
            outcome,
            text,
            [
                (f"{title.removeprefix('Captured ')} on rank {rank}", written)
                for rank, result in reports.items()
                for title, written in result["sections"]
            ],
            max((result["seconds"] for result in reports.values()), default=0),
        )

    def _failure(self, reports: dict[int, dict]) -> str:
        # In the order of time: later failures may be consequences of the first.
        ranks_of: dict[str, list[int]] = {}
        for rank, result in sorted(reports.items(), key=lambda pair: pair[1]["time"]):
            if result["outcome"] == "failed":
                ranks_of.setdefault(result["text"], []).append(rank)
        parts = [f"{self._line('failed', ranks)}\n{text}" for text, ranks in ranks_of.items()]
        missing = [rank for rank in range(self.ranks) if rank not in reports]
        if missing:
            status = "none, it took too long" if self.ended.status is None else self.ended.status
            parts.append(
                f"{self._line('no result', missing)}\nThe launch took {self.ended.seconds:.0f} s; "
                f"its exit status: {status}; the end of its output:\n{self.ended.tail()}"
            )
        if not parts:
            outcomes = {rank: result["outcome"] for rank, result in reports.items()}
            parts.append(f"The outcomes of the ranks differ: {outcomes}")
        return "\n".join(parts)

    def _line(self, what: str, ranks: list[int]) -> str:
        return f"----- {what}: rank {', '.join(map(str, ranks))} of {self.ranks} -----"
