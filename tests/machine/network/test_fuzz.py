"""Generated machines: never a crash, never a mask that is empty, too wide or shared, never a link that nobody drew."""

from __future__ import annotations

import json
import os

from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.machine.network.decision import FabricJob
from hpc_train.machine.network.facts import Gpu, GpuLink, Nic, NodeFacts, Port, format_cpu_list, parse_cpu_list
from hpc_train.machine.network.node import report
from hpc_train.machine.network.rails import match
from hpc_train.machine.network.rank_binding import bindings, cpu_masks
from hpc_train.machine.network.rdma import parse_rdma_text
from hpc_train.machine.network.smi import parse_matrix
from hpc_train.run.rows import check_fields
from tests.machine.network.machines import matrix

FAST = settings(max_examples=2000 if os.environ.get("HPC_TRAIN_LONG") else 20, deadline=None)
WAYS = ["NV4", "PIX", "PXB", "PHB", "NODE", "SYS"]
CPUS = st.sets(st.integers(0, 63), max_size=32).map(lambda found: tuple(sorted(found)))


@st.composite
def machines(draw: st.DrawFn) -> NodeFacts:
    gpus = [Gpu(index, cpus=draw(CPUS)) for index in range(draw(st.integers(1, 8)))]
    nics = [
        Nic(
            f"mlx5_{index}",
            "mellanox",
            ports=(
                Port(
                    1,
                    draw(st.sampled_from(["ACTIVE", "DOWN", "INIT", None])),
                    draw(st.sampled_from(["LINKUP", "POLLING", None])),
                    draw(st.sampled_from(["InfiniBand", "Ethernet", None])),
                    draw(st.sampled_from([100.0, 400.0, None])),
                ),
            ),
        )
        for index in range(draw(st.integers(0, 4)))
    ]
    names = [gpu.name for gpu in gpus] + [nic.name for nic in nics]
    pairs = [(a, b) for i, b in enumerate(names) for a in names[:i]]
    drawn = draw(st.lists(st.sampled_from([*WAYS, None]), min_size=len(pairs), max_size=len(pairs)))
    links = [
        GpuLink(a, b, way)
        for (a, b), way in zip(pairs, drawn, strict=True)
        if way is not None and (way != "NV4" or b.startswith("GPU"))
    ]
    cores = draw(st.sampled_from([(), tuple((cpu, cpu + 32) for cpu in range(32)), tuple((cpu,) for cpu in range(64))]))
    return NodeFacts("n1", tuple(gpus), tuple(nics), (), tuple(links), cores, draw(CPUS))


@FAST
@given(machines())
def test_masks_are_never_empty_too_wide_or_shared(facts: NodeFacts) -> None:
    given_out: set[int] = set()
    for gpu, mask in zip(facts.gpus, cpu_masks(facts), strict=True):
        assert mask.gpu == gpu.name
        if mask.cpus is None:
            continue
        cpus = set(mask.cpus)
        assert cpus and cpus <= set(gpu.cpus)
        assert not facts.allowed or cpus <= set(facts.allowed)
        cores = {core for core in facts.cores if cpus & set(core)}
        touched = {cpu for core in cores for cpu in core} or cpus
        assert not touched & given_out
        given_out |= touched


