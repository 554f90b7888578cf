# shellcheck shell=sh
# Sourced by quickstart.sh and tests/run.sh: Debian packages, those that are missing.

# packages_missing NAME...: prints the names that are not installed.
packages_missing() {
    for package in "$@"; do
        case $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) in
        installed) ;;
        *) printf '%s ' "$package" ;;
        esac
    done
}

# packages_advice NAME...: prints what to do when packages_install has failed.
packages_advice() {
    if command -v apt-get >/dev/null; then
        echo "Install them by hand, as root, then run this again: apt-get install $*"
    else
        echo "Install by hand what these Debian packages hold, then run this again: $*"
    fi
}

# packages_install NAME...: installs them, output on stderr. It can be interrupted until all is
# downloaded; from then on a signal waits, because dpkg that is ended half way leaves a system in
# which nothing can be installed. What such an end has left is mended first.
packages_install() {
    packages_sudo=
    if [ "$(id -u)" != 0 ]; then
        packages_sudo=sudo
        if ! command -v sudo >/dev/null; then
            echo "not root, and no sudo here" >&2
            return 1
        fi
    fi
    if ! command -v apt-get >/dev/null; then
        echo "no apt-get here" >&2
        return 1
    fi
    {
        packages_mend &&
            $packages_sudo apt-get -q update &&
            packages_apt --download-only "$@" &&
            (trap '' INT QUIT TERM HUP && packages_apt "$@")
    } </dev/null >&2
}

packages_apt() {
    $packages_sudo env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends \
        -o DPkg::Lock::Timeout=300 install "$@"
}

packages_mend() {
    packages_journal=$(ls "/var/lib/dpkg/updates" 2>/dev/null)
    [ -n "$packages_journal$(dpkg --audit 2>/dev/null)" ] || return 0
    echo "dpkg was interrupted before: dpkg --configure -a"
    (trap '' INT QUIT TERM HUP && $packages_sudo env DEBIAN_FRONTEND=noninteractive dpkg --configure -a)
}
