#!/bin/sh
# Fills .cache/ in the repository root with what tests use when it is there, all of it from PyPI but for the JavaScript clients of both APIs, which npm gets: NVRTC, NVIDIA's run-time
# compiler, the Python clients of OpenAI's and Anthropic's APIs, langchain-openai, schemathesis, jsonschema, h5py, TensorBoard, and Zig, which brings a clang that compiles
# for other processors. With the argument `litellm` also that (260 MB), with `harness` EleutherAI's lm-evaluation-harness (580 MB), with `peft` PEFT, transformers and PyTorch,
# which take some GB; several may be given. Running it again changes nothing. Without pip or without a network it says
# so and leaves with success: the tests that want these then print that they were skipped.
set -u

root=$(cd "$(dirname "$0")/.." && pwd)
python=$(command -v python3 || command -v python || true)

# fill NAME FOLDER FUNCTION: FUNCTION gets an empty folder, fills its subfolder "unpacked", and a log; FOLDER appears
# whole or not at all.
fill() {
    if [ -d "$2" ]; then
        echo "$1: already in $2"
        return
    fi
    if [ -z "$python" ] || ! "$python" -m pip --version >/dev/null 2>&1; then
        echo "$1: skipped, there is no python with pip"
        return
    fi
    mkdir -p "$(dirname "$2")"
    work=$(mktemp -d "$(dirname "$2")/download.XXXXXX")
    if "$3" "$work" 2>"$work/log" && mv "$work/unpacked" "$2"; then
        echo "$1: unpacked into $2"
    else
        echo "$1: skipped: $(tail -n 1 "$work/log")"
    fi
    rm -rf "$work"
}

nvrtc=13.5.37
nvrtc() {
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$1" "nvidia-cuda-nvrtc==$nvrtc" || return 1
    # Only the libraries: the wheel's headers are not used.
    "$python" - "$1" <<'PYTHON'
import pathlib, sys, zipfile
work = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
    names = [n for n in wheel.namelist() if "/lib/" in n and "libnvrtc" in n and ".so" in n or n.endswith("License.txt")]
    wheel.extractall(work / "unpacked", names)
PYTHON
}

zig=0.17.1
zig() {
    "$python" -m pip install --quiet --no-compile --no-deps --only-binary=:all: --target "$1/unpacked" "ziglang==$zig"
}

openai=3.54.0
openai() {
    "$python" -m pip install --quiet --no-compile --only-binary=:all: --target "$1/unpacked" "openai==$openai"
}

h5py=3.16.0
h5py() {
    "$python" -m pip install --quiet --no-compile --only-binary=:all: --target "$1/unpacked" "h5py==$h5py"
}

tensorboard=2.21.0
tensorboard() {
    "$python" -m pip install --quiet --no-compile --only-binary=:all: --target "$1/unpacked" "tensorboard==$tensorboard"
}

anthropic=2.13.0
anthropic() {
    "$python" -m pip install --quiet --no-compile --only-binary=:all: --target "$1/unpacked" "anthropic==$anthropic"
}

npm=openai-6.49.0-anthropic-1.14.0
npm() {
    command npm install --silent --no-audit --no-fund --prefix "$1/unpacked" openai@6.49.0 @anthropic-ai/sdk@1.14.0
}

jsonschema=4.26.0
jsonschema() {
    "$python" -m pip install --quiet --no-compile --only-binary=:all: --target "$1/unpacked" "jsonschema==$jsonschema" rfc3339-validator==0.1.4
}

langchain=1.7.4
langchain() {
    "$python" -m pip install --quiet --no-compile --only-binary=:all: --target "$1/unpacked" "langchain-openai==$langchain"
}

schemathesis=4.32.5
schemathesis() {
    "$python" -m pip install --quiet --no-compile --prefer-binary --target "$1/unpacked" "schemathesis==$schemathesis"
}

litellm=1.110.2
litellm() {
    "$python" -m pip install --quiet --no-compile --only-binary=:all: --target "$1/unpacked" "litellm==$litellm"
}

harness=0.4.13
harness() {
    "$python" -m pip install --quiet --no-compile --prefer-binary --target "$1/unpacked" "lm_eval[api]==$harness"
}

peft=0.21.2
peft() {
    "$python" -m pip install --quiet --no-compile --only-binary=:all: --target "$1/unpacked" "peft==$peft" transformers==5.23.0 torch==2.15.0
}

fill "nvrtc $nvrtc" "$root/.cache/nvrtc/$nvrtc" nvrtc
fill "zig $zig" "$root/.cache/zig/$zig" zig
# Parts of the client are compiled for one version of Python.
version=$("${python:-false}" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo none)
fill "openai $openai" "$root/.cache/openai/$openai-python$version" openai
fill "h5py $h5py" "$root/.cache/h5py/$h5py-python$version" h5py
fill "tensorboard $tensorboard" "$root/.cache/tensorboard/$tensorboard-python$version" tensorboard
fill "anthropic $anthropic" "$root/.cache/anthropic/$anthropic-python$version" anthropic
fill "npm $npm" "$root/.cache/npm/$npm" npm
fill "jsonschema $jsonschema" "$root/.cache/jsonschema/$jsonschema-python$version" jsonschema
fill "langchain $langchain" "$root/.cache/langchain/$langchain-python$version" langchain
fill "schemathesis $schemathesis" "$root/.cache/schemathesis/$schemathesis-python$version" schemathesis
for more in "$@"; do
    case $more in
        litellm) fill "litellm $litellm" "$root/.cache/litellm/$litellm-python$version" litellm ;;
        harness) fill "harness $harness" "$root/.cache/harness/$harness-python$version" harness ;;
        peft) fill "peft $peft" "$root/.cache/peft/$peft-python$version" peft ;;
        *) echo "$more: there is no such argument; litellm, harness and peft are" ;;
    esac
done
