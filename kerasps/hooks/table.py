"""The table of all functions that kerasps patches in Keras and TensorFlow, in order."""

from __future__ import annotations

from kerasps import saving, training
from kerasps._private_names import (
    BACKUPS,
    CHECKPOINTS,
    CUSTOM_LOOPS,
    EAGER_STEPS,
    EMBEDDING_LOOKUPS,
    EXPORTS,
    FILES,
    FIT,
    GRADIENTS,
    MESSAGES,
    RECURRENT,
    SUMMARIES,
)
from kerasps.hooks import (
    backups,
    devices,
    functions,
    models,
    optimizers,
    variables,
)
from kerasps.hooks.patch import KERAS, TENSORFLOW, Patch

_VARIABLE, _OPTIMIZER, _MODEL = "keras:Variable", "keras:optimizers.Optimizer", "keras:Model"
_TAPE = "tensorflow:GradientTape"
_BACKUP = "keras:callbacks.BackupAndRestore"
_ARCHIVE = "keras:export.ExportArchive"

_WHOLE_FILES = "renames a file when it is complete, and writes large variables in chunks"
_LOADING = "reads large variables in chunks; Keras reports a damaged file as missing"
_LARGE_ENTRIES = "writes and reads large variables in chunks of rows"
_RESUMING = "the ps write their variables, and `fit` resumes at the step of the backup"
_EXPORTING = "functions traced during an export are for a SavedModel, which has no cluster"
_STEPS = "runs steps of a model of ours on the workers, or as plain Python if it is eager"
_BATCH = "a step of a model of ours runs on the coordinator, and pushes to the ps"
_ADOPTING = "adopts a variable that was made elsewhere when a step uses it"
_IN_STEP = "in a step, assigns to our variable; Keras would assign to the storage"

