"""python -m latent_moe.report FILES… -o report.html: one page that shows what was measured, and needs no network.

FILES are JSON of `latent-moe bench`, `verify` and `tune` and of `scripts/check-cost-model`, and traces of `bench --trace`;
the page has a section for each.
Tables hold every figure (exact in the attribute `data-value`), so nothing depends on the drawings or on the script.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

COLOURS = ["#0b62a4", "#c2410c", "#15803d", "#7e22ce", "#b91c1c", "#0e7490", "#a16207", "#be185d", "#4d7c0f", "#1e3a8a"]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: #fff; }
h1 { font-size: 1.6rem; } h2 { margin-top: 3rem; border-top: 2px solid #ddd; padding-top: 1rem; font-size: 1.3rem; }
table { border-collapse: collapse; margin: .6rem 0 1.4rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .15rem .6rem; border-bottom: 1px solid #e5e5e5; text-align: right; }
th[scope=row] { text-align: left; font-weight: 400; } td.best { font-weight: 700; } td.text { text-align: left; }
tr.external th { color: #666; } svg { max-width: 100%; height: auto; } .scroll { overflow-x: auto; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .85rem; }
.legend button { all: unset; cursor: pointer; } .legend button:focus-visible { outline: 2px solid #0b62a4; }
.legend button[aria-pressed=false] { opacity: .35; text-decoration: line-through; }
.note { color: #555; } .fail { color: #b91c1c; font-weight: 700; }
"""

# A click on a name hides its line. Everything is there without it.
SCRIPT = """
for (const button of document.querySelectorAll('.legend button')) {
  button.addEventListener('click', () => {
    const shown = button.getAttribute('aria-pressed') === 'false';
    button.setAttribute('aria-pressed', String(shown));
    const figure = button.closest('figure');
    for (const line of figure.querySelectorAll('g[data-series]')) {
      if (line.dataset.series === button.dataset.series) line.style.display = shown ? '' : 'none';
    }
  });
}
"""


class UnusableError(Exception):
    """A file that no section can be made of."""


def escaped(value: object) -> str:
    return html.escape(str(value))


