#!/bin/bash
# One run of train.py as a Slurm job that survives its time limit: warned, it saves and puts itself back into the queue.
#
#     sbatch slurm.sh configs/gpt350m_fp8.py optim.lr=3e-4                from the repository's folder: one node, eight GPUs
#     sbatch --nodes=4 slurm.sh configs/gpt1p5b_fp8.py                    several nodes
#     sbatch --partition=gpu --time=04:00:00 slurm.sh configs/...         whatever your cluster asks for
#     scancel JOB                                                         ends it for good; what was saved stays
#
# Slurm starts one process per GPU itself, and its warning reaches train.py. With torchrun in between the warning, SIGUSR1,
# would end torchrun alone, whose workers then save and leave by themselves; to pass it on, and to give them more than 30 s:
# torchrun --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout=280. What a restart by torchrun would
# mend, the requeued job mends, on other nodes if need be.
#
#SBATCH --job-name=nanofp8
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out

set -u
say() { echo "slurm.sh: $*" >&2; }

cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
if [ $# -eq 0 ] || [ ! -f train.py ] || [ -z "${SLURM_JOB_ID:-}" ]; then
    say "submit it from the repository's folder, with a config: sbatch slurm.sh configs/gpt350m_fp8.py key=value"
    exit 2
fi
[ -x .venv/bin/python ] && default=.venv/bin/python || default=python
python="${PYTHON:-$default}"

# The run's folder, from the config itself: train.py's exit code 0 means finished, or saved on request.
run_dir=$("$python" -c '
import sys
from lib.errors import UserError
from runtime.command_line import read_command_line
from runtime.config import load_config
try:
    line = read_command_line(sys.argv[1:])
    if line.plan_for is not None:
        raise UserError("--plan trains nothing and needs no GPU: python train.py FILE --plan")
    print(load_config(line.file, line.overrides).run_dir)
except UserError as error:
    print(f"slurm.sh: {error}", file=sys.stderr)
    sys.exit(2)' "$@") || exit 2
newest_checkpoint() { find "$run_dir/checkpoints" -maxdepth 1 -name 'step_????????' 2>/dev/null | sort | tail -n 1; }
before=$(newest_checkpoint)

trap : USR1     # should the warning reach this shell too, it waits on
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + (SLURM_JOB_ID + ${SLURM_RESTART_COUNT:-0}) % 20000))
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS=1 SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
# Where one process fails, the others have a minute to say what they saw before they are ended.
srun --kill-on-bad-exit=0 --wait=60 bash -c \
    'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$((SLURM_NTASKS / ${SLURM_NNODES:-1})) \
     WORLD_SIZE=$SLURM_NTASKS exec "$0" train.py "$@"' "$python" "$@"
code=$?

if [ -f "$run_dir/summary.json" ]; then
    exit $code
elif [ $code -eq 2 ]; then
    say "a mistake in the settings: not requeued; correct it and submit again"
    exit 2
elif [ $code -ne 0 ] && [ $code -ne 138 ] && [[ ! "$(newest_checkpoint)" > "$before" ]]; then   # 138: warned while loading
    say "ended with code $code, and nothing new was saved since this job began: not requeued, or it might go on for ever"
    exit $code
fi
say "not finished (code $code): requeued"
scontrol requeue "$SLURM_JOB_ID" || { say "scontrol requeue failed: submit the same command again to go on"; exit 1; }
