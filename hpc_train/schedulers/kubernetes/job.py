"""The Job of Kubernetes in whose pod this process runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hpc_train.schedulers.environment import EnvironmentJob
from hpc_train.schedulers.kubernetes.manifest import REFERENCE
from hpc_train.schedulers.scheduler import TimeLimit


@dataclass(frozen=True)
class KubernetesJob(EnvironmentJob):
    """A Job whose controller replaces the pods that end with the exit code of a requeue. ``reference`` is what commands
    name the Job by."""

    scheduler = "Kubernetes"
    replaces_nodes = True

    reference: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> KubernetesJob:
        described = super().of(environment)
        assert isinstance(described, KubernetesJob)
        return replace(described, reference=environment[REFERENCE])

    @property
    def name(self) -> str:
        return self.reference

    def limit(self) -> TimeLimit:
        """Returns that SIGTERM announces a preemption: the kubelet sends it when a pod is evicted or deleted."""
        return TimeLimit(is_preempted=True)