def figure_text(value: float) -> str:
    """Three significant digits or more."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def cell(value: float | str | None, best: bool = False, title: str = "") -> str:
    """A figure as people read it, and exactly as the file has it."""
    if value is None:
        return "<td>–</td>"
    if isinstance(value, str):
        return f'<td class="text">{escaped(value)}</td>'
    hint = f' title="{escaped(title)}"' if title else ""
    return f'<td data-value="{value!r}"{" class=best" if best else ""}{hint}>{figure_text(value)}</td>'


def table(caption: str, headers: list[str], rows: Iterable[tuple[str, str, list[str]]], name: str = "") -> str:
    """`rows`: a class, the row's own header, its cells."""
    head = "".join(f'<th scope="col">{escaped(header)}</th>' for header in headers)
    body = "".join(
        f'<tr class="{kind}"><th scope="row">{escaped(title)}</th>{"".join(cells)}</tr>' for kind, title, cells in rows
    )
    return (
        f'<div class="scroll"><table data-table="{escaped(name)}"><caption>{escaped(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


Series = dict[str, list[tuple[float, float]]]


def chart(title: str, unit: str, series: Series, dashed: frozenset[str] = frozenset()) -> str:
    """Both axes logarithmic; a table beside it holds the figures."""
    points = [point for line in series.values() for point in line if point[0] > 0 and point[1] > 0]
    if not points:
        return ""
    width, height, left, right, top, bottom = 860, 380, 62, 16, 14, 40
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y, high_y = min(y for _, y in points) * 0.8, max(y for _, y in points) * 1.25
    span_x = math.log(high_x / low_x) or 1.0
    span_y = math.log(high_y / low_y)

    def at_x(x: float) -> float:
        return left + (width - left - right) * (math.log(x / low_x) / span_x)

    def at_y(y: float) -> float:
        return height - bottom - (height - top - bottom) * (math.log(y / low_y) / span_y)

    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escaped(title)}; the table below holds its figures">'
    ]
    for power in range(math.floor(math.log10(low_y)), math.ceil(math.log10(high_y)) + 1):
        for digit in (1, 2, 5):
            tick = digit * 10.0**power
            if low_y <= tick <= high_y:
                parts.append(
                    f'<line x1="{left}" x2="{width - right}" y1="{at_y(tick):.1f}" y2="{at_y(tick):.1f}" stroke="#e5e5e5"/>'
                    f'<text x="{left - 6}" y="{at_y(tick) + 4:.1f}" text-anchor="end" font-size="11">{tick:g}</text>'
                )
    for x in sorted({x for x, _ in points}):
        parts.append(f'<text x="{at_x(x):.1f}" y="{height - bottom + 16}" text-anchor="middle" font-size="11">{x:g}</text>')
    parts.append(
        f'<text x="{(left + width - right) / 2}" y="{height - 4}" text-anchor="middle" font-size="12">tokens</text>'
        f'<text x="12" y="{height / 2}" font-size="12" text-anchor="middle" transform="rotate(-90 12 {height / 2})">'
        f"{escaped(unit)}</text>"
    )
    legend = []
    for index, (name, line) in enumerate(series.items()):
        colour = "#666" if name in dashed else COLOURS[index % len(COLOURS)]
        stroke = ' stroke-dasharray="6 4"' if name in dashed or index >= len(COLOURS) else ""
        faint = ' opacity="0.45"' if name.startswith("external:") else ""
        weight = 1.2 if faint else 2.2
        drawn = [(at_x(x), at_y(y), x, y) for x, y in sorted(line) if x > 0 and y > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in drawn)
        marks = "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2">'
            f"<title>{escaped(name)}: {figure_text(value)} at {tokens:g} tokens</title></circle>"
            for x, y, tokens, value in drawn
        )
        parts.append(
            f'<g data-series="{escaped(name)}" fill="{colour}" stroke="{colour}"{faint}>'
            f'<polyline points="{path}" fill="none" stroke-width="{weight}"{stroke}/>{marks}</g>'
        )
        legend.append(
            f'<li><button aria-pressed="true" data-series="{escaped(name)}">'
            f'<span style="color:{colour}" aria-hidden="true">●</span> '
            f"{escaped(name)}</button></li>"
        )
    parts.append("</svg>")
    drawing = "".join(parts)
    names = "".join(legend)
    return f'<figure><figcaption>{escaped(title)}</figcaption>{drawing}<ul class="legend">{names}</ul></figure>'


# bench


def series_name(row: Row) -> str:
    return row["tail"] + (", dependent launch" if row.get("dependent_launch") else "")


def crossovers(rows: list[Row], external: bool) -> list[tuple[int, str, float]]:
    """The fastest at each number of tokens, where it changes."""
    found: list[tuple[int, str, float]] = []
    for tokens in sorted({row["tokens"] for row in rows}):
        here = [row for row in rows if row["tokens"] == tokens and bool(row.get("external")) == external]
        if here:
            best = min(here, key=lambda row: row["median_us"])
            if not found or found[-1][1] != series_name(best):
                found.append((tokens, series_name(best), best["median_us"]))
    return found


def bench_rows(title: str, name: str, rows: list[Row], field: str) -> str:
    """A line a series, a column a number of tokens."""
    tokens = sorted({row["tokens"] for row in rows})
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(series_name(row), []).append(row)
    best = {count: min(row[field] for row in rows if row["tokens"] == count) for count in tokens}
    lines = []
    for key, own in series.items():
        by_tokens = {row["tokens"]: row for row in own}
        cells = []
        for count in tokens:
            row = by_tokens.get(count)
            span = f"p10 {row['p10_us']:.2f}, p90 {row['p90_us']:.2f} µs, {row['repeats']} repeats" if row else ""
            cells.append(cell(row[field], row[field] == best[count], span) if row else cell(None))
        lines.append(("external" if own[0].get("external") else "", key, cells))
    return table(title, ["", *(f"M = {count}" for count in tokens)], lines, name)


