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

# packages_install NAME...: installs them, output on stderr. Fails with advice on stderr.
packages_install() {
    packages_sudo=
    if [ "$(id -u)" != 0 ]; then
        packages_sudo=sudo
        if ! command -v sudo >/dev/null; then
            echo "not root, and no sudo. As root, run: apt-get install $*" >&2
            return 1
        fi
    fi
    if ! command -v apt-get >/dev/null; then
        echo "no apt-get here. Install what these Debian packages hold: $*" >&2
        return 1
    fi
    {
        $packages_sudo apt-get -q update &&
            $packages_sudo env DEBIAN_FRONTEND=noninteractive apt-get -q -y \
                --no-install-recommends -o DPkg::Lock::Timeout=300 install "$@"
    } </dev/null >&2
}
