# Sourced by the other scripts: where things are, and how packages are installed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

build_packages=(g++ cmake ninja-build git libdnnl-dev ocl-icd-opencl-dev libopenmpi-dev openmpi-bin libfmt-dev libcli11-dev
                nlohmann-json3-dev)
hip_packages=(clang-19 clang-tools-19 lld-19 llvm-19 rocm-device-libs libamdhip64-dev)
test_packages=(libgtest-dev relacy-dev clang-format-14 clang-tidy-19 clang-14 libclang-rt-14-dev python3)

say() { printf '\n== %s\n' "$*"; }

# install_packages NAME…: those that are missing, with apt.
install_packages() {
    local missing=() package
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return
    command -v apt-get >/dev/null || { echo "these packages are missing and there is no apt-get: ${missing[*]}" >&2; exit 3; }
    local as_root=()
    [ "$(id -u)" -eq 0 ] || as_root=(sudo)
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}
