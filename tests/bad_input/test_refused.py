"""Wrong configs and inputs: one clear message, exit code 2, no traceback, nothing written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_train.cli import run
from hpc_train.config.translate import translate
from hpc_train.run import lease
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze
from tests.config.composing import config_of

Called = Callable[..., subprocess.CompletedProcess[str]]

IMAGES = ["data=synthetic", "data.task=images"]
MISTAKES: list[tuple[list[str], str]] = [  # arguments, and what the message must name
    # unknown words
    (["foo"], "unknown command 'foo'"),
    (["trian"], "did you mean train?"),
    (["promote", "mine"], "fix:    checkpoint promote"),
    (["list", "mine"], "fix:    checkpoint list"),
    (["+optim.lrr=1"], "optim.lrr is not a config key"),
    (["+strategy=dp", "strategy.ppp=2"], "strategy.ppp is not a config key"),
    (["experiment=nope"], "experiment/nope does not exist"),
    (["+metrics=[f1,acc]"], "did you mean accuracy?"),
    (["+strategy=fsdp"], "did you mean zero3?"),
    (["lr=1e-3"], "fix:    optim.lr=1e-3"),
    (["train.lr=1e-3"], "fix:    optim.lr=1e-3"),
    (["batch.size=8"], "did you mean global_size?"),
    (["epoch=8"], "fix:    train.epochs=8"),
    (["hydra/launcher=nope"], "hydra/launcher/nope does not exist"),
    (["-cn", "nope"], "there is no config file nope.yaml"),
    (["-cd", "nope"], "does not exist"),
    (["model=custom", "model._target_=a.B", "model.args.n_classes=4"], "fix:    +model.args.n_classes=4"),
    (
        ["model=custom", "model._target_=a.B", "model.args.act=relu,gelu", "-m"],
        "fix:    +model.args.act=relu,gelu",
    ),
    (["model=custom", "model._target_=a.B", "model.width=4"], "a custom class is +model.args.width=VALUE"),
    (["model._target_=a.B"], "add model=custom"),
    (["data.args.digits=3"], "add data=custom"),
    (["+cluster=local"], "cluster=local without +"),
    (["+optim.lr=1"], "optim.lr=1 without +"),
    (["metrics=f1"], "fix:    +metrics=f1"),
    (["+metrics=top_k", "metrics.top_k.k=0"], "metrics.top_k.args.k=VALUE"),
    (["run.name=sweep"], "has 2 runs of a sweep or group"),
    (["run.name=done/0"], "outputs/done is a run, so"),
    (["optim.name=adam"], "did you mean adamw?"),
    (["precision.name=fp61"], "fp64"),
    (["strategy=pp", "strategy.schedule=1f2b"], "did you mean 1f1b?"),
    (["telemetry.wandb.mode=on"], "offline"),
    (["telemetry.mlflow.uri=mlruns"], "MLflow no longer writes to its file store"),
    # wrong types and forms
    (["optim.lr="], "optim.lr"),
    (["~data", "data.sequence_length=8"], "choose another file with data=NAME"),
    (["~optim.lr"], "remove ~optim.lr to keep the value"),
    (["~train.epochs=null"], "train.epochs cannot be removed"),
    (["optim@other=sgd"], "fix:    optim=sgd"),
    (["data@eval_sets.x=text"], "fix:    +data@eval_sets.x=text"),
    (["+eval_sets.x.sequence_length=0"], "eval_sets.x.sequence_length is 0, but must be at least 1"),
    (["run.name=${oc.env:UNSET_IN_TESTS}"], "export UNSET_IN_TESTS=VALUE"),
    (["hydra.job.name=mine"], "fix:    run.name=NAME"),
    (["optim.lr=1,2,", "-m"], "a comma only between two values: optim.lr=1,2"),
    (["optim.betas=(0.9,0.99)"], "a list is optim.betas=[0.9,0.99]"),
    (["hydra.launcher.n_jobs=2"], "launch.array_parallelism=VALUE"),
    (["hydra.callbacks.mine._target_=a.B"], "put + before the override"),
    (["+hydra.callbacks.mine._target_=nope.B"], "nope.B"),
    (["--resolve"], "--cfg job --resolve"),
    (["-p", "train"], "--cfg job --package train"),
    (["--package", "train", "-m"], "--cfg job --package train"),
    (["--experimental-rerun=x"], "python -m hpc_train resume RUN"),
    (["~optim.nope"], "~optim.nope removes a key that does not exist"),
    (["optim+lr=1"], "'optim+lr' is not a key of the config"),
    (["train..steps=1"], "'train..steps' is not a key of the config"),
    (["cluster.env=A=1"], "+cluster.env.NAME=VALUE"),
    (["checkpoint.every=5", "minutes"], "if the value has spaces"),
    (["--dry-run"], "fix:    launch.dry_run=true; an override has no dashes"),
    (["telemetry.wandb=true"], "telemetry.wandb is a group of keys"),
    (["optim.betas=0.9"], "fix:    optim.betas=[A,B]"),
    (["checkpoint.keep_best=val_acc"], "did you mean val_accuracy?"),
    (["~optim"], "optim cannot be removed"),
    (["~batch"], "set batch.KEY=VALUE"),
    (["~strategy"], "~strategy removes the choice of a file that nothing in this config chooses"),
    (["optim.lr"], "optim.lr"),
    (["optim.lr=["], "close the ["),
    (["data.path='a"], "close the quote '"),
    (["data.path=[a,b]"], "data.path must be text"),
    (["run.name=a=b"], """'run.name="a=b"'"""),
    (["cluster.extra={hint: x}"], "put + before the override: +cluster.extra={hint: x}"),
    (["optim.lr==3"], "optim.lr=3, with one equals sign"),
    (["=5"], "names no config key"),
    ([""], "names no config key"),
    (["--nope"], "unrecognized arguments: --nope"),
    (["--optim.lr=0.1"], "optim.lr=0.1; an override has no dashes"),
    (["--strategy=dp"], "fix:    strategy=dp; an override has no dashes"),
    (["--lr=0.1"], "fix:    optim.lr=0.1; an override has no dashes"),
    (["--batch-size=4"], "fix:    batch.global_size=4; an override has no dashes"),
    (["--foo=4"], "--hydra-help list the options"),
    (["--optim.lr", "0.1"], "optim.lr=VALUE; an override has no dashes"),
    (["train.steps=1e3"], "fix:    train.steps=1000"),
    (["train.verify.every=0"], "fix:    train.verify.every=N, at least 1, or train.verify.every=null"),
    (["--shell-completion", "install=tcsh"], "install=bash | install=zsh"),
    (["--shell-completion"], "names no action and shell"),
    (["status", "run.root=/x"], "HPC_TRAIN_ROOT=/x python -m hpc_train status"),
    (["why", "first", "run.root=/x"], "/x/NAME"),
    (["--cfg", "nope"], "invalid choice: 'nope'"),
    (["cluster.health_check=a;b"], """'cluster.health_check="a;b"'"""),
    (["optim.betas=[0.9]"], "two numbers"),
    (["strategy.dp=all"], "fill"),
    (["strategy.pp_split=some"], "strategy.pp_split"),
    (["cluster.time=soon"], "cluster.time"),
    (["cluster.gpus_per_node=two"], "cluster.gpus_per_node"),
    (["batch=null"], "batch is null, but must have a value"),
    (["~model"], "model=NAME"),
    (["data.pattern=${nothing}"], "data.pattern"),
    # out of range
    (["optim.lr=nan"], "above 0"),
    (["optim.lr=inf"], "too large"),
    (["train.steps=99999999999999999999"], "below 2^63"),
    # what does not go together
    (["train.compile=true", "train.cuda_graphs=true", "cluster.gpus_per_node=0"], "train.cuda_graphs needs GPUs"),
    (["precision=fp8", "precision.fp8=mxfp8", "strategy=tp", "strategy.tp=2", "cluster.cpu_workers=2"], "width of 352"),
    (["optim.in_backward=true"], "optim.in_backward is true, but clipping"),
    (["train.steps=null"], "neither train.steps nor train.epochs is set"),
    (["model=vit_tiny"], "requires images"),
    ([*IMAGES], "requires tokens"),
    (["model=vit_tiny", *IMAGES, "model.patch_size=5"], "does not divide"),
    (["model=vit_tiny", *IMAGES, "model.n_classes=3"], "10 classes"),
    (["model=vit_tiny", *IMAGES, "model.channels=1"], "model.channels=3"),
    (["model.n_kv_heads=3"], "does not divide"),
    (["model.vocab_size=100"], "256"),
    (["data=custom", "data._target_=a.b"], "model.vocab_size=VALUE"),
    (["data=tokens"], "data.path and data.vocab_size have no value"),
    (["model=custom"], "model._target_"),
    # impossible layouts
    (["strategy=pp", "strategy.pp=8"], "8 pipeline ranks"),
    (["strategy=dp", "strategy.dp=5"], "strategy.dp=fill"),
    (["strategy=dp", "batch.global_size=2"], "would have no sample"),
    (["strategy=tp", "strategy.tp=3"], "tensor parallelism"),
    (["strategy=tp", "data.sequence_length=255"], "data.sequence_length"),
    (["strategy=tp", "model.n_kv_heads=1"], "model.n_kv_heads"),
    (["strategy=tp", "strategy.data_parallel=ddp"], "allreduce or zero1"),
    (["strategy=hybrid", "strategy.schedule=zbv"], "stages_per_rank=2"),
    (["strategy=hybrid", "strategy.schedule=zbv", "strategy.stages_per_rank=2"], "pytorch#144530"),
    (["strategy=hybrid", "model.n_layers=1"], "too few for 2 pipeline stages"),
    (["strategy=hybrid", "strategy.pp_split=[1,2]"], "strategy.pp_split"),
    (["strategy=hybrid", "batch.micro_batches=1"], "1 micro-batch per step cannot fill"),
    (["strategy=hybrid", "batch.micro_batches=1"], "batch.micro_batches=2 or more"),
    (["strategy=hybrid", "batch.micro_size=16"], "a smaller batch.micro_size"),
    (["strategy=model_parallel", "batch.micro_batches=4"], "one micro-batch"),
    (["strategy=pp", "strategy.dp=fill"], "both be fill"),
    (["cluster.nodes=2", "cluster=local"], "cluster.nodes=1"),
    (["cluster.gpus_per_node=99", "cluster=local"], "99 GPUs"),
    (["strategy=zero2", "strategy.compression=topk"], "scatters gradients"),
    (["strategy=zero3", "strategy.compression=fp16"], "strategy.compression=bf16 or none"),
    (["strategy=hsdp", "strategy.compression=topk"], "compress by topk"),
    (["strategy=tp", "strategy.compression=powersgd"], "slices of gradients"),
    (["strategy=dp", "strategy.compression=topk", "precision=fp16"], "in units of the loss"),
    (["strategy=dp", "strategy.compression=bf16", "train.reproducible=any_world_size"], "how many ranks"),
    (["strategy=dp", "strategy.compression=top-k"], "did you mean topk?"),
    (["strategy=dp", "strategy.compression_share=0"], "at most 1"),
    # data that is not there
    (["data.path=empty"], "no file matches"),
    (["data.path=*.none"], "no file matches"),
    (["data.path=blank"], "only empty files match"),
    (["data.path=blank/a.py"], "is empty"),
    (["data=tokens", "data.vocab_size=9", "data.path=empty"], "prepare"),
    (["data=cifar100", "data.path=empty", "model=vit_tiny", "model.patch_size=4"], "cifar-100-python"),
    (["data=cifar100", "data.path=blank/a.py", "model=vit_tiny", "model.patch_size=4"], "not a directory"),
    (["data=images", "data.path=empty", "data.n_classes=2", "model=vit_tiny"], "CLASS"),
    (["data=images", "data.path=pictures", "data.n_classes=3", "model=vit_tiny"], "data.n_classes=2"),
    # names and places
    (["run.name=../x"], "run name"),
    (["run.name=/x"], "run name"),
    (["run.name='a b'"], "run name"),
    (["run.name=Übung"], "letters A-Z"),
    (["run.name=taken"], "is a file"),
    (["run.root=empty/../outputs/taken"], "not a directory"),
    ([f"run.name={'x' * 300}"], "has 300 characters"),
    (["run.name=broken"], "is a symbolic link to gone"),
    (["run.root=loop"], "is a symbolic link to loop"),
    (["run.root=/proc/x"], "no permission to write to /proc"),
    (["run.fork=x"], "run.name=OLD"),
    (["run.name=none", "run.fork=x"], "the run to fork does not exist"),
    (["run.name=a,b", "-m"], "one value"),
    (["optim.lr=1,2"], "optim.lr=1,2 lists several values"),
    (["optim.lr=0,001"], "optim.lr=0.001, if the comma is a decimal one"),
    (["optim.lr=1,2", "run.name=lr${optim.lr}", "-m"], "refers to a key that the sweep varies"),
    (["-cd", "site", "cluster=time"], "site/cluster/time.yaml:2"),
    (["-cd", "site", "cluster=broken"], "site/cluster/broken.yaml:2: expected ':'"),
    (["-cd", "site", "cluster=env"], "env must be NAME: VALUE pairs"),
    (["-cd", "site", "cluster=setup"], "setup must be a list of lines"),
    (["-cd", "site", "cluster=typo"], "set in: cluster.partion in site/cluster/typo.yaml:2"),
    (["-cd", "site", "cluster=blank"], "has no value\n  set in: cluster.account in site/cluster/blank.yaml:2"),
    (["-cd", "site", "cluster=cores"], "set in: cluster.cpus_per_gpu in site/cluster/cores.yaml:2"),
    (["-cd", "site", "cluster=nested"], "start the file with `# @package _global_`"),
    (["freeze", "-cd", "site", "cluster=typo"], "site/cluster/typo.yaml:2"),
    (["-cd", "site", "strategy=mine"], "strategy.compression in site/strategy/mine.yaml:3"),
    (["-cd", "blank/a.py"], "is a file"),
    (["-cd", "site", "experiment=bare"], "start the file with `# @package _global_`"),
    (["-cd", "site", "-cn", "mine"], "optim.lr"),
    (["optim.lr=interval(0,1)", "-m"], "commas"),
    (["train.seed=range(3,0)", "-m"], "the sweep has no job"),
    (["script", "nosuch"], "KEY=VALUE"),
    (["script", "cluster=local"], "cluster=slurm, or cluster=kubernetes"),
    (["doctor", "--submit", "cluster=kubernetes"], "only Slurm runs this command as a job"),
    (["freeze", "optim.lr=1,2"], "one job"),
    (["freeze", "data.path=nope"], "does not exist"),
]  # fmt: skip


FILES = {  # their bytes, and what the message names
    "latin": (b"comment: caf\xe9\n", "latin.yaml is not UTF-8"),
    "zero": (b"comment: \x00\n", "zero.yaml has a character that YAML does not allow"),
    "number": (b"5\n", "number.yaml must be NAME: VALUE pairs"),
    "lines": (b"- a\n", "lines.yaml must be NAME: VALUE pairs"),
    "nothing": (b"defaults: null\n", "defaults must be a list"),
    "word": (b"# me\ndefaults: local\n", "set in: site/cluster/word.yaml:2"),
    "self": (b"defaults: [self]\n", "contain the file itself"),
}
SITES = {  # lines after the defaults
    "time": "time: 24:00:00",
    "blank": "account: ???",
    "broken": "partition gpu\naccount: x",
    "env": "env: [A=1]",
    "setup": "setup: module load cuda",
    "typo": "partion: gpu",
    "cores": "cpus_per_gpu: 0",
    "nested": "run:\n  root: /scratch",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with some inputs that are not as they should be."""
    files = {f"site/cluster/{name}.yaml": f"defaults: [local, _self_]\n{lines}\n" for name, lines in SITES.items()}
    files |= {
        "site/strategy/mine.yaml": "defaults: [zero2, _self_]\nname: mine\ncompression: topk\n",
        "site/experiment/bare.yaml": "optim: {lr: 1e-3}\n",
        "site/mine.yaml": "defaults: [config, _self_]\noptim:\n  lr: -1\n",
    }
    empty = ("blank/a.py", "outputs/taken", "outputs/done/config.yaml", "outputs/done/run.json")
    files |= dict.fromkeys((*empty, "outputs/sweep/0/config.yaml", "outputs/sweep/1/config.yaml"), "")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "empty").mkdir()
    for folder in ("train/cat", "train/dog", "validation/cat", "validation/dog"):
        (tmp_path / "pictures" / folder).mkdir(parents=True)
    (tmp_path / "outputs" / "broken").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def test_a_job_that_does_not_fit_into_memory_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster=local", "batch.global_size=1000000000", "launch.dry_run=true"]) == 0
    output = capsys.readouterr().out
    assert "note: the run will probably run out of memory: it needs about" in output and "of this machine\n" in output
    assert "verdict: can be submitted, but will probably run out of memory\n" in output
    assert run(["cluster=local", "launch.dry_run=true", "optim.lr=1e-3", "optim.lr=1e-4"]) == 0
    output = capsys.readouterr().out
    assert "note: the command line sets optim.lr more than once; the last value is used\n" in output
    assert "verdict: can be submitted\n" in output


