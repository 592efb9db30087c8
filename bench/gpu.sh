#!/bin/sh
# gpu.sh: what a GPU says of astrai, in one command and at most 10 minutes, on a machine with a driver and nothing else.
#
#   bench/gpu.sh pack DIR        here: builds what is wanted and copies it into a folder, to be carried to that machine
#   DIR/gpu.sh [OUT.jsonl]       there: runs everything, and adds JSON lines to the file as it goes [default: gpu.jsonl]
#
# Steps, each with lines of its own and one that says how it ended: machine; kernels (the kernel tables against the interpreter, and how
# many of their results have the bits of the emulator's); sanitizer (compute-sanitizer, where it is installed); golden (whole models
# against their references); constants (launch, bandwidth, products, for the cost model); timings (astrai bench, beside PyTorch where it is
# installed).
# GPU_MINUTES is how long all may take; GPU_SMALL=1 tries the script itself with the smallest sizes.
set -u

here=$(cd "$(dirname "$0")" && pwd)

if [ "${1:-}" = pack ]; then
    set -e
    to=${2:?usage: bench/gpu.sh pack DIR}
    root=$here/..
    nvrtc=$(find "$root/.cache/nvrtc" -name 'libnvrtc.so*' | sort | tail -n 1)
    [ -n "$nvrtc" ] || { echo "gpu.sh: no NVRTC in .cache/nvrtc; scripts/setup-cache.sh puts it there" >&2; exit 1; }
    cargo build --manifest-path "$root/Cargo.toml" --release --bin astrai
    mkdir -p "$to/nvrtc" "$to/golden" "$to/shapes"
    cargo test --manifest-path "$root/Cargo.toml" --release --no-run --test conformance 2>"$to/build" || { cat "$to/build" >&2; exit 1; }
    tests=$(sed -n 's/.*Executable.*(\(.*\))$/\1/p' "$to/build")
    rm "$to/build"
    cp "$root/target/release/astrai" "$to/astrai"
    (cd "$root" && cp "$tests" "$to/kernels")
    cp "$(dirname "$nvrtc")"/libnvrtc*.so* "$to/nvrtc/"
    cp -r "$root/tests/golden/." "$to/golden/"
    cp "$here"/shapes/*.json "$to/shapes/"
    cp "$here/gpu.sh" "$here/torch_lm.py" "$to/"
    du -sh "$to"
    exit
fi

case "${1:-}" in -*) unknown=1 ;; *) unknown= ;; esac
if [ -n "$unknown" ] || [ ! -x "$here/astrai" ]; then
    echo "usage: bench/gpu.sh pack DIR, then DIR/gpu.sh [OUT.jsonl] where the GPU is" >&2
    exit 2
fi
out=${1:-gpu.jsonl}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
end=$(($(date +%s) + ${GPU_MINUTES:-10} * 60))
small=${GPU_SMALL:-}
failed=0
ASTRAI_NVRTC=$here/nvrtc
ASTRAI_CACHE=$here/cache
export ASTRAI_NVRTC ASTRAI_CACHE

say() {
    printf '%s\n' "$1" >>"$out"
}

# Text of a file's last line between the quotes of JSON, its plain characters.
quoted() {
    tail -n 1 "$1" | LC_ALL=C tr -cd '\040-\176' | cut -c 1-400 | sed 's/\\/\\\\/g; s/"/\\"/g'
}

# step NAME SECONDS CMD…: runs a command for so long at most. Lines of JSON that it prints go on under the name of the step.
step() {
    name=$1 most=$2
    shift 2
    now=$(date +%s)
    left=$((end - now))
    [ "$left" -ge "$most" ] || most=$left
    if [ "$most" -lt 5 ]; then
        say "{\"step\":\"$name\",\"skipped\":\"no time is left\"}"
        failed=1
        return
    fi
    {
        timeout -k 5 "$most" "$@" 2>"$work/err"
        echo $? >"$work/code"
    } | sed -u -n "s/^[^{]*{\(.*}\)\$/{\"step\":\"$name\",\1/p" >>"$out"
    code=$(cat "$work/code")
    [ "$code" = 0 ] || failed=1
    took=$(($(date +%s) - now))
    say "{\"step\":\"$name\",\"exit\":$code,\"seconds\":$took,\"command\":\"$(basename "$1") ${2:-}\",\"said\":\"$(quoted "$work/err")\"}"
}

step machine 60 "$here/astrai" devices --json
if command -v nvidia-smi >/dev/null 2>&1; then
    timeout 30 nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit --format=csv,noheader >"$work/smi" 2>&1
    say "{\"step\":\"machine\",\"nvidia_smi\":\"$(quoted "$work/smi")\"}"
fi

# One test of the tests' binary, by its name.
table="--ignored --exact --nocapture --test-threads 1"
step kernels 240 "$here/kernels" cuda::gpu::tables_agree_on_the_gpu $table

# What they say stands beside the file, FILE.TOOL.
if command -v compute-sanitizer >/dev/null 2>&1; then
    for tool in memcheck racecheck initcheck synccheck; do
        step sanitizer 45 compute-sanitizer --tool "$tool" --error-exitcode 9 --log-file "$out.$tool" "$here/astrai" verify "$here/golden/llama" \
            --device cuda --only logits --json
    done
    # Weights and pages of 8 bits, by tensor cores.
    for tool in memcheck racecheck; do
        step sanitizer 30 compute-sanitizer --tool "$tool" --error-exitcode 9 --log-file "$out.codes.$tool" "$here/astrai" bench decode \
            --shape "$here/golden/llama/config.json" --dtype bf16 --quantize int8 --kv-cache-dtype int8 --seq 100 --new 2 --repeat 1 --device cuda
    done
else
    say '{"step":"sanitizer","skipped":"no compute-sanitizer"}'
fi

for model in "$here"/golden/*/; do
    [ -f "$model/golden.safetensors" ] || continue
    if [ -n "$small" ]; then
        step golden 60 "$here/astrai" verify "$model" --device cuda --json --only logits,loss
    else
        step golden 60 "$here/astrai" verify "$model" --device cuda --json
    fi
