import hpc_train


def main(same):
    return hpc_train.submit(
        [
            "+strategy=dp",
            "model=custom",
            "model._target_=benchmarks.customize.shared.Classifier",
            "data=custom",
            "data._target_=benchmarks.customize.shared.Shapes",
            "batch.global_size=16",
            "train.epochs=1",
            "optim=custom",
            "optim._target_=examples.own_optimizer.Lion",
            "optim.elementwise=true",
            "optim.lr=1e-3",
            "optim.weight_decay=0.1",
            "optim.clip_norm=0",
            "optim.warmup_steps=0",
            "optim.schedule=constant",
            "+optim.groups.convolutions.match=convolutions",
            "+optim.groups.convolutions.lr_factor=0.1",
            *same,
        ],
        detach=False,
    )