def bench_state(state: str, rows: list[Row]) -> str:
    """What was timed with inputs in one state."""
    times: Series = {}
    ratios: Series = {}
    floors: dict[float, float] = {}
    for row in rows:
        times.setdefault(series_name(row), []).append((row["tokens"], row["median_us"]))
        ratios.setdefault(series_name(row), []).append((row["tokens"], row["ratio_to_floor"]))
        if row["tail"].split(" ")[0] != "onednn-product":
            floors[row["tokens"]] = min(row["floor_us"], floors.get(row["tokens"], math.inf))
    drawn = dict(times)
    drawn["floor of the cheapest tail"] = list(floors.items())
    out = [f"<h3>Inputs: {escaped(state)}</h3>"]
    out.append(chart(f"Time of one tail, inputs {state}", "µs", drawn, frozenset({"floor of the cheapest tail"})))
    out.append(bench_rows("Median µs of one tail (the fastest is bold)", f"median_us/{state}", rows, "median_us"))
    out.append(chart(f"Time over each schedule's own floor, inputs {state}", "× floor", ratios))
    out.append(bench_rows("Ratio to the floor of the same schedule", f"ratio_to_floor/{state}", rows, "ratio_to_floor"))
    for external, whose in ((False, "ours"), (True, "other libraries")):
        changes = crossovers(rows, external)
        if changes:
            told = "; ".join(f"from {tokens} tokens {escaped(name)} ({figure_text(us)} µs)" for tokens, name, us in changes)
            out.append(f"<p>Fastest of {whose}, by measured sizes: {told}.</p>")
    return "".join(out)


def step_section(step: dict[str, Any]) -> str:
    lines = []
    for gain in step["gains"]:
        before, after = gain.get("baseline_tpot_ms"), gain.get("tpot_ms")
        percent = 100 * (before / after - 1) if before and after else None
        lines.append(
            (
                "",
                f"{gain['tail']} instead of {gain['baseline']}",
                [
                    cell(gain["tokens"]),
                    cell(gain["tail_us"]),
                    cell(gain["baseline_us"]),
                    cell(gain["saved_ms"]),
                    cell(before),
                    cell(after),
                    cell(percent),
                ],
            )
        )
    headers = [
        "",
        "tokens",
        "µs a layer",
        "instead of µs",
        "saved ms a step",
        "TPOT before, ms",
        "TPOT, ms",
        "% more tokens/s",
    ]
    return table(f"A step of {step['layers']} layers", headers, lines, "step") if lines else ""


def machine_text(data: dict[str, Any]) -> str:
    machine, shape = data.get("machine", {}), data.get("shape", {})
    parts = [f"{machine.get('constants', 'unknown machine')}; {machine.get('cpu', '')}, {machine.get('cores', '?')} cores"]
    if shape:
        prefix = "" if "prefix" not in shape else ", prefix" if shape["prefix"] else ", no prefix"
        parts.append(f"hidden {shape['hidden']}, latent {shape['latent']}, norm {shape['norm']}, {shape['dtype']}{prefix}")
    parts.append(
        f"ranks: {data.get('ranks', 'unknown')}, TP {', '.join(map(str, sorted({row['tp'] for row in data['rows']})))}"
    )
    if data.get("external_versions"):
        parts.append(", ".join(f"{name} {version}" for name, version in data["external_versions"].items()))
    return "; ".join(parts)


def bench_section(data: dict[str, Any]) -> str:
    out = [f"<p>{escaped(machine_text(data))}</p>"]
    constants = {
        name: value for name, value in data.get("machine", {}).items() if isinstance(value, int | float) and name != "cores"
    }
    if constants:
        out.append(
            table(
                "Constants that the plan and the floor go by",
                ["", "value"],
                [("", name, [cell(value)]) for name, value in constants.items()],
                "machine",
            )
        )
    for layers in sorted({row["layers"] for row in data["rows"]}):
        rows = [row for row in data["rows"] if row["layers"] == layers]
        out.append(f'<p class="note">{layers} layers with weights of their own.</p>')
        for state in dict.fromkeys(row.get("inputs", "raw") for row in rows):
            out.append(bench_state(state, [row for row in rows if row.get("inputs", "raw") == state]))
    out.append(step_section(data["step"]) if data.get("step") else "")
    if data.get("traced"):
        lines = [
            ("", each["tail"], [cell(each["tokens"]), cell(each["launches_per_tail"]), cell(each.get("hidden_share"))])
            for each in data["traced"]
        ]
        out.append(
            table(
                "Traced", ["", "tokens", "launches a tail", "part of the all-reduces beside other kernels"], lines, "traced"
            )
        )
    if data.get("refused"):
        told = "".join(f"<li>{escaped(each['tail'])}: {escaped(each['reason'])}</li>" for each in data["refused"])
        out.append(f"<p>Refused:</p><ul>{told}</ul>")
    if data.get("failure"):
        out.append(f'<p class="fail">The run ended early: {escaped(data["failure"])}</p>')
    return "".join(out)


