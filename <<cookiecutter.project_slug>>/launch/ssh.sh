#!/usr/bin/env bash
# Trains on the hosts of launch/hosts (see launch/hosts.example), which ssh must reach without a password:
#   launch/ssh.sh [-H a:4,b:4] [-n RANKS] [overrides of the configuration...]
# -H names other hosts; launch/ssh.sh --help lists all options.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/local.sh" ssh "$@"
