"""The pages on environment variables, options, exit codes and TF_CONFIG agree with the code."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.cluster.serving.run_end import CODE_OF_LOST
from support.documentation import code_blocks, command_parsers, page_text
from support.names import variables_in_source

VARIABLE = r"KERASPS_[A-Z_]*[A-Z]"
# Variables by which processes of kerasps hand something to each other, with the reason.
INTERNAL = {
    "KERASPS_END_OF_TRAINING_ON_STDIN": "the launcher tells its evaluator how it hears of the end",
    "KERASPS_HELD_SOCKETS": "a task that restarts its process keeps its port by it",
    "KERASPS_SCRIPT_MARK": "marks the processes that a script of `kerasps run` starts",
    "KERASPS_SUPERVISOR_FD": "the pipe from a script to its launcher",
}


def rows(page, section=""):
    """The rows of the tables of a page, or of one section of it, as lists of cells."""
    text = page_text(page)
    if section:
        (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    found = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in cells] for cells in found]


def test_every_variable_that_the_source_reads_is_on_the_page():
    listed = [cells[0].strip("`") for cells in rows("environment")]
    read = {name for name in variables_in_source() if re.fullmatch(VARIABLE, name)}
    assert sorted(listed) == sorted(read - INTERNAL.keys())


def test_internal_variables_are_in_the_source():
    assert INTERNAL.keys() <= variables_in_source()


def test_every_variable_has_a_default_and_readers():
    assert [cells[0] for cells in rows("environment") if len(cells) != 5 or not all(cells)] == []


def options_of(command):
    """The options of a command, by name: their actions."""
    return {
        action.option_strings[-1]: action
        for action in command_parsers()[command]._actions
        if action.option_strings and "--help" not in action.option_strings
    }


WITH_OPTIONS = [name for name in command_parsers() if options_of(name)]


def test_every_command_is_listed():
    listed = {
        cells[0].strip("`").split()[1] for cells in rows("commands") if "kerasps " in cells[0]
    }
    assert listed == command_parsers().keys()


@pytest.mark.parametrize("command", WITH_OPTIONS)
def test_every_option_is_listed_with_its_variable_and_default(command):
    options = options_of(command)
    table = {
        cells[0].strip("`").split()[0]: cells for cells in rows("commands", f"kerasps {command}")
    }
    assert list(table) == list(options)
    for name, (usage, default, variable, _) in table.items():
        text = options[name].help
        assert set(re.findall(VARIABLE, variable)) == set(re.findall(VARIABLE, text)), name
        assert (" " in usage.strip("`")) == (options[name].nargs != 0), name
        for number in re.findall(r"\(default: (\d+)", text):
            assert re.match(rf"{number}\b", default), (name, default, number)


def test_the_example_of_tf_config_is_read_and_has_a_chief(monkeypatch):
    text = page_text("tf_config")
    (example,) = code_blocks(text, "json")
    (commands,) = code_blocks(text, "bash")
    assignment = shlex.split(commands.splitlines()[0])[1]
    assert json.loads(assignment.removeprefix("TF_CONFIG=")) == json.loads(example)
    monkeypatch.setenv("TF_CONFIG", example)
    description = read_tf_config()
    assert description.task == ("ps", 0)
    assert {name: len(tasks) for name, tasks in description.jobs.items()} == {
        "chief": 1,
        "ps": 2,
        "worker": 2,
    }


@pytest.mark.parametrize("page", ["deploy", "fault_tolerance", "errors"])
def test_pages_list_the_exit_codes_to_try_again(page):
    text = page_text(page)
    for code in (137, CODE_OF_LOST, 143):
        assert re.search(rf"^\| {code}\b", text, re.MULTILINE), code


def test_the_unit_of_systemd_restarts_the_exit_codes_to_try_again():
    text = page_text("fault_tolerance")
    (codes,) = re.findall(r"^RestartForceExitStatus=(.*)$", text, re.MULTILINE)
    assert codes.split() == ["137", str(CODE_OF_LOST), "143"]
