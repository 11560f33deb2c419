"""scripts/whole-node: its steps fit in eight minutes, a rehearsal on the CPU leaves every file, and its findings are the files'.

    python3 whole_node_test.py SCRIPT PROGRAM"""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace

SCRIPT, PROGRAM = sys.argv.pop(1), sys.argv.pop(1)
loader = importlib.machinery.SourceFileLoader("whole_node", SCRIPT)
script = importlib.util.module_from_spec(importlib.util.spec_from_loader("whole_node", loader))
sys.dont_write_bytecode = True
loader.exec_module(script)


def row(tail, tokens, us, external=False, inputs="raw"):
    return {"tail": tail, "tokens": tokens, "median_us": us, "external": external, "inputs": inputs}


class WholeNode(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="latent-moe-node-")
        self.addCleanup(folder.cleanup)
        self.out = Path(folder.name)

    def run_it(self, *arguments):
        return subprocess.run([sys.executable, SCRIPT, "--program", PROGRAM, "--out", str(self.out), *arguments], capture_output=True, text=True,
                              timeout=300)

    def test_its_limits_fit_in_eight_minutes(self):
        done = self.run_it("--plan", "--tp", "8")
        self.assertEqual(done.returncode, 0, done.stdout)
        for step in ("kernels", "soak", "bench-external", "tune", "model", "report"):
            self.assertIn(f"  {step}: ", done.stdout)
        self.assertIn("--minutes 3 ", done.stdout)

    def test_a_rehearsal_leaves_every_file(self):
        done = self.run_it("--backend", "cpu", "--quick")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual({path.name for path in self.out.iterdir()},
                         {"summary.json", "report.html", "bench.json", "machine.json", "verify.json", "model.json", "cpu-tp2-small.json", "log.txt"})
        summary = json.loads((self.out / "summary.json").read_text())
        self.assertEqual({step["step"]: step["verdict"] for step in summary["steps"] if step["verdict"] in ("skipped", "FAILED", "TIMEOUT")},
                         {"bench-external": "skipped"})
        self.assertTrue(summary["soak"]["passed"])
        self.assertEqual({each["tokens"] for each in json.loads((self.out / "bench.json").read_text())["rows"]}, {1, 8, 64, 256})
        self.assertIn("Cost model: model.json", (self.out / "report.html").read_text())

    def test_a_step_that_fails_is_told_and_the_others_go_on(self):
        broken = self.out / "broken"
        broken.write_text("#!/bin/sh\necho no such thing >&2\nexit 2\n")
        broken.chmod(0o755)
        done = self.run_it("--backend", "cpu", "--quick", "--only", "machine,bench-decode", "--program", str(broken))
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stdout.count("FAILED"), 2, done.stdout)
        self.assertIn("no such thing", (self.out / "log.txt").read_text())

    def test_a_step_ends_at_its_limit(self):
        node = SimpleNamespace(environment=None, work=self.out)
        with (self.out / "log").open("w") as log:
            found = script.run_step(node, log, "slow", 1, [["sleep", "30"], ["false"]])
        self.assertEqual(found["verdict"], "TIMEOUT")
        self.assertLess(found["seconds"], 10)

    def findings(self, tp, rows, **files):
        (self.out / "bench.json").write_text(json.dumps({"rows": rows}))
        work = self.out / "work"
        work.mkdir(exist_ok=True)
        for name, data in files.items():
            (self.out / f"{name}.json").write_text(json.dumps(data))
        found = script.findings(SimpleNamespace(out=self.out, work=work, tp=tp, given=SimpleNamespace(quick=False)))
        return {what: met for what, met, _ in found}

    def test_findings_are_what_the_issue_asks_for(self):
        rows = [row("fused", 8, 6.5), row("fused", 8, 5.9), row("overlap", 8, 14), row("external:a", 8, 13.2, True), row("external:b", 8, 20, True),
                row("fused", 16, 9.5), row("external:a", 16, 30, True), row("fused", 1, 2, inputs="cooperating"),
                row("column_parallel", 4096, 400), row("external:a", 4096, 399, True)]
        model = {"median": 0.1, "worst": 0.31, "machine": "h200"}
        found = self.findings(8, rows, model=model)
        self.assertEqual(found, {"fused at 8": True, "fused beside the best external row at 8": True, "fused at 16": False,
                                 "fused beside the best external row at 16": True, "best tail at 8": True, "best tail at 16": True,
                                 "best tail at 4096": False, "model": False})
        self.assertNotIn("fused at 8", self.findings(4, rows))  # the goals are of TP 8


if __name__ == "__main__":
    unittest.main()
