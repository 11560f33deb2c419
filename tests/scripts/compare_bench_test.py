"""What scripts/compare-bench calls moved.

    python3 compare_bench_test.py scripts/compare-bench
"""

import copy
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
SCRIPT = ""


def row(tail, tokens, p10, median, p90, **more):
    return {"tail": tail, "tokens": tokens, "tp": 2, "layers": 12, "inputs": "raw", "dependent_launch": False, "p10_us": p10,
            "median_us": median, "p90_us": p90, **more}


def bench(*rows, **more):
    return {"schema": "latent-moe/bench/1", "ranks": "threads", "machine": {"cores": 2}, "shape": {"hidden": 96}, "rows": list(rows), **more}


class CompareBench(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def compare(self, before, after):
        for name, data in (("before.json", before), ("after.json", after)):
            (self.folder / name).write_text(data if isinstance(data, str) else json.dumps(data))
        return subprocess.run([sys.executable, SCRIPT, "before.json", "after.json"], capture_output=True, text=True, cwd=self.folder)

    def test_what_is_within_the_noise_has_not_moved(self):
        done = self.compare(bench(row("fused", 1, 9, 10, 11)), bench(row("fused", 1, 11, 12, 13)))
        self.assertEqual((done.returncode, done.stdout), (0, "0 slower, 0 faster, 1 within the noise\n"))

    def test_what_is_beyond_it_is_named_and_slower_fails(self):
        before = bench(row("fused", 1, 9, 10, 11), row("fused", 16, 9, 10, 11), row("overlap", 1, 20, 21, 22))
        after = bench(row("fused", 1, 11.5, 12, 13), row("fused", 16, 9, 10, 11), row("overlap", 1, 15, 16, 17))
        done = self.compare(before, after)
        self.assertEqual(done.returncode, 1)
        self.assertIn("slower: fused, 1 tokens, tp 2, 12 layers, raw: 10.00 us (9.00 to 11.00), then 12.00 us (11.50 to 13.00): x 1.200", done.stdout)
        self.assertIn("faster: overlap, 1 tokens", done.stdout)
        self.assertIn("1 slower, 1 faster, 1 within the noise", done.stdout)
        self.assertEqual(self.compare(before, bench(*before["rows"][:2], after["rows"][2])).returncode, 0)

    def test_rows_are_the_same_only_in_the_same_state(self):
        done = self.compare(bench(row("fused", 1, 9, 10, 11)), bench(row("fused", 1, 90, 91, 92, dependent_launch=True)))
        self.assertEqual(done.returncode, 0)
        self.assertIn("gone: fused, 1 tokens, tp 2, 12 layers, raw: ", done.stdout)
        self.assertIn("new: fused, 1 tokens, tp 2, 12 layers, raw, dependent launch: ", done.stdout)

    def test_what_differs_in_machine_and_shape_is_told(self):
        other = bench(row("fused", 1, 9, 10, 11), machine={"cores": 4}, ranks="processes")
        done = self.compare(bench(row("fused", 1, 9, 10, 11)), other)
        self.assertIn("machine differs in cores: 2, then 4\n", done.stdout)
        self.assertIn("ranks differ: threads, then processes\n", done.stdout)

    def test_files_that_cannot_be_compared(self):
        sound = bench(row("fused", 1, 9, 10, 11))
        headless = copy.deepcopy(sound)
        del headless["rows"][0]["p90_us"]
        for broken, says in (("{", "not valid JSON"), ({"schema": "x"}, "expected schema"), (headless, "has no p90_us"),
                             (bench(row("fused", 1, 9, 12, 11)), "outside p10 to p90"),
                             (bench(*sound["rows"], *sound["rows"]), "there twice")):
            done = self.compare(sound, broken)
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1))
            self.assertIn("after.json: ", done.stderr)
            self.assertIn(says, done.stderr)

    def test_measured_data_is_the_same_as_itself(self):
        files = (Path(SCRIPT).parent.parent / "docs" / "data").glob("*/*.json")
        benches = [path for path in files if json.loads(path.read_text())["schema"] == "latent-moe/bench/1"]
        self.assertGreaterEqual(len(benches), 4)
        for path in benches:
            done = subprocess.run([sys.executable, SCRIPT, path, path], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stdout, r"^0 slower, 0 faster, \d+ within the noise\n$")


if __name__ == "__main__":
    SCRIPT = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()
