"""``bench step --profile-gap``: what a step loses against the peak rate, by the names of kernels and operators."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_train.bench import step_gap
from hpc_train.bench.step import report
from hpc_train.bench.step_gap import (
    COMMUNICATION,
    PRODUCTS,
    RECOMPUTED,
    WAITING,
    kind_of,
    losses,
    seconds_by_kind,
)
from hpc_train.config.compose import typed
from tests.config.composing import compose
from tests.doors.command import TINY, hpc_train

# as torch.profiler names them on A100, H100 and MI250
KERNELS = {
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT": PRODUCTS,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_segment_k_off_kernel": PRODUCTS,
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>": PRODUCTS,
    "Cijk_Alik_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1_SN": PRODUCTS,
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>": PRODUCTS,
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": PRODUCTS,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_128x128x128_4x1x1_kernel0_0": PRODUCTS,
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 128, 4, 16, 128, 3, 4>": PRODUCTS,
    "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4>": PRODUCTS,
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>": step_gap.LOSS,
    "triton_red_fused__log_softmax_nll_loss_forward_2": step_gap.LOSS,
    "triton_poi_fused__to_copy_add_mul_silu_1": step_gap.ELEMENTWISE,
    # of compact_adamw._update, as torch 2.11 names it
    "triton_poi_fused___rshift____to_copy_add_bitwise_and_bitwise_xor_copy__div_lerp_mul_neg_sqrt_sub_view_where_0":
        step_gap.OPTIMIZER,
    "triton_poi_fused__scaled_dot_product_flash_attention_transpose_3": step_gap.ELEMENTWISE,
    "triton_tem_fused_mm_t_5": PRODUCTS,
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": step_gap.ELEMENTWISE,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": step_gap.OPTIMIZER,
    "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>": step_gap.COPIES,
    "Memcpy DtoD (Device -> Device)": step_gap.COPIES,
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), KERNELS.items())
def test_a_kernel_is_of_the_kind_that_its_name_tells(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "train.compile=true"),
        (["train.compile=true", "precision.residual=fp32"], "precision.residual=compute"),
        (["train.compile=true", "train.activation_checkpointing=ops"], "train.activation_checkpointing=none"),
        (["train.compile=true"], "model.dim"),
    ],
)
def test_the_advice_is_not_what_the_config_has_already(given: list[str], words: str) -> None:
    config = typed(compose(["precision=bf16", *given]))
    assert words in step_gap.advice(step_gap.ELEMENTWISE, config)
    assert ("precision.weights=bf16" in step_gap.advice(step_gap.COPIES, config)) == config.train.compile


def kernel(name: str, begin: float, end: float) -> Any:
    gpu = torch.autograd.DeviceType.CUDA
    times = SimpleNamespace(start=begin, end=end)
    return SimpleNamespace(name=name, device_type=gpu, is_user_annotation=False, time_range=times)


def test_kernels_share_the_time_in_which_they_overlap_and_collectives_count_where_they_are_alone() -> None:
    events = [
        kernel("nvjet_hsh_128x256", 0, 60),
        kernel("triton_poi_fused_add", 40, 60),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 50, 90),
        kernel("ncclDevKernel_SendRecv", 80, 100),
        kernel("Memcpy DtoH (Device -> Pinned)", 55, 110),
    ]
    seconds = seconds_by_kind(events, on_gpu=True, stages=True)
    assert seconds[PRODUCTS] == pytest.approx(45e-6) and seconds[step_gap.ELEMENTWISE] == pytest.approx(15e-6)
    assert seconds[COMMUNICATION] == pytest.approx(30e-6) and seconds[step_gap.BUBBLE] == pytest.approx(10e-6)
    assert seconds[step_gap.TRANSFERS] == pytest.approx(10e-6)
    alone = seconds_by_kind(events, on_gpu=True, stages=False)  # context parallelism has the same kernel as messages
    assert alone[COMMUNICATION] == pytest.approx(40e-6) and alone[step_gap.BUBBLE] == 0


def test_the_losses_add_up_to_the_gap() -> None:
    seconds = dict.fromkeys(seconds_by_kind([], on_gpu=True, stages=True), 0.01) | {PRODUCTS: 0.6}
    for step_s in (1.0, 0.5):  # the profile of the second was slower than the measured step
        lost = losses(seconds, step_s, 0.3, 0.1)
        assert sum(lost.values()) == pytest.approx(step_s - 0.3)
        assert lost[RECOMPUTED] == 0.1
        assert lost[WAITING] == pytest.approx(max(0.0, step_s - sum(seconds.values())))


@pytest.mark.long_form(9)
def test_a_step_on_this_machine_names_its_losses(tmp_path: Path) -> None:
    here = ["cluster=local", "cluster.cpu_workers=2", "cluster.gpus_per_node=0", *TINY, "--steps", "2", "--pairs", "2"]
    done = hpc_train("bench", "step", "+strategy=dp", *here, "--profile-gap", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    gap = result["gap"]
    seconds = {loss["kind"]: loss["seconds"] for loss in gap["losses"]}
    assert gap["step_s"] == result["step_s"]["median"]
    assert gap["ideal_s"] <= result["mfu"]["value"] * gap["step_s"] * 1.001
    assert sum(seconds.values()) == pytest.approx(gap["step_s"] - gap["ideal_s"]) and min(seconds.values()) >= 0
    assert seconds[COMMUNICATION] > 0 and seconds[step_gap.ELEMENTWISE] > 0 and seconds[step_gap.OPTIMIZER] > 0
    assert [*seconds.values()] == sorted(seconds.values(), reverse=True)
    words = report(result)
    assert words.count(" ms ") >= 5 and gap["losses"][0]["advice"] in words
    assert "gap " not in report(result | {"gap": None})
