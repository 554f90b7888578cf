#!/bin/sh
# Runs every GPU check and benchmark of the bundle this script lies in, and ends with a table.
# Usage: run.sh [log folder]. Exits 0 when nothing failed; a machine without a GPU skips in words.
cd "$(dirname "$0")" || exit 1
[ -f programs.tar.gz ] && [ ! -x ./test_ops ] && tar xzf programs.tar.gz
logs=${1:-.}
table=
failed=0
step() {
    name=$1
    shift
    timeout 300 "$@" >"$logs/$name.log" 2>&1
    rc=$?
    verdict=pass
    grep -q '^skip' "$logs/$name.log" && verdict=skip
    if [ $rc -ne 0 ]; then
        verdict="FAIL (exit $rc)"
        failed=1
        grep FAIL "$logs/$name.log"
    fi
    table="$table$(printf '%-28s %s' "$name" "$verdict")
"
}
step test_ops ./test_ops
step test_gdn ./test_gdn
step test_attn ./test_attn
step test_moe ./test_moe
step test_head ./test_head
step test_sample ./test_sample
if command -v compute-sanitizer >/dev/null 2>&1; then
    for tool in memcheck racecheck initcheck synccheck; do
        for t in test_ops test_gdn test_attn test_moe test_head test_sample; do
            step "$tool-$t" compute-sanitizer --tool $tool --error-exitcode 9 ./$t small
        done
    done
else
    table="${table}sanitizers                   skip: no compute-sanitizer here
"
fi
step bench_ops ./bench_ops
step bench_gdn ./bench_gdn
step bench_attn ./bench_attn
step bench_moe ./bench_moe
for b in bench_ops bench_gdn bench_attn bench_moe; do
    cat "$logs/$b.log"
done
printf '%s' "$table"
exit $failed
