"""The synthetic runs of tests/report, for the tests of pages."""

from tests.report.conftest import built, crashed, finished

__all__ = ["built", "crashed", "finished"]
