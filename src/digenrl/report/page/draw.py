"""Pictures and report.html of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from digenrl.record.run_dir import REPORT, atomic_replace
from digenrl.report.attempt import make_or_warn
from digenrl.report.page import html
from digenrl.report.page.plots import draw_all
from digenrl.report.read_run import Run
from digenrl.report.summary_record import Summary


def draw_report(run: Run, summary: Summary, warnings: list[str]) -> None:
    """Write every picture and report.html of a run. Failures are added to `warnings`."""
    pictures = draw_all(run, warnings)
    page = partial(html.render_page, run, summary, pictures)
    make_or_warn(REPORT, lambda: _write_page(run.path / REPORT, page()), warnings)


def _write_page(path: Path, page: str) -> None:
    with atomic_replace(path) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="replace")
