"""The table of all functions that kerasps patches in Keras and TensorFlow, in order."""

from __future__ import annotations

import importlib
import inspect

import keras
import tensorflow as tf

from kerasps import _compat, saving, training
from kerasps.hooks import (
    backups,
    coordinators,
    devices,
    functions,
    models,
    optimizers,
    variables,
)
from kerasps.hooks.patch import KERAS, TENSORFLOW, Patch

_BASE, _OPTIMIZER = _compat.BaseOptimizer, _compat.TFOptimizer
_TRAINER = _compat.trainer_that_defines("make_train_function")
# The trainers have other names in Keras 3.16.
_MODEL = "keras.Model"
_SAVER = _compat.MultiDeviceSaver
_SAVING, _STORE = _compat.saving_lib, _compat.H5IOStore
_COORDINATOR = tf.distribute.coordinator.ClusterCoordinator
_BACKUP = keras.callbacks.BackupAndRestore
# In some versions of Keras the backend has another class, which is not always the one called.
_ARCHIVE = type(keras.export.ExportArchive())
# Found by the function, since the package has a function with the same name as this module.
_RNN = inspect.getmodule(_compat.cudnn_ok)
# Imported by name: before this import, `tf.compat.v1` is another object.
_V1 = importlib.import_module("tensorflow.compat.v1")

_WHOLE_FILES = "renames a file when it is complete, and writes large variables in chunks"
_DAMAGED = "Keras reports a damaged file as missing"
_LARGE_ENTRIES = "writes and reads large variables in chunks of rows"
_RESUMING = "the ps write their variables, and `fit` resumes at the step of the backup"
_EXPORTING = "functions traced during an export are for a SavedModel, which has no cluster"
_STEPS = "runs steps of a model of ours on the workers, or as plain Python if it is eager"
_BATCH = "a step of a model of ours runs on the coordinator, and pushes to the ps"
_ADOPTING = "adopts a variable that was made elsewhere when a step uses it"
_UNTUNED = "a worker that deletes an iterator does not wait for the thread that tunes it"
_IN_STEP = "in a step, assigns to our variable; Keras would assign to the storage"

