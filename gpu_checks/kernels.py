"""Checks of which kernels run, on which stream, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from timeit import timeit
from typing import Any

import torch
import torch.nn.functional as F

from gpu_checks.check import Probe
from gpu_checks.commands import train
from gpu_checks.models import CYCLES_PER_S
from gpu_checks.steps import Steps, World, profiled, trace_of
from hpc_train.config.schema import GPTConfig, MoEConfig
from hpc_train.models.attention import rotary_tables, rotate
from hpc_train.models.hf.nf4 import NF4Linear, pack, pairs_of_levels
from hpc_train.models.moe import Experts
from hpc_train.parallel.compile import _written_apart, compile_in_turns
from hpc_train.parallel.ring import flash, flash_backward, merge
from hpc_train.planner.machine import OPTIONAL
from hpc_train.train.watch.peak_rates import peak_flops
from hpc_train.train.watch.step_clock import StepClock, make_stopwatch

QUADRATIC = ("aten::_scaled_dot_product_attention_math", "aten::_safe_softmax")  # scores of s x s in memory
PRODUCTS = ("gemm", "cutlass", "nvjet", "xmma", "cublas")
ATTENTION = ("flash", "fmha", "cudnn", "attention", "sdpa")


def attention(probe: Probe) -> None:
    """Attention never computes scores of s x s in memory, with and without packing and grouped heads."""
    world = World(probe)
    length = 1024 if probe.on_gpu else 128
    heads = {"grouped heads": "model.n_kv_heads=2", "as many keys as queries": "model.n_kv_heads=4"}
    for packing in (False, True):
        for name, given in heads.items():
            for precision in ("bf16", "fp32"):
                case = f"{name}, {precision}{', packed' * packing}"
                data = ["data=text", f"data.packing={packing}".lower(), f"data.sequence_length={length}"]
                batch = ["batch.global_size=2", "batch.micro_size=2"]
                steps = world.steps("model=gpt_tiny", *data, *batch, given, f"precision={precision}")
                _check_attention(probe, case, steps)
                steps.close()


def _check_attention(probe: Probe, case: str, steps: Steps) -> None:
    steps.step()
    with profiled(steps) as profiler:
        steps.step()
    operators = {event.key for event in profiler.key_averages()}
    used = sorted(name for name in operators if "scaled_dot_product" in name or "flex" in name or "varlen" in name)
    bad = sorted(operators.intersection(QUADRATIC))
    names = [name.removeprefix("aten::").removeprefix("_scaled_dot_product_") for name in used]
    if probe.on_gpu:
        probe.expect(case, names, f"none of {', '.join(QUADRATIC)}", not bad)
    else:  # on the CPU a mask leads to the plain path
        probe.expect(case, names, "an operator of attention", bool(names))


def ring(probe: Probe) -> None:
    """Flash attention of two parts of the keys, merged as by a ring, gives the results and gradients of all keys."""
    device = torch.device(probe.device)
    length = 4096 if probe.on_gpu else 64
    shapes = [(2, length, heads, 64) for heads in (8, 2, 2, 8)]
    query, key, value, gradient = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    whole = [tensor.float().requires_grad_() for tensor in (query, key, value)]
    queries, keys, values = (tensor.transpose(1, 2) for tensor in whole)
    expected = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True).transpose(1, 2)
    expected.backward(gradient.float())
    wide = torch.zeros_like(query, dtype=torch.float32)
    normalizers = query.new_full((2, 8, length), -torch.inf, dtype=torch.float32)
    first, second = slice(0, length // 2), slice(length // 2, length)
    blocks = [(first, first, True), (second, second, True), (second, first, False)]
    for rows, columns, causal in blocks:
        part = flash(query[:, rows], key[:, columns], value[:, columns], causal, 0.125)
        merge(wide, normalizers, rows, *part)
    sums = [torch.zeros_like(tensor) for tensor in whole]
    for rows, columns, causal in blocks:
        of_rows = gradient[:, rows], query[:, rows], wide.bfloat16()[:, rows], normalizers[..., rows]
        parts = flash_backward(*of_rows, key[:, columns], value[:, columns], causal, 0.125)
        for tensor, places, of_block in zip(sums, (rows, columns, columns), parts, strict=True):
            tensor[:, places] += of_block
    for name, tensor, exact in zip(("query", "key", "value"), sums, whole, strict=True):
        assert exact.grad is not None
        error = (tensor - exact.grad).abs().max() / exact.grad.abs().max()
        probe.within(f"largest error of the gradient of the {name}, relative", float(error), high=0.02)
    probe.within("largest error of the result", float((wide - expected.detach()).abs().max()), high=0.02)


def copies(probe: Probe) -> None:
    """Batches reach the GPU on a separate stream, while the kernels of the step before run."""
    world = World(probe)
    images = ["data.task=images", "data.image_size=224", "model=vit_base", "batch.global_size=64", "precision=bf16"]
    steps = world.steps(*images)
    for _ in range(3):
        steps.step()
    with profiled(steps) as profiler:
        for _ in range(3):
            steps.step()
    events = trace_of(profiler, probe.folder)
    uploads = [event for event in events if "Memcpy HtoD" in event["name"] and event["args"].get("bytes", 0) > 1e5]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    main = _most(event["args"]["stream"] for event in kernels)
    probe.within("large copies to the GPU in three steps", len(uploads), low=1)
    streams = sorted({event["args"]["stream"] for event in uploads})
    probe.expect("their streams", streams, f"not {main}, that of the kernels", bool(streams) and main not in streams)
    probe.note("bytes of a batch", sum(event["args"]["bytes"] for event in uploads) / 3)
    steps.close()


def clocks(probe: Probe) -> None:
    """The times of waiting that a step reports are those of the device, to within a tenth."""
    steps = World(probe).tiny_gpt()
    device, side = steps.mesh.device, torch.cuda.Stream()
    spin(0.5)  # until the clock has its full speed
    torch.cuda.synchronize()
    exact = timed(lambda: spin(0.2))
    watch = make_stopwatch(device)
    begun = watch.begin()
    spin(0.2)
    watch.end(begun)
    probe.within("a kernel, measured / exact", watch.take() / exact, 0.95, 1.05)
    clock = StepClock(device)
    with clock.watching(), clock.step():
        with torch.cuda.stream(side):
            spin(0.2)
            event = torch.cuda.Event()
            event.record()
        torch.cuda.current_stream().wait_event(event)
        torch.ones(8, device=device).sum()
    probe.within("a wait for another stream, measured / exact", clock.read().communication_s / exact, 0.9, 1.1)
    steps.close()


def spin(seconds: float) -> None:
    """Occupies the current stream of the GPU for about ``seconds``."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_S))


