"""All that kerasps patches in Keras and TensorFlow, in the order in which it is installed."""

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
_TRAINER, _SAVER = _compat.TensorFlowTrainer, _compat.MultiDeviceSaver
_SAVING, _STORE = _compat.saving_lib, _compat.H5IOStore
_COORDINATOR = tf.distribute.coordinator.ClusterCoordinator
_BACKUP = keras.callbacks.BackupAndRestore
# The backend has a class of its own in some versions of Keras: not always the one that is called.
_ARCHIVE = type(keras.export.ExportArchive())
# The package has a function of this module's name.
_RNN = inspect.getmodule(_compat.cudnn_ok)
# Until somebody imports it, `tf.compat.v1` is another object.
_V1 = importlib.import_module("tensorflow.compat.v1")

_WHOLE_FILES = "a file takes its name when it is whole, and large variables travel in chunks"
_DAMAGED = "of a file that is damaged, Keras says that there is none"
_LARGE_ENTRIES = "large variables go to files, and come from them, a chunk of rows at a time"
_RESUMING = "the ps write what they hold, and `fit` goes on at the step of the backup"
_EXPORTING = "what is traced meanwhile is for a SavedModel, which has no cluster"
_STEPS = "steps of a model of ours run on the workers, or as plain Python where it is eager"
_BATCH = "a step of a model of ours runs on the coordinator, and pushes to the ps"
_ADOPTING = "a variable that a step touches, and that was made elsewhere, is adopted"
_UNTUNED = "a worker that deletes an iterator does not wait for the thread that tunes it"
_IN_STEP = "in a step our variables take assignments themselves; Keras would assign the storage"

