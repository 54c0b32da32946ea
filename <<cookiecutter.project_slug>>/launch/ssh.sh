#!/usr/bin/env bash
# Trains on the hosts of launch/hosts (see launch/hosts.example), which ssh must reach without a password:
#   launch/ssh.sh [-n RANKS] [overrides of the configuration...]
# launch/ssh.sh --help lists all options; launch/local.sh -H a:4,b:4 takes other hosts.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/local.sh" --hosts launch/hosts "$@"
