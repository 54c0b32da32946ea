#!/usr/bin/env bash
# A worker is healthy when its sshd answers, any other container while its command runs.
set -euo pipefail
if [[ -e /tmp/ssh/worker ]]; then
    exec 3<>/dev/tcp/127.0.0.1/2222
    read -r -t 5 greeting <&3
    [[ $greeting == SSH-* ]]
fi
