"""The report: its figures are the files', it needs no network, and it refuses what it does not know."""

from __future__ import annotations

import importlib.util
import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docs" / "data").glob("*/*.json"))
MEASURED = [file for file in FILES if json.loads(file.read_text())["schema"] == "latent-moe/bench/1"]

# Loaded by path: it needs the standard library only, not the built package.
_spec = importlib.util.spec_from_file_location("report", ROOT / "python" / "latent_moe" / "report.py")
report = importlib.util.module_from_spec(_spec)
sys.modules["report"] = report
_spec.loader.exec_module(report)

VERIFY = {
    "schema": "latent-moe/verify/1",
    "passed": 1,
    "failed": 1,
    "cases": [
        {
            "tail": "fused",
            "backend": "cuda",
            "tp": 2,
            "tokens": 16,
            "dtype": "bf16",
            "rel_l2": 2.86e-3,
            "chain_rel_l2": 3.03e-3,
            "max_abs": 0.1,
            "ranks_identical": True,
            "repeat_identical": True,
            "pass": True,
        },
        {
            "tail": "overlap",
            "backend": "cuda",
            "tp": 2,
            "tokens": 0,
            "dtype": "bf16",
            "rel_l2": 0,
            "chain_rel_l2": 0,
            "max_abs": 0,
            "ranks_identical": False,
            "repeat_identical": True,
            "pass": False,
        },
    ],
}
TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "name": "k<1>", "dur": 3.0},
        {"ph": "X", "name": "k<1>", "dur": 5.0},
        {"ph": "X", "name": "other", "dur": 24.0},
    ]
}


class Page(HTMLParser):
    """Tables by name: header cells, and rows as a title with the exact values."""

    VOID = frozenset({"meta", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[tuple[str, str], list[tuple[str, list]]] = {}
        self.columns: dict[tuple[str, str], list[str]] = {}
        self.links: list[str] = []
        self.open: list[str] = []
        self.file = ""
        self._table: tuple[str, str] = ("", "")
        self._text = ""
        self._value: float | None = None
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.links += [value for name, value in attributes if name in ("src", "href") and value]
        if tag not in self.VOID:
            self.open.append(tag)
        self._text = ""
        if tag == "section":
            self.file = given["data-file"]
        elif tag == "table":
            self._table = (self.file, given["data-table"])
            while self._table in self.tables:  # a second group of layers
                self._table = (self.file, self._table[1] + "+")
            self.tables[self._table] = []
            self.columns[self._table] = []
        elif tag == "tr" and "tbody" in self.open:
            self.tables[self._table].append(("", []))
        elif tag == "td":
            self._value = float(given["data-value"]) if "data-value" in given else None

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """A shape that closes itself."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        rows = self.tables.get(self._table)
        if tag == "td":
            rows[-1][1].append(self._value if self._value is not None else self._text)
        elif tag == "th" and "thead" in self.open:
            self.columns[self._table].append(self._text)
        elif tag == "th":
            rows[-1] = (self._text, rows[-1][1])

    def handle_data(self, data: str) -> None:
        self._text += data


def page_of(*paths: Path) -> Page:
    return Page(report.page(list(paths)))


def written(folder: Path, name: str, data: object) -> Path:
    path = folder / name
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.name)
def test_figures_of_a_bench_are_the_files(path: Path) -> None:
    data = json.loads(path.read_text())
    page = page_of(path)
    for field in ("median_us", "ratio_to_floor"):
        found = {}
        for (_, name), rows in page.tables.items():
            if not name.startswith(f"{field}/"):
                continue
            columns = page.columns[(path.name, name)][1:]
            for series, values in rows:
                for column, value in zip(columns, values, strict=True):
                    if isinstance(value, float):
                        found[(series, name.split("/")[1], int(column.removeprefix("M = ")))] = value
        expected = {(report.series_name(row), row["inputs"], row["tokens"]): row[field] for row in data["rows"]}
        assert found == expected
    if "step" in data:
        saved = [values[3] for _, values in page.tables[(path.name, "step")]]
        assert saved == [gain["saved_ms"] for gain in data["step"]["gains"]]


def test_there_is_measured_data() -> None:
    assert len(MEASURED) >= 3


def test_a_page_needs_nothing_else() -> None:
    text = report.page(MEASURED)
    assert Page(text).links == ["data:,"]
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    assert "@import" not in text


def test_every_line_of_a_drawing_is_in_its_legend() -> None:
    text = report.chart("a < b", "µs", {"x & y": [(1, 2.0), (16, 3.0)], "floor": [(1, 1.0)]}, frozenset({"floor"}))
    assert text.count('<g data-series="x &amp; y"') == 1
    assert text.count('<button aria-pressed="true"') == 2
    assert text.count("<circle") == 3
    assert 'aria-label="a &lt; b' in text
    assert report.chart("empty", "µs", {}) == ""


def test_crossovers_are_where_the_fastest_changes() -> None:
    rows = [
        {"tail": tail, "tokens": tokens, "median_us": us}
        for tail, tokens, us in (
            ("fused", 1, 8.0),
            ("overlap", 1, 20.0),
            ("fused", 16, 9.0),
            ("overlap", 16, 21.0),
            ("fused", 64, 30.0),
            ("overlap", 64, 25.0),
        )
    ]
    assert report.crossovers(rows, False) == [(1, "fused", 8.0), (64, "overlap", 25.0)]
    assert report.crossovers(rows, True) == []


def test_accuracy_stages_and_tables_of_times(tmp_path: Path) -> None:
    tune = ROOT / "tables" / "h200-tp2-kimi-k3.json"
    page = page_of(written(tmp_path, "verify.json", VERIFY), written(tmp_path, "trace.json", TRACE), tune)
    cases = page.tables[("verify.json", "verify")]
    assert cases[0][1][:4] == [16.0, 2.86e-3, 3.03e-3, 2.86e-3 / 3.03e-3]
    assert cases[1][1][4:] == ["DIFFER", "FAIL"]
    assert page.tables[("trace.json", "trace")] == [("other", [1.0, 24.0, 75.0, ""]), ("k<1>", [2.0, 4.0, 25.0, ""])]
    points = json.loads(tune.read_text())["tables"][0]["points"]
    columns = page.columns[(tune.name, "tune")][1:]
    for point, (tokens, values) in zip(points, page.tables[(tune.name, "tune")], strict=True):
        assert int(tokens) == point["tokens"]
        assert {tail: value for tail, value in zip(columns, values, strict=True) if value != "–"} == point["us"]


def test_predictions_stand_beside_what_was_measured(tmp_path: Path) -> None:
    points = [
        {
            "tail": "fused",
            "dependent_launch": early,
            "tokens": 16,
            "measured_us": us,
            "model_us": 10.0,
            "error": 10.0 / us - 1,
        }
        for early, us in ((False, 11.1), (True, 9.7))
    ]
    model = {"schema": "latent-moe/model/1", "machine": "h200", "median": 0.065, "worst": 0.099}
    model["groups"] = [{"title": "a < b", "points": points}]
    verified = [{"tokens": 3, "chosen": "overlap", "chosen_us": 12.0, "best": "fused", "best_us": 10.0, "ratio": 1.2}]
    tune = {"schema": "latent-moe/tune/1", "tables": [], "verified": {"allowed_ratio": 1.05, "rows": verified}}
    page = page_of(written(tmp_path, "model.json", model), written(tmp_path, "tune.json", tune))
    assert page.tables[("model.json", "model")] == [
        ("fused", [16.0, 11.1, 10.0, 100 * points[0]["error"]]),
        ("fused, dependent launch", [16.0, 9.7, 10.0, 100 * points[1]["error"]]),
    ]
    assert page.tables[("tune.json", "verified")] == [("3", ["overlap", 12.0, "fused", 10.0, 1.2])]
    assert "predictions" in report.page([tmp_path / "model.json"])


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    data = json.loads(MEASURED[0].read_text())
    data["rows"] = data["rows"][:1]
    data["rows"][0]["tail"] = "</script><script>alert(1)</script>"
    assert "<script>alert" not in report.page([written(tmp_path, "a<b.json", data)])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not valid JSON"),
        ("[]", "schema is list"),
        ('{"schema": "x"}', "schema is x, expected one of latent-moe/bench/1"),
        ('{"schema": "latent-moe/bench/1"}', "not as its schema says"),
        ('{"schema": "latent-moe/bench/1", "rows": [{}]}', "not as its schema"),
    ],
)
def test_files_that_are_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    out = tmp_path / "report.html"
    assert report.main([str(path), "-o", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{path}: " in error
    assert says in error
    assert not out.exists()


def test_writes_the_page(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert report.main([*map(str, MEASURED), "-o", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == report.page(MEASURED)


def test_the_page_does_not_take_the_place_of_what_it_shows(tmp_path, capsys):
    given = tmp_path / "verify.json"
    given.write_text(json.dumps(VERIFY))
    assert report.main([str(given), "-o", str(given)]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert json.loads(given.read_text()) == VERIFY


def test_a_page_that_cannot_be_finished_leaves_the_old_one(tmp_path, capsys):
    given, page = tmp_path / "verify.json", tmp_path / "page.html"
    given.write_text("[" * 200_000)
    page.write_text("the old one")
    assert report.main([str(given), "-o", str(page)]) == 2
    assert "nested too deeply" in capsys.readouterr().err
    assert page.read_text() == "the old one"
    assert sorted(tmp_path.iterdir()) == [page, given]
