"""Backups of a training: variables, which the ps write during the training, and a record."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps.runtime.calls import separate_executor
from kerasps.runtime.connected import connected_host
from kerasps.runtime.errors import check_ps_of
from kerasps.saving.backup_files import PROBE, Backup, BackupDirectory
from kerasps.saving.table_backups import (
    TableCopies,
    TablePiece,
    TableRestorer,
    Versions,
    read_tables,
    tables_of,
)
from kerasps.saving.variable_copies import VariableCopies, restore, specs_of, to_record
from kerasps.variables import ParameterServerVariable, is_seed_state
from kerasps.variables.keras.slots import optimizers_of
from kerasps.variables.lanes.flights import worker_timeout
from kerasps.variables.storage.kinds import is_metric_state

# A whole backup follows when the deltas have more than this share of the bytes of the last one.
_MOST_OF_BASE = 0.5


class BackupStore:
    """Writes and restores the backups of one model in one directory.

    Contract: `write` returns when each ps has copied its variables; a thread then writes the
    copies. One backup is written at a time. An error there does not end the training: `problems`
    returns it. Thread: `fit`'s.

    Args:
        keep: how many whole backups stay, with the deltas on them.
        full_every: the most deltas on a whole backup; 0 for whole ones alone.
    """

    def __init__(
        self, path: str, model: keras.Model, *, keep: int = 1, full_every: int = 0
    ) -> None:
        self._directory = BackupDirectory(path, keep)
        self._full_every = full_every
        # The last complete backup of this object, and the versions of its tables.
        self._chain: _Chain | None = None
        self._model = model
        self._copies: tuple[list[int], VariableCopies, TableCopies] | None = None
        self._thread: threading.Thread | None = None
        self._problems: list[str] = []

    @property
    def modified_at(self) -> float | None:
        """The time of the last backup, in seconds since 1970; None if there is none."""
        return self._directory.modified_at()

    def restore(self, variables: Iterable[ParameterServerVariable]) -> dict[str, Any] | None:
        """Restore the variables of the last complete backup; return its record.

        Returns the record; None if there is no backup.

        Raises:
            PSLostError: a ps is lost.
            ValueError: the backup is of another model.
        """
        by_key = _by_key(self._model, variables)
        damaged: dict[int, Exception] = {}
        for backup in self._directory.backups():
            for each in backup.chain:
                _check_fits(each, by_key)
            try:
                _restore(backup, by_key, damaged)
            except (tf.errors.OpError, OSError) as exc:
                check_ps_of(connected_host())
                self._directory.warn_of_damage(backup.number, exc)
            else:
                return backup.record
        return None

    def write(self, record: dict[str, Any], variables: Iterable[ParameterServerVariable]) -> None:
        """Copy the variables on their ps, and begin to write the copies with `record`.

        Waits for a backup in progress. Call when no step is in flight. Raises tf.errors.OpError if
        a ps is lost.
        """
        if not self.wait(worker_timeout()):
            self._problems.append(self._problem(TimeoutError("the previous one is in progress")))
            return
        by_key = _by_key(self._model, variables)
        storages = [id(shard) for variable in by_key.values() for shard in variable.shards]
        if self._copies is None or self._copies[0] != storages:
            tables = tables_of(by_key)
            others = {key: each for key, each in by_key.items() if key not in tables}
            self._copies = storages, VariableCopies(others), TableCopies(tables)
            self._chain = None
        _, others_copies, table_copies = self._copies
        following = self._following(table_copies) if self._full_every else None
        others_copies.make()
        previous = None if following is None else following.previous
        table_copies.make({} if previous is None else previous.versions)
        arguments = (others_copies, table_copies), record, specs_of(by_key), following
        self._thread = threading.Thread(
            target=self._write, args=arguments, name="kerasps backup", daemon=True
        )
        self._thread.start()

    def _following(self, tables: TableCopies) -> _Next:
        """Return what the next backup is on, and begin new versions of all tables."""
        chain = self._chain
        if chain is not None and not all(map(self._directory.has, chain.needed)):
            chain = None  # somebody deleted it
        changes = tables.changes({} if chain is None else chain.versions)
        versions = {key: each.version for key, each in changes.items()}
        is_whole = any(each.is_whole for each in changes.values())
        if chain is None or is_whole or not chain.has_room(self._full_every):
            return _Next(None, versions, {})
        return _Next(chain, versions, {key: each.removed for key, each in changes.items()})

    @property
    def is_writing(self) -> bool:
        """True while a backup is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is being written; return False after `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.is_writing

    def problems(self) -> list[str]:
        """Return the errors of writes since the last call, a text for each backup."""
        found, self._problems = self._problems, []
        return found

    def last(self) -> str:
        """Return a sentence about the last complete backup. Asks no ps."""
        path, at = self._directory.last_manifest(), self.modified_at
        if path is None or at is None:
            return f"There is no backup in {self._directory.path}: the next run begins anew."
        when = time.strftime("%H:%M:%S", time.localtime(at))
        return f"The last backup is {path}, of {when}: the next run resumes there."

    def _write(
        self,
        copies: Sequence[VariableCopies | TableCopies],
        record: dict[str, Any],
        specs: dict[str, dict[str, Any]],
        following: _Next | None,
    ) -> None:
        """Write a backup, and free the copies. Thread: the store's."""
        number = None
        try:
            try:
                number, directory = self._directory.begin()
                probe = f"{directory}/{PROBE}"
                with tf.io.gfile.GFile(probe, "w") as file:
                    file.write("Made to learn which ps see this directory.")
                pieces = [piece for each in copies for piece in each.write(directory, probe)]
            finally:
                with separate_executor():  # an error here must not end the training
                    for each in copies:
                        each.free()
            tf.io.gfile.remove(probe)
            previous = None if following is None else following.previous
            backup = self._directory.commit(
                number,
                record,
                to_record(pieces),
                specs,
                removed=None if following is None else following.removed,
                previous=None if previous is None else previous.backups[-1],
            )
            if following is not None:
                before = () if previous is None else previous.backups
                self._chain = _Chain((*before, backup), following.versions)
        except Exception as exc:
            self._problems.append(self._problem(exc))
            if number is not None:
                self._directory.discard(number)

    def _problem(self, error: Exception) -> str:
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        when = time.strftime("%H:%M:%S")
        return (
            f"At {when} a backup could not be written to {self._directory.path}: {reason}. "
            "Expected: a directory with room for another backup, in which this process and the ps "
            "can write. The previous backup is unchanged, and the training continues; kerasps "
            "tries the next backup when it is due."
        )


@dataclass(frozen=True)
class _Chain:
    """A whole backup and the deltas on it.

    Attributes:
        backups: these backups, the whole one first.
        versions: the versions of all tables at the last one.
    """

    backups: tuple[Backup, ...]
    versions: Versions

    @property
    def needed(self) -> list[int]:
        """The numbers of the backups."""
        return [backup.number for backup in self.backups]

    def has_room(self, most: int) -> bool:
        """Return True if another delta may be on it."""
        base, *deltas = (backup.num_bytes for backup in self.backups)
        return len(deltas) < most and sum(deltas) <= _MOST_OF_BASE * base


@dataclass(frozen=True)
class _Next:
    """The place of a backup in progress in its chain.

    Attributes:
        previous: the chain that it is a delta on; None for a whole one.
        versions: the versions of all tables that it has.
        removed: the ids whose rows were removed since.
    """

    previous: _Chain | None
    versions: Versions
    removed: dict[str, np.ndarray]


def _restore(
    backup: Backup,
    variables: Mapping[str, ParameterServerVariable],
    damaged: dict[int, Exception],
) -> None:
    """Restore variables from a backup and its chain; change none if a file is damaged.

    Args:
        damaged: the backups that are known to be damaged; it is added to.
    """
    tables = tables_of(variables)
    of_tables = {
        each.number: [TablePiece(**entry) for entry in each.pieces if "tables" in entry]
        for each in backup.chain
    }
    for each in backup.chain:
        try:
            if each.number in damaged:
                raise damaged[each.number]
            read_tables(of_tables[each.number], tables, each.directory)
        except (tf.errors.OpError, OSError) as exc:
            damaged[each.number] = exc
            raise
    pieces = [entry for entry in backup.pieces if "tables" not in entry]
    others = {key: each for key, each in variables.items() if key not in tables}
    restore(replace(backup, pieces=pieces), others)
    restorer = TableRestorer(tables)
    for each in backup.chain:
        restorer.write(of_tables[each.number], each.removed, each.directory)
    restorer.finish()


def _by_key(
    model: keras.Model, variables: Iterable[ParameterServerVariable]
) -> dict[str, ParameterServerVariable]:
    """Return the variables to back up: all of the model, of its optimizers and of its step.

    The keys are places in lists, which a script makes in the same order in each run. Names would
    not do, since they may depend on what was made before. States of metrics and seed generators
    are left out, since they are part of the position of the training.
    """
    groups: dict[str, Iterable[Any]] = {"model": model.variables}
    for number, optimizer in enumerate(optimizers_of(model)):
        groups[f"optimizer/{number}"] = optimizer.variables
    groups["step"] = variables
    found: dict[str, ParameterServerVariable] = {}
    known: set[int] = set()
    for group, members in groups.items():
        for index, variable in enumerate(members):
            if (
                id(variable) not in known
                and isinstance(variable, ParameterServerVariable)
                and not is_metric_state(variable)
                and not is_seed_state(variable)
            ):
                known.add(id(variable))
                found[f"{group}/{index}"] = variable
    return found


def _check_fits(backup: Backup, variables: Mapping[str, ParameterServerVariable]) -> None:
    """Raise `ValueError` if a backup is not one of these variables."""
    expected, received = specs_of(variables), backup.specs

    def form(spec: Mapping[str, Any] | None) -> str:
        return "none" if spec is None else f"{spec['path']} of {spec['dtype']}{spec['shape']}"

    for key in [*expected, *received]:
        ours, theirs = expected.get(key), received.get(key)
        same = ours and theirs and all(ours[name] == theirs[name] for name in ("shape", "dtype"))
        if not same:
            raise ValueError(
                "A backup is of another model, or of another optimizer. Expected: variable "
                f"{key}, {form(ours)}. Received: {form(theirs)}, in {backup.directory}. Make the "
                f"model as it was, or delete {os.path.dirname(backup.directory)} to begin anew."
            )
