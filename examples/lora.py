"""Trains LoRA adapters beside the fixed weights of a language model, and lets peft load them.

    python examples/lora.py MODEL [OVERRIDE...]

MODEL is a directory or a name on the hub. The checkpoints and the export hold the adapters only.
"""

from __future__ import annotations

import subprocess
import sys

import hpc_train


def main(model: str, *overrides: str) -> None:
    run = hpc_train.submit([
        "+strategy=zero3", "run.name=adapted",
        "model=hf", "model.task=causal_lm", f"model.name_or_path={model}",
        "model.lora.rank=8", "model.lora.targets=[q_proj,v_proj]",
        "optim.lr=2e-4", "train.steps=100", *overrides,
    ])  # fmt: skip
    assert isinstance(run, hpc_train.Run)  # and not a sweep
    status = run.wait()
    if status.exit_code != 0:
        sys.exit(f"{status.state}: {status.message}")
    command = [sys.executable, "-m", "hpc_train", "checkpoint", "export", str(run.path), "--to", "adapter"]
    subprocess.run(command, check=True)

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), "adapter")
    trained = sum(value.numel() for name, value in adapted.named_parameters() if "lora_" in name)
    print(f"{trained} of {sum(value.numel() for value in adapted.parameters())} weights are those of the adapters")


if __name__ == "__main__":
    main(*sys.argv[1:])
