"""Stores checkpoints, with their lineage, in the model registries of W&B and MLflow, and imports them again.

A checkpoint is promoted only after every byte of it was verified.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hpc_train.checkpoint import disk
from hpc_train.checkpoint.listing import BEST, NEWEST, Bar, choose_by_name, verified_manifest
from hpc_train.checkpoint.manifest import COMMITTED, Manifest
from hpc_train.checkpoint.store import Checkpoint
from hpc_train.config.evaluation import BestMetric
from hpc_train.config.schema import Config, MlflowConfig
from hpc_train.config.secrets import without_secrets
from hpc_train.config.values import check_answers, server_uri
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import read_json
from hpc_train.run.freeze import text_of
from hpc_train.run.imported import PUBLISHED, import_directory, published
from hpc_train.telemetry.sinks.mlflow import check_installed, find_or_create
from hpc_train.telemetry.sinks.tracker import Identity, Session
from hpc_train.telemetry.sinks.wandb import Wandb

# the layout of a stored model
CHECKPOINT, CONFIG, LINEAGE = "checkpoint", "config.yaml", "lineage.json"
REGISTRIES = ("wandb", "mlflow")


@dataclass(frozen=True)
class Model:
    """Describes a verified checkpoint to a registry.

    Attributes:
        name: the name of the model in the registry.
        folder: the directory of the checkpoint.
        notes: a directory with the config and the lineage.
        about: the lineage; see ``lineage``.
    """

    run: RunDirectory
    config: Config
    name: str
    folder: Path
    notes: Path
    about: Mapping[str, Any]
    aliases: Sequence[str]


@dataclass(frozen=True)
class Promoted:
    """Holds a model version, with its reference for ``checkpoint import`` and its page."""

    version: str
    reference: str
    url: str | None


def bad_reference(reference: str, form: str) -> UserError:
    return UserError(f"{reference!r} is not a version of a model", where="checkpoint import", fix=f"write {form}")


MANIFEST, CONFIG_DIGEST = "manifest_sha256", "config_sha256"


def shared_config(config: Config) -> str:
    """Returns the config as text for a registry: without the environment and setup of the jobs, which may be secret."""
    return text_of(replace(config, cluster=replace(config.cluster, env={}, setup=[], teardown=[])))


def lineage(run: RunDirectory, config: Config, manifest: Manifest) -> dict[str, Any]:
    """Returns what a registry stores in addition to the files of a checkpoint.

    The keys are step, run_id, run (the directory), parent_run (that it was forked from), config_sha256 (of
    ``shared_config``), code (the version of the code), versions (of packages), data (its config), metrics (of the
    evaluation at this step), published (see ``published``), manifest_sha256, and digests (xxh3-128 of each file).
    """
    record = run.record()
    return {
        "step": manifest.step,
        "run_id": record.get("run_id") or run.path.name,
        "run": str(run.path),
        "parent_run": record.get("forked_from"),
        CONFIG_DIGEST: hashlib.sha256(shared_config(config).encode()).hexdigest(),
        "code": record.get("code"),
        "versions": record.get("versions"),
        "data": without_secrets(config)["data"],
        "metrics": dict(manifest.metrics),
        PUBLISHED: published(run),
        MANIFEST: hashlib.sha256(manifest.encode()).hexdigest(),
        "digests": {name: entry.digest for name, entry in manifest.files.items()},
    }


def model_card(name: str, about: Mapping[str, Any], evaluated: Mapping[str, Any], config: str, folder: Path) -> str:
    """Returns the model card of a release in Markdown, with the front matter that Hugging Face reads.

    Args:
        about: the lineage; see ``lineage``.
        evaluated: the result of ``evaluate``.
        config: see ``shared_config``.
        folder: the files of the release, which are listed with their SHA-256.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    library = "transformers" if (folder / "config.json").exists() else "pytorch"
    origin = {key: about[key] for key in ("run_id", "run", "parent_run", "step", "code", "versions", MANIFEST)}
    samples = ", ".join(f"{count:,} of {part}" for part, count in evaluated["samples"].items())
    lines = [
        f"---\nlibrary_name: {library}\ntags: [hpc_train]\n---\n\n# {name}\n",
        f"Trained with hpc_train; step {about['step']} of the run `{about['run_id']}`.\n",
        f"## Metrics\n\nOf {samples} samples, in {evaluated['precision']}.\n\n| Metric | Value |\n|---|---|",
        *(f"| {metric} | {value:.6g} |" for metric, value in evaluated["metrics"].items()),
        f"\n## Data\n\n```json\n{json.dumps(about['data'], indent=2)}\n```\n",
        f"## Origin\n\n```json\n{json.dumps(origin, indent=2)}\n```\n",
        "## Files\n\n| File | Bytes | SHA-256 |\n|---|---|---|",
    ]
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"| {path.relative_to(folder)} | {path.stat().st_size} | {digest} |")
    lines.append(f"\n## Config\n\n```yaml\n{config.rstrip()}\n```")
    return "\n".join(lines) + "\n"


