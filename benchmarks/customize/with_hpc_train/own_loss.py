import hpc_train


def main(same):
    return hpc_train.submit(
        [
            "+strategy=dp",
            "model=custom",
            "model._target_=examples.own_model.WeightedClassifier",
            "+model.args.n_classes=4",
            "data=custom",
            "data._target_=benchmarks.customize.shared.Shapes",
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
