#!/bin/bash
# Pretraining on hosts without a scheduler: the same command on each, but for HOST.
#
#   HOSTS="alpha beta" HOST=0 PROCESSES=8 launch/hosts/pretrain.sh --config celeba
#   HOSTS="alpha beta" HOST=1 PROCESSES=8 launch/hosts/pretrain.sh --config celeba
#
#   HOSTS       names or addresses of all hosts, as the others reach them; they meet at the first
#   HOST        this host's place in HOSTS, from 0
#   PROCESSES   processes on each host: its GPUs; by default what nvidia-smi lists, or 1
#   PORT        where they meet on the first host (29517)
#   PYTHON      the interpreter that has Heron installed (.venv/bin/python, else python3)
#   ZERO        0, 1, 2 or 3 for DeepSpeed ZeRO of that stage; unset for DistributedDataParallel
#   GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME   the network interface that the hosts share; without
#               GPUs by default the one by which this host reaches the first
#
# Relative paths are of the folder that it is called in. run.dir lies on a disk that all hosts see;
# run.resume=auto is added, so the same command goes on after a stop. Ctrl-C, SIGTERM or SIGUSR1 to
# this script on any host saves and ends all of them with status 75. The script ends with the
# highest status of its processes. Once one has ended, the others here have 300 s to end too, in
# which a checkpoint may still be written; then they are killed, with status 76. One that was
# stopped (SIGSTOP) goes on at that point, to end.
set -uo pipefail

read -ra hosts <<<"${HOSTS:?names of all hosts, the first is where they meet}"
: "${HOST:?this host\'s place in HOSTS, from 0}"
if [[ ! $HOST =~ ^(0|[1-9][0-9]{0,8})$ ]] || ((HOST >= ${#hosts[@]})); then
  echo "error: HOST is $HOST; expected 0 to $((${#hosts[@]} - 1)), its place in HOSTS: $HOSTS" >&2
  exit 2
fi
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
PROCESSES=${PROCESSES:-$((gpus > 0 ? gpus : 1))}
PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}

export MASTER_ADDR=${hosts[0]} MASTER_PORT=${PORT:-29517}
export WORLD_SIZE=$((${#hosts[@]} * PROCESSES)) LOCAL_WORLD_SIZE=$PROCESSES
if ((gpus == 0)) && [[ -z ${GLOO_SOCKET_IFNAME:-} ]]; then
  peer=${hosts[HOST == 0 ? ${#hosts[@]} - 1 : 0]}
  address=$(getent ahostsv4 "$peer" | awk '{print $1; exit}')
  GLOO_SOCKET_IFNAME=$(ip -4 route get "${address:-$peer}" 2>/dev/null | grep -oP ' dev \K\S+')
  [[ -n $GLOO_SOCKET_IFNAME ]] && export GLOO_SOCKET_IFNAME
fi
if [[ -n ${ZERO:-} ]]; then # what accelerate launch would set
  export ACCELERATE_USE_DEEPSPEED=true ACCELERATE_DEEPSPEED_ZERO_STAGE=$ZERO
  export ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=none
  export ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE=none
  export ACCELERATE_DEEPSPEED_ZERO3_INIT=false ACCELERATE_GRADIENT_ACCUMULATION_STEPS=1
  export ACCELERATE_GRADIENT_CLIPPING=0.0 ACCELERATE_MIXED_PRECISION=no
elif ((gpus == 0)); then
  export ACCELERATE_USE_CPU=true
fi

trap '' USR1 TERM INT # until Python listens, the processes ignore what is sent to them
pids=()
for ((i = 0; i < PROCESSES; i++)); do
  RANK=$((HOST * PROCESSES + i)) LOCAL_RANK=$i \
    "$PYTHON" -m heron.api.job "$@" run.resume=auto &
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null' USR1 TERM INT

END_S=${END_S:-300} # as `heron pretrain --processes` and slurm/pretrain.sbatch
status=0 ended='' deadline=0
while ((${#pids[@]})); do
  for i in "${!pids[@]}"; do
    kill -0 "${pids[i]}" 2>/dev/null && continue
    wait "${pids[i]}"
    code=$?
    ((code > status)) && status=$code
    [[ -n $ended ]] || ended="rank $((HOST * PROCESSES + i)) ended with status $code"
    unset "pids[i]"
  done
  if [[ -n $ended ]] && ((${#pids[@]})); then
    ((deadline)) || deadline=$((SECONDS + END_S))
    kill -CONT "${pids[@]}" 2>/dev/null
    if ((SECONDS >= deadline)); then
      for i in "${!pids[@]}"; do
        echo "error: rank $((HOST * PROCESSES + i)) had not ended $END_S s after $ended; killed" >&2
        kill -KILL "${pids[i]}" 2>/dev/null
        wait "${pids[i]}" 2>/dev/null
      done
      ((status > 76)) || status=76
      break
    fi
  fi
  sleep 0.2
done
echo "host $HOST of ${#hosts[@]}: ended with status $status" >&2
exit "$status"
