#!/usr/bin/env bash
# A SLURM of this machine alone, for tests. As root, with Debian's packages slurm-wlm and munge; no systemd.
#
#   one_machine_slurm.sh start FOLDER   daemons, configuration and logs are in the new FOLDER
#   export SLURM_CONF=FOLDER/slurm.conf
#   sbatch --wrap hostname
#   one_machine_slurm.sh stop FOLDER    cancels all jobs and ends the daemons
set -euo pipefail

start() {
    local folder=$1 host cores
    host=$(hostname -s)
    cores=${SLURM_CORES:-8} # more than there are: tests need several jobs at once
    mkdir -p "$folder" "$folder/state" "$folder/spool"
    chmod 755 "$folder"
    (umask 077 && dd if=/dev/urandom of="$folder/munge.key" bs=1024 count=1 status=none)
    cat >"$folder/slurm.conf" <<END
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmctldPort=${SLURM_PORT:-46817}
SlurmdPort=$((${SLURM_PORT:-46817} + 1))
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
JobRequeue=1
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cores RealMemory=$(awk "/MemTotal/ {print int(\$2 / 1024)}" /proc/meminfo) State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
END
    munged --force --num-threads 2 --socket "$folder/munge.socket" --key-file "$folder/munge.key" \
        --pid-file "$folder/munged.pid" --log-file "$folder/munged.log" --seed-file "$folder/munged.seed"
    export SLURM_CONF=$folder/slurm.conf
    slurmctld -c
    slurmd -c
    for _ in $(seq 150); do
        if [ "$(sinfo --noheader --format %T 2>/dev/null)" = idle ]; then return; fi
        sleep 0.2
    done
    echo "SLURM did not start; see the logs in $folder" >&2
    tail -n 5 "$folder"/*.log >&2
    stop "$folder"
    return 1
}

stop() {
    local folder=$1 name pid
    export SLURM_CONF=$folder/slurm.conf
    scancel --signal KILL --full --user root 2>/dev/null || true
    for name in slurmctld slurmd munged; do
        pid=$(cat "$folder/$name.pid" 2>/dev/null) || continue
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
