#!/bin/sh
# The one test command: installs what it needs, builds and tests prefilld in three ways (plain,
# ASan+UBSan, TSan), tries the installation and the tarball, and ends with one line
# `N passed, N failed, N skipped`. Builds and logs are in build/. Again, it builds what changed.
# shellcheck disable=SC2317 # functions are called by stage and by trap
set -u
root=$(cd "$(dirname "$0")/.." && pwd) || exit 1
cd "$root" || exit 1
. clients/packages.sh

packages='build-essential autoconf automake pkgconf libmicrohttpd-dev libjansson-dev libpcre2-dev
    libutf8proc-dev libcriterion-dev python3'
checkers='clang-format mandoc haproxy systemd debootstrap python3-prometheus-client
    debhelper lintian' # without them their tests are skipped in words
jobs=$(nproc)
logs=$root/build/logs
# No make check takes minutes; a test that hangs is ended here.
hang_s=1200
export LC_ALL=C
unset MAKEFLAGS MAKELEVEL CFLAGS CPPFLAGS LDFLAGS DESTDIR TESTS

passed=0
failed=0
skipped=0
started=$(date +%s)

finish() {
    status=$?
    trap - EXIT
    [ -z "${preparing-}" ] || kill "$preparing" 2>/dev/null
    # Ended early, by a signal or a mistake in this script: that is not a pass.
    if [ -z "${complete-}" ]; then
        failed=$((failed + 1))
    fi
    echo "in all $(($(date +%s) - started)) s"
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ] || exit $((status ? status : 1))
    exit 0
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# count_summary LOG: adds what automake's summary says. Sets counted_failures.
count_summary() {
    summary=$(awk '
        /^# (PASS|XFAIL): / { p += $3 } /^# SKIP: / { s += $3 }
        /^# (FAIL|XPASS|ERROR): / { f += $3 } END { print p + 0, f + 0, s + 0 }' "$1")
    # shellcheck disable=SC2086
    set -- $summary
    passed=$((passed + $1))
    failed=$((failed + $2))
    skipped=$((skipped + $3))
    counted_failures=$2
    counts="$1 passed, $2 failed, $3 skipped"
}

# stage NAME DIR COMMAND...: runs COMMAND in DIR with its output in a log; one line says how it
# went. A stage with tests counts them; another one counts as one.
stage() {
    name=$1
    dir=$2
    shift 2
    log=$logs/$(echo "$name" | tr -c 'a-z0-9\n' '-').log
    at=$(date +%s)
    (cd "$dir" && "$@") >"$log" 2>&1 </dev/null
    rc=$?
    took=$(($(date +%s) - at))
    counted_failures=0
    counts=
    case $name in
    *': check')
        count_summary "$log"
        if [ "$rc $counts" = '0 0 passed, 0 failed, 0 skipped' ]; then
            rc=1
            echo "no test ran" >>"$log"
        fi
        ;;
    *)
        [ $rc -ne 0 ] || passed=$((passed + 1))
        ;;
    esac
    if [ $rc -eq 0 ]; then
        printf '%-28s ok      %4d s  %s\n' "$name" "$took" "$counts"
        return 0
    fi
    [ "$counted_failures" -gt 0 ] || failed=$((failed + 1))
    printf '%-28s FAILED  %4d s  %s\n' "$name" "$took" "$counts"
    show_failure "$dir" "$log"
    return 1
}

# The log of the tests that failed, or the end of the stage's own.
show_failure() {
    if [ "$counted_failures" -gt 0 ] && [ -s "$1/test-suite.log" ]; then
        echo "---- the end of $1/test-suite.log"
        tail -n 150 "$1/test-suite.log"
    fi
    echo "---- from $2"
    grep -E '^(FAIL|ERROR|XPASS): |error:|warning:' "$2" | head -n 40
    echo "---- the end of $2"
    tail -n 25 "$2"
    echo "----"
}

