"""GPUs that are idle for long are told once."""

from __future__ import annotations

from hpc_train.elastic.gpu_errors import IdleGpus
from hpc_train.machine.health.gpu_health import GpuState


def test_gpus_are_told_when_they_were_idle_at_every_look_for_the_time() -> None:
    told: list[tuple[float, list[str]]] = []
    idle: list[bool] = []

    def states() -> tuple[GpuState, ...]:
        return tuple(GpuState(index, f"0000:0{index}:00.0", idle=one) for index, one in enumerate(idle))

    own = ["0000:00:00.0", "0000:01:00.0"]  # the third GPU belongs to another job
    gpus = IdleGpus(own, 120.0, lambda minutes, names: told.append((minutes, names)), states)
    looks = [
        (0, "TTT"),
        (60, "TFT"),
        (119, "TTT"),
        (120, "TTT"),
        (180, "TTT"),
        (240, "TTT"),
        (300, "FFT"),
        (360, "TTT"),
    ]
    for now, shown in looks:
        idle[:] = [letter == "T" for letter in shown]
        gpus.look(float(now))
    first, second = "GPU0 (0000:00:00.0)", "GPU1 (0000:01:00.0)"
    assert told == [(2.0, [first]), (4.0, [first, second])]
    for now in (420, 480):
        gpus.look(float(now))
    assert told[2:] == [(2.0, [first, second])], "told again after they had worked"
