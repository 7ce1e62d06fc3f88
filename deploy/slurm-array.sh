#!/bin/bash
#SBATCH --job-name=icejax
#SBATCH --array=0-7
#SBATCH --gres=gpu:1
#SBATCH --requeue
#SBATCH --output=icejax-%A-%a.log
# Eight tasks answer an eighth of the lines each. A task that is requeued goes on where it ended.
set -euo pipefail
FOLDER=/documents
SHARES=8  # of the array; the same when some tasks run again
exec icejax generate --model "$FOLDER/model" --prompt-file "$FOLDER/prompts.jsonl" --chat --max-new-tokens 256 \
    --shard "$SLURM_ARRAY_TASK_ID/$SHARES" --output "$FOLDER/answers-$SLURM_ARRAY_TASK_ID.jsonl"
