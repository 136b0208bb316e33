#!/usr/bin/env bash
# Installs what tests/multinode runs its nodes with: Debian's packages, as root. Does nothing where they are there.
set -euo pipefail
packages=(openssh-server iproute2 procps pdsh openmpi-bin slurm-wlm munge nftables)
missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null | grep -qx installed || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0
# Their services belong into the nodes: none may start on this machine.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' > $policy
    chmod +x $policy
    trap 'rm -f $policy' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
