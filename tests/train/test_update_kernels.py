"""The kernels that a step of the optimizer with compact moments launches, and that fewer of them compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_train.train.optimizers.compact_adamw import LARGE, CompactAdamW
from tests.ranks import run_on_world, run_ranks

LAYER = [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (64, 128), (128, 64), (64,), (64,)]
LAYERS = 12
# For matrices and norms together, as weight decay makes two groups of them. One by one they need 6,000 kernels.
MOST_KERNELS = 160
VIEWS = {"view", "split", "split_with_sizes", "expand", "unbind", "select", "slice", "detach", "alias", "unsqueeze"}


class Kernels(TorchDispatchMode):
    """Counts operations that are no views; a GPU launches at least one kernel for each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "aten" and func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))


class Graphs:
    """A backend of torch.compile that runs graphs as they are and counts them, and how often they are called."""

    def __init__(self) -> None:
        self.compiled = 0
        self.called = 0

    def __call__(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        self.compiled += 1

        def call(*args: Any) -> Any:
            self.called += 1
            return graph.forward(*args)

        return call


def parameters(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def optimizer_of(members: Sequence[nn.Parameter], **backend: Any) -> CompactAdamW:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in members if (p.ndim >= 2) == decays], "weight_decay": 0.1 if decays else 0.0}
        for decays in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = CompactAdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, **backend)
    for parameter in members:
        optimizer.state[parameter] = optimizer.initial_state(parameter)
    return optimizer


def steps(optimizer: CompactAdamW, members: Sequence[nn.Parameter], first: int = 0, number: int = 4) -> None:
    """Runs steps with another learning rate each; the gradients depend on the shape and the step only."""
    for step in range(first, first + number):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        for parameter in members:
            generator = torch.Generator().manual_seed(step)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.found_inf = torch.tensor(float(step == 2))
        optimizer.step()


def bits(optimizer: CompactAdamW, parameter: nn.Parameter) -> list[Tensor]:
    state = optimizer.state[parameter]
    return [parameter.detach(), state["step"], state["exp_avg"], state["exp_avg_sq"]]


def test_the_update_is_compiled_where_there_are_gpus() -> None:
    """Offloaded tensors are in pinned memory, which only a machine with a GPU has."""
    members = parameters([(64, 64)])
    assert not optimizer_of(members)._compiled
    with mock.patch.object(Tensor, "is_pinned", lambda _: True):
        assert optimizer_of(members)._compiled


def kernels(rank: int, world_size: int) -> int:
    members = parameters(LAYER * LAYERS)
    optimizer = optimizer_of(members)
    steps(optimizer, members)
    with Kernels() as counted:
        optimizer.step()
    return counted.count


def test_small_tensors_are_updated_together() -> None:
    (found,) = run_on_world(1, kernels)
    assert 0 < found <= MOST_KERNELS


def alone_and_together(rank: int, world_size: int) -> None:
    shapes = [*LAYER, (7,), (3, 5), (), (0,), (100, 128)]
    members, single = parameters(shapes), parameters(shapes)
    together = optimizer_of(members)
    steps(together, members)
    for parameter, own in zip(members, single, strict=True):
        alone = optimizer_of([own])
        steps(alone, [own])
        for one, other in zip(bits(together, parameter), bits(alone, own), strict=True):
            assert torch.equal(one, other), parameter.shape


def test_tensors_that_are_updated_together_get_the_same_bits() -> None:
    run_on_world(1, alone_and_together)


def assert_close(ours: Sequence[nn.Parameter], theirs: Sequence[nn.Parameter]) -> None:
    """The parameters have moved by 0.01; torch.compile makes a fused multiply-add of ``addcmul``, and a moment that is
    rounded the other way differs by 1 %."""
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=2e-4)


def compiled(rank: int, world_size: int) -> tuple[int, int]:
    shapes = [(LARGE // 64, 64)] * 3 + [(LARGE // 32, 64)] * 2 + LAYER
    members, eager = parameters(shapes), parameters(shapes)
    graphs = Graphs()
    optimizer, plain = optimizer_of(members, backend=graphs), optimizer_of(eager)
    for one, its in ((optimizer, members), (plain, eager)):
        steps(one, its)
    assert_close(members, eager)
    before = graphs.called
    steps(optimizer, members, first=4, number=1)
    return graphs.compiled, graphs.called - before


@pytest.mark.long_form(8)  # the eager update below and above
def test_a_compiled_update_is_one_graph_for_each_size_and_survives_a_new_learning_rate() -> None:
    ((graphs, calls),) = run_ranks(1, compiled)
    assert graphs == 4, "of two large sizes, of the small matrices and of the norms"
    assert calls == 3 + 2 + 2


def failing_backend(rank: int, world_size: int) -> None:
    def fail(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise RuntimeError("no compiler here")

    members, eager = parameters(LAYER), parameters(LAYER)
    optimizer, plain = optimizer_of(members, backend=fail), optimizer_of(eager)
    with pytest.warns(UserWarning, match="no compiler here"):
        steps(optimizer, members)
    steps(plain, eager)
    for own, other in zip(members, eager, strict=True):
        assert all(torch.equal(*both) for both in zip(bits(optimizer, own), bits(plain, other), strict=True))


def test_a_compiler_that_fails_leaves_the_eager_update() -> None:
    run_ranks(1, failing_backend)


def by_inductor(rank: int, world_size: int) -> int:
    from torch._inductor import metrics

    shapes = [(LARGE // 64, 64), (64, 64), (32,)]
    members, eager = parameters(shapes), parameters(shapes)
    optimizer, plain = optimizer_of(members, backend="inductor"), optimizer_of(eager)
    for one, its in ((optimizer, members), (plain, eager)):
        steps(one, its)
    assert optimizer._compiled
    assert_close(members, eager)
    return metrics.generated_kernel_count


@pytest.mark.long_form(60)  # a minute of the C++ compiler
def test_inductor_computes_the_update_up_to_rounding() -> None:
    (kernels,) = run_ranks(1, by_inductor, timeout=300)
    assert 0 < kernels <= 3, "of a large matrix, the small one, and the norm"
