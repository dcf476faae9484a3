"""Tables of a page can be sorted, filtered and folded, and its figures taken along: in a real browser."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from archipelago.reports.build import ReportRequest, build_report
from tests.support.browser import CHROMIUM, look

ROOT = Path(__file__).parents[2]
ROWS = "[...document.querySelectorAll('#tables tbody tr')]"
UNFOLDED = """(async () => {
  document.querySelector('td.main a').click();
  await new Promise((done) => setTimeout(done, 50));
  const open = document.querySelector(location.hash);
  const link = open.querySelector('td:last-child a').getAttribute('href');
  return [open.open, open.querySelectorAll('tbody tr').length, link];
})()"""
TAKEN = """(async () => {
  const good = [], bad = [], size = { width: 300, height: 200 };
  for (const place of document.querySelectorAll('.plot')) {
    const shown = report.figures.find((each) => each.name === place.dataset.drawn);
    if (!shown || shown.kind === 'images') continue;
    const png = await Plotly.toImage(place, { format: 'png', ...size });
    const svg = decodeURIComponent(await Plotly.toImage(place, { format: 'svg', ...size }));
    const fine = png.startsWith('data:image/png') && png.length > 1000 && svg.includes('<svg');
    (fine ? good : bad).push(shown.name);
  }
  return [good.length, bad.join()];
})()"""
NUMBERS = """report.figures.filter((each) => {
  const rows = reportTools.csv(each.data);
  return rows.length < 2 || new Set(rows.map((row) => row.length)).size > 1;
}).map((each) => each.name).join()"""
QUESTIONS = {
    "costs before": "getComputedStyle(document.querySelector('td.costs')).display",
    "costs after": "document.querySelector('[data-fold=costs]').click(), "
    "getComputedStyle(document.querySelector('td.costs')).display",
    "best first": f"document.querySelectorAll('#tables th')[3].click(), {ROWS}[0].cells[3].textContent",
    "worst first": f"document.querySelectorAll('#tables th')[3].click(), {ROWS}[0].cells[3].textContent",
    "filtered": "(() => { const field = document.querySelector('.tools input'); field.value = 'cam fine'; "
    f"field.dispatchEvent(new Event('input')); return {ROWS}.filter((row) => !row.hidden).length; }})()",
    "buttons": "document.querySelectorAll('.take button').length / document.querySelectorAll('[data-family]').length",
    "links": f"{ROWS}.filter((row) => !row.querySelector('td.main a')).map((row) => row.cells[0].textContent).join()",
    "unfolded": UNFOLDED,
    "taken": TAKEN,
    "numbers": NUMBERS,
    "csv": "reportTools.csv(report.figures.find((each) => each.family === 'bars').data)[0].join()",
}


@pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason="needs chromium")
def test_page_tools_sort_filter_fold_and_save(tmp_path: Path) -> None:
    built = build_report(ReportRequest([str(ROOT / "results" / "cifar10")], out=str(tmp_path), figures="no"))
    means = [row.cells[built.tables[0].metrics[0].name].mean for row in built.tables[0].rows]
    known = [mean for mean in means if mean is not None]
    ready = "document.documentElement.dataset.ready === 'yes'"
    seen = look(tmp_path / "report.html", QUESTIONS, ready=ready, width=390)
    assert not seen.errors
    assert (seen.answers["costs before"], seen.answers["costs after"]) == ("none", "table-cell")
    assert (seen.answers["best first"], seen.answers["worst first"]) == (
        f"{max(known):.2f}",
        f"{min(known):.2f}",
    )
    assert seen.answers["filtered"] == 2 and seen.answers["buttons"] == 3
    assert seen.answers["csv"] == "name,value,std,published"
    assert set(seen.answers["links"].split(",")) == {row.label for row in built.tables[0].guesses}
    assert seen.answers["numbers"] == ""
    drawn, bad = seen.answers["taken"]
    assert drawn > 8 and bad == ""
    opened, runs, link = seen.answers["unfolded"]
    assert (opened, runs) == (True, 1) and (tmp_path / link).is_file()
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (
        "Rows differ in <code>method</code>" in text and "Settings that differ between rows: method" in text
    )
    assert text.index("Settings that differ") < text.index("Settings that all runs share")
