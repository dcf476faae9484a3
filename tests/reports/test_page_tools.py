"""Tables of a page can be sorted, filtered and folded, and its figures taken along: in a real browser."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from archipelago.reports.build import ReportRequest, build_report
from archipelago.reports.page import figures_in
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
# Every button of every figure: what it would save, by name and by what is in it.
TAKEN = """(async () => {
  const saved = new Map(), texts = new Map(), make = URL.createObjectURL.bind(URL);
  URL.createObjectURL = (blob) => { const name = make(blob); texts.set(name, blob); return name; };
  HTMLAnchorElement.prototype.click = function () { saved.set(this.download, this.href); };
  const found = [];
  for (const card of document.querySelectorAll('[data-family]')) {
    const drawn = report.figures.find((each) => each.name === card.querySelector('.plot').dataset.drawn);
    for (const button of card.querySelectorAll('.take button')) {
      const name = `${drawn.name}.${button.textContent.toLowerCase()}`, late = Date.now() + 5000;
      button.click();
      while (!saved.has(name) && Date.now() < late) { await new Promise((done) => setTimeout(done, 5)); }
      const address = saved.get(name) || '';
      const text = texts.has(address) ? await texts.get(address).text() : decodeURIComponent(address);
      found.push([drawn.kind, button.textContent, text.slice(0, 60), text.length, text.split('\\n').length]);
    }
  }
  return found;
})()"""
NUMBERS = """report.figures.filter((each) => {
  const rows = reportTools.csv(each.data);
  return rows.length < 2 || new Set(rows.map((row) => row.length)).size > 1;
}).map((each) => each.name).join()"""
BOXES = "[...document.querySelectorAll('#tables .scroll')]"
OVERFLOW = f"Math.max(...{BOXES}.map((box) => box.scrollWidth - box.clientWidth))"
SORTED = """(() => {
  const heads = [...document.querySelectorAll('#tables th')];
  const column = heads.findIndex((head) => head.textContent === 'lift');
  const seen = () => [...document.querySelectorAll('#tables tbody tr')].map((row) => row.cells[column].textContent);
  heads[column].click(); const down = seen(); heads[column].click(); return [down, seen()];
})()"""
UNLINKED = """[...document.querySelectorAll('#tables tbody tr:not(.guess)')].flatMap((row) => [...row.cells].slice(1))
  .filter((cell) => /\\d/.test(cell.textContent) && !cell.querySelector('a')).map((cell) => cell.textContent)"""
QUESTIONS = {
    "overflow": OVERFLOW,
    "width": "document.documentElement.scrollWidth",
    "beside": "document.querySelector('[data-fold=details]').click(), " + OVERFLOW,
    "lifts": SORTED,
    "unlinked": UNLINKED,
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


def check_taken(found: list[tuple[str, str, str, int, int]], kinds: set[str]) -> None:
    """Every button saved a file of its kind, with something in it."""
    starts = {"PNG": "data:image/png;base64,", "SVG": "data:image/svg+xml"}
    assert {kind for kind, *_ in found} == kinds and len(found) > 20
    for kind, form, text, size, lines in found:
        if form == "CSV":
            assert "," in text and lines > 2, (kind, text)
            assert kind != "images" or (text.startswith("name,row,column,red,green,blue") and lines > 500)
        else:
            assert text.startswith(starts[form]) and size > 1000, (kind, form, text)


@pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason="needs chromium")
def test_page_tools_sort_filter_fold_and_save(tmp_path: Path) -> None:
    built = build_report(ReportRequest([str(ROOT / "results" / "cifar10")], out=str(tmp_path), figures="no"))
    means = [row.cells[built.tables[0].metrics[0].name].mean for row in built.tables[0].rows]
    known = [mean for mean in means if mean is not None]
    ready = "document.documentElement.dataset.ready === 'yes'"
    seen = look(tmp_path / "report.html", QUESTIONS, ready=ready, width=390)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not seen.errors
    # On a phone a table is as wide as the screen until more of it is asked for.
    assert (seen.answers["overflow"], seen.answers["width"]) == (0, 390) and seen.answers["beside"] > 100
    down, up = seen.answers["lifts"]  # "+3.50", "-13.08", and what guessing is worth below both orders
    guesses = len(built.tables[0].guesses)
    assert guesses and {*down[-guesses:]} == {*up[-guesses:]}
    lifts = [float(text) for text in down[:-guesses] if text]
    assert lifts == sorted(lifts, reverse=True) and min(lifts) < 0 < max(lifts)
    assert [float(text) for text in up[:-guesses] if text] == sorted(lifts)
    assert seen.answers["unlinked"] == []
    assert (seen.answers["costs before"], seen.answers["costs after"]) == ("none", "table-cell")
    assert (seen.answers["best first"], seen.answers["worst first"]) == (
        f"{max(known):.2f}",
        f"{min(known):.2f}",
    )
    assert seen.answers["filtered"] == 2 and seen.answers["buttons"] == 3
    assert seen.answers["csv"] == "name,value,std,published"
    assert set(seen.answers["links"].split(",")) == {row.label for row in built.tables[0].guesses}
    assert seen.answers["numbers"] == ""
    check_taken(seen.answers["taken"], {each["kind"] for each in figures_in(text)})
    opened, runs, link = seen.answers["unfolded"]
    assert (opened, runs) == (True, 1) and (tmp_path / link).is_file()
    assert (
        "Rows differ in <code>method</code>" in text and "Settings that differ between rows: method" in text
    )
    assert text.index("Settings that differ") < text.index("Settings that all runs share")
