"""What users write, right and wrong, as a type checker sees it. Never run.

`check.py` compares what mypy says of it: a line that ends in `# error: code` is wrong.
"""

from __future__ import annotations

from typing import Literal

import tensorflow as tf

import kerasps


def right() -> None:
    with kerasps.LocalCluster(num_workers=2, num_ps=1) as cluster:
        kerasps.ParameterServerStrategy(cluster)
        strategy = kerasps.ParameterServerStrategy(
            cluster.cluster_resolver,
            kerasps.MinSizePartitioner(),
            update_mode="sync",
            shard_layout="div",
            sparse_updates="dense",
        )
    spec = tf.train.ClusterSpec({"worker": ["host1:2222"], "ps": ["host2:2222"]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    kerasps.ParameterServerStrategy(resolver)
    kerasps.WorkerDrivenStrategy(cluster_resolver=resolver)
    mode: Literal["async", "sync"] = strategy.options.update_mode
    kerasps.ParameterServerStrategy(update_mode=mode, shard_layout=strategy.options.shard_layout)
    if strategy.options.sparse_updates == "lazy" and strategy.workers()[0].status == "connected":
        strategy.placement()
    kerasps.BackupAndRestore("backup", save_freq=100)
    kerasps.BackupAndRestore("backup", save_freq="epoch")
    kerasps.CentralStorageStrategy(["CPU:0"])
    kerasps.DatasetCreator(lambda context: tf.data.Dataset.range(context.input_pipeline_id))


class OfScheduler:
    """The resolver of another scheduler."""

    task_type = "chief"
    task_id = 0

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Return the tasks."""
        return tf.train.ClusterSpec({"worker": ["host1:2222"], "ps": ["host2:2222"]})


def estimators(model_fn: object) -> None:
    resolver: kerasps.ClusterResolver = OfScheduler()
    kerasps.ParameterServerStrategy(resolver)
    train_spec = kerasps.TrainSpec(lambda: tf.data.Dataset.range(3), max_steps=10, callbacks=None)
    kerasps.TrainSpec(lambda: tf.data.Dataset.range(3), hooks=[])  # error: call-arg
    kerasps.RunConfig("run", save_summary_steps=10)  # error: call-arg
    config = kerasps.RunConfig("run", keep_checkpoint_max=None)
    spec = kerasps.EvalSpec(lambda: tf.data.Dataset.range(3))
    kerasps.train_and_evaluate(model_fn, train_spec, spec, config=config)  # error: arg-type
    kerasps.train_and_evaluate(lambda: None, spec, train_spec, config=config)  # error: arg-type


def wrong(strategy: kerasps.ParameterServerStrategy) -> None:
    kerasps.ParameterServerStrategy({"worker": ["host1:2222"]})  # error: arg-type
    kerasps.ParameterServerStrategy("grpc://host:2222")  # error: arg-type
    kerasps.ParameterServerStrategy(update_mode="both")  # error: arg-type
    kerasps.ParameterServerStrategy(shard_layout="range")  # error: arg-type
    kerasps.ParameterServerStrategy(sparse_updates=True)  # error: arg-type
    kerasps.ParameterServerStrategy(max_stalenes=3)  # error: call-arg
    kerasps.WorkerDrivenStrategy(shard_layout="rows")  # error: arg-type
    kerasps.LocalCluster(num_workers="2")  # error: arg-type
    kerasps.BackupAndRestore("backup", save_freq="batch")  # error: arg-type
    kerasps.SidecarEvaluatorModelExport("best/model.keras", mode="least")  # error: arg-type
    print(strategy.options.update_mode == "asynch")  # error: comparison-overlap
    print(strategy.workers()[0].status == "gone")  # error: comparison-overlap
    kerasps.Foo()  # error: attr-defined
    number: str = strategy.num_workers  # error: assignment
    print(number)
