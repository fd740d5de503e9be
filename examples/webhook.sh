#!/bin/bash
# Posts the events of a run that matter to a webhook (Slack, Mattermost, or any that takes {"text": ...}):
#
#     export HPC_TRAIN_WEBHOOK_URL=https://hooks.slack.com/services/...
#     python -m hpc_train +strategy=dp run.on_event='bash examples/webhook.sh' -m
#
# The event is a line of JSON on the standard input, and $HPC_TRAIN_RUN_DIR is the run directory. The URL is a secret: it
# stays in the environment, and curl reads it from its input, because other users can see the arguments of a command.

message=$(python3 -c '
import json, os, sys

event = json.load(sys.stdin)
if event["event"] not in ("failed", "stopped_retrying", "requeued", "requeued_by_slurm", "finished", "gpu_idle"):
    sys.exit()
run = os.environ["HPC_TRAIN_RUN_DIR"]
reason = event.get("message") or event.get("reason") or ""
text = run + ": " + event["event"] + "\n" + reason[:1500] + "\npython -m hpc_train why " + run
print(json.dumps({"text": text}))
') || exit
[ -n "$message" ] || exit 0

curl --silent --show-error --fail --max-time 8 --output /dev/null --header 'Content-Type: application/json' \
  --data "$message" --config - <<< "url = \"${HPC_TRAIN_WEBHOOK_URL:?is not set}\""
