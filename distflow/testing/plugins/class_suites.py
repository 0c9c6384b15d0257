"""Engines and backends: the suites that the shipped ones pass, run by pytest within this process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.errors import UserError
from distflow.flow.resolve import check_call, resolve
from distflow.testing.plugins.findings import IMPORTING, SuiteReport
from distflow.testing.plugins.subjects import Subject

if TYPE_CHECKING:
    import pytest

MOST_SHOWN = 10
CLASSES = {"engine": "SuiteOfEngines", "backend": "SuiteOfBackends"}


def run_class_suite(subject: Subject, report: SuiteReport) -> None:
    """Run the suite; `settings` are the options of the pool. Raises UserError without pytest, or for no such class."""
    report.begin(IMPORTING)
    check_call(subject.call, resolve(subject.call), ("spec",), ())
    try:
        import pytest
    except ImportError as error:
        raise UserError("the suites of engines and backends need pytest: pip install pytest") from error
    from distflow.testing.plugins import contract_classes

    listener = _Listener(report)
    os.environ[contract_classes.VARIABLE] = json.dumps([subject.call, dict(subject.settings)])
    file = Path(contract_classes.__file__)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull, f"--rootdir={file.parent}"]
    patterns = ["-o", "python_classes=SuiteOf*", "-o", "python_functions=test_*"]
    pytest.main([*options, *patterns, f"{file}::{CLASSES[subject.kind]}"], plugins=[listener])
    if listener.failed > MOST_SHOWN:
        report.add("wrong", f"and {listener.failed - MOST_SHOWN} more tests fail")
    if listener.passed:
        report.add("ok", f"passes {listener.passed} of {listener.passed + listener.failed} tests of its contract")
    elif not listener.failed:
        report.add("wrong", "the suite could not be run")


class _Listener:
    """Tells each test of the suite; a plug-in of pytest."""

    def __init__(self, report: SuiteReport) -> None:
        self._report = report
        self.passed = 0
        self.failed = 0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._report.begin(_title(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Part of a test is over."""
        self.passed += report.when == "call" and report.passed
        if not report.failed:
            return
        self.failed += 1
        if self.failed <= MOST_SHOWN:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = str(report.longrepr) if crash is None else str(crash.message)
            self._report.add("wrong", f"{_title(report.nodeid)}:\n{message[:600]}")


def _title(node: str) -> str:
    """`…::test_greedy_has_no_log_probs[1.0]` in words."""
    return node.rpartition("::")[2].removeprefix("test_").replace("_", " ")
