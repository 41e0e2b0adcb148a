"""Variables of a step in this process: no cluster, and no strategy.

A step knows a variable by its storages, which may be anywhere. Here they are on the CPU at hand.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from kerasps import _compat
from kerasps.step.compute.compute import Compute
from kerasps.step.contract.change import Change, StateChange
from kerasps.step.contract.compute_messages import ComputeInputs, ComputeOutputs, InputNames
from kerasps.step.contract.inventory import Inventory
from kerasps.step.records.identity import ByIdentity, IdentitySet
from kerasps.step.records.specs import spec_of
from kerasps.step.rows.row_requests import LookupIds
from kerasps.step.updates.update import Update, UpdateTensors
from kerasps.step.updates.updating import Scalars
from kerasps.variables import ParameterServerVariable, current_phase
from kerasps.variables.keras.slots import shared_state
from kerasps.variables.rows.sharding import LAYOUTS, ShardedStorage

_TF_OPTIMIZER = _compat.definer("keras:optimizers.Optimizer", "_var_key")


def make_local(variable, sharding=None):
    """Turn a Keras variable in place into one that a step knows, whole or in shards."""
    value = variable._value
    variable.__class__ = ParameterServerVariable
    if sharding is not None:
        shards = [
            tf.Variable(sharding.rows_in(value.numpy(), i)) for i in range(sharding.num_shards)
        ]
        variable._value = ShardedStorage(shards, sharding, variable.name)
        variable._value._unique_id = value._unique_id  # what optimizers know it by
    return variable


def local_variable(value, num_shards=1, layout="mod", **kwargs):
    value = np.asarray(value)
    sharding = None if num_shards == 1 else LAYOUTS[layout](len(value), num_shards)
    return make_local(keras.Variable(value, **kwargs), sharding)


def make_optimizer_local(optimizer, num_shards=1, layout="mod"):
    """Turn a built optimizer and the variables that it trains into a step's; slots lie alike."""
    for variable in [*optimizer._trainable_variables, *optimizer.variables]:
        in_shards = num_shards > 1 and len(variable.shape) > 0
        sharding = LAYOUTS[layout](variable.shape[0], num_shards) if in_shards else None
        make_local(variable, sharding)


def patch_optimizers(monkeypatch):
    """Do to optimizers what `hooks.py` does once there is a strategy, as far as updates need it."""
    for name in ("assign", "assign_add", "assign_sub"):
        monkeypatch.setattr(_TF_OPTIMIZER, name, _through_variable(name))
    original_update_step = _TF_OPTIMIZER._backend_update_step

    def update_step(self, gradients, trainable, learning_rate):
        phase = current_phase()
        if isinstance(phase, Compute):
            phase.record_update_step(gradients, trainable, learning_rate)
        else:
            original_update_step(self, gradients, trainable, learning_rate)

    monkeypatch.setattr(_TF_OPTIMIZER, "_backend_update_step", update_step)
    original = _TF_OPTIMIZER._var_key

    def var_key(self, variable):
        if isinstance(variable, ParameterServerVariable):
            return variable.storage._unique_id
        return original(self, variable)

    monkeypatch.setattr(_TF_OPTIMIZER, "_var_key", var_key)


def _through_variable(name):
    original = getattr(_TF_OPTIMIZER, name)

    def method(self, variable, value):
        if isinstance(variable, ParameterServerVariable):
            getattr(variable, name)(value)
        else:
            original(self, variable, value)

    return method


def update_of(optimizer, gradients, clip_scale=None, applied=None):
    """Return what the compute phase records of `optimizer.apply` with these gradients."""
    shared = shared_state(optimizer)
    scalars = Scalars(
        tf.constant(float(optimizer.learning_rate.numpy()), tf.float32),
        [tf.convert_to_tensor(v.storage) for v in shared],
        clip_scale,
    )
    variables = list(optimizer._trainable_variables)
    tensors = UpdateTensors(scalars, gradients, applied)
    return Update(optimizer, variables, shared, IdentitySet(), tensors)


def outputs_of(*updates, changes=()):
    return ComputeOutputs([], [update.tensors for update in updates], list(changes), [], [])


def adding(variable, after=0):
    """The change of a variable by an addend that each step sends."""
    return StateChange(variable, after, Change(), Change(addend=spec_of(variable)), replaces=False)


def replacing(variable, after=0):
    """The change of a variable by a value that each step sends."""
    sent = Change(addend=spec_of(variable))
    return StateChange(variable, after, Change(scale=0), sent, replaces=True)


def inventory_of(pulled=(), tables=()):
    """Return what traces have met of a step that reads these; of tables with one look-up each."""
    inventory = Inventory()
    for variable in pulled:
        inventory.pulled.add(variable)
    for table in tables:
        inventory.tables[table] = 1
    return inventory


def compute_graph(inventory, element_spec, ids):
    """Trace a compute phase that looks up `ids`, a function of its inputs, and does no more.

    Returns its concrete function, the names of its inputs, and the ids of each look-up.
    """
    seen = []

    def compute(*arguments):
        inputs = ComputeInputs(*arguments)
        lookups = ids(inputs)
        seen.append((InputNames.of(inputs, inventory), lookups))
        return [tf.identity(tensor) for tensors in lookups for tensor in tensors]

    function = tf.function(compute, autograph=False).get_concrete_function(
        *ComputeInputs.specs(element_spec, inventory)
    )
    names, lookups = seen[-1]
    wanted = [[LookupIds(tensor, from_end=False) for tensor in tensors] for tensors in lookups]
    return function, names, ByIdentity(zip(inventory.tables, wanted, strict=True))
