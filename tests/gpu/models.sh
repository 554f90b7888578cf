#!/bin/sh
# Operations of the CUDA backend, whole models and the daemon on the GPU, then benchmarks. Lies in
# the bundle that `make gpu-bundle` makes. Usage: models.sh [log folder [step...]]; without steps
# all of them. Exits 0 when nothing failed; a machine without a GPU skips in words.
cd "$(dirname "$0")" || exit 1
[ -f programs.tar.gz ] && [ ! -x ./test_ops ] && tar xzf programs.tar.gz
logs=${1:-.}
[ $# -gt 0 ] && shift
wanted=${*:-backend models bits engine share export records daemon storm contract lost memcheck load bench}
SRCDIR=$PWD/src
BUILDDIR=$PWD
LD_LIBRARY_PATH=$PWD/lib:/usr/local/cuda/lib64
PYTHONUNBUFFERED=1
export SRCDIR BUILDDIR LD_LIBRARY_PATH PYTHONUNBUFFERED
# A bundle that travels beside the source tree may leave the demo model to it.
if [ ! -d src/tests/models/demo ] && [ -d ../tests/models/demo ]; then
    mkdir -p src/tests/models && ln -s "$PWD/../tests/models/demo" src/tests/models/demo
fi
table=
failed=0
step() {
    name=$1
    limit_s=$2
    shift 2
    at=$(date +%s)
    timeout "$limit_s" "$@" >"$logs/$name.log" 2>&1
    rc=$?
    verdict=pass
    grep -q 'SKIP' "$logs/$name.log" && verdict=skip
    if [ $rc -ne 0 ]; then
        verdict="FAIL (exit $rc)"
        failed=1
        grep -E -A3 '^(not ok|FAIL|Bail)' "$logs/$name.log" | head -60
        tail -5 "$logs/$name.log"
    fi
    table="$table$(printf '%-28s %-16s %4d s' "$name" "$verdict" $(($(date +%s) - at)))
"
}
for what in $wanted; do
    case $what in
    backend) step backend 240 ./test_backend ;;
    models)
        step models 120 ./test_models
        grep -E 'error mean|by layer|SKIP' "$logs/models.log"
        ;;
    bits)
        step bits 150 env TEST_BACKEND=cuda ./test_bits 20261129 6 12
        grep '^#' "$logs/bits.log" | tail -3
        ;;
    records)
        step records 100 ./test_records
        grep '^#' "$logs/records.log" | tail -3
        ;;
    engine) step engine 60 env TEST_BACKEND=cuda ./test_engine ;;
    share)
        step share 120 env TEST_BACKEND=cuda ./test_share 20261130 10
        step session 120 env TEST_BACKEND=cuda ./test_session 20261201 10
        ;;
    export)
        step export 120 env TEST_BACKEND=cuda ./test_export 20261130 8
        step export-daemons 150 python3 export.py
        step export-bench 100 env TEST_BACKEND=cuda ./export src/tests/bench/models/35b-a3b 16384 .
        grep '^#' "$logs/export-daemons.log"
        cat "$logs/export-bench.log"
        ;;
    memcheck)
        if command -v compute-sanitizer >/dev/null 2>&1; then
            step memcheck-backend 200 compute-sanitizer --tool memcheck --error-exitcode 9 \
                ./test_backend small
            step memcheck-replay 200 env TEST_BACKEND=cuda compute-sanitizer --tool memcheck \
                --error-exitcode 9 ./test_bits 20261130 3 12
            grep 'ERROR SUMMARY' "$logs"/memcheck-*.log
        else
            table="${table}memcheck-backend             skip: no compute-sanitizer here
"
        fi
        ;;
    lost) step lost 120 python3 lost.py faulty ;;
    load)
        step load 300 python3 load.py
        cat "$logs/load.log"
        ;;
    daemon)
        step daemon 120 python3 daemon.py
        grep '^#' "$logs/daemon.log"
        ;;
    contract) step contract 120 python3 src/tests/e2e_contract.py ;;
    # Long: recorded steps take memory until as many shapes were met as are kept.
    storm) step storm 120 python3 src/tests/e2e_storm.py 100000 ;;
    bench)
        models=src/tests/bench/models
        step bench-0.8b 100 ./gpu_prefill $models/0.8b 0 10 table 1x2048 table 1x8192 4x2048 \
            readback 64x2048 readback 64x256 all 1x8192
        step bench-27b-8 100 ./gpu_prefill $models/27b 8 5 1x2048 table 1x8192
        step bench-35b-8 100 ./gpu_prefill $models/35b-a3b 8 5 1x2048 table 1x8192
        step bench-35b 150 ./gpu_prefill $models/35b-a3b 0 3 table 32x1024 8x8192 1x32768 keep 1x8190
        cat "$logs"/bench-*.log
        ;;
    esac
done
printf '%s' "$table"
exit $failed