def timed(work: Any) -> float:
    """Returns the seconds that what ``work`` starts takes on the GPU."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) * 1e-3


def profile_files(probe: Probe) -> None:
    """A profile of two steps has a trace that can be read, shares that add up, and on a GPU a memory snapshot."""
    import gzip
    import json
    import pickle

    run = train(probe, "run", "model=gpt_tiny", "data.vocab_size=256", "telemetry.profile.steps=4-5")
    folder = run.path / "profile"
    traces = sorted(folder.glob("*.json.gz"))
    probe.equal("traces", len(traces), 1)
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"] if traces else []
    wanted = "kernel" if probe.on_gpu else "cpu_op"
    probe.within(f"events of kind {wanted}", sum(event.get("cat") == wanted for event in events), low=50)
    shares = json.loads((folder / "summary.json").read_text())["ranks"]["0"]
    probe.within("sum of the shares of time", sum(shares.values()), 0.999, 1.001)
    probe.note("shares", [f"{name} {value:.1%}" for name, value in shares.items()])
    if probe.on_gpu:
        snapshot = pickle.loads(next(folder.glob("*-memory.pickle")).read_bytes())
        probe.within("segments in the memory snapshot", len(snapshot["segments"]), low=1)


def products(probe: Probe) -> None:
    """A bf16 product of 8192 x 8192 runs at the speed that the data sheet promises, less what all GPUs lose."""
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = per_call(lambda: left @ right)
    rate = 2 * size**3 / seconds
    peak = peak_flops(torch.cuda.get_device_name(0), "bf16") or rate
    probe.note("TFLOP/s", rate / 1e12)
    probe.within("share of the data sheet", rate / peak, 0.6, 1.0)


def experts(probe: Probe) -> None:
    """Experts compute at the share of the rate of a dense branch with as many operations that the planner assumes."""
    tokens, dim, width, number, chosen = (16384, 2048, 768, 128, 8) if probe.on_gpu else (64, 32, 16, 4, 2)
    device = "cuda" if probe.on_gpu else "cpu"
    moe = MoEConfig(experts=number, top_k=chosen, expert_dim=width)
    sizes = GPTConfig(vocab_size=8, n_layers=1, dim=dim, n_heads=2, n_kv_heads=2, ffn_dim=chosen * width, moe=moe)
    with torch.device(device):
        mixture = Experts(sizes, F.silu)
        dense = [torch.nn.Linear(dim, chosen * width, bias=False) for _ in range(2)]
        last = torch.nn.Linear(chosen * width, dim, bias=False)
        rows = torch.randn(tokens * chosen, dim, dtype=torch.bfloat16, requires_grad=True)
        hidden = torch.randn(tokens, dim, dtype=torch.bfloat16, requires_grad=True)
        ends = torch.arange(1, number + 1, dtype=torch.int32) * (tokens * chosen // number)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for module in (mixture, *dense, last):
        module.bfloat16()
    calls = {
        "experts": lambda: mixture(rows, ends).backward(rows.detach()),
        "dense": lambda: last(F.silu(dense[0](hidden)) * dense[1](hidden)).backward(hidden.detach()),
    }
    operations = 3 * 2 * tokens * chosen * 3 * dim * width
    seconds = {name: per_call(call) if probe.on_gpu else timeit(call, number=3) / 3 for name, call in calls.items()}
    for name, value in seconds.items():
        probe.note(f"TFLOP/s, forward and backward: {name}", operations / value / 1e12)
    share = seconds["dense"] / seconds["experts"]
    probe.within("rate of experts / dense branch", share, low=OPTIONAL["grouped_share"].value if probe.on_gpu else 0.0)


def four_bits(probe: Probe) -> None:
    """A linear layer of NF4 computes what the CPU computes from the same bytes; its time beside a layer in bf16."""
    tokens, width = (8192, 4096) if probe.on_gpu else (16, 256)
    torch.manual_seed(0)
    layer = torch.nn.Linear(width, width, bias=False)
    quantized = NF4Linear(layer)
    quantized.packed.data.copy_(pack(layer.weight.detach().flatten()))
    exact = quantized.rounded(layer.weight.detach())
    device = torch.device(probe.device)
    quantized.to(device).pairs = pairs_of_levels(device)
    eye = torch.eye(width, device=device)
    probe.equal("weights that differ from those of the CPU", int((quantized(eye).t().cpu() != exact).sum()), 0)
    whole = layer.to(device, torch.bfloat16).requires_grad_(False)
    inputs = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    calls = {name: partial(_forward_backward, module, inputs) for name, module in (("nf4", quantized), ("bf16", whole))}
    seconds = {name: per_call(call) if probe.on_gpu else timeit(call, number=3) / 3 for name, call in calls.items()}
    probe.note("time of forward and backward, NF4 / bf16", seconds["nf4"] / seconds["bf16"])


def _forward_backward(module: torch.nn.Module, inputs: torch.Tensor) -> None:
    module(inputs).backward(inputs.detach())


def rotation(probe: Probe) -> None:
    """The gradient of joined queries, keys and values is written about as fast as they are rotated."""
    tokens, widths, width = 2048, (2048, 512, 512), 64
    joined = torch.randn(16, tokens, sum(widths), device="cuda", dtype=torch.bfloat16, requires_grad=True)
    tables = rotary_tables(torch.arange(tokens, device="cuda"), width, 5e5)

    def rotated(joined: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = (part.unflatten(-1, (-1, width)) for part in joined.split(widths, -1))
        return rotate(query, *tables), rotate(key, *tables), value.contiguous()

    compiled = torch.compile(rotated, backend=compile_in_turns)
    results = compiled(joined)
    gradients = [torch.randn_like(result) for result in results]
    forward_s = per_call(lambda: compiled(joined))
    backward_s = per_call(lambda: torch.autograd.grad(results, joined, gradients, retain_graph=True))
    probe.note("milliseconds of the forward", 1e3 * forward_s)
    probe.within("backward / forward", backward_s / forward_s, high=1.5 if _written_apart() else 5)
    narrow = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    wide = narrow.float()
    casts: dict[str, Any] = {
        "to": narrow.float,
        "_foreach_copy_": lambda: torch._foreach_copy_([wide], [narrow]),
        "compiled": partial(torch.compile(torch.Tensor.float, backend=compile_in_turns), narrow),
    }
    for name, cast in casts.items():
        rate = (narrow.nbytes + wide.nbytes) / per_call(cast)
        probe.note(f"GB/s of a cast from bf16 to fp32 by {name}", rate / 1e9)


def per_call(work: Any) -> float:
    """Returns the seconds on the GPU of one call of ``work``."""
    for _ in range(3):
        work()
    return timed(lambda: [work() for _ in range(20)]) / 20


def kernels(probe: Probe) -> None:
    """In steps of 1.2 billion parameters the GPU is never idle, and nothing but products and attention takes long."""
    steps = World(probe).steps("experiment=gpt1b_h200", "batch.global_size=32", *_fitting())
    for _ in range(3):
        steps.step()
    with profiled(steps) as profiler:
        for _ in range(2):
            steps.step()
    events = [event for event in trace_of(profiler, probe.folder) if event.get("cat") in ("kernel", "gpu_memcpy")]
    begin = min(event["ts"] for event in events)
    end = max(event["ts"] + event["dur"] for event in events)
    probe.within("share of the time in which a kernel runs", covered(events) / (end - begin), low=0.97)
    _write_kernels(probe, events, end - begin)
    steps.close()


def _fitting() -> list[str]:
    """Returns overrides with which the experiment fits into this GPU."""
    memory = torch.cuda.get_device_properties(0).total_memory
    return [] if memory > 120e9 else ["batch.micro_size=8"] if memory > 70e9 else ["batch.micro_size=1"]


def _write_kernels(probe: Probe, events: Sequence[dict[str, Any]], elapsed: float) -> None:
    """Writes the times by name, and expects no kernel of another kind than products and attention above 5 %."""
    times: dict[str, float] = {}
    for event in events:
        times[event["name"]] = times.get(event["name"], 0.0) + event["dur"]
    ordered = sorted(times.items(), key=lambda pair: -pair[1])
    lines = [f"{100 * value / elapsed:6.2f} %  {name[:160]}" for name, value in ordered[:40]]
    (probe.place.out / "kernels.txt").write_text("\n".join(lines) + "\n")
    other = [(name, value) for name, value in ordered if not any(word in name.lower() for word in PRODUCTS + ATTENTION)]
    for name, value in other[:3]:
        probe.within(f"share of {name[:80]}", value / elapsed, high=0.05)
    probe.note("share of products and attention", 1 - sum(value for _, value in other) / sum(times.values()))


def covered(events: Sequence[dict[str, Any]]) -> float:
    """Returns the microseconds in which at least one of ``events`` runs."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _most(values: Any) -> Any:
    counted = list(values)
    return max(set(counted), key=counted.count)