MLFLOW_REFERENCE = re.compile(r"(?P<name>[^@/:]+)(@(?P<alias>[^@/]+)|/(?P<version>\d+))")
TAG_CHARACTERS = 5000


class MlflowRegistry:
    """Keeps models in the registry of an MLflow server. The files are artifacts of the MLflow run of the checkpoint's
    run.
    """

    def __init__(self, settings: MlflowConfig) -> None:
        self._uri = server_uri(settings)
        self._experiment = settings.experiment
        check_installed()
        check_answers(self._uri)

    def promote(self, model: Model) -> Promoted:
        """Uploads a checkpoint as a new version, unless one has the same files, and sets the aliases of the version."""
        client = self._client()
        versions = client.search_model_versions(f"name='{model.name}'")
        same = [item for item in versions if item.tags.get(f"hpc_train.{MANIFEST}") == model.about[MANIFEST]]
        version = str(same[0].version) if same else self._create(client, model)
        for alias in model.aliases:
            client.set_registered_model_alias(model.name, alias, version)
        reference = f"mlflow:{model.name}/{version}"
        if model.aliases:
            reference = f"mlflow:{model.name}@{model.aliases[0]}"
        return Promoted(version, reference, f"{self._uri.rstrip('/')}/#/models/{model.name}/versions/{version}")

    def fetch(self, reference: str, to: Path) -> None:
        """Downloads the version ``reference``, such as NAME@ALIAS, into the directory ``to``."""
        from mlflow.artifacts import download_artifacts

        match = MLFLOW_REFERENCE.fullmatch(reference)
        if match is None:
            raise bad_reference(f"mlflow:{reference}", "mlflow:NAME@ALIAS or mlflow:NAME/VERSION")
        client = self._client()
        name = match["name"]
        version = match["version"]
        if version is None:
            version = client.get_model_version_by_alias(name, match["alias"]).version
        source = client.get_model_version_download_uri(name, version)
        to.mkdir(parents=True, exist_ok=True)
        download_artifacts(artifact_uri=source, dst_path=str(to), tracking_uri=self._uri)
        downloaded = to / source.rstrip("/").rpartition("/")[2]
        if downloaded.is_dir():  # the directory itself, for some stores
            for path in list(downloaded.iterdir()):
                path.rename(to / path.name)
            downloaded.rmdir()

    def _client(self) -> Any:
        from mlflow.tracking import MlflowClient

        return MlflowClient(self._uri, registry_uri=self._uri)

    def _create(self, client: Any, model: Model) -> str:
        from mlflow.exceptions import MlflowException

        run = find_or_create(client, self._experiment, Identity.of(model.config, model.run))
        run_id = run.info.run_id
        folder = f"model-{model.about[MANIFEST][:12]}"
        client.log_artifacts(run_id, str(model.folder), f"{folder}/{CHECKPOINT}")
        client.log_artifacts(run_id, str(model.notes), folder)
        try:
            client.create_registered_model(model.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"{run.info.artifact_uri}/{folder}"
        tags = {
            f"hpc_train.{key}": (value if isinstance(value, str) else json.dumps(value))[:TAG_CHARACTERS]
            for key, value in model.about.items()
            if value is not None
        }
        created = client.create_model_version(model.name, source, run_id, tags=tags, await_creation_for=0)
        return str(created.version)


WANDB_REFERENCE = re.compile(r"([^/:]+/)?[^/:]+/[^/:]+:[^/:]+")
NOT_IN_NAMES = re.compile(r"[^\w\-.]")


class WandbRegistry:
    """Keeps models as artifacts of a W&B project. Each artifact belongs to the W&B run of the checkpoint's run."""

    def promote(self, model: Model) -> Promoted:
        import wandb

        name = NOT_IN_NAMES.sub("-", model.name)
        artifact = wandb.Artifact(name, type="model", metadata=dict(model.about))
        artifact.add_dir(str(model.folder), name=CHECKPOINT)
        artifact.add_dir(str(model.notes))
        tracker = Wandb(Session(model.config, model.run))
        tracker.open()  # it holds the lock of the run, to which two processes must not send at once
        try:
            logged = tracker.log_artifact(artifact, model.aliases)
            tracker.finish()
        except BaseException:
            tracker.abandon()
            raise
        return Promoted(logged.version, f"wandb:{logged.entity}/{logged.project}/{logged.name}", tracker.url)

    def fetch(self, reference: str, to: Path) -> None:
        import wandb

        if WANDB_REFERENCE.fullmatch(reference) is None:
            raise bad_reference(f"wandb:{reference}", "wandb:ENTITY/PROJECT/NAME:ALIAS")
        wandb.Api().artifact(reference, type="model").download(root=str(to))


LAST = "last"


def registry_of(name: str, config: Config) -> MlflowRegistry | WandbRegistry:
    """Returns the registry with the account and project of ``config``. Raises UserError if its client is not installed,
    or its address is missing."""
    if name == "wandb":
        return WandbRegistry()
    return MlflowRegistry(config.telemetry.mlflow)


def promote(
    run: RunDirectory,
    config: Config,
    to: str,
    choice: str,
    metric: BestMetric,
    name: str,
    also: Sequence[str],
    bar: Bar,
) -> dict[str, Any]:
    """Verifies a checkpoint and uploads it as a version of the model ``name``.

    The version gets the alias ``last`` if the checkpoint is the newest one of the run, ``best`` if it is the best one,
    and the aliases in ``also``. Raises UserError if there is no such checkpoint, it is damaged, or the registry does
    not accept it.

    Args:
        to: wandb or mlflow.
        choice: newest, best, or a step.
        metric: the metric of the best checkpoint.

    Returns:
        A dict of ``step``, ``name``, ``version``, ``aliases``, ``reference`` (for ``checkpoint import``) and ``url``.
    """
    registry = registry_of(to, config)
    checkpoint = choose_by_name(run, choice, metric)
    with bar("verifying", sum(file.stat().st_size for file in checkpoint.path.iterdir())) as advance:
        manifest = verified_manifest(checkpoint, advance)
    aliases = list(dict.fromkeys(also))
    for alias, its_choice in ((BEST, BEST), (LAST, NEWEST)):
        with suppress(UserError):  # no checkpoint was evaluated
            if alias not in aliases and choose_by_name(run, its_choice, metric) == checkpoint:
                aliases.append(alias)
    about = lineage(run, config, manifest)
    with TemporaryDirectory() as folder:
        notes = Path(folder)
        (notes / CONFIG).write_text(shared_config(config), encoding="utf-8")
        (notes / LINEAGE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        try:
            promoted = registry.promote(Model(run, config, name, checkpoint.path, notes, about, aliases))
        except UserError:
            raise
        except Exception as error:  # errors of clients have no common base
            raise UserError(
                f"{to} did not accept the checkpoint of step {checkpoint.step}: {type(error).__name__}: {error}",
                where=f"checkpoint promote --to {to}",
                fix="repeat the command when the service responds; a running job may also have removed the checkpoint",
            ) from error
    return {"step": checkpoint.step, "name": name, "aliases": aliases} | asdict(promoted)


def is_reference(source: str) -> bool:
    """Returns whether ``source`` names a version in a registry, such as ``mlflow:NAME@ALIAS``, and not a directory."""
    return source.partition(":")[0] in REGISTRIES and ":" in source and not Path(source).exists()


def import_reference(source: str, name: str, root: Path, config: Config) -> dict[str, Any]:
    """Downloads a version, verifies every byte of it, and creates the run ``root``/``name`` from it. Raises UserError
    if there is no such version, it is damaged, or the name is taken.

    Args:
        config: gives the address of the registry.

    Returns:
        A dict of ``path``, ``step``, and ``lineage``.
    """
    directory = import_directory(root, name)
    kind, _, reference = source.partition(":")
    registry = registry_of(kind, config)
    try:
        return _import(directory, lambda to: registry.fetch(reference, to), source)
    except BaseException as error:
        disk.remove(directory.path)  # it was empty before
        if isinstance(error, Exception) and not isinstance(error, UserError):
            raise UserError(
                f"cannot import {source}: {type(error).__name__}: {error}",
                where="checkpoint import",
                fix="check the name and the alias, and that the service responds",
            ) from error
        raise


def _import(directory: RunDirectory, fetch: Callable[[Path], None], source: str) -> dict[str, Any]:
    download = directory.path / ".download"
    download.mkdir(parents=True)
    fetch(download)
    for name in (CHECKPOINT, CONFIG, LINEAGE):
        if not (download / name).exists():
            fix = "import a version that `checkpoint promote` has created"
            raise UserError(f"{source} has no {name}", where="checkpoint import", fix=fix)
    about = read_json(download / LINEAGE)
    manifest = verified_manifest(Checkpoint(about["step"], download / CHECKPOINT))
    config_digest = hashlib.sha256((download / CONFIG).read_bytes()).hexdigest()
    if config_digest != about[CONFIG_DIGEST] or hashlib.sha256(manifest.encode()).hexdigest() != about[MANIFEST]:
        fix = "promote the checkpoint again; somebody has changed the files in the registry"
        raise UserError(f"{source} differs from its lineage", where="checkpoint import", fix=fix)
    directory.create()
    (download / CONFIG).rename(directory.config)
    (download / CHECKPOINT / COMMITTED).unlink(missing_ok=True)  # the rename commits it
    (download / CHECKPOINT).rename(directory.checkpoints / f"step-{manifest.step:08d}")
    directory.update_record(
        run_id=secrets.token_hex(4),
        created=time.time(),
        config_hash=config_digest,
        imported_from=source,
        lineage=about,
        published=about.get(PUBLISHED),
    )
    disk.remove(download)
    return {"path": str(directory.path), "step": manifest.step, "lineage": about}
