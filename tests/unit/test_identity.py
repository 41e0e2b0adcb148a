"""Keys that are told apart by identity, whatever they say about being equal."""

from __future__ import annotations

import keras
import pytest

from kerasps.step.records.identity import ByIdentity, IdentitySet


class Equal:
    """Equal to all others, and in no dict: it has no hash."""

    def __eq__(self, other):
        return True


@pytest.mark.parametrize("make", [Equal, lambda: keras.Variable([1.0, 2.0]), lambda: [1]])
def test_a_mapping_has_a_value_for_each_of_equal_keys(make):
    first, second, other = make(), make(), make()
    mapping = ByIdentity([(first, 1), (second, 2)])
    mapping[first] = 3
    assert [(key is first, value) for key, value in mapping.items()] == [(True, 3), (False, 2)]
    assert other not in mapping
    assert mapping.get(other) is None
    with pytest.raises(KeyError):
        mapping[other]
    assert mapping.pop(first) == 3
    assert (first in mapping, second in mapping, len(mapping)) == (False, True, 1)


def test_a_set_has_each_of_equal_members_once_and_in_order():
    members = [Equal() for _ in range(5)]
    found = IdentitySet([*members, *reversed(members)])
    assert [id(member) for member in found] == [id(member) for member in members]
    found.discard(members[2])
    assert members[2] not in found
    assert len(found) == 4
    for member in found:  # which may change while it is gone through
        found.discard(member)
    assert not found


def test_keys_are_kept_alive():
    mapping, found = ByIdentity(), IdentitySet()
    for number in range(100):
        # Each is garbage but for the mapping; were it collected, the next would have its `id`.
        mapping[Equal()] = number
        found.add(Equal())
    assert list(mapping.values()) == list(range(100))
    assert len(found) == 100
