#!/usr/bin/env bash
# A Grid Engine of this machine alone, for tests. As root, with Debian's packages gridengine-master, gridengine-exec
# and gridengine-client, which are not running; no systemd. It changes the configuration that these packages installed.
#
#   one_machine_sge.sh start FOLDER   process numbers and logs of jobs are in the new FOLDER
#   qsub -b y hostname
#   one_machine_sge.sh stop FOLDER    deletes all jobs and ends the daemons
set -euo pipefail

export SGE_ROOT=/var/lib/gridengine SGE_CELL=default
spool=/var/spool/gridengine

start() {
    local folder=$1 host attribute
    host=$(hostname -s)
    mkdir -p "$folder"
    chmod 755 "$folder"
    if qconf -sh >/dev/null 2>&1 || pgrep -x sge_execd >/dev/null; then
        echo "a Grid Engine runs on this machine already" >&2
        return 1
    fi
    echo "$host localhost" >"$SGE_ROOT/$SGE_CELL/common/host_aliases"
    echo "$host" >"$SGE_ROOT/$SGE_CELL/common/act_qmaster"
    sge_qmaster
    for _ in $(seq 100); do
        qconf -sh >/dev/null 2>&1 && break
        sleep 0.2
    done
    cp "$spool/qmaster/qmaster.pid" "$folder/"

    # Jobs of root, and decisions every second.
    qconf -sconf | grep -v '^#' | sed -e 's/^\(min_[ug]id\) .*/\1 0/' -e 's/^\(load_report_time\) .*/\1 00:00:02/' \
        >"$folder/global"
    qconf -Mconf "$folder/global"
    qconf -ssconf | sed -e 's/^\(schedule_interval\) .*/\1 0:0:1/' -e 's/^\(flush_.*_sec\) .*/\1 1/' >"$folder/sched"
    qconf -Msconf "$folder/sched"

    qconf -as "$host"
    if ! qconf -se "$host" >/dev/null 2>&1; then
        {
            echo "hostname $host"
            for attribute in load_scaling complex_values user_lists xuser_lists projects xprojects usage_scaling \
                report_variables; do echo "$attribute NONE"; done
        } >"$folder/host"
        qconf -Ae "$folder/host"
    fi
    if ! qconf -sq all.q >/dev/null 2>&1; then
        { # more slots than cores: tests need several jobs at once
            printf '%s\n' "qname all.q" "hostlist $host" "slots ${SGE_SLOTS:-8}" "qtype BATCH" "rerun TRUE" \
                "shell /bin/bash" "shell_start_mode unix_behavior" "tmpdir /tmp" "priority 0" "seq_no 0" "nsuspend 1" \
                "processors UNDEFINED" "initial_state default" "notify 00:00:60" "min_cpu_interval 00:05:00" \
                "suspend_interval 00:05:00"
            for attribute in load_thresholds suspend_thresholds ckpt_list pe_list prolog epilog starter_method \
                suspend_method resume_method terminate_method owner_list user_lists xuser_lists subordinate_list \
                complex_values projects xprojects calendar; do echo "$attribute NONE"; done
            for attribute in rt cpu fsize data stack core rss vmem; do
                printf '%s\n' "s_$attribute INFINITY" "h_$attribute INFINITY"
            done
        } >"$folder/queue"
        qconf -Aq "$folder/queue"
    fi
    sge_execd
    for _ in $(seq 100); do
        if qhost -h "$host" 2>/dev/null | grep -q lx-; then
            pgrep -x sge_execd >"$folder/execd.pid" # there was none before
            return
        fi
        sleep 0.2
    done
    echo "Grid Engine did not start; see the messages in $spool" >&2
    stop "$folder"
    return 1
}

stop() {
    local folder=$1 pid
    qdel -f -u '*' >/dev/null 2>&1 || true
    for pid in $(cat "$folder/execd.pid" "$folder/qmaster.pid" 2>/dev/null); do
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 50); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.2
        done
        kill -KILL "$pid" 2>/dev/null || true
    done
}

case "${1-} ${2+folder}" in
"start folder") start "$(realpath -m "$2")" ;;
"stop folder") stop "$(realpath "$2")" ;;
*)
    echo "usage: $0 start|stop FOLDER" >&2
    exit 2
    ;;
esac
