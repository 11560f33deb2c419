"""The table of scripts/coverage: lines that ran, by folder and by file, from what gcov says of a build folder."""

import gzip
import json
import pathlib
import subprocess
import sys
import tempfile
from collections import defaultdict


def lines_of(build):
    """For every source below src/ and include/: line number -> whether it ran in any program."""
    root = pathlib.Path.cwd()
    ran = defaultdict(dict)
    counters = [path for path in build.rglob("*.gcno") if path.with_suffix(".gcda").exists()]
    with tempfile.TemporaryDirectory() as folder:
        for counter in counters:
            subprocess.run(
                ["gcov", "--json-format", str(counter.resolve())], cwd=folder, check=True, stdout=subprocess.DEVNULL
            )
            for report in pathlib.Path(folder).glob("*.gcov.json.gz"):
                with gzip.open(report) as file:
                    found = json.load(file)
                base = pathlib.Path(found["current_working_directory"])
                for source in found["files"]:
                    path = (base / source["file"]).resolve()
                    if not path.is_relative_to(root) or path.relative_to(root).parts[0] not in ("src", "include"):
                        continue
                    lines = ran[str(path.relative_to(root))]
                    for line in source["lines"]:
                        number = line["line_number"]
                        lines[number] = lines.get(number, False) or line["count"] > 0
                report.unlink()
    return ran


def ranges(numbers):
    """1, 2, 3, 7 -> 1-3, 7"""
    parts = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def main():
    ran = lines_of(pathlib.Path(sys.argv[1]))
    folders = defaultdict(lambda: [0, 0])
    for path, lines in ran.items():
        folder = str(pathlib.Path(path).parent)
        folders[folder][0] += sum(lines.values())
        folders[folder][1] += len(lines)
    print(f"{'lines':>6} {'ran':>6}   %  folder")
    for folder, (hit, lines) in sorted(folders.items()):
        print(f"{lines:6} {hit:6} {100 * hit / lines:5.1f}  {folder}")
    hit, lines = (sum(each[at] for each in folders.values()) for at in (0, 1))
    print(f"{lines:6} {hit:6} {100 * hit / lines:5.1f}  in all\n\nfiles with gaps, the largest first:")
    gaps = {path: [number for number, hit in lines.items() if not hit] for path, lines in ran.items()}
    for path, missing in sorted(gaps.items(), key=lambda each: -len(each[1])):
        if missing:
            print(f"{len(missing):5} of {len(ran[path]):5}  {path}: {ranges(missing)}")


if __name__ == "__main__":
    main()
