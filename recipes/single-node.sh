#!/bin/sh
# A machine that keeps a Ray cluster of its own (no systemd needed), to which jobs can be sent one after the other.
#
#   sh recipes/single-node.sh start
#   sh recipes/single-node.sh submit method=ifca clusters=4 data.rotations=4
#   sh recipes/single-node.sh stop
#
# For one experiment at a time none of this is needed: `archipelago ...` starts a Ray of its own and ends it.
# `stop` ends this cluster and no other (`ray stop` would end every Ray of the user on the machine). Beside another one give
# it ports of its own: PORT, DASHBOARD_PORT, AGENT_PORT, CLIENT_PORT, METRICS_PORT.
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
export RAY_AUTH_MODE=token RAY_TMPDIR="${RAY_TMPDIR:-/tmp/ray-archipelago}"
storage="${STORAGE:-$PWD/runs}"
port="${PORT:-6379}" dashboard="${DASHBOARD_PORT:-8265}"
process="$RAY_TMPDIR/head.pid"

running() {
    [ -e "$process" ] && kill -0 "$(cat "$process")" 2>/dev/null
}

case "${1:-}" in
start)
    if running; then
        echo "it is running already, as process $(cat "$process")" >&2
        exit 2
    fi
    mkdir -p "$RAY_TMPDIR"
    [ -e "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ] || ray get-auth-token --generate >/dev/null
    nohup ray start --head --block --port="$port" --dashboard-port="$dashboard" \
        --dashboard-agent-listen-port="${AGENT_PORT:-52365}" --ray-client-server-port="${CLIENT_PORT:-10001}" \
        --metrics-export-port="${METRICS_PORT:-8080}" --temp-dir="$RAY_TMPDIR" >"$RAY_TMPDIR/head.log" 2>&1 &
    echo $! >"$process"
    # It is there when it takes jobs, which comes last.
    for _ in $(seq 60); do
        if ray job submit --address "http://127.0.0.1:$dashboard" -- true >/dev/null 2>&1; then
            echo "running at http://127.0.0.1:$dashboard (log: $RAY_TMPDIR/head.log)"
            exit 0
        fi
        running || break
        sleep 1
    done
    tail -n 20 "$RAY_TMPDIR/head.log" >&2
    exit 1
    ;;
submit)
    shift
    ray job submit --address "http://127.0.0.1:$dashboard" -- python -m platform.launch "$@" "storage=$storage"
    ;;
stop)
    if ! running; then
        echo "it is not running" >&2
        exit 2
    fi
    kill -TERM "$(cat "$process")"
    while running; do sleep 0.2; done
    rm -f "$process"
    ;;
*)
    echo "expected start, submit or stop, got '${1:-}': as in  sh recipes/single-node.sh start" >&2
    exit 2
    ;;
esac
