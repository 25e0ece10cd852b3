#!/usr/bin/env bash
# Runs the tests and benchmarks in its folder. Usage: run.sh [tests|benches|all] [arguments for the programs]
set -uo pipefail
cd "$(dirname "$0")"
# On this host, a missing GPU is an error, not a reason to skip tests.
export TANDEM_REQUIRE_GPU=1

what=${1:-all}
shift || true
case $what in
    tests) kinds=(test) ;;
    benches) kinds=(bench) ;;
    all) kinds=(test bench) ;;
    *) echo "usage: run.sh [tests|benches|all] [arguments]" >&2; exit 2 ;;
esac

failed=()
for kind in "${kinds[@]}"; do
    for program in "$kind"-*; do
        [ -f "$program" ] || continue
        chmod +x "$program"
        echo "== $program"
        arguments=("$@")
        # Without cargo, the flag must tell a benchmark that it is run as one.
        if [ "$kind" = bench ]; then arguments=(--bench "$@"); fi
        "./$program" "${arguments[@]}" || failed+=("$program")
    done
done

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
echo "all passed"
