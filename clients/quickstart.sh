#!/bin/sh
# From a bare Debian 12 to an answer: installs what is missing, builds, starts prefilld on the
# demo model, sends it a passage, shows the answer, stops it. Again takes seconds.
set -u

usage() {
    cat <<'TXT'
usage: sh clients/quickstart.sh [--keep]

Builds prefilld in build/quickstart, starts it on the demo model, sends it a passage and shows
the answer.
  --keep   leave the daemon running afterwards, and say how to stop it
TXT
}

keep=
[ $# -le 1 ] || { usage >&2 && exit 2; }
case ${1-} in
'') ;;
--keep) keep=yes ;;
-h | --help) usage && exit 0 ;;
*) usage >&2 && exit 2 ;;
esac

root=$(cd "$(dirname "$0")/.." && pwd) || exit 1
cd "$root" || exit 1
. clients/packages.sh

packages='build-essential autoconf automake pkgconf libmicrohttpd-dev libjansson-dev libpcre2-dev
    libutf8proc-dev python3 curl'
work=$root/build/quickstart
log=$work/prefilld-$$.log # its own: a kept daemon goes on writing to that of its run
pid=

say() {
    printf '\n%s\n' "$*"
}

die() { # what went wrong, file that tells more, advice
    printf '\nquickstart: %s\n' "$1" >&2
    if [ -s "$2" ]; then
        printf '\nThe end of %s:\n' "$2" >&2
        tail -n 25 "$2" | sed 's/^/    /' >&2
    fi
    printf '\n%s\n' "$3" >&2
    exit 1
}

# What an interrupted run left half done is done again: autoreconf unless the last line of the
# file that it writes last is there, configure unless it came to its end.
build() {
    if ! [ -x configure ] || [ "$(tail -n 1 Makefile.in 2>/dev/null)" != .NOEXPORT: ]; then
        autoreconf -i || return
    fi
    [ -f "$work/configured" ] ||
        (cd "$work" && ../../configure --quiet --disable-tests && touch configured) || return
    make -C "$work" -j"$(nproc)" prefilld
}

# Daemons that earlier runs with --keep left, when they still run.
show_kept() {
    for file in "$work"/kept-*; do
        kept=${file##*/kept-}
        case $(readlink "/proc/$kept/exe" 2>/dev/null) in
        "$work/prefilld"*) say "One that was kept runs already: $(cat "$file"), process $kept" ;;
        *) rm -f "$file" ;;
        esac
    done
}

stop_daemon() {
    [ -n "$pid" ] || return 0
    kill "$pid" 2>/dev/null
    # It drains; with nothing running that is at once. A second signal makes it stop anyway.
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.2
    done
    kill "$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
    pid=
}

trap stop_daemon EXIT
trap 'rm -f "$log"; exit 130' INT
trap 'rm -f "$log"; exit 143' TERM HUP

if [ -f config.status ]; then
    die "this tree is configured in place, and cannot be built elsewhere too" '' \
        "Run this first, then quickstart again: make -C '$root' distclean"
fi
mkdir -p "$work" 2>/dev/null
if ! [ -w "$work" ] || ! [ -w "$root" ]; then
    die "$(id -un) cannot write in $root, where it is built" '' \
        "Run it as the owner of that folder, or in a copy of your own."
fi

# shellcheck disable=SC2086
missing=$(packages_missing $packages)
if [ -n "$missing" ]; then
    say "Installing the Debian packages $missing"
    # shellcheck disable=SC2046,SC2086
    packages_install $missing >"$work/packages.log" 2>&1 ||
        die "the packages could not be installed" "$work/packages.log" \
            "$(packages_advice $missing)"
fi

[ -x "$work/prefilld" ] || say "Building in build/quickstart; the first time takes a minute or two"
build >"$work/build.log" 2>&1 ||
    die "the build failed" "$work/build.log" \
        "Remove the folder build/quickstart and try again. If it fails again, that log says why."

# Small steps, so that the passage is seen to run in more than one piece.
model=tests/models/demo
say "Starting prefilld on the demo model, which learned the King James Bible ($model)"
show_kept
run="build/quickstart/prefilld --model $model --listen 127.0.0.1:0 --max-step-tokens 256"
if [ -n "$keep" ]; then
    # shellcheck disable=SC2086
    nohup $run >"$log" 2>&1 </dev/null &
else
    # shellcheck disable=SC2086
    $run >"$log" 2>&1 </dev/null &
fi
pid=$!

address=
tries=0
while [ -z "$address" ]; do
    address=$(sed -n 's/.*ready listen=\([^, ]*\).*/\1/p' "$log" | head -n 1)
    if ! kill -0 "$pid" 2>/dev/null && [ -z "$address" ]; then
        pid=
        die "prefilld did not start" "$log" "What it ran: $run"
    fi
    tries=$((tries + 1))
    [ "$tries" -le 300 ] || die "prefilld is not ready after a minute" "$log" "What it ran: $run"
    [ -n "$address" ] || sleep 0.2
done
grep 'ready listen=' "$log"

# Joseph's dreams, from the part of the text that the model was not trained on, up to a word that
# can be guessed.
passage=$work/passage.txt
awk -v cut='And he told it to his father, and to his' '
    { at = index($0, cut) }
    at { printf "%s", substr($0, 1, at + length(cut) - 1); exit }
    { print }' "$model/heldout.txt" >"$passage"
say "Sending it $(wc -w <"$passage") words that it has never seen. They end in:"
printf '\n    ... %s ...\n\n' "$(tail -n 1 "$passage")"

clients/prefill --url "http://$address" --file "$passage" ||
    die "the request failed" "$log" "What it sent: clients/prefill --url http://$address --file $passage"

if [ -n "$keep" ]; then
    echo "http://$address" >"$work/kept-$pid"
    say "prefilld goes on: http://$address, process $pid, log $log"
    cat <<TXT
  ask it:   '$root/clients/prefill' --url http://$address --text 'In the beginning'
            curl http://$address/v1/prefill -d '{"prompt": "In the beginning"}'
  stop it:  kill $pid
TXT
    pid=
else
    stop_daemon
    rm -f "$log"
    say "prefilld is stopped. --keep leaves it running; README.md says what else it does."
fi