# One row, one call: as a table.
# fmt: off
PATCHES: tuple[Patch, ...] = (
    # Variables.
    Patch(keras.Variable, "__init__", variables.make_variable,
          "makes our subclass while our strategy is current", KERAS, "keras.Variable"),
    Patch(keras.Variable, "value", variables.value, _ADOPTING, KERAS, "keras.Variable"),
    Patch(keras.Variable, "assign", variables.assign, _ADOPTING, KERAS, "keras.Variable"),
    Patch(_compat.keras_numpy, "take", variables.take,
          "`keras.layers.Embedding` reads rows of our variables by it, and not all of them", KERAS),
    Patch(_compat.embedding_ops, "_embedding_lookup_and_transform", variables.lookup,
          "of our variables, rows are read alone", TENSORFLOW, "tf.nn.embedding_lookup"),
    Patch(_compat.embedding_ops, "embedding_lookup_sparse_impl", variables.lookup_sparse,
          "of the value of a variable, which is what Keras 3 has it given, rows are read alone",
          TENSORFLOW, "tf.nn.embedding_lookup_sparse"),
    Patch(tf.GradientTape, "gradient", variables.gradient,
          "a variable in shards is as many variables to a tape", TENSORFLOW),
    Patch(tf.GradientTape, "watch", variables.watch,
          "a variable in shards is as many variables to a tape", TENSORFLOW),
    Patch(_compat.gradients_util, "_GradientsHelper", variables.gradients_in_graph,
          "a variable in shards is as many variables to `tf.gradients`", TENSORFLOW,
          "tf.gradients"),
    # Building.
    Patch(_compat.BaseTrainer, "compile", models.compile_model,
          "a model of ours makes its metrics and its optimizer's state in the scope", KERAS),
    Patch(keras.layers.Layer, "_open_name_scope", models.open_name_scope,
          "what a model of ours builds outside the scope, it builds in it", KERAS),
    Patch(_OPTIMIZER, "add_variable", optimizers.add_variable,
          "an optimizer of ours makes its state in the scope", KERAS),
    Patch(_OPTIMIZER, "add_variable_from_reference", optimizers.add_slot,
          "a slot lies beside the storage, not beside the value of a step", KERAS),
    # Optimizers.
    Patch(_BASE, "apply", optimizers.apply,
          "an optimizer that a step meets is adopted, and built outside of the trace", KERAS),
    Patch(_BASE, "_backend_apply_gradients", optimizers.apply_gradients,
          "where gradients leave the worker", KERAS),
    Patch(_BASE, "_get_current_learning_rate", optimizers.learning_rate,
          "a ps uses the rate that the worker sent, and reads none", KERAS),
    Patch(keras.optimizers.LossScaleOptimizer, "apply", optimizers.apply_scaled,
          "works in the scope outside a step too, which Keras refuses under a strategy", KERAS),
    Patch(_OPTIMIZER, "_backend_update_step", optimizers.update_step,
          "an update that an optimizer's override asks for is recorded", KERAS),
    Patch(_OPTIMIZER, "_var_key", optimizers.var_key,
          "Keras finds the slots of a variable by it: ours by its storage", KERAS),
    Patch(_OPTIMIZER, "_apply_weight_decay", optimizers.apply_weight_decay,
          "on a ps it works on what is pushed, which may be rows of a table", KERAS),
    Patch(_OPTIMIZER, "assign", optimizers.assigning("assign"), _IN_STEP, KERAS),
    Patch(_OPTIMIZER, "assign_add", optimizers.assigning("assign_add"), _IN_STEP, KERAS),
    Patch(_OPTIMIZER, "assign_sub", optimizers.assigning("assign_sub"), _IN_STEP, KERAS),
    # Training.
    Patch(_TRAINER, "fit", models.on_workers(training.fit), _STEPS, KERAS),
    Patch(_TRAINER, "evaluate", models.on_workers(training.evaluate), _STEPS, KERAS),
    Patch(_TRAINER, "predict", models.on_workers(training.predict), _STEPS, KERAS),
    Patch(_TRAINER, "train_on_batch", models.on_workers(training.train_on_batch), _BATCH, KERAS),
    Patch(_TRAINER, "test_on_batch", models.on_workers(training.test_on_batch), _BATCH, KERAS),
    Patch(_TRAINER, "predict_on_batch", models.on_workers(training.predict_on_batch),
          _BATCH, KERAS),
    Patch(_TRAINER, "_maybe_symbolic_build", models.symbolic_build,
          "the first step of a model that runs eagerly builds it, as without a strategy", KERAS),
    Patch(_TRAINER, "distribute_strategy", models.distribute_strategy,
          "Keras's own loop runs eager steps, under what it takes for a strategy", KERAS),
    Patch(_compat.TracedFunction, "__call__", functions.call,
          "a `tf.function` that a step calls is traced as a part of the step", TENSORFLOW,
          "tf.function"),
    Patch(_RNN, "_is_gpu_available", devices.is_gpu_available,
          "a step takes cuDNN's kernels where it computes on a GPU, wherever others are", KERAS),
    # Custom loops.
    Patch(_COORDINATOR, "schedule", coordinators.schedule,
          "what a callback schedules waits for the steps of `fit`", TENSORFLOW),
    Patch(_COORDINATOR, "join", coordinators.join,
          "waits for no task that is gone, and errors name it", TENSORFLOW),
    Patch(_COORDINATOR, "create_per_worker_dataset", coordinators.create_per_worker_dataset,
          _UNTUNED, TENSORFLOW),
    Patch(_compat.multi_device_iterator_ops, "_create_device_dataset",
          coordinators.create_device_dataset, _UNTUNED, TENSORFLOW),
    Patch(_compat.Closure, "__init__", coordinators.make_closure,
          "a scheduled function that trains outside `strategy.run` is run there", TENSORFLOW),
    Patch(_compat.Closure, "execute_on", coordinators.execute,
          "each update of a scheduled function is applied once, whichever worker is lost",
          TENSORFLOW),
    # Files.
    Patch(_compat.saving_api, "load_model", saving.load_whole_model, _DAMAGED, KERAS),
    Patch(_SAVING, "save_model", saving.save_model, _WHOLE_FILES, KERAS),
    Patch(_SAVING, "save_weights_only", saving.save_weights, _WHOLE_FILES, KERAS),
    Patch(_SAVING, "load_model", saving.load_model, _WHOLE_FILES, KERAS),
    Patch(_SAVING, "load_weights_only", saving.load_weights, _WHOLE_FILES, KERAS),
    Patch(_SAVING, "is_memory_sufficient", saving.is_memory_sufficient,
          "large files are not made up in memory", KERAS),
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
          "of variables in shards, a checkpoint is written and read by ours", TENSORFLOW),
    Patch(_SAVER, "save", models.naming_tasks(saving.save_checkpoint),
          "a checkpoint goes to an absolute path, by a device that sees it", TENSORFLOW),
    Patch(_SAVER, "restore", models.naming_tasks(saving.restore_checkpoint),
          "a checkpoint goes to an absolute path, by a device that sees it", TENSORFLOW),
    # TensorFlow's own housekeeping.
    Patch(_V1, "reset_default_graph", functions.reset_default_graph,
          "`keras.utils.clear_session` leaves the scopes that threads are in", TENSORFLOW,
          "tf.compat.v1"),
    Patch(_compat.framework_ops, "raise_from_not_ok_status", functions.raise_status,
          "an operation on a variable of a cluster that was closed says so", TENSORFLOW),
    Patch(_compat.Executor, "__del__", functions.delete_executor,
          "an executor whose task is gone is deleted without printing why", TENSORFLOW),
    Patch(_compat.Context, "add_c_function", functions.add_to_tasks,
          "a function is told to tasks that are there, and not while they change", TENSORFLOW),
    Patch(_compat.Context, "add_function_def", functions.add_to_tasks,
          "a function is told to tasks that are there, and not while they change", TENSORFLOW),
    Patch(_compat.Context, "remove_function", functions.remove_function,
          "at the end functions stay on tasks, which may have ended before", TENSORFLOW),
)
# fmt: on