# One call per row, as a table.
# fmt: off
PATCHES: tuple[Patch, ...] = (
    # Variables.
    Patch(keras.Variable, "__init__", variables.make_variable,
          "makes our subclass while our strategy is current", KERAS, "keras.Variable"),
    Patch(keras.Variable, "value", variables.value, _ADOPTING, KERAS, "keras.Variable"),
    Patch(keras.Variable, "assign", variables.assign, _ADOPTING, KERAS, "keras.Variable"),
    Patch(_compat.keras_numpy, "take", variables.take,
          "`keras.layers.Embedding` calls it: reads only the rows needed of our variables", KERAS),
    Patch(_compat.embedding_ops, "_embedding_lookup_and_transform", variables.lookup,
          "reads only the rows needed of our variables", TENSORFLOW, "tf.nn.embedding_lookup"),
    Patch(_compat.embedding_ops, "embedding_lookup_sparse_impl", variables.lookup_sparse,
          "given a variable's value, as Keras 3 passes it, reads only the rows needed",
          TENSORFLOW, "tf.nn.embedding_lookup_sparse"),
    Patch(tf.GradientTape, "gradient", variables.gradient,
          "a tape sees each shard of a variable as a variable", TENSORFLOW),
    Patch(tf.GradientTape, "watch", variables.watch,
          "a tape sees each shard of a variable as a variable", TENSORFLOW),
    Patch(_compat.gradients_util, "_GradientsHelper", variables.gradients_in_graph,
          "`tf.gradients` sees each shard of a variable as a variable", TENSORFLOW,
          "tf.gradients"),
    # Building.
    Patch(_compat.trainer_that_defines("compile"), "compile", models.compile_model,
          "makes the metrics and the optimizer's state of a model of ours in the scope", KERAS,
          _MODEL),
    Patch(keras.layers.Layer, "_open_name_scope", models.open_name_scope,
          "builds a model of ours in the scope, also when called outside of it", KERAS),
    Patch(_OPTIMIZER, "add_variable", optimizers.add_variable,
          "makes the state of an optimizer of ours in the scope", KERAS),
    Patch(_OPTIMIZER, "add_variable_from_reference", optimizers.add_slot,
          "makes a slot beside the storage, not beside the value of a step", KERAS),
    # Optimizers.
    Patch(_BASE, "apply", optimizers.apply,
          "adopts an optimizer when a step uses it, and builds it outside of the trace", KERAS),
    Patch(_BASE, "_backend_apply_gradients", optimizers.apply_gradients,
          "records the gradients that the worker sends", KERAS),
    Patch(_BASE, "_get_current_learning_rate", optimizers.learning_rate,
          "a ps uses the learning rate that the worker sent", KERAS),
    Patch(keras.optimizers.LossScaleOptimizer, "apply", optimizers.apply_scaled,
          "works in the scope outside a step too, which Keras refuses under a strategy", KERAS),
    Patch(_OPTIMIZER, "_backend_update_step", optimizers.update_step,
          "records the updates that an optimizer's override makes", KERAS),
    Patch(_OPTIMIZER, "_var_key", optimizers.var_key,
          "Keras finds slots by this key; that of our variables is their storage's", KERAS),
    Patch(_OPTIMIZER, "_apply_weight_decay", optimizers.apply_weight_decay,
          "on a ps, decays what a push updates, which may be rows of a table", KERAS),
    Patch(_OPTIMIZER, "assign", optimizers.assigning("assign"), _IN_STEP, KERAS),
    Patch(_OPTIMIZER, "assign_add", optimizers.assigning("assign_add"), _IN_STEP, KERAS),
    Patch(_OPTIMIZER, "assign_sub", optimizers.assigning("assign_sub"), _IN_STEP, KERAS),
    # Training.
    Patch(_TRAINER, "fit", models.on_workers(training.fit), _STEPS, KERAS, _MODEL),
    Patch(_TRAINER, "evaluate", models.on_workers(training.evaluate), _STEPS, KERAS, _MODEL),
    Patch(_TRAINER, "predict", models.on_workers(training.predict), _STEPS, KERAS, _MODEL),
    Patch(_TRAINER, "train_on_batch", models.on_workers(training.train_on_batch), _BATCH,
          KERAS, _MODEL),
    Patch(_TRAINER, "test_on_batch", models.on_workers(training.test_on_batch), _BATCH, KERAS,
          _MODEL),
    Patch(_TRAINER, "predict_on_batch", models.on_workers(training.predict_on_batch),
          _BATCH, KERAS, _MODEL),
    Patch(_TRAINER, "_maybe_symbolic_build", models.symbolic_build,
          "the first step of a model that runs eagerly builds it, as without a strategy", KERAS,
          _MODEL),
    Patch(_TRAINER, "distribute_strategy", models.distribute_strategy,
          "Keras's loop runs eager steps, with a strategy that runs them in this process", KERAS,
          _MODEL),
    Patch(_compat.TracedFunction, "__call__", functions.call,
          "traces a `tf.function` that a step calls as a part of the step", TENSORFLOW,
          "tf.function"),
    Patch(_compat.FuncRegistry, "__call__", functions.call_python,
          "keeps the exception of a generator or `py_function`, which `fit` then raises",
          TENSORFLOW),
    Patch(_RNN, "_is_gpu_available", devices.is_gpu_available,
          "a step uses cuDNN's kernels only if its device is a GPU", KERAS),
    # Custom loops.
    Patch(_COORDINATOR, "schedule", coordinators.schedule,
          "called by a callback, waits for the steps of `fit` first", TENSORFLOW),
    Patch(_COORDINATOR, "join", coordinators.join,
          "does not wait for lost tasks, and its errors name them", TENSORFLOW),
    Patch(_COORDINATOR, "create_per_worker_dataset", coordinators.create_per_worker_dataset,
          _UNTUNED, TENSORFLOW),
    Patch(_compat.multi_device_iterator_ops, "_create_device_dataset",
          coordinators.create_device_dataset, _UNTUNED, TENSORFLOW),
    Patch(_compat.Closure, "__init__", coordinators.make_closure,
          "runs a scheduled function that trains outside `strategy.run` in it", TENSORFLOW),
    Patch(_compat.Closure, "execute_on", coordinators.execute,
          "applies each update of a scheduled function once, also when workers are lost",
          TENSORFLOW),
    # Files.
    Patch(_compat.saving_api, "load_model", saving.load_whole_model, _DAMAGED, KERAS),
    Patch(_SAVING, "save_model", saving.save_model, _WHOLE_FILES, KERAS),
    Patch(_SAVING, "save_weights_only", saving.save_weights, _WHOLE_FILES, KERAS),
    Patch(_SAVING, "load_model", saving.load_model, _WHOLE_FILES, KERAS),
    Patch(_SAVING, "load_weights_only", saving.load_weights, _WHOLE_FILES, KERAS),
    Patch(_SAVING, "is_memory_sufficient", saving.is_memory_sufficient,
          "keeps Keras from building large files in memory", KERAS),
    Patch(_compat.legacy_h5_format, "save_model_to_hdf5", saving.save_model, _WHOLE_FILES, KERAS),
    Patch(_STORE, "__setitem__", saving.set_entry, _LARGE_ENTRIES, KERAS),
    Patch(_STORE, "__getitem__", saving.get_entry, _LARGE_ENTRIES, KERAS),
    Patch(_BASE, "save_own_variables", saving.save_optimizer, _LARGE_ENTRIES, KERAS),
    Patch(_BACKUP, "_save_model", backups.save, _RESUMING, KERAS),
    Patch(_BACKUP, "_load_model", backups.load, _RESUMING, KERAS),
    Patch(_ARCHIVE, "add_endpoint", models.exported, _EXPORTING, KERAS, "ExportArchive"),
    Patch(_ARCHIVE, "write_out", models.exported, _EXPORTING, KERAS, "ExportArchive"),
    Patch(_compat.saved_model, "save_and_return_nodes", models.exported, _EXPORTING, TENSORFLOW,
          "saved_model.save"),
    Patch(_SAVER, "__init__", saving.make_saver,
          "our saver writes and reads variables in shards", TENSORFLOW),
    Patch(_SAVER, "save", models.naming_tasks(saving.save_checkpoint),
          "uses an absolute path, and a device that can access it", TENSORFLOW),
    Patch(_SAVER, "restore", models.naming_tasks(saving.restore_checkpoint),
          "uses an absolute path, and a device that can access it", TENSORFLOW),
    # TensorFlow's housekeeping.
    Patch(_V1, "reset_default_graph", functions.reset_default_graph,
          "keeps the threads' scopes when `keras.utils.clear_session` calls it", TENSORFLOW,
          "tf.compat.v1"),
    Patch(_compat.framework_ops, "raise_from_not_ok_status", functions.raise_status,
          "raises a clear error for an operation on a variable of a closed cluster", TENSORFLOW),
    Patch(_compat.Executor, "__del__", functions.delete_executor,
          "deletes an executor whose task is lost without printing the error", TENSORFLOW),
    Patch(_compat.Context, "add_c_function", functions.add_to_tasks,
          "sends a function to the tasks while their list does not change", TENSORFLOW),
    Patch(_compat.Context, "add_function_def", functions.add_to_tasks,
          "sends a function to the tasks while their list does not change", TENSORFLOW),
    Patch(_compat.Context, "remove_function", functions.remove_function,
          "leaves functions on tasks at exit, since these may have ended before", TENSORFLOW),
)
# fmt: on
