"""scripts/check-cost-model: the program's model fits the table that is shipped, and what does not fit is told.

    python3 check_cost_model_test.py SCRIPT PROGRAM"""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT, PROGRAM = sys.argv.pop(1), sys.argv.pop(1)
TABLE = Path(__file__).resolve().parents[2] / "tables" / "h200-tp2-kimi-k3.json"
MEASURED = sorted((TABLE.parents[1] / "docs" / "data").glob("*/*.json"))


class CheckCostModel(unittest.TestCase):
    def check(self, *arguments):
        return subprocess.run([sys.executable, SCRIPT, *map(str, arguments), "--program", PROGRAM], capture_output=True, text=True, timeout=60)

    def written(self, data):
        file = tempfile.NamedTemporaryFile("w", suffix=".json", delete=False)
        self.addCleanup(Path(file.name).unlink)
        with file:
            json.dump(data, file)
        return file.name

    def test_the_model_fits_the_shipped_table(self):
        done = self.check(TABLE)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"all: median [0-9.]+ %, worst [0-9.]+ % of \d+ points")

    def test_every_point_is_compared(self):
        out = self.written({})
        self.check(TABLE, "--json", out)
        points = [point for group in json.loads(Path(out).read_text())["groups"] for point in group["points"]]
        table = json.loads(TABLE.read_text())["tables"][0]
        self.assertEqual({(point["tail"], point["tokens"]): point["measured_us"] for point in points},
                         {(tail, point["tokens"]): us for point in table["points"] for tail, us in point["us"].items()})
        for point in points:
            self.assertAlmostEqual(point["error"], point["model_us"] / point["measured_us"] - 1)

    def test_bench_files_too(self):
        for file in MEASURED:
            self.assertIn("all: median", self.check(file).stdout, file)

    def test_a_table_that_it_does_not_fit(self):
        table = json.loads(TABLE.read_text())
        for point in table["tables"][0]["points"]:
            point["us"] = {tail: 2 * us for tail, us in point["us"].items()}
        self.assertEqual(self.check(self.written(table)).returncode, 1)
        self.assertEqual(self.check(TABLE, "--machine", "mi300x").returncode, 1)

    def test_files_that_are_no_measurement(self):
        for data in ({}, [], {"schema": "latent-moe/tune/1", "tables": []}, {"schema": "latent-moe/bench/1"}):
            done = self.check(self.written(data))
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)


if __name__ == "__main__":
    unittest.main()