@st.composite
def layouts(draw: st.DrawFn) -> NodeFacts:
    """Sockets cut into NUMA nodes (NPS4), hyperthreads or none, CPUs numbered by node or in turn, a cpuset, a machine
    that hides what is near (a VM), and nodes with more or fewer GPUs than NUMA nodes (Grace has one each)."""
    nodes, per_node = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 12))
    threads = draw(st.sampled_from([1, 2, 4]))
    in_turn, hidden = draw(st.booleans()), draw(st.booleans())
    count = nodes * per_node
    of_node = [
        [core for core in range(count) if (core % nodes if in_turn else core // per_node) == n] for n in range(nodes)
    ]
    cores = tuple(tuple(core + count * thread for thread in range(threads)) for core in range(count))
    numa = tuple(tuple(sorted(cpu for core in own for cpu in cores[core])) for own in of_node)
    cpus = range(count * threads)
    allowed = draw(st.one_of(st.just(set(cpus)), st.sets(st.sampled_from(cpus), min_size=1)))
    gpus = draw(st.integers(0, 8))
    near = [() if hidden else numa[draw(st.integers(0, nodes - 1))] for _ in range(gpus)]
    return NodeFacts(
        "n1",
        tuple(Gpu(index, cpus=cpus) for index, cpus in enumerate(near)),
        cores=cores,
        numa=numa,
        allowed=tuple(sorted(allowed)),
        allocated_cpus=draw(st.sampled_from([None, 1, len(allowed)])),
        visible=tuple(map(str, draw(st.permutations(range(gpus))))),
    )


@FAST
@given(layouts(), st.integers(1, 8))
def test_ranks_are_bound_to_cores_of_their_own_or_not_at_all(facts: NodeFacts, ranks: int) -> None:
    ranks = min(ranks, len(facts.visible) or ranks)
    bound = bindings(facts, ranks)
    assert len(bound) == ranks and all(binding.reason for binding in bound)
    given_out: set[int] = set()
    for rank, binding in enumerate(bound):
        if binding.cpus is None:
            continue
        cpus = set(binding.cpus)
        assert cpus and cpus <= set(facts.allowed)
        assert not facts.visible or cpus <= set(facts.gpus[int(facts.visible[rank])].cpus)
        touched = {core for core in facts.cores if cpus & set(core)}
        assert binding.cores == len(touched)
        assert not {cpu for core in touched for cpu in core} & given_out
        given_out |= {cpu for core in touched for cpu in core}
    if not facts.visible and facts.allocated_cpus == len(facts.allowed) and all(found.cpus for found in bound):
        assert sum(len(found.cpus or ()) for found in bound) == len(facts.allowed)  # nothing lies idle


@FAST
@given(machines(), st.integers(1, 300))
def test_everything_has_a_reason_and_goes_through_json(facts: NodeFacts, nodes: int) -> None:
    for matched in match(facts):
        assert matched.reason
        if matched.nic is not None:
            assert facts.link(matched.gpu, matched.nic) == matched.path_type
    found = report(facts, FabricJob(nodes, len(facts.gpus), (2, 20)), {})
    assert json.loads(json.dumps(found.to_json()))["gpus"][0]["name"] == "GPU0"
    assert all(variable.reason for variable in found.decision.variables)
    assert NodeFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts
    check_fields(facts)  # what the rendezvous server accepts


@FAST
@given(machines(), st.integers(20, 4000))
def test_a_matrix_says_what_it_says_or_nothing(facts: NodeFacts, cut: int) -> None:
    names = [gpu.name for gpu in facts.gpus] + [nic.name for nic in facts.nics]
    drawn = {(link.a, link.b): link.path_type for link in facts.links}
    cpus = {gpu.name: format_cpu_list(gpu.cpus) for gpu in facts.gpus}
    text = matrix(names, drawn, cpus, "SYS")
    whole = parse_matrix(text)
    assert {(link.a, link.b): link.path_type for link in whole.links} == {
        (a, b): drawn.get((a, b), "SYS") for i, b in enumerate(names) for a in names[:i]
    }
    assert [gpu.cpus for gpu in whole.gpus] == [gpu.cpus for gpu in facts.gpus]
    for link in parse_matrix(text[:cut]).links:  # a copy that ends somewhere
        ends = text[:cut].rsplit(maxsplit=1)[-1]
        assert link in whole.links or link.path_type == ends


@FAST
@given(st.text(alphabet="GPUNICmlx5_0123 \tXSYSNVPHB:'\nCAPort", max_size=300))
def test_noise_is_not_a_crash(text: str) -> None:
    parse_matrix(text)
    parse_rdma_text(text)


@FAST
@given(CPUS)
def test_lists_of_cpus_are_read_as_written(cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(format_cpu_list(cpus)) == cpus