# One call per row, as a table.
# fmt: off
PATCHES: tuple[Patch, ...] = (
    # Variables.
    Patch(_VARIABLE, "__init__", variables.make_variable, FIT,
          "makes our subclass while our strategy is current", KERAS),
    Patch(_VARIABLE, "value", variables.value, FIT, _ADOPTING, KERAS),
    Patch(_VARIABLE, "assign", variables.assign, FIT, _ADOPTING, KERAS),
    Patch("keras_numpy", "take", variables.take, FIT,
          "`keras.layers.Embedding` calls it: reads only the rows needed of our variables", KERAS),
    Patch("embedding_ops", "_embedding_lookup_and_transform", variables.lookup, EMBEDDING_LOOKUPS,
          "reads only the rows needed of our variables", TENSORFLOW, "tf.nn.embedding_lookup"),
    Patch("embedding_ops", "embedding_lookup_sparse_impl", variables.lookup_sparse,
          EMBEDDING_LOOKUPS,
          "given a variable's value, as Keras 3 passes it, reads only the rows needed",
          TENSORFLOW, "tf.nn.embedding_lookup_sparse"),
    Patch(_TAPE, "gradient", variables.gradient, FIT,
          "a tape sees each shard of a variable as a variable", TENSORFLOW),
    Patch(_TAPE, "watch", variables.watch, FIT,
          "a tape sees each shard of a variable as a variable", TENSORFLOW),
    Patch("gradients_util", "_GradientsHelper", variables.gradients_in_graph, GRADIENTS,
          "`tf.gradients` sees each shard of a variable as a variable", TENSORFLOW, "tf.gradients"),
    # Building.
    Patch(_MODEL, "compile", models.compile_model, FIT,
          "makes the metrics and the optimizer's state of a model of ours in the scope", KERAS),
    Patch("keras:layers.Layer", "_open_name_scope", models.open_name_scope, FIT,
          "builds a model of ours in the scope, also when called outside of it", KERAS),
    Patch("keras_summary", "count_params", variables.count_params, SUMMARIES,
          "counts the rows that a table without a vocabulary has", KERAS),
    Patch("keras_summary", "weight_memory_size", variables.memory_size, SUMMARIES,
          "counts the rows that a table without a vocabulary has", KERAS),
    Patch(_OPTIMIZER, "add_variable", optimizers.add_variable, FIT,
          "makes the state of an optimizer of ours in the scope", KERAS),
    Patch(_OPTIMIZER, "add_variable_from_reference", optimizers.add_slot, FIT,
          "makes a slot beside the storage, not beside the value of a step", KERAS),
    # Optimizers.
    Patch(_OPTIMIZER, "apply", optimizers.apply, FIT,
          "adopts an optimizer when a step uses it, and builds it outside of the trace", KERAS),
    Patch(_OPTIMIZER, "_backend_apply_gradients", optimizers.apply_gradients, FIT,
          "records the gradients that the worker sends", KERAS),
    Patch(_OPTIMIZER, "_get_current_learning_rate", optimizers.learning_rate, FIT,
          "a ps uses the learning rate that the worker sent", KERAS),
    Patch("keras:optimizers.LossScaleOptimizer", "apply", optimizers.apply_scaled, FIT,
          "works in the scope outside a step too, which Keras refuses under a strategy", KERAS),
    Patch(_OPTIMIZER, "_backend_update_step", optimizers.update_step, FIT,
          "records the updates that an optimizer's override makes", KERAS),
    Patch(_OPTIMIZER, "_var_key", optimizers.var_key, FIT,
          "Keras finds slots by this key; that of our variables is their storage's", KERAS),
    Patch(_OPTIMIZER, "_apply_weight_decay", optimizers.apply_weight_decay, FIT,
          "on a ps, decays what a push updates, which may be rows of a table", KERAS),
    Patch(_OPTIMIZER, "assign", optimizers.assigning("assign"), FIT, _IN_STEP, KERAS),
    Patch(_OPTIMIZER, "assign_add", optimizers.assigning("assign_add"), FIT, _IN_STEP, KERAS),
    Patch(_OPTIMIZER, "assign_sub", optimizers.assigning("assign_sub"), FIT, _IN_STEP, KERAS),
    # Training.
    Patch(_MODEL, "fit", models.on_workers(training.fit), FIT, _STEPS, KERAS),
    Patch(_MODEL, "evaluate", models.on_workers(training.evaluate), FIT, _STEPS, KERAS),
    Patch(_MODEL, "predict", models.on_workers(training.predict), FIT, _STEPS, KERAS),
    Patch(_MODEL, "train_on_batch", models.on_workers(training.train_on_batch), FIT, _BATCH, KERAS),
    Patch(_MODEL, "test_on_batch", models.on_workers(training.test_on_batch), FIT, _BATCH, KERAS),
    Patch(_MODEL, "predict_on_batch", models.on_workers(training.predict_on_batch), FIT,
          _BATCH, KERAS),
    Patch(_MODEL, "_maybe_symbolic_build", models.symbolic_build, EAGER_STEPS,
          "the first step of a model that runs eagerly builds it, as without a strategy", KERAS),
    Patch(_MODEL, "distribute_strategy", models.distribute_strategy, EAGER_STEPS,
          "Keras's loop runs eager steps, with a strategy that runs them in this process", KERAS),
    Patch("TracedFunction", "__call__", functions.call, FIT,
          "traces a `tf.function` that a step calls as a part of the step",
          TENSORFLOW, "tf.function"),
    Patch("FuncRegistry", "__call__", functions.call_python, MESSAGES,
          "keeps the exception of a generator or `py_function`, which `fit` then raises",
          TENSORFLOW),
    Patch("keras_rnn", "_is_gpu_available", devices.is_gpu_available,
          RECURRENT, "a step uses cuDNN's kernels only if its device is a GPU", KERAS),
    # Custom loops.
    Patch("multi_device_iterator_ops", "_create_device_dataset", devices.create_dataset,
          CUSTOM_LOOPS,
          "a worker that deletes an iterator does not wait for the thread that tunes it",
          TENSORFLOW),
    # Files.
    Patch("saving_api", "save_model", saving.save_model, FILES, _WHOLE_FILES, KERAS),
    Patch("saving_api", "load_model", saving.load_model, FILES, _LOADING, KERAS),
    Patch("saving_lib", "save_weights_only", saving.save_weights, FILES, _WHOLE_FILES, KERAS),
    Patch("saving_lib", "load_weights_only", saving.load_weights, FILES, _WHOLE_FILES, KERAS),
    Patch("saving_lib", "is_memory_sufficient", saving.is_memory_sufficient, FILES,
          "keeps Keras from building large files in memory", KERAS),
    Patch("H5IOStore", "__setitem__", saving.set_entry, FILES, _LARGE_ENTRIES, KERAS),
    Patch("H5IOStore", "__getitem__", saving.get_entry, FILES, _LARGE_ENTRIES, KERAS),
    Patch(_OPTIMIZER, "save_own_variables", saving.save_optimizer, FILES, _LARGE_ENTRIES, KERAS),
    Patch(_OPTIMIZER, "load_own_variables", saving.load_optimizer, FILES,
          "reads the slots of tables without a vocabulary", KERAS),
    Patch(_BACKUP, "_save_model", backups.save, BACKUPS, _RESUMING, KERAS),
    Patch(_BACKUP, "_load_model", backups.load, BACKUPS, _RESUMING, KERAS),
    Patch(_MODEL, "export", models.export, EXPORTS,
          "with `updatable=True`, writes a SavedModel that deltas update", KERAS),
    Patch(_ARCHIVE, "add_endpoint", models.exported, EXPORTS, _EXPORTING, KERAS),
    Patch(_ARCHIVE, "write_out", models.exported, EXPORTS, _EXPORTING, KERAS),
    Patch("saved_model", "save_and_return_nodes", models.exported, EXPORTS,
          _EXPORTING, TENSORFLOW, "saved_model.save"),
    Patch("MultiDeviceSaver", "__init__", saving.make_saver, CHECKPOINTS,
          "makes our saver: absolute paths, devices that can access them, variables in shards",
          TENSORFLOW),
    # TensorFlow's housekeeping.
    Patch("tensorflow.compat.v1", "reset_default_graph", functions.reset_default_graph, FIT,
          "keeps the threads' scopes when `keras.utils.clear_session` calls it", TENSORFLOW),
    Patch("framework_ops", "raise_from_not_ok_status", functions.raise_status, MESSAGES,
          "raises a clear error for an operation on a variable of a closed cluster", TENSORFLOW),
    Patch("Executor", "__del__", functions.delete_executor, MESSAGES,
          "deletes an executor whose task is lost without printing the error", TENSORFLOW),
    Patch("Context", "add_c_function", functions.add_to_tasks, FIT,
          "sends a function to the tasks while their list does not change", TENSORFLOW),
    Patch("Context", "add_function_def", functions.add_to_tasks, FIT,
          "sends a function to the tasks while their list does not change", TENSORFLOW),
    Patch("Context", "remove_function", functions.remove_function, MESSAGES,
          "leaves functions on tasks at exit, since these may have ended before", TENSORFLOW),
)
# fmt: on

_OF_TABLES = {
    (_MODEL, "export"),
    (_VARIABLE, "__init__"),
    (_OPTIMIZER, "add_variable_from_reference"),
    (_OPTIMIZER, "save_own_variables"),
    (_OPTIMIZER, "load_own_variables"),
    ("saved_model", "save_and_return_nodes"),
}
# What a table without a vocabulary needs in one process.
ONE_PROCESS = tuple(patch for patch in PATCHES if (patch.where, patch.name) in _OF_TABLES)
