#!/usr/bin/env bash
# Trains on a cluster from a CI job on a login node, and compares the result with that of the last good run.
#
#   deploy/ci/train.sh smoke OVERRIDE...   trains 20 steps and writes a report; fails if the run fails
#   deploy/ci/train.sh full OVERRIDE...    trains to the end; fails if the run fails or is worse than the last good one
#
# The job waits until the run has ended. If it is cancelled or times out, the run goes on, and a second call with the
# same RUN_NAME follows or resumes it. Variables:
#
#   RUN_NAME   the name of the run (default: ci-SHA of the commit; -smoke is appended for a short one)
#   RUN_ROOT   the directory of the runs, on the shared file system (default: outputs)
#   FAIL_IF    the conditions under which a run is worse, separated by semicolons
#   REPORT     the HTML file to keep as an artifact (default: report.html)
#   PROMOTE_TO wandb or mlflow: the registry in which the best checkpoint of a good run gets the alias PROMOTE_AS
#              (default: production); empty promotes nothing
#   MODEL      the name of the model in the registry, the same for all commits (default: that of the repository)
set -euo pipefail

kind=${1:?smoke or full}
shift
root=${RUN_ROOT:-outputs}
name=${RUN_NAME:-ci-$(git rev-parse --short HEAD)}
conditions=${FAIL_IF:-val_loss>1.02*baseline; samples_per_s<0.9*baseline}
last_good=$root/last-good  # a file with the path of the run
own=("run.root=$root")

case $kind in
    smoke) name=$name-smoke own+=(train.steps=20) ;;
    full) ;;
    *) echo "$0: $kind is neither smoke nor full" >&2 && exit 2 ;;
esac
run=$root/$name

# Whatever happens to the run, its report is kept.
trap 'python -m hpc_train report "$run" --out "${REPORT:-report.html}" || true' EXIT

if [[ -d $run ]]; then # an earlier call left it; if it has ended, this returns at once
    python -m hpc_train wait "$run" || true
fi
code=0
python -m hpc_train "$@" "${own[@]}" "run.name=$name" launch.yes=true -m || code=$?
if ((code != 0)); then
    python -m hpc_train why "$run" || true
    exit "$code"
fi
[[ $kind == full ]] || exit 0

if [[ -s $last_good && $(<"$last_good") != "$run" ]]; then # the job of the last good run may be run again
    IFS=';' read -ra each <<<"$conditions"
    python -m hpc_train compare "$(<"$last_good")" "$run" "${each[@]/#/--fail-if=}"
fi
echo "$run" >"$last_good.new" && mv "$last_good.new" "$last_good"
if [[ -n ${PROMOTE_TO:-} ]]; then
    model=${MODEL:-$(basename "$(git rev-parse --show-toplevel)")}
    python -m hpc_train checkpoint promote "$run" --checkpoint best --to "$PROMOTE_TO" --name "$model" \
        --as "${PROMOTE_AS:-production}"
fi