# verify, tune, traces


def verify_section(data: dict[str, Any]) -> str:
    lines = []
    for case in data["cases"]:
        ratio = case["rel_l2"] / case["chain_rel_l2"] if case["chain_rel_l2"] else None
        lines.append(
            (
                "",
                f"{case['tail']}, {case['backend']}, TP {case['tp']}, {case['dtype']}",
                [
                    cell(case["tokens"]),
                    cell(case["rel_l2"]),
                    cell(case["chain_rel_l2"]),
                    cell(ratio),
                    cell("same" if case["ranks_identical"] and case["repeat_identical"] else "DIFFER"),
                    cell("pass" if case["pass"] else "FAIL"),
                ],
            )
        )
    headers = ["", "tokens", "error (relative L2)", "the unfused chain's", "ratio", "bits on ranks and repeats", "verdict"]
    counted = (
        f"<p>{data['passed']} passed, <span{' class=fail' if data['failed'] else ''}>{data['failed']} failed</span>.</p>"
    )
    return counted + table("Error against float64, beside that of the unfused chain", headers, lines, "verify")


def tune_section(data: dict[str, Any]) -> str:
    out = []
    for each in data["tables"]:
        out.append(
            f"<p>{escaped(each['device'])}, {escaped(each['links'])}, TP {each['tp']}, hidden {each['hidden']}, latent "
            f"{each['latent']}, {escaped(each['dtype'])}, version {escaped(each['version'])}: {escaped(each['origin'])}</p>"
        )
        series: Series = {}
        for point in each["points"]:
            for tail, us in point["us"].items():
                series.setdefault(tail, []).append((point["tokens"], us))
        out.append(chart("Measured times that the plan goes by", "µs", series))
        lines = []
        for point in each["points"]:
            best = min(point["us"].values(), default=None)
            lines.append(
                (
                    "",
                    str(point["tokens"]),
                    [
                        cell(point["us"].get(tail), point["us"].get(tail) == best) if tail in point["us"] else cell(None)
                        for tail in series
                    ],
                )
            )
        out.append(table("Median µs (the fastest is bold)", ["tokens", *series], lines, "tune"))
    changes = data.get("crossovers", [])
    if changes:
        told = "; ".join(f"from {change['from_tokens']} tokens {escaped(change['tail'])}" for change in changes)
        out.append(f"<p>Plan: {told}.</p>")
    if data.get("verified"):
        lines = [
            (
                "",
                str(row["tokens"]),
                [
                    cell(row["chosen"]),
                    cell(row["chosen_us"]),
                    cell(row["best"]),
                    cell(row["best_us"]),
                    cell(row["ratio"], row["ratio"] > data["verified"]["allowed_ratio"]),
                ],
            )
            for row in data["verified"]["rows"]
        ]
        out.append(
            table(
                "The tail that the table chooses, at numbers of tokens that it does not hold (bold: beyond what is allowed)",
                ["tokens", "chosen", "µs", "fastest", "µs", "ratio"],
                lines,
                "verified",
            )
        )
    return "".join(out)


