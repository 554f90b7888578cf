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
    # shellcheck disable=SC2086
    {
        packages_mend &&
            packages_run apt-get -q update &&
            packages_run apt-get $packages_apt --download-only install "$@" &&
            packages_shield apt-get $packages_apt install "$@"
    } </dev/null >&2
}

packages_apt='-q -y --no-install-recommends -o DPkg::Lock::Timeout=300'

packages_run() {
    $packages_sudo env DEBIAN_FRONTEND=noninteractive "$@"
}

# In a session of its own, which Ctrl-C does not reach: ignoring the signal is not enough, because
# apt-get gives dpkg the default again.
packages_shield() {
    (trap '' INT QUIT TERM HUP && packages_run setsid -w "$@")
}

packages_mend() {
    if [ -z "$(ls /var/lib/dpkg/updates 2>/dev/null)$(dpkg --audit 2>/dev/null)" ]; then
        return 0
    fi
    echo "dpkg was interrupted before: dpkg --configure -a"
    packages_shield dpkg --configure -a
}
