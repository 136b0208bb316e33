#!/usr/bin/env bash
# Installs the Debian packages that the nodes of tests/multinode need. Run it as root. It does nothing if they are there.
set -euo pipefail
packages=(openssh-server iproute2 procps pdsh openmpi-bin slurm-wlm munge nftables)
missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null | grep -qx installed || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0
# Services of these packages run only in the nodes, so this policy keeps apt from starting them on the machine itself.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' > $policy
    chmod +x $policy
    trap 'rm -f $policy' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
