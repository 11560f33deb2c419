"""The program `latent-moe` from outside: exit statuses, the one line of an error, files that come out.

    python3 cli_test.py build/latent-moe [--no-mpi] [unittest arguments]
"""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

PROGRAM = ""
MPIRUN = shutil.which("mpirun")
SMALL = ["--hidden", "96", "--latent", "64"]  # 96 columns: divisible by 1, 2, 3, 4 and 8 ranks, not by 5 or 7
TAILS = ["replicated", "overlap", "column_parallel", "token_parallel", "late_reduce", "fused"]


# Files.

def read_tensors(path):
    """Name to (dtype, shape, bytes)."""
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    body = data[8 + length:]
    return {name: (entry["dtype"], entry["shape"], bytearray(body[slice(*entry["data_offsets"])]))
            for name, entry in header.items() if name != "__metadata__"}


def file_bytes(header, body, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def write_tensors(path, tensors, padding=""):
    """`padding` spaces after the header: an odd number misaligns every tensor."""
    header, body = {}, bytearray()
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    Path(path).write_bytes(file_bytes(json.dumps(header).encode() + padding.encode(), bytes(body)))


def rows_of(tensor):
    _, shape, data = tensor
    width = len(data) // shape[0]
    return [bytes(data[row * width:(row + 1) * width]) for row in range(shape[0])]


def bf16(value):
    return struct.pack("<f", value)[2:]


def floats(row):
    return [struct.unpack("<f", b"\0\0" + row[at:at + 2])[0] for at in range(0, len(row), 2)]


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="latent-moe-cli-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def path(self, name):
        return str(self.folder / name)

    def call(self, *arguments, launcher=(), environment=None):
        return subprocess.run([*launcher, PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=120, cwd=self.folder,
                              env={**os.environ, **(environment or {})})

    def succeed(self, *arguments, **more):
        done = self.call(*arguments, **more)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(done.stderr, "")
        return done.stdout

    def refuse(self, status, parts, *arguments, environment=None):
        """One line on standard error that holds every one of `parts`, nothing on standard output, and no file left behind."""
        before = sorted(self.folder.rglob("*"))
        done = self.call(*arguments, environment=environment)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertTrue(done.stderr.startswith("latent-moe: error: "), done.stderr)
        for part in parts:
            self.assertIn(part, done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertEqual(sorted(self.folder.rglob("*")), before)

    def result(self, *arguments, status=0):
        done = self.call(*arguments, "--json", "-")
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return json.loads(done.stdout)

    def make_checkpoint(self, name="checkpoint", *arguments):
        self.succeed("synthesize", *(arguments or SMALL), "--layers", 3, "--shards", 2, "--out", self.path(name))
        return self.path(name)

    def make_inputs(self, *arguments, name="inputs.safetensors"):
        self.succeed("synthesize", *SMALL, "--inputs-out", self.path(name), "--tp", 4, "--tokens", 6, *arguments)
        return self.path(name)


class Usage(Case):
    def test_help_and_version(self):
        self.assertIn("verify", self.succeed("--help"))
        self.assertIn("latent-moe ", self.succeed("--version"))
        for command in ("run", "verify", "bench", "explain", "tune", "inspect", "op", "info", "synthesize"):
            self.assertIn("Examples:", self.succeed(command, "--help"))

    def test_wrong_usage(self):
        self.refuse(2, ["subcommand"])
        self.refuse(2, ["subcommand is 'bogus'", "verify"], "bogus")
        self.refuse(2, ["--bogus"], "run", "--bogus")
        self.refuse(2, ["--model is 'gpt'", "kimi-k3"], "run", "--model", "gpt")
        self.refuse(2, ["--tail is 'fast'", "column_parallel"], "run", *SMALL, "--tail", "fast")
        self.refuse(2, ["--backend is 'tpu'", "cpu"], "run", *SMALL, "--backend", "tpu")
        self.refuse(2, ["--dtype is 'e4m3'", "bf16"], "run", *SMALL, "--dtype", "e4m3")
        self.refuse(2, ["--ranks is 'goblins'"], "run", *SMALL, "--ranks", "goblins")
        self.refuse(2, ["hidden"], "run")
        self.refuse(2, ["--hidden"], "run", "--model", "kimi-k3", "--hidden", "64")
        self.refuse(2, ["hidden is 100", "multiple of 8"], "run", "--hidden", 100, "--latent", 64)
        self.refuse(2, ["hidden is -8"], "run", "--hidden=-8", "--latent", 64)
        self.refuse(2, ["epsilon is nan"], "run", *SMALL, "--eps", "nan")
        self.refuse(2, ["op is 'sum'", "all-reduce-rms-norm"], "op", "sum", *SMALL)
        self.refuse(2, ["run takes one"], "run", *SMALL, "--tail", "all")
        self.refuse(2, ["one number"], "run", *SMALL, "--tokens", "1,2")
        self.refuse(2, ["--limit"], "explain", *SMALL, "--limit", "fused")
        self.refuse(2, ["--limit is 'fused=-1'"], "explain", *SMALL, "--limit", "fused=-1")
        self.refuse(2, ["--input-state is 'raw,warm'", "'warm'"], "bench", *SMALL, "--input-state", "raw,warm")
        self.refuse(2, ["--dependent-launch is 'maybe'", "on, off or both"], "bench", *SMALL, "--dependent-launch", "maybe")
        for seed in ("-1", "1e3", "18446744073709551616"):
            self.refuse(2, [f"--seed is '{seed}'", "0 to 18446744073709551615"], "run", *SMALL, f"--seed={seed}")
        self.refuse(2, ["--tpot-ms", "'fast'"], "bench", *SMALL, "--step", "--tpot-ms", "fast")
        self.refuse(2, ["--tpot-ms", "--step"], "bench", *SMALL, "--tpot-ms", "20")
        self.refuse(2, ["--tpot-ms has 3 numbers", "1 or 2"], "bench", *SMALL, "--step", "--tokens", "1,2", "--tpot-ms", "1,2,3")

    def test_ranks(self):
        self.refuse(2, ["--tp is 0", "1 to 16"], "run", *SMALL, "--tp", 0)
        self.refuse(2, ["--tp is 17", "1 to 16"], "run", *SMALL, "--tp", 17)
        self.refuse(2, ["--tp is '2x'"], "run", *SMALL, "--tp", "2x")
        self.refuse(2, ["--tp is '99999999999999999999'"], "run", *SMALL, "--tp", "99999999999999999999")
        self.refuse(2, ["column_parallel", "96", "not divisible by 5"], "run", *SMALL, "--tp", 5, "--tail", "column_parallel")
        self.assertEqual(self.result("run", *SMALL, "--tp", 5, "--repeats", 1)["pass"], True)  # another tail runs

    def test_tokens(self):
        for text, part in (("-1", "outside 0 to 65536"), ("65537", "outside"), ("3-1", "backwards"), ("1,,2", "not a whole number"),
                           ("", "LIST"), ("1-", "not a whole number"), ("0x10", "not a whole number")):
            self.refuse(2, ["--tokens", part], "verify", *SMALL, f"--tokens={text}")

    def test_tails_that_cannot_run(self):
        self.refuse(2, ["late_reduce", "norm"], "run", *SMALL, "--tail", "late_reduce")
        self.refuse(2, ["late_reduce", "norm"], "verify", *SMALL, "--tail", "late_reduce")
        self.refuse(2, ["one rank"], "bench", *SMALL, "--tp", 1, "--tail", "column_parallel")

    def test_what_the_machine_cannot_do(self):
        self.refuse(3, ["GB"], "run", "--hidden", 1048576, "--latent", 1048576)
        if os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 48e9:  # else the machine can do it
            self.refuse(3, ["workspaces of 16 ranks", "GB"], "info", "--hidden", 1048576, "--latent", 1048576, "--tp", 16)
        self.refuse(2, ["--input-state", "cpu"], "bench", *SMALL, "--backend", "cpu", "--input-state", "all")
        self.refuse(3, ["--trace", "cpu"], "bench", *SMALL, "--backend", "cpu", "--trace", self.path("trace.json"))
        information = self.result("info")
        here = [backend["name"] for backend in information["backends"] if backend["available"]]
        for backend in {"cuda", "hip"} - set(here):
            self.refuse(3, [backend], "run", *SMALL, "--backend", backend)

    def test_outputs_that_cannot_be_written(self):
        for option in ("--out", "--json"):
            self.refuse(2, ["missing/file"], "run", *SMALL, option, "missing/file")
            self.refuse(2, ["is a directory"], "run", *SMALL, option, ".")
            self.refuse(2, ['""'], "run", *SMALL, option, "")
        self.refuse(2, ["nothing to write"], "synthesize", *SMALL)
        self.refuse(2, ["--out is ''"], "synthesize", *SMALL, "--out", "")
        self.refuse(2, ['""'], "run", *SMALL, "--inputs", "")

    def test_synthesize_checks_all_its_outputs_before_it_writes_one(self):
        both = ["synthesize", *SMALL, "--shards", 2, "--out", self.path("checkpoint")]
        self.refuse(2, ["missing/file"], *both, "--inputs-out", "missing/file")
        self.refuse(2, ["one number of --tokens"], *both, "--inputs-out", self.path("inputs"), "--tokens", "1,2")
        self.succeed(*both, "--inputs-out", self.path("checkpoint/inputs"), "--quiet")
        shutil.rmtree(self.path("checkpoint"))
        os.makedirs(self.path("checkpoint/model-00002-of-00002.safetensors"))
        self.refuse(2, ["is a directory"], *both, "--quiet")  # and the first shard is not left behind

    def test_names_of_any_bytes_are_told_in_one_line(self):
        name = "two\nlines \x1b[31m"
        run = self.succeed("run", *SMALL, "--repeats", 1, "--out", self.path(name))
        self.assertIn("two\\nlines \\x1b[31m", run)
        self.refuse(2, ["missing\\nfile"], "run", *SMALL, "--weights", "missing\nfile")

    def test_outputs_take_the_place_of_nothing_that_is_read_or_written(self):
        inputs = self.make_inputs()
        model = self.make_checkpoint()
        index = model + "/model.safetensors.index.json"
        read = ["run", "--weights", model, "--inputs", inputs]
        for path, what in ((inputs, "the inputs are read from"), (index, "the weights are read from"), ("out", "--out names too")):
            self.refuse(2, [f"--json is {path}", what, "another file"], *read, "--out", "out", "--json", path)
        self.refuse(2, ["the weights are read from"], "inspect", model, "--json", index)
        self.succeed(*read, "--repeats", 1, "--quiet", "--out", "/dev/null", "--json", "/dev/null")

    def test_a_process_that_is_killed_leaves_no_half_of_a_file(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            soak = subprocess.Popen([PROGRAM, "soak", "--backend", "cpu", "--minutes", "1", "--json", self.path("soak.json")],
                                    stderr=subprocess.PIPE, text=True)
            time.sleep(1)
            soak.send_signal(number)
            soak.communicate(timeout=60)
            self.assertEqual(os.listdir(self.folder), [])

    def test_standard_output_that_cannot_be_written(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([PROGRAM, "info"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1))
        with open("/dev/full", "w") as full:
            done = subprocess.run([PROGRAM, "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual((done.returncode, done.stderr), (2, "latent-moe: error: standard output: cannot write the help\n"))
        done = subprocess.run(f"{PROGRAM} info >&-", shell=True, stderr=subprocess.PIPE, text=True)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1))
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([PROGRAM, "info"], stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        self.assertEqual((done.returncode, done.stderr), (0, ""))


class Files(Case):
    def test_checkpoints_of_both_families(self):
        for name, family, arguments in (("kimi", "kimi-k3", SMALL), ("nemotron", "nemotron-3", [*SMALL, "--norm", "none"]),
                                        ("float8", "nemotron-3", [*SMALL, "--norm", "none", "--weight-dtype", "e4m3"])):
            with self.subTest(name):
                checkpoint = self.make_checkpoint(name, *arguments)
                layers = self.result("inspect", checkpoint)["layers"]
                self.assertEqual([layer["layer"] for layer in layers], [1, 2, 3])
                self.assertEqual({(layer["family"], layer["hidden"], layer["latent"]) for layer in layers}, {(family, 96, 64)})
                self.assertEqual(layers[0]["norm"], "rms" if family == "kimi-k3" else "none")
                for path in (checkpoint, checkpoint + "/model.safetensors.index.json"):
                    run = self.result("run", "--weights", path, "--layer", 2, "--tp", 4, "--repeats", 1)
                    self.assertEqual((run["layer"], run["pass"]), (2, True))

    def test_files_and_seed_give_the_same_output(self):
        checkpoint, inputs = self.make_checkpoint(), self.make_inputs()
        common = ["--tail", "column_parallel", "--repeats", 1]
        self.succeed("run", "--weights", checkpoint, "--layer", 3, "--inputs", inputs, "--out", self.path("files"), *common)
        self.succeed("run", *SMALL, "--layer", 3, "--tp", 4, "--tokens", 6, "--out", self.path("seed"), *common)
        self.assertEqual(read_tensors(self.path("files"))["out"], read_tensors(self.path("seed"))["out"])
        self.assertEqual(read_tensors(self.path("files"))["out"][:2], ("BF16", [6, 96]))

    def test_misaligned_tensors(self):
        checkpoint, inputs = self.make_checkpoint(), self.make_inputs()
        for path in (inputs, *Path(checkpoint).glob("*.safetensors")):
            tensors = read_tensors(path)
            for padding in ("", " "):
                write_tensors(path, tensors, padding)
                if os.path.getsize(path) % 2 == 1:
                    break
        self.assertTrue(self.result("run", "--weights", checkpoint, "--inputs", inputs, "--repeats", 1)["pass"])

    def test_inputs_decide_dtype_and_ranks(self):
        inputs = self.make_inputs("--dtype", "f16", "--no-prefix")
        run = self.result("run", "--inputs", inputs, "--out", self.path("out"), "--repeats", 1)
        self.assertEqual((run["tp"], run["tokens"], run["dtype"]), (4, 6, "f16"))
        self.assertEqual(read_tensors(self.path("out"))["out"][0], "F16")

    def test_weights_that_do_not_fit(self):
        checkpoint = self.make_checkpoint()
        self.refuse(2, ["no latent-MoE layer 9", "1-3"], "run", "--weights", checkpoint, "--layer", 9)
        self.refuse(2, ["hidden is 96", "7168", "kimi-k3"], "run", "--weights", checkpoint, "--model", "kimi-k3")
        self.refuse(2, ["latent is 64", "128"], "run", "--weights", checkpoint, "--latent", 128)
        self.refuse(2, ["missing.safetensors"], "run", "--weights", "missing.safetensors")
        self.refuse(2, ["holds no latent-MoE layer"], "inspect", self.make_inputs())
        nemotron = self.make_checkpoint("nemotron", *SMALL, "--norm", "none")
        self.refuse(2, ["norm"], "run", "--weights", nemotron, "--norm", "rms")

    def test_deferred_rows_are_drawn_only(self):
        self.refuse(2, ["--deferred and --inputs", "combined rows"], "verify", "--inputs", self.make_inputs(), "--deferred", 2)

    def test_inputs_that_do_not_fit(self):
        inputs = self.make_inputs()
        self.refuse(2, ["missing"], "run", *SMALL, "--inputs", "missing")
        self.refuse(2, ["routed.0 has 64 columns", "32"], "run", "--latent", 32, "--inputs", inputs)
        self.refuse(2, ["shared.0 has 96 columns", "128"], "run", "--hidden", 128, "--latent", 64, "--inputs", inputs)
        self.refuse(2, ["bf16", "f32"], "run", "--inputs", inputs, "--dtype", "f32")
        self.refuse(2, ["4 ranks", "2"], "run", "--inputs", inputs, "--tp", 2)
        self.refuse(2, ["7", "6"], "run", "--inputs", inputs, "--tokens", 7)
        self.refuse(2, ["shared.0"], "run", "--inputs", inputs, "--shared", "absent")
        tensors = read_tensors(inputs)
        tensors["shared.3"] = ("BF16", [2, 48], tensors["shared.3"][2][:2 * 48 * 2])
        write_tensors(self.path("ragged"), tensors)
        self.refuse(2, ["ragged", "shared.3"], "run", "--inputs", "ragged")
        tensors["shared.3"] = ("I16", [6, 96], read_tensors(inputs)["shared.3"][2])
        write_tensors(self.path("integers"), tensors)
        self.refuse(2, ["integers", "shared.3", "I16"], "run", "--inputs", "integers")
        tensors = read_tensors(inputs)
        del tensors["routed.0"]
        write_tensors(self.path("incomplete"), tensors)
        self.refuse(2, ["incomplete", "routed.0"], "run", "--inputs", "incomplete")

    def test_broken_files(self):
        inputs = Path(self.make_inputs())
        sound = inputs.read_bytes()
        tensor = {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}
        broken = {
            "empty": b"",
            "short": b"\x10\0\0",
            "header_2_60": file_bytes(b"{}", b"", 1 << 60),
            "header_2_64": file_bytes(b"{}", b"", (1 << 64) - 1),
            "no_json": file_bytes(b"hello, world", b""),
            "truncated": sound[:-100],
            "truncated_header": sound[:60],
            "trailing": sound + b"\0" * 8,
            "overlap": file_bytes({"routed.0": tensor, "shared.0": {**tensor, "data_offsets": [4, 12]}}, b"\0" * 12),
            "hole": file_bytes({"routed.0": tensor, "shared.0": {**tensor, "data_offsets": [12, 20]}}, b"\0" * 20),
            "outside": file_bytes({"routed.0": {**tensor, "data_offsets": [0, 1 << 62]}}, b"\0" * 8),
            "wrong_shape": file_bytes({"routed.0": {**tensor, "shape": [2, 3]}}, b"\0" * 8),
            "huge_shape": file_bytes({"routed.0": {**tensor, "shape": [1 << 40, 1 << 40]}}, b"\0" * 8),
            "negative": file_bytes({"routed.0": {**tensor, "shape": [-2, -2]}}, b"\0" * 8),
            "wrong_dtype": file_bytes({"routed.0": {**tensor, "dtype": "BF17"}}, b"\0" * 8),
            "duplicate": file_bytes(b'{"routed.0":%b,"routed.0":%b}' % ((json.dumps(tensor).encode(),) * 2), b"\0" * 8),
            "newline": file_bytes({"routed\n.0": {**tensor, "shape": [2, 3]}}, b"\0" * 8),
        }
        for name, data in broken.items():
            with self.subTest(name):
                (self.folder / name).write_bytes(data)
                self.refuse(2, [name], "run", *SMALL, "--inputs", name)
                self.refuse(2, [name], "run", "--weights", name)
                self.refuse(2, [name], "inspect", name)

    def test_folders_and_devices(self):
        self.refuse(2, ["."], "run", *SMALL, "--inputs", ".")
        self.refuse(2, ["/dev/null"], "run", "--weights", "/dev/null")
        os.mkfifo(self.path("pipe"))
        self.refuse(2, ["pipe"], "run", "--weights", "pipe")


class Results(Case):
    def test_no_tokens(self):
        run = self.result("run", *SMALL, "--tokens", 0, "--out", self.path("out"))
        self.assertEqual((run["tokens"], run["rel_l2"], run["chain_rel_l2"], run["pass"]), (0, 0, 0, True))
        self.assertEqual(read_tensors(self.path("out"))["out"], ("BF16", [0, 96], b""))

    def test_run_says_what_it_did(self):
        text = self.succeed("run", *SMALL, "--tp", 4, "--repeats", 2)
        for part in ("column_parallel", "only one that can run", "replicated: cannot run", "float64", "median", "identical on every rank"):
            self.assertIn(part, text)
        self.assertEqual(self.succeed("run", *SMALL, "--quiet", "--repeats", 1), "")

    def test_nan_and_infinity_stay_on_their_rows(self):
        inputs = self.make_inputs()
        for tail in TAILS[:4]:
            with self.subTest(tail):
                arguments = ["run", "--inputs", inputs, "--tail", tail, "--repeats", 1, "--out", self.path("out")]
                write_tensors(inputs, self.sound_inputs(inputs))
                self.succeed(*arguments)
                sound = rows_of(read_tensors(self.path("out"))["out"])

                tensors = self.sound_inputs(inputs)
                self.put(tensors, "routed.1", 1, 5, float("nan"))
                self.put(tensors, "routed.0", 2, 7, float("inf"))
                self.put(tensors, "shared.3", 4, 9, float("-inf"))
                write_tensors(inputs, tensors)
                self.succeed(*arguments)
                rows = rows_of(read_tensors(self.path("out"))["out"])
                self.assertEqual([rows[at] for at in (0, 3, 5)], [sound[at] for at in (0, 3, 5)])
                for at in (1, 2):  # through the norm and the projection every element depends on the whole row
                    self.assertTrue(all(value != value for value in floats(rows[at])), at)
                self.assertEqual(floats(rows[4])[9], float("-inf"))
                self.assertEqual(rows[4][:18] + rows[4][20:], sound[4][:18] + sound[4][20:])

    def sound_inputs(self, inputs):
        if not os.path.exists(inputs + ".sound"):
            shutil.copy(inputs, inputs + ".sound")
        return read_tensors(inputs + ".sound")

    @staticmethod
    def put(tensors, name, row, column, value):
        _, (_, columns), data = tensors[name]
        at = 2 * (row * columns + column)
        data[at:at + 2] = bf16(value)

    def test_verify(self):
        for arguments in (["--tp", 3], ["--tp", 7], ["--tp", 1], ["--tp", 4, "--norm", "none"], ["--tp", 2, "--dtype", "f16"],
                          ["--tp", 3, "--dtype", "f32"], ["--tp", 4, "--shared", "reduced"], ["--tp", 3, "--shared", "absent", "--no-prefix"],
                          ["--tp", 4, "--sequence-parallel"], ["--tp", 2, "--weight-dtype", "e4m3", "--routed-scale", "2.5"]):
            with self.subTest(arguments):
                verify = self.result("verify", *SMALL, "--tokens", "0,1,5-7", *arguments)
                self.assertEqual((verify["schema"], verify["failed"]), ("latent-moe/verify/1", 0))
                self.assertEqual(verify["passed"], len(verify["cases"]))
                self.assertEqual(len(verify["cases"]) + len(verify["refused"]), len(TAILS) * 5)
                for case in verify["cases"]:
                    self.assertEqual(set(case), {"tail", "backend", "tp", "tokens", "dtype", "rel_l2", "chain_rel_l2", "max_abs",
                                                 "ranks_identical", "repeat_identical", "pass"})
                    self.assertTrue(case["pass"] and case["ranks_identical"] and case["repeat_identical"])
                    if case["tokens"] == 0:
                        self.assertEqual((case["rel_l2"], case["chain_rel_l2"]), (0, 0))
                    else:
                        self.assertGreater(case["chain_rel_l2"], 0)

    # Each feature: which tails serve it on the CPU, and why the others do not.
    PORTABLE = set(TAILS) - {"fused"}
    FEATURES = (
        (["--deferred", 4], PORTABLE, {}),
        (["--deferred", 1, "--dtype", "f16"], PORTABLE, {}),
        (["--float8-weights"], PORTABLE, {}),
        (["--weight-dtype", "e4m3"], PORTABLE, {}),
        (["--float8-weights", "--deferred", 3, "--no-prefix"], PORTABLE, {}),
        (["--expert-parallel", "--shared", "reduced", "--deferred", 2], {"replicated", "column_parallel", "token_parallel"},
         {"overlap": "already reduced", "late_reduce": "already reduced"}),
        (["--shared", "absent", "--deferred", 2], PORTABLE - {"overlap"}, {"overlap": "there is no shared partial"}),
        (["--sequence-parallel", "--deferred", 2, "--float8-weights"], {"token_parallel"},
         {tail: "wants its own tokens only" for tail in PORTABLE - {"token_parallel"}}),
    )

    def test_every_feature_through_every_tail(self):
        for arguments, serving, reasons in self.FEATURES:
            with self.subTest(arguments):
                verify = self.result("verify", "--backend", "cpu", *SMALL, "--norm", "none", "--tp", 3, "--tokens", "0,1,7", "--tail",
                                     "all", *arguments)
                self.assertEqual(verify["failed"], 0)
                self.assertEqual({case["tail"] for case in verify["cases"]}, serving)
                self.assertEqual(len(verify["cases"]), 3 * len(serving))
                refused = {each["tail"]: each["reason"] for each in verify["refused"]}
                self.assertEqual(set(refused), set(TAILS) - serving)
                for tail, reason in reasons.items():
                    self.assertIn(reason, refused[tail])

    def test_batch_invariance_through_every_tail(self):
        shape = ["--hidden", 768, "--latent", 512, "--norm", "none", "--tp", 3]
        for tail in self.PORTABLE:
            with self.subTest(tail):
                verify = self.result("verify", "--backend", "cpu", *shape, "--tokens", "1,7,64,2,300", "--tail", tail, "--deferred", 2,
                                     "--batch-invariant")
                self.assertEqual(verify["passed"], 5)
                self.assertTrue(all(case["batch_identical"] for case in verify["cases"]))
        refused = self.result("verify", "--backend", "cpu", *shape, "--tokens", 1, "--batch-invariant")["refused"]
        self.assertEqual(len(refused), len(TAILS) - 1)
        for each in refused:
            self.assertIn("a batch-invariant context keeps to one tail", each["reason"])

    def test_float8_packing_tells_what_it_costs(self):
        verify = self.result("verify", "--backend", "cpu", *SMALL, "--tokens", 5, "--float8-weights", "--tail", "replicated")
        self.assertGreater(verify["float8_rel_l2"], 0.003)
        self.assertLess(verify["float8_rel_l2"], 0.03)

    def test_verify_of_files(self):
        verify = self.result("verify", "--weights", self.make_checkpoint(), "--inputs", self.make_inputs(), "--tail", "auto")
        self.assertEqual([(case["tp"], case["tokens"]) for case in verify["cases"]], [(4, 6)])

    def test_bench(self):
        bench = self.result("bench", *SMALL, "--tokens", "0,4", "--layers", 2, "--repeats", 3, "--threads", 1)
        self.assertEqual(bench["schema"], "latent-moe/bench/1")
        self.assertIn("cores", bench["machine"])
        self.assertEqual({row["tail"] for row in bench["rows"]}, {*TAILS[:4], "onednn-product"})
        for row in bench["rows"]:
            self.assertEqual(set(row), {"tail", "backend", "tp", "tokens", "layers", "median_us", "p10_us", "p90_us", "repeats",
                                        "hbm_bytes", "wire_bytes", "floor_us", "ratio_to_floor", "inputs", "dependent_launch", "external", "spread"})
            self.assertEqual((row["inputs"], row["dependent_launch"], row["external"]), ("raw", False, False))
            self.assertLessEqual(row["p10_us"], row["median_us"])
            self.assertLessEqual(row["median_us"], row["p90_us"])
            self.assertGreater(row["floor_us"], 0)
        without = self.result("bench", *SMALL, "--tokens", 4, "--layers", 2, "--repeats", 1, "--threads", 1, "--no-external")["rows"]
        self.assertNotIn("onednn-product", {row["tail"] for row in without})
        checkpoint = self.make_checkpoint()
        rows = self.result("bench", "--weights", checkpoint, "--tokens", 2, "--repeats", 1, "--tail", "column_parallel", "--threads", 1)["rows"]
        self.assertEqual(rows[0]["layers"], 3)

    def test_bench_of_a_step(self):
        step = self.result("bench", *SMALL, "--step", "--tokens", "1,2", "--repeats", 1, "--threads", 1, "--tail", "column_parallel",
                           "--tpot-ms", "20,30.5")
        self.assertEqual({row["layers"] for row in step["rows"] if row["tail"] == "column_parallel"}, {92})
        self.assertEqual(step["step"], {"layers": 92, "gains": []})  # no external tail on a CPU
        told = self.succeed("bench", *SMALL, "--step", "--layers", 3, "--tokens", 1, "--repeats", 1, "--threads", 1, "--tail", "column_parallel")
        self.assertIn("a step of 92 layers, by the time of a tail among 3", told)

    def test_progress_of_bench(self):
        done = self.call("bench", *SMALL, "--tokens", 4, "--layers", 2, "--repeats", 1, "--threads", 1, "--progress", "--quiet")
        self.assertEqual((done.returncode, done.stdout), (0, ""))
        self.assertRegex(done.stderr, r"\[ *[0-9.]+ s\] adding 2 layers\n(.*\n)*\[ *[0-9.]+ s\] done\n$")

    def test_explain(self):
        explain = self.result("explain", *SMALL, "--tp", 4, "--tokens", "1,8", "--limit", "column_parallel=4", "--keep-whole-weights")
        self.assertEqual(explain["schema"], "latent-moe/explain/1")
        self.assertEqual([row["tokens"] for row in explain["rows"]], [1, 8])
        for row in explain["rows"]:
            self.assertGreater(row["expected_us"], 0)
            self.assertEqual(len(row["refused"]) + len(row["candidates"]), len(TAILS))
        reasons = {each["tail"]: each["reason"] for each in explain["rows"][1]["refused"]}
        self.assertIn("limit", reasons["column_parallel"])
        self.assertIn("norm", reasons["late_reduce"])

    def test_tune(self):
        how = [*SMALL, "--tp", 2, "--threads", 1]
        tuned = self.result("tune", *how, "--tokens", "8,1,64", "--layers", 2, "--repeats", 3, "--out", self.path("table.json"))
        (table,) = tuned["tables"]
        self.assertEqual([point["tokens"] for point in table["points"]], [1, 8, 64])
        self.assertEqual(set(table["points"][0]["us"]), set(TAILS[:4]))
        self.assertEqual(tuned["crossovers"][0]["from_tokens"], 0)
        (saved,) = json.loads(Path(self.path("table.json")).read_text())["tables"]
        self.assertEqual(saved, table)

        plan = self.result("explain", *how, "--tokens", "1,3,8,30,64", "--keep-whole-weights", "--table", self.path("table.json"))
        chosen = {row["tokens"]: row["tail"] for row in plan["rows"]}
        self.assertTrue(all(row["from_table"] and row["source"].startswith("table ") for row in plan["rows"]))
        for between, left, right in ((3, 1, 8), (30, 8, 64)):  # what was not measured goes by a neighbour
            self.assertIn(chosen[between], (chosen[left], chosen[right]))
        limited = self.result("explain", *how, "--tokens", 1, "--keep-whole-weights", "--table", self.path("table.json"),
                              "--limit", f"{chosen[1]}=0")["rows"][0]
        self.assertNotEqual(limited["tail"], chosen[1])

        other = self.result("explain", *SMALL, "--tp", 4, "--threads", 1, "--tokens", 1, "--table", self.path("table.json"))["rows"][0]
        self.assertFalse(other["from_table"])
        self.assertIn("is not used: its tp is 2, here it is 4", other["source"])
        self.result("tune", *SMALL, "--tp", 4, "--threads", 1, "--tokens", 1, "--layers", 1, "--repeats", 1, "--out", self.path("table.json"))
        # One that is stopped early does not take the place of a fuller one.
        before = Path(self.path("table.json")).read_text()
        done = self.call("tune", *how, "--tokens", "1,2", "--layers", 1, "--repeats", 1, "--budget-s", 0, "--out", self.path("table.json"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("not saved", done.stdout)
        self.assertEqual(Path(self.path("table.json")).read_text(), before)
        self.result("tune", *how, "--tokens", 1, "--layers", 1, "--repeats", 1, "--out", self.path("table.json"))
        tables = json.loads(Path(self.path("table.json")).read_text())["tables"]
        self.assertEqual([(each["tp"], len(each["points"])) for each in tables], [(2, 1), (4, 1)])

    def test_tune_in_bounded_time(self):
        tuned = self.result("tune", *SMALL, "--tokens", "1,2,4", "--layers", 1, "--repeats", 1, "--threads", 1, "--budget-s", 0)
        self.assertEqual([point["tokens"] for point in tuned["tables"][0]["points"]], [1])
        self.assertEqual(tuned["stopped_before_tokens"], 2)

    def test_tune_says_before_it_measures_what_it_cannot_do(self):
        self.refuse(2, ["nowhere/t.json"], "tune", *SMALL, "--tokens", 1, "--out", self.path("nowhere/t.json"))
        self.refuse(2, ["not expected", "--table"], "tune", *SMALL, "--tokens", 1, "--table", "t.json")
        self.refuse(2, ["x" * 40], "tune", *SMALL, "--tokens", 1, "--out", self.path("x" * 300))
        told = self.succeed("tune", *SMALL, "--tokens", "1,2", "--layers", 1, "--repeats", 1, "--threads", 1, "--verify", 3)
        self.assertIn("nothing to verify", told)

    def test_run_does_not_write_over_what_it_reads(self):
        model, inputs = self.make_checkpoint(), self.make_inputs()
        shard = next(Path(model).glob("*.safetensors"))
        held = shard.read_bytes()
        read = ("--weights", model, "--inputs", inputs)
        for out, what in ((shard, "weights"), (inputs, "inputs")):
            self.refuse(2, [f"which the {what} are read from"], "run", *read, "--out", out)
        self.assertEqual(shard.read_bytes(), held)

    def test_tune_verifies_what_it_chose(self):
        done = self.call("tune", *SMALL, "--tp", 2, "--tokens", "1,8,64", "--layers", 1, "--repeats", 1, "--threads", 1, "--verify", 5, "--json", "-")
        verified = json.loads(done.stdout)["verified"]
        self.assertEqual(len(verified["rows"]), 5)
        good = 0
        for row in verified["rows"]:
            self.assertTrue(1 < row["tokens"] < 64 and row["tokens"] != 8, row)
            self.assertAlmostEqual(row["ratio"], row["chosen_us"] / row["best_us"])
            self.assertGreaterEqual(row["ratio"], 1)
            good += row["ratio"] <= verified["allowed_ratio"]
        self.assertEqual(verified["within"], good)
        self.assertEqual(done.returncode, 0 if good == 5 else 1, done.stderr)  # which of them depends on the machine

    def test_machines_are_measured_and_predicted_for(self):
        shape = ["--hidden", 512, "--latent", 256]
        measured = self.result("info", *shape, "--measure", "--backend", "cpu", "--tp", 2, "--threads", 1, "--repeats", 3)
        machine = measured["machine"]
        self.assertEqual(machine["schema"], "latent-moe/machine/1")
        self.assertIn("measured by info --measure, 2 ranks", machine["origin"])
        for name in ("memory_bytes_per_us", "flops_per_us", "wire_bytes_per_us"):
            self.assertGreater(machine[name], 0)
        self.assertGreater(machine["timed_us"]["all_reduce_few"], 0)
        alone = self.result("info", *shape, "--measure", "--backend", "cpu", "--tp", 1, "--threads", 1, "--repeats", 3)["machine"]
        self.assertTrue({"hop_us", "wire_bytes_per_us"} <= set(alone["unmeasured"]))

        for name, content in (("info.json", measured), ("machine.json", machine)):
            Path(self.path(name)).write_text(json.dumps(content))
            predicted = self.result("explain", *shape, "--machine", self.path(name), "--tp", 4, "--tokens", "1,64", "--keep-whole-weights")
            self.assertEqual(predicted["machine"]["memory_bytes_per_us"], machine["memory_bytes_per_us"])
            self.assertFalse(any(row["from_table"] for row in predicted["rows"]))
        told = self.succeed("explain", *shape, "--machine", self.path("info.json"), "--tp", 4)
        self.assertIn("PREDICTION, not a measurement", told)
        self.assertIn("its links join 2 ranks", told)

    def test_predictions_for_machines_that_are_not_here(self):
        def predicted(machine, tp, tokens="1,64,4096"):
            return self.result("explain", "--model", "kimi-k3", "--machine", machine, "--tp", tp, "--tokens", tokens, "--keep-whole-weights")
        for tp in (2, 4, 8, 16):
            for machine in ("h200", "h100", "b200", "mi300x"):
                found = predicted(machine, tp)
                self.assertEqual("data sheet" in found["machine"]["origin"], machine != "h200")
                self.assertEqual(found["rows"][0]["tail"], "fused")
                for each in found["predictions"]:
                    self.assertEqual(list(each["us"]), TAILS)
                    self.assertLess(each["us_starting_early"]["fused"], each["us"]["fused"] + 1e-9)
        # With the gates of AMD's devices: one stage ends at 128 KB of latents beyond 4 ranks; the library's collectives are not captured.
        refusals = lambda *arguments: {row["tokens"]: {each["tail"]: each["reason"] for each in row["refused"]} for row in self.result(
            "explain", "--model", "kimi-k3", "--machine", "mi300x", "--tokens", "18,19", "--keep-whole-weights", *arguments)["rows"]}
        self.assertNotIn("fused", refusals("--tp", 8)[18])
        self.assertIn("one stage", refusals("--tp", 8)[19]["fused"])
        self.assertNotIn("fused", refusals("--tp", 4)[19])
        self.assertIn("captured", refusals("--tp", 8, "--captured", "--no-custom-all-reduce")[18]["overlap"])
        one, other = predicted("h200", 2)["predictions"], predicted("h200", 8)["predictions"]
        self.assertGreater(one[0]["us"]["fused"], other[0]["us"]["fused"])  # an eighth of the weights a rank, not half
        self.refuse(2, ["machine is h300, expected h200, ", "info --measure"], "explain", *SMALL, "--machine", "h300")
        self.refuse(2, ["machine is hhh", "info --measure"], "explain", *SMALL, "--machine", "h" * 300)
        self.refuse(2, ["backend is cuda", "--machine"], "explain", *SMALL, "--machine", "mi300x", "--backend", "cuda")
        self.refuse(2, ["--machine", "--table"], "explain", *SMALL, "--machine", "h200", "--table", "t.json")
        Path(self.path("broken.json")).write_text('{"schema": "latent-moe/info/1"}')
        self.refuse(2, ["broken.json", "holds no machine"], "explain", *SMALL, "--machine", self.path("broken.json"))

    def test_broken_tables(self):
        Path(self.path("broken.json")).write_text('{"schema": "latent-moe/tune/1", "tables": [{"tp": 2}]}')
        self.refuse(2, ["broken.json: table 0: has no version"], "explain", *SMALL, "--table", self.path("broken.json"))
        self.refuse(2, ["broken.json: table 0: has no version"], "tune", *SMALL, "--tokens", 1, "--out", self.path("broken.json"))
        Path(self.path("other.json")).write_text('{"schema": "latent-moe/info/1"}')
        self.refuse(2, ["other.json", "expected schema latent-moe/tune/1, found latent-moe/info/1"], "run", *SMALL, "--table", self.path("other.json"))
        self.refuse(2, ["nowhere.json"], "run", *SMALL, "--table", self.path("nowhere.json"))

    def test_operations(self):
        for operation in ("all-reduce-rms-norm", "accumulate-projection"):
            rows = self.result("op", operation, *SMALL, "--tp", 4, "--tokens", "0,1,9", "--repeats", 2)["rows"]
            self.assertEqual([(row["tokens"], row["pass"]) for row in rows], [(0, True), (1, True), (9, True)])

    def test_info(self):
        information = self.result("info", *SMALL, "--tp", 2)
        self.assertIn("cpu", [backend["name"] for backend in information["backends"]])
        self.assertRegex(information["libraries"]["oneDNN"], r"^\d+\.\d+")
        self.assertGreater(information["context"]["workspace_bytes"], 0)

    def soak(self, *arguments):
        return json.loads(self.succeed("soak", *arguments, "--backend", "cpu", "--json", "-"))

    def test_soak_where_the_device_is_missing_is_no_failed_check(self):
        here = {each["name"] for each in json.loads(self.succeed("info", "--json", "-"))["backends"] if each["available"]}
        for backend in {"cuda", "hip"} - here:
            self.refuse(3, [backend], "soak", "--calls", 3, "--tp", 2, "--backend", backend)

    def test_soak_makes_the_calls_of_its_seed(self):
        soak = self.soak("--calls", 96, "--seed", 7)
        self.assertEqual((soak["schema"], soak["seed"], soak["calls"], soak["failures"], soak["passed"]),
                         ("latent-moe/soak/1", 7, 96, [], True))
        self.assertEqual(sum(soak["by_tail"].values()), 96)
        self.assertGreater(soak["replays"], 0)
        self.assertGreater(soak["contexts"], 2)
        again = self.soak("--calls", 96, "--seed", 7)
        self.assertEqual((soak["by_tail"], soak["replays"]), (again["by_tail"], again["replays"]))
        self.assertNotEqual(soak["by_tail"], self.soak("--calls", 96, "--seed", 8)["by_tail"])

    def test_soak_can_begin_anywhere(self):
        parts = [self.soak("--calls", 1, "--from-call", call, "--seed", 7) for call in range(30, 36)]
        whole = self.soak("--calls", 6, "--from-call", 30, "--seed", 7)
        for field in ("calls", "replays", "refused"):
            self.assertEqual(sum(part[field] for part in parts), whole[field])

    def test_soak_by_the_clock(self):
        soak = self.soak("--minutes", 0.02)
        self.assertGreater(soak["calls"], 0)
        self.assertTrue(soak["passed"])


class Processes(Case):
    def setUp(self):
        super().setUp()
        if MPIRUN is None or "--no-mpi" in OPTIONS:
            self.skipTest("no MPI")

    def mpi(self, count, *arguments):
        launcher = [MPIRUN, "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "-n", str(count)]
        # MPI itself leaks at exit, which is not ours to report.
        return self.call(*arguments, "--ranks", "processes", launcher=launcher, environment={"ASAN_OPTIONS": "detect_leaks=0"})

    def error_lines(self, done):
        return [line for line in done.stderr.splitlines() if line.startswith("latent-moe: error: ")]

    def test_verify(self):
        done = self.mpi(3, "verify", *SMALL, "--tokens", "0,1,6", "--json", "-")
        self.assertEqual(done.returncode, 0, done.stderr)
        verify = json.loads(done.stdout)  # of one process alone
        self.assertEqual((verify["failed"], verify["cases"][0]["tp"]), (0, 3))
        self.assertGreaterEqual(verify["passed"], 9)

    def test_soak(self):
        done = self.mpi(3, "soak", "--calls", 64, "--threads", 1, "--json", "-")
        self.assertEqual(done.returncode, 0, done.stderr)
        soak = json.loads(done.stdout)
        self.assertEqual((soak["calls"], soak["sets_by_world"], soak["passed"]), (64, {"3": 2}, True))

    def test_same_bits_as_threads(self):
        checkpoint, inputs = self.make_checkpoint(), self.make_inputs()
        common = ["run", "--weights", checkpoint, "--layer", 2, "--inputs", inputs, "--repeats", 1]
        done = self.mpi(4, *common, "--out", self.path("processes"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.succeed(*common, "--out", self.path("threads"))
        self.assertEqual(read_tensors(self.path("processes")), read_tensors(self.path("threads")))

    def test_errors_are_told_once(self):
        for arguments, part in ((["run", *SMALL, "--tp", 3], "mpirun started 2 processes"),
                                (["run", *SMALL, "--tail", "late_reduce"], "norm"),
                                (["explain", *SMALL, "--json", "missing/file"], "missing/file"),
                                (["verify", "--bogus"], "--bogus")):
            with self.subTest(part):
                done = self.mpi(2, *arguments)
                self.assertEqual(done.returncode, 2, done.stderr)
                lines = self.error_lines(done)
                self.assertEqual(len(lines), 1, done.stderr)
                self.assertIn(part, lines[0])

    def each(self, first, second, folders=(".", ".")):
        """A job of two processes with a command line and a folder each."""
        mpirun = [MPIRUN, "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
        first, second = (list(map(str, each)) for each in (first, second))
        both = [*first, ":", "-wdir", str(self.folder / folders[1]), "-n", "1", PROGRAM, *second]
        return self.call(*both, launcher=[*mpirun, "-wdir", str(self.folder / folders[0]), "-n", "1"],
                         environment={"ASAN_OPTIONS": "detect_leaks=0"})

    def refuse_both(self, parts, *jobs, **more):
        done = self.each(*jobs, **more)
        self.assertEqual(done.returncode, 2, done.stderr)
        lines = self.error_lines(done)
        self.assertEqual(len(lines), 1, done.stderr)
        for part in parts:
            self.assertIn(part, lines[0])

    def test_different_arguments_end_in_one_error(self):
        ranks = ["run", *SMALL, "--timeout-ms", 1500, "--ranks", "processes"]
        same = "expected the same arguments for all"
        self.refuse_both(["rank 1 was started with", "rank 0 with", "--no-check", same], [*ranks, "--no-check"], ranks)
        self.refuse_both(["--latent 128", same], ranks, [*ranks[:4], 128, *ranks[5:]])
        self.refuse_both(["rank 1 was started with 'run --help'", same], ranks, ["run", "--help"])

    def test_an_error_of_one_rank_is_told_with_its_number(self):
        ranks = ["run", *SMALL, "--timeout-ms", 1500, "--ranks", "processes"]
        self.refuse_both(["error: rank 1: ", "--bogus"], ranks, [*ranks, "--bogus"])
        self.refuse_both(["error: rank 1: --ranks is threads"], ranks, ranks[:-2])
        self.refuse_both(["error: The following", "--bogus"], [*ranks, "--bogus"], ranks)
        for folder in ("there", "away"):
            (self.folder / folder).mkdir()
        self.succeed("synthesize", *SMALL, "--inputs-out", self.path("there/inputs"), "--tp", 2, "--tokens", 6)
        read = [*ranks, "--inputs", "inputs"]
        self.refuse_both(["error: rank 1: inputs: cannot open"], read, read, folders=("there", "away"))
        self.refuse_both(["error: inputs: cannot open"], read, read, folders=("away", "there"))

    def test_a_stopped_rank_does_not_keep_the_others_for_ever(self):
        # Rank 1 stops while rank 0 works alone or they make calls: in time rank 0 says so and ends the job.
        stops = "import os, signal, subprocess, sys, time\n" \
                "rank = subprocess.Popen(sys.argv[2:])\n" \
                "time.sleep(float(sys.argv[1]))\n" \
                "os.kill(rank.pid, signal.SIGSTOP)\n" \
                "sys.exit(rank.wait())\n"
        command = ["verify", "--hidden", 4096, "--latent", 2048, "--tokens", "1,500", "--timeout-ms", 300, "--ranks", "processes"]
        program = [sys.executable, "-c", stops, "2.5", PROGRAM]
        launcher = [MPIRUN, "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "-n", "1"]
        done = self.call(*command, ":", "-n", "1", *program, *command, launcher=launcher)
        if done.returncode == 0:
            self.skipTest("the job was done before its rank was stopped")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, "latent-moe: error: .*(rank 1 did not|a rank did not)")

    def test_processes_of_a_launcher_are_ranks(self):
        launcher = [MPIRUN, "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "-n", "2"]
        done = self.call("verify", *SMALL, launcher=launcher, environment={"ASAN_OPTIONS": "detect_leaks=0"})
        self.assertEqual(done.returncode, 2, done.stderr)
        (line,) = self.error_lines(done)
        self.assertIn("one of 2 processes", line)
        self.assertIn("expected --ranks processes", line)

    def test_without_a_launcher(self):
        done = self.call("verify", *SMALL, "--ranks", "processes", "--tp", 4, environment={"ASAN_OPTIONS": "detect_leaks=0"})
        self.assertEqual(done.returncode, 2)
        self.assertIn("mpirun -n 4 latent-moe", done.stderr)


if __name__ == "__main__":
    PROGRAM = os.path.abspath(sys.argv[1])
    OPTIONS = [argument for argument in sys.argv[2:] if argument == "--no-mpi"]
    unittest.main(argv=[sys.argv[0], *(argument for argument in sys.argv[2:] if argument not in OPTIONS)])
