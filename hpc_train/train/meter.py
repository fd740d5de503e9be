"""How fast training goes since the line before: time, tokens, samples; without pauses for saving and evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hpc_train.config.schema import Config
from hpc_train.data.dataset import Dataset
from hpc_train.measure.memory import peak_device_memory, peak_host_memory
from hpc_train.measure.peak_flops import peak_flops
from hpc_train.measure.utilisation import FlopCount, count_flops
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.mesh import Mesh


@dataclass(frozen=True)
class Interval:
    """Between two lines of metrics: ``steps`` in ``seconds``, of which ``waited_s`` were spent waiting for data."""

    seconds: float
    steps: int
    waited_s: float


@dataclass
class Meter:
    """Counts since ``begin``; reads the host's clock only.

    Attributes:
        flops: of one sample; None where the model does not know.
        peak_flops: FLOP/s of all devices together; None where they are not known.
        interval: what the last ``read`` was about.
        waited_s: for data, since the start.
    """

    flops: FlopCount | None = None
    peak_flops: float | None = None
    interval: Interval = Interval(0.0, 0, 0.0)
    _began: float = field(default_factory=time.perf_counter)
    _paused: float = 0.0
    _saved: float = 0.0
    _waited: float = 0.0
    _steps: int = 0
    _samples: int = 0
    _tokens: int = 0
    waited_s: float = 0.0
    _all_seconds: float = 0.0
    _all_tokens: int = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for data."""
        began = time.perf_counter()
        yield
        waited = time.perf_counter() - began
        self._waited += waited
        self.waited_s += waited

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Around what is not training: evaluation, a save."""
        began = time.perf_counter()
        yield
        self._paused += time.perf_counter() - began

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save, as far as it blocks training."""
        began = time.perf_counter()
        with self.pausing():
            yield
        self._saved += time.perf_counter() - began

    def count(self, samples: int, tokens: int) -> None:
        """After each step."""
        self._steps += 1
        self._samples += samples
        self._tokens += tokens

    def read(self) -> dict[str, float]:
        """The rates since the last ``read``, under the keys of the metrics; begins anew."""
        now = time.perf_counter()
        seconds = max(now - self._began - self._paused, 1e-9)
        rates = {
            "step_s": seconds / max(1, self._steps),
            "tokens_per_s": self._tokens / seconds,
            "samples_per_s": self._samples / seconds,
            "data_wait_share": min(1.0, self._waited / seconds),
            "save_s": self._saved,
        }
        if self.flops is not None and self.peak_flops:
            found = self.flops.utilisation(rates["samples_per_s"], self.peak_flops)
            rates |= {name: found[name] for name in ("mfu", "hfu") if name in found}
        self.interval = Interval(seconds, self._steps, min(seconds, self._waited))
        self._all_seconds += seconds
        self._all_tokens += self._tokens
        self._began, self._paused, self._saved, self._waited = now, 0.0, 0.0, 0.0
        self._steps = self._samples = self._tokens = 0
        return rates

    @property
    def mean_tokens_per_s(self) -> float:
        """Over all that was read so far."""
        return self._all_tokens / max(self._all_seconds, 1e-9)


def make_meter(config: Config, mesh: Mesh, dataset: Dataset) -> Meter:
    """With what utilisation needs, where the model and the devices are known."""
    if mesh.device.type != "cuda":
        return Meter()
    per_device = peak_flops(torch.cuda.get_device_name(mesh.device), config.precision.name)
    if per_device is None or config.model.kind == "custom":
        return Meter()
    model = build_model(config.model, config.train.seed)  # on meta: no memory, no time
    assert isinstance(model, Model)
    inputs = torch.empty((1, *dataset.inputs_shape()), device="meta")
    return Meter(count_flops(model, inputs, config.train), per_device * mesh.layout.world_size)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has used: of the GPU's allocator, on the CPU the resident set (VmHWM)."""
    return peak_device_memory(device) or peak_host_memory()
