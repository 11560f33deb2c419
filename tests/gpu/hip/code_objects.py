"""What the compiler made for AMD GPUs, as the assembly test reads it: kernels with their instructions and their budgets."""
import dataclasses
import os
import pathlib
import re
import subprocess
import tempfile


@dataclasses.dataclass
class Kernel:
    name: str  # as written in the source, without its template arguments
    symbol: str
    instructions: list[str]
    vgprs: int
    spilled: int
    scratch_bytes: int
    lds_bytes: int
    most_threads: int

    def matching(self, pattern):
        return [i for i in self.instructions if re.search(pattern, i)]


def plain_name(symbol):
    """all_reduce's `one_stage` of `_ZN10latent_moe3gpu12_GLOBAL__N_19one_stageILNS_…`: the last part of the nested name."""
    at, name = len("_ZN"), ""
    while number := re.match(r"\d+", symbol[at:]):
        at += len(number.group())
        name = symbol[at : at + int(number.group())]
        at += int(number.group())
    return name


class Tools:
    """The programs that come with the compiler."""

    def __init__(self, compiler):
        self.compiler = compiler
        self.folder = pathlib.Path(os.path.realpath(compiler)).parent

    def run(self, name, *arguments):
        return subprocess.run([self.folder / name, *map(str, arguments)], check=True, capture_output=True, text=True).stdout

    def compile(self, flags, architecture, source, out, *more):
        command = [self.compiler, *flags, f"--offload-arch={architecture}", "--cuda-device-only", "--no-gpu-bundle-output", *more]
        subprocess.run([*command, "-c", str(source), "-o", str(out)], check=True)

    def kernels_of_object(self, path, architecture):
        """Of a host object, whose code for GPUs is a bundle of code objects."""
        with tempfile.TemporaryDirectory() as folder:
            bundle, code = pathlib.Path(folder) / "bundle", pathlib.Path(folder) / "code"
            self.run("llvm-objcopy", f"--dump-section=.hip_fatbin={bundle}", path, os.devnull)
            self.run("clang-offload-bundler", "--unbundle", "--type=o", f"--targets=hip-amdgcn-amd-amdhsa--{architecture}",
                     f"--input={bundle}", f"--output={code}")
            return self.kernels_of_code(code)

    def kernels_of_code(self, code):
        notes = self.run("llvm-readelf", "--notes", code)
        text = self.run("llvm-objdump", "-d", "--no-show-raw-insn", "--no-leading-addr", code)
        bodies = {}
        for part in re.split(r"^<(?=[^>]+>:$)", text, flags=re.M)[1:]:
            symbol, _, body = part.partition(">:\n")
            bodies[symbol] = [line.split("//")[0].strip() for line in body.splitlines() if line.strip()]
        kernels = []
        for entry in re.split(r"^  - (?=\.agpr_count|\.args)", notes, flags=re.M)[1:]:
            value = lambda key: re.search(rf"^ *\.{key}: +(\S+)", "    " + entry, flags=re.M).group(1)
            symbol = value("name")
            kernels.append(Kernel(plain_name(symbol), symbol, bodies[symbol], int(value("vgpr_count")),
                                  int(value("vgpr_spill_count")), int(value("private_segment_fixed_size")),
                                  int(value("group_segment_fixed_size")), int(value("max_flat_workgroup_size"))))
        return kernels
