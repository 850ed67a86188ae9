"""The soak test in small: see ``soak.py``, and run it whole by ``python -m tests.soak``."""

from __future__ import annotations

from tests.soak import run


def test_random_requests_with_everything_going_wrong_leave_nothing_behind() -> None:
    result = run(requests=600)
    assert result["failures"] == 0, result["first_failures"]
    assert result["requests"] >= 600 and result["leaked_blocks"] == result["threads_left"] == 0
    assert set(result["outcomes"]) >= {
        "length",
        "cancelled",
        "aborted",
        "DeadlineError",
        "EngineDeadError",
        "refused",
    }
