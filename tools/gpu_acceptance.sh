#!/usr/bin/env bash
# Accepts the engine of a pool on the host that it is for, with its GPU and its model: in one command
#
#   1. of the engine trtllm: that the installed tensorrt_llm has what the adapter calls
#   2. the conformance kit (laneway engines check)
#   3. a short benchmark of interactive calls beside bulk (bench/engine_mixed.py), in about a minute
#
#   tools/gpu_acceptance.sh CONFIG [POOL [FOLDER]]
#
# CONFIG is a laneway.toml with the pool in [[models]]; without POOL its first. FOLDER gets signatures.txt,
# conformance.json and mixed.json (./acceptance if not given). Exits 1 if any of the three failed; all are run in any
# case. PYTHON names the interpreter that has Laneway with its engine's extra and `local`; ACCEPTANCE_SMOKE=1 makes
# the benchmark a matter of seconds.
#
# Then `python tools/engine_table.py FOLDER/conformance.json` writes the engine's column of docs/engines.md.
set -uo pipefail

if [ $# -lt 1 ] || [ $# -gt 3 ] || [ ! -f "$1" ]; then
    sed -n '2,18s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
config=$(realpath "$1")
pool=${2:-}
mkdir -p "${3:-acceptance}"
folder=$(realpath "${3:-acceptance}")
python=${PYTHON:-python}
cd "$(dirname "$0")/.." || exit 2

failed=()
step() { # name, file of its output, command
    local name=$1 output=$2
    shift 2
    echo "== $name" >&2
    if "$@" >"$output"; then
        echo "== $name: passed" >&2
    else
        echo "== $name: FAILED, see $output" >&2
        failed+=("$name")
    fi
}

if grep -Eq '^ *engine *= *"trtllm"' "$config"; then
    step signatures "$folder/signatures.txt" "$python" -m pytest -q -rs -p no:cacheprovider \
        tests/contract/test_trtllm_signatures.py -k installed
fi
step conformance "$folder/conformance.json" "$python" -m laneway.cli engines check --config "$config" \
    ${pool:+--pool "$pool"} --json
step mixed "$folder/mixed.json" env LANEWAY_CONFIG="$config" BENCH_POOL="$pool" \
    "$python" bench/engine_mixed.py --json ${ACCEPTANCE_SMOKE:+--smoke}

if [ ${#failed[@]} -gt 0 ]; then
    echo "not accepted: ${failed[*]}" >&2
    exit 1
fi
echo "accepted: $folder" >&2
