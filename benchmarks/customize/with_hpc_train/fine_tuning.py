import hpc_train
from benchmarks.customize.shared import tiny_llama


def main(same):
    return hpc_train.submit(
        [
            "+strategy=dp",
            "model=hf",
            f"model.name_or_path={tiny_llama()}",
            "model.task=causal_lm",
            "data=custom",
            "data._target_=benchmarks.customize.shared.Sentences",
            "batch.global_size=16",
            "train.epochs=1",
            "optim=sgd",
            "optim.momentum=0",
            "optim.weight_decay=0",
            "optim.schedule=constant",
            *same,
        ],
        detach=False,
    )
