#!/usr/bin/env python3
"""Reads the machine code of every kernel for AMD GPUs: scopes of the hand-offs, MFMA in the products, budgets.

What a scope looks like on gfx942 (LLVM's memory model for it):
    system    loads and stores carry `sc0 sc1`; release: `buffer_wbl2 sc0 sc1`; acquire: `buffer_inv sc0 sc1`
    device    `sc1`, `buffer_wbl2 sc1`, `buffer_inv sc1`
and on gfx90a: system-scope fences are `buffer_wbl2` and `buffer_invl2`, which device scope does not need; loads carry `glc`.

The 8-byte accesses of these kernels are the hand-offs: mailboxes, headers, counters. All else that threads share is 4 bytes (fault
words at system scope, epochs and digests at device scope) or plain.

usage: assembly_test.py COMPILER FOLDER-OF-OBJECTS SOURCE-ROOT FLAG… -- ARCHITECTURE… (the first must be gfx942)
"""
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from code_objects import Tools  # noqa: E402

EXCHANGES = {"one_stage", "two_stage", "reduce_and_normalise", "scatter_rows", "gather_rows", "reduce_rows", "exchange_bulk",
             "fused"}
PRODUCTS = {"project", "fused"}
# Between the CTAs of one GPU: the parts of the latents are announced and awaited there.
DEVICE_FENCES = {"fused"}
# Reads at device scope what a fence of system scope before it has made visible.
DEVICE_LOADS = {"exchange_bulk"}
# Hands over counters beside the headers, one each way, and no mailboxes.
HANDS_OVER_COUNTERS = {"exchange_bulk"}
# Rows of 16384 float32 values and more a CTA, which no model here has: they may spill.
MAY_SPILL = ("Li2ELi8E", "Li4ELi8E", "Li8ELi8E")

LDS_BYTES = 64 << 10
SCRATCH_BYTES = 96  # of scalars: kernels that poll many peers together have more than fit
REGISTERS_OF_SIMD = 512  # a lane's, all waves together
SIMDS = 4


def scope_faults(kernel):
    """Why an exchanging kernel for gfx942 does not hand over at system scope on both sides; empty if it does."""
    faults = []

    def want(count, pattern, what):
        found = len(kernel.matching(pattern))
        if found < count:
            faults.append(f"{what}: {found}, expected at least {count}")

    def refuse(pattern, what):
        if found := kernel.matching(pattern):
            faults.append(f"{what}: {found[0]} (and {len(found) - 1} more)")

    both, one = r"\bsc0 sc1\b", r"^(?!.*\bsc0 sc1\b).*\bsc[01]\b"
    least = 3 if kernel.name in HANDS_OVER_COUNTERS else 4  # a header is two
    want(least, rf"^(global|flat)_store_dwordx2 .*{both}", "stores of hand-offs at system scope")
    want(least, rf"^(global|flat)_load_dwordx2 .*{both}", "loads of hand-offs at system scope")
    refuse(rf"(?=^(global|flat)_store_dwordx2 ){one}", "a store of a hand-off below system scope")
    if kernel.name not in DEVICE_LOADS:
        refuse(rf"(?=^(global|flat)_load_dwordx2 ){one}", "a load of a hand-off below system scope")
    want(1, rf"^(global|flat)_store_dword .*{both}", "fault words told at system scope")
    want(1, rf"^(global|flat)_load_dword .*{both}", "fault words read at system scope")
    # Two fences of the headers and one of the fault record, and those of the header's own store and load.
    want(4, rf"^buffer_wbl2 {both}", "releases at system scope")
    want(4, rf"^buffer_inv {both}", "acquires at system scope")
    if kernel.name not in DEVICE_FENCES:
        refuse(rf"(?=^buffer_(wbl2|inv) ){one}", "a fence below system scope")
    faults += order_faults(kernel)
    return faults


def order_faults(kernel):
    """The header's first half: stored behind a write-back that was waited for, acquired behind a load that was waited for."""
    steps = [i for i in kernel.instructions if i.startswith(("buffer_", "global_", "flat_", "s_waitcnt"))]

    def ordered(first, second, third):
        return any(first(a) and any(second(b) for b in steps[i + 1 : i + 4]) and any(third(c) for c in steps[i + 1 : i + 5])
                   for i, a in enumerate(steps))

    waits = lambda i: i.startswith("s_waitcnt vmcnt(0)")
    store = lambda i: i.startswith("global_store_dwordx2") and "sc0 sc1" in i
    load = lambda i: i.startswith("global_load_dwordx2") and "sc0 sc1" in i
    faults = []
    if not ordered(lambda i: i == "buffer_wbl2 sc0 sc1", waits, store):
        faults.append("no store of a header right behind a write-back of the caches")
    if not ordered(load, waits, lambda i: i == "buffer_inv sc0 sc1"):
        faults.append("no load of a header right before an invalidation of the caches")
    return faults