def test_one_verdict_names_all_refused_jobs_of_a_sweep(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Jobs with the same mistake are told together."""
    before = everything(place)
    sweep = ["+strategy=dp,nope", "optim.lr=1e-3,-1", "train.seed=1,2", "cluster=local", "-m"]
    assert run(sweep) == 2
    output = capsys.readouterr().err
    assert output.startswith("6 of 8 jobs are refused, and none was submitted:\n")
    assert "\njobs 2, 3 (the first: +strategy=dp optim.lr=-1 train.seed=1 cluster=local): optim.lr is -1.0" in output
    assert (
        "\njobs 4, 5, 6, 7 (the first: +strategy=nope optim.lr=0.001 train.seed=1 cluster=local): strategy/" in output
    )
    assert output.count("set in:") == output.count("fix:") == 2
    assert run([*sweep, "launch.dry_run=true"]) == 2
    output = capsys.readouterr().out
    assert output.endswith("verdict: refused\ndry run: 8 jobs, 6 refused\n") and "dry_run=" not in output
    assert everything(place) == before


def everything(place: Path) -> set[Path]:
    return set(place.rglob("*"))


# Cases of the long form: another case, or one in tests/config/test_hydra_settings.py, has a message of the same form.
ALIKE = (
    "list mine",
    "+optim.lrr=1",
    "+strategy=dp strategy.ppp=2",
    "hydra/launcher=nope",
    "hydra.launcher.n_jobs=2",
    "model=custom model._target_=a.B model.args.act=relu,gelu -m",
    "data.args.digits=3",
    "+optim.lr=1",
    "optim.lr=",
    "~train.epochs=null",
    "data@eval_sets.x=text",
    "+hydra.callbacks.mine._target_=nope.B",
    "-p train",
    "--package train -m",
    "--strategy=dp",
    "--optim.lr=0.1",
    "why first run.root=/x",
    "optim.betas=[0.9]",
    "strategy.dp=all",
    "cluster.gpus_per_node=two",
    "optim.lr=nan",
    "train.lr=1e-3",
    "epoch=8",
    "optim.betas=0.9",
    "~batch",
    "optim.lr=inf",
    "--foo=4",
    "model=vit_tiny data=synthetic data.task=images model.channels=1",
    "model.n_kv_heads=3",
    "strategy=tp strategy.tp=3",
    "strategy=zero3 strategy.compression=fp16",
    "strategy=dp strategy.compression=top-k",
    "strategy=dp strategy.compression_share=0",
    "data.path=*.none",
    "data.path=blank/a.py",
    "run.name=/x",
    "run.name='a b'",
    "run.root=loop",
    "-cd site cluster=env",
    "-cd site cluster=setup",
    "-cd site cluster=cores",
    "freeze -cd site cluster=typo",
    "-cd site experiment=bare",
    "freeze data.path=nope",
)


@pytest.mark.parametrize(("arguments", "named"), MISTAKES, ids=lambda value: " ".join(value) if value else None)
@pytest.mark.long_form(1, cases=ALIKE)
def test_a_mistake_is_one_message_and_exit_code_2(
    arguments: list[str], named: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(place)
    command = arguments if arguments[0] == "freeze" else [*arguments, "launch.dry_run=true"]
    assert run(command) == 2
    output = "".join(capsys.readouterr())
    assert named in output
    assert "Traceback" not in output
    assert output.count("set in:") == 1
    assert output.count("fix:") == 1
    assert everything(place) == before


def test_a_file_that_hydra_cannot_load_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (data, named) in FILES.items():
        (place / "site" / "cluster" / f"{name}.yaml").write_bytes(data)
        assert run(["-cd", "site", f"cluster={name}", "launch.dry_run=true"]) == 2
        output = "".join(capsys.readouterr())
        assert named in output
        assert output.count("set in:") == output.count("fix:") == 1


OWN = """
import nonesuch
from torch import nn
class Base(nn.Module):
    pass
class Net(Base):
    def __init__(self, width, depth=2):
        pass
def built(width: int) -> Net:
    return Net(width)
def undeclared(width: int):
    return Net(width)
"""


def test_an_own_model_and_missing_packages_are_told_at_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "own_net.py").write_text(OWN)
    (place / "own_bad.py").write_text("\ndef f(:\n")
    (place / "own_search.py").write_text(f"import sys\nsys.path.append('vendor')\n{OWN}")
    monkeypatch.syspath_prepend(place)
    monkeypatch.setitem(sys.modules, "tensorboard", None)

    def refused(target: str, *arguments: str) -> str:
        given = ["model=custom", f"model._target_={target}", *arguments, "launch.dry_run=true"]
        assert run(given) == 2
        return "".join(capsys.readouterr())

    told = refused(
        "own_net.Net", "+model.args.widht=3", "telemetry.tensorboard=true", "data.path=nope", "strategy.dp=9"
    )
    assert "5 mistakes:" in told
    assert told.count("set in:") == told.count("fix:") == 5
    for part in ("did you mean width?", "[tensorboard]", "nope does not exist", "9 workers", "own_net.py:2"):
        assert part in told
    assert "nonesuch" not in refused("own_search.Net", "+model.args.width=3", "data.path=nope")
    for target in ("own_net.Net", "own_net.built"):
        assert "only a hpc_train.models.model.Model" in refused(target, "+model.args.width=3", "strategy=pp")
    assert "Model can be cut" not in refused("own_net.undeclared", "+model.args.width=3", "strategy=pp")
    assert "own_bad.py:2: invalid syntax" in refused("own_bad.f")
    assert "there is no module nope" in refused("nope.Net")
    told = refused("own_net.Net", "+model.args.width=3", "optim.lr=-1", "train.steps=0")
    assert "2 mistakes" in told
    assert "set in: optim.lr" in told
    assert "set in: train.steps" in told


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["+strategy=hybird", "strategy.nothing=1", "optim.lrr=1", "train.compile=perhaps", "model=gpt_tny",
          "nodel=gpt_tiny", "cluster=here"],
         ["did you mean hybrid?", "did you mean lr?", "train.compile is 'perhaps'", "did you mean gpt_tiny?",
          "did you mean model?", "your own file DIR/cluster/here.yaml needs -cd DIR"]),
        (["optim.lr=1,foo", "optim.lrr=1", "-m"], ["optim.lr is 'foo'", "did you mean lr?"]),
        (["strategy=tp", "model.n_heads=3", "model.dim=48", "model.n_kv_heads=1", "data.sequence_length=255"],
         ["model.n_heads=3", "model.n_kv_heads=1", "data.sequence_length=255"]),
        (["train.loss_chunks=99999", "strategy.offload=all", "data.path=nope", "run.name=live",
          "train.verify.every=90", "checkpoint.every=20"],
         ["train.loss_chunks", "strategy.offload=all requires", "nope does not exist", "is live",
          "steps, but checkpoint.keep=2 with checkpoint.every=20 keeps the checkpoints of the last 40 steps"]),
        (["strategy=dp", "train.verify.every=45", "checkpoint.every=20", "data.path=nope"],
         ["within 90 steps", "nope does not exist"]),
        (["optim.lr=foo", "data.sequence_length=1.5", "train.compile=perhaps", "optim.betas=[0.9,a]",
          "cluster.preflight_action.tpc=stop", "cluster.env=[A]", "cluster.setup=module", "eval_sets=5"],
         ["optim.lr", "data.sequence_length", "train.compile", "optim.betas", "did you mean tcp?",
          "cluster.env must be NAME: VALUE pairs", "cluster.setup must be a list of lines",
          "eval_sets must be NAME: VALUE pairs"]),
        (["optim.lr=-1", "train.steps=0", "model.dropout=1.5", "batch.global_size=0", "telemetry.log_every=0",
          "data.validation_share=1", "train.seed=9223372036854775808", "cluster.time=soon", "optim.betas=[0.9]",
          "checkpoint.every=often"],
         ["above 0", "must be at least 1", "below 1", "batch.global_size", "telemetry.log_every",
          "data.validation_share", "too large", "cluster.time is", "optim.betas", "checkpoint.every"]),
        (["model.n_heads=3", "batch.micro_size=2", "batch.micro_batches=2", "train.steps=5", "train.epochs=1",
          "data.path=nope"],
         ["does not divide", "auto", "only one may be set", "does not exist"]),
    ],
)  # fmt: skip
def test_all_independent_mistakes_are_told_in_one_verdict(
    arguments: list[str], named: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = RunDirectory(place / "outputs" / "live")
    freeze(config_of("run.name=live"), live)
    with lease.hold_lease(live):
        before = everything(place)
        assert run([*arguments, "launch.dry_run=true"]) == 2
        assert everything(place) == before
    output = "".join(capsys.readouterr())
    assert f"{len(named)} mistakes:" in output and "Traceback" not in output
    assert [part for part in named if part not in output] == []
    assert output.count("set in:") == output.count("fix:") == len(named)


def test_an_unreadable_file_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root reads everything, so what the system would answer another user is put in its mouth."""
    closed = place / "closed.txt"
    closed.write_text("text")
    ask = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed and ask(path, mode))
    assert run(["data.path=closed.txt", "launch.dry_run=true"]) == 2
    assert "cannot be read" in "".join(capsys.readouterr())


