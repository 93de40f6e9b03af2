#!/usr/bin/env bash
# Peers of a run as jobs of a Slurm cluster, one node of the cluster each:   sbatch --array=0-7 slurm.sh
# ~/invite holds the invite, readable by you alone (chmod 600). A job that is preempted, or out of time, hands its round over within
# 50 s and is queued again; it comes back as the same member, since its home stays.
#SBATCH --job-name=atoll
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@60
export ATOLL_HOME="$HOME/atoll/${SLURM_ARRAY_TASK_ID:-0}" # one home a peer: two live nodes with one key do not vote
exec atoll join --yes --invite-file "$HOME/invite" --drain 50 --script train.py