# build_and_check NAME CONFIGURE-ARGUMENT...
build_and_check() {
    variant=$1
    shift
    dir=$root/build/$variant
    mkdir -p "$dir" || return 1
    if [ "$(cat "$dir/configured-with" 2>/dev/null)" != "$*" ]; then
        stage "$variant: configure" "$dir" ../../configure --quiet "$@" || return 1
        echo "$*" >"$dir/configured-with"
    fi
    # Sanitized arithmetic takes twice as long at -O1, in every model that a test computes.
    case $variant in asan | tsan)
        # shellcheck disable=SC2046
        stage "$variant: build kernels" "$dir" make -j"$jobs" CFLAGS='-O2 -g -Werror' \
            $(cd src && echo cpu_*.c | sed 's,\([a-z0-9_]*\)\.c,src/\1.o,g') || return 1
        ;;
    esac
    stage "$variant: build" "$dir" make -j"$jobs" all || return 1
    stage "$variant: build tests" "$dir" make -j"$jobs" check TESTS= || return 1
    [ "$variant" != plain ] || prepare_systemd
    # TSan does not start where addresses are too random for it.
    run=
    if [ "$variant" = tsan ] && setarch "$(uname -m)" -R true 2>/dev/null; then
        run="setarch $(uname -m) -R"
    fi
    # Clients, documents and the proxy are not what a sanitizer looks at.
    scripts=
    [ "$variant" != asan ] || scripts='SCRIPT_TESTS=$(DAEMON_TESTS)'
    # One more than there are cores: tests also wait, for each other's ends and for time to pass.
    # shellcheck disable=SC2086
    stage "$variant: check" "$dir" timeout --foreground -k 10 $hang_s $run \
        make -j$((jobs + 1)) $scripts check
}

# In the build directory: what make install puts where, and that make uninstall takes it away.
check_install() {
    dest=$PWD/install
    rm -rf "$dest"
    make install DESTDIR="$dest" prefix=/usr sysconfdir=/etc || return 1
    for file in sbin/prefilld bin/prefill bin/loadgen share/man/man1/loadgen.1 \
        share/man/man1/prefill.1 share/man/man8/prefilld.8 \
        share/man/man5/prefilld.conf.5 share/doc/prefilld/prefilld.conf \
        share/doc/prefilld/README.md lib/systemd/system/prefilld.service \
        lib/systemd/system/prefilld.socket lib/sysusers.d/prefilld.conf lib/tmpfiles.d/prefilld.conf \
        share/doc/prefilld/cpu.conf; do
        [ -s "$dest/usr/$file" ] || { echo "make install did not install $file" && return 1; }
    done
    "$dest/usr/sbin/prefilld" --version || return 1
    "$dest/usr/sbin/prefilld" --help >/dev/null || return 1
    "$dest/usr/bin/prefill" --help >/dev/null || return 1
    "$dest/usr/bin/loadgen" --help >/dev/null || return 1
    # The installed sample is a configuration that holds: only the model is the reader's own.
    "$dest/usr/sbin/prefilld" --config "$dest/usr/share/doc/prefilld/prefilld.conf" \
        --model "$root/tests/models/demo" --listen 127.0.0.1:0 --check || return 1
    make uninstall DESTDIR="$dest" prefix=/usr sysconfdir=/etc || return 1
    left=$(find "$dest" ! -type d -o -type d -name prefilld)
    [ -z "$left" ] || { echo "make uninstall left $left" && return 1; }
    rm -rf "$dest"
}

# In the build directory: the tarball that distcheck left has every file of the repository, and
# nothing that a build made.
check_tarball() {
    # shellcheck disable=SC2012
    tarball=$(ls -t prefilld-*.tar.gz | head -n 1)
    tar -tzf "$tarball" | sed 's,^[^/]*/,,' | sort >tarball.files
    if grep -E '\.(o|d|pyc)$|/\.deps/' tarball.files; then
        echo "is in the tarball" && return 1
    fi
    if ! git -C "$root" ls-files >tree.files 2>&1; then
        echo "not a git repository, or no git: nothing to compare with" && return 0
    fi
    grep -vx '.gitignore' tree.files | sort | comm -23 - tarball.files >missing.files
    [ ! -s missing.files ] || { echo "make dist leaves out:" && cat missing.files && return 1; }
}