def test_a_live_run_and_changed_identity_keys_are_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, live = config_of("run.name=live"), RunDirectory(place / "outputs" / "live")
    freeze(config, live)
    with lease.hold_lease(live):
        assert run(["run.name=live", "launch.dry_run=true"]) == 2
    assert "is live" in "".join(capsys.readouterr())
    live.metrics_file(0).write_text('{"step": 1}\n')
    assert run(["run.name=live", "model.dim=64", "launch.dry_run=true"]) == 2
    assert "run.fork=" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "arguments",
    [
        ["optim.lr=-1"],
        ["model=vit_tiny", "-m"],
        ["+strategy=dp,hybird", "-m"],
        ["optim.lr=1,-1", "-m"],
        ["-cd", "site", "cluster=broken", "-m"],
        ["run.name=taken"],
        ["--cfg", "job", "optim.lrr=1"],
        ["data.path=nope", "cluster=slurm"],
    ],
    ids=" ".join,
)
def test_every_door_refuses_alike_and_leaves_nothing(arguments: list[str], place: Path, called: Called) -> None:
    before = everything(place)
    done = called(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("set in:") == 1
    assert everything(place) == before


def test_a_full_disk_is_told_in_one_message() -> None:
    with pytest.raises(OSError) as full, Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"no room")
    mistake = translate(full.value)
    assert mistake is not None
    assert mistake.what == "the disk or quota is full (No space left on device)"
    assert "run.root" in mistake.fix
    assert "ulimit -f" in str(translate(OSError(errno.EFBIG, "File too large")))
    mistake = translate(OSError(errno.EROFS, "Read-only file system", "/ro/x"))
    assert mistake is not None and mistake.what == "/ro/x is on a file system that is read-only here"
