"""What scripts/bench-external does with figures; the figures themselves need GPUs.

    python3 bench_external_test.py scripts/bench-external
"""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
SCRIPT = ""


def load():
    loader = importlib.machinery.SourceFileLoader("bench_external", SCRIPT)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def row(tail, tokens, us, external=False, inputs="raw", floor=7.0):
    return {"tail": tail, "tokens": tokens, "median_us": us, "external": external, "inputs": inputs, "floor_us": floor,
            "ratio_to_floor": us / floor}


class Figures(unittest.TestCase):
    def test_bytes_and_floor_are_those_of_the_design(self):
        script = load()
        column = script.work_of("column", 7168, 3584, 1, 2)
        self.assertEqual(column["weights"], 7168 * 3584)
        self.assertEqual(column["wire"], 21504)
        self.assertAlmostEqual(script.floor_us(column), 6.9, delta=0.05)
        self.assertEqual(script.work_of("native", 7168, 3584, 1, 2)["weights"], 2 * 7168 * 3584)

    def test_tokens(self):
        self.assertEqual(load().parse_tokens("1,4-6,16"), [1, 4, 5, 6, 16])

    def test_a_step_compares_the_fastest_tail_with_every_external_row(self):
        rows = [row("fused", 1, 10, inputs="fresh-late"), row("overlap", 1, 20, inputs="fresh-late"), row("fused", 1, 8),
                row("external:a column", 1, 30, True, "fresh-late"), row("onednn-product", 1, 1, inputs="fresh-late")]
        (gain,) = load().step_gains(rows, [1], [23.86])
        self.assertEqual((gain["tail"], gain["baseline"], gain["inputs"]), ("fused", "external:a column", "fresh-late"))
        self.assertAlmostEqual(gain["saved_ms"], 20 * 92 / 1e3)
        self.assertAlmostEqual(gain["tpot_ms"], 23.86 - gain["saved_ms"])
        self.assertNotIn("tpot_ms", load().step_gains(rows, [1], [1.0])[0])  # less than is saved


class Merging(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "bench.json"

    def merge(self, rows, refused=(), step=False):
        arguments = types.SimpleNamespace(step=step, tokens=[1], tpot_ms=None)
        load().merge(self.path, list(rows), list(refused), {"torch": "2"}, arguments)
        return json.loads(self.path.read_text())

    def test_rows_join_and_take_the_floor_of_the_tail_that_they_are_like(self):
        self.path.write_text(json.dumps({"schema": "latent-moe/bench/1", "rows": [row("column_parallel", 1, 20, floor=8)], "refused": []}))
        merged = self.merge([row("external:torch column", 1, 40, True)], [{"tail": "external:x", "reason": "missing"}])
        self.assertEqual([each["tail"] for each in merged["rows"]], ["column_parallel", "external:torch column"])
        self.assertEqual((merged["rows"][1]["floor_us"], merged["rows"][1]["ratio_to_floor"]), (8, 5))
        self.assertEqual(merged["refused"], [{"tail": "external:x", "reason": "missing"}])

    def test_rows_of_an_earlier_merge_are_replaced(self):
        self.path.write_text(json.dumps({"schema": "latent-moe/bench/1", "rows": [row("fused", 1, 9)]}))
        self.merge([row("external:torch column", 1, 40, True)])
        merged = self.merge([row("external:torch column", 1, 41, True)])
        self.assertEqual([each["median_us"] for each in merged["rows"]], [9, 41])

    def test_a_file_of_another_kind_is_left_alone(self):
        self.path.write_text('{"schema": "other", "rows": []}')
        with self.assertRaisesRegex(SystemExit, "schema is 'other'"):
            self.merge([])
        self.assertEqual(self.path.read_text(), '{"schema": "other", "rows": []}')


class Program(unittest.TestCase):
    def test_without_pytorch_or_gpus_it_says_so_in_one_line(self):
        done = subprocess.run([sys.executable, SCRIPT, "--tp", "9999"], capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r"^bench-external: error: .*\n$")


if __name__ == "__main__":
    SCRIPT = sys.argv.pop(1)
    unittest.main()
