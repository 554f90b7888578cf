#!/bin/sh
# Sources are as .clang-format has them, and ASCII without tabs; comments end at column 96. TAP.
cd "${SRCDIR:-.}" || exit 1
files=$(find src kernels tests clients \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) | sort)

# Other versions format otherwise; Debian 12 has 14.
format=
for name in clang-format-14 clang-format; do
    case $($name --version 2>/dev/null) in
    *'version 14.'*) format=$name && break ;;
    esac
done

status=0
report() { # number, what, what is wrong
    if [ -z "$3" ]; then
        echo "ok $1 - $2"
    else
        echo "not ok $1 - $2"
        printf '%s\n' "$3" | head -40 | sed 's/^/# /'
        status=1
    fi
}

if [ -z "$format" ]; then
    echo "ok 1 - sources are formatted # SKIP no clang-format 14 (Debian package clang-format)"
else
    # shellcheck disable=SC2086
    report 1 "sources are formatted (clang-format -i FILE mends it)" \
        "$($format --dry-run --Werror $files 2>&1 | grep 'error:')"
fi
# shellcheck disable=SC2086
report 2 "sources are ASCII without tabs" "$(LC_ALL=C grep -n '[^ -~]' $files)"
# clang-format leaves comments alone.
# shellcheck disable=SC2086
report 3 "comments have at most 96 columns" \
    "$(grep -nE '^.{97}' $files | cut -c1-100)"
echo "1..3"
exit $status
