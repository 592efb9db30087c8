#!/bin/sh
# Fills .cache/ in the repository root with what tests use when it is there: NVRTC, NVIDIA's run-time compiler, from PyPI.
# Running it again changes nothing. Without pip or without a network it says so and leaves with success: the tests that
# want the library then print that they were skipped.
set -u

version=13.5.37
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$root/.cache/nvrtc/$version

if ls "$folder"/nvidia/*/lib/libnvrtc.so.* >/dev/null 2>&1; then
    echo "nvrtc $version: already in $folder"
    exit 0
fi
python=$(command -v python3 || command -v python || true)
if [ -z "$python" ] || ! "$python" -m pip --version >/dev/null 2>&1; then
    echo "nvrtc $version: skipped, there is no python with pip"
    exit 0
fi
mkdir -p "$root/.cache/nvrtc"
work=$(mktemp -d "$root/.cache/nvrtc/download.XXXXXX")
trap 'rm -rf "$work"' EXIT
if ! "$python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$work" "nvidia-cuda-nvrtc==$version" 2>"$work/log"; then
    echo "nvrtc $version: skipped, the download failed: $(tail -n 1 "$work/log")"
    exit 0
fi
# Only the libraries: the wheel's headers are not used. The folder appears whole or not at all.
if ! "$python" - "$work" <<'PYTHON'
import pathlib, sys, zipfile
work = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
    names = [n for n in wheel.namelist() if "/lib/" in n and "libnvrtc" in n and ".so" in n or n.endswith("License.txt")]
    wheel.extractall(work / "unpacked", names)
PYTHON
then
    echo "nvrtc $version: skipped, the wheel could not be unpacked"
    exit 0
fi
rm -rf "$folder"
mv "$work/unpacked" "$folder"
echo "nvrtc $version: unpacked into $folder"