done

step constants 60 "$here/kernels" cuda::gpu::constants_of_the_gpu $table

# timing JOB SHAPE ARGS…: ours, then PyTorch's on the same.
torch=
timeout 60 python3 -c 'import sys, torch, transformers; sys.exit(not torch.cuda.is_available())' 2>/dev/null && torch=1
timing() {
    job=$1 shape=$2
    shift 2
    step timings 60 "$here/astrai" bench "$job" --shape "$shape" --device cuda "$@"
    [ -z "$torch" ] || step torch 60 python3 "$here/torch_lm.py" "$shape" "$job" --device cuda "$@"
}
if [ -n "$small" ]; then
    timing decode "$here/golden/llama/config.json" --seq 8 --new 2 --repeat 1
else
    for dtype in bf16 f32; do
        timing decode "$here/shapes/qwen3-0.6b.json" --dtype "$dtype" --seq 512 --new 32
        timing prefill "$here/shapes/qwen3-0.6b.json" --dtype "$dtype" --seq 512
        timing train "$here/shapes/llama-124m.json" --dtype "$dtype" --batch 4 --seq 256 --repeat 3
    done
    qwen=$here/shapes/qwen3-0.6b.json
    for storage in int4 int8 fp8; do
        step timings 60 "$here/astrai" bench decode --shape "$qwen" --device cuda --dtype bf16 --quantize $storage --seq 512 --new 32
        step timings 60 "$here/astrai" bench decode --shape "$qwen" --device cuda --dtype bf16 --quantize $storage --seq 512 --new 32 --batch 16
        step timings 60 "$here/astrai" bench prefill --shape "$qwen" --device cuda --dtype bf16 --quantize $storage --seq 512
    done
    for pages in auto int8; do
        step timings 60 "$here/astrai" bench decode --shape "$qwen" --device cuda --dtype bf16 --kv-cache-dtype $pages --seq 4096 --new 32
    done
fi
exit $failed