def model_section(data: dict[str, Any]) -> str:
    """What the cost model expected, beside what was measured."""
    out = [
        f"<p>Constants: {escaped(data['machine'])}. Median error {figure_text(100 * data['median'])} %, worst "
        f"{figure_text(100 * data['worst'])} %. The model's figures are predictions.</p>"
    ]
    for group in data["groups"]:
        out.append(f"<p>{escaped(group['title'])}</p>")
        series: Series = {}
        predicted = set()
        lines = []
        for point in group["points"]:
            name = series_name(point)
            series.setdefault(name, []).append((point["tokens"], point["measured_us"]))
            series.setdefault(f"{name}, predicted", []).append((point["tokens"], point["model_us"]))
            predicted.add(f"{name}, predicted")
            figures = [point["tokens"], point["measured_us"], point["model_us"], 100 * point["error"]]
            lines.append(("", name, [cell(figure) for figure in figures]))
        out.append(chart("Measured, and predicted by the cost model", "µs", series, frozenset(predicted)))
        out.append(table("Measured and predicted", ["", "tokens", "measured µs", "predicted µs", "error %"], lines, "model"))
    return "".join(out)


def trace_section(data: dict[str, Any]) -> str:
    kernels: dict[str, list[float]] = {}
    for event in data["traceEvents"]:
        if event.get("ph") == "X":
            kernels.setdefault(event["name"], []).append(event["dur"])
    total = sum(sum(spans) for spans in kernels.values()) or 1.0
    lines = []
    for name, spans in sorted(kernels.items(), key=lambda item: -sum(item[1])):
        share = sum(spans) / total
        rect = f'<rect width="{120 * share:.1f}" height="10" fill="{COLOURS[0]}"/>'
        bar = f'<svg width="120" height="10" aria-hidden="true">{rect}</svg>'
        lines.append(("", name, [cell(len(spans)), cell(sum(spans) / len(spans)), cell(100 * share), f"<td>{bar}</td>"]))
    return table(
        "Stages: kernels of the traced passes, all devices (times under a tracer are longer)",
        ["", "runs", "mean µs", "% of all", ""],
        lines,
        "trace",
    )


SECTIONS = {
    "latent-moe/bench/1": ("Times", bench_section),
    "latent-moe/verify/1": ("Accuracy", verify_section),
    "latent-moe/tune/1": ("Tables of measured times", tune_section),
    "latent-moe/model/1": ("Cost model", model_section),
}


def section(path: Path) -> str:
    try:
        if not path.is_file() and path.exists():
            raise UnusableError(f"{path}: is no regular file")
        data = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise UnusableError(f"{path}: is nested too deeply") from None
    except OSError as error:
        raise UnusableError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UnusableError(f"{path}: is not valid JSON: {error}") from None
    if isinstance(data, dict) and "traceEvents" in data:
        title, make = "Stages", trace_section
    elif isinstance(data, dict) and data.get("schema") in SECTIONS:
        title, make = SECTIONS[data["schema"]]
    else:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise UnusableError(f"{path}: schema is {found}, expected one of {', '.join(SECTIONS)}, or a trace")
    try:
        body = make(data)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise UnusableError(f"{path}: not as its schema says: {error!r}") from None
    return f'<section data-file="{escaped(path.name)}"><h2>{title}: {escaped(path.name)}</h2>{body}</section>'


def page(paths: list[Path]) -> str:
    sections = "".join(section(path) for path in paths)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<link rel="icon" href="data:,"><title>latent-moe: what was measured</title><style>{STYLE}</style></head><body>'
        "<h1>latent-moe: what was measured</h1>"
        '<p class="note">Times are medians of one tail, the slowest rank counting. Ratios count only within one file. '
        "Point at a figure for its spread; click on a name to hide its line.</p>"
        f"{sections}<script>{SCRIPT}</script></body></html>\n"
    )


def write_whole(path: Path, text: str) -> None:
    """The file appears complete or stays as it was."""
    if path.exists() and not path.is_file():  # a device or a pipe
        path.write_text(text, encoding="utf-8")
        return
    beside = path.resolve().with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path.resolve())
    finally:
        beside.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m latent_moe.report", description="One page that shows what was measured."
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="JSON of bench, verify, tune or check-cost-model, or a trace"
    )
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="HTML", help="the page")
    given = parser.parse_args(arguments)
    try:
        for path in given.files:
            if path.exists() and given.out.exists() and path.samefile(given.out):
                raise UnusableError(f"{path}: is given and would be overwritten, expected another name behind -o")
        write_whole(given.out, page(given.files))
    except UnusableError as error:
        print(f"latent_moe.report: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"latent_moe.report: error: {given.out}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
