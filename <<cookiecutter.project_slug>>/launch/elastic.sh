#!/usr/bin/env bash
# Trains on those hosts of launch/hosts that answer, and starts again from the newest checkpoint when one is lost or comes:
#   launch/elastic.sh [--min SLOTS] [--max SLOTS] [--discover COMMAND] [overrides of the configuration...]
# The file may change in the meantime; a command that lists the hosts may take its place. --help lists all options.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/local.sh" elastic "$@"