# In the build directory: the package from what the tarball has. Its tests were run.
build_debian() {
    rm -rf ../debian && mkdir ../debian || return 1
    # shellcheck disable=SC2012
    tar -xzf "$(ls -t prefilld-*.tar.gz | head -n 1)" -C ../debian || return 1
    cd ../debian/prefilld-* || return 1
    DEB_BUILD_OPTIONS="nocheck parallel=$jobs" DEB_BUILD_PROFILES=nocheck \
        dpkg-buildpackage -b -us -uc || return 1
    if ! command -v lintian; then
        echo "no lintian (Debian package lintian)"
        return 0
    fi
    lintian --fail-on error ../*.changes
}

check_debian() {
    if ! command -v dh >/dev/null || ! command -v dpkg-buildpackage >/dev/null; then
        echo "plain: Debian package        skipped         no debhelper"
        skipped=$((skipped + 1))
        return
    fi
    stage "plain: Debian package" build/plain build_debian
}

# Beside other stages: the Debian takes a while to download and unpack, mostly waiting.
prepare_systemd() {
    timeout -k 10 $hang_s python3 tests/pid1.py --prepare >"$logs/plain--debian-for-systemd.log" \
        2>&1 </dev/null &
    preparing=$!
}

# The installed service under a systemd that is PID 1, in a Debian made for it; then the package.
check_systemd() {
    [ -z "${preparing-}" ] || wait "$preparing"
    preparing=
    deb=$(find build/debian -name 'prefilld_*.deb' 2>/dev/null | head -n 1)
    stage "plain: systemd as PID 1" . timeout --foreground -k 10 $hang_s \
        env SRCDIR=. BUILDDIR=build/plain ${deb:+"PID1_DEB=$deb"} python3 tests/pid1.py || return
    if grep -q 'a real systemd as PID 1 # SKIP' "$log"; then
        passed=$((passed - 1))
        skipped=$((skipped + 1))
        sed -n 's/.*# SKIP/    skipped:/p' "$log"
    fi
}

# The plain build compiles the kernels, for both kinds of card, where there is nvcc.
note_kernels() {
    grep -q 'HAVE_CUDA 1' build/plain/config.h 2>/dev/null && return
    echo "kernels: compile             skipped         no CUDA Toolkit (nvcc, cuBLAS)"
    skipped=$((skipped + 1))
}

if [ -f config.status ]; then
    echo "this tree is configured in place, and cannot be built elsewhere too." \
        "Run first: make -C '$root' distclean"
    exit 1
fi
mkdir -p "$logs" 2>/dev/null
if ! [ -w "$logs" ] || ! [ -w "$root" ]; then
    echo "$(id -un) cannot write in $root, where it is built and tested:" \
        "run it as the owner of that folder, or in a copy of your own"
    exit 1
fi
# shellcheck disable=SC2086
missing=$(packages_missing $packages $checkers)
if [ -n "$missing" ]; then
    # shellcheck disable=SC2086
    if ! stage "install packages" . packages_install $missing &&
        [ -n "$(packages_missing $packages)" ]; then
        # shellcheck disable=SC2086
        packages_advice $missing
        complete=yes
        exit 1
    fi
fi
[ -d ../shared/fixtures ] ||
    echo "note: ../shared/fixtures is not here; tests that need its goldens are skipped"

if stage "autoreconf" . autoreconf -i; then
    build_and_check plain CFLAGS='-O2 -g -Werror'
    if [ -x build/plain/prefilld ]; then
        stage "plain: install" build/plain check_install
        rm -rf build/debian
        # The tarball has all that it needs: it is unpacked, built and, in part, tested elsewhere.
        # What is compiled of it was compiled before; that no test's file is missing is seen below.
        programs='tests/test_tokenizer tests/test_request tests/test_engine'
        stage "plain: distcheck" build/plain timeout --foreground -k 10 $hang_s make -j"$jobs" distcheck \
            check_PROGRAMS="$programs" TESTS="tests/docs.py $programs tests/e2e_contract.py" &&
            stage "plain: tarball" build/plain check_tarball &&
            check_debian
        check_systemd
    fi
    note_kernels
    build_and_check asan CFLAGS='-O1 -g -Werror' --with-cuda=no --enable-sanitize=address,undefined
    build_and_check tsan CFLAGS='-O1 -g -Werror' --with-cuda=no --enable-sanitize=thread
fi
complete=yes
exit 0
