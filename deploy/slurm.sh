#!/bin/bash
# A sweep on nodes of a Slurm cluster, with Ray between them.
#
#   sbatch deploy/slurm.sh recipes/quickstart.yaml stages.gptq.group_size=32,64,128
#   attar status "$HOME/runs/quickstart-sweep"
#
# The folder of the runs is one that all nodes see. A job that was cut off is submitted again: it goes on.
#SBATCH --job-name=attar
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --output=%x-%j.log
set -euo pipefail

recipe=${1:?the recipe}
change=${2:?a setting with its values: key=value,value}
runs=${RUNS:-$HOME/runs}
port=${RAY_PORT:-6379}
cpus=${SLURM_CPUS_PER_TASK:-16}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')

srun --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address="$address" --port="$port" --num-cpus="$cpus" --disable-usage-stats --block &
sleep 15
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --nodelist="$node" \
        ray start --address="$address:$port" --num-cpus="$cpus" --disable-usage-stats --block &
done
sleep 15

name=$(basename "$recipe" .yaml)
RAY_ADDRESS="$address:$port" attar sweep "$recipe" --set "$change" -o "$runs/$name-sweep" --on auto --cpus "$cpus"