def budget_faults(kernel):
    waves_of_simd = -(-kernel.most_threads // 64 // SIMDS)
    faults = []
    if kernel.lds_bytes > LDS_BYTES:
        faults.append(f"{kernel.lds_bytes} bytes of LDS, expected at most {LDS_BYTES}")
    if kernel.vgprs > REGISTERS_OF_SIMD // waves_of_simd:
        faults.append(f"{kernel.vgprs} registers in CTAs of {kernel.most_threads} threads, which have "
                      f"{REGISTERS_OF_SIMD // waves_of_simd} each")
    if (kernel.scratch_bytes > SCRATCH_BYTES or kernel.spilled) and not any(part in kernel.symbol for part in MAY_SPILL):
        faults.append(f"{kernel.scratch_bytes} bytes of scratch, {kernel.spilled} registers spilled: expected none, and at most {SCRATCH_BYTES} bytes")
    return faults


class EveryKernel(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        objects = sorted(pathlib.Path(FOLDER).glob("*.cu.o"))
        cls.kernels = {a: [k for o in objects for k in TOOLS.kernels_of_object(o, a)] for a in ARCHITECTURES}

    def each(self, architecture, names=None):
        kernels = [k for k in self.kernels[architecture] if names is None or k.name in names]
        self.assertEqual({k.name for k in kernels}, names or {k.name for k in kernels}, "kernels found")
        return kernels

    def test_hands_over_at_system_scope_on_both_sides(self):
        for kernel in self.each("gfx942", EXCHANGES):
            with self.subTest(kernel.symbol):
                self.assertEqual(scope_faults(kernel), [])

    def test_has_system_fences_and_coherent_polls_on_gfx90a_too(self):
        if "gfx90a" not in ARCHITECTURES:
            self.skipTest("not built")
        for kernel in self.each("gfx90a", EXCHANGES):
            with self.subTest(kernel.symbol):
                self.assertGreaterEqual(len(kernel.matching("^buffer_wbl2$")), 3)
                self.assertGreaterEqual(len(kernel.matching("^buffer_invl2$")), 3)
                self.assertGreaterEqual(len(kernel.matching("^global_load_dwordx2 .*glc")), 4)

    def test_multiplies_by_mfma_and_only_the_products_do(self):
        for architecture in ARCHITECTURES:
            bf16, f16 = r"^v_mfma_f32_16x16x16_?bf16", r"^v_mfma_f32_16x16x16_?f16"
            for kernel in self.each(architecture):
                with self.subTest(f"{architecture} {kernel.symbol}"):
                    # The projection's element is its first template argument: 0 is bf16.
                    is_f16 = kernel.name == "project" and "DtypeE1E" in kernel.symbol
                    if kernel.name in PRODUCTS:
                        self.assertGreaterEqual(len(kernel.matching(f16 if is_f16 else bf16)), 4)
                        self.assertEqual(kernel.matching(bf16 if is_f16 else f16), [])
                    else:
                        self.assertEqual(kernel.matching("^v_mfma"), [])

    def test_keeps_to_its_registers_and_lds(self):
        for architecture in ARCHITECTURES:
            for kernel in self.each(architecture):
                with self.subTest(f"{architecture} {kernel.symbol}"):
                    self.assertEqual(budget_faults(kernel), [])


class TheChecks(unittest.TestCase):
    """Each hand-off of the source weakened in turn, by a flag that nothing else sets: the check of its kernel must find it."""

    def faults(self, hand_off, source):
        with tempfile.TemporaryDirectory() as folder:
            code = pathlib.Path(folder) / "code"
            TOOLS.compile(FLAGS, "gfx942", pathlib.Path(ROOT) / "src/gpu/kernels" / source, code, f"-DLATENT_MOE_WEAKEN={hand_off}")
            kernels = [k for k in TOOLS.kernels_of_code(code) if k.name in EXCHANGES]
            self.assertTrue(kernels)
            return [scope_faults(k) for k in kernels]

    def test_fail_when_one_hand_off_is_weakened(self):
        for hand_off in ("mailbox_store", "mailbox_load", "header_store", "header_load", "fence"):
            with self.subTest(hand_off):
                for faults in self.faults(hand_off, "row_exchange.cu"):
                    self.assertNotEqual(faults, [], f"{hand_off} at device scope was not noticed")

    def test_fail_when_a_bulk_counter_is_stored_for_this_device_only(self):
        for faults in self.faults("counter_store", "bulk_exchange.cu"):
            self.assertNotEqual(faults, [])


if __name__ == "__main__":
    TOOLS, FOLDER, ROOT = Tools(sys.argv[1]), sys.argv[2], sys.argv[3]
    split = sys.argv.index("--")
    FLAGS, ARCHITECTURES = sys.argv[4:split], sys.argv[split + 1 :]
    unittest.main(argv=sys.argv[:1], verbosity=2)
